"""Seeing and answering what a model's own code does with the parameters around its layers.

The code around the layers is the model's and is run as it is. Two function modes watch it:

- `Readers` notes, on a few rows, which parameters are read by which function and in which phase.
  So we learn which units each phase needs, and which tables are read by lookup alone.
- `Answers` runs a phase without its tables: a lookup is answered with rows that were gathered on
  the host, or, in the epilogue, whose repeated prologue nobody looks at, with zeros. It also lets a
  head add its weight gradient straight into the float32 sums.

[Note: head] The gradient of a head's weight is as large as the head, once for every piece of an
epilogue. Adding it up in two kernels would cost more memory than the logits and a few percent of
the step. A matrix product with a float32 accumulator does both at once, without rounding in
between. It is used on devices with that product, for 16-bit weights; elsewhere plain PyTorch runs.
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
    ) -> None:
        """All mappings are by `id` of the weight tensor that the model's code sees.

        Args:
            rows: answers to lookups.
            heads: sums of weights' gradients.
            absent: names of parameters that must not be read otherwise.
        """
        super().__init__()
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
                    "batch, so it is not on the device. Say embedding='device' to keep all "
                    "parameters around the layers there."
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
