"""Schedules are text: golden files, round trip, properties over all small sizes, refusals.

`schedules/*.txt` holds what `make_schedule` prints for the shapes in `GOLDEN`. When schedules are
meant to change, write the files anew and read the difference; in the folder of this file:

    python -c "import test_schedule; test_schedule.write_golden_files()"

Properties are checked with a second, slower model of what lines touch and what orders them
(`touched`, `assert_conflicts_are_ordered`), written apart from the one in `l2l.schedule`.
"""

import dataclasses
import functools
import itertools
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

import l2l.schedule
from l2l.schedule import (
    KINDS,
    LASTING,
    NOTHING,
    NUM_LENT,
    VERBS,
    Action,
    Lane,
    OuterUnit,
    Schedule,
    Shape,
    Wait,
    WaitLast,
    make_schedule,
    parse_line,
    validate,
)

FOLDER = Path(__file__).parent / "schedules"


def first_layers(count: int) -> tuple[int, ...]:
    return tuple(range(count))


PASSES = ("forward", "loss", "backward")
FROZEN = (OuterUnit(trained=False),)
AFTER = OuterUnit(in_prologue=False)  # a norm
TIED = (OuterUnit(name="T0", in_prologue=False, looked_up=True), AFTER)
UNTIED = (OuterUnit(name="T0", in_prologue=False, in_epilogue=False, looked_up=True), AFTER)
APART = (OuterUnit(name="T0", in_epilogue=False), AFTER)

IN_SLICES = (dataclasses.replace(TIED[0], num_slices=3), AFTER)
HEAD = OuterUnit(name="T1", in_prologue=False, num_slices=2)

IN_HALVES = Shape(
    layers=first_layers(3),
    num_microbatches=2,
    outer=TIED,
    num_late=4,
    pending=("T0", "O", "L2", "L1", "L0"),
    halves=True,
)
GOLDEN = {
    "two_stacks": Shape(layers=first_layers(3), stacks=(2,), num_microbatches=2),
    "three_stacks_in_another_order": Shape(
        layers=first_layers(4),
        units=(2, 0, 1, 3),
        stacks=(1, 3),
        num_microbatches=2,
        num_tail=1,
        frozen_layers=frozenset({0, 1}),
        outer=FROZEN,
    ),
    "layers_called_twice": Shape(
        layers=first_layers(4), units=(0, 1, 0, 1), num_microbatches=2, num_late=1, pending=("O",)
    ),
    "one_loss_over_all_rows": Shape(
        layers=first_layers(3), stacks=(1,), num_microbatches=2, joint=True
    ),
    "three_layers_one_microbatch": Shape(layers=first_layers(3), num_microbatches=1),
    "three_layers_two_microbatches": Shape(
        layers=first_layers(3), num_microbatches=2, num_slots=2, num_cells=6
    ),
    "three_layers_one_slot": Shape(layers=first_layers(3), num_microbatches=2, num_slots=1),
    "four_layers_three_microbatches": Shape(
        layers=first_layers(4), num_microbatches=3, num_cells=4, num_staging=2
    ),
    "five_layers_five_microbatches": Shape(
        layers=first_layers(5), num_microbatches=5, num_cells=4, num_staging=2
    ),
    "forward_only": Shape(layers=first_layers(3), num_microbatches=3, training=False, num_cells=4),
    "frozen_lower_layers": Shape(
        layers=first_layers(4),
        num_microbatches=2,
        frozen_layers=frozenset({0, 1}),
        outer=FROZEN,
    ),
    "some_layers": Shape(layers=(0, 2, 5), num_microbatches=2),
    "late_updates": Shape(
        layers=first_layers(3), num_microbatches=2, num_late=2, pending=("O", "L0")
    ),
    "device_updates": Shape(layers=first_layers(3), num_microbatches=2, device_updates=True),
    "several_ranks": Shape(
        layers=first_layers(3),
        num_microbatches=2,
        outer=APART,
        num_late=2,
        pending=("T0", "L0"),
        parallel=True,
    ),
    "several_ranks_device_updates": Shape(
        layers=first_layers(3), num_microbatches=2, device_updates=True, parallel=True
    ),
    "tied_table_on_the_host_clipped": dataclasses.replace(IN_HALVES, halves=False),
    "tied_table_on_the_host_in_halves": IN_HALVES,
    "tied_head_in_slices_clipped": dataclasses.replace(IN_HALVES, halves=False, outer=IN_SLICES),
    "head_in_slices": Shape(
        layers=first_layers(3), stacks=(2,), num_microbatches=3, outer=(OuterUnit(), HEAD)
    ),
    "frozen_head_in_slices": Shape(
        layers=first_layers(3),
        num_microbatches=2,
        outer=(*FROZEN, dataclasses.replace(HEAD, trained=False)),
    ),
    "untied_table_on_the_host": Shape(
        layers=first_layers(3), num_microbatches=2, outer=UNTIED, pending=("T0",)
    ),
    "tail_of_one_with_device_state": Shape(
        layers=first_layers(3),
        num_microbatches=2,
        num_tail=1,
        device_state=frozenset({2}),
        held=frozenset({"L2"}),
        pending=("L2",),
    ),
    "tail_of_all": Shape(layers=first_layers(3), num_microbatches=2, num_tail=3),
    "shared_memory_and_kept_cells": Shape(
        layers=first_layers(3),
        num_microbatches=2,
        outer=APART,
        shares_memory=True,
        num_kept_cells=2,
    ),
    "shared_updates": Shape(
        layers=first_layers(3),
        num_microbatches=2,
        num_late=4,
        pending=("L2", "L1", "L0", "O"),
        shared=frozenset({0, 2}),
        num_pieces=4,
    ),
    "state_on_disk": Shape(
        layers=first_layers(3),
        num_microbatches=2,
        on_disk=frozenset({"L0", "L1", "L2"}),
        num_disk_buffers=2,
    ),
    "state_on_disk_clipped": dataclasses.replace(
        IN_HALVES, halves=False, on_disk=frozenset({"L1", "L2"})
    ),
    "weights_on_disk": Shape(
        layers=first_layers(3),
        num_microbatches=2,
        on_disk=frozenset({"L0", "L1", "L2"}),
        num_disk_buffers=2,
        weights_on_disk=frozenset({"L0", "L1", "L2"}),
        num_weight_buffers=2,
    ),
    "stash_on_disk": Shape(
        layers=first_layers(3), num_microbatches=2, num_cells=3, num_stash_buffers=3
    ),
    "weights_on_disk_clipped": dataclasses.replace(
        IN_HALVES,
        halves=False,
        on_disk=frozenset({"L0", "L1", "L2"}),
        weights_on_disk=frozenset({"L0", "L1", "L2"}),
        num_weight_buffers=2,
    ),
    "shared_updates_at_once": Shape(
        layers=first_layers(3),
        num_microbatches=2,
        num_late=2,
        pending=("O", "L0"),
        shared=frozenset({0, 1}),
        num_pieces=5,
        shares_memory=True,
    ),
    "forward_side": Shape(layers=first_layers(3), num_microbatches=2, outer=TIED, side="forward"),
    "backward_side": Shape(layers=first_layers(3), num_microbatches=2, outer=TIED, side="backward"),
    "outputs_side": Shape(layers=first_layers(3), num_microbatches=2, outer=TIED, side="outputs"),
    "fused_forward_side": Shape(
        layers=first_layers(3), num_microbatches=2, outer=TIED, side="forward", fused=True
    ),
    "fused_backward_side": Shape(
        layers=first_layers(3), num_microbatches=2, outer=TIED, side="backward", fused=True
    ),
    "backward_side_of_two_stacks": Shape(
        layers=first_layers(3), stacks=(2,), num_microbatches=2, side="backward"
    ),
    "backward_side_to_the_inputs": Shape(
        layers=first_layers(3),
        num_microbatches=2,
        num_cells=4,
        frozen_layers=frozenset({0, 1}),
        outer=FROZEN,
        side="backward",
        asks_inputs=True,
    ),
}


def write_golden_files() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, shape in GOLDEN.items():
        (FOLDER / f"{name}.txt").write_text(f"{make_schedule(shape)}\n")


def small_shapes(*, training: bool = True) -> Iterator[Shape]:
    for num_layers, num_microbatches, num_cells in itertools.product(
        (1, 2, 3, 4, 5, 7), (1, 2, 3, 5), (3, 4, 5, 6, 8)
    ):
        for num_slots in range(1, num_layers + 1):
            yield Shape(
                layers=first_layers(num_layers),
                num_microbatches=num_microbatches,
                num_slots=num_slots,
                num_cells=num_cells,
                training=training,
            )


ON_DISK = frozenset({"L0", "L2"})
WEIGHTS = {
    "weights_on_disk": frozenset({"L0", "L1", "L2"}),
    "on_disk": frozenset({"L1"}),
    "num_weight_buffers": 2,
}


def varied_shapes() -> Iterator[Shape]:
    """Few sizes, with every other number varied."""
    for training, frozen_layers, trains_outer in (
        (True, {}, True),
        (True, {}, False),
        (True, {0}, True),
        (True, {0, 1}, False),
        (True, {1}, False),
        (True, {0, 1, 2}, True),
        (False, {}, True),
    ):
        for num_slots, num_cells, num_gradient_slots, num_staging in (
            (1, 3, 1, 1),
            (2, 4, 1, 2),
            (2, 5, 2, 1),
            (3, 8, 3, 3),
        ):
            yield Shape(
                layers=(0, 1, 2),
                num_microbatches=2,
                num_slots=num_slots,
                num_cells=num_cells,
                num_recorded_cells=num_slots,
                num_gradient_slots=num_gradient_slots,
                num_staging=num_staging,
                training=training,
                frozen_layers=frozenset(frozen_layers),
                outer=(OuterUnit(trained=trains_outer),),
            )
    for settings in (
        {"num_late": 1, "pending": ("O",)},
        {"num_late": 4, "pending": ("O", "L0", "L1", "L2")},
        {"num_late": 4, "pending": ("O", "L0", "L1", "L2"), "num_slots": 1, "num_cells": 3},
        {"pending": ("O", "L0"), "training": False},
        {"num_late": 2, "pending": ("O", "L0"), "halves": True},
        {"num_late": 4, "pending": ("O", "L0", "L1", "L2"), "halves": True},
        {**FEW, "num_late": 4, "pending": ("O", "L0", "L1", "L2"), "halves": True, "num_slots": 1},
        {"pending": ("O", "L0"), "training": False, "halves": True},
        {"on_disk": ON_DISK, "num_disk_buffers": 1},
        {"on_disk": ON_DISK, "num_late": 2, "pending": ("O", "L0", "L1")},
        {"on_disk": ON_DISK, "pending": ("O", "L0", "L1", "L2"), "num_disk_buffers": 2},
        {"on_disk": ON_DISK, "num_late": 4, "pending": ("L0", "L1", "L2"), "halves": True},
        {"on_disk": ON_DISK, "pending": ("L0", "L2"), "training": False, "num_disk_buffers": 1},
        {"weights_on_disk": ON_DISK, "num_weight_buffers": 1},
        {"weights_on_disk": ON_DISK, "num_weight_buffers": 2, "num_slots": 1},
        {"weights_on_disk": ON_DISK, "on_disk": ON_DISK, "num_disk_buffers": 1},
        {**WEIGHTS, "num_late": 2, "pending": ("O", "L0", "L1")},
        {**WEIGHTS, "pending": ("O", "L0", "L1", "L2"), "num_late": 4},
        {**WEIGHTS, "num_late": 4, "pending": ("L0", "L1", "L2"), "halves": True},
        {**WEIGHTS, "pending": ("L0", "L2"), "training": False},
        {**WEIGHTS, "training": False, "num_slots": 1, "num_cells": 3},
        {**WEIGHTS, "frozen_layers": frozenset({0, 1}), "outer": FROZEN},
        {"num_stash_buffers": 2, "num_cells": 3},
        {"num_stash_buffers": 1, "num_cells": 3, "num_late": 2, "pending": ("O", "L0")},
        {**WEIGHTS, "num_stash_buffers": 3, "num_cells": 3, "num_slots": 1},
        {"num_stash_buffers": 1, "num_cells": 3, "training": False},
        {**WEIGHTS, "num_tail": 1, "num_late": 1, "pending": ("O",)},
        {"device_updates": True, "num_slots": 1},
        {"device_updates": True, "num_slots": 3, "num_gradient_slots": 1, "num_cells": 4},
    ):
        yield Shape(layers=(0, 1, 2), num_microbatches=2, **settings)


