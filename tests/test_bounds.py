"""The speed of light of a step: from made-up rates and counts, and from those of a plan."""

from dataclasses import replace

import pytest
import torch
from test_comparison import measured, row_of

import l2l
from l2l.bench.comparison import describe
from l2l.bench.workload import Workload
from l2l.cli.report import summarise
from l2l.planner import H200, Bounds
from l2l.planner.bounds import Work
from l2l.train import Settings

MACHINE = replace(
    H200,
    matrix_rate=1e12,
    fetch_rate=10e9,
    drain_rate=5e9,
    both_ways_rate=4e9,
    host_rate=100e9,
    eight_bit_rate=1e9,
)
BOUNDS = Bounds(compute=1.0, link=2.0, host=0.5, lane="link")


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (Work(matrix_flops=3e12), (3.0, 0.0, 0.0)),
        (Work(bytes_in=20e9), (0.0, 2.0, 0.0)),
        (Work(bytes_out=20e9), (0.0, 4.0, 0.0)),
        (Work(bytes_in=24e9, bytes_out=4e9), (0.0, 1.0 + 2.0, 0.0)),  # both ways, then one
        (Work(num_updated=1e10, update_bytes=26.0), (0.0, 0.0, 2.6)),
        (Work(num_updated=1e10, update_bytes=8.0, eight_bit=True), (0.0, 0.0, 10.0)),
        (Work(num_updated=1e10, update_bytes=200.0, eight_bit=True), (0.0, 0.0, 20.0)),
    ],
)
def test_bounds_are_work_over_rates(work: Work, expected: tuple[float, float, float]) -> None:
    found = Bounds.of(work, MACHINE, lane="host")
    assert (found.compute, found.link, found.host) == pytest.approx(expected)


def test_a_step_reaches_a_share_of_its_bounds() -> None:
    assert BOUNDS.share(4.0) == 0.5
    assert BOUNDS.shares(4.0) == {"compute": 0.25, "link": 0.5, "host": 0.125}
    assert BOUNDS.describe(4.0) == (
        "the link at 50% of its rate; matrix products 25%, the host's memory 12%"
    )


def plan_of(num_layers: int, **settings) -> l2l.Plan:
    model = Workload(shape="1b", num_layers=num_layers).model(torch.device("meta"))
    streamed = {"num_tail": 0, "num_shared": 0, "keep": 0.0, "num_kept_cells": 0, "num_cells": 6}
    streamed |= {"outer_state": False, "num_head_slices": 0}
    settings = {"num_rows": 8, "length": 1024, "overrides": streamed, **settings}
    return l2l.plan(model, hardware=H200, microbatch_size=4, **settings)


def test_a_plan_counts_what_its_step_does() -> None:
    """By hand, for layers that are all streamed: what two layers more add."""
    fewer, more = (plan_of(number).bounds for number in (4, 6))
    assert fewer is not None
    assert more is not None
    hidden, tokens = 2048, 8 * 1024
    layer = hidden * (2 * hidden + 2 * 512) + 3 * hidden * 8192  # parameters in matrices
    scores = 2 * 2 * 1024 * hidden  # of the products of attention, for each token
    # Forward, and backward with a recomputation that leaves out its last product.
    flops = 2 * tokens * (4 * layer - hidden * 8192 * 1 + 4.5 * scores / 2)
    assert (more.compute - fewer.compute) * H200.matrix_rate == pytest.approx(2 * flops, rel=0.05)
    parameters = layer + 2 * hidden
    moved_bytes = 2 * parameters + 2 * tokens * hidden  # weights and hidden states, of 16 bits
    linked = (more.link - fewer.link) * H200.both_ways_rate
    assert 2 * moved_bytes < linked < 4 * moved_bytes  # twice inwards, with gradients outwards
    assert (more.host - fewer.host) * H200.host_rate == pytest.approx(2 * 26 * parameters, rel=0.01)


def test_no_plan_is_faster_than_its_bounds() -> None:
    for plan in (plan_of(4), plan_of(4, clip_norm=1.0), plan_of(4, device_memory="4GiB")):
        assert plan.bounds is not None
        assert plan.predicted_seconds is not None
        assert plan.bounds.lane == plan.bound
        shares = plan.bounds.shares(plan.predicted_seconds)
        assert 0 < max(shares.values()) <= 1.04  # layers run a little faster than was measured
        assert plan.bounds.describe(plan.predicted_seconds) in str(plan)


def test_the_benchmark_of_steps_names_the_lane_and_its_share() -> None:
    outcome = measured(65536 / 4.0, 3.9, device_memory="4GiB")
    assert outcome.measurement is not None
    outcome.measurement["bounds"] = {"compute": 1.0, "link": 2.0, "host": 0.5, "lane": "link"}
    table, data = describe([outcome])
    assert row_of(table, "engine 4GiB").endswith("link 50% yes")
    assert Bounds(**data["results"][0]["bounds"]) == BOUNDS


def test_a_report_has_the_median_share_of_the_lane() -> None:
    settings = Settings.of_table(
        {"model": {"folder": "m"}, "data": {"source": ["d.txt"]}, "output": {"folder": "o"}}
    )
    step = {"kind": "step", "loss": 1.0, "tokens": 8, "seconds": 1.0}
    told = [("host", 0.9), ("link", 0.2), ("link", 0.5), ("link", 0.6)]
    records = [
        {**step, "step": number, "bound": lane, "share_of_bound": share}
        for number, (lane, share) in enumerate(told, start=2)
    ]
    found = summarise(settings, [{**step, "step": 1}, *records])
    assert (found["bound"], found["share_of_bound"]) == ("link", 0.5)
    assert summarise(settings, [{**step, "step": 1}])["bound"] is None
