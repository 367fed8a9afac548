"""The planner: ledgers add up, more memory is never slower, what is too little is said, in seconds.

Plans are made for Llama shapes on an H200 (its figures, l2l/hardware.py). Nothing runs and nothing
is allocated: a plan is a function of sizes and costs (`Problem`), a machine and a budget.
"""

import dataclasses
import re
import time
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import inside
import pytest
import torch
from families import build_llama
from sampled import sampled
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

import l2l
from l2l.bench.workload import Workload
from l2l.device.byte_size import parse_bytes
from l2l.parameter_server import UpdatePolicy
from l2l.planner import STATE_ON_HOST, Decisions, DoesNotFitError, Plan, Together
from l2l.planner.cost_model import CostModel
from l2l.planner.decisions import ALWAYS
from l2l.planner.hardware import H200 as WITH_CONTEXT
from l2l.planner.layer_cost import count_pass
from l2l.planner.problem import Problem
from l2l.planner.search import Candidate, find_plan

H200 = dataclasses.replace(WITH_CONTEXT, context_bytes=0)  # budgets are those of tensors

GIB = 2**30
META = torch.device("meta")
NUM_LAYERS = 10
BUDGETS = (2, 2.5, 3, 5, 10, 20, 48)  # GiB: from one row at a time to everything
SETTINGS: dict[str, dict[str, Any]] = {
    "exact": {"num_rows": 32},
    "clipped": {"num_rows": 32, "clip_norm": 1.0},
    "few rows": {"num_rows": 8, "clip_norm": 1.0},
    "8-bit": {"num_rows": 8, "clip_norm": 1.0, "optimizer": l2l.AdamW(moments="8bit")},
    "SGD": {"num_rows": 8, "clip_norm": 1.0, "optimizer": l2l.SGD(momentum=0.9)},
    "Adafactor": {"num_rows": 16, "optimizer": l2l.Adafactor()},
    "uncompiled": {"num_rows": 16, "compile": False},
    "large": {"num_rows": 64},
}


class CapturedError(Exception):
    """Stops a preview when its problem is known."""


def problem_for(model: nn.Module, **settings: Any) -> Problem:
    """What a plan is made for, as a preview of a model finds it."""
    found: list[Problem] = []

    def capture(problem: Problem, *_: object, **__: object) -> None:
        found.append(problem)
        raise CapturedError

    with mock.patch("l2l.planner.planning.find_plan", capture), pytest.raises(CapturedError):
        l2l.plan(model, hardware=H200, **settings)
    return found[0]


@cache
def problem_of(name: str) -> Problem:
    """The same for a setting."""
    shape = {"shape": "3.2b"} if name == "large" else {"shape": "1b", "num_layers": NUM_LAYERS}
    return problem_for(Workload(**shape).model(META), **SETTINGS[name])


@cache
def found(name: str, budget: float) -> Candidate | None:
    """The plan for a budget in GiB; None if nothing fits."""
    try:
        return find_plan(problem_of(name), H200, budget_bytes=int(budget * GIB), rows=None)
    except DoesNotFitError:
        return None


def all_found(name: str) -> list[Candidate]:
    return [one for budget in BUDGETS if (one := found(name, budget)) is not None]


every_setting = pytest.mark.parametrize("name", [name for name in SETTINGS if name != "large"])


# --------------------------------------------------------------------------------------------------
# Bytes


