"""Optimizer state on disk: the same bits wherever it lies, and nothing lost when the disk fails.

Faults are put where bytes reach the system: `read_some` and `write_some` of `l2l.device.disk`.
"""

import dataclasses
import errno
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import inside
import pytest
import test_ordering as models
import torch
from torch import Tensor, nn

import l2l
from l2l.cli.report import _lines, summarise
from l2l.device import (
    CheckingDevice,
    DiskError,
    DiskFolder,
    UpdateFailedError,
    Work,
    disk,
    parse_bytes,
)
from l2l.engine import Engine
from l2l.planner import H200, STATE_ON_HOST, DiskTier, Together
from l2l.planner.disk_tier import spread
from l2l.train.settings.sections import MemorySettings

ADAMW = l2l.AdamW(lr=0.01)
HALVES = {"optimizer": ADAMW, "clip_norm": 0.05, "overrides": {"halves": True}}
SETTINGS: dict[str, dict[str, Any]] = {
    "eager": {},
    "clipped": {"clip_norm": 0.05},
    "halves": HALVES,
    "some late": {"optimizer": ADAMW, "overrides": {"num_late": 3}},
    "8-bit": {"optimizer": l2l.AdamW(lr=0.01, moments="8bit"), "kernel": "native"},
    "Lion": {"optimizer": l2l.Lion(lr=0.01), "precision": "bfloat16"},
    "bfloat16": {"optimizer": ADAMW, "kernel": "native", "precision": "bfloat16"},
    "float16": {"optimizer": ADAMW, "precision": "float16"},
    "averages": {"optimizer": l2l.AdamW(lr=0.01, average=0.9)},
    "tail": {"optimizer": ADAMW, "overrides": {"num_tail": 2}},
    "device state": {
        "optimizer": ADAMW,
        "overrides": {"num_tail": 1, "num_device_states": 1, "num_shared": 1, "num_pieces": 2},
        "kernel": "native",
        "clip_norm": 0.05,
    },
    "random depth": {"optimizer": ADAMW, "depth": l2l.StochasticDepth(0.5), "seed": 3},
}
OTHERS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], dict[str, Any]]] = {
    "tables": (
        models.build_tied,
        models.make_tokens,
        {"optimizer": ADAMW, "embedding": "host", "clip_norm": 0.05},
    ),
    "several stacks": (
        lambda: models.build_of(models.Translator),
        models.make_sequences,
        {"optimizer": ADAMW},
    ),
    "layers called twice": (
        lambda: models.build_of(models.TwiceClassifier),
        models.make_batch,
        {"optimizer": ADAMW},
    ),
}
FIRST = models.make_batch
Result = tuple[list[float], dict[str, Tensor]]


def state_of(engine: Engine) -> dict[str, Tensor]:
    """Weights, and everything that the optimizer keeps."""
    found = {name: weight.clone() for name, weight in engine.named_weights()}
    states = engine.optimizer.state_dict()["state"]
    for number, state in states.items():
        found |= {f"{number}|{name}": torch.as_tensor(one).clone() for name, one in state.items()}
    return found


def engine_of(
    model: nn.Module, folder: Path | None, number: int, weights: int = 0, **settings: Any
) -> Engine:
    """An engine with state, and weights, of so many layers on disk."""
    if folder is not None:
        on_disk = {"num_on_disk": number, "num_weights_on_disk": weights}
        overrides = {**settings.get("overrides", {}), **on_disk}
        settings = {**settings, "overrides": overrides, "disk": folder}
    return models.make_engine(model, settings.pop("first", None), **settings)


def trained(
    folder: Path | None,
    number: int = 0,
    *,
    build: Callable[[], nn.Module] = models.build,
    batch: Callable[[int], Any] = FIRST,
    num_steps: int = 4,
    **settings: Any,
) -> Result:
    with engine_of(build(), folder, number, **settings) as engine:
        losses = [engine.step(batch(seed)).loss for seed in range(num_steps)]
        return losses, state_of(engine)


