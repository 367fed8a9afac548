"""The model's own code, run as plain PyTorch runs it, with the weights of one layer at a time.

The user's own modules and parameter objects are used, not copies: whatever code holds on to them
(a loss, a compiled layer, a replaced `forward`) sees real weights. Around the layers these are
there all the time. A layer's are brought when its code runs and taken away when it ends; what
autograd saves of them is noted by its place, and brought again for the backward pass. Beyond
`SAVED_BYTES`, other saved tensors wait on the host. So this needs the memory of what is around the
layers, its gradient, and a layer or two, whatever the depth.

Random numbers are those of the engine: the code around the layers has one stream for each
microbatch, and each layer one of its own.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from l2l.device import Device
from l2l.model import (
    LossFunction,
    Microbatch,
    Partition,
    Rule,
    lend,
    modules_kept,
    move_batch,
    require_loss,
    same,
    take_back,
)
from l2l.parameter_server import ParameterServer
from l2l.proof.evidence import Evidence

SAVED_BYTES = 128 << 20  # of a microbatch that may wait on the device
_HOST = torch.device("cpu")

SeedOf = Callable[[int | None, int], int]
"""The seed of a layer, or of the code around them (None), for a microbatch."""


@dataclass(eq=False, kw_only=True)
class Subject:
    """What a proof is about."""

    model: nn.Module  # the user's, whose weights are in the server
    partition: Partition  # the same model, cut
    server: ParameterServer
    device: Device  # whose random numbers are drawn
    loss_function: LossFunction | None  # the user's; None: the model's own


@dataclass(frozen=True, slots=True)
class _Spot:
    """A saved tensor that lies in a layer's weights."""

    layer: int
    offset: int  # in elements of its dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


