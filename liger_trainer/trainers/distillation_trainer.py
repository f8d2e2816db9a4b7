"""`LigerDistillationTrainer`: `trl.DistillationTrainer` with the divergence of two captured heads.

TRL's trainer asks `_get_last_hidden_state` for the hidden states of student and teacher, and gives them with the
weights of both heads to its `ChunkedDivergenceFunction`. Here the models' own forwards run instead, with deferred
logits, which go through TRL's loss in the place of the hidden states, down to that function: ours, which calls both
heads. So masks, reduction and metrics stay TRL's, while adapters, prompt learning and what a model does to its logits
count.
"""

import sys
from dataclasses import dataclass

import torch
from trl import DistillationConfig, DistillationTrainer

from liger_trainer.head.deferred import DeferredLogits
from liger_trainer.head.find import base_model_of, head_reason, output_head
from liger_trainer.trainers.arguments import LigerArguments
from liger_trainer.trainers.trl import LigerTRLMixin, _NoAdapterIsRefused, with_globals
from liger_triton import linear_divergence


@dataclass
class LigerDistillationConfig(LigerArguments, DistillationConfig):
    """[`~trl.DistillationConfig`] with `use_liger` and `liger_config`, for [`LigerDistillationTrainer`]."""

    _VALID_DICT_FIELDS = [*DistillationConfig._VALID_DICT_FIELDS, "liger_config"]


class LigerDistillationTrainer(LigerTRLMixin, DistillationTrainer):
    """[`~trl.DistillationTrainer`] with the same losses, gradients and metrics, on fused kernels.

    Student and teacher are patched, and neither builds logits but for the tokens being generated. Takes the arguments
    of `DistillationTrainer`; `args` is a [`LigerDistillationConfig`] (a plain `DistillationConfig` counts as
    `use_liger=True`). Beyond stock: a LoRA on `lm_head` and prompt-learning adapters train, and logits are scaled and
    capped by the models themselves instead of by fields of their configs.

    Raises:
        ValueError: Student and teacher have vocabularies of two sizes, a head that cannot be fused, or an option that
            would have no effect.
    """

    loss_hook = None
    ignored_fields = ("label_smoothing_factor",)

    def _seam(self) -> dict:
        if not self.uses_liger:
            return {}
        stock = vars(_stock_module())["prepare_deepspeed"]

        def patch_and_prepare(teacher, accelerator):
            self._patch_frozen(teacher)  # its weights are sharded afterwards
            return stock(teacher, accelerator)

        seam = {"prepare_deepspeed": patch_and_prepare}
        if self._wants("fused_linear_cross_entropy"):
            seam |= {"BaseTunerLayer": _NoAdapterIsRefused, "PromptLearningConfig": _NoAdapterIsRefused}
        return seam

    def create_accelerator_and_postprocess(self) -> None:
        """As the stock trainer does; what it has prepared for evaluation alone, the teacher, is patched first.

        Afterwards our forward would lie around the autocast that accelerate wraps around the teacher's.
        """
        super().create_accelerator_and_postprocess()
        prepare = self.accelerator.prepare_model

        def patch_and_prepare(model, device_placement=None, evaluation_mode=False):
            if evaluation_mode:
                self._patch_frozen(model)
            return prepare(model, device_placement=device_placement, evaluation_mode=evaluation_mode)

        self.accelerator.prepare_model = patch_and_prepare

    def _finish_init(self) -> None:
        del self.accelerator.prepare_model  # the class's own again
        if self.head_is_ours and self.teacher_model is not None:
            self._refuse_unlike_heads()
        super()._finish_init()

    def _refuse_unlike_heads(self) -> None:
        sizes = {}
        for name, model in (("student", self.model), ("teacher", self.accelerator.unwrap_model(self.teacher_model))):
            if (reason := head_reason(model)) is not None:
                raise ValueError(
                    f"The {name} cannot be distilled with a fused divergence, since {reason}. Set "
                    'liger_config={"fused_linear_cross_entropy": false}.'
                )
            sizes[name] = output_head(base_model_of(model)).out_features
        if sizes["student"] != sizes["teacher"]:
            raise ValueError(
                f"The LM head of the student has {sizes['student']} outputs, that of the teacher {sizes['teacher']}. A "
                "divergence needs one vocabulary: use a teacher of the student's, or resize_token_embeddings of one."
            )

    def _get_last_hidden_state(self, unwrapped_model, *args, **kwargs):
        if self.head_is_ours:
            unwrapped_model = _LogitsForHiddenStates(unwrapped_model)
        return super()._get_last_hidden_state(unwrapped_model, *args, **kwargs)

    def _compute_loss(self, unwrapped_student, inputs, num_items_in_batch):
        if not self.head_is_ours:
            return super()._compute_loss(unwrapped_student, inputs, num_items_in_batch)
        # TRL drops the positions outside of the mask before the function where `_use_triton` says that Triton runs.
        divergence = with_globals(
            _stock_module()._chunked_divergence_loss,
            {"ChunkedDivergenceFunction": _FusedDivergence, "_use_triton": lambda device: True},
        )
        stock = with_globals(super()._compute_loss.__func__, {"_chunked_divergence_loss": divergence})
        return stock(self, unwrapped_student, inputs, num_items_in_batch)


