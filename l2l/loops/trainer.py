"""Trainers of transformers and TRL whose model is in an engine.

`streamed(trl.SFTTrainer)` is a subclass with the same arguments and one more, `l2l`: settings of
the engine. The trainer's own code is what runs; this is what changes:

    model placed on the device   it is not
    create_optimizer             an engine is made of the model; its optimizer is the trainer's
    training_step                where the loss is the model's own, the microbatches of a step are
                                 handed to `engine.step` together; else the loss goes backward
                                 through the model, as in any loop
    clipping, gradient norm      the engine's, where it makes whole steps
    evaluation, generation       `engine.evaluate`, `predict` and `generate`
    optimizer state on the disk  a checkpoint of the engine, in a folder beside the trainer's files
    reference model (TRL)        in an engine of its own, frozen

[Note: the same loss] A trainer adds up the losses of microbatches, each divided by the targets of
all of them; a step of the engine takes the mean over the targets of all microbatches. For causal
models these are the same number. Other models may ignore what they are to divide by: with several
microbatches in a step these go through the model one by one. The loss of routers, which a trainer
adds for every microbatch, is no mean over targets: several microbatches are refused.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import logging
import math
import shutil
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from l2l.engine import Engine
from l2l.loops.adapters import refuse_copies, with_switch
from l2l.loops.arguments import adapt, engine_settings, keep_on_host
from l2l.loops.optimizers import BY_TORCH, by_name, drive, unscheduled
from l2l.run import StepReport

logger = logging.getLogger("l2l")

FOLDER = "l2l"  # of the engine, in a checkpoint of the trainer
ELSEWHERE = {"param_groups": [], "state": {}, "l2l": f"optimizer state is in the folder {FOLDER}"}
OF_REFERENCE = frozenset(
    [
        "device",
        "device_memory",
        "host_memory",
        "precision",
        "layers",
        "microbatch_size",
        "compile",
        "seed",
        "prove",
        "execution",
    ]
)
"""Settings that the engine of a reference model gets too."""
SAVE = "save_pretrained"
REPLACED = (
    "create_accelerator_and_postprocess",
    "_build_accelerator_args",
    "_move_model_to_device",
    "create_optimizer",
    "_inner_training_loop",
    "training_step",
    "_clip_grad_norm",
    "_get_grad_norm",
    "_maybe_log_save_evaluate",
    "evaluation_loop",
    "prediction_step",
    "_save",
    "_save_optimizer_and_scheduler",
    "_load_optimizer_and_scheduler",
    "_load_from_checkpoint",
    "_load_best_model",
)
"""The trainer's methods that ours come before; without one of them it would go on without us."""
TRAINER, SFT_TRAINER = "transformers.trainer", "trl.trainer.sft_trainer"


@functools.cache
def streamed(trainer: type[Any]) -> type[Any]:
    """A trainer of transformers, or of TRL, whose model is streamed layer by layer.

    It takes what `trainer` takes, and `l2l`: a dict of settings of `l2l.Engine`, such as
    `device_memory`, and `token_metrics`: whether TRL's SFTTrainer shall log entropy and accuracy
    of tokens (default), or make whole steps without them, which is faster.
    """
    transformers = importlib.import_module("transformers")
    if not issubclass(trainer, transformers.Trainer):
        raise ValueError(
            f"streamed() got {trainer!r}. Expected transformers.Trainer or a class made of it, "
            "such as trl.SFTTrainer."
        )
    if missing := [name for name in REPLACED if not hasattr(transformers.Trainer, name)]:
        raise ValueError(
            f"transformers {transformers.__version__} has a Trainer without {missing}, which are "
            "replaced where a model is streamed. Expected a version like 5.22."
        )
    if issubclass(trainer, Streaming):
        return trainer
    members = {"__doc__": trainer.__doc__, "__module__": trainer.__module__, "_plain_kind": trainer}
    return type(f"Streamed{trainer.__name__}", (Streaming, trainer), members)