@final
class Reference:
    """Runs microbatches through the user's model; what they leave is an `Evidence`."""

    def __init__(
        self,
        subject: Subject,
        *,
        rows: Sequence[Microbatch],
        rule: Rule,
        buffers: Mapping[str, Tensor],
        seed_of: SeedOf,
        on_host: bool,
        room: int,
    ) -> None:
        """Nothing happens yet.

        Args:
            subject: what runs.
            rows: microbatches, on the host.
            rule: what their loss averages over.
            buffers: as training has left them, by owner, those that training changes.
            seed_of: see `SeedOf`.
            on_host: whether to run there, in evaluation mode: random numbers would be others.
            room: device memory that weights of layers may take, beyond those of two.
        """
        self._model, self._partition = subject.model, subject.partition
        self._server, self._device = subject.server, subject.device
        self._loss_function = subject.loss_function
        self.rows, self._rule = rows, rule
        self._seed_of, self._on_host, self._room = seed_of, on_host, room
        self._place = _HOST if on_host else subject.device.torch_device
        self._given = dict(buffers)
        self._buffers: dict[str, Tensor] = {}  # of layers, as their code has left them
        self._flats: OrderedDict[int, Tensor] = OrderedDict()  # weights of layers that are here
        self._spans: dict[int, int] = {}  # address of such weights -> layer
        self._around: set[int] = set()  # addresses of weights around the layers
        self._running: int | None = None
        self._outer_random: Any = None
        self._m = self._saved_bytes = 0

    def run(self, factor: float) -> Evidence:
        """Losses, gradients and buffers, with losses times a factor that is divided out again."""
        self._evidence = Evidence(self._place)
        self._buffers = {k: v.to(self._place, copy=True) for k, v in self._given.items()}
        weights: list[float] = []
        with self._model_as_given(), self._device.private_random_state():
            for m, microbatch in enumerate(self.rows):
                self._m = m
                share = self._rule.total([microbatch]) / max(1, self._rule.total(self.rows))
                weights.append(self._one(microbatch, share, factor))
            self._evidence.buffers = self._changed_buffers()
        total = sum(weights) if self._rule is Rule.SUM_AND_WEIGHT else 1.0
        found = self._evidence.scaled(1.0 / (total * factor))
        found.losses = [loss / total for loss in found.losses]
        return found

    def _one(self, microbatch: Microbatch, share: float, factor: float) -> float:
        """A microbatch, forward and backward; the weight that the user's loss gives it."""
        inputs = move_batch(microbatch, self._place)
        self._device.seed(self._seed_of(None, self._m))
        self._saved_bytes = 0
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        with torch.enable_grad(), hooks:
            outputs = self._partition.run(self._model, inputs)
            function, weight = self._loss_function, 1.0
            found = require_loss(outputs) if function is None else function(outputs, inputs)
            if isinstance(found, tuple):
                found, weight = found[0], float(found[1])
            loss = found * share
            self._evidence.losses.append(float(loss.detach()))
            if loss.requires_grad:
                (loss.float() * factor).backward()  # type: ignore[no-untyped-call]
        return weight

    # ----------------------------------------------------------------------------------------------
    # The user's model with real weights

    @contextlib.contextmanager
    def _model_as_given(self) -> Iterator[None]:
        """Real weights around the layers, watched layers; all is as before at the end."""
        trains = self._model.training
        with contextlib.ExitStack() as stack:
            stack.callback(self._forget)
            stack.enter_context(modules_kept(self._model.modules()))
            if "torch._dynamo" in sys.modules:  # else nothing was compiled, and it takes a second
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            for module in self._model.modules():  # as `Partition.set_training`
                given = module.training or not trains
                module.__dict__["training"] = given and not self._on_host
                for registry in (module._parameters, module._buffers):
                    stack.callback(registry.update, dict[str, Any](registry))
            units, partition = self._server.units, self._partition
            parameters = {
                owner: parameter
                for tensors in (partition.outer_tensors, *partition.layer_tensors)
                for owner, parameter in tensors.parameters.items()
            }
            self._units = {o: u for u in units.values() for o in u.form.weight_layout.names}
            for owner, parameter in parameters.items():
                dtype = self._units[owner].form.weight_layout.dtype_of(owner)
                lend(parameter, self._nothing(parameter, dtype))
                stack.callback(_restore, parameter, parameter.grad)
                parameter.grad = None
                if parameter.requires_grad:
                    taken = functools.partial(self._take, owner)
                    hook = parameter.register_post_accumulate_grad_hook(taken)  # type: ignore[no-untyped-call]
                    stack.callback(hook.remove)
            for owner, buffer in partition.skeleton.buffers().items():
                self._set_buffer(owner, buffer.to(self._place, copy=True))
            for name in units:
                if not name.startswith("L"):
                    weights = self._brought(name)
                    self._around.add(weights.untyped_storage().data_ptr())
                    for owner, view in units[name].form.weight_layout.views(weights).items():
                        if owner in parameters:
                            parameters[owner].data = view
            layers = self._model.get_submodule(partition.list_name)
            for index, layer in enumerate(layers.children()):
                self._watch(index, layer)
            yield

    def _nothing(self, parameter: nn.Parameter, dtype: torch.dtype | None) -> Tensor:
        value = torch.nan if parameter.is_floating_point() else 0
        return torch.full((), value, dtype=dtype, device=self._place).expand(parameter.shape)

    def _set_buffer(self, owner: str, value: Tensor) -> None:
        for module, local in self._buffer_places[owner]:
            module._buffers[local] = value

    def _buffer(self, owner: str) -> Tensor | None:
        module, local = self._buffer_places[owner][0]
        return module._buffers[local]

    @functools.cached_property
    def _buffer_places(self) -> dict[str, list[tuple[nn.Module, str]]]:
        """Where the user's modules keep their buffers, by owner."""
        owners = {id(buffer): name for name, buffer in self._model.named_buffers()}
        found: dict[str, list[tuple[nn.Module, str]]] = {}
        for module in self._model.modules():
            for local, buffer in module._buffers.items():
                if buffer is not None:
                    found.setdefault(owners[id(buffer)], []).append((module, local))
        return found

    def _watch(self, index: int, layer: nn.Module) -> None:
        """Have the weights there whenever the layer's code runs, called in whatever way."""
        layer.register_forward_pre_hook(lambda *_: self._enter(index), prepend=True)
        layer.register_forward_hook(lambda *_: self._leave(index), always_call=True)
        inner = layer.forward

        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._running == index:  # called as a module
                return inner(*args, **kwargs)
            self._enter(index)
            try:
                return inner(*args, **kwargs)
            finally:
                self._leave(index)

        layer.__dict__["forward"] = forward
        layer.__dict__["_compiled_call_impl"] = None

    def _enter(self, index: int) -> None:
        self._outer_random = self._device.random_numbers.state()
        self._running = index
        tensors, unit = self._partition.layer_tensors[index], self._server.units[f"L{index}"]
        views = unit.form.weight_layout.views(self._weights(index))
        for owner, parameter in tensors.parameters.items():
            parameter.data = views[owner]
        for owner in tensors.buffers:
            known = self._buffers.get(owner)
            self._set_buffer(owner, views[owner].clone() if known is None else known)
        self._device.seed(self._seed_of(index, self._m))

    def _leave(self, index: int) -> None:
        tensors = self._partition.layer_tensors[index]
        for owner in tensors.buffers:
            if (left := self._buffer(owner)) is not None:
                self._buffers[owner] = left
        for parameter in tensors.parameters.values():
            parameter.data = self._nothing(parameter, parameter.dtype)
        self._running = None
        self._device.random_numbers.set_state(self._outer_random)

    def _changed_buffers(self) -> dict[str, Tensor]:
        """Buffers that are not what they were before the first microbatch."""
        outer, found = self._partition.skeleton.buffers(), dict[str, Tensor]()
        for owner in [*outer, *(o for one in self._partition.layer_tensors for o in one.buffers)]:
            left = self._buffer(owner) if owner in outer else self._buffers.get(owner)
            start = outer.get(owner, self._given.get(owner))
            if start is None:
                start = self._units[owner].weight_of(owner)
            if left is not None and not same(left, start):
                found[owner] = left.cpu()
        return found

    # ----------------------------------------------------------------------------------------------
    # What autograd saves and gives

    def _weights(self, index: int) -> Tensor:
        """A layer's weights, here; the last few stay."""
        found = self._flats.get(index)
        if found is None:
            found = self._brought(f"L{index}")
            self._spans[found.untyped_storage().data_ptr()] = index
            self._flats[index] = found
            kept = self._flats.values()
            while len(kept) > 2 and sum(one.nbytes for one in kept) > self._room:
                _, gone = self._flats.popitem(last=False)
                del self._spans[gone.untyped_storage().data_ptr()]
        self._flats.move_to_end(index)
        return found

    def _brought(self, name: str) -> Tensor:
        # Nobody waits: the host's weights stay as they are meanwhile.
        weights = self._server.whole(name).weights
        return weights.to(self._place, copy=True, non_blocking=True)

    def _pack(self, tensor: Tensor) -> Any:
        address = tensor.untyped_storage().data_ptr() if tensor.numel() else 0
        if address in self._spans:
            shape, strides = tuple(tensor.shape), tuple(tensor.stride())
            layer, start = self._spans[address], int(tensor.storage_offset())
            return _Spot(layer, start, shape, strides, tensor.dtype)
        self._saved_bytes += 0 if address in self._around else tensor.nbytes
        if self._saved_bytes <= SAVED_BYTES or address in self._around or tensor.device == _HOST:
            return tensor
        return tensor.device, tensor.cpu()

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _Spot):
            flat = self._weights(packed.layer).view(packed.dtype)
            return flat.as_strided(packed.shape, packed.strides, packed.offset)
        found: Tensor = packed[1].to(packed[0]) if isinstance(packed, tuple) else packed
        return found

    def _take(self, owner: str, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        unit = self._units[owner]  # of which this rank may hold a piece
        piece = gradient.reshape(-1)[unit.form.trained.piece(owner, unit.share)]
        self._evidence.add(owner, piece)

    def _forget(self) -> None:
        for held in (self._flats, self._spans, self._around, self._buffers):
            held.clear()


def _restore(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    parameter.grad = gradient
    take_back(parameter)
