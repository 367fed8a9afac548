"""What a layer does position by position, done some positions at a time.

The perceptron of a layer makes values several times as wide as its hidden state, its norms make
some in float32: of a row of 131,072 positions many times what attention takes. But they give each
position what they would give it alone. Where nothing else fits, they run in *tiles*: forward
without a graph, and a backward pass that runs each tile again and adds up the gradients of weights
in float32. Of such a part only its input stays. Attention runs over whole rows as ever.

Which parts these are is tried (`find_pointwise`), never guessed by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from typing_extensions import override

from l2l.model.structures import attributes_of

TILE_TOKENS = 4096  # matrix products reach their full rate with these
WHOLE = (nn.Linear, nn.Embedding, nn.Identity, nn.ModuleList)  # make nothing but their output
TOLERANCE = 1e-5  # of float32, between products of different sizes
MOST_ALIKE = 0.999  # of positions; to others rounding may give other experts


@dataclass(frozen=True, slots=True)
class Tiles:
    """Parts of a layer that run in tiles, and how many positions of all rows one has."""

    names: tuple[str, ...]
    tokens: int


@contextlib.contextmanager
def tiled(layer: nn.Module, tiles: Tiles | None) -> Iterator[None]:
    """Inside the block these parts of a layer run in tiles; what has a graph stays so."""
    with contextlib.ExitStack() as stack:
        for name in tiles.names if tiles else ():
            assert tiles is not None
            part = layer.get_submodule(name)
            stack.enter_context(_instead(part, _in_tiles(part, part.forward, tiles.tokens)))
        yield


@contextlib.contextmanager
def _instead(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if before is not None:
            module.__dict__["forward"] = before


def _in_tiles(part: nn.Module, run: Callable[[Tensor], Tensor], tokens: int) -> Any:
    def forward(value: Tensor) -> Tensor:
        size = max(1, tokens // value.shape[0])
        if value.shape[1] <= size:
            return run(value)
        tensors = {**dict(part.named_parameters()), **dict(part.named_buffers())}
        apply: Any = _Tiled.apply
        found: Tensor = apply(part, run, size, value, tuple(tensors), *tensors.values())
        return found

    return forward


class _Tiled(torch.autograd.Function):
    """A part of a layer over tiles of positions, which are the second dimension."""

    @staticmethod
    @override
    def forward(
        ctx: Any,
        part: nn.Module,
        run: Callable[[Tensor], Tensor],
        size: int,
        value: Tensor,
        names: tuple[str, ...],
        *tensors: Tensor,
    ) -> Tensor:
        ctx.part, ctx.size, ctx.names = part, size, names
        ctx.save_for_backward(value, *tensors)
        found = None
        for start in range(0, value.shape[1], size):
            tile = run(value[:, start : start + size])
            if found is None:
                found = tile.new_empty((value.shape[0], value.shape[1], *tile.shape[2:]))
            found[:, start : start + size] = tile
            del tile
        assert found is not None
        return found

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        value, *tensors = ctx.saved_tensors
        needs_value, needs = ctx.needs_input_grad[3], ctx.needs_input_grad[5:]
        bound = [t.detach().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
        trained = [i for i, need in enumerate(needs) if need]
        of_value = torch.empty_like(value) if needs_value else None
        sums: list[Tensor | None] = [None] * len(tensors)
        for start in range(0, value.shape[1], ctx.size):
            there = slice(start, start + ctx.size)
            tile = value[:, there].detach().requires_grad_(needs_value)
            with torch.enable_grad():
                given = dict(zip(ctx.names, bound, strict=True))
                output = functional_call(ctx.part, given, (tile,))
            wanted = [*([tile] if needs_value else []), *(bound[i] for i in trained)]
            found: list[Any] = [
                *torch.autograd.grad(output, wanted, gradient[:, there], allow_unused=True)
            ]
            del output
            if of_value is not None:
                first = found.pop(0)
                of_value[:, there] = 0 if first is None else first
            for i, one in zip(trained, found, strict=True):
                _add(sums, i, one)
        cast = [None if s is None else s.to(t.dtype) for s, t in zip(sums, tensors, strict=True)]
        return None, None, None, of_value, None, *cast


def _add(sums: list[Tensor | None], index: int, gradient: Tensor | None) -> None:
    if gradient is None:
        return
    so_far = sums[index]
    sums[index] = gradient.float() if so_far is None else so_far.add_(gradient)


# --------------------------------------------------------------------------------------------------
# Which parts these are


def find_pointwise(
    layer: nn.Module, run: Callable[[], object], hidden: Tensor, *, tries: bool = True
) -> tuple[str, ...]:
    """Names of the parts of a layer that give each position what they would give it alone.

    Args:
        layer: whose parts are meant, with its weights.
        run: runs it on this hidden state.
        hidden: rows, positions and what comes then.
        tries: whether parts are run again to see; otherwise all are taken that are given one
            tensor of positions and return one, as attention is not.
    """
    if hidden.dim() < 3 or hidden.shape[1] < 2:
        return ()
    seen: dict[str, list[tuple[Sequence[Any], Any, Any]]] = {}

    def note(name: str) -> Callable[..., None]:
        return lambda _, args, kwargs, value: seen.setdefault(name, []).append(
            (args, kwargs, value)
        )

    parts = {name: part for name, part in layer.named_modules() if name}
    hooks = [
        part.register_forward_hook(note(name), with_kwargs=True) for name, part in parts.items()
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    found: list[str] = []
    for name, part in parts.items():  # each before those inside it
        calls = seen.get(name, [])
        if any(name.startswith(f"{outer}.") for outer in found) or isinstance(part, WHOLE):
            continue
        if any(inner._forward_hooks or inner._forward_pre_hooks for inner in part.modules()):
            continue  # somebody looks at what passes
        if (
            calls
            and all(_has_shape(*call, hidden) for call in calls)
            and (not tries or all(_is_pointwise(part, args[0], value) for args, _, value in calls))
        ):
            found.append(name)
    return tuple(found)


def _has_shape(args: Sequence[Any], kwargs: Any, value: Any, hidden: Tensor) -> bool:
    tensors = [*args, value]
    return (
        not kwargs
        and len(args) == 1
        and all(
            isinstance(one, Tensor)
            and one.is_floating_point()
            and one.dim() >= 3
            and one.shape[:2] == hidden.shape[:2]
            for one in tensors
        )
    )


def _is_pointwise(part: nn.Module, value: Tensor, expected: Tensor) -> bool:
    """Whether positions are independent of others, and running it leaves nothing behind.

    Other positions are poisoned: what is not a number would spread. And as a row may be long, and
    what is zero or one now may be trained to be something else, a row of two tiles must be the same
    whole and tile by tile, with other weights too: in float32, where experts are chosen alike.
    """
    kept, attributes = value.clone(), attributes_of(part)
    buffers = {name: one.clone() for name, one in part.named_buffers()}
    half, length = value.shape[1] // 2, max(2, 2 * TILE_TOKENS // value.shape[0])
    try:
        again = part(value)
        if not torch.equal(again, expected) or not torch.equal(value, kept):
            return False  # it draws random numbers, or writes into what it is given
        for mine, others in (
            (slice(0, half), slice(half, None)),
            (slice(half, None), slice(0, half)),
        ):
            poisoned = value.clone()
            poisoned[:, others] = torch.nan
            if not torch.equal(part(poisoned)[:, mine], expected[:, mine]):
                return False
        row = _row_like(value, length)
        for weights in _singles(part, moved=False), _singles(part, moved=True):
            whole = functional_call(part, weights, (row,))
            for start in (0, length // 2):
                mine = slice(start, start + length // 2)
                if not _are_alike(functional_call(part, weights, (row[:, mine],)), whole[:, mine]):
                    return False
    except torch.OutOfMemoryError:
        raise
    except Exception:  # it does not take other values
        return False
    same = all(torch.equal(buffers[name], one) for name, one in part.named_buffers())
    return same and attributes_of(part) == attributes


def _are_alike(found: Tensor, expected: Tensor) -> bool:
    """Whether positions are the same but for rounding."""
    difference, size = ((one.flatten(2).norm(dim=2)) for one in (found - expected, expected))
    return bool((difference <= TOLERANCE * size).float().mean() >= MOST_ALIKE)


def _row_like(value: Tensor, length: int) -> Tensor:
    """Rows of so many positions, all different and as large as others, in float32."""
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(value.shape[0], length, *value.shape[2:], generator=generator)
    return (row * float(value.float().std())).to(value.device)


def _singles(part: nn.Module, *, moved: bool) -> dict[str, Tensor]:
    """Tensors of a part in float32; `moved`: with as much again added, so that none is zero."""
    tensors = dict(part.named_buffers()) | dict(part.named_parameters())
    found = {n: one.detach().float() for n, one in tensors.items() if one.is_floating_point()}
    for name, _ in part.named_parameters() if moved else ():
        if name in found:
            one = found[name]
            scale = float(one.std()) if one.numel() > 1 else 0.0
            found[name] = one + (scale or 1.0) * _waves(one)
    return found


def _waves(tensor: Tensor) -> Tensor:
    """Numbers of every sign and size in the shape of a tensor."""
    found = torch.ones((), device=tensor.device)
    for size in tensor.shape:
        found = found.unsqueeze(-1) * torch.arange(1, size + 1, device=tensor.device).sin()
    return found
