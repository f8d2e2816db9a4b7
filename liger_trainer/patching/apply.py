"""`apply_liger` and `remove_liger`, which walk over the modules of a model and write the report.

Each pattern that is recognised has a file in this folder, or in `varlen/proof/` if it is about rows without padding.
If one module is enough to recognise it, the file has a `PATTERN`, which `patterns_of` lists. Rotary functions and
backbones need more of the model, so their files have a function that takes the model. All of them return the modules
that they matched, each with the binding for it.
"""

import difflib
from collections.abc import Iterable

from torch import nn

from liger_trainer.fp8 import layers as float8
from liger_trainer.head.calls import install_fused_head
from liger_trainer.head.module import base_model_of, has_fused_head, modules_called_by, output_head
from liger_trainer.head.outputs import HeadOptions
from liger_trainer.lora import layers as lora
from liger_trainer.memory.rebuild import REBUILD_ABOVE_BYTES
from liger_trainer.patching import experts, mlps, norms, rotary, rule_packages
from liger_trainer.patching.core import probe
from liger_trainer.patching.core.binding import Binding, bind, unbind_all
from liger_trainer.patching.core.pattern import PatchMatch, PatchPattern, match_modules
from liger_trainer.patching.core.report import OPERATIONS, LigerReport, OperationReport, ReportEntry
from liger_trainer.varlen import registry
from liger_trainer.varlen.proof import backbone, image_positions, towers

REBUILD_ABOVE_MIB = "rebuild_above_mib"
_HEAD = "fused_linear_cross_entropy"
CONFIG_KEYS = (*OPERATIONS, REBUILD_ABOVE_MIB)  # of `liger_config`; tests check help, docstring and docs by it


def apply_liger(
    model: nn.Module, config: dict | None = None, strict: bool = False, head_options: HeadOptions | None = None
) -> LigerReport:
    """Put fused kernels into this model instance, wherever they are shown to compute what its modules compute.

    Norms, gated MLPs, experts and rotary functions are recognised by their structure. Each original and its
    replacement are run on small random inputs on the CPU, and the replacement is bound to the instance only where the
    values and the gradients agree. Other instances, classes and Python modules stay as they are, with one exception:
    with a fused head, transformers asks `liger_trainer.varlen.registry` for SDPA attention and its masks, and gets the
    same values. A second call replaces what the first one has done.

    Args:
        model (`nn.Module`): A model of transformers, wrapped by PEFT or not, on any device.
        config (`dict`, *optional*): Switches single operations off, for example `{"rope": False}`. The keys are
            `rms_norm`, `layer_norm`, `rope`, `swiglu`, `geglu`, `experts`, `lora`, `float8`,
            `fused_linear_cross_entropy` and `varlen_attention`, which computes nothing for padding. A further key is
            `rebuild_above_mib`, 16 by default: the backward pass computes outputs of norms and gates again that are
            larger than so many MiB.
        strict (`bool`, *optional*, defaults to `False`): Raise if something that is recognised keeps its own code, or
            if nothing is recognised. The model is then unpatched.
        head_options (`HeadOptions`, *optional*): Temperature, precision and outputs of calls with `fused_lm_head=True`,
            which TRL's trainers make. Unset: the defaults of `HeadOptions`.

    Returns:
        `LigerReport`: What was found, swapped and skipped, and why.

    Raises:
        ValueError: `config` is not valid, or `model` is not a `torch.nn.Module`; with `strict`, something was not
            swapped, and the message has names and reasons.
    """
    wanted = check_config(config)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model is a {type(model).__name__}; expected a torch.nn.Module, such as a transformers model."
        )
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    inner, head = base_model_of(model), output_head(model)
    report = LigerReport(type(model).__name__)
    for name, operation in report.operations.items():
        operation.enabled = bool(wanted[name])
    attends = report[backbone.OPERATION]
    attends.enabled = attends.enabled and report[_HEAD].enabled  # its forward sees the labels
    unbind_all(model)
    patterns = patterns_of(int(wanted[REBUILD_ABOVE_MIB] * 2**20))
    of_head = [] if head is None else [part for part in modules_called_by(head) if "base_layer" in part._modules]
    with probe.isolated():
        # LoRA on the head is in the fused loss
        _swap(match_modules(patterns, [found for found in model.named_modules() if found[1] not in of_head]), report)
        if report[rotary.OPERATION].enabled:
            _swap(rotary.find_attentions(model), report)
    if report[_HEAD].enabled and head is not None:
        _swap_head(model, head, head_options, report)
    if attends.enabled:
        with probe.isolated():
            _swap(backbone.find_backbone(inner), report)
            _swap(match_modules((*image_positions.PATTERNS, towers.PATTERN), model.named_modules()), report)
    report.advice = rule_packages.advice(model)
    if strict and (report.skipped or not any(operation.swapped for operation in report.operations.values())):
        remove_liger(model)
        problem = "not everything recognised could be swapped" if report.skipped else "nothing was recognised"
        raise ValueError(f"strict=True, but in {report.model_name} {problem}.\n{report}")
    return report


