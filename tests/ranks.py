"""One rank of test_distributed.py, in a process of its own: python ranks.py FOLDER RANK SIZE ...

Runs scenarios and saves what each has found; ranks meet through a file.
"""

import argparse
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from families import FAMILIES, Family
from safetensors.torch import load_file
from torch import Tensor

import l2l

ROWS = 8
STEPS = 20
ADAMW = {"lr": 1e-3, "eps": 1e-3, "weight_decay": 0.1}
SMALLER = (
    "eager",
    "eight_bit",
    "adafactor",
    "changing_depth",
    "float16_overflow",
    "outputs",
    "uneven",
)
"""Scenarios that need not be tried with more than two ranks."""
SCENARIOS: dict[str, Callable[["Rank"], Any]] = {}


class Rank:
    """Which one this is, and what it does alike in every scenario."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.folder, self.rank, self.size = options.folder, options.rank, options.size
        self.given = {"device": options.device, "precision": "float32", "compile": False}
        self.given |= {"microbatch_size": 2, "seed": 3}
        if options.backend and self.size == 1:
            self.given["group_size"] = 1  # through the collectives, too

    def engine(self, family: Family, model: torch.nn.Module, **settings: Any) -> l2l.Engine:
        return l2l.Engine(model, layers=family.layers, **{**self.given, **settings})

    def rows(self, batch: dict[str, Tensor], sizes: tuple[int, ...] | None = None) -> dict:
        """This rank's rows of a batch."""
        number = next(iter(batch.values())).shape[0]
        sizes = sizes or (number // self.size,) * self.size
        start = sum(sizes[: self.rank])
        return {name: value[start : start + sizes[self.rank]] for name, value in batch.items()}


def scenario(function: Callable[[Rank], Any]) -> Callable[[Rank], Any]:
    SCENARIOS[function.__name__] = function
    return function


def gradients(rank: Rank, name: str, **settings: Any) -> dict[str, Any]:
    """This rank's pieces of all gradients, each with where it begins."""
    family, recorder = FAMILIES[name], l2l.RecordGradients()
    with rank.engine(family, family.build(), optimizer=recorder, **settings) as engine:
        report = engine.step(rank.rows(family.batch(ROWS)))
        loss, norm = report.loss, report.gradient_norm
        world = engine._world
        starts = {
            owner: unit.form.trained.piece(owner, world.share).start
            for unit in engine._server.units.values()
            for owner in unit.form.trained.names
        }
    pieces = {owner: (starts[owner], value) for owner, value in recorder.gradients.items()}
    return {"loss": loss, "norm": norm, "pieces": pieces}


def trained(
    rank: Rank, family: Family, *, frozen: bool = False, sizes: Any = None, **settings: Any
) -> dict[str, Any]:
    model = family.build()
    if frozen:
        freeze_half(model)
    given = {"optimizer": l2l.AdamW(**ADAMW), **settings}
    with rank.engine(family, model, **given) as engine:
        batches = [family.batch(ROWS, seed=number) for number in range(STEPS)]
        losses = [engine.step(rank.rows(batch, sizes)).loss for batch in batches]
        evaluated = engine.evaluate(rank.rows(family.batch(ROWS, seed=99), sizes))
        host_bytes = dict(engine._arena.bytes_by_name)
        peak = engine.device.peak_bytes()
    found = {"losses": losses, "evaluated": evaluated, "host": host_bytes, "peak": peak}
    return {**found, "state": model.state_dict()}


def freeze_half(model: torch.nn.Module) -> None:
    for parameter in list(model.parameters())[::2]:
        parameter.requires_grad_(False)


@scenario
def gradients_tied(rank: Rank) -> Any:
    return gradients(rank, "llama_tied")


@scenario
def gradients_experts(rank: Rank) -> Any:
    """Experts in a list, of which one gets tokens on some ranks only."""
    return gradients(rank, "hand_written")


@scenario
def gradients_copies(rank: Rank) -> Any:
    """Groups of ranks that hold copies of the model."""
    return gradients(rank, "llama_tied", group_size=max(1, rank.size // 2))


@scenario
def tied_clipped(rank: Rank) -> Any:
    return trained(rank, FAMILIES["llama_tied"], clip_norm=0.5, embedding="device")


@scenario
def eager(rank: Rank) -> Any:
    return trained(rank, FAMILIES["bert_classification"])


@scenario
def frozen_half(rank: Rank) -> Any:
    return trained(rank, FAMILIES["llama_untied"], frozen=True)


@scenario
def experts(rank: Rank) -> Any:
    return trained(rank, FAMILIES["hand_written"], clip_norm=1.0)


@scenario
def copies(rank: Rank) -> Any:
    group = max(1, rank.size // 2)
    return trained(rank, FAMILIES["llama_tied"], clip_norm=0.5, group_size=group)


@scenario
def uneven(rank: Rank) -> Any:
    """Ranks with more and with fewer rows; one goes through some for the sake of others."""
    sizes = {1: (8,), 2: (7, 1), 4: (4, 1, 2, 1)}[rank.size]
    return trained(rank, FAMILIES["llama_tied"], clip_norm=0.5, sizes=sizes)


@scenario
def eight_bit(rank: Rank) -> Any:
    optimizer = l2l.AdamW(**ADAMW, moments="8bit")
    settings = {"optimizer": optimizer, "precision": "bfloat16", "overrides": {"num_tail": 1}}
    return trained(rank, FAMILIES["llama_tied"], **settings)


@scenario
def adafactor(rank: Rank) -> Any:
    settings = {"optimizer": l2l.Adafactor(lr=1e-3), "precision": "float32"}
    return trained(rank, FAMILIES["llama_tied"], **settings)


@scenario
def changing_depth(rank: Rank) -> Any:
    """Layers that are left out by chance, by name, and layers that come and go."""
    family, model = FAMILIES["llama_tied"], FAMILIES["llama_tied"].build()
    policy = l2l.StochasticDepth(last=0.3)
    settings = {"optimizer": l2l.AdamW(**ADAMW), "clip_norm": 0.5, "depth": policy}
    found: dict[str, Any] = {"layers": [], "losses": []}

    def step(engine: l2l.Engine, number: int, layers: Any = None) -> None:
        report = engine.step(rank.rows(family.batch(ROWS, seed=number)), layers=layers)
        found["layers"].append(report.layers)
        found["losses"].append(report.loss)

    with rank.engine(family, model, **settings) as engine:
        for number in range(6):
            step(engine, number)
        step(engine, 6, [0, 2])
        engine.layers.grow(2)
        engine.layers.insert(1, copy_of=4, moments="fresh")
        engine.layers.remove(0)
        for number in range(7, 11):
            step(engine, number)
        found["evaluated"] = engine.evaluate(rank.rows(family.batch(ROWS, seed=99)))
    return {**found, "state": model.state_dict()}


@scenario
def float16_overflow(rank: Rank) -> Any:
    """Numbers that are too large, on one rank only: all of them skip the step."""
    family, found = FAMILIES["sequential"], []
    with rank.engine(family, family.build(), precision="float16") as engine:
        for number in range(5):
            batch = rank.rows(family.batch(ROWS, seed=number))
            too_large = number == 3 and rank.rank == rank.size - 1
            batch["inputs"] = (batch["inputs"] * (1e6 if too_large else 1.0)).half()
            report = engine.step(batch)
            found.append((report.skipped, report.loss_scale))
    return found


@scenario
def outputs(rank: Rank) -> Any:
    family = FAMILIES["bert_classification"]
    with rank.engine(family, family.build()) as engine:
        return engine.predict(rank.rows(family.batch(ROWS))).logits


@scenario
def saved(rank: Rank) -> Any:
    """Saved beside a step, gone on with, and loaded again; also what other worlds have saved."""
    family, found = FAMILIES["llama_tied"], {}

    def train(engine: l2l.Engine, *numbers: int) -> None:
        for number in numbers:
            engine.step(rank.rows(family.batch(ROWS, seed=number)))

    settings = {"optimizer": l2l.AdamW(**ADAMW), "clip_norm": 0.5, "embedding": "device"}
    model = family.build()
    with rank.engine(family, model, **settings) as engine:
        train(engine, 0, 1)
        saving = engine.save(rank.folder / f"saved-{rank.size}", background=True)
        train(engine, 2, 3)
        saving.wait()
        engine.export(rank.folder / "exported")
    found["straight on"] = model.state_dict()
    if rank.rank == 0:
        found["exported"] = load_file(rank.folder / "exported" / "model.safetensors")
    for folder in sorted(rank.folder.parent.glob("*/saved-*")):
        if folder.suffix:  # of another rank that is writing
            continue
        model = family.build()
        with rank.engine(family, model, **settings) as engine:
            engine.load(folder)
            train(engine, 2, 3)
        found[folder.name] = model.state_dict()
    return found


@scenario
def refused(rank: Rank) -> Any:
    """What each of these says."""
    family, found = FAMILIES["llama_tied"], {}

    def attempt(name: str, **settings: Any) -> None:
        try:
            rank.engine(family, **settings).close()
        except ValueError as error:
            found[name] = str(error)

    attempt("group size", model=family.build(), group_size=3)
    attempt("embedding", model=family.build(), embedding="host")
    model = family.build()
    with torch.no_grad():
        next(model.parameters()).add_(float(rank.rank))
    attempt("weights", model=model)
    return found


def run(
    folder: Path, size: int, *, device: str = "cpu", backend: str = "", scenarios: Any = ()
) -> list[dict[str, Any]]:
    """What each of so many ranks has found, in processes of their own."""
    folder.mkdir()
    words = [sys.executable, __file__, str(folder), "--size", str(size), "--device", device]
    words += ["--backend", backend or ("gloo" if size > 1 else ""), "--scenarios", *scenarios]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen([*words, "--rank", str(rank)], env=environment) for rank in range(size)
    ]
    codes = [one.wait(timeout=240) for one in running]
    found = [
        torch.load(path, weights_only=False) if (path := folder / f"{rank}.pt").exists() else {}
        for rank in range(size)
    ]
    failed = [text for one in found for text in one.values() if isinstance(text, str)]
    assert not any(codes), failed
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--size", type=int)
    parser.add_argument("--device")
    parser.add_argument("--backend")
    parser.add_argument("--scenarios", nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.backend:
        dist.init_process_group(
            options.backend,
            f"file://{options.folder / 'store'}",
            rank=options.rank,
            world_size=options.size,
            timeout=timedelta(seconds=60),
        )
    rank, results = Rank(options), {}
    path = options.folder / f"{options.rank}.pt"
    usual = [one for one in SCENARIOS if options.size < 4 or one not in SMALLER]
    for name in options.scenarios or usual:
        torch.manual_seed(0)
        try:
            results[name] = SCENARIOS[name](rank)
        except BaseException:
            torch.save({**results, name: traceback.format_exc()}, path)
            os._exit(1)  # the others end, too
    torch.save(results, path)
    if options.backend:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