OUTER_KINDS = {
    "whole": (OuterUnit(),),
    "frozen": FROZEN,
    "apart": APART,
    "tied": TIED,
    "untied": UNTIED,
    "frozen table": (dataclasses.replace(TIED[0], trained=False), AFTER),
    "table alone": (UNTIED[0], *FROZEN),
    "with state": tuple(dataclasses.replace(unit, device_state=True) for unit in APART),
    "in slices": IN_SLICES,
    "in slices with nothing beside it": (HEAD,),
    "frozen in slices": (dataclasses.replace(IN_SLICES[0], trained=False), AFTER),
    "frozen in slices with nothing trained": (dataclasses.replace(HEAD, trained=False), *FROZEN),
    "nothing to update": (
        OuterUnit(name="T0", in_prologue=False, in_epilogue=False, device_state=True),  # not read
        OuterUnit(in_prologue=False, trained=False, device_state=True),
    ),
}
TAILS = ((0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2))  # layers that stay, and of them with state
MODES = (
    {"num_late": 0},
    {"num_late": 9},
    {"num_late": 9, "shared": frozenset({0, 1}), "num_pieces": 2},
    {"num_late": 1, "shared": frozenset({0, 1, 2}), "num_pieces": 5},
    {"num_late": 9, "halves": True},
    {"training": False, "num_late": 9},
)
MODES_WITH_MANY_CELLS = (
    {"num_late": 1},
    {"num_late": 9, "shared": frozenset({1}), "num_pieces": 2},
    {"num_late": 1, "halves": True},
    {"num_late": 9, "shared": frozenset({1}), "num_pieces": 2, "halves": True},
    {"training": False, "num_late": 9, "halves": True},
    {"training": False, "num_late": 9, "shared": frozenset({0, 1}), "num_pieces": 2},
    {"device_updates": True},
)
FEW = {"num_cells": 3, "num_recorded_cells": 1, "num_gradient_slots": 1, "num_staging": 1}
CELLS = ({}, {"num_kept_cells": 2}, FEW, {"num_kept_cells": 1, **FEW})


def is_refused_in_slices(
    outer: tuple[OuterUnit, ...],
    *,
    num_tail: int,
    shares_memory: bool,
    mode: dict[str, object],
    joint: bool = False,
) -> bool:
    """Whether a head in slices does not go with the rest."""
    others = num_tail or shares_memory or joint or {"device_updates", "parallel"} & {*mode}
    return any(unit.num_slices for unit in outer) and bool(others)


def combined_shapes() -> Iterator[Shape]:
    """Two layers and two microbatches, all else combined: first steps and steps that follow."""
    for outer, (num_tail, num_states), mode, shares_memory, frozen, cells in itertools.product(
        OUTER_KINDS.values(),
        TAILS,
        (*MODES, *MODES_WITH_MANY_CELLS),
        (False, True),
        ((), (0,), (1,)),
        CELLS,
    ):
        has_state = num_states or any(unit.device_state for unit in outer)
        has_rows = any(unit.looked_up and unit.trained for unit in outer)
        if "device_updates" in mode and (has_state or has_rows):
            continue  # refused: see below
        if shares_memory and not any(unit.passes for unit in outer):
            continue  # nothing to share
        if is_refused_in_slices(outer, num_tail=num_tail, shares_memory=shares_memory, mode=mode):
            continue
        if num_tail == 2 and ("num_kept_cells" in cells or "shared" in mode):
            continue  # no layer to keep anything of, or to share the updates of
        if cells and mode in MODES_WITH_MANY_CELLS:
            continue  # is not about cells
        if "training" in mode and (frozen or "num_kept_cells" in cells):
            continue  # makes no difference
        shape = Shape(
            layers=(0, 1),
            num_microbatches=2,
            num_slots=1,
            outer=outer,
            num_tail=num_tail,
            device_state=frozenset(range(2 - num_states, 2)),
            shares_memory=shares_memory,
            frozen_layers=frozenset(frozen),
            **mode,
            **cells,
        )
        left = dataclasses.replace(shape, training=True).late_units
        if not left or (not cells and "shared" not in mode and "halves" not in mode):
            yield shape
        if left:
            yield dataclasses.replace(shape, pending=left, held=frozenset(shape.on_device))


ROUTES = (  # which layers are called when
    {"layers": first_layers(3), "stacks": (2,)},
    {"layers": first_layers(4), "units": (2, 0, 1, 3), "stacks": (1, 3)},
    {"layers": first_layers(4), "units": (0, 1, 0, 1)},
    {"layers": first_layers(5), "units": (0, 1, 0, 1, 2), "stacks": (2,)},
    {"layers": first_layers(4), "units": (1, 1, 0, 2), "stacks": (1,)},
    {"layers": (1, 4), "stacks": (1, 3, 4)},  # nothing is left of the first stack and the third
    {"layers": first_layers(2)},
)
RANKS = (
    {"parallel": True},
    {"parallel": True, "num_late": 9, "halves": True},
    {"parallel": True, "device_updates": True},
)
TIGHT = {**FEW, "num_recorded_cells": 2}
NUM_DRAWN = 4500  # of which about a quarter can be


def routed_shapes() -> Iterator[Shape]:
    """Several stacks, layers called again, joint losses and ranks, at random with all else."""
    draw = random.Random(0).choice
    for _ in range(NUM_DRAWN):
        route, mode = draw(ROUTES), draw((*MODES, *MODES_WITH_MANY_CELLS, *RANKS, *RANKS))
        outer = draw((*OUTER_KINDS.values(),))
        joint, shares_memory = draw((False, True)), draw((False, True))
        num_tail, num_states = draw(((0, 0), (0, 0), (1, 0), (1, 1)))
        layers = route["layers"]
        units = route.get("units", range(layers[-1] + 1))
        again = {unit for unit in units if list(units).count(unit) > 1}
        frozen = draw(((), (), (), (0,), (1,), (0, 1)))
        has_state = num_states or any(unit.device_state for unit in outer)
        has_rows = any(unit.looked_up and (unit.trained or "parallel" in mode) for unit in outer)
        if num_tail and (joint or units[layers[-1]] in again):
            continue
        if "stacks" in route and outer is APART:
            continue  # the code before later stacks reads what is there for the whole step
        if {"parallel", "device_updates"} & {*mode} and (has_state or has_rows):
            continue
        if shares_memory and not any(unit.passes for unit in outer):
            continue
        if is_refused_in_slices(
            outer, num_tail=num_tail, shares_memory=shares_memory, mode=mode, joint=joint
        ):
            continue
        if "shared" in mode:
            shared = (call for call in layers[: len(layers) - num_tail] if units[call] not in again)
            mode = {**mode, "shared": frozenset(shared)}
        shape = Shape(
            **route,
            num_microbatches=draw((1, 2, 3)),
            outer=outer,
            num_tail=num_tail,
            device_state=frozenset(layers[len(layers) - num_states :]),
            frozen_layers=frozenset(call for call in layers if units[call] in frozen),
            joint=joint,
            shares_memory=shares_memory,
            **mode,
            **draw(
                ({"num_slots": 1}, {"num_kept_cells": 2}, TIGHT, {**TIGHT, "num_kept_cells": 1})
            ),
        )
        left = dataclasses.replace(shape, training=True).late_units
        yield dataclasses.replace(shape, pending=left, held=frozenset(shape.on_device))


@functools.cache
def small_schedules() -> tuple[Schedule, ...]:
    """Of all small sizes; in training."""
    return tuple(make_schedule(shape) for shape in small_shapes())


@functools.cache
def varied_schedules() -> tuple[Schedule, ...]:
    """The golden ones, and of few sizes with every other number varied."""
    golden = (shape for shape in GOLDEN.values() if not shape.side)
    return tuple(make_schedule(shape) for shape in (*golden, *varied_shapes()))


OUTERS = (TIED, UNTIED, APART, (OuterUnit(),), FROZEN)


def sided_shapes() -> Iterator[Shape]:
    """Of both sides of steps, fused or not, and of what may come in between."""
    for outer, stacks, microbatches, few in itertools.product(
        OUTERS, ((), (1,), (1, 2)), (1, 2, 3), (False, True)
    ):
        if stacks and outer in (APART,):  # units that any code before stacks reads all stay
            continue
        numbers = {"num_slots": 1, "num_cells": 3, "num_staging": 1} if few else {}
        whole = Shape(
            layers=first_layers(4),
            stacks=stacks,
            num_microbatches=microbatches,
            outer=outer,
            frozen_layers=frozenset({1}),
            num_recorded_cells=2,
            **numbers,
        )
        if few and outer is not FROZEN:
            whole = dataclasses.replace(whole, shares_memory=True)
        left = (*(unit.name for unit in outer if unit.trained), "L3", "L0")
        yield dataclasses.replace(whole, side="forward", pending=left)
        asks = {"asks_inputs": True, "num_cells": max(4, whole.num_cells)}
        for side in ("forward", "backward") if microbatches == 2 else ():
            yield dataclasses.replace(whole, side=side, **asks)
        for side in ("forward", "outputs", "backward"):
            yield dataclasses.replace(whole, side=side)
        if any(unit.stays and unit.trained for unit in outer):
            continue
        for side, joint in itertools.product(("forward", "backward"), (False, True)):
            yield dataclasses.replace(whole, side=side, fused=True, joint=joint)


@functools.cache
def sided_schedules() -> tuple[Schedule, ...]:
    return tuple(make_schedule(shape) for shape in sided_shapes())


@functools.cache
def combined_schedules() -> tuple[Schedule, ...]:
    """Of one size, all else combined."""
    return tuple(make_schedule(shape) for shape in combined_shapes())


