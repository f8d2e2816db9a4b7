"""Arguments and models that would train wrongly, or not as asked, are refused at construction.

The message says what to do.
"""

import tempfile

import pytest
from tiny_models import classifier, collate, ragged_rows, tiny_model
from transformers import AutoModelForTokenClassification

from liger_trainer import LigerSFTConfig, LigerTrainer, LigerTrainingArguments


def arguments(args_class=LigerTrainingArguments, **options):
    return args_class(output_dir=tempfile.mkdtemp(), use_cpu=True, report_to="none", **({"bf16": False} | options))


@pytest.mark.parametrize("args_class", [LigerTrainingArguments, LigerSFTConfig])
@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"liger_config": {"rmsnorm": False}},
            "unknown key 'rmsnorm'; did you mean 'rms_norm'.*fused_linear_cross_entropy",
        ),
        ({"liger_config": {"rope": "no"}}, r"liger_config\['rope'\] is 'no'; expected True or False"),
        ({"liger_config": ["rope"]}, "expected a dict such as"),
        ({"use_liger": "maybe"}, "use_liger is 'maybe'; expected true or false"),
    ],
)
def test_arguments(args_class, options, message):
    with pytest.raises(ValueError, match=message):
        arguments(args_class, **options)


def test_liger_config_from_a_command_line_is_json():
    assert arguments(liger_config='{"rope": false}').liger_config == {"rope": False}


def sorter_of_tokens():
    """Its head is neither an LM head nor one that pools a token of each row."""
    return AutoModelForTokenClassification.from_config(classifier().config)


def test_token_loss_of_a_classifier():
    class Own(LigerTrainer):
        def token_loss(self, outputs, inputs):
            return -outputs.log_probs

    with pytest.raises(ValueError, match="LlamaForSequenceClassification has no LM head"):
        Own(model=classifier(), args=arguments(), train_dataset=ragged_rows(4), data_collator=collate)


def test_a_model_without_an_lm_head(tmp_path):
    options = {"train_dataset": ragged_rows(4), "data_collator": collate}
    with pytest.raises(
        ValueError, match="LlamaForTokenClassification has no LM head.*fused_linear_cross_entropy.*use_liger"
    ):
        LigerTrainer(model=sorter_of_tokens(), args=arguments(), **options)
    layers_only = LigerTrainer(
        model=sorter_of_tokens(), args=arguments(liger_config={"fused_linear_cross_entropy": False}), **options
    )
    assert layers_only.liger_report.operations["rms_norm"].swapped


def test_the_report_is_written_and_logged(tmp_path, caplog):
    args = arguments(LigerTrainingArguments, max_steps=1)
    args.output_dir = str(tmp_path)
    with caplog.at_level("INFO", "liger_trainer"):
        trainer = LigerTrainer(
            model=tiny_model("llama"), args=args, train_dataset=ragged_rows(8), data_collator=collate
        )
    assert trainer.liger_report.one_line() in caplog.text
    trainer.train()
    assert (tmp_path / "liger_report.json").read_text().count("rms_norm") == 1


def test_model_init_is_patched_too(tmp_path):
    args = arguments(max_steps=1, remove_unused_columns=False)
    args.output_dir = str(tmp_path)
    trainer = LigerTrainer(
        model_init=lambda: tiny_model("llama"), args=args, train_dataset=ragged_rows(8), data_collator=collate
    )
    for _ in range(2):
        trainer.train()
        assert trainer.uses_fused_head
        assert trainer.model.config.use_cache is False, "a cache would be filled in each step, and padding computed"


def test_data_parallel_is_refused():
    args = arguments()
    args._n_gpu = 2  # what `Trainer` finds with two GPUs and no launcher
    with pytest.raises(ValueError, match="2 GPUs are visible to this single process.*accelerate launch"):
        LigerTrainer(model=tiny_model("llama"), args=args, train_dataset=ragged_rows(8), data_collator=collate)


def test_a_soft_cap_that_attention_leaves_out():
    """transformers 5.17 gives Gemma 2 SDPA; later versions refuse to."""
    model = tiny_model("gemma2")
    model.config._attn_implementation_internal = "sdpa"
    options = {"train_dataset": ragged_rows(4), "data_collator": collate}
    with pytest.raises(ValueError, match="'sdpa', which ignores the model's attn_logit_softcapping of 20.0"):
        LigerTrainer(model=model, args=arguments(), **options)
    LigerTrainer(model=tiny_model("gemma2"), args=arguments(), **options)
