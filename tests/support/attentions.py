"""The attention that every model type of the installed transformers runs, as the report of `apply_liger` names it.

As a script with `--write` this file writes the table of docs/padding.md (some minutes):

    python tests/support/attentions.py [--write] [model type ...]
"""

import sys
import textwrap
import warnings

import torch
import transformers
from architectures import MODEL_TYPES, build
from checkout import ROOT

from liger_trainer import apply_liger

PAGE = ROOT / "docs" / "padding.md"
BEGIN, END = (f"<!-- {word} attention -->\n" for word in ("begin", "end"))
OTHERS = {
    "rms_norm": False,
    "layer_norm": False,
    "rope": False,
    "swiglu": False,
    "geglu": False,
    "experts": False,
    "lora": False,
    "float8": False,
}
HEAD = """\
| the decoder, as `trainer.liger_report` has it | model types of transformers {version} |
|---|---|
"""


def without_dropout(model) -> None:
    """Turn dropout off: padded and unpadded rows draw different numbers."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and "drop" in name:
                setattr(module, name, 0.0)
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


def with_own_attention(model_type):
    """(tiny model, None) with SDPA, or with eager attention where its class has no SDPA; else (None, reason)."""
    model, reason = build(model_type)
    if model is None:
        return None, reason
    try:
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    except (ValueError, ImportError) as error:
        return None, str(error)
    without_dropout(model)
    return model, None


def decoder_in(report) -> str:
    """The report's line on a model's decoder, without its towers."""
    found = report["varlen_attention"]
    said = [*found.swapped.values(), *found.skipped.values(), *found.unsuited.values()]
    said = [text for text in said if not text.startswith("one attention for all")]
    return " ".join(said[0].replace("|", "/").split()) if said else "its own attention"


def section(found: dict[str, str]) -> str:
    """The table `model type -> report`; the most common report comes first."""
    groups: dict[str, list[str]] = {}
    for model_type, said in found.items():
        groups.setdefault(said, []).append(f"`{model_type}`")
    rows = sorted(groups.items(), key=lambda row: (not row[0].startswith("runs"), -len(row[1]), row[0]))
    return HEAD.format(version=transformers.__version__) + "".join(f"| {s} | {', '.join(n)} |\n" for s, n in rows)


def written() -> str:
    """The table as it stands on the page."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


def documented(model_type: str) -> str | None:
    """The page's entry for a model type; None if the page lacks it or was written for another transformers."""
    if f"of transformers {transformers.__version__} |" not in written():
        return None
    rows = (line.split(" | ") for line in written().splitlines()[2:])
    return next((said.removeprefix("| ") for said, names in rows if f"`{model_type}`" in names), None)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    found = {}
    for model_type in [name for name in sys.argv[1:] if name != "--write"] or MODEL_TYPES:
        model, reason = with_own_attention(model_type)
        said = decoder_in(apply_liger(model, OTHERS)) if model is not None else reason
        print(model_type, textwrap.shorten(said, 200), flush=True)
        if model is not None:
            found[model_type] = said
    if "--write" in sys.argv:
        if len(sys.argv) > 2:
            sys.exit("--write makes the whole table: name no model types with it.")
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + BEGIN + section(found) + END + rest.partition(END)[2])
