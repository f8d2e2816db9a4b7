"""Compares each patched norm, gate and head by itself in bf16 with the model's own code and with fp32."""

import copy
import inspect
from typing import Any, Protocol

import torch
from torch import nn

from liger_trainer.head.module import output_head
from liger_trainer.patching import apply_liger, remove_liger
from liger_trainer.patching.core.report import OPERATIONS, LigerReport
from liger_trainer.verify.figures import Check, errors
from liger_trainer.verify.observed import Tensors
from liger_trainer.verify.runs import HEAD, in_chunks

OTHERWISE_ROUNDED = 1e-2  # share of a norm's elements that may round differently; a misplaced cast changes a quarter
TIMES_STOCK = 2.0  # the allowed error against fp32, as a multiple of the error of the model's own code
LEAST = 1e-3  # smallest allowed error, relative to a tensor's norm: a quarter of bf16's rounding
FROM_STOCK = 4e-2  # the allowed distance from the model's own result; a wrong gradient at a clamp is off by more
_SCALES = (1.0, 10.0)  # scales of a gate's inputs: a clamp at 7 has no effect at scale 1
_ROWS = 256


class PatchedTrainer(Protocol):
    """The trainer attributes that say which modules are patched. None is written."""

    model: nn.Module
    liger_report: LigerReport | None


def norms(trainer: PatchedTrainer) -> Check:
    """Compare norms by the share of elements that round differently."""
    report, shares = trainer.liger_report, {}
    swapped = {} if report is None else report["rms_norm"].swapped | report["layer_norm"].swapped
    for name in swapped:
        ours = copy.deepcopy(trainer.model.get_submodule(name)).bfloat16()
        if getattr(ours, "weight", None) is None:
            continue
        x = _drawn(_ROWS, ours.weight.shape[-1]).to(ours.weight.device, torch.bfloat16)
        with torch.no_grad():
            try:
                got = ours(x)
            except TypeError:  # a gated norm, which takes two inputs
                continue
            remove_liger(ours)
            shares[name] = float((got != ours(x)).float().mean())
    if not shares:
        return Check("none was swapped")
    where = max(shares, key=lambda name: shares[name])
    return Check(f"share of elements that round differently, most in {where}", shares[where], OTHERWISE_ROUNDED)


def gates(trainer: PatchedTrainer) -> Check:
    """Compare MLPs and experts with a patched gate: output and gradients, for inputs of several scales."""
    report = trainer.liger_report
    swapped = {} if report is None else report["swiglu"].swapped | report["geglu"].swapped | report["experts"].swapped
    errors_of: dict[str, tuple[float, float]] = {}
    for name in swapped:
        ours = copy.deepcopy(trainer.model.get_submodule(name)).bfloat16().requires_grad_()
        stock = copy.deepcopy(ours)
        remove_liger(stock)
        exact = copy.deepcopy(stock).float()
        for scale in _SCALES:
            inputs = _inputs_of(stock, scale)
            if inputs is None:
                continue
            results = [_run(module, inputs) for module in (ours, stock, exact)]
            errors_of |= {f"{part} of {name}": error for part, error in _errors_with_limits(*results).items()}
    return _worst(errors_of, "none was swapped")


def head(model: nn.Module, ids: torch.Tensor) -> Check:
    """Compare the head's loss and the gradients of its weight and input, in several chunks, for labels `ids`."""
    stock = model.bfloat16().train()  # in evaluation mode, logits would be built
    ours, exact = copy.deepcopy(stock), copy.deepcopy(stock).float()
    report = apply_liger(ours, {name: name == HEAD for name in OPERATIONS})
    if not report[HEAD].swapped:
        return Check("the head is not fused")
    states: list[torch.Tensor] = []
    want = _loss_and_gradients(stock, ids, keep=states)
    with in_chunks():
        got = _loss_and_gradients(ours, ids)
    truth = _loss_and_gradients(exact, ids, instead=states[0])
    return _worst(
        {f"{part} of the head": error for part, error in _errors_with_limits(got, want, truth).items()},
        "nothing trains",
    )


