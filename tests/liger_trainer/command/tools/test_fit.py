"""`liger-trainer fit` on a tiny model's config."""

import importlib.util
import re

import pytest
import yaml
from architectures import small_config
from image_models import image_model, processor_of
from recipe_fixtures import command
from transformers import LlamaConfig

from liger_trainer.command.recipe.read import parse_recipe
from liger_trainer.command.tools.fit_spec import train_spec_of
from liger_trainer.errors import RecipeError
from liger_trainer.fitting import fit_report
from liger_trainer.fitting.step import estimate_memory
from liger_trainer.memory.device_memory import GIB
from liger_triton import _dispatch


@pytest.fixture(autouse=True)
def kernels_are_proven_by_their_twins(monkeypatch):
    monkeypatch.setattr(_dispatch, "INTERPRET", False)


@pytest.fixture
def short_search(monkeypatch):
    """Shorten the search in tests that do not need the largest batch."""
    monkeypatch.setattr(fit_report, "TRIES", 1)


@pytest.fixture
def recipe(tmp_path):
    LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1000,
        max_position_embeddings=65536,
    ).save_pretrained(tmp_path / "model")

    def write(**keys):
        values = {
            "model_name_or_path": str(tmp_path / "model"),
            "dtype": "bfloat16",
            "bf16": True,
            "max_length": 256,
            "per_device_train_batch_size": 2,
            "activation_checkpointing": "auto",
            "dataset_name": "nothing.json",
            "output_dir": str(tmp_path / "out"),
        }
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump({key: value for key, value in (values | keys).items() if value != "absent"}))
        return path

    return write


def test_what_it_prints(recipe, tmp_path, capsys):
    code, out, err = command(capsys, "fit", recipe(), "--gpu-memory", "0.5")
    assert code == 0, err
    assert "2 x 256 tokens on one GPU of 0.5 GiB" in out
    assert re.search(r"^auto +\d.*<- the recipe, 2 of 2 layers kept$", out, re.MULTILINE)
    batch = int(re.search(r"rows of 256 tokens is (\d+)", out)[1])
    longest = int(re.search(r"batch of 2 have about (\d+) tokens", out)[1])
    assert batch > 2 and longest > 256
    assert longest * 2 == pytest.approx(batch * 256, rel=0.1)
    assert "a step of 2 x 256 tokens with activation_checkpointing: auto\n" in err, "a line shows how far it is"
    assert not (tmp_path / "out").exists()
    code, out, _ = command(capsys, "fit", recipe(), "--gpu-memory", "0.05", "--max_length", "8192")
    assert code == 0 and "does not fit" in out and "not one row of 8192 tokens fits" in out


@pytest.mark.parametrize(
    "told, words, keys",
    [
        (True, (), {}),
        (False, (), {"cuda_graphs": False}),
        pytest.param(True, (), {"cuda_graphs": True}, marks=pytest.mark.slow),
        pytest.param(False, ("--activation_checkpointing", "auto"), {}, marks=pytest.mark.slow),
        pytest.param(False, ("--gpus", "2"), {}, marks=pytest.mark.slow),
    ],
)
def test_the_memory_of_captured_steps_is_told_where_there_may_be_some(told, words, keys, short_search, recipe, capsys):
    code, out, err = command(capsys, "fit", recipe(activation_checkpointing="true", **keys), *words)
    assert code == 0, err
    assert ("The memory of captured steps (cuda_graphs) is not counted. Their pool holds" in out) == told


def test_a_model_of_images(short_search, recipe, tmp_path, capsys):
    small_config("qwen3_vl").save_pretrained(tmp_path / "model")
    code, out, err = command(capsys, "fit", recipe(max_length=64))
    assert code == 0, err
    assert "qwen3_vl, 2 x 64 tokens" in out and "Images are not counted" in out and "Pass --images 640x480" in out
    code, out, err = command(capsys, "doctor", tmp_path / "model")
    assert code == 0 and "attn: one attention for all images or windows" in out, err


@pytest.mark.slow
def test_images_of_rows(recipe, tmp_path, capsys):
    image_model("gemma3").config.save_pretrained(tmp_path / "model")
    path, images = recipe(max_length=64), ("--images", "80x60,60x80")
    code, _, err = command(capsys, "fit", path, *images)
    assert code == 2 and "which AutoProcessor cannot load" in err
    processor_of("gemma3").save_pretrained(tmp_path / "model")

    code, out, err = command(capsys, "fit", path, "--gpu-memory", "0.06", *images)
    assert code == 0, err
    assert "Counted with images in each row. They take 12 of its tokens." in out and "not counted" not in out
    batches = [
        re.search(r"rows of 64 tokens is (\d+)", text)[1]
        for text in (out, command(capsys, "fit", path, "--gpu-memory", "0.06")[1])
    ]
    assert 0 < int(batches[0]) < int(batches[1])
    code, _, err = command(capsys, "fit", path, "--images", "80x60,60x80", "--max_length", "8")
    assert code == 2 and "max_length is 8, but the images of a row alone have 12 tokens" in err


