"""One model trained twice: by plain PyTorch and by the engine. Uses what the package shows.

Two steps of SGD, losses and the whole state_dict compared: once with all rows in one microbatch,
which must give the same bits, and once with rows singly. For these, plain PyTorch accumulates the
gradients of the rows, each loss weighted as its part of the loss of the whole batch. Which weights
these are (by labels, by rows) is found here by trying, without the engine. Some models amplify
rounding: where the engine is not exact, it may be from plain PyTorch twice as far as that is from
itself with every weight changed in its last bit.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import math
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import l2l
from l2l.proof import ProofError

from .batches import IGNORED, ROWS, Batch, ragged
from .cases import LABELLED, Case, build
from .tiny import signature

LEARNING_RATE = 0.1
USUAL_LOSS = 10.0  # above, a smaller learning rate: losses that are sums would diverge
TOLERANCE = 1e-6  # of the largest value of a tensor, or ten times that of its largest change
MOST_APART = 1e-4  # that plain PyTorch may be from itself
LOSS_TOLERANCE = 1e-5  # of a loss; for weights of rows to be the right ones, too
ROUNDING = 2.5e-7  # of the largest value: what a small change cannot be told from,
CHANGE_TOLERANCE = 0.01  # but for this part of it
CODE = Path(l2l.__path__[0]).resolve()

State = dict[str, Tensor]
Parts = list[tuple[float, Batch]]  # of a batch, with weights
Trained = tuple[list[float], State]  # losses and weights
Found = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Task:
    """What is trained, both ways."""

    model: nn.Module
    batches: Sequence[Batch]
    learning_rate: float


# --------------------------------------------------------------------------------------------------
# Plain PyTorch


def rows_of(batch: Batch) -> list[Batch] | None:
    """Each row by itself, or None where an entry has no such rows."""
    tensors = {k: v for k, v in batch.items() if isinstance(v, Tensor) and v.dim()}
    if {len(tensor) for tensor in tensors.values()} != {ROWS}:
        return None
    return [{**batch, **{k: v[i : i + 1] for k, v in tensors.items()}} for i in range(ROWS)]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    settings = {"use_cache": False} if "use_cache" in signature(model.forward) else {}
    outputs = model(**{**settings, **batch})
    return outputs["loss"] if hasattr(outputs, "keys") else outputs[0]


def weights_of_rows(
    model: nn.Module, batch: Batch, rows: Sequence[Batch]
) -> tuple[list[float] | None, bool]:
    """Weights of the losses of rows, and whether these add up to the loss of the batch.

    They do not where a model normalizes by statistics of the rows (these count the same), nor
    where a loss is no mean (None).
    """
    labels = batch.get("labels")
    rules: list[list[float]] = [[1 / ROWS] * ROWS, [1.0] * ROWS]
    if isinstance(labels, Tensor) and labels.dim() > 1 and not labels.is_floating_point():
        for counted in (labels, labels[:, 1:]):
            numbers = (counted != IGNORED).flatten(1).sum(1)
            rules.append((numbers / numbers.sum()).tolist())
    with torch.no_grad():
        model = copy.deepcopy(model)  # buffers may change
        whole = float(loss_of(model, batch))
        losses = [float(loss_of(model, row)) for row in rows]

    def error(weights: list[float]) -> float:
        return abs(sum(w * x for w, x in zip(weights, losses, strict=True)) - whole)

    best = min(rules, key=error)
    if error(best) <= LOSS_TOLERANCE * abs(whole):
        return best, True
    statistics = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    depends = any(isinstance(module, statistics) for module in model.modules())
    return rules[0] if depends else None, False


def train_plain(task: Task, steps: Sequence[Parts] | None = None, seed: int = 0) -> Trained:
    """One step for each batch: given in weighted parts, or whole."""
    steps = steps or [[(1.0, batch)] for batch in task.batches]
    model = copy.deepcopy(task.model)
    torch.manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.learning_rate, foreach=False)
    losses = []
    for parts in steps:
        optimizer.zero_grad()
        total = torch.zeros(())
        for weight, batch in parts:
            loss = loss_of(model, batch) * weight
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        losses.append(float(total))
    return losses, state_of(model)


def state_of(model: nn.Module) -> State:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


# --------------------------------------------------------------------------------------------------
# The engine


@contextlib.contextmanager
def listening() -> Iterator[list[str]]:
    """Everything that the engine logs, and all warnings."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                said.append(record.getMessage())

    listener, logger = Listener(), logging.getLogger("l2l")
    logger.addHandler(listener)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield said
        said.extend(str(warning.message) for warning in warned)
    finally:
        logger.removeHandler(listener)


