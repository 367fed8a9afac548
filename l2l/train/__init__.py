"""A training run: from settings to a trained model, through any number of interruptions.

    folder/
      run.toml            the settings in force; `l2l train folder` goes on with them
      metrics.jsonl       what happened (progress.py)
      plan.json           what it goes by (planned.py)
      events/             the same for TensorBoard
      checkpoints/        the last ones (checkpoint.py); it goes on with the last of them
      model/              the trained model, for `from_pretrained`

[Note: resuming] Everything that a step depends on is in the checkpoint, or is a function of the
settings and the step's number: its batch, its learning rate, its dropout. So a run that goes on
from a checkpoint is the run that was never interrupted. What is checked before it goes on: that
model and data are those that it was begun with. Other settings may have changed; those that change
the result are named, and hold from there on.

A run is stopped between two steps: `Training.stop` may be called at any time, by a signal too.

    settings     what is to be done, read and checked
    data         from files to batches
    folder       where everything is, and whether the disk takes it
    prepared     what there is before the engine: tokenizer, batches, the model without weights
    tasks        what is known of each task
    objective    what a task asks of the engine: loss, batches, metrics
    grpo         the same of learning from rewards
    losses       the formulas of preferences
    generating   what a model says: samples, answers, rollouts
    reference    what a reference model says of the data, computed once
    planned      the plan that it goes by, to be read later
    progress     what happens, passed on to display, metrics.jsonl and TensorBoard
    steps        the steps, and what is between them: evaluations, checkpoints
    run          what is before and after the steps
    export       the model of a checkpoint
"""

from l2l.train.display import Display, Level, format_seconds, open_display
from l2l.train.export import export_checkpoint
from l2l.train.folder import RunFolder, TrainingError
from l2l.train.planned import Planned
from l2l.train.progress import Record, read_metrics
from l2l.train.run import Training
from l2l.train.settings import SECTIONS, Flag, Settings, answer, help_text
from l2l.train.tasks import KINDS
