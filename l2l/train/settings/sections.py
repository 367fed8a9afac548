"""The sections of a run's settings: frozen data, every key with one sentence that says what it is.

Errors, `l2l train --help-settings` and the flags of `l2l train` all read that sentence: it is
written once, here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from torch import nn

from l2l.engine import Depth, ProgressiveLayerDropping, StochasticDepth
from l2l.parameter_server import SGD, Adafactor, AdamW, Lion, Optimizer
from l2l.train.data import DOCUMENTS, TASKS
from l2l.train.settings.values import About

LANGUAGE_TASKS = ("causal", "instruct")
PRECISIONS = ("bfloat16", "float16", "float32")
RUNS = "runs"  # where run folders are if no output folder is named


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """What is trained."""

    folder: Annotated[
        Path,
        About(
            "A Hugging Face folder: config.json, the tokenizer, and weights in safetensors files.",
            changes_result=False,
        ),
    ]
    random_init: Annotated[
        bool, About("Begin with random weights; the folder then needs no weights.")
    ] = False
    allow_missing_weights: Annotated[
        bool,
        About(
            "Begin with random values for weights that the folder lacks, not only for new heads."
        ),
    ] = False
    layer_list: Annotated[
        str | None, About("Dotted name of the list of layers, for a model that has several.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """What it is trained on."""

    source: Annotated[
        tuple[str, ...],
        About(
            "Training data: .txt or .jsonl, also .gz, a folder of such files, or several of all "
            "these; other files, and names of the Hub, through the datasets library.",
            changes_result=False,
        ),
    ]
    evaluation_source: Annotated[
        tuple[str, ...] | None,
        About("Data to evaluate on, in the same form.", changes_result=False),
    ] = None
    hold_out: Annotated[
        int | None,
        About("Examples of the training data to evaluate on, instead of training on.", least=1),
    ] = None
    task: Annotated[
        str,
        About(
            "causal: texts. instruct: prompts or chats, of which the answers are learnt. "
            "classification, regression: texts or pairs of texts with a class or a number.",
            choices=TASKS,
        ),
    ] = "causal"
    packing: Annotated[
        bool | None,
        About(
            "Put several examples into a row; they do not see each other. Default: for language "
            "models, where the model keeps them apart."
        ),
    ] = None
    documents: Annotated[
        str, About("What parts the documents of a .txt file.", choices=DOCUMENTS)
    ] = "blank lines"
    template: Annotated[
        str | None, About("A chat template, of instruct. Default: the tokenizer's own.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnSettings:
    """Names of the data's columns. Default: found by the names that are usual."""

    text: Annotated[str | None, About("Of causal, classification and regression.")] = None
    pair: Annotated[str | None, About("A second text of classification, regression.")] = None
    label: Annotated[str | None, About("Of classification and regression.")] = None
    prompt: Annotated[str | None, About("Of instruct.")] = None
    input: Annotated[str | None, About("What the prompt is about; follows it.")] = None
    completion: Annotated[str | None, About("The answer to the prompt.")] = None
    messages: Annotated[str | None, About("A conversation, of instruct.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """How a step is made, and how many."""

    steps: Annotated[
        int | None, About("Optimizer steps of the run. Default: as many as epochs has.", least=1)
    ] = None
    epochs: Annotated[
        float | None,
        About("Times the data is gone through, instead of steps. Default: 1.", above=0),
    ] = None
    rows: Annotated[int, About("Rows of a step.", least=1)] = 8
    length: Annotated[
        int,
        About(
            "Most tokens of a row. Default: 1024, or what the model is made for if that is less.",
            least=2,
        ),
    ] = 1024
    precision: Annotated[
        str,
        About(
            "What runs on the device and crosses the link; masters are float32.", choices=PRECISIONS
        ),
    ] = "bfloat16"
    clip_norm: Annotated[
        float, About("Clip the gradient by its global norm; 0: do not. Adafactor cannot.", least=0)
    ] = 1.0
    max_bad_steps: Annotated[
        int,
        About(
            "Give up after so many steps in a row, or half of the run if that is less, that are "
            "skipped because a loss or gradient is not finite; 0: never. The search for float16's "
            "loss scale does not count.",
            least=0,
            changes_result=False,
        ),
    ] = 10
    seed: Annotated[int, About("Of random weights, shuffling and dropout.", least=0)] = 0
    survival: Annotated[
        float,
        About(
            "How probable it is that the last layer runs in a step, the others linear in depth.",
            above=0,
            most=1,
        ),
    ] = 1.0
    survival_decay: Annotated[
        float,
        About("How fast that falls from 1, for each step; 0: it is so from the first.", least=0),
    ] = 0.0
    microbatch_size: Annotated[
        int | None, About("Rows that pass a layer at once. Default: planned.", least=1)
    ] = None
    compile: Annotated[
        bool | None, About("Whether layers go through torch.compile. Default: on an accelerator.")
    ] = None
    device: Annotated[
        str | None,
        About(
            "Such as cuda:1 or cpu. Default: the accelerator if there is one.", changes_result=False
        ),
    ] = None

    def depth(self) -> Depth | None:
        """Which layers every step runs; None: all."""
        if self.survival == 1.0:
            return None
        if self.survival_decay:
            return ProgressiveLayerDropping(final=self.survival, rate=self.survival_decay)
        return StochasticDepth(last=self.survival)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """How weights are updated. Every optimizer takes some of these, under torch's names."""

    name: Annotated[
        str,
        About(
            "adamw, adamw-8bit (moments in 8 bits), adafactor (2 bytes a parameter), lion or sgd.",
            choices=("adamw", "adamw-8bit", "adafactor", "lion", "sgd"),
        ),
    ] = "adamw"
    learning_rate: Annotated[
        float,
        About(
            "At the top of the schedule. Default: 2e-5; lion 5e-6, adafactor and sgd 1e-3.", least=0
        ),
    ] = 2e-5
    weight_decay: Annotated[float, About("Default: 0.01 with adamw, else 0.", least=0)] = 0.01
    decay_biases_and_norms: Annotated[
        bool, About("Whether weight decay is for biases and norms too, all that is not a matrix.")
    ] = False
    betas: Annotated[
        tuple[float, float] | None, About("adamw [0.9, 0.999], lion [0.9, 0.99].", least=0)
    ] = None
    eps: Annotated[
        float | tuple[float, float] | None, About("adamw 1e-8, adafactor [1.2e-7, 1e-3].", least=0)
    ] = None
    momentum: Annotated[float | None, About("sgd 0.", least=0)] = None
    dampening: Annotated[float | None, About("sgd 0.")] = None
    nesterov: Annotated[bool | None, About("sgd false.")] = None
    beta2_decay: Annotated[float | None, About("adafactor -0.8.", most=0)] = None
    d: Annotated[
        float | None, About("adafactor 1.0: how large a tensor's update may get.", least=1)
    ] = None

    def make(self) -> Optimizer:
        """The optimizer that these settings describe.

        Raises:
            ValueError: they exclude each other.
        """
        kind = OPTIMIZERS[self.name]
        arguments = {name: getattr(self, name) for name in kind.defaults}
        arguments["lr"] = arguments.pop("learning_rate")
        groups = None if self.decay_biases_and_norms else without_decay
        return kind.make(**arguments, groups=groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSettings:
    """The learning rate over the run: a pure function of the step."""

    shape: Annotated[
        str, About("How it goes on after the warm-up.", choices=("constant", "linear", "cosine"))
    ] = "cosine"
    warm_up_steps: Annotated[
        int | None,
        About("Steps in which it rises evenly to its top, instead of warm_up_share.", least=0),
    ] = None
    warm_up_share: Annotated[
        float | None, About("Share of the run in which it rises. Default: 0.03.", least=0, most=1)
    ] = None
    minimum_ratio: Annotated[
        float, About("Share of the top that linear and cosine end with.", least=0, most=1)
    ] = 0.0

    def warm_up(self, total: int) -> int:
        """Steps of the warm-up in a run of `total`."""
        steps = self.warm_up_steps
        return min(total, round((self.warm_up_share or 0.0) * total) if steps is None else steps)

    def factor(self, step: int, *, total: int) -> float:
        """What the learning rate is multiplied with in a step; the first is 0."""
        rise = self.warm_up(total)
        if step < rise:
            return (step + 1) / rise
        if self.shape == "constant":
            return 1.0
        done = min(1.0, (step - rise) / max(1, total - rise))
        left = 1.0 - done if self.shape == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.minimum_ratio + (1.0 - self.minimum_ratio) * left


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """How much may be taken."""

    device_memory: Annotated[
        str | None,
        About("Of the device, such as 8GiB. Default: 90% of what is free.", changes_result=False),
    ] = None
    host_memory: Annotated[
        str | None,
        About(
            "Of the host, such as 100GiB. Default: 95% of what is free.",
            changes_result=False,
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """When the model is evaluated, if there is data for it: also first and last."""

    every_steps: Annotated[
        int | None,
        About(
            "Steps between evaluations; 0: only before the first and after the last. Default: a "
            "tenth of the run.",
            least=0,
            changes_result=False,
        ),
    ] = None
    rows: Annotated[
        int | None,
        About("Rows of a batch. Default: as in training.", least=1, changes_result=False),
    ] = None
    most_batches: Annotated[
        int | None,
        About(
            "Evaluate on so many batches only, the first ones. Default: on all.",
            least=1,
            changes_result=False,
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """When the run is saved: in the background, and at the end."""

    every_steps: Annotated[
        int, About("Steps between checkpoints; 0: only at the end.", least=0, changes_result=False)
    ] = 200
    keep: Annotated[int, About("Checkpoints that are kept.", least=1, changes_result=False)] = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSettings:
    """What is left behind, and what is shown."""

    folder: Annotated[
        Path,
        About(
            "The run folder: settings, metrics, checkpoints, the trained model. A run that finds "
            f"its checkpoint there goes on from it. Default: {RUNS}/ and the name of the TOML "
            "file, or of model and data.",
            changes_result=False,
        ),
    ]
    export: Annotated[
        bool,
        About(
            "Write the trained model to the run folder's model/, for from_pretrained.",
            changes_result=False,
        ),
    ] = True
    export_dtype: Annotated[
        str | None,
        About(
            "Of the exported weights. Default: bfloat16; float32 if that is the precision.",
            choices=("bfloat16", "float32"),
            changes_result=False,
        ),
    ] = None
    tensorboard: Annotated[
        bool,
        About("Write TensorBoard events too, if tensorboard is installed.", changes_result=False),
    ] = True
    every_steps: Annotated[
        int,
        About(
            "Steps between two lines of progress, where there is no terminal.",
            least=1,
            changes_result=False,
        ),
    ] = 10


# --------------------------------------------------------------------------------------------------
# Optimizers


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerKind:
    """An optimizer, the settings that it takes, and what they are if nothing is said."""

    make: Callable[..., Optimizer]
    defaults: Mapping[str, Any]


ADAMW = {"learning_rate": 2e-5, "weight_decay": 0.01, "betas": (0.9, 0.999), "eps": 1e-8}
OPTIMIZERS: Mapping[str, OptimizerKind] = {
    "adamw": OptimizerKind(make=AdamW, defaults=ADAMW),
    "adamw-8bit": OptimizerKind(
        make=lambda **arguments: AdamW(moments="8bit", **arguments), defaults=ADAMW
    ),
    "adafactor": OptimizerKind(
        make=Adafactor,
        defaults={
            "learning_rate": 1e-3,
            "weight_decay": 0.0,
            "eps": (2.0**-23, 1e-3),
            "beta2_decay": -0.8,
            "d": 1.0,
        },
    ),
    "lion": OptimizerKind(
        make=Lion,
        defaults={"learning_rate": 5e-6, "weight_decay": 0.0, "betas": (0.9, 0.99)},
    ),
    "sgd": OptimizerKind(
        make=SGD,
        defaults={
            "learning_rate": 1e-3,
            "weight_decay": 0.0,
            "momentum": 0.0,
            "dampening": 0.0,
            "nesterov": False,
        },
    ),
}


def without_decay(name: str, parameter: nn.Parameter) -> Mapping[str, Any] | None:
    """Biases and the weights of norms have no weight decay: whatever is not a matrix."""
    del name
    return {"weight_decay": 0.0} if parameter.dim() < 2 else None
