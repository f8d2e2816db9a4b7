"""Saves a run: checkpoints with manifests, the stop after SIGTERM, and a rescue of the model if a save fails."""

import contextlib
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from accelerate import Accelerator
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from liger_trainer.command.processes import gather_from_all
from liger_trainer.command.recipe.read import Recipe
from liger_trainer.command.rows.prompt_form import IN_WORDS, write_prompt_form
from liger_trainer.command.run import manifest
from liger_trainer.command.run.manifest import checkpoints_in
from liger_trainer.command.run.output_dir import WEIGHTS, ResumePoint, matches
from liger_trainer.command.run.pictures import CURVES, draw_curves
from liger_trainer.command.run.preemption import SaveOnSigterm, Terminated
from liger_trainer.command.run.summary import RunRecorder, best_evaluation, hardware
from liger_trainer.errors import RecipeError, RewardError, RunError, refusal
from liger_trainer.trainers.model_card import CardText, accuracy_lines, card_without_risk

if TYPE_CHECKING:  # the mixin always goes before a trainer of a recipe
    from trl import SFTTrainer as StockTrainer
else:
    StockTrainer = object


class SavedTrainer(Protocol):
    """The trainer attributes that say where a checkpoint is, and which of its files this process writes."""

    args: TrainingArguments
    state: TrainerState
    accelerator: Accelerator


class RunTrainer(SavedTrainer, Protocol):
    """The trainer attributes that training and saving a run read. They write `curves`."""

    checkpoints: "CheckpointManager"
    stop: SaveOnSigterm
    recipe: Recipe
    recorder: RunRecorder
    curves: bool
    callback_handler: CallbackHandler
    control: TrainerControl
    is_deepspeed_enabled: bool
    is_fsdp_enabled: bool

    def is_world_process_zero(self) -> bool:
        """Return whether this is the main process of the run."""

    def train(self, resume_from_checkpoint: str | bool | None = None) -> Any:
        """Train, from a checkpoint if one is given."""

    def save_model(self, output_dir: str, _internal_call: bool = False) -> None:
        """Save the model, on all processes together. With `_internal_call`, nothing is pushed."""

    def save_state(self) -> None:
        """Save the numbers of steps and the logs."""

    def create_model_card(self) -> None:
        """Write the card of the model."""

    def _save(self, output_dir: str) -> None:
        """Save the model from this process alone."""


class _SaveError(Exception):
    """Raised when a write fails; the message says why."""