def _stock_module():
    return sys.modules[DistillationTrainer.__module__]


class _LogitsForHiddenStates(torch.nn.Module):
    """What `DistillationTrainer._get_last_hidden_state` needs of a model, with the logits as the last hidden state.

    A module, as accelerate looks for compiled ones inside it.
    """

    def __init__(self, model):
        super().__init__()
        self.model = model

    def base_model(self, **inputs):
        device = inputs["input_ids"].device.type
        outside = {"dtype": torch.get_autocast_dtype(device), "enabled": torch.is_autocast_enabled(device)}

        def score(run):
            # TRL calls the backbone past the autocast that accelerate wraps around the model's forward.
            with torch.autocast(device, **outside):
                return run()

        # `forward`, not a call: we are inside the wrapper's, whose hooks would shard the weights again too early.
        outputs = self.model.forward(**inputs, scored_by=score)
        return _BackboneOutput(outputs.logits)


class _BackboneOutput:
    def __init__(self, last_hidden_state):
        self.last_hidden_state = last_hidden_state


class _FusedDivergence:
    """Takes the place of `trl.kernels.chunked_divergence.ChunkedDivergenceFunction`."""

    @staticmethod
    def apply(student, student_weight, student_bias, teacher, teacher_weight, teacher_bias, beta, temperature, *scales):
        """(divergence, entropy), (T,) each, of `DeferredLogits` (T, V), which know weights, biases and scales better.

        The promise that TRL sums the rows (one upstream gradient) spares a product; a broken one gives NaN.
        """
        for name, logits in (("student", student), ("teacher", teacher)):
            if not isinstance(logits, DeferredLogits) or logits.is_materialized:
                raise RuntimeError(
                    f"The {name} made real logits, so its divergence cannot be fused: its LM head changed after the "
                    'trainer was built. Set liger_config={"fused_linear_cross_entropy": false}.'
                )

        def of_student(hidden, target, **own):
            def of_both(teacher_hidden, target, **theirs):
                theirs = {f"teacher_{name}": value for name, value in theirs.items()}
                return linear_divergence(
                    hidden, teacher_hidden=teacher_hidden, beta=beta, temperature=temperature, uniform_grad=True,
                    **own, **theirs,
                )  # fmt: skip

            return teacher.fused(of_both, target)  # a call of the teacher's head within the call of the student's

        rows = torch.zeros(student.shape[:-1], dtype=torch.int64, device=student.device)  # `fused` wants targets
        return student.fused(of_student, rows)
