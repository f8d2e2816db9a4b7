"""The Medusa loss against brute force: value, every gradient and the logs, for any form of batch."""

import pytest
import torch
from datasets import Dataset
from medusa_brute_force import brute_force, medusa_trainer, model_with_heads, packed_batch, plain_copy, ragged_batch
from tiny_models import (
    LargestTensor,
    assert_same_gradients,
    collate,
    gradients,
    ragged_rows,
    tiny_model,
    tiny_tokenizer,
)

import liger_trainer.medusa.loss as medusa_loss
from liger_trainer import LigerSFTConfig, LigerSFTTrainer
from liger_trainer.head.targets import head_targets, token_positions
from liger_trainer.verify.observed import KeepGradients

CASES = [
    pytest.param("llama", 1, True, "hard", packed_batch, id="stage1-tied-hard-packed"),
    pytest.param("llama", 1, False, "hard", ragged_batch, id="stage1-untied-hard-padded"),
    pytest.param("llama", 1, True, "soft", ragged_batch, id="stage1-tied-soft-padded"),
    pytest.param("llama", 1, False, "soft", packed_batch, id="stage1-untied-soft-packed"),
    pytest.param("llama", 2, True, "hard", ragged_batch, id="stage2-tied-hard-padded"),
    pytest.param("llama", 2, False, "hard", packed_batch, id="stage2-untied-hard-packed"),
    pytest.param("llama", 2, True, "soft", packed_batch, id="stage2-tied-soft-packed"),
    pytest.param("gemma2", 2, False, "soft", ragged_batch, id="stage2-untied-soft-padded-softcap"),
    pytest.param("granite", 2, True, "hard", packed_batch, id="stage2-tied-hard-packed-scale"),
]


@pytest.mark.parametrize("model_type, stage, tied, targets, batch", CASES)
def test_loss_and_every_gradient(model_type, stage, tied, targets, batch, tmp_path):
    """Each head has two blocks. A frozen parameter has no gradient; a trained one has brute force's."""
    batch = batch()
    model = model_with_heads(model_type, num_layers=2, tied=tied)
    trainer = medusa_trainer(
        model,
        tmp_path,
        medusa_stage=stage,
        medusa_tied=tied,
        medusa_targets=targets,
        medusa_num_layers=2,
        medusa_heads_coefficient=0.6,
    )
    twin = plain_copy(model)
    want, report = brute_force(twin, batch, stage, targets, decay=0.7, coefficient=0.6)
    want.backward()
    model.train()
    got = trainer.compute_loss(model, dict(batch))
    got.backward()
    torch.testing.assert_close(got, want.detach(), rtol=1e-5, atol=0)
    assert_same_gradients(gradients(model), gradients(twin), floor=0)
    trained = {n for n, p in model.named_parameters() if stage == 2 or "medusa_head" in n}
    assert gradients(model).keys() == trained

    trainer.compute_loss(model, dict(batch))  # a second micro-batch: logs are means over both
    logs = {}
    trainer.log(logs)
    for k, (loss, accuracy, _) in enumerate(report):
        names = (f"medusa_head{k}_loss", f"medusa_head{k}_accuracy") if k else ("lm_loss", "mean_token_accuracy")
        assert k or stage == 2 or not set(names) & logs.keys()  # stage 1 computes no loss of the LM head
        if k or stage == 2:
            assert logs[names[0]] == pytest.approx(loss, rel=1e-5)
            assert logs[names[1]] == pytest.approx(accuracy)


def test_the_rest_of_stage_2_is_the_loss_of_sft(tmp_path):
    """Without the heads' part, the loss is `LigerSFTTrainer`'s, including a mixture of experts' auxiliary loss."""
    model, batch = tiny_model("qwen3_moe"), ragged_batch()
    args = LigerSFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    rows = Dataset.from_list(ragged_rows())
    sft = LigerSFTTrainer(plain_copy(model), args, train_dataset=rows, processing_class=tiny_tokenizer())
    assert sft.aux_loss_enabled
    want = sft.compute_loss(sft.model.train(), dict(batch))
    trainer = medusa_trainer(model, tmp_path, medusa_stage=2, medusa_heads_coefficient=0.5)
    got = trainer.compute_loss(model.train(), dict(batch))
    _, report = brute_force(model, batch, 2, "hard", decay=0.7, coefficient=0.5)
    heads = sum(0.5 * 0.7**k * loss * rows for k, (loss, _, rows) in enumerate(report) if k) / report[0][2]
    assert float(got.detach()) == pytest.approx(float(want.detach()) + heads, rel=1e-5)
    assert float(want.detach()) != pytest.approx(report[0][0], rel=1e-5)  # there is an auxiliary loss


SPLITS = [
    pytest.param(1, True, False, id="stage1-tied-padded"),
    pytest.param(1, False, True, id="stage1-untied-packed"),
    pytest.param(2, True, True, id="stage2-tied-packed"),
    pytest.param(2, False, False, id="stage2-untied-padded"),
]


