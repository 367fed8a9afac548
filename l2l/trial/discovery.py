"""How a model's own code runs its layers, found by running it once with real layers.

The model's code runs on a few rows, and so does every layer where the code calls it. Meanwhile it
is noted what becomes of every tensor that a layer returns: which layers are given it, and which
code between them, or after them, computes with it. From that follows the `Route`:

- a further stack begins where code computes with what the last layer returned, or where a layer is
  not given any of it;
- the code before a stack needs whatever the tensors that it makes were computed from.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from typing_extensions import override

from l2l.model import METADATA as SHAPES
from l2l.model import (
    CutError,
    Key,
    Microbatch,
    Partition,
    Recording,
    Returns,
    Route,
    emit,
    find_pointwise,
    leaves_more,
    num_rows,
    require_loss,
    watching,
)

RunLayer = Callable[[int, Any, Any], Any]
LossOf = Callable[[Any, Microbatch], Any]
Bound = Callable[[int], contextlib.AbstractContextManager[None]]


@dataclass(slots=True)
class Call:
    """One call of a layer, as it was seen."""

    layer: int
    given: list[Any]  # leaves of its arguments
    made: dict[int, Tensor] = field(default_factory=dict)  # what it returned, by entry
    first_shape: torch.Size = field(default_factory=torch.Size)  # of what entered its stack


@final
class Discovery(TorchFunctionMode):
    """Runs a model's code with real layers; then says by which route."""

    def __init__(self, partition: Partition, run_layer: RunLayer) -> None:
        """`run_layer` runs a layer with its real weights, and gives what it returns."""
        super().__init__()
        self._partition, self._run_layer = partition, run_layer
        self._calls: list[Call] = []
        self._makers: dict[int, Key] = {}  # by `id` of what layers returned
        self._deps: dict[int, frozenset[Key]] = {}  # by storage: what it was computed from
        self._alive: list[Any] = []  # nothing gets an `id` that another thing had
        self._computed: dict[Key, set[int]] = defaultdict(set)  # before which calls code used it
        self._asked: dict[int, frozenset[Key]] = defaultdict(frozenset)  # answers as numbers
        self._written: set[Key] = set()
        self._is_inside = False  # a layer

    def run(self, batch: Microbatch, loss_of: LossOf | None = None) -> tuple[Route, Route]:
        """The routes of a model's code on these rows: to its loss, and to all of its outputs.

        Args:
            batch: the rows.
            loss_of: gives the loss in the outputs; None, or if there is none: all of them.

        Raises:
            CutError: no layer was called.
        """
        self._num_rows, self._states = num_rows(batch), self._partition.layer_states()
        with self, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tensors that require gradients only here
            with watching(loss_of) as seen:
                outputs = self._partition.walk_with(batch, self._call)
            loss = None if loss_of is None else loss_of(seen(outputs), batch)
        if not self._calls:
            raise CutError("the model calls none of its layers. Name others with layers='...'.")
        self._outputs = pytree.tree_leaves(outputs)
        route = self._route()
        if loss is None:
            return route, route
        needed = self._needed_after(route, pytree.tree_leaves(loss))
        return self._for_loss(route, needed), route

    # ----------------------------------------------------------------------------------------------
    # What happens

    def _call(self, index: int, args: Any, kwargs: Any) -> Any:
        self._partition.refuse_changed(index, self._states)
        given = pytree.tree_leaves((list(args), dict(kwargs)))
        self._alive.append(given)
        one = Call(index, given)
        number = len(self._calls)
        self._calls.append(one)
        self._is_inside = True
        try:
            value = self._run_layer(index, args, kwargs)
            own = self._partition.returned_by(index, args, kwargs).own
            value = self._without_graph(value, own)
            self._note_made(one, number, pytree.tree_leaves(value), own)
        finally:
            self._is_inside = False
        if leaves_more(args, kwargs):
            value, left = value
            emit(left, args, kwargs)
        return value

    @staticmethod
    def _without_graph(value: Any, entries: Iterable[int]) -> Any:
        """What a layer returns as leaves of new graphs, so that no graph keeps its weights."""
        leaves, spec = pytree.tree_flatten(value)
        new = {id(leaves[entry]): _new(leaves[entry]) for entry in entries}
        return pytree.tree_unflatten([new.get(id(leaf), leaf) for leaf in leaves], spec)

    def _note_made(self, one: Call, number: int, made: list[Any], entries: Iterable[int]) -> None:
        """Note what a layer has returned."""
        self._alive.append(made)
        tensors = [leaf for leaf in one.given if isinstance(leaf, Tensor)]
        if not tensors:
            raise CutError(
                f"layer {one.layer} is called without any tensor. Expected the hidden state as its "
                "first argument."
            )
        before = self._calls[number - 1].made.values() if number else ()
        is_straight = any(leaf is other for leaf in tensors for other in before)
        first = self._calls[number - 1] if is_straight else None
        one.first_shape = tensors[0].shape if first is None else first.first_shape
        for entry in entries:
            one.made[entry] = made[entry]
            self._makers[id(made[entry])] = (number, entry)
            self._note(made[entry], frozenset({(number, entry)}))

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what a function of torch computes with, and what it makes of it."""
        found = func(*args, **(kwargs or {}))
        if not self._is_inside:
            with torch._C.DisableTorchFunction():
                self._see(func, args, kwargs or {}, found)
        return found

    def _see(self, func: Any, args: Any, kwargs: Any, found: Any) -> None:
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        used = {self._makers[id(one)] for one in given if id(one) in self._makers}
        now = len(self._calls)
        if func in SHAPES:
            used = {key for key in used if self._is_reshaped(key)}  # their shape is not known else
            for key in used:
                self._computed[key].add(now)
                self._asked[now] |= {key}
            return
        for key in used:
            self._computed[key].add(now)
        deps = self._of(given)
        made = [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, Tensor)]
        self._alive.append(made)
        if not made:
            self._asked[now] |= deps
        for one in made:
            self._note(one, deps)
        name = getattr(func, "__name__", "")
        if given and _writes(name, given, made):
            self._note(given[0], deps)
            if id(given[0]) in self._makers:
                self._written.add(self._makers.pop(id(given[0])))

    def _is_reshaped(self, key: Key) -> bool:
        one = self._calls[key[0]]
        return one.made[key[1]].shape != one.first_shape

    def _has_rows(self, key: Key) -> bool:
        shape = self._calls[key[0]].made[key[1]].shape
        return bool(shape) and shape[0] % self._num_rows == 0

    def _note(self, tensor: Tensor, deps: frozenset[Key]) -> None:
        storage = _storage(tensor)
        self._deps[storage] = self._deps.get(storage, frozenset()) | deps

    def _of(self, tensors: Iterable[Tensor]) -> frozenset[Key]:
        found = (self._deps.get(_storage(one), frozenset()) for one in tensors)
        return frozenset[Key]().union(*found)

    # ----------------------------------------------------------------------------------------------
    # What follows from it

    def _route(self) -> Route:
        last, calls = len(self._calls), self._calls
        given = self._given()
        uses: dict[Key, set[int]] = {key: set(times) for key, times in self._computed.items()}
        for call, keys in given.items():
            for key in keys:
                uses.setdefault(key, set()).add(call)
        for one in self._outputs:
            if isinstance(one, Tensor) and id(one) in self._makers:
                uses.setdefault(self._makers[id(one)], set()).add(last)
        stacks = self._stacks(given, uses)
        route = Route(
            layers=tuple(one.layer for one in calls), gives=((),) * last, stacks=tuple(stacks)
        )
        gives, asides = [], dict[int, tuple[int, ...]]()
        for call in range(last):
            own = [entry for number, entry in sorted(uses) if number == call]
            if call == route.end(route.stack_of(call)):
                gives.append(tuple(own))
                continue
            gives.append(tuple(entry for number, entry in given[call + 1] if number == call))
            later = tuple(e for e in own if max(uses[call, e]) > route.end(route.stack_of(call)))
            if later:
                asides[call] = later
        again = self._given_again(route)
        needs = self._needs(route, uses)
        for (call, _), key in again.items():
            stack = route.stack_of(call)
            needs = (*needs[:stack], needs[stack] | {key}, *needs[stack + 1 :])
        return Route(
            layers=route.layers,
            gives=tuple(gives),
            stacks=route.stacks,
            asides=asides,
            seen=frozenset(
                (c, e) for c, e in uses if c in asides or c == route.end(route.stack_of(c))
            ),
            needs=needs,
            again=again,
            constant=frozenset(k for k in uses if not calls[k[0]].made[k[1]].requires_grad),
            shared=frozenset(key for key in uses if not self._has_rows(key)),
            reshaped=frozenset(key for key in uses if self._is_reshaped(key)),
            written=frozenset(self._written),
        )

    def _given(self) -> dict[int, list[Key]]:
        """What layers have returned, among the arguments of every call."""
        found: dict[int, list[Key]] = {}
        for number, one in enumerate(self._calls):
            tensors = (id(leaf) for leaf in one.given if isinstance(leaf, Tensor))
            keys = (self._makers[one] for one in tensors if one in self._makers)
            found[number] = list(dict.fromkeys(keys))
        return found

    def _given_again(self, route: Route) -> dict[Key, Key]:
        """Arguments made by the model's code that a layer of an earlier stack was given before."""
        first: dict[int, Key] = {}
        found: dict[Key, Key] = {}
        for call, one in enumerate(self._calls):
            for place, leaf in enumerate(one.given):
                is_made = isinstance(leaf, Tensor) and id(leaf) not in self._makers
                if (
                    not is_made
                    or not leaf.is_floating_point()
                    or (route.is_first(call) and not place)
                ):
                    continue
                key = first.setdefault(id(leaf), (call, -1 - place))
                if route.stack_of(key[0]) < route.stack_of(call):
                    found[call, -1 - place] = key
        return found

    def _stacks(self, given: dict[int, list[Key]], uses: dict[Key, set[int]]) -> list[int]:
        """The calls before which the model's own code must run again."""
        found = {
            call for call, keys in given.items()
            if call and not any(number == call - 1 for number, _ in keys)
        }  # fmt: skip
        computed = {(key, time) for key, times in self._computed.items() for time in times}
        for key, times in uses.items():
            for time in times:
                if time == len(self._calls):
                    continue  # the code after the layers gets it as an aside
                is_straight = time == key[0] + 1 and (key, time) not in computed
                if not is_straight and not any(key[0] < one <= time for one in found):
                    found.add(key[0] + 1)
        return sorted(found)

    def _needs(self, route: Route, uses: dict[Key, set[int]]) -> tuple[frozenset[Key], ...]:
        """What the code before each stack, and after the last one, computes with."""
        found: list[frozenset[Key]] = []
        for stack in range(route.num_stacks):
            given = [one for call in route.calls(stack) for one in self._calls[call].given]
            found.append(self._needed(given, route.calls(stack).start, uses))
        found.append(self._needed(self._outputs, len(self._calls), uses))
        return tuple(found)

    def _needed(
        self, made: Iterable[Any], before: int, uses: Mapping[Key, Collection[int]]
    ) -> frozenset[Key]:
        """What code before a call must be given, to make these."""
        asked = (deps for time, deps in self._asked.items() if time <= before)
        needed = frozenset[Key]().union(*asked)
        needed |= self._of(one for one in made if isinstance(one, Tensor))
        needed = frozenset(key for key in needed if key[0] < before)
        # Others are replaced by something of the shape that the layer was given.
        return needed | frozenset(
            key
            for key in uses
            if key[0] < before and self._is_reshaped(key) and min(uses[key]) <= before
        )

    def _for_loss(self, route: Route, needed: frozenset[Key]) -> Route:
        """The same route where only the loss is wanted of the outputs."""
        needs = (*route.needs[:-1], needed)
        wanted = frozenset[Key]().union(*needs)
        asides = {
            call: tuple(entry for entry in entries if (call, entry) in wanted)
            for call, entries in route.asides.items()
        }
        return replace(route, needs=needs, asides={c: e for c, e in asides.items() if e})

    def _needed_after(self, route: Route, made: Iterable[Any]) -> frozenset[Key]:
        """What the code after the layers must be given, to make these."""
        reshaped = dict.fromkeys(route.reshaped & route.needs[-1], (0,))
        return self._needed(made, len(self._calls), reshaped)


