"""Checks the rows: which tokens are learned, and where answers end."""

from collections import Counter

from liger_trainer.preflight.context import PreflightContext
from liger_trainer.preflight.sequences import Sequence

_AFTER_END = 2  # tokens that a template may write after the end of a turn, such as a newline


def nothing_learned(run: PreflightContext) -> str | None:
    """Warn if no token of the rows counts in the loss."""
    if not run.sequences or any(any(sequence.learned) for sequence in run.sequences):
        return None
    return (
        f"in the first {len(run.sequences)} rows each label is -100, so the loss is 0 and nothing is learned. Look at "
        "how labels are made: the template may mark no answers, or max_length may cut them off."
    )


def cut_answers(run: PreflightContext) -> str | None:
    """Warn if `max_length` cuts answers, or whole rows."""
    trainer, limit = run.trainer, run.max_length
    if limit is None:
        return None
    num_given = getattr(trainer, "rows_given", None)
    packs = bool(getattr(trainer.args, "packing", False))
    dropped = 0 if packs else getattr(trainer, "rows_left_out", 0)
    full = [sequence for sequence in run.sequences if len(sequence.ids) >= limit]
    empty = [sequence for sequence in full if not any(sequence.learned)]
    shortened = [sequence for sequence in full if sequence.has_prompt]
    parts = []
    if dropped:
        parts.append(f"{dropped} of {num_given} rows are left out, since they have nothing to learn within max_length")
    if empty:
        parts.append(f"{len(empty)} of the first {len(run.sequences)} rows are cut before their answer begins")
    if shortened:
        parts.append(f"{len(shortened)} of the first {len(run.sequences)} rows are cut, or end, within their answer")
    if not parts:
        return None
    return f"max_length is {limit}: {'; '.join(parts)}. Raise max_length, or shorten or remove these rows."


def end_token_learned(run: PreflightContext) -> str | None:
    """Warn if the token that ends answers never counts in the loss."""
    answers = [sequence for sequence in run.whole_sequences if any(sequence.learned)]
    if not answers or not run.end_tokens or any(_learned_end(run, sequence) is not None for sequence in answers):
        return None
    masked = Counter(token for sequence in answers for token in _masked_ends(run, sequence))
    if masked:
        name = run.name_of(masked.most_common(1)[0][0])
        return (
            f"the token {name} comes after answers in the rows, but its label is -100, so the model does not learn to "
            "stop. If padding has the same token, set another pad_token. If the chat template leaves it out of "
            "{% generation %}, move it inside."
        )
    if not all(sequence.has_prompt for sequence in answers):
        return None  # plain text, which may have no end
    last = answers[0].ids[answers[0].last_learned or 0]
    return (
        f"no answer in the first {len(run.sequences)} rows ends with a token that ends a turn; the first ends with "
        f"{run.name_of(last)}. The model does not learn to stop. Write the end-of-turn token after each answer."
    )


def end_token_stops(run: PreflightContext) -> str | None:
    """Warn if generation does not stop at the token that ends answers."""
    if not run.stop_tokens:
        return None
    learned_ends = [_learned_end(run, sequence) for sequence in run.whole_sequences]
    ends = Counter(end for end in learned_ends if end is not None)
    if not ends or run.stop_tokens & ends.keys():
        return None
    token, count = ends.most_common(1)[0]
    if 2 * count < ends.total():
        return None
    stops = ", ".join(run.name_of(stop) for stop in sorted(run.stop_tokens))
    return (
        f"answers end with {run.name_of(token)}, but generation only stops at {stops}, so servers go on after the "
        f"answer. Set eos_token of the tokenizer to it, or add {token} to model.generation_config.eos_token_id."
    )


def two_begin_tokens(run: PreflightContext) -> str | None:
    """Warn if rows begin with two begin tokens: a template writes one, and the tokenizer adds another."""
    begin = getattr(run.tokenizer, "bos_token_id", None)
    if begin is None:
        return None
    doubled = [sequence for sequence in run.sequences if sequence.ids[:2] == [begin, begin]]
    if not doubled:
        return None
    return (
        f"{len(doubled)} of the first {len(run.sequences)} rows begin with {run.name_of(begin)} twice, which the model "
        "has not seen. Tokenize text that a chat template has rendered with add_special_tokens=False."
    )


def _learned_end(run: PreflightContext, sequence: Sequence) -> int | None:
    """Return the token that ends the last answer if it is learned, else None."""
    last = sequence.last_learned
    if last is None:
        return None
    for position in range(last, max(last - _AFTER_END - 1, -1), -1):
        if sequence.learned[position] and sequence.ids[position] in run.end_tokens:
            return sequence.ids[position]
    return None


def _masked_ends(run: PreflightContext, sequence: Sequence) -> list[int]:
    """Return the end tokens that follow a learned token but are not learned themselves."""
    ends = []
    for position in range(1, len(sequence.ids)):
        token = sequence.ids[position]
        if sequence.learned[position - 1] and not sequence.learned[position] and token in run.end_tokens:
            ends.append(token)
    return ends