@pytest.mark.parametrize("stage, tied, packed", SPLITS)
def test_every_split_of_the_batch(stage, tied, packed, tmp_path):
    """One step on 8 ragged rows in one or more micro-batches has one divisor for all heads and micro-batches.

    If packed, the collator joins a micro-batch's rows, and the loss does not change.
    """
    rows = ragged_rows(8)
    twin = model_with_heads(tied=tied)
    want, report = brute_force(twin, collate(rows), stage, "hard", decay=0.7, coefficient=0.5)
    want.backward()
    for batch, accumulation in ((8, 1), (4, 2), (1, 8)):
        keep = KeepGradients()
        trainer = medusa_trainer(
            model_with_heads(tied=tied),
            tmp_path,
            rows,
            {"callbacks": [keep]},
            medusa_stage=stage,
            medusa_tied=tied,
            medusa_heads_coefficient=0.5,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
            padding_free=packed,
            max_length=None if packed else 64,
        )
        assert (next(iter(trainer.get_train_dataloader()))["input_ids"].shape[0] == 1) == (packed or batch == 1)
        trainer.train()
        want_grads = {n: g for n, g in gradients(twin).items() if n in keep.steps[0]}
        assert_same_gradients(keep.steps[0], want_grads, floor=0)
        log = trainer.state.log_history[0]
        assert log["loss"] == pytest.approx(float(want.detach()), rel=1e-5)
        for k in (1, 2, 3):
            assert log[f"medusa_head{k}_loss"] == pytest.approx(report[k][0], rel=1e-5)
        assert log["num_tokens"] == sum(len(row["input_ids"]) for row in rows)


def test_evaluation_counts_every_head(tmp_path):
    """Evaluation uses the full weight of the heads, even if the schedule has not started."""
    model = model_with_heads()
    trainer = medusa_trainer(model, tmp_path, ragged_rows(8), medusa_schedule="linear")
    result = trainer.evaluate()
    want, report = brute_force(model.eval(), collate(ragged_rows(8)), 1, "hard", decay=0.7, coefficient=1.0)
    assert result["eval_loss"] == pytest.approx(float(want.detach()), rel=1e-5)
    for k in (1, 2, 3):
        assert result[f"eval_medusa_head{k}_loss"] == pytest.approx(report[k][0], rel=1e-5)
        assert result[f"eval_medusa_head{k}_accuracy"] == pytest.approx(report[k][1])


@pytest.mark.parametrize("num_heads", [1, 4])
@pytest.mark.parametrize("targets", ["hard", "soft"])
def test_no_logits_whatever_the_number_of_heads(targets, num_heads, tmp_path, monkeypatch):
    """In stage 1, as many rows meet the vocabulary as there are heads: no LM head loss is computed needlessly."""
    import liger_triton._chunks as chunks

    monkeypatch.setattr(chunks, "_CPU_CHUNK_BYTES", 4 * 4096 * 8)  # 8 rows of logits
    model = model_with_heads(num_heads=num_heads, vocab_size=4096)
    trainer = medusa_trainer(model, tmp_path, medusa_num_heads=num_heads, medusa_targets=targets)
    heads = []
    for name in ("linear_heads_cross_entropy", "linear_heads_kl"):
        stock = getattr(medusa_loss, name)

        def counting(rows, *args, stock=stock, **kwargs):
            heads.append(len(rows))
            return stock(rows, *args, **kwargs)

        monkeypatch.setattr(medusa_loss, name, counting)
    batch = ragged_batch(16)
    with LargestTensor() as largest:
        trainer.compute_loss(model.train(), batch).backward()
    assert sum(heads) == num_heads
    # fp32 logits of a chunk, or what students and teacher need for a window of K rows and more
    assert largest.numel < batch["input_ids"].numel() * 4096 / 4


