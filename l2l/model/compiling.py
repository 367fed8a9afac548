"""What goes through torch.compile, and what becomes of it if that fails."""

from __future__ import annotations

import contextlib
import itertools
import os
import types
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, final

import torch

from l2l.device import Device
from l2l.files import cache_folder
from l2l.model.beside import NotCompiledYetError, current, may_wait, must_wait


def parse_backend(word: bool | str | None, device: Device) -> str | None:  # noqa: FBT001
    """The compiler's backend for what the user said; None: nothing is compiled."""
    if word is None:
        word = device.torch_device.type != "cpu"
    return {True: "inductor", False: None}[word] if isinstance(word, bool) else word


def nothing() -> None:
    """What is done where nothing is to be done."""


def quietly(
    backend: Any,
    *,
    settings: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    on_ready: Callable[[], None] = nothing,
) -> Callable[[Any, Any], Any]:
    """A compiler's backend that keeps to itself what torch, while compiling, warns of itself.

    Args:
        backend: its name, or the function.
        settings: what holds while it compiles.
        on_ready: called when a graph that was to be compiled beside the steps is there.
    """

    def compile_graph(graph: Any, inputs: Any) -> Any:
        # This import takes a second, which is lost only where something is compiled.
        from torch._dynamo.backends.registry import lookup_backend

        def make(examples: Any) -> Any:
            with settings():
                return lookup_backend(backend)(graph, examples)

        beside = current()
        if beside is not None and may_wait(inputs):
            return beside.take(make, inputs, on_ready)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make(inputs)

    return compile_graph


def keep_programs() -> None:
    """Let torch keep what its own compiler makes in the user's folder, from process to process.

    Where the user has not named another. Its own is one that goes when the machine starts anew. It
    finds a program by the graph, the settings, its version and the machine's kind.
    """
    folder = cache_folder()
    if folder is not None:
        place = str(folder / "programs")
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", place)  # noqa: TID251 (torch reads it)


_numbers = itertools.count()  # never the same twice, as an `id` may be


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a code object of its own, by which the compiler keys its programs."""
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    return types.FunctionType(code, function.__globals__)


@final
class Compilable:
    """A function of tensors that runs through a compiler where that is asked for and succeeds."""

    def __init__(
        self, function: Callable[..., Any], *, plain: Callable[..., Any] | None = None
    ) -> None:
        """`plain` does the same without a compiler; None: the function itself."""
        self._function, self._plain = function, plain or function
        self._program: Callable[..., Any] | None = None
        self._is_refused = False

    def __call__(self, *tensors: torch.Tensor, compiled: bool) -> Any:
        """What the function makes of these; it must not fail once it has written to any."""
        if not compiled or self._is_refused or must_wait():
            return self._plain(*tensors)
        if self._program is None:
            self._program = torch.compile(self._function, backend=quietly("inductor"), dynamic=None)
        try:
            with torch._C.DisableTorchFunction():
                return self._program(*tensors)
        except NotCompiledYetError:
            return self._plain(*tensors)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a compiler may raise, before anything is computed
            warnings.warn(f"losses run without torch.compile: {error!r:.200}", stacklevel=2)
            self._is_refused = True
            return self._plain(*tensors)
