"""Every wait of a schedule matters, shown by running it without.

The checking device can run any lane ahead of all others as far as its waits allow ([Note: hostile
order] in device.py). Under every such order a whole schedule gives the bits of plain PyTorch. With
one wait deleted, the order that favours the waiting lane gives something else, or breaks: for each
wait of each schedule here, in real steps.

The model is tiny, and made so that everything that moves is needed and different: layers get a
tensor besides the hidden state (the recorded cells), each microbatch has its own rows, and two
steps with momentum are taken, so that an update that is late or skipped shows.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import train_plain
from torch import Tensor, nn

import l2l
from l2l.device import CheckingDevice, QueuedEvent
from l2l.engine import Engine
from l2l.schedule import Lane, Schedule, Shape, Wait, make_schedule

WIDTH = 8
CLASSES = 3
ROWS = 5
MICROBATCH_ROWS = 2  # three microbatches, the last with one row
SGD = {"lr": 0.1, "momentum": 0.9}
GOLDEN = Path(__file__).parent / "schedules" / "four_layers_three_microbatches.txt"
ORDERS = (None, *Lane)

every_order = pytest.mark.parametrize(
    "first", ORDERS, ids=lambda lane: lane.value if lane else "default"
)

Result = tuple[list[float], dict[str, Tensor]]
Change = Callable[[nn.Module], None]
MakeSchedule = Callable[[Shape], Schedule]


class ScaledLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, scale: Tensor) -> Tensor:
        return hidden + scale * torch.tanh(self.linear(hidden))


class ScaledClassifier(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(ScaledLayer() for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden, scale = self.entry(inputs), 1 + inputs.mean(dim=1, keepdim=True)
        for layer in self.layers:
            hidden = layer(hidden, scale)
        logits = self.head(hidden)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def build(num_layers: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return ScaledClassifier(num_layers)


def make_batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "inputs": torch.randn(ROWS, WIDTH, generator=generator),
        "labels": torch.randint(0, CLASSES, (ROWS,), generator=generator),
    }


def leave(model: nn.Module) -> None:
    """Change nothing."""


def freeze_below(model: nn.Module) -> None:
    for module in (model.entry, model.head, *model.layers[:2]):
        module.requires_grad_(False)


def plain_result(change: Change = leave) -> Result:
    model = build()
    change(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, foreach=False, **SGD)
    batches = [make_batch(0), make_batch(1)]
    losses = train_plain(model, batches, optimizer=optimizer, rule="rows", size=MICROBATCH_ROWS)
    return losses, model.state_dict()


def make_engine(model: nn.Module, first: Lane | None, **settings: Any) -> Engine:
    return Engine(
        model,
        optimizer=l2l.SGD(**SGD),
        device=CheckingDevice(first=first),
        microbatch_size=MICROBATCH_ROWS,
        precision="float32",
        kernel="readable",
        **settings,
    )


def engine_shape(engine: Engine, *, training: bool = True) -> Shape:
    return engine._shape(-(-ROWS // MICROBATCH_ROWS), training=training)


def engine_result(
    schedule: MakeSchedule, first: Lane | None, *, change: Change = leave, **settings: Any
) -> Result:
    """Losses and weights of two steps with a given schedule, submitted before anything is read."""
    model = build()
    change(model)
    engine = make_engine(model, first, **settings)
    shape = engine_shape(engine)
    engine._schedules[shape] = schedule(shape)
    reports = [engine.step(make_batch(seed)) for seed in range(2)]
    losses = [report.loss for report in reports]
    engine.close()
    return losses, model.state_dict()


def is_same(found: Result, expected: Result) -> bool:
    return found[0] == expected[0] and all(
        torch.equal(tensor, expected[1][name]) for name, tensor in found[1].items()
    )


def with_numbers(**numbers: int) -> MakeSchedule:
    return lambda shape: make_schedule(dataclasses.replace(shape, **numbers))


def golden_schedule(shape: Shape) -> Schedule:
    return Schedule.parse(
        GOLDEN.read_text(), dataclasses.replace(shape, num_cells=4, num_staging=2)
    )


@dataclasses.dataclass(frozen=True)
class Case:
    """A schedule to take waits from, and the model it is run with."""

    schedule: MakeSchedule
    change: Change = leave
    stash: str = "host"


CASES = {
    "golden": Case(golden_schedule),
    "engine": Case(make_schedule),
    "tightest": Case(
        with_numbers(
            num_slots=1, num_cells=3, num_recorded_cells=1, num_gradient_slots=1, num_staging=1
        )
    ),
    "frozen": Case(with_numbers(num_cells=4, num_gradient_slots=1), change=freeze_below),
    "stash_on_device": Case(golden_schedule, stash="device"),
}

every_case = pytest.mark.parametrize("name", CASES)


@every_order
@every_case
def test_every_order_that_waits_allow_gives_the_bits_of_plain_pytorch(
    name: str, first: Lane | None
) -> None:
    case = CASES[name]
    found = engine_result(case.schedule, first, change=case.change, stash=case.stash)
    assert is_same(found, plain_result(case.change))


def survives(case: Case, schedule: Schedule, expected: Result, *, first: Lane) -> bool:
    """Whether two steps with a broken schedule still give the right bits."""
    try:
        found = engine_result(lambda _: schedule, first, change=case.change, stash=case.stash)
    except (AssertionError, KeyError, RuntimeError):  # not resident; not written yet; no memory
        return False
    return is_same(found, expected)


@pytest.mark.parametrize("name", [name for name in CASES if name != "stash_on_device"])
def test_a_step_fails_when_any_wait_is_deleted(name: str) -> None:
    """Already in the one order that favours the lane which no longer waits."""
    case = CASES[name]
    model = build()
    case.change(model)
    with make_engine(model, None) as engine:
        schedule = case.schedule(engine_shape(engine))
    expected = plain_result(case.change)
    waits = [(n, line) for n, line in enumerate(schedule.lines) if isinstance(line, Wait)]
    for lane in {wait.lane for _, wait in waits}:
        assert survives(case, schedule, expected, first=lane), "as long as none is deleted"
    survivors = []
    for position, wait in waits:
        lines = schedule.lines[:position] + schedule.lines[position + 1 :]
        broken = dataclasses.replace(schedule, lines=lines)
        if survives(case, broken, expected, first=wait.lane):
            survivors.append(f"{position}: {wait}")
    assert len(waits) > 50
    assert not survivors, f"{len(survivors)} of {len(waits)} waits were not missed: {survivors}"


def test_the_golden_schedule_has_waits_of_every_kind() -> None:
    """Lane that waits, and verb of the line it waits for."""
    with make_engine(build(), None) as engine:
        schedule = golden_schedule(engine_shape(engine))
    kinds = {
        f"{line.lane.value} waits {line.action.verb}"
        for line in schedule.lines
        if isinstance(line, Wait)
    }
    assert kinds == {
        "fetch waits release",  # the slot is reused
        "compute waits fetch",  # the weights are there
        "compute waits drain",  # the gradient slot is reused
        "compute waits stash",  # the cell is reused
        "compute waits unstash",  # the value is there
        "stash waits prologue",
        "stash waits forward",
        "stash waits epilogue",
        "stash waits backward",
        "unstash waits stash",  # the value is kept, or the cell is reused
        "unstash waits forward",  # the cell is reused
        "unstash waits epilogue",
        "unstash waits backward",
        "drain waits epilogue",  # the losses are there
        "drain waits backward",
        "drain waits regress",
        "drain waits update",  # the staging is reused
        "update waits drain",
    }


def evaluated(schedule: MakeSchedule, first: Lane | None) -> tuple[float, Tensor]:
    engine = make_engine(build(), first)
    shape = engine_shape(engine, training=False)
    engine._schedules[shape] = schedule(shape)
    found = engine.evaluate(make_batch(0)), engine.predict(make_batch(1))["logits"]
    engine.close()
    return found


def test_an_evaluation_fails_when_any_wait_is_deleted() -> None:
    def same(one: tuple[float, Tensor], other: tuple[float, Tensor]) -> bool:
        return one[0] == other[0] and torch.equal(one[1], other[1])

    make = with_numbers(num_cells=4)
    with make_engine(build(), None) as engine:
        schedule = make(engine_shape(engine, training=False))
    expected = evaluated(make_schedule, None)
    for first in ORDERS:
        assert same(evaluated(make, first), expected)
    survivors = []
    for position, wait in enumerate(schedule.lines):
        if not isinstance(wait, Wait):
            continue
        lines = schedule.lines[:position] + schedule.lines[position + 1 :]
        broken = dataclasses.replace(schedule, lines=lines)
        try:
            found = evaluated(lambda _, broken=broken: broken, wait.lane)
        except (AssertionError, KeyError, RuntimeError):
            continue
        if same(found, expected):
            survivors.append(f"{position}: {wait}")
    assert not survivors


# --------------------------------------------------------------------------------------------------
# From step to step


def test_a_fetch_that_does_not_wait_for_the_last_update_gets_stale_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = plain_result()
    assert is_same(engine_result(make_schedule, Lane.FETCH), expected)
    wait = CheckingDevice.wait

    def wait_for_no_update(device: CheckingDevice, lane: Lane, event: QueuedEvent) -> None:
        if (lane, event.lane) != (Lane.FETCH, Lane.UPDATE):
            wait(device, lane, event)

    monkeypatch.setattr(CheckingDevice, "wait", wait_for_no_update)
    losses, weights = engine_result(make_schedule, Lane.FETCH)
    assert losses[0] == expected[0][0]
    assert losses[1] != expected[0][1]
    assert not is_same((losses, weights), expected)


@every_order
def test_evaluating_between_steps_sees_the_updated_weights(first: Lane | None) -> None:
    model = build()
    engine = make_engine(model, first)
    engine.step(make_batch(0))
    between = engine.evaluate(make_batch(1))
    engine.step(make_batch(1))
    engine.close()

    plain = build()
    optimizer = torch.optim.SGD(plain.parameters(), foreach=False, **SGD)
    settings = {"optimizer": optimizer, "rule": "rows", "size": MICROBATCH_ROWS}
    train_plain(plain, [make_batch(0)], **settings)
    assert train_plain(plain, [make_batch(1)], **settings) == [between]
    for name, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


# --------------------------------------------------------------------------------------------------
# The checking device


def test_lanes_that_wait_for_each_other_are_a_deadlock() -> None:
    device = CheckingDevice(first=Lane.COMPUTE)
    device.wait(Lane.COMPUTE, QueuedEvent(device, Lane.FETCH, 2))
    device.submit(Lane.COMPUTE, "release L0 S0", lambda: None)
    device.wait(Lane.FETCH, device.record(Lane.COMPUTE))
    device.submit(Lane.FETCH, "fetch L1 S0", lambda: None)
    with pytest.raises(RuntimeError, match="deadlock: the compute lane waits for itself"):
        device.finish()


def test_a_schedule_in_which_a_wait_comes_before_its_line_does_not_run() -> None:
    """So a schedule cannot tell two lanes to wait for each other."""

    def crossed(shape: Shape) -> Schedule:
        lines = list(make_schedule(shape).lines)
        wait = next(n for n, line in enumerate(lines) if isinstance(line, Wait))
        action = lines.index(lines[wait].action)
        lines.insert(action, lines.pop(wait))
        return Schedule(shape=shape, lines=tuple(lines))

    with pytest.raises(KeyError):
        engine_result(crossed, Lane.COMPUTE)


def test_a_favoured_lane_runs_ahead_as_far_as_its_waits_allow() -> None:
    def order(first: Lane, *, waits: bool) -> list[str]:
        device, done = CheckingDevice(first=first), []
        for name in ("fetch L0", "fetch L1"):
            device.submit(Lane.FETCH, name, lambda name=name: done.append(name))
            fetched = device.record(Lane.FETCH)
            if waits:
                device.wait(Lane.COMPUTE, fetched)
            name = name.replace("fetch", "forward")
            device.submit(Lane.COMPUTE, name, lambda name=name: done.append(name))
        device.finish()
        return done

    each, fetches, passes = "fetch L0,forward L0", "fetch L0,fetch L1", "forward L0,forward L1"
    assert ",".join(order(Lane.FETCH, waits=True)) == f"{fetches},{passes}"
    assert ",".join(order(Lane.COMPUTE, waits=True)) == f"{each},{each.replace('0', '1')}"
    assert ",".join(order(Lane.COMPUTE, waits=False)) == f"{passes},{fetches}"


@pytest.mark.parametrize("first", [None, Lane.COMPUTE], ids=["default", "compute"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
def test_memory_is_nan_until_it_is_written(first: Lane | None, dtype: torch.dtype) -> None:
    device = CheckingDevice(first=first)
    for buffer in (device.empty(512), device.host_empty(512, registered=True)):
        assert buffer.dtype is torch.uint8
        assert buffer.view(dtype).isnan().all()
        buffer.zero_()
        device.poison(buffer)
        assert buffer.view(dtype).isnan().all()
    assert device.host_record(2, 3).isnan().all()
    assert device.host_record(2, 3).shape == (2, 3)
    device.close()


@every_order
def test_released_slots_are_nan(first: Lane | None) -> None:
    with make_engine(build(), first) as engine:
        engine.step(make_batch(0))
        slots = engine._transfer._slots
        assert set(slots) == {"S0", "S1", "SO"}
        for slot in slots.values():
            assert slot.view(torch.float32).isnan().all()


def test_values_kept_outside_cells_are_nan_after_the_step() -> None:
    with make_engine(build(), None) as engine:
        shape = engine_shape(engine)
        engine._schedules[shape] = golden_schedule(shape)
        engine.step(make_batch(0))
        pooled = [buffer for buffers in engine._stash._pool.values() for buffer in buffers]
        assert len(pooled) > 10
        for buffer in pooled:
            assert buffer.view(torch.float32).isnan().all()


def policy_result(
    schedule: Schedule | None, first: Lane | None, settings: dict[str, Any]
) -> Result:
    """Losses and weights of three steps; the schedule, if given, is that of the last two."""
    model = build()
    optimizer = settings.get("optimizer", l2l.SGD(**SGD))
    engine = Engine(
        model,
        device=CheckingDevice(first=first),
        microbatch_size=MICROBATCH_ROWS,
        precision="float32",
        kernel="readable",
        **{**settings, "optimizer": optimizer},
    )
    if schedule is not None:
        engine._schedules[schedule.shape] = schedule
    losses = [report.loss for report in [engine.step(make_batch(seed)) for seed in range(3)]]
    engine.close()
    return losses, model.state_dict()


POLICIES = {
    "just in time": {"update": "just in time"},
    "clipped": {"clip_norm": 0.05},
    "on the device": {"optimizer": l2l.Adafactor(lr=0.05)},
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_step_with_late_or_device_updates_fails_when_any_wait_is_deleted(name: str) -> None:
    settings = POLICIES[name]
    with make_engine(build(), None, **{k: v for k, v in settings.items() if k != "optimizer"}) as e:
        shape = engine_shape(e)
    if "optimizer" in settings:
        shape = dataclasses.replace(shape, device_updates=True)
    shape = dataclasses.replace(shape, pending=shape.late_units)  # as after the first step
    schedule = make_schedule(shape)
    expected = policy_result(None, None, settings)
    waits = [(n, line) for n, line in enumerate(schedule.lines) if isinstance(line, Wait)]
    survivors = []
    for lane in {wait.lane for _, wait in waits}:
        assert is_same(policy_result(schedule, lane, settings), expected), "none is deleted"
    for position, wait in waits:
        lines = schedule.lines[:position] + schedule.lines[position + 1 :]
        broken = dataclasses.replace(schedule, lines=lines)
        try:
            same = is_same(policy_result(broken, wait.lane, settings), expected)
        except (AssertionError, KeyError, RuntimeError):
            same = False
        if same:
            survivors.append(f"{position}: {wait}")
    assert len(waits) > 50
    assert not survivors, f"{len(survivors)} of {len(waits)} waits were not missed: {survivors}"
