"""The sections of a run's settings: frozen pydantic models, every key explained once.

The docstring below a key is its description. Errors, `l2l train --help-settings` and the flags of
`l2l train` all read it from there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from torch import nn

from l2l.device import Disk, parse_bytes
from l2l.engine import Depth, ProgressiveLayerDropping, StochasticDepth
from l2l.hugging_face import ALL_LINEAR, Lora
from l2l.parameter_server import OPTIMIZERS, AdamW, Optimizer
from l2l.train.data import DocumentsEnd, Task

LANGUAGE_TASKS = ("causal", "instruct")
PREFERENCES: Mapping[str, Mapping[str, Any]] = {  # what each takes of its section, with defaults
    "dpo": {"beta": 0.1, "loss": "sigmoid", "label_smoothing": 0.0, "reference_free": False},
    "orpo": {"odds_ratio_weight": 0.1},
    "simpo": {"beta": 2.0, "gamma": 1.0, "label_smoothing": 0.0},
    "kto": {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},
    "reward": {"center_rewards": 0.0},
}
OF_TOKENS = ("dpo", "orpo", "simpo", "kto", "grpo")  # whose loss is of log-probabilities
CHATS = ("instruct", "grpo", *PREFERENCES)  # tasks whose data may be conversations
SAME_RESULT = Field(json_schema_extra={"same_result": True})  # whatever it is, so are the weights


def _size(text: str) -> str:
    if parse_bytes(text, name="size") < 1:
        raise ValueError(f"{text!r} is no size. Expected a text like '8GiB'.")
    return text


def _not_empty(path: Any) -> Any:
    if path == "":
        raise ValueError("expected a path in quotes")
    return path


def _number_or_share(value: float) -> float:
    if value <= 0 or (value >= 1 and value != int(value)):
        raise ValueError("expected a number of examples, or a share between 0 and 1")
    return value


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from error
    return text


Folder = Annotated[Path, BeforeValidator(_not_empty), Field(strict=False)]
Sources = Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
Size = Annotated[str, AfterValidator(_size)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Amount = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Pair = Annotated[tuple[Amount, ...], Field(min_length=2, max_length=2, strict=False)]
INVERSE_SQRT_STEPS = 10_000  # what inverse_sqrt counts in without a warm-up, as in transformers
LEARNING_RATES = {
    "adamw": 2e-5,
    "adamw-8bit": 2e-5,
    "adafactor": 1e-3,
    "lion": 5e-6,
    "muon": 2e-5,
    "schedule-free": 2e-5,
    "sgd": 1e-3,
}


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
    """Begin with random values for weights that the folder lacks, or has in another shape, such as
    a head for other classes; not only for new heads."""
    layer_list: str | None = None
    """Dotted name of the list of layers, for a model that has several."""


class DataSettings(Section):
    """What it is trained on."""

    source: Annotated[Sources, SAME_RESULT]
    """Training data: .txt, .jsonl, .json, .csv, .tsv, also .gz, a folder of such files, or several
    of all these; .parquet, .arrow and names of the Hub through the datasets library."""
    evaluation_source: Annotated[Sources | None, SAME_RESULT] = None
    """Data to evaluate on, in the same form."""
    hold_out: Annotated[float, AfterValidator(_number_or_share)] | None = None
    """Examples of the training data to evaluate on, instead of training on; below 1 a share of
    them, such as 0.05."""
    task: Task = "causal"
    """causal: texts. instruct: prompts or chats, of which the answers are learnt. masked: texts, of
    which hidden tokens are learnt by those around them. classification, multi-label, regression:
    texts or pairs of texts with a class, a list of classes or a number. token-classification: lists
    of words and of their classes. dpo, orpo, simpo, reward: a better
    and a worse completion of a prompt; kto: single ones, desirable or not. grpo: prompts, and
    rewards of what the model makes of them."""
    packing: bool | None = None
    """Put several examples into a row; they do not see each other. Default: for language models,
    where the model keeps them apart."""
    masked_share: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """masked: share of the tokens that are hidden and learnt, at least one of each row."""
    documents: DocumentsEnd = "blank lines"
    """What separates the documents of a .txt file."""
    template: str | None = None
    """A chat template, of chats. Default: the tokenizer's own."""


