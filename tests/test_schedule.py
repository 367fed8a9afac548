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
from collections.abc import Iterator
from pathlib import Path

import pytest

from l2l.schedule import (
    NOTHING,
    VERBS,
    Action,
    Lane,
    OuterUnit,
    Schedule,
    Shape,
    Wait,
    make_schedule,
    parse_line,
    validate,
)

FOLDER = Path(__file__).parent / "schedules"


def first_layers(count: int) -> tuple[int, ...]:
    return tuple(range(count))


FROZEN = (OuterUnit(trained=False),)
AFTER = OuterUnit(in_prologue=False)  # a norm
TIED = (OuterUnit(name="T0", in_prologue=False, looked_up=True), AFTER)
UNTIED = (OuterUnit(name="T0", in_prologue=False, in_epilogue=False, looked_up=True), AFTER)
APART = (OuterUnit(name="T0", in_epilogue=False), AFTER)

GOLDEN = {
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
    "tied_table_on_the_host_clipped": Shape(
        layers=first_layers(3),
        num_microbatches=2,
        outer=TIED,
        num_late=4,
        pending=("T0", "O", "L2", "L1", "L0"),
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
}


def write_golden_files() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, shape in GOLDEN.items():
        (FOLDER / f"{name}.txt").write_text(f"{make_schedule(shape)}\n")


def small_shapes(*, training: bool = True) -> Iterator[Shape]:
    for num_layers, num_microbatches, num_cells in itertools.product(
        range(1, 8), (1, 2, 3, 5), range(3, 9)
    ):
        for num_slots in range(1, num_layers + 1):
            yield Shape(
                layers=first_layers(num_layers),
                num_microbatches=num_microbatches,
                num_slots=num_slots,
                num_cells=num_cells,
                training=training,
            )


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
        {"device_updates": True, "num_slots": 1},
        {"device_updates": True, "num_slots": 3, "num_gradient_slots": 1, "num_cells": 4},
    ):
        yield Shape(layers=(0, 1, 2), num_microbatches=2, **settings)


@functools.cache
def small_schedules() -> tuple[Schedule, ...]:
    """Of all small sizes; in training."""
    return tuple(make_schedule(shape) for shape in small_shapes())


@functools.cache
def varied_schedules() -> tuple[Schedule, ...]:
    """The golden ones, and of few sizes with every other number varied."""
    return tuple(make_schedule(shape) for shape in (*GOLDEN.values(), *varied_shapes()))


# --------------------------------------------------------------------------------------------------
# Text


@pytest.mark.parametrize("name", GOLDEN)
def test_a_schedule_prints_as_its_golden_file(name: str) -> None:
    assert f"{make_schedule(GOLDEN[name])}\n" == (FOLDER / f"{name}.txt").read_text()


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


def test_golden_schedules_use_every_verb_and_lane() -> None:
    actions = [action for shape in GOLDEN.values() for action in make_schedule(shape).actions]
    assert {action.verb for action in actions} == set(VERBS)
    assert {action.lane for action in actions} == set(Lane)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "unknown verb"),
        ("fly L0 S0", "unknown verb"),
        ("waits release L0 S0", "unknown verb"),
        ("fetch waits", "takes operands"),
        ("fetch L0", "takes operands like 'LO S>'"),
        ("fetch L0 S0 S1", "takes operands"),
        ("fetch S0 L0", "takes operands"),
        ("report m0", "takes operands"),
        ("backward L0 m0 S0 R0 G0 C0 C1 C2", "takes operands"),
        ("loading waits release L0 S0", "no lane 'loading'; lanes are compute"),
        ("fetch waits compute waits report", "not another wait"),
        ("fetch waits release L0", "takes operands"),
    ],
)
def test_text_that_is_no_line_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_line(text)


def test_lines_are_counted_by_verb() -> None:
    schedule = make_schedule(GOLDEN["three_layers_one_microbatch"])
    assert schedule.count("backward") == 3
    assert schedule.count("update") == 4
    assert schedule.count("score") == 0


# --------------------------------------------------------------------------------------------------
# Properties


def test_computing_goes_layer_by_layer_and_within_a_layer_over_all_microbatches() -> None:
    schedule = make_schedule(GOLDEN["three_layers_two_microbatches"])
    passes = [
        " ".join([action.verb, *(word for word in action.operands if word[0] in "Lm")])
        for action in schedule.actions
        if action.lane is Lane.COMPUTE and action.verb != "release"
    ]
    assert passes == [
        f"{part} {microbatch}"
        for part in (
            "prologue",
            *("forward L0", "forward L1", "forward L2"),
            "epilogue",
            *("backward L2", "backward L1", "backward L0"),
            "regress",
        )
        for microbatch in ("m0", "m1")
    ]