@functools.cache
def routed_schedules() -> tuple[Schedule, ...]:
    """Of several stacks, layers called again, joint losses and ranks."""
    return tuple(make_schedule(shape) for shape in dict.fromkeys(routed_shapes()))


def all_schedules() -> Iterator[Schedule]:
    return itertools.chain(
        small_schedules(), varied_schedules(), combined_schedules(), routed_schedules()
    )


# --------------------------------------------------------------------------------------------------
# Text


@pytest.mark.parametrize("name", GOLDEN)
def test_a_schedule_prints_as_its_golden_file(name: str) -> None:
    assert f"{make_schedule(GOLDEN[name])}\n" == (FOLDER / f"{name}.txt").read_text()


def test_the_example_in_the_documentation_is_a_schedule() -> None:
    """With lines left out where it says so."""
    text = (l2l.schedule.__doc__ or "").partition("[Note")[0]
    shown = [line[4:].partition("  ")[0] for line in text.splitlines() if line.startswith("    ")]
    made = make_schedule(Shape(layers=first_layers(3), num_microbatches=1, outer=TIED))
    rest = iter([str(action) for action in made.actions])
    assert len(shown) > 15
    assert all(line in rest for line in shown if line != "..."), "in this order"


def test_every_golden_file_has_a_shape() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(GOLDEN)


@pytest.mark.parametrize("name", GOLDEN)
def test_printing_and_parsing_are_inverse(name: str) -> None:
    schedule = make_schedule(GOLDEN[name])
    assert Schedule.parse(str(schedule), schedule.shape) == schedule
    spaced = str(schedule).replace("\n", "\n\n  ")
    assert Schedule.parse(spaced, schedule.shape) == schedule
    for line in schedule.lines:
        assert parse_line(str(line)) == line


def test_there_are_at_most_fourteen_verbs_also_for_what_comes() -> None:
    """docs/language.md has schedules of what is planned: units, places and values are new there."""
    assert len(VERBS) <= 14
    text = (FOLDER.parents[1] / "docs" / "language.md").read_text()
    lines = [line for block in text.split("```")[1::2] for line in block.splitlines() if line]
    assert len(lines) > 50
    for line in lines:
        lane, waits, awaited = line.partition(" waits ")
        assert (awaited or line).split()[0] in (*VERBS, *(["last"] if waits else []))
        assert not waits or lane in {one.value for one in Lane}


def test_golden_schedules_use_every_kind_of_line_and_every_lane() -> None:
    actions = [action for shape in GOLDEN.values() for action in make_schedule(shape).actions]
    assert {action.kind for action in actions} == set(KINDS)
    assert {action.lane for action in actions} == set(Lane)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "unknown verb"),
        ("fly L0 S0", "unknown verb"),
        ("waits release L0 S0", "unknown verb"),
        ("fetch waits", "found 'fetch waits'; expected one of fetch U"),
        ("fetch L0", "'fetch U' takes 'LTO S> .D<.'"),
        ("fetch L0 S0 S1", "takes 'LTO S> .D<.'"),
        ("fetch S0 L0", "takes 'LTO S> .D<.', in this order"),
        ("fetch L0.grad S0", "expected one of fetch U"),
        ("drain loss m0", "found 'drain loss m'"),
        ("backward L0 m0 S0 R0 G0 C0 K0 C1 C2", "takes 'L S< G> R< C< K< C< C>'"),
        ("forward L0 m0 S0 R0 C0 C1", "takes 'L S< R< C< C> K>'"),
        ("forward L0 S0 R0 C0 C1 -", "found 'forward U'"),
        ("collect L0 m0 H0", "takes 'T H>'"),
        ("update T0 host late weights", "takes 'LTO H<'"),
        ("update HL0 L0 host late moments", "takes 'LTO H<', in this order"),
        ("update L0 HL0 host", "in this order"),
        ("update L0 host HL0 moments", "found 'update U host moments'"),
        ("drain h0 C0", "found 'drain v'"),
        ("forward Int1 m0 SO R0 C0 C1", "takes 'I S< R< R> C< C>'"),
        ("backward Int1 m0 SO GO R0 C0 - C1 C2", "takes 'I S< G> R< C< C< C>'"),
        ("forward Int m0 SO R0 R1 C0 C1", "takes 'I S< R< R> C< C>'"),
        ("fetch U S0", "takes 'LTO S> .D<.'"),
        ("drain L0:v0.grad G0 H0", "found 'drain L0:v0.grad'"),
        ("take C0", "takes 'SGW>'"),
        ("fetch T0.all:p0 HT0 W0", "takes 'L H< W>'"),
        ("loading waits release L0 S0", "no lane 'loading'; lanes are compute"),
        ("fetch waits compute waits drain loss", "not another wait"),
        ("fetch waits compute waits last L0", "not another wait"),
        ("fetch waits release L0", "takes 'LTO S!'"),
    ],
)
def test_text_that_is_no_line_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_line(text)


def test_lines_are_counted_by_kind() -> None:
    schedule = make_schedule(GOLDEN["three_layers_one_microbatch"])
    assert schedule.count("backward U m") == 3
    assert schedule.count("update U host") == 4
    assert schedule.count("order U") == 0


# --------------------------------------------------------------------------------------------------
# Properties


def unit_of(shape: Shape, call: int) -> str:
    return f"L{shape.units[call] if shape.units else call}"


def units_at(shape: Shape, calls: Iterable[int]) -> set[str]:
    return {unit_of(shape, call) for call in calls}


def call_of(shape: Shape, action: Action) -> int:
    """The call that a pass through a layer is of: it is named where there are several."""
    calls = [call for call in shape.layers if unit_of(shape, call) == action.unit]
    assert (action.call is None) == (len(calls) == 1), action
    call = calls[0] if action.call is None else action.call
    assert call in calls, action
    return call


def streamed(shape: Shape) -> tuple[int, ...]:
    return shape.layers[: len(shape.layers) - shape.num_tail]


def calls_in(shape: Shape, stack: int) -> list[int]:
    """The streamed calls of a stack."""
    return [call for call in streamed(shape) if stack_of(shape, call) == stack]


def stack_of(shape: Shape, call: int) -> int:
    return sum(first <= call for first in shape.stacks)


def trains_before(shape: Shape) -> bool:
    """Whether anything is trained that the first hidden state is made of."""
    return any(unit.trained and (unit.in_prologue or unit.looked_up) for unit in shape.outer)


def returning(shape: Shape) -> list[int]:
    """Streamed calls with a backward pass: something is trained there, or comes before."""
    trained = [call for call in streamed(shape) if call not in shape.frozen_layers]
    needs = trains_before(shape)
    return [
        call
        for call in streamed(shape)
        if shape.training and (needs or any(one <= call for one in trained))
    ]


def parts_of(shape: Shape) -> list[str]:
    """What the device computes, for all microbatches each, as lines begin."""
    units = [unit_of(shape, call) for call in shape.layers]
    last, returns, needs = len(shape.stacks), returning(shape), trains_before(shape)

    def name(call: int) -> str:
        unit = unit_of(shape, call)
        return unit if units.count(unit) == 1 else f"{unit}:v{call}"

    ways, found = ["Pro", *(f"Int{stack + 1}" for stack in range(last))], []
    for stack, way in enumerate(ways):
        found += [f"forward {one}" for one in (way, *map(name, calls_in(shape, stack)))]
    head = head_of(shape)
    if head is not None:
        found += parts_of_head(shape, head, trains=bool(shape.training and (returns or needs)))
    else:
        found.append("loss")
    if shape.joint and shape.training and (returns or needs):
        found.append("loss")  # the gradients of each microbatch
    for stack, way in reversed([*enumerate(ways)]):
        calls = [call for call in calls_in(shape, stack) if call in returns]
        found += [f"backward {name(call)}" for call in reversed(calls)]
        if shape.training and (needs or any(stack_of(shape, call) < stack for call in returns)):
            found.append(f"backward {way}")
    return found


def head_of(shape: Shape) -> OuterUnit | None:
    """The unit that comes in slices."""
    return next((unit for unit in shape.outer if unit.num_slices), None)


def epilogue_units(shape: Shape) -> list[OuterUnit]:
    """Units that the code after the layers reads beside a head in slices."""
    return [unit for unit in shape.outer if unit.in_epilogue and not unit.num_slices]


def parts_of_head(shape: Shape, head: OuterUnit, *, trains: bool) -> list[str]:
    """The code up to the head, all slices, the loss; all slices and that code backward."""
    slices = [f"{head.name}:p{index}" for index in range(head.num_slices)]
    found = ["forward Epi", *(f"forward {one}" for one in slices), "loss Epi"]
    trains |= shape.training and any(unit.trained for unit in epilogue_units(shape))
    if trains or (shape.training and head.trained):
        found += [f"backward {one}" for one in slices[::-1]]
    return [*found, "backward Epi"] if trains else found


def test_computing_goes_part_by_part_and_within_a_part_over_all_microbatches() -> None:
    assert parts_of(GOLDEN["two_stacks"]) == [
        *("forward Pro", "forward L0", "forward L1", "forward Int1", "forward L2"),
        "loss",
        *("backward L2", "backward Int1", "backward L1", "backward L0", "backward Pro"),
    ]
    for schedule in all_schedules():
        shape = schedule.shape
        parts, microbatches = parts_of(shape), range(shape.num_microbatches)
        expected = [f"{part} m{m}" for part in parts for m in microbatches]
        if any(unit.looked_up for unit in shape.outer) and calls_in(shape, 0):
            # Rows of later microbatches may be late: the first layer does not wait for them.
            number = 2 * len(microbatches)
            expected[:number] = [f"{part} m{m}" for m in microbatches for part in parts[:2]]
        passes = [a.text for a in schedule.actions if a.verb in PASSES]
        assert [text[: text.index(" m") + 3] for text in passes] == expected, shape


def places(operand: str) -> list[str]:
    """The places that an operand names."""
    return [] if operand == NOTHING else operand.split(",")


def test_a_unit_is_resident_when_computed_on_and_slots_hold_one_unit_and_end_free() -> None:
    for schedule in all_schedules():
        shape = schedule.shape
        held = {f"S{unit}": unit for unit in shape.held}
        for action in schedule.actions:
            kind, unit, slot = action.kind, action.unit, (*action.places, "")[0]
            unit = unit if action.piece is None else f"{unit}:p{action.piece}"
            if kind in ("fetch U", "fetch U:p"):
                assert slot not in held, (shape, action)
                assert unit not in held.values(), (shape, action)
                held[slot] = unit
            elif kind in ("release U", "release U:p", "drain U free"):
                assert held.pop(slot) == unit, (shape, action)
            elif kind in ("update U device", "update U device late", "drain U") or kind in (
                "forward U m",
                "backward U m",
            ):
                assert held[slot] == unit, (shape, action)
            elif kind in ("forward U:p m", "backward U:p m"):
                assert held[slot] == unit, (shape, action)
                beside = [one.name for one in epilogue_units(shape)]
                assert [held[slot] for slot in places(action.places[1])] == beside, action
            elif action.verb in PASSES and kind != "loss Epi m":
                assert kind == "loss m" or action.unit[:3] in ("Pro", "Int", "Epi")
                assert [held[slot] for slot in places(slot)] == read_by(shape, action), action
            assert sum(slot[1:].isdigit() for slot in held) <= shape.num_slots
        assert sorted(held.values()) == sorted(units_with_state(shape)), shape


