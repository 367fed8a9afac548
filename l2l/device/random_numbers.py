"""Random numbers of passes: from generators of their own, whatever other threads draw.

Torch has one default generator for each device, for all threads of the process. A recomputed layer
that draws from it gets another mask than its forward pass as soon as anybody else draws as well: a
thread that makes batches, or another engine. So what runs inside `RandomNumbers.scope` draws from
generators that belong to it, and nobody's default generators are read or changed. Seeded alike,
they give the same bits.

[Note: redirection] A generator cannot be handed to code that does not ask for one, but torch calls
operators through a table of kernels by *dispatch key*, and a thread may switch a key on for itself.
This module takes a key that torch has reserved and uses for nothing (`Fake`, meant for fake tensors
of another package), registers kernels there for the operators that draw random numbers and for no
others, and a scope switches it on. Operators that draw nothing do not come by and cost nothing, so
that a scope is open around every pass, whether or not it is known to draw: nothing can be missed
that was not seen in a trial. The key lies below autograd (gradients are those of torch, and a
backward pass on a thread of autograd's is in the scope as well) and above dispatch modes and
tensors with code of their own, so that an operator is redirected before these see it. Which
operators draw is torch's own knowledge (the tag `nondeterministic_seeded`):

    redirected    has an argument for a generator, and gets one
    rewritten     has none, but is equal to operators, or has an overload, that have
    borrowing     has none, and is one fused kernel (attention with dropout on an accelerator)
    left alone    consists of others that come by themselves, or draws nothing

Compilers trace with fake tensors, which are left alone; what they have compiled draws when it runs,
and then comes by.

[Note: borrowing] A fused kernel reads the default generator of its device. It runs under a lock
with that generator set to the own state, which is read back after it, and the generator is put back
then. The other way, to compute attention by parts, takes memory quadratic in the length, which is
what the fused kernels are there to avoid. The lock keeps engines apart, but not a thread that draws
from the default generator of the *accelerator* during those microseconds. Then the generator has
moved further than the kernel moves it, or to somewhere else, and the kernel runs again. How far the
kernel moves it is the least of many runs, when it first runs: whoever draws beside it can only move
it further. A thread that waits for Python's lock draws at the very moment at which the kernel's
call gives that lock up, every time; so each run but the first is preceded by a pause, of another
length each time, in which those who wait have their turn. The thread has drawn one of the engine's
numbers then: that cannot be taken back.

[Note: state] `torch.get_rng_state` and its like are functions of the default generators, and
`torch.utils.checkpoint` uses them to draw the same numbers again, as torch.compile does to leave no
trace. Inside a scope, and for its thread alone, they are about its generators.

[Note: others' generators] Code that is no operator of torch (a kernel of an extension) may draw
from the default generators where nobody sees it. A trial finds that: with the own generators
seeded alike, a part gives other results when it runs again. From then on `seed` seeds the default
generators too, as far as that helps, and the scope puts them back; such a part is exact only while
no other thread draws.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final, final

import torch
from torch import Tensor

KEY: Final = "Fake"  # [Note: redirection]
_KEY: Final[Any] = torch._C._parse_dispatch_key(KEY)
_THREADS_OWN: Final = "l2l random numbers"
_TRACING: Final = (
    torch._C._TorchDispatchModeKey.FAKE,
    torch._C._TorchDispatchModeKey.PROXY,
    torch._C._TorchDispatchModeKey.FUNCTIONAL,
)
TRIALS: Final = 32  # of a fused kernel when it first runs: the least that it moves a generator
PAUSES: Final = (0.0, 2e-5, 5e-5, 1e-4, 2e-4)  # seconds, in turn, before it runs again
OFTEN: Final = 64  # a kernel that moves a generator as far so often moves it so by itself
_borrowing = threading.RLock()

LEFT_ALONE: Final[Mapping[str, str]] = {
    "_cudnn_attention_backward": "takes the seed of its forward pass",
    "_scaled_dot_product_cudnn_attention_backward": "takes the seed of its forward pass",
    "_scaled_dot_product_efficient_attention_backward": "takes the seed of its forward pass",
    "_cudnn_init_dropout_state": "takes its seed as an argument",
    "_fill_mem_eff_dropout_mask_": "takes its seed as an argument",
    "_flash_attention_forward_no_dropout_inplace": "has no dropout",
    "_fused_sdp_choice": "draws nothing",
    "_nested_tensor_softmax_with_shape": "draws nothing",
    "_scaled_dot_product_flash_attention_for_cpu": "has no dropout: it refuses any",
    "_lstm_mps": "is of a device that this engine does not drive",
    "_scaled_dot_product_attention_math_for_mps": "is of a device that this engine does not drive",
    "_scaled_dot_product_fused_attention_overrideable": "is of devices of other packages",
    "miopen_rnn": "is of a device that this engine does not drive",
}
"""Operators with the tag that draw nothing here, and why."""


@final
class RandomNumbers:
    """The generators of one device's passes, on the device and on the host."""

    def __init__(self, defaults: Sequence[torch.Generator]) -> None:
        """Take the place of these generators, of one device each."""
        self._defaults = {one.device: one for one in defaults}
        self._own = {device: torch.Generator(device) for device in self._defaults}
        self._before: list[Tensor] | None = None  # states of the defaults, if these were changed
        self._moves: dict[tuple[object, ...], int] = {}  # how far a fused kernel moves a generator
        self.seeds_defaults = False  # [Note: others' generators]
        self.num_draws = 0  # operators that have drawn from here

    def apart(self) -> RandomNumbers:
        """Others in the same place, for another thread."""
        return RandomNumbers([*self._defaults.values()])

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Draw from these generators, in this thread and in what autograd runs for it."""
        _register()
        outer = current()
        _hold_for_thread(self)
        try:
            with torch._C._IncludeDispatchKeyGuard(_KEY):
                yield
        finally:
            _hold_for_thread(outer)
            if self._before is not None and outer is not self:
                _set_states(self._defaults, self._before)
                self._before = None

    def seed(self, seed: int) -> None:
        """Begin the sequence of a seed, on the device and on the host."""
        for own in self._own.values():
            own.manual_seed(seed)
        if self.seeds_defaults:
            if self._before is None:
                self._before = [default.get_state() for default in self._defaults.values()]
            for default in self._defaults.values():
                default.manual_seed(seed)

    def state(self) -> list[Tensor]:
        """Where the sequences are."""
        return [own.get_state() for own in self._own.values()]

    def set_state(self, state: Sequence[Tensor]) -> None:
        """Go on from there."""
        _set_states(self._own, state)

    def generator(self, device: torch.device) -> torch.Generator | None:
        """The generator of a device; None if it is another than these are of."""
        return self._own.get(device)

    def borrow(self, device: torch.device, run: Callable[[], Any], *key: object) -> Any:
        """Run what draws from the default generator, from the own state ([Note: borrowing]).

        Args:
            device: whose generator.
            run: draws, and may run more than once.
            key: what is alike for all that move the generator as far.
        """
        own, default = self._own[device], self._defaults[device]
        pauses, keys = itertools.cycle(PAUSES), torch._C.DispatchKeySet(_KEY)

        def attempt(*, pauses_first: bool = True) -> tuple[Any, Tensor, int | None]:
            if pauses_first:
                time.sleep(next(pauses))
            default.set_state(start)
            with torch._C._ExcludeDispatchKeyGuard(keys):  # parts of the operator do not borrow
                result = run()
            after = default.get_state()
            return result, after, 0 if device.type == "cpu" else _moved(start, after)

        with _borrowing:
            before, start = default.get_state(), own.get_state()
            try:
                result, after, moved = attempt(pauses_first=False)
                if key not in self._moves:
                    trials = TRIALS if device.type != "cpu" else 0
                    moves = [moved, *(attempt()[2] for _ in range(trials))]
                    self._moves[key] = min((one for one in moves if one is not None), default=0)
                last, times = moved, 1
                while (moved is None or moved > self._moves[key]) and times < OFTEN:
                    result, after, moved = attempt()
                    times = times + 1 if moved == last else 1
                    last = moved
                if moved is not None:
                    self._moves[key] = moved
                own.set_state(after)
            finally:
                default.set_state(before)
        return result


class Drawing:
    """What devices have in common: random numbers of their own."""

    def __init__(self, torch_device: torch.device, random_numbers: RandomNumbers) -> None:
        self.torch_device = torch_device
        self.random_numbers = random_numbers
        self.long_lines = set[str]()  # verbs of lines that launch many kernels

    def private_random_state(self) -> contextlib.AbstractContextManager[None]:
        """Draw from generators of this device's own, and leave the caller's as they are."""
        return self.random_numbers.scope()

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """For another thread, which may use the device's libraries inside the block."""
        with self.random_numbers.apart().scope():
            yield

    def hold_back(self, is_compiled: bool) -> None:  # noqa: FBT001
        """Whether another thread compiles from here on: streams leave waiting to the host."""

    def seed(self, seed: int) -> None:
        """Seed the generators that the layers' own code draws from."""
        self.random_numbers.seed(seed)


