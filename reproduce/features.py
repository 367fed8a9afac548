"""Attack what an engine offers, with tiny models of transformers, and print what came of it.

    python reproduce/features.py [FEATURES] [KINDS] [NAMES ..] [--seconds S] [--part I/N]

Every feature is tried with every class of the census (`tests/census`) that may have it, and
compared with plain PyTorch: by loss and gradients, in one microbatch and in two, or by tokens.

    slices    the head in three slices of its words
    tiles     what is pointwise in tiles of six positions
    lora      an adapter at every linear map but the head, head in slices, tiles
    generate  greedy tokens, layers coming and going; between two steps
    frozen    a model of which nothing is trained: its loss and its outputs

A verdict is that of the census: exact, close (rounding; or four times what plain PyTorch differs
from itself when every weight is changed in its last bit), refused, none (the model has no such
head, or nothing that is pointwise), wrong, crash.
"""

from __future__ import annotations

import argparse
import collections
import copy
import functools
import importlib
import math
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import l2l

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import inside
from census import compare
from census.cases import Case, cases
from census.run import beside

from l2l.engine import generation
from l2l.planner import Planning

LIMIT_SECONDS = 60.0
NEW_TOKENS = 5
KINDS = "causal,router,masked,seq2seq"
TOLERANCE = 2e-6
Found = dict[str, Any]
Gradients = dict[str, Tensor]


def engine(model: nn.Module, size: int = compare.ROWS, **settings: Any) -> l2l.Engine:
    """As in the census, with choices of its own."""
    trains = any(parameter.requires_grad for parameter in model.parameters())
    settings = {"optimizer": l2l.SGD(lr=0.1) if trains else None, **settings}
    fixed = {"precision": "float32", "device": "cpu", "microbatch_size": size, "seed": 0}
    return inside.engine(model, kernel="readable", embedding="host", **fixed, **settings)


# --------------------------------------------------------------------------------------------------
# Gradients


def plain_gradients(model: nn.Module, batch: compare.Batch) -> tuple[float, Gradients]:
    """Those of plain PyTorch."""
    model = copy.deepcopy(model)
    loss = compare.loss_of(model, batch)
    loss.backward()
    named = model.named_parameters()
    return float(loss.detach()), {n: p.grad for n, p in named if p.grad is not None}


def distance(found: Gradients, expected: Gradients) -> float:
    """Of the largest gradient; infinite where others have one."""
    if found.keys() != expected.keys():
        return math.inf
    pairs = [(found[name], one) for name, one in expected.items() if one.numel()]
    largest = max(float(one.abs().max()) for _, one in pairs)
    return max(float((own - one).abs().max()) for own, one in pairs) / largest


def with_choices(model: nn.Module, batch: compare.Batch, **choices: Any) -> Found:
    """The worse verdict of a step in one microbatch and in two, by loss and gradients."""
    try:
        loss, expected = plain_gradients(model, batch)
    except Exception as error:
        return {"verdict": "not tested", "why": f"{type(error).__name__}: {error}"}
    moved = plain_gradients(compare.moved(model, 2.0**-23), batch)[1]
    allowed = max(4 * distance(moved, expected), TOLERANCE)
    found = [_verdict(model, batch, size, choices, loss, expected, allowed) for size in (4, 2)]
    order = ("exact", "close", "not tested", "none", "refused", "said", "wrong", "crash")
    return max(found, key=lambda one: order.index(one["verdict"]))


def _verdict(
    model: nn.Module,
    batch: compare.Batch,
    size: int,
    choices: Found,
    loss: float,
    expected: Gradients,
    allowed: float,
) -> Found:
    recorder = l2l.RecordGradients()
    with compare.listening() as said:
        try:
            with engine(copy.deepcopy(model), size, optimizer=recorder, overrides=choices) as one:
                own, evaluated = one.step(batch).loss, one.evaluate(batch)
                decisions, facts = inside.planning(one).decisions, inside.facts(one)
                sliced = "forward U:p m" in {
                    a.kind for each in inside.schedules(one).values() for a in each.actions
                }
        except Exception as error:
            is_none = "cannot come in slices" in str(error)
            return {"verdict": "none"} if is_none else compare.failure(error)
    if choices.get("tile_tokens") and not facts.tiles(decisions.tile_tokens):
        return {"verdict": "none", "why": "nothing is pointwise"}
    if choices.get("num_head_slices") and not sliced:
        return {"verdict": "none", "why": "one loss over all microbatches: the head is whole"}
    found = {n: one for n, one in recorder.gradients.items() if n in expected}
    apart = max(distance(found, expected), *(abs(x - loss) / abs(loss) for x in (own, evaluated)))
    word = "exact" if not apart else "close" if apart <= allowed else "wrong"
    if word == "wrong" and any("gradient accumulation" in text for text in said):
        word = "said"
    return {"verdict": word, "why": f"{apart:.1e} apart, {allowed:.1e} allowed"}


def slices(task: compare.Task) -> Found:
    return with_choices(task.model, task.batches[0], num_head_slices=3)