def _new(tensor: Tensor) -> Tensor:
    """A tensor without its graph, which the model's code may write into."""
    return tensor.detach().requires_grad_(tensor.requires_grad).clone()


def _writes(name: str, given: list[Tensor], made: list[Tensor]) -> bool:
    """Whether a function has changed its first argument."""
    in_place = name.endswith("_") and not name.endswith("__")
    return (
        in_place
        or name == "__setitem__"
        or (name.startswith("__i") and bool(made) and made[0] is given[0])
    )


def _storage(tensor: Tensor) -> int:
    try:
        found: int = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # inside torch.vmap, or sparse
        found = id(tensor)
    return found


def run_through(
    partition: Partition, batch: Microbatch, route: Route, bound: Bound
) -> tuple[list[Recording], dict[Key, Tensor]]:
    """What the code before every stack makes of a few rows, and what the layers return.

    Where the route is straight, what enters the layers stands for what leaves them. Otherwise they
    run, each inside the block of `bound`, in which it has its weights.
    """
    delivered: dict[Key, Tensor] = {}
    recordings = []
    for stack in range(route.num_stacks):
        found = partition.prologue(batch, route, stack=stack, delivered=delivered)
        recordings.append(found)
        rides = zip(route.rides(stack), found.rides, strict=True)
        delivered.update({key: found.tensors[place] for key, place in rides})
        assert found.hidden is not None
        if route.is_straight:
            delivered = dict.fromkeys(route.ends(stack), found.hidden)
            continue
        handed = [found.hidden]
        for call in route.calls(stack):
            found.handed[call] = handed
            index, how, entries = route.layers[call], found.calls[call], route.entries(call)
            writes = partition.structures[index] in partition.changing_input
            hidden = handed[0].clone() if writes else handed[0]
            args, kwargs = how.arguments(hidden, found.tensors, handed[1:])
            with bound(index), how.autocasting():
                value = how.run(partition.layers[index].module, args, kwargs)
            made = dict(zip(entries, Returns.unwrap(value, entries), strict=True))
            delivered.update({(call, entry): one for entry, one in made.items()})
            found.aside_bytes += sum(made[entry].nbytes for entry in route.asides.get(call, ()))
            handed = [made[entry] for entry in route.gives[call]]
    return recordings, delivered