def read_by(shape: Shape, action: Action) -> list[str]:
    """Units that a pass around the layers reads, in order."""
    if action.unit == "Epi" or action.piece is not None:
        return [unit.name for unit in epilogue_units(shape)]
    if action.verb != "loss":
        return [unit.name for unit in shape.outer if unit.in_prologue]
    tail = [unit_of(shape, call) for call in shape.layers[len(shape.layers) - shape.num_tail :]]
    return [*(unit.name for unit in shape.outer if unit.in_epilogue), *tail]


def units_with_state(shape: Shape) -> set[str]:
    """Units that stay on the device from step to step."""
    outer = {
        unit.name
        for unit in shape.outer
        if unit.device_state and (unit.in_prologue or unit.in_epilogue)
    }
    return outer | units_at(shape, shape.device_state)


def frozen_units(shape: Shape) -> set[str]:
    frozen = {unit.name for unit in shape.outer if not unit.trained}
    return frozen | units_at(shape, shape.frozen_layers)


def test_passes_around_the_layers_sum_gradients_of_what_they_read_and_is_trained() -> None:
    for schedule in all_schedules():
        shape = schedule.shape
        frozen = frozen_units(shape)
        for action in schedule.actions:
            around = ("loss m", "backward Pro m", "backward Int m", "backward Epi m")
            if action.kind in (*around, "backward U:p m"):
                trained = [unit for unit in read_by(shape, action) if unit not in frozen]
                expected = [f"G{unit}" for unit in trained] if shape.training else []
                place = action.places[3 if action.kind == "backward U:p m" else 1]
                assert places(place) == expected, (shape, action)


def test_gradients_of_a_layer_are_summed_in_one_place_until_all_are_there() -> None:
    """Those of a layer that is called several times have a place of their own."""
    for schedule in all_schedules():
        shape, summing = schedule.shape, dict[str, str]()
        expected = {
            (call, m)
            for call in returning(shape)
            if call not in shape.frozen_layers
            for m in range(shape.num_microbatches)
        }
        left = {unit: set[tuple[int, int]]() for unit in units_at(shape, streamed(shape))}
        for call, m in expected:
            left[unit_of(shape, call)].add((call, m))
        calls = [unit_of(shape, call) for call in shape.layers]
        for action in schedule.actions:
            kind, unit = action.kind, action.unit
            if kind == "backward U m" and action.places[1] != NOTHING:
                place, number = action.places[1], calls.count(unit)
                assert summing.setdefault(place, unit) == unit, (shape, action)
                assert (place == f"G{unit}") == (number > 1), (shape, action)
                assert place == f"G{unit}" or int(place[1:]) < shape.num_gradient_slots
                left[unit].remove((call_of(shape, action), action.microbatch))
            elif kind in ("reduce U", "drain U.grad", "update U device", "update U:p device"):
                place = action.places[kind not in ("reduce U", "drain U.grad")]
                assert not left.get(unit), (shape, action)
                assert place == f"G{unit}" or summing[place] == unit, (shape, action)
                is_last = action.piece in (None, shape.num_pieces - 1)
                if kind != "reduce U" and is_last and place in summing:
                    del summing[place]
        assert not summing, shape
        assert not any(left.values()), shape


def test_ranks_gather_all_that_is_fetched_and_reduce_all_gradients_and_losses() -> None:
    num_parallel = 0
    for schedule in all_schedules():
        shape = schedule.shape
        verbs = {action.verb for action in schedule.actions}
        assert shape.parallel or not {"gather", "reduce"} & verbs, shape
        num_parallel += shape.parallel
        apart, reduced = set[str](), set[str]()  # weights of which a rank has a part; whole sums
        for action in schedule.actions if shape.parallel else ():
            kind, place = action.kind, (*action.places, "loss")[0]
            if kind == "fetch U":
                apart.add(place)
            elif kind == "gather U":
                apart.remove(place)
            elif action.verb == "reduce":
                assert place not in reduced, (shape, action)
                reduced.add(place)
            elif kind in ("drain U.grad", "drain loss", "update U device"):
                reduced.remove(action.places[1] if kind == "update U device" else place)
            elif action.verb in PASSES:
                assert not apart & {*places(place)}, (shape, action)
        assert not apart | reduced, shape
    assert num_parallel > 50


OF_SLICES = ("forward U:p m", "backward U:p m")


def test_a_layer_is_fetched_again_only_where_others_need_its_slot() -> None:
    """As many as there are slots are walked in between."""
    num_again = 0
    for schedule in all_schedules():
        shape, gone = schedule.shape, dict[str, set[str]]()
        for action in schedule.actions:
            if action.kind == "release U":
                gone[action.unit] = set()
            elif action.kind in ("forward U m", "backward U m", *OF_SLICES):
                since = gone.pop(action.unit, None)
                num_again += since is not None
                assert since is None or len(since) >= shape.num_slots, (shape, action)
                for others in gone.values():
                    others.add(action.text.split()[1])  # of slices each
    assert num_again > 1000


def test_a_step_fetches_twice_the_layers_less_the_slots() -> None:
    for schedule in small_schedules():
        shape = schedule.shape
        fetches = [
            action for action in schedule.actions if action.kind == "fetch U" and action.unit != "O"
        ]
        assert len(fetches) == 2 * len(shape.layers) - shape.num_slots, shape


def test_slots_beyond_the_number_of_layers_change_nothing() -> None:
    lines = [
        make_schedule(Shape(layers=(0, 1), num_microbatches=2, num_slots=num_slots)).lines
        for num_slots in (2, 3, 7)
    ]
    assert lines[0] == lines[1] == lines[2]


def test_an_evaluation_fetches_every_layer_once_and_updates_nothing() -> None:
    for shape in small_shapes(training=False):
        schedule = make_schedule(shape)
        assert schedule.count("fetch U") == len(shape.layers) + 1
        assert schedule.count("drain loss") == 1
        for kind in ("backward U m", "backward Pro m", "drain U.grad", "update U host"):
            assert schedule.count(kind) == 0


def units_of(schedule: Schedule, kind: str) -> set[str]:
    units = [action.unit for action in schedule.actions if action.kind == kind]
    assert len(units) == len(set(units)), (schedule.shape, kind)
    return set(units)


def trained_units(shape: Shape) -> set[str]:
    """Units that get a gradient in a step."""
    if not shape.training:
        return set()
    outer = {
        unit.name
        for unit in shape.outer
        if unit.trained and (unit.in_prologue or unit.in_epilogue or unit.looked_up)
    }
    return outer | units_at(shape, shape.layers) - units_at(shape, shape.frozen_layers)


def test_every_trained_unit_is_updated_once_and_no_other() -> None:
    """On the host, by this step or the next one, or on the device, by this step or the next one."""
    for schedule in all_schedules():
        shape = schedule.shape
        trained = trained_units(shape)
        looked_up = {unit.name for unit in shape.outer if unit.looked_up}
        only_rows = {unit.name for unit in shape.outer if unit.looked_up and not unit.in_epilogue}
        with_state = trained & units_with_state(shape)
        on_host = set() if shape.device_updates else trained - with_state
        late = set(shape.late_units)
        redone = borrowing_units(shape) & on_host - late
        assert set(shape.redone) == redone, shape
        assert len(late) == len(shape.late_units), shape
        assert units_of(schedule, "drain U.norm") == with_state | redone, shape
        assert units_of(schedule, "order U") == redone, shape
        collected = [(a.unit, a.microbatch) for a in schedule.actions if a.verb == "collect"]
        every = range(shape.num_microbatches)
        expected = sorted(itertools.product(on_host & looked_up, every))
        assert sorted(collected) == expected, shape
        sliced = on_host & {unit.name for unit in shape.outer if unit.num_slices}
        assert units_of(schedule, "drain U.grad") == on_host - only_rows - redone - sliced, shape
        slices = [(a.unit, a.piece) for a in schedule.actions if a.kind == "drain U.grad:p"]
        assert slices == [
            (unit.name, index)
            for unit in shape.outer
            for index in reversed(range(unit.num_slices))
            if unit.name in sliced
        ], shape
        assert units_of(schedule, "update U host") == on_host - late - redone, shape
        for kind in ("update U device", "drain U free"):
            assert units_of(schedule, kind) == trained - with_state - on_host, shape
        # Those that are left: what must be, and of the others the last ones drained.
        whole = [a for a in schedule.actions if a.kind.startswith("drain U.grad")]
        drained = [a.unit for a in whole if not a.piece]  # the first slice leaves last
        may_be_left = [unit for unit in drained if unit not in looked_up]
        last = may_be_left[max(0, len(may_be_left) - shape.num_late) :]
        assert late == {*with_state, *(on_host & looked_up), *last}, shape


def test_state_on_disk_is_read_and_written_once_for_every_update() -> None:
    found = 0
    for schedule in varied_schedules():
        on_disk, number = schedule.shape.on_disk, schedule.shape.num_disk_buffers
        kinds = ("fetch U.state", "update U host", "update U host late", "drain U.state")
        lines = [a for a in schedule.actions if a.kind in kinds and a.unit in on_disk]
        assert not units_of(schedule, "update U host late weights") & on_disk
        updates = [line for line in lines if line.verb == "update"]
        for verb in ("fetch", "drain"):
            moved = [(a.unit, a.places[0]) for a in lines if a.verb == verb]
            assert moved == [(a.unit, a.places[1]) for a in updates], "in the order of updates"
        assert [a.places[1] for a in updates] == [f"B{i % number}" for i in range(len(updates))]
        for before, after in itertools.pairwise(lines):
            assert before.verb != "update" or after.verb == "drain", "written at once"
        found += len(updates)
    assert found > 10


def test_weights_on_disk_are_in_a_buffer_when_they_are_needed() -> None:
    """Read before, changed there, written once; read no more often than they are needed."""
    found = 0
    for schedule in varied_schedules():
        units, reads, writes = schedule.shape.weights_on_disk, Counter[str](), Counter[str]()
        buffers, changed = dict[str, str](), set[str]()
        needs = Counter[str]()
        for line in schedule.actions:
            if line.unit not in units:
                continue
            if line.kind == "fetch U.weights":
                gone = buffers.get(line.places[0])
                assert gone not in changed, f"{line}: before {gone} was written"
                buffers[line.places[0]] = line.unit
                reads[line.unit] += 1
            elif line.kind == "drain U.weights":
                assert buffers.pop(line.places[0]) == line.unit
                changed.discard(line.unit)
                writes[line.unit] += 1
            elif line.kind == "fetch U" or line.verb == "update":
                assert buffers[line.places[-1]] == line.unit, line
                needs[line.unit] += 1
                changed |= {line.unit} if line.verb == "update" else set()
        assert not changed
        assert all(reads[unit] <= needs[unit] for unit in units)
        for unit, number in writes.items():
            updates = [a for a in schedule.actions if a.unit == unit and a.verb == "update"]
            assert number <= len(updates)
        found += sum(writes.values())
    assert found > 20


