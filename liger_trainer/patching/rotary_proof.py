"""Finds which rotation a rotary function computes, by running it, and how the numbers of a cos are laid out.

Our kernel reads one angle for each pair of numbers. Most rotary functions read two, which are equal because of how cos
is made: as `[a, b, a, b]` ("half") or as `[a, a, b, b]` ("interleaved"). So a proof says which layout cos must have,
and `layouts_of` runs the module that makes cos, to see which layout it has.
"""

import inspect
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from liger_trainer.patching.core import probe
from liger_triton import rope

COMPLEX = ("freqs_cis", "freqs_ci")  # names of a parameter that is cos + i sin, in one complex tensor
ANGLES = 8  # numbers in a row of cos, which make four pairs: all layouts of a single pair are the same
# all different, so that no wrong broadcast fits
HEADS = 4
KV_HEADS = 2
BATCH = 3
TOKENS = 5
# The kinds of call that are tried: (dimensions of q, dimensions of cos, unsqueeze_dim).
CALLS = ((4, 3, 1), (4, 3, 2), (3, 2, 1), (3, 2, 0), (4, 2, 0))
# The sizes of a head that are tried, by how they compare with the numbers in a row of cos.
HEAD_SIZES = {"equal": ANGLES, "between": ANGLES + 4, "double": 2 * ANGLES, "over": 2 * ANGLES + 4}

Call = tuple[int, int, int]
Dtypes = tuple[torch.dtype, torch.dtype]  # of q and k, and of cos and sin
Case = tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, int]  # [q] or [q, k], cos, sin, unsqueeze_dim