@every_setting
def test_the_ledger_adds_up(name: str) -> None:
    problem = problem_of(name)
    model = CostModel(problem, H200)
    for budget in BUDGETS:
        one = found(name, budget)
        if one is None:
            continue
        plan = Plan(ledger=one.ledger, choices=())
        assert all(line.nbytes > 0 for line in one.ledger)
        assert {line.place for line in one.ledger} == {"device", "host"}
        names = [(line.place, line.phase, line.purpose) for line in one.ledger]
        assert len(set(names)) == len(names)
        device = [line for line in one.ledger if line.place == "device"]
        always = sum(line.nbytes for line in device if line.phase == ALWAYS)
        for phase, nbytes in plan.phases().items():
            own = [line.nbytes for line in device if line.phase == phase]
            assert nbytes == always + sum(own)
        assert plan.total_bytes("device") == max(plan.phases().values())
        assert plan.total_bytes("device") == model.memory.peak_bytes(one.decisions)
        assert plan.total_bytes("device") <= budget * GIB
        host = {line.purpose: line.nbytes for line in one.ledger if line.place == "host"}
        assert plan.total_bytes("host") == sum(host.values())
        first = len(problem.layers) - one.decisions.num_device_states
        moved = sum(unit.state_bytes for unit in problem.layers[first:])
        assert host["parameter server"] == problem.server_bytes - moved


@pytest.mark.parametrize(("shape", "width"), [("1b", 2048), ("50b", 8192)])
def test_a_layer_takes_for_any_number_of_rows_what_counting_them_says(
    shape: str, width: int
) -> None:
    """Few rows: all gradients of weights at the end. Many: the middle of the perceptron."""
    model = Workload(shape=shape, num_layers=1).model(META)
    costs = problem_for(model, num_rows=64).costs[0]
    layer = model.model.layers[0].to(torch.bfloat16)
    rotary = model.model.rotary_emb

    def working_bytes(rows: int) -> int:
        hidden = torch.empty(rows, 1024, width, dtype=torch.bfloat16, device=META)
        positions = rotary(hidden, torch.empty(1, 1024, dtype=torch.int64, device=META))
        gradient = torch.empty_like(hidden)

        def passes() -> tuple[Tensor, ...]:
            output = layer(hidden, position_embeddings=positions, attention_mask=None)
            return torch.autograd.grad([output], [hidden, *layer.parameters()], [gradient])

        hidden.requires_grad_()
        return count_pass(passes, fused=True).working_bytes

    for rows in (1, 2, 3, 4, 6, 8, 16, 64, 256):
        expected, found = working_bytes(rows), costs.backward.at(rows).working_bytes
        assert expected <= found <= 1.15 * expected, rows
    assert working_bytes(64) > 1.2 * (32 * working_bytes(2) - 31 * working_bytes(1))


def test_what_every_choice_takes_is_in_the_ledger() -> None:
    """And nothing else changes with it, but for what it replaces."""
    model = CostModel(problem_of("clipped"), H200)
    start = Decisions(microbatch_tokens=4096)

    def lines(**choices: Any) -> dict[tuple[str, str], int]:
        ledger = model.memory.ledger(replace(start, **choices))
        return {
            (line.phase, line.purpose): line.nbytes for line in ledger if line.place == "device"
        }

    plain = lines()
    layer = model.problem.layers[-1]
    for choices, purpose, nbytes in (
        ({"num_tail": 3}, "tail: weights", 3 * layer.weight_bytes),
        ({"num_tail": 3}, "tail: gradients", 3 * layer.gradient_bytes),
        ({"num_tail": 3, "num_device_states": 2}, "tail: optimizer state", 2 * layer.state_bytes),
        ({"num_shared": 2}, "lent optimizer state", None),
        ({"keep": 0.2, "num_kept_cells": 3}, "kept results", None),
    ):
        changed = lines(**choices)
        assert (ALWAYS, purpose) not in plain
        assert changed[ALWAYS, purpose] > 0
        if nbytes is not None:
            assert changed[ALWAYS, purpose] == nbytes
    assert lines(num_slots=3)[ALWAYS, "weight slots"] == 3 * layer.weight_bytes
    pieces = lines(piece_tokens=1024)
    assert {key for key in plain if plain[key] != pieces[key]} == {("epilogue", "a piece at work")}
    assert (ALWAYS, "gradient slots") in plain
    assert ("backward", "gradient slots") in lines(shares_memory=True)


