"""Tiny models of images and text, processors around a tiny tokenizer, and batches with pixels, without downloads."""

import inspect

import architectures
import torch
import transformers
from PIL import Image
from tiny_models import step
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.utils import is_torchvision_available

# one of the 131 tokens of `architectures.SMALL`
IMAGE = 100
VIDEO = 101
START = 102
END = 103
GRIDS = ((1, 12, 20), (1, 4, 6), (1, 8, 8))  # patches per image; Qwen2.5-VL's windows have 8 x 8
_VIDEOS = ("pixel_values_videos", "video_grid_thw")
_TOKENS = {
    "image_token_id": IMAGE,
    "image_token_index": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "image_start_token_id": START,
    "image_end_token_id": END,
}
_OWN = {
    "qwen2_5_vl": {"depth": 2, "fullatt_block_indexes": [1]},
    "qwen3_vl": {"depth": 2, "deepstack_visual_indexes": [0, 1]},
    "gemma3": {"image_size": 56},
    "internvl": {"image_size": [28, 28], "patch_size": [14, 14]},
    "idefics3": {"image_size": 56},
    "llama4": {
        "intermediate_size": 256,
        "projector_input_dim": 64,
        "projector_output_dim": 64,
        "vision_output_dim": 64,
    },
    "paligemma": {"projection_dim": 64},
    "smolvlm": {"image_size": 56},
}
_WHOLE = {
    "gemma3": {"mm_tokens_per_image": 4},
    "llava_onevision": {"image_grid_pinpoints": [[28, 56], [28, 28]]},
    "paligemma": {"projection_dim": 64},
}
_TEXT = {  # checkpoints rotate an eighth of a head, because heads are large enough for three positions
    "qwen3_5": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        }
    },
}


def image_model(model_type, attention="sdpa"):
    """A random model of `model_type` in training mode. Its towers and its decoder have about two layers."""
    config = architectures.small_config(model_type)
    for name, value in (_TOKENS | _WHOLE.get(model_type, {})).items():
        if hasattr(config, name):
            setattr(config, name, value)
    for name, value in _OWN.get(model_type, {}).items():
        setattr(config.vision_config, name, value)
    for name, value in _TEXT.get(model_type, {}).items():
        setattr(config.text_config, name, value)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForImageTextToText.from_config(config).parameters())
    if size > architectures.MAX_PARAMETERS:
        raise ValueError(f"{size / 1e6:.0f}M parameters")
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation=attention)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
            elif "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    for module in model.modules():  # no dropout: with real tokens alone it would draw other numbers
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and "drop" in name:
                setattr(module, name, 0.0)
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.train()


def let_llama4_return(monkeypatch):
    """Give the decoder's outputs the field that the forward around it reads; it fails without in transformers 5.24."""
    from transformers.modeling_outputs import MoeCausalLMOutputWithPast

    monkeypatch.setattr(MoeCausalLMOutputWithPast, "image_outputs", None, raising=False)


def image_batch(model, images=(2, 0, 1), text=(9, 5, 14), side="right", seed=1):
    """A batch as the model's processor makes it: row i has `images[i]` images and `text[i]` tokens of text."""
    source = torch.Generator().manual_seed(seed)
    pixels, sizes = _pixels(model, sum(images), source)
    sizes, rows = iter(sizes), []
    for count, length in zip(images, text, strict=True):
        row = torch.randint(3, 99, (length,), generator=source).tolist()
        for at in range(count):
            where = 2 + 3 * at + sum(part == IMAGE for part in row)
            row[where:where] = [START, *[IMAGE] * next(sizes), END]
        rows.append(torch.tensor(row))
    width = max(map(len, rows))
    pads = [((width - len(row), 0) if side == "left" else (0, width - len(row))) for row in rows]
    ids = torch.stack([torch.nn.functional.pad(row, pad) for row, pad in zip(rows, pads, strict=True)])
    mask = torch.stack(
        [torch.nn.functional.pad(torch.ones_like(row), pad) for row, pad in zip(rows, pads, strict=True)]
    )
    labels = ids.masked_fill((mask == 0) | (ids >= IMAGE), -100)
    first = mask.argmax(1)
    labels[torch.arange(len(rows)), first] = -100  # which padding would predict
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels} | pixels
    kinds = (ids == IMAGE).int()
    names = inspect.signature(model.forward).parameters
    return batch | {name: kinds for name in ("mm_token_type_ids", "token_type_ids") if name in names}


