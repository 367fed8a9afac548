"""Checkpoints: what was saved is the state of one step, whole; training goes on from it exactly.

Engines of every kind are saved in the background and go on; one that is made anew, with other
weights and another seed, loads what was written and ends with the same bits: weights, masters,
moments, numbers of steps, buffers, loss scale. What the writers have met on the way (copies, waits,
updates that were still to come) is forced and looked for. Then everything that can go wrong.
"""

import dataclasses
import errno
import json
import logging
import os
import shutil
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import inside
import pytest
import torch
import torch.nn.functional as F
from families import FAMILIES, build_llama, causal_batch
from safetensors.torch import load_file, save_file
from sampled import sampled
from torch import Tensor, nn

import l2l
from l2l import files
from l2l.checkpoint import checkpoint
from l2l.checkpoint.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointFolder,
    FileRecord,
    Manifest,
    Saving,
    measure_disk,
)
from l2l.checkpoint.manifest import checksum_of
from l2l.device import CheckingDevice, UpdateFailedError
from l2l.distributed import World
from l2l.files import tensor_file
from l2l.parameter_server import Image, ParameterServer, Snapshot
from l2l.planner.hardware import H200
from l2l.schedule import Lane

WORDS, WIDTH, LENGTH = 11, 128, 2  # rows of a table that can be updated apart
ROWS, MICROBATCH_ROWS = 3, 2
SAVED, LAST = 3, 6  # steps
SLOW = 0.02  # seconds that a file takes at least, where writers are made slow

State = dict[str, Any]


class Layer(nn.Module):
    def __init__(self, *, dropout: float, norm: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(LENGTH) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.dropout(torch.tanh(self.linear(self.norm(hidden))))


class Model(nn.Module):
    """A table before the layers, a head after them, which may be the table again."""

    def __init__(
        self, *, tied: bool = False, dropout: float = 0.0, norm: bool = False, num_layers: int = 3
    ) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer(dropout=dropout, norm=norm) for _ in range(num_layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.table(ids))
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.norm(hidden) * self.scale.to(hidden.dtype)).mean(dim=1)
        return {"loss": F.cross_entropy(logits, labels)}


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator),
        "labels": torch.randint(0, WORDS, (ROWS,), generator=generator),
    }


@dataclasses.dataclass(frozen=True)
class Kind:
    """An engine, and what must happen in it for the test to mean something."""

    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    kinds: frozenset[str] = frozenset()
    scales: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """Loss scales to be set before a step."""
    frozen: tuple[str, ...] = ()
    alike: bool = True
    """Whether late updates have the same bits wherever they are done."""


CLIP: dict[str, Any] = {"clip_norm": 0.1}
ADAMW: dict[str, Any] = {"optimizer": l2l.AdamW(lr=1e-2)}
TAIL = {"num_tail": 1, "num_device_states": 1}
EVERYTHING = {"num_tail": 2, "num_device_states": 1, "num_shared": 1, "halves": True}

KINDS: dict[str, Kind] = {
    "eager": Kind({}, kinds=frozenset({"update U host"})),
    "clipped": Kind(CLIP, kinds=frozenset({"update U host late"})),
    "halves": Kind(
        {**CLIP, "overrides": {"halves": True}}, kinds=frozenset({"update U host late weights"})
    ),
    "some late": Kind(
        {"overrides": {"num_late": 2}}, kinds=frozenset({"update U host", "update U host late"})
    ),
    "bfloat16": Kind({**CLIP, "precision": "bfloat16"}),
    "float16": Kind(
        {"precision": "float16"},
        scales={0: 1024.0, 2: 2.0**40, 4: 2048.0},
        kinds={"update U host late"},
    ),
    "8-bit": Kind({**CLIP, "optimizer": l2l.AdamW(lr=1e-2, moments="8bit")}),
    "8-bit, bfloat16": Kind(
        {"precision": "bfloat16", "optimizer": l2l.AdamW(lr=1e-2, moments="8bit")}
    ),
    "Adafactor": Kind(
        {"optimizer": l2l.Adafactor(), "precision": "bfloat16"},
        kinds={"update U device", "drain U free"},
    ),
    "Lion": Kind({"optimizer": l2l.Lion(lr=1e-3), "precision": "bfloat16"}),
    "Muon": Kind(
        {**CLIP, "optimizer": l2l.Muon(lr=1e-2), "overrides": {"num_shared": 2, "num_pieces": 2}},
        kinds={"update U:p device late", "update U host late"},
        alike=False,
    ),
    "SGD": Kind({"optimizer": l2l.SGD(lr=0.1, momentum=0.9)}),
    "SGD without momentum": Kind({"optimizer": l2l.SGD(lr=0.1), **CLIP}),
    "lookups": Kind({**CLIP, "embedding": "host"}, kinds={"update U:m host late", "collect U m"}),
    "lookups, tied": Kind(
        {**CLIP, "embedding": "host"}, {"tied": True}, kinds={"update U:m host late"}
    ),
    "lookups in halves": Kind(
        {**CLIP, "embedding": "host", "overrides": {"halves": True}},
        {"tied": True},
        {"update U:m host late weights"},
    ),
    "layers in halves": Kind(
        {**CLIP, "embedding": "host", "overrides": {"halves": True, "num_whole": 1}},
        {"tied": True},
        {"update U:m host late weights", "update U host late", "update U host late weights"},
    ),
    "device state": Kind({**CLIP, "overrides": TAIL}, kinds={"update U device late", "drain U"}),
    "all state on the device": Kind(
        {**CLIP, "overrides": {"num_tail": 3, "num_device_states": 3, "outer_state": True}},
        kinds={"update U device late"},
    ),
    "shared": Kind(
        {**CLIP, "overrides": {"num_shared": 2}},
        kinds={"update U:p device late", "drain U.all:p"},
        alike=False,
    ),
    "shared, readable": Kind(
        {**CLIP, "overrides": {"num_shared": 2}, "kernel": "readable"},
        kinds={"update U:p device late"},
    ),
    "shared at once": Kind(
        {"overrides": {"num_shared": 2}}, kinds={"update U:p device", "drain U.all:p"}, alike=False
    ),
    "shared at once, 8-bit": Kind(
        {
            "overrides": {"num_shared": 2, "num_late": 2, "num_pieces": 3},
            "optimizer": l2l.AdamW(lr=1e-2, moments="8bit"),
            "kernel": "readable",
        },
        kinds={"update U:p device", "update U:p device late"},
    ),
    "everything": Kind(
        {**CLIP, "embedding": "host", "precision": "bfloat16", "overrides": EVERYTHING},
        kinds={
            "update U device late",
            "update U:p device late",
            "update U:m host late weights",
            "update U host late weights",
        },
        alike=False,
    ),
    "changing buffers": Kind(CLIP, {"norm": True}),
    "dropout": Kind(CLIP, {"dropout": 0.3}),
    "frozen half": Kind(CLIP, frozen=("table", "layers.0", "head")),
    "readable": Kind({**CLIP, "kernel": "readable", "precision": "bfloat16"}),
    "stash on the device": Kind({"stash": "device"}),
}


def build(kind: Kind, *, seed: int) -> Model:
    torch.manual_seed(seed)
    model = Model(**kind.model)
    for name in kind.frozen:
        model.get_submodule(name).requires_grad_(False)
    return model


def make(kind: Kind | str = "eager", *, seed: int = 0, **more: Any) -> l2l.Engine:
    """An engine of a kind; weights, dropout and rounding depend on the seed."""
    kind = KINDS[kind] if isinstance(kind, str) else kind
    settings = {
        "precision": "float32",
        "microbatch_size": MICROBATCH_ROWS,
        "device": "cpu",
        **ADAMW,
        **kind.settings,
        **more,
    }
    return inside.engine(build(kind, seed=seed), seed=7 + seed, **settings)


def train(engine: l2l.Engine, kind: Kind | str = "eager", *, to: int) -> list[Any]:
    """Reports of the steps up to one."""
    kind = KINDS[kind] if isinstance(kind, str) else kind
    reports = []
    for number in range(engine.step_number, to):
        if number in kind.scales:
            inside.scaler(engine).observe()
            inside.scaler(engine).scale.value = kind.scales[number]
            inside.scaler(engine).scale.growth_interval = 2
        reports.append(engine.step(batch(number)))
    return reports


def state_of(engine: l2l.Engine) -> State:
    """All there is of an engine after its last step, copied."""
    inside.finish_step(engine)
    inside.server(engine).settle_all()
    return contents_of(engine)


def contents_of(engine: l2l.Engine) -> State:
    """The same, with updates left as they are."""
    server = inside.server(engine)
    found: State = {"step": engine.step_number, "seed": inside.seed(engine)}
    buffers = inside.present_buffers(engine)
    found |= {f"buffer {name}": buffer.clone() for name, buffer in buffers.items()}
    for unit in server.units:
        image = server.image(unit)
        tensors = {name: one for name, one in image.tensors.items() if name not in buffers}
        found |= {f"{unit} {name}": tensor.clone() for name, tensor in tensors.items()}
        found |= {f"{unit} {name} updates": number for name, number in image.steps.items()}
    found |= {f"group {i}": group for i, group in enumerate(engine.optimizer.numbers())}
    if inside.scaler(engine) is not None:
        found["scale"] = dataclasses.asdict(inside.scaler(engine).scale)
    return found


