"""Models and arguments that stock trains and ours once refused: compiled models, CPT, encoder-decoders and more."""

import pytest
import torch
from datasets import Dataset
from peft import CPTConfig, get_peft_model
from tiny_models import collate, ragged_rows, tiny_model, tiny_tokenizer
from trainer_parity import (
    STOCK,
    Plain,
    assert_same_numbers,
    assert_same_training,
    build,
    lora,
    method_rows,
    one,
    ours,
    run,
)
from transformers import T5Config, T5ForConditionalGeneration, Trainer, TrainingArguments, set_seed
from trl import SFTConfig, SFTTrainer

from liger_trainer import LigerSFTTrainer, LigerTrainer, apply_liger, remove_liger


@pytest.mark.parametrize(
    "adapter, called",
    [
        pytest.param(False, False, id="full"),
        pytest.param(True, True, id="lora-called-before"),
    ],
)
@pytest.mark.slow  # test_compile.py has shorter ones
def test_a_compiled_model(adapter, called, tmp_path):
    runs = []
    for trainer_class in (Trainer, LigerTrainer):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = tiny_model("llama", num_hidden_layers=1)
        model = torch.compile(get_peft_model(model, lora()) if adapter else model, backend="eager")
        if called:
            batch = collate(ragged_rows(4))
            model(**batch).loss.backward()
            model.zero_grad()
        options = {"remove_unused_columns": False, "use_cpu": True, "report_to": "none", "disable_tqdm": True}
        args = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=2,
            logging_steps=1,
            save_strategy="no",
            learning_rate=1e-2,
            label_smoothing_factor=0.0,
            **options,
        )
        trainer = trainer_class(model=model, args=args, train_dataset=ragged_rows(16), data_collator=collate)
        trainer.train()
        runs.append([(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log])
    assert trainer.uses_fused_head and trainer.liger_report["rms_norm"].swapped
    assert_same_numbers(torch.tensor(runs[1]).double(), torch.tensor(runs[0]).double())


def cpt():
    torch.manual_seed(0)
    config = CPTConfig(
        task_type="CAUSAL_LM",
        cpt_token_ids=[3, 4, 5, 6],
        cpt_mask=[1, 1, 1, 1],
        cpt_tokens_type_mask=[1, 2, 3, 4],
        opt_weighted_loss_type="decay",
        opt_loss_decay_factor=0.95,
        opt_projection_epsilon=0.2,
        opt_projection_format_epsilon=0.1,
    )
    return get_peft_model(tiny_model("llama"), config)


@pytest.mark.parametrize("split", [(8, 1), (4, 2)], ids=str)
def test_a_cpt_adapter_trains_unfused(split, tmp_path):
    want, _ = run(Trainer, cpt(), tmp_path, split)
    got, trainer = run(LigerTrainer, cpt(), tmp_path, split)
    part = trainer.liger_report["fused_linear_cross_entropy"]
    assert "is CPT, which computes its own loss" in part.skipped["lm_head"] and trainer.liger_report["rope"].swapped
    assert_same_numbers(got, want)


def test_what_a_cpt_adapter_excludes(tmp_path):
    with pytest.raises(ValueError, match="Own overrides token_loss, .*but the adapter 'default' is CPT"):
        run(type("Own", (Plain, LigerTrainer), {}), cpt(), tmp_path)
    with pytest.raises(ValueError, match="eval_predictions is 'tokens', but the adapter 'default' is CPT"):
        run(LigerTrainer, cpt(), tmp_path, eval_predictions="tokens")


def test_a_cpt_adapter_where_trl_cannot_train_it(tmp_path):
    with pytest.raises(AttributeError, match="no attribute 'logits'"):
        run(SFTTrainer, cpt(), tmp_path)
    with pytest.raises(ValueError, match="SFTTrainer of trl .* builds no logits, but .* is CPT.*Use LigerTrainer"):
        run(LigerSFTTrainer, cpt(), tmp_path)


def encoder_decoder():
    torch.manual_seed(0)
    sizes = {"vocab_size": 131, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, dropout_rate=0.0))


