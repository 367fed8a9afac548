"""The first step proves itself: what is broken in the engine, or unlike PyTorch, is refused.

Every mutation takes something away that an exact step needs, and the proof must see it; what is
exact must pass. The repairs of single causes are taken out again in test_causes.py.
"""

import contextlib
import copy
import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import inside
import pytest
import test_causes as causes
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import l2l
from l2l.device import CheckingDevice
from l2l.model.passing import HIDDEN, RecordedTensor, Recording
from l2l.model.passing import Call as RecordedCall
from l2l.model.trees import Part, Stub
from l2l.parameter_server import Adafactor
from l2l.proof import Evidence, Proof, ProofError, ProofMemory
from l2l.proof.evidence import ODD_FACTOR, WHOLE_ELEMENTS, check
from l2l.proof.memory import key_of
from l2l.run.buffers import ChangingBuffers
from l2l.run.layer_passes import LayerPasses
from l2l.run.lookup import HostRows
from l2l.run.seeds import mix_seed
from l2l.run.transfer import Transfer
from l2l.run.updates import Updates
from l2l.schedule import Action, Lane, Schedule, Wait, make_schedule
from l2l.trial.layer_trial import LayerTrial

WORDS, WIDTH, LENGTH = 40, 16, 6


@pytest.fixture(autouse=True)
def nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inside.PROVEN, ProofMemory(None))


class Layer(nn.Module):
    """Dropout, a normalization with statistics, and something recorded that is trained."""

    def __init__(self, *, statistics: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH) if statistics else nn.Identity()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, hidden: Tensor, shift: Tensor) -> Tensor:
        normed = self.norm(hidden.flatten(0, 1)).view_as(hidden)
        return hidden + self.dropout(torch.tanh(self.linear(normed) + shift))


class Words(nn.Module):
    """A small language model around such layers."""

    def __init__(self, depth: int = 3, *, statistics: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer(statistics=statistics) for _ in range(depth))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.table(input_ids)
        shift = self.places(torch.arange(input_ids.shape[1]))
        for layer in self.layers:
            hidden = layer(hidden, shift)
        logits = self.head(hidden)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def batch(rows: int = 4, seed: int = 0) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (rows, LENGTH), generator=drawn)
    return {"input_ids": ids, "labels": ids.flip(1)}


def engine_of(model: nn.Module, **settings: Any) -> l2l.Engine:
    given = {"precision": "float32", "device": "cpu", "optimizer": l2l.SGD(lr=0.1), **settings}
    return inside.engine(model, **given)


SETTINGS: dict[str, dict[str, Any]] = {
    "eager": {},
    "clipped": {"clip_norm": 1.0},
    "table on the host": {"embedding": "host"},
    "tail": {"overrides": {"num_tail": 1}},
    "device state": {
        "overrides": {"num_tail": 2, "num_device_states": 1},
        "optimizer": l2l.AdamW(),
    },
    "shared": {"overrides": {"num_shared": 2}, "optimizer": l2l.AdamW()},
    "shared and late": {
        "overrides": {"num_shared": 2},
        "optimizer": l2l.AdamW(),
        "clip_norm": 1.0,
    },
    "halves": {"overrides": {"halves": True}, "optimizer": l2l.AdamW(), "clip_norm": 1.0},
    "on the device": {"optimizer": Adafactor()},
    "bfloat16": {"precision": "bfloat16"},
    "float16": {"precision": "float16"},
}


def has_statistics(settings: dict[str, Any]) -> bool:
    """Mean, variance and number of batch normalizations, which the CPU has in float32 only."""
    return settings.get("precision", "float32") == "float32"


def words_for(settings: dict[str, Any]) -> Words:
    return Words(statistics=has_statistics(settings))