class Streaming:
    """What comes before a trainer's own methods."""

    _plain_kind: type[Any]  # the trainer's class
    _model_of_engine: nn.Module  # what the engine is of
    _is_whole: bool  # whether it makes whole steps

    def __init__(self, *args: Any, l2l: Mapping[str, Any] | None = None, **named: Any) -> None:
        """As the trainer; `l2l` as of `streamed`."""
        self._settings_of_engine = _checked(dict(l2l or {}))
        self._token_metrics = bool(self._settings_of_engine.pop("token_metrics", True))
        self.engine: Engine | None = None
        self._reference_engine: Engine | None = None
        self._undo_stack = contextlib.ExitStack()  # what the model has got
        self._waiting_microbatches: list[dict[str, Any]] = []
        self._last_report: StepReport | None = None
        by_name = isinstance(named.get("model", next(iter(args), None)), str)
        args = tuple(_adapted(one, by_name=by_name) for one in args)
        named = {name: _adapted(one, by_name=by_name) for name, one in named.items()}
        if _is_of_trl(self._plain_kind) and not any(map(_is_arguments, (*args, *named.values()))):
            raise ValueError(
                f"{self._plain_kind.__name__} got no args. Expected its config, such as "
                "args=trl.SFTConfig(...): without it TRL may load models to the device."
            )
        self._given_optimizers: tuple[Any, Any] = None, None
        self._plain_methods.__init__(*args, **named)

    @property
    def _plain_methods(self) -> Any:
        """The trainer's own methods."""
        return super()

    def close(self) -> None:
        """Give the weights back: the model is an ordinary one again, without optimizer state."""
        own: Any = self
        engines = [one for one in (self._reference_engine, self.engine) if one is not None]
        self.engine = self._reference_engine = None
        if not engines:
            return
        own.optimizer, own.lr_scheduler = self._given_optimizers
        self._undo_stack.close()
        for engine in engines:
            engine.close()

    # ----------------------------------------------------------------------------------------------
    # The model stays where it is

    def create_accelerator_and_postprocess(self) -> None:
        """Let nothing be placed, cast or compiled but by the engine."""
        own: Any = self
        adapt(own.args)
        own.args._n_gpu = min(1, own.args.n_gpu)
        self._plain_methods.create_accelerator_and_postprocess()
        own.accelerator.device_placement = False
        if own.accelerator.num_processes > 1:
            raise ValueError(
                f"found {own.accelerator.num_processes} processes. Expected one: a trainer whose "
                "model is streamed runs in one process. For many, use `l2l train` or engine.step."
            )

    def _build_accelerator_args(self, **more: Any) -> Any:
        return self._plain_methods._build_accelerator_args(**{**more, "mixed_precision": "no"})

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Layers come when they run."""

    # ----------------------------------------------------------------------------------------------
    # The engine

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make the engine, unless there is one, and let its optimizer be the trainer's."""
        own: Any = self
        if self.engine is not None and self._model_of_engine is not own.model:  # of another trial
            self.close()
        if self.engine is None:
            self._given_optimizers = own.optimizer, own.lr_scheduler
            try:
                self._open_engine()
            except BaseException:
                self.close()
                own.optimizer, own.lr_scheduler = self._given_optimizers
                raise
        found: torch.optim.Optimizer = own.optimizer
        return found

    def _open_engine(self) -> None:
        own: Any = self
        refuse_copies(own.model)
        scheduler, reason = own.lr_scheduler, _why_not_whole(own)
        if reason is not None and not _is_of_trl(self._plain_kind):
            _refuse_routers(own)
        self._is_whole = reason is None
        if reason is not None:
            logger.info("losses go backward through the model, batch by batch: %s.", reason)
        norm = own.args.max_grad_norm if self._is_whole else 0
        settings = {
            **engine_settings(own.args, own.model),
            "clip_norm": norm if norm and math.isfinite(norm) else None,
            **self._settings_of_engine,
            "optimizer": self._optimizer_of_engine(),
        }
        self._model_of_engine = own.model
        own.model._is_accelerate_prepared = True
        reference = getattr(self, "ref_model", None)
        if isinstance(reference, nn.Module):
            shared = {name: value for name, value in settings.items() if name in OF_REFERENCE}
            reference.requires_grad_(False)
            self._reference_engine = first = Engine(reference, **shared, autograd=True)
            settings["device_memory"] = first  # they use it in turns
        self.engine = Engine(own.model, **settings, autograd=not self._is_whole)
        self._undo_stack.callback(with_switch(own.model))
        if self._is_whole and hasattr(own.model, "generate"):
            own.model.__dict__["generate"] = self._generate_by_engine
            self._undo_stack.callback(own.model.__dict__.pop, "generate")
        elif not self._is_whole and (own.args.bf16 or own.args.fp16):
            self._undo_stack.callback(_let_outputs_be_float32(own.model))
        if scheduler is not None:
            drive(scheduler, self.engine.optimizer)
        face = importlib.import_module("accelerate.optimizer").AcceleratedOptimizer
        own.optimizer = face(self.engine.optimizer, device_placement=False)
        own.optimizer._is_accelerate_prepared = True
        if self._is_whole:  # `engine.step` has done it
            own.optimizer.step = types.MethodType(_nothing, own.optimizer)

    def _optimizer_of_engine(self) -> Any:
        """What the engine makes its optimizer of."""
        own: Any = self
        name = str(getattr(own.args.optim, "value", own.args.optim))
        is_given = own.optimizer is not None or own.optimizer_cls_and_kwargs is not None
        if (chosen := self._settings_of_engine.get("optimizer")) is not None:
            if is_given:
                raise ValueError(
                    "the trainer was given an optimizer, and l2l= another. Leave one of them out."
                )
            return chosen
        makers = ("create_optimizer", "get_optimizer_cls_and_kwargs")
        is_given |= any(_home(own, method) != TRAINER for method in makers)
        if is_given or name in BY_TORCH:
            made, own.optimizer = self._plain_methods.create_optimizer(), None
            return unscheduled(made)
        return by_name(own.args, own.get_decay_parameter_names(own.model))

    # ----------------------------------------------------------------------------------------------
    # Steps

    def _inner_training_loop(self, *args: Any, **named: Any) -> Any:
        self._waiting_microbatches = []  # of a loop that was stopped between them
        return self._plain_methods._inner_training_loop(*args, **named)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """A microbatch; with the last one of a step, the engine's step if it makes whole ones."""
        own: Any = self
        if not self._is_whole:
            found: Tensor = self._plain_methods.training_step(model, inputs, num_items_in_batch)
            return found
        assert self.engine is not None
        self._waiting_microbatches.append(dict(inputs))
        if not own.accelerator.sync_gradients:
            return torch.zeros((), device=own.args.device)
        batch, self._waiting_microbatches = _joined(self._waiting_microbatches), []
        self._last_report = report = self.engine.step(batch)
        if own.args.fp16:  # else a step is not waited for
            own.optimizer._is_overflow = report.skipped
        return torch.tensor(report.loss, device=own.args.device)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return None if self._is_whole else self._plain_methods._clip_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return (
            None
            if self._is_whole
            else self._plain_methods._get_grad_norm(model, grad_norm=grad_norm)
        )

    def _maybe_log_save_evaluate(
        self, tr_loss: Tensor, grad_norm: Any, *args: Any, **named: Any
    ) -> None:
        """The norm is waited for where it is logged."""
        own: Any = self
        if self._is_whole and own.control.should_log and self._last_report is not None:
            grad_norm = self._last_report.gradient_norm
        self._plain_methods._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **named)

    # ----------------------------------------------------------------------------------------------
    # Evaluation

    def evaluation_loop(self, *args: Any, **named: Any) -> Any:
        """In the engine, also where nothing was trained yet."""
        self.create_optimizer()
        return self._plain_methods.evaluation_loop(*args, **named)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,  # noqa: FBT001 (the trainer's)
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """A batch; where its loss is all that is asked for, without whole logits."""
        own: Any = self
        has_labels = bool(own.label_names) and all(name in inputs for name in own.label_names)
        is_plain = _home(own, "prediction_step") in (TRAINER, SFT_TRAINER)
        if self._is_whole and is_plain and prediction_loss_only and has_labels:
            assert self.engine is not None
            loss = self.engine.evaluate(dict(inputs))
            return torch.tensor(loss, device=own.args.device), None, None
        called: Any = self._predict_by_engine if self._is_whole else model
        return self._plain_methods.prediction_step(
            called, inputs, prediction_loss_only, ignore_keys
        )

    def _predict_by_engine(self, **batch: Any) -> Any:
        """What the model returns without gradients, where an engine makes whole steps."""
        own: Any = self
        assert self.engine is not None
        batch.pop("num_items_in_batch", None)  # there are no other batches
        found = self.engine.predict(_moved(batch, torch.device("cpu")))
        return _moved(found, own.args.device)

    def _generate_by_engine(self, *args: Any, **options: Any) -> Any:
        """The same of `model.generate`."""
        own: Any = self
        assert self.engine is not None
        return _moved(self.engine.generate(*args, **options), own.args.device)

    def _precompute_ref_logps(self, *args: Any, **named: Any) -> Any:
        """TRL's DPOTrainer does this before there is an optimizer."""
        self.create_optimizer()
        return self._plain_methods._precompute_ref_logps(*args, **named)

    # ----------------------------------------------------------------------------------------------
    # Files

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Weights are written tensor by tensor: the host has no room for all of them once more."""
        own: Any = self
        model = own.model
        is_known = hasattr(model, SAVE) and not getattr(model, "_hf_peft_config_loaded", False)
        if self.engine is None or state_dict is not None or not is_known:
            self._plain_methods._save(output_dir, state_dict)
            return
        model.__dict__[SAVE] = self._save_by_engine
        try:
            self._plain_methods._save(output_dir)
        finally:
            model.__dict__.pop(SAVE, None)

    def _save_by_engine(self, folder: str, **_: Any) -> None:
        """What `model.save_pretrained` writes."""
        own: Any = self
        assert self.engine is not None
        del own.model.__dict__[SAVE]  # the export of an adapter asks the model for it
        made = Path(folder) / "exported"
        self.engine.export(made)
        for path in made.iterdir():
            if path.name != "README.md" or not (Path(folder) / path.name).exists():
                path.replace(Path(folder) / path.name)
        shutil.rmtree(made)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.engine is not None
        self.engine.save(Path(output_dir) / FOLDER)
        with self._state_elsewhere():
            self._plain_methods._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and (folder := Path(checkpoint) / FOLDER).is_dir():
            assert self.engine is not None
            self.engine.load(folder)
        elif checkpoint is not None and (Path(checkpoint) / "optimizer.pt").is_file():
            raise ValueError(
                f"{checkpoint} was saved by a trainer without an engine: it has no folder "
                f"{FOLDER!r} with the optimizer's state. Go on with it there, or begin a new run "
                "from its weights: model=from_pretrained(checkpoint), without "
                "resume_from_checkpoint."
            )
        with self._state_elsewhere():
            self._plain_methods._load_optimizer_and_scheduler(checkpoint)

    def _load_from_checkpoint(self, checkpoint: str, model: nn.Module | None = None) -> None:
        if not (Path(checkpoint) / FOLDER).is_dir():  # else the engine loads the weights
            self.close()
            self._plain_methods._load_from_checkpoint(checkpoint, model)

    def _load_best_model(self) -> None:
        own: Any = self
        folder = Path(own.state.best_model_checkpoint) / FOLDER
        if folder.is_dir() and self.engine is not None:
            self.engine.load(folder)
        else:
            self.close()
            self._plain_methods._load_best_model()

    @contextlib.contextmanager
    def _state_elsewhere(self) -> Iterator[None]:
        """Inside the block the trainer's optimizer has no state of its own."""
        own: Any = self
        optimizer, own.optimizer = own.optimizer, _Elsewhere()
        try:
            yield
        finally:
            own.optimizer = optimizer


