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
from typing import Any, ClassVar, NoReturn, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typing_extensions import override

from l2l.model.format import MEANT, format_of
from l2l.model.modules import CutError

KEY = "_l2l_place"  # where a parameter, or a copy, notes its place

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
    _is_view _is_zerotensor stride is_contiguous storage_offset result_type empty_like zeros_like
    ones_like full_like rand_like randn_like randint_like
"""
PASSES = """
    linear embedding layer_norm rms_norm group_norm batch_norm instance_norm prelu attention mm mv
    mul einsum tensordot encoder_layer lstm gru rnn conv
"""
"""Parts of the names of what modules do with their weights and what they are given."""
NO_WRITES = frozenset({"requires_grad_", "share_memory_", "detach_"})
"""What ends in an underscore, but changes no values."""
CLOSE = "Close the engine first with engine.close(), change the model, and make a new one"


def _property(name: str) -> Any:
    return getattr(Tensor, name)


QUESTIONS = frozenset(
    [_property(name).__get__ for name in PROPERTIES.split() if hasattr(Tensor, name)]
    + [getattr(torch, name) for name in METHODS.split() if hasattr(torch, name)]
    + [getattr(Tensor, name) for name in METHODS.split() if hasattr(Tensor, name)]
    + [_property("grad").__delete__]
)
"""What is answered without the weights, by whichever of these this version of torch has."""
CUT_OFF = (Tensor.detach, _property("data").__get__, torch.detach)
"""What gives no gradient to anybody."""
GET_GRAD = _property("grad").__get__
SET_DATA, SET_GRAD = _property("data").__set__, _property("grad").__set__
SET_FLAG = (_property("requires_grad").__set__, Tensor.requires_grad_)
ADD_HOOK = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)


class GradientsAway:
    """Gradients of held parameters that are not in `.grad`, as an update still reads them: none."""

    def get(self, owner: str) -> Tensor | None:
        """What stands for a parameter's gradient."""
        return None

    def drop(self, owner: str) -> None:
        """It is not to come back: another was set, or none."""


