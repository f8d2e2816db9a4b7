"""Leaving out the old policy's pass gives the stock trainers' gradients and numbers, in fewer passes."""

import json
from types import SimpleNamespace

import engine_stand_in
import pytest
import torch
from peft import LoraConfig
from tiny_models import tiny_model, words
from trainer_parity import assert_same_training, build, letters, lora, loss_types, moved, with_reference
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from liger_trainer import LigerGRPOConfig, LigerGRPOTrainer, LigerRLOOConfig, LigerRLOOTrainer
from liger_trainer.trainers.online.old_policy import agreed, why_passes_differ
from liger_trainer.trainers.online.rollout_ratios import MODES

CLASSES = {
    "grpo": (LigerGRPOTrainer, LigerGRPOConfig, GRPOTrainer, GRPOConfig),
    "rloo": (LigerRLOOTrainer, LigerRLOOConfig, RLOOTrainer, RLOOConfig),
}
SAMPLING = ("sampling/sampling_logp_difference/mean", "sampling/importance_sampling_ratio/min")
ADAPTER = {"peft_config": lora()}
DROPOUT = {"peft_config": LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")}


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    engine_stand_in.install(monkeypatch)


class Passes:
    """Counts the passes of models: each looks up the embeddings of its tokens once."""

    def __init__(self, monkeypatch):
        self.count = 0
        stock = torch.nn.functional.embedding

        def counted(*args, **kwargs):
            self.count += 1
            return stock(*args, **kwargs)

        monkeypatch.setattr(torch.nn.functional, "embedding", counted)


def one(trainer_class, args_class, folder, trainer_options=None, model="llama", **options):
    generator = torch.Generator().manual_seed(4)
    rows = [{"prompt": words(generator, 2, 6)} for _ in range(16)]
    options = {"num_generations": 2, "max_completion_length": 6, "beta": 0.0, "use_vllm": True} | options
    options |= {"vllm_importance_sampling_clip_max": 1.2} if args_class in (LigerGRPOConfig, GRPOConfig) else {}
    given = {"reward_funcs": letters} | (trainer_options or {})
    base = tiny_model(model)
    base = with_reference(base, folder) if options["beta"] else base
    return moved(build(trainer_class, args_class, base, folder, rows, trainer_options=given, **options))


def ours(kind, folder, **options):
    return one(*CLASSES[kind][:2], folder, **options)


def compare(kind, folder, **options):
    trainer, stock = ours(kind, folder, **options), one(*CLASSES[kind][2:], folder, **options)
    logs = assert_same_training(trainer, stock, SAMPLING if kind == "grpo" else (), loss_size=1.0)
    return trainer, logs


def left_out(trainer):
    assert trainer.old_policy.run == {}
    return trainer.old_policy.left_out


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("split", [(4, 1), (2, 4)], ids=str)
def test_grpo_corrects_by_the_training_pass(split, mode, tmp_path):
    trainer, _ = compare("grpo", tmp_path, split=split, max_steps=3, vllm_importance_sampling_mode=mode)
    assert left_out(trainer) == 3


@pytest.mark.parametrize("loss_type", loss_types(GRPOTrainer))
def test_every_loss(loss_type, tmp_path):
    mode = "token_mask" if loss_type == "vespo" else "sequence_mask"
    options = {"loss_type": loss_type, "split": (4, 2), "max_steps": 2, "vllm_importance_sampling_clip_min": 0.7}
    trainer, _ = compare("grpo", tmp_path, vllm_importance_sampling_mode=mode, **options)
    assert left_out(trainer) == 2


GRPO = [
    pytest.param({"beta": 0.2, "use_bias_correction_kl": True}, 2, id="reference"),
    pytest.param({"beta": 0.2, "trainer_options": ADAPTER, "gradient_checkpointing": True}, 2, id="reference-adapter"),
    pytest.param({"off_policy_mask_threshold": 0.01, "importance_sampling_level": "sequence"}, 2, id="off-policy"),
    pytest.param({"top_entropy_quantile": 0.4, "entropy_coef": 0.3}, 2, id="entropy"),
    pytest.param({"mask_truncated_completions": True, "pad_to_multiple_of": 8}, 2, id="truncated-masked"),
    pytest.param({"steps_per_generation": 2, "split": (4, 4)}, 4, id="two-generations-a-step"),
    pytest.param({"eval_strategy": "steps", "eval_steps": 1}, 2 + 2 * 8, id="evaluated"),
    pytest.param({"model": "qwen3_moe", "router_aux_loss_coef": 0.3}, 2, id="experts"),
]


@pytest.mark.parametrize("options, passes", GRPO)
def test_options_of_grpo(options, passes, tmp_path):
    trainer, _ = compare("grpo", tmp_path, **{"split": (4, 2), "max_steps": 2} | options)
    assert left_out(trainer) == passes


RLOO = [
    pytest.param({"split": (4, 1)}, 2, id="one"),
    pytest.param({"split": (2, 4), "temperature": 0.7, "normalize_advantages": True}, 2, id="accumulated"),
    pytest.param({"steps_per_generation": 2, "split": (4, 4)}, 4, id="two-generations-a-step"),
    pytest.param({"trainer_options": ADAPTER, "gradient_checkpointing": True}, 2, id="adapter"),
    pytest.param({"eval_strategy": "steps", "eval_steps": 1}, 2 + 2 * 8, id="evaluated"),
    pytest.param({"model": "qwen3_moe", "router_aux_loss_coef": 0.3}, 2, id="experts"),
    pytest.param({"use_vllm": False}, 2, id="without-vllm"),
    pytest.param({"mask_truncated_completions": True}, 2, id="truncated-masked"),
]


@pytest.mark.parametrize("options, passes", RLOO)
def test_options_of_rloo(options, passes, tmp_path):
    trainer, _ = compare("rloo", tmp_path, **{"max_steps": 2} | options)
    assert left_out(trainer) == passes


RUNS = [
    pytest.param({"num_iterations": 2, "learning_rate": 0.01}, "num_iterations is 2", id="used-twice"),
    pytest.param(
        {"steps_per_generation": 2, "learning_rate": 0.01},
        "gradient_accumulation_steps is 1, not a multiple of steps_per_generation, which is 2",
        id="moves-in-between",
    ),
    pytest.param({"trainer_options": DROPOUT}, "a Dropout with p=0.1 is on", id="dropout"),
]


@pytest.mark.parametrize("options, reason", RUNS)
@pytest.mark.parametrize("kind", CLASSES)
def test_where_the_passes_would_differ_trl_s_own_way_runs(kind, options, reason, tmp_path):
    trainer, _ = compare(kind, tmp_path, max_steps=4, **options)
    assert trainer.old_policy.left_out == 0
    assert [*trainer.old_policy.run] == [reason]
    report = json.loads((tmp_path / type(trainer).__name__ / "liger_report.json").read_text())
    assert report["old_policy"] == trainer.old_policy.to_dict()


def test_rloo_with_a_reference_needs_the_pass(tmp_path):
    trainer, _ = compare("rloo", tmp_path, beta=0.2, max_steps=2)
    assert trainer.old_policy.left_out == 0
    (reason,) = trainer.old_policy.run
    assert reason.startswith("beta is 0.2")


@pytest.mark.parametrize("kind", CLASSES)
def test_a_batch_costs_one_pass(kind, tmp_path, monkeypatch):
    """Of four rows, in two steps of two: two passes of training, and with TRL's way two more."""
    counted = {}
    for reuses in (True, False):
        trainer = ours(kind, tmp_path, split=(2, 2), reuse_log_probs=reuses)
        trainer.train()  # which proves the model by passes of a small copy
        passes = Passes(monkeypatch)
        trainer.args.max_steps = 1
        trainer.train()
        counted[reuses] = passes.count
        monkeypatch.undo()
        engine_stand_in.install(monkeypatch)
    assert counted == {True: 2, False: 4}


def test_evaluation_of_rloo_never_needs_the_pass(tmp_path):
    """The policy moves within the generation batches of its training, and not within an evaluation."""
    options = {"steps_per_generation": 2, "max_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    trainer, logs = compare("rloo", tmp_path, **options)
    assert trainer.old_policy.left_out == 8
    assert "eval_clip_ratio/region_mean" in logs[-2]


def test_a_batch_has_everything_once_its_loss_is_computed(tmp_path):
    grpo, rloo = ours("grpo", tmp_path), ours("rloo", tmp_path)
    for trainer, names in ((grpo, {"old_per_token_logps", "importance_sampling_ratio"}), (rloo, {"old_logps"})):
        trainer.train()
        (batch,) = trainer._buffered_inputs
        assert names <= batch.keys()
        assert all(batch[name].isfinite().all() for name in names)


def test_a_rollout_function_sees_the_trainer_as_it_is(tmp_path):
    """And tokens that it marks as not written by the policy count for nothing, here as in TRL."""
    seen = []

    def rollout(prompts, trainer):
        seen.append(trainer.vllm_importance_sampling_correction)
        made = [trainer.vllm_generation.completion() for _ in prompts]
        return {
            "prompt_ids": [trainer.processing_class(prompt)["input_ids"] for prompt in prompts],
            "completion_ids": [ids for ids, _ in made],
            "logprobs": [scores for _, scores in made],
            "env_mask": [[i % 3 != 1 for i in range(len(ids))] for ids, _ in made],
        }

    trainer, _ = compare("grpo", tmp_path, split=(4, 2), max_steps=2, trainer_options={"rollout_func": rollout})
    assert left_out(trainer) == 2
    assert seen == [True] * 4
    assert trainer.vllm_importance_sampling_correction


def test_a_rollout_without_log_probabilities_is_refused(tmp_path):
    def rollout(prompts, trainer):
        ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        return {"prompt_ids": ids, "completion_ids": ids, "logprobs": None}

    trainer = ours("grpo", tmp_path, trainer_options={"rollout_func": rollout})
    with pytest.raises(ValueError, match="rollout_func returned no logprobs"):
        trainer.train()
    assert trainer.vllm_importance_sampling_correction


def overriding(name):
    def method(self, *args, **kwargs):
        return getattr(super(changed, self), name)(*args, **kwargs)

    changed = type("Changed", (LigerRLOOTrainer,), {name: method})
    return changed


@pytest.mark.parametrize(
    "name",
    [
        "_compute_loss",
        "_generate",
        "_generate_and_score_completions",
        "_get_per_token_logps_and_entropies",
        "_prepare_inputs",
        "training_step",
    ],
)
def test_a_subclass_that_may_read_the_numbers_gets_them(name, tmp_path):
    trainer = one(overriding(name), LigerRLOOConfig, tmp_path)
    trainer.train()
    assert trainer.old_policy.run == {f"Changed overrides {name}": 1}


def test_a_method_of_the_instance_counts_too(tmp_path):
    trainer = ours("rloo", tmp_path)
    stock = trainer._compute_loss
    trainer._compute_loss = lambda model, inputs: stock(model, inputs)
    trainer.train()
    assert trainer.old_policy.run == {"_compute_loss of this trainer was replaced": 1}


def test_a_hook_gets_every_pass(tmp_path):
    def count_calls(module, inputs):
        calls.append(len(inputs[0]))

    calls = []
    trainer = ours("grpo", tmp_path)
    trainer.model.model.layers[0].mlp.register_forward_pre_hook(count_calls)
    trainer.train()
    (reason,) = trainer.old_policy.run
    assert "count_calls) on a LlamaMLP would miss a pass" in reason
    assert len(calls) == 2


def test_a_model_of_the_user_s_runs_every_pass(tmp_path):
    class Counting(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x)

    trainer = ours("grpo", tmp_path)
    trainer.model.model.layers[0].self_attn.q_proj.__class__ = Counting
    trainer.train()
    assert trainer.old_policy.run == {"the forward of Counting is not from a known library": 1}


def with_statistics(trainer):
    trainer.model.add_module("statistics", torch.nn.BatchNorm1d(3))


def with_noise_of_embeddings(trainer):
    trainer.neftune_noise_alpha = 5.0


def with_jitter(trainer):
    trainer.model.config.router_jitter_noise = 0.1


def with_a_new_batch_size(trainer):
    trainer.args.auto_find_batch_size = True


@pytest.mark.parametrize(
    "change, reason",
    [
        (with_statistics, "a BatchNorm1d keeps statistics of each pass"),
        (with_noise_of_embeddings, "NEFTune adds noise"),
        (with_jitter, "router_jitter_noise of its config is 0.1"),
        (with_a_new_batch_size, "auto_find_batch_size restarts within a generation batch"),
    ],
)
def test_what_makes_two_passes_differ(change, reason, tmp_path):
    trainer = ours("rloo", tmp_path)
    trainer.model.train()
    assert trainer._why_it_runs() is None
    change(trainer)
    assert trainer._why_it_runs() == reason
    trainer.model.eval()
    if change is not with_a_new_batch_size:
        assert trainer._why_it_runs() is None, "an evaluation draws no numbers"


def test_fp8_scales_by_earlier_passes(tmp_path):
    trainer = SimpleNamespace(model=tiny_model("llama"), accelerator=SimpleNamespace(mixed_precision="fp8"))
    assert why_passes_differ(trainer) == "fp8 scales by the passes before"


def test_all_processes_run_the_same_passes():
    """One alone would wait for ever for the others, where a pass gathers weights."""
    flags = []

    def gather(own):
        flags.append(own.tolist())
        return torch.tensor([0, 1])

    two = SimpleNamespace(num_processes=2, device="cpu", gather=gather)
    assert agreed(None, two) == "another process has a reason"
    assert agreed("a hook", two) == "a hook"
    assert flags == [[0], [1]]
    assert agreed(None, SimpleNamespace(num_processes=1)) is None


class StopsWithin(TrainerCallback):
    """Interrupts the training after a micro-batch that ends no step."""

    def on_substep_end(self, args, state, control, **kwargs):
        raise KeyboardInterrupt


def test_a_training_that_begins_within_a_batch_runs_the_pass(tmp_path):
    trainer = ours("rloo", tmp_path, split=(2, 2), max_steps=2)
    callback = StopsWithin()
    trainer.add_callback(callback)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(callback)
    with pytest.raises(RuntimeError, match=r"written at step 0, and this is step 1.*Set reuse_log_probs=False"):
        trainer._wrote_at["train"] = 0
        trainer.state.global_step = 1
        trainer._trained = {key: x for key, x in trainer._buffered_inputs[1].items() if key != "old_logps"}
        trainer._get_per_token_logps_and_entropies(trainer.model, *joined(trainer._trained))
    trainer._trained = None
    trainer.train()
    assert "an earlier training of this trainer stopped within a generation batch" in trainer.old_policy.run


def joined(batch):
    ids = torch.cat((batch["prompt_ids"], batch["completion_ids"]), 1)
    mask = torch.cat((batch["prompt_mask"], batch["completion_mask"]), 1)
    return ids, mask, batch["completion_ids"].shape[1]


def test_use_liger_false_runs_every_pass(tmp_path, monkeypatch):
    trainer = ours("rloo", tmp_path, use_liger=False)
    passes = Passes(monkeypatch)
    trainer.train()
    assert passes.count == 2
    assert trainer.old_policy.is_empty


def test_a_bad_value_is_refused(tmp_path):
    for args in (LigerGRPOConfig, LigerRLOOConfig):
        with pytest.raises(ValueError, match="reuse_log_probs is 'no'; expected true or false"):
            args(output_dir=str(tmp_path), reuse_log_probs="no", use_cpu=True, bf16=False)