class CheckpointManager(TrainerCallback):
    """Writes the manifests of checkpoints, and deletes old checkpoints beyond `limit`.

    A thread computes checksums while training goes on. Once a manifest is written, the oldest checkpoints of this run
    are deleted. Checkpoints of other runs are never touched. The newest and the best one always stay.
    """

    def __init__(self, fingerprint: dict[str, Any], resume_point: ResumePoint, limit: int | None = None) -> None:
        self.fingerprint = fingerprint | {"run": resume_point.run or uuid.uuid4().hex}
        self.resume_point = resume_point
        self._limit = limit
        self._pool = ThreadPoolExecutor(1)
        self._writing: Future | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Correct the path of the best checkpoint, in case the folder was moved."""
        if self.resume_point.checkpoint is not None:
            best = Path(self.resume_point.checkpoint).parent / f"checkpoint-{state.best_global_step}"
            if best.is_dir():
                state.best_model_checkpoint = str(best)

    def on_evaluate(
        self, args: Any, state: TrainerState, control: TrainerControl, metrics: Any = None, **kwargs: Any
    ) -> None:
        """RecipeError for a metric that the evaluation does not have, before the trainer looks for it."""
        name = args.metric_for_best_model
        if name is not None and f"eval_{name.removeprefix('eval_')}" not in metrics:
            raise RecipeError(f"metric_for_best_model is {name!r}; expected one of: {', '.join(metrics)}.")

    def begin(self, trainer: SavedTrainer) -> None:
        if trainer.args.should_save:
            manifest.begin(_checkpoint_of(trainer), self.fingerprint)
        trainer.accelerator.wait_for_everyone()  # an earlier attempt may have left files, which `begin` deletes

    def finish(self, trainer: SavedTrainer) -> None:
        """Start writing the manifest, once all processes have saved their parts and called this."""
        checkpoint = _checkpoint_of(trainer)
        args = trainer.args
        state = trainer.state
        # On a network disk, a process may not see the files of all others yet, so the lists are joined.
        files_of_process = gather_from_all(args, manifest.files_in(checkpoint))
        names = set(files_of_process[args.process_index])
        if not args.save_on_each_node:
            names = set().union(*files_of_process)
        if args.should_save:
            fingerprint = self.fingerprint | {"step": state.global_step}
            self._writing = self._pool.submit(self._write, checkpoint, names, fingerprint, state.best_model_checkpoint)

    def wait(self, trainer: SavedTrainer) -> None:
        """Wait for the manifest of the last checkpoint."""
        if self._writing is not None:
            with _saving("A checkpoint", trainer):
                self._writing.result()  # if Ctrl-C interrupts it, `_writing` stays set and the next call waits again
        self._writing = None

    def _write(self, checkpoint: Path, names: Iterable[str], fingerprint: dict[str, Any], best: str | None) -> None:
        manifest.write(checkpoint, names, fingerprint)
        if self._limit is None:
            return
        in_folder = checkpoints_in(checkpoint.parent)
        until_now = in_folder[: in_folder.index(checkpoint) + 1]  # later ones are damaged: this run resumed before them
        manifests = {path: manifest.read(path) for path in until_now}
        of_this_run = [
            path for path, saved in manifests.items() if saved is not None and saved["run"] == fingerprint["run"]
        ]

        always_kept = {checkpoint}
        if best is not None:
            always_kept.update(path for path in of_this_run if path.name == Path(best).name)
        limit = max(self._limit, len(always_kept))
        candidates = [path for path in of_this_run if path not in always_kept]
        surplus = candidates[: max(0, len(of_this_run) - limit)]
        cut_off = [path for path in until_now if (path / manifest.BEGUN).exists()]
        for path in [*surplus, *cut_off]:
            with contextlib.suppress(OSError):  # a surplus checkpoint does no harm
                manifest.remove(path)


class SavesWithManifest(StockTrainer):
    """Mixin for a run of the command: changes how the trainer saves, and adds the run to the model card."""

    checkpoints: CheckpointManager
    stop: SaveOnSigterm
    recipe: Recipe
    recorder: RunRecorder
    curves: bool = False  # whether this run has drawn its training curves

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.checkpoints.wait(self)
        with _saving("A checkpoint", self):
            self.checkpoints.begin(self)
            super()._save_checkpoint(model, trial)
            if self.args.should_save:
                write_prompt_form(_checkpoint_of(self), self.recorder.form, self.recipe.args.system_prompt)
            self.checkpoints.finish(self)
        if self.args.push_to_hub:
            self.checkpoints.wait(self)
            super()._push_from_checkpoint(str(_checkpoint_of(self)))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Do nothing: the stock trainer pushes before the manifest exists. `_save_checkpoint` pushes afterwards."""

    def _run_epoch(self, **kwargs: Any) -> None:
        # The stock loop trains one more step of a finished run.
        if self.state.global_step < self.state.max_steps and not self.control.should_training_stop:
            super()._run_epoch(**kwargs)

    def create_model_card(self, model_name: str | None = None, **kwargs: Any) -> None:
        """Write a card that names this package, the base model, the rows, the loss, the machine and the recipe."""
        name = model_name or Path(self.args.output_dir).name
        super().create_model_card(name, tags="liger-trainer")

    def card_text(self) -> CardText:
        stock = super().card_text()
        # The example in the card uses the chat template.
        chats = self.recorder.form == "chat" and getattr(self.processing_class, "chat_template", None)
        return CardText(
            base_model=_public_name(self.checkpoints.fingerprint["base"][0]),
            quick_start=bool(chats) and (stock is None or stock.quick_start),
            trained=self._what_was_trained(),
        )

    def _evaluation(self) -> list[str]:
        """Return the line of the card about the evaluation loss, if there was an evaluation."""
        losses = [log["eval_loss"] for log in self.state.log_history if "eval_loss" in log]
        if not losses:
            return []
        best = best_evaluation(self.state.log_history)
        saved = "the best is saved" if self.args.load_best_model_at_end else "the last is saved"
        return [f"- Loss of the evaluation: from {losses[0]:.4g} to {losses[-1]:.4g}, {best}; {saved}"]

    def _what_was_trained(self) -> str:
        """Return the lines of the card about this run, in Markdown."""
        import liger_trainer

        base, base_print = self.checkpoints.fingerprint["base"]
        rows, rows_print = self.checkpoints.fingerprint["rows"]
        losses = [log["loss"] for log in self.state.log_history if "loss" in log]
        kind = getattr(self, "loss_name", None) or getattr(self.args, "loss_type", None) or self._name
        loss = f"{kind if isinstance(kind, str) else ', '.join(kind)}, {self.state.global_step} steps"
        if losses:
            loss += f", from {losses[0]:.4g} to {losses[-1]:.4g}"
        machine = hardware(self.args.world_size)
        if self.recorder.speed is not None:
            machine += f", {self.recorder.speed:,.0f} tokens/s"
        lines = [
            f"- liger_trainer {liger_trainer.__version__}, `{type(self).__name__}`",
            f"- Base model: `{_public_name(base)}` {base_print}",
            f"- Data: `{rows}` {rows_print}",
            f"- Form of the prompts: {IN_WORDS[self.recorder.form]}",
            f"- Loss: {loss}",
            *self._evaluation(),
            *accuracy_lines(self.state.log_history).splitlines(),
            f"- Hardware: {machine}",
            "",
        ]
        if self.curves:
            lines += [f"![loss, gradient norm and rewards by step]({CURVES})", ""]
        return "\n".join([*lines, self.recipe.to_card()])