@pytest.mark.parametrize("value", ["640", "640x", "0x480", "640x480;20x20", ""])
def test_wrong_image_sizes_are_refused(value, recipe, capsys):
    code, _, err = command(capsys, "fit", recipe(), "--images", value)
    assert code == 2 and f"--images is {value!r}; expected the width and height" in err


@pytest.mark.slow
def test_documents_of_packed_rows(short_search, recipe, tmp_path, capsys):
    small_config("bamba").save_pretrained(tmp_path / "model")

    def peak(*words, **keys):
        code, out, err = command(capsys, "fit", recipe(**keys), "--gpu-memory", "4", *words)
        assert code == 0, err
        return float(re.search(r"^false +([\d.]+)", out, re.MULTILINE)[1]), out

    full, said = peak(max_length=2048)
    assert "side by side" not in said
    packed, said = peak(max_length=2048, packing=True)
    assert packed > full
    assert "The documents of packed rows lie side by side, padded, in 1 of the layers, which keep a state." in said
    assert re.search(r"Counted with \d\d documents of at most 512 tokens in a micro-batch\.", said)


def test_the_package_of_the_gated_delta_rule(short_search, recipe, tmp_path, capsys):
    small_config("qwen3_5_text").save_pretrained(tmp_path / "model")
    code, out, err = command(capsys, "fit", recipe(packing=True))
    assert code == 0 and "is counted with flash-linear-attention, in 1 of the layers" in out, err
    assert "side by side" not in out
    code, out, err = command(capsys, "fit", recipe(packing=True), "--fla", "false")
    assert code == 0 and "lie side by side, padded, in 1 of the layers" in out, err
    assert "flash-linear-attention" not in out


def test_images_for_a_model_of_text(recipe, capsys):
    code, _, err = command(capsys, "fit", recipe(), "--images", "640x480")
    assert code == 2 and "is a text-only model" in err


def test_images_that_cannot_be_counted(recipe, tmp_path, capsys):
    try:
        processor = processor_of("idefics3")
    except ImportError as error:  # from torchvision
        pytest.skip(str(error).strip().splitlines()[0])
    image_model("idefics3").config.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    code, _, err = command(capsys, "fit", recipe(), "--images", "80x60")
    assert code == 2 and "cannot count the images of idefics3" in err and "Leave out --images" in err


def test_rows_are_no_longer_than_the_model_has_positions_for(recipe, tmp_path, capsys):
    path, config = recipe(), tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace("65536", "512"))
    code, out, err = command(capsys, "fit", path, "--gpu-memory", "0.5")
    assert code == 0, err
    assert "the longest rows in a batch of 2 have 512 tokens, the model's max_position_embeddings" in out


def test_its_help_names_its_own_options(recipe, capsys):
    code, out, err = command(capsys, "fit", recipe(), "--help")
    assert code == 0, err
    assert out.startswith("usage: liger-trainer fit RECIPE") and "--dry_run" not in out


@pytest.mark.slow
def test_attention_of_long_rows(short_search, recipe, tmp_path, capsys):
    config = LlamaConfig.from_pretrained(tmp_path / "model")
    config.num_hidden_layers = 4
    config.save_pretrained(tmp_path / "four")
    path = recipe(model_name_or_path=str(tmp_path / "four"), max_length=8192, per_device_train_batch_size=1)
    job = train_spec_of(parse_recipe(str(path), ["--use_cpu", "true"]), 1)
    full, none = (estimate_memory(job, 1, 8192, checkpointing, 1 << 40).peak / GIB for checkpointing in (True, False))
    budget = full + 0.3 * (none - full)
    code, out, err = command(capsys, "fit", path, "--gpu-memory", str(none), "--memory_budget", str(budget))
    assert code == 0, err
    found = re.search(r"<- the recipe, (\d) of 4 layers kept, attention of (\d)$", out, re.MULTILINE)
    assert int(found[2]) > 0 and int(found[1]) + int(found[2]) <= 4


def test_the_recipe_s_sharding_and_adapter(short_search, recipe, capsys):
    def states(*words):
        code, out, err = command(capsys, "fit", recipe(), "--gpu-memory", "0.5", "--gpus", "2", *words)
        assert code == 0, err
        assert "each of 2 GPUs of 0.5 GiB" in out
        return out, float(re.search(r"^optimizer states +([\d.]+)", out, re.MULTILINE)[1])

    ddp = states()
    fsdp2 = states("--accelerate_config", "fsdp2")
    lora = states("--use_peft", "true")
    assert "with DDP" in ddp[0] and "with FSDP2" in fsdp2[0]
    assert fsdp2[1] == ddp[1], "half of the numbers, each of twice as many bytes"
    assert lora[1] == 0 < ddp[1]


