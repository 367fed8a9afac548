"""One run, step by step: [Note: resuming] in the package says what it may rely on."""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar, cast, final

from torch import nn

from l2l.checkpoint import CheckpointError, CheckpointFolder, OtherCheckpointError
from l2l.distributed import World
from l2l.engine import Engine, Execution
from l2l.files import write_file
from l2l.hugging_face import base_of
from l2l.model import TokenLoss
from l2l.planner import measured_hardware, plan
from l2l.train.best import Best
from l2l.train.data import packing_holds
from l2l.train.display import Display, Level, near
from l2l.train.export import export_checkpoint, read_checkpoint
from l2l.train.folder import RunFolder, TrainingError
from l2l.train.generating import Samples
from l2l.train.objective import Objective
from l2l.train.prepared import Prepared, engine_options, weight_options
from l2l.train.progress import Progress, read_metrics
from l2l.train.reference import References
from l2l.train.settings import Settings
from l2l.train.steps import Steps
from l2l.train.tasks import KINDS, best_of

T = TypeVar("T")

ALONE = World()
LENGTHS = ("[training] steps", "[training] epochs")  # how lines about these begin
EXPORT = "export"  # kind of the metrics' line that says that the model was written


@final
class Training:
    """One run."""

    def __init__(
        self, settings: Settings, *, display: Display, resume: bool = True, world: World = ALONE
    ) -> None:
        """Read the data and make the model, without weights.

        Of several ranks the first one writes; `display` is its own.

        Raises:
            ValueError: they are not as the settings say.
        """
        self._world = world
        self._display = display
        self._resume = resume
        self._folder = RunFolder(settings.output.folder)
        self._own = self._folder  # where this rank writes what happened
        keep, is_tidy = settings.checkpoint.keep, self._world.rank > 0
        self._checkpoints = CheckpointFolder(self._folder.checkpoints, keep=keep, is_tidy=is_tidy)
        self._stops = False
        self._end: Callable[[], None] | None = None  # to be called when a block is left
        self._is_undisturbed = False
        self._is_held = False  # the run folder, by this process
        self.has_begun = False  # whether something is written: `stop` leaves it in order
        self.has_stepped = False
        self._prepared = Prepared(settings, tell=display.say_passing)
        self._objective = KINDS[settings.data.task].objective(self._prepared, world)
        if self._world.size > 1 and isinstance(self._objective.loss, TokenLoss):
            raise TrainingError(
                f"{settings.data.task} is for one process: its loss is of log-probabilities, whose "
                f"head comes in slices. Found {self._world.size} processes."
            )
        speaks = settings.samples.prompts or settings.evaluation.answer_marker is not None
        if self._world.size > 1 and speaks:
            raise TrainingError(
                "[samples] and [evaluation] answer_marker are for one process, which generates "
                f"alone. Found {self._world.size} processes."
            )
        if settings.training.rows < self._world.size:
            raise TrainingError(
                f"[training] rows = {settings.training.rows}, but there are {self._world.size} "
                "processes. Expected at least a row for each."
            )

    @property
    def _settings(self) -> Settings:
        return self._prepared.settings

    def dry_run(self) -> None:
        """Say what the run would be: its data, a batch, the plan. Nothing is written.

        Raises:
            DoesNotFitError: the plan does not; the message says what would.
        """
        say, prepared, training = self._display.say, self._prepared, self._settings.training
        say("\n".join([*prepared.notes(), prepared.described(), prepared.sample()]))
        if training.device == "cpu" and self._settings.memory.device_memory is None:
            say("on the CPU nothing is planned unless device_memory is given: layers are streamed")
            return
        if measured_hardware() is None:
            say(f"there is no accelerator here: the plan is for an H200, in {training.precision}")
        options = engine_options(self._settings)
        compiled = training.compile is not False
        outline = self._objective.outline(prepared.batches.batch(0))
        say(str(plan(prepared.model, outline, compile=compiled, **options)))

    def run(self) -> bool:
        """Train, from the beginning or from the last checkpoint; False if `stop` ended it.

        Raises:
            ValueError: the run cannot go on from its checkpoint, or does not fit.
            CheckpointError: a checkpoint cannot be read or written.
        """
        with contextlib.ExitStack() as holding:
            latest = self._first_says(lambda: self._take_over(holding))
            if self._world.rank:
                with self._undisturbed():
                    self._own = RunFolder(Path(holding.enter_context(TemporaryDirectory())))
                if self._folder.metrics_file.exists():
                    shutil.copy(self._folder.metrics_file, self._own.metrics_file)
            step, changes = self._compare(latest) if latest is not None else (0, [])
            must_export = self._first_says(lambda: self._must_export(step))
            is_over = self._first_says(lambda: self._is_given_up(step))
            is_over = is_over or step >= self._prepared.num_steps
            if latest is not None and is_over and not must_export:
                self._refuse_other_settings(changes)
                self._display.say(
                    f"the run in {self._folder.root} is at its end, step {step}. To go on, say "
                    "--steps with a larger number; to begin anew, --no-resume.",
                    Level.NEEDED,
                )
                return True
            for line in changes:
                kept = " (dropout keeps the one it began with)" if "[training] seed" in line else ""
                self._display.say(f"changed: {line}{kept}", Level.NEEDED)
            self._introduce()
            self._add_references()
            with self._engine() as engine:
                if latest is not None:
                    self._load(engine, latest)
                else:
                    self._try_packing(engine)
                self._check_disk(engine)
                if not self._settings.data.packing:
                    widest = self._prepared.widest_batch()
                    engine.evaluate(self._objective.widest(widest, engine))
                self.has_begun = True
                self._write_settings()
                return self._train(engine)

    def _refuse_other_settings(self, changes: list[str]) -> None:
        """Let nobody take a run that is at its end for one with these settings.

        Raises:
            TrainingError: they differ in more than the number of steps.
        """
        told = [line for line in changes if not line.startswith(LENGTHS)]
        if told:
            lines = "\n  ".join(line.removesuffix(" from here") for line in told)
            raise TrainingError(
                f"the run in {self._folder.root} is at its end, and was made with other settings; "
                "nothing was trained. To train with these, name another folder with --output, or "
                f"begin anew with --no-resume.\n  {lines}"
            )

    def _introduce(self) -> None:
        """Say what will be trained on what, and where the results go."""
        say, root = self._display.say, near(self._folder.root)
        for folder, differences in self._settings.passed_over:
            say(f"note: {near(folder)} has a run of other settings: {'; '.join(differences)}")
        for note in self._prepared.notes():
            say(note, Level.NEEDED)
        say("\n".join(self._prepared.summary()))
        say(f"output: {root}; to go on, l2l train takes this folder, to look at it, l2l report")
        say(self._prepared.described(), Level.DETAIL)

    def _take_over(self, holding: contextlib.ExitStack) -> Path | None:
        """Keep others from the run folder; returns the checkpoint to go on with."""
        with self._undisturbed():
            if not self._resume:
                with self._folder.held():  # nobody trains there
                    earlier = self._folder.set_aside()
                if earlier is not None:
                    self._display.say(f"the run that was there is now {earlier}")
            holding.enter_context(self._folder.held())
            self._is_held = True
        self._checkpoints.tidy()
        return self._checkpoints.latest()

    def _is_given_up(self, step: int) -> bool:
        """Whether the run has ended before its last step, as it did not become better."""
        records = read_metrics(self._folder.metrics_file) if step else []
        kept = [one for one in records if one["step"] <= step]
        return best_of(self._settings, kept).is_given_up(self._settings.evaluation.patience)

    def _must_export(self, step: int) -> bool:
        """Whether the model is to be written, and that after this step was not."""
        if not self._settings.output.export or not self._folder.model.exists():
            return self._settings.output.export
        records = read_metrics(self._folder.metrics_file)
        return not any((one["kind"], one["step"]) == (EXPORT, step) for one in records)

    def _first_says(self, ask: Callable[[], T]) -> T:
        """What the first rank finds, on all ranks.

        Raises:
            TrainingError: it has failed there.
        """
        found, failure = None, None
        if not self._world.rank:
            try:
                found = ask()
            except Exception as error:
                failure = error
        said = self._world.gather_facts((found, None if failure is None else str(failure)))
        if failure is not None:
            raise failure
        if said[0][1] is not None:
            raise TrainingError(f"rank 0: {said[0][1]}")
        return cast(T, said[0][0])

    def stop(self) -> None:
        """Finish the step, save, and end; may be called from a signal handler."""
        self._stops = True

    def interrupt(self, end: Callable[[], None]) -> bool:
        """For a signal handler: stop, or `end` the process if nothing is written yet.

        Returns:
            whether the run goes on until it has saved what there is.
        """
        if self.has_begun:
            self.stop()
        elif self._is_undisturbed:
            self._end = end
        else:
            self._forget()
            end()
        return self.has_begun

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Let `interrupt` wait for the end of a block, to know what the block has made."""
        self._is_undisturbed = True
        try:
            yield
        finally:
            self._is_undisturbed = False
        if self._end is not None:
            self.interrupt(self._end)

    def _forget(self) -> None:
        """Leave nothing where nothing was written."""
        if self._is_held:
            self._folder.forget_if_empty()
        if self._own is not self._folder:
            shutil.rmtree(self._own.root, ignore_errors=True)

    # -- before the first step ---------------------------------------------------------------------

    @contextlib.contextmanager
    def _engine(self) -> Iterator[Engine]:
        engine = make_engine(self._prepared, self._objective)
        try:
            yield engine
            self._objective.close()
        except BaseException:
            if self._world.size == 1:  # others would have to help
                with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):
                    self._objective.close()
                    engine.close()  # what went wrong before is what is said
            raise
        engine.close(give_back=self._world.size == 1)

    def _add_references(self) -> None:
        """Let batches have what a reference model says of their rows, if the task asks for it."""
        if not self._objective.has_reference:
            return
        references = References(self._prepared, self._folder, self._world)
        known = self._first_says(references.read)
        if known is None:
            self._display.say("the reference model goes through the data, once")
            known = references.compute()
            self._first_says(lambda: references.write(known))
        self._prepared.add_references(*known)

    def _try_packing(self, engine: Engine) -> None:
        """Pack only if the model keeps the examples of a row from each other.

        Raises:
            TrainingError: it does not, and the settings ask for packing.
        """
        # Convolutions over tokens run across examples, with too little effect on a loss to be seen.
        convolves = any(isinstance(module, nn.Conv1d) for module in self._prepared.model.modules())
        if not self._settings.data.packing or (
            not convolves and packing_holds(engine.evaluate, self._prepared.batches.batch(0))
        ):
            return
        kind = type(base_of(self._prepared.model)).__name__
        if self._prepared.packing_is_asked:
            raise TrainingError(
                f"[data] packing = true, but in {kind} examples packed into one row would attend "
                "to each other. Set packing = false."
            )
        self._display.say(
            f"in {kind} examples of one row would attend to each other: rows are padded instead",
        )
        self._prepared.make_batches(packing=False)
        self._display.say(self._prepared.described_rows())

    def _check_disk(self, engine: Engine) -> None:
        """Refuse a disk that does not take what will be written.

        Raises:
            TrainingError: it does not.
        """
        output, prepared = self._settings.output, self._prepared
        nbytes = sum(self._world.gather_facts(engine.checkpoint_bytes))
        itemsize = 4 if output.export_dtype == "float32" else 2
        counts = {
            "present": len(self._checkpoints.all()),
            "saves": prepared.num_saves_from(engine.step_number + 1),
            "keep": self._settings.checkpoint.keep + self._settings.checkpoint.best,
        }
        exported = itemsize * prepared.num_exported if output.export else 0
        self._first_says(lambda: self._folder.check_disk(nbytes, exported, **counts))

    def _compare(self, latest: Path) -> tuple[int, list[str]]:
        """See whether a checkpoint is of this run; its step, and what settings have changed.

        Raises:
            TrainingError: it is of another model or other data.
            CheckpointError: it cannot be read.
        """
        with naming_older(latest):
            manifest = read_checkpoint(latest).manifest
        extra, before = manifest.extra, manifest.extra.get("settings", {})
        if not self._prepared.packing_is_asked and "packing" in before.get("data", {}):
            self._prepared.make_batches(packing=before["data"]["packing"])
        changes, identity = self._settings.differences(before), self._prepared.identity
        for name in ("model", "data"):
            if extra.get(name) != identity[name]:
                source = extra.get(f"{name}_source", "of somebody else")
                told = "\n  ".join([" Settings that differ:", *changes] if changes else [""])
                raise TrainingError(
                    f"the run in {self._folder.root} was started with the {name} {source}, which "
                    f"differs from the current {identity[f'{name}_source']}. Use the same, choose "
                    f"another folder with --output, or start over with --no-resume.{told}"
                )
        return manifest.step, changes

    def _load(self, engine: Engine, latest: Path) -> None:
        """Go on from a checkpoint; what the settings say of the optimizer holds, not what it was.

        Raises:
            CheckpointError: it is damaged, or of another optimizer.
        """
        before = [dict(group) for group in engine.optimizer.param_groups]
        with naming_older(latest):
            self._objective.restore(engine.load(latest))
        for group, own in zip(engine.optimizer.param_groups, before, strict=True):
            group.update({key: value for key, value in own.items() if key != "params"})
        self._display.say(f"going on from {latest}")

    def _write_settings(self) -> None:
        if not self._world.rank:
            write_file(self._folder.settings_file, self._settings.to_toml())

    def _train(self, engine: Engine) -> bool:
        """Make the steps that are left, and export; False if the run was stopped."""
        prepared, folder, output = self._prepared, self._folder, self._settings.output
        say, num_steps = self._display.say, prepared.num_steps
        progress = Progress(
            self._own,
            self._display,
            engine.step_number,
            num_steps,
            tensorboard=output.tensorboard,
            steps_an_epoch=prepared.steps_an_epoch,
            best=best_of(self._settings),
        )
        samples = Samples(
            self._own,
            self._settings.samples,
            prepared.speaker,
            seed=self._settings.training.seed,
            step=engine.step_number,
        )
        steps = Steps(
            engine,
            prepared,
            self._objective,
            self._checkpoints,
            progress,
            samples,
            self._world,
            lambda: self._stops,
        )
        with contextlib.closing(progress):
            is_finished = steps.make()
            self.has_stepped = steps.has_stepped
            if progress.status.num_skipped:
                number = progress.status.num_skipped
                say(f"{number} steps were skipped: a loss or gradient not finite", Level.NEEDED)
            if not is_finished:
                step = f"step {engine.step_number} of {num_steps}"
                say(f"stopped after {step}. Go on with: l2l train {folder.root}", Level.NEEDED)
                return False
            best, last = steps.best, engine.step_number
            found = f" (step {best.step}: {best.metric} {best.value:.4f})"
            if last < num_steps:
                since = best.num_since
                say(f"ended after step {last}: {since} evaluations were no better{found}")
            if output.export:
                self._export(engine, best)
                progress.note(EXPORT, last, folder=folder.model.name)
                told = found if self._settings.checkpoint.best and best.step is not None else ""
                say(f"the trained model is in {folder.model}{told}")
            return True

    def _export(self, engine: Engine, best: Best) -> None:
        """Write the model as it is now, or as it was when it was best."""
        folder, output = self._folder.model, self._settings.output
        if not self._settings.checkpoint.best or best.step in (None, engine.step_number):
            tokenizer = self._prepared.tokenizer
            with self._prepared.result_of(engine):
                engine.export(folder, dtype=output.export_dtype, tokenizer=tokenizer)
            return
        kept = self._checkpoints.path_of(best.step or 0)
        self._first_says(lambda: export_checkpoint(kept, folder, dtype=output.export_dtype))


def make_engine(prepared: Prepared, objective: Objective) -> Engine:
    """The engine that the settings describe, with the weights that training begins with.

    Raises:
        ValueError: it cannot be made, or the model does not fit.
    """
    training = prepared.settings.training
    return Engine(
        prepared.model,
        loss=objective.loss,
        split=objective.split,
        depth=training.depth(),
        execution=Execution(compile_ahead=training.compile_ahead),
        **weight_options(prepared.settings),
        **engine_options(prepared.settings),
    )


@contextlib.contextmanager
def naming_older(latest: Path) -> Iterator[None]:
    """Let an error about a damaged checkpoint name the one before it."""
    try:
        yield
    except OtherCheckpointError:  # as all before it are
        raise
    except CheckpointError as error:
        older = CheckpointFolder(latest.parent).before(latest)
        advice = f" To go on from {older[-1]} instead, delete {latest}." if older else ""
        raise CheckpointError(f"{error}{advice}") from error
