"""The steps of a run, and what is between them: evaluations, checkpoints, the plan.

Checkpoints are written beside the steps, one at a time. The last good one, from which a step was
made, is spared until there is a newer: the step before a bad one may be what has made the weights
useless.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

from l2l.checkpoint import CheckpointFolder, Saving
from l2l.device import format_bytes
from l2l.distributed import World
from l2l.engine import Engine
from l2l.planner import Plan
from l2l.train.display import Level, format_seconds
from l2l.train.folder import TrainingError
from l2l.train.generating import Samples, exact_match
from l2l.train.objective import Objective, evaluate
from l2l.train.planned import Planned, outline_of
from l2l.train.prepared import Prepared
from l2l.train.progress import INTERRUPTED, Progress

DIVERGED = "diverged"  # kind of the metrics' line that says that a run was given up
MAX_ANSWER = 256  # tokens, if nothing else is said
MIN_STALL_SECONDS = 0.05  # that is worth a word


@final
@dataclass
class Steps:
    """Makes the steps that are left of a run."""

    engine: Engine
    prepared: Prepared
    objective: Objective
    checkpoints: CheckpointFolder
    progress: Progress
    samples: Samples
    world: World
    is_told_to_stop: Callable[[], bool]  # this rank

    def __post_init__(self) -> None:
        self.has_stepped = False
        assert self.progress.best is not None
        self.best = self.progress.best
        self._tops = [group["lr"] for group in self.engine.optimizer.param_groups]
        self._is_stopped = False  # what the ranks have agreed on
        self._saved_step = self.engine.step_number  # it has a checkpoint
        self._saved_at = time.monotonic()
        self._saving: Saving | None = None
        self._plan: Plan | None = None
        self._is_time_told = False

    def make(self) -> bool:
        """Make all steps that are left; False if the run was stopped on the way.

        Raises:
            TrainingError: too many of them could not be made.
            CheckpointError: a checkpoint could not be written.
        """
        engine, prepared, progress = self.engine, self.prepared, self.progress
        objective = self.objective
        step = first = engine.step_number
        self._evaluate(step)
        self._spare_best()
        self._draw_samples(step)
        if step and self._is_saved_after(step) and not progress.has("checkpoint", step):
            self._note_checkpoint(step)
        progress.lap()
        written = engine.disk_written_bytes
        while not self._is_at_end(step) and not self._must_stop():
            rate = self._learning_rate(step)
            self._set_rates(step, rate)
            report = engine.step(objective.batch(step, prepared.batches, engine))
            step, self.has_stepped = step + 1, True
            if step == first + 1 and prepared.num_saves_from(step) > 1:
                engine.prepare_saving()  # now that everything else has its memory
            written, before = engine.disk_written_bytes, written
            progress.step_begun(
                step,
                report,
                learning_rate=rate,
                measured=objective.measures.taken(),
                written=written - before,
            )
            self._refuse_divergence()
            if self._saving is not None and self._saving.is_done:
                self._finish_saving()
            self._look_at_plan()
            self._spare_no_longer()
            self._evaluate(step)
            self._draw_samples(step)
            if self._is_saved_after(step):
                self._save()
            elif self._is_overdue():
                self._save(is_planned=False)
        progress.catch_up()
        self._refuse_divergence()
        if step != self._saved_step:
            self._save()
        self._finish_saving()
        return self._is_at_end(step) and not self._is_stopped

    def _is_at_end(self, step: int) -> bool:
        """Whether no step is left to be made, or none would make the model better."""
        patience = self.prepared.settings.evaluation.patience
        return step >= self.prepared.num_steps or self.best.is_given_up(patience)

    def _is_saved_after(self, step: int) -> bool:
        """Whether a checkpoint is due, or this is the best model so far."""
        is_best = self.prepared.settings.checkpoint.best and step == self.best.step
        return self.prepared.is_saved_after(step) or is_best

    def _is_overdue(self) -> bool:
        """Whether much time has passed since the last checkpoint; all ranks must ask together."""
        minutes = self.prepared.settings.checkpoint.every_minutes
        if minutes is None:
            return False
        passed = time.monotonic() - self._saved_at
        return any(self.world.gather_facts(passed >= 60 * minutes))

    def _spare_best(self) -> None:
        """Keep the checkpoint of the best evaluation, if that is asked for."""
        if self.prepared.settings.checkpoint.best and self.best.step is not None:
            self.checkpoints.best = self.checkpoints.path_of(self.best.step)

    def _must_stop(self) -> bool:
        """Whether any rank was told to stop; all ranks must ask together."""
        if not self._is_stopped:
            self._is_stopped = any(self.world.gather_facts(self.is_told_to_stop()))
        return self._is_stopped

    def _learning_rate(self, step: int) -> float:
        settings = self.prepared.settings
        factor = settings.schedule.factor(step, total=self.prepared.num_steps)
        return settings.optimizer.learning_rate * factor

    def _set_rates(self, step: int, rate: float) -> None:
        """Let groups with a learning rate of their own follow the same schedule."""
        settings = self.prepared.settings
        factor = settings.schedule.factor(step, total=self.prepared.num_steps)
        for group, top in zip(self.engine.optimizer.param_groups, self._tops, strict=True):
            group["lr"] = rate if top == settings.optimizer.learning_rate else top * factor

    def _evaluate(self, step: int) -> None:
        """Evaluate after a step, if it is time and was not done."""
        is_due = self.prepared.is_evaluated_after(step)
        if not is_due or self.progress.has("evaluation", step) or self._must_stop():
            return
        self.progress.catch_up()
        began = time.perf_counter()
        settings, batches = self.prepared.settings, self.prepared.evaluation_batches.in_order()
        chosen = itertools.islice(batches, settings.evaluation.most_batches)
        marker = settings.evaluation.answer_marker
        with self.prepared.result_of(self.engine):
            found = evaluate(self.engine, chosen, objective=self.objective, stops=self._must_stop)
            if found is not None and marker is not None:
                assert self.prepared.held_out is not None
                found["exact_match"] = exact_match(
                    self.engine,
                    self.prepared.speaker,
                    self.prepared.held_out,
                    marker,
                    max_new_tokens=settings.evaluation.max_new_tokens or MAX_ANSWER,
                )
        if found is not None:
            self.progress.evaluated(step, found, seconds=time.perf_counter() - began)

    def _draw_samples(self, step: int) -> None:
        """Let the model say something after a step, if it is time and it did not."""
        if self.samples.is_due_after(step, num_steps=self.prepared.num_steps):
            self.progress.catch_up()
            with self.prepared.result_of(self.engine):
                drawn = self.samples.draw(self.engine, step)
            for one in drawn:
                say = self.progress.display.say
                say(f"sample after step {step}: {one['prompt']!r} -> {one['completion']!r}")
            self.progress.lap()

    def _look_at_plan(self) -> None:
        """Learn what the plan is, and how memory does."""
        if self._plan is None:
            self._plan = self.engine.plan
            self.progress.display.say(f"plan:   {self._plan.sentence()}")
            self.progress.display.say(str(self._plan), Level.DETAIL)
            self._planned(self._plan).write(self.progress.folder.plan_file)
        self._tell_time(self._plan)
        if self._plan.budget_bytes is not None:
            status = self.progress.status
            status.peak_bytes = self.engine.device.peak_bytes()
            status.budget_bytes, status.bounds = self._plan.budget_bytes, self._plan.bounds

    def _planned(self, plan: Plan) -> Planned:
        """The plan, and a step for which it can be made again."""
        prepared = self.prepared
        is_padded = not prepared.settings.data.packing
        batch = prepared.widest_batch() if is_padded else prepared.batches.batch(0)
        outline = outline_of(self.objective.outline(batch))
        return Planned(
            plan=plan,
            num_steps=prepared.num_steps,
            outline=outline,
            num_labels=prepared.examples.num_labels,
        )

    def _tell_time(self, plan: Plan) -> None:
        """How long the run will take, once: as it is planned, or else as the first steps were."""
        status = self.progress.status
        seconds = plan.predicted_seconds or status.step_seconds
        if self._is_time_told or not seconds:
            return
        self._is_time_told = True
        left = self.prepared.num_steps - self.engine.step_number
        source = "by the plan" if plan.predicted_seconds else "as measured so far"
        self.progress.display.say(
            f"time:   {format_seconds(left * seconds)} to the end, without evaluations: {left:,} "
            f"more steps of {seconds:.3g} s, {source}"
        )

    # -- checkpoints -------------------------------------------------------------------------------

    def _save(self, *, is_planned: bool = True) -> None:
        """Begin to save; what was begun before is there when this returns."""
        progress, checkpoints, step = self.progress, self.checkpoints, self.engine.step_number
        progress.catch_up()
        self._finish_saving()
        self._spare_no_longer()
        if step < self.prepared.num_steps or progress.num_bad:
            checkpoints.spared = self._last_good()
        self._note_checkpoint(step, interrupted=self._is_stopped or not is_planned)
        self._spare_best()
        progress.status.saving = checkpoints.path_of(step).name
        extra = {**self.prepared.extra(), **self.objective.extra()}
        self._saving = checkpoints.save(self.engine, extra=extra, background=True)
        self._saved_step, self._saved_at = step, time.monotonic()

    def _note_checkpoint(self, step: int, *, interrupted: bool = False) -> None:
        """Write down that a checkpoint is begun, perhaps only because the run is stopped."""
        name = str(self.checkpoints.path_of(step).relative_to(self.checkpoints.root.parent))
        self.progress.note(
            "checkpoint", step, folder=name, **({INTERRUPTED: True} if interrupted else {})
        )

    def _finish_saving(self) -> None:
        """Wait for the checkpoint that is being written."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        saving.wait()
        self.progress.status.saving = ""
        waited = f", {saving.stall_seconds:.1f} s of it waited for"
        self.progress.display.say(
            f"saved {saving.folder.name}: {format_bytes(saving.num_bytes)} in {saving.seconds:.1f} "
            f"s{waited if saving.stall_seconds >= MIN_STALL_SECONDS else ''}"
        )

    def _spare_no_longer(self) -> None:
        """Delete the checkpoint that was spared, once there is a newer good one."""
        checkpoints = self.checkpoints
        if checkpoints.spared is None or self._saving is not None or self.world.rank:
            return
        if self.progress.is_good(self._saved_step + 1):
            checkpoints.spared = None
            checkpoints.prune(checkpoints.path_of(self._saved_step))

    def _last_good(self) -> Path | None:
        """The newest checkpoint from which a step was made."""
        found = self.checkpoints.all()
        good = [path for path in found if self.progress.is_good(_step_of(path) + 1)]
        return good[-1] if good else None

    def _refuse_divergence(self) -> None:
        """Give up after too many bad steps in a row."""
        number, num_steps = self.progress.num_bad, self.prepared.num_steps
        most = min(self.prepared.settings.training.max_bad_steps, max(1, num_steps // 2))
        if not most or number < most:
            return
        self._finish_saving()
        last, good = self.progress.status.step, self._last_good()
        first = last - number + 1
        self.progress.note(DIVERGED, last, since=first, **{INTERRUPTED: True})
        advice = "There is no checkpoint from before: change the settings and begin anew."
        if good is not None:
            found = self.checkpoints.all()
            later = " and ".join(path.name for path in found if _step_of(path) > _step_of(good))
            advice = (
                f"The last good checkpoint is {good}. To go on from it: "
                f"{f'delete {later} beside it, ' if later else ''}change the settings, then l2l "
                f"train {self.checkpoints.root.parent}."
            )
        raise TrainingError(
            f"{number} steps in a row, {first} to {last} of {num_steps}, were skipped because the "
            "loss or a gradient was not finite; their weights were left alone "
            f"({self.progress.status.num_skipped} steps were skipped in all). Usual causes: a "
            "learning rate that is too high, no warm-up, data that the loss is not finite for, a "
            "precision that does not hold the model's numbers (try bfloat16 or float32). Nothing "
            f"was exported. {advice} [training] max_bad_steps says how many are too many."
        )


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])
