"""The parts of TRL and transformers that this package depends on. A failure names what a new release has moved."""

import dataclasses
import inspect
import re
import sys
from unittest import mock

import pytest
import torch
import trl
import trl.trainer.distillation_trainer as trl_distillation
import trl.trainer.sft_trainer as trl_sft
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Trainer
from transformers.loss import loss_utils
from trl.trainer.utils import FusedCausalLMOutput, add_fused_lm_head

from liger_trainer import LigerTrainer
from liger_trainer.head.outputs import FusedLMOutput, HeadOptions
from liger_trainer.trainers import base
from liger_trainer.trainers.base import LigerTrainerMixin
from liger_trainer.trainers.dpo_trainer import _SMOOTHED
from liger_trainer.trainers.trl import with_globals


def test_trl_s_fused_head_takes_the_options_that_ours_takes():
    options = list(inspect.signature(add_fused_lm_head).parameters)[1:]
    ours = [field.name for field in dataclasses.fields(HeadOptions) if field.name != "sharing"]  # it is our own
    assert options == ours, "trl's add_fused_lm_head has other options"
    defaults = {
        name: p.default for name, p in inspect.signature(add_fused_lm_head).parameters.items() if name != "model"
    }
    assert defaults | {"sharing": None} == dataclasses.asdict(HeadOptions())


def test_our_output_has_every_field_of_trl_s():
    ours = {field.name for field in dataclasses.fields(FusedLMOutput)}
    theirs = {field.name for field in dataclasses.fields(FusedCausalLMOutput)}
    assert theirs <= ours, f"trl's FusedCausalLMOutput has new fields: {theirs - ours}"


@pytest.mark.parametrize("name", ["add_fused_lm_head", "BaseTunerLayer"])
@pytest.mark.parametrize("method", ["SFT", "DPO", "KTO", "GRPO", "RLOO"])
def test_the_stock_init_uses_the_globals_that_we_replace(method, name):
    trainer = getattr(trl, f"{method}Trainer")
    assert name in vars(sys.modules[trainer.__module__])
    assert name in inspect.getsource(trainer.__init__)


def test_sft_loss_reduces_log_probs_by_a_sum():
    """`uniform_grad` in LigerSFTTrainer makes a promise about these lines of TRL."""
    source = inspect.getsource(trl_sft.SFTTrainer.compute_loss)
    for line in (
        "per_token_loss = -outputs.log_probs",
        "loss = per_token_loss.sum() / torch.as_tensor(num_tokens).clamp(min=1)",
        'if self.args.loss_type == "dft":',
    ):
        assert line in source, f"trl's SFTTrainer.compute_loss no longer has: {line}"


def test_the_dpo_losses_that_read_label_smoothing():
    """`LigerDPOTrainer` refuses label smoothing only with the other losses."""
    branches = re.split(r'loss_type == "(\w+)"', inspect.getsource(trl.DPOTrainer._compute_loss))
    smoothed = [
        name for name, code in zip(branches[1::2], branches[2::2], strict=True) if "self.label_smoothing" in code
    ]
    assert sorted(smoothed) == sorted(_SMOOTHED), "trl's DPOTrainer reads label_smoothing in other losses"


def test_distillation_loss_takes_the_way_on_which_logits_are_deferred():
    """`LigerDistillationTrainer` returns logits for hidden states, and promises one upstream gradient for all rows."""
    ours = {
        trl_distillation.DistillationTrainer.__init__: ("BaseTunerLayer", "PromptLearningConfig", "prepare_deepspeed("),
        trl_distillation.DistillationTrainer._get_last_hidden_state: (
            "backbone = unwrapped_model.base_model",
            "last_hidden_state = backbone(**model_inputs).last_hidden_state",
        ),
        trl_distillation.DistillationTrainer._compute_loss: (
            "self._get_last_hidden_state(",
            "_chunked_divergence_loss(",
            "temperature=self.temperature",
        ),
        trl_distillation._chunked_divergence_loss: (
            "compact = _use_triton(",
            "ChunkedDivergenceFunction.apply(",
            "loss = per_token_divergence.sum()",
        ),
    }
    for function, lines in ours.items():
        for line in lines:
            assert line in inspect.getsource(function), f"trl's {function.__qualname__} no longer has: {line}"


def lines_of(trainer, word):
    """The lines of a trainer's code that have `word`, without comments."""
    lines = [line.partition("#")[0].strip() for line in inspect.getsource(trainer).splitlines()]
    return [line for line in lines if word in line]


def test_what_grpo_makes_of_the_old_policy():
    """`LigerGRPOTrainer` leaves its pass out, and makes the same of the training pass."""
    assert lines_of(trl.GRPOTrainer, "old_per_token_logps") == [
        "old_per_token_logps, _, _ = self._get_per_token_logps_and_entropies(",
        "old_per_token_logps = None",
        "per_token_logps_diff = (old_per_token_logps - sampling_per_token_logps) * mask",
        "delta = torch.abs(old_per_token_logps - sampling_per_token_logps)",
        "if old_per_token_logps is not None:",
        'output["old_per_token_logps"] = old_per_token_logps',
        'old_per_token_logps = inputs.get("old_per_token_logps")',
        "old_per_token_logps = per_token_logps.detach() if old_per_token_logps is None else old_per_token_logps",
        'sampling_per_token_logps = inputs.get("sampling_per_token_logps", old_per_token_logps)',
        "log_ratio = per_token_logps - old_per_token_logps",
    ]
    assert lines_of(trl.GRPOTrainer, "vllm_importance_sampling_correction")[2:] == [
        "and self.vllm_importance_sampling_correction",
        '"`vllm_importance_sampling_correction=False`."',
        "self.use_vllm and self.vllm_importance_sampling_correction",
        *["if self.use_vllm and self.vllm_importance_sampling_correction:"] * 3,
        'if self.use_vllm and self.vllm_importance_sampling_correction and self.loss_type != "vespo":',
    ]


