"""What one pass through a piece of a model costs on the device, without running it there.

`count_pass` runs a function on tensors without data (the meta device, or FakeTensors whose mode was
entered outside) and notes every operator that is dispatched, those of the backward pass too. From
the notes it reckons matrix arithmetic, memory traffic, number of kernels and most memory alive at
once. `seconds` turns that into time on a machine.

[Note: operators] Four kinds. *Matrix* operators (products, convolutions, attention) cost
arithmetic; what they read and write has to be in memory. *Fusable* ones (elementwise, copies,
lookups, and what works row by row: softmax, norms, reductions over the last dimension) can be done
by a compiler in one kernel with their neighbours. *Reductions* over other dimensions can swallow
what they read, and write their result. The rest stands *apart*: reads and writes memory. Views are
free.

[Note: fusion] Not fused, every operator is a kernel that reads its arguments and writes its
results, and memory is what autograd keeps alive. Fused, we do as a compiler does, roughly:

- what nobody needs is not computed (the output of a recomputed layer, and so its last product);
- the result of a fusable operator is written only if a matrix operator or one apart reads it, if it
  is returned, if it is random, or if it depends on many values in memory. Whoever else reads it
  computes it again from the values in memory it depends on, its *sources*;
- results of one size with common sources are written by one kernel, where the order allows it: the
  earlier ones are computed later. That can take more memory, as it does in the compiler;
- a result takes the place of a value of the same size that nothing else needs;
- memory is free after the last kernel that reads it.

A graph that is kept for a later backward pass keeps the written values that the latter will read,
as a compiler that cuts the graph in two does, not all that autograd would save. And nothing costs
more than if it were not fused.

[Note: attention] `scaled_dot_product_attention` without data would take the path that writes all
scores. We take the kernels an accelerator takes: flash attention for 16 bits without a mask, memory
efficient attention otherwise. Flops are those of the full square, causal or not: a causal kernel
does half of them at about half the speed. The backward kernel has memory of its own: the gradient
of the queries in float32 and, where several heads share a key, gradients of each head's key and
value.

[Note: submission] Small layers take as long as the host needs to submit them. Measured on an H200
with layers of BERT, Llama and GPT-2 of hidden size 256 and 512, compiled and not, streamed: a
layer's two passes take 3.6 to 6.3 ms where a small operation is submitted in 7.3 microseconds, and
`submission_seconds` is within a quarter of that (but for GPT-2 compiled, which takes twice as
long). Compiling saves next to nothing of it: fewer kernels, more to do before them.

[Note: calibration] Measured on an H200, compiled, one Llama layer (hidden 3072, MLP 8192, 24 heads,
8 for keys) on 8 x 1024 tokens; tests/test_layer_cost.py holds the figures and how near we come.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from graphlib import TopologicalSorter
from typing import Any, final

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from l2l.planner.hardware import Hardware
from l2l.planner.tape import FusedAttention, Kind, Operation, Tape

MATRIX_EFFICIENCY = 1.04  # of the layer's own products, against `Hardware.matrix_rate`
KERNEL_SECONDS = 3e-6
PASS_LAUNCHES = 70.0  # what a pass costs the host beside its kernels, in small operations
KERNEL_LAUNCHES = 6.0  # what a kernel costs it
MAX_SOURCES = 8
MAX_SHARED_SOURCES = 4  # of a value with several readers
MAX_KERNELS_APART = 64  # between two that are looked at to become one
MAX_KERNELS = 1000  # that are looked at at all


@dataclass(frozen=True, slots=True)
class PassCost:
    """What one pass costs."""

    matrix_flops: float  # matrix products, convolutions and attention
    # Read and written by everything else, and by matrix products too small to hide theirs.
    moved_bytes: float
    num_kernels: int
    working_bytes: int  # most memory alive at once, beyond inputs; outputs included
    output_bytes: int
    kept_bytes: int  # alive afterwards besides the outputs: what a later backward pass needs
    # The same two if it runs uncompiled; 0: it is not known.
    plain_working_bytes: int = 0
    plain_kept_bytes: int = 0

    def seconds(self, hardware: Hardware) -> float:
        """How long it takes on a machine."""
        return (
            self.matrix_flops / (hardware.matrix_rate * MATRIX_EFFICIENCY)
            + self.moved_bytes / hardware.memory_rate
            + self.num_kernels * KERNEL_SECONDS
        )

    def submission_seconds(self, hardware: Hardware) -> float:
        """How long the host needs to submit it; a pass of little work takes as long."""
        return (PASS_LAUNCHES + KERNEL_LAUNCHES * self.num_kernels) * hardware.launch_seconds


def count_pass(function: Callable[[], Any], *, fused: bool) -> PassCost:
    """The cost of a function on tensors without data.

    Args:
        function: runs the pass; what it takes are inputs, tensors in what it returns are outputs.
        fused: whether it will run compiled ([Note: fusion]).
    """
    with FusedAttention(), Tape() as tape:
        tape.end_phase(function())
    return _costs(tape, fused=fused)[0]


def count_kept_pass(
    forward: Callable[[], Tensor], backward: Callable[[GradientEdge], Any], *, fused: bool
) -> tuple[PassCost, PassCost]:
    """The costs of a forward pass whose graph is kept, and of its backward pass.

    Args:
        forward: returns the output with its graph.
        backward: is given the end of the graph, for `torch.autograd.grad`; the output is gone. Its
            working bytes include what the forward pass has kept.
        fused: whether both will run compiled ([Note: fusion]).
    """
    with FusedAttention(), Tape() as tape:
        output = forward()
        tape.end_phase(output)
        edge = get_gradient_edge(output)
        del output
        result = backward(edge)
        del edge
        tape.end_phase(result)
    before, after = _costs(tape, fused=fused)
    return before, after


def _costs(tape: Tape, *, fused: bool) -> list[PassCost]:
    """The cost of each phase of a tape; fused at most what it is if nothing is."""
    memory = [(one.peak_bytes, tape.nbytes(one.alive - one.outputs)) for one in tape.phases]
    plain = _costs_of(tape, tape.operations, memory)
    if not fused:
        return plain
    fusion = _Fusion(tape)
    found = _costs_of(tape, fusion.kernels, fusion.memory())
    pairs = zip(map(astuple, found), map(astuple, plain), strict=True)
    least = [PassCost(*map(min, *pair)) for pair in pairs]
    return [
        replace(one, plain_working_bytes=by.working_bytes, plain_kept_bytes=by.kept_bytes)
        for one, by in zip(least, plain, strict=True)
    ]


def _costs_of(
    tape: Tape, kernels: Sequence[Operation], memory: Iterable[tuple[int, int]]
) -> list[PassCost]:
    costs = []
    for number, (phase, (peak, kept)) in enumerate(zip(tape.phases, memory, strict=True)):
        own = [kernel for kernel in kernels if kernel.phase == number]
        flops = sum(kernel.flops for kernel in own)
        moved = sum(kernel.moved_bytes() for kernel in own)
        costs.append(PassCost(flops, moved, len(own), peak, tape.nbytes(phase.outputs), kept))
    return costs


@final
class _Fusion:
    """A tape as a compiler would run it ([Note: fusion])."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._outputs = frozenset[int]().union(*(phase.outputs for phase in tape.phases))
        self._final = tape.final_values()
        operations = self._needed()
        self._read_by: dict[int, list[Kind]] = {}
        for operation in operations:
            for value in operation.reads:
                self._read_by.setdefault(value, []).append(operation.kind)
        self._sources: dict[int, dict[int, int]] = {}  # of values that are not written
        kernels = [self._kernel(operation) for operation in operations]
        self.kernels = [kernel for kernel in kernels if kernel.writes]
        if len(self.kernels) <= MAX_KERNELS:
            self.kernels = _Joining(self.kernels).run()

    def _needed(self) -> list[Operation]:
        """Operators on which something depends that outlives its phase."""
        tape = self._tape
        outlives = self._outputs | tape.phases[-1].alive | tape.inputs
        needed = {value for value in self._final if tape.buffer_of[value] in outlives}
        kept = []
        for operation in reversed(tape.operations):
            if needed.intersection(operation.writes):
                needed.update(operation.reads)
                kept.append(operation)
        return kept[::-1]

    def _kernel(self, operation: Operation) -> Operation:
        """A kernel for what an operator writes to memory; that may be nothing."""
        needs_memory = operation.kind in (Kind.MATRIX, Kind.APART)
        reads = dict(operation.reads) if needs_memory else self._in_memory(operation.reads)
        writes = {}
        for value, nbytes in operation.writes.items():
            if operation.kind is Kind.FUSABLE and not self._is_written(value, operation, reads):
                self._sources[value] = reads
            else:
                writes[value] = nbytes
        return replace(operation, reads=dict(reads), writes=writes, readers=dict.fromkeys(reads, 1))

    def _in_memory(self, reads: Mapping[int, int]) -> dict[int, int]:
        """What is read in memory to have these values."""
        found: dict[int, int] = {}
        for value, nbytes in reads.items():
            for source, looked_at in self._sources.get(value, {value: nbytes}).items():
                most = self._tape.sizes[self._tape.buffer_of[source]]
                found[source] = min(found.get(source, 0) + looked_at, most)
        return found

    def _is_written(self, value: int, operation: Operation, sources: Mapping[int, int]) -> bool:
        """Whether a fusable operator's result has to be in memory."""
        buffer, readers = self._tape.buffer_of[value], self._read_by.get(value, [])
        return (
            (buffer in self._outputs and value in self._final)
            or operation.is_random
            or buffer in self._tape.inputs
            or Kind.MATRIX in readers
            or Kind.APART in readers
            or len(sources) > (MAX_SHARED_SOURCES if len(readers) > 1 else MAX_SOURCES)
        )

    def memory(self) -> list[tuple[int, int]]:
        """For each phase: most bytes alive at once, and bytes alive afterwards but for outputs."""
        tape, touched = self._tape, self._touched()
        freed = self._freed(touched)
        found, live, index = [], 0, 0
        for number, phase in enumerate(tape.phases):
            peak = live
            while index < len(self.kernels) and self.kernels[index].phase == number:
                kernel = self.kernels[index]
                written = dict.fromkeys(tape.buffer_of[value] for value in kernel.writes)
                born = [buffer for buffer in written if touched.get(buffer, [-1])[0] == index]
                dying = freed.get(index, [])
                overwritten = self._overwritten(kernel, born, dying)
                live += tape.nbytes(born) - overwritten
                peak = max(peak, live + kernel.workspace_bytes)
                live -= tape.nbytes(dying) - overwritten
                index += 1
            outputs = [buffer for buffer in phase.outputs if buffer in touched]
            found.append((peak, live - tape.nbytes(outputs)))
            live -= tape.nbytes(buffer for buffer in outputs if touched[buffer][-1] < index)
        return found

    def _touched(self) -> dict[int, list[int]]:
        """The kernels that read or write each buffer that was not given, in order."""
        touched: dict[int, list[int]] = {}
        for index, kernel in enumerate(self.kernels):
            for value in (*kernel.reads, *kernel.writes):
                touched.setdefault(self._tape.buffer_of[value], []).append(index)
        return {b: k for b, k in touched.items() if b not in self._tape.inputs}

    def _freed(self, touched: Mapping[int, list[int]]) -> dict[int, list[int]]:
        """For each kernel the buffers that nothing needs after it."""
        tape, kept = self._tape, set[int]()
        for value in self._final:
            if tape.buffer_of[value] in tape.phases[-1].alive:
                sources = self._sources.get(value, [value])
                kept.update(tape.buffer_of[source] for source in sources)
        freed: dict[int, list[int]] = {}
        for buffer, kernels in touched.items():
            phase = tape.phases[self.kernels[kernels[-1]].phase]
            if buffer not in kept and buffer not in phase.outputs:
                freed.setdefault(kernels[-1], []).append(buffer)
        return freed

    def _overwritten(self, kernel: Operation, born: Iterable[int], dying: Iterable[int]) -> int:
        """Bytes of results that take the place of a value that only one of them reads."""
        if kernel.kind is not Kind.FUSABLE:
            return 0
        tape = self._tape
        once = {tape.buffer_of[value] for value, number in kernel.readers.items() if number == 1}
        sizes = Counter(tape.sizes[buffer] for buffer in dying if buffer in once)
        sizes &= Counter(tape.sizes[buffer] for buffer in born)
        return sum(sizes.elements())