class Reader:
    """Gives the present weights of held parameters; knows nothing of who holds them."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        """Nothing is read yet.

        Args:
            read: a bound method, which is not kept alive: a parameter's name -> its present value,
                perhaps as a view.
        """
        self._read = weakref.WeakMethod(read)
        self._prepare: Callable[[], Callable[[], None] | None] = lambda: None
        self.places: dict[str, Place] = {}
        self.lost: str | None = None  # why there are no weights any more
        self.num_running = 0  # steps that run now
        self.has_gradients = False  # whether gradients come to held parameters, and are used
        self.gradients = GradientsAway()
        self._copies: dict[str, tuple[weakref.ref[WeightCopy], int]] = {}
        self._is_prepared = False
        self._watched: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []

    def prepare_with(self, prepare: Callable[[], None]) -> None:
        """Have a bound method called before the first read, and before the first after a step."""
        self._prepare = weakref.WeakMethod(prepare)

    def watch(self, model: nn.Module) -> None:
        """Note where a model's modules look up their parameters."""
        registries = [module._parameters for module in model.modules()]
        self._watched = [
            (one, name, p) for one in registries for name, p in one.items() if p is not None
        ]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Inside the block nothing may be read: a step runs.

        Raises:
            RuntimeError: a module has got another parameter than the one that is held.
        """
        for registry, name, parameter in self._watched:
            if registry.get(name) is not parameter:
                raise RuntimeError(
                    f"{parameter.__dict__[KEY].owner!r} was replaced by another parameter "
                    "(load_state_dict with assign=True does that), while its engine goes on with "
                    f"the one it has. {CLOSE}."
                )
        self.forget()
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1

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
        owner, read, prepare = place.owner, self._read(), self._prepare()
        if self.num_running:
            raise CutError(
                f"code that the engine runs ('{function}') reads {owner!r} of the model itself, "
                "whose weights are in the engine. Expected code that uses parameters of its own "
                "module: a forward that was replaced, or compiled, must use its own self; a loss "
                "gets what it needs from the outputs; a penalty on weights is weight_decay."
            )
        if self.places.get(owner) is not place:
            raise RuntimeError(f"{owner!r} was removed from the engine, and its weights with it.")
        if self.lost is not None or read is None:
            reason = self.lost or "the engine that held them is gone"
            raise RuntimeError(f"{owner!r} has no weights: {reason}. {ANEW}")
        if prepare is not None and not self._is_prepared:
            prepare()
            self._is_prepared = True
        with torch.inference_mode(mode=False), torch.no_grad():
            found = read(owner)
            if (known := format_of(found)) is not None:
                return known.to_read(found)
            value = found.detach().to(device="cpu", dtype=parameter.dtype)
            return value.clone() if value.data_ptr() == found.data_ptr() else value

    def copy(self, parameter: Tensor, function: str) -> WeightCopy:
        """The same as a tensor that is not written to; see [Note: copies]."""
        place: Place = parameter.__dict__[KEY]
        known, version = self._copies.get(place.owner, (None, 0))
        found = None if known is None or self.num_running else known()
        if found is not None and found._version == version and self.places[place.owner] is place:
            return found
        with torch._C.DisableTorchFunctionSubclass():
            value = self.value(place, parameter, function)
            if format_of(value) is not None:  # nobody writes to what is not trained
                return value  # type: ignore[return-value]
            made = value.as_subclass(WeightCopy)
            self._copies[place.owner] = (weakref.ref(made), made._version)
            made.__dict__[KEY], made.whole = place, None
        return made


ANEW = "Build the model again and load it from a checkpoint or an export."


@final
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Place:
    """Where the weights of a parameter are, and what it was before."""

    owner: str
    reader: Reader
    kind: type[nn.Parameter]
    hollow: Tensor  # what the parameter holds meanwhile


class Guarded:
    """A tensor through which every function of torch passes that is given it."""

    answered: ClassVar[frozenset[Any]] = frozenset()  # without the weights

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See the module."""
        if func in cls.answered:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return _answer(func, args, kwargs or {})

    def ordinary(self: Any) -> Any:
        """The same as an ordinary tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def __iter__(self: Any) -> Iterator[Any]:
        return iter(Tensor.unbind(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), self.ordinary())

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.ordinary().__reduce_ex__(protocol)


class Held(Guarded):
    """What makes a parameter a held one: an additional base of its class."""

    answered = QUESTIONS

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == GET_GRAD:
            place: Place = args[0].__dict__[KEY]
            found = place.reader.gradients.get(place.owner)
            if found is not None:
                return found
        return super().__torch_function__(func, types, args, kwargs)

    @override
    def __hash__(self) -> int:
        return id(self)

    @override
    def ordinary(self: Any) -> Any:
        place: Place = self.__dict__[KEY]
        value = place.reader.value(place, self, "copy")
        made = nn.Parameter(value, requires_grad=self.requires_grad)
        if format_of(value) is None:
            made.__class__ = place.kind
            made.__dict__.update({k: v for k, v in self.__dict__.items() if k not in (KEY, MEANT)})
        return made


class WeightCopy(Guarded, Tensor):
    """A copy of weights that are in an engine, to be read; see [Note: copies]."""

    whole: WeightCopy | None  # what it is a view of: alive as long as this

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), self.ordinary().clone())


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


@contextlib.contextmanager
def lent(parameter: nn.Parameter, tensor: Tensor) -> Iterator[None]:
    """Let a held parameter be an ordinary one with this tensor, and no gradient, in the block."""
    place: Place = parameter.__dict__[KEY]
    parameter.__class__ = place.kind
    parameter.data, gradient, parameter.grad = tensor, parameter.grad, None
    try:
        yield
    finally:
        parameter.data, parameter.grad = place.hollow, gradient
        parameter.__class__ = _held_class(place.kind)


def reason_for(parameter: nn.Parameter) -> str:
    """Why a held parameter has no weights of its own, and what to do, as an end of a sentence."""
    lost = parameter.__dict__[KEY].reader.lost
    return f"{lost}. {ANEW}" if lost else "its weights are in another engine. Close that one first."


def is_held(parameter: object) -> bool:
    """Whether a parameter's weights are in an engine, and it was not lent others."""
    return isinstance(parameter, Held)


