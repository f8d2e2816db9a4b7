"""`launch` hands a call only to the kernel version compiled for such arguments."""

import importlib
import pkgutil

import pytest
import torch

import liger_triton
from liger_triton import _launch
from liger_triton._low_rank import low_rank_gradients
from liger_triton.float8_cast import float8_cast, float8_columns, float8_rows, row_cast
from liger_triton.gates import gate_of_sums, gradients_of_sums
from liger_triton.sizes import sizes_only


class OnGPU(torch.Tensor):
    """A tensor that claims to be on a GPU."""

    is_cuda = True


class Compiled:
    def __init__(self, log, kind):
        self.log, self.kind = log, kind

    def __getitem__(self, grid):
        return lambda *args: self.log.append((self.kind, grid, args))


class Kernel:
    """A stand-in for a `triton.jit` function: a call compiles for its dtypes, alignments and numbers."""

    arg_names = ("X", "n", "eps", "BLOCK", "FLAG")

    def __init__(self):
        self.searched, self.launched = [], []

    def __getitem__(self, grid):
        def run(x, n, eps, *, BLOCK, FLAG, num_warps=4):
            kind = (x.dtype, x.data_ptr() % 16 == 0, n, eps, BLOCK, FLAG, num_warps)
            self.searched.append(kind)
            return Compiled(self.launched, kind)

        return run


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(_launch, "INTERPRET", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(OnGPU, "get_device", lambda self: 0)
    return Kernel()


def tensor(dtype=torch.float32, offset=0):
    whole = torch.empty(64, dtype=dtype)
    first = -whole.data_ptr() % 16 // whole.element_size()
    return whole[first + offset : first + offset + 16].as_subclass(OnGPU)


def test_a_second_call_of_a_kind_is_not_searched_for(kernel):
    x, y = tensor(), tensor()
    _launch.launch(kernel, (3,), x, 48, 1e-6, FLAG=True, BLOCK=64, num_warps=8)
    _launch.launch(kernel, (5, 2), y, 48, 1e-6, FLAG=True, BLOCK=64, num_warps=8)
    assert len(kernel.searched) == 1
    (kind, grid, args) = kernel.launched[0]
    assert kind == kernel.searched[0] and grid[:3] == (5, 2, 1)
    assert args[0] is y and args[1:] == (48, 1e-6, 64, True)  # constants in the order of the kernel's arguments


@pytest.mark.parametrize(
    "other",
    [
        {"x": lambda: tensor(torch.bfloat16)},
        {"x": lambda: tensor(offset=1)},
        {"n": 1},
        {"n": 47},
        {"n": 2**31 + 16},
        {"BLOCK": 128},
        {"FLAG": False},
        {"num_warps": 4},
    ],
    ids=("dtype", "alignment", "one", "number", "wide", "constant", "flag", "option"),
)
def test_another_kind_is_searched_for(kernel, other):
    call = {"x": tensor, "n": 48, "eps": 1e-6, "BLOCK": 64, "FLAG": True, "num_warps": 8}
    for given in (call, call | other):
        x, n, eps, *_ = given.values()
        _launch.launch(kernel, (1,), x(), n, eps, **{name: given[name] for name in ("BLOCK", "FLAG", "num_warps")})
    assert len(kernel.searched) == 2 and not kernel.launched


def test_another_device_is_another_kind(kernel, monkeypatch):
    """The kernel is launched on that device, whatever the current one is."""
    inside = []

    class Device:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            inside.append(self.device)
            monkeypatch.setattr(torch.cuda, "current_device", lambda: self.device)

        def __exit__(self, *_):
            monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    monkeypatch.setattr(torch.cuda, "device", Device)
    for device in (0, 1):
        monkeypatch.setattr(OnGPU, "get_device", lambda self, device=device: device)
        _launch.launch(kernel, (1,), tensor(), 48, 1e-6, BLOCK=64, FLAG=True)
    assert len(kernel.searched) == 2 and inside == [1] and torch.cuda.current_device() == 0


def test_rows_of_every_length_are_of_few_kinds(kernel):
    """Triton itself distinguishes multiples of 16, other numbers, and 1."""
    for n in range(1, 2000):
        _launch.launch(kernel, (1,), tensor(), n, 1e-6 * n, BLOCK=64, FLAG=True)
    assert len(kernel.searched) == len(kernel._liger_compiled) == 3
    assert {kind[2] for kind in kernel.searched} == {1, 2, 16} and len(kernel.launched) == 1996


def rows(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype).requires_grad_()


def casts(n):
    x = rows(n, 32).detach()
    float8_cast(x, columns=True, rows=n % 2 == 0)
    _, _, maxima = float8_rows(x, maxima=True)
    float8_columns(x, maxima)
    row_cast([x, x])


def lora(n):
    x, h, b = (rows(*shape, dtype=torch.bfloat16).detach() for shape in ((n, 32), (n, 8), (32, 8)))
    low_rank_gradients(x, h, b, torch.empty_like(h), 1, 1.0, 0.5)
    gate_of_sums(x, x, (h, b.t()), None, "silu")
    gradients_of_sums(x, x.clone(), x.clone(), None, (h, b.t()), (h, b.t()), "silu")


def experts(n):
    lora = liger_triton.ExpertLoRA(rows(4, 8, 32), rows(4, 64, 8), 0.5)
    weights = rows(4, 64, 32), rows(4, 32, 32)
    return liger_triton.experts(rows(n, 32), target(n, 2), rows(n, 2), *weights, gate_up_lora=lora)


def row_attention(n):
    q, k, v = (rows(n, heads, 16) for heads in (4, 2, 2))
    return liger_triton.row_attention(q, k, v, torch.zeros(3, dtype=torch.int32), n, softcap=10.0)


def rollout_attention(n):
    q, k, v, own_key, own_value = (rows(n, heads, 16) for heads in (4, 2, 2, 2, 2))
    return liger_triton.rollout_attention(q, k, v, [own_key], [own_value], torch.zeros(3, dtype=torch.int32), n)


def short_conv(n):
    cu_seqlens = torch.zeros(3, dtype=torch.int32)
    return liger_triton.short_conv(rows(n, 32), rows(32, 4), rows(32), cu_seqlens=cu_seqlens, activation="silu")


def target(*shape):
    return torch.zeros(shape, dtype=torch.int64)


OPERATIONS = {
    "rms_norm": lambda n: liger_triton.rms_norm(rows(n, 32), rows(32), 1e-6),
    "add_rms_norm": lambda n: liger_triton.add_rms_norm(rows(n, 32), rows(n, 32), rows(32), 1e-6)[0],
    "gated_rms_norm": lambda n: liger_triton.gated_rms_norm(rows(n, 32), rows(n, 32), rows(32), 1e-6, group_size=16),
    "layer_norm": lambda n: liger_triton.layer_norm(rows(n, 32), rows(32), rows(32), 1e-6),
    "rope": lambda n: liger_triton.rope(rows(1, n, 2, 16).transpose(1, 2), None, *torch.ones(2, 1, n, 16))[0],
    "swiglu": lambda n: liger_triton.swiglu(*rows(n, 64).chunk(2, -1)),
    "geglu": lambda n: liger_triton.geglu(rows(n, 32), rows(n, 32)),
    "cross_entropy": lambda n: liger_triton.cross_entropy(rows(n, 50), target(n)),
    "linear_cross_entropy": lambda n: liger_triton.linear_cross_entropy(rows(n, 16), rows(50, 16), target(n)),
    "linear_heads_kl": lambda n: (
        liger_triton.linear_heads_kl(
            rows(2, n, 16), rows(50, 16), rows(n, 16).detach(), rows(50, 16).detach(), target(2, n) == 0
        ).loss
    ),
    "fp8 casts": casts,
    "lora": lora,
    "experts": experts,
    "rollout_attention": rollout_attention,
    "row_attention": row_attention,
    "short_conv": short_conv,
}


class Known:
    """A kernel that was requested, and the versions Triton compiled."""

    def __init__(self, asked):
        self.arg_names = asked.arg_names
        options = getattr(asked, "kwargs", None) or vars(asked)
        self.general = options["do_not_specialize"] or ()

    def __getitem__(self, grid):
        return lambda *args, **constants: Compiled([], None)

    def compiled(self):
        names = ["device", *self.arg_names]
        special = [k for k, name in enumerate(names) if name not in self.general]
        return {tuple([key[k] for k in special if k < len(key)]) for key in self._liger_compiled}


@pytest.fixture
def launched(kernel, triton_only, monkeypatch):
    """Return a function that runs an operation for each given number of rows, and returns the kernels by name."""

    def run(operation, numbers):
        kernels = {}

        def launch(asked, grid, *args, **constants):
            known = kernels.setdefault(asked.__name__, Known(asked))
            given = [t.detach().as_subclass(OnGPU) if isinstance(t, torch.Tensor) else t for t in args]
            _launch.launch(known, grid, *given, **constants)

        for name in [file.name for file in pkgutil.iter_modules(liger_triton.__path__) if file.name != "_launch"]:
            module = importlib.import_module(f"liger_triton.{name}")
            if hasattr(module, "launch"):
                monkeypatch.setattr(module, "launch", launch)
        monkeypatch.setattr(_launch, "computes_nothing", lambda: False)
        for n in numbers:
            with sizes_only():
                y = OPERATIONS[operation](n)
                if y is not None:
                    y.sum().backward()
        return kernels

    return run


@pytest.mark.parametrize("operation", OPERATIONS)
def test_ragged_rows_are_of_few_kinds_in_every_operation(operation, launched):
    """Each step has another number of rows. The versions remembered for a kernel do not grow with that number."""
    found = {name: len(known._liger_compiled) for name, known in launched(operation, range(1, 201)).items()}
    assert found and max(found.values()) <= 12, found


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name != "fp8 casts"])
def test_no_number_of_rows_recompiles_a_kernel(operation, launched):
    """A kernel takes seconds to compile, and packed rows have another length in each micro-batch.

    One length in 16 is a multiple of 16. (fp8 casts are left out: their columns are as long as there are rows, stored
    in words.)
    """
    first = launched(operation, [1025])
    all_of_them = launched(operation, range(1025, 1060))
    assert first and {name: known.compiled() for name, known in first.items()} == {
        name: known.compiled() for name, known in all_of_them.items()
    }


def test_the_interpreter_is_called_as_usual(kernel, monkeypatch):
    monkeypatch.setattr(_launch, "INTERPRET", True)
    for _ in range(2):
        _launch.launch(kernel, (1,), tensor(), 48, 1e-6, BLOCK=64, FLAG=True)
    assert len(kernel.searched) == 2
