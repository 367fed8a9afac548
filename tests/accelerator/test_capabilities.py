"""What an engine offers, on the accelerator as on the CPU: weights after some steps are close.

Without a CUDA device both runs are on the CPU, which tests this file and nothing else.
"""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
from families import FAMILIES, build_llama, causal_batch
from torch import Tensor, nn

import l2l

pytestmark = pytest.mark.accelerator

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = 6
NUM_STEPS = 3
Run = Callable[[l2l.Engine, nn.Module], Any]
MUON = l2l.Muon(lr=1e-3, ns_steps=1)  # more make last bits large


@pytest.fixture(autouse=True)
def exact_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def steps(engine: l2l.Engine, _: nn.Module) -> None:
    for seed in range(NUM_STEPS):
        engine.step(causal_batch(ROWS, seed))


def entropy(found: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    counted = batch["labels"] != -100
    return -found[counted].sum(), counted.sum()


def weights_after(
    run: Run, device: str, build: Callable[[], nn.Module] = build_llama, **settings: Any
) -> dict[str, Tensor]:
    model = build()
    given = {"precision": "float32", "microbatch_size": 2, "compile": False, "seed": 1, **settings}
    given.setdefault("optimizer", l2l.AdamW(lr=1e-2))
    if callable(given["optimizer"]):
        given["optimizer"] = given["optimizer"](model)
    with inside.engine(model, device=device, **given) as engine:
        run(engine, model)
        return engine.state_dict()


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], *, most: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        far = float((found[name] - tensor).abs().max())
        assert far <= most * max(1e-3, float(tensor.abs().max())), name


def compare(run: Run, *, most: float = 1e-3, **settings: Any) -> None:
    expected = weights_after(run, "cpu", **settings)
    assert_close(weights_after(run, DEVICE, **settings), expected, most=most)


SETTINGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "a head in slices": {"overrides": {"num_head_slices": 3}},
    "a head in slices, clipped": {"overrides": {"num_head_slices": 3}, "clip_norm": 0.05},
    "long rows in tiles": {"overrides": {"tile_tokens": 8}},
    "a running mean": {"optimizer": l2l.AdamW(lr=1e-2, average=0.9)},
    "another optimizer of torch": {
        "optimizer": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3)
    },
    "one of whole parameters": {
        "optimizer": lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-3)
    },
    "without a schedule": {"optimizer": l2l.ScheduleFreeAdamW(lr=1e-2)},
    "Muon": {"optimizer": MUON},
    "Muon, clipped, lent": {
        "optimizer": MUON,
        "clip_norm": 0.05,
        "overrides": {"num_tail": 0, "num_device_states": 0, "num_shared": 3, "num_pieces": 4},
    },
    "Muon, lent at once": {
        "optimizer": MUON,
        "overrides": {"num_tail": 0, "num_device_states": 0, "num_shared": 3, "num_pieces": 4},
    },
    "a loss of log-probabilities": {"loss": l2l.TokenLoss(entropy)},
    "clipped, updates in halves": {"clip_norm": 0.05, "overrides": {"halves": True}},
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_steps(name: str, compiled: bool) -> None:
    settings = SETTINGS[name]
    expected = weights_after(steps, "cpu", **settings)
    most = 1e-2 if compiled else 1e-3
    found = weights_after(steps, DEVICE, **{**settings, "compile": compiled})
    assert_close(found, expected, most=most)


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_state_on_disk(clip_norm: float | None, tmp_path: Path) -> None:
    """Its lanes are threads that streams wait for by way of updates."""
    expected = weights_after(steps, DEVICE, clip_norm=clip_norm)
    found = weights_after(
        steps,
        DEVICE,
        clip_norm=clip_norm,
        disk=tmp_path / "disk",
        overrides={"num_on_disk": 2, "num_device_states": 0, "num_shared": 0},
    )
    assert_close(found, expected, most=1e-5)


def loop(uses: Callable[[Any], Tensor]) -> Run:
    """A loop of one's own; on CUDA, backward passes run on a thread of autograd's."""

    def run(engine: l2l.Engine, model: nn.Module) -> None:
        for seed in range(NUM_STEPS):
            for _ in range(2):  # gradients add up
                uses(model(**causal_batch(ROWS, seed))).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            engine.optimizer.step()
            engine.optimizer.zero_grad()

    return run


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "uses",
    [lambda outputs: outputs.loss, lambda outputs: outputs.logits.float().square().mean()],
    ids=["loss", "logits"],
)
def test_a_loop_of_ones_own(uses: Callable[[Any], Tensor], compiled: bool) -> None:
    expected = weights_after(loop(uses), "cpu", autograd=True)
    found = weights_after(loop(uses), DEVICE, autograd=True, compile=compiled)
    assert_close(found, expected, most=1e-2 if compiled else 1e-3)


def test_a_loop_on_the_device_gets_its_outputs_there() -> None:
    model = build_llama()
    with l2l.Engine(model, device=DEVICE, precision="float32", autograd=True) as engine:
        batch = {name: one.to(DEVICE) for name, one in causal_batch(ROWS).items()}
        outputs = model.to(DEVICE)(**batch)
        assert outputs.loss.device.type == DEVICE
        outputs.loss.backward()
        engine.optimizer.step()
        assert engine.step_number == 1


@pytest.mark.parametrize("stays", [True, False])
def test_generating_gives_the_models_own_tokens(stays: bool) -> None:
    ids = causal_batch(ROWS)["input_ids"][:, :6]
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = build_llama().eval().generate(ids, **options)
    model = build_llama()
    with l2l.Engine(model, device=DEVICE, precision="float32", compile=False) as engine:
        if stays:
            engine.step(causal_batch(ROWS))
            model = build_llama()
            model.load_state_dict(engine.state_dict())
            expected = model.eval().generate(ids, **options)
        found = engine.generate(ids, **options)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("base", ["nf4", "int8"])
def test_an_adapter_beside_a_quantized_base(base: str) -> None:
    pytest.importorskip("torchao")
    peft = pytest.importorskip("peft")

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = FAMILIES["llama_tied"].build()
        wide = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}
        return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **wide))

    def run(engine: l2l.Engine, _: nn.Module) -> None:
        losses = [float(engine.step(causal_batch(ROWS, seed)).loss) for seed in range(NUM_STEPS)]
        assert all(loss == loss for loss in losses)

    def adapters(device: str) -> dict[str, Tensor]:
        found = weights_after(run, device, build, base=base, optimizer=l2l.SGD(lr=1e-2))
        return {name: one for name, one in found.items() if "lora" in name}

    assert_close(adapters(DEVICE), adapters("cpu"), most=5e-2)


def test_layers_that_are_compiled_beside_steps() -> None:
    model = build_llama()
    with inside.engine(
        model, device=DEVICE, precision="float32", compile=True, compile_ahead="background"
    ) as engine:
        losses = []
        for _ in range(200):
            report = engine.step(causal_batch(ROWS))
            losses.append(report.loss)
            if report.compiled:
                break
        assert all(later < earlier for earlier, later in pairwise(losses))


def test_a_frozen_model_predicts() -> None:
    model = build_llama().eval().requires_grad_(False)
    batch = causal_batch(ROWS)
    with torch.no_grad():
        expected = model(**batch).logits
    with l2l.Engine(model, device=DEVICE, precision="float32", compile=False) as engine:
        found = engine.predict(batch).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
