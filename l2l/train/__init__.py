"""A training run: from settings to a trained model, through any number of interruptions.

    folder/
      run.toml            the settings in force; `l2l train folder` goes on with them
      metrics.jsonl       what happened (metrics_file.py)
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
    folder       where everything is
    parts        tokenizer, model and engine, as the settings say
    prepared     what there is before the engine: batches, the model without weights
    disk         whether it takes what will be written
    evaluation   the metrics of a task
    progress     what happens, passed on to display and metrics_file
    keeping      checkpoints while the run goes
    run          the steps, and what is between them
"""

from l2l.train.display import Display, format_seconds, open_display
from l2l.train.evaluation import BEST, evaluate
from l2l.train.folder import RunFolder, TrainingError
from l2l.train.metrics_file import Record, read_metrics
from l2l.train.parts import export_checkpoint
from l2l.train.run import Training
from l2l.train.settings import SECTIONS, Flag, Settings, SettingsError, help_text
