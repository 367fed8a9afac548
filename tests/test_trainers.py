"""Trainers of other libraries train what they train in plain PyTorch, with layers streamed.

The trainers are those of examples/trainers; here they run plain and streamed, 20 steps each.
"""

import contextlib
import functools
import importlib
import shutil
import sys
from pathlib import Path
from typing import Any, ClassVar

import inside
import peft
import pytest
import torch
import transformers
import trl
from safetensors.torch import load_file
from transformers import TrainerCallback

import l2l

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "examples" / "trainers"))
tiny = importlib.import_module("tiny")

pytestmark = [
    pytest.mark.usefixtures("frozen_garbage"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
Trainer = l2l.loops.streamed(transformers.Trainer)
TIMES = ("runtime", "per_second", "num_input_tokens", "step_time", "preparation_time")
Options = dict[str, Any]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "1")  # TRL tells nobody


class Watch(TrainerCallback):
    """Traces the third step of a trainer."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.stack = trainer, contextlib.ExitStack()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            self.trace = self.stack.enter_context(self.trainer.engine.trace())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3:
            self.stack.close()

    def fetched(self) -> set[str]:
        """Layers that came to the device."""
        words = [span.text.split() for span in self.trace.spans if span.text.startswith("fetch L")]
        return {line[1] for line in words}


class Answering(trl.GRPOTrainer):
    """Answers as it did before, if there is a record of that, and leaves the same seed."""

    record: ClassVar[list[Any]] = []
    place: ClassVar[int | None] = None

    def _generate_single_turn(self, *args: Any, **named: Any) -> Any:
        kind = Answering
        if kind.place is None:
            found = super()._generate_single_turn(*args, **named)
            kind.record.append((found, torch.get_rng_state()))
            return found
        kind.place += 1
        found, random_state = kind.record[kind.place - 1]
        torch.set_rng_state(random_state)
        return found


def made(example: str, folder: Path, *, plain: bool, **how: Any) -> Any:
    return importlib.import_module(example).make(plain=plain, folder=folder, use_cpu=True, **how)


def logs(trainer: Any) -> list[dict[str, float]]:
    """What was logged, and an evaluation at the end; without times."""
    found = [*trainer.state.log_history]
    if trainer.eval_dataset is not None:
        found.append(trainer.evaluate())
    return [{k: v for k, v in one.items() if not any(t in k for t in TIMES)} for one in found]


def assert_same_logs(streamed: Any, plain: Any) -> None:
    ours, theirs = logs(streamed), logs(plain)
    assert sum("loss" in one for one in ours) == tiny.STEPS
    for own, other in zip(ours, theirs, strict=True):
        norms = {name: other.pop(name) for name in [*other] if name == "grad_norm"}
        found = {name: own.pop(name) for name in norms}
        assert found == pytest.approx(norms, rel=1e-4, abs=1e-5)
        assert own == pytest.approx(other, rel=1e-5, abs=1e-5)


LORA = functools.partial(peft.LoraConfig, r=4, target_modules="all-linear")
HALVES = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
CASES: dict[str, tuple[str, Options]] = {
    "a language model": ("clm", HALVES),
    "labels": ("classification", {}),
    "SFT": ("sft", {}),
    "DPO": ("dpo", {}),
    "GRPO": ("grpo", {"kind": Answering, "beta": 0.0}),
}
MORE: dict[str, tuple[str, Options]] = {
    "a language model at once": ("clm", {}),
    "a reward": ("reward", {}),
    "a smoothed loss": ("clm", {"label_smoothing_factor": 0.1}),
    "labels, accumulating": ("classification", HALVES),
    "SFT, accumulating": ("sft", HALVES),
    "DPO, computed ahead": ("dpo", {"precompute_ref_log_probs": True}),
    "DPO of an adapter": ("dpo", {"peft_config": LORA}),
    "DPO, accumulating": ("dpo", HALVES),
    "GRPO, several updates": ("grpo", {"kind": Answering, "num_iterations": 2, **HALVES}),
    "GRPO of an adapter": ("grpo", {"kind": Answering, "beta": 0.1, "peft_config": LORA}),
}


def compare(case: tuple[str, Options], folder: Path) -> None:
    example, options = case
    Answering.record, Answering.place = [], None
    found = []
    for plain in (True, False):
        how = {name: one() if one is LORA else one for name, one in options.items()}
        trainer = made(example, folder, plain=plain, **how)
        if not plain:
            trainer.add_callback(watch := Watch(trainer))
        trainer.train()
        Answering.place = 0
        found.append(trainer)
    plain_one, trainer = found
    assert watch.fetched() == {"L0", "L1", "L2"}
    assert_same_logs(trainer, plain_one)
    theirs = plain_one.model.state_dict()
    for name, tensor in trainer.model.state_dict().items():
        assert tensor.isfinite().all(), name
        if not name.endswith("key.bias"):  # whose gradient is zero but for rounding
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=1e-4)
    if trainer._reference_engine is not None:  # they use the device's memory in turns
        reference = inside.planning(trainer._reference_engine)
        assert reference.budget is inside.planning(trainer.engine).budget
    trainer.close()


def test_a_trainer_that_makes_whole_steps_predicts_and_generates(tmp_path: Path) -> None:
    prompts = torch.arange(2, 14).view(2, 6)
    found = []
    for plain in (True, False):
        trainer = made("classification", tmp_path, plain=plain, max_steps=2)
        predicted = trainer.predict(trainer.eval_dataset)
        language = made("clm", tmp_path, plain=plain, max_steps=2)
        language.train()
        found.append(
            (predicted, language.model.generate(prompts, max_new_tokens=4, do_sample=False))
        )
        if not plain:
            assert trainer.engine is not None
            trainer.close()
            language.close()
    (theirs, their_words), (ours, our_words) = found
    assert ours.predictions == pytest.approx(theirs.predictions, abs=1e-5)
    assert ours.metrics["test_loss"] == pytest.approx(theirs.metrics["test_loss"], abs=1e-5)
    assert torch.equal(our_words, their_words)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_trainer_has_the_losses_of_plain_pytorch(
    case: tuple[str, Options], tmp_path: Path
) -> None:
    compare(case, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("case", MORE.values(), ids=MORE)
def test_more_trainers_have_the_losses_of_plain_pytorch(
    case: tuple[str, Options], tmp_path: Path
) -> None:
    compare(case, tmp_path)


def test_losses_of_16_bits_are_taken_in_32(tmp_path: Path) -> None:
    trainer = made("reward", tmp_path, plain=False, max_steps=2)
    trainer.args.bf16 = True
    trainer.train()
    found = torch.tensor([one["loss"] for one in trainer.state.log_history if "loss" in one])
    assert (found != found.bfloat16().float()).any()
    trainer.close()
    assert "forward" not in vars(trainer.model)


def test_sft_without_metrics_of_tokens_makes_whole_steps(tmp_path: Path) -> None:
    found = [made("sft", tmp_path, plain=plain, **HALVES) for plain in (True, False)]
    found[1]._token_metrics = False
    found[1].add_callback(watch := Watch(found[1]))
    for trainer in found:
        trainer.train()
    assert watch.fetched() == {"L0", "L1", "L2"}
    backward = [one.text for one in watch.trace.spans if one.text.startswith("drain L0.grad")]
    assert len(backward) == 1  # one for both batches
    plain_one, whole = logs(found[0]), logs(found[1])
    for name in ("loss", "eval_loss"):
        theirs = [one[name] for one in plain_one if name in one]
        assert [one[name] for one in whole if name in one] == pytest.approx(theirs, abs=1e-5)
    assert not any("entropy" in name for one in whole for name in one)
    found[1].close()


# --------------------------------------------------------------------------------------------------
# Files


def assert_no_file_has_nan(folder: Path) -> None:
    files = sorted(folder.rglob("*.safetensors"))
    assert files
    for path in files:
        for name, tensor in load_file(path).items():
            assert not tensor.is_floating_point() or tensor.isfinite().all(), (path, name)


SAVING = {
    "save_strategy": "steps",
    "save_steps": 5,
    "eval_strategy": "steps",
    "eval_steps": 5,
    "save_total_limit": 2,
    "load_best_model_at_end": True,
}


@pytest.mark.parametrize("example", ["clm", pytest.param("sft", marks=pytest.mark.thorough)])
def test_a_run_that_is_resumed_is_the_one_that_was_not_interrupted(
    example: str, tmp_path: Path
) -> None:
    whole = made(example, tmp_path, plain=False, **SAVING, report_to="tensorboard")
    whole.train()
    weights = {name: one.clone() for name, one in whole.model.state_dict().items()}
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {
        "checkpoint-15",
        "checkpoint-20",
    }
    assert [*tmp_path.rglob("events.out.tfevents*")]
    assert_no_file_has_nan(tmp_path)
    expected = whole.state.log_history
    whole.close()
    shutil.rmtree(tmp_path / "checkpoint-20")
    resumed = made(example, tmp_path, plain=False, **SAVING)
    resumed.train(resume_from_checkpoint=True)

    def told(history: list[dict[str, float]]) -> list[dict[str, float]]:
        return [
            {k: v for k, v in one.items() if k in ("loss", "grad_norm", "eval_loss", "step")}
            for one in history[:-1]
        ]

    assert told(resumed.state.log_history) == told(expected)
    for name, tensor in resumed.model.state_dict().items():
        assert torch.equal(tensor, weights[name]), name
    saved = load_file(tmp_path / "checkpoint-20" / "model.safetensors")
    assert all(torch.equal(one, weights[name]) for name, one in saved.items())
    resumed.close()
    assert all(torch.equal(p, weights[n]) for n, p in resumed.model.named_parameters())


def test_the_best_model_is_loaded_without_the_engines_folder(tmp_path: Path) -> None:
    rising = {**SAVING, "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_steps": 10}
    trainer = made("clm", tmp_path, plain=False, **rising, save_only_model=True)
    trainer.train()
    best = trainer.state.best_model_checkpoint
    expected = load_file(Path(best) / "model.safetensors")
    for name, tensor in trainer.model.state_dict().items():
        assert name not in expected or torch.equal(tensor, expected[name])
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, rel=1e-5)
    trainer.close()


def test_optimizer_state_of_a_plain_trainer_is_refused_and_its_weights_are_not(
    tmp_path: Path,
) -> None:
    saving = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    plain = made("clm", tmp_path, plain=True, **saving)
    plain.train()
    trainer = made("clm", tmp_path, plain=False, **saving | {"max_steps": 4})
    with pytest.raises(ValueError, match="saved by a trainer without an engine"):
        trainer.train(resume_from_checkpoint=True)
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(tensor, plain.model.state_dict()[name])
    trainer.close()
