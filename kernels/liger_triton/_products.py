"""Matrix products over the vocabulary, at full speed for a vocabulary of any size.

cuBLAS has fast kernels for 16-bit matrices whose contiguous dimensions are multiples of 16 bytes ("Tensor Core Usage"
in its documentation). If the vocabulary is not a multiple of 8 (50257, or 128256 and a token of one's own), the few
words past the last multiple are multiplied on their own, which makes two products of one and needs no copy of the
weight. Other vocabularies, fp32 and CPUs take one product.

Shapes  x (n, k), weight (V, k), logits and dl (n, V) of any row stride.
"""

import torch
import torch.nn.functional as F

from ._dispatch import on_cuda


def _word_slices(vocab: int, like: torch.Tensor) -> list[slice]:
    """Which words are multiplied together: first those past the last multiple of 16 bytes, if any, then the others."""
    odd = vocab % (16 // like.element_size()) if on_cuda(like) and like.element_size() == 2 else 0
    return [slice(vocab - odd, vocab), slice(0, vocab - odd)] if 0 < odd < vocab else [slice(0, vocab)]


def project(x, weight, logits, bias=None, add=False) -> None:
    """logits = x weight^T + bias, or with `add` logits += x weight^T."""
    for words in _word_slices(weight.shape[0], x):
        out, w = logits[:, words], weight[words].t()
        if add:
            out.addmm_(x, w)
        elif bias is None:
            torch.mm(x, w, out=out)
        else:
            torch.addmm(bias[words], x, w, out=out)


def back(dl, weight, out=None) -> torch.Tensor:
    """dl weight, (n, k). It is written into `out`, if that is given."""
    slices = _word_slices(weight.shape[0], dl)
    if len(slices) == 1:
        return torch.mm(dl, weight, out=out)
    total = torch.empty((dl.shape[0], weight.shape[1]), dtype=torch.float32, device=dl.device)
    for k, words in enumerate(slices):
        _add(total, dl[:, words], weight[words], started=k > 0)
    return total.to(dl.dtype) if out is None else out.copy_(total)


def add_outer(total, dl, x, started: bool) -> None:
    """total (V, k) += dl^T x, or total = dl^T x if it is not `started`. It may be fp32 where the factors have 16
    bits."""
    for words in _word_slices(total.shape[0], dl):
        _add(total[words], dl[:, words].t(), x, started)


def wide_product(a, b) -> torch.Tensor:
    """a b in fp32 (float64 for float64 factors), straight from the accumulators where a GPU multiplies 16-bit ones."""
    dtype = torch.promote_types(a.dtype, torch.float32)
    total = torch.empty((a.shape[0], b.shape[1]), dtype=dtype, device=a.device)
    _add(total, a, b, started=False)
    return total


def _add(total, a, b, started: bool) -> None:
    """total += a b, or total = a b if it is not `started`. If `total` is fp32 and the factors have 16 bits, a GPU adds
    their product straight from the accumulators of its matrix units, without rounding it. Elsewhere the factors are
    converted first."""
    if a.shape[1] == 1 and on_cuda(a):  # of one row: a single column takes 0.8 ms where eight take 0.3 (4096x128256)
        a, b = F.pad(a, (0, 7)), F.pad(b, (0, 0, 0, 7))
    wider = a.dtype != total.dtype
    if wider and not on_cuda(a):
        a, b, wider = a.to(total.dtype), b.to(total.dtype), False
    more = {"out_dtype": total.dtype} if wider else {}
    if started:
        torch.addmm(total, a, b, out=total, **more)
    else:
        torch.mm(a, b, out=total, **more)
