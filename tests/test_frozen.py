"""Models of which nothing is trained, and students that learn from them."""

from typing import Any

import inside
import pytest
import torch
import torch.nn.functional as F
from families import FAMILIES, build_llama
from reference import Batch
from torch import Tensor, nn

import l2l
from l2l.device import CheckingDevice, checking
from l2l.device.limits import MemoryLimits

FAMILY = FAMILIES["llama_tied"]


def frozen() -> nn.Module:
    return FAMILY.build().eval().requires_grad_(False)


SINGLE: dict[str, Any] = {"precision": "float32"}


@pytest.mark.parametrize("settings", [{}, {"device_memory": "256MiB"}], ids=["plain", "planned"])
def test_a_frozen_model_takes_its_weights_alone_and_gives_what_pytorch_gives(
    settings: dict[str, Any],
) -> None:
    model, batch = frozen(), FAMILY.batch(5)
    with torch.no_grad():
        expected = model(**batch)
    with l2l.Engine(model, precision="float32", **settings) as engine:
        assert engine.evaluate(batch) == pytest.approx(float(expected.loss), rel=1e-6)
        assert torch.equal(engine.predict(batch).logits, expected.logits)
        taken = dict(inside.arena(engine).bytes_by_name)
        assert set(taken) <= {"weights", "stash", "rows"}
        forms = [unit.form for unit in inside.server(engine).units.values()]
        assert taken["weights"] == sum(form.weight_layout.nbytes for form in forms)
    assert torch.equal(model.lm_head.weight, FAMILY.build().lm_head.weight)


def test_in_16_bits_it_takes_two_bytes_a_parameter() -> None:
    model = build_llama().bfloat16().requires_grad_(False)
    total = sum(parameter.numel() for parameter in model.parameters())
    with l2l.Engine(model) as engine:
        assert inside.arena(engine).bytes_by_name == {
            "weights": pytest.approx(2 * total, rel=0.03)  # each unit is filled up to a block
        }


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("engine.step", lambda engine, folder: engine.step(FAMILY.batch(2))),
        ("engine.save", lambda engine, folder: engine.save(folder)),
        ("engine.prepare_saving", lambda engine, folder: engine.prepare_saving()),
        ("engine.load", lambda engine, folder: engine.load(folder)),
    ],
)
def test_what_is_for_training_is_refused_by_name(name: str, use: Any, tmp_path: Any) -> None:
    with (
        l2l.Engine(frozen(), **SINGLE) as engine,
        pytest.raises(RuntimeError, match=rf"{name} is for models that are trained"),
    ):
        use(engine, tmp_path / "folder")


def test_an_optimizer_without_anything_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient"):
        l2l.Engine(frozen(), optimizer=l2l.AdamW(), **SINGLE)


def distillation(outputs: Any, batch: Batch) -> Tensor:
    """The mean over rows of what the student's words are off from the teacher's."""
    own = F.log_softmax(outputs["logits"].float(), dim=-1)
    theirs = batch["teacher"].float().log_softmax(dim=-1)
    return F.kl_div(own, theirs, log_target=True, reduction="sum") / own.shape[0]


class Student(nn.Module):
    """Takes nothing but ids."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(67, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 67)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        hidden = self.table(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return {"logits": self.head(hidden)}


@pytest.mark.parametrize("build", [Student, build_llama], ids=["takes ids", "takes anything"])
def test_a_student_learns_from_entries_that_only_its_loss_reads(build: Any) -> None:
    ids = FAMILY.batch(4)["input_ids"]
    teacher = l2l.Engine(frozen(), **SINGLE)
    batch = {"input_ids": ids, "teacher": teacher.predict({"input_ids": ids}).logits}
    plain, optimizer = build(), None
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    expected = []
    for _ in range(3):
        loss = distillation(plain(input_ids=ids), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    student = l2l.Engine(
        build(),
        optimizer=l2l.AdamW(lr=1e-2, weight_decay=0.0),
        loss=distillation,
        precision="float32",
        microbatch_size=2,
    )
    with teacher, student:
        found = [student.step(batch).loss for _ in range(3)]
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_process_may_take_what_its_engines_may_take_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits, place = MemoryLimits(), torch.device("cpu")
    monkeypatch.setattr(checking, "LIMITS", limits)  # other tests leave engines to the collector
    with (
        l2l.Engine(frozen(), device=CheckingDevice(), **SINGLE, device_memory="200MiB"),
        l2l.Engine(frozen(), device=CheckingDevice(), **SINGLE, device_memory="300MiB") as second,
    ):
        assert limits.total(place) == 500 << 20
        assert limits.of_others(place, second.device) == 200 << 20
        with l2l.Engine(frozen(), device=CheckingDevice(), **SINGLE):  # whatever is free
            assert limits.total(place) is None
    assert limits.total(place) is None


def test_a_limit_goes_with_its_device() -> None:
    class Owner:
        pass

    limits, place, owner = MemoryLimits(), torch.device("cpu"), Owner()
    limits.set(place, owner, 7)
    assert limits.total(place) == 7
    del owner
    assert limits.total(place) is None
