"""`apply_liger` and `remove_liger`: which modules are looked at, what is bound to them, and what the report says."""

import difflib
from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from . import mlps, norms, probe, rebuild, rotary
from .binding import KEY, bind, unbind
from .hooks import seen_by_others
from .report import OPERATIONS, LigerReport, Place

REBUILD_ABOVE_MIB = "rebuild_above_mib"
_KNOWN = (*OPERATIONS, REBUILD_ABOVE_MIB)


def check_config(config: dict | None) -> dict[str, bool | float]:
    """Every operation and whether it is on, and `rebuild_above_mib`.

    Args:
        config (`dict`, *optional*): Operation -> bool, `rebuild_above_mib` -> number; what it leaves out has its
            default.

    Raises:
        ValueError: `config` is no dict, has an unknown key (the nearest known one is named), or a value not a bool (of
            `rebuild_above_mib`: not a number of 0 or more).
    """
    if config is not None and not isinstance(config, dict):
        raise ValueError(f"liger_config is {config!r}; expected a dict such as {{'rope': False}}, or None.")
    for key, value in (config or {}).items():
        if key not in _KNOWN:
            near = difflib.get_close_matches(str(key), _KNOWN, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"liger_config has the unknown key {key!r}; did you mean {near!r}? Known keys: {', '.join(_KNOWN)}."
            )
        if key == REBUILD_ABOVE_MIB:
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise ValueError(f"liger_config[{key!r}] is {value!r}; expected a number of MiB, 0 or more.")
        elif not isinstance(value, bool):
            raise ValueError(f"liger_config[{key!r}] is {value!r}; expected True or False.")
    return {name: True for name in OPERATIONS} | {REBUILD_ABOVE_MIB: rebuild.ABOVE / 2**20} | (config or {})


def apply_liger(
    model: nn.Module, config: dict | None = None, strict: bool = False, head_options=None
) -> LigerReport:
    """Put fused kernels into this model instance, wherever they are shown to compute what its modules compute.

    Norms, gated MLPs, expert gates and rotary functions are nominated by structure. Each original and its replacement
    are run on small random inputs on the CPU, values and gradients; only where they agree is the replacement bound to
    the instance. Other instances, classes and modules of Python stay as they are; with a fused head, transformers asks
    `liger_trainer.causal_mask` for its masks, and gets the same. A second call starts afresh.

    Args:
        model (`nn.Module`): A model of transformers, wrapped by PEFT or not, on any device.
        config (`dict`, *optional*): Switches single operations off, for example `{"rope": False}`. Keys: `rms_norm`,
            `layer_norm`, `rope`, `swiglu`, `geglu`, `fused_linear_cross_entropy`. And `rebuild_above_mib`, 16 by
            default: outputs of norms and gates of more MiB are computed again in the backward pass instead of kept.
        strict (`bool`, *optional*, defaults to `False`): Raise where something recognised keeps its own code, or where
            nothing is recognised. The model is then unpatched.
        head_options (`HeadOptions`, *optional*): Temperature, precision and outputs of calls with `fused_lm_head=True`,
            which TRL's trainers make. Unset: the defaults of `HeadOptions`.

    Returns:
        `LigerReport`: What was found, swapped and skipped, and why.

    Raises:
        ValueError: A bad `config`; with `strict`, something was not swapped (the message has names and reasons).
    """
    wanted = check_config(config)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model is a {type(model).__name__}; expected a torch.nn.Module, such as a transformers model."
        )
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    report = LigerReport(type(model).__name__)
    for name, part in report.operations.items():
        part.enabled = wanted[name]
    _unbind_all(model)
    with probe.isolated():
        _swap_modules(model, report, int(wanted[REBUILD_ABOVE_MIB] * 2**20))
        if wanted["rope"]:
            rotary.swap(model, report["rope"])
    _swap_head(model, wanted["fused_linear_cross_entropy"], head_options, report)
    if strict and (report.skipped or not any(part.swapped for part in report.operations.values())):
        remove_liger(model)
        what = "not everything recognised could be swapped" if report.skipped else "nothing was recognised"
        raise ValueError(f"strict=True, but in {report.model_name} {what}.\n{report}")
    return report


def remove_liger(model: nn.Module) -> None:
    """Give every module of `model` its own code back; the `__dict__` of each is as before `apply_liger`."""
    from liger_trainer.fused_head import remove_fused_head

    model = getattr(model, "_orig_mod", model)
    _unbind_all(model)
    remove_fused_head(model)


def _unbind_all(model):
    for module in model.modules():
        unbind(module, KEY)


def _swap_modules(model, report, rebuild_above):
    """Norms, MLPs and expert gates. One proof for each fingerprint."""
    proofs = {}
    for name, module in model.named_modules():
        for kind in _KINDS:
            if not kind.nominated(module):
                continue
            slot, reason = (kind.method, None) if kind.method else probe.slot_of(module)
            proven = None
            if reason is None:
                key = (kind, probe.fingerprint(module))
                if key not in proofs:
                    proofs[key] = probe.attempt(kind.prove, module)
                proven, reason = proofs[key]
            part = report[proven.operation if proven else kind.guessed_operation(module)]
            if not part.enabled:
                continue
            if proven:
                reason = seen_by_others(module, proven.left_out)
            if reason is None:
                bind(module, KEY, kind.build(proven, rebuild_above), slot, place=Place(part, name))
                part.swapped[name] = str(proven)
            else:
                part.skipped[name] = reason


class _Kind(NamedTuple):
    """How one kind of module is found, proven and replaced; `method` is what is replaced if it is not the forward."""

    nominated: Callable
    prove: Callable
    build: Callable
    guessed_operation: Callable
    method: str | None = None


_KINDS = (
    _Kind(norms.nominated, norms.prove, norms.build, norms.guessed_operation),
    _Kind(mlps.nominated, mlps.prove, mlps.build, mlps.guessed_operation),
    _Kind(mlps.has_expert_gate, mlps.prove_experts, mlps.build_experts, mlps.guessed_operation, "_apply_gate"),
)


def _swap_head(model, wanted, options, report):
    from liger_trainer.fused_head import install_fused_head, output_head, remove_fused_head

    part = report["fused_linear_cross_entropy"]
    if not wanted:
        remove_fused_head(model)
        return
    head = output_head(model)
    if head is None:
        return
    name = next((name for name, module in model.named_modules() if module is head), type(head).__name__)
    reason = install_fused_head(model, options, Place(part, name))
    if reason is None:
        part.swapped[name] = "captured at the head"
    else:
        part.skipped[name] = reason
