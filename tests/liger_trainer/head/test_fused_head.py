"""The fused LM head: what it records, what falls back, what is never allocated, and what survives."""

import copy
import inspect
import io
import logging
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from tiny_models import VOCAB, LargestTensor, collate, gradients, ragged_rows, tiny_model

from liger_trainer._logging import logger
from liger_trainer.head.calls import install_fused_head
from liger_trainer.head.deferred import DeferredLogits, defer_logits
from liger_trainer.head.module import has_fused_head
from liger_trainer.head.outputs import HeadOptions
from liger_trainer.head.scores import token_scores
from liger_trainer.patching import apply_liger, remove_liger


def fused(model_type="llama", **config):
    model = tiny_model(model_type, **config).train()
    assert install_fused_head(model) is None
    return model


def head_and_hidden(bias=False):
    from liger_trainer.head.module import bind_head

    torch.manual_seed(0)
    head = torch.nn.Linear(16, 61, bias=bias)
    bind_head(head)
    return head, torch.randn(2, 9, 16, requires_grad=True)


TRANSFORMS = {
    "plain": lambda z: z,
    "scale": lambda z: 0.25 * z,
    "divide": lambda z: z / 3.0,
    "softcap": lambda z: 2.0 * torch.tanh(z / 2.0),
    "method-softcap": lambda z: z.div(2.0).tanh().mul(2.0),
    "scale-softcap-scale": lambda z: torch.tanh((z * 0.5) / 2.0) * 2.0 * 1.5,
    "negative": lambda z: -1.5 * torch.tanh(z / -3.0) * -2.0,
    "turned-softcap": lambda z: -2.0 * torch.tanh(z / 3.0),
    "float": lambda z: z.float().to(torch.float32),
    "vocab-slice": lambda z: z[..., :50],
    "vocab-slice-after-softcap": lambda z: (2.0 * torch.tanh(z / 2.0))[:, :, :50],
    "rows": lambda z: z[:, 1:][:, ::2],
    "one-row": lambda z: z[:, -1],
    "mask": lambda z: z[torch.arange(18).view(2, 9) % 3 == 0],
    "tensor-index": lambda z: z[:, torch.tensor([3, 1, 1])],
    "slice-vocab-full": lambda z: z[..., :-1, :].contiguous(),
    "ellipsis": lambda z: z[0, ...],
    "reshape": lambda z: torch.reshape(z, (3, 6, 61)),
    "flatten": lambda z: z.flatten(0, 1),
}
UNKNOWN = {
    "sigmoid": lambda z: torch.sigmoid(z),
    "add": lambda z: z + 1.0,
    "radd": lambda z: 1.0 + z,
    "neg": lambda z: -z,
    "tensor-scale": lambda z: z * torch.linspace(0.5, 1.5, 61),
    "tensor-first": lambda z: torch.linspace(0.5, 1.5, 61) * z,
    "two-tanh": lambda z: torch.tanh(torch.tanh(z)),
    "vocab-index": lambda z: z[..., torch.arange(60, 0, -1)],
    "vocab-tail": lambda z: z[..., 5:],
    "vocab-step": lambda z: z[..., :45:2],
    "transpose": lambda z: z.transpose(0, 1),
    "zero": lambda z: z * 0,
}


def in_place_on_real_logits(z):
    z = z.masked_fill(torch.arange(61) == 4, -9.0)
    z *= 2.0
    return z


