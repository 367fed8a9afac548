"""The model's own code, run as plain PyTorch runs it, with the weights of one layer at a time.

The user's own modules and parameter objects are used, not copies: whatever code holds on to them
(a loss, a compiled layer, a replaced `forward`) sees real weights. Around the layers these are
there all the time. A layer's are brought when its code runs and taken away when it ends; what
autograd saves of them is noted by its place, and brought again for the backward pass. Kernels of
quantized weights may keep these themselves, unseen: their memory is emptied, and filled again when
the gradient of the layer's output is there. Beyond `SAVED_BYTES`, other saved tensors wait on the
host. So this needs the memory of what is around the
layers, its gradient, and a layer or two, whatever the depth.

Random numbers are those of the engine: the code around the layers has one stream for each
microbatch, and each layer one of its own.

One engine's proof: which code was proven, against what, and what it means if it differs.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from l2l.device import Device
from l2l.model import (
    IGNORED,
    LossFunction,
    Microbatch,
    Part,
    Partition,
    Route,
    Rule,
    format_of,
    given_loss,
    lent,
    modules_kept,
    move_batch,
    num_rows,
    require_loss,
    same,
    some_rows,
    take_rows,
    trial_batch,
    turned,
    watching,
)
from l2l.parameter_server import ParameterServer
from l2l.proof.evidence import ODD_FACTOR, TOLERANCE, Evidence, ProofError, check
from l2l.proof.memory import ProofMemory, key_of

SAVED_BYTES = 128 << 20  # of a microbatch that may wait on the device
_HOST = torch.device("cpu")

SeedOf = Callable[[int | None, int], int]
"""The seed of a call of a layer, or of the code around them (None), for a microbatch."""


@dataclass(eq=False, kw_only=True)
class Subject:
    """What a proof is about."""

    model: nn.Module  # the user's, whose weights are in the server
    partition: Partition  # the same model, cut
    server: ParameterServer
    device: Device  # whose random numbers are drawn
    loss_function: LossFunction | None  # the user's; None: the model's own


@final
@dataclass(eq=False, kw_only=True)
class Reference:
    """Runs microbatches through the user's model; what they leave is an `Evidence`."""

    of: Subject
    rows: Sequence[Microbatch]  # on the host
    rule: Rule  # what their loss averages over
    route: Route  # how the model's code runs its layers
    buffers: Mapping[str, Tensor]  # those that training changes, as it has left them, by owner
    seed_of: SeedOf
    on_host: bool  # runs there, in evaluation mode: random numbers would be others
    room: int  # device memory that weights of layers may take, beyond those of two
    _left: dict[str, Tensor] = field(default_factory=dict)  # buffers of layers, by their code
    _flats: OrderedDict[int, Tensor] = field(default_factory=OrderedDict)
    """Weights of layers that are here."""
    _emptied: dict[int, Tensor] = field(default_factory=dict)  # without memory, that code may hold
    _spans: dict[int, int] = field(default_factory=dict)  # address of such weights -> layer
    _around: set[int] = field(default_factory=set)  # addresses of weights around the layers
    _running: int | None = None
    _times: Counter[int] = field(default_factory=Counter)  # that layers ran for a microbatch
    _outer_random: Any = None
    _m: int = 0
    _saved_bytes: int = 0

    def __post_init__(self) -> None:
        self._place = _HOST if self.on_host else self.of.device.torch_device
        model, units = self.of.model, self.of.server.units.values()
        named = [*model.named_parameters(), *model.named_buffers()]
        owners = {id(tensor): name for name, tensor in named}
        self._units = {owner: one for one in units for owner in one.form.owners}
        self._formats = {o: one for unit in units for o, one in unit.form.formats.items()}
        self._whole = Part(model, owners)
        layers = map(model.get_submodule, self.of.partition.layer_paths)
        self._layers = [Part(layer, owners) for layer in layers]

    def run(self, factor: float) -> Evidence:
        """Losses, gradients and buffers, with losses times a factor that is divided out again."""
        self._evidence = Evidence(self._place)
        self._left = {k: v.to(self._place, copy=True) for k, v in self.buffers.items()}
        weights: list[float] = []
        with self._model_as_given(), self.of.device.private_random_state():
            for m, microbatch in enumerate(self.rows):
                self._m, self._saved_bytes = m, 0
                self._times.clear()
                share = self.rule.total([microbatch]) / max(1, self.rule.total(self.rows))
                weights.append(self._one(microbatch, share, factor))
            self._evidence.buffers = self._changed_buffers()
        total = sum(weights) if self.rule is Rule.SUM_AND_WEIGHT else 1.0
        found = self._evidence.scaled(1.0 / (total * factor))
        found.losses = [loss / total for loss in found.losses]
        return found

    def _one(self, microbatch: Microbatch, share: float, factor: float) -> float:
        """A microbatch, forward and backward; the weight that the user's loss gives it."""
        inputs = move_batch(microbatch, self._place)
        self.of.device.seed(self.seed_of(None, self._m))
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda packed: packed())
        with torch.enable_grad(), hooks:
            function, weight = self.of.loss_function, None
            with watching(function) as seen:
                outputs = self.of.partition.run(self.of.model, inputs)
            if function is None:
                loss = require_loss(outputs)
            else:
                loss, weight = given_loss(function, seen(outputs), inputs)
            loss = loss * share
            self._evidence.losses.append(float(loss.detach()))
            if loss.requires_grad:
                (loss.float() * factor).backward()  # type: ignore[no-untyped-call]
        return 1.0 if weight is None else float(weight)

    # ----------------------------------------------------------------------------------------------
    # The user's model with real weights

    @contextlib.contextmanager
    def _model_as_given(self) -> Iterator[None]:
        """Real weights around the layers, watched layers; all is as before at the end."""
        whole, model = self._whole, self.of.model
        parameters = whole.tensors.parameters
        with contextlib.ExitStack() as stack:
            stack.callback(self._forget)
            stack.callback(whole.bind, {**parameters, **whole.tensors.buffers})
            stack.enter_context(modules_kept(model.modules()))
            if "torch._dynamo" in sys.modules:  # else nothing was compiled, and it takes a second
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            whole.set_training(not self.on_host, as_given=model.training)
            for owner, parameter in parameters.items():
                layout = self._units[owner].form.weight_layout
                dtype = layout.dtype_of(owner) or parameter.dtype
                stack.enter_context(lent(parameter, self._nothing(parameter, dtype)))
                if parameter.requires_grad:
                    taken = functools.partial(self._take, owner)
                    hook = parameter.register_post_accumulate_grad_hook(taken)  # type: ignore[no-untyped-call]
                    stack.callback(hook.remove)
            outer = self.of.partition.skeleton.buffers()
            whole.bind({owner: one.to(self._place, copy=True) for owner, one in outer.items()})
            for name, unit in self.of.server.units.items():
                if not name.startswith("L"):
                    weights = self._brought(name)
                    self._around.add(weights.untyped_storage().data_ptr())
                    self._lend(whole, unit.form.weights_in(weights))
            for index, part in enumerate(self._layers):
                self._watch(index, part.module)
            yield

    def _nothing(self, parameter: nn.Parameter, dtype: torch.dtype | None) -> Tensor:
        value = torch.nan if parameter.is_floating_point() else 0
        return torch.full((), value, dtype=dtype, device=self._place).expand(parameter.shape)

    def _watch(self, index: int, layer: nn.Module) -> None:
        """Have the weights there whenever the layer's code runs, called in whatever way."""
        layer.register_forward_pre_hook(lambda *_: self._enter(index), prepend=True)
        leave = functools.partial(self._leave, index)
        layer.register_forward_hook(lambda _, __, value: leave(value), always_call=True)
        inner = layer.forward

        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._running == index:  # called as a module
                return inner(*args, **kwargs)
            self._enter(index)
            value = None
            try:
                value = inner(*args, **kwargs)
                return value
            finally:
                leave(value)

        layer.__dict__["forward"] = forward
        layer.__dict__["_compiled_call_impl"] = None

    def _enter(self, index: int) -> None:
        self._outer_random, self._running = self.of.device.random_numbers.state(), index
        part, unit = self._layers[index], self.of.server.units[f"L{index}"]
        views = unit.form.weights_in(self._weights(index))
        self._lend(part, views)
        buffers = {o: self._left[o] if o in self._left else views[o] for o in part.tensors.buffers}
        part.bind({o: one if o in self._left else one.clone() for o, one in buffers.items()})
        calls = [call for call, layer in enumerate(self.route.layers) if layer == index]
        call = calls[self._times[index] % len(calls)] if calls else index
        self._times[index] += 1
        self.of.device.seed(self.seed_of(call, self._m))

    def _leave(self, index: int, value: Any) -> None:
        for one in pytree.tree_leaves(value) if self._is_kept(index) else ():
            if isinstance(one, Tensor) and one.requires_grad:
                one.register_hook(lambda _: self._bring(index))  # type: ignore[no-untyped-call]
        self._left |= self._layers[index].buffers()
        part = self._layers[index]
        for owner, parameter in part.tensors.parameters.items():
            if owner in self._formats:
                part.bind({owner: parameter})
            else:
                parameter.data = self._nothing(parameter, parameter.dtype)
        self._running = None
        self.of.device.random_numbers.set_state(self._outer_random)

    def _lend(self, part: Part, views: Mapping[str, Tensor]) -> None:
        """Let parameters have these values; where they are made of several tensors, modules do."""
        for owner, parameter in part.tensors.parameters.items():
            if owner in views and owner in self._formats:
                part.bind({owner: views[owner]})
            elif owner in views:
                parameter.data = views[owner]

    def _changed_buffers(self) -> dict[str, Tensor]:
        """Buffers that are not what they were before the first microbatch."""
        starts, now = self.of.partition.skeleton.buffers(), self._whole.buffers()
        left = {owner: now[owner] for owner in starts if owner in now}
        for part in self._layers:
            for owner in part.tensors.buffers.keys() & self._left.keys():
                left[owner], start = self._left[owner], self.buffers.get(owner)
                starts[owner] = self._first(owner) if start is None else start
        return {owner: one.cpu() for owner, one in left.items() if not same(one, starts[owner])}

    def _first(self, owner: str) -> Tensor:
        """A buffer of a layer as the server has it."""
        unit = self.of.server.whole(self._units[owner].form.name)
        return unit.weight_of(owner).clone()

    # ----------------------------------------------------------------------------------------------
    # What autograd saves and gives

    def _weights(self, index: int) -> Tensor:
        """A layer's weights, here; the last few stay."""
        if index not in self._flats:
            found, brought = self._emptied.pop(index, None), self._brought(f"L{index}")
            if found is None:
                found = brought
            else:
                found.untyped_storage().resize_(brought.nbytes)
                found.copy_(brought)
            self._flats[index] = found
            self._spans[found.untyped_storage().data_ptr()] = index
            kept = self._flats.values()
            while len(kept) > 2 and sum(one.nbytes for one in kept) > self.room:
                number, gone = self._flats.popitem(last=False)
                self._spans.pop(gone.untyped_storage().data_ptr(), None)  # without weights: 0
                if self._is_kept(number):
                    gone.untyped_storage().resize_(0)
                    self._emptied[number] = gone
        self._flats.move_to_end(index)
        return self._flats[index]

    def _bring(self, index: int) -> None:
        self._weights(index)

    def _is_kept(self, index: int) -> bool:
        """Whether kernels may hold a layer's weights where no hook of autograd sees it."""
        formats = self.of.server.units[f"L{index}"].form.formats.values()
        return any(not one.is_wrapper for one in formats)

    def _brought(self, name: str) -> Tensor:
        # Nobody waits: the host's weights stay as they are meanwhile, but for those on disk.
        unit = self.of.server.whole(name)
        return unit.weights.to(self._place, copy=True, non_blocking=not unit.blocks)

    def _pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        """What brings a saved tensor again."""
        known = format_of(tensor)
        if known is not None and known.is_wrapper:
            parts = {name: self._pack(one) for name, one in known.take_apart(tensor).items()}
            return lambda: known.join({name: one() for name, one in parts.items()})
        address = tensor.untyped_storage().data_ptr() if tensor.numel() else 0
        if address in self._spans:
            index, dtype = self._spans[address], tensor.dtype
            form = tensor.size(), tensor.stride(), tensor.storage_offset()
            return lambda: self._weights(index).view(dtype).as_strided(*form)
        self._saved_bytes += 0 if address in self._around else tensor.nbytes
        if self._saved_bytes <= SAVED_BYTES or address in self._around or tensor.device == _HOST:
            return lambda: tensor
        on_host, device = tensor.cpu(), tensor.device
        return lambda: on_host.to(device)

    def _take(self, owner: str, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        unit = self._units[owner]  # of which this rank may hold a piece
        piece = gradient.reshape(-1)[unit.form.trained.piece(owner, unit.share)]
        self._evidence.add(owner, piece)

    def _forget(self) -> None:
        for held in (self._flats, self._emptied, self._spans, self._around, self._left):
            held.clear()


# --------------------------------------------------------------------------------------------------
# The proof


logger = logging.getLogger("l2l")

FLOAT16_SCALE = 256.0  # of losses: with it hardly any gradient is zero or infinite
HOST_TOLERANCE = 0.1  # of 16-bit gradients, where one run was on the host: other kernels

Batches = Mapping[str, Any] | Sequence[Mapping[str, Any]]
Path = tuple[object, ...]
Buffers = Callable[[], Mapping[str, Tensor]]
Run = Callable[[Evidence, Sequence[Microbatch], int], float]
"""Runs microbatches through the engine, with what their loss averages over; adds gradients to the
evidence, and returns what they must be multiplied with."""


@final
@dataclass(eq=False, kw_only=True)
class Proof(Subject):
    """Owner of what an engine has proven."""

    link: torch.dtype
    memory: ProofMemory
    _keys: dict[Path, str | None] = field(default_factory=dict, init=False)
    _done: set[Path] = field(default_factory=set, init=False)
    _agreed: set[Path] = field(default_factory=set, init=False)  # by all ranks
    _reference: Reference | None = field(default=None, init=False)  # None: cannot be compared
    _theirs: Evidence | None = field(default=None, init=False)
    on_host: bool = field(default=False, init=False)
    """Whether the model's own code ran there, without random numbers."""

    def is_done(self, batch: Batches, path: Path) -> bool:
        """Whether the code that a path names was proven, for all ranks."""
        if path not in self._agreed:
            if path not in self._done:
                first = batch if isinstance(batch, Mapping) else batch[0]
                key = key_of(self.model, loss_function=self.loss_function, batch=first, path=path)
                self._keys[path] = key
                if self.memory.has(key):
                    self._done.add(path)
            if all(self.server.world.gather_facts(path in self._done)):
                self._agreed.add(path)
        return path in self._agreed

    def see(
        self,
        batch: Batches,
        rule: Rule,
        route: Route,
        *,
        cut: bool,
        buffers: Mapping[str, Tensor],
        seed_of: SeedOf,
        room: int | None,
    ) -> None:
        """Run the model's own code, with the present weights; nothing else may be on the device.

        Args:
            batch: the first one.
            rule: what its loss averages over.
            route: how the model's code runs its layers.
            cut: whether a few tokens of a row are enough for the model.
            buffers: as training has left them.
            seed_of: as of `Reference`.
            room: device memory that there is; None: no limit is known.
        """
        failure: Exception | None = None
        for on_host in self._places(room):
            for short in (True, False) if cut else (False,):
                own = proof_rows(batch, rule, cut=short)
                # Of the first rank that has all entries.
                rows = max(self.server.world.gather_facts(own), key=lambda one: len(one[0]))
                self.on_host = on_host
                self._reference = Reference(
                    of=self,
                    rows=rows,
                    rule=rule,
                    route=route,
                    buffers=buffers,
                    seed_of=seed_of,
                    on_host=on_host,
                    room=max(0, ((room or 0) - self._least_bytes()) // 2),
                )
                try:
                    self._theirs = self._reference.run(self._scale)
                except torch.OutOfMemoryError as error:
                    failure = error
                    break
                except Exception as error:  # rows this short, or the model's own code at all
                    failure = error
                    continue
                return
        self._give_up(f"the model's own code fails on a few rows: {failure}")

    def _places(self, room: int | None) -> tuple[bool, ...]:
        """Where the model's own code may run: on the device, if it has room; else on the host."""
        if self.device.torch_device.type == "cpu":
            return (False,)
        return (False, True) if room is None or self._least_bytes() <= room else (True,)

    def _least_bytes(self) -> int:
        sizes = {n: u.form.weight_layout.nbytes for n, u in self.server.units.items()}
        around = sum(nbytes for name, nbytes in sizes.items() if not name.startswith("L"))
        return 2 * around + 5 * max(nbytes for name, nbytes in sizes.items() if name[0] == "L")

    @property
    def _scale(self) -> float:
        return FLOAT16_SCALE if self.link is torch.float16 else 1.0

    def _give_up(self, reason: str) -> None:
        self._reference = None
        logger.warning(
            "the first step is not compared with plain PyTorch: %s. Compare a few steps of a small "
            "version of this model yourself.",
            reason,
        )

    def check(self, rule: Rule, path: Path, run: Run, buffers: Buffers) -> None:
        """Run the engine on the same rows and compare; it must be left as it was.

        Args:
            rule: what the loss averages over.
            path: what is proven by it.
            run: the engine's run.
            buffers: gives those that training changes, as they are now.

        Raises:
            ProofError: the engine does not compute what the model's own code does.
        """
        theirs, self._theirs = self._theirs, None  # weights change
        if self._reference is not None:
            assert theirs is not None
            gather, failure = self.server.world.gather_facts, None
            mine = self._evidence(rule, self._reference.rows, run, buffers)
            is_finite = all(gather(theirs.is_finite))
            try:
                if is_finite:
                    self._compare(mine, theirs, self._reference)
            except ProofError as error:
                failure = str(error)
            for found in gather(failure):
                if found is not None:
                    raise ProofError(found)
            if is_finite:
                self.memory.add(self._keys.get(path))
            else:
                self._give_up("the model's own code has a loss or a gradient that is not finite")
        self._done.add(path)

    def _compare(self, mine: Evidence, theirs: Evidence, reference: Reference) -> None:
        def noise(wanted: bool) -> Evidence | None:  # noqa: FBT001
            wanted = any(self.server.world.gather_facts(wanted))
            return reference.run(self._scale * ODD_FACTOR) if wanted else None

        wide = self.on_host and self.link is not torch.float32
        tolerance = HOST_TOLERANCE if wide else TOLERANCE[self.link]
        order = [name for name, _ in self.model.named_parameters()]
        check(mine, theirs, tolerance=tolerance, order=order, noise=noise)

    def _evidence(
        self, rule: Rule, rows: Sequence[Microbatch], run: Run, buffers: Buffers
    ) -> Evidence:
        """The engine's, or a refusal: the model's own code runs the same rows."""
        before = {owner: buffer.clone() for owner, buffer in buffers().items()}
        mine = Evidence(torch.device("cpu") if self.on_host else self.device.torch_device)
        try:
            factor = run(mine, rows, rule.total(rows))
            mine.buffers = {
                owner: buffer.to("cpu", copy=True)
                for owner, buffer in buffers().items()
                if not same(buffer, before[owner])
            }
        except (ValueError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ProofError(
                "the engine raised an error on a model whose own forward and backward run: "
                f"{type(error).__name__}: {error}. Nothing has changed. Please report this model."
            ) from error
        finally:
            for owner, buffer in buffers().items():
                buffer.copy_(before[owner])
        return mine.scaled(factor)


def proof_rows(batch: Batches, rule: Rule, *, cut: bool) -> list[Microbatch]:
    """Two microbatches of two rows, which differ where they can; of an unknown rule, one.

    Args:
        batch: as a step is given it.
        rule: what the loss averages over.
        cut: whether rows of tokens are cut short.
    """
    if isinstance(batch, Mapping):
        first = some_rows(batch)
        # Of fewer rows the same, the other way round.
        second = turned(first) if num_rows(batch) < 4 else take_rows(batch, 2, 4)
        given: list[Mapping[str, Any]] = [first, second]
    else:
        given = [max(batch, key=len), batch[-1]]
    parts = [trial_batch(one, cut=cut) for one in given]
    for part in parts:  # something to learn from, also if the first tokens are a prompt
        if not rule.count(part):
            part["labels"] = torch.where(part["labels"] == IGNORED, 0, part["labels"])
    return [move_batch(part, "cpu") for part in (parts[:1] if rule is Rule.UNKNOWN else parts)]