@pytest.mark.parametrize(
    ("keys", "words", "says"),
    [
        (
            {"trainer": "grpo", "reward_funcs": ["boxed_answer"], "max_length": "absent", "num_generations": 2},
            (),
            "cannot estimate a step with LigerGRPOTrainer. It knows sft, dpo, orpo, cpo, kto. A copy of the",
        ),
        ({"model_name_or_path": "org/gated"}, (), "needs only the file config.json: save it in a folder, such as"),
        ({"max_length": None}, (), "max_length is unset"),
        (
            {"load_in_4bit": True, "use_peft": True},
            ("--accelerate_config", "fsdp2"),
            "load_in_4bit: true where FSDP shards the weights",
        ),
        (
            {"trainer": "orpo", "load_in_4bit": True, "use_peft": True},
            (),
            "load_in_4bit: true and LigerORPOTrainer",
        ),
        ({"fp8": True}, (), "fp8: true"),
        ({"use_liger": False}, (), "use_liger: false"),
        ({"train_mtp": True}, (), "train_mtp: true"),
        ({}, ("--accelerate_config", "context_parallel"), "context parallelism"),
        ({"activation_checkpointing_kwargs": {"every_n_layers": 2}}, (), "kwargs: every_n_layers: 2"),
        (
            {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"offload": True}},
            ("--accelerate_config", "fsdp2"),
            "offload: true where FSDP shards the weights",
        ),
        ({"activation_checkpointing_kwargs": {"selective": True}}, (), "kwargs: selective: True"),
        ({}, ("--gpus", "two"), "--gpus is 'two'; expected a whole number"),
        ({}, ("--gpu-memory", "-1"), "--gpu-memory is '-1'; expected a number"),
        ({}, ("--gpu", "2"), "gpu"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict | tuple) else "",
)
def test_what_it_refuses(keys, words, says, recipe, capsys):
    code, _, err = command(capsys, "fit", recipe(**keys), *words)
    assert code == 2 and says in err


def test_an_option_that_is_wrong_in_the_recipe_can_be_replaced(short_search, recipe, capsys):
    keys = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"every_n_layers": 2}}
    words = ("--gpu-memory", "0.5", "--activation_checkpointing_kwargs")
    code, out, err = command(capsys, "fit", recipe(**keys), *words, '{"use_reentrant": false}')
    assert code == 0, err
    same = command(capsys, "fit", recipe(**keys), *words, '{"every_n_layers": 1, "use_reentrant": false}')
    assert same[:2] == (0, out)


def test_deepspeed_is_refused_by_name(recipe):
    parsed = parse_recipe(str(recipe()), ["--use_cpu", "true"])
    parsed.sharding = "DEEPSPEED"
    with pytest.raises(RecipeError, match="with DeepSpeed"):
        train_spec_of(parsed, 2)


def test_a_frozen_fp8_base(short_search, recipe, capsys):
    words = ("--use_peft", "true", "--fp8", "true")
    code, out, err = command(capsys, "fit", recipe(), "--gpu-memory", "0.5", *words)
    assert code == 0 and "rows of 256 tokens is" in out, err
    job = train_spec_of(parse_recipe(str(recipe()), ["--use_cpu", "true", *words]), 1)
    assert job.shape.fp8 and job.shape.peft_config is not None and job.autocast is not None


@pytest.mark.slow
def test_optimizer_in_backward(short_search, recipe, capsys):
    for value in ("true", "false"):
        words = ("--gpu-memory", "0.5", "--optimizer_in_backward", value)
        code, out, err = command(capsys, "fit", recipe(max_grad_norm=0), *words)
        assert code == 0, err
        (line,) = re.findall(r"^gradients +[\d.]+ *(.*)$", out, re.MULTILINE)
        assert line == ("the largest; each is freed in the backward pass" if value == "true" else "")
    with pytest.raises(RecipeError, match="optimizer_in_backward: true on more than one GPU"):
        train_spec_of(parse_recipe(str(recipe(max_grad_norm=0, optimizer_in_backward=True)), ["--use_cpu", "true"]), 2)


@pytest.mark.slow
def test_inputs_of_layers_on_the_host(short_search, recipe, capsys):
    keys = {"activation_checkpointing": True, "per_device_train_batch_size": 4, "max_length": 8192}
    stays, leaves = (
        command(capsys, "fit", recipe(**keys), "--activation_checkpointing_kwargs", options)
        for options in ('{"use_reentrant": false}', '{"use_reentrant": false, "offload": true}')
    )
    assert leaves[0] == 0, leaves[2]
    assert "on the host" not in stays[1]
    assert re.search(r"^true .*<- the recipe, [\d.]+ GiB on the host$", leaves[1], re.MULTILINE)


def test_a_4_bit_base_without_bitsandbytes_is_refused(recipe, capsys, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *more: None if name == "bitsandbytes" else found(name, *more)
    )
    code, _, err = command(capsys, "fit", recipe(), "--use_peft", "true", "--load_in_4bit", "true")
    assert code == 2 and "needs bitsandbytes to build 4-bit layers. Run `pip install bitsandbytes`" in err


@pytest.mark.parametrize("trainer", ["sft", "dpo"])
def test_a_4_bit_base(trainer, short_search, recipe, capsys):
    pytest.importorskip("bitsandbytes")

    def weights(*words):
        code, out, err = command(capsys, "fit", recipe(trainer=trainer), "--use_peft", "true", *words)
        assert code == 0, err
        return float(re.search(r"^weights +([\d.]+)", out, re.MULTILINE)[1])

    assert weights("--load_in_4bit", "true") <= weights()
