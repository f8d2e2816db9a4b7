"""Tables of options of TRL's trainers: the form of a case, and the rows, adapters and models that cases share."""

import copy

import pytest
import torch
from peft import (
    AdaLoraConfig,
    IA3Config,
    LNTuningConfig,
    LoHaConfig,
    LoraConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    VeraConfig,
)
from tiny_models import tiny_model, tiny_tokenizer, words
from trainer_parity import assert_same_training, build, moved
from transformers import set_seed

# Conversations with roles, turns and tools in the tiny tokenizer's words. Answers are marked for `assistant_only_loss`.
CHAT_TEMPLATE = (
    "{%- if tools %}{% for tool in tools %}w120 w{{ tool['function']['name'] | length + 20 }} {% endfor %}{% endif %}"
    "{%- if formal %}w119 {% endif %}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'assistant' %}w118 {% generation %}{{ message['content'] }} </s>{% endgeneration %} "
    "{%- else %}{{ 'w117' if message['role'] == 'user' else 'w116' }} {{ message['content'] }} </s> {% endif %}"
    "{%- endfor %}{% if add_generation_prompt %}w118 {% endif %}"
)
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": "w3", "parameters": {"type": "object", "properties": {}}},
}


def chat_tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def source(seed=4):
    return torch.Generator().manual_seed(seed)


def turn(generator, role, low=2, high=8):
    return {"role": role, "content": words(generator, low, high)}


def texts(n=8, column="text"):
    generator = source()
    return [{column: words(generator, 4, 20)} for _ in range(n)]


def prompts_and_completions(n=8):
    generator = source()
    return [{"prompt": words(generator, 2, 8), "completion": " " + words(generator, 2, 12)} for _ in range(n)]


def conversations(n=8, **columns):
    """Conversations of two turns. The first rows have a system message."""
    generator = source()
    rows = []
    for i in range(n):
        turns = [turn(generator, role) for role in ("user", "assistant", "user", "assistant")]
        rows.append({"messages": [turn(generator, "system")] * (i < 3) + turns} | columns)
    return rows


def conversational_prompts_and_completions(n=8, **columns):
    generator = source()
    return [
        {"prompt": [turn(generator, "user")], "completion": [turn(generator, "assistant")]} | columns for _ in range(n)
    ]


def as_conversation(rows):
    """Turn rows of text into rows of one user turn, and one assistant turn for each completion."""

    def changed(name, value):
        if name not in ("prompt", "chosen", "rejected", "completion"):
            return value
        return [{"role": "user" if name == "prompt" else "assistant", "content": value.strip()}]

    return [{name: changed(name, value) for name, value in row.items()} for row in rows]


def with_columns(rows, **columns):
    return [row | columns for row in rows]


# fp32. One step agrees to 1e-5; the second starts from weights that differ by as much.
RTOL = 1e-4
# A case: options of the config, and these keys for the test itself.
CASE = ("model", "rows", "given", "part", "split", "metrics", "rtol", "loss_size", "prepare")


def case(name, quick=False, **options):
    """Make a row of a table from options of the config and the keys of `CASE`:

    model (a model type, or a function that makes a model), rows, given (arguments of the trainer, or a function of the
    folder that makes them), part (occurs in the names of weights to randomise, since adapters start at zero), split,
    metrics (must have been logged), rtol, loss_size, prepare (called with the model).
    """
    return pytest.param(options, id=name, marks=() if quick else pytest.mark.slow)


def compare(ours, stock, folder, options, defaults):
    """Train `ours` and `stock`, each (trainer class, config class). Compare logs, gradients and weights."""
    options = defaults | options
    own = {name: options.pop(name) for name in CASE if name in options}
    given = own.get("given", {})
    given = given(folder) if callable(given) else given
    made = own.get("model", "llama")
    model = made() if callable(made) else tiny_model(made)
    if "prepare" in own:
        model = own["prepare"](model, folder) or model
    trainers = []
    for trainer_class, args_class in (ours, stock):
        set_seed(0)  # building the trainer draws the adapters
        rows = copy.deepcopy(own["rows"])
        trainer = build(
            trainer_class,
            args_class,
            model,
            folder,
            rows,
            own.get("split", (4, 1)),
            trainer_options=given,
            **{"max_steps": 2} | options,
        )
        trainers.append(moved(trainer, own.get("part", "lora_B")))
    start = {name: p.detach().clone() for name, p in trainers[0].model.named_parameters()}
    rtol = own.get("rtol", RTOL)
    logs = assert_same_training(*trainers, own.get("metrics", ("loss",)), rtol, own.get("loss_size", 0.0))
    got, want = (dict(trainer.model.named_parameters()) for trainer in trainers)
    assert got.keys() == want.keys()
    learned = {name: p.detach() - start[name] for name, p in want.items() if not torch.equal(p, start[name])}
    assert learned, "nothing was learned: nothing was compared"
    largest = max(change.norm() for change in learned.values())
    for name, change in learned.items():
        error = (got[name].detach() - want[name].detach()).norm()
        assert error <= 2 * rtol * max(change.norm(), 1e-3 * largest) + 1e-6 * want[name].norm(), name
    return logs, trainers[0]


def adapters():
    """PEFT adapters other than a plain LoRA on projections; the string occurs in the names of their trained weights."""
    linear = ["q_proj", "v_proj", "gate_proj", "down_proj"]
    task = {"task_type": "CAUSAL_LM"}
    return {
        "lora-all-linear": (LoraConfig(r=4, target_modules="all-linear", **task), "lora_B"),
        "lora-dropout": (LoraConfig(r=4, target_modules=linear, lora_dropout=0.2, **task), "lora_B"),
        "rslora": (LoraConfig(r=4, target_modules=linear, use_rslora=True, **task), "lora_B"),
        "dora": (LoraConfig(r=4, target_modules=linear, use_dora=True, **task), "lora_B"),
        "lora-bias": (LoraConfig(r=4, target_modules=linear, lora_bias=True, **task), "lora_B"),
        "lora-head-saved": (LoraConfig(r=4, target_modules=linear, modules_to_save=["lm_head"], **task), "lora_B"),
        "lora-norms-saved": (
            LoraConfig(r=4, target_modules=linear, modules_to_save=["norm", "input_layernorm"], **task),
            "lora_B",
        ),
        "lora-embeddings": (LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"], **task), "lora_embedding_B"),
        "lora-tokens": (LoraConfig(r=4, target_modules=linear, trainable_token_indices=[5, 6, 7], **task), "lora_B"),
        "lora-layer": (LoraConfig(r=4, target_modules=linear, layers_to_transform=[1], **task), "lora_B"),
        "adalora": (AdaLoraConfig(init_r=4, target_r=2, total_step=10, target_modules=linear, **task), "lora_E"),
        "ia3": (IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], **task), "ia3"),
        "loha": (LoHaConfig(r=4, target_modules=linear, **task), "hada_w2_a"),
        "vera": (VeraConfig(r=4, target_modules=["q_proj"], **task), "vera_lambda_b"),
        "norms": (LNTuningConfig(target_modules=["input_layernorm", "norm"], **task), "nothing"),
        "prompt": (PromptTuningConfig(num_virtual_tokens=3, **task), "prompt_encoder"),
        "p-tuning": (PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=16, **task), "embedding"),
        "prefix": (PrefixTuningConfig(num_virtual_tokens=3, **task), "prompt_encoder"),
    }


def expert_lora():
    """A LoRA on the parameters of experts, which are not modules."""
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], target_parameters=parameters)
