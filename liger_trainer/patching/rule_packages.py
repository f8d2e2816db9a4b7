"""Advises which packages to install for layers that keep a state, and what it costs to train without them.

transformers computes the rules of these layers with a package if one is installed, and otherwise with simple PyTorch
code. It chooses when a modeling file is imported.
"""

import importlib.util
import inspect
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.torch_version import TorchVersion

from liger_trainer.patching.core.binding import own_class
from liger_trainer.varlen.proof.packed_rows import choice_behind

EXTRA = "pip install 'liger-trainer[linear-attention]'"
_WRONG_FROM, _RIGHT_FROM = "3.4", "3.7.1"  # Triton's versions, on Hopper
_HOPPER = 9  # the first number of its compute capability


class _Rule(NamedTuple):
    """A rule that a package computes.

    Attributes:
        name (`str`): Its common name.
        package (`str`): The package to install.
        without (`str`): How to install the package, and what it costs to train without it.
    """

    name: str
    package: str
    without: str


_MAMBA = "mamba-ssm has no wheel and is compiled with nvcc; what it costs to go without was not measured"
# By the name of the package's function. Short convolutions and the steps of generation are left out.
_RULES = {
    "chunk_gated_delta_rule": _Rule(
        "the gated delta rule",
        "flash-linear-attention",
        f"{EXTRA}. PyTorch code is slower; how much was not measured",
    ),
    "chunk_kda": _Rule(
        "Kimi delta attention", "flash-linear-attention", f"{EXTRA}. What it costs to go without was not measured"
    ),
    "mamba_chunk_scan_combined": _Rule("the scan of Mamba 2", "mamba-ssm", _MAMBA),
    "selective_scan_fn": _Rule("the scan of Mamba", "mamba-ssm", _MAMBA),
}
_REFUSED = "chunk_gated_delta_rule"  # flash-linear-attention rejects it with the versions of Triton above


def advice(model: nn.Module) -> list[str]:
    """Return advice on the packages for the rules of `model`, or nothing without a GPU.

    There is one sentence, without its full stop, for each rule that lacks its package or would raise in training.
    """
    if not torch.cuda.is_available():
        return []
    said = []
    for (name, is_there), count in _rules_of(model).items():
        rule = _RULES[name]
        layers = f"{count} layer{'s' if count > 1 else ''}"
        if not is_there:
            said.append(
                f"In {layers}, {rule.name} runs in PyTorch code, since {rule.package} is not installed: {rule.without}"
            )
        elif name == _REFUSED and _is_refused():
            said.append(
                f"In {layers}, {rule.name} will raise in the first backward pass: with Triton {_triton()} on this GPU, "
                f"{rule.package} would compute wrong gradients. Install triton>={_RIGHT_FROM}, or tilelang and nvcc"
            )
    return said


def _rules_of(model: nn.Module) -> Counter[tuple[str, bool]]:
    """Return (name of the package's function, whether the package is there) of the rules of all layers, counted."""
    found: Counter[tuple[str, bool]] = Counter()
    classes: Counter[type] = Counter(map(own_class, model.modules()))
    for cls, count in classes.items():
        for rule in _rules_in(inspect.unwrap(cls.forward)):  # type: ignore[attr-defined]
            found[rule] += count
    return found


def _rules_in(forward: Any) -> set[tuple[str, bool]]:
    code, scope = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
    rules = set()
    for name in () if code is None else code.co_names:
        held = choice_behind(scope.get(name))
        if held is not None and held.get("func_name") in _RULES:
            rules.add((held["func_name"], held["is_new_implementation"]))
    return rules


def _is_refused() -> bool:
    if torch.version.hip is not None or torch.cuda.get_device_capability()[0] != _HOPPER:
        return False
    wrong = TorchVersion(_WRONG_FROM) <= TorchVersion(_triton()) < TorchVersion(_RIGHT_FROM)
    return wrong and importlib.util.find_spec("tilelang") is None


def _triton() -> str:
    import triton  # not installed on macOS and Windows, which have no such GPU

    return triton.__version__
