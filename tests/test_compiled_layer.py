"""Layers through a compiler: how often it compiles, whatever the depth and the lengths."""

import gc
import math
import random
from typing import NoReturn

import inside
import pytest
import torch
from sampled import sampled
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import l2l
from l2l.model.layer_pass import BackwardResult, Compiler, GradientSum, Handed, Packed
from l2l.planner.hardware import H200

BACKEND = "aot_eager_decomp_partition"  # traces and cuts as the real one does, and compiles nothing
VOCABULARY, NUM_TOKENS = 128, 256

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def llama(num_layers: int) -> torch.nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=VOCABULARY,
        )
    )


def gpt2(num_layers: int) -> torch.nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            n_embd=64,
            n_layer=num_layers,
            n_head=4,
            vocab_size=VOCABULARY,
            bos_token_id=0,
            eos_token_id=0,
            resid_pdrop=0.0,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
        )
    )


def bert(num_layers: int, *, dropout: float = 0.0) -> torch.nn.Module:
    torch.manual_seed(0)
    return BertForMaskedLM(
        BertConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            vocab_size=VOCABULARY,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
    )


def batch(length: int, *, padded: bool, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = max(1, NUM_TOKENS // length)
    ids = torch.randint(1, VOCABULARY, (rows, length), generator=generator)
    found = {"input_ids": ids, "labels": ids}
    if padded:
        found["attention_mask"] = torch.ones_like(ids)
        found["attention_mask"][:, -2:] = 0
    return found


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("build", "number", "padded"),
    sampled(
        [(build, 8, padded) for build in (llama, gpt2, bert) for padded in (False, True)]
        + [(llama, 50, padded) for padded in (False, True)],
        lambda one: one in ((llama, 8, True), (gpt2, 8, False), (bert, 8, True)),
    ),
)
def test_any_number_of_lengths_takes_two_compilations(build, number: int, padded: bool) -> None:
    lengths = random.Random(0).sample(range(5, 61), number)
    with inside.engine(build(3), device="cpu", compile=BACKEND) as engine:
        for number, length in enumerate(lengths):
            engine.step(batch(length, padded=padded, seed=number))
        assert len(inside.compiler(engine).programs) == 1
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("num_layers", [2, 7])
def test_depth_adds_no_compilation(num_layers: int) -> None:
    settings = {"compile": BACKEND, "overrides": {"num_tail": 1}}
    with inside.engine(llama(num_layers), device="cpu", **settings) as engine:
        for number in range(2):
            engine.step(batch(16, padded=False, seed=number))
        assert len(inside.compiler(engine).programs) == 2  # of streamed layers, and of the tail
    assert counters["stats"]["unique_graphs"] == 2


def test_the_plan_says_what_compilation_took() -> None:
    with inside.engine(llama(2), device="cpu", compile=BACKEND) as engine:
        engine.step(batch(16, padded=False, seed=0))
        line = dict(engine.plan.choices)["layers run"]
    assert "1 programs" in line
    assert BACKEND in line


def num_handed() -> int:
    """What forward passes have handed over and is still there."""
    gc.collect()
    return sum(type(one) in (Handed, Packed) for one in gc.get_objects())


@pytest.mark.parametrize(
    "keep", [0.6, *(pytest.param(one, marks=pytest.mark.thorough) for one in (0.0, 0.2, 0.4, 0.8))]
)
def test_compiled_layers_repeat_their_random_numbers(keep: float) -> None:
    """Whatever is kept, and for each of two lengths, of which the second compiles anew."""
    batches = [batch(length, padded=False, seed=length) for length in (16, 12)]
    losses: list[list[float]] = []
    for backend in (False, BACKEND):
        with inside.engine(
            bert(2, dropout=0.3),
            device="cpu",
            compile=backend,
            precision="float32",
            optimizer=l2l.AdamW(lr=1e-2),
            microbatch_size=4,
            overrides={"num_tail": 0, "keep": keep, "num_kept_cells": 3 if keep else 0},
        ) as engine:
            losses.append([engine.step(one).loss for one in batches])
            assert inside.compiler(engine).compiles(inside.partition(engine).structures[0]) is bool(
                backend
            )
            assert not num_handed()
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_what_was_handed_over_goes_with_its_last_owner() -> None:
    """Also if no backward pass has used it."""
    with inside.engine(llama(2), device="cpu", compile=BACKEND, precision="float32") as engine:
        engine.step(batch(16, padded=False, seed=0))
        inside.compiler(engine).program(
            inside.partition(engine).structures[0], keep=0.0
        ).is_trusted = False
        engine.step(batch(16, padded=False, seed=0))
        assert not num_handed()


def test_a_plan_keeps_nothing_of_layers_that_draw_random_numbers() -> None:
    settings = {"num_rows": 64, "length": 512, "hardware": H200, "overrides": {"num_tail": 0}}
    kept = [
        dict(l2l.plan(bert(24, dropout=one), **settings).choices)["kept, not recomputed"]
        for one in (0.0, 0.1)
    ]
    assert kept[0] != "nothing"
    assert kept[1] == "nothing"


def test_what_draws_other_random_numbers_keeps_nothing_then_runs_uncompiled() -> None:
    compiler = Compiler(backend=BACKEND)
    compiler.note_random("layer")
    right, wrong = (
        BackwardResult(hidden=torch.full((4,), value), parameters={}, recorded={})
        for value in (1.0, 2.0)
    )
    partial, nothing = compiler.program("layer", keep=0.5), compiler.program("layer", keep=0.0)
    kept = Handed(partial, Packed(), is_first=True)
    assert compiler.must_check("layer", kept)
    assert not compiler.check("layer", partial, wrong, right)
    assert not compiler.trusts("layer", kept)
    assert compiler.program("layer", keep=0.5) is nothing
    assert compiler.program("layer", keep=1.0) not in (partial, nothing)

    handed = Handed(nothing, Packed(), is_first=True)
    assert compiler.check("layer", nothing, right, right)
    assert compiler.trusts("layer", handed)
    assert not compiler.must_check("layer", Handed(nothing, Packed()))
    assert compiler.must_check("layer", handed)  # something else was compiled
    with pytest.warns(UserWarning, match="random numbers"):
        assert not compiler.check("layer", nothing, wrong, right)
    assert compiler.program("layer", keep=0.0) is None


def _sums_and_gradients(seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Sums as they lie in a gradient slot: views of bytes."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(8, 16), (16,), (4, 4)]
    slot = torch.zeros(4 * 512, dtype=torch.uint8).view(torch.float32)
    sums = [slot[128 * i :][: math.prod(one)].view(one) for i, one in enumerate(shapes)]
    return sums, [torch.randn(one, generator=generator).bfloat16() for one in shapes]


def test_compiled_sums_of_gradients_are_the_same_bits():
    """And another slot, or fewer gradients, need no other program."""
    add = GradientSum(backend=BACKEND)
    for seed in (1, 2):
        sums, gradients = _sums_and_gradients(seed)
        expected = [torch.zeros_like(one) for one in sums]
        for number in (3, 3, 2, 3):
            add(sums[:number], gradients[:number])
            torch._foreach_add_(expected[:number], gradients[:number])
        assert all(map(torch.equal, sums, expected))
    assert not add._is_refused
    assert add._num_gradients == 3


def test_a_backend_that_fails_to_compile_a_sum_is_not_asked_again():
    asked = []

    def fails(graph: object, inputs: object) -> NoReturn:
        asked.append(graph)
        raise RuntimeError("no")

    add = GradientSum(backend=fails)
    sums, gradients = _sums_and_gradients(1)
    for _ in range(2):
        add(sums, gradients)
    assert len(asked) == 1
    assert torch.equal(sums[0], gradients[0].float() * 2)
