"""Parameters whose weights are in an engine: what any other code may do with them.

While an engine is open, the user's parameters stay the same objects but are of a class of their own
(`Held`), through which every function of torch passes that is given one of them:

    asked for a shape, a dtype, ...   answers as always
    read                              the function gets a copy of the present weights, on the CPU
    written to                        refused, also through what a read has given out
    run with other tensors            refused: `engine.step` and the others do that
    in code that a step runs          refused: the step has its own tensors for this parameter

So `state_dict`, `save_pretrained`, `torch.save`, `copy.deepcopy`, `numpy()` and whatever else reads
tell the truth. The memory of a held parameter has no room for its weights; code that takes its
address without asking torch gets an error, not NaN.

[Note: copies] What shares memory with a copy (`detach()`, `data`, a view) is a `WeightCopy`: it is
an ordinary tensor to every reader, and refuses to be written to, because that would be lost without
a word. Copies of one parameter share memory as long as one of them is alive and no step has run, so
that tied parameters are tied in what is saved.

[Note: no gradient] Values that are computed from a held parameter require a gradient where they
would if it was an ordinary one, and refuse to give it: a training loop never runs without an error.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typing_extensions import override

from l2l.model.modules import CutError

KEY = "_l2l_place"  # where a parameter notes its place

PROPERTIES = """
    shape dtype device ndim requires_grad layout is_cuda is_cpu is_meta is_leaf grad grad_fn nbytes
    itemsize is_sparse is_sparse_csr is_quantized is_mkldnn is_nested is_xpu is_mps is_xla is_mtia
    is_vulkan names _version _base output_nr retains_grad _backward_hooks
    _post_accumulate_grad_hooks
"""
METHODS = """
    size dim ndimension numel nelement element_size is_floating_point is_complex is_signed
    get_device is_inference is_conj is_neg is_shared is_pinned is_same_size retain_grad new_empty
    new_zeros new_ones new_full new_tensor new_empty_strided __len__ __hash__ __dlpack_device__
    _is_view _is_zerotensor stride is_contiguous storage_offset
"""
FUNCTIONS = """
    is_floating_point is_complex is_signed is_inference is_conj is_neg numel get_device is_same_size
    result_type empty_like zeros_like ones_like full_like rand_like randn_like randint_like
"""
PASSES = """
    linear bilinear embedding embedding_bag layer_norm rms_norm group_norm batch_norm instance_norm
    native_layer_norm native_group_norm native_batch_norm prelu multi_head_attention_forward
    scaled_dot_product_attention _native_multi_head_attention _transformer_encoder_layer_fwd matmul
    mm bmm mv addmm addmv addbmm baddbmm chain_matmul einsum tensordot __matmul__ __rmatmul__ mul
    __mul__ __rmul__ multiply lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell
    rnn_relu_cell _grouped_mm _scaled_mm conv1d conv2d conv3d conv_transpose1d conv_transpose2d
    conv_transpose3d convolution conv_tbc
