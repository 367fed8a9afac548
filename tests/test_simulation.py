"""Schedules by the clock: what bounds a step, in closed form, and small steps computed by hand."""

import contextlib
import time
from collections.abc import Callable

import pytest

from l2l.planner.simulation import Cost, Simulation, simulate
from l2l.schedule import (
    NOTHING,
    Action,
    Lane,
    Line,
    Schedule,
    Shape,
    Wait,
    action,
    make_schedule,
    parse_line,
)

GIGABYTE = 10**9
RATES = {"fetch_rate": 1e9, "drain_rate": 1e9, "both_ways_rate": 1e9}
ANY_SHAPE = Shape(layers=(0,), num_microbatches=1)
COPIES = {"in": (Lane.FETCH, Lane.UNSTASH), "out": (Lane.DRAIN, Lane.STASH)}


def line(text: str) -> Action:
    """An action; places that do not matter here, the last ones, are left out."""
    for missing in range(8):
        with contextlib.suppress(ValueError):
            return action(text + f" {NOTHING}" * missing)
    raise ValueError(text)


def written(text: str) -> Schedule:
    """A schedule of `lane waits action`, `lane waits last` and `action` lines."""
    lines: list[Line] = []
    for one in text.strip().splitlines():
        lane, waits, awaited = one.strip().partition(" waits ")
        if awaited.startswith("last"):
            lines.append(parse_line(one))
        else:
            lines.append(Wait(Lane(lane), line(awaited)) if waits else line(lane))
    return Schedule(shape=ANY_SHAPE, lines=tuple(lines))


def by_lane(
    *, compute: float = 0.0, copy: float = 0.0, update: float = 0.0
) -> Callable[[Action], Cost]:
    """Seconds of passes, gigabytes of copies, seconds of updates."""

    def cost(action: Action) -> Cost:
        if action.lane is Lane.COMPUTE:
            return Cost(compute if action.kind in ("forward U m", "backward U m") else 0.0)
        if action.lane is Lane.UPDATE:
            return Cost(update)
        way = "in" if action.lane in COPIES["in"] else "out"
        is_weights = action.kind in ("fetch U", "drain U.grad")
        return Cost(link=way, nbytes=int(copy * GIGABYTE) if is_weights else 0)

    return cost


def spans(simulation: Simulation) -> dict[str, tuple[float, float]]:
    """When each line ran, by its words without the operands left out."""
    return {
        " ".join(word for word in span.text.split() if word != NOTHING): (span.start, span.end)
        for span in simulation.trace.spans
    }


# --------------------------------------------------------------------------------------------------
# What bounds a step

LAYERS = 12
MICROBATCHES = 4


def step(**changes: object) -> Schedule:
    settings = {"layers": tuple(range(LAYERS)), "num_microbatches": MICROBATCHES, **changes}
    return make_schedule(Shape(**settings))


def test_compute_bound():
    schedule = step()
    num_passes = schedule.count("forward U m") + schedule.count("backward U m")
    cost = by_lane(compute=1.0, copy=0.01, update=0.01)
    simulation = simulate(schedule, cost, **RATES)
    assert simulation.bound == "compute"
    assert num_passes < simulation.seconds < num_passes + 0.5  # first and last copies show
    assert simulation.busy["compute"] == pytest.approx(num_passes / simulation.seconds)
    assert simulation.busy["compute"] > 0.99 > 0.1 > simulation.busy["link"]
    assert simulate(schedule, by_lane(compute=1.0), **RATES).seconds == num_passes


def test_link_bound():
    schedule = step()
    num_fetches, num_drains = schedule.count("fetch U"), schedule.count("drain U.grad")
    cost = by_lane(compute=1e-6, copy=1.0, update=1e-6)
    simulation = simulate(schedule, cost, **RATES)
    assert simulation.bound == "link"
    assert num_fetches <= simulation.seconds < num_fetches + num_drains
    assert simulation.busy["link"] == pytest.approx(num_fetches / simulation.seconds)


def test_host_bound():
    schedule = step()
    num_updates = sum(action.lane is Lane.UPDATE for action in schedule.actions)
    cost = by_lane(compute=1e-6, copy=1e-6, update=1.0)
    simulation = simulate(schedule, cost, **RATES)
    assert simulation.bound == "host"
    assert simulation.seconds == pytest.approx(num_updates, rel=1e-3)
    assert simulation.busy["host"] == pytest.approx(1.0, rel=1e-3)


def test_late_updates_hide_under_the_next_forward():
    early = step(num_late=0)
    late_units = step(num_late=LAYERS + 1).shape.late_units
    late = step(num_late=LAYERS + 1, pending=late_units)
    cost = by_lane(compute=1.0, update=1.0)
    passes = 2 * LAYERS * MICROBATCHES
    for schedule in (early, late):
        seconds = simulate(schedule, cost, **RATES).seconds
        assert passes <= seconds <= passes + 4


