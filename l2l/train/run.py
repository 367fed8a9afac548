"""One run, step by step: [Note: resuming] in the package says what it may rely on."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, cast, final

from torch import Tensor, nn

from l2l.checkpoint import (
    CheckpointError,
    CheckpointFolder,
    OtherCheckpointError,
    Saving,
)
from l2l.device import format_bytes
from l2l.distributed import Alone, World
from l2l.engine import Engine
from l2l.files import write_file
from l2l.hugging_face import class_names
from l2l.model import IGNORED
from l2l.planner import Plan, measured_hardware, plan
from l2l.train.data import Batches, Examples, make_examples, packing_holds, read_records
from l2l.train.disk import Writing
from l2l.train.display import Display
from l2l.train.evaluation import evaluate, own_rows
from l2l.train.folder import RunFolder, TrainingError
from l2l.train.metrics_file import MetricsFile, open_events, read_metrics
from l2l.train.parts import (
    make_engine,
    make_model,
    make_tokenizer,
    model_fingerprint,
    pad_id_of,
    run_manifest,
)
from l2l.train.progress import Facts, Progress
from l2l.train.settings import LANGUAGE_TASKS, Settings

T = TypeVar("T")

DIVERGED = "diverged"  # kind of the metrics' line that says that a run was given up
EXPORT = "export"  # kind of the metrics' line that says that the model was written
PADDED_TO = 64  # lengths of rows that are not packed are multiples of this
NUM_EVALUATIONS = 10  # in a run, if nothing else is said
SAMPLE_CHARACTERS = 600
LEAST_STALL_SECONDS = 0.05  # that is worth a word


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
        self._world = world or Alone()
        self._display = display
        self._resume = resume
        self._folder = RunFolder(settings.output.folder)
        self._own = self._folder  # where this rank writes what happened
        self._stops = False
        self._all_stop = False  # what the ranks have agreed on
        self._saving: Saving | None = None
        self._saved_step = 0
        self._plan: Plan | None = None
        self._end: Callable[[], None] | None = None  # to be called when a block is left
        self._is_undisturbed = False
        self._is_held = False  # the run folder, by this process
        self.has_begun = False  # whether something is written: `stop` leaves it in order
        self.has_stepped = False
        self._tokenizer = make_tokenizer(settings)
        self._pad_id = pad_id_of(self._tokenizer)
        self._examples, self._held_out = self._read(settings)
        self._model = make_model(
            settings,
            pad_id=self._pad_id,
            num_labels=self._examples.num_labels,
            label_names=self._examples.label_names,
        )
        self._check_vocabulary(settings.model.folder)
        if settings.training.rows < self._world.size:
            raise TrainingError(
                f"[training] rows = {settings.training.rows}, but there are {self._world.size} "
                "processes. Expected at least a row for each."
            )
        self._settings = settings
        self._packing_is_asked = settings.data.packing is not None
        may_pack = settings.data.task in LANGUAGE_TASKS
        self._make_batches(packing=settings.data.packing if self._packing_is_asked else may_pack)

    def dry_run(self) -> None:
        """Say what the run would be: its data, a batch, the plan. Nothing is written.

        Raises:
            DoesNotFitError: the plan does not; the message says what would.
        """
        self._describe()
        self._display.say(self._sample())
        training, memory = self._settings.training, self._settings.memory
        if training.device == "cpu" and memory.device_memory is None:
            self._display.say(
                "on the CPU nothing is planned unless device_memory is given: layers are streamed"
            )
            return
        if measured_hardware() is None:
            self._display.say("there is no accelerator here: the plan is for an NVIDIA H200")
        self._display.say(
            str(
                plan(
                    self._model,
                    self._batches.batch(0),
                    optimizer=self._settings.optimizer.make(),
                    device_memory=memory.device_memory,
                    host_memory=memory.host_memory,
                    microbatch_size=training.microbatch_size,
                    precision=training.precision,
                    clip_norm=training.clip_norm or None,
                    layers=self._settings.model.layer_list,
                    compile=training.compile is not False,
                )
            )
        )

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
            must_export = self._first_says(lambda: self._must_export(step))
            if latest is not None and step >= self._num_steps and not must_export:
                self._display.say(
                    f"the run in {self._folder.root} is at its end, step {step}. To go on, say "
                    "--steps with a larger number; to begin anew, --no-resume."
                )
                return True
            for line in changes:
                kept = " (dropout keeps the one it began with)" if "[training] seed" in line else ""
                self._display.say(f"changed: {line}{kept}")
            self._describe()
            with self._engine() as engine:
                if latest is not None:
                    self._load(engine, latest)
                else:
                    self._try_packing(engine)
                self._check_disk(engine, checkpoints)
                if not self._settings.data.packing:
                    engine.evaluate(own_rows(self._widest_batch(), self._world))
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

    def _read(self, settings: Settings) -> tuple[Examples, Examples | None]:
        data, tokenizer = settings.data, self._tokenizer
        records = read_records(data.source, documents=data.documents)
        examples = make_examples(records, tokenizer=tokenizer, form=settings.form)
        examples = examples.numbered_as(class_names(settings.model.folder))
        if data.hold_out is not None:
            return examples.hold_out(data.hold_out, seed=settings.training.seed)
        if data.evaluation_source is None:
            return examples, None
        records = read_records(data.evaluation_source, documents=data.documents)
        return examples, make_examples(
            records, tokenizer=tokenizer, form=settings.form, like=examples
        )

    def _check_vocabulary(self, folder: Path) -> None:
        model: Any = self._model
        size = model.get_input_embeddings().num_embeddings
        sets = [one for one in (self._examples, self._held_out) if one is not None and len(one)]
        most = max(self._pad_id, *(int(one.ids.max()) for one in sets))
        if most >= size:
            raise TrainingError(
                f"the tokenizer in {folder} (tokenizer.json or the like) makes token {most}, but "
                f"the model has {size} embeddings (vocab_size in config.json). Expected a "
                "tokenizer that belongs to the model: is the folder complete?"
            )

    def _make_batches(self, *, packing: bool | None) -> None:
        data = self._settings.data.model_copy(update={"packing": bool(packing)})
        self._settings = self._settings.model_copy(update={"data": data})
        training = self._settings.training
        self._batches = self._batches_of(self._examples, training.rows)
        self._num_steps = training.steps or self._batches.num_steps(training.epochs or 1.0)

    def _batches_of(self, examples: Examples, rows: int) -> Batches:
        return Batches(
            examples,
            pad_id=self._pad_id,
            rows=rows,
            length=self._settings.training.length,
            packing=bool(self._settings.data.packing),
            padded_to=PADDED_TO,
            seed=self._settings.training.seed,
        )

    @cached_property
    def _evaluation_batches(self) -> Batches:
        assert self._held_out is not None
        rows = self._settings.evaluation.rows or self._settings.training.rows
        return self._batches_of(self._held_out, rows)

    def _describe(self) -> None:
        settings = self._settings
        length = settings.training.length
        config: Any = self._model.config
        most = getattr(config.get_text_config(), "max_position_embeddings", None)
        if isinstance(most, int) and length > most:
            self._display.say(f"note: rows of {length} tokens, but the model is made for {most}")
        kind = type(self._model).__name__
        lines = [f"model: {kind}, {self._num_parameters:,} parameters, {settings.model.folder}"]
        lines += [f"data: {', '.join(settings.data.source)}", str(self._examples.statistics)]
        if self._held_out is not None:
            lines.append(f"evaluation: {len(self._held_out):,} examples")
        lines += [str(self._batches), f"{self._num_steps:,} steps"]
        self._display.say("\n".join(lines))

    @property
    def _num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._model.parameters())

    def _sample(self) -> str:
        """The first row of the first batch, as text."""
        batch = self._batches.batch(0)
        ids, labels = batch["input_ids"][0], batch["labels"]
        mask = batch.get("attention_mask")
        ids = ids if mask is None else ids[mask[0].bool()]
        shape = " x ".join(str(size) for size in batch["input_ids"].shape)
        lines = [f"batch of step 1: {shape} tokens, {', '.join(batch)}", "its first row:"]
        lines.append(_shortened(self._tokenizer.decode(ids)))
        if labels.dim() == 2:
            learnt = labels[0][labels[0] != IGNORED]
            lines.append(f"of which is learnt ({learnt.numel()} tokens):")
            lines.append(_shortened(self._tokenizer.decode(learnt)))
        else:
            lines.append(f"label: {labels[0].item()}")
        return "\n".join(lines)

    @contextlib.contextmanager
    def _engine(self) -> Iterator[Engine]:
        engine = make_engine(self._settings, self._model)
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
        convolves = any(isinstance(module, nn.Conv1d) for module in self._model.modules())
        if not self._settings.data.packing or (
            not convolves and packing_holds(engine.evaluate, self._batches.batch(0))
        ):
            return
        kind = type(self._model).__name__
        if self._packing_is_asked:
            raise TrainingError(
                f"[data] packing = true, but {kind} does not keep the examples of a row from each "
                "other. Expected false."
            )
        self._display.say(
            f"{kind} does not keep the examples of a row from each other: rows are padded instead"
        )
        self._make_batches(packing=False)
        self._display.say(f"{self._batches}\n{self._num_steps:,} steps")

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
            num_saves=sum(
                map(self._is_saved_after, range(engine.step_number + 1, self._num_steps + 1))
            ),
            keep=self._settings.checkpoint.keep,
            export_bytes=itemsize * self._num_parameters if output.export else 0,
        )
        self._first_says(lambda: writing.check(self._folder))

    def _compare(self, latest: Path) -> tuple[int, list[str]]:
        """See whether a checkpoint is of this run; its step, and what settings have changed.

        Raises:
            TrainingError: it is of another model or other data.
            CheckpointError: it cannot be read.
        """
        with _naming_older(latest):
            manifest = run_manifest(latest)
        extra = manifest.extra
        before = extra.get("settings", {})
        if not self._packing_is_asked and "packing" in before.get("data", {}):
            self._make_batches(packing=before["data"]["packing"])
        changes = self._settings.differences(before)
        for name in ("model", "data"):
            if extra.get(name) != self._identity[name]:
                told = "".join(f"\n  {line}" for line in changes)
                raise TrainingError(
                    f"the run in {self._folder.root} was begun with the {name} "
                    f"{extra.get(f'{name}_source', 'of somebody else')}, which differs from "
                    f"{self._identity[f'{name}_source']} as it is now. Expected the same: name "
                    "another folder with --output, or begin anew with --no-resume."
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
        with _naming_older(latest):
            engine.load(latest)
        for group, own in zip(engine.optimizer.param_groups, numbers, strict=True):
            group.update(own)
        self._saved_step = engine.step_number
        self._display.say(f"going on from {latest}")

    def _write_settings(self) -> None:
        if self._world.rank:
            return
        write_file(self._folder.settings_file, self._settings.to_toml())

    def _extra(self) -> dict[str, Any]:
        """What is saved with every checkpoint."""
        return {
            "settings": self._settings.table(),
            "num_steps": self._num_steps,
            "num_labels": self._examples.num_labels,
            "label_names": list(self._examples.label_names),
            **self._identity,
        }

    @cached_property
    def _identity(self) -> dict[str, str]:
        """What must not change in a run, and where it came from."""
        return {
            "model": model_fingerprint(self._settings.model.folder),
            "model_source": str(self._settings.model.folder),
            "data": self._examples.fingerprint(),
            "data_source": ", ".join(self._settings.data.source),
        }

    # -- steps -------------------------------------------------------------------------------------

    def _must_export(self, step: int) -> bool:
        """Whether the model after a step is still to be written."""
        if not self._settings.output.export or not self._folder.metrics_file.exists():
            return self._settings.output.export
        records = read_metrics(self._folder.metrics_file)
        done = [record["step"] for record in records if record["kind"] == EXPORT]
        return step not in done or not self._folder.model.exists()

    def _train(self, engine: Engine, checkpoints: CheckpointFolder) -> bool:
        step = engine.step_number
        output = self._settings.output
        progress = Progress(
            display=self._display,
            metrics=MetricsFile(self._own.metrics_file, step=step),
            events=open_events(self._own.events, step=step) if output.tensorboard else None,
            step=step,
            num_steps=self._num_steps,
        )
        with contextlib.closing(progress):
            finished = self._steps(engine, checkpoints, progress)
            self._finish_saving(progress)
            if progress.num_skipped:
                self._display.say(
                    f"{progress.num_skipped} steps were skipped: a loss or gradient not finite"
                )
            if not finished:
                self._display.say(
                    f"stopped after step {engine.step_number} of {self._num_steps}. Go on with: "
                    f"l2l train {self._folder.root}"
                )
                return False
            if output.export:
                dtype = output.export_dtype
                engine.export(self._folder.model, dtype=dtype, tokenizer=self._tokenizer)
                progress.note(EXPORT, engine.step_number, folder=self._folder.model.name)
                self._display.say(f"the trained model is in {self._folder.model}")
            return True

    def _steps(self, engine: Engine, checkpoints: CheckpointFolder, progress: Progress) -> bool:
        """All steps that are left; False if the run was stopped on the way."""
        step = engine.step_number
        self._evaluate(engine, progress, step)
        if step and self._is_saved_after(step) and not progress.has_checkpoint(step):
            progress.checkpoint_begun(step, self._name_of(checkpoints.path_of(step)))
        progress.resume_clock()
        has_prepared = False
        while step < self._num_steps and not self._must_stop():
            rate = self._learning_rate(step)
            for group in engine.optimizer.param_groups:
                group["lr"] = rate
            report = engine.step(own_rows(self._batches.batch(step), self._world))
            step, self.has_stepped = step + 1, True
            if not has_prepared and any(map(self._is_saved_after, range(step, self._num_steps))):
                engine.prepare_saving()  # now that everything else has its memory
            has_prepared = True
            progress.step_begun(step, report, learning_rate=rate)
            self._refuse_divergence(checkpoints, progress)
            self._look_at(engine, progress)
            self._spare_no_longer(checkpoints, progress)
            self._evaluate(engine, progress, step)
            if self._is_saved_after(step):
                self._save(engine, checkpoints, progress)
        progress.catch_up()
        self._refuse_divergence(checkpoints, progress)
        if step != self._saved_step:
            self._save(engine, checkpoints, progress)
        return step >= self._num_steps and not self._all_stop

    def _widest_batch(self) -> dict[str, Tensor]:
        """The first batch, filled up to the length of the longest row of all.

        A plan that is made for it holds for every batch, so no choice changes during a run.
        """
        sets = (self._examples, self._held_out or self._examples)
        longest = max(int(examples.lengths.max()) for examples in sets)
        width = min(self._settings.training.length, -(-longest // PADDED_TO) * PADDED_TO)
        fill = {"input_ids": self._pad_id, "labels": IGNORED}
        return {
            name: nn.functional.pad(
                value, (0, max(0, width - value.shape[1])), value=fill.get(name, 0)
            )
            if value.dim() == 2
            else value
            for name, value in self._batches.batch(0).items()
        }

    def _learning_rate(self, step: int) -> float:
        factor = self._settings.schedule.factor(step, total=self._num_steps)
        return self._settings.optimizer.learning_rate * factor

    def _is_saved_after(self, step: int) -> bool:
        every = self._settings.checkpoint.every_steps
        return step == self._num_steps or bool(every and step % every == 0)

    def _evaluate(self, engine: Engine, progress: Progress, step: int) -> None:
        """Evaluate after a step, if it is time and was not done."""
        if self._held_out is None or progress.has_evaluation(step) or self._must_stop():
            return
        every = self._settings.evaluation.every_steps
        every = max(1, self._num_steps // NUM_EVALUATIONS) if every is None else every
        if step not in (0, self._num_steps) and (not every or step % every):
            return
        progress.catch_up()
        began = time.perf_counter()
        most = self._settings.evaluation.most_batches
        chosen = itertools.islice(self._evaluation_batches.in_order(), most)
        found = evaluate(
            engine,
            chosen,
            task=self._settings.data.task,
            stopped=self._must_stop,
            world=self._world,
        )
        if found is not None:
            progress.evaluated(step, found, seconds=time.perf_counter() - began)

    def _last_good(self, checkpoints: CheckpointFolder, progress: Progress) -> Path | None:
        """The newest checkpoint from which a step was made: it is kept until the next such one.

        The step before a bad one may be what has made the weights useless.
        """
        good = [path for path in checkpoints.all() if progress.is_good(_step_of(path) + 1)]
        return good[-1] if good else None

    def _spare_no_longer(self, checkpoints: CheckpointFolder, progress: Progress) -> None:
        """Delete the checkpoint that was spared, once there is a newer good one."""
        if checkpoints.spared is None or self._saving is not None or self._world.rank:
            return
        if progress.is_good(self._saved_step + 1):
            checkpoints.spared = None
            checkpoints.prune(checkpoints.path_of(self._saved_step))

    def _refuse_divergence(self, checkpoints: CheckpointFolder, progress: Progress) -> None:
        """Give up after too many bad steps in a row.

        Raises:
            TrainingError: there were.
        """
        most = min(self._settings.training.max_bad_steps, max(1, self._num_steps // 2))
        if not most or progress.num_bad < most:
            return
        self._finish_saving(progress)
        last, number = progress.last_read, progress.num_bad
        good = self._last_good(checkpoints, progress)
        later = [
            path.name for path in checkpoints.all() if good and _step_of(path) > _step_of(good)
        ]
        progress.note(DIVERGED, last, since=last - number + 1, interrupted=True)
        found = (
            f"{number} steps in a row, {last - number + 1} to {last} of {self._num_steps}, were "
            "skipped because the loss or a gradient was not finite; their weights were left alone "
            f"({progress.num_skipped} steps were skipped in all). Usual causes: a learning rate "
            "that is too high, no warm-up, data that the loss is not finite for, a precision that "
            "does not hold the model's numbers (try bfloat16 or float32). Nothing was exported. "
        )
        if good is None:
            advice = "There is no checkpoint from before: change the settings and begin anew."
        else:
            gone = f"delete {' and '.join(later)} beside it, " if later else ""
            advice = (
                f"The last good checkpoint is {good}. To go on from it: {gone}change the settings, "
                f"then l2l train {self._folder.root}."
            )
        raise TrainingError(f"{found}{advice} [training] max_bad_steps says how many are too many.")

    def _save(self, engine: Engine, checkpoints: CheckpointFolder, progress: Progress) -> None:
        """Begin to save; what was begun before is there when this returns.

        Raises:
            CheckpointError: the one before could not be written.
        """
        progress.catch_up()
        self._finish_saving(progress)
        step = engine.step_number
        folder = checkpoints.path_of(step)
        self._spare_no_longer(checkpoints, progress)
        if step < self._num_steps or progress.num_bad:
            checkpoints.spared = self._last_good(checkpoints, progress)
        progress.checkpoint_begun(step, self._name_of(folder), interrupted=self._all_stop)
        progress.saving = folder.name
        self._saving = checkpoints.save(engine, extra=self._extra(), background=True)
        self._saved_step = step

    def _name_of(self, folder: Path) -> str:
        return str(folder.relative_to(self._folder.root))

    def _look_at(self, engine: Engine, progress: Progress) -> None:
        """Learn how memory and the checkpoint that is being written are doing.

        Raises:
            CheckpointError: the checkpoint could not be written.
        """
        if self._saving is not None and self._saving.is_done:
            self._finish_saving(progress)
        if self._plan is None:
            self._plan = engine.plan
            self._display.say(str(self._plan))
        if self._plan.budget_bytes is not None:
            progress.facts = Facts(
                peak_bytes=engine.device.peak_bytes(),
                budget_bytes=self._plan.budget_bytes,
                bound=self._plan.bound,
            )

    def _finish_saving(self, progress: Progress) -> None:
        """Wait for the checkpoint that is being written.

        Raises:
            CheckpointError: it could not be.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return
        saving.wait()
        progress.saving = ""
        waited = f", {saving.stall_seconds:.1f} s of it waited for"
        self._display.say(
            f"saved {saving.folder.name}: {format_bytes(saving.num_bytes)} in {saving.seconds:.1f} "
            f"s{waited if saving.stall_seconds >= LEAST_STALL_SECONDS else ''}"
        )


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


@contextlib.contextmanager
def _naming_older(latest: Path) -> Iterator[None]:
    """Let an error about a damaged checkpoint name the one before it."""
    try:
        yield
    except OtherCheckpointError:  # as all before it are
        raise
    except CheckpointError as error:
        older = CheckpointFolder(latest.parent).before(latest)
        advice = f" To go on from {older[-1]} instead, delete {latest}." if older else ""
        raise CheckpointError(f"{error}{advice}") from error


def _shortened(text: str) -> str:
    text = text if len(text) <= SAMPLE_CHARACTERS else f"{text[:SAMPLE_CHARACTERS]} ..."
    return "\n".join(f"  {line}" for line in text.splitlines())