def state_of(engine: l2l.Engine) -> dict[str, Tensor]:
    """All that an engine holds, copied."""
    server = inside.server(engine)
    server.settle_all()
    found: dict[str, Tensor] = {}
    for name in server.units:
        image = server.image(name)
        found |= {f"{name} {key}": tensor.clone() for key, tensor in image.tensors.items()}
        found[f"{name} steps"] = torch.tensor(list(image.steps.values()))
    present = inside.present_buffers(engine)
    return found | {key: tensor.clone() for key, tensor in present.items()}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_what_is_exact_is_proven_and_leaves_no_trace(settings: dict[str, Any]) -> None:
    models = [words_for(settings) for _ in range(2)]
    proven, given = engine_of(models[0], **settings), engine_of(models[1], prove=False, **settings)
    losses = [[one.step(batch(seed=seed)).loss for seed in (0, 1, 2)] for one in (proven, given)]
    assert losses[0] == losses[1]
    found, expected = state_of(proven), state_of(given)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert len(inside.proof(proven)._done) == 1
    assert not inside.proof(given)._done
    proven.close()
    given.close()


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_every_kind_of_update_shows_its_gradients(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Evidence] = []
    monkeypatch.setattr(
        "l2l.proof.proof.check", lambda mine, theirs, **_: seen.extend((mine, theirs))
    )
    with engine_of(words_for(settings), **settings) as engine:
        engine.step(batch())
        names = {name for name, _ in inside.model(engine).named_parameters()}
    mine, theirs = seen
    assert mine.gradients.keys() == theirs.gradients.keys() == names
    if has_statistics(settings):
        tied = {"places.weight"}  # gradients of all layers, added up in another order
        assert mine.losses == theirs.losses
        unequal = {n for n in names if not torch.equal(mine.gradients[n], theirs.gradients[n])}
        assert unequal <= tied
    assert mine.buffers.keys() == theirs.buffers.keys()
    assert len(mine.buffers) == (3 * 3 if has_statistics(settings) else 0)


# --------------------------------------------------------------------------------------------------
# Mutations


Break = Callable[[pytest.MonkeyPatch], None]


def drop_gradient_of_recorded(patch: pytest.MonkeyPatch) -> None:
    def gather(step: Any, stack: int, m: int, *_: Any) -> list[Tensor]:
        step.gathered[stack, m] = []
        return []

    patch.setattr("l2l.run.layer_passes.gather_recorded", gather)