def _set_states(
    generators: Mapping[torch.device, torch.Generator], states: Sequence[Tensor]
) -> None:
    for generator, state in zip(generators.values(), states, strict=True):
        generator.set_state(state)


def _moved(start: Tensor, after: Tensor) -> int | None:
    """How far an accelerator's generator, a seed and a position, has moved; None: elsewhere."""
    (seed, position), (seed_after, position_after) = (
        state.view(torch.int64).tolist() for state in (start, after)
    )
    moved: int = position_after - position
    return moved if seed == seed_after and moved >= 0 else None


def _hold_for_thread(numbers: RandomNumbers | None) -> None:
    """Let a scope's random numbers, or none, be those of this thread and of autograd's for it."""
    if _steals_references():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(numbers))
    torch._C._stash_obj_in_tls(_THREADS_OWN, numbers)


@cache
def _steals_references() -> bool:
    """Whether torch takes over a reference to what it holds for a thread, as older ones do."""
    probe = object()
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls(f"{_THREADS_OWN}, tried", probe)
    steals = sys.getrefcount(probe) == before
    if steals:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    return steals


def current() -> RandomNumbers | None:
    """The random numbers of the scope that is open in this thread, if any."""
    if not torch._C._is_key_in_tls(_THREADS_OWN):
        return None
    found = torch._C._get_obj_in_tls(_THREADS_OWN)
    assert found is None or isinstance(found, RandomNumbers)
    return found


