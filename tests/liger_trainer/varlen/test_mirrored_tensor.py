"""Tensors with values that the host knows behave like plain ones."""

import pytest
import torch
from image_models import as_videos, image_batch, image_model, image_step
from tiny_models import assert_same_step

from liger_trainer import apply_liger
from liger_trainer.varlen import mirrored_tensor
from liger_trainer.varlen.host_copies import values_of
from liger_trainer.varlen.mirrored_tensor import MirroredTensor
from liger_trainer.varlen.proof import image_positions
from liger_trainer.varlen.rows import Rows
from liger_trainer.varlen.unpad_plan import UnpadPlan

MASK = torch.tensor([[True, False, True, False], [False, False, True, True]])


def as_known(x=MASK):
    return MirroredTensor.around(x.clone(), x)


def pair(function):
    """The results of `function` of hidden states, features and a mask, with a plain mask and with a known one."""
    found = []
    for mask in (MASK, as_known()):
        source = torch.Generator().manual_seed(0)
        x, y = (torch.randn(shape, generator=source).requires_grad_() for shape in ((2, 4, 3), (4, 3)))
        z = function(x * 1, y * 1, mask)
        found.append((z, *torch.autograd.grad(z, (x, y), torch.randn(z.shape, generator=source), allow_unused=True)))
    return found


def deepstack(x, y, mask):
    mask = mask.to(x.device)
    x = x.clone()
    local = x[mask, :] + y
    x[mask, :] = local
    return x


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y, mask: x.masked_scatter(mask.unsqueeze(-1), y),
        lambda x, y, mask: x[mask] * y,
        deepstack,
        lambda x, y, mask: x.masked_scatter(mask[..., None].expand(2, 4, 3), y),
        lambda x, y, mask: x[mask, 0],
        lambda x, y, mask: x.masked_scatter(mask[..., None], torch.cat((y, y))),
        lambda x, y, mask: x[:, mask[0]],
        lambda x, y, mask: x * mask[..., None] + y.sum(),
        lambda x, y, mask: torch.where(mask[..., None], x, 0.0),
        lambda x, y, mask: x[mask | mask.roll(1, 0)],
        lambda x, y, mask: x[mask, torch.zeros(4, dtype=torch.long)],
    ],
)
def test_a_mask(function):
    want, got = pair(function)
    for mine, theirs in zip(got, want, strict=True):
        assert (mine is None and theirs is None) or (torch.equal(mine, theirs) and type(mine) is torch.Tensor)