class ColumnSettings(Section):
    """Names of the data's columns. Default: found by the names that are usual."""

    text: str | None = None
    """Of texts; the words of token-classification."""
    pair: str | None = None
    """A second text of classification, multi-label, regression."""
    label: str | None = None
    """Of classification, multi-label, token-classification, regression and kto."""
    prompt: str | None = None
    """Of instruct, and before completions."""
    input: str | None = None
    """What the prompt is about; follows it."""
    completion: str | None = None
    """The answer to the prompt."""
    messages: str | None = None
    """A conversation, of instruct."""
    system: str | None = None
    """A text that conversations begin with, of instruct. If prompt or messages are named, it is
    used only if it is named too; so with tools."""
    tools: str | None = None
    """Tools that the model may call, of instruct: a list, or its JSON, for the chat template."""
    chosen: str | None = None
    """The better completion, of dpo, orpo, simpo and reward."""
    rejected: str | None = None
    """The worse one."""


class TrainingSettings(Section):
    """How a step is made, and how many."""

    steps: Positive | None = None
    """Optimizer steps of the run. Default: as many as epochs has."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the data, instead of steps. Default: 1."""
    rows: Positive = 8
    """Rows of a step. Of dpo, orpo, simpo and reward these are pairs, of grpo prompts."""
    length: Annotated[int, Field(ge=2)] = 1024
    """Most tokens of a row. Default: 1024, or what the model is made for if that is less."""
    precision: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """What runs on the device and crosses the link; masters are float32. Default: bfloat16,
    and on the CPU float32."""
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
    compile_ahead: Literal["wait", "background"] = "wait"
    """wait: compile in the first step. background: on a thread, while steps run uncompiled; from
    which step on they are compiled, and the last bits, depend on the machine's speed."""
    device: Annotated[str | None, SAME_RESULT] = None
    """Such as cuda:1 or cpu. Default: the accelerator if there is one."""

    def depth(self) -> Depth | None:
        """Which layers every step runs; None: all."""
        if self.survival == 1.0:
            return None
        if self.survival_decay:
            return ProgressiveLayerDropping(final=self.survival, rate=self.survival_decay)
        return StochasticDepth(last=self.survival)


class LoraSettings(Section):
    """Train an adapter of peft instead of the model, whose own weights stay as they are."""

    enabled: bool = False
    """Train an adapter (LoRA). Default: if anything else is set in [lora]. A learning rate of 1e-4
    to 2e-4 is usual then, and has to be set: its default stays what it is."""
    rank: Positive = 16
    """Rank of the two matrices that are trained beside each weight."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """What the two add is multiplied with alpha / rank. Default: twice the rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of what they are given that is dropped."""
    targets: Annotated[tuple[str, ...], Field(min_length=1, strict=False)] = (ALL_LINEAR,)
    """Modules whose weights they stand beside, by the ends of their names, such as q_proj. Default:
    all-linear, all linear ones but the head."""
    rslora: bool = False
    """Multiply with alpha / sqrt(rank) instead."""
    dora: bool = False
    """DoRA: train the norms of the weights besides."""
    base: Literal["nf4", "int8"] | None = None
    """Keep the linear weights of the layers, which are not trained, in 4 bits (nf4, with double
    quantization: QLoRA) or 8 bits (int8), by torchao. Default: as they are."""
    modules_to_save: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Modules that are trained whole and saved beside the adapter, such as lm_head. Default: new
    heads of classification and regression."""

    def make(self) -> Lora | None:
        """What is said of the adapter; None: there is none."""
        return Lora(**self.model_dump(exclude={"enabled", "base"})) if self.enabled else None