def test_what_rloo_makes_of_the_old_policy():
    """`LigerRLOOTrainer` answers the first call that scores by itself, right after `_generate`."""
    assert lines_of(trl.RLOOTrainer, "old_") == [
        "old_per_token_logps, _, _ = self._get_per_token_logps_and_entropies(",
        "old_logps = (old_per_token_logps * completion_mask).sum(1)",
        "per_token_kl = old_per_token_logps - ref_per_token_logps",
        '"old_logps": old_logps,',
        'old_logps = inputs["old_logps"]',
        "log_ratio = logps - old_logps",
    ]
    source = inspect.getsource(trl.RLOOTrainer._generate_and_score_completions)
    generates, scores = source.index("self._generate("), source.index("self._get_per_token_logps_and_entropies(")
    assert generates < scores < source.index("self._calculate_rewards(")


def test_a_moved_name_is_an_import_error_that_says_what_to_do():
    with pytest.raises(ImportError, match="test_contracts of trl .* has no moved_name.*trl>=1.16,<2"):
        with_globals(test_a_moved_name_is_an_import_error_that_says_what_to_do, {"moved_name": None})


def test_the_causal_lm_loss_still_ends_in_cross_entropy():
    source = inspect.getsource(loss_utils.fixed_cross_entropy)
    assert "nn.functional.cross_entropy(source, target, ignore_index=ignore_index, reduction=reduction" in source
    assert isinstance(inspect.getattr_static(PreTrainedModel, "loss_function"), property)


def test_trainer_asks_the_signature_for_num_items_in_batch():
    assert "model_accepts_loss_kwargs" in inspect.getsource(Trainer.__init__)
    assert "num_items_in_batch" in inspect.signature(Trainer.compute_loss).parameters


def test_cross_entropy_offers_itself_to_torch_function():
    seen = []

    class Probe:
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            return torch.zeros(())

    torch.nn.functional.cross_entropy(Probe(), torch.zeros(3, dtype=torch.long))
    assert seen == [torch.nn.functional.cross_entropy]


def test_saved_tensor_hooks_of_others_can_be_seen():
    """PyTorch has no public function for it. Without it, products would be rebuilt inside a user's offloading."""
    top = torch._C._autograd._top_saved_tensors_default_hooks
    assert top(True) is None
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert top(True) is not None


def test_floating_point_ops_equal_the_stock_trainer_s(monkeypatch):
    """This holds with a LoRA, for models outside transformers, and with one parameter count per training."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=16))
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    batches = [{"input_ids": torch.zeros(shape, dtype=torch.long)} for shape in ((2, 3), (1, 5))]
    found = []
    for subject in (adapted, model, torch.nn.Linear(2, 2)):
        trainer = object.__new__(LigerTrainer)
        trainer.model = subject
        found.append([trainer.floating_point_ops(inputs) for inputs in batches])
        assert found[-1] == [Trainer.floating_point_ops(trainer, inputs) for inputs in batches]
    assert found[0] == found[1] != found[2] == [0, 0] and trainer.floating_point_ops({}) == 0
    trainer.model, count = model, mock.Mock(side_effect=model.num_parameters)
    monkeypatch.setattr(model, "num_parameters", count, raising=False)
    monkeypatch.setattr(Trainer, "train", lambda self: [self.floating_point_ops(inputs) for inputs in batches])
    monkeypatch.setattr(LigerTrainer, "_apply_head_options", lambda self: None)
    monkeypatch.setattr(base, "FEATURES", ())
    assert trainer.train() == trainer.train() == found[0] and count.call_count == 2

    class Counts(Trainer):
        def floating_point_ops(self, inputs):
            return inputs["input_ids"].shape[1] ** 2

    trainer = object.__new__(type("Both", (LigerTrainerMixin, Counts), {}))
    trainer.model = model
    assert [trainer.floating_point_ops(inputs) for inputs in batches] == [9, 25], "a class between ours and theirs"


def test_trainer_filters_losses_where_we_do():
    """The argument is off from the training step to `floating_point_ops`: see `LossFilter`."""
    source = inspect.getsource(Trainer)
    first, last = (
        "tr_loss_step = self.training_step(model, inputs, num_items_in_batch)",
        "self.floating_point_ops(inputs)",
    )
    between = source[source.index(first) : source.index(last)]
    for line in (
        "and (torch.isnan(tr_loss_step) or torch.isinf(tr_loss_step))",
        "self._tr_loss += self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)",
        "self._tr_loss += tr_loss_step",
    ):
        assert line in between, f"transformers' Trainer no longer has: {line}"
    assert "callback_handler" not in between
