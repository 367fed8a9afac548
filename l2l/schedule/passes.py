"""What the device computes in a step, and in which order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from l2l.schedule.lines import EPILOGUE, NOTHING, PROLOGUE
from l2l.schedule.shape import OuterUnit, Shape

SLOTS = "slots"
SUMS = "sums"


@dataclass(frozen=True, slots=True)
class Operand:
    """A boundary value that a pass reads or writes, in a cell of some kind; or none."""

    kind: str  # the letter of the cell: C, R, K, P
    value: str = NOTHING
    written: bool = False


@dataclass(frozen=True, slots=True)
class Pass:
    """One microbatch through one part of the model, in one direction; not yet placed."""

    verb: str  # forward, loss or backward
    part: str  # as the line names it: Pro, Int1, L3, T0:p1, Epi; empty: the tail and the loss
    microbatch: int
    operands: tuple[str | Operand, ...]
    """What the line names, in order: weight slots, gradient slots, boundary values. `SLOTS` and
    `SUMS` are places that are not known yet."""
    unit: str = ""
    """That comes and goes through slots: a layer, or a slice of the head."""
    call: int | None = None
    """Of a layer."""
    stack: int = 0
    """That it is in, or before."""

    @property
    def reads(self) -> list[str]:
        """Boundary values that it reads, in the order in which they are brought.

        Rows that are looked up and what was kept come last: others must not queue behind them.
        """
        found = [one for one in self.values if not one.written]
        return [one.value for one in sorted(found, key=lambda one: one.value[0] in "ek")]

    @property
    def values(self) -> list[Operand]:
        """Its boundary values."""
        return [one for one in self.operands if isinstance(one, Operand) and one.value != NOTHING]


def compute_order(shape: Shape) -> list[Pass]:
    """What the device computes: for each layer all microbatches, forward, then backward."""
    if shape.side:
        return _sides(shape, fused=shape.fused)[shape.side]
    passes = _all_forward(shape)
    passes += _loss(shape) if shape.head is None else _head(shape)
    return passes + _all_backward(shape) if shape.training else passes


def _all_forward(shape: Shape) -> list[Pass]:
    """The code before every stack, and its layers."""
    return [one for stack in range(len(shape.parts)) for one in _forward(shape, stack)]


def _all_backward(shape: Shape) -> list[Pass]:
    """The same, last first."""
    stacks = range(len(shape.stacks), -1, -1)
    return [one for stack in stacks for one in _backward(shape, stack)]


def _sides(shape: Shape, *, fused: bool) -> dict[str, list[Pass]]:
    """What is computed before the user's own code runs, and behind it ([Note: sides])."""
    last = len(shape.stacks)
    given = (_reads("R", recorded(last), when=last > 0), _reads("C", "hE"))
    nothing = (Operand("C", written=True), Operand("P", written=True))
    outputs = _over_all(shape, "forward", EPILOGUE, SLOTS, *given, *nothing, stack=last)
    if fused:
        return {"forward": _all_forward(shape) + _loss(shape), "backward": _all_backward(shape)}
    to = (Operand("C"), _writes("C", "gE", when=shape.needs_gradient))
    behind = _over_all(shape, "backward", EPILOGUE, SLOTS, SUMS, *given, *to, stack=last)
    return {
        "forward": _all_forward(shape) + outputs,
        "outputs": outputs,
        "backward": behind + _all_backward(shape),
    }


def carried(shape: Shape) -> frozenset[str]:
    """Boundary values that the forward side of a step leaves to others, or that others find.

    After a fused one, it is not known yet whether its backward side will be.
    """
    if not shape.side:
        return frozenset()
    whole = _sides(shape, fused=False)
    sides = _sides(shape, fused=shape.fused)
    made = {
        f"{operand.value} m{one.microbatch}"
        for one in sides["forward"]
        for operand in one.values
        if operand.written
    }
    later = [*sides["backward"], *whole["backward"]]
    read = {f"{name} m{one.microbatch}" for one in later for name in one.reads}
    return frozenset(made & read)


def recorded(stack: int) -> str:
    """What the code before a stack has recorded for it."""
    return f"r{stack or ''}"


def _reads(kind: str, value: str, *, when: bool = True) -> Operand:
    return Operand(kind, value if when else NOTHING)


def _writes(kind: str, value: str, *, when: bool = True) -> Operand:
    return Operand(kind, value if when else NOTHING, written=True)


def join(kind: str, units: Iterable[OuterUnit]) -> str:
    """The slots of units around the layers, as a pass names them."""
    return ",".join(f"{kind}{unit.name}" for unit in units) or NOTHING


def _over_all(
    shape: Shape, verb: str, part: str, *operands: str | Operand, unit: str = "", stack: int = 0
) -> list[Pass]:
    """The same for every microbatch."""
    microbatches = range(shape.num_microbatches)
    return [Pass(verb, part, m, operands, unit, stack=stack) for m in microbatches]


def _over_layer(
    shape: Shape, verb: str, call: int, stack: int, *operands: str | Operand
) -> list[Pass]:
    """The same, through a layer."""
    unit, microbatches = shape.unit(call), range(shape.num_microbatches)
    part = f"{unit}:v{call}" if unit in shape.repeated else unit
    return [Pass(verb, part, m, operands, unit, call, stack) for m in microbatches]


def _has_rows(shape: Shape) -> bool:
    """Whether the prologue reads rows that the host has looked up."""
    return any(unit.looked_up for unit in shape.outer)


