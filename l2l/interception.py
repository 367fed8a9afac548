"""Seeing and answering what a model's own code does with the parameters around its layers.

The code around the layers is the model's and is run as it is. Two function modes watch it:

- `Readers` notes, on a few rows, which parameters are read by which function and in which phase.
  So we learn which units each phase needs, and which tables are read by lookup alone.
- `Answers` runs a phase without its tables: a lookup is answered with rows that were gathered on
  the host, or, in the epilogue, whose repeated prologue nobody looks at, with NaN. It also lets a
  head add its weight gradient straight into the float32 sums.

[Note: head] The gradient of a head's weight is as large as the head, once for every piece of an
epilogue. Adding it up in two kernels would cost more memory than the logits and a few percent of
the step. A matrix product with a float32 accumulator does both at once, without rounding in
between. It is used on devices with that product, for 16-bit weights; elsewhere plain PyTorch runs.

[Note: frugal loss] Cross-entropy over many words keeps its logits several times over: as float32,
as log-probabilities, as gradient. The gradient of each row is known as soon as its loss is, so it
can take the place of the float32 logits, a few rows at a time: 8 bytes for a logit instead of 14.
That is done where the logits were widened to float32 for the loss, so that nobody else sees them,
and the loss is a plain one; the numbers are those of torch but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from typing_extensions import override

from l2l.carving import METADATA

Sum = Callable[[Tensor, Tensor], None]
"""Adds outputs' gradient and inputs of a matrix product to a weight's gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """One lookup in a table, as the model's code asked for it."""

    weight: Tensor
    ids: Tensor
    padding_idx: int | None
    plain: bool  # without options that change the weight or the form of its gradient

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Lookup:
        """Read the arguments of `torch.nn.functional.embedding`."""
        names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")
        given = dict(zip((*names, "sparse"), args, strict=False)) | dict(kwargs)
        plain = (
            given.get("max_norm") is None
            and not given.get("scale_grad_by_freq")
            and not given.get("sparse")
        )
        weight, padding = given["weight"], given.get("padding_idx")
        if padding is not None and padding < 0:
            padding += weight.shape[0]
        return cls(weight=weight, ids=given["input"], padding_idx=padding, plain=plain)

    def is_by(self, ids: Tensor) -> bool:
        """Whether the rows asked for are those of `ids`, in order: it, or a view of all of it."""
        return self.ids is ids or (
            self.ids.data_ptr() == ids.data_ptr()
            and self.ids.dtype == ids.dtype
            and self.ids.numel() == ids.numel()
            and self.ids.is_contiguous()
            and ids.is_contiguous()
        )


@final
@dataclass(slots=True)
class Reading:
    """How one parameter is read in a phase."""

    lookups: list[Lookup] = field(default_factory=list)
    otherwise: bool = False