"""


def _existing(owner: Any, names: str) -> list[Any]:
    """Those of the named attributes that this version of torch has."""
    return [getattr(owner, name) for name in names.split() if hasattr(owner, name)]


QUESTIONS = frozenset(
    [one.__get__ for one in _existing(Tensor, PROPERTIES)]
    + _existing(Tensor, METHODS)
    + _existing(torch, FUNCTIONS)
    + [one.__delete__ for one in _existing(Tensor, "grad")]
)
"""What is answered without the weights."""
_CUT_OFF = frozenset(
    [Tensor.detach, Tensor.data.__get__, torch.detach]  # type: ignore[attr-defined]
)
"""What gives no gradient to anybody."""
_NO_WRITES = frozenset({"requires_grad_", "share_memory_", "detach_"})
"""What ends in an underscore, but changes no values."""
_PASSES = frozenset(PASSES.split())
"""What modules do with their weights and what they are given, by name."""


class Reader:
    """Gives the present weights of held parameters; knows nothing of who holds them."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        """Nothing is read yet.

        Args:
            read: a bound method, which is not kept alive: a parameter's name -> its present value,
                perhaps as a view.
        """
        self._read = weakref.WeakMethod(read)
        self._prepare: weakref.WeakMethod[Callable[[], None]] | None = None
        self.places: dict[str, Place] = {}
        self.lost: str | None = None  # why there are no weights any more
        self._copies: dict[str, tuple[weakref.ref[WeightCopy], int]] = {}
        self._num_running = 0
        self._is_prepared = False

    def prepare_with(self, prepare: Callable[[], None]) -> None:
        """Have a bound method called before the first read, and before the first after a step."""
        self._prepare = weakref.WeakMethod(prepare)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Inside the block nothing may be read: a step runs."""
        self.forget()
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1

    @property
    def is_running(self) -> bool:
        """Whether a step runs."""
        return bool(self._num_running)

    def forget(self) -> None:
        """The weights change: copies that were given out are of the past."""
        self._copies.clear()
        self._is_prepared = False

    def close(self, reason: str) -> None:
        """No weights are there any more, for this reason."""
        self.forget()
        self.lost = reason

    def value(self, place: Place, parameter: Tensor, function: str) -> Tensor:
        """A parameter's present weights, in fresh memory on the CPU.

        Raises:
            ValueError: a step runs.
            RuntimeError: they cannot be read.
        """
        owner = place.owner
        if self._num_running:
            raise CutError(
                f"code that the engine runs ('{function}') reads {owner!r} of the model itself, "
                "whose weights are in the engine. Expected code that uses the parameters of the "
                "module it is part of. A layer whose forward was replaced, or given to "
                "torch.compile, must use its own self, not the module it was taken from; a loss "
                "gets what it needs from the outputs; a penalty on weights is weight_decay."
            )
        if self.places.get(owner) is not place:
            raise RuntimeError(f"{owner!r} was removed from the engine, and its weights with it.")
        read = self._read()
        if self.lost is not None or read is None:
            reason = self.lost or "the engine that held them is gone"
            raise RuntimeError(
                f"there are no weights for {owner!r}: {reason}. Make the model anew, from a "
                "checkpoint or an export."
            )
        prepare = None if self._prepare is None else self._prepare()
        if prepare is not None and not self._is_prepared:
            prepare()
            self._is_prepared = True
        with torch.inference_mode(mode=False), torch.no_grad():
            found = read(owner)
            value = found.detach().to(device="cpu", dtype=parameter.dtype)
            return value.clone() if value.data_ptr() == found.data_ptr() else value

    def copy(self, place: Place, parameter: Tensor, function: str) -> WeightCopy:
        """The same as a tensor that is not written to; see [Note: copies]."""
        known, version = self._copies.get(place.owner, (None, 0))
        found = None if known is None or self._num_running else known()
        if found is not None and found._version == version and self.places[place.owner] is place:
            return found
        with torch._C.DisableTorchFunctionSubclass():
            made = self.value(place, parameter, function).as_subclass(WeightCopy)
            self._copies[place.owner] = (weakref.ref(made), made._version)
            made.place, made.whole = place, None
        return made


@final
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Place:
    """Where the weights of a parameter are, and what it was before."""

    owner: str
    reader: Reader
    kind: type[nn.Parameter]
    hollow: Tensor  # what the parameter holds meanwhile


class Held:
    """What makes a parameter a held one: an additional base of its class."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See the module."""
        del types
        if func in QUESTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return _answer(func, args, kwargs or {})

    @override
    def __hash__(self) -> int:
        return id(self)

    def __iter__(self) -> Iterator[Any]:
        return iter(Tensor.unbind(self))  # type: ignore[arg-type]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        found: nn.Parameter = _ordinary(self)
        memo[id(self)] = found
        return found

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        return _ordinary(self).__reduce_ex__(protocol)


