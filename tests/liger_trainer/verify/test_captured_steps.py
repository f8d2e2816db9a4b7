"""`verify` checks that captured steps equal uncaptured ones. On a CPU, recorded Python runs again."""

import pytest
import torch
from varlen_batches import RerunRecorder, capture_on_cpu
from verify_setups import lora, setup_of

from liger_trainer.varlen.graphs.static_batch import CapturedSize
from liger_trainer.varlen.graphs.static_gradients import GradientBuffers, Handed
from liger_trainer.verify import quiet
from liger_trainer.verify.captured import captured
from liger_trainer.verify.runs import Bench


def check_of(tmp_path, setup, **options):
    with quiet():
        bench = Bench(setup, str(tmp_path))
        return captured(bench, bench.build("ours", **options), {})


SETUPS = {
    "SFT": ("SFT", {}),
    "Medusa": ("Medusa", {}),  # its frozen model runs in evaluation mode within the call
    "DPO, LoRA": ("DPO", {"peft_config": lora()}),  # TRL checkpoints, except for the reference
}


@pytest.mark.parametrize("name", ["SFT", *(pytest.param(x, marks=pytest.mark.slow) for x in ("Medusa", "DPO, LoRA"))])
def test_silent_where_nothing_is_wrong(name, tmp_path, monkeypatch):
    method, parts = SETUPS[name]
    capture_on_cpu(monkeypatch)
    check = check_of(tmp_path, setup_of(method, **parts))
    assert check.verdict == "ok" and check.figure > 0, check
    assert int(check.detail.split()[0]) >= 3, check.detail


def embeddings_stay(monkeypatch):
    """The first batch's embeddings are replayed for ever. The comparison at the capture cannot see it."""
    fill = CapturedSize.fill

    def once(self, batch):
        embeds = self.embeds.detach().clone()
        seen, self.seen = getattr(self, "seen", False), True
        fill(self, batch)
        if seen:
            self.embeds.data.copy_(embeds)

    monkeypatch.setattr(CapturedSize, "fill", once)


def gradients_of_the_last_step_stay(monkeypatch):
    def begin_without_zeros(self, learned):
        return Handed([p for p in learned if not self._is_alias(p)], {})

    monkeypatch.setattr(GradientBuffers, "begin", begin_without_zeros)


@pytest.mark.parametrize("wrong", [embeddings_stay, gradients_of_the_last_step_stay])
def test_replays_that_go_wrong_fail(wrong, tmp_path, monkeypatch):
    capture_on_cpu(monkeypatch)
    wrong(monkeypatch)
    assert check_of(tmp_path, setup_of("SFT")).verdict == "FAILED"


class Full(RerunRecorder):
    def make_room(self, size):
        return False


def test_it_says_why_it_was_left_out(tmp_path, monkeypatch):
    assert check_of(tmp_path / "a", setup_of("SFT")).detail == "it trains on cpu, and CUDA graphs need a CUDA GPU"
    capture_on_cpu(monkeypatch, Full)
    for part, method, detail in (
        ("b", "GRPO", "the trainer generates the text that it trains on"),
        ("c", "SFT", "captured 0 of "),
    ):
        check = check_of(tmp_path / part, setup_of(method))
        assert check.verdict == "-" and check.detail.startswith(detail), check
    assert "too little memory is left for their graphs" in check.detail


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("parts", [{}, {"peft_config": lora()}], ids=["all weights", "LoRA"])
def test_on_a_gpu(parts, tmp_path):
    check = check_of(tmp_path, setup_of("SFT", **parts))
    assert check.verdict == "ok", check