@final
class Readers(TorchFunctionMode):
    """Notes who reads the watched tensors while `watching`."""

    def __init__(self, watched: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names = {id(tensor): name for name, tensor in watched.items()}
        self.watching = True
        self.readings: dict[str, Reading] = {}

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note the function's tensor arguments, then run it."""
        if self.watching and func not in METADATA:
            self._note(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        for leaf in pytree.tree_leaves((args, kwargs)):
            name = self._names.get(id(leaf))
            if name is None:
                continue
            reading = self.readings.setdefault(name, Reading())
            lookup = Lookup.of(args, kwargs) if func is F.embedding else None
            if lookup is not None and lookup.weight is leaf and lookup.plain:
                reading.lookups.append(lookup)
            else:
                reading.otherwise = True


@final
class Answers(TorchFunctionMode):
    """Answers lookups in tables that are not there; adds up the gradients of heads."""

    def __init__(
        self,
        *,
        rows: Mapping[int, Callable[[Lookup], Tensor]],
        heads: Mapping[int, Sum],
        absent: Mapping[int, str],
        frugal: bool = False,
    ) -> None:
        """All mappings are by `id` of the weight tensor that the model's code sees.

        Args:
            rows: answers to lookups.
            heads: sums of weights' gradients.
            absent: names of parameters that must not be read otherwise.
            frugal: whether losses are to save memory ([Note: frugal loss]).
        """
        super().__init__()
        self._frugal = frugal
        self._rows = rows
        self._heads = heads
        self.absent = absent

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer, or run the function as it is."""
        kwargs = kwargs or {}
        if func in METADATA:
            return func(*args, **kwargs)
        if func is F.embedding:
            lookup = Lookup.of(args, kwargs)
            if id(lookup.weight) in self._rows:
                return self._rows[id(lookup.weight)](lookup)
        elif func is F.linear and self._heads and len(args) >= 2 and id(args[1]) in self._heads:
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            apply: Any = _SummingProduct.apply
            output = apply(args[0], args[1], self._heads[id(args[1])])
            return output if bias is None else output + bias
        if func is F.cross_entropy and self._frugal:
            loss = FrugalLoss.of(args, kwargs)
            if loss is not None:
                return loss.run()
        if self.absent:
            self._refuse(args)
            self._refuse(kwargs.values())
        return func(*args, **kwargs)

    def _refuse(self, arguments: Iterable[Any]) -> None:
        """Refuse to have a parameter read that is not there."""
        for one in arguments:
            if isinstance(one, list | tuple):
                self._refuse(one)
            elif id(one) in self.absent:
                raise RuntimeError(
                    f"the model reads {self.absent[id(one)]!r} where it did not for the first "
                    "batch, so it is not on the device. Begin with a batch for which it does, or, "
                    "if it is an embedding table read before the layers, say embedding='device'."
                )


class _SummingProduct(torch.autograd.Function):
    """A linear map whose weight gradient goes straight into a sum ([Note: head])."""

    @staticmethod
    @override
    def forward(ctx: Any, given: Tensor, weight: Tensor, add: Sum) -> Tensor:
        ctx.save_for_backward(given, weight)
        ctx.add = add
        return F.linear(given, weight)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        given, weight = ctx.saved_tensors
        gradient = gradients[0]
        flat = gradient.reshape(-1, gradient.shape[-1])
        ctx.add(flat, given.reshape(-1, given.shape[-1]))
        wanted = gradient @ weight if ctx.needs_input_grad[0] else None
        return wanted, None, None


VIEWS = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")
PIECE_BYTES = 64 << 20  # of logits that are worked on at once


@dataclass(frozen=True, slots=True, kw_only=True)
class FrugalLoss:
    """A cross-entropy that can be had with less memory ([Note: frugal loss])."""

    logits: Tensor
    targets: Tensor
    ignored: int
    mean: bool

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FrugalLoss | None:
        """The loss of a call of `torch.nn.functional.cross_entropy`; None if it is another kind."""
        names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
        given = dict(zip(names, args, strict=False)) | dict(kwargs)
        logits, targets = given["input"], given["target"]
        reduction = given.get("reduction", "mean")
        plain = (
            all(given.get(name) is None for name in ("weight", "size_average", "reduce"))
            and not given.get("label_smoothing")
            and reduction in ("mean", "sum")
        )
        own = _was_widened(logits)
        whole = logits.dim() == 2 and logits.is_contiguous() and targets.dim() == 1
        if not (plain and own and whole and logits.dtype is torch.float32):
            return None
        ignored = given.get("ignore_index", -100)
        return cls(logits=logits, targets=targets, ignored=ignored, mean=reduction == "mean")

    def run(self) -> Tensor:
        """The loss; the logits are its gradient from now on."""
        apply: Any = _FrugalFunction.apply
        total: Tensor = apply(self.logits, self.targets, self.ignored)
        if self.mean:
            return total / (self.targets != self.ignored).sum()
        return total


def _was_widened(logits: Tensor) -> bool:
    """Whether a tensor, or what it is a view of, was just made by a change of dtype."""
    node = logits.grad_fn
    while node is not None and node.name() in VIEWS:
        node = node.next_functions[0][0]
    return node is not None and node.name() == "ToCopyBackward0"


class _FrugalFunction(torch.autograd.Function):
    """The sum of cross-entropies over rows."""

    @staticmethod
    @override
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
        counted = targets != ignored
        columns = torch.where(counted, targets, 0).unsqueeze(1)
        total = torch.zeros((), device=logits.device)
        step = max(1, PIECE_BYTES // (4 * logits.shape[1]))
        for start in range(0, logits.shape[0], step):
            rows = slice(start, start + step)
            piece = logits[rows]
            logarithms = torch.log_softmax(piece, dim=1)
            losses = logarithms.gather(1, columns[rows]).squeeze(1)
            total -= torch.where(counted[rows], losses, 0.0).sum()
            torch.exp(logarithms, out=piece)
            one = piece.new_full((), -1.0)
            piece.scatter_add_(1, columns[rows], one.expand(columns[rows].shape))
            piece.mul_(counted[rows].unsqueeze(1))
        ctx.gradient = logits
        return total

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        gradient: Tensor = ctx.gradient
        ctx.gradient = None
        return gradient.mul_(gradients[0]), None, None