def test_device_memory_of_streamed_layers_does_not_depend_on_their_number() -> None:
    problem = problem_of("exact")
    deep = replace(problem, layers=problem.layers * 4, costs=problem.costs * 4)
    for decisions in (Decisions(), Decisions(keep=0.16, num_kept_cells=3, shares_memory=True)):
        peaks = [CostModel(one, H200).memory.peak_bytes(decisions) for one in (problem, deep)]
        assert peaks[0] == peaks[1]


@pytest.mark.parametrize(
    "name",
    sampled(
        [name for name in SETTINGS if name != "large"],
        lambda name: name in ("exact", "clipped", "8-bit"),
    ),
)
def test_too_small_a_budget_is_refused_with_one_that_fits(name: str) -> None:
    problem = problem_of(name)
    with pytest.raises(DoesNotFitError) as refused:
        find_plan(problem, H200, budget_bytes=GIB // 4, rows=None)
    text = str(refused.value)
    assert "256.00 MiB" in text
    advice = re.search(r"device_memory='(\d+MiB)'", text)
    assert advice is not None
    enough = parse_bytes(advice[1], name="")
    made = find_plan(problem, H200, budget_bytes=enough, rows=None)
    assert Plan(ledger=made.ledger, choices=()).total_bytes("device") <= enough
    with pytest.raises(DoesNotFitError):
        find_plan(problem, H200, budget_bytes=enough - (2 << 20), rows=None)


def test_a_given_microbatch_is_kept_and_may_be_what_does_not_fit() -> None:
    problem = problem_of("exact")
    few = replace(problem, num_rows=8)
    for rows in (1, 3, 8):
        made = find_plan(few, H200, budget_bytes=6 * GIB, rows=rows)
        assert made.rows == rows
        assert made.decisions.microbatch_tokens == rows * problem.length
    with pytest.raises(DoesNotFitError, match=r"microbatches of 32 row"):
        find_plan(problem, H200, budget_bytes=3 * GIB, rows=32)


# --------------------------------------------------------------------------------------------------
# Seconds


def assert_never_slower(plans: list[Candidate]) -> None:
    best = plans[0].seconds
    for one in plans:
        assert one.seconds <= 1.03 * best, one.decisions  # candidates are ranked by a rough formula
        best = min(best, one.seconds)


def test_layers_in_float32_are_planned_with_the_rate_of_float32() -> None:
    plans = [
        find_plan(
            replace(problem_of("exact"), is_single=is_single), H200, budget_bytes=8 * GIB, rows=None
        )
        for is_single in (False, True)
    ]
    assert plans[1].seconds > 4 * plans[0].seconds
    assert plans[1].bound == "compute"


@every_setting
def test_more_memory_is_never_slower(name: str) -> None:
    plans = all_found(name)
    assert len(plans) >= 5
    assert_never_slower(plans)
    # With Adafactor weights cross the link both ways, and are updated on the device operation by
    # operation, whatever the budget.
    assert plans[-1].seconds < (0.87 if name == "Adafactor" else 0.8) * plans[0].seconds


def test_more_memory_is_never_slower_for_a_larger_model() -> None:
    plans = [found("large", budget) for budget in (8, 16, 20, 32)]
    assert_never_slower([one for one in plans if one is not None])


def test_twice_the_tokens_take_twice_the_time_where_the_device_is_what_is_slow() -> None:
    problem = problem_of("exact")
    one, two = (
        find_plan(replace(problem, num_rows=rows), H200, budget_bytes=8 * GIB, rows=None)
        for rows in (32, 64)
    )
    assert one.bound == two.bound == "compute"
    assert two.seconds / one.seconds == pytest.approx(2, rel=0.1)


def test_few_tokens_take_as_long_as_the_host_or_the_link() -> None:
    problem = problem_of("clipped")
    one, two = (
        find_plan(replace(problem, num_rows=rows), H200, budget_bytes=4 * GIB, rows=None)
        for rows in (1, 2)
    )
    assert one.bound in ("host", "link")
    assert two.seconds / one.seconds < 1.3


def test_small_passes_take_as_long_as_the_host_needs_to_submit_them() -> None:
    problem = problem_of("exact")
    slow = replace(H200, launch_seconds=1e-4)  # then a pass takes 15 to 30 ms to submit
    quick, waiting = CostModel(problem, H200), CostModel(problem, slow)
    for kind in ("forward", "backward", "kept_forward", "kept_backward"):
        least = waiting.pass_seconds(0, kind, 1)
        assert least > 3 * quick.pass_seconds(0, kind, 1)
        assert waiting.pass_seconds(0, kind, 2) == least
        assert waiting.pass_seconds(0, kind, 1000) == quick.pass_seconds(0, kind, 1000)
    few = problem_of("few rows")
    rows = [
        sum(find_plan(few, one, budget_bytes=size * GIB, rows=None).rows for size in (4, 10))
        for one in (H200, slow)
    ]
    assert rows[0] < rows[1]  # fewer passes


def test_faster_machines_are_faster_at_what_they_are_faster_at() -> None:
    problem = problem_of("exact")
    arithmetic = replace(H200, matrix_rate=2 * H200.matrix_rate, memory_rate=2 * H200.memory_rate)
    now, later = (
        find_plan(problem, machine, budget_bytes=8 * GIB, rows=None).seconds
        for machine in (H200, arithmetic)
    )
    assert 0.45 < later / now < 0.85
    slow_host = replace(H200, host_rate=H200.host_rate / 20)
    made = find_plan(problem, slow_host, budget_bytes=3 * GIB, rows=None)
    assert made.bound in ("host", "link")
    assert made.seconds > now


@every_setting
def test_the_formula_and_the_simulation_agree(name: str) -> None:
    model = CostModel(problem_of(name), H200)
    for one in all_found(name):
        simulated = model.simulate(one.decisions).seconds
        assert simulated == one.seconds
        assert model.estimate(one.decisions) == pytest.approx(simulated, rel=0.35)


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_they_agree_on_choices_that_are_not_the_best_too(rows: int) -> None:
    model = CostModel(problem_of("clipped"), H200)
    for choices in (
        {},
        {"num_tail": 4},
        {"num_tail": 4, "num_device_states": 4},
        {"num_shared": 6},
        {"halves": True},
        {"halves": True, "num_shared": 3, "num_tail": 2, "num_device_states": 1},
        {"keep": 0.16, "num_kept_cells": 3},
        {"piece_tokens": 512, "shares_memory": True},
        {"num_tail": NUM_LAYERS, "num_device_states": NUM_LAYERS, "outer_state": True},
    ):
        decisions = Decisions(microbatch_tokens=rows * 1024, **choices)
        estimated = model.estimate(decisions)
        simulated = model.simulate(decisions).seconds
        assert estimated == pytest.approx(simulated, rel=0.35), choices


def update_seconds_of(model: CostModel, **choices: Any) -> float:
    """What the host does of layers before they are fetched, in a simulated step."""
    spans = model.simulate(Decisions(microbatch_tokens=4096, **choices)).trace.spans
    late = re.compile(r"update L\d+ host \w+ late( weights)?$")
    lines = [span for span in spans if late.match(span.text)]
    return sum(span.end - span.start for span in lines)


@pytest.mark.parametrize("name", ["clipped", "8-bit"])
def test_weights_alone_are_sooner_done_and_both_halves_later(name: str) -> None:
    model = CostModel(problem_of(name), H200)
    whole = model.update_seconds(1e9)
    first, last = (model.update_seconds(1e9, half=half) for half in ("weights", "moments"))
    assert max(first, last) < whole < first + last
    assert update_seconds_of(model, halves=True) < update_seconds_of(model)


@pytest.mark.parametrize("halves", [False, True])
def test_lending_state_does_not_spare_the_memory_of_the_host(halves: bool) -> None:
    """It is read and written to be lent as it is to be updated."""
    model = CostModel(problem_of("few rows"), H200)
    numbers = range(0, NUM_LAYERS - 1, 2)
    start = Decisions(microbatch_tokens=4096, halves=halves)
    beside = [model.beside_forward(replace(start, num_shared=number)) for number in numbers]
    assert beside == sorted(set(beside))
    alone, *helped = (update_seconds_of(model, num_shared=n, halves=halves) for n in numbers)
    assert min(helped) > 0.95 * alone
    fast = replace(H200, host_rate=1e3 * H200.host_rate)
    model = CostModel(replace(model.problem, eight_bit=True), fast)  # bound by arithmetic
    alone, *helped = (update_seconds_of(model, num_shared=n, halves=halves) for n in numbers)
    assert helped == pytest.approx([alone * (1 - n / NUM_LAYERS) for n in numbers[1:]])


def test_nothing_is_moved_beside_the_forward_pass_where_nothing_is_streamed() -> None:
    model = CostModel(problem_of("clipped"), H200)
    assert model.beside_forward(Decisions(num_tail=NUM_LAYERS)) == 0
    assert model.beside_forward(Decisions(num_tail=1)) > 0


def test_a_plan_takes_seconds() -> None:
    problem = problem_of("large")
    start = time.perf_counter()
    find_plan(problem, H200, budget_bytes=24 * GIB, rows=None)
    assert time.perf_counter() - start < 10


# --------------------------------------------------------------------------------------------------
# Choices


def chosen(*names: str) -> list[Decisions]:
    return [one.decisions for name in names for one in all_found(name)]


@pytest.mark.parametrize(
    "choice",
    [
        "num_tail",
        "num_device_states",
        "piece_tokens",
        "keep",
        "num_kept_cells",
        "num_shared",
        "halves",
        "shares_memory",
        "outer_state",
    ],
)
def test_every_choice_is_made_somewhere_and_left_elsewhere(choice: str) -> None:
    values = {getattr(one, choice) for one in chosen("exact", "clipped", "few rows", "8-bit")}
    assert getattr(Decisions(), choice) in values
    assert len(values) > 1


def test_updates_are_left_to_the_next_step_where_the_host_is_slow() -> None:
    problem = replace(problem_of("exact"), num_rows=4)
    made = find_plan(problem, H200, budget_bytes=3 * GIB, rows=None)
    assert problem.policy is UpdatePolicy.EAGER
    assert made.decisions.num_late > 0
    assert not any(one.num_late for one in chosen("Adafactor"))


def test_late_updates_are_done_in_halves_where_the_forward_pass_waits_for_them() -> None:
    problem, slow = problem_of("clipped"), replace(H200, host_rate=H200.host_rate / 2.4)
    made = find_plan(problem, slow, budget_bytes=3 * GIB, rows=None)
    whole, halved = (
        find_plan(problem, slow, budget_bytes=3 * GIB, rows=None, chosen={"halves": halves})
        for halves in (False, True)
    )
    assert whole.bound == "host"
    assert made.decisions.halves
    assert halved.decisions.halves
    assert not whole.decisions.halves
    assert made.seconds <= halved.seconds < whole.seconds


def test_hidden_states_stay_between_layers_where_there_is_room() -> None:
    """Also where nothing would wait for their copies: BERT-Large in 2 GiB."""
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
    with META:
        model = BertForSequenceClassification(BertConfig(**shape, num_hidden_layers=24))
        rows = {"input_ids": torch.zeros(256, 512, dtype=torch.long)}
        rows["labels"] = torch.zeros(256, dtype=torch.long)
    problem = problem_for(model, batch=rows)
    found, fewer = (
        find_plan(problem, H200, budget_bytes=2 * GIB, rows=None, chosen=chosen)
        for chosen in ({}, {"num_cells": 6})
    )
    assert found.decisions.num_tail < 24
    assert found.decisions.num_cells == found.decisions.num_microbatches(problem) + 2
    assert 0.99 * fewer.seconds < found.seconds <= fewer.seconds


def test_what_has_no_halves_is_updated_at_once() -> None:
    assert problem_of("clipped").has_halves
    assert problem_of("8-bit").has_halves
    for name in ("SGD", "Adafactor"):
        assert not problem_of(name).has_halves
        assert not any(one.halves for one in chosen(name))
    without = replace(problem_of("8-bit"), has_halves=False)
    assert found("8-bit", 3).decisions.halves
    assert not find_plan(without, H200, budget_bytes=3 * GIB, rows=None).decisions.halves


def test_microbatches_grow_with_the_budget() -> None:
    rows = [one.rows for one in all_found("exact")]
    assert rows[0] < rows[-1] == max(rows)


def test_with_room_for_everything_everything_stays() -> None:
    one = found("clipped", 48)
    assert one is not None
    assert one.decisions.num_tail == one.decisions.num_device_states == NUM_LAYERS
    assert one.decisions.outer_state
    assert all(line.purpose != "weight slots" for line in one.ledger)


def test_an_optimizer_without_state_has_none_on_the_device() -> None:
    assert all(one.num_device_states == one.num_shared == 0 for one in chosen("Adafactor"))


def test_what_is_not_compiled_keeps_nothing() -> None:
    assert all(one.keep == one.num_kept_cells == 0 for one in chosen("uncompiled"))


def test_nothing_is_kept_that_the_host_has_no_room_for() -> None:
    problem = problem_of("Adafactor")
    keeping = next(one for one in all_found("Adafactor") if one.decisions.num_kept_cells)
    taken = sum(line.nbytes for line in keeping.ledger if line.place == "host")
    kept = {line.purpose: line.nbytes for line in keeping.ledger}["stash: kept results"]
    assert kept > 0
    full = replace(problem, host_limit_bytes=taken - kept)
    for budget in BUDGETS[3:]:
        made = find_plan(full, H200, budget_bytes=int(budget * GIB), rows=None)
        if made.decisions.num_kept_cells:
            assert sum(one.nbytes for one in made.ledger if one.place == "host") <= taken - kept


def host_bytes(one: Candidate) -> int:
    return sum(line.nbytes for line in one.ledger if line.place == "host")


def test_no_more_updates_are_left_than_the_host_has_room_for() -> None:
    problem, slow = problem_of("exact"), replace(H200, host_rate=20e9)
    start, staging = Decisions(microbatch_tokens=4096), problem.layers[0].staging_bytes
    free = CostModel(problem, slow)
    late = free.with_late(start)
    assert late.num_late == len(problem.layers) - 2  # of two, updates are done under backward
    lines = {line.purpose: line.nbytes for line in free.memory.ledger(late)}
    assert lines["gradients of late updates"] == late.num_late * staging
    for number in (0, 1, 3):
        room = free.memory.host_bytes(start) + number * staging + staging // 2
        tight = replace(problem, host_limit_bytes=room)
        assert CostModel(tight, slow).with_late(start).num_late == number
        made = find_plan(tight, slow, budget_bytes=3 * GIB, rows=4)
        assert host_bytes(made) <= room


@pytest.mark.parametrize("num_late", [0, 3])
def test_an_engine_takes_the_host_memory_of_its_plan(num_late: int) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 256, "vocab_size": 512}

    def build() -> nn.Module:
        return build_llama(num_hidden_layers=6, **sizes)

    ids = torch.randint(0, 512, (8, 32))
    overrides = {"num_late": num_late, "num_tail": 0, "microbatch_tokens": 64}
    settings = {"device": "cpu", "device_memory": "256MiB", "overrides": overrides}
    settings["prove"] = False  # whose small microbatches have a stash of their own
    with inside.engine(build(), **settings) as engine:
        engine.step({"input_ids": ids, "labels": ids})
        planned = inside.planning(engine)._candidate
        assert planned is not None
        taken = sum(line.nbytes for line in engine.plan.ledger if line.place == "host")
    assert 0.99 * host_bytes(planned) < taken <= host_bytes(planned)
    with inside.engine(build(), **settings, host_memory=host_bytes(planned)) as engine:
        engine.step({"input_ids": ids, "labels": ids})
        planned, decisions = engine.plan, inside.planning(engine).decisions
        longer = torch.randint(0, 512, (8, 256))
        with pytest.raises(
            ValueError, match=r"the step needs .* of host memory \(parameter server"
        ):
            engine.step({"input_ids": longer, "labels": longer})
        assert inside.planning(engine).decisions == decisions
        engine.step({"input_ids": ids, "labels": ids})  # goes on as before
        assert engine.plan.choices == planned.choices


