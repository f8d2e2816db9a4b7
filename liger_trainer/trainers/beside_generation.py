"""Memory of captured steps, given back to an engine that sleeps while the model trains."""

from typing import Any

from liger_trainer.varlen.graphs.step_graphs import current_graphs


class GivesMemoryBack:
    """Goes before `LigerTRLMixin` in a trainer that generates its rows.

    With `vllm_enable_sleep_mode` vLLM leaves its memory to the training and takes it back to generate. CUDA graphs keep
    theirs in pools of their own, which no emptied cache gives back. So they are released before vLLM wakes, and sizes
    are captured again when they come. Other engines have their memory beside that of the training all the time.
    """

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        trainer: Any = self
        graphs = current_graphs()
        sleeps = trainer.use_vllm and trainer.vllm_mode == "colocate" and trainer.args.vllm_enable_sleep_mode
        if sleeps and graphs is not None:
            graphs.release()
        return super()._generate(*args, **kwargs)  # type: ignore[misc]
