"""Counts of rows that a run used, cut and dropped, compared with TRL; and data with nothing to learn."""

import json
import re
import shutil

import pytest
from recipe_fixtures import command, write_model, write_recipe

CHAT = (
    "{% for m in messages %}{{ m['content'] }} {% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("counts")
    write_model(folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(CHAT)
    return folder


@pytest.fixture
def folder(base, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "model").symlink_to(base / "model")
    return tmp_path


def words(n, first=3):
    return " ".join(f"w{first + i % 100}" for i in range(n))


def train(capsys, folder, rows, **keys):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"prompt_template": None, "max_steps": 1, "max_length": 10} | keys
    shutil.rmtree(folder / "out", ignore_errors=True)  # from an earlier call
    return command(capsys, "train", write_recipe(folder, **keys))


def rows_line(out):
    return re.search(r"^  rows +(.*)$", out, re.M)[1]


PAIRS = {
    "used": {"prompt": words(4) + " ", "completion": words(2, 20)},
    "cut": {"prompt": words(4) + " ", "completion": words(20, 20)},
    "dropped": {"prompt": words(20) + " ", "completion": words(2, 20)},
}


def as_pairs(row):
    return {"prompt": row["prompt"], "chosen": row["completion"], "rejected": words(1, 60)}


SETS = {
    "sft": [PAIRS["used"]] * 3 + [PAIRS["cut"]] * 2 + [PAIRS["dropped"]] * 4,
    "kto": [
        row | {"label": i % 2 == 0}
        for i, row in enumerate([PAIRS["used"]] * 3 + [PAIRS["cut"]] * 2 + [PAIRS["dropped"]] * 4)
    ],
    "dpo": [as_pairs(row) for row in [PAIRS["used"]] * 3 + [PAIRS["cut"]] * 2 + [PAIRS["dropped"]] * 4],
    "orpo": [as_pairs(row) for row in [PAIRS["used"]] * 3 + [PAIRS["cut"]] * 2],
    "cpo": [as_pairs(row) for row in [PAIRS["used"]] * 3 + [PAIRS["cut"]] * 2],
}


@pytest.mark.parametrize("trainer", ["sft", "medusa", "kto", "dpo"])
def test_rows_used_cut_and_dropped(trainer, folder, capsys, caplog):
    """The sequence of a cut row is longer than max_length; of a dropped one, the prompt is."""
    code, out, err = train(capsys, folder, SETS.get(trainer, SETS["sft"]), trainer=trainer)
    assert code == 0, err
    said = "5 used of 9; 2 cut to max_length 10, or as long; 4 dropped, with nothing to learn within max_length 10"
    assert rows_line(out) == said
    assert f"train rows: {said}" in caplog.messages


@pytest.mark.parametrize("trainer", ["orpo", "cpo"])
def test_rows_cut_of_pairs_that_trl_cuts_itself(trainer, folder, capsys):
    code, out, err = train(capsys, folder, SETS[trainer], trainer=trainer)
    assert code == 0, err
    assert rows_line(out) == "5 used of 5; 2 cut to max_length 10, or as long"


@pytest.mark.parametrize("trainer", ["orpo", "cpo"])
def test_a_prompt_that_fills_max_length_stops_pairs_without_reference(trainer, folder, capsys):
    """TRL keeps such a row with an empty completion, and its mean log-probability is 0 / 0."""
    code, _, err = train(capsys, folder, SETS["dpo"], trainer=trainer)
    assert code == 2 and "The prompt alone fills max_length 10 in 4 train rows" in err and "the first is row 6." in err


def test_exactly_max_length_counts_as_cut(folder, capsys):
    """4 tokens of prompt, 5 of the completion and the end make 10; ORPO puts the tokenizer's bos_token before them."""
    for trainer, lengths in (("sft", (4, 5, 6)), ("orpo", (3, 4, 5))):
        rows = [{"prompt": words(4) + " ", "completion": words(n, 20)} for n in lengths]
        code, out, err = train(capsys, folder, rows if trainer == "sft" else map(as_pairs, rows), trainer=trainer)
        assert code == 0, err
        assert rows_line(out) == "3 used of 3; 2 cut to max_length 10, or as long", trainer


@pytest.mark.parametrize(
    "strategy, line",
    [
        ("bfd", "9 used of 9; 6 cut to max_length 10, or as long; 4 with nothing to learn"),
        ("bfd_split", "9 used of 9"),
    ],
)
def test_packed_rows(strategy, line, folder, capsys):
    """Packing cuts only with `bfd`, and then TRL drops no row: rows with nothing to learn take up room."""
    code, out, err = train(capsys, folder, SETS["sft"], packing=True, packing_strategy=strategy)
    assert code == 0, err
    assert rows_line(out) == line


def test_keep_end_keeps_the_part_to_learn(folder, capsys):
    code, out, err = train(capsys, folder, SETS["sft"], truncation_mode="keep_end")
    assert code == 0, err
    assert rows_line(out) == "9 used of 9; 6 cut to max_length 10, or as long"


def test_counting_leaves_the_losses_unchanged(folder, capsys):
    """Counting changes neither batches nor losses."""
    from trl import SFTConfig, SFTTrainer

    from liger_trainer.command.recipe.read import parse_recipe

    rows = [{"prompt": words(4, i) + " ", "completion": words(3 * i + 1, 20 + i)} for i in range(8)]
    for i, extra in enumerate(({}, {"packing": True}, {"shuffle_dataset": True})):
        code, _, err = train(
            capsys, folder, rows, max_steps=4, use_liger=False, output_dir=str(folder / f"ours{i}"), **extra
        )
        assert code == 0, err
        ours = json.loads((folder / f"ours{i}" / "trainer_state.json").read_text())["log_history"]
        training = parse_recipe(str(folder / "recipe.yaml"), ["--output_dir", str(folder / "stock")]).training
        given = {
            key: getattr(training, key)
            for key in (
                "max_length",
                "max_steps",
                "per_device_train_batch_size",
                "gradient_checkpointing",
                "learning_rate",
                "bf16",
                "logging_steps",
                "report_to",
                "save_strategy",
                "disable_tqdm",
                "packing",
                "shuffle_dataset",
                "output_dir",
            )
        }
        from datasets import load_dataset

        data = load_dataset("json", data_files=str(folder / "rows.jsonl"), split="train")
        stock = SFTTrainer(str(folder / "model"), SFTConfig(**given), train_dataset=data)
        stock.train()
        for name in ("loss", "grad_norm", "num_tokens"):
            expected = [entry[name] for entry in stock.state.log_history if name in entry]
            assert [entry[name] for entry in ours if name in entry] == expected and expected, (extra, name)


EMPTY = {
    "empty texts": ("sft", [{"text": ""}] * 4, "Nothing can be learned from the 4 train rows"),
    "empty texts, packed": ("sft", [{"text": ""}] * 4, "Nothing can be learned from the 4 train rows"),
    "labels that never count": (
        "sft",
        [{"input_ids": [5, 6, 7], "labels": [-100] * 3}] * 4,
        "Nothing can be learned from the 4 train rows",
    ),
    "beyond max_length": ("sft", [PAIRS["dropped"]] * 4, "in the loss within max_length 10"),
    "beyond max_length, packed": ("sft", [PAIRS["dropped"]] * 4, "in the loss within max_length 10"),
    "kto": ("kto", [PAIRS["dropped"] | {"label": i % 2 == 0} for i in range(4)], "in the loss within max_length 10"),
    "one label": (
        "kto",
        [{"prompt": "w4 ", "completion": f"w{i}", "label": True} for i in range(5, 9)],
        "label is the same in all rows",
    ),
    "the other label": (
        "kto",
        [{"prompt": "w4 ", "completion": f"w{i}", "label": False} for i in range(5, 9)],
        "label is the same in all rows",
    ),
}

EMPTY |= {
    "a token id outside the vocabulary": (
        "sft",
        [{"input_ids": [5, 6, 7]}, {"input_ids": [5, 999999]}] * 2,
        "input_ids of the train rows has the token 999999, but the model has",
    ),
    "a negative token id": ("sft", [{"input_ids": [5, -1, 7]}] * 4, "input_ids of the train rows has the token -1"),
    "a label outside the vocabulary": (
        "sft",
        [{"input_ids": [5, 6, 7], "labels": [-100, 6, -7]}] * 4,
        "labels of the train rows has the token -7",
    ),
}


@pytest.mark.parametrize("trainer, rows, message", EMPTY.values(), ids=EMPTY)
def test_nothing_to_learn_is_an_error(trainer, rows, message, folder, capsys, request):
    code, out, err = train(capsys, folder, rows, trainer=trainer, packing="packed" in request.node.name or None)
    assert code == 2, out
    assert message in err
    assert not list(folder.glob("out/*")), "nothing was trained"


def test_rows_without_anything_to_learn_are_counted(folder, capsys):
    code, out, err = train(capsys, folder, [{"text": ""}, {"text": "w4 w5"}, {"text": ""}], max_length=None)
    assert code == 0, err
    assert rows_line(out) == "3 used of 3; 2 with nothing to learn"


def test_a_label_that_the_trainer_does_not_read(folder, capsys, caplog):
    rows = [{"prompt": "w4 ", "completion": f"w{5 + i}", "label": i % 2 == 0} for i in range(4)]
    for trainer in ("kto", "sft"):
        assert "column label" not in caplog.text
        code, _, err = train(capsys, folder, rows, trainer=trainer)
        assert code == 0, err
    assert "The rows have a column label, which LigerSFTTrainer does not read" in caplog.text


def test_a_tokenizer_with_more_tokens_than_the_model(base, tmp_path, capsys):
    """Added tokens without new embeddings would be an IndexError in the first step; on a GPU, a device assert."""
    from transformers import AutoTokenizer

    shutil.copytree(base / "model", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.add_tokens([f"<new{i}>" for i in range(200)])
    tokenizer.save_pretrained(tmp_path / "model")
    pair = {"prompt": "w4 ", "chosen": "<new199>", "rejected": ""}
    for trainer, row in (("sft", {"text": "w4 <new199>"}), ("dpo", pair)):
        code, _, err = train(capsys, tmp_path, [row] * 4, trainer=trainer)
        assert code == 2, err
        assert "of the train rows has the token" in err


def test_pairs_that_kto_takes_apart_are_counted_as_it_does(folder, capsys):
    code, out, err = train(capsys, folder, SETS["dpo"][:5], trainer="kto")
    assert code == 0, err
    assert rows_line(out) == "10 used of 10; 2 cut to max_length 10, or as long"


def test_evaluation_rows_are_counted_too(folder, capsys, caplog):
    (folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SETS["sft"]))
    keys = {"eval_dataset_name": "eval.jsonl", "eval_strategy": "steps", "eval_steps": 1}
    code, out, err = train(capsys, folder, SETS["sft"][:5], **keys)
    assert code == 0, err
    assert any(
        line.startswith("eval rows: 5 used of 9; 2 cut to max_length 10, or as long; 4 dropped")
        for line in caplog.messages
    )
    assert rows_line(out) == "5 used of 5; 2 cut to max_length 10, or as long"
    (folder / "eval.jsonl").write_text(json.dumps(PAIRS["dropped"]) + "\n")
    code, out, err = train(capsys, folder, SETS["sft"][:5], **keys)
    assert code == 2 and "Nothing can be learned from the 1 eval rows" in err


def test_parameters_and_evaluation_in_the_summary(folder, capsys):
    from transformers import AutoModelForCausalLM

    total = AutoModelForCausalLM.from_pretrained(folder / "model").num_parameters()
    rows = [{"text": words(5, i)} for i in range(6)]
    keys = {"eval_fraction": 0.34, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}
    code, out, err = train(capsys, folder, rows, **keys)
    assert code == 0, err
    assert re.search(rf"^  trains   {total:,} of {total:,} parameters", out, re.M), out
    logs = json.loads((folder / "out" / "trainer_state.json").read_text())["log_history"]
    first, last = (entry["eval_loss"] for entry in logs if "eval_loss" in entry)
    best, step = min((first, 2), (last, 4))
    assert f"\n  eval     loss {first:.3f} -> {last:.3f}, best {best:.3f} at step {step}\n" in out, out

    lora = {"use_peft": True, "lora_r": 4, "lora_target_modules": ["q_proj", "v_proj"]}
    code, out, err = train(capsys, folder, rows, **lora)
    assert code == 0, err
    trained = int(re.search(r"^  trains   ([\d,]+) of", out, re.M)[1].replace(",", ""))
    adapter = adapter_size(folder / "out")
    assert trained == adapter
    whole = total + adapter
    assert re.search(rf"^  trains   {trained:,} of {whole:,} parameters \({trained / whole:.2%}\)$", out, re.M), out
    assert not re.search(r"^  eval ", out, re.M)


def adapter_size(folder):
    from safetensors.torch import load_file

    return sum(tensor.numel() for tensor in load_file(folder / "adapter_model.safetensors").values())


REFUSING = CHAT.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if m['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}",
)


@pytest.mark.parametrize("trainer", ["sft", "dpo"])
def test_a_chat_template_that_refuses_a_row(trainer, base, tmp_path, capsys):
    """Templates raise a jinja2 error for an unknown role or for turns out of order."""
    (tmp_path / "model").mkdir()
    for file in (base / "model").iterdir():
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model" / "chat_template.jinja").write_text(REFUSING)
    user = {"role": "user", "content": "w4"}
    answer = {"role": "assistant", "content": "w5"}
    system = {"role": "system", "content": "w6"}
    rows = [{"messages": [user, answer]}, {"messages": [system, user, answer]}]
    if trainer == "dpo":
        rows = [{"prompt": [*head, user], "chosen": [answer], "rejected": [user]} for head in ([], [system])]
    code, _, err = train(capsys, tmp_path, rows, trainer=trainer)
    assert code == 2, err
    assert "a chat template refuses a row: System role not supported" in err


def test_a_conversation_without_the_assistant(folder, capsys):
    template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
        "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    (folder / "chat.jinja").write_text(template)
    keys = {"assistant_only_loss": True, "chat_template_path": str(folder / "chat.jinja")}
    code, _, err = train(capsys, folder, [{"messages": [{"role": "user", "content": "w4"}]}] * 2, **keys)
    assert code == 2 and "learned, but row 0 of the dataset has none in messages" in err, err


def test_what_the_counts_stand_on_in_trl():
    """The counts use these names of TRL: its two-step preparation, the column that marks it done, the cut of pairs."""
    import inspect

    from trl import DPOTrainer, KTOTrainer, SFTTrainer
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    parameters = list(inspect.signature(SFTTrainer._prepare_dataset).parameters)
    assert parameters == [
        "self",
        "dataset",
        "processing_class",
        "args",
        "packing",
        "formatting_func",
        "dataset_name",
    ], "trl's SFTTrainer._prepare_dataset has other parameters"
    source = inspect.getsource(SFTTrainer._prepare_dataset)
    for line in ('is_processed = "input_ids" in column_names', 'if "labels" not in column_names:'):
        assert line in source, f"trl's SFTTrainer._prepare_dataset no longer has: {line}"
    for trainer, column in ((DPOTrainer, "chosen_ids"), (KTOTrainer, "completion_ids")):
        assert f'"{column}"' in inspect.getsource(trainer._prepare_dataset), f"trl's {trainer.__name__} has no {column}"
    for trainer in (ORPOTrainer, CPOTrainer):
        assert "self.max_length" in inspect.getsource(trainer.tokenize_row), f"trl's {trainer.__name__} cuts elsewhere"