# --------------------------------------------------------------------------------------------------
# Kernels


def random_operators() -> list[torch._ops.OpOverload]:
    """The operators of torch that draw random numbers, as torch has tagged them."""
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if namespace == "aten":
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
            if torch.Tag.nondeterministic_seeded in operator.tags:
                found.append(operator)
    return found


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of an operator inside a scope."""

    operator: torch._ops.OpOverload
    below: Callable[..., Any]  # the operator as it is
    numbers: RandomNumbers  # of the scope
    own: torch.Generator  # among these, that of the operator's device
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def as_it_is(self) -> Any:
        """What the operator does by itself."""
        return self.below(*self.args, **self.kwargs)

    def named(self) -> dict[str, Any]:
        """All arguments by name, also those that the operator has by itself."""
        names, missing = _arguments(self.operator)
        return missing | dict(zip(names, self.args, strict=False)) | dict(self.kwargs)


def kernel_of(operator: torch._ops.OpOverload) -> Callable[[_Call], Any] | None:
    """What runs instead of an operator inside a scope; None: it is left alone."""
    if operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return None  # its parts come by
    if any(argument.name == "generator" for argument in operator._schema.arguments):
        return _redirected
    packet, _, overload = str(operator).removeprefix("aten.").partition(".")
    if packet in LEFT_ALONE:
        return None
    if packet in FACTORIES and overload in WITH_GENERATOR:
        return _with_generator
    rewritten = _REWRITTEN.get(packet) if overload == "default" else None
    return _borrowing_kernel if rewritten is None else rewritten


_libraries: list[torch.library.Library] = []  # kernels are there as long as these are
_registering = threading.Lock()


def _register() -> None:
    """Register the kernels, once in a process; they run where the key is on."""
    with _registering:
        if _libraries:
            return
        others = torch.library.Library("_", "IMPL")
        others.fallback(torch.library.fallthrough_kernel, KEY)
        library = torch.library.Library("aten", "IMPL", KEY)
        for operator in random_operators():
            kernel = kernel_of(operator)
            if kernel is not None:
                library.impl(operator, partial(_perform, operator, kernel), with_keyset=True)
        vars(torch.random)["default_generator"] = _ThreadsGenerator()
        _libraries.extend([others, library])


def _perform(
    operator: torch._ops.OpOverload,
    kernel: Callable[[_Call], Any],
    keys: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run an operator's kernel, or the operator itself where it is not to be redirected."""
    below = partial(operator.redispatch, keys & torch._C._dispatch_keyset_full_after(_KEY))
    numbers, own = current(), None
    traced = any(torch._C._get_dispatch_mode(mode) is not None for mode in _TRACING)
    if numbers is not None and not traced:
        tensors = (one for one in (*args, *kwargs.values()) if isinstance(one, Tensor))
        elsewhere = torch.device(kwargs.get("device") or "cpu")
        own = numbers.generator(next((one.device for one in tensors), elsewhere))
    if numbers is None or own is None:
        return below(*args, **kwargs)
    return kernel(_Call(operator, below, numbers, own, args, kwargs))