class PreferenceSettings(Section):
    """The loss of dpo, orpo, simpo, kto and reward; docs/preferences.md has the formulas."""

    beta: Annotated[float | None, Field(gt=0)] = None
    """How much a log-probability counts. Default: dpo, kto 0.1, simpo 2."""
    loss: Literal["sigmoid", "ipo", "hinge"] | None = None
    """Kind of dpo's loss. Default: sigmoid."""
    label_smoothing: Annotated[float | None, Field(ge=0, lt=0.5)] = None
    """dpo, simpo: share of pairs that are thought to be the wrong way round. Default: 0."""
    reference_free: bool | None = None
    """dpo: compare with a reference that gives all completions the same. Default: false."""
    gamma: float | None = None
    """simpo: by how much the better one must be better. Default: 1."""
    odds_ratio_weight: Amount | None = None
    """orpo: lambda, what the odds ratio counts beside learning the chosen. Default: 0.1."""
    desirable_weight: Amount | None = None
    """kto: what desirable completions count. Default: 1."""
    undesirable_weight: Amount | None = None
    """kto: what the others count. Default: 1."""
    center_rewards: Amount | None = None
    """reward: weight of the square of a pair's sum, which keeps scores around 0. Default: 0."""


class GrpoSettings(Section):
    """How grpo learns from rewards of completions that the model itself has made."""

    rewards: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Functions of Python that give rewards, as FILE.py:FUNCTION; see docs/preferences.md."""
    reward_weights: Annotated[tuple[float, ...] | None, Field(strict=False)] = None
    """What each reward counts. Default: 1 each."""
    num_generations: Annotated[int, Field(ge=2)] = 8
    """Completions of a prompt, which are compared with each other."""
    max_new_tokens: Positive = 256
    """Most tokens of a completion; of [training] length, prompts have what is left."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """How freely tokens are drawn; log-probabilities are those of what is drawn from."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw among the likeliest tokens that have this probability together."""
    generated_at_once: Positive | None = None
    """Completions that are generated together, where the device has no room for all of a step."""
    num_iterations: Positive = 1
    """Steps that are made with the same completions."""
    epsilon: Amount = 0.2
    """By how much a step may change a token's probability, as a share, before it is clipped."""
    epsilon_high: Amount | None = None
    """The same upwards. Default: as epsilon."""
    beta: Amount = 0.0
    """Weight of the distance from the model that training began with; 0: it is not needed. Else
    it gets half of device_memory, and host memory of its own: 2 bytes a parameter."""
    unbiased_distance: bool = True
    """Multiply that distance by the ratio of probabilities, which makes its gradient unbiased."""
    loss: Literal["grpo", "bnpo", "dr_grpo"] = "bnpo"
    """Mean of a batch's tokens: of completions one by one (grpo), of all (bnpo; TRL calls it dapo),
    or their sum by max_new_tokens of each completion (dr_grpo)."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """By whose standard deviation advantages are divided."""


class GroupSettings(Section):
    """Settings of the optimizer for some parameters."""

    parameters: Annotated[str, AfterValidator(_pattern)]
    learning_rate: Amount | None = None
    weight_decay: Amount | None = None


class OptimizerSettings(Section):
    """How weights are updated. Every optimizer takes some of these, under torch's names."""

    name: Literal["adamw", "adamw-8bit", "adafactor", "lion", "muon", "schedule-free", "sgd"] = (
        "adamw"
    )
    """adamw, adamw-8bit (moments in 8 bits), adafactor (2 bytes a parameter), lion, muon (for
    matrices of layers, with adamw for the rest), schedule-free (adamw whose weights are averaged
    instead of a schedule; their mean is evaluated and exported) or sgd."""
    learning_rate: Amount = 2e-5
    """At the top of the schedule. Default: 2e-5; lion 5e-6, adafactor and sgd 1e-3. Usual with
    [lora]: 1e-4 to 2e-4."""
    weight_decay: Amount = 0.01
    """Default: 0.01 with adamw, 0.1 with muon, else 0."""
    decay_biases_and_norms: bool = False
    """Whether weight decay is for biases and norms too, all that is not a matrix."""
    groups: Annotated[tuple[GroupSettings, ...], Field(strict=False)] = ()
    """Other settings for some parameters, the first that is for one: a list of tables such as
    {parameters = "embed_tokens|lm_head", learning_rate = 1e-6, weight_decay = 0.0}, where
    parameters is a regular expression that is searched for in their names."""
    betas: Pair | None = None
    """adamw, schedule-free, and muon for what is no matrix of a layer [0.9, 0.999]; lion
    [0.9, 0.99]."""
    eps: Amount | Pair | None = None
    """adamw and schedule-free 1e-8, adafactor [1.2e-7, 1e-3]."""
    momentum: Amount | None = None
    """sgd 0, muon 0.95."""
    dampening: float | None = None
    """sgd 0."""
    nesterov: bool | None = None
    """sgd false, muon true."""
    ns_steps: Positive | None = None
    """muon 5: iterations that bring a momentum near an orthogonal matrix."""
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None
    """muon match_rms_adamw: its steps are as large as those of adamw, and so are learning rates; or
    original, for rates of about 0.02."""
    others_learning_rate: Amount | None = None
    """muon: that of embeddings, heads, norms and biases. Default: learning_rate."""
    warmup_steps: Natural | None = None
    """schedule-free 0: steps in which its learning rate rises. It takes no [schedule]."""
    beta2_decay: Annotated[float, Field(le=0)] | None = None
    """adafactor -0.8."""
    d: Annotated[float, Field(ge=1)] | None = None
    """adafactor 1.0: how large a tensor's update may get."""

    @property
    def averages(self) -> bool:
        """Whether the result of training is a mean of weights."""
        return self.name == "schedule-free"

    def make(self) -> Optimizer:
        """The optimizer that these settings describe.

        Raises:
            ValueError: they exclude each other.
        """
        taken = taken_by(self.name)
        apart = {"name", "decay_biases_and_norms", "groups"}
        own = self.model_dump(exclude_none=True, exclude=apart)
        for key, value in own.items():
            if key not in taken:
                raise ValueError(f"{key} is not for {self.name}. Expected {', '.join(taken)}.")
            if isinstance(value, tuple) != isinstance(taken[key], tuple):
                raise ValueError(f"{key} = {value}. Expected the like of {taken[key]}.")
        groups = None if self.decay_biases_and_norms else without_decay
        if self.groups:
            groups = self.group_of
        if self.name == "muon":
            others = {"lr": own.pop("others_learning_rate", self.learning_rate)}
            others |= {key: own.pop(key) for key in ("betas",) if key in own}
            own["others"] = AdamW(**others, weight_decay=self.weight_decay)
        return OPTIMIZERS[self.name](lr=own.pop("learning_rate"), **own, groups=groups)

    def group_of(self, name: str, parameter: nn.Parameter) -> Mapping[str, Any] | None:
        """What is otherwise for a parameter; None: nothing."""
        found = {} if self.decay_biases_and_norms else dict(without_decay(name, parameter) or {})
        for group in self.groups:
            if re.search(group.parameters, name):
                given = {"lr": group.learning_rate, "weight_decay": group.weight_decay}
                found |= {key: value for key, value in given.items() if value is not None}
                break
        return found or None