class WeightCopy(Tensor):
    """A copy of weights that are in an engine, to be read; see [Note: copies]."""

    place: Place
    whole: WeightCopy | None  # what it is a view of: alive as long as this

    @classmethod
    @override
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run anything that does not write."""
        return _answer(func, args, kwargs or {})

    @override
    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbind())

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            found = self.as_subclass(Tensor).clone()
        memo[id(self)] = found
        return found

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            plain = self.as_subclass(Tensor)
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


# --------------------------------------------------------------------------------------------------
# Holding


def hold(parameter: nn.Parameter, owner: str, reader: Reader) -> None:
    """Let a parameter's weights be those that a reader knows as `owner`.

    It keeps what it has in the place of weights: something that takes no memory.
    """
    known: Place | None = parameter.__dict__.get(KEY)
    with torch._C.DisableTorchFunctionSubclass():
        hollow = parameter.data if known is None else known.hollow
    kind = type(parameter) if known is None else known.kind
    place = Place(owner=owner, reader=reader, kind=kind, hollow=hollow)
    parameter.__dict__[KEY] = reader.places[owner] = place
    parameter.__class__ = _held_class(kind)


def release(parameter: nn.Parameter) -> None:
    """Make a parameter an ordinary one again; what it holds is for the caller to set."""
    place: Place | None = parameter.__dict__.pop(KEY, None)
    if place is not None:
        parameter.__class__ = place.kind
        if place.reader.places.get(place.owner) is place:
            del place.reader.places[place.owner]


def lend(parameter: nn.Parameter, tensor: Tensor) -> None:
    """Let a held parameter be an ordinary one with this tensor, until `take_back`."""
    place: Place = parameter.__dict__[KEY]
    parameter.__class__ = place.kind
    parameter.data = tensor


def take_back(parameter: nn.Parameter) -> None:
    """End what `lend` has begun."""
    place: Place = parameter.__dict__[KEY]
    parameter.data = place.hollow
    parameter.__class__ = _held_class(place.kind)


def reason_for(parameter: nn.Parameter) -> str:
    """Why a held parameter has no weights of its own, and what to do, as an end of a sentence."""
    lost = parameter.__dict__[KEY].reader.lost
    if lost is None:
        return "its weights are in another engine. Close that one first."
    return f"{lost}. Make the model anew, from a checkpoint or an export."


def is_held(parameter: object) -> bool:
    """Whether a parameter's weights are in an engine, and it was not lent others."""
    return isinstance(parameter, Held)


Registered = list[tuple[dict[str, Any], str, nn.Parameter]]


