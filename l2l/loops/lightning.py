"""A strategy by which Lightning streams a model layer by layer.

    L.Trainer(strategy=l2l.loops.lightning_strategy(device_memory="8GiB"), ...)

The LightningModule stays as it is, with automatic or manual optimization. The engine is made of the
module inside it that holds the parameters, when Lightning has its optimizer, and is closed when the
trainer has finished: then the module has its weights again. Beside each checkpoint `name.ckpt` lies
a folder `name.ckpt.l2l`, from which a run goes on exactly.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from l2l.engine import Engine
from l2l.loops.optimizers import drive, unscheduled

SUFFIX = ".l2l"  # of the engine's folder, beside a checkpoint
PRECISIONS = {
    "32-true": "float32",
    "bf16-mixed": "bfloat16",
    "bf16-true": "bfloat16",
    "16-mixed": "float16",
    "16-true": "float16",
}
"""Of the engine, by what Lightning calls them."""


def lightning_strategy(*, module: str | None = None, **settings: Any) -> Any:
    """A strategy for `lightning.pytorch.Trainer`.

    Args:
        module: name of the module inside the LightningModule that is streamed. None: the only one
            that has parameters.
        settings: of `l2l.Engine`, such as `device_memory`.

    Raises:
        ValueError: Lightning is not installed.
    """
    made: Any = _kind("pytorch_lightning" if _is_old() else "lightning.pytorch")
    return made(module, settings)


def _is_old() -> bool:
    """Whether the program has Lightning under its older name."""
    return "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules


@functools.cache
def _kind(package: str) -> type[Any]:
    try:
        strategies = importlib.import_module(f"{package}.strategies")
        precision = importlib.import_module(f"{package}.plugins.precision")
    except ImportError as error:
        raise ValueError(
            f"Lightning cannot be imported ({error}). Install it with: pip install lightning"
        ) from error
    members = {"__doc__": Streaming.__doc__, "_precision_kind": precision.Precision}
    return type("L2LStrategy", (Streaming, strategies.SingleDeviceStrategy), members)


class Streaming:
    """Lightning's strategy for one device, on which one layer of the model is at a time."""

    _precision_kind: type[Any]  # Lightning's own, which casts nothing

    def __init__(self, module: str | None, settings: Mapping[str, Any]) -> None:
        """For a module inside the LightningModule, with settings of the engine."""
        self._name, self._settings = module, dict(settings)
        self.engine: Engine | None = None
        self._frozen: list[nn.Parameter] = []  # for the time without an optimizer
        self._restored: str | None = None
        self._asked_precision = "32-true"
        self._base.__init__()

    @property
    def _base(self) -> Any:
        return super()

    # ----------------------------------------------------------------------------------------------
    # Where things are, and in which precision

    @property
    def root_device(self) -> torch.device:
        """Of the accelerator that Lightning has chosen."""
        own: Any = self
        is_cpu = own.accelerator is None or own.accelerator.name() == "cpu"
        return torch.device("cpu") if is_cpu else torch.device(own.accelerator.name(), 0)

    @property
    def precision_plugin(self) -> Any:
        """One that casts nothing: the engine does."""
        return self._precision_kind()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        self._asked_precision = getattr(plugin, "precision", "32-true")
        if self._asked_precision not in PRECISIONS:
            raise ValueError(
                f"precision={self._asked_precision!r} does not run in an engine. Expected one of "
                f"{sorted(PRECISIONS)}."
            )

    def model_to_device(self) -> None:
        """All but what is streamed."""
        own: Any = self
        with self._without_streamed():
            own.lightning_module.to(own.root_device)

    @contextlib.contextmanager
    def _without_streamed(self) -> Iterator[None]:
        """Inside the block the LightningModule does not have the module that is streamed."""
        name = self._streamed_name()
        parent: Any = self
        parent = parent.lightning_module.get_submodule(name.rpartition(".")[0])
        own = name.rpartition(".")[2]
        streamed, parent._modules[own] = parent._modules[own], nn.Module()
        try:
            yield
        finally:
            parent._modules[own] = streamed

    def _streamed_name(self) -> str:
        """Of the module that is streamed.

        Raises:
            ValueError: it is not certain which.
        """
        own: Any = self
        if self._name is not None:
            return self._name
        children = dict(own.lightning_module.named_children())
        found = [name for name, one in children.items() if next(one.parameters(), None) is not None]
        outside = [name for name, _ in own.lightning_module.named_parameters(recurse=False)]
        if len(found) != 1 or outside:
            raise ValueError(
                f"{type(own.lightning_module).__name__} has parameters in {found + outside}. "
                "Expected one module that holds all of them and is called in training_step: put "
                "them into one nn.Module, or name that which is streamed: "
                "lightning_strategy(module='...')."
            )
        name: str = found[0]
        return name

    # ----------------------------------------------------------------------------------------------
    # The engine

    def setup(self, trainer: Any) -> None:
        """As any strategy; where nothing is trained, the engine holds weights only."""
        own: Any = self
        self._base.setup(trainer)
        if self.engine is None:
            streamed = own.lightning_module.get_submodule(self._streamed_name())
            self._frozen = [one for one in streamed.parameters() if one.requires_grad]
            streamed.requires_grad_(False)
            self._open(streamed, {"optimizer": None})

    def setup_optimizers(self, trainer: Any) -> None:
        """The LightningModule's own, which the engine takes over with its schedulers."""
        own: Any = self
        self._base.setup_optimizers(trainer)
        if len(own.optimizers) != 1:
            raise ValueError(
                f"configure_optimizers returned {len(own.optimizers)} optimizers. Expected one, "
                "with groups of parameters where their settings differ."
            )
        streamed = own.lightning_module.get_submodule(self._streamed_name())
        engine = self._open(streamed, {"optimizer": unscheduled(own.optimizers[0])})
        for config in own.lr_scheduler_configs:
            drive(config.scheduler, engine.optimizer)
        own.optimizers = [engine.optimizer]

    def _open(self, streamed: nn.Module, more: dict[str, Any]) -> Engine:
        own: Any = self
        precision = PRECISIONS[self._asked_precision]
        settings = {"device": own.root_device, "precision": precision, **more, **self._settings}
        if more["optimizer"] is None:
            settings["optimizer"] = None
        self.engine = engine = Engine(streamed, **settings, autograd=True)
        return engine

    def validation_step(self, *args: Any, **named: Any) -> Any:
        """Any step that does not train: with tensors that autograd knows."""
        return _without_inference_mode(self._base.validation_step, args, named)

    def test_step(self, *args: Any, **named: Any) -> Any:
        """As `validation_step`."""
        return _without_inference_mode(self._base.test_step, args, named)

    def predict_step(self, *args: Any, **named: Any) -> Any:
        """As `validation_step`."""
        return _without_inference_mode(self._base.predict_step, args, named)

    def teardown(self) -> None:
        """Give the weights back: the module is an ordinary one again."""
        own: Any = self
        if self.engine is not None:
            self.engine.close()
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        self.engine, self._frozen = None, []
        own.optimizers = []
        self._base.teardown()

    # ----------------------------------------------------------------------------------------------
    # Files

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """None that Lightning would write: it is in the engine's folder."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, **named: Any) -> None:
        """Lightning's file and, where it is to go on from, the engine's folder."""
        self._base.save_checkpoint(checkpoint, filepath, **named)
        if self.engine is not None and "optimizer_states" in checkpoint:
            self.engine.save(_folder(filepath))

    def remove_checkpoint(self, filepath: Any) -> None:
        """Both of them."""
        self._base.remove_checkpoint(filepath)
        shutil.rmtree(_folder(filepath), ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: Any, **named: Any) -> Any:
        """Lightning's file; the engine's folder is read once there is an engine."""
        self._restored = str(checkpoint_path)
        return self._base.load_checkpoint(checkpoint_path, **named)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Go on from the engine's folder.

        Raises:
            ValueError: the checkpoint has none.
        """
        assert self._restored is not None
        assert self.engine is not None
        folder = _folder(self._restored)
        if not folder.is_dir():
            raise ValueError(
                f"{self._restored} has no folder {folder.name!r} with the optimizer's state: it "
                "was saved without this strategy. Go on with the one that saved it, or load the "
                "weights alone."
            )
        self.engine.load(folder)


def _without_inference_mode(step: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """An engine notes the versions of tensors, which those of inference mode do not have."""
    with torch.inference_mode(mode=False), torch.no_grad():
        args, named = pytree.tree_map_only(Tensor, _noted, (args, named))
        return step(*args, **named)


def _noted(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_inference() else tensor


def _folder(checkpoint: Any) -> Path:
    return Path(f"{checkpoint}{SUFFIX}")
