"""`liger-trainer doctor MODEL` says what would be patched in a model, and why the rest would not be."""

import argparse
from typing import Any

from liger_trainer.command.processes import Heartbeat, importing, print_loading


def add_doctor_command(commands: Any) -> None:
    """Add `doctor` to the subparsers of `liger-trainer`."""
    doctor = commands.add_parser("doctor", help="say what would be patched in a model, and why the rest would not be")
    doctor.add_argument("model", metavar="MODEL", help="a folder, or a name on the Hub; only its config is read")
    doctor.add_argument("--gguf_file", help="a GGUF file in the folder MODEL")
    doctor.add_argument("--trust_remote_code", action="store_true", help="run model code that comes with MODEL")
    doctor.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    print_loading()
    with importing():
        import torch
        from transformers import AutoConfig

        from liger_trainer import apply_liger
        from liger_trainer.command.recipe.model_source import find_model
        from liger_trainer.fitting.meta_model import auto_class_of

    with Heartbeat(lambda time: f"still building {args.model} without its weights, {time}."):
        source = find_model(args.model, args.gguf_file, key="MODEL", trust_remote_code=args.trust_remote_code)
        config = source.load(AutoConfig)
        with torch.device("meta"):  # the report depends on code and shapes only, so no weights are needed
            model = auto_class_of(config).from_config(config, trust_remote_code=args.trust_remote_code)
        report = apply_liger(model)
    print(report)
    return 0
