"""Mistakes of the first hour: each message blames what is wrong, and says what to do."""

import csv
import json
import re

import pytest
from recipe_fixtures import command, write_recipe

from liger_trainer.command.recipe import parser
from liger_trainer.command.recipe.trainers import TRAINERS

QUESTIONS = [{"question": f"w{10 + i} w20", "answer": f"w{30 + i} w40"} for i in range(6)]
CHAT = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


@pytest.fixture
def own_rows(folder):
    """A folder with a tiny model that has a chat template, and questions and answers in qa.csv."""
    (folder / "model" / "chat_template.jinja").write_text(CHAT)
    with open(folder / "qa.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["question", "answer"])
        writer.writeheader()
        writer.writerows(QUESTIONS)
    return folder


def train(capsys, folder, *options, **keys):
    defaults = {
        "dataset_name": "qa.csv",
        "prompt_template": None,
        "columns": {"question": "question", "answer": "answer"},
    }
    return command(capsys, "train", write_recipe(folder, **(defaults | keys)), *options)


def test_a_misspelt_column_of_the_data_is_not_the_wrong_way_round(own_rows, capsys):
    code, _, err = train(capsys, own_rows, "--dry_run", columns={"question": "quest", "answer": "answer"})
    assert code == 2 and "columns names 'quest'. Did you mean question?" in err and "wrong way" not in err
    code, _, err = train(capsys, own_rows, "--dry_run", columns={"q": "question", "a": "answer"})
    assert code == 2 and "columns sets 'a', which the trainer does not read" in err
    assert "Its name comes first: columns: {question: ..., answer: ...}." in err


def test_a_split_that_a_file_does_not_have_names_its_key(own_rows, capsys):
    code, _, err = train(capsys, own_rows, "--dry_run", dataset_eval_split="test", eval_strategy="epoch")
    assert code == 2 and "Correct dataset_eval_split. To hold out rows of it, set eval_fraction: 0.1" in err
    code, _, err = train(capsys, own_rows, "--dry_run", dataset_train_split="tran")
    assert code == 2 and "Correct dataset_train_split." in err and "eval_fraction" not in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"question,answer\n", "cannot be loaded: it has no rows."),
        (b"\n\n", "cannot be loaded: it has no rows."),
        (b"question,answer,answer\nw5,w6,w7\n", "the header of qa.csv has the column 'answer' twice. Rename one"),
        ("question,answer\ncafé,w5\n".encode("latin-1"), "it is not in UTF-8"),
    ],
    ids=["no rows", "no header", "two columns of a name", "Latin-1"],
)
def test_a_file_that_cannot_be_read(content, message, own_rows, capsys):
    (own_rows / "qa.csv").write_bytes(content)
    code, _, err = train(capsys, own_rows, "--dry_run")
    assert code == 2 and message in err
    assert "no data!" not in err


def test_rows_without_a_learned_token_cause_no_warning_of_numpy(own_rows, capsys, recwarn):
    code, _, err = train(capsys, own_rows, max_length=2)
    assert code == 2 and "Nothing can be learned from the 6 train rows" in err and "--preview" in err
    assert not [warning for warning in recwarn if warning.category is RuntimeWarning]


def test_the_model_is_not_written_over(own_rows, capsys):
    before = (own_rows / "model" / "model.safetensors").read_bytes()
    for resumes in ("false", "auto"):
        code, _, err = train(capsys, own_rows, output_dir=str(own_rows / "model"), resume_from_checkpoint=resumes)
        assert code == 2 and "the folder of model_name_or_path, which would be written over" in err
        assert "delete" not in err
    assert (own_rows / "model" / "model.safetensors").read_bytes() == before


def test_a_finished_run_is_said_to_be_finished(own_rows, capsys):
    keys = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    code, _, err = train(capsys, own_rows, **keys)
    assert code == 0 and "training 2 steps. The first one takes longest." in err
    code, _, err = train(capsys, own_rows, resume_from_checkpoint=True, **keys)
    assert code == 0 and "training 0 steps" not in err
    assert re.search(
        r"nothing is left to train: the run in '.*out' has had its 2 steps. To go on, raise max_steps", err
    )