def test_boundary_tensors_on_disk_are_in_a_buffer_when_they_are_needed() -> None:
    found = 0
    for schedule in varied_schedules():
        number, buffers, written = schedule.shape.num_stash_buffers, dict[str, str](), set[str]()
        for line in schedule.actions:
            place = line.places[-1] if line.places else ""
            if not place.startswith("E"):
                assert not (
                    line.kind in ("drain v m", "fetch v m") and line.value[0] in "hg" and number
                )
            elif line.kind == "drain v m":
                buffers[place] = line.value
                written.discard(line.value)
            elif line.kind == "drain v.stash m":
                assert buffers[place] == line.value
                written.add(line.value)
            elif line.kind == "fetch v.stash m":
                assert line.value in written
                buffers[place] = line.value
                found += 1
            else:
                assert buffers[place] == line.value
        assert set(buffers) <= {f"E{i}" for i in range(number)}
    assert found > 20


@pytest.mark.parametrize("num_layers", [3, 9])
def test_with_room_for_two_layers_nothing_is_read_that_was_just_written(num_layers: int) -> None:
    """What went to disk comes again for backward passes only, and gradients never go."""
    found = 0
    for rows, slots, cells in itertools.product((1, 2, 4, 8), (1, 2), (3, 6)):
        numbers = {"num_slots": slots, "num_cells": cells, "num_stash_buffers": 2 * rows}
        shape = Shape(layers=first_layers(num_layers), num_microbatches=rows, **numbers)
        actions = make_schedule(shape).actions
        loss = next(i for i, line in enumerate(actions) if line.verb == "loss")
        read = [i for i, line in enumerate(actions) if line.kind == "fetch v.stash m"]
        assert all(i > loss and actions[i].value.startswith("h") for i in read)
        found += len(read)
    assert found > 0


def test_every_update_that_was_left_is_done_once_and_before_it_is_needed() -> None:
    num_settled = num_halved = num_renewed = num_reworked = 0
    for schedule in all_schedules():
        shape = schedule.shape
        pending, looked_up = set(shape.pending), {u.name for u in shape.outer if u.looked_up}
        renewed, reworked = pending & units_with_state(shape), pending & borrowing_units(shape)
        settled = pending - renewed - reworked
        halved = (
            settled - shape.on_disk - shape.weights_on_disk
            if shape.halves and shape.training
            else set()
        )
        for kind in ("update U device late", "drain U"):
            assert units_of(schedule, kind) == renewed, shape
        assert units_of(schedule, "order U late") == renewed | reworked, shape
        assert units_of(schedule, "update U host late") == settled - halved, shape
        for half in ("weights", "moments"):
            assert units_of(schedule, f"update U host late {half}") == halved, shape
        of_rows = [a for a in schedule.actions if a.kind.startswith("update U:m")]
        assert {a.kind.endswith("weights") for a in of_rows} <= {bool(halved & looked_up)}, shape
        refreshed = [(a.unit, a.microbatch) for a in of_rows]
        each = {(u, m) for u in pending & looked_up for m in range(shape.num_microbatches)}
        assert set(refreshed) == each, shape
        assert len(refreshed) == len(each), shape
        in_order = [unit_of(shape, call) for call in streamed(shape)]
        left = [unit for unit in in_order if unit in reworked]
        assert_state_is_lent(schedule, left, [*shape.redone])
        num_settled += len(settled - halved)
        num_halved += len(halved)
        num_renewed += len(renewed)
        num_reworked += len(reworked)
        assert_done_before_needed(schedule, pending, looked_up, renewed)
    assert min(num_settled, num_halved, num_renewed, num_reworked) > 300


WHOLE_OR_WEIGHTS = ("update U host late", "update U host late weights")
NEEDS_IT_DONE = (
    *("fetch U", "drain U", "drain U.grad", "drain U.norm", "collect U m", "update U host"),
    "update U device",
)


def assert_done_before_needed(
    schedule: Schedule, pending: set[str], looked_up: set[str], renewed: set[str]
) -> None:
    shape = schedule.shape
    done: set[str] = set()
    for action in schedule.actions:
        kind, unit = action.kind, action.unit
        if "device" in kind and kind != "update U device":
            late = " late" if "late" in kind else ""
            assert f"order {unit}{late}" in done, (shape, action)
        is_last = kind == "drain U.all:p" and action.piece == shape.num_pieces - 1
        if is_last or kind in ("update U device late", *WHOLE_OR_WEIGHTS):
            done.add(unit)
        elif action.verb == "order":
            done.add(action.text)
        elif kind.startswith("update U:m"):
            done.add(f"{unit} m{action.microbatch}")
        elif kind in NEEDS_IT_DONE:
            assert unit not in pending - done, (shape, action)
        elif action.verb in PASSES and not unit.startswith("L"):
            assert not renewed & {*read_by(shape, action)} - done, (shape, action)
        elif action.verb == "lookup":
            needed = {f"{unit} m{action.microbatch}" for unit in pending & looked_up}
            assert needed <= done, shape


def assert_state_is_lent(schedule: Schedule, left: list[str], at_once: list[str]) -> None:
    """All pieces of all units, in order, once; and brought back."""
    lent = {
        "fetch U.all:p": left,
        "update U:p device late": left,
        "fetch U.state:p": at_once,
        "update U:p device": at_once,
    }
    for kind, units in {**lent, "drain U.all:p": left + at_once}.items():
        pieces = [(a.unit, a.piece) for a in schedule.actions if a.kind == kind]
        every = [(unit, i) for unit in units for i in range(schedule.shape.num_pieces)]
        assert pieces == every, schedule.shape


def test_in_halves_weights_come_as_they_are_fetched_and_moments_after_all_as_they_drain() -> None:
    num_advanced = 0
    for schedule in all_schedules():
        units: dict[str, list[str]] = {kind: [] for kind in KINDS}
        weights, moments = (f"update U host late {half}" for half in ("weights", "moments"))
        for action in schedule.actions:
            units[action.kind].append(action.unit)
            assert action.kind != weights or not units[moments], (schedule.shape, action)
        advanced, completed = units[weights], units[moments]
        num_advanced += len(advanced)
        assert sorted(advanced) == sorted(completed)
        assert schedule.shape.training or not advanced
        fetched = [a.unit for a in schedule.actions if a.kind in ("fetch U", "fetch U:p")]
        drained = units["drain U.grad"]
        needed = [fetched.index(one) if one in fetched else len(fetched) for one in advanced]
        leaving = [drained.index(one) if one in drained else -1 for one in completed]
        assert needed == sorted(needed), schedule.shape
        assert leaving == sorted(leaving), schedule.shape
        for line in schedule.lines:  # a fetch waits for weights alone, a drain for both halves
            if isinstance(line, Wait) and line.action.kind in (weights, moments):
                assert (line.lane, line.action.kind) in (
                    (Lane.FETCH, weights),
                    (Lane.DRAIN, moments),
                ), (schedule.shape, line)
    assert num_advanced > 1000


def must_keep_order(one: Action, other: Action) -> bool:
    """Whether two lines are on one lane, or touch a place that one of them writes."""
    mine = dict(one.accesses)
    touched = [
        place for place, writes in other.accesses if place in mine and (writes or mine[place])
    ]
    return bool(touched) or one.lane is other.lane


def test_what_a_pass_fetches_is_submitted_before_the_pass_that_precedes_it() -> None:
    """Unless its cell or what was stashed does not allow it, or the host must look it up first."""
    num_ahead = 0
    for schedule in all_schedules():
        actions = schedule.actions
        passes = [i for i, action in enumerate(actions) if action.verb in PASSES]
        for i, action in enumerate(actions):
            if action.kind != "fetch v m" or action.value.startswith("e"):
                continue
            arrives = (action.places[0], False)
            reader = next(n for n in passes if n > i and arrives in actions[n].accesses)
            before = [n for n in passes if n < reader]
            if not before or i < before[-1]:
                num_ahead += 1
                assert sum(i < n for n in before) <= 1, (schedule.shape, action)
            else:
                between = actions[before[-1] : i]
                found = any(must_keep_order(one, action) for one in between)
                assert found, (schedule.shape, action)
    assert num_ahead > 1000


def borrowing_units(shape: Shape) -> set[str]:
    """Streamed layers whose update, once it was left, is done with borrowed state."""
    return units_at(shape, {*streamed(shape)} & shape.shared) if shape.training else set()


def test_places_that_take_turns_have_memory_when_used_and_never_both() -> None:
    num_turns = 0
    for schedule in all_schedules():
        shape = schedule.shape
        turns = {a.places[0] for a in schedule.actions if a.kind in ("take", "release")}
        borrowed = {place for place in turns if place.startswith("W")}
        assert shape.shares_memory or not turns
        assert borrowed <= {f"W{i}" for i in range(NUM_LENT)}
        num_turns += bool(turns)
        gradients = {place for place in turns if place.startswith("G") and place[1:].isdigit()}
        if shape.shares_memory:
            head = {f"S{unit.name}" for unit in shape.outer if unit.passes}
            assert head <= turns
            assert bool(borrowed) == bool(borrowing_units(shape) & {*shape.pending, *shape.redone})
        has: set[str] = set(gradients)  # from the step before, unless it is the first
        for action in schedule.actions:
            if action.verb == "take":
                assert action.places[0] not in has, (shape, action)
                has.add(action.places[0])
                kinds = {
                    "gradients" if place in gradients else "lent" if place in borrowed else "head"
                    for place in has
                }
                assert len(kinds) == 1 or kinds == {"gradients", "lent"}, (shape, action)
            elif action.kind == "release":
                has.remove(action.places[0])
            else:
                used = {place for named in action.places for place in places(named)}
                assert used & turns <= has, (shape, action)
        assert has == gradients, shape
    assert num_turns > 100


def test_late_updates_leave_staging_that_the_next_step_settles() -> None:
    shape = Shape(layers=first_layers(4), num_microbatches=1, num_late=3)
    assert shape.late_units == ("L1", "L0", "O")
    schedule = make_schedule(shape)
    drained = {a.unit: a.places[1] for a in schedule.actions if a.kind == "drain U.grad"}
    following = make_schedule(dataclasses.replace(shape, pending=shape.late_units))
    late = [a for a in following.actions if a.kind == "update U host late"]
    expected = [(unit, (drained[unit],)) for unit in ("O", "L0", "L1")]
    assert [(a.unit, a.places) for a in late] == expected, "as they are fetched"
    updated = {a.places[0] for a in following.actions if a.kind == "update U host"}
    assert not updated & {drained[unit] for unit in shape.late_units}


def test_a_unit_that_leaves_its_gradient_always_comes_first_among_those_left() -> None:
    """State on the device, then tables that are looked up, then those drained last."""
    shape = Shape(
        layers=first_layers(3),
        num_microbatches=1,
        outer=TIED,
        num_tail=2,
        device_state=frozenset({2}),
    )
    assert shape.late_units == ("L2", "T0")
    assert shape.drained_units == ("O", "L1", "L0")
    for num_late, others in ((1, ("L0",)), (2, ("L1", "L0")), (9, ("O", "L1", "L0"))):
        late = dataclasses.replace(shape, num_late=num_late).late_units
        assert late == ("L2", "T0", *others)


