"""Writes the answer of `liger-trainer fit`, and searches for the largest batch and the longest rows that fit."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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

    with _quiet():
        full = estimate(rows, length, True)
        estimates = {True: full, AUTO: estimate(rows, length, AUTO), False: estimate(rows, length, False, full)}
        mode = bool(checkpointing)  # auto falls back to checkpointing every layer, so both fit the same sizes
        like = estimates[mode]
        fits = _find_sizes(job, rows, length, like, lambda n, tokens: estimate(n, tokens, mode, like).peak, memory)
    lines = [
        _title(job, rows, length, gpu_memory),
        "",
        *_parts(full, job.in_backward),
        "",
        f"{'activation_checkpointing':26} {'peak, GiB':>9}",
    ]
    for name, each in (("true", full), (AUTO, estimates[AUTO]), ("false", estimates[False])):
        lines.append(f"{name:26} {each.peak / GIB:9.1f}  {_comment(each, fits.most, name, checkpointing)}".rstrip())
    lines += [
        "",
        f"Within {fits.most / GIB:.1f} GiB ({RESERVE:.0%} are left to the allocator), and activation_checkpointing: "
        f"{str(checkpointing).lower()}:",
        f"  {_batch_line(fits, length)}",
        f"  {_length_line(fits, rows, like.host / length)}",
        *_notes_on_images(job),
        *_notes_on_states(job, rows, length),
    ]
    if captures:
        lines += ["", _CAPTURES]
    return "\n".join(lines)


@dataclass(frozen=True)
class _Sizes:
    """The sizes of a micro-batch that fit.

    Attributes:
        most (`int`): Bytes that a step may take.
        batch (`int`): The most rows of the given length; 0 if not one fits.
        longest (`int`): The most tokens of each of the given rows; 0 if no length fits.
        positions (`int`, *optional*): The `max_position_embeddings` of the model.
        batch_limit, length_limit (`int`): No larger size was tried.
    """

    most: int
    batch: int
    longest: int
    positions: int | None
    batch_limit: int
    length_limit: int


def _find_sizes(
    job: TrainSpec, rows: int, length: int, like: MemoryEstimate, peak: Callable[[int, int], int], memory: int
) -> _Sizes:
    """Find the largest batch and the longest rows.

    `like` is the estimate for `rows` x `length` tokens. `peak` estimates the bytes of another size.
    """
    most = limit_of(None, memory)

    def peak_of_length(tokens: int) -> int:
        if job.images is not None and tokens < job.images.tokens:
            return most + 1  # the images of a row do not fit into it
        return peak(rows, tokens)

    positions = getattr(job.shape.config.get_text_config(), "max_position_embeddings", None)
    batch_limit = max(rows, MOST_TOKENS // length)
    length_limit = max(length, MOST_TOKENS // rows)
    length_limit = min(length_limit, positions or length_limit)
    batch = largest(lambda n: peak(n, length), most, {rows: like.peak}, 1, batch_limit)
    longest = largest(peak_of_length, most, {length: like.peak}, UNIT, length_limit)
    return _Sizes(most, batch, longest, positions, batch_limit, length_limit)


def _title(job: TrainSpec, rows: int, length: int, gpu_memory: float) -> str:
    gpus = job.sharding.gpus
    machine = "one GPU" if gpus == 1 else f"each of {gpus} GPUs"
    sharded = f" with {job.sharding.kind.upper()}" if gpus > 1 else ""
    return f"{job.shape.config.model_type}, {rows} x {length} tokens on {machine} of {gpu_memory:g} GiB{sharded}"


def _batch_line(fits: _Sizes, length: int) -> str:
    if not fits.batch:
        return f"not one row of {length} tokens fits"
    more = " or more" if fits.batch == fits.batch_limit else ""
    return f"the largest per_device_train_batch_size of rows of {length} tokens is {fits.batch}{more}"


def _length_line(fits: _Sizes, rows: int, host_per_token: float) -> str:
    """Return the line about the longest rows. `host_per_token` is the host's memory for a token of each, in bytes."""
    if fits.positions is not None and fits.longest + UNIT > fits.positions:
        return (
            f"the longest rows in a batch of {rows} have {fits.positions} tokens, the model's max_position_embeddings"
        )
    if not fits.longest:
        return f"no batch of {rows} rows fits"
    more = " or more" if fits.longest + UNIT > fits.length_limit else ""
    on_host = f", with {host_per_token * fits.longest / GIB:.0f} GiB on the host" if host_per_token else ""
    return f"the longest rows in a batch of {rows} have about {fits.longest} tokens{more}{on_host}"


def _notes_on_images(job: TrainSpec) -> list[str]:
    if job.images is not None:
        return ["", f"Counted with images in each row. They take {job.images.tokens} of its tokens."]
    if job.shape.has_tower:
        return [
            "",
            "Images are not counted: the activations of their tower come on top. Pass --images 640x480, the sizes of "
            "the images of a row (640x480,640x480 for two).",
        ]
    return []


def _notes_on_states(job: TrainSpec, rows: int, length: int) -> list[str]:
    by_package, side_by_side = job.count_state_layers()
    notes = []
    if by_package and job.fla:
        notes += [
            "",
            f"The gated delta rule is counted with flash-linear-attention, in {by_package} of the layers. --fla false "
            "counts PyTorch code, which runs without that package and takes more.",
        ]
    if side_by_side and job.documents is not None:
        lengths = job.documents(rows, length)
        notes += [
            "",
            f"The documents of packed rows lie side by side, padded, in {side_by_side} of the layers, which keep a "
            f"state. Counted with {len(lengths)} documents of at most {max(lengths)} tokens in a micro-batch.",
        ]
    return notes


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
