"""The numbers of a pass that is compiled ([Note: fusion] of the package)."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from l2l.planner.layer_cost.costs import PassCost, moved_bytes, plain_costs
from l2l.planner.layer_cost.tape import Kind, Operation, Tape

MAX_SOURCES = 8
MAX_SHARED_SOURCES = 4  # of a value with several readers
MAX_KERNELS_APART = 64  # between two that are looked at to become one
MAX_KERNELS = 1000  # that are looked at at all


def fused_costs(tape: Tape) -> list[PassCost]:
    """The cost of each phase of a tape; at most what it is if nothing is fused."""
    return [
        dataclasses.replace(
            cost,
            moved_bytes=min(cost.moved_bytes, bound.moved_bytes),
            num_kernels=min(cost.num_kernels, bound.num_kernels),
            working_bytes=min(cost.working_bytes, bound.working_bytes),
            kept_bytes=min(cost.kept_bytes, bound.kept_bytes),
        )
        for cost, bound in zip(_Fusion(tape).costs(), plain_costs(tape), strict=True)
    ]


@dataclass(slots=True)
class _Kernel:
    """Operators that a compiler would run as one; values and their bytes."""

    kind: Kind
    phase: int
    numel: int
    flops: float
    workspace_bytes: int
    reads: dict[int, int]
    writes: dict[int, int]
    readers: dict[int, int]  # value -> how many of the results depend on it

    def moved_bytes(self) -> float:
        """Bytes read and written that take time of their own."""
        nbytes = sum(self.reads.values()) + sum(self.writes.values())
        return moved_bytes(self.kind, nbytes=nbytes, flops=self.flops)

    def join(self, other: _Kernel) -> None:
        """Do what another kernel does, too."""
        self.writes |= other.writes
        for value, nbytes in other.reads.items():
            self.reads[value] = max(nbytes, self.reads.get(value, 0))
            self.readers[value] = self.readers.get(value, 0) + other.readers[value]
        for value in self.writes:
            self.reads.pop(value, None)

    def shared_bytes(self, other: _Kernel) -> int:
        """Bytes that need not be read twice if both are one."""
        mine = self.reads | self.writes
        return sum(nbytes for value, nbytes in other.reads.items() if value in mine)


@final
class _Fusion:
    """A tape as a compiler would run it ([Note: fusion])."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._outputs = frozenset[int]().union(*(phase.outputs for phase in tape.phases))
        self._final = tape.final_values()
        operations = self._needed()
        self._read_by: dict[int, list[Kind]] = {}
        for _, operation in operations:
            for value in operation.reads:
                self._read_by.setdefault(value, []).append(operation.kind)
        self._sources: dict[int, dict[int, int]] = {}  # of values that are not written
        kernels = [self._kernel(operation, phase) for phase, operation in operations]
        self._kernels = [kernel for kernel in kernels if kernel is not None]
        if len(self._kernels) <= MAX_KERNELS:
            self._kernels = _Joining(self._kernels).run()

    def _needed(self) -> list[tuple[int, Operation]]:
        """Operators on which something depends that outlives its phase, each with its phase."""
        tape = self._tape
        alive = self._outputs | tape.phases[-1].alive
        needed = {
            value
            for value in self._final
            if tape.buffer_of[value] in alive or tape.buffers[tape.buffer_of[value]].is_input
        }
        kept, phase = [], len(tape.phases) - 1
        for index in reversed(range(len(tape.operations))):
            while phase and index < tape.phases[phase - 1].num_operations:
                phase -= 1
            operation = tape.operations[index]
            if needed.intersection(operation.writes):
                needed.update(operation.reads)
                kept.append((phase, operation))
        return kept[::-1]

    def _nbytes(self, value: int) -> int:
        return self._tape.buffers[self._tape.buffer_of[value]].nbytes

    def _kernel(self, operation: Operation, phase: int) -> _Kernel | None:
        """A kernel for what an operator writes to memory; None if nothing."""
        needs_memory = operation.kind in (Kind.MATRIX, Kind.APART)
        reads = dict(operation.reads) if needs_memory else self._in_memory(operation.reads)
        writes = {}
        for value, nbytes in operation.writes.items():
            if operation.kind is Kind.FUSABLE and not self._is_written(value, operation, reads):
                self._sources[value] = reads
            else:
                writes[value] = nbytes
        if not writes:
            return None
        return _Kernel(
            kind=operation.kind,
            phase=phase,
            numel=operation.numel,
            flops=operation.flops,
            workspace_bytes=operation.workspace_bytes,
            reads=dict(reads),
            writes=writes,
            readers=dict.fromkeys(reads, 1),
        )

    def _in_memory(self, reads: Mapping[int, int]) -> dict[int, int]:
        """What is read in memory to have these values."""
        found: dict[int, int] = {}
        for value, nbytes in reads.items():
            for source, looked_at in self._sources.get(value, {value: nbytes}).items():
                found[source] = min(found.get(source, 0) + looked_at, self._nbytes(source))
        return found

    def _is_written(self, value: int, operation: Operation, sources: Mapping[int, int]) -> bool:
        """Whether a fusable operator's result has to be in memory."""
        buffer, readers = self._tape.buffer_of[value], self._read_by.get(value, [])
        return (
            (buffer in self._outputs and value in self._final)
            or operation.is_random
            or self._tape.buffers[buffer].is_input
            or Kind.MATRIX in readers
            or Kind.APART in readers
            or len(sources) > (MAX_SHARED_SOURCES if len(readers) > 1 else MAX_SOURCES)
        )

    def costs(self) -> list[PassCost]:
        """The cost of each phase."""
        costs = []
        for number, (phase, (peak, kept)) in enumerate(
            zip(self._tape.phases, self._memory(), strict=True)
        ):
            kernels = [kernel for kernel in self._kernels if kernel.phase == number]
            costs.append(
                PassCost(
                    matrix_flops=sum(kernel.flops for kernel in kernels),
                    moved_bytes=sum(kernel.moved_bytes() for kernel in kernels),
                    num_kernels=len(kernels),
                    working_bytes=peak,
                    output_bytes=self._sum(phase.outputs),
                    kept_bytes=kept,
                )
            )
        return costs

    def _sum(self, buffers: Iterable[int]) -> int:
        return sum(self._tape.buffers[buffer].nbytes for buffer in buffers)

    def _memory(self) -> list[tuple[int, int]]:
        """For each phase: most bytes alive at once, and bytes alive afterwards but for outputs."""
        touched = self._touched()
        freed = self._freed(touched)
        found, live, index = [], 0, 0
        for number, phase in enumerate(self._tape.phases):
            peak = live
            while index < len(self._kernels) and self._kernels[index].phase == number:
                kernel = self._kernels[index]
                written = dict.fromkeys(self._tape.buffer_of[value] for value in kernel.writes)
                born = [buffer for buffer in written if touched.get(buffer, [-1])[0] == index]
                dying = freed.get(index, [])
                overwritten = self._overwritten(kernel, born, dying)
                live += self._sum(born) - overwritten
                peak = max(peak, live + kernel.workspace_bytes)
                live -= self._sum(dying) - overwritten
                index += 1
            outputs = [buffer for buffer in phase.outputs if buffer in touched]
            found.append((peak, live - self._sum(outputs)))
            live -= self._sum(buffer for buffer in outputs if touched[buffer][-1] < index)
        return found

    def _touched(self) -> dict[int, list[int]]:
        """The kernels that read or write each buffer that was not given, in order."""
        touched: dict[int, list[int]] = {}
        for index, kernel in enumerate(self._kernels):
            for value in (*kernel.reads, *kernel.writes):
                touched.setdefault(self._tape.buffer_of[value], []).append(index)
        return {b: k for b, k in touched.items() if not self._tape.buffers[b].is_input}

    def _freed(self, touched: Mapping[int, list[int]]) -> dict[int, list[int]]:
        """For each kernel the buffers that nothing needs after it."""
        kept: set[int] = set()
        for value in self._final:
            if self._tape.buffer_of[value] in self._tape.phases[-1].alive:
                sources = self._sources.get(value, {value: 0})
                kept.update(self._tape.buffer_of[source] for source in sources)
        freed: dict[int, list[int]] = {}
        for buffer, kernels in touched.items():
            phase = self._kernels[kernels[-1]].phase
            if buffer not in kept and buffer not in self._tape.phases[phase].outputs:
                freed.setdefault(kernels[-1], []).append(buffer)
        return freed

    def _overwritten(self, kernel: _Kernel, born: Iterable[int], dying: Iterable[int]) -> int:
        """Bytes of results that take the place of a value that only one of them reads."""
        if kernel.kind is not Kind.FUSABLE:
            return 0
        once = {self._tape.buffer_of[value] for value, num in kernel.readers.items() if num == 1}
        sizes = [self._sum([buffer]) for buffer in dying if buffer in once]
        total = 0
        for nbytes in (self._sum([buffer]) for buffer in born):
            if nbytes in sizes:
                sizes.remove(nbytes)
                total += nbytes
        return total