@dataclass(frozen=True)
class Geometry:
    """A rotation: the numbers of a head that each angle turns.

    `sign` is 1.0, or -1.0 for a rotation by the negative angles. The other fields are arguments of `liger_triton.rope`.
    """

    interleaved: bool
    out_interleaved: bool
    cos_layout: str
    rotate_last: bool
    sign: float = 1.0
    cast: str = "promote"

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of `liger_triton.rope`."""
        names = ("interleaved", "out_interleaved", "cos_layout", "rotate_last", "cast")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        text = "interleaved" if self.interleaved else "half-rotate"
        text += " to half" if self.interleaved and not self.out_interleaved else ""
        text += {"half": "", "interleaved": ", cos interleaved", "single": ", one cos per pair"}[self.cos_layout]
        text += ", last dims" if self.rotate_last else ""
        text += ", negative angle" if self.sign < 0 else ""
        return text + (", fp32 inside" if self.cast == "input" else "")


GEOMETRIES = tuple(
    Geometry(interleaved, out_interleaved, layout, last, sign)
    for sign, last, (interleaved, out_interleaved), layout in itertools.product(
        (1.0, -1.0),
        (False, True),
        ((False, False), (True, True), (True, False), (False, True)),
        ("half", "interleaved", "single"),
    )
)


@dataclass(frozen=True)
class Signature:
    """The parameters of a rotary function.

    Attributes:
        names (`tuple`): The names of all parameters, in order.
        turned (`tuple`): The names of the one or two tensors that it turns.
        cos (`str` or `None`): The name of cos; None where `sin` names one complex tensor.
        sin (`str`): The name of sin, or of the complex tensor.
        unsqueeze_dim (`int` or `None`): The default of the parameter of this name; None without such a parameter.
    """

    names: tuple[str, ...]
    turned: tuple[str, ...]
    cos: str | None
    sin: str
    unsqueeze_dim: int | None

    @classmethod
    def of(cls, function: Callable) -> "Signature | None":
        """Return the signature of `function`, or None if no rotary function has such a signature."""
        forward = function.forward if isinstance(function, nn.Module) else function  # the library `kernels` has modules
        try:
            parameters = inspect.signature(forward).parameters
        except (TypeError, ValueError):
            return None
        names = tuple(n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD)
        places = [names.index(n) for n in ("cos", "sin", *COMPLEX) if n in names]
        if not places or not 1 <= min(places) <= 2 or len(places) != (1 if names[places[0]] in COMPLEX else 2):
            return None
        default = parameters["unsqueeze_dim"].default if "unsqueeze_dim" in names else None
        cos, sin = ("cos", "sin") if len(places) == 2 else (None, names[places[0]])
        return cls(names, names[: min(places)], cos, sin, default)

    def call(self, function: Callable, case: Case) -> tuple[torch.Tensor, ...]:
        """Call `function` with the tensors of `case` under its own names, and return its results as a tuple."""
        turned, cos, sin, unsqueeze_dim = case
        arguments = dict(zip(self.turned, turned, strict=True))
        if self.cos is None:
            arguments[self.sin] = torch.complex(cos.float(), sin.float())
        else:
            arguments |= {self.cos: cos, self.sin: sin}
        if self.unsqueeze_dim is not None:
            arguments["unsqueeze_dim"] = unsqueeze_dim
        result = function(**arguments)
        return (result,) if len(turned) == 1 else tuple(result)


@dataclass(frozen=True)
class Rotation:
    """The rotation that a function computes in one kind of call, for one size of head.

    Attributes:
        call (`tuple`): One of `CALLS`.
        size (`str`): A key of `HEAD_SIZES`.
        geometry (`Geometry`): The rotation.
        layout (`str` or `None`): The layout that cos must have; None where any will do.
    """

    call: Call
    size: str
    geometry: Geometry
    layout: str | None


def prove(function: Callable) -> tuple[tuple[Rotation, ...], str | None]:
    """Return (a proof for each kind of call and size of head that our kernel takes, None), or ((), why none holds)."""
    signature = Signature.of(function)
    label = getattr(function, "__name__", type(function).__name__)
    if signature is None:
        return (), f"{label} has another signature than (q, k, cos, sin), (x, cos, sin) or (q, k, freqs_cis)"
    proven: list[Rotation] = []
    for call in CALLS:
        if signature.unsqueeze_dim is None and any(p.call[:2] == call[:2] for p in proven):
            continue  # the function itself fixes the place of the heads, which has been found
        for size in HEAD_SIZES:
            likely = [replace(p.geometry, cast="promote") for p in proven]
            proof = _prove_call(function, signature, call, size, dict.fromkeys([*likely, *GEOMETRIES]))
            proven += [proof] if proof else []
    return tuple(proven), None if proven else f"{label} computes none of the known rotations"


def _case(
    signature: Signature, call: Call, size: str, layout: str | None, dtypes: Dtypes = (torch.float32, torch.float32)
) -> Case:
    """Random tensors. Where `layout` is None, all numbers of cos differ."""
    q_dims, cos_dims, unsqueeze_dim = call
    source = probe.generator()
    head_size = HEAD_SIZES[size]
    shape = [BATCH, HEADS, TOKENS, head_size] if unsqueeze_dim != 2 else [BATCH, TOKENS, HEADS, head_size]
    if q_dims == 3:
        shape = [HEADS, TOKENS, head_size] if unsqueeze_dim == 0 else [TOKENS, HEADS, head_size]
    heads_dim = shape.index(HEADS)
    turned = []
    for heads in (HEADS, KV_HEADS)[: len(signature.turned)]:
        shape[heads_dim] = heads
        turned.append((10 * probe.randn(shape, source)).to(dtypes[0]))
    angles = []
    for _ in range(2):
        angle = probe.randn([*([BATCH] if cos_dims == 3 else []), TOKENS, ANGLES], source)
        if layout == "half":
            angle[..., ANGLES // 2 :] = angle[..., : ANGLES // 2]
        elif layout == "interleaved":
            angle[..., 1::2] = angle[..., 0::2]
        angles.append(angle.to(dtypes[1]))
    cos, sin = angles
    return turned, cos, sin, unsqueeze_dim


def _prove_call(
    function: Callable, signature: Signature, call: Call, size: str, candidates: Iterable[Geometry]
) -> Rotation | None:
    """Return the proof for one kind of call and size of head, or None.

    Layouts that demand less of cos are tried first.
    """
    for layout in (None, "half", "interleaved"):
        case = _case(signature, call, size, layout)
        try:
            want = signature.call(function, case)
        except (RuntimeError, IndexError, TypeError, ValueError):
            return None  # the function does not take this kind of call
        if len(want) != len(case[0]) or any(not isinstance(w, torch.Tensor) for w in want):
            return None
        for geometry in candidates:
            if layout in (None, geometry.cos_layout) and _matches(geometry, case, want):
                with_cast = _with_cast(function, signature, call, size, layout, geometry)
                return None if with_cast is None else Rotation(call, size, with_cast, layout)
    return None


def _turn(geometry: Geometry, case: Case) -> tuple[torch.Tensor, ...]:
    """Turn q (and k) by our kernel."""
    (q, *k), cos, sin, unsqueeze_dim = case
    turned = rope(q, k[0] if k else None, cos, sin * geometry.sign, unsqueeze_dim=unsqueeze_dim, **geometry.arguments())
    return turned[: 1 + len(k)]


def _matches(geometry: Geometry, case: Case, want: tuple[torch.Tensor, ...], rtol: float = probe.FP32_RTOL) -> bool:
    """Return whether our kernel with this geometry gives what is wanted."""
    try:
        got = _turn(geometry, case)
    except ValueError:  # this geometry does not fit the shapes
        return False
    return all(probe.allclose_to_max(g, w, rtol) for g, w in zip(got, want, strict=True))


def _with_cast(
    function: Callable, signature: Signature, call: Call, size: str, layout: str | None, geometry: Geometry
) -> Geometry | None:
    """Return the geometry with the cast that gives the dtypes of `function` in 16 bit.

    None if gradients or dtypes differ.
    """
    case = _case(signature, call, size, layout)
    leaves = [t.requires_grad_() for t in case[0]]
    grads = []
    for result in (_turn(geometry, case), signature.call(function, case)):
        dy = [probe.randn(r.shape, probe.generator()) for r in result]
        grads.append(torch.autograd.grad(result, leaves, dy))
    if not all(probe.allclose_to_max(g, w, probe.FP32_RTOL) for g, w in zip(*grads, strict=True)):
        return None
    half, full = torch.bfloat16, torch.float32
    for cast in ("promote", "input"):
        candidate = replace(geometry, cast=cast)
        for dtypes in ((half, half), (half, full), (full, half)):
            case = _case(signature, call, size, layout, dtypes)
            want = signature.call(function, case)
            if signature.cos is None:
                case = (case[0], case[1].float(), case[2].float(), case[3])
            if not _matches(candidate, case, want, rtol=0.03):
                break
        else:
            return candidate
    return None


def makes_angles(module: nn.Module) -> bool:
    """Return whether `module` has "rotary" in its class's name and no parameters, as a rotary embedding."""
    return "rotary" in type(module).__name__.lower() and not any(True for _ in module.parameters())


