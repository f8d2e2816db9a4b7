"""`apply_liger` and `remove_liger`, which walk over the modules of a model and write the report.

Each pattern that is recognised has a file in this folder. Where it is one kind of module, the file has a `KIND`, which
is listed in `KINDS` here. Rotary functions and rows without padding need more of the model than one module, so their
files have a function `swap(model, report, wanted)`.
"""

import difflib

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from liger_trainer.fp8 import layers as float8
from liger_trainer.head.calls import install_fused_head, remove_fused_head
from liger_trainer.head.find import output_head
from liger_trainer.head.module import modules_called_by
from liger_trainer.head.outputs import HeadOptions
from liger_trainer.instance import probe
from liger_trainer.instance.binding import Binding, bind, unbind
from liger_trainer.instance.guards import Guards, NotProven
from liger_trainer.instance.kind import Kind, Proven
from liger_trainer.instance.report import OPERATIONS, LigerReport, Place
from liger_trainer.lora import layers as lora
from liger_trainer.memory.rebuild import REBUILD_ABOVE_BYTES
from liger_trainer.patching import experts, mlps, norms, rotary, towers, varlen

KINDS: tuple[Kind, ...] = (
    norms.KIND, mlps.KIND, experts.KIND, lora.KIND, experts.WRAPPER_KIND, float8.KIND,
)  # fmt: skip
REBUILD_ABOVE_MIB = "rebuild_above_mib"
_KNOWN = (*OPERATIONS, REBUILD_ABOVE_MIB)
_Proof = tuple[Proven | None, Guards | None, str | None]


def apply_liger(
    model: nn.Module, config: dict | None = None, strict: bool = False, head_options: HeadOptions | None = None
) -> LigerReport:
    """Put fused kernels into this model instance, wherever they are shown to compute what its modules compute.

    Norms, gated MLPs, experts and rotary functions are nominated by their structure. Each original and its
    replacement are run on small random inputs on the CPU, and the replacement is bound to the instance only where the
    values and the gradients agree. Other instances, classes and Python modules stay as they are, with one exception:
    with a fused head, transformers asks `liger_trainer.head.masks` for SDPA attention and its masks, and gets the same
    values. A second call replaces what the first one has done.

    Args:
        model (`nn.Module`): A model of transformers, wrapped by PEFT or not, on any device.
        config (`dict`, *optional*): Switches single operations off, for example `{"rope": False}`. The keys are
            `rms_norm`, `layer_norm`, `rope`, `swiglu`, `geglu`, `lora`, `float8`, `fused_linear_cross_entropy` and
            `varlen_attention`, with which nothing is computed for padding. A further key is `rebuild_above_mib`, 16 by
            default: outputs of norms and gates that are larger than so many MiB are not kept for the backward pass,
            which computes them again.
        strict (`bool`, *optional*, defaults to `False`): Raise if something that is recognised keeps its own code, or
            if nothing is recognised. The model is then unpatched.
        head_options (`HeadOptions`, *optional*): Temperature, precision and outputs of calls with `fused_lm_head=True`,
            which TRL's trainers make. Unset: the defaults of `HeadOptions`.

    Returns:
        `LigerReport`: What was found, swapped and skipped, and why.

    Raises:
        ValueError: `config` is not valid, or `model` is no `torch.nn.Module`; with `strict`, something was not swapped,
            and the message has names and reasons.
    """
    wanted = check_config(config)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model is a {type(model).__name__}; expected a torch.nn.Module, such as a transformers model."
        )
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    report = LigerReport(type(model).__name__)
    for name, operation in report.operations.items():
        operation.enabled = bool(wanted[name])
    _unbind_all(model)
    with probe.isolated():
        _swap_kinds(model, report, wanted)
        rotary.swap(model, report, wanted)
    _swap_head(model, report, wanted, head_options)
    with probe.isolated():
        varlen.swap(model, report, wanted)
        towers.swap(model, report, wanted)
    if strict and (report.skipped or not any(operation.swapped for operation in report.operations.values())):
        remove_liger(model)
        problem = "not everything recognised could be swapped" if report.skipped else "nothing was recognised"
        raise ValueError(f"strict=True, but in {report.model_name} {problem}.\n{report}")
    return report