def pointwise_parts(
    partition: Partition, batch: Microbatch, route: Route, bound: Bound, *, tries: bool
) -> dict[str, tuple[str, ...]]:
    """By structure, the parts of layers that may run in tiles; `tries` as in `find_pointwise`."""
    found: dict[str, tuple[str, ...]] = {}
    recordings, _ = run_through(partition, batch, route, bound)
    for stack, recording in enumerate(recordings):
        for call in route.calls(stack):
            index, how = route.layers[call], recording.calls[call]
            structure, module = partition.structures[index], partition.layers[index].module
            assert recording.hidden is not None
            hidden, *beside = recording.handed.get(call, [recording.hidden])
            args, kwargs = how.arguments(hidden.clone(), recording.tensors, beside)
            if structure not in found:
                with bound(index):
                    run = partial(how.run, module, args, kwargs)
                    found[structure] = find_pointwise(module, run, hidden, tries=tries)
    return found


def own_loss(outputs: Any, _: Microbatch) -> Tensor | None:
    """The loss in a model's outputs, if there is one."""
    try:
        return require_loss(outputs)
    except ValueError:
        return None


def find_route(partition: Partition, batch: Microbatch, run_layer: RunLayer) -> Route:
    """The route of a model's code on these rows; `run_layer` runs a layer."""

    def see(index: int, args: Any, kwargs: Any) -> Any:
        if partition.form(index, args, kwargs) not in partition.returns:
            return partition.learn(index, run_layer, args, kwargs)
        return run_layer(index, args, kwargs)

    if len(partition.lists) == 1:
        try:
            hidden = partition.prologue(batch, learn=run_layer).hidden
            assert hidden is not None
            partition.epilogue(batch, hidden)
        except Exception:  # it does something else
            partition.forget()
        else:
            return partition.straight
    return Discovery(partition, see).run(batch, own_loss)[0]