@final
class _Joining:
    """Makes kernels one where a compiler would.

    Two of a size can be one if the later one need not read half of what it writes because the
    earlier one has read or written it, and nothing has to come between them.
    """

    def __init__(self, kernels: Sequence[Operation]) -> None:
        self._kernels = kernels
        made_by = {value: i for i, kernel in enumerate(kernels) for value in kernel.writes}
        self._needs = [{made_by[v] for v in kernel.reads if v in made_by} for kernel in kernels]
        self._before = [0] * len(kernels)  # a bit for every kernel that must come before
        for i, direct in enumerate(self._needs):
            for j in direct:
                self._before[i] |= self._before[j] | 1 << j

    def run(self) -> list[Operation]:
        """The kernels that are left, each after what it needs, otherwise as they were given."""
        left = set(range(len(self._kernels)))
        for later in range(len(self._kernels)):
            for earlier in range(later - 1, max(-1, later - 1 - MAX_KERNELS_APART), -1):
                if earlier in left and self._can_join(earlier, later):
                    self._join(earlier, later)
                    left.remove(earlier)
        sorter = TopologicalSorter({i: self._needs[i] for i in left})
        sorter.prepare()
        ready: list[int] = []
        ordered = []
        while sorter.is_active():
            for i in sorter.get_ready():
                heapq.heappush(ready, i)
            first = heapq.heappop(ready)
            ordered.append(self._kernels[first])
            sorter.done(first)
        return ordered

    def _can_join(self, earlier: int, later: int) -> bool:
        first, second = self._kernels[earlier], self._kernels[later]
        if not (
            first.kind is second.kind is Kind.FUSABLE
            and first.numel == second.numel
            and first.phase == second.phase
        ):
            return False
        known = first.reads | first.writes  # need not be read twice if both are one
        spared = sum(nbytes for value, nbytes in second.reads.items() if value in known)
        return (
            2 * spared >= sum(second.writes.values())
            and not self._comes_between(earlier, later)
            and not self._comes_between(later, earlier)
        )

    def _comes_between(self, first: int, second: int) -> bool:
        return any(self._before[j] >> first & 1 for j in self._needs[second] if j != first)

    def _join(self, earlier: int, later: int) -> None:
        """Let a later kernel do what an earlier one does, too."""
        first, second = self._kernels[earlier], self._kernels[later]
        second.writes |= first.writes
        for value, nbytes in first.reads.items():
            second.reads[value] = max(nbytes, second.reads.get(value, 0))
            second.readers[value] = second.readers.get(value, 0) + first.readers[value]
        for value in second.writes:
            second.reads.pop(value, None)
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
