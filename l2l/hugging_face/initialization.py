"""Values for tensors that no file has, module by module: a model on the meta device is never whole.

A model fills its tensors by code of its own (`fillings`), a call for each module. A
call may fill more than its module's own tensors: attention in GPT-2 fills the projection inside it
once more, smaller the deeper the model. So a module's tensors are made by its own call and by those
of all modules around it, in their order, while every other tensor is on the meta device, where
filling takes no memory. What was written into is watched: a tensor that nobody fills is refused.

Random numbers depend on the seed and on the name of the module, and on nothing else: not on which
other tensors are made, nor in which order.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from l2l.hugging_face.folder import is_adapted, is_transformers
from l2l.model import copy_tree

PLAIN_ADAPTER = (True, False, "gaussian")  # beginnings of an adapter that do not need the weights
FAILURES = (RuntimeError, NotImplementedError, TypeError, AttributeError)  # of code without values


@dataclass(frozen=True, slots=True)
class Filling:
    """A way to fill some of a model's tensors, in place."""

    run: Callable[[], Any]
    is_last_resort: bool = False  # for what has no other way


def fillings(tree: nn.Module) -> Mapping[str, list[Filling]]:
    """A model's own ways to fill its tensors, by module, in the order in which they are taken.

    A module is filled after those inside it, and may fill these once more. Inside a transformers
    model that is `_init_weights` of the nearest model around a module; elsewhere, and for what that
    leaves alone, it is the module's own way. Adapters of a PEFT model have theirs.
    """
    found: dict[str, list[Filling]] = defaultdict(list)
    adapters: Mapping[str, Any] = getattr(tree, "peft_config", {}) if is_adapted(tree) else {}

    def visit(path: str, module: Any, fill: Callable[[nn.Module], Any] | None) -> None:
        fill = module._init_weights if is_transformers(module) else fill
        for name, child in module.named_children():
            visit(f"{path}.{name}" if path else name, child, fill)
        own = [getattr(module, name, None) for name in ("reset_parameters", "_reset_parameters")]
        run = next((one for one in own if callable(one)), None)
        if run is not None:
            found[path].append(Filling(run, is_last_resort=fill is not None))
        if fill is not None:
            found[path].append(Filling(partial(fill, module)))
        if callable(getattr(module, "reset_lora_parameters", None)):
            for adapter, config in adapters.items():
                found[path].append(Filling(partial(_reset_adapter, path, module, adapter, config)))

    visit("", tree, None)
    return found


def _reset_adapter(path: str, module: Any, adapter: str, config: Any) -> None:
    if config.init_lora_weights not in PLAIN_ADAPTER:
        raise ValueError(
            f"the adapter of {path!r} uses init_lora_weights={config.init_lora_weights!r}, which "
            "needs the base weights. For a model on the meta device, use True, False or 'gaussian'."
        )
    module.reset_lora_parameters(adapter, config.init_lora_weights)


@final
class Initialization:
    """Makes tensors of a model that is on the meta device; the model is only read."""

    def __init__(self, model: nn.Module, *, seed: int) -> None:
        self._seed = seed
        self._tree = copy_tree(model, {})
        for module in self._tree.modules():
            for local, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    _empty(module, local, torch.device("meta"))
        self._fillings = fillings(self._tree)

    def make(self, path: str, names: Iterable[str], device: torch.device) -> dict[str, Tensor]:
        """Make some of a module's own tensors.

        Args:
            path: the module.
            names: of the tensors, in the whole model.
            device: where to make them.

        Raises:
            ValueError: nothing fills one of them, or the model's own code failed.
        """
        module = self._tree.get_submodule(path)
        parameters, buffers = dict(module._parameters), dict(module._buffers)
        made = {name: _empty(module, name.rpartition(".")[2], device) for name in names}
        try:
            self._fill(path, made, device)
        finally:
            module._parameters.update(parameters)
            module._buffers.update(buffers)
        return made

    def _fill(self, path: str, made: dict[str, Tensor], device: torch.device) -> None:
        parts = path.split(".") if path else []
        around = [".".join(parts[:number]) for number in range(len(parts), -1, -1)]
        found = [filling for one in around for filling in self._fillings.get(one, ())]
        unfilled = self._run(path, [one for one in found if not one.is_last_resort], made, device)
        unfilled = unfilled and self._run(path, found, made, device)
        if unfilled:
            kind = type(self._tree.get_submodule(path)).__name__
            raise ValueError(
                f"nothing initializes {', '.join(map(repr, unfilled))}, which no file has. Add "
                f"_init_weights, or reset_parameters of {kind}, or build the model on the CPU."
            )

    def _run(
        self, path: str, chosen: list[Filling], made: dict[str, Tensor], device: torch.device
    ) -> list[str]:
        """Fill tensors; returns those that were not written into."""
        digest = hashlib.sha256(f"{self._seed} {path}".encode()).digest()
        seed = int.from_bytes(digest[:7], "little")
        devices = [] if device.type == "cpu" else [device]
        forked = torch.random.fork_rng(devices, device_type=device.type)
        with forked, torch.device(device), torch.no_grad(), _Watching() as watching:
            if devices:
                torch.manual_seed(seed)
            else:  # that of other devices is left alone
                torch.default_generator.manual_seed(seed)
            for filling in chosen:
                try:
                    filling.run()
                except FAILURES as error:
                    raise ValueError(
                        f"the model's own code could not fill {path!r} while the rest of the model "
                        f"is on the meta device: {error}. Build the model on the CPU instead."
                    ) from error
        return [name for name, one in made.items() if _storage(one) not in watching.written]


def _empty(module: nn.Module, local: str, device: torch.device) -> Tensor:
    """Let a module have an empty tensor, on a device, in the place of one of its own."""
    is_parameter = local in module._parameters
    registry: dict[str, Any] = module._parameters if is_parameter else module._buffers
    empty = torch.empty_like(registry[local], device=device)
    registry[local] = nn.Parameter(empty, requires_grad=False) if is_parameter else empty
    return empty


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@final
class _Watching(TorchDispatchMode):
    """Notes what is written into."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: set[int] = set()

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        arguments = func._schema.arguments
        given = {**dict(zip((one.name for one in arguments), args, strict=False)), **kwargs}
        for argument in arguments:
            alias, value = argument.alias_info, given.get(argument.name)
            if alias is not None and alias.is_write and isinstance(value, Tensor):
                self.written.add(_storage(value))
        return func(*args, **kwargs)
