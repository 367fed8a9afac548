"""Seeing and answering what a model's own code does with the parameters around its layers.

The code around the layers is the model's and is run as it is. Two function modes watch it:

- `Readers` notes, on a few rows, which parameters are read by which function and in which phase.
  So we learn which units each phase needs, and which tables are read by lookup alone.
- `Answers` runs a phase without its tables: a lookup is answered with rows that were gathered on
  the host, or, in the epilogue, whose repeated prologue nobody looks at, with zeros. It also puts
  off the logits of a head until their loss is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from typing_extensions import override

from l2l.model.head import Asked, Head, Pointwise, Question, by_name, cross_entropy
from l2l.model.passing import METADATA

LOOKUP_ARGUMENTS = "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse"
POINTWISE: Mapping[str, Callable[..., Tensor]] = {
    **dict.fromkeys(("div", "true_divide", "__truediv__", "__itruediv__"), torch.div),
    **dict.fromkeys(("mul", "__mul__", "__rmul__", "__imul__"), torch.mul),
    "tanh": torch.tanh,
}
"""Functions of single numbers that models apply to logits; also with a `_` behind."""


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
        given = by_name(LOOKUP_ARGUMENTS, args, kwargs)
        options = [given.get(name) for name in ("max_norm", "scale_grad_by_freq", "sparse")]
        plain = all(option is None or option is False for option in options)
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
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the function's tensor arguments, then run it."""
        kwargs = kwargs or {}
        if self.watching and func not in METADATA:
            lookup = Lookup.of(args, kwargs) if func is F.embedding else None
            self.note(pytree.tree_leaves((args, kwargs)), lookup)
        return func(*args, **kwargs)

    def note(self, read: Iterable[Any], lookup: Lookup | None = None) -> None:
        """Note what is read, or handed on as it is."""
        for one in read:
            if (name := self._names.get(id(one))) is not None:
                reading = self.readings.setdefault(name, Reading())
                if lookup is not None and lookup.plain and lookup.weight is one:
                    reading.lookups.append(lookup)
                else:
                    reading.otherwise = True


@dataclass(frozen=True, slots=True)
class _PutOff:
    """Logits that were not computed."""

    stand_in: Tensor  # kept, so that its `id` is nobody else's
    given: Tensor
    weight: Tensor
    head: Head | None  # None: it comes in slices
    bias: Tensor | None = None
    pointwise: tuple[Pointwise, ...] = ()  # what was done with them since