class ScheduleSettings(Section):
    """The learning rate over the run: a pure function of the step."""

    shape: Literal[
        "constant",
        "linear",
        "cosine",
        "polynomial",
        "inverse_sqrt",
        "cosine_with_restarts",
        "warmup_stable_decay",
        "constant_with_warmup",
        "cosine_with_min_lr",
    ] = "cosine"
    """Shape of the learning-rate schedule after the warm-up, by the names of transformers. The last
    two are constant and cosine, which have a warm-up and a minimum_ratio here."""
    warm_up_steps: Natural | None = None
    """Steps in which it rises evenly to its top, instead of warm_up_share."""
    warm_up_share: Share | None = None
    """Share of the run in which it rises. Default: 0.03."""
    minimum_ratio: Share = 0.0
    """Share of the top that it ends with, but constant and inverse_sqrt."""
    power: Annotated[float, Field(gt=0)] = 1.0
    """Of polynomial."""
    cycles: Positive = 1
    """Of cosine_with_restarts: how often it begins at its top."""
    decay_share: Share = 0.1
    """Of warmup_stable_decay: share of the run in which it falls, at the end."""

    def rise(self, total: int) -> int:
        """Steps of the warm-up, of so many."""
        share = round((self.warm_up_share or 0.0) * total)
        return min(total, share if self.warm_up_steps is None else self.warm_up_steps)

    def factor(self, step: int, *, total: int) -> float:
        """What the learning rate is multiplied with in a step; the first is 0."""
        rise = self.rise(total)
        if step < rise:
            return (step + 1) / rise
        if self.shape.startswith("constant"):
            return 1.0
        if self.shape == "inverse_sqrt":
            scale = rise or INVERSE_SQRT_STEPS
            return math.sqrt(scale / (step - rise + scale))
        begin = rise
        if self.shape == "warmup_stable_decay":
            begin = max(rise, total - round(self.decay_share * total))
        done = min(1.0, max(0, step - begin) / max(1, total - begin))
        return self.minimum_ratio + (1.0 - self.minimum_ratio) * self._left(done)

    def _left(self, done: float) -> float:
        """From 1 to 0, when this share of the way down is done."""
        if self.shape in ("linear", "polynomial"):
            return float((1.0 - done) ** (self.power if self.shape == "polynomial" else 1.0))
        if self.shape == "cosine_with_restarts" and done < 1.0:
            return _half_wave(self.cycles * done % 1.0)
        return _half_wave(done)


