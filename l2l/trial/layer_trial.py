"""One layer of each structure, run on a few rows: what it returns, changes, draws and reads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from l2l.device import Device
from l2l.model import (
    Attribute,
    Compiler,
    CutError,
    Key,
    Microbatch,
    Partition,
    Recording,
    Route,
    State,
    attributes_of,
    first_argument,
    leaves,
    named_arguments,
    objects_in,
    open_lists,
    run_layer,
    same,
    states_of,
)
from l2l.parameter_server import ParameterServer
from l2l.trial.discovery import pointwise_parts, run_through

ROW_TOLERANCE = 1e-4  # of float32 values
HALF_TOLERANCE = 0.05  # of those of 16 bits
TRIAL_SEED = 1  # of whatever is run again


def first_tensor(value: Any) -> Tensor:
    """The first tensor in a value: of a layer's return value, its hidden state."""
    return next(leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def same_rows(found: Tensor, expected: Tensor) -> bool:
    """Whether rows are the same, computed alone and with another."""
    if found.shape != expected.shape:
        return True  # no rows, or nobody knows which
    tolerance = ROW_TOLERANCE if found.dtype is torch.float32 else HALF_TOLERANCE
    difference = (found.float() - expected.float()).norm()
    return float(difference) <= tolerance * float(expected.float().norm())


def repeats(device: Device, first: Any, again: Any) -> bool:
    """Whether two runs from the same seed agree ([Note: others' generators])."""
    agree = same(first, again)
    if not agree:
        device.random_numbers.seeds_defaults = True
    return agree


def _has_changed(
    before: Mapping[Attribute, tuple[Any, str]], now: Mapping[Attribute, tuple[Any, str]]
) -> bool:
    """Whether an object is the same as before and holds something else."""
    both = ((before[key], now[key]) for key in before.keys() & now.keys())
    return any(one is other and text != later for (one, text), (other, later) in both)


@final
@dataclass(slots=True)
class LayerTrial:
    """Runs layers with their real weights, slowly, and refuses those that cannot be streamed."""

    _partition: Partition
    _server: ParameterServer
    _device: Device
    _compiler: Compiler
    _changing: dict[str, list[int]] = field(default_factory=dict)
    """By structure, positions among buffers."""
    _left: dict[int, tuple[State, int]] = field(default_factory=dict)
    """Objects before a layer changed them."""
    mixes_rows: bool = False  # whether a layer computes rows with other rows
    reshaped: str | None = None  # a layer that changes the shape of the hidden state

    def changing(self) -> dict[int, tuple[str, ...]]:
        """The user's buffers that layers change when they run, of layers that do."""
        found = {}
        for index, structure in enumerate(self._partition.structures):
            owners = list(self._partition.layer_tensors[index].buffers)
            found[index] = tuple(owners[position] for position in self._changing.get(structure, ()))
        return {index: owners for index, owners in found.items() if owners}

    def run(self, index: int, args: Any, kwargs: Any) -> Any:
        """Run a layer of a structure that is not known yet; what it returns."""
        with self._partition.layers[index].kept():  # nobody holds its weights then
            return self._learn(index, args, kwargs)

    def _learn(self, index: int, args: Any, kwargs: Any) -> Any:
        part, structure = self._partition.layers[index], self._partition.structures[index]
        weights = self._layer_weights(index)
        part.bind(weights)
        buffers = part.buffers()
        before = {owner: buffer.clone() for owner, buffer in buffers.items()}
        given = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))
        attributes, form = attributes_of(part.module), pytree.tree_structure((args, kwargs))
        contents = self._partition.likeness.contents(index)
        states = states_of(named_arguments(part.module, args, kwargs))
        num_draws = self._device.random_numbers.num_draws
        value = self._try_layer(index, args, kwargs)
        if pytree.tree_structure((args, kwargs)) != form:
            raise CutError(
                f"layer {index} adds entries to its arguments (such as a list or dict), which "
                "would be lost: return what the model needs as part of the hidden state."
            )
        self._note_written(index, attributes)
        if _has_changed(contents, self._partition.likeness.contents(index)):
            self._compiler.uncompiled.add(structure)  # its layers would share what one has left
        part.take_over(buffers)
        changed = [
            i for i, name in enumerate(before) if not torch.equal(before[name], buffers[name])
        ]
        self._changing[structure] = changed
        for state in states:
            if state.is_past():
                self._left.setdefault(id(state.value), (state, index))
        self.meet(index, args, kwargs)
        part.bind(weights)
        self._refuse_written(index, (args, kwargs), given=given, value=value)
        # Once more, from the same seed and arguments: what differs was drawn from a generator that
        # is not ours.
        agrees = repeats(self._device, value, self._run(index, *given))
        if not agrees or self._device.random_numbers.num_draws > num_draws:
            self._compiler.note_random(structure)
        if changed:
            self._compiler.uncompiled.add(structure)
        if structure not in self._compiler.random and not self.mixes_rows:
            for owner, buffer in before.items():
                weights[owner].copy_(buffer)
            part.bind(weights)
            self.mixes_rows = self._mixes_rows(index, given[0], given[1], value)
        return value

    def _mixes_rows(self, index: int, args: Any, kwargs: Any, value: Any) -> bool:
        """Whether a layer gives the first row something else if it is alone, as far as is seen."""
        hidden = first_tensor((args, kwargs))
        rows = hidden.shape[0] if hidden.dim() else 1
        if rows < 2 or first_tensor(value).shape[:1] != hidden.shape[:1]:
            return False

        def cut(one: Tensor) -> Tensor:
            return one[:1] if one.dim() and one.shape[0] == rows else one

        try:
            alone = self._run(index, *pytree.tree_map_only(Tensor, cut, (args, kwargs)))
        except Exception:  # it takes no single row
            return False
        return not same_rows(first_tensor(alone), first_tensor(value)[:1])

    def _run(self, index: int, args: Any, kwargs: Any) -> Any:
        self._device.seed(TRIAL_SEED)
        return run_layer(self._partition.layers[index].module, args, kwargs, open_lists())

    def see(self, index: int, args: Any, kwargs: Any) -> Any:
        """Run a layer where the model calls it, and learn of it what is not known.

        Returns:
            its value, of which that requires gradients which does so in training.
        """
        if self._partition.form(index, args, kwargs) not in self._partition.returns:
            states = states_of(named_arguments(self._partition.layers[index].module, args, kwargs))
            self._partition.learn(index, self.run, args, kwargs)
            for state in states:
                state.restore()
        else:
            self.meet(index, args, kwargs)
        trained, part = (
            self._server.units[f"L{index}"].form.trained.names,
            self._partition.layers[index],
        )
        with part.kept():
            part.bind(leaves(self._layer_weights(index), trained))
            return self._run(index, args, kwargs)

    def through(self, batch: Microbatch, route: Route) -> tuple[list[Recording], dict[Key, Tensor]]:
        """As `run_through`, with real weights."""
        return run_through(self._partition, batch, route, self._with_weights)

    def pointwise(self, batch: Microbatch, route: Route) -> dict[str, tuple[str, ...]]:
        """As `pointwise_parts`, with real weights."""
        return pointwise_parts(self._partition, batch, route, self._with_weights, tries=True)

    @contextlib.contextmanager
    def _with_weights(self, index: int) -> Iterator[None]:
        """Inside the block a layer has its weights, and random numbers that are always the same."""
        with self._partition.layers[index].kept():
            self._partition.layers[index].bind(self._layer_weights(index))
            self._device.seed(TRIAL_SEED)
            yield

    def _note_written(self, index: int, before: dict[tuple[str, str], Any]) -> None:
        """Tell stubs of layers like this one which attributes such a layer writes."""
        structure, module = self._partition.structures[index], self._partition.layers[index].module
        written = {
            path.partition(".")[0] or name
            for (path, name), found in attributes_of(module).items()
            if (path, name) not in before or found != before[path, name]
        }
        for other, stub in zip(self._partition.structures, self._partition.stubs, strict=True):
            if other == structure:
                stub.note_written(written)

    def _try_layer(self, index: int, args: Any, kwargs: Any) -> Any:
        """Run a layer; what it returns."""
        value = self._run(index, args, kwargs)
        given, hidden = first_argument(args, kwargs), first_tensor(value)
        if not isinstance(given, Tensor) or given.shape != hidden.shape:
            shape = list(getattr(given, "shape", ()))
            shapes = f"is given {shape} and returns {list(hidden.shape)}"
            self.reshaped = f"layer {index} {shapes}"
        return value

    def meet(self, index: int, args: Any, kwargs: Any) -> None:
        """Refuse a layer that reads what another one, or itself, has left in an object.

        It is run with the objects as they are, and as they were before anything was left in them.
        """
        if not self._left:
            return
        given = named_arguments(self._partition.layers[index].module, args, kwargs)
        met = [self._left[id(v)] for _, v, _ in objects_in(given) if id(v) in self._left]
        if not met:
            return
        now = [before.now() for before, _ in met]
        try:
            found = self._output(index, args, kwargs)
            for before, _ in met:
                before.restore()
            reads = not same(self._output(index, args, kwargs), found)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # what it reads is not there, or is there twice
            reads = True
        for state in now:
            state.restore()
        if reads:
            before, layer = met[0]
            kind = type(given.get(before.name, before.value)).__name__
            raise CutError(
                f"layer {layer} changes its argument {before.name!r} ({kind}), and layer {index} "
                "reads what it has left there. Only the hidden state is passed from layer to "
                "layer: gradients through anything else would be lost. Turn off what shares it (a "
                "cache; prefix tuning fills one), or pass layers tensors that are made before the "
                "first layer runs."
            )

    def _output(self, index: int, args: Any, kwargs: Any) -> Tensor:
        """What a layer makes of another hidden state than the one that is given."""
        hidden = first_argument(args, kwargs)
        if not isinstance(hidden, Tensor):
            hidden = first_tensor((args, kwargs))
        other = hidden * 1.25 + 0.25 if hidden.is_floating_point() else hidden
        args = [other if value is hidden else value for value in args]
        kwargs = {name: other if value is hidden else value for name, value in kwargs.items()}
        with self._with_weights(index):
            return first_tensor(self._run(index, args, kwargs))

    def _layer_weights(self, index: int) -> dict[str, Tensor]:
        """A copy on the device of a layer's weights and buffers, into which it may write."""
        unit = self._server.whole(f"L{index}")
        weights = unit.weights.to(self._device.torch_device, copy=True)
        return unit.form.weights_in(weights)

    def _refuse_written(self, index: int, now: Any, *, given: Any, value: Any) -> None:
        """Refuse a layer that writes into a tensor besides its hidden state and reads it again."""
        hidden, original = first_argument(*now), first_argument(*given)
        pairs = zip(pytree.tree_leaves(now), pytree.tree_leaves(given), strict=True)
        if all(new is hidden or same(old, new) for new, old in pairs):
            return
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda one: original.clone() if one is hidden else one.clone(), now
        )
        if not same(first_tensor(value), first_tensor(self._run(index, args, kwargs))):
            raise CutError(
                f"layer {index} writes into a tensor that it is given besides its hidden state, "
                "and would find it changed when it runs again. Write into a copy instead."
            )
