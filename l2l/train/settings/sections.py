"""The sections of a run's settings: frozen pydantic models, every key explained once.

The docstring below a key is its description. Errors, `l2l train --help-settings` and the flags of
`l2l train` all read it from there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from torch import nn

from l2l.device import parse_bytes
from l2l.engine import Depth, ProgressiveLayerDropping, StochasticDepth
from l2l.parameter_server import OPTIMIZERS, Optimizer
from l2l.train.data import DocumentsEnd, Task

LANGUAGE_TASKS = ("causal", "instruct")
SAME_RESULT = Field(json_schema_extra={"same_result": True})  # whatever it is, so are the weights


def _size(text: str) -> str:
    if parse_bytes(text, name="size") < 1:
        raise ValueError(f"{text!r} is no size. Expected a text like '8GiB'.")
    return text


def _not_empty(path: Any) -> Any:
    if path == "":
        raise ValueError("expected a path in quotes")
    return path


Folder = Annotated[Path, BeforeValidator(_not_empty), Field(strict=False)]
Sources = Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
Size = Annotated[str, AfterValidator(_size)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Amount = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Pair = Annotated[tuple[Amount, ...], Field(min_length=2, max_length=2, strict=False)]
LEARNING_RATES = {"adamw": 2e-5, "adamw-8bit": 2e-5, "adafactor": 1e-3, "lion": 5e-6, "sgd": 1e-3}


class Section(BaseModel):
    """What all sections have in common."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


class ModelSettings(Section):
    """What is trained."""

    folder: Annotated[Folder, SAME_RESULT]
    """A Hugging Face folder: config.json, the tokenizer, and weights in safetensors files."""
    random_init: bool = False
    """Begin with random weights; the folder then needs no weights."""
    allow_missing_weights: bool = False
    """Begin with random values for weights that the folder lacks, not only for new heads."""
    layer_list: str | None = None
    """Dotted name of the list of layers, for a model that has several."""


class DataSettings(Section):
    """What it is trained on."""

    source: Annotated[Sources, SAME_RESULT]
    """Training data: .txt or .jsonl, also .gz, a folder of such files, or several of all these;
    other files, and names of the Hub, through the datasets library."""
    evaluation_source: Annotated[Sources | None, SAME_RESULT] = None
    """Data to evaluate on, in the same form."""
    hold_out: Positive | None = None
    """Examples of the training data to evaluate on, instead of training on."""
    task: Task = "causal"
    """causal: texts. instruct: prompts or chats, of which the answers are learnt. classification,
    regression: texts or pairs of texts with a class or a number."""
    packing: bool | None = None
    """Put several examples into a row; they do not see each other. Default: for language models,
    where the model keeps them apart."""
    documents: DocumentsEnd = "blank lines"
    """What separates the documents of a .txt file."""
    template: str | None = None
    """A chat template, of instruct. Default: the tokenizer's own."""


class ColumnSettings(Section):
    """Names of the data's columns. Default: found by the names that are usual."""

    text: str | None = None
    """Of causal, classification and regression."""
    pair: str | None = None
    """A second text of classification, regression."""
    label: str | None = None
    """Of classification and regression."""
    prompt: str | None = None
    """Of instruct."""
    input: str | None = None
    """What the prompt is about; follows it."""
    completion: str | None = None
    """The answer to the prompt."""
    messages: str | None = None
    """A conversation, of instruct."""


class TrainingSettings(Section):
    """How a step is made, and how many."""

    steps: Positive | None = None
    """Optimizer steps of the run. Default: as many as epochs has."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the data, instead of steps. Default: 1."""
    rows: Positive = 8
    """Rows of a step."""
    length: Annotated[int, Field(ge=2)] = 1024
    """Most tokens of a row. Default: 1024, or what the model is made for if that is less."""
    precision: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """What runs on the device and crosses the link; masters are float32."""
    clip_norm: Amount = 1.0
    """Clip the gradient by its global norm; 0: do not. Adafactor cannot."""
    max_bad_steps: Annotated[Natural, SAME_RESULT] = 10
    """Stop after this many consecutive skipped steps (non-finite loss or gradient), or half of the
    run if that is less; 0: never. The search for float16's loss scale does not count."""
    seed: Natural = 0
    """Of random weights, shuffling and dropout."""
    survival: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Stochastic depth: probability that the last layer runs; it falls linearly with depth."""
    survival_decay: Amount = 0.0
    """Progressive layer dropping: rate per step at which it decays from 1; 0: constant."""
    microbatch_size: Positive | None = None
    """Rows that pass a layer at once. Default: planned."""
    compile: bool | None = None
    """Whether layers go through torch.compile. Default: on an accelerator."""
    device: Annotated[str | None, SAME_RESULT] = None
    """Such as cuda:1 or cpu. Default: the accelerator if there is one."""

    def depth(self) -> Depth | None:
        """Which layers every step runs; None: all."""
        if self.survival == 1.0:
            return None
        if self.survival_decay:
            return ProgressiveLayerDropping(final=self.survival, rate=self.survival_decay)
        return StochasticDepth(last=self.survival)


class OptimizerSettings(Section):
    """How weights are updated. Every optimizer takes some of these, under torch's names."""

    name: Literal["adamw", "adamw-8bit", "adafactor", "lion", "sgd"] = "adamw"
    """adamw, adamw-8bit (moments in 8 bits), adafactor (2 bytes a parameter), lion or sgd."""
    learning_rate: Amount = 2e-5
    """At the top of the schedule. Default: 2e-5; lion 5e-6, adafactor and sgd 1e-3."""
    weight_decay: Amount = 0.01
    """Default: 0.01 with adamw, else 0."""
    decay_biases_and_norms: bool = False
    """Whether weight decay is for biases and norms too, all that is not a matrix."""
    betas: Pair | None = None
    """adamw [0.9, 0.999], lion [0.9, 0.99]."""
    eps: Amount | Pair | None = None
    """adamw 1e-8, adafactor [1.2e-7, 1e-3]."""
    momentum: Amount | None = None
    """sgd 0."""
    dampening: float | None = None
    """sgd 0."""
    nesterov: bool | None = None
    """sgd false."""
    beta2_decay: Annotated[float, Field(le=0)] | None = None
    """adafactor -0.8."""
    d: Annotated[float, Field(ge=1)] | None = None
    """adafactor 1.0: how large a tensor's update may get."""

    def make(self) -> Optimizer:
        """The optimizer that these settings describe.

        Raises:
            ValueError: they exclude each other.
        """
        taken = taken_by(self.name)
        own = self.model_dump(exclude_none=True, exclude={"name", "decay_biases_and_norms"})
        for key, value in own.items():
            if key not in taken:
                raise ValueError(f"{key} is not for {self.name}. Expected {', '.join(taken)}.")
            if isinstance(value, tuple) != isinstance(taken[key], tuple):
                raise ValueError(f"{key} = {value}. Expected the like of {taken[key]}.")
        groups = None if self.decay_biases_and_norms else without_decay
        return OPTIMIZERS[self.name](lr=own.pop("learning_rate"), **own, groups=groups)


