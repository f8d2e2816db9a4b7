"""Triton kernels for training language models, each with a plain PyTorch twin in `liger_triton.reference`.

They need torch, and Triton for tensors on a GPU. Each file holds one operation or one family of operations;
`modules.py` holds `torch.nn` modules that call them.
"""

from .cross_entropy import cross_entropy
from .dequantize import MXFP4Weight, dequantize_mxfp4
from .experts import ExpertLoRA, experts
from .float8_cast import Float8, float8_cast
from .float8_linear import Float8Form, Float8RowwiseForm, float8_linear
from .frozen_float8 import Float8Matrices, Float8Weight, frozen_float8_linear
from .gates import geglu, swiglu
from .layer_norm import layer_norm
from .linear_divergence import linear_divergence
from .linear_head import linear_cross_entropy, linear_heads_cross_entropy, linear_logprobs
from .linear_heads_kl import linear_heads_kl
from .lora_linear import lora_linear
from .lora_mlp import lora_mlp
from .modules import (
    LigerCrossEntropyLoss,
    LigerFusedLinearCrossEntropyLoss,
    LigerGEGLUMLP,
    LigerLayerNorm,
    LigerRMSNorm,
    LigerSwiGLUMLP,
)
from .results import Divergence, HeadsLoss, LogProbs, TokenRanks
from .rms_norm import add_rms_norm, gated_rms_norm, rms_norm
from .rollout_attention import rollout_attention
from .rope import rope
from .row_attention import row_attention
from .short_conv import short_conv
from .token_ranks import linear_token_ranks, token_ranks

__all__ = [
    "Divergence",
    "ExpertLoRA",
    "Float8",
    "Float8Form",
    "Float8Matrices",
    "Float8RowwiseForm",
    "Float8Weight",
    "HeadsLoss",
    "LigerCrossEntropyLoss",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerGEGLUMLP",
    "LigerLayerNorm",
    "LigerRMSNorm",
    "LigerSwiGLUMLP",
    "LogProbs",
    "MXFP4Weight",
    "TokenRanks",
    "add_rms_norm",
    "cross_entropy",
    "dequantize_mxfp4",
    "experts",
    "float8_cast",
    "float8_linear",
    "frozen_float8_linear",
    "gated_rms_norm",
    "geglu",
    "layer_norm",
    "linear_cross_entropy",
    "linear_divergence",
    "linear_heads_cross_entropy",
    "linear_heads_kl",
    "linear_logprobs",
    "linear_token_ranks",
    "lora_linear",
    "lora_mlp",
    "rms_norm",
    "rope",
    "rollout_attention",
    "row_attention",
    "short_conv",
    "swiglu",
    "token_ranks",
]