def test_layers_below_the_lowest_trained_one_have_no_backward_pass() -> None:
    shape = GOLDEN["frozen_lower_layers"]
    schedule = make_schedule(shape)
    backward = [action for action in schedule.actions if action.verb == "backward"]
    assert [action.unit for action in backward] == ["L3", "L3", "L2", "L2"]
    assert [action.places[-1] for action in backward[2:]] == [NOTHING, NOTHING]


def test_a_frozen_layer_between_trained_ones_passes_gradients_on_and_keeps_none() -> None:
    shape = Shape(layers=(0, 1, 2), num_microbatches=2, frozen_layers=frozenset({1}))
    backward = [a for a in make_schedule(shape).actions if a.kind == "backward U m"]
    gradient_slots = {action.unit: action.places[1] for action in backward}
    assert gradient_slots == {"L2": "G0", "L1": NOTHING, "L0": "G1"}
    assert all(action.places[-1] != NOTHING for action in backward)


def test_a_schedule_over_some_layers_names_only_those() -> None:
    text = str(make_schedule(GOLDEN["some_layers"]))
    units = {word.partition(".")[0] for word in text.split() if word.startswith("L")}
    assert units == {"L0", "L2", "L5"}
    values = {word for word in text.split() if word[0] in "hg" and word[1:] in list("012345E")}
    assert values <= {f"{kind}{part}" for kind in "hg" for part in "025E"}


TOUCHED = {  # kind -> what it reads, what it writes: by name, or by its position among the places
    "take": ([], [0]),
    "release": ([], [0]),
    "release U": ([], [0]),
    "release U:p": ([], [0]),
    "fetch U": (["weights"], [0]),
    "fetch U:p": (["weights"], [0]),
    "fetch U.state:p": (["piece"], [0]),
    "fetch U.all:p": ([0, "piece"], [1]),
    "fetch U.state": (["state"], [0]),
    "drain U.state": ([], [0, "state"]),
    "fetch U.weights": (["weights on disk"], [0]),
    "drain U.weights": ([], [0, "weights on disk"]),
    "fetch v.stash m": (["stash on disk"], [0]),
    "drain v.stash m": ([0], ["stash on disk"]),
    "fetch v m": (["kept"], [0]),
    "drain U": ([0], ["weights"]),
    "drain U free": ([], [0, "weights"]),
    "drain U.grad": ([0], [1]),
    "drain U.grad:p": ([0], [1]),
    "drain U.norm": ([0], []),
    "drain U.all:p": ([0], ["weights", "piece"]),
    "drain v m": ([0], ["kept"]),
    "drain loss": (["loss"], ["drained loss"]),
    "gather U": ([], [0]),
    "reduce U": ([], [0]),
    "reduce loss": ([], ["loss"]),
    "forward Pro m": ([0, 2], [1, 3]),
    "forward U m": ([0, 1, 2], [3, 4]),
    "forward Int m": ([0, 1, 3], [2, 4]),
    "loss m": ([0, 2, 3], [1, "loss", 4]),
    "forward Epi m": ([0, 1, 2], [3, 4]),
    "forward U:p m": ([0, 1, 2, 3], [4]),
    "loss Epi m": ([0], ["loss", 1]),
    "backward U:p m": ([0, 1, 4, 5, 6], [2, 3, 7]),
    "backward Epi m": ([0, 2, 3, 4], [1, 5]),
    "backward U m": ([0, 2, 3, 4, 5], [1, 6]),
    "backward Pro m": ([0, 2, 3, 4, 5], [1, 6, -1]),  # the last where gradients of inputs are asked
    "backward Int m": ([0, 2, 3, 4], [1, 5]),
    "lookup m": (["tables"], ["rows"]),
    "collect U m": (["gradients of rows"], [0]),
    "collect U": ([0], []),
    "update U host": ([0, "drained loss"], ["weights"]),
    "update U host late": ([0], ["weights"]),
    "update U host late weights": ([0], ["weights"]),
    "update U host late moments": ([0], []),
    "update U:m host late": ([0], ["weights"]),
    "update U:m host late weights": ([0], ["weights"]),
    "order U": (["drained loss"], ["numbers"]),
    "order U late": ([], ["numbers"]),
    "update U device": ([1, "loss"], [0]),
    "update U device late": ([1, "numbers"], [0]),
    "update U:p device": ([0, 1, "numbers"], [2]),
    "update U:p device late": (["numbers"], [0]),
}


def touched(action: Action, shape: Shape) -> tuple[set[str], set[str]]:
    """Places an action reads and places it writes: a second account beside `KINDS`."""
    unit, microbatches = action.unit, range(shape.num_microbatches)
    last = action.microbatch if action.verb == "collect" and action.microbatch is not None else -1
    own = {
        "weights": [f"weights {unit}"],
        "piece": [f"piece {unit} {action.piece}"],
        "tables": [f"weights {unit.name}" for unit in shape.outer if unit.looked_up],
        "numbers": [f"numbers {unit}"],
        "state": [f"state {unit}"],
        "weights on disk": [f"weights on disk {unit}"],
        "stash on disk": [f"stash on disk {action.value}"],
        "kept": [f"kept {action.value}"],
        "rows": [f"kept e m{action.microbatch}"],
        "gradients of rows": [f"kept x m{m}" for m in microbatches if m <= last],
    }
    reads, writes = (
        {
            place
            for name in names
            for place in (
                places(action.places[name]) if isinstance(name, int) else own.get(name, [name])
            )
        }
        for names in TOUCHED[action.kind]
    )
    buffers = {place for place in action.places if place[0] in "BDE"}
    if action.kind in ("fetch U", "fetch v m", "drain v.stash m"):
        return reads | buffers, writes
    return reads, writes | buffers


def assert_conflicts_are_ordered(schedule: Schedule) -> None:
    """Any two lines that touch one place, one of them writing, are ordered by lanes and waits.

    `before[n]` has bit k when action k is done before action n begins. A wait means the latest
    line before it that reads like the one it names. What earlier steps did is an action too, one
    for each thing that a line may wait for: the first lines, on no lane.
    """
    earlier = {name: number for number, name in enumerate(earlier_steps(schedule))}
    drained = 1 << earlier["drain"]
    lane_history = dict.fromkeys(Lane, drained)  # most lanes begin after the drains
    for lane in LASTING:  # which go on, each in its own order
        lane_history[lane] = 0
    for name, number in earlier.items():
        if name != "drain":
            lane = Lane.WRITE if name[0] in "BD" or "." in name else Lane.UPDATE
            lane_history[Lane.FETCH if name == "fetch" else lane] |= 1 << number
    latest: dict[Action, int] = {}
    before: list[int] = [0] * len(earlier)
    reading: dict[str, int] = {}
    writing: dict[str, int] = {}
    for line in schedule.lines:
        if isinstance(line, WaitLast):
            lane_history[line.lane] |= 1 << earlier[line.what]
            continue
        if isinstance(line, Wait):
            number = latest[line.action]
            lane_history[line.lane] |= before[number] | 1 << number
            continue
        number = len(before)
        history = lane_history[line.lane]
        for last in needed_of_earlier_steps(line, schedule.shape, writing):
            assert history >> earlier[last] & 1, f"{line}: last {last} not known done"
        reads, writes = touched(line, schedule.shape)
        for place in reads | writes:
            others = writing.get(place, 0) | (reading.get(place, 0) if place in writes else 0)
            assert not others & ~history, f"{line}: {place} is touched by lines not known done"
        for place in reads:
            reading[place] = reading.get(place, 0) | 1 << number
        for place in writes:
            writing[place] = writing.get(place, 0) | 1 << number
        before.append(history)
        latest[line] = number
        lane_history[line.lane] = history | 1 << number


def earlier_steps(schedule: Schedule) -> list[str]:
    """What of earlier steps may go on, or may be needed, when a step begins."""
    units = [a.unit for a in schedule.actions if a.unit]
    staging = [p for a in schedule.actions for p in a.places if p[0] in "HBD"]
    parts = [f"{unit}.state" for unit in schedule.shape.on_disk]
    parts += [f"{unit}.weights" for unit in schedule.shape.weights_on_disk]
    return list(dict.fromkeys([*units, *staging, *parts, "fetch", "drain"]))


def needed_of_earlier_steps(action: Action, shape: Shape, written: Mapping[str, int]) -> list[str]:
    """What of earlier steps must be done before a line, behind others that have written."""
    if action.kind == "fetch U.state":
        return [action.places[0], f"{action.unit}.state"]
    if action.kind == "fetch U.weights":
        own = [] if action.unit in frozen_units(shape) else [f"{action.unit}.weights"]
        return [action.places[0], *own, "fetch"]
    if action.kind in ("fetch U", "fetch U:p") and not shape.device_updates:
        own = frozen_units(shape) | units_with_state(shape)
        own |= shape.weights_on_disk  # what has been read was written after the last update
        return [action.unit] if action.unit not in own else []
    if action.kind in ("drain U.grad", "drain U.grad:p"):
        return [action.places[1]]
    if action.kind == "collect U" and action.places[0] not in written:
        return ["drain"]
    return ["drain"] if "late" in action.text and action.lane is Lane.UPDATE else []


def test_conflicting_lines_of_different_lanes_are_ordered() -> None:
    for schedule in (*all_schedules(), *sided_schedules()):
        assert_conflicts_are_ordered(schedule)


@pytest.mark.parametrize("name", GOLDEN)
def test_the_second_account_of_order_sees_a_deleted_wait(name: str) -> None:
    schedule = make_schedule(GOLDEN[name])
    for position, line in enumerate(schedule.lines):
        if isinstance(line, Wait | WaitLast):
            with pytest.raises(AssertionError, match="not known done"):
                assert_conflicts_are_ordered(without(schedule, position))


Values = dict[str, str]


def after(shape: Shape, call: int, stack: int) -> str:
    """The call that follows one in a stack, or the code after that; -1 is the code before it."""
    later = [str(one) for one in calls_in(shape, stack) if one > call]
    return (*later, f"I{stack + 1}" if stack < len(shape.stacks) else "E")[0]


def recorded(stack: int, m: str) -> str:
    return f"r{stack} {m}" if stack else f"r {m}"


def values_of(action: Action, shape: Shape) -> tuple[Values, Values]:
    """What a pass must find in cells and what it leaves there, worked out from the layers."""
    m, found = f"m{action.microbatch}", action.places
    if action.kind == "loss m":
        reads = {found[2]: recorded(len(shape.stacks), m), found[3]: f"hE {m}"}
        return reads, {found[4]: f"gE {m}"}
    if action.unit == "Epi" or action.piece is not None:
        return values_of_head(action, shape)
    if not action.unit.startswith("L"):
        return values_around(action, shape)
    call = call_of(shape, action)
    stack = stack_of(shape, call)
    hidden, kept, to = f"h{call} {m}", f"k{call} {m}", after(shape, call, stack)
    if action.verb == "forward":
        reads = {found[1]: recorded(stack, m), found[2]: hidden}
        return reads, {found[3]: f"h{to} {m}", found[4]: kept}
    reads = {found[2]: recorded(stack, m), found[3]: hidden, found[4]: kept}
    return {**reads, found[5]: f"g{to} {m}"}, {found[6]: f"g{call} {m}"}


