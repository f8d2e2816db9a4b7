"""`torch.nn` modules over single kernels, for composing a model.

Classes, arguments, parameters and children have the names and order of liger-kernel. Change the import line of a
script, and its checkpoints load. An argument without a counterpart here raises an error that names it, unless it has
its default value.
"""

from typing import Any

import torch
from torch import nn

from ._head_inputs import check_numbers
from .cross_entropy import cross_entropy
from .gates import geglu, swiglu
from .layer_norm import layer_norm
from .linear_head import linear_cross_entropy
from .rms_norm import CASTS, rms_norm

_SILU = ("silu", "swish")
_TANH_GELU = ("gelu_pytorch_tanh", "gelu_new")


def _refuse(owner: nn.Module, remedy: str, **arguments: Any) -> None:
    """Raise ValueError if an argument that only liger-kernel supports is neither None nor False."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise ValueError(f"{type(owner).__name__} has no {name}, got {value!r}. {remedy}")


def _initial(owner: nn.Module, hidden_size: int, init_fn: str) -> torch.Tensor:
    if init_fn not in ("ones", "zeros"):
        raise ValueError(f'{type(owner).__name__} got init_fn={init_fn!r}; expected "ones" or "zeros".')
    return torch.ones(hidden_size) if init_fn == "ones" else torch.zeros(hidden_size)


class LigerRMSNorm(nn.Module):
    """RMSNorm by `liger_triton.rms_norm`. The result has the dtype of the input.

    Args:
        hidden_size (`int`): The last dimension of the input.
        eps (`float`, *optional*, defaults to 1e-6): Added to the mean of the squares.
        offset (`float`, *optional*, defaults to 0.0): Added to the weight.
        casting_mode (`str`, *optional*, defaults to `"llama"`): `"llama"`, `"gemma"` or `"none"`: the `cast` of
            `liger_triton.rms_norm`. With `"none"` the arithmetic is in fp32 too.
        init_fn (`str`, *optional*, defaults to `"ones"`): Initial weight, `"ones"` or `"zeros"`.
        in_place (`bool`, *optional*, defaults to `True`): Accepted for compatibility and ignored. It lets liger-kernel
            overwrite the gradient of the output with the gradient of the input.
        row_mode (*optional*): Only `None`. In liger-kernel it chooses between two kernels.
        elementwise_affine (`bool`, *optional*, defaults to `True`): Whether there is a weight.

    Raises:
        ValueError: An argument is out of its range, or has no counterpart here.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = True,
        row_mode: bool | None = None,
        elementwise_affine: bool = True,
    ):
        super().__init__()
        if row_mode is not None:
            raise ValueError(f"LigerRMSNorm has no row_mode, got {row_mode!r}. There is one kernel here: leave it out.")
        if casting_mode not in CASTS:
            raise ValueError(f"LigerRMSNorm got casting_mode={casting_mode!r}; expected one of {', '.join(CASTS)}.")
        if offset and not elementwise_affine:
            raise ValueError(f"LigerRMSNorm got offset={offset} and no weight to add it to. Leave offset at 0.")
        weight = _initial(self, hidden_size, init_fn)
        self.weight = nn.Parameter(weight) if elementwise_affine else None
        self.elementwise_affine, self.in_place = elementwise_affine, in_place
        self.variance_epsilon = eps
        self.offset = offset
        self.casting_mode = casting_mode

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        y = rms_norm(
            hidden_states, self.weight, self.variance_epsilon, offset=self.offset, cast=self.casting_mode
        )  # in the common dtype of input and weight
        return y.to(hidden_states.dtype)

    def extra_repr(self) -> str:
        size = None if self.weight is None else tuple(self.weight.shape)
        return f"{size}, eps={self.variance_epsilon}, offset={self.offset}, casting_mode={self.casting_mode!r}"


