"""What a run is made of before it has an engine: its data in batches, its model without weights."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from l2l.engine import Engine
from l2l.hugging_face import (
    ADAPTED,
    RandomInit,
    base_of,
    class_names,
    empty_model,
    read_json,
    sees_what_follows,
    tokenizer_of,
    with_lora,
)
from l2l.model import IGNORED, TokenLoss
from l2l.train.data import PLAIN_TEMPLATE, Batches, Examples, KeptExamples, padded_length
from l2l.train.display import near
from l2l.train.folder import TrainingError
from l2l.train.generating import Speaker
from l2l.train.settings import CHATS, LANGUAGE_TASKS, GrpoSettings, Settings
from l2l.train.tasks import KINDS

KEPT = KeptExamples.of_user()
NUM_EVALUATIONS = 10  # in a run, if nothing else is said
SAMPLE_CHARACTERS = 600
SHAPES_OF_LORA = {"rank", "targets", "dora", "modules_to_save"}  # what decides its weights
POSITIONS = ("position_embeddings", "position_embedding", "wpe", "embed_positions")
VOLATILE = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")  # of a config.json


def make_tokenizer(settings: Settings) -> Any:
    """The model's tokenizer, with the chat template that is trained with.

    Raises:
        ValueError: the folder has none.
    """
    data, tokenizer = settings.data, tokenizer_of(settings.model.folder)
    if data.task in CHATS and (data.template or not tokenizer.chat_template):
        tokenizer.chat_template = data.template or PLAIN_TEMPLATE
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        tokenizer.pad_token = tokenizer.eos_token  # what rows are filled with, also by others
    return tokenizer


def make_model(
    settings: Settings, *, tokenizer: Any, num_labels: int | None, label_names: Sequence[str]
) -> nn.Module:
    """The model, on the meta device.

    Raises:
        ValueError: transformers makes none of the folder, or peft no adapter of it.
    """
    folder, task = settings.model.folder, KINDS[settings.data.task].head
    if task == "causal":
        model = empty_model(folder)
        if sees_what_follows(model):
            raise TrainingError(
                f"{type(model).__name__} lets each token see those that follow it, so it cannot "
                f"learn to predict them, as {settings.data.task} would. Expected --task masked, "
                "classification or another task for such models; or a model that writes texts."
            )
    elif task == "masked":
        model = empty_model(folder, task=task)
    else:
        model = empty_model(folder, task=task, num_labels=num_labels)
        config: Any = model.config
        config.pad_token_id = pad_id_of(tokenizer)  # decoders find the last token of a row by it
        if label_names:
            config.id2label = dict(enumerate(label_names))
            config.label2id = {name: number for number, name in enumerate(label_names)}
    if settings.grpo.temperature != 1.0:
        head: Any = model
        head.get_output_embeddings().register_forward_hook(partial(_cooled, settings.grpo))
    lora = settings.lora.make()
    return model if lora is None else with_lora(model, lora, task=task)


def _cooled(settings: GrpoSettings, module: nn.Module, given: Any, logits: Tensor) -> Tensor:
    """Let all that is made of logits, draws and log-probabilities, be at a temperature."""
    del module, given
    return logits / settings.temperature


def pad_id_of(tokenizer: Any) -> int:
    """A token to fill rows up with."""
    offers = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(int(number) for number in offers if number is not None)


def engine_options(settings: Settings) -> dict[str, Any]:
    """What the settings say of an engine, and of the plan that it would make."""
    training, memory, layers = settings.training, settings.memory, settings.model.layer_list
    if layers is not None and settings.lora.enabled:
        layers = f"{ADAPTED}{layers}"
    return {
        "optimizer": settings.optimizer.make(),
        "device_memory": memory.device_memory,
        "host_memory": memory.host_memory,
        "disk": memory.make_disk(),
        "microbatch_size": training.microbatch_size,
        "precision": training.precision,
        "base": settings.lora.base if settings.lora.enabled else None,
        "clip_norm": training.clip_norm or None,
        "layers": layers,
    }


def weight_options(settings: Settings) -> dict[str, Any]:
    """What the settings say of an engine besides: where its weights come from, and go."""
    training, model = settings.training, settings.model
    return {
        "weights": RandomInit(training.seed) if model.random_init else model.folder,
        "allow_missing_weights": model.allow_missing_weights,
        "device": training.device,
        "compile": training.compile,
        "seed": training.seed,
    }


@final
class Prepared:
    """Tokenizer, examples, batches and model, as the settings say."""

    def __init__(self, settings: Settings, *, tell: Callable[[str], None] = lambda _: None) -> None:
        """Read the data and make the model, without weights; `tell` is told how far that is.

        Raises:
            ValueError: they are not as the settings say.
        """
        self.settings = settings
        self._tell = tell
        self.tokenizer = make_tokenizer(settings)
        self._pad_id = pad_id_of(self.tokenizer)
        self.examples, self.held_out = self._read()
        self.model = make_model(
            settings,
            tokenizer=self.tokenizer,
            num_labels=self.examples.num_labels,
            label_names=self.examples.label_names,
        )
        self._check_vocabulary()
        self._check_positions()
        self._check_groups()
        parameters = [*self.model.parameters()]
        self.num_parameters = sum(one.numel() for one in parameters)
        self.num_trained = sum(one.numel() for one in parameters if one.requires_grad)
        self.num_exported = self.num_trained if settings.lora.enabled else self.num_parameters
        self.packing_is_asked = settings.data.packing is not None
        may_pack = settings.data.task in LANGUAGE_TASKS
        self.make_batches(packing=settings.data.packing if self.packing_is_asked else may_pack)

    def make_batches(self, *, packing: bool | None) -> None:
        """Lay the examples out in rows, anew if they were before; the settings say so too."""
        data = self.settings.data.model_copy(update={"packing": bool(packing)})
        self.settings = self.settings.model_copy(update={"data": data})
        training = self.settings.training
        self.batches = self.batches_of(self.examples, training.rows)
        once = self.batches.num_steps(training.epochs or 1.0)
        self.num_steps = training.steps or once * self.settings.grpo.num_iterations

    @cached_property
    def evaluation_batches(self) -> Batches:
        """Of what is held out."""
        assert self.held_out is not None
        rows = self.settings.evaluation.rows or self.settings.training.rows
        return self.batches_of(self.held_out, rows)

    def reference_engine(self, loss: TokenLoss, *, beside: Engine | None = None) -> Engine:
        """The model that training begins with, frozen, without what an adapter would add.

        It uses the device memory of the engine `beside` it, in turns with that.

        Raises:
            ValueError: it cannot be made, or does not fit.
        """
        settings = self.settings
        model: Any = make_model(settings, tokenizer=self.tokenizer, num_labels=None, label_names=())
        if settings.lora.enabled:
            model.base_model.disable_adapter_layers()
        options = engine_options(settings)
        del options["optimizer"], options["clip_norm"]
        options["device_memory"] = beside or options["device_memory"]
        frozen = model.requires_grad_(requires_grad=False)
        return Engine(frozen, loss=loss, **weight_options(settings), **options)

    def add_references(self, training: Tensor, evaluation: Tensor | None) -> None:
        """Let batches have the log-probabilities that a reference model gives their rows."""
        self.identity  # noqa: B018 (of the data as they are)
        self.examples = self.examples.with_numbers(reference=training)
        if self.held_out is not None and evaluation is not None:
            self.held_out = self.held_out.with_numbers(reference=evaluation)
        self.make_batches(packing=False)
        self.__dict__.pop("evaluation_batches", None)

    def result_of(self, engine: Engine) -> contextlib.AbstractContextManager[None]:
        """Inside the block, the engine has the weights that are the result of training so far."""
        return engine.averaged() if self.settings.optimizer.averages else contextlib.nullcontext()

    @cached_property
    def speaker(self) -> Speaker:
        """What completes prompts with the model."""
        model: Any = base_of(self.model)
        ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        known = {*(ends if isinstance(ends, list) else [ends]), self.tokenizer.eos_token_id}
        heat = self.settings.grpo.temperature
        return Speaker(self.tokenizer, self._pad_id, frozenset(known - {None}), heat)

    def is_saved_after(self, step: int) -> bool:
        """Whether a checkpoint is due."""
        every = self.settings.checkpoint.every_steps
        return step == self.num_steps or bool(every and step % every == 0)

    def num_saves_from(self, step: int) -> int:
        """Checkpoints that are due after a step and those that follow it."""
        steps = range(step, self.num_steps + 1)
        best = self.settings.checkpoint.best
        return sum(self.is_saved_after(n) or (best and self.is_evaluated_after(n)) for n in steps)

    def is_evaluated_after(self, step: int) -> bool:
        """Whether an evaluation is due, if there is something to evaluate on."""
        every = self.settings.evaluation.every_steps
        every = max(1, self.num_steps // NUM_EVALUATIONS) if every is None else every
        due = step in (0, self.num_steps) or bool(every and step % every == 0)
        return self.held_out is not None and due

    @cached_property
    def identity(self) -> dict[str, str]:
        """What must not change in a run, and where it came from."""
        folder = self.settings.model.folder
        shape = {k: v for k, v in read_json(folder / "config.json").items() if k not in VOLATILE}
        if self.settings.lora.enabled:
            shape["lora"] = self.settings.lora.model_dump(include=SHAPES_OF_LORA)
            if self.settings.lora.base is not None:
                shape["base"] = self.settings.lora.base
        return {
            "model": hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:16],
            "model_source": str(folder),
            "data": self.examples.fingerprint(),
            "data_source": ", ".join(self.settings.data.source),
        }

    def extra(self) -> dict[str, Any]:
        """What is saved with every checkpoint."""
        return {
            "settings": self.settings.table(),
            "num_steps": self.num_steps,
            "num_labels": self.examples.num_labels,
            "label_names": list(self.examples.label_names),
            **self.identity,
        }

    def summary(self) -> list[str]:
        """Model and data, a line each."""
        data, examples = self.settings.data, self.examples
        is_part = self.num_trained != self.num_parameters
        trained = f", {self.num_trained:,} of them trained" if is_part else ""
        kind = type(base_of(self.model)).__name__
        sources = ", ".join(Path(one).name for one in data.source)
        unused = examples.told_unused().removeprefix("; ")
        unused = f" (columns {', '.join(examples.columns.values())}; {unused})" if unused else ""
        held = f", {self.held_out.num_groups:,} to evaluate on" if self.held_out else ""
        epochs, folder = self.num_steps / self.steps_an_epoch, self.settings.model.folder
        return [
            f"model:  {kind}, {self.num_parameters:,} parameters{trained}, {near(folder)}",
            f"data:   {sources}{unused}, {data.task}: {examples.num_groups:,} "
            f"{'pairs' if examples.group > 1 else 'examples'}, {examples.ids.numel():,} tokens"
            f"{held}; {self.batches.rows} rows a step, {self.batches.padding:.0%} padding; "
            f"{self.num_steps:,} steps, {epochs:,.3g} epochs",
        ]

    @property
    def steps_an_epoch(self) -> float:
        """Steps in which all rows come once."""
        iterations = self.settings.grpo.num_iterations
        return self.batches.num_rows / self.batches.rows * iterations

    def notes(self) -> list[str]:
        """What should be known before the first step."""
        found, length, config = [], self.settings.training.length, self._config
        most = getattr(config.get_text_config(), "max_position_embeddings", None)
        if isinstance(most, int) and length > most:
            found.append(
                f"note: rows of {length} tokens, but the model is made for {most}: --length {most} "
                "keeps within that"
            )
        found += self._absent_classes()
        rise = self.settings.schedule.warm_up_steps
        if rise is not None and rise > self.num_steps:
            found.append(
                f"note: [schedule] warm_up_steps = {rise}, but the run has {self.num_steps} steps: "
                "the learning rate rises in all of them. Expected fewer, or warm_up_share"
            )
        if self.tokenizer.pad_token_id is None:
            found.append(
                "note: the tokenizer has no padding token, nor one that ends texts: rows are "
                f"filled with token {self._pad_id}, and the exported tokenizer cannot fill rows. "
                "Name one in tokenizer_config.json: pad_token"
            )
        return found

    def _absent_classes(self) -> list[str]:
        """A note about classes that no example has, but that the model knows."""
        examples = self.examples
        there = examples.targets if examples.token_targets is None else examples.token_targets
        if there is None or not examples.label_names:
            return []
        numbers = there.nonzero()[:, 1] if there.dim() == 2 else there
        seen = {*torch.unique(numbers).tolist()}
        absent = [repr(name) for n, name in enumerate(examples.label_names) if n not in seen]
        if not absent:
            return []
        return [
            f"note: no example has the model's classes {', '.join(absent)}; its head keeps them"
        ]

    @property
    def _config(self) -> Any:
        model: Any = self.model
        return model.config

    def described(self) -> str:
        """Model, data and steps, for people."""
        settings, kind = self.settings, type(base_of(self.model)).__name__
        lines = [f"model: {kind}, {self.num_parameters:,} parameters, {settings.model.folder}"]
        if settings.lora.enabled:
            base = settings.lora.base
            beside = "" if base is None else f", beside linear weights in {base}"
            lines += [f"adapter: {self.num_trained:,} of them are trained{beside}"]
        lines += [f"data: {', '.join(settings.data.source)}", str(self.examples)]
        if self.held_out is not None:
            lines.append(f"evaluation: {self.held_out.num_groups:,} examples")
        if self.tokenizer.init_kwargs.get("pad_token") is None and self.tokenizer.pad_token:
            filler = self.tokenizer.pad_token
            lines.append(f"rows are filled with {filler}: the tokenizer has no padding token")
        return "\n".join([*lines, self.described_rows()])

    def described_rows(self) -> str:
        """How the examples lie in rows, and how many steps that makes."""
        return f"{self.batches}\n{self.num_steps:,} steps"

    def sample(self) -> str:
        """The first row of the first batch, as text."""
        batch = self.batches.batch(0)
        ids, labels = batch["input_ids"][0], batch["labels"]
        if "attention_mask" in batch:
            ids = ids[batch["attention_mask"][0].bool()]
        shape = " x ".join(str(size) for size in batch["input_ids"].shape)
        lines = [f"batch of step 1: {shape} tokens, {', '.join(batch)}", "its first row:"]
        lines.append(_shortened(self.tokenizer.decode(ids)))
        if self.examples.records:
            return "\n".join(lines)
        if labels.dim() == 1 or labels.is_floating_point():
            return "\n".join([*lines, f"label: {labels[0].tolist()}"])
        if self.examples.token_targets is not None:
            told = f"labels: {labels[0][labels[0] != IGNORED].tolist()}"
            return "\n".join([*lines, _shortened(told)])
        if self.settings.data.task == "masked":
            share = self.settings.data.masked_share
            return "\n".join([*lines, f"of which {share:.0%} are hidden, and learnt"])
        learnt = labels[0][labels[0] != IGNORED]
        lines.append(f"of which is learnt ({learnt.numel()} tokens):")
        return "\n".join([*lines, _shortened(self.tokenizer.decode(learnt))])

    def widest_batch(self) -> dict[str, Tensor]:
        """The first batch, filled up to the length of the longest row of all.

        A plan that is made for it holds for every batch, so no choice changes during a run.
        """
        sets = (self.examples, self.held_out or self.examples)
        longest = max(int(examples.lengths.max()) for examples in sets)
        width = min(self.settings.training.length, padded_length(longest))
        fill, batch = {"input_ids": self._pad_id, "labels": IGNORED}, self.batches.batch(0)
        for name, value in batch.items():
            if value.dim() == 2 and not value.is_floating_point():
                missing = (0, max(0, width - value.shape[1]))
                batch[name] = nn.functional.pad(value, missing, value=fill.get(name, 0))
        return batch

    def _read(self) -> tuple[Examples, Examples | None]:
        settings, data = self.settings, self.settings.data
        make = partial(
            KEPT.make,
            documents=data.documents,
            model_folder=settings.model.folder,
            tokenizer=self.tokenizer,
            form=settings.form(),
            tell=self._tell,
        )
        examples = make(data.source)
        examples = examples.numbered_as(class_names(settings.model.folder))
        if data.hold_out is not None:
            number = data.hold_out
            if number < 1:
                number = max(1, round(number * examples.num_groups))
            return examples.hold_out(int(number), seed=settings.training.seed)
        if data.evaluation_source is None:
            return examples, None
        return examples, make(data.evaluation_source, like=examples)

    def _check_vocabulary(self) -> None:
        model: Any = self.model
        size = model.get_input_embeddings().num_embeddings
        sets = [one for one in (self.examples, self.held_out) if one is not None and len(one)]
        most = max(self._pad_id, *(int(one.ids.max()) for one in sets))
        if most >= size:
            raise TrainingError(
                f"the tokenizer in {self.settings.model.folder} (tokenizer.json or the like) makes "
                f"token {most}, but the model has {size} embeddings (vocab_size in config.json). "
                "Expected a tokenizer that belongs to the model: is the folder complete?"
            )

    def _check_positions(self) -> None:
        sets = [one for one in (self.examples, self.held_out) if one is not None and len(one)]
        width = min(self.settings.training.length, max(int(one.lengths.max()) for one in sets))
        for name, module in self.model.named_modules():
            if name.rpartition(".")[2] not in POSITIONS or not isinstance(module, nn.Embedding):
                continue
            padding = module.padding_idx
            before = getattr(module, "offset", 0 if padding is None else padding + 1)
            most = module.num_embeddings - before
            if width > most:
                raise TrainingError(
                    f"rows have up to {width} tokens, but {type(base_of(self.model)).__name__} has "
                    f"learnt positions for {most} ({name}). Expected --length {most} or less: "
                    "longer texts are cut."
                )

    def _check_groups(self) -> None:
        names = [name for name, one in self.model.named_parameters() if one.requires_grad]
        for group in self.settings.optimizer.groups:
            if not any(re.search(group.parameters, name) for name in names):
                raise TrainingError(
                    f"[optimizer] groups: {group.parameters!r} is in the name of no parameter that "
                    f"is trained. They are called {', '.join(names[:4])}, ..."
                )

    def batches_of(self, examples: Examples, rows: int | None = None) -> Batches:
        """Batches of so many rows; None: as in training."""
        return Batches(
            examples,
            pad_id=self._pad_id,
            rows=rows or self.settings.training.rows,
            length=self.settings.training.length,
            packing=bool(self.settings.data.packing),
            seed=self.settings.training.seed,
        )


def _shortened(text: str) -> str:
    text = text if len(text) <= SAMPLE_CHARACTERS else f"{text[:SAMPLE_CHARACTERS]} ..."
    return "\n".join(f"  {line}" for line in text.splitlines())