def values_of_head(action: Action, shape: Shape) -> tuple[Values, Values]:
    """The same of the code up to a head in slices, of its slices and of the loss behind them."""
    m, found, head = f"m{action.microbatch}", action.places, head_of(shape)
    assert head is not None
    part = action.piece or 0
    if action.kind == "loss Epi m":
        return {found[0]: f"s{head.num_slices} {m}"}, {found[1]: f"c {m}"}
    if action.kind == "forward U:p m":
        return {found[2]: f"y {m}", found[3]: f"s{part} {m}"}, {found[4]: f"s{part + 1} {m}"}
    if action.kind == "backward U:p m":
        reads = {found[4]: f"y {m}", found[5]: f"c {m}", found[6]: f"d{part + 1} {m}"}
        return reads, {found[7]: f"d{part} {m}"}
    ends = {found[-3]: f"hE {m}", found[-4]: recorded(len(shape.stacks), m)}
    if action.verb == "forward":
        return ends, {found[-2]: f"y {m}", found[-1]: f"s0 {m}"}
    ends = {found[2]: recorded(len(shape.stacks), m), found[3]: f"hE {m}"}
    return {**ends, found[4]: f"d0 {m}"}, {found[5]: f"gE {m}"}


def values_around(action: Action, shape: Shape) -> tuple[Values, Values]:
    """The same of the code before a stack."""
    m, found = f"m{action.microbatch}", action.places
    stack = 0 if action.unit == "Pro" else int(action.unit[3:])
    first, end = after(shape, -1, stack), f"I{stack} {m}"
    if action.kind == "forward Pro m":
        return {found[2]: f"e {m}"}, {found[1]: recorded(0, m), found[3]: f"h{first} {m}"}
    if action.kind == "backward Pro m":
        return {found[3]: f"e {m}", found[5]: f"g{first} {m}"}, {found[6]: f"x {m}"}
    if action.kind == "forward Int m":
        reads = {found[1]: recorded(stack - 1, m), found[3]: f"h{end}"}
        return reads, {found[2]: recorded(stack, m), found[4]: f"h{first} {m}"}
    reads = {found[2]: recorded(stack - 1, m), found[3]: f"h{end}", found[4]: f"g{first} {m}"}
    return reads, {found[5]: f"g{end}"}


def test_every_boundary_value_is_in_the_cell_it_is_read_from() -> None:
    for schedule in all_schedules():
        shape = schedule.shape
        cells: dict[str, str] = {}
        kept: set[str] = set()  # outside the cells
        for action in schedule.actions:
            if action.verb == "lookup":
                kept.add(f"e m{action.microbatch}")
            elif action.kind == "drain v m":
                assert cells[action.places[0]] == action.value, (shape, action)
                kept.add(action.value)
            elif action.kind == "fetch v m":
                assert action.value in kept, (shape, action)
                cells[action.places[0]] = action.value
            elif action.verb == "collect":
                assert f"x m{action.microbatch}" in kept, (shape, action)
            elif action.verb in PASSES:
                found, left = values_of(action, shape)
                for cell, expected in found.items():
                    assert cell == NOTHING or cells[cell] == expected, (shape, action)
                cells |= {cell: value for cell, value in left.items() if cell != NOTHING}
        numbers = {"C": shape.num_cells, "R": shape.num_recorded_cells, "K": shape.num_kept_cells}
        numbers["P"] = shape.num_head_cells
        assert {*cells} <= {f"{kind}{i}" for kind, number in numbers.items() for i in range(number)}


def test_what_is_copied_out_of_cells_comes_back_and_is_read() -> None:
    for schedule in all_schedules():
        shape, out, read = schedule.shape, set[str](), set[str]()
        arrived: dict[str, str] = {}  # cell -> value that no pass has read yet
        for action in schedule.actions:
            if action.kind == "drain v m":
                assert action.value not in out, (shape, action)
                out.add(action.value)
            elif action.kind == "fetch v m":
                assert arrived.setdefault(action.places[0], action.value) == action.value
            elif action.verb == "collect":
                read.add(f"x m{action.microbatch}")
            elif action.verb in PASSES:
                read |= {arrived.pop(cell) for cell in action.places if cell in arrived}
        assert not arrived, shape
        assert out <= read, shape


def test_a_pass_has_a_cell_for_everything_it_needs_and_for_nothing_else() -> None:
    for schedule in all_schedules():
        shape = schedule.shape
        looked_up = [unit for unit in shape.outer if unit.looked_up]
        trains_rows = any(unit.trained for unit in looked_up)
        before, returns = trains_before(shape), returning(shape)
        returns_any = shape.training and (before or bool(returns))
        walks = shape.num_tail > 0 or bool(shape.stacks)
        num_losses = 0
        for action in schedule.actions:
            if action.verb not in PASSES:
                continue
            call = call_of(shape, action) if action.unit.startswith("L") else -1
            num_losses += action.verb == "loss"
            is_second = num_losses > shape.num_microbatches  # of a joint loss that was taken
            if action.unit == "Epi" or action.piece is not None:
                assert_cells_of_head(action, shape, needs=returns_any)
                continue
            needed = {  # the places that a pass may do without
                "forward Pro m": {2: bool(looked_up)},
                "forward Int m": {},
                "forward U m": {4: call in returns and shape.num_kept_cells > 0},
                "loss m": {
                    2: walks and not is_second,
                    3: not is_second,
                    4: returns_any and is_second == shape.joint,
                },
                "backward U m": {
                    1: call not in shape.frozen_layers,
                    4: shape.num_kept_cells > 0,
                    6: before or call != (*returns, None)[0],
                },
                "backward Int m": {},
                "backward Pro m": {2: False, 3: bool(looked_up), 4: False, 6: trains_rows},
            }[action.kind]
            around = (0, 1) if action.verb != "forward" else (0,)
            for position, word in enumerate(action.places):
                if call < 0 and position in around:
                    continue  # see above
                assert (word != NOTHING) == needed.get(position, True), (shape, action)


def assert_cells_of_head(action: Action, shape: Shape, *, needs: bool) -> None:
    head = head_of(shape)
    assert head is not None
    trains = shape.training and (needs or any(one.trained for one in epilogue_units(shape)))
    is_last = action.piece == head.num_slices - 1
    expected = {
        "forward Epi m": {1: bool(shape.stacks)},
        "forward U:p m": {},
        "loss Epi m": {1: trains or (shape.training and head.trained)},
        "backward U:p m": {2: head.trained, 6: trains and not is_last, 7: trains},
        "backward Epi m": {2: bool(shape.stacks), 5: needs},
    }[action.kind]
    for position, word in enumerate(action.places):
        if word[:1] in "CRPG-" and not (word == NOTHING and position in (0, 1, 3)):
            assert (word != NOTHING) == expected.get(position, True), (shape, action, position)


def test_more_layers_and_microbatches_need_no_more_places() -> None:
    def numbered(num_layers: int, num_microbatches: int) -> set[str]:
        shape = Shape(
            layers=first_layers(num_layers), num_microbatches=num_microbatches, num_kept_cells=3
        )
        words = str(make_schedule(shape)).split()
        return {word for word in words if word[0] in "SGHCRK" and word[1:].isdigit()}

    assert numbered(8, 8) == numbered(16, 8) == numbered(8, 32)
    assert len(numbered(8, 8)) == 2 + 2 + 4 + 6 + 2 + 3


def without(schedule: Schedule, position: int) -> Schedule:
    lines = schedule.lines[:position] + schedule.lines[position + 1 :]
    return dataclasses.replace(schedule, lines=lines)


def test_a_schedule_with_any_wait_deleted_is_refused() -> None:
    num_waits = 0
    for schedule in varied_schedules():
        for position, line in enumerate(schedule.lines):
            if isinstance(line, Wait | WaitLast):
                num_waits += 1
                with pytest.raises(ValueError, match="is not ordered after"):
                    validate(without(schedule, position))
    assert num_waits > 1000


def test_no_line_waits_for_its_own_lane() -> None:
    for schedule in all_schedules():
        for line in schedule.lines:
            assert not isinstance(line, Wait) or line.lane is not line.action.lane


# --------------------------------------------------------------------------------------------------
# Refusals

ONE_LAYER = Shape(layers=(0,), num_microbatches=1, num_slots=1, training=False)
ONE_LAYER_TEXT = """
fetch waits last O
fetch O SO
fetch waits last L0
fetch L0 S0
compute waits fetch O SO
forward Pro m0 SO R0 - C0
compute waits fetch L0 S0
forward L0 m0 S0 R0 C0 C1 -
release L0 S0
loss m0 SO - - C1 -
drain waits loss m0 SO - - C1 -
drain loss
release O SO
"""


