"""Gemma 4 in captured steps on a GPU: heads of 512 by the offsets of rows, and embeddings for each layer.

CUDA_VISIBLE_DEVICES=0 pytest -m gpu tests/liger_trainer/varlen/graphs/test_captured_per_layer_gpu.py
"""

import copy
import itertools

import pytest
import torch
from gemma4_models import text_model, whole_model
from peft import LoraConfig, get_peft_model
from transformers import CONFIG_MAPPING
from varlen_batches import captured_step

from liger_trainer import apply_liger
from liger_trainer.varlen import attention
from liger_trainer.varlen.graphs.graph_recorder import CudaGraphRecorder
from liger_trainer.varlen.graphs.step_graphs import StepGraphs
from liger_trainer.varlen.rows import RowMask, Rows, StaticRows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif("gemma4" not in CONFIG_MAPPING, reason="this transformers has no Gemma 4"),
]
# Each batch fills the same size, 512 tokens, so that products round alike in captured and uncaptured steps.
ROWS = ((130, 1, 300, 81), (260, 60, 192), (64, 64, 320, 64), (1, 500, 11), (90, 70, 300, 10, 42))


class TimelessRecorder(CudaGraphRecorder):
    """Reports that a replay is faster than Python."""

    def __init__(self, device):
        super().__init__(device)
        self.seconds = itertools.cycle([1.0, 0.5])

    def seconds_of(self, run):
        run()
        return next(self.seconds)


def batch(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(3, 97, (len(lengths), width), generator=generator)
    real = torch.arange(width) < torch.tensor(lengths)[:, None]
    labels = ids.masked_fill(~real, -100)
    labels[:, 0] = -100
    return {"input_ids": ids.cuda(), "attention_mask": real.long().cuda(), "labels": labels.cuda()}


def full(model):
    return model


def lora(model):
    torch.manual_seed(1)
    in_the_decoder = r"model\.(language_model\.)?layers\..*\.(q_proj|k_proj|v_proj|down_proj)"
    model = get_peft_model(model, LoraConfig(r=8, target_modules=in_the_decoder))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.05)
    return model


@pytest.mark.parametrize("rows", ["padded", "without padding"])
@pytest.mark.parametrize("change", [full, lora], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("build", "name"), [(text_model, "e2b"), (text_model, "e4b"), (whole_model, "e4b")])
def test_replayed_steps_equal_uncaptured_ones(build, name, change, rows, monkeypatch):
    """With checkpointing. No layer attends row by row: that would need lengths on the host.

    Without padding, uncaptured layers attend by other kernels than captured ones. Both are compared with stock in fp32,
    because the scores of random weights are large, and rounding changes the gradients of queries by half.
    """
    longer = {"max_position_embeddings": 1024, "sliding_window": 64}
    model = build(name, **longer)
    model = change(model).to("cuda", torch.bfloat16)
    exact = copy.deepcopy(model).float().train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    report = apply_liger(model.train())["varlen_attention"]
    assert not report.skipped, report
    # The first step compares the kernel for heads of 512 with rows one by one.
    captured_step(copy.deepcopy(model), batch(ROWS[0], seed=len(ROWS) * 2))
    monkeypatch.setattr(attention, "_row_by_row", None)
    graphs = StepGraphs(TimelessRecorder)
    graphs.may_capture = True
    plain = copy.deepcopy(model)
    batches = ROWS if rows == "padded" else ((128,) * 4, (512,), (256,) * 2, (64,) * 8)
    for count, lengths in enumerate((*batches, *batches)):
        call = batch(lengths, seed=count)
        (got_loss, got), (want_loss, want) = captured_step(model, call, graphs), captured_step(plain, call)
        torch.testing.assert_close(got_loss, want_loss, rtol=2e-3, atol=0)
        assert got.keys() == want.keys()
        reference, rounding = want, dict.fromkeys(want, 0.0)
        if rows != "padded":
            _, reference = captured_step(exact, call)
            rounding = {parameter: (want[parameter] - reference[parameter]).norm() for parameter in want}
        largest = max(gradient.norm() for gradient in reference.values())
        for parameter, gradient in reference.items():
            apart = (got[parameter] - gradient).norm()
            allowed = 3e-2 * gradient.norm() + 1e-3 * largest + 1.5 * rounding[parameter]
            assert apart <= allowed, (lengths, parameter, rounding[parameter])
    summary = graphs.summary.to_dict()
    assert summary["calls_replayed"] == 2 * len(batches) - 1, summary
    assert summary["sizes"][0] == 512, summary


