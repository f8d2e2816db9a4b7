"""`use_kernels=True` of transformers: our norms where they are proven, the class's own code where they are not."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.utils import is_kernels_available

from liger_trainer.integrations import hf_kernels

needs_kernels = pytest.mark.skipif(
    not is_kernels_available(), reason="kernels is not installed, or not in a version that transformers takes"
)


@needs_kernels
@pytest.mark.parametrize("family", ["llama", "olmo2"])
def test_norms_are_those_of_this_package(family, monkeypatch):
    """Olmo 2 rounds after the weight, and Llama before: both classes have the name RMSNorm in the mapping."""
    hf_kernels.register(devices=("cpu",))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(family, vocab_size=64, pad_token_id=0, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    ids = torch.arange(3, 23)[None]
    want = model(ids).logits
    model.train()
    model.use_kernels = True
    norms = [m for name, m in model.named_modules() if "norm" in name]
    assert norms and all(norm.forward.__func__ is hf_kernels.ProvenRMSNorm.forward for norm in norms)
    got = model(ids)
    torch.testing.assert_close(got.logits, want, rtol=2e-2, atol=2e-2)
    assert not any(hf_kernels._bound[norm].aside for norm in norms)
    got.logits.float().sum().backward()
    assert all(norm.weight.grad is not None for norm in norms)


def test_a_norm_that_is_none_of_ours_keeps_its_code():
    class Shifted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.ones(8)), 1e-6

        def forward(self, hidden_states):
            return self.weight * hidden_states + 1

    norm = Shifted()
    x = torch.randn(2, 8)
    torch.testing.assert_close(hf_kernels.ProvenRMSNorm.forward(norm, x), norm.weight * x + 1)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_the_first_call_of_a_norm_may_be_one_without_gradients(mode):
    norm, x = LlamaRMSNorm(8), torch.randn(2, 8)
    with mode():
        y = hf_kernels.ProvenRMSNorm.forward(norm, x)
    assert not hf_kernels._bound[norm].aside
    torch.testing.assert_close(y, norm(x))
    norm.variance_epsilon = 0.5
    torch.testing.assert_close(hf_kernels.ProvenRMSNorm.forward(norm, x), norm(x))
    assert hf_kernels._bound[norm].aside
