"""The answer of `liger-trainer fit`, with a search for the largest batch and the longest rows that fit."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from liger_trainer._logging import logger
from liger_trainer.fitting.step import Job, Need, need
from liger_trainer.memory.feature import AUTO
from liger_trainer.memory.memory import GIB, RESERVE, limit_of
from liger_trainer.varlen.recorder import RESERVE as FREE

UNIT = 128  # tokens: lengths are tried in multiples of it
TRIES = 10  # at most
MOST_TOKENS = 1 << 20  # of a micro-batch: more are not tried
# No number: it depends on which sizes of micro-batches a training meets.
_CAPTURES = (
    "Captured steps (cuda_graphs) are not counted. Their pool holds what the layers keep of the largest captured "
    "micro-batch, between steps too, and a micro-batch that runs uncaptured takes its own memory beside it. "
    f"A capture that would leave less than {FREE:.0%} of the GPU does not take place."
)


def answer(
    job: Job, rows: int, length: int, checkpointing: bool | str, gpu_memory: float, captures: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> str:  # fmt: skip
    """Return the text: what a step needs with and without checkpointing, what `auto` would choose, what would fit.

    Args:
        job (`Job`): What is trained.
        rows (`int`), length (`int`): A micro-batch.
        checkpointing (`bool` or `"auto"`): Of the recipe.
        gpu_memory (`float`): GiB of a GPU.
        captures (`bool`, *optional*, defaults to `False`): Whether steps may be captured, whose memory is not counted.
        progress (`Callable`, *optional*): Is called with a line about each size, before it is tried.
    """
    memory = int(gpu_memory * GIB)

    def tried(rows: int, length: int, way: bool | str, like: Need | None = None) -> Need:
        progress(f"a step of {rows} x {length} tokens with activation_checkpointing: {str(way).lower()}")
        return need(job, rows, length, way, memory, like)

    def with_room_for_images(length: int) -> int:
        fits = job.images is None or length >= job.images.tokens
        return tried(rows, length, way, like).peak if fits else most + 1

    with _quiet():
        full = tried(rows, length, True)
        found = {True: full, AUTO: tried(rows, length, AUTO), False: tried(rows, length, False, full)}
        most = limit_of(None, memory)
        way = bool(checkpointing)  # what fits with auto is what fits with every layer checkpointed
        like = found[way]
        positions = getattr(job.shape.config.get_text_config(), "max_position_embeddings", None)
        most_rows, most_length = max(rows, MOST_TOKENS // length), max(length, MOST_TOKENS // rows)
        batch = largest(lambda n: tried(n, length, way, like).peak, most, {rows: like.peak}, 1, most_rows)
        top = min(most_length, positions or most_length)
        longest = largest(with_room_for_images, most, {length: like.peak}, UNIT, top)
        all_positions = positions is not None and longest + UNIT > positions
    on_host = f", with {like.host / GIB * longest / length:.0f} GiB on the host" if like.host else ""
    gpus = job.sharding.gpus
    lines = [
        f"{job.shape.config.model_type}, {rows} x {length} tokens on "
        f"{'one GPU' if gpus == 1 else f'each of {gpus} GPUs'} of {gpu_memory:g} GiB"
        f"{' with ' + job.sharding.kind.upper() if gpus > 1 else ''}",
        "",
        *_parts(found[True], job.in_backward),
        "",
        f"{'activation_checkpointing':26} {'peak, GiB':>9}",
    ]
    for name, each in (("true", found[True]), (AUTO, found[AUTO]), ("false", found[False])):
        lines.append(f"{name:26} {each.peak / GIB:9.1f}  {_comment(each, most, name, checkpointing)}".rstrip())
    lines += [
        "",
        f"Within {most / GIB:.1f} GiB ({RESERVE:.0%} are left to the allocator), and activation_checkpointing: "
        f"{str(checkpointing).lower()}:",
        f"  the largest per_device_train_batch_size of rows of {length} tokens is {batch}"
        f"{' or more' if batch == most_rows else ''}"
        if batch
        else f"  not one row of {length} tokens fits",
        f"  the longest rows in a batch of {rows} have {positions} tokens, all that the model has positions for"
        if all_positions
        else f"  the longest rows in a batch of {rows} have about {longest} tokens"
        f"{' or more' if longest + UNIT > top else ''}{on_host}"
        if longest
        else f"  no batch of {rows} rows fits",
    ]
    if job.images is not None:
        lines += ["", f"Counted with images in each row, which are {job.images.tokens} of its tokens."]
    elif job.shape.has_tower:
        lines += [
            "", "Images are not counted: what their tower keeps for its backward pass comes on top. Pass --images "
            "640x480, the sizes of the images of a row (640x480,640x480 for two)."
        ]  # fmt: skip
    if captures:
        lines += ["", _CAPTURES]
    return "\n".join(lines)


def _parts(full: Need, in_backward: bool) -> Iterator[str]:
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


def _comment(each: Need, most: int, name: str, asked: bool | str) -> str:
    words = ["<- the recipe"] if name == str(asked).lower() else []
    if each.chosen is not None:
        attention = f", attention of {each.chosen.attention}" if each.chosen.attention else ""
        words.append(f"{each.chosen.kept} of {each.chosen.layers} layers kept{attention}")
    if each.host:
        words.append(f"{each.host / GIB:.1f} GiB on the host")
    if each.peak > most:
        words.append("does not fit")
    if each.loaded > max(each.micro_batch, each.step):
        words.append("while the model is loaded, before fp8")
    elif each.step > each.micro_batch:
        words.append("in the optimizer's step")
    return ", ".join(words)


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out the lines that a training would log."""
    before = logger.logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def largest(need: Callable[[int], int], limit: int, known: dict[int, int], unit: int, top: int) -> int:
    """Return the largest multiple of `unit` for which `need` is at most `limit`, or up to 2 % less; 0 if there is none.

    Args:
        need (`Callable`): Grows nearly in proportion to its number.
        limit (`int`): What it may be at most.
        known (`dict`): What it is for numbers that have been tried.
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
        known[number] = need(number)
    return fits // unit * unit