def assert_same(found: Result, expected: Result) -> None:
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    for name, tensor in expected[1].items():
        assert torch.equal(found[1][name], tensor), name


@pytest.mark.parametrize("name", SETTINGS)
def test_any_split_between_memory_and_disk_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    settings = SETTINGS[name]
    expected = trained(None, **settings)
    splits = ((0, 0), (2, 0), (4, 1), (4, 4)) if name == "eager" else ((3, 0), (4, 3), (1, 2))
    for number, weights in splits:
        assert_same(trained(tmp_path, number, weights=weights, **settings), expected)
    assert not list(tmp_path.glob("*.l2l")), "nothing but the lock is left"


@pytest.mark.parametrize("values", [1, 2, 4, 9])
@pytest.mark.parametrize("name", ["eager", "clipped", "bfloat16", "tail", "random depth"])
def test_a_stash_on_disk_gives_the_same_bits(name: str, values: int, tmp_path: Path) -> None:
    settings = {**SETTINGS[name], "microbatch_size": 1}
    expected = trained(None, **settings)
    chosen = {"num_cells": 3, **settings.pop("overrides", {}), "stash_values": values}
    split = {"number": 2, "weights": 2, "overrides": chosen}
    assert_same(trained(tmp_path, **split, **settings), expected)


def test_a_stash_on_disk_takes_the_memory_of_few_layers(tmp_path: Path) -> None:
    taken = []
    for values in (None, 2, 1):
        overrides = {"num_cells": 3, "stash_values": values}
        settings = {"microbatch_size": 1, "overrides": overrides, "optimizer": ADAMW}
        with engine_of(models.build(), tmp_path, 0, **settings) as engine:
            for seed in range(2):
                engine.step(FIRST(seed))
            inside.finish_step(engine)
            folder = inside.server(engine).disk.folder
            assert (folder.num_written_bytes > 0) is (values is not None)
            assert (folder.num_read_bytes > 0) is (values is not None)
            taken.append(inside.arena(engine).bytes_by_name["stash"])
            engine.evaluate(FIRST(0))
            assert inside.arena(engine).bytes_by_name["stash"] == taken[-1]
    assert taken[1] < 0.6 * taken[0]
    assert taken[2] < 0.7 * taken[1], "recorded arguments stay in memory"


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_give_the_same_bits(name: str, tmp_path: Path) -> None:
    build, batch, settings = OTHERS[name]
    expected = trained(None, build=build, batch=batch, **settings)
    for number, values in ((0, None), (2, None), (2, 1)):
        split = {"number": 2, "weights": number, "overrides": {"stash_values": values}}
        assert_same(trained(tmp_path, **split, build=build, batch=batch, **settings), expected)


