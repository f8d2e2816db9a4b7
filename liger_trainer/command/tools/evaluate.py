"""`liger-trainer evaluate MODEL`: the loss of held-out rows, exact answers, and tasks of lm-eval."""

import importlib
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from liger_trainer.command.options import parse_positive
from liger_trainer.command.processes import print_status
from liger_trainer.command.rows.prompt_form import read_system_prompt
from liger_trainer.command.tools.chat import load_model
from liger_trainer.command.tools.loading import add_command, add_model_options
from liger_trainer.errors import RecipeError, short

if TYPE_CHECKING:
    from datasets import Dataset


def add_evaluate_command(commands: Any) -> None:
    """Add `evaluate` to the subparsers of `liger-trainer`."""
    parser = add_command(
        commands, "evaluate", _evaluate, "the loss of held-out rows and exact answers, or tasks of lm-eval"
    )
    parser.add_argument("model", metavar="MODEL", help="an output_dir, a checkpoint, a folder, or a name on the Hub")
    parser.add_argument("--model", dest="base_model", help="the base of an adapter, where it has moved")
    parser.add_argument("--dataset_name", metavar="FILE", help="held-out rows, in any form that a recipe takes")
    parser.add_argument("--dataset_split", default="test", help="the split of a Hub dataset; default test")
    parser.add_argument("--dataset_config", help="the configuration of a Hub dataset")
    parser.add_argument("--prompt_template", default="none", help="as in a recipe: alpaca, sharegpt or last_turn")
    parser.add_argument("--columns", help="as in a recipe, such as '{question: q, answer: a}'")
    parser.add_argument("--system_prompt", help="as in a recipe; default: the one from training")
    parser.add_argument("--max_rows", help="use this many rows, the first ones")
    parser.add_argument("--max_length", default="2048", help="rows are cut to this many tokens; default 2048")
    parser.add_argument("--answers", type=int, default=100, help="how many rows are answered; default 100, 0 for none")
    parser.add_argument("--max_new_tokens", default="256", help="how long an answer may be; default 256")
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help="tasks of lm-eval, such as gsm8k or arc_easy")
    parser.add_argument("--limit", help="with --tasks, use this many examples of each")
    parser.add_argument("--json", metavar="FILE", help="write the figures to a file too")
    add_model_options(parser)


def _evaluate(args: Any) -> None:
    if not args.dataset_name and not args.tasks:
        raise RecipeError("Nothing to evaluate on. Pass --dataset_name FILE, --tasks TASK, or both.")
    if args.answers < 0:
        raise RecipeError(f"--answers is {args.answers}; expected 0 or more.")
    if args.json and not Path(args.json).absolute().parent.is_dir():
        raise RecipeError(f"--json is {args.json!r}, but the folder {Path(args.json).parent} does not exist. Make it.")
    if args.tasks and importlib.util.find_spec("lm_eval") is None:
        raise RecipeError('--tasks needs the package lm_eval. Run `pip install "lm_eval[hf]"`, or leave --tasks out.')
    rows = None if args.dataset_name is None else _rows(args)
    model, reader = load_model(args)
    tokenizer = getattr(reader, "tokenizer", reader)
    figures: dict[str, Any] = {"model": args.model}
    if rows is not None:
        figures |= {"dataset_name": args.dataset_name} | _held_out(args, model, tokenizer, rows)
    if args.tasks:
        figures["tasks"] = _tasks(args, model, tokenizer)
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2, default=str) + "\n", encoding="utf-8")


def _rows(args: Any) -> Any:
    from liger_trainer.command.recipe.keys import RecipeArguments
    from liger_trainer.command.recipe.trainers import TRAINERS
    from liger_trainer.command.rows.load import load_rows

    system_prompt = args.system_prompt
    if system_prompt is None:
        system_prompt = read_system_prompt(args.model)
        if system_prompt is not None:
            print_status(f"the rows get the system prompt of the training, {short(system_prompt)}.")
    is_file = Path(args.dataset_name).expanduser().exists()
    arguments = RecipeArguments(
        dataset_name=args.dataset_name,
        dataset_config=args.dataset_config,
        dataset_train_split="train" if is_file else args.dataset_split,
        prompt_template=args.prompt_template,
        columns=args.columns,
        system_prompt=system_prompt or None,
        max_rows=None if args.max_rows is None else parse_positive("--max_rows", args.max_rows, int),
    )
    return load_rows(arguments, Path(), TRAINERS["sft"].columns, 0)[0]


def _held_out(args: Any, model: Any, tokenizer: Any, rows: "Dataset") -> dict[str, Any]:
    from liger_trainer.command.tools.held_out import measure

    max_length = parse_positive("--max_length", args.max_length, int)
    max_new_tokens = parse_positive("--max_new_tokens", args.max_new_tokens, int)
    measured = measure(model, tokenizer, rows, max_length, args.answers, max_new_tokens)
    print(f"{args.dataset_name}\n{measured}")
    return measured.to_dict()


def _tasks(args: Any, model: Any, tokenizer: Any) -> dict[str, Any]:
    """Run tasks of lm-eval on the loaded model."""
    lm_eval: Any = importlib.import_module("lm_eval")
    lm_eval_models: Any = importlib.import_module("lm_eval.models.huggingface")
    limit = None if args.limit is None else parse_positive("--limit", args.limit, int)
    print_status(f"lm-eval runs {', '.join(args.tasks)}")
    wrapped = lm_eval_models.HFLM(pretrained=model, tokenizer=tokenizer)
    results = lm_eval.simple_evaluate(model=wrapped, tasks=args.tasks, limit=limit)
    if results is None:  # on a process that is not the main one
        return {}
    for task, metrics in results["results"].items():
        for name, value in metrics.items():
            if isinstance(value, float) and "stderr" not in name:
                print(f"  {task}  {name.partition(',')[0]}  {value:.4f}")
    return results["results"]