def differences(found: State, expected: State) -> list[str]:
    """What is not the same, bit by bit."""

    def same(one: Any, other: Any) -> bool:
        if not isinstance(one, Tensor):
            return one == other
        return one.dtype == other.dtype and torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))

    missing = [name for name in expected if name not in found]
    surplus = [name for name in found if name not in expected]
    both = expected.keys() & found.keys()
    return missing + surplus + [name for name in both if not same(found[name], expected[name])]


def kinds_of(engine: l2l.Engine) -> set[str]:
    schedules = inside.schedules(engine).values()
    return {action.kind for schedule in schedules for action in schedule.actions}


@cache
def undisturbed(kind: str) -> State:
    """How training ends that nothing disturbs.

    Saving lets the host do updates that the device would have done in the next step, with state
    lent to it. Where the two differ in their last bits, so is it here.
    """
    with make(kind) as engine:
        train(engine, kind, to=SAVED)
        if not KINDS[kind].alike:
            inside.server(engine).settle_all()
        train(engine, kind, to=LAST)
        return state_of(engine)


def contents(folder: Path) -> dict[str, Any]:
    """What is in a checkpoint, to be compared."""
    found: dict[str, Any] = {
        path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".safetensors"
    }
    return found | {"manifest": json.loads((folder / "manifest.json").read_text())}


# --------------------------------------------------------------------------------------------------
# Training goes on exactly


@pytest.mark.parametrize("name", KINDS)
def test_training_goes_on_exactly_from_what_was_saved_beside_it(tmp_path: Path, name: str):
    kind = KINDS[name]
    with make(kind) as engine:
        reports = train(engine, kind, to=SAVED)
        saving = engine.save(tmp_path / "saved", extra={"rows": [1, 2]}, background=True)
        reports += train(engine, kind, to=LAST)
        assert kind.kinds <= kinds_of(engine)
        expected = state_of(engine)
        saving.wait()
    assert not differences(expected, undisturbed(name))
    with make(kind, seed=1) as engine:
        assert differences(state_of(engine), expected)
        assert engine.load(tmp_path / "saved") == {"rows": [1, 2]}
        assert engine.step_number == SAVED
        again = train(engine, kind, to=LAST)
        assert not differences(state_of(engine), expected)
    assert [one.loss for one in again] == [one.loss for one in reports[SAVED:]]
    if kind.scales:
        assert [one.skipped for one in reports] == [False, False, True, True, False, False]
        assert [one.loss_scale for one in again] == [2.0**39, 2048.0, 2048.0]


HOSTILE = ("everything", "Adafactor", "float16")
OFTEN = (Lane.UPDATE, Lane.DRAIN)


@pytest.mark.parametrize(
    ("name", "first"),
    sampled(product(HOSTILE, Lane), lambda one: "everything" in one or one[1] in OFTEN),
)
def test_training_goes_on_exactly_whichever_lane_runs_ahead(tmp_path: Path, name: str, first: Lane):
    with make(name, device=CheckingDevice(first=first)) as engine:
        train(engine, name, to=SAVED)
        saving = engine.save(tmp_path / "saved", background=True)
        train(engine, name, to=SAVED + 2)
        saving.wait()
        train(engine, name, to=LAST)
        expected = state_of(engine)
    with make(name, seed=1, device=CheckingDevice(first=first)) as engine:
        engine.load(tmp_path / "saved")
        train(engine, name, to=LAST)
        assert not differences(state_of(engine), expected)
    assert not differences(expected, undisturbed(name))


@pytest.mark.parametrize("name", ["clipped", "lookups", "everything", "changing buffers"])
def test_an_engine_that_has_trained_already_loads_all_the_same(tmp_path: Path, name: str):
    with make(name) as engine:
        train(engine, name, to=SAVED)
        engine.save(tmp_path / "saved")
    with make(name, seed=1) as engine:
        for number in range(2):
            engine.step(batch(90 + number))
        engine.load(tmp_path / "saved")
        train(engine, name, to=LAST)
        assert not differences(state_of(engine), undisturbed(name))


@pytest.mark.parametrize("name", ["clipped", "changing buffers", "device state"])
def test_a_checkpoint_from_before_the_first_step_brings_an_engine_back_to_it(
    tmp_path: Path, name: str
):
    with make(name) as engine:
        assert engine.step_number == 0
        engine.save(tmp_path / "fresh")
    with make(name, seed=1) as engine:
        train(engine, name, to=2)
        engine.load(tmp_path / "fresh")
        assert engine.step_number == 0
        train(engine, name, to=LAST)
        assert not differences(state_of(engine), undisturbed(name))


def test_an_engine_goes_back_to_its_own_checkpoint(tmp_path: Path):
    with make("lookups") as engine:
        train(engine, "lookups", to=SAVED)
        engine.save(tmp_path / "saved", background=True)
        train(engine, "lookups", to=SAVED + 1)
        engine.load(tmp_path / "saved")
        train(engine, "lookups", to=LAST)
        assert not differences(state_of(engine), undisturbed("lookups"))


def test_evaluation_between_saving_and_the_next_step_changes_nothing(tmp_path: Path):
    with make("lookups") as engine:
        train(engine, "lookups", to=SAVED)
        saving = engine.save(tmp_path / "one", background=True)
        engine.evaluate(batch(50))
        train(engine, "lookups", to=LAST)
        saving.wait()
        assert not differences(state_of(engine), undisturbed("lookups"))
    with make("lookups") as engine:
        train(engine, "lookups", to=SAVED)
        engine.save(tmp_path / "two")
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@pytest.mark.parametrize("name", ["eager", "everything"])
def test_every_step_may_be_saved_over_the_one_before(tmp_path: Path, name: str):
    with make(name) as engine:
        for number in range(LAST):
            train(engine, name, to=number + 1)
            engine.save(tmp_path / "saved", background=True)
        expected = state_of(engine)
    with make(name, seed=1) as engine:
        engine.load(tmp_path / "saved")
        assert not differences(state_of(engine), expected)
    assert os.listdir(tmp_path) == ["saved"]


