"""Run a stock and a patched model side by side under the same hooks, and compare the outcomes."""

import pytest
import tiny_models
import torch
from tiny_models import collate, gradients, ragged_rows, tiny_model
from torch import nn

from liger_trainer import apply_liger
from liger_trainer.patching import gates, mlps
from liger_triton.gates import gate_gradients


class Gate(torch.autograd.Function):
    """silu(g) * u like the kernel. `allowed` and `done` count backward passes that may and do overwrite inputs."""

    allowed = done = 0

    @staticmethod
    def forward(ctx, gate, up, reuse):
        ctx.save_for_backward(gate, up)
        ctx.reuse = reuse
        return nn.functional.silu(gate) * up

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        gate, up = ctx.saved_tensors
        s = torch.sigmoid(gate)
        du, dg = dy * gate * s, dy * up * s * (1 + gate * (1 - s))
        out = gate_gradients(gate, up, ctx.reuse)
        Gate.allowed += ctx.reuse
        Gate.done += out[0].data_ptr() == gate.data_ptr()
        return out[0].copy_(dg), out[1].copy_(du), None


CHECKPOINTING = {"kept": None, "checkpoint": False, "reentrant": True}  # arguments for use_reentrant
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# In bf16 the two round in different places. The hooks here have an error of 1.5 in a factor, which gives 0.3 or more.
TOLERANCE = {"fp32": 2e-5, "bf16": 0.1}
FIRST = ("sdpa", "kept", "fp32")
SETTINGS = [(a, c, d) for a in ("sdpa", "eager") for c in CHECKPOINTING for d in DTYPES]


def first_or_slow(*values, first):
    """Parameter sets of a test: the first combination is quick; `make test-all` runs the others."""
    name = "-".join("-".join(value) if isinstance(value, tuple) else value for value in values)
    return pytest.param(*values, id=name, marks=() if first else pytest.mark.slow)


EVERY_SETTING = [first_or_slow(setting, first=setting == FIRST) for setting in SETTINGS]


REBUILT = {"rebuild_above_mib": 0}  # tensors are small in tests; users get this for large ones only


def as_at_real_size(monkeypatch):
    """Do on the CPU what Triton's gate does on a GPU: write its gradients over its inputs.

    In a model patched with `REBUILT`, tensors are rebuilt in the backward pass as on a GPU.
    """
    monkeypatch.setitem(gates.GATES, "silu", lambda a, b, reuse_inputs=False: Gate.apply(a, b, reuse_inputs))
    # forwards are built once per process, and must not keep this gate
    monkeypatch.setattr(mlps, "build", mlps.build.__wrapped__)


def model_of(setting, model_type="llama", wrap=None):
    """A tiny model in training mode. `wrap(model)` is trained, for example a `PeftModel`."""
    attention, checkpointing, dtype = setting
    model = tiny_model(model_type, dtype=DTYPES[dtype])
    model.set_attn_implementation(attention)
    if CHECKPOINTING[checkpointing] is not None:
        model.gradient_checkpointing_enable({"use_reentrant": CHECKPOINTING[checkpointing]})
        model.enable_input_require_grads()
    torch.manual_seed(3)
    return (wrap(model) if wrap else model).train()


def patched(model, head=True):
    """Patch everything; with `head=False`, for a head with a hook, keep the head."""
    report = apply_liger(model, {"fused_linear_cross_entropy": head, **REBUILT})
    for operation in ("rope", "rms_norm", "layer_norm", "swiglu", "geglu", "experts"):
        assert not report[operation].skipped, report.one_line()
    assert report["rope"].swapped and any(report[gate].swapped for gate in ("swiglu", "geglu", "experts")), (
        report.one_line()
    )
    assert bool(report["fused_linear_cross_entropy"].found) == head, report.one_line()
    return model


def batch(seed=1):
    """Rows padded to the longest, with labels on some of their tokens."""
    return collate(ragged_rows(4, seed))


def step(model, seed=1):
    """Loss of a batch. Its gradients add to the existing ones."""
    loss = model(**batch(seed)).loss
    loss.backward()
    return loss.detach(), gradients(model)


def outcome(run, *args):
    """The result of `run`, or the type of the error it raises."""
    try:
        return run(*args)
    except (RuntimeError, ValueError) as error:
        return type(error)


def assert_same_step(got, want, dtype):
    rtol = TOLERANCE[dtype]
    if isinstance(want, type):
        assert got is want, f"stock raises {want.__name__}"
        return
    assert not isinstance(got, type), f"ours raises {got.__name__}"
    tiny_models.assert_same_step(got, want, rtol)
