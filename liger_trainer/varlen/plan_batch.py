"""Finds the rows in a call of a model, and plans how its backbone runs on their real tokens."""

from typing import Any

import torch
import torch.nn.functional as F

from liger_trainer.patching.core.probe import one_thread
from liger_trainer.varlen.groups import SharingRule, find_groups, find_pairs, worthwhile
from liger_trainer.varlen.host_copies import remember, sent, values_of
from liger_trainer.varlen.rows import Rows
from liger_trainer.varlen.shared_plan import SharedPromptsPlan
from liger_trainer.varlen.unpad_plan import UnpadPlan, cache_of, tokens_of

_STATIC_ROPES = ("default", "linear", "yarn", "llama3", "proportional")


@one_thread()
def plan_batch(
    config,
    call: dict[str, Any],
    attention: str = "sdpa",
    with_full_batches: bool = False,
    sharing: SharingRule | None = None,
) -> UnpadPlan | None:
    """Return the plan of a call, or None if the call has to run as it is.

    The host works in one thread. Waking 32 of them took 12 to 20 ms of a step, while the GPU waited.

    Args:
        config ([`~transformers.PreTrainedConfig`]): The model's config.
        call (`dict`): `input_ids` (B, S) or `inputs_embeds` (B, S, H), with `attention_mask` (B, S), or `position_ids`
            (1, S) of a packed row. `labels` (B, S) are predicted from the position before, `shift_labels` (B, S) from
            their own. No label may be predicted from padding.
        attention (`str`, *optional*, defaults to `"sdpa"`): The attention that was proven, by its name in the config.
        with_full_batches (`bool`, *optional*, defaults to `False`): Also plan batches without padding, for layers with
            more than causal attention.
        sharing (`SharingRule`, *optional*): When rows share a prompt. Such rows need labels, and no position ids.
            Unset: never.
    """
    tokens = tokens_of(call)
    mask = call.get("attention_mask")
    positions = call.get("position_ids")
    text = config.get_text_config()
    keeps = call.get("use_cache")
    if keeps is None:
        keeps = getattr(config, "use_cache", getattr(text, "use_cache", None))  # trainers set it on the whole model
    # The keys and values in a cache belong to the padded batch. An attention that was set after the proof is unproven.
    if keeps or cache_of(call) is not None or text._attn_implementation != attention:
        return None
    if not isinstance(tokens, torch.Tensor) or tokens.ndim < 2:
        return None
    if positions is not None and (positions.ndim not in (2, 3) or positions.shape[-2] not in (1, tokens.shape[0])):
        return None
    if mask is None:
        return _packed_plan(call, tokens, with_full_batches)
    if not isinstance(mask, torch.Tensor) or mask.shape != tokens.shape[:2]:
        return None
    return _padded_plan(call, tokens, mask, with_full_batches, sharing)


def _full_plan(call, tokens) -> UnpadPlan:
    batch, length = tokens.shape[:2]
    return UnpadPlan(call, Rows([length] * batch, tokens.device, batch))


def holds_packed_rows(call: dict[str, Any]) -> bool:
    """Return whether a call without a mask is one row of several, according to its positions."""
    tokens = tokens_of(call)
    positions = call.get("position_ids")
    if call.get("attention_mask") is not None or not isinstance(tokens, torch.Tensor) or positions is None:
        return False
    if tokens.ndim < 2 or tokens.shape[0] != 1 or tokens.shape[1] == 1 or positions.shape != tokens.shape[:2]:
        return False
    return bool((values_of(positions)[0].diff() != 1).any())


def _packed_plan(call, tokens, with_full_batches) -> UnpadPlan | None:
    """Plan a batch of one packed row.

    The rows in it begin where the positions restart, as in transformers with SDPA. `cu_seq_lens_q` is ignored.
    """
    positions = call.get("position_ids")
    if positions is None:
        return _full_plan(call, tokens) if with_full_batches else None
    if tokens.shape[0] != 1 or positions.shape != tokens.shape[:2]:
        return None
    values = values_of(positions)[0].cpu()[0]  # waits for the device unless the host knows the values
    starts = [0, *((values.diff() != 1).nonzero()[:, 0] + 1).tolist(), len(values)]
    lengths = [end - start for start, end in zip(starts, starts[1:], strict=False)]
    return UnpadPlan(call, Rows(lengths, tokens.device)) if with_full_batches or len(lengths) > 1 else None


def _padded_plan(call, tokens, mask, with_full_batches, sharing) -> UnpadPlan | None:
    shifted = call.get("shift_labels") is not None
    labels = call["shift_labels"] if shifted else call.get("labels")
    if labels is not None and (labels.shape != mask.shape or labels.device != mask.device):
        return None
    shares = sharing is not None and labels is not None and may_share(call)
    given = [mask]
    if labels is not None:
        given.append(labels)
    if shares:
        given.append(call["input_ids"])
    known = values_of(*given)
    ids = known[-1].cpu() if shares else None  # waits for the device unless the host knows the values
    # One copy to the host for all, if the values have to come from the device.
    marks = [known[0] != 0]
    if labels is not None:
        marks.append(known[1] != -100)
    real, *labelled = torch.stack(marks).cpu()
    # The tokens of a row have to be contiguous: attention with row lengths cannot skip a gap.
    runs = (real & ~F.pad(real[:, :-1], (1, 0))).sum(1)
    lengths = real.sum(1).tolist()
    broken = (runs > 1).any() or sum(lengths) == 0
    predicting = None
    if labels is not None:
        predicting = labelled[0] if shifted else F.pad(labelled[0][:, 1:], (0, 1))
        broken = broken or (predicting & ~real).any()
    unshared = None
    if with_full_batches and real.all():
        unshared = _full_plan(call, tokens)
    elif not broken and sum(lengths) < real.numel():
        places = real.flatten().nonzero()[:, 0]
        index = sent(places, tokens.device)
        if index is not places:
            remember(index, places)
        unshared = UnpadPlan(call, Rows(lengths, tokens.device), index, bool(real[:, -1].any()))
    if shares and ids is not None and sharing is not None and not broken:
        find = find_pairs if sharing.halves else find_groups
        groups = worthwhile(find(ids, real, predicting), sum(lengths), sharing)
        if groups:
            return SharedPromptsPlan(call, real, groups, unshared)
    return unshared


def may_share(call: dict[str, Any]) -> bool:
    """Return whether rows of a call may share a prompt: it has input ids and no position ids."""
    return call.get("input_ids") is not None and call.get("position_ids") is None


def rotates_by_length(config) -> bool:
    """Return whether the rotary frequencies depend on the longest position of a call, according to the config."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    ropes = [x for x in rope.values() if isinstance(x, dict)] or [rope]  # one for each kind of layer, or one for all
    return any(x.get("rope_type", "default") not in _STATIC_ROPES for x in ropes)