def test_more_steps_change_nothing():
    for costs in ({"compute": 1.0}, {"update": 1.0}, {"copy": 1.0, "compute": 0.2, "update": 0.7}):
        three, seven = (
            simulate(step(), by_lane(**costs), **RATES, num_steps=num_steps).seconds
            for num_steps in (3, 7)
        )
        assert three == pytest.approx(seven)


# --------------------------------------------------------------------------------------------------
# By hand


def test_three_layers_by_hand():
    """Two slots; each pass takes 2 s, each copy 1 s, each update 3 s."""
    schedule = written(
        """
        fetch L0 S0
        fetch waits last L1
        fetch L1 S1
        compute waits fetch L0 S0
        forward L0 m0 S0
        release L0 S0
        fetch waits release L0 S0
        fetch waits last L2
        fetch L2 S0
        compute waits fetch L1 S1
        forward L1 m0 S1
        compute waits fetch L2 S0
        forward L2 m0 S0
        backward L2 m0 S0
        drain waits backward L2 m0 S0
        drain L2.grad G0 H0
        update waits drain L2.grad G0 H0
        update L2 host H0
        backward L1 m0 S1
        drain waits backward L1 m0 S1
        drain L1.grad G1 H1
        update waits drain L1.grad G1 H1
        update L1 host H1
        """
    )
    cost = by_lane(compute=2.0, copy=1.0, update=3.0)
    first = simulate(schedule, cost, **RATES, num_steps=1)
    assert spans(first) == {
        "fetch L0 S0": (0, 1),
        "fetch L1 S1": (1, 2),
        "forward L0 m0 S0": (1, 3),
        "release L0 S0": (3, 3),
        "fetch L2 S0": (3, 4),
        "forward L1 m0 S1": (3, 5),
        "forward L2 m0 S0": (5, 7),
        "backward L2 m0 S0": (7, 9),
        "drain L2.grad G0 H0": (9, 10),
        "update L2 host H0": (10, 13),
        "backward L1 m0 S1": (9, 11),
        "drain L1.grad G1 H1": (11, 12),
        "update L1 host H1": (13, 16),
    }
    assert first.seconds == 12  # the update lane goes on into the next step
    assert first.busy == {"compute": 10 / 12, "link": 3 / 12, "host": 6 / 12}
    assert first.bound == "compute"

    # The next step begins at 12; L1 can be fetched at 16 only, 4 s into it, not at 1.
    second = simulate(schedule, cost, **RATES, num_steps=2)
    found = spans(second)
    assert found["fetch L0 S0"] == (0, 1)
    assert found["fetch L1 S1"] == (4, 5)
    assert found["fetch L2 S0"] == (5, 6)
    assert found["forward L1 m0 S1"] == (5, 7)
    assert second.seconds == 14


def test_what_is_left_waits_for_the_last_drain_and_its_fetch_for_it():
    schedule = written(
        """
        update waits last drain
        update L0 host HL0 late
        fetch waits update L0 host HL0 late
        fetch L0 S0
        compute waits fetch L0 S0
        backward L0 m0 S0
        drain waits backward L0 m0 S0
        drain L0.grad G0 HL0
        """
    )
    cost = by_lane(compute=5.0, copy=1.0, update=2.0)
    simulation = simulate(schedule, cost, **RATES)
    assert spans(simulation) == {
        "update L0 host HL0 late": (0, 2),
        "fetch L0 S0": (2, 3),
        "backward L0 m0 S0": (3, 8),
        "drain L0.grad G0 HL0": (8, 9),
    }
    assert simulation.seconds == 9
    first = simulate(schedule, cost, **RATES, num_steps=1)
    assert first.seconds == 9


def test_a_fetch_waits_for_weights_and_a_drain_for_moments():
    """Halves of 2 s each, a pass of 0.5 s, copies of 1 s."""
    schedule = written(
        """
        update waits last drain
        update L0 host HL0 late weights
        update L0 host HL0 late moments
        fetch waits update L0 host HL0 late weights
        fetch L0 S0
        compute waits fetch L0 S0
        backward L0 m0 S0
        drain waits backward L0 m0 S0
        drain waits update L0 host HL0 late moments
        drain L0.grad G0 HL0
        """
    )
    simulation = simulate(schedule, by_lane(compute=0.5, copy=1.0, update=2.0), **RATES)
    assert spans(simulation) == {
        "update L0 host HL0 late weights": (0, 2),
        "update L0 host HL0 late moments": (2, 4),
        "fetch L0 S0": (2, 3),
        "backward L0 m0 S0": (3, 3.5),
        "drain L0.grad G0 HL0": (4, 5),
    }
    assert simulation.seconds == 5