UNKNOWN["in-place-on-real-logits"] = in_place_on_real_logits


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", [*TRANSFORMS, *UNKNOWN])
def test_loss_and_gradients_through_every_transform(name, bias):
    """The loss of transformed deferred logits equals the same transform of real ones.

    Only the unknown transforms build logits.
    """
    transform = (TRANSFORMS | UNKNOWN)[name]
    results = []
    for deferred in (False, True):
        head, hidden = head_and_hidden(bias)
        z = transform(defer_logits(hidden, head, 61) if deferred else F.linear(hidden, head.weight, head.bias))
        if deferred and name in TRANSFORMS:
            assert isinstance(z, DeferredLogits) and not z.is_materialized
        shape = z.shape
        target = torch.arange(shape[:-1].numel()) % 40
        target[1] = -100
        loss = F.cross_entropy(z.reshape(-1, shape[-1]), target)
        loss.backward()
        results.append((shape, loss, hidden.grad, head.weight.grad, *([head.bias.grad] if bias else [])))
    want, got = results
    assert got[0] == want[0]
    for x, ref in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(x, ref, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_options_of_cross_entropy(reduction):
    results = []
    for deferred in (False, True):
        head, hidden = head_and_hidden()
        z = defer_logits(hidden, head, 61) if deferred else head(hidden)
        target = torch.arange(18) % 7
        loss = F.cross_entropy(z.view(-1, 61), target, ignore_index=3, reduction=reduction, label_smoothing=0.2)
        loss.backward(torch.linspace(1, 2, loss.numel()).view(loss.shape))
        results.append((loss, hidden.grad, head.weight.grad))
    for x, ref in zip(*results, strict=True):
        torch.testing.assert_close(x, ref, rtol=1e-5, atol=1e-7)


def test_class_weights_and_soft_targets_fall_back():
    head, hidden = head_and_hidden()
    weight, soft = torch.rand(61), torch.softmax(torch.randn(18, 61), -1)
    for target, options in ((torch.arange(18), {"weight": weight}), (soft, {})):
        want = F.cross_entropy(head(hidden).view(-1, 61), target, **options)
        got = F.cross_entropy(defer_logits(hidden, head, 61).view(-1, 61), target, **options)
        torch.testing.assert_close(got, want)


def test_an_unknown_operation_is_said_once(caplog):
    logger.warning_once.__func__.cache_clear()
    head, hidden = head_and_hidden()
    with caplog.at_level(logging.WARNING, "liger_trainer"):
        for _ in range(3):
            torch.testing.assert_close(defer_logits(hidden, head, 61).softmax(-1), head(hidden).softmax(-1))
    assert [r.message for r in caplog.records if "`softmax`" in r.message] == [
        "The fused LM head does not know `softmax` on logits: they are built in full. The numbers are right; "
        "the memory is not saved."
    ]


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "granite", "cohere2"])
@pytest.mark.parametrize("call", ["labels", "smoothing", "trl", "trl-all", "eval-loss"])
def test_no_tensor_of_tokens_times_vocabulary(model_type, call):
    model = fused(model_type, vocab_size=4096)
    batch = collate(ragged_rows(8))
    tokens = batch["input_ids"].numel()
    limit = max(tokens * 4096 - 1, model.get_output_embeddings().weight.numel())
    assert limit == tokens * 4096 - 1
    with LargestTensor() as largest:
        if call == "eval-loss":
            with torch.no_grad():
                assert model.eval()(**batch, skip_logits=True).logits is None
        else:
            kwargs = {
                "labels": {},
                "smoothing": {"label_smoothing": 0.1},
                "trl": {"fused_lm_head": True, "uniform_grad": True},
                "trl-all": {
                    "fused_lm_head": True,
                    "token_outputs": ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"),
                },
            }[call]
            model(**batch, **kwargs).loss.backward()
    assert largest.numel <= limit
    remove_liger(model)
    with LargestTensor() as control:
        model.train()(**batch).loss.backward()
    assert control.numel > limit  # the counter counts


def test_logits_are_returned_where_asked_for():
    model, batch = fused(), collate(ragged_rows(4))
    assert model(**batch).logits is None
    assert model(**batch, skip_logits=False).logits.shape == (*batch["input_ids"].shape, VOCAB)
    assert model(input_ids=batch["input_ids"]).logits.shape[-1] == VOCAB
    assert model.eval()(**batch).logits.shape[-1] == VOCAB
    loss, logits = model.train()(**batch, return_dict=False)[:2]
    assert isinstance(logits, torch.Tensor) and loss.ndim == 0


def test_a_call_of_the_model_inside_its_own():
    """A hook makes the inner call, which returns logits. The outer one still builds none."""
    model = fused()
    batch = collate(ragged_rows(2))
    inner = []
    want = model(**batch).loss

    def call(*_):
        if not inner:
            inner.append(None)
            inner[0] = model(input_ids=batch["input_ids"]).logits

    model.model.layers[0].register_forward_hook(call)
    outputs = model(**batch)
    assert isinstance(inner[0], torch.Tensor) and outputs.logits is None
    assert torch.equal(outputs.loss, want)


