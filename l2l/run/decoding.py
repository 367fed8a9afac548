"""Layers run one after the other where the model's own code calls them, again and again.

So tokens are decoded: for each of them the model's code runs once, over all rows, with the cache
that it makes. Weights cross the link once a token, a layer ahead:

    fetch L0 S0
    forward L0 S0
    fetch L1 S1        meanwhile
    forward L1 S1
    fetch L2 S0        waits for forward L0
    ..
    forward L3 S1
    fetch L0 S0        waits for forward L2: the next token

This is the only code without a schedule, as nobody knows beforehand what the model's code will do.
Which layer comes after another is known from the last time; one that was not foreseen is fetched
when it is called. The last layers may stay.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, final

from l2l.device import Event
from l2l.model import emit, leaves_more, open_lists, run_layer
from l2l.parameter_server import PLACES
from l2l.run.parts import Parts
from l2l.schedule import Lane


@final
class Decoding:
    """Owner of which layer is in which slot while a model's code calls its layers."""

    def __init__(self, parts: Parts, *, slots: Sequence[str], staying: Sequence[int]) -> None:
        """The layers that stay are in their own slots; all others share `slots`."""
        self._partition, self._device = parts.partition, parts.device
        self._transfer, self._staying = parts.transfer, frozenset(staying)
        self._server = parts.server
        self._copies: dict[str, Event] = {}  # the last one from each buffer of the disk
        self._slots: dict[str, int | None] = dict.fromkeys(slots)  # the one used last at the end
        self._arrivals: dict[int, Event] = {}  # of layers that no pass has waited for yet
        self._passes: dict[str, Event] = {}  # the last one that has read a slot
        self._next: dict[int, int] = {}  # what was called after a layer
        self._last: int | None = None
        self.num_fetched = 0

    def call(self, index: int, args: Any, kwargs: Any) -> Any:
        """Run a layer, and fetch what will come next; what the layer returns."""
        if self._last is not None:
            self._next[self._last] = index
        self._last, device, found = index, self._device, list[Any]()
        slot = self._bring(index, keep=())
        if index in self._arrivals:
            device.wait(Lane.COMPUTE, self._arrivals.pop(index))
        run = partial(self._run, index, slot, args, kwargs, found)
        device.submit(Lane.COMPUTE, f"forward L{index} {slot}", run)
        if slot in self._slots:
            self._passes[slot] = device.record(Lane.COMPUTE)
        self._bring_ahead(index)
        return found[0]

    def _run(self, index: int, slot: str, args: Any, kwargs: Any, found: list[Any]) -> None:
        part = self._partition.layers[index]
        views = self._transfer.views(f"L{index}", slot)
        part.bind({owner: part.again(owner, one) for owner, one in views.items()})
        value = run_layer(part.module, args, kwargs, open_lists())
        if leaves_more(args, kwargs):
            value, left = value
            emit(left, args, kwargs)
        found.append(value)

    def _bring_ahead(self, index: int) -> None:
        """Fetch what comes after a layer, as far as there are slots."""
        keep, following = {index} - self._staying, index
        for _ in range(self._partition.num_layers):
            if len(keep) == len(self._slots):
                return
            following = self._next.get(following, following + 1) % self._partition.num_layers
            if following not in self._staying:
                self._bring(following, keep=keep)
                keep.add(following)

    def _read(self, index: int) -> str | None:
        """The buffer into which a layer's weights are read, if they are on disk."""
        unit, disk = self._server.units[f"L{index}"], self._server.disk
        if disk is None or "weights" not in unit.blocks:
            return None
        buffer = PLACES["weights"][self.num_fetched % len(PLACES["weights"])]
        if buffer in self._copies:
            self._device.wait(Lane.READ, self._copies.pop(buffer))
        read = partial(disk.fetch, unit, buffer)
        self._device.submit(Lane.READ, f"fetch L{index}.weights {buffer}", read)
        self._device.wait(Lane.FETCH, self._device.record(Lane.READ))
        return buffer

    def _bring(self, index: int, *, keep: Collection[int]) -> str:
        """The slot of a layer, to which it comes if it is not there; those to be kept stay."""
        if index in self._staying:
            return f"SL{index}"
        slot = next((slot for slot, layer in self._slots.items() if layer == index), None)
        if slot is None:
            slot, gone = next((s, layer) for s, layer in self._slots.items() if layer not in keep)
            if gone is not None:
                self._arrivals.pop(gone, None)
            if slot in self._passes:
                self._device.wait(Lane.FETCH, self._passes.pop(slot))
            buffer = self._read(index)
            fetch = partial(self._transfer.fetch, f"L{index}", slot, buffer)
            self._device.submit(Lane.FETCH, f"fetch L{index} {slot}", fetch)
            if buffer is not None:
                self._copies[buffer] = self._device.record(Lane.FETCH)
            self._arrivals[index] = self._device.record(Lane.FETCH)
            self.num_fetched += 1
        del self._slots[slot]
        self._slots[slot] = index
        return slot
