"""One microbatch through one part of the model: forward, recomputation, backward.

All autograd is here, and nothing of slots, cells or lanes: a pass gets the tensors to work on and
returns tensors. Two cares make a recomputed pass equal to its forward pass:

- random numbers: the pass's own generators (device/random_numbers.py) are seeded by (seed, step,
  layer, microbatch) before either, so dropout draws the same mask in both;
- buffers: what a layer changes in its own buffers (BatchNorm's statistics) it changes once per
  microbatch. The forward pass works on the real buffers and keeps a copy of what they were before;
  the recomputed pass works on that copy, which is then dropped. A buffer that the layer's code
  replaces by assignment is taken over after a forward pass (`ChangingBuffers.leave_layer`).

[Note: flags] A pass without graph still marks its inputs as requiring gradients where plain PyTorch
would have them so: matrix products fold their operands differently for a tensor that requires one,
even under `no_grad`, and the output differs in its last bits.

Gradients are taken with `torch.autograd.grad`, so a parameter that took no part has None, and is
skipped as torch would skip it.

Layers through a compiler: forward, and recomputation with backward as one program.

The compiler traces a layer's forward and backward together and cuts that graph in two: a forward
program that hands over some tensors, and a backward program that takes them and makes everything
else again. Which tensors are handed over is decided by operation, in the graph, under a limit:

    keep = 0     only the layer's inputs: the backward program recomputes the layer, and what it
                 does not need of it (the last matrix product) falls away by itself
    keep = 1     whatever saves time: nothing heavy is computed twice; for the resident tail
    between      the operations whose results save most time for their bytes

Handed-over tensors go through hooks. Weights, hidden state and recorded arguments are in slots and
cells, which will have other contents, or other addresses, when the backward pass comes: of these
only the place is noted. The rest is *kept*: the relay moves it to the stash and back.

One program serves all layers of a structure (`Template` in structures.py). A second one is
compiled if the sizes of its inputs change; that one takes any size.

[Note: random numbers] A recomputed layer must draw the random numbers of its forward pass. Layers
that draw any are compiled so that they draw through torch's own operators, which are redirected to
the generators of the pass (device/random_numbers.py), seeded alike before both passes. If
everything is drawn again, in its order, the numbers are the same; if some of it was kept, the rest
may get the numbers of what is not drawn any more. So the first backward pass of everything that is
compiled is compared with an uncompiled one. If they differ, the structure keeps nothing from then
on; if they differ even so, it runs uncompiled.
"""

from __future__ import annotations

import contextlib
import math
import time
import types
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.func import functional_call

from l2l.model.beside import Beside, must_wait, wait_for_others
from l2l.model.compiling import keep_programs, quietly, with_own_code
from l2l.model.gradient_sum import GradientSum
from l2l.model.passing import HIDDEN, Call, Returns
from l2l.model.structures import Template
from l2l.model.tiling import Tiles, tiled
from l2l.model.trees import Part

Gradients = Sequence[Tensor | None]
"""Of the outputs of a pass; None: nothing has used that one."""
NO_SUMS: Mapping[Any, Tensor] = types.MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardResult:
    """Gradients of one pass."""

    hidden: Tensor | None
    parameters: dict[str, Tensor]  # those that took part
    recorded: dict[int, Tensor]  # by index of the recorded tensor; those that took part
    beside: dict[int, Tensor] = field(default_factory=dict)  # by place; those that took part


def leaves(tensors: Mapping[str, Tensor], trained: Sequence[str]) -> dict[str, Tensor]:
    """The same tensors, those that are trained as leaves of a new graph."""
    names = set(trained)
    return {n: t.detach().requires_grad_() if n in names else t for n, t in tensors.items()}


@dataclass(frozen=True, slots=True)
class Leaves:
    """What a pass works on, as leaves of a new graph."""

    hidden: Tensor
    beside: list[Tensor]
    recorded: list[Tensor]
    parameters: dict[str, Tensor]
    wanted: dict[Any, Tensor]  # those whose gradients are asked for