def _redirected(call: _Call) -> Any:
    """The operator with the scope's generator, unless the caller gave one."""
    position, args = _arguments(call.operator)[0].index("generator"), list(call.args)
    given = args[position] if len(args) > position else call.kwargs.get("generator")
    if given is not None:
        return call.as_it_is()
    call.numbers.num_draws += 1
    if len(args) > position:
        args[position] = call.own
        return call.below(*args, **call.kwargs)
    return call.below(*args, **{**call.kwargs, "generator": call.own})


def _borrowing_kernel(call: _Call) -> Any:
    """The operator from the default generator ([Note: borrowing]), if it draws at all."""
    given = call.named()
    if given.get("dropout_p", 1.0) == 0 or given.get("dropout", 1.0) == 0:
        return call.as_it_is()
    call.numbers.num_draws += 1
    alike = [
        (one.dtype, tuple(one.shape)) if isinstance(one, Tensor) else repr(one)
        for one in given.values()
    ]
    return call.numbers.borrow(call.own.device, call.as_it_is, str(call.operator), *alike)


@cache
def _arguments(operator: torch._ops.OpOverload) -> tuple[list[str], dict[str, Any]]:
    """Names of an operator's arguments, and the values that some have by themselves."""
    arguments = operator._schema.arguments  # takes milliseconds to read
    missing = {one.name: one.default_value for one in arguments if one.has_default_value()}
    return [one.name for one in arguments], missing


def _native_dropout(call: _Call) -> Any:
    tensor, p, train = call.args
    if train is False or p == 1:
        return call.as_it_is()
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_nested:
        return _borrowing_kernel(call)
    call.numbers.num_draws += 1
    if call.own.device.type != "cpu":
        output, mask = torch.ops.aten._fused_dropout(tensor, 1 - p, call.own)
        return output, mask.view(torch.bool)
    mask = torch.empty_like(tensor, dtype=torch.bool).bernoulli_(1 - p, generator=call.own)
    return tensor.mul(mask).mul_(1 / (1 - p)), mask


def _cudnn_rnn(call: _Call) -> Any:
    """Recurrent layers with dropout: their library goes on from a state that all of them share."""
    given = call.named()
    if given["dropout"] == 0 or not given["train"]:
        return call.as_it_is()
    call.numbers.num_draws += 1
    host = call.numbers.generator(torch.device("cpu"))
    seed = int(torch.empty((), dtype=torch.int64).random_(generator=host))
    given["dropout_state"] = torch.ops.aten._cudnn_init_dropout_state(
        given["dropout"], True, seed, dtype=torch.uint8, device=call.own.device
    )
    return call.below(**given)


def _with_generator(call: _Call) -> Any:
    """Another overload of the same operator, which takes a generator."""
    own, device = call.numbers.generator(call.own.device), call.kwargs.get("device")
    if device is not None and isinstance(call.args[0], Tensor):  # like one on another device
        own = call.numbers.generator(torch.empty(0, device=device).device)
    if own is None:
        return call.as_it_is()
    call.numbers.num_draws += 1
    packet, _, overload = str(call.operator).removeprefix("aten.").partition(".")
    other = getattr(getattr(torch.ops.aten, packet), WITH_GENERATOR[overload])
    return other(*call.args, **call.kwargs, generator=own)


FACTORIES: Final = {
    "rand",
    "randn",
    "randint",
    "randperm",
    "rand_like",
    "randn_like",
    "randint_like",
}
WITH_GENERATOR: Final[Mapping[str, str]] = {
    "default": "generator",
    "out": "generator_out",
    "low": "low_generator",
    "low_out": "low_generator_out",
    "low_dtype": "low_generator_dtype",
    "Tensor": "Tensor_generator",
}
"""Overloads of `FACTORIES`, and those that take a generator besides."""
_REWRITTEN: Final = {"native_dropout": _native_dropout, "_cudnn_rnn": _cudnn_rnn}


@final
class _ThreadsGenerator:
    """In the place of torch's default generator, for `torch.get_rng_state` ([Note: state])."""

    def __getattr__(self, name: str) -> Any:
        numbers = current()
        own = None if numbers is None else numbers.generator(torch.device("cpu"))
        return getattr(torch.default_generator if own is None else own, name)
