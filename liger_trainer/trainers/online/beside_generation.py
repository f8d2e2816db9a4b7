"""Releases the memory of CUDA graphs before a sleeping inference engine wakes up."""

from typing import TYPE_CHECKING, Any, Protocol

from liger_trainer.varlen.graphs.step_graphs import current_graphs

if TYPE_CHECKING:  # the mixin always goes before one of TRL's trainers
    from trl import GRPOTrainer as StockTrainer
else:
    StockTrainer = object


class EngineArguments(Protocol):
    """The trainer arguments about an inference engine that are read here."""

    vllm_enable_sleep_mode: bool


class EngineTrainer(Protocol):
    """The trainer attributes about an inference engine that are read here. None is written."""

    args: EngineArguments
    use_vllm: bool
    vllm_mode: str


class GivesMemoryBack(StockTrainer):
    """Mixin of trainers that generate their rows. It precedes `LigerTRLMixin`.

    With `vllm_enable_sleep_mode`, vLLM frees its memory for training and claims it again to generate. CUDA graphs hold
    memory in private pools, which emptying the cache does not free. So the graphs are released before vLLM wakes, and
    captured again as their sizes come up. Other engines hold their own memory all the time.
    """

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        trainer: EngineTrainer = self
        graphs = current_graphs()
        sleeps = trainer.use_vllm and trainer.vllm_mode == "colocate" and trainer.args.vllm_enable_sleep_mode
        if sleeps and graphs is not None:
            graphs.release()
        return super()._generate(*args, **kwargs)
