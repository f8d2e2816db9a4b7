"""The fields that every arguments class of this package adds to the stock one's."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from liger_trainer.fp8 import fields as fp8_fields
from liger_trainer.memory import fields as checkpointing_fields
from liger_trainer.patching import check_config
from liger_trainer.trainers import in_backward_checks

if TYPE_CHECKING:  # it always goes before a class of arguments of transformers or TRL
    from transformers import TrainingArguments as StockArguments
else:
    StockArguments = object


@dataclass
class LigerArguments(StockArguments):
    """The fields that every arguments class of this package adds to the stock one.

    One stock option gets another default with `use_liger`, so that a step does not wait for the GPU: where there is a
    GPU, `accelerator_config` has `non_blocking=True` unless you set it.
    """

    use_liger: bool = field(
        default=True,
        metadata={
            "help": "Patch the model with fused kernels and compute the loss without logits. "
            "False: this is exactly the stock trainer."
        },
    )
    liger_config: dict | str | None = field(
        default=None,
        metadata={
            "help": "Switches single parts off; all are on by default: rms_norm, layer_norm, rope, swiglu, geglu, "
            'lora, float8, fused_linear_cross_entropy, varlen_attention. For example {"rope": false}. It may also have '
            "rebuild_above_mib, 16 by default: results of norms and gates that take more MiB than that are computed "
            "again in the backward pass instead of being kept."
        },
    )

    eval_predictions: Literal["logits", "tokens"] = field(
        default="logits",
        metadata={
            "help": "What `compute_metrics` gets. 'logits': logits, as in the stock trainer. 'tokens': a dict of "
            "`token_ids` (argmax), `log_probs` and `ranks` of the labels, which costs neither logits nor a second "
            "forward."
        },
    )

    activation_checkpointing: str | None = field(
        default=None,
        metadata={
            "help": "true: the layers' activations are computed again in the backward pass, which takes less memory "
            "and more time. false: they are kept. 'auto': they are kept in as many layers as memory_budget allows, "
            "as measured in the first steps. Newer name of gradient_checkpointing.",
            "nargs": "?",
            "const": "true",
        },
    )
    activation_checkpointing_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Newer name of gradient_checkpointing_kwargs."}
    )
    memory_budget: float | None = field(
        default=None,
        metadata={
            "help": "With activation_checkpointing 'auto': how many GiB of the GPU's memory tensors may take up. By "
            "default, what the GPU has, less a reserve."
        },
    )
    host_memory_budget: float | None = field(
        default=None,
        metadata={
            "help": "With activation_checkpointing 'auto': in how many GiB of the host's memory each process may keep "
            "activations that the GPU has no room for. By default, half of what is free, shared by the processes of "
            "the machine. 0: none are kept there."
        },
    )

    optimizer_in_backward: bool = field(
        default=False,
        metadata={
            "help": "Run the optimizer step of each weight in the backward pass, as soon as its gradient is there, and "
            "free the gradient, so that the gradients of all weights never exist together. Needs max_grad_norm: 0 and "
            "gradient_accumulation_steps: 1."
        },
    )

    fp8: bool = field(
        default=False,
        metadata={
            "help": "Compute most products in eight bits: these are not the same numbers. accelerate converts all "
            "linear layers but the first and the last, which is the LM head, to those of torchao when training starts. "
            "With adapters, the weights of the frozen base are put into eight bits instead, which needs no torchao. "
            "It needs a GPU of compute capability 8.9 or later."
        },
    )
    fp8_recipe: str | None = field(
        default=None,
        metadata={
            "help": "With fp8, and without adapters: a recipe of torchao, by its name. 'tensorwise', the default: one "
            "scale for a tensor, gradients in e5m2. 'rowwise': scales by row, gradients in e4m3. 'rowwise_with_gw_hp': "
            "the same, with the gradients of weights computed in 16 bits."
        },
    )

    def __post_init__(self) -> None:
        checkpointing_fields.settle(self)
        fp8_fields.settle(self)
        if self.use_liger and torch.cuda.is_available() and isinstance(self.accelerator_config, dict | None):
            self.accelerator_config: Any = {"non_blocking": True} | (self.accelerator_config or {})
        super().__post_init__()
        checkpointing_fields.check_options(self)
        in_backward_checks.check_fields(self)
        fp8_fields.apply(self)
        if not isinstance(self.use_liger, bool):
            raise ValueError(f"use_liger is {self.use_liger!r}; expected true or false.")
        if self.eval_predictions not in ("logits", "tokens"):
            raise ValueError(f"eval_predictions is {self.eval_predictions!r}; expected 'logits' or 'tokens'.")
        config: Any = self.liger_config  # None, a dict, or text that was no JSON, which is refused
        check_config(config)
        if self.use_liger and self.use_liger_kernel:
            raise ValueError(
                "use_liger and use_liger_kernel are both true, and each patches the same modules; "
                "remove use_liger_kernel."
            )
