"""Packages for linear attention as transformers finds them when installed, without a GPU for their kernels."""

import sys
import types

import pytest
from transformers.integrations import hub_kernels


def conv_on_gpu(x, weight, bias=None, activation=None, seq_idx=None):
    raise RuntimeError("there is no GPU")  # as Triton raises for CPU tensors


def rule_on_gpu(q, k, v, g, beta, cu_seqlens=None, use_qk_l2norm_in_kernel=False):
    raise RuntimeError("there is no GPU")


def chunked_rule_on_gpu(
    q,
    k,
    v,
    g,
    beta,
    use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    chunk_indices=None,
):
    raise RuntimeError("there is no GPU")


KERNELS = {  # a global of a modeling file -> the package function that it calls
    "causal_conv1d_fn": ("causal_conv1d_fn", conv_on_gpu),
    "torch_chunk_gated_delta_rule": ("chunk_gated_delta_rule", chunked_rule_on_gpu),
    "torch_recurrent_gated_delta_rule": ("fused_recurrent_gated_delta_rule", rule_on_gpu),
    "chunk_kimi_delta_attention": ("chunk_kda", rule_on_gpu),
}


def install_packages(monkeypatch, modeling, names=tuple(KERNELS)):
    """Make the functions `names` of a modeling file call packages that need a GPU."""
    decorator = getattr(hub_kernels, "use_kernel_func_from_hub_with_fallback", None)
    if decorator is None:
        pytest.skip("this transformers chooses packages in another way")
    scope = sys.modules[modeling]
    for name in names:
        if not hasattr(scope, name):
            continue
        kernel, function = KERNELS[name]
        package = types.ModuleType(f"installed_{name}")
        inner = types.SimpleNamespace(**{kernel: function})
        package.ops = types.SimpleNamespace(gated_delta_rule=inner, kda=inner)
        setattr(package, kernel, function)
        monkeypatch.setitem(sys.modules, package.__name__, package)
        decorated = decorator(kernel, package.__name__)(getattr(scope, name).__wrapped__)
        monkeypatch.setattr(scope, name, decorated)
