"""`activation_checkpointing: auto` for rows that count as long: layers keep the results of attention."""

import pytest
from memory_runs import LAYERS, At, CountedMemory, build, same_bits, train
from tiny_models import tiny_model

from liger_trainer import LigerSFTConfig, LigerTrainer
from liger_trainer.memory import selective
from liger_trainer.memory.device_memory import GIB
from liger_triton import _dispatch


@pytest.fixture(autouse=True)
def all_rows_are_long(monkeypatch):
    monkeypatch.setattr(selective, "LONG", 2)


def model(implementation="sdpa", **config):
    found = tiny_model("llama", num_hidden_layers=LAYERS, **config)
    found.set_attn_implementation(implementation)
    return found


def make(out, checkpointing, memory=None, callbacks=(), implementation="sdpa", dropout=0.0, **options):
    twin = model(implementation, attention_dropout=dropout)
    return build(out, checkpointing, memory, callbacks, model=twin, **options)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Losses, weights and peak bytes without checkpointing, and with all layers checkpointed."""
    found = {}
    for checkpointing in (False, True):
        memory = CountedMemory()
        trainer = make(tmp_path_factory.mktemp("run"), checkpointing, memory)
        found[checkpointing] = (*train(trainer), memory.highest)
    return found


def between(runs, share):
    full, none = runs[True][2], runs[False][2]
    return full + share * (none - full)


@pytest.mark.parametrize("share", [0.05, 0.4, 1.5])
def test_the_same_bits_within_the_budget(share, runs, tmp_path, caplog):
    budget = between(runs, share)
    memory = CountedMemory()
    trainer = make(tmp_path, "auto", memory, memory_budget=budget / GIB)
    assert same_bits(train(trainer), runs[False])
    chosen = trainer.checkpointing
    assert memory.highest <= budget * 1.005
    if share > 1:
        assert (chosen.kept, chosen.attention) == (LAYERS, 0)
    else:
        assert 0 < chosen.attention <= LAYERS - chosen.kept
        words = f"{chosen.kept} of {LAYERS} layers kept their activations and {chosen.attention} kept the"
        assert words in caplog.text and words in str(chosen)
        report = chosen.to_dict()
        assert report["largest"]["attention"] == chosen.attention <= report["attention_most"]


def test_short_rows_do_not(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(selective, "LONG", 1000)
    trainer = make(tmp_path, "auto", CountedMemory(), memory_budget=between(runs, 0.3) / GIB)
    assert same_bits(train(trainer), runs[False])
    assert trainer.checkpointing.most_attention == 0 < trainer.checkpointing.kept


def test_long_rows_after_short_ones_are_measured_again(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(selective, "LONG", 1000)
    callback = At(4, lambda: monkeypatch.setattr(selective, "LONG", 2))
    trainer = make(tmp_path, "auto", CountedMemory(), [callback], memory_budget=between(runs, 0.3) / GIB)
    assert same_bits(train(trainer), runs[False])
    assert trainer.checkpointing.most_attention > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"implementation": "eager"},
        {"dropout": 0.1},
        {"activation_checkpointing_kwargs": {"use_reentrant": True}},
    ],
    ids=["eager", "dropout", "reentrant"],
)
def test_layers_are_kept_whole_if_attention_alone_cannot_be_kept(options, tmp_path):
    made = {}
    for checkpointing in (False, True):
        memory = CountedMemory()
        trainer = make(tmp_path, checkpointing, memory, max_steps=4, **options)
        made[checkpointing] = (*train(trainer), memory.highest)
    budget = made[True][2] + 0.3 * (made[False][2] - made[True][2])
    trainer = make(tmp_path, "auto", CountedMemory(), memory_budget=budget / GIB, max_steps=4, **options)
    assert same_bits(train(trainer), made[False])
    assert trainer.checkpointing.layers == LAYERS and trainer.checkpointing.most_attention == 0


@pytest.mark.parametrize("long", [2, 40])
def test_rows_without_padding_one_after_the_other(long, tmp_path, monkeypatch):
    """A patched model gets three rows of at most 47 tokens as one row, with a mask that knows the longest."""
    monkeypatch.setattr(selective, "LONG", long)
    monkeypatch.setattr(_dispatch, "INTERPRET", False)  # the kernels' twins, which are faster on a CPU
    off = dict.fromkeys(("rms_norm", "rope", "swiglu"), False)
    options = {"use_liger": True, "liger_config": off, "max_steps": 4}
    made = {}
    for checkpointing in (False, True, "auto"):
        memory = CountedMemory()
        if checkpointing == "auto":
            options["memory_budget"] = (made[True][2] + 0.2 * (made[False][2] - made[True][2])) / GIB
        trainer = make(tmp_path, checkpointing, memory, **options)
        made[checkpointing] = (*train(trainer), memory.highest)
    assert same_bits(made[True], made[False]) and same_bits(made["auto"], made[False])
    size = trainer.checkpointing.size
    assert size.rows == 1 and size.length > 40, "the rows of a micro-batch, one after the other"
    assert (trainer.checkpointing.most_attention > 0) == (long == 2)


@pytest.mark.parametrize("value", [True, "auto"])
def test_two_backward_passes_through_one_graph(value, tmp_path, runs):
    """PyTorch's own contexts for such checkpointing would refuse the second."""

    class Twice(LigerTrainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            if loss.requires_grad:
                (loss * 0.5).backward(retain_graph=True)
            return loss

    want = train(make(tmp_path, False, trainer_class=Twice))
    budget = {"memory_budget": between(runs, 0.3) / GIB} if value == "auto" else {}
    trainer = make(tmp_path, value, CountedMemory(), trainer_class=Twice, **budget)
    assert same_bits(train(trainer), want)
    if value == "auto":
        assert trainer.checkpointing.most_attention > 0


def test_offload_is_refused_by_name():
    options = {"activation_checkpointing_kwargs": {"offload": True}, "use_cpu": True, "output_dir": "out"}
    with pytest.raises(ValueError, match="its option offload is true.*Remove offload from activation_checkpointing_kw"):
        LigerSFTConfig(activation_checkpointing="auto", **options)
    LigerSFTConfig(activation_checkpointing=True, **options)
    words = '{"offload": true}'
    with pytest.raises(ValueError, match="its option offload is true"):
        LigerSFTConfig(activation_checkpointing="auto", **options | {"activation_checkpointing_kwargs": words})
    with pytest.raises(ValueError, match="its option offload is true"):
        LigerSFTConfig(
            activation_checkpointing="auto",
            gradient_checkpointing_kwargs={"offload": True},
            use_cpu=True,
            output_dir="out",
        )