def test_adapters_give_the_same_bits(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = models.build()
        for layer in model.layers:
            layer.linear.weight.requires_grad_(False)
        return model

    expected = trained(None, build=build, optimizer=ADAMW)
    for number, weights in ((3, 0), (3, 4), (0, 4)):
        assert_same(
            trained(tmp_path, number, weights=weights, build=build, optimizer=ADAMW), expected
        )


def test_of_frozen_weights_nothing_is_written(tmp_path: Path) -> None:
    """Of a layer with a frozen matrix a step writes the page that its bias is in, and reads all."""
    model = Wide()
    for layer in model.layers:
        layer.weight.requires_grad_(False)
    with engine_of(model, tmp_path, 0, 6, optimizer=l2l.SGD(lr=0.1), precision="float32") as engine:
        engine.step(wide_batch(0))
        inside.finish_step(engine)
        folder = inside.server(engine).disk.folder
        before = folder.num_read_bytes, folder.num_written_bytes
        engine.step(wide_batch(1))
        inside.finish_step(engine)
        assert folder.num_written_bytes - before[1] == 6 * 4096
        assert folder.num_read_bytes - before[0] > 6 * 256 * 256 * 4


@pytest.mark.parametrize("first", [lane.value for lane in models.Lane])
def test_every_order_that_waits_allow_gives_the_same_bits(first: str, tmp_path: Path) -> None:
    settings = {"optimizer": ADAMW, "overrides": {"num_late": 2}}
    expected = trained(None, **settings)
    for weights in (0, 4):
        found = trained(tmp_path, 4, weights=weights, first=models.Lane(first), **settings)
        assert_same(found, expected)


@pytest.mark.parametrize("weights", [0, 4])
def test_weights_can_be_read_and_written_between_steps(weights: int, tmp_path: Path) -> None:
    def result(folder: Path | None) -> list[Any]:
        found: list[Any] = []
        settings = {"optimizer": ADAMW, "precision": "bfloat16", "clip_norm": 0.1}
        with engine_of(models.build(), folder, 3, weights, **settings) as engine:
            for seed in range(3):
                found.append(engine.step(FIRST(seed)).loss)
                found.append(engine.evaluate(FIRST(9)))
                found += state_of(engine).values()
                model = inside.model(engine)
                found.append(model.layers[1].linear.weight.detach().clone())
        return found

    for mine, other in zip(result(tmp_path), result(None), strict=True):
        assert torch.equal(torch.as_tensor(mine), torch.as_tensor(other))


# --------------------------------------------------------------------------------------------------
# Checkpoints


@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_run_resumes_with_any_other_split(tmp_path: Path, clip: float | None) -> None:
    settings = {"optimizer": ADAMW, "precision": "bfloat16", "kernel": "native", "clip_norm": clip}
    expected = trained(None, num_steps=6, **settings)
    losses: list[float] = []
    for part, split in enumerate(((2, 4), (4, 1), (0, 0))):
        with engine_of(models.build(), tmp_path / "disk", *split, **settings) as engine:
            if part:
                engine.load(tmp_path / "checkpoint")
            losses += [engine.step(FIRST(seed)).loss for seed in range(2 * part, 2 * part + 2)]
            engine.save(tmp_path / "checkpoint")
            found = losses, state_of(engine)
    assert_same(found, expected)
    with engine_of(models.build(), None, 0, **settings) as engine:  # and without a disk
        engine.load(tmp_path / "checkpoint")
        assert_same((losses, state_of(engine)), expected)


@pytest.mark.parametrize("weights", [0, 4])
@pytest.mark.parametrize("settings", [{}, {"clip_norm": 0.05}], ids=["eager", "clipped"])
def test_saving_beside_training_saves_exactly_one_step(
    tmp_path: Path, settings: dict[str, Any], weights: int
) -> None:
    settings = {"optimizer": ADAMW, "precision": "bfloat16", "kernel": "native", **settings}
    with engine_of(models.build(), tmp_path / "disk", 3, weights, **settings) as engine:
        losses = [engine.step(FIRST(seed)).loss for seed in range(2)]
        saving = engine.save(tmp_path / "checkpoint", background=True)
        losses += [engine.step(FIRST(seed)).loss for seed in range(2, 5)]
        saving.wait()
        expected = losses, state_of(engine)
    with engine_of(models.build(), tmp_path / "disk", 1, **settings) as engine:
        engine.load(tmp_path / "checkpoint")
        assert engine.step_number == 2
        losses = losses[:2] + [engine.step(FIRST(seed)).loss for seed in range(2, 5)]
        assert_same((losses, state_of(engine)), expected)


def test_a_checkpoint_of_another_precision_is_taken_over_exactly(tmp_path: Path) -> None:
    with engine_of(models.build(), None, 0, optimizer=ADAMW) as engine:
        engine.step(FIRST(0))
        engine.save(tmp_path / "checkpoint")
        expected = state_of(engine)
    settings = {"optimizer": ADAMW, "precision": "bfloat16"}
    with engine_of(models.build(), tmp_path / "disk", 4, 2, **settings) as engine:
        engine.load(tmp_path / "checkpoint")
        found = state_of(engine)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


# --------------------------------------------------------------------------------------------------
# Bytes


@pytest.mark.parametrize(("weights", "clip"), [(0, None), (4, None), (4, 0.05)])
def test_every_step_reads_and_writes_what_the_plan_says(
    weights: int, clip: float | None, tmp_path: Path, as_h200: None
) -> None:
    settings = {
        "optimizer": ADAMW,
        "device_memory": "1GiB",
        "precision": "bfloat16",
        "overrides": STATE_ON_HOST,
        "clip_norm": clip,
    }
    with engine_of(models.build(), tmp_path, 3, weights, **settings) as engine:
        engine.step(FIRST(0))
        inside.finish_step(engine)
        plan, folder = engine.plan, inside.server(engine).disk.folder
        before = folder.num_read_bytes, folder.num_written_bytes
        for seed in range(3):
            engine.step(FIRST(seed))
        inside.finish_step(engine)
        pages = 3 * 3 + weights
        assert plan.disk_written_bytes == pages * 4096, "two moments and remainders, a page each"
        assert plan.disk_read_bytes == (pages + weights // 4) * 4096, "three stay at the turn"
        assert folder.num_read_bytes - before[0] == 3 * plan.disk_read_bytes
        assert folder.num_written_bytes - before[1] == 3 * plan.disk_written_bytes
        text = str(engine.plan)
    written, read = plan.disk_written_bytes, plan.disk_read_bytes
    assert f"{read / 1024:.2f} KiB read and {written / 1024:.2f} KiB written a step" in text
    assert f"a step: {1_200 * 10**12 // written:,} steps use up" in text
    assert "buffers for the disk" in text
    assert "that of 3 of 4 layers" in text
    assert ("those of 4 of 4 layers" in text) is bool(weights)


def test_a_step_that_is_skipped_writes_nothing(tmp_path: Path) -> None:
    with engine_of(models.build(), tmp_path, 4, 4, clip_norm=0.05) as engine:
        engine.step(FIRST(0))
        engine.step(FIRST(1))
        batch = FIRST(2)
        batch["inputs"][0, 0] = torch.nan
        assert engine.step(batch).skipped
        inside.finish_step(engine)
        folder = inside.server(engine).disk.folder
        before = folder.num_written_bytes
        engine.step(FIRST(3))  # has nothing to settle
        inside.finish_step(engine)
        assert folder.num_written_bytes == before
        assert folder.num_read_bytes > 0


class Wide(nn.Module):
    def __init__(self, width: int = 256, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = inputs
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return {"loss": nn.functional.cross_entropy(self.head(hidden), labels)}


def wide_batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (4,), generator=generator)
    return {"inputs": torch.randn(4, 256, generator=generator), "labels": labels}


def test_what_memory_has_no_room_for_goes_to_disk(tmp_path: Path) -> None:
    """Twelve layers with half a megabyte of state each, and room for some of them."""
    torch.manual_seed(0)
    settings = {"optimizer": ADAMW, "precision": "float32"}
    with pytest.raises(ValueError, match=r"parameter server needs.*disk=FOLDER"):
        engine_of(Wide(depth=12), None, 0, host_memory="9MiB", **settings)

    def on_disk(host_memory: str, disk: Any = tmp_path) -> dict[str, int]:
        model, given = Wide(depth=12), {"host_memory": host_memory, "disk": disk, **settings}
        with models.make_engine(model, None, **given) as engine:
            engine.step(wide_batch(0))
            server = inside.arena(engine).bytes_by_name.items()
            taken = sum(nbytes for name, nbytes in server if not name.startswith("stash"))
            limit = parse_bytes(host_memory, name="host_memory")
            assert limit - (1 << 20) < taken <= limit
            units = inside.server(engine).units.values()
            parts = [part for unit in units for part in unit.blocks]
            return {part: parts.count(part) for part in ("state", "weights")}

    found = on_disk("9MiB")
    assert 0 < found["state"] < 12
    assert found["weights"] == 0
    found = on_disk("5MiB")  # of which buffers take two and a half
    assert found["state"] == 12
    assert 0 < found["weights"] < 12
    with pytest.raises(ValueError, match=r"must go to disk, where there is room for 256\.00 KiB"):
        on_disk("9MiB", l2l.Disk(tmp_path, size="256KiB"))


# --------------------------------------------------------------------------------------------------
# Faults


@contextmanager
def faulty(monkeypatch: pytest.MonkeyPatch, way: str, fault: Callable[[], None]) -> Iterator[None]:
    """Let `fault` come before everything that is read, or written."""
    name = f"{way}_some"
    real = getattr(disk, name)

    def some(*args: Any) -> int:
        fault()
        return int(real(*args))

    with monkeypatch.context() as patch:
        patch.setattr(disk, name, some)
        yield


def raising(number: int) -> Callable[[], None]:
    def fault() -> None:
        raise OSError(number, os.strerror(number))

    return fault


@pytest.mark.parametrize("weights", [0, 4])
@pytest.mark.parametrize(
    ("way", "number", "said"),
    [
        ("read", errno.EIO, "cannot read .* Input/output error.*last checkpoint"),
        ("write", errno.EIO, "cannot write .* Input/output error.*last checkpoint"),
        ("write", errno.ENOSPC, "cannot write .* No space left on device. Make room there"),
        ("read", errno.ENODEV, "cannot read .* No such device. Look at the drive"),
    ],
)
def test_a_disk_that_fails_stops_the_run_and_loses_nothing_that_was_saved(
    way: str,
    number: int,
    said: str,
    weights: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"optimizer": ADAMW, "precision": "bfloat16", "clip_norm": 0.05}
    expected = trained(None, num_steps=4, **settings)
    with engine_of(models.build(), tmp_path / "disk", 4, weights, **settings) as engine:
        losses = [engine.step(FIRST(seed)).loss for seed in range(2)]
        engine.save(tmp_path / "checkpoint")
        with faulty(monkeypatch, way, raising(number)):
            with pytest.raises(UpdateFailedError, match=said):  # noqa: PT012
                for seed in range(2, 6):
                    engine.step(FIRST(seed))
            assert engine.state == "torn"
            with pytest.raises(RuntimeError, match=r"engine\.load"):
                engine.step(FIRST(2))
        engine.load(tmp_path / "checkpoint")  # the disk is well again
        losses += [engine.step(FIRST(seed)).loss for seed in range(2, 4)]
        assert_same((losses, state_of(engine)), expected)


@pytest.mark.parametrize("act", ["evaluate", "predict", "step"])
@pytest.mark.parametrize("split", [(4, 4, None), (0, 0, 1)], ids=["weights", "stash"])
def test_nothing_is_made_of_what_could_not_be_read(
    act: str, split: tuple[int, int, int | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"overrides": {"num_cells": 3, "stash_values": split[2]}, "microbatch_size": 1}
    engine = engine_of(models.build(), tmp_path, *split[:2], optimizer=ADAMW, **settings)
    engine.step(FIRST(0))
    said = r"cannot read .* Input/output error"
    with faulty(monkeypatch, "read", raising(errno.EIO)):
        if split[2] is not None and act != "step":  # forward only: all of it is in memory
            getattr(engine, act)(FIRST(1))
        else:
            with pytest.raises(UpdateFailedError, match=said):
                getattr(engine, act)(FIRST(1))
            assert engine.state == "torn"
    with warnings.catch_warnings(action="ignore"), suppress(UpdateFailedError):
        engine.close()  # says once more what has failed


def test_weights_come_back_rounded_when_the_disk_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"optimizer": ADAMW, "precision": "bfloat16"}
    model = models.build()
    engine = engine_of(model, tmp_path, 2, **settings)
    engine.step(FIRST(0))
    expected = {name: one.bfloat16() for name, one in engine.state_dict().items()}
    with faulty(monkeypatch, "read", raising(errno.EIO)):
        engine.evaluate(FIRST(1))  # what was at hand is put away
        engine.close()
    assert engine.state == "closed"
    assert "weights of L1 come back rounded: cannot read" in caplog.text
    found = model.state_dict()
    bits = [(one.bfloat16(), expected[name]) for name, one in found.items()]
    assert all((one - other).abs().max() <= 2e-2 * other.abs().max() for one, other in bits)
    assert torch.equal(found["layers.1.linear.weight"], expected["layers.1.linear.weight"].float())


def test_weights_that_went_with_the_disk_are_not_lost_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.build()
    engine = engine_of(model, tmp_path, 4, 2, optimizer=ADAMW)
    engine.step(FIRST(0))
    expected = engine.state_dict()
    with (
        faulty(monkeypatch, "read", raising(errno.EIO)),
        pytest.raises(DiskError, match=r"weights of L1, L2 .* are NaN in the model now"),
    ):
        engine.close()
    assert engine.state == "closed"
    for name, one in model.state_dict().items():
        is_lost = name.startswith(("layers.1.", "layers.2."))
        assert one.isnan().all() if is_lost else torch.equal(one, expected[name]), name


def test_requests_that_are_done_in_parts_are_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_read, real_write = disk.read_some, disk.write_some
    expected = trained(None, optimizer=ADAMW)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "read_some", lambda d, v, o: real_read(d, [v[0][:4096]], o))
        patch.setattr(disk, "write_some", lambda d, v, o: real_write(d, [v[0][:4096]], o))
        assert_same(trained(tmp_path, 4, optimizer=ADAMW), expected)
        patch.setattr(disk, "read_some", lambda d, v, o: real_read(d, [v[0][:1000]], o))
        patch.setattr(disk, "write_some", lambda d, v, o: real_write(d, [v[0][:1000]], o))
        assert_same(trained(tmp_path, 4, optimizer=ADAMW), expected)


def test_a_slow_disk_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"optimizer": ADAMW, "overrides": {"num_late": 2}}
    expected = trained(None, **settings)
    for way in ("read", "write"):
        with faulty(monkeypatch, way, lambda: time.sleep(0.005)):
            assert_same(trained(tmp_path, 3, weights=4, **settings), expected)