def tiles(task: compare.Task) -> Found:
    return with_choices(task.model, task.batches[0], tile_tokens=6)


def lora(task: compare.Task) -> Found:
    peft = importlib.import_module("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=2, lora_alpha=1, target_modules="all-linear", init_lora_weights=False
    )
    try:
        model = peft.get_peft_model(copy.deepcopy(task.model), config)
    except Exception as error:
        return {"verdict": "none", "why": f"peft: {error}"}
    found = with_choices(model, task.batches[0], num_head_slices=3, tile_tokens=6)
    if found["verdict"] == "none":
        found = with_choices(model, task.batches[0], tile_tokens=6)
    return found


# --------------------------------------------------------------------------------------------------
# What runs without a step


def generate(task: compare.Task) -> Found:
    """Tokens, of a model between two steps, and what the second step then gives."""
    model, batch = task.model, task.batches[0]
    given = {k: v for k, v in batch.items() if k != "labels" and not k.startswith("decoder_")}
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    try:
        expected = copy.deepcopy(model).eval().generate(**given, **options)
    except Exception as error:
        return {"verdict": "none", "why": f"plain: {type(error).__name__}: {error}"}
    generation._most_staying = lambda *_: 0  # this process has one case
    Planning.room_for_tensors = lambda _: 1 << 40
    losses: list[list[float]] = []
    with compare.listening():
        for generates in (False, True):
            copied = copy.deepcopy(model)
            try:
                with engine(copied) as one:
                    if generates:
                        found = one.generate(**given, **options)
                        if not torch.equal(found, expected):
                            return {
                                "verdict": "wrong",
                                "why": f"{found.tolist()} {expected.tolist()}"[:300],
                            }
                    own = [one.step(task.batches[0]).loss]
                    if generates:
                        one.generate(**given, **options)
                    losses.append([*own, one.step(task.batches[1]).loss])
            except Exception as error:
                if not generates:
                    return {"verdict": "none", "why": str(error)}
                return compare.failure(error)
    same = losses[0] == losses[1]
    return {"verdict": "exact"} if same else {"verdict": "wrong", "why": f"training: {losses}"}


def frozen(task: compare.Task) -> Found:
    """The loss and the outputs of a model of which nothing is trained."""
    model, batch = copy.deepcopy(task.model).requires_grad_(False).eval(), task.batches[0]
    try:
        with torch.no_grad():
            expected = copy.deepcopy(model)(**batch)
    except Exception as error:
        return {"verdict": "not tested", "why": f"{type(error).__name__}: {error}"}
    with compare.listening():
        try:
            with engine(model, 2) as one:
                loss = one.evaluate(batch)
                outputs = one.predict(batch)
        except Exception as error:
            return compare.failure(error)
    error = abs(loss - float(expected["loss"])) / abs(float(expected["loss"]))
    logits, mine = expected["logits"], outputs["logits"]
    error = max(error, float((logits - mine).abs().max() / logits.abs().max()))
    word = "exact" if not error else "close" if error <= 1e-5 else "wrong"
    return {"verdict": word, "why": f"{error:.1e}"}


FEATURES: dict[str, Callable[[compare.Task], Found]] = {
    one.__name__: one for one in (slices, tiles, lora, generate, frozen)
}


def examined(feature: str, case: Case) -> Found:
    """A case, in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            task, _ = compare.prepare(case)
        except Exception as error:
            return {"verdict": "not tested", "why": str(error)[:200]}
        try:
            return FEATURES[feature](task)
        except Exception as error:
            return compare.failure(error)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("features", nargs="?", default=",".join(FEATURES))
    parser.add_argument("kinds", nargs="?", default=KINDS)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS)
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--seconds", type=float, default=math.inf, help="for each feature")
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    number, parts = map(int, parsed.part.split("/"))
    todo = [one for kind in parsed.kinds.split(",") for one in cases(kind)]
    todo = [one for one in todo if not parsed.names or {one.name, one.model_type} & {*parsed.names}]
    todo = todo[number - 1 :: parts]
    table: dict[str, collections.Counter[str]] = {}
    for feature in parsed.features.split(","):
        counts = table.setdefault(feature, collections.Counter())
        end = time.monotonic() + parsed.seconds
        for case in todo:
            if time.monotonic() > end:
                break
            row = beside(case, parsed.limit, functools.partial(examined, feature))
            row = row.get("whole", row)
            counts[row["verdict"]] += 1
            if row["verdict"] not in ("exact", "close", "not tested"):
                why = str(row.get("why", row.get("error", "")))[:150]
                words = [feature, case.kind, case.name, row["verdict"], why]
                print("  ".join(words), flush=True)
    print()
    words = ("exact", "close", "none", "refused", "said", "wrong", "crash", "hang", "not tested")
    print("| feature | " + " | ".join(words) + " |")
    print("| --- " * (len(words) + 1) + "|")
    for feature, counts in table.items():
        print(f"| {feature} | " + " | ".join(str(counts[word]) for word in words) + " |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
