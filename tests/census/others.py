"""Models from outside transformers, trained by the engine and by plain PyTorch.

    python tests/census/others.py OUT.jsonl [names of cases, families or libraries]
    python tests/census/others.py --table OUT.jsonl

Two steps of SGD in float32, first with all rows in one microbatch and the optimizer of torch, then
with rows singly and the engine's own. Losses and the whole state_dict are compared with plain
PyTorch, which accumulates the gradients of the same microbatches. A verdict is one of:

    exact    the same bits
    close    the same but for 1e-6 of the largest number of each tensor
    refused  the engine said why it does not train this model; the model was left as it was
    wrong    other numbers, or a refusal that changed the model
    crash    an error that is none of the engine's
    hang     no end after a minute
    broken   the case itself: the library is of another version
    -        plain PyTorch does not run it so, or its rows cannot be cut

A loss that is not the mean of those of its rows must be refused with rows singly, or else be
said to differ, as for statistics of a batch.
"""

import argparse
import importlib
import inspect
import json
import logging
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent)]

import inside  # noqa: E402
from other_cases import CASES, Batch, Case, Loss  # noqa: E402

import l2l  # noqa: E402
from l2l.proof import ProofMemory  # noqa: E402

SECONDS = 60.0
LEARNING_RATE = 1 / 16  # times a gradient is exact: updates round alike, fused or not
STEPS = 2
TOLERANCE = 1e-6
SUM_TOLERANCE = 2e-5
MODES = ("whole", "rows")
WORST = ("broken", "wrong", "crash", "hang", "refused", "close", "-", "exact", "skipped")

Numbers = dict[str, Tensor]
KEPT: list[torch.library.Library] = []  # what they declare goes with them


def made(one: Case) -> tuple[nn.Module, Batch, Loss]:
    """A model with its batch; zeros and ones are moved a little, or they would hide a swap."""
    torch.manual_seed(0)
    model, batch, loss = one.make()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return model.train(), batch, loss


# --------------------------------------------------------------------------------------------------
# Plain PyTorch


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(trained, lr=LEARNING_RATE)


def rows_of(batch: Batch) -> int | None:
    """The number of rows; None: the tensors do not share one."""
    found = {len(one) for one in batch.values() if isinstance(one, Tensor) and one.dim()}
    return found.pop() if len(found) == 1 else None


def split(batch: Batch) -> list[Batch]:
    """The rows of a batch, each alone."""

    def cut(value: Any, row: int) -> Any:
        return value[row : row + 1] if isinstance(value, Tensor) and value.dim() else value

    return [{name: cut(v, row) for name, v in batch.items()} for row in range(rows_of(batch) or 0)]


def outputs_of(model: nn.Module, batch: Batch) -> Any:
    """What a model makes of the entries that it takes."""
    try:
        takes = inspect.signature(model.forward).parameters
    except ValueError:  # of a model that is compiled
        return model(**batch)
    hands_on = any(one.kind is one.VAR_KEYWORD for one in takes.values())
    return model(**{name: v for name, v in batch.items() if hands_on or name in takes})


def plain_step(model: nn.Module, parts: list[Batch], loss: Loss) -> float:
    """Accumulate the gradients of some microbatches; the loss of all."""
    found = []
    for part in parts:
        outputs = outputs_of(model, part)
        found.append(loss(outputs, part) if loss else outputs["loss"])
    shares = [1 / len(parts)] * len(parts)
    if isinstance(found[0], tuple):  # sums and weights
        shares = [1 / sum(float(weight) for _, weight in found)] * len(parts)
        found = [one for one, _ in found]
    whole = torch.zeros(())
    for one, share in zip(found, shares, strict=True):
        (one * share).backward()
        whole = whole + one.detach() * share
    return float(whole)


def train_plainly(one: Case, mode: str, *, moved: bool = False) -> tuple[list[float], Numbers]:
    """Losses and state after some steps; `moved`: from weights that differ in their last bit."""
    model, batch, loss = made(one)
    with torch.no_grad():
        for parameter in model.parameters() if moved else ():
            parameter.mul_(1 + 2.0**-23 * torch.randn_like(parameter).sign())
    parts = [batch] if mode == "whole" else split(batch)
    optimizer = optimizer_of(model)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(plain_step(model, parts, loss))
        optimizer.step()
    return losses, copied(model)


def adds_up(one: Case) -> bool:
    """Whether the loss of the batch is the mean of those of its rows, each of a fresh model."""

    def alone(row: int | None) -> float:
        model, batch, loss = made(one)
        return plain_step(model, [batch if row is None else split(batch)[row]], loss)

    model, batch, loss = made(one)
    found = loss(outputs_of(model, batch), batch) if loss else None
    if isinstance(found, tuple):
        return True
    whole = alone(None)
    rows = [alone(row) for row in range(rows_of(batch) or 0)]
    return abs(whole - sum(rows) / len(rows)) <= SUM_TOLERANCE * max(abs(whole), 1e-2)


