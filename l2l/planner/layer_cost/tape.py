"""What a pass does, noted operator by operator ([Note: operators] of the package)."""

from __future__ import annotations

import enum
import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from typing_extensions import override


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
_ATTENTION = _packets(
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
_ATTENTION_BACKWARD = _packets(
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
)


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory of one storage, given or allocated."""

    nbytes: int
    is_input: bool


@dataclass(frozen=True, slots=True)
class Operation:
    """One operator that does something; its values are numbers, each in a buffer."""

    kind: Kind
    reads: Mapping[int, int]  # value -> bytes looked at
    writes: Mapping[int, int]
    is_random: bool
    numel: int
    flops: float
    workspace_bytes: int


@dataclass(slots=True)
class Phase:
    """Where a part of the tape ends, and what was alive, as autograd has it."""

    num_operations: int
    outputs: frozenset[int]  # buffers
    alive: frozenset[int]
    peak_bytes: int


@final
class Tape(TorchDispatchMode):
    """Notes operators, the values they read and write, and the memory alive.

    A value is what a buffer holds after one operator: writing in place makes a new value.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self.buffers: list[Buffer] = []
        self.buffer_of: list[int] = []  # of each value
        self.phases: list[Phase] = []
        self._value_in: dict[int, int] = {}  # storage -> the value it holds
        self._alive: set[int] = set()
        self._live_bytes = 0
        self._peak_bytes = 0
        self._finalizers: list[weakref.finalize[Any, Any]] = []

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        reads: dict[int, int] = {}
        for tensor in _tensors((args, kwargs)):
            self._look_at(tensor, self._value_of(tensor), reads)
        result = func(*args, **kwargs)
        new = [tensor for tensor in _tensors(result) if not self._is_known(tensor)]
        writes = {self._value_of(t, is_input=False): t.untyped_storage().nbytes() for t in new}
        for tensor in _changed(func, args, kwargs):
            before = self._value_of(tensor)
            if func.overloadpacket in _OVERWRITING and _covers_its_storage(tensor):
                reads.pop(before, None)
            self._look_at(tensor, self._next_value(before, tensor), writes)
        if writes:
            self._note(_Call(func, args, kwargs, result), reads, writes)
        return result

    def _look_at(self, tensor: Tensor, value: int, total: dict[int, int]) -> None:
        """Add the bytes of a tensor; no more than its buffer has."""
        nbytes = total.get(value, 0) + tensor.numel() * tensor.element_size()
        total[value] = min(nbytes, self.buffers[self.buffer_of[value]].nbytes)

    def _note(self, call: _Call, reads: dict[int, int], writes: dict[int, int]) -> None:
        operation = Operation(
            kind=call.kind(),
            reads=reads,
            writes=writes,
            is_random=_is_random(call.func),
            numel=max((tensor.numel() for tensor in _tensors(call.result)), default=0),
            flops=call.flops(),
            workspace_bytes=call.workspace_bytes(),
        )
        self.operations.append(operation)
        self._peak_bytes = max(self._peak_bytes, self._live_bytes + operation.workspace_bytes)

    def end_phase(self, result: Any) -> None:
        """End a part of the tape; tensors in `result` are its outputs."""
        outputs = {
            self.buffer_of[self._value_of(tensor)]
            for tensor in _tensors(result)
            if self._is_known(tensor)
        }
        self.phases.append(
            Phase(
                num_operations=len(self.operations),
                outputs=frozenset(b for b in outputs if not self.buffers[b].is_input),
                alive=frozenset(self._alive),
                peak_bytes=self._peak_bytes,
            )
        )
        self._peak_bytes = self._live_bytes

    def close(self) -> None:
        """Let go of the tensors that were given."""
        for finalizer in self._finalizers:
            finalizer.detach()

    def final_values(self) -> set[int]:
        """The values that buffers hold in the end."""
        last = {buffer: value for value, buffer in enumerate(self.buffer_of)}
        return set(last.values())

    def _is_known(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._value_in

    def _value_of(self, tensor: Tensor, *, is_input: bool = True) -> int:
        """The value a tensor shows; one not seen before is an input, or new."""
        if not self._is_known(tensor):
            self._add(tensor, is_input=is_input)
        return self._value_in[tensor.untyped_storage()._cdata]

    def _next_value(self, before: int, tensor: Tensor) -> int:
        """A new value in the same buffer."""
        value = len(self.buffer_of)
        self.buffer_of.append(self.buffer_of[before])
        self._value_in[tensor.untyped_storage()._cdata] = value
        return value

    def _add(self, tensor: Tensor, *, is_input: bool) -> None:
        storage = tensor.untyped_storage()
        buffer = len(self.buffers)
        self.buffers.append(Buffer(storage.nbytes(), is_input))
        self.buffer_of.append(buffer)
        self._value_in[storage._cdata] = len(self.buffer_of) - 1
        if not is_input:
            self._alive.add(buffer)
            self._live_bytes += storage.nbytes()
            self._peak_bytes = max(self._peak_bytes, self._live_bytes)
        finalizer = weakref.finalize(storage, self._remove, storage._cdata, buffer)
        self._finalizers.append(finalizer)

    def _remove(self, key: int, buffer: int) -> None:
        self._value_in.pop(key, None)
        if buffer in self._alive:
            self._alive.remove(buffer)
            self._live_bytes -= self.buffers[buffer].nbytes


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _covers_its_storage(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _named_arguments(func: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _changed(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Arguments that an operator writes into."""
    if not func._schema.is_mutable:
        return []
    named = _named_arguments(func, args, kwargs)
    return [
        tensor
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _tensors(named.get(argument.name))
    ]


@final
@dataclass(frozen=True, slots=True)
class _Call:
    """An operator with what it was given and what it returned."""

    func: Any
    args: Any
    kwargs: Mapping[str, Any]
    result: Any

    def kind(self) -> Kind:
        """[Note: operators]."""
        packet = self.func.overloadpacket
        if packet in flop_registry or packet in _GROUPED:
            return Kind.MATRIX
        if packet in _FUSABLE or _is_elementwise(self.func) or _is_random(self.func):
            return Kind.FUSABLE
        if packet in _REDUCTIONS:
            return Kind.FUSABLE if self._reduces_rows() else Kind.REDUCTION
        return Kind.APART

    def _reduces_rows(self) -> bool:
        """Whether the last dimension, and no other, is reduced."""
        given = _tensors(self.args)
        dimensions = _named_arguments(self.func, self.args, self.kwargs).get("dim")
        if not given or given[0].ndim < 2 or dimensions is None:
            return False
        num = given[0].ndim
        reduced = {
            one % num for one in ([dimensions] if isinstance(dimensions, int) else dimensions)
        }
        return reduced == {num - 1}

    def flops(self) -> float:
        """Arithmetic of a matrix operator."""
        packet = self.func.overloadpacket
        if packet in _ATTENTION or packet in _ATTENTION_BACKWARD:
            query, key, value = self._attended()
            pairs = math.prod(query.shape[:-1]) * key.shape[-2]
            weights = (1, 1) if packet in _ATTENTION else (3, 2)
            return float(2 * pairs * (weights[0] * query.shape[-1] + weights[1] * value.shape[-1]))
        if packet in _GROUPED:  # rows of the first, or what is summed over, fall into groups
            left, right = self.args[:2]
            columns = right.shape[-1] * (left.shape[0] if left.ndim == right.ndim == 3 else 1)
            return float(2 * math.prod(left.shape[-2:]) * columns)
        formula: Any = flop_registry.get(packet)
        if formula is None:
            return 0.0
        return float(formula(*self.args, **self.kwargs, out_val=self.result))

    def _attended(self) -> tuple[Tensor, Tensor, Tensor]:
        named = _named_arguments(self.func, self.args, self.kwargs)
        return named["query"], named["key"], named["value"]

    def workspace_bytes(self) -> int:
        """Memory that an operator takes for itself ([Note: attention])."""
        if self.func.overloadpacket not in _ATTENTION_BACKWARD:
            return 0
        query, key, value = self._attended()
        nbytes = query.numel() * torch.float32.itemsize
        if key.shape[1] < query.shape[1]:
            share = query.shape[1] // key.shape[1]
            nbytes += share * sum(t.numel() * t.element_size() for t in (key, value))
        return int(nbytes)


def _is_elementwise(func: Any) -> bool:
    """Whether each element of the result comes from the same ones of the arguments."""
    if torch.Tag.pointwise in func.tags:
        return True
    name = func.overloadpacket.__name__
    if name.startswith("_foreach_"):
        return "norm" not in name
    out_of_place = getattr(_ATEN, name.removesuffix("_"), None) if name.endswith("_") else None
    return out_of_place is not None and any(
        torch.Tag.pointwise in getattr(out_of_place, overload).tags
        for overload in out_of_place.overloads()
    )


def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


@final
class FusedAttention(TorchFunctionMode):
    """Attention by the kernels of an accelerator ([Note: attention])."""

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        return func(*args, **kwargs)


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
    if query.ndim != 4:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
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