def engine_of(model: nn.Module, learning_rate: float, size: int) -> l2l.Engine:
    """With defaults, but for what makes its numbers those of plain PyTorch on the CPU."""
    return l2l.Engine(
        model,
        optimizer=l2l.SGD(lr=learning_rate),
        precision="float32",
        device="cpu",
        microbatch_size=size,
        seed=0,
        execution=l2l.Execution(kernel="readable"),  # the native one rounds updates otherwise
    )


def train_engine(task: Task, model: nn.Module, size: int) -> tuple[Found, Trained]:
    """What there is to say, and the losses and weights. Raises what the engine raises."""
    found: Found = {}
    with engine_of(model, task.learning_rate, size) as engine:
        reports = [engine.step(batch) for batch in task.batches]
        losses = [report.loss for report in reports]
        share = getattr(engine, "streamed_share", None)
        found |= {} if share is None else {"streamed": round(float(share), 3)}
        if any(report.skipped for report in reports):
            found["why"] = "a step was skipped"
    return found, (losses, state_of(model))


def is_refusal(error: BaseException) -> bool:
    """A ValueError of the package's own: it says what it cannot do."""
    frames = traceback.extract_tb(error.__traceback__)
    is_ours = CODE in Path(frames[-1].filename).resolve().parents
    return isinstance(error, ValueError) and is_ours


def outcome(
    task: Task, size: int, references: Sequence[Trained], allowed: float = TOLERANCE
) -> Found:
    """A verdict about the engine with microbatches of that size."""
    before, model = state_of(task.model), copy.deepcopy(task.model)
    with listening() as said:
        try:
            found, trained = train_engine(task, model, size)
        except Exception as error:
            found, trained = failure(error), None
    found["said"] = list(dict.fromkeys(one.split("\n")[0][:300] for one in said))
    if trained is not None:
        return found | verdict(trained, references, before, allowed, found.get("why"))
    if found["verdict"] == "refused" and difference(state_of(model), before, before):
        return found | {"verdict": "wrong", "why": f"refused, but changed: {found['why']}"}
    return found


def failure(error: Exception) -> Found:
    why = str(error).split("\n")[0][:600]
    if is_refusal(error):
        return {"verdict": "refused", "why": why, "by_proof": isinstance(error, ProofError)}
    place = traceback.extract_tb(error.__traceback__)[-1]
    at = f"{Path(place.filename).name}:{place.lineno}"
    return {"verdict": "crash", "why": f"{type(error).__name__}: {why} ({at})"}


# --------------------------------------------------------------------------------------------------
# Verdicts


def difference(found: State, expected: State, before: State) -> float:
    """0 for equal bits; infinite where nothing can be compared; else relative."""
    shapes = [{name: tensor.shape for name, tensor in state.items()} for state in (found, expected)]
    if list(found) != list(expected) or shapes[0] != shapes[1]:
        return math.inf
    return max((_difference(found[k], expected[k], before[k]) for k in expected), default=0.0)


def _difference(found: Tensor, expected: Tensor, before: Tensor) -> float:
    """In parts of the largest value or of ten changes; too much where a small change is missed."""
    if torch.equal(found, expected):
        return 0.0
    if not (found.isfinite() == expected.isfinite()).all():
        return math.inf
    found, expected, before = (x.double().nan_to_num() for x in (found, expected, before))
    error = float((found - expected).abs().max())
    value, change = float(expected.abs().max()), float((expected - before).abs().max())
    relative = error / max(value, 10 * change, 1e-30)
    if error > CHANGE_TOLERANCE * change + ROUNDING * value:
        return max(relative, 2 * MOST_APART)
    return relative


