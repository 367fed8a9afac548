"""Fine-tune a pretrained BERT on GLUE tasks, through the relay and through plain PyTorch.

    python reproduce/glue.py --model FOLDER --data FOLDER [--tasks MRPC RTE CoLA SST-2] [--seeds 5]

The model folder is a Hugging Face one with pretrained weights; the data folder has one folder for
each task with train.jsonl.gz and dev.jsonl.gz (`sentence1`, `sentence2`, `label`). Both systems see
the same batches in the same order, the same new head, the same learning rates; dropout draws its
own numbers in each. Results are appended to a file as they come, so a run can be ended and taken
up again; the table says for each task whether the two means differ by more than chance.

With `--curves` instead: dropout off, float32, and the largest difference of the two loss curves.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import l2l
from l2l.train.data import Batches, Examples, Form, make_examples, read_records
from l2l.train.evaluation import accuracy, f1, matthews_correlation

Metric = Callable[[Tensor, Tensor], float]
METRICS: dict[str, tuple[str, Metric]] = {
    "MRPC": ("F1", f1),
    "RTE": ("accuracy", accuracy),
    "CoLA": ("Matthews", matthews_correlation),
    "SST-2": ("accuracy", accuracy),
    "WNLI": ("accuracy", accuracy),
}
EPOCHS = {"SST-2": 1}  # the others: 3
LENGTH, ROWS, WARM_UP, CLIP_NORM = 128, 32, 0.1, 1.0
SYSTEMS = ("relay", "plain")
Run = tuple[str, int, str]  # task, seed, system


@dataclass(frozen=True)
class Task:
    """What is learnt, and in which steps."""

    name: str
    train: Batches
    dev: Batches
    num_labels: int
    num_steps: int
    learning_rate: float

    def rate(self, step: int) -> float:
        """Linear, with warm-up."""
        warm = max(1, int(WARM_UP * self.num_steps))
        share = (
            (step + 1) / warm if step < warm else (self.num_steps - step) / (self.num_steps - warm)
        )
        return self.learning_rate * share


def read_task(name: str, options: argparse.Namespace, *, seed: int) -> Task:
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    form = Form(task="classification", max_length=LENGTH)

    def examples(part: str) -> Examples:
        records = read_records(options.data / name / f"{part}.jsonl.gz")
        return make_examples(records, tokenizer=tokenizer, form=form)

    train = examples("train")
    settings = {"rows": ROWS, "length": LENGTH, "packing": False, "pad_id": tokenizer.pad_token_id}
    batches = Batches(train, seed=seed, **settings)
    return Task(
        name=name,
        train=batches,
        dev=Batches(examples("dev"), seed=0, **settings),
        num_labels=train.num_labels or 2,
        num_steps=min(options.steps or 10**9, batches.num_steps(EPOCHS.get(name, 3))),
        learning_rate=options.learning_rate,
    )


def make_model(task: Task, options: argparse.Namespace, *, seed: int, dropout: bool) -> nn.Module:
    torch.manual_seed(seed)  # of the new head
    settings = {} if dropout else {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return AutoModelForSequenceClassification.from_pretrained(
        options.model, num_labels=task.num_labels, dtype=torch.float32, **settings
    )


def decay(name: str, parameter: nn.Parameter) -> dict[str, float] | None:
    """Matrices decay, all else does not."""
    return {"weight_decay": 0.0} if parameter.dim() < 2 else None


def train_relay(
    task: Task, model: nn.Module, *, seed: int, precision: str, options: argparse.Namespace
) -> tuple[list[float], Tensor]:
    """Losses and predictions."""
    optimizer = l2l.AdamW(lr=task.learning_rate, weight_decay=0.01, groups=decay)
    with l2l.Engine(
        model,
        optimizer=optimizer,
        device=options.device,
        device_memory=options.device_memory,
        microbatch_size=ROWS,
        precision=precision,
        clip_norm=CLIP_NORM,
        compile=False,
        seed=seed,
    ) as engine:
        reports = []
        for step in range(task.num_steps):
            for group in engine.optimizer.param_groups:
                group["lr"] = task.rate(step)
            reports.append(engine.step(task.train.batch(step)))
        losses = [report.loss for report in reports]
        predictions = [engine.predict(batch)["logits"].argmax(-1) for batch in task.dev.in_order()]
    return losses, torch.cat(predictions).cpu()


def train_plain(
    task: Task, model: nn.Module, *, seed: int, precision: str, options: argparse.Namespace
) -> tuple[list[float], Tensor]:
    """The same with everything on the device, in plain PyTorch."""
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model.to(device).train()
    torch.manual_seed(seed)
    trained = list(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for _, p in trained if p.dim() >= 2], "weight_decay": 0.01},
            {"params": [p for _, p in trained if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=task.learning_rate,
    )

    def run(batch: dict[str, Tensor]) -> object:
        mixed = precision == "bfloat16"
        with torch.autocast(device.type, torch.bfloat16) if mixed else nullcontext():
            return model(**{key: value.to(device) for key, value in batch.items()})

    losses = []
    for step in range(task.num_steps):
        for group in optimizer.param_groups:
            group["lr"] = task.rate(step)
        loss = run(task.train.batch(step)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    model.eval()
    with torch.no_grad():
        predictions = [run(batch).logits.argmax(-1).cpu() for batch in task.dev.in_order()]
    return [float(loss) for loss in losses], torch.cat(predictions)


TRAINERS = {"relay": train_relay, "plain": train_plain}


def labels_of(batches: Batches) -> Tensor:
    return torch.cat([batch["labels"] for batch in batches.in_order()])


def run_all(options: argparse.Namespace) -> None:
    """Every task, seed and system that the results file does not have yet."""
    done = {(one["task"], one["seed"], one["system"]) for one in results(options.results)}
    tasks = sorted(options.tasks, key=lambda name: name != "SST-2")  # the longest first
    runs = [one for one in product(tasks, range(options.seeds), SYSTEMS) if one not in done]
    options.results.parent.mkdir(parents=True, exist_ok=True)
    for found in _performed(runs, options):
        with options.results.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(json.dumps(found), flush=True)


def _performed(runs: list[Run], options: argparse.Namespace) -> Iterator[dict[str, object]]:
    if options.workers == 1:
        yield from (perform(run, options) for run in runs)
        return
    threads = max(1, torch.get_num_threads() // options.workers)
    start = partial(torch.set_num_threads, threads)
    with get_context("spawn").Pool(options.workers, initializer=start) as pool:
        yield from pool.imap_unordered(partial(perform, options=options), runs)


def perform(run: Run, options: argparse.Namespace) -> dict[str, object]:
    """Train one system on one task with one seed."""
    name, seed, system = run
    task = read_task(name, options, seed=seed)
    model = make_model(task, options, seed=seed, dropout=True)
    began = time.perf_counter()
    losses, predictions = TRAINERS[system](
        task, model, seed=seed, precision="bfloat16", options=options
    )
    measure, metric = METRICS[name]
    return {
        "task": name,
        "seed": seed,
        "system": system,
        "measure": measure,
        "score": metric(predictions, labels_of(task.dev)),
        "steps": task.num_steps,
        "first_loss": losses[0],
        "last_losses": sum(losses[-20:]) / len(losses[-20:]),
        "seconds": round(time.perf_counter() - began, 2),
    }


def run_curves(options: argparse.Namespace) -> None:
    """Dropout off, float32: the two loss curves."""
    torch.backends.cuda.matmul.allow_tf32 = False
    for name in options.tasks:
        task = read_task(name, options, seed=0)
        curves = {
            system: TRAINERS[system](
                task,
                make_model(task, options, seed=0, dropout=False),
                seed=0,
                precision="float32",
                options=options,
            )[0]
            for system in SYSTEMS
        }
        pairs = zip(curves["relay"], curves["plain"], strict=True)
        largest = max(abs(a - b) for a, b in pairs)
        print(
            json.dumps(
                {
                    "task": name,
                    "steps": task.num_steps,
                    "largest_difference": largest,
                    **{f"last_{system}": curve[-1] for system, curve in curves.items()},
                }
            ),
            flush=True,
        )


def results(path: Path) -> Iterator[dict[str, object]]:
    if path.exists():
        yield from (json.loads(line) for line in path.read_text().splitlines())


def table(path: Path) -> str:
    """Means and spreads, and what differs by more than chance."""
    lines = [
        "| task | measure | seeds | relay | plain PyTorch | difference | bound |",
        "|---|---|---|---|---|---|---|",
    ]
    rows = list(results(path))
    for name in dict.fromkeys(row["task"] for row in rows):
        scores = {
            system: torch.tensor(
                [r["score"] for r in rows if (r["task"], r["system"]) == (name, system)],
                dtype=torch.float64,
            )
            for system in SYSTEMS
        }
        if min(len(one) for one in scores.values()) < 2:
            continue
        number = min(len(one) for one in scores.values())
        spread = math.sqrt(sum(one.var().item() for one in scores.values()) / 2)
        difference = abs(scores["relay"].mean() - scores["plain"].mean()).item()
        bound = 3 * spread * math.sqrt(2 / number)
        measure = next(row["measure"] for row in rows if row["task"] == name)
        cells = [f"{100 * one.mean():.2f} +- {100 * one.std():.2f}" for one in scores.values()]
        verdict = "" if difference <= bound else " (exceeded)"
        lines.append(
            f"| {name} | {measure} | {number} | {cells[0]} | {cells[1]} | {100 * difference:.2f} | "
            f"{100 * bound:.2f}{verdict} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=["MRPC", "RTE", "CoLA", "SST-2"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=None, help="at most so many")
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--device", default=None)
    parser.add_argument("--device-memory", default=None)
    parser.add_argument("--results", type=Path, default=Path("runs/glue.jsonl"))
    parser.add_argument("--workers", type=int, default=1, help="runs at a time, on one device")
    parser.add_argument("--curves", action="store_true")
    options = parser.parse_args()
    if options.curves:
        run_curves(options)
        return
    run_all(options)
    print(table(options.results))


if __name__ == "__main__":
    main()
