"""Boundary tensors: what passes from layer to layer, for every microbatch.

Values live here, each named by what it is and its microbatch:

    h2 m0    the hidden state that enters layer 2 (kept for recomputation); hE enters the epilogue
    g2 m0    its gradient, and the gradients of recorded tensors gathered so far
    r m0     the recorded arguments of the layers (masks, rotary tables), once per microbatch
    k2 m0    what layer 2 keeps from its forward pass for its backward pass
    e m0     embedding rows gathered by the host; x m0 their gradients (lookup.py owns their memory)
    i m0     gradients of what the model was called with, for the user's code

A value is one or more tensors, packed into bytes. On the device values occupy *cells*, a fixed
number of equal buffers however many layers and microbatches there are; that is what makes device
memory constant. Values that lose their cell before their last use are copied out and back by the
stash and unstash lanes, as the schedule says. Where to is the policy: `"host"`, registered host
memory (constant device memory, the default), or `"device"`.

[Note: strides] A tensor keeps the order of its dimensions in memory: kernels may add up in another
order for a transposed tensor, and then a step would not equal plain PyTorch bit by bit.

[Note: one place] The gradient g2 is written by the very pass that is the last to read the hidden
state h2, so it can have h2's memory outside the cells: the stash of g2 waits for that pass, and
that pass waited for h2 to arrive. Half the stash is saved.

[Note: stash on disk] Where host memory has no room for all values, they go through few buffers,
and from there to disk and back; the schedule says which. Work of the disk's lanes may be done long
after it was submitted, when further lines were, or the step was. So it holds on to what belongs to
its step: forms, and which buffer a value is in.

Cells take the size of the largest value seen and keep it. Memory outside the cells is pooled by
size and reused from step to step, so a steady state allocates nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, final, get_args

import torch
from torch import Tensor

from l2l.device import PAGE_BYTES, Block, Device, DiskFolder, Work
from l2l.parameter_server import ALIGNMENT_BYTES, Arena, FlatLayout, round_up

StashPolicy = Literal["host", "device"]
NUM_FORMS = 4096  # that are remembered, and so views of cells
VALUES_OF_A_BLOCK = 64  # on disk, in one file


def parse_policy(policy: str) -> StashPolicy:
    """The policy named by the user.

    Raises:
        ValueError: the word is not a policy.
    """
    for known in get_args(StashPolicy):
        if policy == known:
            return known  # type: ignore[no-any-return]
    raise ValueError(f"stash={policy!r} is not known. Expected one of {get_args(StashPolicy)}.")


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """How the tensors of a value lie in its bytes; the same object for tensors that lie alike."""

    layout: FlatLayout
    orders: tuple[tuple[int, ...], ...]  # dimensions, outermost in memory first ([Note: strides])
    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]  # as given, which counts where a dimension has one entry

    @classmethod
    def of(cls, tensors: list[Tensor]) -> Form:
        """The form of these tensors."""
        return _form_of(tuple((tuple(t.shape), t.stride(), t.dtype) for t in tensors))

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The tensors as views of bytes."""
        flat, found = self.layout.views(buffer), []
        for index, order in enumerate(self.orders):
            one = flat[str(index)].permute(sorted(range(len(order)), key=order.__getitem__))
            given = zip(self.shapes[index], self.strides[index], one.stride(), strict=True)
            strides = [own if size == 1 or own == 0 else now for size, own, now in given]
            found.append(one.as_strided(self.shapes[index], strides, one.storage_offset()))
        return found


@lru_cache(maxsize=NUM_FORMS)
def _form_of(tensors: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]) -> Form:
    described, orders = [], []
    for index, (shape, strides, dtype) in enumerate(tensors):
        # What was expanded is kept once.
        kept = tuple(
            1 if stride == 0 else size for size, stride in zip(shape, strides, strict=True)
        )
        order = _memory_order(kept, strides)
        orders.append(order)
        described.append((str(index), tuple(kept[dimension] for dimension in order), dtype))
    return Form(
        FlatLayout.of(described),
        tuple(orders),
        tuple(shape for shape, _, _ in tensors),
        tuple(strides for _, strides, _ in tensors),
    )


def compact(tensor: Tensor) -> Tensor:
    """A tensor with what was expanded of it once."""
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def pool_size(nbytes: int) -> int:
    """Bytes to take for a value: rounded up to an eighth of a power of two, at least a page.

    So batches of many lengths share few sizes, and memory is reused between them.
    """
    granule = max(PAGE_BYTES, 1 << max(0, nbytes.bit_length() - 4))
    return round_up(max(nbytes, 1), granule)