def test_trl_outputs_against_trl_s_own_head():
    from trl.trainer.utils import add_fused_lm_head

    names = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    batch = collate(ragged_rows(6))
    for model_type in ("llama", "gemma2", "granite", "cohere2"):
        stock = tiny_model(model_type)
        add_fused_lm_head(stock, temperature=0.7, outputs=names)
        model = tiny_model(model_type)
        install_fused_head(model, HeadOptions(temperature=0.7, outputs=names))
        want = stock(**batch, fused_lm_head=True)
        got = model(**batch, fused_lm_head=True)
        for name in ("loss", "label_mask", *names):
            torch.testing.assert_close(got[name], want[name], rtol=2e-5, atol=1e-6, msg=f"{model_type} {name}")
        upstream = torch.randn_like(want.log_probs)
        for output, _m in ((want, stock), (got, model)):
            ((output.log_probs * upstream).sum() * 3.7 + (output.entropy * upstream.flip(0)).sum()).backward()
        for (name, p), ref in zip(model.named_parameters(), stock.parameters(), strict=True):
            torch.testing.assert_close(p.grad, ref.grad, rtol=1e-3, atol=1e-5 * ref.grad.abs().max().item(), msg=name)


def test_shift_labels_and_hidden_states():
    model, batch = fused(), collate(ragged_rows(4))
    labels = batch.pop("labels")
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    want = model(**batch, labels=labels, fused_lm_head=True, token_outputs=("hidden_states",))
    got = model(**batch, shift_labels=shifted, fused_lm_head=True)
    torch.testing.assert_close(got.log_probs[:, :-1], want.log_probs)
    assert want.hidden_states.shape == (*want.log_probs.shape, 32) and want.entropy is None
    hf = model(**batch, labels=labels, shift_labels=shifted)
    torch.testing.assert_close(hf.loss, want.loss)
    with pytest.raises(ValueError, match="labels is None; pass labels"):
        model(**batch, fused_lm_head=True)


def test_a_broken_promise_of_uniform_gradients_is_never_silent():
    model, batch = fused(), collate(ragged_rows(4))
    outputs = model(**batch, fused_lm_head=True, uniform_grad=True)
    (outputs.log_probs * torch.rand_like(outputs.log_probs)).sum().backward()
    assert model.model.norm.weight.grad.isnan().all()


def test_all_labels_ignored_gives_the_loss_of_stock_and_zero_gradients():
    """A mean of nothing is NaN in transformers' models and in `LabelSmoother`, and 0 in TRL's fused head."""
    model, batch = fused(), collate(ragged_rows(4))
    batch["labels"].fill_(-100)
    for kwargs, want in (({}, torch.nan), ({"fused_lm_head": True}, 0.0), ({"label_smoothing": 0.1}, torch.nan)):
        model.zero_grad()
        loss = model(**batch, **kwargs).loss
        torch.testing.assert_close(loss.detach(), torch.tensor(want), rtol=0, atol=0, equal_nan=True)
        loss.backward()
        for name, p in model.named_parameters():
            assert p.grad is not None and (p.grad == 0).all(), name


def test_nan_reaches_the_loss():
    model, batch = fused(), collate(ragged_rows(4))
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    assert model(**batch).loss.isnan()
    assert model(**batch, fused_lm_head=True).loss.isnan()


def test_labels_outside_the_vocabulary():
    model, batch = fused(), collate(ragged_rows(4))
    batch["labels"][0, 3] = VOCAB
    with pytest.raises((ValueError, IndexError), match=str(VOCAB)):
        model(**batch)


def test_signature_and_generate_are_the_models_own():
    plain, model = tiny_model("llama"), fused()
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    prompt = torch.tensor([[5, 9, 11]])
    want = plain.eval().generate(prompt, max_new_tokens=8, do_sample=False)
    model(**collate(ragged_rows(4))).loss.backward()
    assert torch.equal(model.eval().generate(prompt, max_new_tokens=8, do_sample=False), want)


def test_deepcopy_pickle_and_removal():
    model, batch = fused(), collate(ragged_rows(4))
    before = {name: dict(vars(m)) for name, m in tiny_model("llama").named_modules()}
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    assert twin(**batch).logits is None
    torch.testing.assert_close(twin(**batch).loss, torch.tensor(float(VOCAB)).log())  # the copy's own head is used
    assert not torch.allclose(model(**batch).loss, twin(**batch).loss)
    restored = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(restored(**batch).loss, model(**batch).loss, rtol=1e-5, atol=0)
    remove_liger(model)
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys(), name
    assert model(**batch).logits is not None