def layouts_of(module: nn.Module) -> frozenset[tuple[int, str]]:
    """Return (numbers in a row, layout) of every cos that a rotary embedding makes; empty where it cannot be run here.

    The layout is `"half"`, `"interleaved"`, or `"other"` where cos has neither.
    """
    source = probe.generator()
    types = getattr(module, "layer_types", None) or getattr(getattr(module, "config", None), "layer_types", None) or ()
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    position_ids = torch.randint(1, 50, (3, 1, 6), generator=source)  # for each of three axes of multimodal positions
    found: set[tuple[int, str]] = set()
    layer_types = sorted(set(types)) if any(p.name == "layer_type" for p in parameters) else [None]
    for layer_type, ids in itertools.product(layer_types, (position_ids[0], position_ids)):
        arguments = {"position_ids": ids, "layer_type": layer_type}
        given = {}
        for p in parameters:
            if p.name in arguments:
                given[p.name] = arguments[p.name]
            elif p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD:
                given[p.name] = torch.zeros(1, 6, 8, dtype=torch.float32)
        try:
            made = type(module).forward(probe.clone(module, source), **given)
        except Exception:  # noqa: BLE001, S112 - it takes other positions or cannot run at all, which tells us nothing
            continue
        if isinstance(made, tuple) and len(made) == 2 and all(isinstance(t, torch.Tensor) for t in made):
            found |= {(made[0].shape[-1], layout) for layout in _layouts(*made)}
    return frozenset(found)


def _layouts(cos: torch.Tensor, sin: torch.Tensor) -> list[str]:
    """Return the layouts that cos and sin have.

    Both of them where all numbers of a row are equal, none without rows.
    """
    half = cos.shape[-1] // 2
    if cos.shape[:-1].numel() == 0:  # as of a rotary width of 0 for positions of three axes, in transformers 5.17
        return []
    if cos.shape[-1] % 2 or cos.shape[-1] == 0 or cos.shape != sin.shape:
        return ["other"]
    layouts = []
    if all(torch.equal(t[..., :half], t[..., half:]) for t in (cos, sin)):
        layouts.append("half")
    if all(torch.equal(t[..., 0::2], t[..., 1::2]) for t in (cos, sin)):
        layouts.append("interleaved")
    return layouts or ["other"]