def _let_outputs_be_float32(model: nn.Module) -> Callable[[], None]:
    """Let a trainer take its losses in float32, as mixed precision does; undone by the result.

    With labels, the model takes the loss itself, and its other outputs are made if they are used.
    """
    forward = model.__dict__["forward"]

    @functools.wraps(forward)
    def converted(*args: Any, **named: Any) -> Any:
        found = forward(*args, **named)
        return found if "labels" in named else pytree.tree_map_only(Tensor, _float32, found)

    def undo() -> None:
        model.__dict__["forward"] = forward

    model.__dict__["forward"] = converted
    return undo


def _float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _nothing(optimizer: torch.optim.Optimizer, closure: Any = None) -> None:
    """Stands for the step of an optimizer."""


class _Elsewhere:
    """Stands for an optimizer whose state is in the engine's checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        return dict(ELSEWHERE)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The engine has loaded it."""


def _is_of_trl(trainer: type[Any]) -> bool:
    return any(kind.__module__.startswith("trl.") for kind in trainer.__mro__)


def _is_arguments(given: Any) -> bool:
    return isinstance(given, importlib.import_module("transformers").TrainingArguments)


def _adapted(given: Any, *, by_name: bool) -> Any:
    """What a trainer is given; its arguments, as a copy, before it makes models by them."""
    if not _is_arguments(given):
        return given
    args: Any = copy.copy(given)
    adapt(args)
    if hasattr(args, "model_init_kwargs") and (by_name or hasattr(args, "sync_ref_model")):
        keep_on_host(args)
    return args


