"""Which rotation a rotary function computes, found by running it, and how the numbers of a cos are laid out.

Our kernel reads one angle per pair. Most rotary functions read two, equal by construction of cos: `[a, b, a, b]`
("half") or `[a, a, b, b]` ("interleaved"). So a proof says what cos must be like, and `layouts_of` runs the module that
makes cos.
"""

import inspect
import itertools
from dataclasses import dataclass, replace

import torch
from torch import nn

from liger_trainer.patching import probe
from liger_triton import rope

COMPLEX = ("freqs_cis", "freqs_ci")
ANGLES = 8  # numbers in a row of cos. Four pairs: with one, all layouts are the same
HEADS, KV_HEADS, BATCH, TOKENS = 4, 2, 3, 5  # all different, so that no wrong broadcast fits
# kinds of call: (dimensions of q, dimensions of cos, unsqueeze_dim)
CALLS = ((4, 3, 1), (4, 3, 2), (3, 2, 1), (3, 2, 0), (4, 2, 0))
HEAD_SIZES = {"equal": ANGLES, "between": ANGLES + 4, "double": 2 * ANGLES, "over": 2 * ANGLES + 4}


def size_of(head_size: int, angles: int) -> str | None:
    """The key of `HEAD_SIZES` for a head and a row of cos."""
    if head_size <= angles:
        return "equal" if head_size == angles else None
    if head_size <= 2 * angles:
        return "double" if head_size == 2 * angles else "between"
    return "over"


@dataclass(frozen=True)
class Geometry:
    """Which numbers of a head are turned by which angle; the fields are arguments of `liger_triton.rope`."""

    interleaved: bool
    out_interleaved: bool
    cos_layout: str
    rotate_last: bool
    sign: float = 1.0
    cast: str = "promote"

    def arguments(self) -> dict:
        names = ("interleaved", "out_interleaved", "cos_layout", "rotate_last", "cast")
        return {name: getattr(self, name) for name in names}

    def __str__(self):
        text = "interleaved" if self.interleaved else "half-rotate"
        text += " to half" if self.interleaved and not self.out_interleaved else ""
        text += {"half": "", "interleaved": ", cos interleaved", "single": ", one cos per pair"}[self.cos_layout]
        text += ", last dims" if self.rotate_last else ""
        text += ", negative angle" if self.sign < 0 else ""
        return text + (", fp32 inside" if self.cast == "input" else "")


GEOMETRIES = tuple(
    Geometry(a, b, layout, last, sign)
    for sign, last, (a, b), layout in itertools.product(
        (1.0, -1.0),
        (False, True),
        ((False, False), (True, True), (True, False), (False, True)),
        ("half", "interleaved", "single"),
    )
)


@dataclass(frozen=True)
class Signature:
    """Names of a rotary function's parameters: one or two tensors to turn, the angles, and the rest."""

    names: tuple[str, ...]
    turned: tuple[str, ...]
    cos: str | None  # None: `sin` is then one complex tensor
    sin: str
    unsqueeze_dim: int | None  # its default; None if it is no parameter

    @classmethod
    def of(cls, function) -> "Signature | None":
        forward = function.forward if isinstance(function, nn.Module) else function  # the `kernels` library wraps it
        try:
            parameters = inspect.signature(forward).parameters
        except (TypeError, ValueError):
            return None
        names = tuple(n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD)
        at = [names.index(n) for n in ("cos", "sin", *COMPLEX) if n in names]
        if not at or not 1 <= min(at) <= 2 or len(at) != (1 if names[at[0]] in COMPLEX else 2):
            return None
        default = parameters["unsqueeze_dim"].default if "unsqueeze_dim" in names else None
        cos, sin = ("cos", "sin") if len(at) == 2 else (None, names[at[0]])
        return cls(names, names[: min(at)], cos, sin, default)

    def call(self, function, turned, cos, sin, unsqueeze_dim):
        """The function on these tensors, as a tuple."""
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
class Proof:
    """For one kind of call and head size: the geometry, and the layout that cos must have (None: any)."""

    call: tuple[int, int, int]
    size: str
    geometry: Geometry
    layout: str | None


def prove(function) -> tuple[tuple[Proof, ...], str | None]:
    """(a proof for every kind of call on which `function` is one of ours, None), or ((), why none)."""
    signature = Signature.of(function)
    label = getattr(function, "__name__", type(function).__name__)
    if signature is None:
        return (), f"{label} has a signature that is none of (q, k, cos, sin), (x, cos, sin), (q, k, freqs_cis)"
    proven = []
    for call in CALLS:
        if signature.unsqueeze_dim is None and any(p.call[:2] == call[:2] for p in proven):
            continue  # the place of the heads is fixed in the function, and found
        for size in HEAD_SIZES:
            likely = [replace(p.geometry, cast="promote") for p in proven]
            proof = _prove_call(function, signature, call, size, dict.fromkeys([*likely, *GEOMETRIES]))
            proven += [proof] if proof else []
    return tuple(proven), None if proven else f"{label} computes none of the known rotations"


