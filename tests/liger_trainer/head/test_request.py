"""What a call asks of the head, by a `HeadRequest` or by keywords of the model's call."""

from dataclasses import fields, replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import collate, ragged_rows, tiny_model

from liger_trainer.head.calls import install_fused_head
from liger_trainer.head.request import HeadRequest, run_request

ALL = ("entropy", "is_top1", "vocab_mean")
SAME = {
    "nothing": ({}, HeadRequest()),
    "logits": ({"skip_logits": False}, HeadRequest(skip_logits=False)),
    "predictions": ({"token_predictions": True}, HeadRequest(token_predictions=True)),
    "smoothed": ({"label_smoothing": 0.3}, HeadRequest(label_smoothing=0.3)),
    "trl": ({"fused_lm_head": True}, HeadRequest(token_scores=True)),
    "trl-all": (
        {"fused_lm_head": True, "token_outputs": ALL, "uniform_grad": True, "label_smoothing": 0.1},
        HeadRequest(token_scores=True, token_outputs=ALL, uniform_grad=True, label_smoothing=0.1),
    ),
}


def fused(**config):
    model = tiny_model("llama", **config).train()
    assert install_fused_head(model) is None
    return model


def assert_same_outputs(got, want):
    assert type(got) is type(want) and got.keys() == want.keys()
    for name, value in want.items():
        if isinstance(value, dict):
            torch.testing.assert_close(got[name], value, rtol=0, atol=0)
        elif isinstance(value, torch.Tensor):
            assert torch.equal(got[name], value), name


@pytest.mark.parametrize("wrapped", [False, True], ids=["model", "peft"])
@pytest.mark.parametrize("name", SAME)
def test_keywords_and_a_request_ask_for_the_same(name, wrapped):
    keywords, request = SAME[name]
    model, batch = fused(), collate(ragged_rows(4))
    if wrapped:
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])).train()
    want = model(**batch, use_cache=False, **keywords)
    got = run_request(model, request, **batch, use_cache=False)
    assert_same_outputs(got, want)
    assert (got.get("logits") is None) == (name != "logits")


def test_each_field_has_a_keyword():
    """Functions that compute the answer themselves or read the logits are the exception. Trainers pass them."""
    call = {
        "input_ids": None,
        "skip_logits": True,
        "fused_lm_head": True,
        "token_outputs": ALL,
        "label_smoothing": 0.2,
        "uniform_grad": True,
        "token_predictions": True,
    }
    request = HeadRequest.taken_from(call)
    assert call == {"input_ids": None}
    unset = [field.name for field in fields(HeadRequest) if getattr(request, field.name) == field.default]
    assert unset == ["logits_consumer", "logits_observer"]


def test_keywords_refine_a_request():
    call = HeadRequest(token_scores=True, label_smoothing=0.1).added_to({"labels": None})
    call["token_predictions"] = True
    request = HeadRequest.taken_from(call)
    assert request == HeadRequest(token_scores=True, label_smoothing=0.1, token_predictions=True)
    assert call == {"labels": None}


@pytest.mark.parametrize("name", SAME)
def test_a_request_can_be_rebuilt_from_its_fields(name):
    """FSDP does so with every dataclass in the arguments of a forward when it casts the tensors in them."""
    request = SAME[name][1]
    rebuilt = replace(request, **{field.name: getattr(request, field.name) for field in fields(request)})
    assert rebuilt == request and rebuilt.replaces_loss is request.replaces_loss
    assert request.replaces_loss is (name in ("smoothed", "trl", "trl-all"))


def test_a_request_for_nothing_adds_nothing_to_a_call():
    """A model's wrapper need not know of requests."""
    assert HeadRequest().added_to({"labels": 1}) == {"labels": 1}


def test_a_consumer_makes_the_answer_alone():
    with pytest.raises(ValueError, match="logits_consumer is set, .* and so is token_scores, .*Leave those out"):
        HeadRequest(logits_consumer=lambda run: run(), token_scores=True)


def test_scores_keep_no_keys_and_values():
    """Only scores are wanted, so the default of the model's config does not apply. A call may still ask for them."""
    model, batch = fused(), collate(ragged_rows(4))
    seen = []
    model.model.register_forward_pre_hook(lambda m, args, kwargs: seen.append(kwargs["use_cache"]), with_kwargs=True)
    model(**batch, fused_lm_head=True)
    model(**batch, fused_lm_head=True, use_cache=True)
    model(**batch)
    assert seen == [False, True, None]


def test_predictions_are_there_with_logits_too():
    """A user's hook may need outputs with logits, for example."""
    model, batch = fused(), collate(ragged_rows(4))
    want = model(**batch, token_predictions=True)
    got = model(**batch, token_predictions=True, skip_logits=False)
    assert want.logits is None and got.logits is not None
    torch.testing.assert_close(got["predictions"], want["predictions"], rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_takes_requests_without_being_compiled_again():
    model, batch = fused(num_hidden_layers=1), collate(ragged_rows(4))
    want = run_request(model, HeadRequest(token_scores=True, uniform_grad=True), **batch, use_cache=False)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(3):  # each with its own request, as trainers make them
        got = run_request(compiled, HeadRequest(token_scores=True, uniform_grad=True), **batch, use_cache=False)
        torch.testing.assert_close(got.log_probs, want.log_probs, rtol=1e-5, atol=1e-6)
    assert len(graphs) == 1
    torch._dynamo.reset()


def test_an_observer_sees_the_logits_once_they_are_scored():
    """It gets deferred logits, and its return value becomes a field of the answer. It is not called without scores."""
    model = tiny_model("llama")
    install_fused_head(model)
    ids = torch.tensor([[5, 9, 11, 40]])
    seen = []

    def observe(logits):
        seen.append((logits.is_materialized, logits.hidden))
        return logits.hidden.sum()

    request = HeadRequest(token_scores=True, logits_observer=observe)
    got = run_request(model, request, input_ids=ids, labels=ids)
    want = run_request(model, HeadRequest(token_scores=True), input_ids=ids, labels=ids)
    assert torch.equal(got.log_probs, want.log_probs) and want.observed is None
    ((was_built, hidden),) = seen
    assert not was_built and torch.equal(got.observed, hidden.sum())
    with pytest.raises(ValueError, match="logits_observer is set and token_scores is not"):
        HeadRequest(logits_observer=observe)