def unpickled(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copied", [unpickled, lambda model: pickle.loads(pickle.dumps(model))])
def test_an_unpickled_model_is_unpatched_and_can_be_fused_again(copied):
    """Pickle drops all our methods, so it must drop everything else of ours that would claim they exist."""
    model, batch = fused(), collate(ragged_rows(4))
    want = model(**batch, label_smoothing=0.3).loss
    loaded = copied(model)
    assert not has_fused_head(loaded)
    assert loaded(**batch).logits is not None
    report = apply_liger(loaded)
    assert report["fused_linear_cross_entropy"].swapped == {"lm_head": "intercepted at the head"}
    assert has_fused_head(loaded) and loaded(**batch).logits is None
    torch.testing.assert_close(loaded(**batch, label_smoothing=0.3).loss, want)
    keys = {name: set(vars(m)) for name, m in tiny_model("llama").named_modules()}
    remove_liger(loaded)
    for name, module in loaded.named_modules():
        assert set(vars(module)) == keys[name], name
    assert loaded(**batch).logits is not None


def test_options_of_an_earlier_trainer_do_not_stay():
    model, batch = fused(), collate(ragged_rows(4))
    want = model(**batch, fused_lm_head=True).log_probs
    install_fused_head(model, HeadOptions(temperature=0.5))
    assert not torch.allclose(model(**batch, fused_lm_head=True).log_probs, want)
    apply_liger(model)
    torch.testing.assert_close(model(**batch, fused_lm_head=True).log_probs, want)


def test_loss_times_a_factor_plus_another_loss():
    model = fused()
    plain = tiny_model("llama").train()
    batch = collate(ragged_rows(4))
    for m in (model, plain):
        (3.7 * m(**batch).loss + 0.3 * m.model.norm.weight.square().sum()).backward()
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, gradients(plain)[name], rtol=1e-4, atol=1e-6, msg=name)


def test_a_second_backward_needs_a_kept_graph():
    """As in stock, gradients add up with `retain_graph=True`, and a second backward pass is an error without it."""
    model = fused()
    plain = tiny_model("llama").train()
    batch = collate(ragged_rows(4))
    for m in (model, plain):
        loss = m(**batch).loss
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, gradients(plain)[name], rtol=1e-4, atol=1e-6, msg=name)


def test_autocast():
    model = fused()
    plain = tiny_model("llama").train()
    batch = collate(ragged_rows(4))
    losses = []
    for m in (model, plain):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(m(**batch).loss)
        losses[-1].backward()
        assert m.lm_head.weight.grad.dtype == torch.float32
    torch.testing.assert_close(losses[0].float(), losses[1].float(), rtol=2e-3, atol=0)


def test_removed_and_installed_again_inside_a_wrapper():
    """accelerate wraps `model.forward` when training starts and leaves it so. There must be no endless recursion."""
    model, batch = fused(), collate(ragged_rows(4))
    want, ours = model(**batch).loss, model.forward
    model.forward = lambda *args, **kwargs: ours(*args, **kwargs)
    remove_liger(model)
    assert model(**batch).logits is not None
    assert install_fused_head(model) is None
    output = model(**batch)
    assert output.logits is not None  # which the wrapper may read
    torch.testing.assert_close(output.loss, want)
    torch.testing.assert_close(model(**batch, label_smoothing=1e-9).loss, want)


class PlainModule(torch.nn.Module):
    """A language model outside transformers: no config, and no backbone under a known name."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(31, 16)
        self.lm_head = torch.nn.Linear(16, 31, bias=False)

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, labels=None):
        logits = self.lm_head(self.embedding(input_ids))
        return (torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),)


def test_a_module_without_a_config():
    torch.manual_seed(0)
    model, ids = PlainModule(), torch.randint(0, 31, (2, 5))
    want = model(ids, labels=ids)[0]
    assert apply_liger(model)["fused_linear_cross_entropy"].swapped
    torch.testing.assert_close(model(input_ids=ids, labels=ids)[0], want)


def test_the_entropy_of_real_logits_with_words_ruled_out():
    """A model puts -inf in the place of words, for example."""
    logits = torch.tensor([[0.0, 0.0, float("-inf")]])
    options = {"temperature": 1.0, "label_smoothing": 0.0, "uniform_grad": False, "in_fp32": False}
    found = token_scores(logits, torch.tensor([1]), ("log_probs", "entropy"), **options)
    assert found["entropy"].tolist() == pytest.approx([math.log(2)]) == (-found["log_probs"]).tolist()