def _half_wave(done: float) -> float:
    """From 1 to 0 as a cosine does."""
    return 0.5 * (1.0 + math.cos(math.pi * done))


class MemorySettings(Section):
    """How much may be taken."""

    device_memory: Annotated[Size | None, SAME_RESULT] = None
    """Of the device, such as 8GiB. Default: 90% of what is free."""
    host_memory: Annotated[Size | None, SAME_RESULT] = None
    """Of the host, such as 100GiB. Default: 95% of what is free."""
    disk: Annotated[Folder | None, SAME_RESULT] = None
    """Folder on a fast drive, for what host memory has no room for."""
    disk_size: Annotated[Size | None, SAME_RESULT] = None
    """The most that is taken of that drive, such as 2TB. Default: what is free."""
    disk_rates: Annotated[str | None, SAME_RESULT] = None
    """At which it reads and writes for hours, such as 6.5/1.5GB/s. Default: measured."""

    def make_disk(self) -> Disk | None:
        """The disk, if there is one."""
        if self.disk is None:
            return None
        return Disk(self.disk, size=self.disk_size, rates=self.disk_rates)


class EvaluationSettings(Section):
    """When the model is evaluated, if there is data for it: also first and last."""

    every_steps: Annotated[Natural | None, SAME_RESULT] = None
    """Steps between evaluations; 0: only at both ends of the run. Default: a tenth of the run."""
    rows: Annotated[Positive | None, SAME_RESULT] = None
    """Rows of a batch. Default: as in training."""
    most_batches: Annotated[Positive | None, SAME_RESULT] = None
    """Evaluate only on the first so many batches. Default: on all."""
    patience: Positive | None = None
    """End the run after so many evaluations in a row that are no better than the best one."""
    least_gain: Amount | None = None
    """By how much an evaluation must be better to count as better. Default: 0."""
    metric: str | None = None
    """What better means, for patience and [checkpoint] best, such as loss or f1. Default: accuracy
    of classification, pearson of regression, reward of grpo, rewards/accuracies of reward, else
    loss. Of loss and perplexity less is better."""
    answer_marker: Annotated[str | None, SAME_RESULT] = None
    """instruct: also answer the prompts, and count answers that are exactly right after this text,
    such as "####"; "": as a whole."""
    max_new_tokens: Annotated[Positive | None, SAME_RESULT] = None
    """Most tokens of such an answer. Default: 256."""


