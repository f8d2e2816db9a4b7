"""`apply_liger` and `remove_liger`: what is looked at, in which order, and what the report says.

A pattern is a file of this folder. One that swaps modules of a kind has a `KIND`, and a line in `KINDS` here; one that
needs more of the model, as rotary functions and the LM head do, has a function `swap(model, report, wanted)`.
"""

from torch import nn

from liger_trainer.head.install import remove_fused_head
from liger_trainer.instance.binding import KEY, bind, unbind
from liger_trainer.instance.hooks import seen_by_others
from liger_trainer.instance.report import LigerReport, Place
from liger_trainer.patching import experts, head, mlps, norms, probe, rotary
from liger_trainer.patching.config import REBUILD_ABOVE_MIB, check_config

KINDS = (norms.KIND, mlps.KIND, experts.KIND)


def apply_liger(model: nn.Module, config: dict | None = None, strict: bool = False, head_options=None) -> LigerReport:
    """Put fused kernels into this model instance, wherever they are shown to compute what its modules compute.

    Norms, gated MLPs, expert gates and rotary functions are nominated by structure. Each original and its replacement
    are run on small random inputs on the CPU, values and gradients; only where they agree is the replacement bound to
    the instance. Other instances, classes and modules of Python stay as they are; with a fused head, transformers asks
    `liger_trainer.head.masks` for its masks, and gets the same. A second call starts afresh.

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
        _swap_kinds(model, report, wanted)
        rotary.swap(model, report, wanted)
    head.swap(model, report, wanted, head_options)
    if strict and (report.skipped or not any(part.swapped for part in report.operations.values())):
        remove_liger(model)
        what = "not everything recognised could be swapped" if report.skipped else "nothing was recognised"
        raise ValueError(f"strict=True, but in {report.model_name} {what}.\n{report}")
    return report


def remove_liger(model: nn.Module) -> None:
    """Give every module of `model` its own code back; the `__dict__` of each is as before `apply_liger`."""
    model = getattr(model, "_orig_mod", model)
    _unbind_all(model)
    remove_fused_head(model)


def _unbind_all(model):
    for module in model.modules():
        unbind(module, KEY)


def _swap_kinds(model, report, wanted):
    """The modules of `KINDS`. One proof for each fingerprint."""
    proofs, rebuild_above = {}, int(wanted[REBUILD_ABOVE_MIB] * 2**20)
    for name, module in model.named_modules():
        for kind in KINDS:
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