def test_a_model_given_back_has_what_was_loaded(tmp_path: Path):
    with make("changing buffers") as engine:
        train(engine, to=SAVED)
        engine.save(tmp_path / "saved")
        model = inside.model(engine)
    expected = model.state_dict()
    engine = make("changing buffers", seed=1)
    engine.load(tmp_path / "saved")
    engine.close()
    found = inside.model(engine).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_the_learning_rate_of_a_scheduler_comes_back(tmp_path: Path):
    def schedule(engine: l2l.Engine, **settings: Any) -> torch.optim.lr_scheduler.LambdaLR:
        return torch.optim.lr_scheduler.LambdaLR(
            engine.optimizer, lambda number: 0.5 ** (number // 2), **settings
        )

    with make() as engine:
        scheduler = schedule(engine)
        for number in range(SAVED):
            engine.step(batch(number))
            scheduler.step()
        engine.save(tmp_path / "saved")
        for number in range(SAVED, LAST):
            engine.step(batch(number))
            scheduler.step()
        expected = state_of(engine)
    for before in (True, False):  # the scheduler may be made before loading, or after
        with make(seed=1) as engine:
            scheduler = schedule(engine) if before else None
            engine.load(tmp_path / "saved")
            assert engine.optimizer.param_groups[0]["lr"] == 0.005
            scheduler = scheduler or schedule(engine, last_epoch=SAVED - 1)
            scheduler.last_epoch = SAVED
            for number in range(SAVED, LAST):
                engine.step(batch(number))
                scheduler.step()
            assert not differences(state_of(engine), expected)


def test_numbers_of_every_group_come_back(tmp_path: Path):
    def groups(name: str, _: nn.Parameter) -> dict[str, Any]:
        return {"lr": 1e-3, "betas": (0.5, 0.6)} if "norm" in name else {}

    optimizer = {"optimizer": l2l.AdamW(lr=1e-2, groups=groups)}
    with make(**optimizer) as engine:
        engine.optimizer.param_groups[1]["weight_decay"] = 0.25
        engine.save(tmp_path / "saved")
        expected = engine.optimizer.numbers()
    with make(**optimizer) as engine:
        engine.optimizer.param_groups[0]["lr"] = 1.0
        engine.load(tmp_path / "saved")
        assert engine.optimizer.numbers() == expected
        assert {group["betas"] for group in expected} == {(0.9, 0.999), (0.5, 0.6)}


def test_an_engine_with_other_groups_keeps_its_numbers_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    with make() as engine:
        engine.save(tmp_path / "saved")
    grouped = l2l.AdamW(lr=3e-2, groups=lambda name, _: {"lr": 1e-3} if "norm" in name else {})
    with make(optimizer=grouped) as engine:
        expected = engine.optimizer.numbers()
        engine.load(tmp_path / "saved")
        assert engine.optimizer.numbers() == expected
    assert "keeps its own learning rates" in caplog.text


def test_what_the_caller_gives_comes_back_as_it_was_then(tmp_path: Path):
    extra: dict[Any, Any] = {"place": {"row": 3, "deep": [1.5, None, "größe"]}, 2: "two", 10: "ten"}
    with make() as engine:
        saving = engine.save(tmp_path / "saved", extra=extra, background=True)
        extra["place"]["row"] = 4  # the caller goes on with it
        saving.wait()
        found = engine.load(tmp_path / "saved")
    assert found == {"place": {"row": 3, "deep": [1.5, None, "größe"]}, "2": "two", "10": "ten"}


def test_nothing_in_a_checkpoint_is_pickled(tmp_path: Path):
    with make("everything") as engine:
        train(engine, "everything", to=1)
        saving = engine.save(tmp_path / "saved")
        units = set(inside.server(engine).units)
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert names == {f"{unit}.safetensors" for unit in units | {"buffers"}} | {"manifest.json"}
    files = (tmp_path / "saved").glob("*.safetensors")
    assert saving.num_bytes == sum(path.stat().st_size for path in files)


# --------------------------------------------------------------------------------------------------
# What is written beside training is what would have been written at once


@dataclasses.dataclass
class Seen:
    """What writers and changes have met."""

    copies: int = 0
    awaited: bool = False


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found = Seen()
    copy, begin = ParameterServer._copy, ParameterServer.begin_snapshot

    def counted(
        server: ParameterServer, tensors: Mapping[str, Tensor], urgent: bool
    ) -> Mapping[str, Tensor]:
        found.copies += 1
        return copy(server, tensors, urgent)

    def noted(server: ParameterServer, *args: Any, **settings: Any) -> Snapshot:
        snapshot = begin(server, *args, **settings)
        found.awaited |= snapshot.awaits
        return snapshot

    monkeypatch.setattr(ParameterServer, "_copy", counted)
    monkeypatch.setattr(ParameterServer, "begin_snapshot", noted)
    return found


def slow_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each file take longer than a step."""
    write = files.write_tensors

    def slowly(*args: Any, **settings: Any) -> Any:
        time.sleep(SLOW)
        return write(*args, **settings)

    monkeypatch.setattr(files, "write_tensors", slowly)


@contextmanager
def held_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Writers begin only when the block ends."""
    go, write = threading.Event(), Saving._write_units

    def later(saving: Saving, *rest: Any) -> None:
        go.wait()
        write(saving, *rest)

    monkeypatch.setattr(Saving, "_write_units", later)
    try:
        yield
    finally:
        go.set()


def hold_until_a_change_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let writers begin when there is no memory left for copies."""
    go, write = threading.Event(), Saving._write_units

    def later(saving: Saving, *rest: Any) -> None:
        while not go.wait(1e-3):
            if saving._snapshot._urgent or saving._snapshot.is_given_up:
                go.set()
        write(saving, *rest)

    monkeypatch.setattr(Saving, "_write_units", later)


def spare(engine: l2l.Engine, nbytes: int) -> None:
    inside.persistence(engine).spare_bytes = lambda: nbytes


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written need not outlast the machine, and measuring a disk writes little."""
    monkeypatch.setattr(checkpoint, "PROBE_BYTES", 1 << 20)
    monkeypatch.setattr(os, "fsync", lambda _: None)


@cache
def saved_at_once(kind: str) -> dict[str, Any]:
    with make(kind) as engine, tempfile.TemporaryDirectory() as folder:
        train(engine, kind, to=SAVED)
        engine.save(Path(folder) / "saved")
        return contents(Path(folder) / "saved")


COPIED = (
    "eager",
    "clipped",
    "halves",
    "some late",
    "float16",
    "8-bit, bfloat16",
    "Adafactor",
    "lookups",
    "lookups in halves",
    "layers in halves",
    "device state",
    "all state on the device",
    "shared",
    "everything",
    "changing buffers",
    "readable",
)


AT_ONCE = {"eager", "8-bit, bfloat16", "Adafactor", "all state on the device"}  # no update waits


@pytest.mark.parametrize("name", COPIED)
def test_all_is_copied_if_writers_come_late_and_memory_is_there(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, seen: Seen
):
    expected = saved_at_once(name)
    seen.copies, seen.awaited = 0, False
    with make(name) as engine:
        train(engine, name, to=SAVED)
        with held_back(monkeypatch):
            saving = engine.save(tmp_path / "beside", background=True)
            train(engine, name, to=LAST)
            inside.finish_step(engine)
            assert seen.copies > 0
        saving.wait()
        assert not differences(state_of(engine), undisturbed(name))
    assert contents(tmp_path / "beside") == expected
    assert seen.awaited == (name not in AT_ONCE)


STALLED = ("eager", "halves", "float16", "8-bit", "Adafactor", "lookups", "everything", "shared")


@pytest.mark.parametrize("name", STALLED)
def test_updates_wait_for_writers_if_no_memory_is_spare(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, seen: Seen
):
    expected = saved_at_once(name)
    seen.copies, seen.awaited = 0, False
    hold_until_a_change_waits(monkeypatch)
    slow_down(monkeypatch)
    with make(name) as engine:
        spare(engine, 0)
        train(engine, name, to=SAVED)
        saving = engine.save(tmp_path / "beside", background=True)
        train(engine, name, to=LAST)
        saving.wait()
        assert saving.stall_seconds > SLOW
        assert seen.copies == 0
        assert not differences(state_of(engine), undisturbed(name))
    assert contents(tmp_path / "beside") == expected


@pytest.mark.parametrize("name", ["clipped", "lookups", "everything", "Adafactor"])
@pytest.mark.parametrize("units", [1.1, 2.5])
def test_some_is_copied_and_the_rest_waits_if_little_memory_is_spare(
    tmp_path: Path, name: str, units: float, monkeypatch: pytest.MonkeyPatch, seen: Seen
):
    expected = saved_at_once(name)
    seen.copies, seen.awaited = 0, False
    hold_until_a_change_waits(monkeypatch)
    with make(name) as engine:
        spare(engine, int(units * inside.server(engine).image("L0").nbytes))
        train(engine, name, to=SAVED)
        saving = engine.save(tmp_path / "beside", background=True)
        train(engine, name, to=LAST)
        saving.wait()
        assert seen.copies > 0
        assert saving.stall_seconds > 0
    assert contents(tmp_path / "beside") == expected


def test_host_memory_without_room_for_copies_makes_updates_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    with make("clipped") as engine:
        train(engine, "clipped", to=1)
        needed = sum(inside.arena(engine).bytes_by_name.values())
    with make("clipped", host_memory=needed + 1000) as engine, monkeypatch.context() as patched:
        hold_until_a_change_waits(patched)
        train(engine, "clipped", to=SAVED)
        saving = engine.save(tmp_path / "beside", background=True)
        train(engine, "clipped", to=LAST)
        saving.wait()
        assert saving.stall_seconds > 0
        total = sum(
            inside.server(engine).image(name).nbytes for name in inside.server(engine).units
        )
    line = next(r for r in caplog.records if "training will wait" in r.getMessage())
    assert line.levelno == logging.WARNING
    caplog.clear()
    with make("clipped", host_memory=needed + total) as engine:  # as much as the line asks for
        train(engine, "clipped", to=SAVED)
        engine.save(tmp_path / "beside", background=True)
    assert not caplog.records
    assert contents(tmp_path / "beside") == saved_at_once("clipped")


def test_how_long_training_waits_is_said_before_and_how_to_avoid_it(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("l2l.checkpoint.persistence.measure_disk", lambda _: 1e4)
    with make() as engine:
        total = sum(
            inside.server(engine).image(name).nbytes for name in inside.server(engine).units
        )
        spare(engine, total - (64 << 10))
        engine.save(tmp_path / "saved")
        assert not caplog.records  # training waits for all of it anyway
        saving = engine.save(tmp_path / "saved", background=True)
    assert "With 64.00 KiB more" in caplog.text
    assert saving.expected_stall_seconds == pytest.approx((64 << 10) / 1e4)
    assert "training will wait for about 7 s" in caplog.text


def test_waiting_brings_updates_that_are_still_to_come(tmp_path: Path, seen: Seen):
    """Nothing would ever complete them, if no step followed."""
    with make("clipped") as engine:
        train(engine, "clipped", to=SAVED)
        assert inside.server(engine).waiting
        engine.save(tmp_path / "one", background=True).wait()
        assert seen.awaited
        train(engine, "clipped", to=LAST)
        assert not differences(state_of(engine), undisturbed("clipped"))
    with make("clipped") as engine:
        train(engine, "clipped", to=SAVED)
        engine.save(tmp_path / "two", background=True)  # closing waits, too
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_a_second_save_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    slow_down(monkeypatch)
    with make("clipped") as engine:
        train(engine, "clipped", to=SAVED)
        first = engine.save(tmp_path / "first", background=True)
        train(engine, "clipped", to=SAVED + 1)
        engine.save(tmp_path / "second", background=True)
        assert first.is_done
        assert (tmp_path / "first" / "manifest.json").exists()
    assert Checkpoint(tmp_path / "second").manifest.step == SAVED + 1
    assert contents(tmp_path / "first") == saved_at_once("clipped")


def test_a_snapshot_that_ends_while_an_update_looks_for_it_is_no_error():
    """The server forgets it from another thread, between any two lines."""

    class Forgetful:
        def __init__(self) -> None:
            self.looks = 0

        def __get__(self, server: Any, kind: Any = None) -> Any:
            self.looks += 1
            return self if self.looks == 1 else None

        def __set__(self, server: Any, value: Any) -> None:
            self.looks = 0

        def before(self, unit: str) -> None:
            pass

        complete = before

    with make("clipped") as engine:
        train(engine, "clipped", to=1)
        server = inside.server(engine)
        kind = type("Forgetting", (), {"snapshot": Forgetful()})
        for call in (
            lambda it: ParameterServer.before_change(it, "L0"),
            lambda it: ParameterServer.after_update(it, "L0"),
        ):
            call(kind())
        assert server.snapshot is None


# --------------------------------------------------------------------------------------------------
# What is damaged, or of something else, is refused


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of the kind "clipped", in bfloat16."""
    folder = tmp_path_factory.mktemp("whole")
    with make("bfloat16") as engine:
        for number, name in ((SAVED - 1, "older"), (SAVED, "newer")):
            train(engine, "bfloat16", to=number)
            engine.save(folder / name)
    return folder


@pytest.fixture
def copies(whole: Path, tmp_path: Path) -> Path:
    """The same, to be damaged."""
    return shutil.copytree(whole, tmp_path / "copies")


def state(**changes: Any) -> dict[str, Any]:
    """What the manifest of a small checkpoint says of its engine."""
    return {
        "link": "float32",
        "optimizer": "AdamW",
        "moments": "float32",
        "groups": [],
        "loss_scale": None,
        "seed": 5,
        "choices": {
            "microbatch_size": None,
            "microbatch_tokens": 8192,
            "piece_tokens": None,
            "compiled": False,
        },
        **changes,
    }


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


def change_manifest(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


DAMAGES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "a flipped bit": ("L1.safetensors", lambda path: flip(path, 5000), "is damaged"),
    "one in a header": ("O.safetensors", lambda path: flip(path, 20), "is damaged"),
    "one in the last byte": ("L0.safetensors", lambda path: flip(path, -1), "is damaged"),
    "one in a buffer": ("buffers.safetensors", lambda path: flip(path, -1), "is damaged"),
    "one in the manifest": ("manifest.json", lambda path: flip(path, 200), "is damaged"),
    "a truncated file": ("L1.safetensors", lambda p: os.truncate(p, 1000), "has the wrong size"),
    "an empty file": ("L1.safetensors", lambda p: os.truncate(p, 0), "has the wrong size"),
    "a longer file": ("T0.safetensors", lambda p: os.truncate(p, 99999), "has the wrong size"),
    "a missing file": ("L2.safetensors", Path.unlink, "No such file"),
    "a missing manifest": ("manifest.json", Path.unlink, "No such file"),
    "a truncated manifest": ("manifest.json", lambda p: os.truncate(p, 300), "is damaged"),
    "no JSON": ("manifest.json", lambda p: p.write_text("hello"), "is damaged"),
    "no text": ("manifest.json", lambda p: p.write_bytes(b"\xff\xfe"), "is damaged"),
    "other JSON": ("manifest.json", lambda p: p.write_text("[]"), "is not the manifest"),
    "of another program": (
        "manifest.json",
        lambda p: change_manifest(p, format="other"),
        "is not the manifest",
    ),
    "a newer version": (
        "manifest.json",
        lambda p: change_manifest(p, version=2),
        "has format version 2, but this l2l reads version 1",
    ),
    "another step": ("manifest.json", lambda p: change_manifest(p, step=4), "is damaged"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_damaged_is_named_and_nothing_has_changed(copies: Path, name: str):
    file, damage, reason = DAMAGES[name]
    damage(copies / "newer" / file)
    with make("bfloat16") as engine:
        train(engine, "bfloat16", to=1)
        before, waiting = contents_of(engine), list(inside.server(engine).waiting)
        assert waiting
        with pytest.raises(CheckpointError) as caught:
            engine.load(copies / "newer")
        assert str(copies / "newer" / file) in str(caught.value)
        assert reason in str(caught.value)
        assert not differences(contents_of(engine), before)
        assert list(inside.server(engine).waiting) == waiting
        train(engine, "bfloat16", to=SAVED)
        found = state_of(engine)
        engine.load(copies / "older")
        train(engine, "bfloat16", to=SAVED)
        assert not differences(state_of(engine), found)


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with make() as engine:
        for name in ("missing", "file"):
            with pytest.raises(CheckpointError, match=rf"cannot read .*{name}/manifest\.json"):
                engine.load(tmp_path / name)


def sealed(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a manifest, and let its checksum be right."""
    body = json.loads(path.read_text())
    del body["checksum"]
    change(body)
    path.write_text(json.dumps({**body, "checksum": checksum_of(body)}))


EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a negative step": (lambda b: b.update(step=-1), "step is -1; expected a whole number"),
    "a step that is true": (lambda b: b.update(step=True), "step is True"),
    "a huge step": (lambda b: b.update(step=10**40), "step is 1000"),
    "no step": (lambda b: b.pop("step"), "it has no step"),
    "no state": (lambda b: b.update(state=None), "state is None; expected an object"),
    "no seed": (lambda b: b["state"].pop("seed"), "it has no state.seed"),
    "another link": (lambda b: b["state"].update(link="int8"), "state.link is 'int8'"),
    "no choices": (lambda b: b["state"].update(choices=[]), r"state.choices is \[\]"),
    "a choice": (
        lambda b: b["state"]["choices"].update(piece_tokens="many"),
        "state.choices.piece_tokens is 'many'; expected null or a whole number",
    ),
    "a million shares": (
        lambda b: b["state"].update(num_shares=1_000_000),
        r"files has '\w+', but state.num_shares is 1000000",
    ),
    "groups": (lambda b: b["state"].update(groups=3), "state.groups is 3"),
    "a learning rate": (
        lambda b: b["state"]["groups"][0].update(lr="fast"),
        "lr of parameter group 0 is 'fast'; expected a value like",
    ),
    "betas": (lambda b: b["state"]["groups"][0].update(betas=[0.9]), "betas of parameter group"),
    "a loss scale": (
        lambda b: b["state"].update(loss_scale={"value": 1.0}),
        "state.loss_scale is",
    ),
    "a loss scale of bfloat16": (
        lambda b: b["state"].update(
            loss_scale={"value": 1.0, "growth_interval": 1, "num_good_steps": 0}
        ),
        "state.loss_scale must be present with float16 and null otherwise",
    ),
    "layers": (lambda b: b["state"].update(layers={}), "it has no state.layers.given"),
    "origins": (
        lambda b: b["state"]["layers"].update(origins=[0, 1, 9]),
        r"state.layers.origins is \[0, 1, 9\]",
    ),
    "a path": (
        lambda b: b["files"].update({"../L0": b["files"].pop("L0")}),
        "files contains '../L0', not a valid checkpoint file name",
    ),
    "a record": (lambda b: b["files"].update(L0=7), "files.L0 is 7"),
    "bytes": (lambda b: b["files"]["L0"].update(bytes=-4), "files.L0.bytes is -4"),
    "a checksum": (lambda b: b["files"]["L0"].update(checksum="x"), "files.L0.checksum is 'x'"),
    "updates": (
        lambda b: b["files"]["L0"].update(steps={"": 99}),
        "files.L0.steps. is 99; expected at most the 3 steps",
    ),
    "updates of strangers": (
        lambda b: b["files"]["L0"].update(steps={"a": 1}),
        "the update counts of L0 do not match its trained parameters",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_manifest_that_was_edited_and_sealed_again_is_refused(copies: Path, name: str):
    change, message = EDITS[name]
    path = copies / "newer" / "manifest.json"
    sealed(path, change)
    with make("bfloat16") as engine:
        train(engine, "bfloat16", to=1)
        before = contents_of(engine)
        with pytest.raises(CheckpointError, match=message) as caught:
            engine.load(copies / "newer")
        assert str(path) in str(caught.value)
        assert not differences(contents_of(engine), before)
        engine.step(batch(1))


TENSORS: dict[str, tuple[str, Callable[[dict[str, Tensor]], Any], str]] = {
    "a buffer's dtype": ("buffers", lambda t: t.update(scale=t["scale"].double()), "dtype"),
    "a buffer's shape": ("buffers", lambda t: t.update(scale=t["scale"][:1].clone()), "shape"),
    "no buffer": (
        "buffers",
        lambda t: (t.pop("scale"), t.update(a=torch.ones(1))),
        "lacks 'scale'",
    ),
    "a stranger": ("buffers", lambda t: t.update(other=torch.ones(1)), "also has 'other'"),
    "a weight's dtype": (
        "L0",
        lambda t: t.update({"layers.0.linear.bias": t["layers.0.linear.bias"].float()}),
        "dtype torch.float32, expected torch.bfloat16",
    ),
    "a moment's dtype": (
        "L0",
        lambda t: t.update(
            {"layers.0.linear.bias|exp_avg": t["layers.0.linear.bias|exp_avg"].double()}
        ),
        "dtype torch.float64, expected torch.float32",
    ),
}


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_tensors_of_another_kind_are_refused_before_anything_changes(
    copies: Path, name: str, precision: str
):
    """In the precision of the checkpoint and in another one."""
    file, change, message = TENSORS[name]
    path = copies / "newer" / f"{file}.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    data = path.read_bytes()
    record = {"bytes": len(data), "checksum": f"{zlib.crc32(data):08x}"}
    sealed(copies / "newer" / "manifest.json", lambda body: body["files"][file].update(record))
    with make(KINDS["bfloat16"], precision=precision) as engine:
        train(engine, "bfloat16", to=1)
        before = contents_of(engine)
        with pytest.raises(CheckpointError, match=message) as caught:
            engine.load(copies / "newer")
        assert str(path) in str(caught.value)
        assert not differences(contents_of(engine), before)
        engine.step(batch(1))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": 1, "a": 2}', '{"a": NaN}', '{"a": 1e999}'])
def test_json_that_no_manifest_is_written_as_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "manifest.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=rf"{path} is damaged"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize("name", ["manifest.json", "L1.safetensors", "buffers.safetensors"])
def test_nobody_waits_for_a_pipe(copies: Path, name: str):
    (copies / "newer" / name).unlink()
    os.mkfifo(copies / "newer" / name)
    with make("bfloat16") as engine, pytest.raises(CheckpointError, match=f"{name}: it is a pipe"):
        engine.load(copies / "newer")


def test_every_flipped_bit_of_a_manifest_is_found_or_changes_nothing(tmp_path: Path):
    manifest = Manifest(
        step=3,
        state=state(groups=[{"lr": 1e-05, "word": "größe"}]),
        files={"L0": FileRecord(nbytes=10, checksum=7, steps={"a": 1, "b": 2})},
        extra={"list": [1, 2.5, None]},
    )
    manifest.write(tmp_path)
    path = tmp_path / "manifest.json"
    data, messages = path.read_bytes(), list[str]()
    for place in range(len(data)):
        for bit in (0, 5):
            damaged = bytearray(data)
            damaged[place] ^= 1 << bit
            path.write_bytes(damaged)
            try:
                found = Manifest.read(tmp_path)
            except CheckpointError as error:
                messages.append(str(error))
            else:
                assert found == manifest  # it has 1E-05 for 1e-05
    assert all(str(path) in message for message in messages)
    assert len(messages) > 2 * len(data) - 10


OTHERS: dict[str, tuple[Kind, str]] = {
    "fewer layers": (Kind(model={"num_layers": 2}), r"L2.*2 layers"),
    "more layers": (Kind(model={"num_layers": 4}), r"no unit L3.*4 layers"),
    "a tied head": (Kind(model={"tied": True}), r"safetensors.*another model"),
    "a frozen layer": (
        Kind({"precision": "float32"}, frozen=("layers.1",)),
        r"L1\.safetensors also has 'layers\.1\.linear\.\w+\|exp_avg\w*'.*trained",
    ),
    "Lion": (
        Kind({"optimizer": l2l.Lion(lr=1e-3)}),
        r"newer was saved with the optimizer AdamW with float32 moments; the engine has Lion",
    ),
    "8-bit moments": (
        Kind({"optimizer": l2l.AdamW(moments="8bit")}),
        r"AdamW with float32 moments; the engine has AdamW with 8bit moments",
    ),
    "Adafactor": (Kind({"optimizer": l2l.Adafactor()}), r"the engine has Adafactor"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_of_something_else_is_refused(whole: Path, name: str):
    kind, message = OTHERS[name]
    kind = dataclasses.replace(kind, settings={"precision": "bfloat16", **kind.settings})
    with make(kind, seed=1) as engine:
        train(engine, to=1)
        before = state_of(engine)
        with pytest.raises(CheckpointError, match=message):
            engine.load(whole / "newer")
        assert not differences(state_of(engine), before)
        train(engine, to=2)


def test_a_checkpoint_of_a_wider_model_is_refused_with_both_shapes(
    whole: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(globals(), "WIDTH", 64)
    message = r"L0\.safetensors: 'layers\.0\.linear\.weight' .*\[128, 128\], expected \[64, 64\]"
    with make("bfloat16") as engine, pytest.raises(CheckpointError, match=message):
        engine.load(whole / "newer")


def test_momentum_that_was_not_saved_is_missed(tmp_path: Path):
    with make("SGD without momentum") as engine:
        engine.save(tmp_path / "saved")
    message = r"safetensors lacks '.*\|momentum_buffer'"
    with make("SGD") as engine, pytest.raises(CheckpointError, match=message):
        engine.load(tmp_path / "saved")


def test_an_engine_that_has_loaded_only_in_part_is_torn_until_it_loads_again(
    whole: Path, monkeypatch: pytest.MonkeyPatch
):
    """The disk failed after everything had been checked."""
    read, calls = Checkpoint.read, list[str]()

    def fail(checkpoint: Checkpoint, name: str, *rest: Any) -> Any:
        calls.append(name)
        if len(calls) == 3:
            raise CheckpointError("planted")
        return read(checkpoint, name, *rest)

    with make("bfloat16") as engine:
        train(engine, "bfloat16", to=1)
        with monkeypatch.context() as patched:
            patched.setattr(Checkpoint, "read", fail)
            with pytest.raises(CheckpointError, match=r"planted Part of it had already been"):
                engine.load(whole / "newer")
        with pytest.raises(RuntimeError, match="two steps"):
            engine.step(batch(0))
        engine.load(whole / "newer")
        train(engine, "bfloat16", to=LAST)
        assert not differences(state_of(engine), undisturbed("bfloat16"))


def test_a_closed_engine_neither_saves_nor_loads(whole: Path, tmp_path: Path):
    engine = make("bfloat16")
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.load(whole / "newer")
    with pytest.raises(RuntimeError, match="closed"):
        engine.save(tmp_path / "saved")


# --------------------------------------------------------------------------------------------------
# What cannot be written


class Failing:
    """A function of `os` that fails at its n-th call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, *, at: int, code: int) -> None:
        self.calls, self._at, self._code = 0, at, code
        self._whole = getattr(os, name)
        self._lock = threading.Lock()
        monkeypatch.setattr(os, name, self)

    def __call__(self, *args: Any, **settings: Any) -> Any:
        with self._lock:
            self.calls += 1
            failed = self.calls == self._at
        if failed:
            raise OSError(self._code, os.strerror(self._code))
        return self._whole(*args, **settings)


FAILURES = [
    *(("write", at, errno.ENOSPC) for at in (1, 15, 30)),
    # Files, then all of them again with the manifest, the folder, and the one around it.
    *(("fsync", at, errno.EIO) for at in (1, 6, 7, 13, 14, 15)),
    *(("rename", at, errno.EACCES) for at in (1, 2)),
]


@pytest.mark.parametrize(
    ("function", "at", "code", "background"),
    [(*FAILURES[2], False), (*FAILURES[-1], False), *((*one, True) for one in FAILURES)],
    ids=str,
)
def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    at: int,
    code: int,
    background: bool,
):
    with make("lookups") as engine:
        train(engine, "lookups", to=SAVED)
        engine.save(tmp_path / "saved")
        before = contents(tmp_path / "saved")
        train(engine, "lookups", to=SAVED + 1)
        with monkeypatch.context() as patched:
            patched.setattr(tensor_file, "PIECE_BYTES", 16 << 10)  # several writes for each file
            failing = Failing(patched, function, at=at, code=code)
            if background:
                act = engine.save(tmp_path / "saved", background=True).wait
                train(engine, "lookups", to=SAVED + 2)
            else:
                act = partial(engine.save, tmp_path / "saved")
            with pytest.raises(CheckpointError, match=r"saved was not saved: ") as caught:
                act()
        assert failing.calls >= at
        assert str(tmp_path / "saved") in str(caught.value)
        assert os.strerror(code) in str(caught.value)
        assert inside.server(engine).snapshot is None
        assert contents(tmp_path / "saved") == before
        assert os.listdir(tmp_path) == ["saved"]
        train(engine, "lookups", to=LAST)
        assert not differences(state_of(engine), undisturbed("lookups"))
        engine.save(tmp_path / "saved")  # and the failure was told once
    assert Checkpoint(tmp_path / "saved").manifest.step == LAST


def test_a_folder_that_cannot_be_made_is_an_error_at_once(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with make("clipped") as engine:
        train(engine, "clipped", to=1)
        with pytest.raises(CheckpointError, match=r"cannot make .*file/saved\.partial"):
            engine.save(tmp_path / "file" / "saved", background=True)
        assert inside.server(engine).snapshot is None
        train(engine, "clipped", to=LAST)
        assert not differences(state_of(engine), undisturbed("clipped"))


@pytest.mark.parametrize("extra", [{"a": object()}, {"a": float("nan")}, {("a",): 1}])
def test_what_json_cannot_hold_is_an_error_at_once(tmp_path: Path, extra: dict[Any, Any]):
    with make() as engine:
        with pytest.raises(CheckpointError, match="extra"):
            engine.save(tmp_path / "saved", extra=extra, background=True)
        assert not os.listdir(tmp_path)
        train(engine, to=1)


def test_a_name_that_no_folder_can_have_leaves_the_engine_as_it_was(tmp_path: Path):
    with make("clipped") as engine:
        spare(engine, 1 << 30)
        train(engine, "clipped", to=1)
        for name in ("/", "."):
            with pytest.raises(ValueError, match=r"name|not a checkpoint"):
                engine.save(name)
        assert inside.server(engine).snapshot is None


def test_what_is_not_a_checkpoint_is_not_replaced(tmp_path: Path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("more")
    (tmp_path / "empty").mkdir()
    with make() as engine:
        for name in ("notes", "file"):
            message = rf"{name} already exists and is not a checkpoint"
            with pytest.raises(CheckpointError, match=message):
                engine.save(tmp_path / name, background=True)
        engine.save(tmp_path / "empty")
        engine.save(tmp_path / "empty")
    assert names(tmp_path) == ["empty", "file", "notes"]
    assert (tmp_path / "notes" / "thesis.txt").read_text() == "years of work"


def test_a_full_disk_is_found_when_it_is_measured(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write to .*file"):
        measure_disk(tmp_path / "file")
    assert measure_disk(tmp_path / "new") > 0
    assert os.listdir(tmp_path / "new") == []


@pytest.mark.parametrize("name", ["eager", "clipped"])
def test_a_failure_beside_training_is_raised_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    with make(name) as engine:
        train(engine, name, to=SAVED)
        with monkeypatch.context() as patched:
            Failing(patched, "write", at=3, code=errno.ENOSPC)
            saving = engine.save(tmp_path / "one", background=True)
            train(engine, name, to=SAVED + 1)
            saving._thread.join()
        with pytest.raises(CheckpointError, match=r"one was not saved: .*No space left"):
            engine.save(tmp_path / "two")
        assert not os.listdir(tmp_path)
        engine.save(tmp_path / "two")
        train(engine, name, to=LAST)
        assert not differences(state_of(engine), undisturbed(name))


def test_a_failure_beside_training_is_raised_by_close_after_weights_are_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    engine = make("clipped")
    train(engine, "clipped", to=SAVED)
    Failing(monkeypatch, "write", at=3, code=errno.ENOSPC)
    engine.save(tmp_path / "one", background=True)
    train(engine, "clipped", to=LAST)
    with pytest.raises(CheckpointError, match=r"one was not saved: .*No space left"):
        engine.close()
    engine.close()
    with make("clipped") as expected:
        train(expected, "clipped", to=LAST)
    found = inside.model(engine).state_dict()
    assert all(
        torch.equal(found[name], tensor)
        for name, tensor in inside.model(expected).state_dict().items()
    )


def test_a_failure_that_was_told_is_not_told_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    engine = make()
    with monkeypatch.context() as patched:
        Failing(patched, "write", at=3, code=errno.ENOSPC)
        saving = engine.save(tmp_path / "one", background=True)
        for _ in range(2):  # who asks again is told again
            with pytest.raises(CheckpointError, match="No space left"):
                saving.wait()
    engine.close()


def test_a_failure_beside_training_is_logged_by_load(
    tmp_path: Path,
    whole: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    with make("bfloat16") as engine:
        with monkeypatch.context() as patched:
            Failing(patched, "write", at=3, code=errno.ENOSPC)
            engine.save(tmp_path / "one", background=True)._thread.join()
        engine.load(whole / "newer")
    assert "one was not saved" in caplog.text


def test_what_is_called_afterwards_may_fail(tmp_path: Path):
    def fail() -> None:
        raise CheckpointError("planted")

    with make() as engine:
        with pytest.raises(CheckpointError, match="planted"):
            engine.save(tmp_path / "saved", then=fail)
        train(engine, to=1)


def test_an_error_of_ours_in_a_writer_is_told_and_nobody_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("planted")

    with make("clipped") as engine:
        train(engine, "clipped", to=1)
        with monkeypatch.context() as patched:
            patched.setattr(files, "write_tensors", fail)
            saving = engine.save(tmp_path / "saved", background=True)
            with pytest.raises(CheckpointError, match=r"ZeroDivisionError.*planted"):
                saving.wait()
        assert not os.listdir(tmp_path)
        train(engine, "clipped", to=LAST)
        assert not differences(state_of(engine), undisturbed("clipped"))


# --------------------------------------------------------------------------------------------------
# Steps that fail


def plant(engine: l2l.Engine, kind: str) -> Callable[[], None]:
    """Let a line of the next step fail; returns what mends it."""
    perform = inside.relay(engine)._perform[kind]
    inside.relay(engine)._perform[kind] = lambda *_: (_ for _ in ()).throw(OSError("planted"))
    return lambda: inside.relay(engine)._perform.__setitem__(kind, perform)


@pytest.mark.parametrize("name", ["eager", "Adafactor", "some late"])
@pytest.mark.parametrize("beside", [False, True], ids=["saved", "being saved"])
def test_a_torn_engine_is_whole_again_once_it_has_loaded(
    tmp_path: Path, name: str, *, beside: bool
):
    with make(name) as engine:
        train(engine, name, to=SAVED)
        engine.save(tmp_path / "saved", background=beside)
        mend = plant(engine, "backward Pro m")
        with pytest.raises(OSError, match="planted"):
            engine.step(batch(SAVED))
        mend()
        with pytest.raises(RuntimeError, match=r"two steps.*engine\.load"):
            engine.step(batch(SAVED))
        with pytest.raises(RuntimeError, match="two steps"):
            engine.save(tmp_path / "torn")
        with pytest.raises(CheckpointError):
            engine.load(tmp_path / "missing")
        with pytest.raises(RuntimeError, match="two steps"):
            engine.step(batch(SAVED))
        engine.load(tmp_path / "saved")
        train(engine, name, to=LAST)
        assert not differences(state_of(engine), undisturbed(name))


@pytest.mark.parametrize("name", ["lookups", "everything", "halves"])
@pytest.mark.parametrize("kind", ["forward Pro m", "backward Pro m"])
def test_a_step_that_fails_beside_a_save_harms_neither(tmp_path: Path, name: str, kind: str):
    expected = saved_at_once(name)
    with make(name) as engine:
        train(engine, name, to=SAVED)
        saving = engine.save(tmp_path / "beside", background=True)
        mend = plant(engine, kind)
        with pytest.raises(OSError, match="planted"):
            engine.step(batch(SAVED))
        mend()
        saving.wait()
        train(engine, name, to=LAST)
        assert not differences(state_of(engine), undisturbed(name))
    assert contents(tmp_path / "beside") == expected


@pytest.mark.parametrize("then", ["wait", "close", "load"])
def test_an_update_that_fails_beside_a_save_leaves_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
):
    """The updates that the checkpoint waits for will never come: it is given up."""
    engine = make("clipped")
    train(engine, "clipped", to=SAVED)
    engine.save(tmp_path / "older")
    train(engine, "clipped", to=SAVED + 1)
    saving = engine.save(tmp_path / "newer", background=True)
    update = ParameterServer.update

    def fail(server: ParameterServer, name: str, *args: Any, **settings: Any) -> None:
        if name == "L1":
            raise MemoryError("planted")
        update(server, name, *args, **settings)

    monkeypatch.setattr(ParameterServer, "update", fail)
    with pytest.raises(UpdateFailedError, match="planted"):
        train(engine, "clipped", to=LAST)
    if then == "wait":
        with pytest.raises(CheckpointError, match=r"newer was not saved: .*update"):
            saving.wait()
    if then == "load":
        monkeypatch.undo()
        engine.load(tmp_path / "older")
        train(engine, "clipped", to=LAST)
        assert not differences(state_of(engine), undisturbed("clipped"))
        engine.close()
    else:
        with pytest.raises(UpdateFailedError, match="planted"):
            engine.close()
    assert saving.is_done
    assert os.listdir(tmp_path) == ["older"]
    assert all(parameter.isfinite().all() for parameter in inside.model(engine).parameters())
    with make("clipped") as fresh:
        fresh.load(tmp_path / "older")


# --------------------------------------------------------------------------------------------------
# The checkpoints of a run


class Dead(BaseException):
    """The process was killed: nothing runs any more."""


class Kill:
    """Counts what is done to the disk, and ends the process before the n-th of it."""

    FUNCTIONS = ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, before: int | None = None) -> None:
        self.count, self._before = 0, before
        self._lock = threading.Lock()
        monkeypatch.setattr(tensor_file, "PIECE_BYTES", 64)  # several writes for each file
        for name in self.FUNCTIONS:
            monkeypatch.setattr(os, name, self._wrapped(getattr(os, name)))
        monkeypatch.setattr(Path, "open", self._wrapped(Path.open))

    def _wrapped(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def perform(*args: Any, **settings: Any) -> Any:
            with self._lock:
                self.count += 1
                if self._before is not None and self.count >= self._before:
                    raise Dead
            return act(*args, **settings)

        return perform


@dataclasses.dataclass
class TinyEngine:
    """Saves a number, on the calling thread."""

    step_number: int
    value: int = 0

    def save(
        self,
        folder: str | Path,
        *,
        extra: Mapping[str, Any] | None = None,
        background: bool = False,
        then: Callable[[], None] | None = None,
    ) -> Saving:
        memory = {unit: torch.full((3,), self.step_number + self.value) for unit in ("L0", "L1")}
        files.empty_folder(Path(folder))
        saving = Saving(
            Path(folder),
            server=SimpleNamespace(world=World(), snapshot=None),
            snapshot=Snapshot(
                list(memory),
                image_of=lambda unit: Image(unit=unit, tensors={"a": memory[unit]}, steps={}),
                copy_of=lambda tensors, _: tensors,
                awaited=frozenset(),
                changing=frozenset(),
                spare_bytes=0,
            ),
            buffers={},
            manifest=Manifest(step=self.step_number, state=state(), files={}, extra=extra or {}),
            then=then,
        )
        saving._run()
        return saving


def value_of(folder: Path) -> int:
    """What a whole checkpoint holds."""
    found = Checkpoint(folder)
    found.check()
    values: list[int] = []
    for unit in ("L0", "L1"):
        for _, tensor in found.read(unit, ["a"]):
            values.extend(tensor.tolist())
    assert len(set(values)) == 1
    return values[0]


def filled(root: Path, *steps: int, keep: int = 2) -> CheckpointFolder:
    folder = CheckpointFolder(root, keep=keep)
    for step in steps:
        folder.save(TinyEngine(step))
    return folder


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.mark.parametrize("steps", [(), (1,), (1, 2)], ids=str)
@pytest.mark.parametrize("again", [False, True], ids=["a new step", "the last step again"])
def test_a_run_killed_at_any_action_has_a_whole_checkpoint_to_go_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: tuple[int, ...], *, again: bool
):
    engine = TinyEngine(len(steps) if again else len(steps) + 1, value=100 if again else 0)
    new = engine.step_number + engine.value
    with monkeypatch.context() as patched:
        folder = filled(tmp_path / "whole", *steps)
        kill = Kill(patched)
        folder.save(engine)
    assert kill.count > 15
    seen: list[int | None] = []
    for before in range(1, kill.count + 1):
        root = tmp_path / f"killed before {before}"
        folder = filled(root, *steps)
        with monkeypatch.context() as patched:
            Kill(patched, before=before)
            with pytest.raises(Dead):
                folder.save(engine)
        reopened = CheckpointFolder(root, keep=2)
        found = reopened.latest()  # also by who only reads
        value = None if found is None else value_of(found)
        reopened.tidy()
        latest = reopened.latest()
        seen.append(None if latest is None else value_of(latest))
        assert seen[-1] == value
        if latest is not None:
            assert (root / "latest").read_text() == latest.name + "\n"
        if root.exists():
            whole = {path.name for path in reopened.all()}
            assert set(names(root)) <= whole | {"latest", "latest.partial"}
            assert all(value_of(path) in (1, 2, new) for path in reopened.all())
        reopened.save(TinyEngine(9))  # nothing is in its way
        assert value_of(reopened.latest() or root) == 9
        assert set(names(root)) == {"latest", *(path.name for path in reopened.all())}
        shutil.rmtree(root)
    switched = seen.index(new)
    old = steps[-1] if steps else None
    assert seen == [old] * switched + [new] * (len(seen) - switched)


def test_a_checkpoint_written_over_its_predecessor_outlives_a_kill_at_any_action(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also where nobody keeps a folder of them."""
    with monkeypatch.context() as patched:
        TinyEngine(1).save(tmp_path / "counted")
        kill = Kill(patched)
        TinyEngine(2).save(tmp_path / "counted")
    for before in range(1, kill.count + 1):
        folder = tmp_path / f"killed before {before}"
        TinyEngine(1).save(folder)
        with monkeypatch.context() as patched:
            Kill(patched, before=before)
            with pytest.raises(Dead):
                TinyEngine(2).save(folder)
        assert value_of(folder) in (1, 2)
        TinyEngine(3).save(folder)
        assert value_of(folder) == 3
        shutil.rmtree(folder)
    assert names(tmp_path) == ["counted"]


def test_the_newest_few_are_kept(tmp_path: Path):
    folder = filled(tmp_path, 5, 10, 100, 2000, keep=3)
    assert [path.name[-4:] for path in folder.all()] == ["0010", "0100", "2000"]
    assert folder.latest() == tmp_path / "step-00002000"
    assert folder.latest() == folder.path_of(2000)
    folder = CheckpointFolder(tmp_path, keep=1)
    folder.save(TinyEngine(2001))
    assert names(tmp_path) == ["latest", "step-00002001"]


def test_checkpoints_are_ordered_by_the_number_of_their_step(tmp_path: Path):
    folder = filled(tmp_path, 99_999_998, 99_999_999, 100_000_000)
    first, last = folder.path_of(99_999_999), folder.path_of(100_000_000)
    assert folder.all() == [first, last]
    assert folder.latest() == last
    assert folder.before(last) == [first]
    assert folder.before(first) == []


def test_the_one_just_saved_is_kept_though_others_have_higher_numbers(tmp_path: Path):
    folder = filled(tmp_path, 5, 9)
    folder.save(TinyEngine(6))
    assert [path.name[-1] for path in folder.all()] == ["6", "9"]
    assert (tmp_path / "latest").read_text() == "step-00000006\n"
    assert folder.latest() == folder.path_of(9)


def test_none_is_the_latest_of_nothing(tmp_path: Path):
    folder = CheckpointFolder(tmp_path / "missing")
    assert folder.latest() is None
    assert folder.all() == []
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize("keep", [0, -1])
def test_at_least_one_is_kept(tmp_path: Path, keep: int):
    with pytest.raises(ValueError, match=f"keep={keep}; expected at least 1"):
        CheckpointFolder(tmp_path, keep=keep)


@pytest.mark.parametrize("text", ["", "step-00000001", "elsewhere", None])
def test_the_newest_that_is_whole_is_the_latest_whatever_the_pointer_says(
    tmp_path: Path, text: str | None
):
    """It is behind if the run was killed before it was switched."""
    folder = filled(tmp_path, 1, 2)
    if text is None:
        (tmp_path / "latest").unlink()
    else:
        (tmp_path / "latest").write_text(text)
    assert folder.latest() == folder.path_of(2)


def test_what_is_not_ours_is_left_alone(tmp_path: Path):
    for name in ("step-notes", "other.partial", "step-1.partial.txt"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "step-1000").mkdir()  # somebody else's checkpoint
    (tmp_path / "step-1000" / "model.pt").write_text("all of it")
    folder = filled(tmp_path, 1, 2, 3)
    assert (tmp_path / "step-1000" / "model.pt").read_text() == "all of it"
    assert {"step-notes", "other.partial", "step-1.partial.txt", "metrics.jsonl"} < set(
        names(tmp_path)
    )
    assert [path.name[-1] for path in folder.all()] == ["2", "3"]


@pytest.mark.parametrize("saves", [False, True], ids=["tidied", "saved to"])
def test_what_killed_runs_left_goes_once_somebody_writes(tmp_path: Path, *, saves: bool):
    filled(tmp_path, 1, 2)
    for name in ("step-00000003.partial", "step-00000002.replaced", "step-00000004.deleted"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "L0.safetensors").write_text("half")
    before = names(tmp_path)
    folder = CheckpointFolder(tmp_path)
    assert value_of(folder.latest() or tmp_path) == 2
    assert names(tmp_path) == before  # a run may go on writing where one only reads
    if saves:
        folder.save(TinyEngine(2, value=1))
    else:
        folder.tidy()
    assert names(tmp_path) == ["latest", "step-00000001", "step-00000002"]
    assert value_of(folder.latest() or tmp_path) == 2 + saves


def test_what_is_being_written_is_not_tidied_away_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = CheckpointFolder(tmp_path)
    folder.tidy()
    with make() as engine:
        with held_back(monkeypatch):
            folder.save(engine, background=True)
            assert folder.latest() is None
            assert names(tmp_path) == ["step-00000000.partial"]
        train(engine, to=1)
        folder.save(engine, background=True)
    assert [path.name for path in folder.all()] == ["step-00000000", "step-00000001"]


def test_what_is_deleted_only_in_part_does_not_look_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = filled(tmp_path, 1, 2)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda *_, **__: None)  # killed before that
        folder.save(TinyEngine(3))
    assert (tmp_path / "step-00000001.deleted" / "L0.safetensors").exists()
    assert folder.all() == [folder.path_of(2), folder.path_of(3)]
    CheckpointFolder(tmp_path).tidy()
    assert names(tmp_path) == ["latest", "step-00000002", "step-00000003"]


def test_a_pointer_that_cannot_be_switched_is_an_error_and_nothing_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    root = tmp_path / "run"
    with make() as engine:
        folder = CheckpointFolder(root, keep=1)
        train(engine, to=1)
        folder.save(engine)
        train(engine, to=2)
        with monkeypatch.context() as patched:
            Failing(patched, "rename", at=2, code=errno.EACCES)  # after that of the folder
            with pytest.raises(CheckpointError, match=r"cannot write .*latest: Permission denied"):
                folder.save(engine)
        assert folder.all() == [folder.path_of(1), folder.path_of(2)]
        assert (root / "latest").read_text() == "step-00000001\n"
        train(engine, to=3)
        folder.save(engine, background=True).wait()
        assert folder.all() == [folder.path_of(3)]


def test_an_engine_is_saved_into_a_folder_beside_training(tmp_path: Path):
    folder = CheckpointFolder(tmp_path, keep=2)
    with make("clipped") as engine:
        for number in range(1, LAST + 1):
            train(engine, "clipped", to=number)
            folder.save(engine, extra={"number": number}, background=True)
        expected = state_of(engine)
    assert [path.name for path in folder.all()] == ["step-00000005", "step-00000006"]
    with make("clipped", seed=1) as engine:
        assert engine.load(folder.latest() or "") == {"number": LAST}
        assert not differences(state_of(engine), expected)


# --------------------------------------------------------------------------------------------------
# Engines that differ


PRECISIONS = ("float32", "bfloat16", "float16")


@pytest.mark.parametrize("found", PRECISIONS)
@pytest.mark.parametrize("own", PRECISIONS)
def test_another_precision_takes_over_the_exact_masters_and_says_so(
    tmp_path: Path, found: str, own: str, caplog: pytest.LogCaptureFixture
):
    moments = "8bit" if own == "bfloat16" else "float32"
    kind = Kind({"optimizer": l2l.AdamW(lr=1e-2, moments=moments)})
    with make(kind, precision=found) as engine:
        train(engine, to=SAVED)
        engine.save(tmp_path / "saved")
        expected, model = state_of(engine), inside.model(engine)
    with make(kind, seed=1, precision=own) as engine:
        caplog.clear()
        engine.load(tmp_path / "saved")
        loaded = state_of(engine)
        for name, parameter in model.named_parameters():
            assert torch.equal(inside.server(engine).weight(name).float(), parameter), name
        kept = [name for name in expected if "|exp_avg" in name or name.endswith("updates")]
        assert len(kept) > 20
        assert not differences(
            {name: loaded[name] for name in kept}, {name: expected[name] for name in kept}
        )
        assert len(caplog.records) == (found != own)
        if found != own:
            assert f"was saved with precision {found}; this engine has {own}" in caplog.text
        train(engine, to=LAST)


def test_adafactor_in_another_precision_takes_over_weights_and_state(tmp_path: Path):
    with make("Adafactor") as engine:
        train(engine, to=SAVED)
        engine.save(tmp_path / "saved")
        model = inside.model(engine)
    with make("Adafactor", seed=1, precision="float32") as engine:
        engine.load(tmp_path / "saved")
        for name, parameter in model.named_parameters():
            assert torch.equal(inside.server(engine).weight(name), parameter.float())
        train(engine, to=LAST)


@pytest.mark.parametrize(("found", "own"), [(2, 3), (2, None), (None, 2)])
def test_other_microbatches_are_one_line_of_the_log(
    tmp_path: Path, found: int | None, own: int | None, caplog: pytest.LogCaptureFixture
):
    with make(microbatch_size=found) as engine:
        train(engine, to=SAVED)
        engine.save(tmp_path / "saved")
    with make(microbatch_size=own) as engine:
        caplog.clear()
        engine.load(tmp_path / "saved")
        assert [record.getMessage() for record in caplog.records] == [
            f"the checkpoint was made with microbatch_size={found}, this engine has {own}: results "
            "may differ in their last bits."
        ]
        train(engine, to=LAST)


def test_the_size_of_microbatches_is_that_of_the_checkpoint(tmp_path: Path):
    planned = Kind({"microbatch_size": None, "overrides": {"microbatch_tokens": 2 * LENGTH}})
    with make(planned) as engine:
        train(engine, to=SAVED)
        engine.save(tmp_path / "saved")
        train(engine, to=LAST)
        expected = state_of(engine)
    with make(microbatch_size=None, seed=1) as engine:
        engine.load(tmp_path / "saved")
        assert inside.planning(engine).decisions.microbatch_tokens == 2 * LENGTH
        train(engine, to=LAST)
        assert not differences(state_of(engine), expected)
    own = {"microbatch_size": None, "overrides": {"microbatch_tokens": 3 * LENGTH}}
    with make(Kind(own)) as engine:  # what the user says, holds
        engine.load(tmp_path / "saved")
        train(engine, to=LAST)
        assert inside.planning(engine).decisions.microbatch_tokens == 3 * LENGTH


@pytest.mark.parametrize(
    "overrides", [{"halves": True}, {"num_tail": 2}, {"num_slots": 3, "num_cells": 9}], ids=str
)
def test_an_engine_with_other_choices_that_change_no_bits_goes_on_exactly(
    tmp_path: Path, overrides: dict[str, Any]
):
    with make("clipped") as engine:
        train(engine, "clipped", to=SAVED)
        engine.save(tmp_path / "saved")
    with make("clipped", seed=1, overrides=overrides) as engine:
        engine.load(tmp_path / "saved")
        train(engine, "clipped", to=LAST)
        assert not differences(state_of(engine), undisturbed("clipped"))


BUDGETED = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6}
SMALL, LARGE = "150MiB", "240MiB"


def budgeted(budget: str, **settings: Any) -> l2l.Engine:
    model = build_llama(**BUDGETED)
    return inside.engine(
        model,
        device="cpu",
        device_memory=budget,
        precision="float32",
        kernel="readable",  # which rounds as the device does
        seed=0,
        **ADAMW,
        **settings,
    )


@pytest.mark.usefixtures("as_h200")
def test_choices_that_change_bits_are_adopted_in_another_budget(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    chosen = {"microbatch_tokens": 24, "piece_tokens": 12}
    with budgeted(SMALL, overrides=chosen) as engine:
        engine.step(causal_batch(8, 0))
        engine.save(tmp_path / "saved")
        engine.step(causal_batch(8, 1))
        expected = state_of(engine)
        before = dict(engine.plan.choices)
    with budgeted(LARGE) as engine:
        engine.step(causal_batch(8, 5))
        assert inside.planning(engine).decisions.microbatch_tokens != 24
        caplog.clear()
        engine.load(tmp_path / "saved")
        engine.step(causal_batch(8, 1))
        choices, decisions = dict(engine.plan.choices), inside.planning(engine).decisions
        assert (decisions.microbatch_tokens, decisions.piece_tokens) == (24, 12)
        assert choices["microbatch"] == before["microbatch"]
        assert choices["tail"] != before["tail"]  # what changes no bits follows the budget
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert not differences(state_of(engine), expected)


@pytest.mark.parametrize("budget", ["160MiB", "180MiB"])
def test_the_same_budget_on_another_machine_places_layers_alike(
    budget: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Where each layer runs decides which code computes it: the same bits need the same place."""
    fast = dataclasses.replace(H200, context_bytes=0)  # for which these budgets have no room
    slow = dataclasses.replace(fast, both_ways_rate=1e9, fetch_rate=1e9, host_rate=1e9)
    placed = []
    for hardware, loads in ((fast, False), (slow, True), (slow, False)):
        monkeypatch.setattr(
            "l2l.planner.planning.known_hardware", lambda *_, found=hardware, **__: found
        )
        with budgeted(budget) as engine:
            if loads:
                engine.load(tmp_path / "saved")
            engine.step(causal_batch(8, 0))
            decisions = inside.planning(engine).decisions
            placed.append({name: getattr(decisions, name) for name in inside.PLACED})
            if hardware is fast:
                engine.save(tmp_path / "saved")
    assert placed[0] == placed[1] != placed[2]


@pytest.mark.parametrize("compiled", [False, True])
def test_another_budget_is_one_line_where_layers_are_compiled(
    compiled: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    with make("eager") as engine:
        train(engine, "eager", to=1)
        engine.save(tmp_path / "saved")
    with make("eager") as engine:
        monkeypatch.setattr(type(inside.compiler(engine)), "is_on", property(lambda _: compiled))
        inside.planning(engine).budget.given = 1 << 30
        engine.load(tmp_path / "saved")
    told = [line for line in caplog.messages if "placed anew" in line]
    assert len(told) == compiled


@pytest.mark.usefixtures("as_h200")
def test_choices_that_do_not_fit_another_budget_are_made_anew_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    rows = {name: tensor.repeat(1, 8) for name, tensor in causal_batch(8).items()}
    with budgeted(LARGE) as engine:
        engine.step(rows)
        tokens = inside.planning(engine).decisions.microbatch_tokens
        engine.save(tmp_path / "saved")
    with budgeted("151MiB") as engine:
        engine.load(tmp_path / "saved")
        engine.step(rows)
        assert inside.planning(engine).decisions.microbatch_tokens < tokens
    assert "does not fit this budget and is chosen anew" in caplog.text


# --------------------------------------------------------------------------------------------------
# The format, as docs/checkpoint_format.md has it


def test_masters_can_be_read_without_this_package(whole: Path):
    with make("bfloat16", seed=1) as engine:
        engine.load(whole / "newer")
        name = "layers.0.linear.weight"
        master = inside.server(engine).weight(name).clone()
    found = load_file(whole / "newer" / "L0.safetensors")
    weight, remainder = found[name], found[f"{name}|remainders"]
    bits = (weight.view(torch.int16).int() << 16) + remainder.int()
    assert torch.equal(bits.view(torch.float32), master)
    assert torch.equal(weight, master.bfloat16())  # but for ties


def test_the_manifest_says_what_the_files_are(whole: Path):
    body = json.loads((whole / "newer" / "manifest.json").read_text())
    assert (body["format"], body["version"], body["step"]) == ("l2l checkpoint", 1, SAVED)
    assert set(body) == {"format", "version", "step", "state", "extra", "files", "checksum"}
    assert set(body["state"]) == {
        "seed",
        "choices",
        "layers",
        "link",
        "optimizer",
        "moments",
        "groups",
        "num_shares",
        "loss_scale",
    }
    for name, record in body["files"].items():
        path = whole / "newer" / f"{name}.safetensors"
        assert record["bytes"] == path.stat().st_size
        assert record["steps"] == ({} if name == "buffers" else {"": SAVED})
        assert record["checksum"] == f"{zlib.crc32(path.read_bytes()):08x}"
    checksum = body.pop("checksum")
    text = json.dumps(body, sort_keys=True)
    assert checksum == f"{zlib.crc32(text.encode()):08x}"


def test_memory_for_copies_is_made_beforehand_and_used_again(tmp_path: Path):
    family = FAMILIES["llama_tied"]
    with inside.engine(family.build(), device="cpu", microbatch_size=2, clip_norm=1.0) as engine:
        engine.step(family.batch(4))
        engine.prepare_saving()
        spare = inside.server(engine).spare
        spare.wait()
        made = spare.free_bytes
        assert made >= sum(
            inside.server(engine).image(name).nbytes
            for name, unit in inside.server(engine).units.items()
            if unit.form.trained.names
        )
        for number in range(2):
            saving = engine.save(tmp_path / str(number), background=True)
            for _ in range(2):
                engine.step(family.batch(4))
            saving.wait()
            assert spare.free_bytes == made, "and no more was needed"
    assert spare.free_bytes == 0