def read_another_row(patch: pytest.MonkeyPatch) -> None:
    gather = HostRows.gather

    def mutated(self: HostRows, rows: Any, microbatch: int) -> None:
        gather(self, rows, microbatch)
        one = rows.microbatches[microbatch]
        one.rows.copy_(one.rows.roll(one.rows.numel() // 3))

    patch.setattr(HostRows, "gather", mutated)


def collect_into_another_row(patch: pytest.MonkeyPatch) -> None:
    collect = Updates.collect

    def mutated(self: Updates, step: Any, action: Action) -> None:
        collect(self, step, action)
        layout = self._server.units[action.unit].form.staging_layout
        table = layout.view(self._transfer.staging[action.places[0]], "table.weight")
        table.copy_(table.roll(1, 0))

    patch.setattr(Updates, "collect", mutated)


def keep_a_stale_slot(patch: pytest.MonkeyPatch) -> None:
    fetch, number = Transfer.fetch, [0]

    def mutated(self: Transfer, unit: str, slot: str) -> None:
        number[0] += unit == "L0"
        stale = unit == "L0" and number[0] == 2  # for its backward pass
        fetch(self, "L1" if stale else unit, slot)
        self._held[slot] = unit

    patch.setattr(Transfer, "fetch", mutated)


def forget_to_add(patch: pytest.MonkeyPatch) -> None:
    accumulate = Transfer.accumulate

    def mutated(self: Transfer, unit: str, slot: str, gradients: Any, **rest: Any) -> None:
        fresh = {n: g for n, g in gradients.items() if n not in rest["received"]}
        accumulate(self, unit, slot, fresh, **rest)

    patch.setattr(Transfer, "accumulate", mutated)


def draw_the_mask_of_another_microbatch(patch: pytest.MonkeyPatch) -> None:
    backward = LayerPasses.backward

    def mutated(self: LayerPasses, step: Any, action: Action) -> None:
        def other(seed: int, number: int, part: int, m: int) -> int:
            return mix_seed(seed, number, part, 1 - m)

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr("l2l.run.layer_passes.mix_seed", other)
            backward(self, step, action)

    patch.setattr(LayerPasses, "backward", mutated)


def count_statistics_twice(patch: pytest.MonkeyPatch) -> None:
    def note(step: Any, part: int, m: int, changing: dict[str, Tensor]) -> None:
        step.buffers_before[part, m] = changing  # not copied

    patch.setattr(ChangingBuffers, "_note", staticmethod(note))


def weigh_microbatches_wrongly(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("l2l.run.step.Step.share", lambda self, part: 1.0)


def update_with_an_old_gradient(patch: pytest.MonkeyPatch) -> None:
    drain = Transfer.drain

    def mutated(self: Transfer, unit: str, slot: str, staging: str) -> None:
        if unit != "L1":
            drain(self, unit, slot, staging)

    patch.setattr(Transfer, "drain", mutated)


MUTATIONS: dict[str, tuple[Break, dict[str, Any]]] = {
    "a dropped gradient of a recorded argument": (drop_gradient_of_recorded, {}),
    "a wrong row of a table": (read_another_row, {"embedding": "host"}),
    "a gradient in a wrong row": (collect_into_another_row, {"embedding": "host"}),
    "a stale slot": (keep_a_stale_slot, {}),
    "a missing accumulation": (forget_to_add, {}),
    "another microbatch's mask": (draw_the_mask_of_another_microbatch, {}),
    "statistics counted twice": (count_statistics_twice, {}),
    "microbatches weighed wrongly": (weigh_microbatches_wrongly, {}),
    "an old gradient": (update_with_an_old_gradient, {}),
}


@pytest.mark.parametrize(("mutate", "settings"), MUTATIONS.values(), ids=MUTATIONS)
def test_a_mutation_of_the_engine_is_refused_and_nothing_changes(
    mutate: Break, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Words()
    before = copy.deepcopy(model.state_dict())
    mutate(monkeypatch)
    engine = engine_of(model, **settings)
    with pytest.raises(ProofError, match=r"model's own"):
        engine.step(batch())
    engine.close()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("first", [Lane.COMPUTE, Lane.FETCH])
def test_a_deleted_wait_is_refused_where_the_device_runs_into_it(first: Lane) -> None:
    """Some waits, one at a time; those that this order cannot run into change nothing."""
    seen: list[Schedule] = []

    def without(number: int) -> Callable[[Any], Schedule]:
        def made(shape: Any) -> Schedule:
            schedule = make_schedule(shape)
            waits = [i for i, line in enumerate(schedule.lines) if isinstance(line, Wait)]
            seen.append(schedule)
            kept = [line for i, line in enumerate(schedule.lines) if i != waits[number]]
            return Schedule(shape=shape, lines=tuple(kept))

        return made

    refused, exact, number, total = 0, 0, 0, 1
    with engine_of(Words(), microbatch_size=2) as engine:
        expected = [engine.step(batch(seed=seed)).loss for seed in (0, 1)]
    while number < total:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(inside.MAKE_SCHEDULE, without(number))
            patch.setattr(inside.PROVEN, ProofMemory(None))
            engine = engine_of(Words(), device=CheckingDevice(first=first), microbatch_size=2)
            found: list[float] = []
            with contextlib.suppress(ProofError):
                found = [engine.step(batch(seed=seed)).loss for seed in (0, 1)]
            assert found in ([], expected), f"wait {number} was missed"
            refused, exact = refused + (not found), exact + bool(found)
            total = sum(isinstance(line, Wait) for line in seen[-1].lines)
            engine.close(give_back=False)
        number += 4
    assert refused, (refused, exact)


# --------------------------------------------------------------------------------------------------
# What cannot be proven, what need not be


def test_a_proof_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_to_add(monkeypatch)
    with engine_of(Words(), prove=False) as engine:
        engine.step(batch())
        assert engine.step_number == 1
        assert not inside.proof(engine)._done


@pytest.mark.parametrize("mutated", [False, True])
def test_the_models_own_code_may_run_on_the_host(
    mutated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the device has too little room for it: both run without dropout then."""
    monkeypatch.setattr(Proof, "_places", lambda self, room: (True,))
    if mutated:
        drop_gradient_of_recorded(monkeypatch)
    engine = engine_of(Words())
    with pytest.raises(ProofError) if mutated else contextlib.nullcontext():
        engine.step(batch())
    assert inside.proof(engine).on_host
    assert bool(inside.proof(engine)._done) is not mutated
    engine.close()


def test_where_the_models_own_code_runs() -> None:
    with engine_of(Words()) as engine:
        proof, least = inside.proof(engine), inside.proof(engine)._least_bytes()
        proof.device = SimpleNamespace(torch_device=torch.device("cuda"))
        assert proof._places(least) == (False, True)
        assert proof._places(least - 1) == (True,)
        assert proof._places(None) == (False, True)


def test_a_model_that_cannot_run_a_few_rows_is_said(caplog: pytest.LogCaptureFixture) -> None:
    class Picky(Words):
        def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            if not isinstance(self.layers[0], Layer):  # not in the engine
                return super().forward(input_ids, labels)
            raise RuntimeError("not today")

    with engine_of(Picky()) as engine, caplog.at_level(logging.WARNING, "l2l"):
        engine.step(batch())
    assert "not compared with plain PyTorch" in caplog.text
    assert "not today" in caplog.text


def test_what_was_proven_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    run = inside.run_of_proof

    def counted(*args: Any) -> float:
        runs.append(1)
        return run(*args)

    monkeypatch.setattr(inside.RUN_OF_PROOF, counted)
    for folder in (tmp_path / "one", tmp_path / "one", tmp_path / "two"):
        monkeypatch.setattr(inside.PROVEN, ProofMemory(folder))
        with engine_of(Words()) as engine:
            engine.step(batch())
            engine.step(batch())
    assert len(runs) == 2
    with engine_of(Words(), clip_norm=1.0) as engine:  # other code
        engine.step(batch())
        engine.layers.remove(2)  # another structure
        engine.step(batch())
    assert len(runs) == 4


def test_the_key_depends_on_code_and_structure() -> None:
    def key(model: nn.Module, loss: Any = None, **rest: Any) -> str | None:
        given = {"batch": batch(), "path": ("cpu",), **rest}
        return key_of(model, loss_function=loss, **given)

    plain = key(Words())
    assert plain is not None
    assert plain == key(Words())
    others = [
        key(Words(depth=2)),
        key(Words(), path=("cuda",)),
        key(Words(), batch={**batch(), "mask": torch.ones(4, LENGTH)}),
        key(Words(), loss=lambda outputs, batch: outputs["loss"]),
    ]
    drops = Words()
    drops.layers[1].dropout.p = 0.5
    others.append(key(drops))
    switched = Words()
    switched.layers[1]._is_switched_off = True
    others.append(key(switched))
    assert plain not in others
    assert len({*others}) == len(others)
    hooked, patched, open_loss = Words(), Words(), object()
    hooked.layers[0].register_forward_hook(lambda *_: None)
    patched.layers[0].forward = lambda hidden, shift: hidden
    assert key(hooked) is None
    assert key(patched) is None
    assert key(Words(), loss=lambda outputs, batch: (outputs, open_loss)) is None


def test_the_reference_holds_two_layers_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    enter = l2l.proof.proof.Reference._enter

    def watched(self: Any, index: int) -> None:
        enter(self, index)
        held.append(len(self._flats))

    monkeypatch.setattr(l2l.proof.proof.Reference, "_enter", watched)
    with engine_of(Words(depth=7)) as engine:
        engine.step(batch())
    assert len(held) == 14
    assert max(held) == 2


# --------------------------------------------------------------------------------------------------
# Evidence


def test_a_sketch_shows_how_far_two_gradients_are_apart() -> None:
    size = 37 * WHOLE_ELEMENTS + 5
    drawn = torch.Generator().manual_seed(0)
    gradient = torch.randn(size, generator=drawn)
    one, other = Evidence(torch.device("cpu")), Evidence(torch.device("cpu"))
    one.add("w", gradient)
    wrong = gradient.clone()
    wrong[1000:3000] += 0.01 * torch.randn(2000, generator=drawn)
    half = wrong / 2  # sketches of microbatches add up
    other.add("w", half)
    other.add("w", half)
    distance = float((one.gradients["w"] - other.gradients["w"]).norm()) / 2**0.5
    assert distance == pytest.approx(float((gradient - wrong).norm()), rel=0.1)
    with pytest.raises(ProofError, match="'w'"):
        check(one, other, tolerance=1e-5, order=["w"], noise=lambda _: other.scaled(1 + 1e-9))


def test_what_is_nothing_but_rounding_is_no_difference() -> None:
    place = torch.device("cpu")
    mine, theirs, again = Evidence(place), Evidence(place), Evidence(place)
    for evidence, seed in ((mine, 0), (theirs, 1), (again, 2)):
        drawn = torch.Generator().manual_seed(seed)
        evidence.add("bias of keys", 1e-9 * torch.randn(64, generator=drawn))
    check(mine, theirs, tolerance=1e-5, order=["bias of keys"], noise=lambda _: again)
    with pytest.raises(ProofError, match="'bias of keys'"):
        check(mine, theirs, tolerance=1e-5, order=["bias of keys"], noise=lambda _: theirs)
    assert ODD_FACTOR not in (1.0, 2.0)


# --------------------------------------------------------------------------------------------------
# Repairs of what once trained wrongly, each taken out again: test_causes.py shows that they work


def without_refusing_objects(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LayerTrial, "meet", lambda *_: None)


def with_caches(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("l2l.model.partition.configs_of", lambda model: [])
    without_refusing_objects(patch)


def with_one_hidden_state(patch: pytest.MonkeyPatch) -> None:
    add = Recording._add

    def mutated(self: Recording, layer: int, args: Any, kwargs: Any, hidden: Tensor) -> None:
        add(self, layer, args, kwargs, hidden)
        call, self.tensors = self.calls[layer], [*self.tensors, hidden]
        first = call.leaves.index(HIDDEN)
        constant = RecordedTensor(len(self.tensors) - 1)
        rest = (constant if leaf is HIDDEN else leaf for leaf in call.leaves[first + 1 :])
        leaves = (*call.leaves[: first + 1], *rest)
        self.calls[layer] = dataclasses.replace(call, leaves=leaves)

    patch.setattr(Recording, "_add", mutated)


def without_assigned_buffers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Part, "assigned", lambda self, bound: {})


def without_autocast(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RecordedCall, "autocasting", lambda self: contextlib.nullcontext())


def under_autocast(layer: nn.Module, hidden: Tensor, first: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return layer(hidden)


def with_any_weights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Stub, "layer_state", lambda self: None)


REPAIRS: dict[str, tuple[Break, Callable[[], nn.Module]]] = {
    "a cache that is appended to twice": (with_caches, causes.build_llava),
    "an object that layers share": (
        without_refusing_objects,
        lambda: causes.Given(causes.SharingByName, lambda _: SimpleNamespace(keys=None)),
    ),
    "an object that a layer counts in": (
        without_refusing_objects,
        lambda: causes.Given(causes.Counting, lambda _: SimpleNamespace(calls=0)),
    ),
    "layer(h, h)": (
        with_one_hidden_state,
        lambda: causes.Net(causes.Attending, lambda layer, hidden, first: layer(hidden, hidden)),
    ),
    "a buffer that a layer assigns": (
        without_assigned_buffers,
        lambda: causes.Net(causes.Assigning),
    ),
    "a buffer that the code around assigns": (without_assigned_buffers, causes.AssigningAround),
    "the model's own autocast": (
        without_autocast,
        lambda: causes.Net(causes.Layer, under_autocast),
    ),
    "generated weights": (with_any_weights, lambda: causes.Net(causes.Layer, causes.generated)),
}


@pytest.mark.parametrize(("mutate", "create"), REPAIRS.values(), ids=REPAIRS)
def test_a_repair_that_is_taken_out_is_missed(
    mutate: Break, create: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = causes.prepared(create)
    before = copy.deepcopy(model.state_dict())
    ids = torch.randint(40, 99, (4, 12), generator=torch.Generator().manual_seed(0))
    is_language = isinstance(model, PreTrainedModel)
    given = {"input_ids": ids, "labels": ids} if is_language else causes.batch_of()
    mutate(monkeypatch)
    engine = causes.engine_for(model)
    with pytest.raises(ProofError):
        engine.step(given)
    engine.close()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
