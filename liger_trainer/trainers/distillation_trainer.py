"""`LigerDistillationTrainer`: `trl.DistillationTrainer` with a divergence that both LM heads compute without logits.

TRL's trainer gets the hidden states of student and teacher from `_get_last_hidden_state`, and passes them with the
weights of both heads to its `ChunkedDivergenceFunction`. Here, the models' forwards return deferred logits, which go
through TRL's loss in place of the hidden states. Our replacement of `ChunkedDivergenceFunction` then calls both heads.
So masks, reduction and metrics stay TRL's, while adapters, logit scales and softcaps take effect.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from trl import DistillationConfig, DistillationTrainer

from liger_trainer.head.deferred import DeferredLogits
from liger_trainer.head.module import head_reason
from liger_trainer.head.request import HeadRequest, run_request
from liger_trainer.trainers.arguments import LigerArguments
from liger_trainer.trainers.fsdp2 import broadcast_weights
from liger_trainer.trainers.online.rows import KeepsOnlineRows, join_on_host
from liger_trainer.trainers.trl import LigerTRLMixin, NoAdapterIsRefused, with_globals
from liger_triton import linear_divergence


@dataclass
class LigerDistillationConfig(LigerArguments, DistillationConfig):
    """[`~trl.DistillationConfig`] with the fields of [`LigerArguments`], for [`LigerDistillationTrainer`]."""


class LigerDistillationTrainer(KeepsOnlineRows, LigerTRLMixin, DistillationTrainer):
    """[`~trl.DistillationTrainer`] with the same losses, gradients and metrics, on fused kernels.

    Student and teacher are patched, and neither builds logits except for the tokens that it generates. The trainer
    takes the arguments of `DistillationTrainer`, with a [`LigerDistillationConfig`] as `args`; a plain
    `DistillationConfig` counts as one with `use_liger=True`. Unlike the stock trainer, it can train a LoRA on `lm_head`
    and prompt-learning adapters. The models scale and cap their logits themselves; the stock trainer does it by fields
    of their configs.

    Raises:
        ValueError: The LM head of student or teacher cannot be fused.
    """

    _trained: dict[str, Any] | None = None  # the micro-batch, while its loss is computed

    def _replaced_globals(self) -> dict[str, Any]:
        if not self.uses_liger:
            return {}
        stock = vars(_stock_module())["prepare_deepspeed"]

        def patch_and_prepare(teacher: nn.Module, accelerator: Accelerator) -> nn.Module:
            self._patch_frozen(teacher)  # its weights are sharded afterwards
            return stock(teacher, accelerator)

        replaced: dict[str, Any] = {"prepare_deepspeed": patch_and_prepare}
        if self.wants_part("fused_linear_cross_entropy"):
            replaced |= {"BaseTunerLayer": NoAdapterIsRefused, "PromptLearningConfig": NoAdapterIsRefused}
        return replaced

    def create_accelerator_and_postprocess(self) -> None:
        """Patch the teacher before accelerate prepares it. It is the only model that is prepared for evaluation only.

        If it were patched later, our forward would run outside the autocast that accelerate puts around it.
        """
        super().create_accelerator_and_postprocess()
        prepare = self.accelerator.prepare_model

        def patch_and_prepare(
            model: nn.Module, device_placement: Any = None, evaluation_mode: bool = False
        ) -> nn.Module:
            if evaluation_mode:
                broadcast_weights(model, self.accelerator)
                self._patch_frozen(model)
            return prepare(model, device_placement=device_placement, evaluation_mode=evaluation_mode)

        self.accelerator.prepare_model = patch_and_prepare

    def _finish_init(self) -> None:
        del self.accelerator.prepare_model  # brings back the method of the class
        teacher = None if self.teacher_model is None else self.accelerator.unwrap_model(self.teacher_model)
        for name, model in (("student", self.model), ("teacher", teacher)):
            reason = head_reason(model) if self.uses_fused_head and model is not None else None
            if reason is not None:
                raise ValueError(
                    f"The {name} cannot be distilled with a fused divergence, since {reason}. Set "
                    'liger_config={"fused_linear_cross_entropy": false}.'
                )
        super()._finish_init()

    def _get_last_hidden_state(
        self,
        unwrapped_model: nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if self._trained is not None and self.wants_part("varlen_attention"):
            join_on_host(self._trained, input_ids, attention_mask)
        if self.uses_fused_head:
            unwrapped_model = _LogitsForHiddenStates(unwrapped_model)
        return super()._get_last_hidden_state(unwrapped_model, input_ids, attention_mask, *args, **kwargs)

    def _compute_loss(self, unwrapped_student: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any) -> Any:
        self._trained = inputs
        try:
            return self._divergence(unwrapped_student, inputs, num_items_in_batch)
        finally:
            self._trained = None

    def _divergence(self, unwrapped_student: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any) -> Any:
        """Compute the stock loss, with our divergence where both heads are fused."""
        if not self.uses_fused_head:
            return super()._compute_loss(unwrapped_student, inputs, num_items_in_batch)
        # With `_use_triton`, TRL drops the positions outside of the mask before it calls the function.
        divergence = with_globals(
            _stock_module()._chunked_divergence_loss,
            {"ChunkedDivergenceFunction": _FusedDivergence, "_use_triton": lambda device: True},
        )
        stock = with_globals(super()._compute_loss.__func__, {"_chunked_divergence_loss": divergence})
        return stock(self, unwrapped_student, inputs, num_items_in_batch)


def _stock_module() -> ModuleType:
    return sys.modules[DistillationTrainer.__module__]


class _LogitsForHiddenStates(nn.Module):
    """Returns the logits of a model as its last hidden state, for `DistillationTrainer._get_last_hidden_state`.

    It is a module because accelerate looks for compiled modules inside it. The model is not one of its modules, or
    accelerate would walk through all of them, which takes milliseconds for a large model with adapters.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._held = (model,)  # in a tuple, which does not make it a module of this one

    def base_model(self, **inputs: Any) -> SimpleNamespace:
        device = inputs["input_ids"].device.type
        outside = {"dtype": torch.get_autocast_dtype(device), "enabled": torch.is_autocast_enabled(device)}

        def score(run: Callable[[], Any]) -> Any:
            # TRL calls the backbone outside the autocast that accelerate puts around the model's forward.
            with torch.autocast(device, **outside):
                return run()

        # Call `forward`, not the module: its hooks would reshard the weights before the surrounding call has ended.
        outputs = run_request(self._held[0].forward, HeadRequest(logits_consumer=score), **inputs)
        return SimpleNamespace(last_hidden_state=outputs.logits)