@dataclass(slots=True)
class Walked:
    """A layer's pass with its graph, waiting for its backward pass."""

    outputs: list[Tensor]
    wanted: dict[Any, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """What a pass through a layer works on, the same in forward and backward."""

    part: Part
    tensors: Mapping[str, Tensor]
    trained: Sequence[str]
    call: Call
    hidden: Tensor
    beside: Sequence[Tensor] = ()  # what else the layer before it has handed on
    entries: Sequence[int] = (0,)  # of its return value, that are asked for
    constant: Collection[int] = ()  # of what is handed on, what has no gradient: places
    hidden_requires_gradient: bool
    recorded: list[Tensor]
    through: Sequence[int]  # recorded tensors that require gradients
    changes_input: bool  # whether the layer writes into its hidden state
    survival: float | None = None  # of a layer that may be left out ([Note: survival] in depth.py)
    tiles: Tiles | None = None  # of the layer, what runs some positions at a time
    sums: Mapping[Any, Tensor] = field(default_factory=dict)
    """Gradients that later passes have found for the same tensors: see `Walked`."""

    def leaves(self) -> Leaves:
        """Hidden state, recorded tensors and parameters as leaves of a new graph."""
        hidden = _leaf(self.hidden, requires=self.hidden_requires_gradient)
        beside = [
            _leaf(one, requires=self.hidden_requires_gradient and place not in self.constant)
            for place, one in enumerate(self.beside, start=1)
        ]
        recorded = [
            tensor.detach().requires_grad_() if index in self.through else tensor
            for index, tensor in enumerate(self.recorded)
        ]
        # What a layer's code does to one weight (a parametrization sets it anew) is not done to
        # others, although they lie in one buffer: each counts its changes for itself.
        frozen = self.part.tensors.parameters.keys() - set(self.trained)
        again, given = self.part.again, self.tensors.items()
        apart = {name: again(name, one) if name in frozen else one for name, one in given}
        bound = leaves(apart, self.trained)
        wanted: dict[Any, Tensor] = {name: bound[name] for name in self.trained}
        wanted |= {index: recorded[index] for index in self.through}
        handed = (hidden, *beside)
        wanted |= {HIDDEN.index - i: one for i, one in enumerate(handed) if one.requires_grad}
        return Leaves(hidden, beside, recorded, bound, wanted)

    def sums_of(self, gathered: Mapping[int, Tensor]) -> dict[Any, Tensor]:
        """Gradients of recorded tensors that this pass can go on adding to, as autograd would."""
        return {i: one for i, one in gathered.items() if one.dtype is self.recorded[i].dtype}

    def walk(self, *, with_graph: bool = True) -> Walked:
        """Run the layer ([Note: flags]); one that writes into its input gets a copy of it."""
        given = self.leaves()
        self.part.bind(given.parameters)
        has_graph = with_graph and self.call.has_graph
        with torch.set_grad_enabled(has_graph), self.call.autocasting():
            hidden = given.hidden.clone() if self.changes_input else given.hidden
            args, kwargs = self.call.arguments(hidden, given.recorded, given.beside)
            with tiled(self.part.module, self.tiles):
                value = self.call.run(self.part.module, args, kwargs)
            return Walked(Returns.unwrap(value, self.entries), given.wanted)

    def forward(self, *, with_graph: bool = False) -> list[Tensor]:
        """The layer's outputs; with a graph that is thrown away, to the last bit plain PyTorch's.

        Without one, matrix products inside the layer may fold their operands differently.
        """
        return [one.detach() for one in self.walk(with_graph=with_graph).outputs]

    def unwind(self, walked: Walked, gradients: Gradients) -> BackwardResult:
        """Take the gradients of a pass with graph."""
        return result_of(take_gradients(walked.outputs, gradients, walked.wanted, sums=self.sums))

    def backward(self, gradients: Gradients) -> BackwardResult:
        """Run the layer again with graph and take its gradients."""
        return self.unwind(self.walk(), gradients)

    def weighed(self, outputs: list[Tensor]) -> list[Tensor]:
        """What is handed on of the layer's outputs."""
        if self.survival is None:
            return outputs
        return [self.hidden + (outputs[0] - self.hidden) / self.survival, *outputs[1:]]

    def weigh_gradient(
        self, gradients: Gradients, backward: Callable[[Gradients], BackwardResult]
    ) -> BackwardResult:
        """The gradients of `weighed`, from those of the layer."""
        if self.survival is None or gradients[0] is None:
            return backward(gradients)
        gradient = gradients[0]
        of_layer = gradient / self.survival
        result, passed = backward([of_layer, *gradients[1:]]), gradient - of_layer
        hidden = passed if result.hidden is None else passed + result.hidden
        return replace(result, hidden=hidden)


def _leaf(tensor: Tensor, *, requires: bool) -> Tensor:
    """A tensor as a leaf of a new graph; integers never require gradients."""
    return tensor.detach().requires_grad_(requires and tensor.is_floating_point())


def result_of(found: Mapping[Any, Tensor]) -> BackwardResult:
    """Gradients by what they are of: names of parameters, or indices of recorded tensors."""
    others = {key: gradient for key, gradient in found.items() if not isinstance(key, str)}
    hidden = others.pop(HIDDEN.index, None)
    return BackwardResult(
        hidden=hidden,
        parameters={key: gradient for key, gradient in found.items() if isinstance(key, str)},
        recorded={key: gradient for key, gradient in others.items() if key >= 0},
        beside={HIDDEN.index - key: one for key, one in others.items() if key < 0},
    )


def take_gradients(
    outputs: Sequence[Tensor | GradientEdge | None],
    gradients: Sequence[Tensor | None],
    inputs: Mapping[Any, Tensor],
    *,
    sums: Mapping[Any, Tensor] = NO_SUMS,
) -> dict[Any, Tensor]:
    """Gradients of outputs, or of edges of a graph, for the inputs that took part in them.

    Args:
        outputs: what is differentiated; None: nothing.
        gradients: of these; None: nothing.
        inputs: by any keys.
        sums: gradients that some inputs have had from elsewhere. These are added first, and the
            others one by one, as autograd does where it sees all of it at once.
    """
    pairs = [
        (output, gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if gradient is not None
        and (isinstance(output, GradientEdge) or (output is not None and output.requires_grad))
    ]
    pairs = [(inputs[key], one) for key, one in sums.items() if key in inputs] + pairs
    if not inputs or not pairs:
        return {}
    ends, given = zip(*pairs, strict=True)
    found: Sequence[Tensor | None] = torch.autograd.grad(
        ends, list(inputs.values()), given, allow_unused=True
    )
    return {key: one for key, one in zip(inputs, found, strict=True) if one is not None}


# --------------------------------------------------------------------------------------------------
# Through a compiler


CLOSE_ENOUGH = 0.05  # relative difference of two gradients that differ by rounding to 16 bits
SMALL_BYTES = 1 << 20  # kept on the device beside the stash: statistics, seeds
EVERYTHING = 1.0  # to be kept, as far as that saves time


@final
class Packed:
    """The tensors that a graph needs for its backward pass: the graph's hooks.

    Nothing here leads back to the graph. That would be a circle through torch's own objects, which
    no collector sees: what was handed over and never used would stay for ever.
    """

    def __init__(self) -> None:
        self.kept: list[Tensor] = []
        self.set_anchors({})

    def set_anchors(self, bases: Mapping[str, Tensor]) -> None:
        """From here on these are the slots and cells that the pass reads; {}: none."""
        starts = [(name, base, base.data_ptr()) for name, base in bases.items()]
        self._spans = [(n, base.device, start, start + base.numel()) for n, base, start in starts]
        self._bases = bases
        self._typed: dict[tuple[str, torch.dtype], Tensor] = {}

    def pack(self, tensor: Tensor) -> Any:
        """Note the place of a tensor, or keep it."""
        address = tensor.data_ptr() if tensor.numel() else 0
        for name, device, start, end in self._spans:
            if start <= address < end and tensor.device == device:
                return name, address - start, tensor.dtype, tensor.size(), tensor.stride()
        if tensor.nbytes <= SMALL_BYTES:
            return tensor
        self.kept.append(tensor)
        return len(self.kept) - 1

    def unpack(self, packed: Any) -> Tensor:
        """The tensor again: what is in its place now, or what was kept."""
        if isinstance(packed, tuple):
            name, offset_bytes, dtype, size, stride = packed
            base = self._bases[name]
            if (name, dtype) not in self._typed:
                self._typed[name, dtype] = base[: base.numel() // 16 * 16].view(dtype)
            start = (base.storage_offset() + offset_bytes) // dtype.itemsize
            return self._typed[name, dtype].as_strided(size, stride, start)
        found: Tensor = self.kept[packed] if isinstance(packed, int) else packed
        return found


@final
@dataclass(slots=True)
class Handed:
    """What a forward pass hands to its backward pass, besides what is in slots and cells."""

    program: Program
    packed: Packed = field(default_factory=Packed)
    edges: list[GradientEdge | None] = field(default_factory=list)
    wanted: dict[Any, Tensor] = field(default_factory=dict)
    is_first: bool = False  # of what its forward pass had compiled


def _layer(
    module: nn.Module, tensors: dict[str, Tensor], args: Any, kwargs: Any, entries: tuple[int, ...]
) -> list[Tensor]:
    return Returns.unwrap(functional_call(module, tensors, args, kwargs), entries)


@final
class Program:
    """One structure's compiled code, for one limit on what is kept."""

    def __init__(self, *, backend: str, keep: float, own_random_numbers: bool) -> None:
        self.keep = keep
        self.own_random_numbers = own_random_numbers
        self.num_passes = 0
        self.is_trusted = True  # its gradients are those of an uncompiled pass, as far as is known
        self._num_graphs = 0
        self._is_new = False  # whether what was compiled beside the steps has not run yet
        self._backend = quietly(backend, settings=self._settings, on_ready=self._note_new)
        self._function: Callable[..., list[Tensor]] = torch.compile(
            with_own_code(_layer), backend=self._compile, fullgraph=True
        )

    def _note_new(self) -> None:
        self._is_new = True

    def _compile(self, graph: Any, inputs: Any) -> Any:
        self._num_graphs += 1
        return self._backend(graph, inputs)

    @contextlib.contextmanager
    def _settings(self) -> Iterator[None]:
        """Compile forward and backward, with settings that nobody else's code gets."""
        from torch._functorch import config as functorch
        from torch._inductor import config as inductor

        # Backward at once as well: compiled when it is first needed, it would miss these settings.
        partition = functorch.patch(
            activation_memory_budget=self.keep, force_non_lazy_backward_lowering=True
        )
        random = inductor.patch(fallback_random=self.own_random_numbers or inductor.fallback_random)
        with partition, random:
            yield

    def forward(
        self, template: Template, inputs: LayerInputs, *, anchors: Mapping[str, Tensor] | None
    ) -> tuple[list[Tensor], Handed]:
        """Run the layer; `anchors` are the slots and cells it reads, None keeps all tensors."""
        given, handed, num_graphs = inputs.leaves(), Handed(self), self._num_graphs
        args, kwargs = inputs.call.arguments(given.hidden, given.recorded, given.beside)
        packed = handed.packed
        hooks: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if anchors is not None:
            packed.set_anchors(anchors)
            hooks = saved_tensors_hooks(packed.pack, packed.unpack)
        with torch.enable_grad(), hooks, template.tensors(given.parameters) as tensors:
            entries = tuple(inputs.entries)
            outputs = self._function(template.module, tensors, args, kwargs, entries)
        packed.set_anchors({})
        handed.is_first = self._num_graphs > num_graphs or self._is_new
        self._is_new = False
        handed.wanted = given.wanted
        handed.edges = [get_gradient_edge(one) if one.requires_grad else None for one in outputs]
        return [one.detach() for one in outputs], handed

    def backward(
        self,
        handed: Handed,
        *,
        gradients: Gradients,
        anchors: Mapping[str, Tensor] | None,
        sums: Mapping[Any, Tensor] = NO_SUMS,
    ) -> BackwardResult:
        """Gradients of a layer; `anchors` as in its forward pass, as they are now."""
        handed.packed.set_anchors(anchors or {})
        found = take_gradients(handed.edges, gradients, handed.wanted, sums=sums)
        handed.edges.clear()
        handed.packed.set_anchors({})
        handed.packed.kept.clear()
        return result_of(found)


@final
@dataclass(eq=False, kw_only=True)
class Compiler:
    """The programs of an engine, one for each structure and limit; knows which do not compile."""

    backend: str | None  # None: nothing is compiled
    beside: Beside | None = None  # None: everything is compiled where it is met
    programs: dict[tuple[str, float], Program] = field(default_factory=dict)
    random: set[str] = field(default_factory=set)  # structures that draw random numbers
    uncompiled: set[str] = field(default_factory=set)  # those that run as they are
    seconds: float = 0.0
    _sums: dict[str, GradientSum] = field(default_factory=dict)
    _unchecked: set[str] = field(default_factory=set)  # whose gradients are to be compared
    _recomputed: set[str] = field(default_factory=set)  # that keep nothing
    _paused: bool = False

    def __post_init__(self) -> None:
        if self.backend == "inductor":
            keep_programs()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the block layers run as they are."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    @property
    def is_paused(self) -> bool:
        """Whether layers run as they are for now."""
        return self._paused

    @property
    def is_on(self) -> bool:
        """Whether anything may be compiled."""
        return self.backend is not None

    @property
    def is_ready(self) -> bool:
        """Whether code that is compiled where it is met may be now."""
        beside = self.beside
        return self.is_on and (beside is None or (beside.has_settled and not beside.is_busy))

    @property
    def has_waited(self) -> bool:
        """Whether layers of the last step ran as they are, because nothing was ready."""
        return self.beside is not None and self.beside.has_waited

    def settle(self) -> bool:
        """A step begins; whether it is the first that runs what was compiled beside earlier ones.

        No program may run while another engine's are traced ([Note: two traces] in beside.py).
        """
        settled = self.beside is not None and self.beside.settle()
        if self.is_on and (self.beside is None or not self.beside.is_busy):
            wait_for_others()
        return settled

    def running(self, beside: bool) -> contextlib.AbstractContextManager[None]:  # noqa: FBT001
        """A step: what it meets is compiled beside it and the next, or where it is met."""
        if self.beside is None:
            return contextlib.nullcontext()
        if not beside and not self.beside.is_busy:
            self.beside.has_settled = True
            return contextlib.nullcontext()
        return self.beside.running()

    def note_waiting(self) -> None:
        """A pass runs as it is, since its program is not ready."""
        if self.beside is not None:
            self.beside.has_waited = True

    def note_backward(self) -> None:
        """A layer's backward pass has ended."""
        if self.beside is not None:
            self.beside.note_backward()

    def close(self) -> None:
        """Compile nothing more."""
        if self.beside is not None:
            self.beside.close()

    def describe(self) -> str:
        """One line for a plan."""
        if self.backend is None:
            return "as they are"
        uncompiled = f", {len(self.uncompiled)} structures as they are" if self.uncompiled else ""
        if self.beside is not None:
            uncompiled += f", {self.beside.seconds:.1f} s beside steps"
            uncompiled += "; not ready yet: layers run as they are" if self.beside.is_busy else ""
        return (
            f"through torch.compile ({self.backend}): {len(self.programs)} programs, "
            f"{self.seconds:.1f} s{uncompiled}"
        )

    def note_random(self, structure: str) -> None:
        """A structure draws random numbers ([Note: random numbers])."""
        self.random.add(structure)
        self._unchecked.add(structure)

    def compiles(self, structure: str) -> bool:
        """Whether a structure is compiled, as far as is known."""
        known = self.is_on and not self._paused and structure not in self.uncompiled
        return known and not must_wait()

    def program(self, structure: str, *, keep: float) -> Program | None:
        """The program of a structure; None if it runs uncompiled."""
        if self.backend is None or not self.compiles(structure):
            return None
        keep = 0.0 if structure in self._recomputed and keep < EVERYTHING else keep
        if (structure, keep) not in self.programs:
            self.programs[structure, keep] = Program(
                backend=self.backend, keep=keep, own_random_numbers=structure in self.random
            )
        return self.programs[structure, keep]

    def gradient_sum(self, structure: str) -> GradientSum | None:
        """What adds up a structure's gradients; None if it runs uncompiled."""
        if self.backend is None or not self.compiles(structure):
            return None
        if structure not in self._sums:
            self._sums[structure] = GradientSum(backend=self.backend)
        return self._sums[structure]

    def trusts(self, structure: str, handed: Handed) -> bool:
        """Whether what was handed over may be used by a backward pass."""
        return self.compiles(structure) and handed.program.is_trusted

    def give_up(self, structure: str, reason: str | Exception) -> None:
        """A structure does not compile: it runs uncompiled from now on, with one warning."""
        if structure not in self.uncompiled:
            self.uncompiled.add(structure)
            reason = (str(reason).strip().splitlines() or [type(reason).__name__])[0]
            name = structure.partition(":")[2].partition(":")[0]
            warnings.warn(
                f"layers of type {name} run without torch.compile, more slowly: {reason}. Say "
                "compile=False to silence this.",
                stacklevel=2,
            )

    def must_check(self, structure: str, handed: Handed) -> bool:
        """Whether a backward pass is to be compared with an uncompiled one."""
        is_new = handed.is_first and structure in self.random
        return (is_new or structure in self._unchecked) and structure not in self.uncompiled

    def check(
        self, structure: str, program: Program, found: BackwardResult, expected: BackwardResult
    ) -> bool:
        """Compare two backward passes; if they differ, less is compiled.

        Gradients that are not finite tell nothing: then the next ones are compared.
        """
        # All parameters at once: gradients of some are nothing but noise (of biases of keys).
        groups = list(zip(_groups(found), _groups(expected), strict=True))
        if any(mine.keys() != theirs.keys() for mine, theirs in groups):
            self.give_up(structure, "its compiled gradients are of other parameters")
            return False
        for mine, theirs in groups:
            scale = _norm(theirs.values())
            if not math.isfinite(scale):
                self._unchecked.add(structure)
                return True
            distance = _norm(mine[name] - one for name, one in theirs.items())
            if not distance <= CLOSE_ENOUGH * scale + 1e-12:
                program.is_trusted = False
                if program.keep > 0:
                    self._recomputed.add(structure)
                else:
                    self.give_up(structure, "compiled, it does not repeat its random numbers")
                return False
        self._unchecked.discard(structure)
        return True

    @contextlib.contextmanager
    def timed(self, program: Program) -> Iterator[None]:
        """Count the time of a program's first passes, in which it is compiled."""
        if program.num_passes >= 2:
            yield
            return
        program.num_passes += 1
        start = time.perf_counter()
        try:
            with warnings.catch_warnings():  # torch, while compiling, warns of itself
                warnings.simplefilter("ignore")
                yield
        finally:
            self.seconds += time.perf_counter() - start


def _groups(result: BackwardResult) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return result.parameters, {} if result.hidden is None else {"hidden state": result.hidden}


def _norm(tensors: Iterable[Tensor]) -> float:
    """The norm of all of them together."""
    return math.hypot(*(float(tensor.float().norm()) for tensor in tensors))
