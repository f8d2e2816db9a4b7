"""A recipe on the workers of Ray Train: `python deploy/ray/train.py --workers 8 RECIPE [--key value ...]`.

Ray starts the workers and joins them with torch.distributed; what a worker then runs is the same entry as everywhere. A
worker that dies is replaced, with all others, `--retries` times, and the run goes on from its last checkpoint. So
`output_dir` has to be a folder that all machines share. `pip install ".[ray]"` in a checkout.
"""

import argparse
import os
import sys
from typing import Any


def run_recipe(config: dict[str, Any]) -> None:
    """What each worker runs. RuntimeError if the run has failed, which has Ray begin anew if it may."""
    import ray.train

    from liger_trainer.command.main import main

    os.chdir(config["folder"])  # Ray starts workers in a folder of their own
    if code := main(["train", *config["words"]]):
        raise RuntimeError(f"liger-trainer train has ended with the code {code}; the worker's log says why.")
    ray.train.report({"code": 0})


def train(words: list[str], workers: int, use_gpu: bool, retries: int, storage: str | None) -> Any:
    """Run a recipe, and return Ray's result. `words` are what follows `liger-trainer train`."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    if not any(word.startswith("--resume_from_checkpoint") for word in words):
        words = [*words, "--resume_from_checkpoint", "auto"]
    trainer = TorchTrainer(
        run_recipe,
        train_loop_config={"words": words, "folder": os.getcwd()},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=use_gpu),
        run_config=RunConfig(storage_path=storage, failure_config=FailureConfig(max_failures=retries)),
    )
    return trainer.fit()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, required=True, help="processes in all, one a GPU")
    parser.add_argument("--cpu", action="store_true", help="workers without a GPU")
    parser.add_argument("--retries", type=int, default=3, help="how often to begin anew; -1 for always")
    parser.add_argument("--storage", help="where Ray keeps what it knows of the run; a shared folder or a bucket")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="RECIPE [--key value ...]")
    given = parser.parse_args()
    result = train(given.words, given.workers, not given.cpu, given.retries, given.storage)
    sys.exit(0 if result.error is None else 1)
