"""The parameter server as it was after one step, written while training goes on.

A unit's state is still from its update in step n until its update in step n + 1. A writer takes it
in that window. A disk needs longer than a step, so units are copied into spare host memory while
nobody waits for them (`copy_ahead`), those first that change first. Who is about to change a unit
that was neither copied nor written yet calls `before`, which copies it then; or, if there is no
memory left, waits until it is written. So what is written is the state of exactly one step,
whatever the timing.

A unit whose update of step n is itself left to the next step is `AWAITED` at first: its window
opens when that update is complete.

    AWAITED --complete--> READY --take--> BUSY --written--> DONE
                            |                                 ^
                            +--before, copy_ahead--> COPIED --take, written-+
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor


class ImageState(enum.Enum):
    """How far the writing of a unit is."""

    AWAITED = "awaited"
    READY = "ready"
    COPYING = "copying"
    COPIED = "copied"
    BUSY = "busy"
    DONE = "done"


NUM_WRITERS = 3  # threads that write, and mostly wait for the disk
WRITING_CORES = 1  # that updates leave to those who write and copy

# States in which a unit must not change: somebody reads it, or will.
UNSAFE = (ImageState.READY, ImageState.COPYING, ImageState.BUSY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A unit after a step."""

    unit: str
    tensors: Mapping[str, Tensor]
    steps: Mapping[str, int]
    is_copy: bool = False
    # Gives values of tensors that are on disk, and without values here; such a unit is not copied.
    read: Callable[[str], Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def value(self, name: str) -> Tensor:
        """A tensor, on the host."""
        tensor = self.tensors[name]
        if tensor.is_meta:
            assert self.read is not None
            return self.read(name)
        return tensor.cpu()


CopyOf = Callable[[Mapping[str, Tensor], bool], Mapping[str, Tensor]]


@final
class Snapshot:
    """Units on their way to a writer; all methods may be called from any thread."""

    def __init__(
        self,
        units: Sequence[str],
        *,
        image_of: Callable[[str], Image],
        copy_of: CopyOf,
        awaited: frozenset[str],
        changing: frozenset[str],
        spare_bytes: int,
        copies_ahead: bool = False,
        release: Callable[[Image], None] = lambda _: None,
    ) -> None:
        """Begin.

        Args:
            units: all of them, those first that are changed first.
            image_of: a unit as it is now, without copying.
            copy_of: copies of tensors, in host memory; urgent if a change waits for them.
            awaited: units whose update of this step is not complete.
            changing: units that the next step will change.
            spare_bytes: host memory that copies may take.
            copies_ahead: whether somebody will call `copy_ahead` until nothing is left to copy.
            release: called when nobody needs a copy any more.
        """
        self._release = release
        self._image_of = image_of
        self._copy_of = copy_of
        self._changing = changing
        self._spare_bytes = spare_bytes
        self._changed = threading.Condition()
        self._states = {
            unit: ImageState.AWAITED if unit in awaited else ImageState.READY for unit in units
        }
        self._urgent: list[str] = []
        self._copies: dict[str, Image] = {}
        self.is_given_up = False  # so that some units will not be written
        self.copies_ahead = copies_ahead
        self.stall_seconds = 0.0  # how long changes have waited so far

    @property
    def awaits(self) -> bool:
        """Whether any unit's update of the step is not complete."""
        with self._changed:
            return ImageState.AWAITED in self._states.values()

    # ----------------------------------------------------------------------------------------------
    # For those who change units

    def complete(self, unit: str) -> None:
        """The unit's update of this step is done."""
        with self._changed:
            if self._states[unit] is ImageState.AWAITED:
                self._states[unit] = ImageState.READY
                self._changed.notify_all()

    def before(self, unit: str) -> None:
        """The unit is about to change: copy it, or wait until it is written."""
        with self._changed:
            image = self._begin_copying(unit)
        if image is None or not self._copy(image, urgent=True):
            with self._changed:
                self._wait_for(unit)

    def _begin_copying(self, unit: str) -> Image | None:
        """The unit, if it is ready and there is memory for a copy, which it now has."""
        image = self._image_of(unit) if self._states[unit] is ImageState.READY else None
        if image is None or image.read is not None or image.nbytes > self._spare_bytes:
            return None
        self._spare_bytes -= image.nbytes
        self._states[unit] = ImageState.COPYING
        return image

    def _copy(self, image: Image, *, urgent: bool) -> bool:
        """Make the copy; False if there is no memory for it after all."""
        copy = None
        try:
            tensors = self._copy_of(image.tensors, urgent)
            copy = Image(unit=image.unit, tensors=tensors, steps=dict(image.steps), is_copy=True)
        except (MemoryError, RuntimeError):  # torch's own for too little memory
            return False
        finally:
            self._end_copying(image, copy)
        return True

    def _end_copying(self, image: Image, copy: Image | None) -> None:
        """Leave the copy to the writers; without one the unit itself, as before."""
        with self._changed:
            if self._states[image.unit] is not ImageState.COPYING:  # nobody wants it any more
                return
            if copy is None:
                self._spare_bytes += image.nbytes
                self._states[image.unit] = ImageState.READY
            else:
                self._copies[image.unit] = copy
                self._states[image.unit] = ImageState.COPIED
            self._changed.notify_all()

    def _wait_for(self, unit: str) -> None:
        if self._states[unit] not in UNSAFE:
            return
        if self._states[unit] is ImageState.READY:
            self._urgent.append(unit)
            self._changed.notify_all()
        began = time.perf_counter()
        while self._states[unit] in UNSAFE:
            self._changed.wait()
        self.stall_seconds += time.perf_counter() - began

    # ----------------------------------------------------------------------------------------------
    # For writers

    def copy_ahead(self) -> bool:
        """Copy the unit that changes next, once one is ready and there is memory for it.

        Returns:
            False: nothing is left to copy, or memory is short after all.
        """
        with self._changed:
            while (image := self._next_to_copy()) is None:
                waits = (ImageState.AWAITED, ImageState.READY)
                if not any(self._states[unit] in waits for unit in self._changing):
                    break
                self._changed.wait()
        if image is not None and self._copy(image, urgent=False):
            return True
        with self._changed:
            self.copies_ahead = False  # writers take what is left
            self._changed.notify_all()
        return False

    def _next_to_copy(self) -> Image | None:
        for unit, state in self._states.items():
            if state is ImageState.READY and unit in self._changing:
                return self._begin_copying(unit)
        return None

    def take(self) -> Image | None:
        """The next unit to write; waits for one. None: none is left."""
        with self._changed:
            while (found := self._next()) is None:
                if set(self._states.values()) <= {ImageState.BUSY, ImageState.DONE}:
                    return None
                self._changed.wait()
            if found in self._copies:
                self._states[found] = ImageState.DONE
                return self._copies.pop(found)
            self._states[found] = ImageState.BUSY
            self._urgent = [unit for unit in self._urgent if unit != found]
            return self._image_of(found)

    def _next(self) -> str | None:
        """What to write next.

        Copies first: they hold memory, and nobody waits for them. While there is memory to copy
        units that change, those are left to `copy_ahead`; if nobody copies ahead, writers begin
        with those that change last, and meet few changes. Without memory, they begin with those
        that are waited for first.
        """
        for unit in self._urgent:
            if self._states[unit] is ImageState.READY:  # and not copied for another change
                return unit
        ready = [unit for unit, state in self._states.items() if state is ImageState.READY]
        copied = (unit for unit, state in self._states.items() if state is ImageState.COPIED)
        if self.copies_ahead or not ready:
            found = next(copied, None)
            if found is not None or not ready:
                return found
        changing = [unit for unit in ready if unit in self._changing] or ready
        may_copy = self._image_of(changing[0]).nbytes <= self._spare_bytes
        if self.copies_ahead and may_copy:
            fixed = (unit for unit in ready if unit not in self._changing)
            return next(fixed, None)
        return ready[-1] if may_copy else ready[0]

    def written(self, image: Image) -> None:
        """A unit is written."""
        if image.is_copy:
            self._release(image)
        with self._changed:
            if image.is_copy:
                self._spare_bytes += image.nbytes
            self._states[image.unit] = ImageState.DONE
            self._changed.notify_all()

    def let_go(self) -> None:
        """Have no lock: an interrupt may have left this thread with one, for which writers wait."""
        while self._changed._is_owned():  # type: ignore[attr-defined]
            self._changed.release()

    def give_up(self) -> None:
        """Nothing more will be written: nobody waits any longer."""
        with self._changed:
            self.is_given_up = True
            self._states = dict.fromkeys(self._states, ImageState.DONE)
            self._urgent.clear()
            self._copies.clear()
            self._changed.notify_all()
