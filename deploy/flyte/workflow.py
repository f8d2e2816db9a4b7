"""Fine-tuning as a Flyte workflow: fetch rows, train a recipe on several machines, evaluate, return model and report.

    pip install ".[flyte]"    # in a checkout
    pyflyte run --remote deploy/flyte/workflow.py fine_tune --rows s3://bucket/alpaca.json

`train` is an elastic task: Flyte starts LIGER_NNODES machines of LIGER_NPROC processes each, as torchrun would. Locally
(`pyflyte run` without --remote, with LIGER_NNODES=1) the same workflow runs on the processes of one machine.
"""

import json
import os
from pathlib import Path

from flytekit import FlyteContextManager, Resources, task, workflow
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile
from flytekitplugins.kfpytorch import Elastic

IMAGE = os.environ.get("LIGER_IMAGE", "liger-trainer:0.1.0")
NNODES = int(os.environ.get("LIGER_NNODES", "4"))
NPROC = int(os.environ.get("LIGER_NPROC", "8"))
OUTPUT = os.environ.get("LIGER_OUTPUT", "/workspace/llama3_8b")  # on a volume that all machines share
GPUS = {} if os.environ.get("LIGER_CPU") else {"requests": Resources(gpu=str(NPROC), mem="512Gi")}
ONE_GPU = {"requests": Resources(gpu="1", mem="64Gi")} if GPUS else {}


@task(container_image=IMAGE, cache=True, cache_version="1")
def fetch_data(rows: FlyteFile, eval_fraction: float) -> tuple[FlyteFile, FlyteFile]:
    """Rows to train on, and rows held out for evaluation, as JSON lines. The last ones are held out."""
    from datasets import load_dataset

    path = rows.download()
    whole = load_dataset("parquet" if path.endswith(".parquet") else "json", data_files=path, split="train")
    held_out = max(1, round(len(whole) * eval_fraction))
    folder, files = Path(FlyteContextManager.current_context().file_access.local_sandbox_dir), []
    for name, part in (
        ("train", whole.select(range(len(whole) - held_out))),
        ("eval", whole.select(range(len(whole) - held_out, len(whole)))),
    ):
        files.append(str(folder / f"{name}.jsonl"))
        part.to_json(files[-1])
    return FlyteFile(files[0]), FlyteFile(files[1])


@task(
    container_image=IMAGE,
    task_config=Elastic(nnodes=NNODES, nproc_per_node=NPROC, max_restarts=3, increase_shared_mem=False),
    environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},  # a restart gets a store without dead processes
    shared_memory=True,
    retries=3,
    **GPUS,
)
def train(recipe: str, rows: FlyteFile, options: list[str]) -> FlyteDirectory:
    """Train `recipe` on `rows`. Flyte starts this in every process of every machine, and keeps what rank 0 returns.

    A restart or another attempt goes on from the last checkpoint in `OUTPUT`.
    """
    from liger_trainer.command.main import main

    words = [recipe, "--dataset_name", _own_copy(rows), "--output_dir", OUTPUT, "--resume_from_checkpoint", "auto"]
    code = main(["train", *words, *options])
    if code in (1, 143):  # a full disk or a machine that was taken back: another attempt may go on
        raise FlyteRecoverableException(f"liger-trainer train has ended with the code {code}.")
    if code:
        raise ValueError(f"liger-trainer train has refused the recipe (code {code}); the log says why.")
    return FlyteDirectory(OUTPUT)


def _own_copy(rows: FlyteFile) -> str:
    """The path of `rows`, downloaded for this process alone: two that write one file cut it off for each other."""
    access = FlyteContextManager.current_context().file_access
    path = Path(access.local_sandbox_dir) / f"rows_of_process_{os.environ.get('LOCAL_RANK', '0')}.jsonl"
    access.get_data(str(rows.remote_source or rows.path), str(path))
    return str(path)


@task(container_image=IMAGE, **ONE_GPU)
def evaluate(model: FlyteDirectory, rows: FlyteFile) -> FlyteFile:
    """The loss of the trained model on the rows held out, with what the run has reported, as a JSON file."""
    import math

    import torch
    from datasets import load_dataset

    from liger_trainer import LigerSFTConfig, LigerSFTTrainer
    from liger_trainer.data.formats import alpaca_row

    folder = Path(model.download())
    held_out = load_dataset("json", data_files=rows.download(), split="train")
    if "instruction" in held_out.column_names:  # others are prompt and completion, or messages, already
        held_out = held_out.map(alpaca_row, with_indices=True, remove_columns=held_out.column_names)
    scratch = Path(FlyteContextManager.current_context().file_access.local_sandbox_dir)
    gpu = torch.cuda.is_available()
    args = LigerSFTConfig(output_dir=str(scratch / "evaluation"), bf16=gpu, use_cpu=not gpu, report_to="none")
    trainer = LigerSFTTrainer(model=str(folder), args=args, train_dataset=held_out, eval_dataset=held_out)
    loss = trainer.evaluate()["eval_loss"]
    state = json.loads((folder / "trainer_state.json").read_text())
    report = {
        "eval_loss": loss,
        "eval_perplexity": math.exp(min(loss, 100.0)),
        "eval_rows": len(held_out),
        "steps": state["global_step"],
        "train_loss": [entry["loss"] for entry in state["log_history"] if "loss" in entry],
        "liger_report": json.loads((folder / "liger_report.json").read_text()),
    }
    path = scratch / "report.json"
    path.write_text(json.dumps(report, indent=2))
    return FlyteFile(str(path))


@workflow
def fine_tune(
    rows: FlyteFile,
    recipe: str = "llama3_8b/sft_alpaca",
    options: list[str] = ["--accelerate_config", "fsdp2"],  # noqa: B006 - Flyte reads it as the default of an input
    eval_fraction: float = 0.02,
) -> tuple[FlyteDirectory, FlyteFile]:
    """Rows to a fine-tuned model and the report of its evaluation."""
    train_rows, eval_rows = fetch_data(rows=rows, eval_fraction=eval_fraction)
    model = train(recipe=recipe, rows=train_rows, options=options)
    return model, evaluate(model=model, rows=eval_rows)