def _public_name(model: str) -> str:
    """Return the name of a model for a card, without the folders of this machine."""
    return Path(model).name if Path(model).is_dir() else model


@contextlib.contextmanager
def _saving(what: str, trainer: SavedTrainer) -> Iterator[None]:
    """Context manager: turn an error about a failed write into `_SaveError`. Other errors pass unchanged."""
    try:
        yield
    except Exception as error:
        by_torch = "inline_container.cc" in str(error)  # torch only says how many bytes are missing
        if not (isinstance(error, OSError) or by_torch or "Error while serializing: I/O error" in str(error)):
            raise
        reason = "no space left, or a limit on the size of its files" if by_torch else error
        raise _SaveError(f"{what} cannot be written: {reason} (in {trainer.args.output_dir}).") from error


def train_and_save(trainer: RunTrainer, recipe: Recipe) -> None:
    """Train, and save the model in `output_dir`. RecipeError if a library refuses something before the first step."""
    checkpoints, resume_point = trainer.checkpoints, trainer.checkpoints.resume_point
    try:
        trainer.train(resume_from_checkpoint=resume_point.checkpoint)
        if trainer.state.global_step == 0:
            raise RecipeError(
                "No step was trained, because the rows do not fill a batch. Set dataloader_drop_last: false."
            )
        checkpoints.wait(trainer)
        _save_model(trainer)
    except Terminated:
        checkpoints.wait(trainer)
        trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
        trainer.stop.any_signalled()  # a barrier: once one process exits, the launcher ends the others
        raise
    except RewardError as error:
        if trainer.state.global_step == 0:
            raise RecipeError(str(error)) from error
        raise RunError(f"{error} {describe_last_checkpoint(recipe)}") from error
    except _SaveError as error:
        raise RunError(f"{error} {_keep_model(trainer)}{describe_last_checkpoint(recipe)}") from error
    except Exception as error:
        args = trainer.args
        named_fields = {name: getattr(args, name, None) for name in ("optim_args", "lr_scheduler_kwargs", "loss_type")}
        message = refusal(error, **named_fields)
        if not resume_point.known:
            message = f"{resume_point.checkpoint} cannot be loaded: {' '.join(str(error).split())}"
        # TRL checks these in the first step only
        late = ("loss_type: ", "The reward function ")
        by_trl = trainer.state.global_step == 0 and message is not None and any(text in message for text in late)
        if message is None or (trainer.stop.training and not by_trl):
            raise
        raise RecipeError(f"{message} ({type(error).__name__})") from error
    finally:
        # After another error too: `describe_last_checkpoint` may name this checkpoint.
        with contextlib.suppress(_SaveError):
            checkpoints.wait(trainer)