def _loss_and_gradients(
    model: Any, ids: torch.Tensor, keep: list[torch.Tensor] | None = None, instead: torch.Tensor | None = None
) -> Tensors:
    """Return the loss of a model and the gradients of its head. `instead` replaces the input of the head, if given."""
    layer: Any = output_head(model)
    entered: list[torch.Tensor] = []

    def enter(module: nn.Module, args: tuple) -> tuple:
        states = args[0] if instead is None else instead.to(args[0])
        entered.append(states.detach().clone().requires_grad_())
        return (entered[-1], *args[1:])

    model.requires_grad_(False)
    layer.weight.requires_grad_()
    layer.register_forward_pre_hook(enter)
    with torch.enable_grad():
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    if keep is not None:
        keep.append(entered[0].detach())
    results = {"loss": loss.detach().double(), "gradient of the weight": layer.weight.grad.double()}
    for states in entered:  # a fused head is called twice; the second call gets the gradient
        if states.grad is not None:
            results["gradient of the input"] = states.grad.double()
    return results


def _inputs_of(module: nn.Module, scale: float) -> tuple[Any, ...] | None:
    """Return inputs for an MLP, or for experts with a router's choices; None for other signatures."""
    device = next(module.parameters()).device
    names = list(inspect.signature(module.forward).parameters)
    linear = next((part for part in module.modules() if hasattr(part, "in_features")), None)
    if len(names) == 1 and linear is not None:
        return (scale * _drawn(_ROWS, int(linear.in_features)).to(device),)
    stacked = [p for p in module.parameters() if p.ndim == 3]
    width = getattr(module, "hidden_dim", getattr(module, "hidden_size", None))
    if len(names) != 3 or not stacked or not isinstance(width, int):
        return None
    number = stacked[0].shape[0]
    chosen = torch.stack([torch.arange(_ROWS) % number, (torch.arange(_ROWS) + 1) % number], 1).to(device)
    return scale * _drawn(_ROWS, width).to(device), chosen, torch.full((_ROWS, 2), 0.5, device=device)


def _run(module: nn.Module, inputs: tuple[Any, ...]) -> Tensors:
    """Run `module` in the dtype of its weights, and return its output and all gradients."""
    dtype = next(module.parameters()).dtype
    cast = [x.to(torch.bfloat16).to(dtype) if x.is_floating_point() else x for x in inputs]
    cast[0].requires_grad_()
    module.zero_grad(set_to_none=True)
    output = module(*cast)
    output = output[0] if isinstance(output, tuple) else output
    upstream = _drawn(*output.shape).to(output.device)
    output.backward(upstream.to(torch.bfloat16).to(output.dtype))
    results = {"output": output.detach().double(), "gradient of the input": cast[0].grad.double()}
    return results | {f"gradient of {n}": p.grad.double() for n, p in module.named_parameters() if p.grad is not None}


def _errors_with_limits(got: Tensors, stock: Tensors, exact: Tensors) -> dict[str, tuple[float, float]]:
    """Return each error of `got` with its limit: the error against fp32, or against `stock` if that is worse."""
    ours = errors(got, exact)
    theirs = errors(stock, exact)
    apart = errors(got, stock)
    errors_of = {}
    for name in ours:
        allowed = max(TIMES_STOCK * theirs[name], LEAST if name != "loss" else 4 * LEAST)
        far = apart[name], FROM_STOCK
        errors_of[name] = max((ours[name], allowed), far, key=lambda one: one[0] / one[1])
    return errors_of


def _worst(errors_of: dict[str, tuple[float, float]], without: str) -> Check:
    if not errors_of:
        return Check(without)
    name = max(errors_of, key=lambda name: errors_of[name][0] / errors_of[name][1])
    return Check(f"most in {name}", *errors_of[name])


def _drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))