class SampleSettings(Section):
    """What the model says to some prompts, from time to time: in samples.jsonl and shown."""

    prompts: Annotated[tuple[str, ...], Field(strict=False), SAME_RESULT] = ()
    """Texts to go on with."""
    every_steps: Annotated[Natural, SAME_RESULT] = 100
    """Steps between samples; 0: only at both ends of the run."""
    max_new_tokens: Annotated[Positive, SAME_RESULT] = 64
    """Most tokens of a sample."""
    temperature: Annotated[Amount, SAME_RESULT] = 0.0
    """How freely tokens are drawn; 0: the likeliest is taken."""
    top_p: Annotated[float, Field(gt=0, le=1), SAME_RESULT] = 1.0
    """Draw among the likeliest tokens that have this probability together."""
    chat: Annotated[bool | None, SAME_RESULT] = None
    """Put prompts into the chat template, as a user's. Default: with instruct."""


class CheckpointSettings(Section):
    """When the run is saved: in the background, and at the end."""

    every_steps: Annotated[Natural, SAME_RESULT] = 200
    """Steps between checkpoints; 0: only at the end."""
    every_minutes: Annotated[float | None, Field(gt=0), SAME_RESULT] = None
    """Also save when so much time has passed since the last checkpoint."""
    keep: Annotated[Positive, SAME_RESULT] = 2
    """Checkpoints that are kept."""
    best: bool = False
    """Also save whenever an evaluation is the best so far, keep that, and export its model at the
    end instead of the last one."""


class OutputSettings(Section):
    """What is left behind, and what is shown."""

    folder: Annotated[Folder, SAME_RESULT]
    """The run folder: settings, metrics, checkpoints, the trained model. A run goes on from its
    checkpoint there. Default: runs/ and the name of the TOML file, or of model and data."""
    export: Annotated[bool, SAME_RESULT] = True
    """Write the trained model to the run folder's model/, for from_pretrained; of [lora] the
    adapter, in peft's format (l2l export --merge writes the whole model)."""
    export_dtype: Annotated[Literal["bfloat16", "float32"] | None, SAME_RESULT] = None
    """Of the exported weights. Default: bfloat16; float32 with that precision, or with [lora]."""
    tensorboard: Annotated[bool, SAME_RESULT] = True
    """Write TensorBoard events too, if tensorboard is installed."""
    every_steps: Annotated[Positive, SAME_RESULT] = 10
    """Steps between two lines of progress, where there is no terminal."""


def taken_by(optimizer: str) -> dict[str, Any]:
    """The settings that an optimizer takes, with its defaults."""
    own = OPTIMIZERS[optimizer]().defaults | {"learning_rate": LEARNING_RATES[optimizer]}
    del own["lr"]
    if optimizer == "muon":
        own |= {"adjust_lr_fn": "match_rms_adamw", "betas": AdamW().betas}
        own["others_learning_rate"] = own["learning_rate"]
        own = {key: one for key, one in own.items() if key in OptimizerSettings.model_fields}
        del own["eps"]
    return own | ({"eps": (2.0**-23, 1e-3)} if optimizer == "adafactor" else {})


def without_decay(name: str, parameter: nn.Parameter) -> Mapping[str, Any] | None:
    """Biases and the weights of norms have no weight decay: whatever is not a matrix."""
    del name
    return {"weight_decay": 0.0} if parameter.dim() < 2 else None