class LigerLayerNorm(nn.Module):
    """LayerNorm by `liger_triton.layer_norm`, with weight and bias.

    Args:
        hidden_size (`int`): The last dimension of the input.
        eps (`float`, *optional*, defaults to 1e-6): Added to the variance.
        bias (`bool`, *optional*, defaults to `False`): Start the bias with normal random numbers instead of zeros, as
            in liger-kernel. There is a trained bias either way.
        init_fn (`str`, *optional*, defaults to `"ones"`): Initial weight, `"ones"` or `"zeros"`.
        impl, mode, backend (*optional*): Only `None`. In liger-kernel they choose between kernels.

    Raises:
        ValueError: `init_fn` is unknown, or an argument has no counterpart here.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        bias: bool = False,
        init_fn: str = "ones",
        impl: str | None = None,
        mode: str | None = None,
        backend: str | None = None,
    ):
        super().__init__()
        _refuse(self, "There is one kernel here: leave it out.", impl=impl, mode=mode, backend=backend)
        self.hidden_size = hidden_size
        self.eps = eps
        self.variance_epsilon = eps
        self.weight = nn.Parameter(_initial(self, hidden_size, init_fn))
        self.bias = nn.Parameter(torch.randn(hidden_size) if bias else torch.zeros(hidden_size))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return layer_norm(hidden_states, self.weight, self.bias, self.variance_epsilon)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}"


class _GatedMLP(nn.Module):
    """down_proj(act(gate_proj(x)) * up_proj(x)) without biases."""

    def __init__(self, config: Any, intermediate_size: int | None = None):
        super().__init__()
        self.config = config
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.intermediate_size if intermediate_size is None else intermediate_size
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)


class LigerSwiGLUMLP(_GatedMLP):
    """down_proj(silu(gate_proj(x)) * up_proj(x)), three linear layers without biases and `liger_triton.swiglu`.

    Args:
        config: Anything with `hidden_size`, `intermediate_size` and a `hidden_act` of `"silu"` or `"swish"`.
        intermediate_size (`int`, *optional*): Takes the place of the one in `config`.

    Raises:
        ValueError: `hidden_act` is another activation.
    """

    def __init__(self, config: Any, intermediate_size: int | None = None):
        super().__init__(config, intermediate_size)
        if config.hidden_act not in _SILU:
            raise ValueError(
                f"LigerSwiGLUMLP got hidden_act={config.hidden_act!r}; expected one of {', '.join(_SILU)}. For a gelu "
                "use LigerGEGLUMLP."
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class LigerGEGLUMLP(_GatedMLP):
    """down_proj(gelu(gate_proj(x)) * up_proj(x)), three linear layers without biases and `liger_triton.geglu`.

    The gelu is the tanh approximation, as in liger-kernel. liger-kernel ignores the activation that `config` names;
    here a config with another one is an error.

    Args:
        config: Anything with `hidden_size` and `intermediate_size`. Its `hidden_activation` or, where that is missing,
            its `hidden_act` is `"gelu_pytorch_tanh"` or `"gelu_new"`, if it has one.

    Raises:
        ValueError: The config names another activation.
    """

    def __init__(self, config: Any):
        super().__init__(config)
        act = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
        if act is not None and act not in _TANH_GELU:
            raise ValueError(
                f"LigerGEGLUMLP got a config with the activation {act!r}, but computes the tanh gelu; expected "
                f"one of {', '.join(_TANH_GELU)}. Set hidden_act='gelu_pytorch_tanh' if that is what was meant."
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(geglu(self.gate_proj(x), self.up_proj(x), approximate="tanh"))


class _Loss(nn.Module):
    """Options that both losses share. `refused` are options of liger-kernel that neither loss supports."""

    def __init__(
        self, class_weights, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, **refused: bool
    ):
        super().__init__()
        check_numbers(reduction, label_smoothing, softcap, 1.0, lse_square_scale)
        self.ignore_index, self.lse_square_scale = ignore_index, lse_square_scale
        self.label_smoothing = label_smoothing
        self.reduction = reduction
        self.softcap = softcap
        _refuse(self, "For class weights use torch.nn.CrossEntropyLoss.", **class_weights)
        _refuse(self, "Compute it from the logits under torch.no_grad(), and leave the argument out.", **refused)

    def options(self) -> dict[str, Any]:
        """Return the options under the names that the functions of `liger_triton` use."""
        names = {"lse_square_scale": "z_loss"}
        known = ("ignore_index", "reduction", "label_smoothing", "softcap", "lse_square_scale")
        return {names.get(name, name): getattr(self, name) for name in known}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options().items())


class LigerCrossEntropyLoss(_Loss):
    """Cross-entropy of logits (T, V) by `liger_triton.cross_entropy`, in fp32.

    The logits are not changed; liger-kernel overwrites them with their gradient.

    Args:
        weight (*optional*): Only `None`: class weights are not supported.
        ignore_index (`int`, *optional*, defaults to -100): Rows with this target do not count.
        lse_square_scale (`float`, *optional*, defaults to 0.0): Adds lse_square_scale * logsumexp**2 to each row.
        label_smoothing (`float`, *optional*, defaults to 0.0): As in `torch.nn.CrossEntropyLoss`.
        reduction (`str`, *optional*, defaults to `"mean"`): `"mean"` over the rows that count, `"sum"` or `"none"`.
        softcap (`float`, *optional*): The logits become softcap * tanh(logits / softcap).
        return_z_loss, return_token_accuracy, return_predicted_tokens (*optional*): Only `False`: it returns the loss.

    Raises:
        ValueError: An argument is out of its range, or has no counterpart here.
    """

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ):
        super().__init__(
            {"weight": weight},
            ignore_index,
            lse_square_scale,
            label_smoothing,
            reduction,
            softcap,
            return_z_loss=return_z_loss,
            return_token_accuracy=return_token_accuracy,
            return_predicted_tokens=return_predicted_tokens,
        )

    def forward(self, _input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(_input, target, **self.options())


class LigerFusedLinearCrossEntropyLoss(_Loss):
    """Cross-entropy of F.linear(_input, lin_weight, bias) by `liger_triton.linear_cross_entropy`, without its logits.

    Args:
        ce_weight (*optional*): Only `None`: class weights are not supported.
        ignore_index, lse_square_scale, label_smoothing, reduction, softcap (*optional*): As in `LigerCrossEntropyLoss`.
        return_z_loss, return_token_accuracy, return_predicted_tokens (*optional*): Only `False`: it returns the loss.
        accum_dtype (`torch.dtype`, *optional*): Dtype of the sum over chunks that is the gradient of `lin_weight`:
            fp32 or the dtype of `lin_weight`. The latter halves the memory of that sum in bf16. Unset: fp32
            (liger-kernel: the dtype of `lin_weight`).
        use_token_scaling (*optional*): Only `False`.

    Raises:
        ValueError: An argument is out of its range, or has no counterpart here; when called, `accum_dtype` is neither
            fp32 nor the dtype of `lin_weight`.
    """

    def __init__(
        self,
        ce_weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ):
        super().__init__(
            {"ce_weight": ce_weight},
            ignore_index,
            lse_square_scale,
            label_smoothing,
            reduction,
            softcap,
            return_z_loss=return_z_loss,
            return_token_accuracy=return_token_accuracy,
            return_predicted_tokens=return_predicted_tokens,
        )
        remedy = "Pass liger_triton.linear_cross_entropy the token_weights that you want."
        _refuse(self, remedy, use_token_scaling=use_token_scaling)
        self.accum_dtype = accum_dtype

    def forward(
        self, lin_weight: torch.Tensor, _input: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self.accum_dtype not in (None, torch.float32, lin_weight.dtype):
            raise ValueError(
                f"accum_dtype is {self.accum_dtype}, lin_weight {lin_weight.dtype}; expected torch.float32, "
                f"{lin_weight.dtype} or None."
            )
        accumulate = "lean" if self.accum_dtype == lin_weight.dtype != torch.float32 else "fp32"
        return linear_cross_entropy(_input, lin_weight, target, bias, accumulate=accumulate, **self.options())