def test_what_stays_known():
    mask = as_known()[..., None]
    assert type(mask) is MirroredTensor and mask.values.shape == (2, 4, 1) and torch.equal(mask.values, MASK[..., None])
    assert torch.equal((as_known() | mask[..., 0]).values, MASK) and torch.equal(
        as_known().places, MASK.flatten().nonzero()[:, 0]
    )
    sizes = as_known(torch.tensor([[1, 12, 20], [2, 4, 6]]))
    assert type(sizes.prod(-1) // 4) is MirroredTensor and (sizes.prod(-1) // 4).tolist() == [60, 12]
    assert type(sizes + 1) is torch.Tensor and (sizes + 1).tolist() == [[2, 13, 21], [3, 5, 7]]
    assert mask.to("cpu") is mask and type(mask.to(torch.int64)) is torch.Tensor  # as DeepStack sends its mask
    sizes.values = None  # nothing asks the device
    assert sizes.shape == (2, 3) and sizes.dtype == torch.int64


MODELS = ("qwen2_5_vl", "qwen3_vl", "glm4v", "llava", "gemma3", "internvl", "smolvlm", "qwen3_vl with videos")


@pytest.mark.parametrize("name", MODELS)
def test_a_step_with_known_places_and_sizes(name, monkeypatch):
    """As on a GPU, the host has kept the values of the batch."""
    model = image_model(name.removesuffix(" with videos"))
    batch = image_batch(model) if name in MODELS[:-1] else as_videos(image_batch(model))
    want = image_step(model, batch)
    apply_liger(model)
    monkeypatch.setattr(image_positions, "_value_of", lambda x: x.clone() if isinstance(x, torch.Tensor) else None)
    found = {torch.Tensor.masked_scatter: [], torch.Tensor.__setitem__: []}  # the second by DeepStack

    def watched(function, own):
        def watch(*given):
            found[function].append(own(*given))
            return found[function][-1]

        return watch

    for function in found:
        monkeypatch.setitem(mirrored_tensor._OWN, function, watched(function, mirrored_tensor._OWN[function]))
    assert_same_step(image_step(model, batch), want)
    scattered, written = found.values()
    if hasattr(model.base_model, "inputs_merger"):  # SmolVLM has its own way in transformers 5.17
        assert not scattered and not written
        return
    assert scattered and all(x is not NotImplemented for x in scattered)
    assert len(written) == ("qwen3_vl" in name) * 2 and all(x is not NotImplemented for x in written)
    with pytest.raises(ValueError, match="do not match"):
        image_step(model, batch | {"input_ids": batch["input_ids"].clamp(max=99)})


@pytest.mark.parametrize(
    "write",
    [
        lambda mask: mask.__setitem__(0, False),
        lambda mask: mask.logical_not_(),
        lambda mask: mask[0].fill_(True),
        lambda mask: mask.view(-1)[:3].zero_(),
    ],
)
def test_a_mask_that_is_written_to(write):
    def first_used(x, y, mask):
        x = x + x.detach().masked_scatter(mask[..., None], y.detach()).sum()
        write(mask)
        return x.masked_scatter(mask[..., None], torch.cat((y, y))) + x[mask].sum()

    (want, *_), (got, *_) = pair(
        lambda x, y, mask: first_used(x, y, mask if type(mask) is MirroredTensor else mask.clone())
    )
    assert torch.equal(got, want)


@pytest.mark.parametrize("written", [False, True])
def test_real_tokens_of_a_mask(written):
    """A mask may have been written to. Padding is left out as its current values say."""
    mask, index = as_known(), torch.tensor([0, 1, 2, 4, 5, 6])
    if written:
        mask.logical_not_()
    x, y = torch.zeros(1, 6, 3), torch.ones(6, 3)
    taken = UnpadPlan({"input_ids": mask}, Rows([3, 3], mask.device), index)._taken(mask)[None]
    want = (~MASK if written else MASK).flatten()[index].float()
    assert torch.equal(x.masked_scatter(taken[..., None], y)[0, :, 0], want)
    assert (type(taken) is MirroredTensor) is not written


def test_inference_mode():
    with torch.inference_mode():
        x, mask = torch.zeros(2, 4, 3), as_known()
        assert torch.equal(x.masked_scatter(mask[..., None], torch.ones(4, 3))[..., 0], MASK.float())


@pytest.mark.parametrize(
    "memory",
    [
        lambda x: x.data,
        lambda x: x[:].data,
        lambda x: torch.from_numpy(x.numpy()),
        lambda x: torch.from_dlpack(x),
    ],
    ids=["data", "data of a view", "numpy", "dlpack"],
)
def test_writes_past_autograd_s_version_counter_count(memory):
    sizes = MirroredTensor.around(torch.tensor([1, 2]), torch.tensor([1, 2]))
    memory(sizes)[0] = 7
    assert sizes.tolist() == [7, 2]
    assert values_of(sizes)[0].tolist() == [7, 2]


@pytest.mark.parametrize("model, is_proven", [("qwen3_vl.Qwen3VLModel", True), ("hunyuan_vl.HunYuanVLModel", False)])
def test_masks_as_large_as_the_embeddings_stay_on_the_gpu(model, is_proven):
    """The host would take 0.2 s for 4,096 tokens of 4,096 numbers."""
    room, name = model.split(".")
    modeling = pytest.importorskip(f"transformers.models.{room}.modeling_{room}")
    cls = getattr(modeling, name)
    module = cls.__new__(cls)
    torch.nn.Module.__init__(module)
    proof, reason = image_positions._prove_method("get_placeholder_mask", module)
    assert (proof is not None) is is_proven
    assert is_proven or "a mask as large as the embeddings" in reason