def test_choices_that_were_made_are_not_made_again() -> None:
    problem = problem_of("clipped")
    chosen = {"num_tail": 3, "num_device_states": 1, "num_shared": 2, "piece_tokens": 256}
    made = find_plan(problem, H200, budget_bytes=24 * GIB, rows=None, chosen=chosen)
    assert all(getattr(made.decisions, name) == value for name, value in chosen.items())


def test_overriding_what_is_not_a_choice_names_those_that_are() -> None:
    assert Decisions().override({"num_tail": 2}).num_tail == 2
    assert Decisions(num_tail=1).override({}) == Decisions(num_tail=1)
    with pytest.raises(ValueError, match=r"\['number_of_slots', 'tail'\].*num_slots.*num_tail"):
        Decisions().override({"tail": 1, "number_of_slots": 2, "keep": 0.1})


def test_shared_layers_are_spread_over_those_that_are_streamed() -> None:
    assert Decisions().shared_layers(8) == frozenset()
    assert Decisions(num_shared=2).shared_layers(8) == {2, 6}
    assert Decisions(num_shared=9, num_tail=4).shared_layers(8) == {0, 1, 2, 3}
    assert Decisions(num_shared=1, num_tail=8).shared_layers(8) == frozenset()


# --------------------------------------------------------------------------------------------------
# Several devices