@pytest.mark.parametrize(("late", "start"), [("", 5), ("late weights", 5), ("late moments", 0)])
def test_a_fetch_waits_for_weights_of_the_step_before_and_not_for_moments(late: str, start: int):
    schedule = written(
        f"""
        fetch waits last L0
        fetch L0 S0
        compute waits fetch L0 S0
        forward L0 m0 S0
        update waits forward L0 m0 S0
        update L0 host HL0 {late}
        """
    )
    simulation = simulate(schedule, by_lane(compute=1.0, copy=1.0, update=5.0), **RATES)
    assert spans(simulation)["fetch L0 S0"] == (start, start + 1)


def test_a_lane_goes_on_copying_before_others_that_wait_longer():
    schedule = written(
        """
        fetch L0 S0
        fetch h1 m0 C0
        fetch L1 S1
        fetch h2 m0 C1
        """
    )

    def cost(action: Action) -> Cost:
        return Cost(link="in", nbytes=2 * GIGABYTE)

    simulation = simulate(schedule, cost, **RATES)
    assert spans(simulation) == {
        "fetch L0 S0": (0, 2),
        "fetch L1 S1": (2, 4),
        "fetch h1 m0 C0": (4, 6),
        "fetch h2 m0 C1": (6, 8),
    }
    assert simulation.busy["link"] == 1.0


def test_a_lane_whose_next_copy_is_not_ready_lets_others_go_first():
    schedule = written(
        """
        fetch L0 S0
        fetch h1 m0 C0
        fetch waits fetch h1 m0 C0
        fetch L1 S1
        """
    )

    def cost(action: Action) -> Cost:
        return Cost(link="in", nbytes=2 * GIGABYTE)

    assert spans(simulate(schedule, cost, **RATES)) == {
        "fetch L0 S0": (0, 2),
        "fetch h1 m0 C0": (2, 4),
        "fetch L1 S1": (4, 6),
    }


def test_both_directions_at_once_are_slower():
    schedule = written(
        """
        fetch L0 S0
        drain h1 m0 C0
        """
    )
    sizes = {"fetch": 10 * GIGABYTE, "drain": 3 * GIGABYTE}

    def cost(action: Action) -> Cost:
        way = "in" if action.verb == "fetch" else "out"
        return Cost(link=way, nbytes=sizes[action.verb])

    rates = {"fetch_rate": 2e9, "drain_rate": 1.5e9, "both_ways_rate": 1e9}
    found = spans(simulate(schedule, cost, **rates))
    assert found["drain h1 m0 C0"] == pytest.approx((0, 3))
    assert found["fetch L0 S0"] == pytest.approx((0, 3 + 7 / 2))  # 3 GB at 1 GB/s, 7 at 2


def test_a_copy_may_take_time_on_its_lane_first():
    schedule = written("drain L0.grad G0 H0")
    simulation = simulate(schedule, lambda _: Cost(0.5, "out", GIGABYTE), **RATES)
    assert spans(simulation) == {"drain L0.grad G0 H0": (0.0, 1.5)}
    assert simulation.busy["link"] == 1.0


def test_a_line_that_repeats_is_awaited_where_it_came_last():
    schedule = written(
        """
        fetch L0 S0
        compute waits fetch L0 S0
        release L0 S0
        fetch waits release L0 S0
        fetch L0 S0
        compute waits fetch L0 S0
        forward L0 m0 S0
        """
    )
    found = spans(simulate(schedule, by_lane(compute=1.0, copy=1.0), **RATES))
    assert found["forward L0 m0 S0"] == (2, 3)


def test_a_wait_for_a_line_that_comes_later_is_an_error():
    with pytest.raises(ValueError, match="'compute waits fetch L0 S0' waits for a line that was"):
        simulate(written("compute waits fetch L0 S0\nfetch L0 S0"), by_lane(), **RATES)


def test_every_lane_and_every_action_is_in_the_trace():
    schedule = step()
    simulation = simulate(schedule, by_lane(compute=1.0, copy=0.1, update=0.1), **RATES)
    assert sorted(span.text for span in simulation.trace.spans) == sorted(
        map(str, schedule.actions)
    )
    assert all(span.end >= span.start >= 0 for span in simulation.trace.spans)


def test_thousands_of_lines_take_a_moment():
    schedule = step(layers=tuple(range(40)), num_microbatches=8)
    assert len(schedule.lines) > 4000
    start = time.perf_counter()
    simulate(schedule, by_lane(compute=1.0, copy=0.1, update=0.1), **RATES)
    assert time.perf_counter() - start < 1.0
