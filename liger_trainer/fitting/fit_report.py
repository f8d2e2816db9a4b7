"""Writes the answer of `liger-trainer fit`, and searches for the largest batch and the longest rows that fit."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from liger_trainer._logging import logger
from liger_trainer.fitting.step import MemoryEstimate, TrainSpec, estimate_memory
from liger_trainer.memory.device_memory import GIB, RESERVE, limit_of
from liger_trainer.memory.feature import AUTO
from liger_trainer.varlen.graphs.graph_recorder import RESERVE as FREE

UNIT = 128  # tokens: lengths are tried in multiples of it
TRIES = 10  # at most
MOST_TOKENS = 1 << 20  # of a micro-batch: more are not tried
# Captured steps are not counted: their memory depends on the sizes of the micro-batches in a training.
_CAPTURES = (
    "The memory of captured steps (cuda_graphs) is not counted. Their pool holds the activations of the largest "
    "captured micro-batch, between steps too. A micro-batch that runs uncaptured needs its own memory in addition. "
    f"A capture that would leave less than {FREE:.0%} of the GPU does not take place."
)


def fit_report(
    job: TrainSpec,
    rows: int,
    length: int,
    checkpointing: bool | str,
    gpu_memory: float,
    captures: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> str:
    """Return the text: memory of a step with and without checkpointing, the choice of `auto`, and the sizes that fit.

    Args:
        job (`TrainSpec`): The training.
        rows (`int`), length (`int`): Size of a micro-batch.
        checkpointing (`bool` or `"auto"`): `activation_checkpointing` of the recipe.
        gpu_memory (`float`): GiB of one GPU.
        captures (`bool`, *optional*, defaults to `False`): Say that the memory of captured steps is not counted.
        progress (`Callable`, *optional*): Called with a line about each size before it is tried.
    """
    memory = int(gpu_memory * GIB)

    def estimate(rows: int, length: int, mode: bool | str, like: MemoryEstimate | None = None) -> MemoryEstimate:
        progress(f"a step of {rows} x {length} tokens with activation_checkpointing: {str(mode).lower()}")
        return estimate_memory(job, rows, length, mode, memory, like)

    def peak_of_length(length: int) -> int:
        if job.images is not None and length < job.images.tokens:
            return most + 1  # the images of a row do not fit into it
        return estimate(rows, length, mode, like).peak

    with _quiet():
        full = estimate(rows, length, True)
        estimates = {True: full, AUTO: estimate(rows, length, AUTO), False: estimate(rows, length, False, full)}
        most = limit_of(None, memory)
        mode = bool(checkpointing)  # auto falls back to checkpointing every layer, so both fit the same sizes
        like = estimates[mode]
        positions = getattr(job.shape.config.get_text_config(), "max_position_embeddings", None)
        most_rows = max(rows, MOST_TOKENS // length)
        most_length = max(length, MOST_TOKENS // rows)
        batch = largest(lambda n: estimate(n, length, mode, like).peak, most, {rows: like.peak}, 1, most_rows)
        top = min(most_length, positions or most_length)
        longest = largest(peak_of_length, most, {length: like.peak}, UNIT, top)
        all_positions = positions is not None and longest + UNIT > positions
    on_host = f", with {like.host / GIB * longest / length:.0f} GiB on the host" if like.host else ""
    gpus = job.sharding.gpus
    lines = [
        f"{job.shape.config.model_type}, {rows} x {length} tokens on "
        f"{'one GPU' if gpus == 1 else f'each of {gpus} GPUs'} of {gpu_memory:g} GiB"
        f"{' with ' + job.sharding.kind.upper() if gpus > 1 else ''}",
        "",
        *_parts(full, job.in_backward),
        "",
        f"{'activation_checkpointing':26} {'peak, GiB':>9}",
    ]
    for name, each in (("true", full), (AUTO, estimates[AUTO]), ("false", estimates[False])):
        lines.append(f"{name:26} {each.peak / GIB:9.1f}  {_comment(each, most, name, checkpointing)}".rstrip())
    lines += [
        "",
        f"Within {most / GIB:.1f} GiB ({RESERVE:.0%} are left to the allocator), and activation_checkpointing: "
        f"{str(checkpointing).lower()}:",
        f"  the largest per_device_train_batch_size of rows of {length} tokens is {batch}"
        f"{' or more' if batch == most_rows else ''}"
        if batch
        else f"  not one row of {length} tokens fits",
        f"  the longest rows in a batch of {rows} have {positions} tokens, the model's max_position_embeddings"
        if all_positions
        else f"  the longest rows in a batch of {rows} have about {longest} tokens"
        f"{' or more' if longest + UNIT > top else ''}{on_host}"
        if longest
        else f"  no batch of {rows} rows fits",
    ]
    if job.images is not None:
        lines += ["", f"Counted with images in each row. They take {job.images.tokens} of its tokens."]
    elif job.shape.has_tower:
        lines += [
            "",
            "Images are not counted: the activations of their tower come on top. Pass --images 640x480, the sizes of "
            "the images of a row (640x480,640x480 for two).",
        ]
    if captures:
        lines += ["", _CAPTURES]
    return "\n".join(lines)


def _parts(full: MemoryEstimate, in_backward: bool) -> Iterator[str]:
    yield f"{'a step needs':26} {'GiB':>9}"
    rows = [
        ("weights", full.weights, ""),
        ("reference model", full.reference, ""),
        ("gradients", full.gradients, "the largest; each is freed in the backward pass" if in_backward else ""),
        ("optimizer states", full.states, ""),
        ("buffers", full.others, ""),
    ]
    for name, size, comment in rows:
        if size:
            yield f"{name:26} {size / GIB:9.2f}  {comment}".rstrip()


def _comment(estimate: MemoryEstimate, most: int, name: str, asked: bool | str) -> str:
    notes = ["<- the recipe"] if name == str(asked).lower() else []
    if estimate.checkpointing is not None:
        attention = f", attention of {estimate.checkpointing.attention}" if estimate.checkpointing.attention else ""
        notes.append(f"{estimate.checkpointing.kept} of {estimate.checkpointing.layers} layers kept{attention}")
    if estimate.host:
        notes.append(f"{estimate.host / GIB:.1f} GiB on the host")
    if estimate.peak > most:
        notes.append("does not fit")
    if estimate.loaded > max(estimate.micro_batch, estimate.step):
        notes.append("while the model is loaded, before fp8")
    elif estimate.step > estimate.micro_batch:
        notes.append("in the optimizer's step")
    return ", ".join(notes)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what a training would log."""
    before = logger.logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def largest(memory_of: Callable[[int], int], limit: int, known: dict[int, int], unit: int, top: int) -> int:
    """Return the largest multiple of `unit` that `memory_of` finds within `limit`, up to 2 % too small; 0 if none fits.

    Args:
        need (`Callable`): Grows nearly in proportion to its argument.
        limit (`int`): The largest allowed value of `memory_of`.
        known (`dict`): Values of `memory_of` for arguments that have been tried.
        unit (`int`), top (`int`): Only multiples of `unit` up to `top` are tried.
    """
    known = dict(known)
    for _ in range(TRIES):
        fits = max((n for n in known if known[n] <= limit), default=0)
        fails = min((n for n in known if known[n] > limit), default=top // unit * unit + unit)
        if fails - fits <= max(unit, fits // 50):
            break
        a, b = sorted({0, *known})[-2:]  # the line through the two largest numbers meets the limit
        low = known.get(a, 0)
        met = a + (limit - low) * (b - a) / max(known[b] - low, 1)
        number = min(int(met), 16 * max(fits, unit), fails - 1) // unit * unit
        number = max(number, fits // unit * unit + unit)
        known[number] = memory_of(number)
    return fits // unit * unit