def test_a_share_of_a_rank_and_what_it_says_to_others() -> None:
    world = Together(num_ranks=32, per_host=8, near_rate=1e9, far_rate=1e8)
    assert (world.num_shares, world.num_copies) == (8, 4)
    alone = Together()
    assert (alone.num_shares, alone.num_copies, alone.contention) == (1, 1, 1.0)
    assert world.gather_seconds(8e9) == pytest.approx(7.0, rel=1e-3)
    across = 2 * 1e9 * 3 / 4 / 1e8
    assert world.reduce_seconds(8e9) == pytest.approx(7.0 + across, rel=1e-3)
    assert replace(world, host_speed=2.0).contention == 4.0


def test_devices_that_share_everything_are_as_fast_as_what_joins_them() -> None:
    problem = replace(problem_of("exact"), outer=())
    made = find_plan(problem, H200, budget_bytes=8 * GIB, rows=None)
    decisions = made.decisions.override(STATE_ON_HOST)

    def seconds(**world: float) -> float:
        own = replace(problem, together=Together(**world))
        return CostModel(own, H200).simulate(decisions).seconds

    alone, together = seconds(), seconds(num_ranks=8, per_host=8)
    assert together <= 1.01 * alone
    slow = seconds(num_ranks=8, per_host=8, near_rate=5e9)
    slower = seconds(num_ranks=8, per_host=8, near_rate=1e9)
    assert together < slow < slower
    busy = seconds(num_ranks=8, per_host=8, host_speed=0.5)
    assert busy > together
    far = seconds(num_ranks=16, per_host=8, far_rate=1e8)
    assert far > together


def test_a_step_works_out_no_sizes_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """It did so for every layer, as often as there are layers."""
    worked_out: list[str] = []
    unit_size = l2l.planner.subject.unit_size

    def counted(form: Any) -> Any:
        worked_out.append(form.name)
        return unit_size(form)

    monkeypatch.setattr(l2l.planner.subject, "unit_size", counted)
    ids = torch.randint(3, 60, (2, 8))
    with inside.engine(build_llama(num_hidden_layers=6), device="cpu", prove=False) as engine:
        for _ in range(3):
            engine.step({"input_ids": ids, "labels": ids})
    assert sorted(worked_out) == [f"L{index}" for index in range(6)]