def test_a_layer_is_resident_when_computed_on_and_slots_hold_one_layer_and_end_free() -> None:
    for schedule in small_schedules():
        shape = schedule.shape
        held: dict[str, str] = {}
        for action in schedule.actions:
            if action.verb == "fetch":
                assert action.operands[1] not in held, (shape, action)
                held[action.operands[1]] = action.operands[0]
            elif action.verb == "release":
                assert held.pop(action.operands[1]) == action.operands[0], (shape, action)
            elif action.verb in ("forward", "backward"):
                assert held[action.operands[2]] == action.operands[0], (shape, action)
            elif action.verb in ("prologue", "epilogue", "regress"):
                assert held["SO"] == "O", (shape, action)
            assert len(held) <= shape.num_slots + 1
        assert not held, shape


def test_a_step_fetches_twice_the_layers_less_the_slots() -> None:
    for schedule in small_schedules():
        shape = schedule.shape
        fetches = [
            action
            for action in schedule.actions
            if action.verb == "fetch" and action.operands[0] != "O"
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
        assert schedule.count("fetch") == len(shape.layers) + 1
        assert schedule.count("report") == 1
        for verb in ("epilogue", "backward", "regress", "drain", "update"):
            assert schedule.count(verb) == 0


def units_of(schedule: Schedule, verb: str) -> set[str]:
    units = [action.operands[0] for action in schedule.actions if action.verb == verb]
    assert len(units) == len(set(units)), (schedule.shape, verb)
    return set(units)


def test_every_trained_unit_is_updated_once_and_no_other() -> None:
    """On the host, by this step or the next one, or on the device."""
    for schedule in (*small_schedules(), *varied_schedules()):
        shape = schedule.shape
        trained = {f"L{layer}" for layer in shape.layers if layer not in shape.frozen_layers}
        trained |= set() if shape.frozen_outer else {"O"}
        trained = trained if shape.training else set()
        on_host = set() if shape.device_updates else trained
        late = set(shape.late_units)
        assert len(late) == min(shape.num_late, len(trained)), shape
        assert units_of(schedule, "drain") == on_host, shape
        assert units_of(schedule, "update") == on_host - late, shape
        assert units_of(schedule, "settle") == set(shape.pending), shape
        for verb in ("revise", "return"):
            assert units_of(schedule, verb) == trained - on_host, shape


def test_late_updates_leave_staging_that_the_next_step_settles() -> None:
    shape = Shape(layers=first_layers(4), num_microbatches=1, num_late=3)
    assert shape.late_units == ("O", "L0", "L1")
    schedule = make_schedule(shape)
    drained = {a.operands[0]: a.operands[2] for a in schedule.actions if a.verb == "drain"}
    following = make_schedule(dataclasses.replace(shape, pending=shape.late_units))
    settled = [action.operands for action in following.actions if action.verb == "settle"]
    assert settled == [(unit, drained[unit]) for unit in shape.late_units]
    updated = {a.operands[1] for a in following.actions if a.verb == "update"}
    assert not updated & {drained[unit] for unit in shape.late_units}


def test_layers_below_the_lowest_trained_one_have_no_backward_pass() -> None:
    shape = GOLDEN["frozen_lower_layers"]
    schedule = make_schedule(shape)
    backward = [action for action in schedule.actions if action.verb == "backward"]
    assert [action.operands[0] for action in backward] == ["L3", "L3", "L2", "L2"]
    assert [action.operands[-1] for action in backward[2:]] == [NOTHING, NOTHING]
    assert schedule.count("regress") == 0


def test_a_frozen_layer_between_trained_ones_passes_gradients_on_and_keeps_none() -> None:
    shape = Shape(layers=(0, 1, 2), num_microbatches=2, frozen_layers=frozenset({1}))
    backward = [action for action in make_schedule(shape).actions if action.verb == "backward"]
    gradient_slots = {action.operands[0]: action.operands[3] for action in backward}
    assert gradient_slots == {"L2": "G0", "L1": NOTHING, "L0": "G1"}
    assert all(action.operands[-1] != NOTHING for action in backward)


def test_a_schedule_over_some_layers_names_only_those() -> None:
    text = str(make_schedule(GOLDEN["some_layers"]))
    assert {word for word in text.split() if word.startswith("L")} == {"L0", "L2", "L5"}
    values = {word for word in text.split() if word[0] in "hg" and word[1:] in list("012345E")}
    assert values <= {f"{kind}{part}" for kind in "hg" for part in "025E"}


TOUCHED = {  # verb -> what it reads, what it writes: places, or positions of operands
    "fetch": (["weights"], [1]),
    "release": ([], [1]),
    "prologue": (["SO"], [1, 2]),
    "forward": ([2, 3, 4], [5]),
    "score": (["SO", 1], ["loss"]),
    "epilogue": (["SO", 1], ["GO", "loss", 2]),
    "backward": ([2, 4, 5, 6], [3, 7]),
    "regress": (["SO", 1], ["GO"]),
    "report": (["loss"], ["reported loss"]),
    "drain": ([1], [2]),
    "update": ([1, "reported loss"], ["weights"]),
    "settle": ([1], ["weights"]),
    "revise": ([2, "loss"], [1]),
    "return": ([], [1, "weights"]),
    "stash": ([2], ["kept"]),
    "unstash": (["kept"], [2]),
}


def touched(action: Action) -> tuple[set[str], set[str]]:
    """Places an action reads and places it writes: a second account beside `VERBS`."""
    own = {"kept": "kept " + " ".join(action.operands[:2])}
    own |= {"weights": f"weights {action.operands[0]}"} if action.operands else {}
    reads, writes = (
        {action.operands[word] if isinstance(word, int) else own.get(word, word) for word in words}
        for words in TOUCHED[action.verb]
    )
    return reads - {NOTHING}, writes - {NOTHING}


def assert_conflicts_are_ordered(schedule: Schedule) -> None:
    """Any two lines that touch one place, one of them writing, are ordered by lanes and waits.

    `before[n]` has bit k when action k is done before action n begins. A wait means the latest
    line before it that reads like the one it names.
    """
    lane_history = dict.fromkeys(Lane, 0)
    latest: dict[Action, int] = {}
    before: list[int] = []
    reading: dict[str, int] = {}
    writing: dict[str, int] = {}
    for line in schedule.lines:
        if isinstance(line, Wait):
            number = latest[line.action]
            lane_history[line.lane] |= before[number] | 1 << number
            continue
        number = len(before)
        history = lane_history[line.lane]
        reads, writes = touched(line)
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


def test_conflicting_lines_of_different_lanes_are_ordered() -> None:
    for schedule in (*small_schedules(), *varied_schedules()):
        assert_conflicts_are_ordered(schedule)


def test_the_second_account_of_order_sees_a_deleted_wait() -> None:
    schedule = make_schedule(GOLDEN["four_layers_three_microbatches"])
    for position, line in enumerate(schedule.lines):
        if isinstance(line, Wait):
            with pytest.raises(AssertionError, match="not known done"):
                assert_conflicts_are_ordered(without(schedule, position))


def value_names(schedule: Schedule) -> Iterator[tuple[Action, list[str], list[str]]]:
    """For each action the boundary values it must read and writes, worked out from the layers."""
    layers = schedule.shape.layers
    after = dict(zip(layers, [*map(str, layers[1:]), "E"], strict=True))
    for action in schedule.actions:
        words = action.operands
        if action.verb == "prologue":
            yield action, [], [f"r {words[0]}", f"h{layers[0]} {words[0]}"]
        elif action.verb == "forward":
            layer, m = int(words[0][1:]), words[1]
            yield action, [f"r {m}", f"h{layer} {m}"], [f"h{after[layer]} {m}"]
        elif action.verb == "backward":
            layer, m = int(words[0][1:]), words[1]
            yield action, [f"r {m}", f"h{layer} {m}", f"g{after[layer]} {m}"], [f"g{layer} {m}"]
        elif action.verb in ("epilogue", "score"):
            yield action, [f"hE {words[0]}"], [f"gE {words[0]}"]
        elif action.verb == "regress":
            yield action, [f"g{layers[0]} {words[0]}"], []
        elif action.verb in ("stash", "unstash"):
            yield action, [f"{words[0]} {words[1]}"], [f"{words[0]} {words[1]}"]


def test_every_boundary_value_is_in_the_cell_it_is_read_from() -> None:
    for schedule in (*small_schedules(), *varied_schedules()):
        shape = schedule.shape
        cells: dict[str, str] = {}
        kept: set[str] = set()
        for action, reads, writes in value_names(schedule):
            places = [word for word in action.operands if word[0] in "RC-"]
            if action.verb == "backward" and action.operands[3] == NOTHING:
                places = places[1:]
            if action.verb == "stash":
                assert cells[places[0]] == reads[0], (shape, action)
                kept.add(reads[0])
            elif action.verb == "unstash":
                assert reads[0] in kept, (shape, action)
                cells[places[0]] = reads[0]
            else:
                for place, value in zip(places, reads, strict=False):
                    assert cells[place] == value, (shape, action)
                for place, value in zip(places[len(reads) :], writes, strict=False):
                    cells[place] = value
        used = {cell for cell in cells if cell.startswith("C")}
        assert used <= {f"C{index}" for index in range(shape.num_cells)}


def test_more_layers_and_microbatches_need_no_more_places() -> None:
    def places(num_layers: int, num_microbatches: int) -> set[str]:
        shape = Shape(layers=first_layers(num_layers), num_microbatches=num_microbatches)
        words = str(make_schedule(shape)).split()
        return {word for word in words if word[0] in "SGHCR" and word[1:].isdigit()}

    assert places(8, 8) == places(16, 8) == places(8, 32)
    assert len(places(8, 8)) == 2 + 2 + 4 + 6 + 2


def without(schedule: Schedule, position: int) -> Schedule:
    lines = schedule.lines[:position] + schedule.lines[position + 1 :]
    return dataclasses.replace(schedule, lines=lines)


def test_a_schedule_with_any_wait_deleted_is_refused() -> None:
    num_waits = 0
    for schedule in varied_schedules():
        for position, line in enumerate(schedule.lines):
            if isinstance(line, Wait):
                num_waits += 1
                with pytest.raises(ValueError, match="is not ordered after"):
                    validate(without(schedule, position))
    assert num_waits > 1000


def test_no_line_waits_for_its_own_lane() -> None:
    for schedule in (*small_schedules(), *varied_schedules()):
        for line in schedule.lines:
            assert not isinstance(line, Wait) or line.lane is not line.action.lane


# --------------------------------------------------------------------------------------------------
# Refusals

ONE_LAYER = Shape(layers=(0,), num_microbatches=1, num_slots=1, training=False)
ONE_LAYER_TEXT = """
fetch O SO
fetch L0 S0
compute waits fetch O SO
prologue m0 R0 C0
compute waits fetch L0 S0
forward L0 m0 S0 R0 C0 C1
release L0 S0
score m0 C1
drain waits score m0 C1
report
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
        ("m0 S0 R0 C0 C1", "m0 S0 R0 C2 C1", "C2 must hold 'h0 m0', found 'nothing'"),
        ("m0 S0 R0 C0 C1", "m0 S0 R1 C0 C1", "R1 must hold 'r m0', found 'nothing'"),
        ("\nscore m0 C1", "\nscore m0 C0", "C0 must hold 'hE m0', found 'h0 m0'"),
        ("forward L0 m0 ", "forward L0 m1 ", "R0 must hold 'r m1', found 'r m0'"),
        ("score m0 C1\ndrain", "unstash hE m0 C1\nscore m0 C1\ndrain", "found 'nothing'"),
        ("compute waits fetch L0 S0\n", "", "is not ordered after 'fetch L0 S0'"),
        ("compute waits fetch O SO\n", "", "is not ordered after 'fetch O SO'"),
        ("drain waits score m0 C1\n", "", "is not ordered after 'score m0 C1'"),
        ("drain waits score m0 C1\nreport", "drain waits report\nreport", "not been given before"),
    ],
)
def test_a_schedule_with_a_mistake_is_refused(old: str, new: str, reason: str) -> None:
    assert ONE_LAYER_TEXT.count(old) == 1
    text = ONE_LAYER_TEXT.replace(old, new)
    with pytest.raises(ValueError, match=reason):
        validate(Schedule.parse(text, ONE_LAYER))


def test_a_refusal_names_the_line_and_its_number() -> None:
    text = ONE_LAYER_TEXT.replace("compute waits fetch L0 S0\n", "")
    with pytest.raises(ValueError, match=r"^line 5, 'forward L0 m0 S0 R0 C0 C1': is not ordered"):
        validate(Schedule.parse(text, ONE_LAYER))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"layers": ()}, "at least one layer"),
        ({"num_microbatches": 0}, "at least one layer and one microbatch"),
        ({"layers": (0, 2, 1)}, "strictly increasing"),
        ({"layers": (0, 1, 1)}, "strictly increasing"),
        ({"layers": (-1, 0)}, "strictly increasing"),
        ({"num_slots": 0}, "num_slots must be at least 1, found 0"),
        ({"num_cells": 2}, "num_cells must be at least 3, found 2"),
        ({"num_recorded_cells": 0}, "num_recorded_cells must be at least 1"),
        ({"num_gradient_slots": 0}, "num_gradient_slots must be at least 1"),
        ({"num_staging": 0}, "num_staging must be at least 1"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Shape(**{"layers": (0, 1), "num_microbatches": 1, **settings})
