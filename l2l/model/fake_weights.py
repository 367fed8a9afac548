"""Running a model's code without its memory: large tensors are fake, small ones are real.

A fake tensor is a single zero, expanded to its shape: it is on the CPU, answers every question
about itself and takes no memory. Inside `FakeWeights` an operator that reads one, or would write a
large result, is not run: its result has the shape that the meta device finds, of zeros, fake_weight
again if it is large. All other operators are run, so code that looks at small values (masks,
positions, counts of labels) does what it always does, which it could not on the meta device.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from typing_extensions import override

LARGE_BYTES = 8 << 20


def fake_weight(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros of any shape; many of them are in the memory of one."""
    number = math.prod(shape)
    if number * dtype.itemsize <= LARGE_BYTES:
        return torch.zeros(tuple(shape), dtype=dtype)
    return torch.zeros((), dtype=dtype).expand(tuple(shape))


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor is large and has no memory for it."""
    return tensor.nbytes > max(LARGE_BYTES, tensor.untyped_storage().nbytes())


@final
class FakeWeights(TorchDispatchMode):
    """Does not run what is large."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_for_class = any(map(is_traceable_wrapper_subclass, tensors))
        is_for_meta = torch.device(kwargs.get("device") or "cpu").type == "meta"
        is_for_meta |= any(tensor.is_meta for tensor in tensors)
        if is_for_class or is_for_meta or _is_view(func):
            # What a class makes of its tensors is looked at.
            with self if is_for_class else contextlib.nullcontext():
                return func(*args, **kwargs)
        if func._schema.is_mutable:
            if any(map(is_fake, tensors)):
                return _written(func, args, kwargs)
            return func(*args, **kwargs)
        try:
            shapes = _on_meta(func, args, kwargs)
        except Exception:  # its result depends on values; or it fails, and says so itself
            return func(*args, **kwargs)
        results = [leaf for leaf in pytree.tree_leaves(shapes) if isinstance(leaf, Tensor)]
        is_large = any(one.nbytes > LARGE_BYTES for one in results)
        if not is_large and not any(map(is_fake, tensors)):
            return func(*args, **kwargs)
        return pytree.tree_map_only(Tensor, _zeros, shapes)


def _is_view(func: Any) -> bool:
    aliases = [argument.alias_info for argument in func._schema.arguments]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an operator returns that writes into its arguments: these, as they are."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    written = [
        given[argument.name]
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    number = len(func._schema.returns)
    return written[0] if number == 1 else tuple(written[:number]) or None


def _on_meta(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    args, kwargs = pytree.tree_map_only(Tensor, lambda one: one.to("meta"), (args, kwargs))
    if any(argument.name == "device" for argument in func._schema.arguments):
        kwargs = {**kwargs, "device": torch.device("meta")}
    return func(*args, **kwargs)


def _zeros(found: Tensor) -> Tensor:
    if found.nbytes > LARGE_BYTES:
        return fake_weight(found.shape, found.dtype)
    return torch.empty_strided(found.shape, found.stride(), dtype=found.dtype).zero_()
