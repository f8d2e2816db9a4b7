"""One step on two gloo ranks with different rows: gradients are bit-equal across ranks, and equal to one process."""

import shutil

import pytest
import torch
from launching import PROCESSES, accelerate_fsdp2, in_processes, in_processes_fsdp2
from recipe_fixtures import command, write_model, write_recipe, write_rows
from safetensors.torch import load_file
from tiny_models import collate, ragged_rows, tiny_model
from two_ranks import MODES


def two_ranks(mode, out):
    in_processes("two_ranks.py", mode, out)
    return [torch.load(out / f"{rank}.pt") for rank in range(2)]


def test_processes_have_one_gloo_worker():
    """PyTorch's two workers of a group corrupt the heap now and then: `one_gloo_worker` says how."""
    done = in_processes("gloo_workers.py")
    assert done.stdout.split() == ["1"] * 4


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=pytest.mark.slow if mode in ("sft-accumulation", "trainer", "sft", "varlen") else ())
        for mode in MODES
        if mode not in ("fsdp1", "fsdp2", "fsdp2-lora", "sampled")
    ],
)
def test_ddp(mode, tmp_path):
    first, second = two_ranks(mode, tmp_path)
    one_process = MODES[mode.removesuffix("-accumulation")](tmp_path)
    assert first.keys() == second.keys() == one_process.keys()
    for name, grad in first.items():
        assert torch.equal(grad, second[name]), f"{name} differs between ranks"
        torch.testing.assert_close(grad, one_process[name], rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.slow
def test_ddp_of_trainers_that_sample(tmp_path):
    """One process would write other completions. TRL's trainers on the same two ranks write the same."""
    first, second = two_ranks("sampled", tmp_path)
    ours = [name for name in first if name.startswith("Liger")]
    assert len({name.partition(".")[0] for name in ours}) == 6 and len(first) == 2 * len(ours)
    assert sum("sampling/" in name for name in ours) == 5
    for name in ours:
        assert torch.equal(first[name], second[name]), f"{name} differs between ranks"
        stock = first[name.removeprefix("Liger")]
        torch.testing.assert_close(first[name], stock, rtol=1e-4, atol=1e-6 * stock.norm().item(), msg=name)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"label_smoothing_factor": 0.1}, id="smoothing", marks=pytest.mark.slow),
    ],
)
def test_fsdp2_through_accelerate_launch(options, tmp_path, capsys):
    """With the shipped config, saved weights equal one process with all rows of a step, resumed or not."""
    write_model(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl")
    # Without the large epsilon, gradients that are only rounding make full-length steps.
    steps = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2}
    recipe = write_recipe(tmp_path, use_cpu=True, adam_epsilon=1e-3, **steps, **options)
    out = [tmp_path / name for name in ("sharded", "whole")]
    train = ("train", recipe, "--output_dir")
    done = accelerate_fsdp2(tmp_path, PROCESSES / "launched_cli.py", *train, out[0])
    assert done.stdout.count("Summary") == 1
    code, _, err = command(capsys, *train, out[1], "--per_device_train_batch_size", 4)
    assert code == 0, err
    assert_trained_alike(*out)
    (out[0] / "model.safetensors").unlink()
    for folder in out[0].glob("checkpoint-*"):
        if folder.name != "checkpoint-2":  # resuming with newer checkpoints in the folder is refused
            shutil.rmtree(folder)
    resumed = ("--resume_from_checkpoint", out[0] / "checkpoint-2")
    done = in_processes_fsdp2(tmp_path, "launched_cli.py", *train, out[0], *resumed)
    assert "resumed at step 2" in done.stdout
    assert_trained_alike(*out)


def assert_trained_alike(sharded, whole):
    sharded, whole = (load_file(folder / "model.safetensors") for folder in (sharded, whole))
    start = tiny_model("llama").state_dict()
    assert sharded.keys() == whole.keys()
    for name, want in whole.items():
        assert not torch.equal(want, start[name]), f"{name} has not moved"
        torch.testing.assert_close(sharded[name], want, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.slow
def test_fsdp2(tmp_path):
    first, second = two_ranks("fsdp2", tmp_path)
    model = tiny_model("llama").train()
    rows = ragged_rows(16)
    for half in (rows[0::2], rows[1::2]):  # FSDP averages over ranks
        (model(**collate(half), num_items_in_batch=torch.tensor(40.0)).loss / 2).backward()
    for rank, half in ((first, rows[0::2]), (second, rows[1::2])):
        batch = collate(half)
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits.detach()
        torch.testing.assert_close(rank["vocab_mean"], logits.mean(-1), rtol=1e-4, atol=1e-6)
        nll = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        counted = (batch["labels"][:, 1:] != -100).sum()
        torch.testing.assert_close(-rank["log_probs"].sum() / counted, nll, rtol=1e-5, atol=0)
    for name, p in model.named_parameters():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], p.grad, rtol=1e-4, atol=1e-7, msg=name)
    for name, p in tiny_model("llama", tie_word_embeddings=True).named_parameters():
        for kind in ("zeros", "meta"):  # the part of a reference on the second process, if only the first has read it
            assert torch.equal(second[f"{kind}.{name}"], p), name


def test_fsdp2_with_lora_on_every_linear_layer(tmp_path):
    """Weights are freed after the forward pass and gathered again for the backward pass, where our code reads them."""
    first, second = two_ranks("fsdp2-lora", tmp_path)
    for checkpointing in (False, True):
        names = {key[2] for key in first if key[:2] == (checkpointing, True)}
        assert names == {key[2] for key in first if key[:2] == (checkpointing, False)} and len(names) == 28
        assert first["swapped", checkpointing] == 14  # no hook of FSDP2 sits on a part of a layer
        for name in names:
            got = first[checkpointing, True, name]
            want = first[checkpointing, False, name]
            assert torch.equal(got, second[checkpointing, True, name])
            assert (got - want).norm() <= 1e-4 * want.norm(), name


@pytest.mark.slow
def test_fsdp1_with_lora_on_the_head(tmp_path):
    """FSDP1's wrappers call the module inside them: the fused head must be bound there, not on the wrappers."""
    for grads in two_ranks("fsdp1", tmp_path):
        names = {name for patched, name in grads if patched}
        assert names == {name for patched, name in grads if not patched}
        assert sum("lm_head" in name for name in names) == 2 and len(names) >= 4
        for name in names:
            want = grads[False, name]
            torch.testing.assert_close(grads[True, name], want, rtol=1e-4, atol=1e-6, msg=name)