class _FusedDivergence:
    """Takes the place of `trl.kernels.chunked_divergence.ChunkedDivergenceFunction`."""

    @staticmethod
    def apply(
        student: Any,
        student_weight: torch.Tensor,
        student_bias: torch.Tensor | None,
        teacher: Any,
        teacher_weight: torch.Tensor,
        teacher_bias: torch.Tensor | None,
        beta: float,
        temperature: float,
        *scales: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the divergence and the entropy of each row, (T,) each.

        `student` and `teacher` are `DeferredLogits` (T, V), which know their own weights, biases and scales.
        `uniform_grad` promises that all rows have one upstream gradient, since TRL sums them. That saves a product. If
        the promise were broken, the gradients would be NaN.
        """
        for name, logits in (("student", student), ("teacher", teacher)):
            if not isinstance(logits, DeferredLogits) or logits.is_materialized:
                raise RuntimeError(
                    f"The {name} built real logits, so its divergence cannot be fused. Its LM head has changed since "
                    'the trainer was built. Set liger_config={"fused_linear_cross_entropy": false}.'
                )

        def in_student_head(hidden: torch.Tensor, target: torch.Tensor, **student_head: Any) -> Any:
            def in_both_heads(teacher_hidden: torch.Tensor, target: torch.Tensor, **teacher_head: Any) -> Any:
                teacher_options = {f"teacher_{name}": value for name, value in teacher_head.items()}
                return linear_divergence(
                    hidden,
                    teacher_hidden=teacher_hidden,
                    beta=beta,
                    temperature=temperature,
                    uniform_grad=True,
                    **student_head,
                    **teacher_options,
                )

            return teacher.fused(in_both_heads, target)  # a call of the teacher's head inside the student's

        # `fused` takes targets, but a divergence does not use them.
        targets = torch.zeros(student.shape[:-1], dtype=torch.int64, device=student.device)
        return student.fused(in_student_head, targets)