@final
class _Joining:
    """Makes kernels one where a compiler would.

    Two of a size can be one if the later one need not read half of what it writes because the
    earlier one has read or written it, and nothing has to come between them.
    """

    def __init__(self, kernels: Sequence[_Kernel]) -> None:
        self._kernels = kernels
        made_by = {value: i for i, kernel in enumerate(kernels) for value in kernel.writes}
        self._needs = [{made_by[v] for v in kernel.reads if v in made_by} for kernel in kernels]
        self._before = [0] * len(kernels)  # a bit for every kernel that must come before
        for i, direct in enumerate(self._needs):
            for j in direct:
                self._before[i] |= self._before[j] | 1 << j
        self._joined: set[int] = set()  # kernels whose work a later one does

    def run(self) -> list[_Kernel]:
        """The kernels that are left, in an order that respects what they read."""
        for later in range(len(self._kernels)):
            for earlier in range(later - 1, max(-1, later - 1 - MAX_KERNELS_APART), -1):
                if self._can_join(earlier, later):
                    self._join(earlier, later)
        needs = {i: self._needs[i] for i in range(len(self._kernels)) if i not in self._joined}
        return _in_order(self._kernels, needs)

    def _can_join(self, earlier: int, later: int) -> bool:
        first, second = self._kernels[earlier], self._kernels[later]
        return (
            first.kind is second.kind is Kind.FUSABLE
            and first.numel == second.numel
            and first.phase == second.phase
            and earlier not in self._joined
            and 2 * first.shared_bytes(second) >= sum(second.writes.values())
            and not self._comes_between(earlier, later)
            and not self._comes_between(later, earlier)
        )

    def _comes_between(self, first: int, second: int) -> bool:
        return any(self._before[j] >> first & 1 for j in self._needs[second] if j != first)

    def _join(self, earlier: int, later: int) -> None:
        self._kernels[later].join(self._kernels[earlier])
        self._joined.add(earlier)
        self._needs[later] = (self._needs[later] | self._needs[earlier]) - {earlier, later}
        before_both = self._before[earlier] | self._before[later]
        both = 1 << earlier | 1 << later
        self._before[later] = before_both & ~both
        for i, direct in enumerate(self._needs):
            if earlier in direct:
                direct.remove(earlier)
                direct.add(later)
            if self._before[i] & both:
                self._before[i] |= before_both | both


def _in_order(kernels: Sequence[_Kernel], needs: Mapping[int, set[int]]) -> list[_Kernel]:
    """The kernels, each after what it needs, otherwise as they were given."""
    needed_by: dict[int, list[int]] = {}
    num_missing = {i: len(direct) for i, direct in needs.items()}
    for i, direct in needs.items():
        for j in direct:
            needed_by.setdefault(j, []).append(i)
    ready = [i for i, missing in num_missing.items() if missing == 0]
    heapq.heapify(ready)
    ordered = []
    while ready:
        i = heapq.heappop(ready)
        ordered.append(kernels[i])
        for j in needed_by.get(i, []):
            num_missing[j] -= 1
            if num_missing[j] == 0:
                heapq.heappush(ready, j)
    assert len(ordered) == len(needs), "kernels wait for each other"
    return ordered
