"""Records the completions that a trainer generates in one run, and replays them in another.

As soon as rounding changes one sampled token, a model generates another text in bf16 than in fp32, and the gradients
can no longer be compared. So runs that compare precisions have to train on the same completions.
"""

from dataclasses import dataclass
from typing import Any

import torch

from liger_trainer.verify.observed import RecordedTrainer, Recorder, Tensors


@dataclass
class Generated:
    """The result of one call of `generate`."""

    prompts: torch.Tensor  # ids (B, P)
    ids: torch.Tensor  # of the prompts and their completions, (B, P + C)
    random: list[torch.Tensor]  # the states of the random number generators after the call


class GenerationRecorder(Recorder):
    """A recorder that also keeps what the model generates.

    Args:
        instead (`list[Tensors]`, *optional*): As in `KeepGradients`.
        replayed (`list[Generated]`, *optional*): The calls of another run, in order. The model still generates, so its
            calls are recorded, but the trainer gets these completions and the random states after them.

    Attributes:
        generations (`list[Generated]`): What the trainer got from each call.
    """

    def __init__(self, instead: list[Tensors] | None = None, replayed: list[Generated] | None = None) -> None:
        super().__init__(instead)
        self.replayed = replayed
        self.generations: list[Generated] = []

    def attach(self, trainer: RecordedTrainer) -> None:
        """Record `trainer` as a `Recorder` does, and the completions of its model.

        The run raises a `ValueError` if its calls differ from the replayed ones.
        """
        super().attach(trainer)
        stock_generate = trainer.model.generate

        def generate(*args: Any, **kwargs: Any) -> torch.Tensor:
            generated = Generated(kwargs["input_ids"].clone(), stock_generate(*args, **kwargs), _random_states())
            if self.replayed is not None:
                generated = self._given_for(generated.prompts)
                _set_random_states(generated.random)
            self.generations.append(generated)
            return generated.ids.clone()

        trainer.model.generate = generate

    def _given_for(self, prompts: torch.Tensor) -> Generated:
        assert self.replayed is not None
        place = len(self.generations)
        if place == len(self.replayed):
            raise ValueError(f"the model generates more than the {place} times that it generates in fp32")
        generated = self.replayed[place]
        if not torch.equal(generated.prompts, prompts):
            raise ValueError(f"call {place + 1} of generate has other prompts than in fp32")
        return generated


def _random_states() -> list[torch.Tensor]:
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *on_gpus]


def _set_random_states(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states[1:])