def verdict(
    trained: Trained,
    references: Sequence[Trained],
    before: State,
    allowed: float,
    why: str | None,
) -> Found:
    """Against the reference that is nearest: "exact", "close" or "wrong"."""
    errors = []
    for losses, state in references:
        pairs = zip(trained[0], losses, strict=True)
        loss_error = max(abs(x - y) / max(abs(y), 1e-12) for x, y in pairs)
        loss_error = loss_error if math.isfinite(loss_error) else math.inf
        loss_error *= TOLERANCE / LOSS_TOLERANCE
        errors.append(max(loss_error, difference(trained[1], state, before)))
    error = min(errors)
    if why is not None or error > allowed:
        return {"verdict": "wrong", "error": error, "losses": [trained[0], references[0][0]]}
    return {"verdict": "close" if error else "exact", "error": error}


# --------------------------------------------------------------------------------------------------
# A case


def examine(case: Case) -> Found:
    """All about one case, in this process, or why plain PyTorch does not run it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            task, whole = prepare(case)
            other = train_plain(task, seed=7)
            rounded = train_plain(dataclasses.replace(task, model=moved(task.model, 2.0**-23)))
        except Exception as error:
            return {"plain": f"{type(error).__name__}: {str(error)[:300]}"}
        rows = [rows_of(batch) for batch in task.batches]
        accumulated, adds_up = accumulate(task, rows)
    found: Found = {"plain": "runs", "parameters": sum(p.numel() for p in task.model.parameters())}
    apart = difference(rounded[1], whole[1], state_of(task.model))
    allowed = min(max(2 * apart, TOLERANCE), MOST_APART)
    found["whole"] = outcome(task, ROWS, [whole], allowed)
    references = [whole] if accumulated is None else [accumulated, whole]
    found["rows"] = outcome(task, 1, references, allowed) | {"adds_up": adds_up}
    if other[0] != whole[0] or difference(other[1], whole[1], whole[1]):
        for name in {"whole", "rows"} & found.keys():
            if found[name]["verdict"] == "wrong":
                found[name]["verdict"] = "random"
    return found


def prepare(case: Case) -> tuple[Task, Trained]:
    """A model and its batches, and plain PyTorch trained with them."""
    model, make_batches = build(case)
    batches = make_batches()
    torch.manual_seed(20)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():  # what is all zero or all one hides what is wrong
                parameter.add_(torch.randn_like(parameter), alpha=0.03)
        loss = float(loss_of(copy.deepcopy(model), batches[0]))
    learning_rate = LEARNING_RATE / max(1.0, abs(loss) / USUAL_LOSS)
    if case.kind in LABELLED and batches[0]["labels"].dim() > 1:
        with contextlib.suppress(Exception):  # some cannot ignore labels
            return _trained(Task(model, [ragged(batch) for batch in batches], learning_rate))
    return _trained(Task(model, batches, learning_rate))


def moved(model: nn.Module, part: float) -> nn.Module:
    """The same with every weight a little larger or smaller."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.mul_(1 + part * torch.randn_like(parameter).sign())
    return model


def _trained(task: Task) -> tuple[Task, Trained]:
    trained = train_plain(task)
    if not all(map(math.isfinite, trained[0])):
        raise FloatingPointError(f"losses of {trained[0]}")
    return task, trained


def accumulate(task: Task, rows: Sequence[list[Batch] | None]) -> tuple[Trained | None, bool]:
    """Plain PyTorch trained with rows singly, if that can be, and whether their losses add up."""
    steps: list[Parts] = []
    all_add_up = True
    try:
        for batch, parts in zip(task.batches, rows, strict=True):
            if parts is None:
                return None, False
            weights, adds_up = weights_of_rows(task.model, batch, parts)
            if weights is None:
                return None, False
            steps.append(list(zip(weights, parts, strict=True)))
            all_add_up &= adds_up
        return train_plain(task, steps), all_add_up
    except Exception:  # the model takes no single row
        return None, False
