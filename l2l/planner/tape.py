"""What a pass does, noted operator by operator ([Note: operators] of layer_cost.py)."""

from __future__ import annotations

import enum
import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

from l2l.device import tensors_in


class Kind(enum.Enum):
    """[Note: operators]."""

    MATRIX = enum.auto()
    FUSABLE = enum.auto()
    REDUCTION = enum.auto()
    APART = enum.auto()


_ATEN = torch.ops.aten


def _packets(*names: str) -> frozenset[Any]:
    """Operators by name, those that this torch has."""
    return frozenset(getattr(_ATEN, name) for name in names if hasattr(_ATEN, name))


_FUSABLE = _packets(
    # copies, fills and moves
    *("_to_copy", "clone", "copy", "copy_", "fill", "fill_", "zero_", "cat", "stack", "roll"),
    *("zeros", "zeros_like", "new_zeros", "ones", "ones_like", "full", "full_like", "arange"),
    *("empty", "empty_like", "new_empty", "new_full", "scalar_tensor", "tril", "triu", "flip"),
    *("slice_backward", "select_backward", "constant_pad_nd", "repeat", "floor_divide"),
    # lookups
    *("embedding", "index", "index_select", "gather", "nll_loss_backward"),
    # row by row
    *("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data"),
    *("native_layer_norm", "_fused_rms_norm"),
)
_REDUCTIONS = _packets(
    *("sum", "mean", "amax", "amin", "prod", "var", "var_mean", "std", "any", "all", "argmax"),
    *("logsumexp", "linalg_vector_norm", "nll_loss_forward", "mse_loss"),
    *("native_layer_norm_backward", "_fused_rms_norm_backward", "native_group_norm"),
    *("native_group_norm_backward", "native_batch_norm", "native_batch_norm_backward"),
)
_GROUPED = _packets("_grouped_mm", "_scaled_grouped_mm")
_OVERWRITING = _packets("copy_", "fill_", "zero_")
_KERNELS = [f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")]
_ATTENTION = _packets(*_KERNELS)
_ATTENTION_BACKWARD = _packets(*(f"{name}_backward" for name in _KERNELS))
BALANCE = 175.0  # flops for each byte below which a matrix operator waits for memory


@dataclass(slots=True, kw_only=True)
class Operation:
    """One operator that does something, or several in one kernel.

    Its values are numbers, each in a buffer.
    """

    kind: Kind
    phase: int
    reads: dict[int, int]  # value -> bytes looked at
    writes: dict[int, int]
    is_random: bool
    numel: int
    flops: float
    workspace_bytes: int
    # Of a kernel: for each value, how many of the results depend on it.
    readers: dict[int, int] = field(default_factory=dict)

    def moved_bytes(self) -> float:
        """Bytes read and written, those that do not pass under matrix arithmetic."""
        nbytes = sum(self.reads.values()) + sum(self.writes.values())
        return max(0.0, nbytes - self.flops / BALANCE) if self.kind is Kind.MATRIX else nbytes


@dataclass(frozen=True, slots=True)
class Phase:
    """What was alive when a part of the tape ended, as autograd has it."""

    outputs: frozenset[int]  # buffers
    alive: frozenset[int]
    peak_bytes: int


@final
class Tape(TorchDispatchMode):
    """Notes operators, the values they read and write, and the memory alive.

    A buffer is the memory of one storage, given or allocated; a value is what it holds after one
    operator: writing in place makes a new value. Both are numbers.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self.sizes: list[int] = []  # of each buffer, in bytes
        self.inputs: set[int] = set()  # buffers that were given
        self.buffer_of: list[int] = []  # of each value
        self.phases: list[Phase] = []
        self._value_in: dict[int, int] = {}  # storage -> the value it holds
        self._alive: set[int] = set()
        self._peak_bytes = 0
        self._references: list[Any] = []

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        if any(map(is_traceable_wrapper_subclass, given)):
            with self:  # what its class makes of it is noted
                return func(*args, **kwargs)
        reads: dict[int, int] = {}
        writes: dict[int, int] = {}
        for tensor in given:
            self._look_at(tensor, self._value_of(tensor), reads)
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            if not self._is_known(tensor):
                value = self._value_of(tensor, is_input=False)
                writes[value] = tensor.untyped_storage().nbytes()
        call = _Call(func, args, kwargs, result)
        for tensor in call.changed():
            before = self._value_of(tensor)
            storage = tensor.untyped_storage()
            if func.overloadpacket in _OVERWRITING and tensor.nbytes == storage.nbytes():
                reads.pop(before, None)
            self._value_in[storage._cdata] = len(self.buffer_of)
            self.buffer_of.append(self.buffer_of[before])
            self._look_at(tensor, len(self.buffer_of) - 1, writes)
        if writes:
            operation = call.operation(len(self.phases), reads, writes)
            self.operations.append(operation)
            self._note_peak(operation.workspace_bytes)
        return result

    def _look_at(self, tensor: Tensor, value: int, total: dict[int, int]) -> None:
        """Add the bytes of a tensor; no more than its buffer has."""
        nbytes = total.get(value, 0) + tensor.nbytes
        total[value] = min(nbytes, self.sizes[self.buffer_of[value]])

    def nbytes(self, buffers: Iterable[int]) -> int:
        """Of buffers."""
        return sum(self.sizes[buffer] for buffer in buffers)

    def _note_peak(self, beside: int = 0) -> None:
        self._peak_bytes = max(self._peak_bytes, self.nbytes(self._alive) + beside)

    def end_phase(self, result: Any) -> None:
        """End a part of the tape; tensors in `result` are its outputs."""
        known = (tensor for tensor in tensors_in(result) if self._is_known(tensor))
        outputs = {self.buffer_of[self._value_of(tensor)] for tensor in known} - self.inputs
        self.phases.append(Phase(frozenset(outputs), frozenset(self._alive), self._peak_bytes))
        self._peak_bytes = self.nbytes(self._alive)

    def final_values(self) -> set[int]:
        """The values that buffers hold in the end."""
        return set({buffer: value for value, buffer in enumerate(self.buffer_of)}.values())

    def _is_known(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._value_in

    def _value_of(self, tensor: Tensor, *, is_input: bool = True) -> int:
        """The value a tensor shows; one not seen before is an input, or new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._value_in:
            buffer = len(self.sizes)
            self.sizes.append(storage.nbytes())
            self._value_in[key] = len(self.buffer_of)
            self.buffer_of.append(buffer)
            (self.inputs if is_input else self._alive).add(buffer)
            self._note_peak()
            # It goes with the tape, or tells when the storage does.
            gone = partial(self._remove, key, buffer)
            self._references.append(weakref.ref(storage, gone))
        return self._value_in[key]

    def _remove(self, key: int, buffer: int, _: object) -> None:
        self._value_in.pop(key, None)
        self._alive.discard(buffer)


@final
class _Call:
    """An operator with what it was given and what it returned."""

    def __init__(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        self.func, self.args, self.kwargs, self.result = func, args, kwargs, result
        self.packet = func.overloadpacket
        names = [argument.name for argument in func._schema.arguments]
        self.named = {**dict(zip(names, args, strict=False)), **kwargs}

    def changed(self) -> list[Tensor]:
        """Arguments that are written into."""
        if not self.func._schema.is_mutable:
            return []
        infos = {one.name: one.alias_info for one in self.func._schema.arguments}
        written = [name for name, info in infos.items() if info is not None and info.is_write]
        return tensors_in([self.named.get(name) for name in written])

    def operation(self, phase: int, reads: dict[int, int], writes: dict[int, int]) -> Operation:
        """What it does, with the values that it reads and writes."""
        is_random = torch.Tag.nondeterministic_seeded in self.func.tags
        return Operation(
            kind=self._kind(is_random=is_random),
            phase=phase,
            reads=reads,
            writes=writes,
            is_random=is_random,
            numel=max((tensor.numel() for tensor in tensors_in(self.result)), default=0),
            flops=self._flops(),
            workspace_bytes=self._workspace_bytes(),
        )

    def _kind(self, *, is_random: bool) -> Kind:
        """[Note: operators]."""
        if self.packet in flop_registry or self.packet in _GROUPED:
            return Kind.MATRIX
        if self.packet in _FUSABLE or is_random or _is_elementwise(self.func):
            return Kind.FUSABLE
        if self.packet in _REDUCTIONS:
            return Kind.FUSABLE if self._reduces_rows() else Kind.REDUCTION
        return Kind.APART

    def _reduces_rows(self) -> bool:
        """Whether the last dimension, and no other, is reduced."""
        given, dimensions = tensors_in(self.args), self.named.get("dim")
        if not given or given[0].ndim < 2 or dimensions is None:
            return False
        reduced = [dimensions] if isinstance(dimensions, int) else dimensions
        return {one % given[0].ndim for one in reduced} == {given[0].ndim - 1}

    def _flops(self) -> float:
        """Arithmetic of a matrix operator."""
        if self.packet in _ATTENTION or self.packet in _ATTENTION_BACKWARD:
            query, key, value = self._attended()
            pairs = math.prod(query.shape[:-1]) * key.shape[-2]
            weights = (1, 1) if self.packet in _ATTENTION else (3, 2)
            return float(2 * pairs * (weights[0] * query.shape[-1] + weights[1] * value.shape[-1]))
        if self.packet in _GROUPED:  # rows of the first, or what is summed over, fall into groups
            left, right = self.args[:2]
            columns = right.shape[-1] * (left.shape[0] if left.ndim == right.ndim == 3 else 1)
            return float(2 * math.prod(left.shape[-2:]) * columns)
        formula: Any = flop_registry.get(self.packet)
        return float(formula(*self.args, **self.kwargs, out_val=self.result)) if formula else 0.0

    def _attended(self) -> list[Tensor]:
        return [self.named[name] for name in ("query", "key", "value")]

    def _workspace_bytes(self) -> int:
        """Memory that an operator takes for itself ([Note: attention])."""
        if self.packet not in _ATTENTION_BACKWARD:
            return 0
        query, key, value = self._attended()
        nbytes = query.numel() * torch.float32.itemsize
        if key.shape[1] < query.shape[1]:
            nbytes += query.shape[1] // key.shape[1] * (key.nbytes + value.nbytes)
        return nbytes


def _is_elementwise(func: Any) -> bool:
    """Whether each element of the result comes from the same ones of the arguments."""
    name = func.overloadpacket.__name__
    if name.startswith("_foreach_"):
        return torch.Tag.pointwise in func.tags or "norm" not in name
    found = [func]
    if name.endswith("_"):  # in place: as the one out of place
        packet = getattr(_ATEN, name.removesuffix("_"), None)
        found += [getattr(packet, overload) for overload in packet.overloads()] if packet else []
    return any(torch.Tag.pointwise in one.tags for one in found)


@final
class FusedAttention(TorchFunctionMode):
    """Attention by the kernels of an accelerator ([Note: attention])."""

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, found = kwargs or {}, None
        if func is torch.nn.functional.scaled_dot_product_attention:
            found = _attention(*args, **kwargs)
        return func(*args, **kwargs) if found is None else found


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 (torch's arguments)
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001, FBT002
) -> Any:
    """What these kernels return; None if they do not take such tensors."""
    if query.ndim != 4:
        return None
    is_plain = attn_mask is None and query.shape[-1] == value.shape[-1]
    if is_plain and query.dtype in (torch.bfloat16, torch.float16):
        return _ATEN._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
    if enable_gqa:
        key, value = (
            one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value)
        )
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            attn_mask = torch.where(attn_mask, 0.0, -torch.inf).to(query.dtype)
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    needs_graph = torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value))
    return _ATEN._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, needs_graph, dropout_p, is_causal, scale=scale
    )[0]
