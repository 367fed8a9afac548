"""Running means of weights, kept beside the optimizer's state, against torch's own."""

from pathlib import Path
from typing import Any

import inside
import pytest
import torch
from families import FAMILIES
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import l2l

FAMILY = FAMILIES["llama_tied"]  # its table is looked up on the host, row by row
KEEPS = 0.9
NUM_STEPS = 4
SINGLE: dict[str, Any] = {"precision": "float32", "microbatch_size": 2, "embedding": "host"}


def averaged_weights(engine: l2l.Engine) -> dict[str, torch.Tensor]:
    with engine.averaged():
        return dict(engine.named_weights())


def train(engine: l2l.Engine, *, first: int = 0, to: int = NUM_STEPS) -> None:
    for seed in range(first, to):
        engine.step(FAMILY.batch(4, seed))


def plain_averages(optimizer: Any, clip_norm: float | None) -> tuple[nn.Module, AveragedModel]:
    """Through an engine without means, whose weights torch averages after each step."""
    model = FAMILY.build()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(KEEPS))
    with inside.engine(model, optimizer=optimizer, clip_norm=clip_norm, **SINGLE) as engine:
        for seed in range(NUM_STEPS):
            engine.step(FAMILY.batch(4, seed))
            now = FAMILY.build()
            now.load_state_dict(engine.state_dict())
            average.update_parameters(now)
    return model, average


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (l2l.AdamW, {}),
        (l2l.AdamW, {"clip_norm": 0.01}),  # updates of the next step
        (l2l.AdamW, {"clip_norm": 0.01, "overrides": {"halves": True}}),
        (l2l.AdamW, {"kernel": "readable"}),
        (l2l.AdamW, {"kernel": "readable", "clip_norm": 0.01, "overrides": {"halves": True}}),
        (l2l.SGD, {}),
        (l2l.Lion, {}),
    ],
    ids=["adamw", "late", "halves", "readable", "readable-halves", "sgd", "lion"],
)
def test_means_are_those_of_torch(kind: Any, settings: dict[str, Any]) -> None:
    _, expected = plain_averages(kind(lr=1e-2), settings.get("clip_norm"))
    with inside.engine(
        FAMILY.build(), optimizer=kind(lr=1e-2, average=KEEPS), **SINGLE, **settings
    ) as engine:
        train(engine)
        found = averaged_weights(engine)
    for name, parameter in expected.module.named_parameters():
        torch.testing.assert_close(found[name], parameter.data, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("moments", ["float32", "8bit"])
def test_means_come_and_go_without_a_trace(precision: str, moments: Any) -> None:
    optimizer = l2l.AdamW(lr=1e-2, average=KEEPS, moments=moments)
    settings = {**SINGLE, "precision": precision}
    with (
        inside.engine(FAMILY.build(), optimizer=optimizer, seed=1, **settings) as engine,
        inside.engine(FAMILY.build(), optimizer=optimizer, seed=1, **settings) as other,
    ):
        train(engine, to=2)
        train(other, to=2)
        before = engine.evaluate(FAMILY.batch(4, 9))
        with engine.averaged():
            assert engine.evaluate(FAMILY.batch(4, 9)) != before
        assert engine.evaluate(FAMILY.batch(4, 9)) == before
        train(engine, first=2)
        train(other, first=2)
        weights = other.state_dict()
        assert all(torch.equal(one, weights[name]) for name, one in engine.state_dict().items())


def test_what_is_evaluated_and_exported_are_the_means(tmp_path: Path) -> None:
    model, expected = plain_averages(l2l.AdamW(lr=1e-2), None)
    batch = FAMILY.batch(4, 7)
    with torch.no_grad():
        loss = float(expected.module.eval()(**batch).loss)
    model = FAMILY.build()
    with inside.engine(model, optimizer=l2l.AdamW(lr=1e-2, average=KEEPS), **SINGLE) as engine:
        train(engine)
        with engine.averaged():
            assert engine.evaluate(batch) == pytest.approx(loss, rel=1e-5)
            engine.export(tmp_path / "means")
            shown = model.lm_head.weight.detach().clone()  # whoever reads the model sees them, too
        assert not torch.equal(shown, model.lm_head.weight.detach())
    found = type(model).from_pretrained(tmp_path / "means")
    with torch.no_grad():
        assert float(found.eval()(**batch).loss) == pytest.approx(loss, rel=1e-5)


def test_means_go_on_from_a_checkpoint_bit_by_bit(tmp_path: Path) -> None:
    optimizer = l2l.AdamW(lr=1e-2, average=KEEPS)
    with inside.engine(FAMILY.build(), optimizer=optimizer, **SINGLE) as engine:
        train(engine)
        expected = averaged_weights(engine)
    with inside.engine(FAMILY.build(), optimizer=optimizer, **SINGLE) as engine:
        train(engine, to=2)
        engine.save(tmp_path / "saved")
    with inside.engine(FAMILY.build(), optimizer=optimizer, **SINGLE) as engine:
        engine.load(tmp_path / "saved")
        train(engine, first=2)
        found = averaged_weights(engine)
    assert all(torch.equal(one, found[name]) for name, one in expected.items())


def test_a_copied_layer_has_the_mean_of_its_source() -> None:
    optimizer = l2l.AdamW(lr=1e-2, average=KEEPS)
    with inside.engine(FAMILY.build(), optimizer=optimizer, **SINGLE) as engine:
        train(engine, to=2)
        engine.layers.insert(1, copy_of=0)
        found = averaged_weights(engine)
    name = "model.layers.{}.mlp.up_proj.weight"
    assert torch.equal(found[name.format(0)], found[name.format(1)])
    assert not torch.equal(found[name.format(0)], found[name.format(2)])


@pytest.mark.parametrize(
    ("word", "use"),
    [
        ("engine.step", lambda engine, folder: engine.step(FAMILY.batch(2))),
        ("engine.save", lambda engine, folder: engine.save(folder)),
        ("engine.load", lambda engine, folder: engine.load(folder)),
        ("engine.averaged", lambda engine, folder: engine.averaged().__enter__()),
        ("engine.layers", lambda engine, folder: engine.layers.remove(0)),
        ("engine.close", lambda engine, folder: engine.close()),
    ],
)
def test_what_changes_or_keeps_weights_is_refused_meanwhile(
    word: str, use: Any, tmp_path: Path
) -> None:
    optimizer = l2l.AdamW(average=KEEPS)
    with inside.engine(FAMILY.build(), optimizer=optimizer, **SINGLE) as engine:
        train(engine, to=1)
        before = engine.state_dict()
        with engine.averaged(), pytest.raises(RuntimeError, match=f"{word}.*Leave that block"):
            use(engine, tmp_path / "saved")
        after = engine.state_dict()
        assert all(torch.equal(one, after[name]) for name, one in before.items())


def test_without_means_that_is_said() -> None:
    with inside.engine(FAMILY.build(), **SINGLE) as engine:
        with pytest.raises(ValueError, match="AdamW"), engine.averaged():
            pass
        assert engine.step(FAMILY.batch(2)).loss > 0
    with pytest.raises(ValueError, match=r"average must lie in \[0, 1\)"):
        l2l.AdamW(average=1.0)
    with pytest.raises(ValueError, match=r"average must lie in \[0, 1\)"):
        l2l.SGD(average=-0.5)


def test_means_are_counted_and_keep_updates_on_the_host(as_h200: None) -> None:
    taken = {}
    for average in (None, KEEPS):
        optimizer = l2l.AdamW(average=average)
        with inside.engine(
            FAMILY.build(), optimizer=optimizer, device_memory="512MiB", **SINGLE
        ) as engine:
            train(engine, to=1)
            taken[average] = inside.arena(engine).bytes_by_name.get("average", 0)
            forms = [unit.form for unit in inside.server(engine).units.values()]
            if average is not None:
                assert inside.planning(engine).decisions.num_device_states == 0
    assert taken[None] == 0
    assert taken[KEEPS] == sum(4 * form.trained.padded_numel for form in forms)