@pytest.mark.parametrize("use_liger", [True, False])
@pytest.mark.parametrize("method", ["ORPO", "CPO"])
def test_pairs_of_an_encoder_decoder(method, use_liger, tmp_path):
    options = {"max_completion_length": 12, "max_length": 24, "max_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    stock = unchecked(STOCK[method], method, tmp_path, **options)
    trainer = unchecked(ours(method), method, tmp_path, use_liger=use_liger, **options)
    if use_liger:
        part = trainer.liger_report["fused_linear_cross_entropy"]
        assert not part.swapped and "T5ForConditionalGeneration is an encoder-decoder" in part.skipped["lm_head"]
        assert not trainer.uses_fused_head
    logs = assert_same_training(trainer, stock, rtol=1e-5 if use_liger else 0.0)
    assert any("eval_loss" in log for log in logs)


def unchecked(classes, method, folder, **options):
    """`build` without its check that the head is ours."""
    trainer_class, args_class = classes
    liger_config = {"fused_linear_cross_entropy": True} if "Liger" in trainer_class.__name__ else None
    extra = {} if liger_config is None or not options.get("use_liger", True) else {"liger_config": liger_config}
    return build(trainer_class, args_class, encoder_decoder(), folder, method_rows(method), **extra, **options)


@pytest.mark.parametrize("trainer_class, args_class", [(LigerTrainer, TrainingArguments), (LigerSFTTrainer, SFTConfig)])
def test_liger_kernel_on_top_is_refused_with_stock_arguments_too(trainer_class, args_class, tmp_path):
    options = {} if args_class is TrainingArguments else {"bf16": False}
    args = args_class(output_dir=str(tmp_path), use_liger_kernel=True, use_cpu=True, report_to="none", **options)
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="use_liger_kernel is true.*Remove use_liger_kernel, or use .*Trainer"):
        trainer_class(
            model=model, args=args, train_dataset=Dataset.from_list(ragged_rows(4)), processing_class=tiny_tokenizer()
        )
    assert "forward" not in vars(model) and not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("method", ["SFT", "DPO", "KTO", "GRPO", "RLOO"])
def test_a_trainer_that_scores_by_fused_heads_after_remove_liger(method, tmp_path):
    trainer = one(method, ours(method), tmp_path)
    removed = getattr(trainer, "ref_model", None) or trainer.model
    remove_liger(removed)
    with pytest.raises(RuntimeError, match=f"Liger{method}Trainer needs the fused LM head.*Call apply_liger"):
        trainer.train()
    apply_liger(removed)
    trainer.train()


@pytest.mark.parametrize("method", ["ORPO", "CPO"])
def test_a_trainer_of_pairs_after_remove_liger(method, tmp_path):
    stock = one(method, STOCK[method], tmp_path)
    trainer = one(method, ours(method), tmp_path)
    remove_liger(trainer.model)
    assert_same_training(trainer, stock)


def test_an_own_loss_after_remove_liger_is_an_error(tmp_path):
    for trainer_class in (LigerTrainer, LigerSFTTrainer):
        _, trainer = run(type("Own", (Plain, trainer_class), {}), tiny_model("llama"), tmp_path)
        remove_liger(trainer.model)
        with pytest.raises(RuntimeError, match="The loss of Own needs the fused LM head, which remove_liger has"):
            trainer.train()


def numbers(trainer):
    """Return the logs of one more training at a learning rate of zero."""
    trainer.state.log_history.clear()
    set_seed(0)
    trainer.train()
    return [{n: log[n] for n in ("loss", "grad_norm", "entropy") if n in log} for log in trainer.state.log_history[:-1]]


def own_loss_trainer(model, folder):
    args = TrainingArguments(
        output_dir=str(folder),
        learning_rate=0.0,
        max_steps=2,
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    given = {"train_dataset": ragged_rows(16), "eval_dataset": ragged_rows(4), "data_collator": collate}
    return type("Own", (Plain, LigerTrainer), {})(model=model, args=args, **given)


def test_two_trainers_on_one_model_in_turn(tmp_path):
    """Each has the numbers of a fresh trainer on a fresh model, with its own temperature and head outputs."""
    options = {"temperature": 0.5, "learning_rate": 0.0, "max_steps": 2}
    first_alone = numbers(one("GRPO", ours("GRPO"), tmp_path, **options))
    alone = own_loss_trainer(tiny_model("llama"), tmp_path)
    second_alone, loss_alone = numbers(alone), alone.evaluate()["eval_loss"]

    first = one("GRPO", ours("GRPO"), tmp_path, **options)
    second = own_loss_trainer(first.model, tmp_path)
    assert second.model is first.model
    for _ in range(2):
        assert numbers(first) == first_alone
        assert second.evaluate()["eval_loss"] == loss_alone
        assert numbers(first) == first_alone
        assert numbers(second) == second_alone


def test_a_model_that_writes_to_the_input_of_a_lora_gets_an_error_that_says_what_to_do(tmp_path):
    """PEFT keeps a bf16 copy and trains. Ours keeps the input itself."""

    def writing(module, args, output):
        with torch.no_grad():
            args[0].mul_(0.5)

    found = []
    for trainer_class, config in ((Trainer, None), (LigerTrainer, {"lora": False}), (LigerTrainer, None)):
        torch.manual_seed(0)
        model = get_peft_model(tiny_model("llama"), lora())
        model.base_model.model.model.layers[0].self_attn.v_proj.register_forward_hook(writing)
        options = {"bf16": True} if config is None else {"bf16": True, "liger_config": config}
        if config is None and trainer_class is LigerTrainer:
            with pytest.raises(RuntimeError, match="modified by an inplace operation") as error:
                run(trainer_class, model, tmp_path, **options)
            assert 'liger_config={"lora": false}' in error.value.__notes__[-1]
        else:
            found.append(run(trainer_class, model, tmp_path, **options)[0])
    assert_same_numbers(found[1], found[0], rtol=2e-2)
