"""Tests run many tiny operators: one thread each is fastest, and leaves a core for updates."""

import dataclasses
import gc

import inside
import pytest
import torch

from l2l.planner import H200, KeptPlans
from l2l.proof import ProofMemory

LONG = frozenset(
    f"test_{name}"
    for name in (
        *("beside", "checkpoint", "compiled_layer", "distributed", "engine", "killed", "layers"),
        *("ordering", "phases", "planner", "preview", "schedule", "scripts", "training", "updates"),
    )
)

gc.disable()  # until all tests are imported
torch.set_num_threads(1)
inside.remember_proofs_in(ProofMemory(None))  # what a test has proven is nobody else's
inside.keep_plans_in(KeptPlans(None))


@pytest.fixture
def as_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans with the figures of an H200: nothing is measured, and choices do not vary.

    But for its context: a budget of a test would hardly have room for that.
    """
    figures = dataclasses.replace(H200, context_bytes=0)
    monkeypatch.setattr("l2l.planner.planning.known_hardware", lambda *_, **__: figures)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files begin first, so that workers end together (each file has one worker)."""
    items.sort(key=lambda item: item.path.stem not in LONG)


def pytest_collection_finish() -> None:
    """Whoever collects garbage does not look at all that large libraries have made."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)  # a test leaves little
    gc.enable()


@pytest.fixture(scope="module")
def frozen_garbage() -> None:
    """Trainers collect garbage often: they look at nothing that there is before this module."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_garbage(frozen_garbage: None) -> None:
    """No engine that an earlier test has dropped: when collected, it says what it still knows."""
    gc.collect()