@final
@dataclass(eq=False, kw_only=True)
class Answers(TorchFunctionMode):
    """Answers lookups in tables that are not there; puts off the logits of heads.

    All mappings are by `id` of the weight tensor that the model's code sees.
    """

    rows: Mapping[int, Callable[[Lookup], Tensor]]  # answers to lookups
    heads: Mapping[int, Head | None]
    """Weights whose products are put off; None: they are not there but come in slices later
    ([Note: slices of a head] in head.py)."""
    absent: Mapping[int, str]  # names of parameters that must not be read otherwise
    asked: Asked = field(default_factory=list)
    """Losses that something stands for."""
    _put_off: dict[int, _PutOff] = field(default_factory=dict)

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer, or run the function as it is."""
        kwargs = kwargs or {}
        if func in METADATA:
            return func(*args, **kwargs)
        if func is F.embedding:
            lookup = Lookup.of(args, kwargs)
            if id(lookup.weight) in self.rows:
                return self.rows[id(lookup.weight)](lookup)
        elif func is F.linear and self._is_head(args, kwargs):
            head, (bias,) = self.heads[id(args[1])], [*args[2:], *kwargs.values()] or [None]
            return self._stand_in(_PutOff(args[0], args[0], args[1], head, bias))
        if self._put_off:
            found = self._use(func, args, kwargs)
            if found is not None:
                return found
            args, kwargs = self._computed((args, kwargs))
        if self.absent:
            self._refuse(args)
            self._refuse(kwargs.values())
        return func(*args, **kwargs)

    def _is_head(self, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether a linear map is that of a head; a bias is taken where that comes in slices."""
        if len(args) < 2 or id(args[1]) not in self.heads:
            return False
        plain = all(bias is None for bias in (*args[2:], *kwargs.values()))
        return plain or self.heads[id(args[1])] is None

    def _stand_in(self, one: _PutOff, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of the shape of logits that are put off, and without their memory."""
        shape = (*one.given.shape[:-1], one.weight.shape[0])
        zero = torch.zeros((), dtype=dtype or one.weight.dtype, device=one.given.device)
        stand_in = zero.expand(shape)
        self._put_off[id(stand_in)] = replace(one, stand_in=stand_in)
        return stand_in

    def _use(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What a use of logits that were put off gives; None if they must be computed."""
        one = self._put_off.get(id(args[0])) if args else None
        if one is None and func is F.cross_entropy:
            one = self._put_off.get(id(kwargs.get("input")))
        if one is None:
            return None
        if func is F.cross_entropy:
            more = {"bias": one.bias, "pointwise": one.pointwise}
            question = Question.of(one.given, one.weight, args, kwargs, **more)
            if question is None or one.head is None or torch.is_grad_enabled():
                return question and self._answer(question, one)
            return cross_entropy(question, one.head)
        given, dtype, wide = one.given, one.stand_in.dtype, torch.float32
        if func is Tensor.float or (func is Tensor.to and args[1:] == (wide,) and not kwargs):
            dtype = wide
        elif func in (Tensor.view, Tensor.reshape) and args[-1] == one.weight.shape[0]:
            given = given.reshape((*args[1:-1], given.shape[-1]))
        elif func is Tensor.__getitem__ and _keeps_words(args[1], one.stand_in.dim()):
            given = given[args[1]]
        elif one.head is None and (done := _pointwise(func, args, kwargs, dtype)) is not None:
            one = replace(one, pointwise=(*one.pointwise, done))
            if func.__name__.endswith("_") and not func.__name__.endswith("__"):  # in place
                self._put_off[id(args[0])] = replace(one, stand_in=args[0])
                return args[0]
        elif func is not Tensor.contiguous:
            return None
        return self._stand_in(replace(one, given=given), dtype)

    def _answer(self, question: Question, one: _PutOff) -> Tensor:
        """What stands for a loss: 0, to see what is added to it; without a graph, 1."""
        has_graph = torch.is_grad_enabled()
        answer = one.stand_in.new_full((), 0.0 if has_graph else 1.0).requires_grad_(has_graph)
        self.asked.append((replace(question, answer=answer), one.head))
        return answer

    def _computed(self, tree: Any) -> Any:
        """Arguments with logits that were put off computed after all."""

        def compute(tensor: Tensor) -> Tensor:
            one = self._put_off.get(id(tensor))
            if one is not None and one.head is None:
                raise RuntimeError(
                    "the model uses its logits otherwise than for a plain cross-entropy, which it "
                    "did not when it was tried. Pass execution=l2l.Execution(overrides="
                    "{'num_head_slices': 0}) to keep its head in one piece."
                )
            found = None if one is None else F.linear(one.given, one.weight).to(tensor.dtype)
            return tensor if found is None else found

        with torch._C.DisableTorchFunction():
            return pytree.tree_map_only(Tensor, compute, tree)

    def _refuse(self, arguments: Iterable[Any]) -> None:
        """Refuse to have a parameter read that is not there."""
        for one in arguments:
            if isinstance(one, list | tuple):
                self._refuse(one)
            elif id(one) in self.absent:
                raise RuntimeError(
                    f"the model reads {self.absent[id(one)]!r} in a phase in which it did not for "
                    "the first batch, so it is not on the device. Pass execution=l2l.Execution("
                    "embedding='device') to keep all parameters outside the layers there."
                )


def _pointwise(
    func: Any, args: Any, kwargs: dict[str, Any], dtype: torch.dtype
) -> Pointwise | None:
    """A function of logits of this type that works on single numbers; None: it is another."""
    name = getattr(func, "__name__", "")
    name = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    rest = args[1:]
    if name not in POINTWISE or kwargs or not all(isinstance(one, int | float) for one in rest):
        return None
    return lambda logits: POINTWISE[name](logits.to(dtype), *rest)


def _keeps_words(index: Any, num_dimensions: int) -> bool:
    """Whether an index leaves the last dimension as it is."""
    if not isinstance(index, tuple):
        return num_dimensions > 1 and isinstance(index, slice)
    plain = all(isinstance(one, slice) or one is Ellipsis for one in index)
    reaches = Ellipsis in index or len(index) == num_dimensions
    return plain and (not reaches or index[-1] == slice(None))
