"""Seeing and answering what a model's own code does with the parameters around its layers.

The code around the layers is the model's and is run as it is. Two function modes watch it:

- `Readers` notes, on a few rows, which parameters are read by which function and in which phase.
  So we learn which units each phase needs, and which tables are read by lookup alone.
- `Answers` runs a phase without its tables: a lookup is answered with rows that were gathered on
  the host, or, in the epilogue, whose repeated prologue nobody looks at, with zeros. It also puts
  off the logits of a head until their loss is asked for.

[Note: logits put off] A head makes words times tokens of logits, and a loss makes as many numbers
again, several times. They are never needed at once: the gradient of a token's logits is known as
soon as its loss is. So the product with a head's weight is *put off*: the model's code gets a
stand-in of the right shape, may widen, reshape and cut it, and when it asks for a plain cross-
entropy, loss and gradients are computed for some tokens at a time: logits, losses, and at once the
gradients of hidden state and head, the latter straight into its float32 sum. Any other use of the
stand-in computes the logits after all. Because gradients are made before the rest of the code has
run, what that code does with the loss must be known: it is proven on a trial (trial.py) that
it returns it as it is.

What a model's code asks about small tensors on the device, answered by the host.

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
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from typing_extensions import override

from l2l.model.layer_pass import quietly
from l2l.model.passing import METADATA

PIECE_BYTES = 64 << 20  # of float32 logits that are worked on at once without a compiler
EVEN_ROWS = 128  # of matrices: products of others take as long as the next multiple's

LOOKUP_ARGUMENTS = "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse"
LOSS_ARGUMENTS = "input target weight size_average ignore_index reduce reduction label_smoothing"

Sum = Callable[[Tensor, Tensor], None]
"""Adds outputs' gradient and inputs of a matrix product to a weight's gradient."""


def _named(names: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a function of torch by name."""
    return dict(zip(names.split(), args, strict=False)) | dict(kwargs)


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
        given = _named(LOOKUP_ARGUMENTS, args, kwargs)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """How the gradient of a head's weight is added up, and how much is worked on at once."""

    add: Sum | None  # None: nobody wants it
    scale: float  # derivative of what is differentiated by the loss
    num_rows: int  # tokens at a time, at most
    compiled: bool

    def pieces(self, num_tokens: int) -> Iterator[slice]:
        """As few as may be, about as large as each other; the last may be smaller."""
        number = max(1, -(-num_tokens // self.num_rows))
        even = -(-num_tokens // number)
        size = min(-(-even // EVEN_ROWS) * EVEN_ROWS, self.num_rows)
        return (slice(start, start + size) for start in range(0, num_tokens, size))


@dataclass(frozen=True, slots=True)
class _PutOff:
    """Logits that were not computed."""

    stand_in: Tensor  # kept, so that its `id` is nobody else's
    given: Tensor
    weight: Tensor
    head: Head


@final
@dataclass(eq=False, kw_only=True)
class Answers(TorchFunctionMode):
    """Answers lookups in tables that are not there; puts off the logits of heads.

    All mappings are by `id` of the weight tensor that the model's code sees.
    """

    rows: Mapping[int, Callable[[Lookup], Tensor]]  # answers to lookups
    heads: Mapping[int, Head]  # weights whose products are put off
    absent: Mapping[int, str]  # names of parameters that must not be read otherwise
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
            return self._stand_in(args[0], args[1], self.heads[id(args[1])])
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
        """Whether a linear map is that of a head, without a bias."""
        known = len(args) > 1 and id(args[1]) in self.heads
        return known and all(bias is None for bias in (*args[2:], *kwargs.values()))

    def _stand_in(
        self, given: Tensor, weight: Tensor, head: Head, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        shape = (*given.shape[:-1], weight.shape[0])
        zero = torch.zeros((), dtype=dtype or weight.dtype, device=weight.device)
        stand_in = zero.expand(shape)
        self._put_off[id(stand_in)] = _PutOff(stand_in, given, weight, head)
        return stand_in

    def _use(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What a use of logits that were put off gives; None if they must be computed."""
        one = self._put_off.get(id(args[0])) if args else None
        if one is None and func is F.cross_entropy:
            one = self._put_off.get(id(kwargs.get("input")))
        if one is None:
            return None
        if func is F.cross_entropy:
            return cross_entropy(one.given, one.weight, one.head, args, kwargs)
        given, dtype, wide = one.given, one.stand_in.dtype, torch.float32
        if func is Tensor.float or (func is Tensor.to and args[1:] == (wide,) and not kwargs):
            dtype = wide
        elif func in (Tensor.view, Tensor.reshape) and args[-1] == one.weight.shape[0]:
            given = given.reshape((*args[1:-1], given.shape[-1]))
        elif func is Tensor.__getitem__ and _keeps_words(args[1], one.stand_in.dim()):
            given = given[args[1]]
        elif func is not Tensor.contiguous:
            return None
        return self._stand_in(given, one.weight, one.head, dtype=dtype)

    def _computed(self, tree: Any) -> Any:
        """Arguments with logits that were put off computed after all."""

        def compute(tensor: Tensor) -> Tensor:
            one = self._put_off.get(id(tensor))
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


def _keeps_words(index: Any, num_dimensions: int) -> bool:
    """Whether an index leaves the last dimension as it is."""
    if not isinstance(index, tuple):
        return num_dimensions > 1 and isinstance(index, slice)
    plain = all(isinstance(one, slice) or one is Ellipsis for one in index)
    reaches = Ellipsis in index or len(index) == num_dimensions
    return plain and (not reaches or index[-1] == slice(None))


def cross_entropy(
    given: Tensor, weight: Tensor, head: Head, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """A plain cross-entropy of logits that were put off; None if it is another kind."""
    asked = _named(LOSS_ARGUMENTS, args, kwargs)
    targets, reduction = asked["target"], asked.get("reduction", "mean")
    plain = (
        all(asked.get(name) is None for name in ("weight", "size_average", "reduce"))
        and not asked.get("label_smoothing")
        and reduction in ("mean", "sum")
        and asked["input"].dim() == 2
        and targets.dim() == 1
    )
    if not plain:
        return None
    ignored = asked.get("ignore_index", -100)
    apply: Any = _HeadLoss.apply
    found: Tensor = apply(given, weight, targets, ignored, reduction == "mean", head)
    return found


class _HeadLoss(torch.autograd.Function):
    """Cross-entropy of a head's logits, all gradients made at once ([Note: logits put off])."""

    @staticmethod
    @override
    def forward(
        ctx: Any,
        given: Tensor,
        weight: Tensor,
        targets: Tensor,
        ignored: int,
        mean: bool,
        head: Head,
    ) -> Tensor:
        counted = targets != ignored
        columns = torch.where(counted, targets, 0)
        number = counted.sum() if mean else torch.ones((), device=given.device)
        factors = counted * (head.scale / number)
        total = torch.zeros((), device=given.device)
        gradient = torch.empty_like(given) if ctx.needs_input_grad[0] else None
        for rows in head.pieces(given.shape[0]):
            logits = F.linear(given[rows], weight)
            losses = differentiate(logits, columns[rows], factors[rows], compiled=head.compiled)
            total += torch.where(counted[rows], losses, 0.0).sum()
            if gradient is not None:
                torch.mm(logits, weight, out=gradient[rows])
            if head.add is not None:
                head.add(logits, given[rows])
            del logits
        ctx.save_for_backward(gradient)
        ctx.scale = head.scale
        return total / number

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        if gradient is not None:
            gradient.mul_(gradients[0] / ctx.scale)
        return gradient, None, None, None, None, None


def differentiate(
    logits: Tensor, columns: Tensor, factors: Tensor, *, compiled: bool = False
) -> Tensor:
    """Each row's cross-entropy; the logits become their gradient, each row times its factor."""
    columns, factors = columns.unsqueeze(1), factors.unsqueeze(1)
    # What a row's label picks is read before, and written after, all else is written over.
    losses, picked = _ways[compiled](logits, logits.gather(1, columns), factors)
    logits.scatter_(1, columns, picked)
    return losses.squeeze(1)


def _in_place(logits: Tensor, picked: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Losses of rows and gradients of picked logits; all others are replaced by theirs."""
    wide = logits.float()
    largest = wide.amax(dim=1, keepdim=True)
    shifted = wide - largest
    norm = shifted.exp().sum(dim=1, keepdim=True).log()
    logarithm = picked.float() - largest - norm
    logits.copy_((shifted - norm).exp() * factors)
    return -logarithm, ((logarithm.exp() - 1) * factors).to(logits.dtype)


def _frugally(logits: Tensor, picked: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """The same without a compiler, in little memory: some rows at a time."""
    step = max(1, PIECE_BYTES // (4 * logits.shape[1]))
    losses, gradients = torch.empty_like(factors), torch.empty_like(picked)
    for start in range(0, logits.shape[0], step):
        rows = slice(start, start + step)
        losses[rows], gradients[rows] = _in_place(logits[rows], picked[rows], factors[rows])
    return losses, gradients


@functools.cache
def _program() -> Losses:
    return torch.compile(_in_place, backend=quietly("inductor"), dynamic=None)


def _compiled(logits: Tensor, picked: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """The same through a compiler, if that succeeds."""
    try:
        with torch._C.DisableTorchFunction():
            return _program()(logits, picked, factors)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a compiler may raise, before anything is computed
        warnings.warn(f"losses run without torch.compile: {error!r:.200}", stacklevel=2)
        _ways[True] = _frugally
        return _frugally(logits, picked, factors)


Losses = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
_ways: dict[bool, Losses] = {False: _frugally, True: _compiled}  # by whether a compiler is used


# --------------------------------------------------------------------------------------------------
# Questions that the host answers


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
