"""The ranks of test_distributed.py, in processes of their own: python ranks.py FOLDER --sizes 1 2

For each number of ranks in turn, so many processes run the scenarios and save what each has found;
they meet through a file. They are forked once everything is imported, which takes seconds.
"""

import argparse
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import inside
import torch
import torch._dynamo
import torch.distributed as dist
from families import FAMILIES, HIDDEN, Family, SequentialClassifier
from safetensors.torch import load_file
from test_split import (
    IMAGE,
    TEXT,
    VIDEO,
    Graphs,
    build_qwen,
    graph_batch,
    qwen_batch,
    qwen_rows,
    split_graphs,
)
from torch import Tensor

import l2l
from l2l.model import Splitting, join_rows

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
    "unlabelled",
)
"""Scenarios that need not be tried with more than two ranks."""
SCENARIOS: dict[str, Callable[["Rank"], Any]] = {}


class Rank:
    """Which one this is, and what it does alike in every scenario."""

    def __init__(self, number: int, options: argparse.Namespace, backend: str) -> None:
        self.folder, self.rank, self.size = options.folder, number, options.size
        self.given = {"device": options.device, "precision": "float32", "compile": False}
        self.given |= {"microbatch_size": 2, "seed": 3}
        if backend and self.size == 1:
            self.given["group_size"] = 1  # through the collectives, too

    def engine(self, family: Family, model: torch.nn.Module, **settings: Any) -> l2l.Engine:
        return inside.engine(model, layers=family.layers, **{**self.given, **settings})

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
    family = FAMILIES[name]
    return gradients_of(rank, family, rank.rows(family.batch(ROWS)), **settings)


def gradients_of(rank: Rank, family: Family, rows: Any, **settings: Any) -> dict[str, Any]:
    recorder = l2l.RecordGradients()
    with rank.engine(family, family.build(), optimizer=recorder, **settings) as engine:
        report = engine.step(rows)
        loss, norm = report.loss, report.gradient_norm
        world = inside.world(engine)
        starts = {
            owner: unit.form.trained.piece(owner, world.share).start
            for unit in inside.server(engine).units.values()
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
        host_bytes = dict(inside.arena(engine).bytes_by_name)
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
def gradients_pictures(rank: Rank) -> Any:
    """Rows of which the first has no images."""
    family = Family("pictures", build_qwen, qwen_batch, "shifted", TEXT)
    ids = Splitting(None, (("image", IMAGE), ("video", VIDEO)))
    rows = ids.of([qwen_rows()[row] for row in (1, 2, 3, 0)])
    return gradients_of(rank, family, dict(join_rows(own_of(rank, rows))), microbatch_size=1)


@scenario
def gradients_graphs(rank: Rank) -> Any:
    """Rows that the user's function cuts."""
    family = Family("graphs", Graphs, graph_batch, "rows")
    sizes = own_of(rank, [3, 5, 2, 4, 6, 2, 3, 7])
    batch = {**graph_batch(*sizes), "y": torch.tensor(sizes) % 4}
    return gradients_of(rank, family, batch, split=split_graphs, microbatch_size=1)


def own_of(rank: Rank, rows: list[Any]) -> list[Any]:
    number = len(rows) // rank.size
    return rows[number * rank.rank : number * (rank.rank + 1)]


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
def unlabelled(rank: Rank) -> Any:
    """Ranks of whose rows nothing is learnt: the first ones in one step, the last in the next."""
    family = FAMILIES["llama_tied"]

    def half_labelled(rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
        batch = family.batch(rows, seed=seed)
        ignored = slice(0, rows // 2) if seed % 2 else slice(rows // 2, rows)
        batch["labels"] = batch["labels"].clone()
        batch["labels"][ignored] = -100
        return batch

    return trained(rank, replace(family, batch=half_labelled), clip_norm=0.5)


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
    nothing = rank.rows(family.batch(ROWS))
    nothing["labels"] = torch.full_like(nothing["labels"], -100)
    kinds = torch.full((2,), -100 if rank.rank == rank.size - 1 else 1)  # some of one rank's
    some = {"inputs": torch.randn(2, 4, HIDDEN), "kinds": kinds}
    with rank.engine(family, family.build()) as engine:
        found["labels"] = refusal(engine, nothing)
        predicted = engine.predict(nothing)
        found["predicted"] = (predicted.logits.isfinite().all(), predicted.loss.isnan())
        found["state"] = engine.state_dict()
        try:
            engine.optimizer.state_dict()
        except RuntimeError as error:
            found["optimizer"] = str(error)
        try:
            inside.model(engine).state_dict()
        except RuntimeError as error:
            found["alone"] = str(error)
    torch.manual_seed(0)
    classifier = OtherTargets(lambda: torch.nn.LayerNorm(HIDDEN))
    with rank.engine(FAMILIES["sequential"], classifier) as engine:
        found["targets"] = refusal(engine, some)
    return found


class OtherTargets(SequentialClassifier):
    """Its targets have a name that nobody counts by."""

    def forward(self, inputs: Tensor, kinds: Tensor) -> dict[str, Tensor]:
        return super().forward(inputs, kinds)


def refusal(engine: l2l.Engine, batch: dict[str, Tensor]) -> str:
    try:
        engine.step(batch)
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def run(
    folder: Path, *sizes: int, device: str = "cpu", backend: str = "", scenarios: Any = ()
) -> dict[int, list[dict[str, Any]]]:
    """For each number of ranks what each of them has found."""
    words = [sys.executable, __file__, str(folder), "--sizes", *map(str, sizes)]
    words += ["--device", device, "--backend", backend, "--scenarios", *scenarios]
    paths = (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", ""))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    code = subprocess.run(words, env=environment, timeout=300, check=False).returncode
    found = {
        size: [
            torch.load(path, weights_only=False) if path.exists() else {}
            for path in (folder / str(size) / f"{rank}.pt" for rank in range(size))
        ]
        for size in sizes
    }
    every = [one for ranks in found.values() for one in ranks]
    assert code == 0, [text for one in every for text in one.values() if isinstance(text, str)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+")
    parser.add_argument("--device")
    parser.add_argument("--backend")
    parser.add_argument("--scenarios", nargs="*")
    options = parser.parse_args()
    FAMILIES["llama_tied"].build()  # imports more
    for size in options.sizes:
        folder = options.folder / str(size)
        folder.mkdir(parents=True)
        running = []
        for number in range(size):
            if (child := os.fork()) == 0:
                be_rank(
                    number, argparse.Namespace(**{**vars(options), "folder": folder, "size": size})
                )
            running.append(child)
        if any(os.waitpid(child, 0)[1] for child in running):
            sys.exit(1)


def be_rank(number: int, options: argparse.Namespace) -> NoReturn:
    """Run the scenarios, and leave the process."""
    path, results = options.folder / f"{number}.pt", {}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    backend = options.backend or ("gloo" if options.size > 1 else "")
    usual = [one for one in SCENARIOS if options.size < 4 or one not in SMALLER]
    name = "the process group"
    try:
        if backend:
            dist.init_process_group(
                backend,
                f"file://{options.folder / 'store'}",
                rank=number,
                world_size=options.size,
                timeout=timedelta(seconds=60),
            )
        rank = Rank(number, options, backend)
        for name in options.scenarios or usual:
            torch.manual_seed(0)
            results[name] = SCENARIOS[name](rank)
        torch.save(results, path)
        if backend:
            dist.destroy_process_group()
    except BaseException:
        torch.save({**results, name: traceback.format_exc()}, path)
        os._exit(1)  # the others end, too
    os._exit(0)


if __name__ == "__main__":
    main()