def _save_model(trainer: RunTrainer) -> None:
    """Save the model in `output_dir`. If that fails, delete what was written: half a model looks like a whole one."""
    folder, failure = Path(trainer.args.output_dir), None
    before = {path: path.stat().st_mtime_ns for path in matches(folder, WEIGHTS)}
    try:
        with _saving("The trained model", trainer):
            trainer.save_model(trainer.args.output_dir, _internal_call=True)  # does not push
            trainer.save_state()
            if trainer.args.should_save:
                write_prompt_form(folder, trainer.recorder.form, trainer.recipe.args.system_prompt)
            if trainer.is_world_process_zero():
                with card_without_risk(trainer.args.output_dir):
                    trainer.curves = draw_curves(trainer.state.log_history, folder / CURVES)
            trainer.create_model_card()
    except Exception as error:
        failure = error
    if not any(gather_from_all(trainer.args, failure is not None)):
        return
    for path in matches(folder, WEIGHTS) if trainer.is_world_process_zero() else ():
        if path.is_file() and path.stat().st_mtime_ns != before.get(path):
            with contextlib.suppress(OSError):
                path.unlink()
    if failure is None:
        raise RunError("The trained model cannot be written; another process says why.")
    if not isinstance(failure, _SaveError):
        failure.add_note(_keep_model(trainer))
    raise failure


def _keep_model(trainer: RunTrainer) -> str:
    """Rescue the model after a failed save: write it without its optimizer, and return a sentence that says where.

    It goes to `output_dir`, or to a temporary folder if `output_dir` is full or has a model already. Return "" and
    write nothing if this step has a checkpoint, or if this process holds only a shard. Checkpoints without a manifest
    are deleted first, to free their space.
    """
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or not trainer.is_world_process_zero():
        return ""
    if manifest.read(_checkpoint_of(trainer)) is not None:
        return ""
    folder = Path(trainer.args.output_dir)
    for path in checkpoints_in(folder):
        if (path / manifest.BEGUN).exists():
            shutil.rmtree(path, ignore_errors=True)
    elsewhere = Path(tempfile.mkdtemp(prefix="liger-trainer-"))
    for place in (elsewhere,) if matches(folder, WEIGHTS) else (folder, elsewhere):  # an earlier model stays
        try:
            trainer._save(str(place))
        except Exception:  # the disk again; the error message is about it already
            for path in matches(place, WEIGHTS):
                path.unlink()
        else:
            if place == folder:
                elsewhere.rmdir()
            return f"The model of step {trainer.state.global_step} is saved in {place}, without its optimizer. "
    shutil.rmtree(elsewhere, ignore_errors=True)
    return f"The model cannot be written to {tempfile.gettempdir()} either. "


def describe_last_checkpoint(recipe: Recipe) -> str:
    """Return a sentence about the newest whole checkpoint of a run that ended early, and how to resume from it."""
    if not recipe.began:  # checkpoints in output_dir are an earlier run's
        return "Training had not begun."
    whole = [path for path in checkpoints_in(Path(recipe.training.output_dir)) if manifest.read(path) is not None]
    if not whole:
        return f"No checkpoint was saved (save_strategy is {recipe.training.save_strategy.value!r})."
    return f"The last checkpoint is {whole[-1]}. To go on, add --resume_from_checkpoint true to the command."


def _checkpoint_of(trainer: SavedTrainer) -> Path:
    return Path(trainer.args.output_dir, f"checkpoint-{trainer.state.global_step}")