def nodes_of(loss):
    """Names of the graph nodes above `loss`."""
    todo, seen = [loss.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [after for after, _ in node.next_functions]
    return {type(node).__name__ for node in seen}


@pytest.mark.parametrize("tied", [True, False])
def test_heads_on_a_frozen_model_keep_nothing_for_the_backward_pass(tied, tmp_path):
    """Memory does not grow with the number of heads: each head's tensors are freed before the next."""
    model = model_with_heads(tied=tied)
    loss = medusa_trainer(model, tmp_path, medusa_tied=tied).compute_loss(model.train(), ragged_batch(4))
    assert "_WithGradientsBackward" in nodes_of(loss) and not any("Silu" in name for name in nodes_of(loss))
    model = model_with_heads(tied=tied)
    loss = medusa_trainer(model, tmp_path, medusa_tied=tied, medusa_stage=2).compute_loss(model, ragged_batch(4))
    assert any("Silu" in name for name in nodes_of(loss)), "the name that the first line looks for"


def test_gradient_checkpointing_changes_nothing(tmp_path):
    grads = []
    for checkpointing in (False, True):
        keep = KeepGradients()
        medusa_trainer(
            model_with_heads(),
            tmp_path,
            None,
            {"callbacks": [keep]},
            medusa_stage=2,
            max_steps=1,
            gradient_checkpointing=checkpointing,
        ).train()
        grads.append(keep.steps[0])
    assert_same_gradients(*grads, floor=0)


def test_a_frozen_model_runs_without_dropout(tmp_path):
    """In stage 1, heads learn from the hidden states that the model will have when served."""
    model = model_with_heads(attention_dropout=0.5)
    trainer = medusa_trainer(model, tmp_path)
    batch = ragged_batch(4)
    losses = {float(trainer.compute_loss(model.train(), dict(batch))) for _ in range(2)}
    want, _ = brute_force(model.eval(), batch, 1, "hard", decay=0.7, coefficient=1.0)
    assert len(losses) == 1 and losses.pop() == pytest.approx(float(want.detach()), rel=1e-5)
    assert not model.training  # as brute_force left it: the trainer restores the mode
    trainer.compute_loss(model.train(), dict(batch))
    assert model.training and model.medusa_head.training


# Targets

BATCH = packed_batch()
DOCUMENTS = (9, 3, 12, 5)


def test_positions_say_the_same_however_documents_are_marked():
    ids, labels = BATCH["input_ids"], BATCH["labels"]
    number = torch.repeat_interleave(torch.arange(4), torch.tensor(DOCUMENTS))[None]
    borders = torch.tensor([0, *torch.tensor(DOCUMENTS).cumsum(0)], dtype=torch.int32)
    for marks in (
        {"position_ids": BATCH["position_ids"]},
        {"position_ids": BATCH["position_ids"].expand(3, 1, -1)},
        {"seq_idx": number.to(torch.int32)},
        {"cu_seq_lens_q": borders},
    ):
        batch = {"input_ids": ids, "labels": labels} | marks
        assert torch.equal(token_positions(batch), BATCH["position_ids"]), marks.keys()
        assert torch.equal(head_targets(batch, 3), head_targets(BATCH, 3))


def test_no_head_looks_over_a_border():
    """The collator masks one label per document, which protects only the LM head.

    Trainers that only shift fail here.
    """
    targets = head_targets(BATCH, 4)
    ends = torch.tensor(DOCUMENTS).cumsum(0)
    for k in range(5):
        for end in ends:
            assert (targets[k, 0, end - min(k + 1, 3) : end] == -100).all()
    assert targets[4, 0, 0] == -100 and targets[4, 0, 1] == BATCH["labels"][0, 6]  # label 5 is masked, 6 is not


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_is_neither_a_row_nor_a_target(side):
    ids = torch.arange(3, 9)
    pad = torch.zeros(3, dtype=torch.long)
    parts = (ids, pad) if side == "right" else (pad, ids)
    mask = (torch.cat(parts) != 0).long()[None]
    batch = {"labels": torch.where(mask.bool(), torch.cat(parts), -100), "attention_mask": mask}
    start = 0 if side == "right" else 3
    for k in (1, 2):
        want = torch.full((9,), -100)
        want[start : start + 5 - k] = ids[k + 1 :]
        assert torch.equal(head_targets(batch, 2)[k, 0], want)


def test_more_heads_than_tokens():
    targets = head_targets({"labels": torch.tensor([[5, 6]])}, 3)
    assert targets.tolist() == [[[6, -100]], *[[[-100, -100]]] * 3]


def test_a_short_batch_has_finite_zero_gradients(tmp_path):
    model = model_with_heads()
    trainer = medusa_trainer(model, tmp_path)
    loss = trainer.compute_loss(model.train(), {"input_ids": torch.tensor([[5, 6]]), "labels": torch.tensor([[5, 6]])})
    loss.backward()
    assert loss == 0 and all((g == 0).all() for g in gradients(model).values())


@pytest.mark.parametrize("labels, rows", [("all", [8 * 7, 8 * 6, 8 * 5]), ("some", [1] * 3), ("none", [0] * 3)])
def test_heads_on_a_frozen_model_compute_no_row_that_they_do_not_guess_from(labels, rows, tmp_path):
    """At t, head k guesses token t + k + 1. So k + 1 rows of each document have nothing to guess."""
    model = model_with_heads()
    trainer = medusa_trainer(model, tmp_path)
    ids = torch.randint(3, 131, (8, 9), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": torch.full_like(ids, -100)}
    if labels == "all":
        batch["labels"] = ids
    elif labels == "some":
        batch["labels"][5, 6] = ids[5, 6]
    seen = []
    for head in model.medusa_head:
        head[0].linear.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[:-1].numel()))
    loss = trainer.compute_loss(model, batch)
    loss.backward()
    assert seen == rows
    assert (loss > 0) == (sum(rows) > 0) and all(p.grad.isfinite().all() for p in model.medusa_head.parameters())
