"""Checks the learning rate against the length of the run and the trained weights."""

from liger_trainer.preflight.context import PreflightContext

# AdamW and its relatives move a weight by at most about the learning rate per step, whatever the gradient's size.
_NORMALISED = ("adamw", "paged_adamw", "lion", "paged_lion", "stable_adamw", "schedule_free_adamw")
_LARGEST_FULL = 1e-3  # when all weights of a pretrained model are trained
_LARGEST_LORA = 1e-2
_SMALL_MODEL = 512  # below this hidden size, larger rates are usual
_LEAST_MOVE = 1e-6  # the least useful change of a weight in a run; weights are about 0.02
_FEW_STEPS = 5  # a trial run
_WITHOUT_WARMUP = ("constant",)


def learning_rate(run: PreflightContext) -> str | None:
    """Warn if the learning rate would destroy a pretrained model, or hardly change a weight in the whole run."""
    args = run.trainer.args
    rate, optimizer = args.learning_rate, str(getattr(args.optim, "value", args.optim))
    if not optimizer.startswith(_NORMALISED):
        return None
    move = rate * run.steps
    if move < _LEAST_MOVE and run.steps > _FEW_STEPS:
        return (
            f"learning_rate is {rate:g} and the run has {run.steps} steps, so no weight changes by more than "
            f"{move:.0e} and the model stays as it is. Usual values are 1e-5 for all weights and 2e-4 for a LoRA."
        )
    if not _is_trained_before(run):
        return None
    if run.is_adapter and rate > _LARGEST_LORA and _is_lora(run):
        return f"learning_rate is {rate:g}, and a LoRA usually diverges at this rate. A usual value is 2e-4."
    if not run.is_adapter and rate > _LARGEST_FULL and _trains_most_weights(run):
        return (
            f"learning_rate is {rate:g} for all weights of a pretrained model, which usually makes it forget what it "
            "knows. A usual value is 1e-5."
        )
    return None


def warmup(run: PreflightContext) -> str | None:
    """Warn if the run ends before the schedule reaches `learning_rate`."""
    args = run.trainer.args
    scheduler = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    steps = args.get_warmup_steps(run.steps)
    if scheduler in _WITHOUT_WARMUP or steps < run.steps or run.steps <= _FEW_STEPS:
        return None
    return (
        f"warmup_steps is {args.warmup_steps:g} and the run has {run.steps} steps, so the learning rate never reaches "
        f"{args.learning_rate:g}. Lower warmup_steps; a fraction such as 0.1 follows the length of the run."
    )


def _is_trained_before(run: PreflightContext) -> bool:
    """Return whether the model was loaded from a checkpoint, and is not small."""
    width = getattr(run.text_config, "hidden_size", None) or 0
    return bool(getattr(run.model, "name_or_path", "")) and width >= _SMALL_MODEL


def _trains_most_weights(run: PreflightContext) -> bool:
    parameters = list(run.model.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return 2 * trained > sum(parameter.numel() for parameter in parameters)


def _is_lora(run: PreflightContext) -> bool:
    configs = run.trainer.model.peft_config.values()
    return {str(getattr(config.peft_type, "value", config.peft_type)) for config in configs} == {"LORA"}
