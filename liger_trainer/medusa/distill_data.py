"""Self-distillation data: the model's own answers to prompts, as rows that a recipe trains on.

Heads are to guess what the model itself writes, so its own text teaches them most. A row has `prompt` and `completion`,
which are texts or messages as the prompts are, and `prompt_index`, the number of its prompt.
"""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from liger_trainer.medusa.prompts import Prompt, answer, encode, end_tokens

# Takes a batch of prompts, and returns for each the answer and whether it came to its own end.
Answerer = Callable[[Sequence[Prompt]], list[tuple[str, bool]]]


@dataclass(frozen=True)
class DistillReport:
    """The rows written by this call, those found from before, and the answers left out, which were cut or empty."""

    written: int
    found: int
    cut: int
    empty: int

    def __str__(self) -> str:
        before = f", after {self.found} that were there" if self.found else ""
        left_out = [f"{self.cut} cut at max_new_tokens"] * bool(self.cut) + [f"{self.empty} empty"] * bool(self.empty)
        return f"{self.written} rows written{before}" + (f"; left out: {', '.join(left_out)}" if left_out else "")


def distill(
    prompts: Sequence[Prompt],
    output: str,
    answerer: Answerer,
    batch_size: int = 16,
    progress: Callable[[int], None] = lambda done: None,
) -> DistillReport:
    """Answer `prompts` and append the rows to `output`, a batch at a time. A run that was stopped goes on where it was.

    An answer that was cut at `max_new_tokens` is left out. A trainer would put the end-of-text token behind it, and the
    heads, or in stage 2 the model, would learn to stop in the middle of a sentence.

    `batch_size` prompts are handed to `answerer` at once; `progress` is called with the number of prompts done after
    each batch. ValueError if `output` is no .jsonl file or holds rows of other prompts.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; expected 1 or more.")
    if Path(output).suffix != ".jsonl":
        raise ValueError(f"output is {output!r}; expected a file ending in .jsonl, with one row per line.")
    os.makedirs(os.path.dirname(os.path.abspath(output)), exist_ok=True)
    found, start = _rows_there(output, prompts)
    written = cut = empty = 0
    with open(output, "a", encoding="utf-8") as file:
        for first in range(start, len(prompts), batch_size):
            batch = prompts[first : first + batch_size]
            for index, (prompt, (text, ended)) in enumerate(zip(batch, answerer(batch), strict=True), start=first):
                if not ended or not text.strip():
                    cut, empty = cut + (not ended), empty + ended
                    continue
                completion = text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
                row = {"prompt": prompt, "completion": completion, "prompt_index": index}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                written += 1
            file.flush()
            progress(first + len(batch))
    return DistillReport(written, found, cut, empty)


def _rows_there(output: str, prompts: Sequence[Prompt]) -> tuple[int, int]:
    """Count the rows in `output`, find the first prompt to answer, and cut off an unfinished last line."""
    with open(output, "a+b") as file:
        file.seek(0)
        *lines, unfinished = file.read().split(b"\n")
        last = -1
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                last = row["prompt_index"]
                same = row["prompt"] == prompts[last]
            except (ValueError, LookupError, TypeError):
                same = False
            if not same:
                raise ValueError(
                    f"output is {output!r}, which is there already, and its line {number} does not answer one of these "
                    "prompts. Give the prompts and the max_rows that it was begun with, or another file."
                )
        file.truncate(file.tell() - len(unfinished))
    return len(lines), last + 1


def local_answerer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int = 512, temperature: float = 0.0
) -> Answerer:
    """Answers with a model in this process, by `prompts.answer`."""
    ends = end_tokens(model, tokenizer)

    def answer_batch(prompts: Sequence[Prompt]) -> list[tuple[str, bool]]:
        answers = answer(model, [encode(tokenizer, p) for p in prompts], ends, max_new_tokens, temperature)
        ended = [new[-1] in ends for new in answers]
        texts = [new[:-1] if at_end else new for new, at_end in zip(answers, ended, strict=True)]
        return list(zip(tokenizer.batch_decode(texts, skip_special_tokens=True), ended, strict=True))

    return answer_batch


def server_answerer(
    url: str, model: str, max_new_tokens: int = 512, temperature: float = 0.0, timeout_s: float = 600.0
) -> Answerer:
    """Answers with an OpenAI-compatible server: `/v1/chat/completions` for messages, `/v1/completions` for text.

    `url` is an address such as `http://localhost:8000`, with or without `/v1`, and `model` the name that the server has
    for the model. ValueError when the answerer is used: the server cannot be reached, or refuses the request.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"server is {url!r}; expected a URL such as http://localhost:8000.")
    root = url.rstrip("/").removesuffix("/v1") + "/v1"

    def ask(prompt: Prompt) -> tuple[str, bool]:
        path, key = ("/completions", "prompt") if isinstance(prompt, str) else ("/chat/completions", "messages")
        body = {"model": model, key: prompt, "max_tokens": max_new_tokens, "temperature": temperature}
        request = urllib.request.Request(root + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                choice = json.load(response)["choices"][0]
            text = choice["text"] if isinstance(prompt, str) else choice["message"]["content"]
        except urllib.error.HTTPError as error:
            said = error.read().decode("utf-8", "replace")[:500]
            raise ValueError(f"server {root + path} answered {error.code} for model {model!r}: {said}") from error
        except OSError as error:
            raise ValueError(f"server {root + path} cannot be reached: {error}. Is it running there?") from error
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"server {root + path} answered what is not an OpenAI completion: {error!r}.") from error
        return text or "", choice.get("finish_reason") == "stop"

    def answer_batch(prompts: Sequence[Prompt]) -> list[tuple[str, bool]]:
        with ThreadPoolExecutor(len(prompts)) as pool:  # the server makes a batch of what arrives together
            return list(pool.map(ask, prompts))

    return answer_batch