def registered(model: nn.Module) -> Registered:
    """Where a model's modules look up their parameters."""
    return [
        (module._parameters, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


def refuse_replaced(expected: Registered) -> None:
    """Refuse a model whose modules have got other parameters than those that are held.

    Raises:
        RuntimeError: with the parameter.
    """
    for registry, name, parameter in expected:
        if registry.get(name) is not parameter:
            place: Place = parameter.__dict__[KEY]
            raise RuntimeError(
                f"{place.owner!r} was replaced by another parameter while its weights are in an "
                "engine (load_state_dict with assign=True does that), which goes on with the one "
                "it has. Close the engine first, change the model, and make a new one."
            )


@functools.cache
def _held_class(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    members = {"__module__": __name__, "__doc__": f"A {kind.__name__} whose weights are elsewhere."}
    meta: Any = type(kind)
    made: type[nn.Parameter] = meta(f"Held{kind.__name__}", (Held, kind), members)
    return made


def _ordinary(parameter: Any) -> Any:
    """A parameter like a held one, with its weights in memory of its own."""
    place: Place = parameter.__dict__[KEY]
    value = place.reader.value(place, parameter, "copy")
    made = nn.Parameter(value, requires_grad=parameter.requires_grad)
    made.__class__ = place.kind
    made.__dict__.update({k: v for k, v in parameter.__dict__.items() if k != KEY})
    return made


# --------------------------------------------------------------------------------------------------
# Functions of torch


def _answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function of torch with copies of the weights, or refuse to."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    held: list[Any] = [leaf for leaf in leaves if isinstance(leaf, Held)]
    others = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, Held)]
    if held and func in _SETTERS:
        return _SETTERS[func](*args, **kwargs)
    name = _name(func)
    for one in _targets(name, args, kwargs):
        if isinstance(one, Held | WeightCopy):
            _refuse_write(name, one)
    if held and name in _PASSES:
        _refuse_pass(name, held[0], others)
    copies = {id(one): _copy(one, name) for one in held}
    watched = [*copies.values(), *(one for one in others if isinstance(one, WeightCopy))]
    asks = torch.is_grad_enabled() and any(one.requires_grad for one in held)
    seen = [*watched, *others] if asks else watched
    with torch._C.DisableTorchFunctionSubclass():
        versions = [_version(one) for one in seen]
        given = [copies.get(id(leaf), leaf) for leaf in leaves]
        new_args, new_kwargs = pytree.tree_unflatten(given, spec)
        result = func(*new_args, **new_kwargs)
        changed = [
            one for one, version in zip(seen, versions, strict=True) if _version(one) != version
        ]
        if changed:
            written = [one for one in changed if isinstance(one, WeightCopy)]
            _refuse_write(name, written[0] if written else held[0], elsewhere=not written)
        asking = held[0].__dict__[KEY] if asks and func not in _CUT_OFF else None
        return pytree.tree_map(lambda one: _given_out(one, watched, asking, others), result)


def _targets(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """What a function writes to, by its name; not every kernel notes that it has written."""
    found = pytree.tree_leaves(kwargs.get("out"))
    is_inside = name == "__setitem__" or (name.startswith("__i") and hasattr(operator, name))
    is_inside |= name.endswith("_") and not name.startswith("__") and name not in _NO_WRITES
    if is_inside:
        found += pytree.tree_leaves(args[:1] or tuple(kwargs.values())[:1])
    return found


def _given_out(
    result: Any, watched: list[WeightCopy], asking: Place | None, others: list[Tensor]
) -> Any:
    """A result as it leaves: see [Note: copies] and [Note: no gradient]."""
    if not isinstance(result, Tensor):
        if hasattr(result, "setflags"):  # an array of numpy
            result.setflags(write=False)
        return result
    if any(result is one for one in others):
        return result
    if asking is not None and (result.is_floating_point() or result.is_complex()):
        anchor = torch.empty(0, requires_grad=True)
        result = _NoGradient.apply(result, anchor, asking.owner)  # type: ignore[no-untyped-call]
    storage = _storage(result)
    for one in watched:
        if storage is not None and storage == _storage(one):
            view = result.as_subclass(WeightCopy)
            view.place, view.whole = one.place, one if one.whole is None else one.whole
            return view
    return result.as_subclass(Tensor) if isinstance(result, WeightCopy) else result


def _storage(tensor: Tensor) -> int | None:
    """Which memory a tensor lies in."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


def _version(tensor: Tensor) -> int:
    """How often a tensor was written to."""
    return -1 if tensor.is_inference() else tensor._version


def _name(func: Any) -> str:
    own = getattr(func, "__name__", str(func))
    if own in ("__get__", "__set__", "__delete__"):  # of a property
        return str(getattr(getattr(func, "__self__", None), "__name__", own))
    return str(own)


def _copy(parameter: Any, name: str) -> WeightCopy:
    place: Place = parameter.__dict__[KEY]
    return place.reader.copy(place, parameter, name)


class _NoGradient(torch.autograd.Function):
    """Gives a value that requires a gradient, and refuses to give that."""

    @staticmethod
    @override
    def forward(ctx: Any, value: Tensor, anchor: Tensor, owner: str) -> Tensor:
        del anchor
        ctx.owner = owner
        return value.view_as(value)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        raise RuntimeError(
            f"a gradient was asked for {ctx.owner!r}, whose weights are in an engine. Use "
            "engine.step, which trains it; or close the engine first, and run a loop of your own. "
            "If no gradient is meant, read the weights with .detach()."
        )


def _refuse_pass(name: str, parameter: Any, others: list[Tensor]) -> None:
    """Refuse to run a part of the model outside the engine."""
    if all(isinstance(one, WeightCopy) or not one.dim() for one in others):
        return  # a question about weights alone
    place: Place = parameter.__dict__[KEY]
    if place.reader.is_running:
        return  # there is more to say of that
    raise RuntimeError(
        f"the model's weights are in an engine ('{name}' was given {place.owner!r}), so the model, "
        "or a part of it, cannot be called by itself. Use engine.step, engine.evaluate or "
        "engine.predict. For anything else, such as model.generate, close the engine first with "
        "engine.close(), or write a copy with engine.export and load that. To compute something "
        "from the weights alone read them with .detach()."
    )


def _refuse_write(name: str, tensor: Any, *, elsewhere: bool = False) -> NoReturn:
    place: Place = tensor.place if isinstance(tensor, WeightCopy) else tensor.__dict__[KEY]
    owner = place.owner
    place.reader.forget()  # it may have happened, to a copy
    if place.reader.is_running:
        raise CutError(
            f"code that the engine runs ('{name}') writes to {owner!r} of the model itself, whose "
            "weights are in the engine. Expected code that leaves parameters to the optimizer."
        )
    if elsewhere:
        raise RuntimeError(
            f"'{name}' writes {owner!r} into another tensor with gradients on, and no gradient can "
            "be given for weights that are in an engine. Do it inside torch.no_grad()."
        )
    raise RuntimeError(
        f"'{name}' writes to {owner!r}, whose weights are in an engine: it would be lost. Close "
        "the engine first with engine.close(), change the weights, and make a new one; or go on "
        "from a checkpoint with engine.load. What was read from a parameter may be changed in a "
        "copy of it: .clone()."
    )


# --------------------------------------------------------------------------------------------------
# Setting something of a held parameter


def _set_data(parameter: Any, value: Tensor) -> None:
    """Nothing changes if it is set to what was read from it: model.to("cpu") does that."""
    place: Place = parameter.__dict__[KEY]
    with torch._C.DisableTorchFunctionSubclass():
        same = (
            isinstance(value, WeightCopy)
            and value.place is place
            and value.whole is not None
            and value.dtype is parameter.dtype
            and value.device == parameter.device
            and value.shape == parameter.shape
            and value.data_ptr() == value.whole.data_ptr()
        )
    if not same:
        raise RuntimeError(
            f"{place.owner!r} is given another tensor, or another type or device, while its "
            "weights are in an engine: it would be lost. Close the engine first with "
            "engine.close(), change the model, and make a new one."
        )


def _is_compatible(*_: Any) -> bool:
    """Asked whether its data can be set, or it must be replaced by another: the former refuses."""
    return True


def _set_grad(parameter: Any, value: Tensor | None) -> None:
    if value is not None:
        raise RuntimeError(
            f"{parameter.__dict__[KEY].owner!r} is given a gradient, but its weights are in an "
            "engine, and no other optimizer can change them. Use engine.step, or close the engine "
            "first with engine.close()."
        )
    with torch._C.DisableTorchFunctionSubclass():
        parameter.grad = None


def _set_requires_grad(parameter: Any, requires_grad: bool = True) -> Any:  # noqa: FBT001, FBT002
    if requires_grad != parameter.requires_grad:
        raise RuntimeError(
            f"requires_grad of {parameter.__dict__[KEY].owner!r} is set while its weights are in "
            "an engine, which would go on as before. Use engine.layers.freeze or "
            "engine.layers.thaw for whole layers, or set it before the engine is made."
        )
    return parameter


def _add_hook(parameter: Any, *_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        f"a hook is added to {parameter.__dict__[KEY].owner!r}, whose weights are in an engine. It "
        "would never run: gradients do not come to the model's own parameters."
    )


def _setter(name: str) -> Any:
    return getattr(Tensor, name).__set__


_SETTERS: dict[Any, Callable[..., Any]] = {
    _setter("data"): _set_data,
    _setter("grad"): _set_grad,
    _setter("requires_grad"): _set_requires_grad,
    Tensor.requires_grad_: _set_requires_grad,
    torch._has_compatible_shallow_copy_type: _is_compatible,
    Tensor.register_hook: _add_hook,
    Tensor.register_post_accumulate_grad_hook: _add_hook,
}