def copied(model: nn.Module) -> Numbers:
    return {n: t.clone() for n, t in model.state_dict().items() if isinstance(t, Tensor)}


# --------------------------------------------------------------------------------------------------
# The engine


class Heard(logging.Handler):
    """Keeps what the engine warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def train_by_engine(model: nn.Module, batch: Batch, loss: Loss, size: int) -> list[float]:
    """Losses of some steps; the model has its weights again afterwards.

    With rows singly the optimizer is ours, which finds the parameters itself.
    """
    optimizer = l2l.SGD(lr=LEARNING_RATE) if size == 1 else optimizer_of(model)
    with l2l.Engine(
        model, optimizer=optimizer, precision="float32", microbatch_size=size, loss=loss
    ) as engine:
        losses = [float(engine.step(batch).loss) for _ in range(STEPS)]
        state = {n: t for n, t in engine.state_dict().items() if isinstance(t, Tensor)}
    assert distance(state, copied(model)) == 0, "engine.state_dict() is not the model's, closed"
    return losses


def distances(found: Numbers, expected: Numbers) -> dict[str, float]:
    """Differences, relative to the largest number of a tensor; of what has the same bits, none."""
    if list(found) != list(expected):
        return {"names": float("inf")}
    each = {name: _relative(found[name], expected[name]) for name in expected}
    return {name: apart for name, apart in each.items() if apart}


def distance(found: Numbers, expected: Numbers) -> float:
    return max(distances(found, expected).values(), default=0.0)


def _relative(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape or found.dtype is not expected.dtype:
        return float("inf")
    if torch.equal(found, expected):
        return 0.0
    if found.is_complex():
        found, expected = torch.view_as_real(found), torch.view_as_real(expected)
    if not found.is_floating_point():
        return float("inf")
    apart = (found.double() - expected.double()).abs().max()
    relative = float(apart / expected.double().abs().max().clamp_min(1e-3))
    return relative if relative == relative else float("inf")


def is_refusal(error: BaseException) -> bool:
    """Whether the engine itself refused, in words of its own."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return isinstance(error, ValueError) and "/l2l/" in last


def place_of(error: BaseException) -> str:
    """The last lines of the engine that an error came through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/l2l/" in f.filename]
    return " < ".join(
        f"{f.filename.rpartition('/l2l/')[2]}:{f.lineno} {f.name}" for f in frames[:-4:-1]
    )


def judge(one: Case, mode: str) -> dict[str, Any]:
    """Train a case in one of the two ways; the verdict, and what led to it."""
    try:
        batch = made(one)[1]
    except Exception as error:
        return {"verdict": "broken", "message": f"the case: {type(error).__name__}: {error}"}
    rows = rows_of(batch)
    if mode == "rows" and rows is None:
        return {"verdict": "-", "message": "its tensors do not share their rows"}
    try:
        losses, state = train_plainly(one, mode)
    except Exception as error:
        return {"verdict": "-", "message": f"plain PyTorch: {type(error).__name__}: {error}"}
    is_mean = mode == "whole" or adds_up(one)
    heard = Heard()
    logging.getLogger("l2l").addHandler(heard)
    model, batch, loss = made(one)
    before = copied(model)
    size = 1 if mode == "rows" else rows or len(next(iter(batch.values())))
    try:
        found = train_by_engine(model, batch, loss, size)
    except Exception as error:
        return failed(error, unchanged=distance(copied(model), before) == 0)
    # A loss that is no mean over rows is to be that of the whole batch, or something is said.
    is_said = any("gradient accumulation" in said for said in heard.messages)
    if not is_mean and not is_said:
        losses, state = train_plainly(one, "whole")
    each = _apart(found, copied(model), losses, state)
    most = max(each.values(), default=0.0)
    allowed = TOLERANCE
    if most > TOLERANCE:  # some models amplify rounding: as far as plain PyTorch from itself
        nearby = train_plainly(one, "whole" if not is_mean else mode, moved=True)
        allowed = 2 * max(_apart(*nearby, losses, state).values(), default=0.0)
    verdict = "exact" if most == 0 else "close" if most <= max(TOLERANCE, allowed) else "wrong"
    names = sorted(each, key=lambda name: -each[name])
    message = f"{len(each)} differ, most {names[0]}, by {most:.1e}" if each else ""
    return {"verdict": verdict, "message": message, "warned": heard.messages}


def _apart(
    found: list[float], state: Numbers, losses: list[float], expected: Numbers
) -> dict[str, float]:
    """Differences of losses and states."""
    of_losses = distances({"loss": torch.tensor(found)}, {"loss": torch.tensor(losses)})
    return of_losses | distances(state, expected)


def failed(error: Exception, *, unchanged: bool) -> dict[str, Any]:
    """The verdict on an engine that raised an error."""
    verdict = "refused" if is_refusal(error) else "crash"
    kind, said = type(error).__name__, str(error)
    if verdict == "refused" and not unchanged:
        verdict, said = "wrong", f"refused, but the model has changed: {said}"
    elif not unchanged:
        said = f"the model has changed: {said}"
    return {"verdict": verdict, "error": kind, "message": said, "place": place_of(error)}


# --------------------------------------------------------------------------------------------------
# Each in a process of its own


def apart(work: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """What a call gives in a forked process, or that it did not end."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)

    def run() -> None:
        warnings.simplefilter("ignore")
        nothing = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nothing, stream)
        try:
            found = work(*args)
        except BaseException as error:
            found = {"verdict": "crash", "error": type(error).__name__, "message": str(error)}
            found["place"] = place_of(error)
        sender.send(found)
        os._exit(0)

    begun = time.perf_counter()
    child = fork.Process(target=run)
    child.start()
    sender.close()
    found: dict[str, Any] = {"verdict": "hang", "message": f"no end after {SECONDS:.0f} s"}
    try:
        if receiver.poll(SECONDS):
            found = receiver.recv()
    except EOFError:
        child.join()
        found = {"verdict": "crash", "message": f"the process ended with {child.exitcode}"}
    child.kill()
    child.join()
    return {**found, "seconds": round(time.perf_counter() - begun, 1)}