def _case(signature, call, size, layout, dtypes=(torch.float32, torch.float32)):
    """Random q (and k), cos and sin; layout None: all numbers of cos differ."""
    q_dims, cos_dims, at = call
    source = probe.generator()
    head_size = HEAD_SIZES[size]
    shape = [BATCH, HEADS, TOKENS, head_size] if at != 2 else [BATCH, TOKENS, HEADS, head_size]
    if q_dims == 3:
        shape = [HEADS, TOKENS, head_size] if at == 0 else [TOKENS, HEADS, head_size]
    heads_at = shape.index(HEADS)
    turned = []
    for heads in (HEADS, KV_HEADS)[: len(signature.turned)]:
        shape[heads_at] = heads
        turned.append((10 * probe.randn(shape, source)).to(dtypes[0]))
    angles = []
    for _ in range(2):
        angle = probe.randn([*([BATCH] if cos_dims == 3 else []), TOKENS, ANGLES], source)
        if layout == "half":
            angle[..., ANGLES // 2 :] = angle[..., : ANGLES // 2]
        elif layout == "interleaved":
            angle[..., 1::2] = angle[..., 0::2]
        angles.append(angle.to(dtypes[1]))
    return turned, *angles, at


def _prove_call(function, signature, call, size, candidates) -> Proof | None:
    for layout in (None, "half", "interleaved"):
        turned, cos, sin, at = _case(signature, call, size, layout)
        try:
            want = signature.call(function, turned, cos, sin, at)
        except (RuntimeError, IndexError, TypeError, ValueError):
            return None  # not a call it takes
        if len(want) != len(turned) or any(not isinstance(w, torch.Tensor) for w in want):
            return None
        for geometry in candidates:
            if layout in (None, geometry.cos_layout) and _matches(geometry, turned, cos, sin, at, want):
                geometry = _with_cast(function, signature, call, size, layout, geometry)
                return geometry and Proof(call, size, geometry, layout)
    return None


def _ours(geometry, turned, cos, sin, at):
    k = turned[1] if len(turned) > 1 else None
    q, k = rope(turned[0], k, cos, sin * geometry.sign, unsqueeze_dim=at, **geometry.arguments())
    return (q,) if k is None else (q, k)


def _matches(geometry, turned, cos, sin, at, want, rtol=probe.FP32_RTOL) -> bool:
    try:
        got = _ours(geometry, turned, cos, sin, at)
    except ValueError:  # this geometry does not fit the shapes
        return False
    return all(probe.same(g, w, rtol) for g, w in zip(got, want, strict=True))


def _with_cast(function, signature, call, size, layout, geometry):
    """The geometry with the cast that gives the dtypes of `function` in 16 bit; None if gradients or dtypes differ."""
    turned, cos, sin, at = _case(signature, call, size, layout)
    turned = [t.requires_grad_() for t in turned]
    grads = []
    for result in (_ours(geometry, turned, cos, sin, at), signature.call(function, turned, cos, sin, at)):
        dy = [probe.randn(r.shape, probe.generator()) for r in result]
        grads.append(torch.autograd.grad(result, turned, dy))
    if not all(probe.same(g, w, probe.FP32_RTOL) for g, w in zip(*grads, strict=True)):
        return None
    half, full = torch.bfloat16, torch.float32
    for cast in ("promote", "input"):
        candidate = replace(geometry, cast=cast)
        for dtypes in ((half, half), (half, full), (full, half)):
            turned, cos, sin, at = _case(signature, call, size, layout, dtypes)
            want = signature.call(function, turned, cos, sin, at)
            if signature.cos is None:
                cos, sin = cos.float(), sin.float()
            if not _matches(candidate, turned, cos, sin, at, want, rtol=0.03):
                break
        else:
            return candidate
    return None


def makes_angles(module: nn.Module) -> bool:
    """A rotary embedding, by its name and having no parameters."""
    return "rotary" in type(module).__name__.lower() and not any(True for _ in module.parameters())


def layouts_of(module: nn.Module) -> frozenset[tuple[int, str]]:
    """(numbers in a row, layout) of every cos that a rotary embedding makes; empty where it cannot be run here."""
    source = probe.generator()
    types = getattr(module, "layer_types", None) or getattr(getattr(module, "config", None), "layer_types", None) or ()
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    position_ids = torch.randint(1, 50, (3, 1, 6), generator=source)  # three: the axes of multimodal positions
    found = set()
    layer_types = sorted(set(types)) if any(p.name == "layer_type" for p in parameters) else [None]
    for layer_type, ids in itertools.product(layer_types, (position_ids[0], position_ids)):
        arguments = {"position_ids": ids, "layer_type": layer_type}
        given = {}
        for p in parameters:
            if p.name in arguments:
                given[p.name] = arguments[p.name]
            elif p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD:
                given[p.name] = torch.zeros(1, 6, 8)
        try:
            made = type(module).forward(probe.clone(module, source), **given)
        except Exception:  # noqa: BLE001, S112 - another kind of positions, or not runnable at all: nothing is learned
            continue
        if isinstance(made, tuple) and len(made) == 2 and all(isinstance(t, torch.Tensor) for t in made):
            found |= {(made[0].shape[-1], layout) for layout in _layouts(*made)}
    return frozenset(found)


def _layouts(cos, sin) -> list[str]:
    half = cos.shape[-1] // 2
    if cos.shape[-1] % 2 or cos.shape[-1] == 0 or cos.shape != sin.shape:
        return ["other"]
    kinds = []
    if all(torch.equal(t[..., :half], t[..., half:]) for t in (cos, sin)):
        kinds.append("half")
    if all(torch.equal(t[..., 0::2], t[..., 1::2]) for t in (cos, sin)):
        kinds.append("interleaved")
    return kinds or ["other"]