def test_the_written_schedule_is_the_one_that_is_made() -> None:
    assert str(make_schedule(ONE_LAYER)) == ONE_LAYER_TEXT.strip()


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("\nfetch L0 S0\n", "\n", "waits for a line that has not been given before it"),
        ("\nfetch L0 S0\n", "\nfetch L0 S0\nfetch L0 S0\n", "S0 still holds 'L0'"),
        (
            "release L0 S0\n",
            "release L0 S0\nfetch waits release L0 S0\nfetch L0 S0\n",
            "slots are left occupied: S0",
        ),
        ("release L0 S0\n", "", "slots are left occupied: S0"),
        ("release O SO\n", "", "slots are left occupied: SO"),
        ("release L0 S0\n", "release L1 S0\n", "S0 must hold 'L1', found 'L0'"),
        ("m0 S0 R0 C0 C1", "m0 S1 R0 C0 C1", "S1 must hold 'L0', found 'nothing'"),
        ("forward Pro m0 SO R0", "forward Pro m0 SO,ST0 R0", "ST0 must hold 'T0', found 'nothing'"),
        ("Pro m0 SO R0 -", "Pro m0 SO R0 C5", "C5 must hold 'e m0', found 'nothing'"),
        (
            "loss m0 SO - - C1 -\ndrain l",
            "loss m0 SO - R1 C1 -\ndrain l",
            "a line that has not been",
        ),
        ("m0 S0 R0 C0 C1", "m0 S0 R0 C2 C1", "C2 must hold 'h0 m0', found 'nothing'"),
        ("m0 S0 R0 C0 C1", "m0 S0 R1 C0 C1", "R1 must hold 'r m0', found 'nothing'"),
        ("\nloss m0 SO - - C1", "\nloss m0 SO - - C0", "C0 must hold 'hE m0', found 'h0 m0'"),
        ("forward L0 m0 ", "forward L0 m1 ", "R0 must hold 'r m1', found 'r m0'"),
        ("\nloss m0 SO", "\nfetch hE m0 C1\nloss m0 SO", "found 'nothing'"),
        ("compute waits fetch L0 S0\n", "", "is not ordered after 'fetch L0 S0'"),
        ("compute waits fetch O SO\n", "", "is not ordered after 'fetch O SO'"),
        ("drain waits loss m0 SO - - C1 -\n", "", "is not ordered after 'loss m0 SO - - C1 -'"),
        ("fetch waits last L0\n", "", "is not ordered after 'last L0'"),
        ("drain waits loss m0 SO - - C1 -", "drain waits drain loss", "not been given before"),
    ],
)
def test_a_schedule_with_a_mistake_is_refused(old: str, new: str, reason: str) -> None:
    assert ONE_LAYER_TEXT.count(old) == 1
    text = ONE_LAYER_TEXT.replace(old, new)
    with pytest.raises(ValueError, match=reason):
        validate(Schedule.parse(text, ONE_LAYER))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("\nupdate L2 dev", "\nfetch L2 SL2\nupdate L2 dev", "SL2 still holds 'L2'"),
        ("\nupdate L2 dev", "\nrelease L2 SL2\nupdate L2 dev", "SL2 must hold 'L2', found"),
        ("\ndrain L2 SL2", "\ndrain L1 SL2", "SL2 must hold 'L1', found 'L2'"),
        ("\ndrain L2.norm", "\ndrain L1.norm", "GL2 must hold 'gradient L1', found 'gradient L2'"),
        ("\norder L2 late\n", "\n", "waits for a line that has not been given"),
        ("\ndrain L2 SL2", "\nrelease SL2\ndrain L2 SL2", "SL2 still holds 'L2'"),
    ],
)
def test_a_schedule_with_a_mistake_about_a_unit_that_stays_is_refused(
    old: str, new: str, reason: str
) -> None:
    shape = GOLDEN["tail_of_one_with_device_state"]
    text = str(make_schedule(shape))
    assert text.count(old) == 1
    with pytest.raises(ValueError, match=reason):
        validate(Schedule.parse(text.replace(old, new), shape))


@pytest.mark.parametrize(
    ("name", "old", "new", "reason"),
    [
        (
            "two_stacks",
            "\nforward Int1 m1",
            "\nforward Int2 m1",
            "there is no stack 2 in this step",
        ),
        ("two_stacks", "m1 SO R0 R1 C5", "m1 SO R0 R1 C3", "C3 must hold 'hI1 m1', found 'h1 m1'"),
        (
            "two_stacks",
            "m0 S0 R0 C1 C3 -",
            "m0 S0 R1 C1 C3 -",
            "R1 must hold 'r1 m0', found 'r1 m1'",
        ),
        (
            "two_stacks",
            "loss m1 SO GO R1",
            "loss m1 SO GO R0",
            "R0 must hold 'r1 m1', found 'r1 m0'",
        ),
        ("two_stacks", "\nbackward Int1 m1 SO GO R1 C0 C2 C4", "", "not been given before it"),
        ("two_stacks", "Int1 m0 SO GO R0 C1 C3", "Int1 m0 SO GO R0 C1 C2", "C2 must hold 'g2 m0'"),
        ("layers_called_twice", "\nforward L0:v2 m1", "\nforward L0:v0 m1", "C5 must hold 'h0 m1'"),
        ("layers_called_twice", "\nforward L0:v2 m1", "\nforward L0:v3 m1", "L0 is not among"),
        ("layers_called_twice", "\nforward L0:v2 m1", "\nforward L0:v4 m1", "L0 is not among"),
        ("layers_called_twice", "L0.grad GL0", "L0.grad GL1", "GL1 must hold 'gradient L0'"),
    ],
)
def test_a_schedule_with_a_mistake_about_stacks_or_calls_is_refused(
    name: str, old: str, new: str, reason: str
) -> None:
    text = str(make_schedule(GOLDEN[name]))
    with pytest.raises(ValueError, match=reason):
        validate(Schedule.parse(text.replace(old, new), GOLDEN[name]))


def test_a_refusal_names_the_line_and_its_number() -> None:
    text = ONE_LAYER_TEXT.replace("compute waits fetch L0 S0\n", "")
    with pytest.raises(ValueError, match=r"^line 7, 'forward L0 m0 S0 R0 C0 C1 -': is not ordered"):
        validate(Schedule.parse(text, ONE_LAYER))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_microbatches": 0}, "at least one microbatch"),
        ({"layers": (0, 2, 1)}, "strictly increasing"),
        ({"layers": (0, 1, 1)}, "strictly increasing"),
        ({"layers": (-1, 0)}, "strictly increasing"),
        ({"num_slots": 0}, "num_slots must be at least 1, found 0"),
        ({"num_cells": 2}, "num_cells must be at least 3, found 2"),
        ({"num_recorded_cells": 0}, "num_recorded_cells must be at least 1"),
        ({"num_gradient_slots": 0}, "num_gradient_slots must be at least 1"),
        ({"num_staging": 0}, "num_staging must be at least 1"),
        ({"num_tail": -1}, "num_tail must be at least 0"),
        ({"num_tail": 3}, "num_tail=3, but there are 2 layers"),
        ({"num_tail": 1, "device_state": frozenset({0, 1})}, r"the tail is \(1,\)"),
        ({"outer": (dataclasses.replace(TIED[0], in_prologue=True),)}, "looked up on the host"),
        ({"outer": (dataclasses.replace(TIED[0], device_state=True),)}, "looked up on the host"),
        ({"num_recorded_cells": 1, "stacks": (1,)}, "num_recorded_cells must be at least 2"),
        ({"num_tail": 2, "stacks": (1,)}, r"the tail \(0, 1\) must be in the last stack"),
        ({"num_tail": 1, "units": (0, 0)}, r"the tail \(1,\) .* each layer once"),
        ({"num_tail": 1, "joint": True}, "a joint loss leaves no tail"),
        ({"parallel": True, "outer": TIED}, "ranks share everything"),
        ({"outer": TIED, "device_updates": True}, "leave nothing"),
        (
            {"num_tail": 1, "device_state": frozenset({1}), "device_updates": True},
            "leave nothing",
        ),
    ],
)
def test_a_shape_that_cannot_be_is_refused(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Shape(**{"layers": (0, 1), "num_microbatches": 1, **settings})


def test_a_step_may_leave_all_layers_out() -> None:
    for training in (True, False):
        schedule = make_schedule(Shape(layers=(), num_microbatches=2, training=training))
        computed = [a.kind for a in schedule.actions if a.verb in PASSES]
        last = ["backward Pro m"] * 2 if training else []
        assert computed == ["forward Pro m"] * 2 + ["loss m"] * 2 + last
        assert schedule.count("fetch U") == 1


LATE = {"num_late": 3, "num_tail": 2, "shared": frozenset({0, 2}), "num_slots": 3}


@pytest.mark.parametrize("stacks", [(), (3,), (1, 4)])
@pytest.mark.parametrize("layers", [(0, 2, 3, 5), (4,), (0, 1), (), (0, 1, 2, 3, 4, 5)])
def test_fewer_layers_leave_the_same_of_the_others_as_it_was(
    layers: tuple[int, ...], stacks: tuple[int, ...]
) -> None:
    """What is late, lent or in the tail is so with any layers: memory was taken for that."""
    whole = Shape(layers=tuple(range(6)), num_microbatches=2, stacks=stacks, **LATE)
    fewer = whole.only(layers)
    chosen = {f"L{layer}" for layer in layers}
    assert fewer.layers == layers
    assert fewer.tail == tuple(layer for layer in whole.tail if layer in layers)
    assert fewer.shared == whole.shared & set(layers)
    outer = {unit for unit in whole.late_units if not unit.startswith("L")}
    assert set(fewer.late_units) == (set(whole.late_units) & chosen) | outer
    pending = whole.late_units  # also of layers that this step leaves out
    schedule = make_schedule(dataclasses.replace(fewer, pending=pending))
    fetched = [a.unit for a in schedule.actions if a.kind == "fetch U"]
    assert {unit for unit in fetched if unit.startswith("L")} == chosen
    settled = ("update U host late", "order U late")
    assert {a.unit for a in schedule.actions if a.kind in settled} == set(pending)
    if layers == whole.layers:
        assert fewer == whole


# --------------------------------------------------------------------------------------------------
# Steps in two sides


def passes_of(shape: Shape) -> list[str]:
    lines = make_schedule(shape).actions
    return [f"{a.verb} {a.unit} m{a.microbatch}" for a in lines if a.verb in PASSES]


def test_two_sides_compute_what_a_whole_step_does() -> None:
    for shape in sided_shapes():
        if shape.side != "forward":
            continue
        whole_step = dataclasses.replace(shape, side="", fused=False, asks_inputs=False)
        if shape.asks_inputs:  # it goes back as far as if all around the layers were trained
            outer = tuple(dataclasses.replace(unit, trained=True) for unit in shape.outer)
            whole_step = dataclasses.replace(whole_step, outer=outer)
        whole = passes_of(whole_step)
        sides = passes_of(shape) + passes_of(dataclasses.replace(shape, side="backward"))
        if shape.fused:
            assert sides == whole
            continue
        epilogues = [f"Epi m{m}" for m in range(shape.num_microbatches)]
        expected = [one for one in whole if not one.startswith("loss")]
        assert [one for one in sides if " Epi " not in one] == expected
        found = [one for one in sides if " Epi " in one]
        assert found == [f"{verb} {one}" for verb in ("forward", "backward") for one in epilogues]


def test_one_side_leaves_on_the_host_what_another_reads() -> None:
    for shape in sided_shapes():
        if shape.side != "forward":
            continue
        left = {a.value for a in make_schedule(shape).actions if a.kind == "drain v m"}
        whole = dataclasses.replace(shape, fused=False, joint=False)
        others = [dataclasses.replace(whole, side=side) for side in ("outputs", "backward")]
        others.append(dataclasses.replace(shape, side="backward"))
        for other in others:
            lines = make_schedule(other).actions
            fetched = {a.value for a in lines if a.kind == "fetch v m"}
            made = {a.value for a in lines if a.kind == "drain v m"}
            rows = {f"e m{m}" for m in range(shape.num_microbatches)}
            assert fetched - made - rows <= left


def test_nothing_of_a_step_in_two_sides_stays_on_the_device_or_is_updated() -> None:
    for schedule in sided_schedules():
        held: set[str] = set()
        for action in schedule.actions:
            assert action.verb not in ("update", "order") or action.text.endswith("late")
            if action.kind == "fetch U":
                held.add(action.places[0])
            elif action.kind == "release U":
                held.remove(action.places[0])
        assert not held


def test_every_gradient_is_collected_once_by_the_backward_side() -> None:
    for schedule in sided_schedules():
        shape = schedule.shape
        collected = [a.unit for a in schedule.actions if a.kind == "collect U"]
        if shape.side != "backward":
            assert not collected
            continue
        trained = {unit.name for unit in shape.outer if unit.trained}
        trained |= {f"L{i}" for i in shape.backward_layers if i not in shape.frozen_layers}
        assert sorted(collected) == sorted(trained)
