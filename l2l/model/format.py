"""What crosses the link has a format of its own: parameters that are made of several tensors.

A quantized weight is a tensor of a class of a library's own, which knows how to compute with it:
numbers of 4 or 8 bits, scales of their blocks, perhaps scales of scales. Its `Format` is a frozen
value that says which plain tensors it is made of (names, shapes, dtypes) and how they are put
together. A unit's flat layout has a field for each of these. They lie in host memory, cross the
link and stand in a slot as they are; where a layer runs, the parameter is put together from views
into the slot, and the library's own kernels expand it, product by product. So results are those of
plain PyTorch with the same model, and nothing here knows of any library. Two kinds of classes:

    wrappers       say themselves what they are made of (`__tensor_flatten__`): torchao's tensors
    with a state   parameters that carry tensors in an attribute `quant_state` beside their numbers:
                   bitsandbytes' 4 bits

A plain parameter may be *meant* for a format (`mean`): its values are brought into it when they
move into the parameter server, tensor by tensor. What an engine holds of a wrapper is a plain
parameter without memory that is meant for its format.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from l2l.model.modules import CutError

MEANT = "_l2l_format"  # where a parameter notes the format that it is meant for
STATE = "quant_state"
NUMBERS = "numbers"  # of a parameter with a state: what it holds itself
BARE = (Tensor, nn.Parameter)
CONTAINERS = (dict, list, tuple)
AS_THEY_ARE = (type, enum.Enum, str, int, float, torch.dtype, torch.Size, type(None))
MAX_DEPTH = 6


@final
@dataclass(frozen=True, slots=True)
class _Place:
    """Stands for a tensor in what a format knows."""

    name: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """What a parameter is made of, and how it is put together; equal if it is the same."""

    kind: type[Tensor]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    fields: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    text: str  # all that it is, in words
    _inner: tuple[tuple[str, Format | None], ...]  # of a wrapper
    _context: Any = field(compare=False, repr=False)
    make: Callable[[Tensor], Tensor] | None = field(default=None, compare=False, repr=False)
    """Brings plain values into this format; None: nothing does."""

    @property
    def is_wrapper(self) -> bool:
        """Whether the parameter has no numbers of its own."""
        return bool(self._inner)

    @property
    def nbytes(self) -> int:
        """Bytes of all that it is made of."""
        sizes = (torch.Size(shape).numel() * dtype.itemsize for _, shape, dtype in self.fields)
        return sum(sizes)

    def made_by(self, make: Callable[[Tensor], Tensor]) -> Format:
        """The same, with what brings plain values into it."""
        return replace(self, make=make)

    def take_apart(self, tensor: Tensor) -> dict[str, Tensor]:
        """The plain tensors of one in this format, by name."""
        if not self.is_wrapper:
            found = {NUMBERS: tensor.detach().as_subclass(Tensor)}
            _without_tensors(vars(tensor), found)
            return found
        parts: dict[str, Tensor] = {}
        for name, inner in self._inner:
            own: Tensor = getattr(tensor, name)
            if inner is None:
                parts[name] = own
            else:
                parts |= {f"{name}.{k}": v for k, v in inner.take_apart(own).items()}
        return parts

    def join(self, parts: Mapping[str, Tensor]) -> Tensor:
        """A tensor made of these, which it shares."""
        device = next(iter(parts.values())).device
        context = _with_tensors(self._context, parts, device)
        if not self.is_wrapper:
            found = torch.Tensor._make_subclass(self.kind, parts[NUMBERS], False)
            found.__dict__.update(context)
            return found
        own: dict[str, Tensor] = {}
        for name, inner in self._inner:
            if inner is None:
                own[name] = parts[name]
            else:
                start = f"{name}."
                below = {k.removeprefix(start): v for k, v in parts.items() if k.startswith(start)}
                own[name] = inner.join(below)
        kind: Any = self.kind
        made: Tensor = kind.__tensor_unflatten__(own, context, self.shape, self.stride)
        return made

    def again(self, tensor: Tensor) -> Tensor:
        """Another object that shares memory with one in this format."""
        return self.join({name: one.data for name, one in self.take_apart(tensor).items()})

    def copy(self, tensor: Tensor, device: torch.device | str = "cpu") -> Tensor:
        """The same in memory of its own."""
        parts = self.take_apart(tensor)
        return self.join({name: one.to(device, copy=True) for name, one in parts.items()})

    def to_read(self, tensor: Tensor) -> Tensor:
        """A copy on the CPU of what a parameter holds itself: of one with a state its numbers."""
        copy = self.copy(tensor)
        return copy if self.is_wrapper else copy.as_subclass(Tensor)


def format_of(tensor: Tensor) -> Format | None:
    """The format of a parameter, or the one that it is meant for; None: it is a plain one.

    Raises:
        ValueError: it cannot be taken apart.
    """
    meant: Format | None = getattr(tensor, "__dict__", {}).get(MEANT)
    if meant is not None or type(tensor) in BARE:
        return meant
    given: Any = tensor
    if is_traceable_wrapper_subclass(given):
        return _of_wrapper(given)
    return None if getattr(tensor, STATE, None) is None else _of_state(tensor)


def mean(parameter: nn.Parameter, wanted: Format | None) -> None:
    """Let a plain parameter be meant for a format; None: for none."""
    parameter.__dict__.pop(MEANT, None)
    if wanted is not None:
        parameter.__dict__[MEANT] = wanted


def is_meant(parameter: nn.Parameter) -> bool:
    """Whether a plain parameter is meant for a format."""
    return MEANT in parameter.__dict__


def bytes_of(parameters: Iterable[nn.Parameter]) -> int:
    """Memory that parameters take."""
    total = 0
    for parameter in parameters:
        found = None if parameter.is_meta or is_meant(parameter) else format_of(parameter)
        total += 0 if parameter.is_meta else parameter.nbytes if found is None else found.nbytes
    return total


def refuse_unusable(model: nn.Module) -> None:
    """Refuse formats that cannot be streamed, and parameters in a format that are to be trained.

    Raises:
        ValueError: with the parameter's name and the remedy.
    """
    for name, parameter in model.named_parameters():
        kind = type(parameter).__name__
        if kind == "Int8Params":
            raise CutError(
                f"parameter {name!r} is in 8 bits of bitsandbytes, whose layers keep tensors and "
                "change them as they run. Load the model in 4 bits (load_in_4bit=True), or in 16 "
                "bits and quantize it to 8 with l2l.Engine(..., base='int8')."
            )
        if kind == "Params4bit" and getattr(parameter, STATE, None) is None:
            raise CutError(
                f"parameter {name!r} is meant for 4 bits of bitsandbytes, and not quantized yet. "
                "Move the model to a device first (model.to('cuda')), or quantize a model in 16 "
                "bits with l2l.Engine(..., base='nf4')."
            )
        found = format_of(parameter)
        if found is None:
            continue
        if parameter.requires_grad:
            raise CutError(
                f"parameter {name!r} is quantized ({found.kind.__name__}) and requires a gradient: "
                "quantized weights are not trained. Freeze it (requires_grad_(False)) and train an "
                "adapter beside it (peft.get_peft_model), or train the model in 16 bits."
            )


# --------------------------------------------------------------------------------------------------
# Taking apart


def _of_wrapper(tensor: Any) -> Format:
    names, context = tensor.__tensor_flatten__()
    inner = tuple((name, format_of(getattr(tensor, name))) for name in names)
    fields: list[tuple[str, tuple[int, ...], torch.dtype]] = []
    for name, found in inner:
        own: Tensor = getattr(tensor, name)
        if found is None:
            fields.append(_field(tensor, name, own))
        else:
            fields += [(f"{name}.{key}", shape, dtype) for key, shape, dtype in found.fields]
    return _format(tensor, fields, context, inner)


def _of_state(tensor: Tensor) -> Format:
    found: dict[str, Tensor] = {NUMBERS: tensor.detach().as_subclass(Tensor)}
    context = _without_tensors(vars(tensor), found)
    fields = [_field(tensor, name, one) for name, one in found.items()]
    return _format(tensor, fields, context, ())


def _format(tensor: Tensor, fields: list[Any], context: Any, inner: Any) -> Format:
    return Format(
        kind=type(tensor),
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        fields=tuple(fields),
        text=f"{tensor.dtype} {fields} {_text(context)}",
        _inner=inner,
        _context=context,
    )


def _field(whole: Tensor, name: str, own: Tensor) -> tuple[str, tuple[int, ...], torch.dtype]:
    if not own.is_contiguous():
        raise CutError(
            f"a {type(whole).__name__} of the model is made of {name!r}, which is not contiguous. "
            "Expected contiguous tensors: quantize contiguous weights (weight.contiguous())."
        )
    return name, tuple(own.shape), own.dtype


def _is_object(value: Any) -> bool:
    """Whether a value is of a class with attributes that are looked into."""
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, (*AS_THEY_ARE, nn.Module))
        and (not callable(value))
    )


def _changed(value: Any, change: Callable[[Any, str], Any], path: str, depth: int) -> Any:
    """A value in which what `change` gives for parts of it stands instead of these."""
    other = change(value, path)
    if other is not value or not depth:
        return other

    def inside(key: object, one: Any) -> Any:
        return _changed(one, change, f"{path}.{key}" if path else str(key), depth - 1)

    if type(value) is dict:
        return {key: inside(key, one) for key, one in value.items()}
    if type(value) in CONTAINERS:
        return type(value)(inside(number, one) for number, one in enumerate(value))
    if not _is_object(value):
        return value
    made = object.__new__(type(value))
    made.__dict__.update({key: inside(key, one) for key, one in vars(value).items()})
    return made


def _without_tensors(value: Any, found: dict[str, Tensor]) -> Any:
    """A value with places for its tensors, which are added to what was found; without modules."""

    def change(one: Any, path: str) -> Any:
        if isinstance(one, Tensor):
            found[path] = one.detach()
            return _Place(path)
        return None if isinstance(one, nn.Module) else one

    return _changed(value, change, "", MAX_DEPTH)


def _with_tensors(value: Any, parts: Mapping[str, Tensor], device: torch.device) -> Any:
    """A value with these tensors in their places, on their device."""

    def change(one: Any, _: str) -> Any:
        if isinstance(one, _Place):
            return parts[one.name]
        return device if isinstance(one, torch.device) else one

    return _changed(value, change, "", MAX_DEPTH)


def _text(context: Any) -> str:
    """What a format knows besides its tensors: equal texts, equal formats."""

    def change(one: Any, _: str) -> Any:
        if isinstance(one, torch.device):
            return ""
        return (type(one).__qualname__, vars(one)) if _is_object(one) else one

    def words(value: Any, depth: int) -> Any:
        value = change(value, "")
        if depth and type(value) is dict:
            return {key: words(one, depth - 1) for key, one in value.items()}
        if depth and type(value) in CONTAINERS:
            return [words(one, depth - 1) for one in value]
        return value

    return repr(words(context, 2 * MAX_DEPTH))