@functools.cache
def _held_class(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    members = {"__module__": __name__, "__doc__": f"A {kind.__name__} whose weights are elsewhere."}
    meta: Any = type(kind)
    made: type[nn.Parameter] = meta(f"Held{kind.__name__}", (Held, kind), members)
    return made


# --------------------------------------------------------------------------------------------------
# Functions of torch


def _answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function of torch with copies of the weights, or refuse to."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    held: list[Any] = [leaf for leaf in leaves if isinstance(leaf, Held)]
    others = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, Held)]
    if held and func is torch._has_compatible_shallow_copy_type:
        return True  # else it would be replaced by another instead of being set, which is refused
    if held and func in (SET_DATA, SET_GRAD, *SET_FLAG, *ADD_HOOK):
        return _set(func, args[0], next(iter([*args[1:], *kwargs.values()]), True))
    name = _name(func)
    for one in _targets(name, args, kwargs):
        if isinstance(one, Guarded):
            _refuse_write(name, one)
    if held and any(word in name for word in PASSES.split()):
        _refuse_pass(name, held[0], others)
    copies = {id(one): one.__dict__[KEY].reader.copy(one, name) for one in held}
    watched = [*copies.values(), *(one for one in others if isinstance(one, WeightCopy))]
    asks = torch.is_grad_enabled() and any(one.requires_grad for one in held)
    seen = [*watched, *others] if asks else watched
    if any(format_of(one) is not None for one in copies.values()):
        return _of_formats(func, name, copies, leaves, spec)
    with torch._C.DisableTorchFunctionSubclass():
        versions = [_version(one) for one in seen]
        given = [copies.get(id(leaf), leaf) for leaf in leaves]
        new_args, new_kwargs = pytree.tree_unflatten(given, spec)
        result = func(*new_args, **new_kwargs)
        changed = [one for one, old in zip(seen, versions, strict=True) if _version(one) != old]
        if changed:
            written = [one for one in changed if isinstance(one, WeightCopy)]
            _refuse_write(name, written[0] if written else held[0], elsewhere=not written)
        owner = held[0].__dict__[KEY].owner if asks and func not in CUT_OFF else None
        return pytree.tree_map(lambda one: _given_out(one, watched, owner, others), result)


def _of_formats(func: Any, name: str, copies: dict[int, Any], leaves: list[Any], spec: Any) -> Any:
    """Run a function with copies that know themselves what it does to them."""
    args, kwargs = pytree.tree_unflatten([copies.get(id(leaf), leaf) for leaf in leaves], spec)
    own = getattr(type(args[0]), name, func) if args else func
    with torch.no_grad():
        if func is not getattr(Tensor, name, None) or own is func:
            return func(*args, **kwargs)
        return own(*args, **{key: one for key, one in kwargs.items() if one is not None})