class ScheduleSettings(Section):
    """The learning rate over the run: a pure function of the step."""

    shape: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape of the learning-rate schedule after the warm-up."""
    warm_up_steps: Natural | None = None
    """Steps in which it rises evenly to its top, instead of warm_up_share."""
    warm_up_share: Share | None = None
    """Share of the run in which it rises. Default: 0.03."""
    minimum_ratio: Share = 0.0
    """Share of the top that linear and cosine end with."""

    def factor(self, step: int, *, total: int) -> float:
        """What the learning rate is multiplied with in a step; the first is 0."""
        share = round((self.warm_up_share or 0.0) * total)
        rise = min(total, share if self.warm_up_steps is None else self.warm_up_steps)
        if step < rise:
            return (step + 1) / rise
        if self.shape == "constant":
            return 1.0
        done = min(1.0, (step - rise) / max(1, total - rise))
        left = 1.0 - done if self.shape == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.minimum_ratio + (1.0 - self.minimum_ratio) * left


class MemorySettings(Section):
    """How much may be taken."""

    device_memory: Annotated[Size | None, SAME_RESULT] = None
    """Of the device, such as 8GiB. Default: 90% of what is free."""
    host_memory: Annotated[Size | None, SAME_RESULT] = None
    """Of the host, such as 100GiB. Default: 95% of what is free."""


class EvaluationSettings(Section):
    """When the model is evaluated, if there is data for it: also first and last."""

    every_steps: Annotated[Natural | None, SAME_RESULT] = None
    """Steps between evaluations; 0: only at both ends of the run. Default: a tenth of the run."""
    rows: Annotated[Positive | None, SAME_RESULT] = None
    """Rows of a batch. Default: as in training."""
    most_batches: Annotated[Positive | None, SAME_RESULT] = None
    """Evaluate only on the first so many batches. Default: on all."""


class CheckpointSettings(Section):
    """When the run is saved: in the background, and at the end."""

    every_steps: Annotated[Natural, SAME_RESULT] = 200
    """Steps between checkpoints; 0: only at the end."""
    keep: Annotated[Positive, SAME_RESULT] = 2
    """Checkpoints that are kept."""


class OutputSettings(Section):
    """What is left behind, and what is shown."""

    folder: Annotated[Folder, SAME_RESULT]
    """The run folder: settings, metrics, checkpoints, the trained model. A run goes on from its
    checkpoint there. Default: runs/ and the name of the TOML file, or of model and data."""
    export: Annotated[bool, SAME_RESULT] = True
    """Write the trained model to the run folder's model/, for from_pretrained."""
    export_dtype: Annotated[Literal["bfloat16", "float32"] | None, SAME_RESULT] = None
    """Of the exported weights. Default: bfloat16; float32 if that is the precision."""
    tensorboard: Annotated[bool, SAME_RESULT] = True
    """Write TensorBoard events too, if tensorboard is installed."""
    every_steps: Annotated[Positive, SAME_RESULT] = 10
    """Steps between two lines of progress, where there is no terminal."""


def taken_by(optimizer: str) -> dict[str, Any]:
    """The settings that an optimizer takes, with its defaults."""
    own = OPTIMIZERS[optimizer]().defaults | {"learning_rate": LEARNING_RATES[optimizer]}
    del own["lr"]
    return own | ({"eps": (2.0**-23, 1e-3)} if optimizer == "adafactor" else {})


def without_decay(name: str, parameter: nn.Parameter) -> Mapping[str, Any] | None:
    """Biases and the weights of norms have no weight decay: whatever is not a matrix."""
    del name
    return {"weight_decay": 0.0} if parameter.dim() < 2 else None