def patterns_of(rebuild_above: int) -> tuple[PatchPattern, ...]:
    """Return the patterns of the modules that are swapped.

    A result of more than `rebuild_above` bytes is computed again backward.
    """
    return (
        norms.pattern(rebuild_above),
        mlps.pattern(rebuild_above),
        experts.PATTERN,
        lora.PATTERN,
        experts.WRAPPER_PATTERN,
        float8.PATTERN,
    )


def remove_liger(model: nn.Module) -> None:
    """Give every module of `model` its own code back; the `__dict__` of each is as before `apply_liger`.

    When no model in the process is patched any more, transformers' registries of attention and masks have its own
    functions again.
    """
    unbind_all(getattr(model, "_orig_mod", model))
    registry.release(has_fused_head)


def swap_converted(model: nn.Module, report: LigerReport) -> int:
    """Swap the fp8 layers that accelerate has put into a patched model since. Returns how many it has found.

    They are added to `report`, which `apply_liger` has returned.
    """
    operation = report[float8.OPERATION]
    before = operation.found
    modules = getattr(model, "_orig_mod", model).named_modules()
    with probe.isolated():
        _swap(
            match_modules(
                (float8.PATTERN,), [(name, module) for name, module in modules if Binding.of(module) is None]
            ),
            report,
        )
    return operation.found - before


def _swap(modules: Iterable[PatchMatch], report: LigerReport) -> None:
    """Bind to modules what is to be bound, and note in the report which were swapped, and why others were not."""
    not_listed = OperationReport()
    for operation, name, module, text, binding, is_rare in modules:
        part = report.operations.get(operation, not_listed)
        if not part.enabled:
            continue
        if binding is None:
            (part.unsuited if is_rare else part.skipped)[name] = text
        else:
            binding.report_entry = ReportEntry(part, name)
            bind(module, binding)
            part.swapped[name] = text


def _swap_head(model: nn.Module, head: nn.Module, options: HeadOptions | None, report: LigerReport) -> None:
    """Install the fused head in `model`."""
    part = report[_HEAD]
    name = next((name for name, module in model.named_modules() if module is head), type(head).__name__)
    reason = install_fused_head(model, options, ReportEntry(part, name))
    if reason is None:
        part.swapped[name] = "intercepted at the head"
    else:
        part.skipped[name] = reason


def check_config(config: dict | None) -> dict[str, bool | float]:
    """Check a `liger_config` and fill in its defaults.

    Returns every operation and whether it is on, and `rebuild_above_mib`.

    Raises:
        ValueError: A key is unknown, and the message names the nearest known one; or a value has another type.
    """
    if config is not None and not isinstance(config, dict):
        raise ValueError(f"liger_config is {config!r}; expected a dict such as {{'rope': False}}, or None.")
    for key, value in (config or {}).items():
        if key not in CONFIG_KEYS:
            known = ", ".join(CONFIG_KEYS)
            near = difflib.get_close_matches(str(key), CONFIG_KEYS, n=1, cutoff=0.0)[0]
            raise ValueError(f"liger_config has the unknown key {key!r}; did you mean {near!r}? Known keys: {known}.")
        if key == REBUILD_ABOVE_MIB:
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise ValueError(f"liger_config[{key!r}] is {value!r}; expected a number of MiB, 0 or more.")
        elif not isinstance(value, bool):
            raise ValueError(f"liger_config[{key!r}] is {value!r}; expected True or False.")
    return dict.fromkeys(OPERATIONS, True) | {REBUILD_ABOVE_MIB: REBUILD_ABOVE_BYTES / 2**20} | (config or {})
