"""What a model's code asks about small tensors on the device, answered by the host.

The code around the layers looks at its inputs: is this mask all ones, do positions begin anew? Each
`if mask.all():` makes the host wait until the device has done everything it was given, and then the
device waits for the host. But masks and positions are made of the batch, which came from the host,
or of nothing. So whatever the code computes of integers is computed on the host as well, on a
*mirror image*, and questions are answered there. Integers are the same everywhere. Floating-point
numbers are mirrored as they come, but not what is computed of them, unless that is an integer
again, as with comparisons; and nothing is that is random.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from typing_extensions import override

from l2l.model.passing import METADATA

MAX_ELEMENTS = 1 << 18  # of what is mirrored: tokens of a microbatch, not pairs of them
HOST = torch.device("cpu")

QUESTIONS = {torch.equal, torch.is_nonzero} | {
    getattr(Tensor, name)
    for name in ("__bool__", "__int__", "__index__", "__contains__", "item", "tolist", "equal")
}
_MAKERS = {torch.arange, torch.zeros, torch.ones, torch.full, torch.tensor}
_EXACT_MAKERS = {torch.zeros, torch.ones, torch.full}  # also of floating-point numbers
_NOT_REPEATED = ("rand", "bernoulli", "multinomial", "dropout", "empty", "cuda")
"""Parts of the names of functions that would not give the same again, or not on the host."""


@final
class HostMirror(TorchFunctionMode):
    """Answers questions about integers on the device without asking it."""

    def __init__(self, on_device: Mapping[str, Any], on_host: Mapping[str, Any]) -> None:
        """The entries of a batch on the device, and the same on the host."""
        super().__init__()
        self._mirrored: dict[int, tuple[Tensor, int, Tensor]] = {}
        """By `id`: a tensor, which is kept so that this stays its own; its version; its values."""
        for name, tensor in on_device.items():
            values = on_host.get(name)
            if isinstance(tensor, Tensor) and isinstance(values, Tensor) and values.is_cpu:
                self._note(tensor, values, as_given=True)

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer, or run the function, for what is mirrored also on the host."""
        kwargs = kwargs or {}
        if func in METADATA:
            return func(*args, **kwargs)
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        known = all(self._is_known(tensor) for tensor in tensors)
        if tensors and known and func in QUESTIONS:
            return self._on_host(func, args, kwargs)
        if tensors and known and func is Tensor.__getitem__ and not _is_by_tensors(args[1]):
            return self._indexed(args, tensors[0].device)
        result = func(*args, **kwargs)
        known = known and all(self._is_known(tensor) for tensor in tensors)  # none was written to
        if known and (tensors or func in _MAKERS) and _can_have_one(func, result):
            with contextlib.suppress(Exception):  # then it has none, and is asked itself
                values = self._on_host(func, args, kwargs)
                self._note(result, values, as_given=func in _EXACT_MAKERS)
        return result

    def _indexed(self, args: Any, device: torch.device) -> Tensor:
        """Elements of a known tensor by lists of numbers, which would be brought there one by one.

        Torch waits until they are there.
        """
        values: Tensor = self._on_host(Tensor.__getitem__, args, {})
        given = values.pin_memory() if device.type == "cuda" else values.clone()
        result: Tensor = given.to(device, non_blocking=True)
        self._note(result, values, as_given=True)
        return result

    def _is_known(self, tensor: Tensor) -> bool:
        mirrored = self._mirrored.get(id(tensor))
        return mirrored is not None and mirrored[0]._version == mirrored[1]

    def _note(self, tensor: Tensor, values: Any, *, as_given: bool) -> None:
        alike = isinstance(values, Tensor) and values.shape == tensor.shape
        small = tensor.numel() <= MAX_ELEMENTS
        exact = as_given or not tensor.is_floating_point()
        if alike and values.dtype is tensor.dtype and small and exact:
            self._mirrored[id(tensor)] = (tensor, tensor._version, values)

    def _on_host(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        def moved(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return self._mirrored[id(leaf)][2]
            return HOST if isinstance(leaf, torch.device) else leaf

        args, kwargs = pytree.tree_map(moved, (args, kwargs))
        if isinstance(kwargs.get("device"), str):
            kwargs["device"] = HOST
        return func(*args, **kwargs)


def _is_by_tensors(index: Any) -> bool:
    """Whether an index has no list of numbers in it."""
    parts = index if isinstance(index, tuple) else (index,)
    return not any(isinstance(part, list) for part in parts)


def _can_have_one(func: Any, result: Any) -> bool:
    """Whether a tensor is one that the host can have as well, in no time."""
    if type(result) is not Tensor or result.is_complex():
        return False
    if result.is_floating_point() and func not in _EXACT_MAKERS:
        return False
    name = getattr(func, "__name__", "")
    return result.numel() <= MAX_ELEMENTS and not any(word in name for word in _NOT_REPEATED)