def _forward(shape: Shape, stack: int) -> list[Pass]:
    """The code before a stack, then its layers."""
    own, first = _writes("R", recorded(stack)), _writes("C", shape.first_value(stack))
    if stack:
        earlier = _reads("R", recorded(stack - 1))
        given = (earlier, own, _reads("C", shape.last_value(stack - 1)), first)
        opening = _over_all(shape, "forward", f"Int{stack}", SLOTS, *given, stack=stack)
    else:
        rows = _reads("C", "e", when=_has_rows(shape))
        opening = _over_all(shape, "forward", PROLOGUE, SLOTS, own, rows, first)
    passes: list[Pass] = []
    returning = shape.backward_layers if shape.training else ()
    for call in shape.parts[stack]:
        keeps = shape.num_kept_cells > 0 and call in returning
        hidden = (_reads("C", f"h{call}"), _writes("C", f"h{shape.following[call]}"))
        operands = (_reads("R", recorded(stack)), *hidden, _writes("K", f"k{call}", when=keeps))
        passes += _over_layer(shape, "forward", call, stack, SLOTS, *operands)
    if not stack and _has_rows(shape) and passes:
        # Rows of a microbatch may be late: the first layer does not wait for all.
        pairs = zip(opening, passes[: len(opening)], strict=True)
        return [one for pair in pairs for one in pair] + passes[len(opening) :]
    return opening + passes


def _loss(shape: Shape) -> list[Pass]:
    """The tail, the epilogue and the loss; of a joint one, what it hands to each microbatch."""
    last, gradient = len(shape.stacks), shape.training and shape.needs_gradient
    arguments = _reads("R", recorded(last), when=shape.num_tail > 0 or last > 0)
    to = _writes("C", "gE", when=gradient and not shape.joint)
    passes = _over_all(shape, "loss", "", SLOTS, SUMS, arguments, _reads("C", "hE"), to, stack=last)
    if shape.joint and gradient:
        nothing = (Operand("R"), Operand("C"))
        passes += _over_all(
            shape, "loss", "", SLOTS, SUMS, *nothing, _writes("C", "gE"), stack=last
        )
    return passes


def _head(shape: Shape) -> list[Pass]:
    """The epilogue with its head in slices ([Note: slices])."""
    assert shape.head is not None
    last, slices = len(shape.stacks), range(shape.head.num_slices)
    arguments, ends = _reads("R", recorded(last), when=last > 0), _reads("C", "hE")
    given, names = _reads("C", "y"), [f"{shape.head.name}:p{index}" for index in slices]
    beside = join("S", shape.beside_head)  # which hold the head's bias
    beside_sums = join("G", [unit for unit in shape.beside_head if unit.trained])
    trains = shape.training and shape.returns_to_epilogue
    outputs = (_writes("C", "y"), _writes("P", "s0"))
    passes = _over_all(shape, "forward", EPILOGUE, SLOTS, arguments, ends, *outputs, stack=last)
    for index, name in enumerate(names):
        sums = (_reads("P", f"s{index}"), _writes("P", f"s{index + 1}"))
        passes += _over_all(
            shape, "forward", name, SLOTS, beside, given, *sums, unit=name, stack=last
        )
    coefficients = _writes("P", "c", when=trains or (shape.training and shape.head.trained))
    total = _reads("P", f"s{len(slices)}")
    passes += _over_all(shape, "loss", EPILOGUE, total, coefficients, stack=last)
    if coefficients.value == NOTHING:
        return passes
    for index in slices[::-1]:
        so_far = _reads("C", f"d{index + 1}", when=trains and index + 1 < len(slices))
        found = (given, _reads("P", "c"), so_far, _writes("C", f"d{index}", when=trains))
        name = names[index]
        slots = (SLOTS, beside, SUMS, beside_sums)
        passes += _over_all(shape, "backward", name, *slots, *found, unit=name, stack=last)
    if trains:
        to = _writes("C", "gE", when=shape.needs_gradient)
        found = (arguments, ends, _reads("C", "d0"), to)
        passes += _over_all(shape, "backward", EPILOGUE, SLOTS, SUMS, *found, stack=last)
    return passes


def _backward(shape: Shape, stack: int) -> list[Pass]:
    """The layers of a stack backward, then the code before it."""
    passes: list[Pass] = []
    lowest = None if shape.returns_to_prologue else shape.backward_layers[-1:]
    for call in (one for one in shape.backward_layers if shape.stack_of(one) == stack):
        operands = (
            _reads("R", recorded(stack)),
            _reads("C", f"h{call}"),
            _reads("K", f"k{call}", when=shape.num_kept_cells > 0),
            _reads("C", f"g{shape.following[call]}"),
            _writes("C", f"g{call}", when=lowest != (call,)),
        )
        passes += _over_layer(shape, "backward", call, stack, SLOTS, SUMS, *operands)
    if stack not in shape.backward_stacks:
        return passes
    gradient = _reads("C", "g" + shape.first_value(stack)[1:])
    if stack:
        before, arguments = shape.last_value(stack - 1), _reads("R", recorded(stack - 1))
        found = (arguments, _reads("C", before), gradient, _writes("C", "g" + before[1:]))
        part = f"Int{stack}"
        return passes + _over_all(shape, "backward", part, SLOTS, SUMS, *found, stack=stack)
    rows = _reads("C", "e", when=_has_rows(shape))
    collected = any(unit.looked_up and unit.trained for unit in shape.outer)
    collects = _writes("C", "x", when=collected)
    given = (Operand("R"), rows, Operand("K"), gradient, collects)
    of_inputs = [_writes("C", "i")] if shape.asks_inputs else []
    return passes + _over_all(shape, "backward", PROLOGUE, SLOTS, SUMS, *given, *of_inputs)