def test_without_direct_access_the_page_cache_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trained(None, optimizer=ADAMW)
    monkeypatch.setattr(disk, "DIRECT", 0)
    assert_same(trained(tmp_path, 4, optimizer=ADAMW), expected)


@pytest.mark.parametrize("weights", [0, 4])
def test_a_step_that_is_interrupted_keeps_what_it_has_settled(
    weights: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward pass fails after late updates were made in buffers of the disk."""
    settings = {"optimizer": ADAMW, "clip_norm": 0.05}
    expected = trained(None, **settings)
    with engine_of(models.build(), tmp_path, 4, weights, **settings) as engine:
        losses = [engine.step(FIRST(0)).loss]
        relay, perform = inside.relay(engine), inside.relay(engine)._perform
        for kind in ("forward U m", "loss m", "fetch U"):
            real = perform[kind]

            def fail(*_: object) -> None:
                raise KeyboardInterrupt

            perform[kind] = fail
            with pytest.raises(KeyboardInterrupt):
                engine.step(FIRST(1))
            relay._perform[kind] = real
            assert engine.state == "open"
        losses += [engine.step(FIRST(seed)).loss for seed in range(1, 4)]
        assert_same((losses, state_of(engine)), expected)


class Interrupted(CheckingDevice):
    """Ctrl-C comes when state that has just been updated is about to be written."""

    number = -1  # of writes until then

    def submit(self, lane: models.Lane, text: str, work: Work) -> None:
        if lane is models.Lane.WRITE:
            self.number -= 1
            if self.number == 0:
                raise KeyboardInterrupt
        super().submit(lane, text, work)


@pytest.mark.parametrize("weights", [0, 4])
@pytest.mark.parametrize("number", [1, 3])
def test_state_is_written_and_saved_when_a_step_is_given_up(
    number: int, weights: int, tmp_path: Path
) -> None:
    """What the step before has left is done by the step that fails, and saved as it is then."""
    settings = {"optimizer": ADAMW, "clip_norm": 0.05}
    with engine_of(models.build(), None, 0, **settings) as engine:
        engine.step(FIRST(0))
        engine.save(tmp_path / "expected")
    expected = trained(None, num_steps=3, **settings)
    device = Interrupted()
    disk = tmp_path / "disk"
    with engine_of(models.build(), disk, 4, weights, device=device, **settings) as engine:
        losses = [engine.step(FIRST(0)).loss]
        saving = engine.save(tmp_path / "saved", background=True)
        device.number = number
        with pytest.raises(KeyboardInterrupt):
            engine.step(FIRST(1))
        saving.wait()
        losses += [engine.step(FIRST(seed)).loss for seed in (1, 2)]
        assert_same((losses, state_of(engine)), expected)
    for path in (tmp_path / "expected").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "saved" / path.name).read_bytes(), path.name


# --------------------------------------------------------------------------------------------------
# The folder


def test_two_runs_in_one_folder_are_refused(tmp_path: Path) -> None:
    said = rf"used by another run \(process {os.getpid()}\)"
    with engine_of(models.build(), tmp_path, 1), pytest.raises(ValueError, match=said):
        engine_of(models.build(), tmp_path, 1)
    engine_of(models.build(), tmp_path, 1).close()


def test_what_a_killed_run_has_left_is_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("not ours")
    child = os.fork()
    if child == 0:
        folder = DiskFolder(l2l.Disk(tmp_path))
        folder.make(1 << 20)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(list(tmp_path.glob("block-*.l2l"))) == 1
    folder = DiskFolder(l2l.Disk(tmp_path))
    assert not list(tmp_path.glob("block-*.l2l"))
    folder.close()
    assert (tmp_path / "mine.txt").read_text() == "not ours"


def test_a_disk_that_is_too_small_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model = models.build()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    monkeypatch.setattr(disk.os, "posix_fallocate", full)
    with pytest.raises(UpdateFailedError, match=r"cannot make .* No space left on device"):
        engine_of(model, tmp_path, 2)
    assert all(torch.equal(before[name], one) for name, one in model.state_dict().items())
    assert not list(tmp_path.glob("block-*.l2l"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"optimizer": l2l.Adafactor(lr=0.1)}, "Adafactor updates them on the device"),
        ({"disk": None, "overrides": {"num_on_disk": 2}}, "there is no disk"),
        ({"disk": None, "overrides": {"num_weights_on_disk": 2}}, "there is no disk"),
    ],
)
def test_what_a_disk_is_not_for_is_refused(
    settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    given = {"disk": tmp_path, **settings}
    if given["disk"] is None:
        del given["disk"]
    with pytest.raises(ValueError, match=said):
        models.make_engine(models.build(), None, **given)


def test_layers_stay_as_they_are_with_a_disk(tmp_path: Path) -> None:
    with (
        engine_of(models.build(), tmp_path, 1) as engine,
        pytest.raises(ValueError, match="without disk="),
    ):
        engine.layers.remove(1)


# --------------------------------------------------------------------------------------------------
# Rates


def test_rates_are_read_from_text() -> None:
    tier = DiskTier.of_text("2TB@6.5/5GB/s")
    assert (tier.size_bytes, tier.read_rate, tier.write_rate) == (2 * 10**12, 6.5e9, 5e9)
    assert (tier.both_read_rate, tier.both_write_rate) == (3.25e9, 2.5e9)
    for text in ("2TB", "2TB@5GB/s", "2TB@0/5GB/s", "much@6.5/5GB/s"):
        with pytest.raises(ValueError, match=r"rates of a disk|is not a size"):
            DiskTier.of_text(text)


def test_a_folder_is_measured(tmp_path: Path) -> None:
    folder = DiskFolder(l2l.Disk(tmp_path, size="1GiB"))
    tier = DiskTier.of_folder(folder, None, small=True)
    assert tier.size_bytes <= 1 << 30
    assert tier.read_rate > 0 < tier.write_rate
    assert tier.both_read_rate <= tier.read_rate
    assert (folder.num_read_bytes, folder.num_written_bytes) == (0, 0)
    given = DiskTier.of_folder(folder, "3/2GB/s", small=True)
    assert (given.read_rate, given.write_rate) == (3e9, 2e9)
    folder.close()


def test_layers_on_disk_lie_evenly_and_the_first_goes_last() -> None:
    order = spread(range(8))
    assert order == [4, 2, 6, 1, 5, 3, 7, 0]
    assert spread(range(5))[-1] == 0


# --------------------------------------------------------------------------------------------------
# Plans


def plan_of(rates: str, host_memory: str, **settings: Any) -> l2l.Plan:
    """Of a model of six layers with half a megabyte of state each, and a slow disk."""
    inputs, labels = torch.zeros(64, 256), torch.zeros(64, dtype=torch.int64)
    return l2l.plan(
        Wide(),
        {"inputs": inputs, "labels": labels},
        precision="float32",
        device_memory="400MiB",
        host_memory=host_memory,
        disk=f"1GB@{rates}",
        compile=False,
        overrides={**STATE_ON_HOST, "num_tail": 0},
        hardware=H200_WITHOUT_CONTEXT,
        **settings,
    )


H200_WITHOUT_CONTEXT = dataclasses.replace(H200, context_bytes=0)


def test_a_plan_puts_the_fewest_layers_on_disk_and_says_what_binds() -> None:
    much, little = plan_of("100/100MB/s", "1GiB"), plan_of("100/100MB/s", "5MiB")
    assert much.disk_read_bytes == 0 < little.disk_read_bytes
    assert little.total_bytes("host") <= 5 << 20
    layer = 257 * 256 * 4  # bytes of a moment
    block = 2 * (-(-layer // 4096) * 4096)
    assert little.disk_read_bytes % block == 0, "two moments of some layers"
    assert little.disk_written_bytes == little.disk_read_bytes
    assert little.bound == "disk"
    seconds = little.disk_read_bytes / 50e6  # both ways at once
    assert seconds / 2 < little.predicted_seconds < 1.5 * seconds
    slower = plan_of("100/10MB/s", "5MiB")
    assert slower.predicted_seconds > 4 * little.predicted_seconds
    fast = plan_of("100/100GB/s", "5MiB")
    assert fast.disk_read_bytes == little.disk_read_bytes
    assert fast.bound != "disk"
    least = plan_of("100/100MB/s", "3MiB")
    assert least.total_bytes("host") <= 3 << 20
    choices = dict(least.choices)
    assert choices["optimizer state on disk"] == "that of 6 of 6 layers"
    assert choices["weights on disk"] == "those of 6 of 6 layers"
    assert choices["stash"].endswith("layers in memory, the rest on disk")
    written, weights = least.disk_written_bytes, 6 * 257 * 256 * 4
    assert written > 6 * block + weights
    assert written < least.disk_read_bytes < written + weights, "some stay at the turn"


def test_a_plan_without_room_on_host_or_disk_is_refused() -> None:
    with pytest.raises(ValueError, match="parameter server needs"):
        plan_of("100/100MB/s", "2MiB")
    with pytest.raises(ValueError, match="several ranks train together"):
        plan_of("100/100MB/s", "6MiB", world=Together(num_ranks=2))


def test_a_run_says_what_it_has_written() -> None:
    step = {"kind": "step", "loss": 1.0, "tokens": 8, "seconds": 1.0}
    records = [{**step, "step": 1, "disk_written": 6 << 30}, {**step, "step": 2}]
    settings: Any = SimpleNamespace(data=SimpleNamespace(task="causal"))
    found = {"num_steps": None, "checkpoints": [], "model": None, **summarise(settings, records)}
    text = "\n".join(_lines(found, settings))
    assert "disk: 6.00 GiB written; 3.00 GiB written a step: 372,529 steps use up" in text
    without = [{**step, "step": 1}]
    found = {"num_steps": None, "checkpoints": [], "model": None, **summarise(settings, without)}
    assert "disk" not in "\n".join(_lines(found, settings))


def test_settings_of_a_run_name_a_disk() -> None:
    assert MemorySettings().make_disk() is None
    section = MemorySettings(disk=Path("fast"), disk_size="2TB", disk_rates="6.5/1.5GB/s")
    assert section.make_disk() == l2l.Disk(Path("fast"), size="2TB", rates="6.5/1.5GB/s")
