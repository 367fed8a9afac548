"""One run, step by step: [Note: resuming] in the package says what it may rely on."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar, cast, final

from torch import nn

from l2l.checkpoint import (
    CheckpointFolder,
)
from l2l.distributed import World
from l2l.engine import Engine
from l2l.files import write_file
from l2l.planner import Plan, measured_hardware, plan
from l2l.train.data import packing_holds
from l2l.train.disk import Writing
from l2l.train.display import Display
from l2l.train.evaluation import evaluate, own_rows
from l2l.train.folder import RunFolder, TrainingError
from l2l.train.keeping import Keeping, naming_older
from l2l.train.metrics_file import MetricsFile, open_events, read_metrics
from l2l.train.parts import (
    make_engine,
    run_manifest,
)
from l2l.train.prepared import Prepared
from l2l.train.progress import Facts, Progress
from l2l.train.settings import Settings

T = TypeVar("T")

EXPORT = "export"  # kind of the metrics' line that says that the model was written


@final
class Training:
    """One run."""

    def __init__(
        self,
        settings: Settings,
        *,
        display: Display,
        resume: bool = True,
        world: World | None = None,
    ) -> None:
        """Read the data and make the model, without weights.

        Of several ranks the first one writes; `display` is its own.

        Raises:
            ValueError: they are not as the settings say.
        """
        self._world = world or World()
        self._display = display
        self._resume = resume
        self._folder = RunFolder(settings.output.folder)
        self._own = self._folder  # where this rank writes what happened
        self._stops = False
        self._all_stop = False  # what the ranks have agreed on
        self._plan: Plan | None = None
        self._end: Callable[[], None] | None = None  # to be called when a block is left
        self._is_undisturbed = False
        self._is_held = False  # the run folder, by this process
        self.has_begun = False  # whether something is written: `stop` leaves it in order
        self.has_stepped = False
        self._prepared = Prepared(settings)
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
        self._display.say(f"{self._prepared.described()}\n{self._prepared.sample()}")
        for words in _planned(self._prepared):
            self._display.say(words)

    def run(self) -> bool:
        """Train, from the beginning or from the last checkpoint; False if `stop` ended it.

        Raises:
            ValueError: the run cannot go on from its checkpoint, or does not fit.
            CheckpointError: a checkpoint cannot be read or written.
        """
        with contextlib.ExitStack() as holding:
            checkpoints = CheckpointFolder(
                self._folder.checkpoints,
                keep=self._settings.checkpoint.keep,
                is_tidy=self._world.rank > 0,
            )
            latest = self._first_says(lambda: self._take_over(holding, checkpoints))
            if self._world.rank:
                with self._undisturbed():
                    self._own = RunFolder(Path(holding.enter_context(TemporaryDirectory())))
                if self._folder.metrics_file.exists():
                    shutil.copy(self._folder.metrics_file, self._own.metrics_file)
            step, changes = self._compare(latest) if latest is not None else (0, [])
            must_export = self._first_says(
                lambda: self._settings.output.export and not _is_exported(self._folder, step)
            )
            if latest is not None and step >= self._prepared.num_steps and not must_export:
                self._display.say(
                    f"the run in {self._folder.root} is at its end, step {step}. To go on, say "
                    "--steps with a larger number; to begin anew, --no-resume."
                )
                return True
            for line in changes:
                kept = " (dropout keeps the one it began with)" if "[training] seed" in line else ""
                self._display.say(f"changed: {line}{kept}")
            self._display.say(self._prepared.described())
            with self._engine() as engine:
                if latest is not None:
                    self._load(engine, latest)
                else:
                    self._try_packing(engine)
                self._check_disk(engine, checkpoints)
                if not self._settings.data.packing:
                    engine.evaluate(own_rows(self._prepared.widest_batch(), self._world))
                self.has_begun = True
                self._write_settings()
                return self._train(engine, checkpoints)

    def _take_over(
        self, holding: contextlib.ExitStack, checkpoints: CheckpointFolder
    ) -> Path | None:
        """Keep others from the run folder; returns the checkpoint to go on with."""
        with self._undisturbed():
            if not self._resume:
                with self._folder.held():  # nobody trains there
                    earlier = self._folder.set_aside()
                if earlier is not None:
                    self._display.say(f"the run that was there is now {earlier}")
            holding.enter_context(self._folder.held())
            self._is_held = True
        checkpoints.tidy()
        return checkpoints.latest()

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

    def _must_stop(self) -> bool:
        """Whether any rank was told to stop; all ranks must ask together."""
        if not self._all_stop:
            self._all_stop = any(self._world.gather_facts(self._stops))
        return self._all_stop

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
        engine = make_engine(self._settings, self._prepared.model)
        try:
            yield engine
        except BaseException:
            if self._world.size == 1:  # others would have to help
                with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):
                    engine.close()  # what went wrong before is what is said
            raise
        engine.close(give_back=self._world.size == 1)

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
        kind = type(self._prepared.model).__name__
        if self._prepared.packing_is_asked:
            raise TrainingError(
                f"[data] packing = true, but {kind} does not keep the examples of a row from each "
                "other. Expected false."
            )
        self._display.say(
            f"{kind} does not keep the examples of a row from each other: rows are padded instead"
        )
        self._prepared.make_batches(packing=False)
        self._display.say(self._prepared.described_rows())

    def _check_disk(self, engine: Engine, checkpoints: CheckpointFolder) -> None:
        """Refuse a disk that does not take what will be written.

        Raises:
            TrainingError: it does not.
        """
        output = self._settings.output
        itemsize = 4 if output.export_dtype == "float32" else 2
        writing = Writing(
            checkpoint_bytes=sum(self._world.gather_facts(engine.checkpoint_bytes)),
            num_present=len(checkpoints.all()),
            num_saves=self._prepared.num_saves_from(engine.step_number + 1),
            keep=self._settings.checkpoint.keep,
            export_bytes=itemsize * self._prepared.num_parameters if output.export else 0,
        )
        self._first_says(lambda: writing.check(self._folder))

    def _compare(self, latest: Path) -> tuple[int, list[str]]:
        """See whether a checkpoint is of this run; its step, and what settings have changed.

        Raises:
            TrainingError: it is of another model or other data.
            CheckpointError: it cannot be read.
        """
        with naming_older(latest):
            manifest = run_manifest(latest)
        extra = manifest.extra
        before = extra.get("settings", {})
        if not self._prepared.packing_is_asked and "packing" in before.get("data", {}):
            self._prepared.make_batches(packing=before["data"]["packing"])
        changes = self._settings.differences(before)
        for name in ("model", "data"):
            if extra.get(name) != self._prepared.identity[name]:
                told = "".join(f"\n  {line}" for line in changes)
                raise TrainingError(
                    f"the run in {self._folder.root} was begun with the {name} "
                    f"{extra.get(f'{name}_source', 'of somebody else')}, which differs from "
                    f"{self._prepared.identity[f'{name}_source']} as it is now. Expected the same: "
                    "name another folder with --output, or begin anew with --no-resume."
                    + (f" Settings that differ:{told}" if told else "")
                )
        return manifest.step, changes

    def _load(self, engine: Engine, latest: Path) -> None:
        """Go on from a checkpoint; what the settings say of the optimizer holds, not what it was.

        Raises:
            CheckpointError: it is damaged, or of another optimizer.
        """
        groups = engine.optimizer.param_groups
        numbers = [
            {key: value for key, value in group.items() if key != "params"} for group in groups
        ]
        with naming_older(latest):
            engine.load(latest)
        for group, own in zip(engine.optimizer.param_groups, numbers, strict=True):
            group.update(own)
        self._display.say(f"going on from {latest}")

    def _write_settings(self) -> None:
        if self._world.rank:
            return
        write_file(self._folder.settings_file, self._settings.to_toml())

    # -- steps -------------------------------------------------------------------------------------

    def _train(self, engine: Engine, checkpoints: CheckpointFolder) -> bool:
        step = engine.step_number
        output = self._settings.output
        progress = Progress(
            display=self._display,
            metrics=MetricsFile(self._own.metrics_file, step=step),
            events=open_events(self._own.events, step=step) if output.tensorboard else None,
            step=step,
            num_steps=self._prepared.num_steps,
        )
        keeping = Keeping(
            self._folder,
            checkpoints,
            progress=progress,
            display=self._display,
            saved_step=step,
            prunes=not self._world.rank,
        )
        with contextlib.closing(progress):
            finished = self._steps(engine, keeping, progress)
            keeping.finish()
            if progress.num_skipped:
                self._display.say(
                    f"{progress.num_skipped} steps were skipped: a loss or gradient not finite"
                )
            if not finished:
                self._display.say(
                    f"stopped after step {engine.step_number} of {self._prepared.num_steps}. Go on "
                    f"with: l2l train {self._folder.root}"
                )
                return False
            if output.export:
                dtype = output.export_dtype
                engine.export(self._folder.model, dtype=dtype, tokenizer=self._prepared.tokenizer)
                progress.note(EXPORT, engine.step_number, folder=self._folder.model.name)
                self._display.say(f"the trained model is in {self._folder.model}")
            return True

    def _steps(self, engine: Engine, keeping: Keeping, progress: Progress) -> bool:
        """All steps that are left; False if the run was stopped on the way."""
        step = engine.step_number
        self._evaluate(engine, progress, step)
        if step and self._prepared.is_saved_after(step) and not progress.has_checkpoint(step):
            keeping.note(step)
        progress.resume_clock()
        has_prepared = False
        while step < self._prepared.num_steps and not self._must_stop():
            rate = self._learning_rate(step)
            for group in engine.optimizer.param_groups:
                group["lr"] = rate
            report = engine.step(own_rows(self._prepared.batches.batch(step), self._world))
            step, self.has_stepped = step + 1, True
            if not has_prepared and self._prepared.num_saves_from(step) > 1:
                engine.prepare_saving()  # now that everything else has its memory
            has_prepared = True
            progress.step_begun(step, report, learning_rate=rate)
            self._refuse_divergence(keeping)
            keeping.look()
            self._look_at(engine, progress)
            keeping.spare_no_longer()
            self._evaluate(engine, progress, step)
            if self._prepared.is_saved_after(step):
                self._save(engine, keeping)
        progress.catch_up()
        self._refuse_divergence(keeping)
        if step != keeping.saved_step:
            self._save(engine, keeping)
        return step >= self._prepared.num_steps and not self._all_stop

    def _learning_rate(self, step: int) -> float:
        factor = self._settings.schedule.factor(step, total=self._prepared.num_steps)
        return self._settings.optimizer.learning_rate * factor

    def _evaluate(self, engine: Engine, progress: Progress, step: int) -> None:
        """Evaluate after a step, if it is time and was not done."""
        if not self._prepared.is_evaluated_after(step) or progress.has_evaluation(step):
            return
        if self._must_stop():
            return
        progress.catch_up()
        began = time.perf_counter()
        most = self._settings.evaluation.most_batches
        chosen = itertools.islice(self._prepared.evaluation_batches.in_order(), most)
        found = evaluate(
            engine,
            chosen,
            task=self._settings.data.task,
            stopped=self._must_stop,
            world=self._world,
        )
        if found is not None:
            progress.evaluated(step, found, seconds=time.perf_counter() - began)

    def _refuse_divergence(self, keeping: Keeping) -> None:
        keeping.refuse_divergence(
            max_bad_steps=self._settings.training.max_bad_steps, num_steps=self._prepared.num_steps
        )

    def _save(self, engine: Engine, keeping: Keeping) -> None:
        keeping.save(
            engine,
            extra=self._prepared.extra(),
            is_last=engine.step_number >= self._prepared.num_steps,
            interrupted=self._all_stop,
        )

    def _look_at(self, engine: Engine, progress: Progress) -> None:
        """Learn what the plan is, and how memory does."""
        if self._plan is None:
            self._plan = engine.plan
            self._display.say(str(self._plan))
        if self._plan.budget_bytes is not None:
            progress.facts = Facts(
                peak_bytes=engine.device.peak_bytes(),
                budget_bytes=self._plan.budget_bytes,
                bound=self._plan.bound,
            )


def _planned(prepared: Prepared) -> Iterator[str]:
    """The plan of a run that has no engine, and what to know of it.

    Raises:
        DoesNotFitError: nothing fits; the message says what would.
    """
    settings = prepared.settings
    training, memory = settings.training, settings.memory
    if training.device == "cpu" and memory.device_memory is None:
        yield "on the CPU nothing is planned unless device_memory is given: layers are streamed"
        return
    if measured_hardware() is None:
        yield "there is no accelerator here: the plan is for an NVIDIA H200"
    found = plan(
        prepared.model,
        prepared.batches.batch(0),
        optimizer=settings.optimizer.make(),
        device_memory=memory.device_memory,
        host_memory=memory.host_memory,
        microbatch_size=training.microbatch_size,
        precision=training.precision,
        clip_norm=training.clip_norm or None,
        layers=settings.model.layer_list,
        compile=training.compile is not False,
    )
    yield str(found)


def _is_exported(folder: RunFolder, step: int) -> bool:
    """Whether the model after a step was written."""
    if not folder.metrics_file.exists() or not folder.model.exists():
        return False
    records = read_metrics(folder.metrics_file)
    return any((one["kind"], one["step"]) == (EXPORT, step) for one in records)