@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (4, 1)])
@pytest.mark.parametrize("lengths", [(300, 17, 211, 128), (1, 1, 600, 3), (656,)], ids=str)
def test_heads_of_512_equal_float64(lengths, heads):
    """A captured size has empty rows after the last one, and room for longer rows than it has tokens."""
    torch.manual_seed(0)
    tokens = sum(lengths)
    given = []
    for number in (heads[0], heads[1], heads[1]):
        x = torch.randn(1, tokens, number, 512, device="cuda", dtype=torch.bfloat16)
        given.append(x.transpose(1, 2).requires_grad_())
    upstream = torch.randn(tokens, heads[0], 512, device="cuda", dtype=torch.bfloat16)
    ends = torch.tensor([0, *itertools.accumulate(lengths), *[tokens] * 12], dtype=torch.int32, device="cuda")
    assert attention.large_kernel_takes(*given, 0.0)
    exact = [x.detach().double().requires_grad_() for x in given]
    want = attention._row_by_row(*exact, Rows(list(lengths), torch.device("cuda")), None, 0.0, 0.044)
    wanted = [want, *torch.autograd.grad(want, exact, upstream.double())]
    for offsets, longest in ((ends[: len(lengths) + 1], max(lengths)), (ends, 1024)):
        out = attention.by_large_kernel(*given, offsets, longest, 0.044)
        for mine, theirs in zip((out, *torch.autograd.grad(out, given, upstream)), wanted, strict=True):
            assert (mine.double() - theirs).norm() <= 4 * torch.finfo(torch.bfloat16).eps * theirs.norm()


def test_the_rule_for_heads_of_512():
    """By offsets for rows of several lengths in 16 bits; SDPA row by row in fp32, with dropout, or for a window."""
    module = torch.nn.Module()
    module.num_key_value_groups = 4
    called = []
    own = attention.by_large_kernel

    def noted(*given):
        called.append(given[-2])
        return own(*given)

    def attend(dtype, window=None, dropout=0.0):
        x = [torch.randn(1, heads, 40, 512, device="cuda", dtype=dtype) for heads in (4, 1, 1)]
        rows = Rows([30, 10], torch.device("cuda"))
        return attention._by_rows(*x, RowMask(rows, window), dropout=dropout, scaling=0.044)

    for dtype in (torch.bfloat16, torch.float16):
        attend(dtype)  # the first call for a dtype tries the kernel
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "by_large_kernel", noted)
        attend(torch.bfloat16)
        attend(torch.float16)
        assert called == [30, 30]
        attend(torch.float32)
        attend(torch.bfloat16, window=8)
        attend(torch.bfloat16, dropout=0.1)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        try:
            attend(torch.bfloat16)
        finally:
            torch.backends.cuda.enable_mem_efficient_sdp(True)
    assert called == [30, 30]


def test_a_graph_reads_the_offsets_of_each_replay():
    """The kernel's arguments hold no length of the first batch."""
    torch.manual_seed(0)
    given = [torch.randn(1, heads, 512, 512, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2)]
    offsets = torch.zeros(9, dtype=torch.int32, device="cuda")
    rows = StaticRows(offsets, 512, 512)

    def fill(lengths):
        offsets.fill_(512)
        offsets[: len(lengths) + 1] = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)

    fill(ROWS[0])
    attention._by_rows(*given, RowMask(rows), scaling=0.044)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream), torch.no_grad():
        out = attention._by_rows(*given, RowMask(rows), scaling=0.044)
    for lengths in ROWS:
        fill(lengths)
        graph.replay()
        want = attention._by_rows(*given, RowMask(Rows(list(lengths), torch.device("cuda"))), scaling=0.044)
        assert (out - want).norm() <= 1e-3 * want.norm(), lengths