def as_videos(batch, some=None):
    """`batch` of a Qwen-VL with videos for its images; with `some`, only for the images with these numbers."""
    ids, grids = batch["input_ids"].clone(), batch["image_grid_thw"]
    patches = grids.prod(1)
    chosen = torch.tensor([some is None or number in some for number in range(len(grids))])
    ids[ids == IMAGE] = torch.where(chosen.repeat_interleave(patches // 4), VIDEO, IMAGE)
    found = batch | {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).int() + 2 * (ids == VIDEO).int()}
    pixels = found.pop("pixel_values"), found.pop("image_grid_thw")
    for names, kept in ((("pixel_values", "image_grid_thw"), ~chosen), (_VIDEOS, chosen)):
        if kept.any():
            found |= {names[0]: pixels[0][kept.repeat_interleave(patches)], names[1]: pixels[1][kept]}
    return found


def _pixels(model, count, source):
    """(arguments with the pixels of `count` images, the tokens that each image takes)."""
    names = inspect.signature(model.forward).parameters
    vision = model.config.vision_config
    if count == 0:
        return {}, []
    if "image_grid_thw" in names:
        grids = torch.tensor([GRIDS[i % len(GRIDS)] for i in range(count)])
        width = vision.patch_size**2 * 3 * getattr(vision, "temporal_patch_size", 1)
        values = torch.randn(int(grids.prod(1).sum()), width, generator=source)
        merged = vision.spatial_merge_size**2
        return {"pixel_values": values, "image_grid_thw": grids}, (grids.prod(1) // merged).tolist()
    size = vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]
    values = torch.randn(count, 3, size, size, generator=source)
    given: dict[str, torch.Tensor] = {"pixel_values": values}
    if "pixel_attention_mask" in names:  # a batch of rows with equally many images
        given = {"pixel_values": values[None]}
    if "image_sizes" in names and model.config.model_type.startswith(("llava_next", "llava_onevision")):
        given = {"pixel_values": values[:, None].repeat(1, 3, 1, 1, 1)}
        given["image_sizes"] = torch.tensor([[size, size // 2]] * count)
    with torch.no_grad():
        more = inspect.signature(model.get_image_features).parameters.get("vision_feature_select_strategy")
        needed = more is not None and more.default is more.empty  # Llama 4 in transformers 5.17
        features = model.get_image_features(
            **given, **({"vision_feature_select_strategy": "default"} if needed else {})
        )
    # Llama 4 has no `pooler_output`
    found = features.last_hidden_state if features.pooler_output is None else features.pooler_output
    found = torch.cat([x.flatten(0, -2) for x in found]) if isinstance(found, list | tuple) else found.flatten(0, -2)
    return given, [found.shape[0] // count] * count


def image_step(model, batch):
    """Loss and gradients of one step. Leaves out the biases of keys: their gradients are only rounding."""
    loss, found = step(model, batch)
    return loss, {name: grad for name, grad in found.items() if not name.endswith("k_proj.bias")}


QWEN = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
QWEN |= {"vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"}
IDS = (IMAGE, VIDEO, START, END)
_NAMES = ("image_token", "video_token", "vision_start_token", "vision_end_token")
PLAIN = dict(zip(_NAMES, ("<image>", "<video>", "<start>", "<end>"), strict=True))
# By model type: what a row has for an image, the tokenizer's tokens, the classes of processors, and their options.
_KINDS = {
    "qwen2_5_vl": ("<|vision_start|><|image_pad|><|vision_end|>", QWEN, "Qwen2_5_VLProcessor", "Qwen2VL", {}),
    "qwen3_vl": ("<|vision_start|><|image_pad|><|vision_end|>", QWEN, "Qwen3VLProcessor", "Qwen2VL", {}),
    "qwen3_5": ("<|vision_start|><|image_pad|><|vision_end|>", QWEN, "Qwen3VLProcessor", "Qwen2VL", {}),
    "gemma3": (
        "<start>",
        {"image_token": "<image>", "boi_token": "<start>", "eoi_token": "<end>"},
        "Gemma3Processor",
        "Gemma3",
        {"image_seq_length": 4},
    ),
    "llava_onevision": (
        "<image>",
        PLAIN,
        "LlavaOnevisionProcessor",
        "LlavaOnevision",
        {"num_image_tokens": 4, "vision_feature_select_strategy": "full"},
    ),
    "idefics3": ("<image>", PLAIN, "Idefics3Processor", "Idefics3", {"image_seq_len": 4}),
    "smolvlm": ("<image>", PLAIN, "SmolVLMProcessor", "SmolVLM", {"image_seq_len": 4}),
    "internvl": (
        "<image>",
        {
            "context_image_token": "<image>",
            "video_token": "<video>",
            "start_image_token": "<start>",
            "end_image_token": "<end>",
        },
        "InternVLProcessor",
        "GotOcr2",
        {"image_seq_length": 1},
    ),
}
_PIXELS = {
    "Qwen2VL": {"patch_size": 14, "size": {"shortest_edge": 56 * 56, "longest_edge": 84 * 84}},
    "Gemma3": {"size": {"height": 56, "width": 56}},
    "LlavaOnevision": {"size": {"height": 28, "width": 28}, "image_grid_pinpoints": [[28, 56], [28, 28]]},
    "Idefics3": {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}},
    "SmolVLM": {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}},
    "GotOcr2": {"size": {"height": 28, "width": 28}, "max_patches": 2},
}
_VIDEO_PROCESSORS = {
    "qwen2_5_vl": "Qwen2VLVideoProcessor",
    "qwen3_vl": "Qwen3VLVideoProcessor",
    "qwen3_5": "Qwen3VLVideoProcessor",
    "smolvlm": "SmolVLMVideoProcessor",
    "internvl": "InternVLVideoProcessor",
    "llava_onevision": "LlavaOnevisionVideoProcessor",
}
_TEMPLATE = """{% for message in messages %}{% if message.content is string %}{{ message.content }} {% else %}
{%- for part in message.content %}{% if part.type == "image" %}IMAGE {% else %}{{ part.text }} {% endif %}{% endfor %}
{%- endif %}{% endfor %}"""
PROCESSED = tuple(_KINDS)


def placeholder(model_type):
    """The text that stands for an image in a row."""
    return _KINDS[model_type][0]


def tokenizer_of(tokens, more=()):
    """A tokenizer of the words w3 to w99; the ids after them go to `tokens` (name -> text) and `more`."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, 100)}
    names = list(dict.fromkeys([*tokens.values(), *more]))
    words |= {name: 100 + i for i, name in enumerate(names)}
    backend = Tokenizer(WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens=dict(tokens),
        additional_special_tokens=names,
    )


def noise_image(width, height, generator):
    """An image of random pixels. PIL's `effect_noise` cannot be seeded."""
    return Image.fromarray(torch.randint(256, (height, width, 3), dtype=torch.uint8, generator=generator).numpy())


class _NoVideos:
    """Replaces the video processor, which needs torchvision, for rows without videos."""

    model_input_names = ()
    num_frames = fps = None  # SmolVLM's processor asks for them

    def to_dict(self):
        return {}


def processor_of(model_type):
    """The processor for `image_model(model_type)`.

    Raises:
        ImportError: num2words is missing, which SmolVLM's processor needs.
    """
    _, tokens, cls, pixels, options = _KINDS[model_type]
    more = ["<fake_token_around_image>", "<end_of_utterance>", "<global-img>"] * (model_type in ("idefics3", "smolvlm"))
    more += [f"<row_{i}_col_{j}>" for i in (1, 2) for j in (1, 2)] * bool(more)
    image_class = getattr(transformers, f"{pixels}ImageProcessorPil")
    parts = {"image_processor": image_class(**_PIXELS[pixels]), "tokenizer": tokenizer_of(tokens, more)}
    made = getattr(transformers, cls)
    if model_type in _VIDEO_PROCESSORS and is_torchvision_available():
        parts["video_processor"] = getattr(transformers, _VIDEO_PROCESSORS[model_type])()
    elif model_type in _VIDEO_PROCESSORS:
        parts["video_processor"] = _NoVideos()
        made = type(cls, (made,), {"check_argument_for_proper_class": lambda self, name, part: None})
    return made(**parts, **options, chat_template=_TEMPLATE.replace("IMAGE", placeholder(model_type)))
