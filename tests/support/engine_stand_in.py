"""A stand-in for TRL's `VLLMGeneration`: drawn completions with drawn log-probabilities, the same in each training."""

import math

import torch
from tiny_models import VOCAB

_END = 2


class EngineStandIn:
    """Completions of one to `max_completion_length` tokens. One in ten log-probabilities is missing, as vLLM may."""

    def __init__(self, max_completion_length, **options):
        self.longest = max_completion_length
        self.drawn = torch.Generator().manual_seed(17)
        self.synced = 0

    def sync_weights(self):
        self.synced += 1

    def _int(self, low, high):
        return int(torch.randint(low, high, (), generator=self.drawn))

    def completion(self):
        """Token ids, and the log-probability of each, or None."""
        length = self._int(1, self.longest + 1)
        ids = [self._int(3, VOCAB) for _ in range(length)]
        if self._int(0, 2):
            ids[-1] = _END
        scores = torch.randn(length, generator=self.drawn) * 0.5 - math.log(VOCAB)
        return ids, [None if self._int(0, 10) == 0 else score for score in scores.tolist()]

    def generate(self, prompts, images, num_generations, profiler=None):
        made = [self.completion() for _ in prompts]
        ids = [ids for ids, _ in made]
        scores = [[[score] for score in scores] for _, scores in made]
        return prompts, ids, scores, None


def install(monkeypatch):
    """Have the trainers of GRPO and RLOO that are built from now on generate by the stand-in."""
    for name in ("grpo", "rloo"):
        monkeypatch.setattr(f"trl.trainer.{name}_trainer.VLLMGeneration", EngineStandIn)