def _memory_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Dimensions by falling stride if the tensor fills its memory, else as they are."""
    order = tuple(sorted(range(len(shape)), key=lambda dimension: -strides[dimension]))
    tensor = torch.empty_strided(shape, strides, device="meta")
    return order if tensor.permute(order).is_contiguous() else tuple(range(len(shape)))


@final
class Parked:
    """What one side of a step has left to the other, by name, in memory that is somebody else's."""

    def __init__(self, kept: dict[str, Tensor], returned: list[tuple[str, Tensor]]) -> None:
        """Memory goes to `returned` once nobody needs it any more."""
        self.forms: dict[str, Form] = {}  # of values
        self.kept, self._returned = kept, returned

    def tensors(self, value: str) -> list[Tensor]:
        """Those of a value, as views; its copy must be done."""
        return self.forms[value].views(self.kept[value])

    def __del__(self) -> None:
        self._returned.extend(self.kept.items())


@final
class Stash:
    """Owner of cells and of the values that are not in a cell."""

    def __init__(
        self,
        *,
        device: Device,
        arena: Arena,
        policy: StashPolicy,
        folder: DiskFolder | None = None,
    ) -> None:
        """`folder`: where values go for which memory has no room."""
        self._folder = folder
        self._buffers: dict[str, Tensor] = {}  # through which they go
        self._placed: dict[tuple[str, str], Tensor] = {}  # of this step: value, name of the buffer
        self._blocks: dict[tuple[int, int], Block] = {}  # by number and size of what is there
        self._device = device
        self._arena = arena
        self.policy: StashPolicy = policy
        self._cells: dict[str, Tensor] = {}
        self._views: dict[tuple[str, Form], list[Tensor]] = {}  # of cells
        self._forms: dict[str, Form] = {}
        self._kept: dict[str, Tensor] = {}
        self._adopted: set[str] = set()
        self._pool: dict[int, list[Tensor]] = {}
        self._outgrown: list[Tensor] = []
        self._returned: list[tuple[str, Tensor]] = []  # memory that nobody needs after this step

    def put(self, cell: str, value: str, tensors: list[Tensor]) -> None:
        """Write a value into a cell; the compute lane does this."""
        form = self._forms[value] = Form.of(tensors)
        self._cell(cell, form.layout.nbytes)
        for view, tensor in zip(self._views_of(cell, form), tensors, strict=True):
            compact(view).copy_(compact(tensor))

    def get(self, cell: str, value: str) -> list[Tensor]:
        """The tensors of a value in a cell, as views."""
        return [*self._views_of(cell, self._forms[value])]

    def _views_of(self, cell: str, form: Form) -> list[Tensor]:
        if (cell, form) not in self._views:
            self._views[cell, form] = form.views(self._cells[cell])
        return self._views[cell, form]

    def adopt(self, value: str, form: Form, memory: Tensor) -> None:
        """Let a value have memory outside the cells that somebody else owns."""
        self._forms[value] = form
        self._adopted.add(value)  # first: an interrupt in between must not make it the stash's own
        self._kept[value] = memory

    def cell(self, cell: str) -> Tensor:
        """The bytes of a cell."""
        return self._cells[cell]

    def stash(
        self, value: str, cell: str, buffer: str | None = None, *, apart: bool = False
    ) -> None:
        """Copy a value out of its cell; the stash lane does this.

        Args:
            value: Which one.
            cell: Where it is.
            buffer: Where to, if buffers are few ([Note: stash on disk]).
            apart: Not to the memory of another ([Note: one place]), which will be read again.
        """
        nbytes = self._forms[value].layout.nbytes
        if buffer is not None:
            target = self._place(value, buffer, nbytes, self._placed)
        else:
            if value not in self._kept:
                self._kept[value] = self._take(nbytes) if apart else self._memory_for(value, nbytes)
            target = self._kept[value]
        target[:nbytes].copy_(self._cells[cell][:nbytes], non_blocking=True)

    def unstash(self, value: str, cell: str, buffer: str | None = None) -> None:
        """Copy a value into a cell again; the unstash lane does this."""
        nbytes = self._forms[value].layout.nbytes
        kept = self._kept.get(value) if buffer is None else self._placed.get((value, buffer))
        target = self._cell(cell, nbytes)[:nbytes]
        if kept is None:  # only a schedule with a missing wait gets here, on the checking device
            self._device.poison(target)
        else:
            target.copy_(kept[:nbytes], non_blocking=True)

    def writing(self, value: str, buffer: str, number: int) -> Work:
        """What the write lane does to copy a value from its buffer to its place on disk."""
        forms, placed = self._forms, self._placed

        def write() -> None:
            self._on_disk(value, placed[value, buffer], number, forms, is_read=False)

        return write

    def reading(self, value: str, buffer: str, number: int) -> Work:
        """What the read lane does to bring it again, perhaps to another buffer."""
        forms, placed = self._forms, self._placed
        if value in forms:  # whose copy from there may be submitted before it is read
            self._place(value, buffer, forms[value].layout.nbytes, placed)

        def read() -> None:
            target = self._place(value, buffer, forms[value].layout.nbytes, placed)
            self._on_disk(value, target, number, forms, is_read=True)

        return read

    def _place(
        self, value: str, buffer: str, nbytes: int, placed: dict[tuple[str, str], Tensor]
    ) -> Tensor:
        """The memory of a value in a buffer, which becomes larger if it must."""
        if (value, buffer) not in placed:
            held = self._buffers.get(buffer)
            if held is None or held.numel() < nbytes:
                if held is not None:
                    self._returned.append((value, held))  # a lane may still need it in this step
                self._buffers[buffer] = self._take(nbytes)
            placed[value, buffer] = self._buffers[buffer]
        return placed[value, buffer]

    def _on_disk(
        self, value: str, memory: Tensor, number: int, forms: Mapping[str, Form], *, is_read: bool
    ) -> None:
        """Read a value from its place on disk, or write it there: values of a size share files."""
        assert self._folder is not None
        nbytes = round_up(forms[value].layout.nbytes, PAGE_BYTES)
        key = number // VALUES_OF_A_BLOCK, nbytes
        if key not in self._blocks:
            self._blocks[key] = self._folder.make(VALUES_OF_A_BLOCK * nbytes)
        move = self._folder.read if is_read else self._folder.write
        move(self._blocks[key], memory[:nbytes], start=number % VALUES_OF_A_BLOCK * nbytes)

    def park(self, values: Collection[str]) -> Parked:
        """Set values aside that were copied out of their cells; nothing else of them stays."""
        parked = Parked({value: self._kept.pop(value) for value in values}, self._returned)
        parked.forms.update({value: self._forms[value] for value in values})
        return parked

    def park_again(self, values: Collection[str], parked: Parked) -> None:
        """Set values aside once more, as they were."""
        parked.kept.update({value: self._kept.pop(value) for value in values})

    def resume(self, parked: Parked) -> None:
        """Go on with values that were set aside."""
        self._forms.update(parked.forms)
        for value in [*parked.kept]:
            self._kept[value] = parked.kept.pop(value)

    def end_step(self) -> None:
        """Forget all values; their memory goes back to the pool."""
        for value in [*self._kept]:  # one at a time: after an interrupt this is done again
            buffer = self._kept.pop(value)
            if value not in self._adopted:
                self._device.poison(buffer)
                self._pool.setdefault(buffer.numel(), []).append(buffer)
        self._adopted.clear()
        self._forms, self._placed = {}, {}  # others may hold on to them
        self._outgrown.clear()
        if len(self._views) > NUM_FORMS:
            self._views.clear()
        while self._returned:
            _, buffer = self._returned.pop()
            self._pool.setdefault(buffer.numel(), []).append(buffer)

    def leave(self) -> None:
        """Give memory of the device back, and of the disk; no step may run."""
        self.end_step()
        for memory in self._buffers.values():
            self._pool.setdefault(memory.numel(), []).append(memory)
        self._buffers.clear()
        for block in self._blocks.values():
            assert self._folder is not None
            self._folder.remove(block)
        self._blocks.clear()
        self._cells.clear()
        self._views.clear()
        if self.policy == "device":
            self._pool.clear()

    def close(self) -> None:
        """Give all memory back."""
        self.leave()
        self._pool.clear()

    def cell_bytes(self) -> int:
        """Bytes of all cells, and of a stash on the device."""
        pooled = sum(b.numel() for buffers in self._pool.values() for b in buffers)
        kept = sum(buffer.numel() for buffer in self._kept.values())
        outside = pooled + kept if self.policy == "device" else 0
        return sum(cell.numel() for cell in self._cells.values()) + outside

    def _cell(self, cell: str, nbytes: int) -> Tensor:
        held = self._cells.get(cell)
        if held is None or held.numel() < nbytes:
            if held is not None:
                self._outgrown.append(held)  # a lane may still read it; it ends with the step
            self._cells[cell] = self._device.empty(max(nbytes, ALIGNMENT_BYTES))
            for key in [key for key in self._views if key[0] == cell]:
                del self._views[key]
        return self._cells[cell]

    def _memory_for(self, value: str, nbytes: int) -> Tensor:
        """Memory for a value; a gradient takes that of its hidden state ([Note: one place])."""
        if value.startswith("g"):
            hidden = self._kept.get("h" + value[1:])
            if hidden is not None and hidden.numel() >= nbytes:
                return self._kept.pop("h" + value[1:])
        return self._take(nbytes)

    def _take(self, nbytes: int) -> Tensor:
        for size in sorted(self._pool):  # few sizes: see `pool_size`
            if size >= nbytes and self._pool[size]:
                return self._pool[size].pop()
        size = pool_size(nbytes)
        if self.policy == "host":
            return self._arena.take("stash", size, torch.uint8, registered=True)
        return self._device.empty(size)