def test_short_prompts_that_all_answers_repeat_are_told(own_rows, capsys):
    rows = [{"prompt": f"w{i}", "chosen": f"w{i} w50", "rejected": f"w{i} w51"} for i in range(10, 14)]
    (own_rows / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"trainer": "dpo", "dataset_name": "pairs.jsonl", "columns": None}
    code, _, err = train(capsys, own_rows, "--dry_run", **keys)
    assert code == 0 and "chosen begins with the prompt in 4 of 4 rows, first in row 0" in err
    rows[0]["chosen"] = "w50"  # by chance, in three of four rows
    (own_rows / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, _, err = train(capsys, own_rows, "--dry_run", **keys)
    assert code == 0 and "chosen begins with" not in err


def test_a_folder_that_is_not_there(folder, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for words in (("chat", "nowhere"), ("doctor", "nowhere")):
        code, _, err = command(capsys, *words)
        assert code == 2 and "No folder here has the name 'nowhere', so it is taken for a name on the Hub" in err
    code, _, err = command(capsys, "chat", "nowhere", "--base")
    assert code == 2 and "--base is only for adapters, but the folder 'nowhere' does not exist" in err


def test_a_reward_function_by_its_file(own_rows, capsys):
    (own_rows / "my_score.py").write_text("def score(completions, **columns):\n    return [1.0] * len(completions)\n")
    rows = "".join(json.dumps({"prompt": f"w{i}"}) + "\n" for i in range(4))
    (own_rows / "prompts.jsonl").write_text(rows)
    keys = {
        "trainer": "grpo",
        "dataset_name": "prompts.jsonl",
        "columns": None,
        "max_length": None,
        "num_generations": 2,
    }
    code, _, err = train(capsys, own_rows, "--dry_run", reward_funcs=["my_score.py:score"], **keys)
    assert code == 2 and "Write my_score.score, as Python imports it." in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": float("inf")}, "learning_rate is inf; expected a finite number."),
        ({"weight_decay": float("inf")}, "weight_decay is inf; expected a finite number."),
        ({"max_length": 10**30}, "which does not fit into 64 bits. For no limit, leave it out or set null."),
        ({"sample_prompts": ["w5", " "]}, "sample_prompts is ['w5', ' '], and one of them is empty."),
        ({"optim": "adamw_torch", "optim_args": "betas=0.9"}, "which has no effect with optim: adamw_torch."),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_values_that_no_library_checks(options, message, own_rows, capsys):
    """They trained without a word, or ended in a traceback."""
    code, _, err = train(capsys, own_rows, "--dry_run", **options)
    assert code == 2 and message in err, err


@pytest.mark.parametrize(
    ("key", "text", "example"),
    [
        ("gradient_checkpointing_kwargs", "use_reentrant=false", '{"use_reentrant": false}'),
        ("lr_scheduler_kwargs", "num_cycles=1", '{"num_cycles": 1}'),
        ("model_init_kwargs", "dtype: float32", '{"dtype": "float32"}'),
    ],
)
def test_a_text_in_place_of_a_mapping(key, text, example, own_rows, capsys):
    """The first was ignored, the others ended in a traceback. The example that the message gives is accepted."""
    code, _, err = train(capsys, own_rows, "--dry_run", f"--{key}", text)
    assert code == 2 and f"{key} is '{text}'; expected a mapping, such as '{example}'" in err, err
    code, _, err = train(capsys, own_rows, "--dry_run", f"--{key}", example)
    assert code == 0, err


def test_a_gradient_norm_without_a_limit_is_allowed(own_rows, capsys):
    code, _, err = train(capsys, own_rows, "--dry_run", max_grad_norm=float("inf"))
    assert code == 0, err


def test_a_question_without_an_answer(own_rows, capsys):
    code, _, err = train(capsys, own_rows, "--dry_run", columns={"question": "question"})
    assert code == 2 and "which has question and no answer. The data has the columns question, answer" in err


def test_roles_that_no_message_has(own_rows, capsys):
    code, _, err = train(capsys, own_rows, "--dry_run", train_on=["asistant"])
    assert code == 2 and "Only messages of the role asistant are learned" in err
    assert "Its roles are assistant. Remove the row, or name other roles in train_on." in err


@pytest.mark.parametrize(
    ("targets", "reason"),
    [("q_proj,v_proj", "it matches none"), ("['q_proj", "it is not valid: unterminated character set")],
)
def test_a_list_of_modules_written_as_one_text(targets, reason, own_rows, capsys):
    code, _, err = train(capsys, own_rows, "--lora_target_modules", targets, use_peft=True)
    assert code == 2 and reason in err, err
    assert "To name modules, write a list, [q_proj, v_proj]" in err


def test_words_that_the_shell_has_split(own_rows, capsys):
    split = ("--columns", "{question:", "question,", "answer:", "answer}")
    code, _, err = train(capsys, own_rows, "--dry_run", *split)
    assert code == 2 and "'question,' on the command line belongs to no option. Put quotes around" in err
    assert "begins with '{question:'" in err
    code, _, err = train(capsys, own_rows, "extra", "--dry_run")
    assert code == 2 and "'extra' on the command line belongs to no option; write --key value after RECIPE." in err


def test_a_negative_number_on_the_command_line(own_rows, capsys):
    code, _, err = train(capsys, own_rows, "--dry_run", "--learning_rate", "-1e-3")
    assert code == 2 and "A negative number needs an equals sign: --key=-1e-3." in err
    code, _, err = train(capsys, own_rows, "--dry_run", "--learning_rate=-1e-3")
    assert code == 2 and "learning_rate is -0.001; expected a number above 0." in err


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("per_device_batch_size", "per_device_train_batch_size"),
        ("val_set_size", "eval_fraction"),
        ("finetuning_type", "use_peft"),
        ("sample_packing", "packing"),
        ("torch_dtype", "dtype"),
    ],
)
def test_names_of_other_tools(name, key, own_rows, capsys):
    """The most similar name would be another key: learning_rate for finetuning_type."""
    code, _, err = train(capsys, own_rows, "--dry_run", **{name: "1"})
    assert code == 2 and f"is not a key of a recipe. Did you mean {key}?" in err


def test_each_other_name_stands_for_a_key():
    _, keys = parser.build_parser(TRAINERS["sft"], "")
    assert not set(parser._OTHER_NAMES.values()) - set(keys)
    assert not set(parser._OTHER_NAMES).intersection(keys)


def test_a_word_after_dry_run(own_rows, capsys):
    code, _, err = train(capsys, own_rows, "--dry_run", "extra")
    assert code == 2 and "--dry_run is 'extra'; expected nothing after it, or true or false." in err
    code, out, _ = train(capsys, own_rows, "--dry_run", "false")
    assert code == 0 and "Summary" in out, "it trains"