def _targets(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """What a function writes to, by its name; not every kernel notes that it has written."""
    found = pytree.tree_leaves(kwargs.get("out"))
    is_inside = name == "__setitem__" or (name.startswith("__i") and hasattr(operator, name))
    is_inside |= name.endswith("_") and not name.startswith("__") and name not in NO_WRITES
    if is_inside:
        found += pytree.tree_leaves(args[:1] or tuple(kwargs.values())[:1])
    return found


def _given_out(
    result: Any, watched: list[WeightCopy], owner: str | None, others: list[Tensor]
) -> Any:
    """A result as it leaves: see [Note: copies], and with an `owner` [Note: no gradient]."""
    if not isinstance(result, Tensor):
        if hasattr(result, "setflags"):  # an array of numpy
            result.setflags(write=False)
        return result
    if any(result is one for one in others):
        return result
    if owner is not None and (result.is_floating_point() or result.is_complex()):
        anchor = torch.empty(0, requires_grad=True)
        result = _NoGradient.apply(result, anchor, owner)  # type: ignore[no-untyped-call]
    storage = _storage(result)
    for one in watched:
        if storage is not None and storage == _storage(one):
            view = result.as_subclass(WeightCopy)
            view.__dict__[KEY], view.whole = (
                one.__dict__[KEY],
                one if one.whole is None else one.whole,
            )
            return view
    return result.as_subclass(Tensor) if isinstance(result, WeightCopy) else result


def _storage(tensor: Tensor) -> int | None:
    """Which memory a tensor lies in."""
    if tensor.layout is not torch.strided or format_of(tensor) is not None:
        return None
    place: int = tensor.untyped_storage()._cdata
    return place


def _version(tensor: Tensor) -> int:
    """How often a tensor was written to."""
    return -1 if tensor.is_inference() else tensor._version


def _name(func: Any) -> str:
    own = getattr(func, "__name__", str(func))
    if own in ("__get__", "__set__", "__delete__"):  # of a property
        return str(getattr(getattr(func, "__self__", None), "__name__", own))
    return str(own)


class _NoGradient(torch.autograd.Function):
    """Gives a value that requires a gradient, and refuses to give that."""

    @staticmethod
    @override
    def forward(ctx: Any, value: Tensor, anchor: Tensor, owner: str) -> Tensor:
        ctx.owner = owner
        return value.view_as(value)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        raise RuntimeError(
            f"a gradient was asked for {ctx.owner!r}, whose weights are in an engine: what is "
            "computed of weights themselves has none. Gradients come from engine.step, or, with "
            "autograd=True, from outputs of the model; those of a penalty on weights are added by "
            "hand, parameter.grad.add_(...), or are weight_decay. If no gradient is meant, read "
            "the weights with .detach()."
        )


def _refuse_pass(name: str, parameter: Any, others: list[Tensor]) -> None:
    """Refuse to run a part of the model outside the engine."""
    place: Place = parameter.__dict__[KEY]
    about_weights = all(isinstance(one, WeightCopy) or not one.dim() for one in others)
    if not about_weights and not place.reader.num_running:  # in a step there is more to say
        raise RuntimeError(
            f"the model's weights are held by an engine ('{name}' was called with {place.owner!r}),"
            " so it and its submodules cannot be called directly. Use engine.step, engine.evaluate "
            "or engine.predict; with autograd=True given to the engine the model itself can be "
            "called. For anything else close the engine first, or load what engine.export writes; "
            "weights alone are read with .detach()."
        )


def _refuse_write(name: str, tensor: Any, *, elsewhere: bool = False) -> NoReturn:
    place: Place = tensor.__dict__[KEY]
    owner = place.owner
    place.reader.forget()  # it may have happened, to a copy
    if place.reader.num_running:
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
        f"'{name}' writes to {owner!r}, whose weights are held by an engine: the write would be "
        f"lost. In a loop of your own engine.optimizer updates them. {CLOSE}; or restore a "
        "checkpoint with engine.load. To change a value that you read, change a .clone() of it."
    )


# --------------------------------------------------------------------------------------------------
# Setting something of a held parameter


def _is_own(parameter: Any, value: Any) -> bool:
    """Whether a value is all that was read from a parameter: model.to("cpu") sets it to that."""
    with torch._C.DisableTorchFunctionSubclass():
        return (
            isinstance(value, WeightCopy)
            and value.__dict__[KEY] is parameter.__dict__[KEY]
            and value.whole is not None
            and value.dtype is parameter.dtype
            and value.device == parameter.device
            and value.shape == parameter.shape
            and value.data_ptr() == value.whole.data_ptr()
        )


def _set(func: Any, parameter: Any, value: Any) -> Any:
    """Let something of a held parameter be set to what it is anyway, or refuse to."""
    place: Place = parameter.__dict__[KEY]
    owner = place.owner
    if func == SET_GRAD:
        place.reader.gradients.drop(owner)
    if place.reader.has_gradients and (func == SET_GRAD or func in ADD_HOOK):
        with torch._C.DisableTorchFunctionSubclass():
            return func(parameter, value)
    if func in ADD_HOOK:
        raise RuntimeError(
            f"a hook is added to {owner!r}, whose weights are in an engine. It would never run: "
            "gradients do not come to the model's own parameters."
        )
    if func in SET_FLAG and value != parameter.requires_grad:
        raise RuntimeError(
            f"requires_grad of {owner!r} is set while its weights are in an engine, which would go "
            "on as before. Use engine.layers.freeze or engine.layers.thaw, or set it before."
        )
    if func == SET_GRAD and value is not None:
        raise RuntimeError(
            f"{owner!r} is given a gradient, but its weights are in an engine, and no other "
            "optimizer can change them. Use engine.step, or close the engine first."
        )
    if func == SET_DATA and not _is_own(parameter, value):
        raise RuntimeError(
            f"{owner!r} is given another tensor, type or device, while its weights are in an "
            f"engine: it would be lost. {CLOSE}."
        )
    with torch._C.DisableTorchFunctionSubclass():
        return None if func == SET_DATA else func(parameter, value)
