"""Other people's loops, with an engine in them: the trainers of transformers and TRL, Lightning.

    Trainer = l2l.loops.streamed(trl.SFTTrainer)
    trainer = Trainer(model, args, l2l=dict(device_memory="8GiB"), ...)

`l2l.loops.Trainer` is `streamed(transformers.Trainer)`.

The loop, its arguments, callbacks and files stay as they are. What changes is where the model is:
an engine is made of it when the loop creates its optimizer.

    arguments    what becomes of each field of TrainingArguments
    trainer      trainers of transformers and TRL
    adapters     the base model without its adapter, as a reference
    optimizers   what an engine makes of the optimizer that a loop would have made
    lightning    a strategy for Lightning
"""

import importlib
from typing import Any

from l2l.loops.arguments import FIELDS, FIELDS_OF_TRL, Field
from l2l.loops.lightning import lightning_strategy
from l2l.loops.trainer import streamed


def __getattr__(name: str) -> Any:
    """`Trainer` is that of transformers, streamed."""
    if name == "Trainer":
        return streamed(importlib.import_module("transformers").Trainer)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