def _checked(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of an engine that a user may give beside a trainer's arguments.

    Raises:
        ValueError: with those that are none.
    """
    taken = {"self", "model", "autograd", "clip_norm", "seed", "loss", "split", "weights"}
    taken |= {"device", "allow_missing_weights"}
    known = {*inspect.signature(Engine.__init__).parameters, "token_metrics"} - taken
    if unknown := sorted(settings.keys() - known):
        raise ValueError(
            f"l2l= has {unknown}. Expected some of {sorted(known)}; device, seed, clipping and "
            "batches are the trainer's."
        )
    return settings


def _home(trainer: Any, method: str) -> str:
    """The module of the class whose method it would be without us."""
    kinds = (kind for kind in type(trainer).__mro__ if method in vars(kind))
    return next((kind.__module__ for kind in kinds if kind is not Streaming), "")


def _why_not_whole(trainer: Any) -> str | None:
    """Why the trainer's step is none of the engine; None: it is. See [Note: the same loss]."""
    if trainer.compute_loss_func is not None or trainer.label_smoother is not None:
        return "the loss is not the model's own"
    for method in ("compute_loss", "training_step"):
        kind = _home(trainer, method)
        if kind == SFT_TRAINER and trainer.args.loss_type == "nll" and not trainer.aux_loss_enabled:
            if trainer._token_metrics:
                return "entropy and accuracy of tokens are logged: see token_metrics"
        elif kind != TRAINER:
            return f"{kind} has a {method} of its own"
    is_mean = trainer.model_accepts_loss_kwargs and trainer._loss_shifts_labels
    if trainer.args.gradient_accumulation_steps > 1 and not (is_mean and not _has_routers(trainer)):
        return "of several batches, the loss may not be the mean over all targets"
    return None


def _has_routers(trainer: Any) -> bool:
    """Whether the model's loss has a part that is taken of its routers."""
    config: Any = getattr(trainer.model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return bool(getattr(text, "output_router_logits", False))


def _refuse_routers(trainer: Any) -> None:
    """Refuse a loss that has a part for every microbatch: see [Note: the same loss].

    Raises:
        ValueError: with the remedy.
    """
    if _has_routers(trainer):
        size = trainer.args.gradient_accumulation_steps * trainer.args.per_device_train_batch_size
        raise ValueError(
            "the model's config has output_router_logits=True, and the step is not one of the "
            "engine: a loss of routers is taken of one batch, by the model's own loss. Expected "
            f"gradient_accumulation_steps=1 and per_device_train_batch_size={size}, which is cut "
            "into microbatches that fit; or output_router_logits=False."
        )


def _moved(values: Any, device: torch.device) -> Any:
    return pytree.tree_map_only(Tensor, lambda one: one.to(device), values)


def _joined(microbatches: list[dict[str, Any]]) -> Any:
    """One batch, to be cut as planned; those with rows of different lengths as they are."""
    first, *others = microbatches
    if not others:
        return first
    shapes = [
        {n: v.shape[1:] if isinstance(v, Tensor) and v.dim() else None for n, v in one.items()}
        for one in microbatches
    ]
    if any(one != shapes[0] or None in one.values() for one in shapes):
        return microbatches
    return {name: torch.cat([one[name] for one in microbatches]) for name in first}