def declare_operators() -> None:
    """Let torchvision be imported beside a torch that its compiled operators do not fit.

    No case calls them, but torchvision describes them when it is imported.
    """
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        KEPT.append(library)


def absent(library: str | None) -> str | None:
    """Why a library cannot be used here; None: it can."""
    try:
        if library is not None:
            importlib.import_module(library)
    except Exception as error:
        return f"{library}: {type(error).__name__}: {error}"
    return None


def chosen(names: list[str]) -> Iterator[Case]:
    for one in CASES.values():
        if not names or {one.name, one.family, one.library} & set(names):
            yield one


def run(path: Path, names: list[str]) -> None:
    """Judge cases, one line of JSON each; what the file has of other cases stays."""
    old = read(path) if path.exists() else []
    cases = list(chosen(names))
    kept = [line for line in old if line["name"] not in {one.name for one in cases}]
    path.write_text("".join(json.dumps(line) + "\n" for line in kept if line["name"] in CASES))
    for number, one in enumerate(cases, start=1):
        line: dict[str, Any] = {"name": one.name, "family": one.family, "library": one.library}
        if (reason := absent(one.library)) is not None:
            line |= {mode: {"verdict": "skipped", "message": reason} for mode in MODES}
        else:
            line |= {mode: apart(judge, one, mode) for mode in MODES}
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        verdicts = " ".join(f"{line[mode]['verdict']:8}" for mode in MODES)
        print(f"{number:3}/{len(cases)} {one.name:40} {verdicts} {short(line)[:100]}", flush=True)


# --------------------------------------------------------------------------------------------------
# The table


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def short(line: dict[str, Any]) -> str:
    """The first sentence about the worse of its verdicts."""
    found = min((line[mode] for mode in MODES), key=lambda one: WORST.index(one["verdict"]))
    message = " ".join(found["message"].split()).replace("|", "\\|")
    sentence = message.partition(". ")[0]
    return sentence if len(sentence) <= 160 else sentence[:157] + "..."


def table(lines: list[dict[str, Any]]) -> str:
    """Counts, and a line for every case, in Markdown."""
    order = {name: place for place, name in enumerate(CASES)}
    lines = sorted(lines, key=lambda line: order.get(line["name"], len(order)))
    counts = [Counter(line[mode]["verdict"] for line in lines) for mode in MODES]
    verdicts = sorted(counts[0] | counts[1], key=lambda verdict: -counts[0][verdict])
    text = ["| verdict | one microbatch | rows singly |", "|---|---|---|"]
    text += [f"| {verdict} | {counts[0][verdict]} | {counts[1][verdict]} |" for verdict in verdicts]
    text += ["", "| model | family | from | one microbatch | rows singly | message |"]
    text += ["|---|---|---|---|---|---|"]
    for line in lines:
        cells = [line["name"], line["family"], line["library"] or "own"]
        cells += [line[mode]["verdict"] for mode in MODES]
        text.append("| " + " | ".join([*cells, short(line)]) + " |")
    return "\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--table", action="store_true", help="print what was found before")
    parser.add_argument("path", type=Path)
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    if given.table:
        print(table(read(given.path)), end="")
        return
    torch.set_num_threads(1)
    declare_operators()
    inside.remember_proofs_in(ProofMemory(None))
    run(given.path, given.names)


if __name__ == "__main__":
    main()
