"""The processors of models of images and text as transformers has them, around a tiny tokenizer: no download."""

import torch
import transformers
from image_models import END, IMAGE, START, VIDEO
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast
from transformers.utils import is_torchvision_available

QWEN = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
QWEN |= {"vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"}
IDS = (IMAGE, VIDEO, START, END)
_NAMES = ("image_token", "video_token", "vision_start_token", "vision_end_token")
PLAIN = dict(zip(_NAMES, ("<image>", "<video>", "<start>", "<end>"), strict=True))
# What a row has for an image, the tokens of the tokenizer, the classes of processors, and their options.
_KINDS = {
    "qwen2_5_vl": ("<|vision_start|><|image_pad|><|vision_end|>", QWEN, "Qwen2_5_VLProcessor", "Qwen2VL", {}),
    "qwen3_vl": ("<|vision_start|><|image_pad|><|vision_end|>", QWEN, "Qwen3VLProcessor", "Qwen2VL", {}),
    "qwen3_5": ("<|vision_start|><|image_pad|><|vision_end|>", QWEN, "Qwen3VLProcessor", "Qwen2VL", {}),
    "gemma3": (
        "<start>", {"image_token": "<image>", "boi_token": "<start>", "eoi_token": "<end>"}, "Gemma3Processor",
        "Gemma3", {"image_seq_length": 4},
    ),
    "llava_onevision": (
        "<image>", PLAIN, "LlavaOnevisionProcessor", "LlavaOnevision",
        {"num_image_tokens": 4, "vision_feature_select_strategy": "full"},
    ),
    "idefics3": ("<image>", PLAIN, "Idefics3Processor", "Idefics3", {"image_seq_len": 4}),
    "smolvlm": ("<image>", PLAIN, "SmolVLMProcessor", "SmolVLM", {"image_seq_len": 4}),
    "internvl": (
        "<image>",
        {"context_image_token": "<image>", "video_token": "<video>", "start_image_token": "<start>",
         "end_image_token": "<end>"},
        "InternVLProcessor", "GotOcr2", {"image_seq_length": 1},
    ),
}  # fmt: skip
_PIXELS = {
    "Qwen2VL": {"patch_size": 14, "size": {"shortest_edge": 56 * 56, "longest_edge": 84 * 84}},
    "Gemma3": {"size": {"height": 56, "width": 56}},
    "LlavaOnevision": {"size": {"height": 28, "width": 28}, "image_grid_pinpoints": [[28, 56], [28, 28]]},
    "Idefics3": {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}},
    "SmolVLM": {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}},
    "GotOcr2": {"size": {"height": 28, "width": 28}, "max_patches": 2},
}
_VIDEOS = {
    "qwen2_5_vl": "Qwen2VLVideoProcessor", "qwen3_vl": "Qwen3VLVideoProcessor",
    "qwen3_5": "Qwen3VLVideoProcessor", "smolvlm": "SmolVLMVideoProcessor",
    "internvl": "InternVLVideoProcessor", "llava_onevision": "LlavaOnevisionVideoProcessor",
}  # fmt: skip
_TEMPLATE = """{% for message in messages %}{% if message.content is string %}{{ message.content }} {% else %}
{%- for part in message.content %}{% if part.type == "image" %}IMAGE {% else %}{{ part.text }} {% endif %}{% endfor %}
{%- endif %}{% endfor %}"""
PROCESSED = tuple(_KINDS)


def placeholder(model_type):
    """What the text of a row has for an image."""
    return _KINDS[model_type][0]


def tokenizer_of(tokens, more=()):
    """A tokenizer of words w3 to w99, and of `tokens` (name -> text) and `more`, which have the ids that follow."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, 100)}
    names = list(dict.fromkeys([*tokens.values(), *more]))
    words |= {name: 100 + i for i, name in enumerate(names)}
    backend = Tokenizer(WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        extra_special_tokens=dict(tokens), additional_special_tokens=names,
    )  # fmt: skip


def noise_image(width, height, generator):
    """An image of random pixels; those of PIL's `effect_noise` cannot be seeded."""
    return Image.fromarray(torch.randint(256, (height, width, 3), dtype=torch.uint8, generator=generator).numpy())


class _NoVideos:
    """In the place of a processor of videos, which needs torchvision, for rows that have none."""

    model_input_names = ()
    num_frames = fps = None  # the processor of SmolVLM asks for them

    def to_dict(self):
        return {}


def processor_of(model_type):
    """The processor for `image_model(model_type)`.

    Raises:
        ImportError: num2words is missing, which that of SmolVLM needs.
    """
    _, tokens, cls, pixels, options = _KINDS[model_type]
    more = ["<fake_token_around_image>", "<end_of_utterance>", "<global-img>"] * (model_type in ("idefics3", "smolvlm"))
    more += [f"<row_{i}_col_{j}>" for i in (1, 2) for j in (1, 2)] * bool(more)
    image_class = getattr(transformers, f"{pixels}ImageProcessorPil")
    parts = {"image_processor": image_class(**_PIXELS[pixels]), "tokenizer": tokenizer_of(tokens, more)}
    made = getattr(transformers, cls)
    if model_type in _VIDEOS and is_torchvision_available():
        parts["video_processor"] = getattr(transformers, _VIDEOS[model_type])()
    elif model_type in _VIDEOS:
        parts["video_processor"] = _NoVideos()
        made = type(cls, (made,), {"check_argument_for_proper_class": lambda self, name, part: None})
    return made(**parts, **options, chat_template=_TEMPLATE.replace("IMAGE", placeholder(model_type)))