def remove_liger(model: nn.Module) -> None:
    """Give every module of `model` its own code back; the `__dict__` of each is as before `apply_liger`."""
    model = getattr(model, "_orig_mod", model)
    _unbind_all(model)
    varlen.remove(model)
    remove_fused_head(model)


def _unbind_all(model: nn.Module) -> None:
    towers.remove(model)  # bound around the others
    for module in model.modules():
        unbind(module, Binding)


def swap_converted(model: nn.Module, report: LigerReport, config: dict | None = None) -> int:
    """Swap the fp8 layers that accelerate has put into a patched model since. Returns how many it has found.

    `report` is what `apply_liger` has returned, to which they are added, and `config` its `config`.
    """
    before = report[float8.OPERATION].found
    with probe.isolated():
        _swap_kinds(getattr(model, "_orig_mod", model), report, check_config(config), (float8.KIND,), only_new=True)
    return report[float8.OPERATION].found - before


def _swap_kinds(
    model: nn.Module,
    report: LigerReport,
    wanted: dict[str, bool | float],
    kinds: tuple[Kind, ...] = KINDS,
    only_new: bool = False,
) -> None:
    """Swap the modules of `kinds`, or with `only_new` the unswapped ones. Equal fingerprints share one proof."""
    proofs: dict[tuple, _Proof] = {}
    rebuild_above = int(wanted[REBUILD_ABOVE_MIB] * 2**20)
    output = output_head(model)
    head_modules = [] if output is None else modules_called_by(output)  # their LoRA is in the fused loss
    for name, module in model.named_modules():
        for kind in kinds:
            if not kind.nominated(module) or (kind is lora.KIND and module in head_modules):
                continue
            if only_new and Binding.of(module) is not None:
                continue
            slot, reason = probe.slot_of(module)
            proven = guards = None
            if reason is None:
                key = (kind, probe.fingerprint(module))
                if key not in proofs:
                    proofs[key] = prove_module(kind, module)
                proven, guards, reason = proofs[key]
            operation = report[proven.operation if proven else kind.guessed_operation(module)]
            if not operation.enabled:
                continue
            if proven and guards:
                reason = guards.broken(module) or kind.why_not(module)
            if reason is None:
                method = kind.build(proven, rebuild_above) if kind.rebuilds else kind.build(proven)
                bind(module, kind.binding(method, slot, Place(operation, name), guards))
                operation.swapped[name] = str(proven)
            else:
                operation.skipped[name] = reason


def _swap_head(
    model: nn.Module, report: LigerReport, wanted: dict[str, bool | float], options: HeadOptions | None = None
) -> None:
    """Install the fused head in `model`, or remove it where `wanted`, the checked config, switches it off."""
    if not wanted["fused_linear_cross_entropy"]:
        remove_fused_head(model)
        return
    head = output_head(model)
    if head is None:
        return
    operation = report["fused_linear_cross_entropy"]
    name = next((name for name, module in model.named_modules() if module is head), type(head).__name__)
    reason = install_fused_head(model, options, Place(operation, name))
    if reason is None:
        operation.swapped[name] = "captured at the head"
    else:
        operation.skipped[name] = reason


def prove_module(kind: Kind, module: nn.Module) -> _Proof:
    """(what the module was proven to compute, the guards of the proof, None), or why there is none."""
    if any(is_parametrized(part) for part in module.modules()):
        return None, None, "it has a parametrisation, which may count how often a weight is read"
    try:
        guards = kind.guards(module)
    except NotProven as error:
        return None, None, str(error)
    proven, reason = probe.attempt(kind.prove, module)
    return proven, guards, reason


def check_config(config: dict | None) -> dict[str, bool | float]:
    """Check a `liger_config` and fill in its defaults.

    Returns every operation and whether it is on, and `rebuild_above_mib`. ValueError for an unknown key, whose message
    names the nearest known one, and for a value of another type.
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
    return dict.fromkeys(OPERATIONS, True) | {REBUILD_ABOVE_MIB: REBUILD_ABOVE_BYTES / 2**20} | (config or {})
