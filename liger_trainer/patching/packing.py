"""Whether rows that are packed into one see each other: some models keep them apart, others do not, and none says so.

transformers finds packed rows by `position_ids` that start anew, where a model hands them to the function that makes
masks. Models with a state (Mamba) or with masks of their own have no such place.
"""

import torch
from transformers import PreTrainedModel

from liger_trainer.head.find import base_model_of
from liger_trainer.instance import probe
from liger_trainer.patching.small_model import small_copy
from liger_trainer.varlen.padding import BackboneBinding, backbone_of

_SHOWN = ("eager", "sdpa")  # what runs on a CPU; others, such as flash-attn, read the lengths of rows
_LENGTHS = (7, 5, 11)
_RTOL = 1e-3  # of the largest hidden state; a token of another row moves it by 1e-2 and more


def why_rows_mix(model) -> str | None:
    """Why packed rows would see each other in `model`, or None where they do not, or where it cannot be shown.

    It is shown on a small copy with random weights: a packed row is compared with its rows one by one.
    """
    model = base_model_of(model)
    backbone = backbone_of(model) if isinstance(model, PreTrainedModel) else None
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if not isinstance(backbone, PreTrainedModel) or attention not in _SHOWN:
        return None
    ours = BackboneBinding.of(backbone)
    if ours is not None and not ours.aside:
        return None
    with probe.isolated():
        apart, _ = probe.attempt(_rows_stay_apart, backbone)
    if apart is not False:
        return None
    return f"in {type(model).__name__} with attn_implementation={attention!r}, packed rows see each other"


def _rows_stay_apart(backbone) -> tuple[bool, None]:
    copy = small_copy(backbone, probe.SEED, backbone.config._attn_implementation).eval()
    generator = probe.generator()
    rows = [torch.randint(3, 40, (1, length), generator=generator) for length in _LENGTHS]
    row = torch.arange(len(rows), dtype=torch.int32).repeat_interleave(torch.tensor(_LENGTHS))
    offsets = torch.tensor((0, *_LENGTHS)).cumsum(0).int()
    packed = {  # as TRL's collator gives it
        "input_ids": torch.cat(rows, 1), "position_ids": torch.cat([torch.arange(n) for n in _LENGTHS])[None],
        "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": max(_LENGTHS),
        "max_length_k": max(_LENGTHS), "seq_idx": row[None],
    }  # fmt: skip
    with torch.no_grad():
        one_by_one = torch.cat([copy(input_ids=ids, use_cache=False)[0] for ids in rows], 1)
        return probe.same(copy(**packed, use_cache=False)[0], one_by_one, _RTOL), None
