"""Tensors that are made when somebody uses them: outputs that a training loop may never look at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import override


@final
class Late(Tensor):
    """Stands for a tensor; every function of torch that is given it works on that one.

    Only its type, and its widening to float32 (which wrappers of models ask for), are answered
    without it.
    """

    _make: Callable[[], Tensor]

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See the class."""
        first = args[0] if args else None
        if isinstance(first, Late) and func == _DTYPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args)
        if isinstance(first, Late) and func is Tensor.float:
            make = first.__dict__["_make"]
            return late(lambda: make().float(), torch.float32)
        args, kwargs = pytree.tree_map_only(Late, _made, (args, kwargs or {}))
        return func(*args, **kwargs)


_DTYPE = getattr(Tensor, "dtype").__get__  # noqa: B009 (mypy takes it for a type)


def late(make: Callable[[], Tensor], dtype: torch.dtype) -> Late:
    """A tensor of this type that `make` gives, which is asked every time it is used."""
    nothing = torch.empty(0, dtype=dtype, device="meta")
    found = nothing.as_subclass(Late)
    found.__dict__["_make"] = make
    return found


def _made(one: Late) -> Tensor:
    found: Tensor = one.__dict__["_make"]()
    return found
