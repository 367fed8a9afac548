"""How good a model is: the metrics of its task, over batches that go through the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from l2l import metrics
from l2l.data import num_targets
from l2l.engine import Engine
from l2l.settings import LANGUAGE_TASKS

BEST = {  # by task: what says how good a model is, and whether more of it is better
    "causal": ("loss", False),
    "instruct": ("loss", False),
    "classification": ("accuracy", True),
    "regression": ("pearson", True),
}


def evaluate(
    engine: Engine, batches: Iterable[dict[str, Tensor]], *, task: str, stopped: Callable[[], bool]
) -> dict[str, float] | None:
    """The task's metrics over batches; None if `stopped` says so on the way."""
    loss = total = 0.0
    predictions: list[Tensor] = []
    labels: list[Tensor] = []
    for batch in batches:
        if stopped():
            return None
        weight = num_targets(batch)
        if task in LANGUAGE_TASKS:
            loss += weight * engine.evaluate(batch)
        else:
            outputs = engine.predict(batch)
            loss += weight * float(outputs.loss)
            predictions.append(outputs.logits.float())
            labels.append(batch["labels"])
        total += weight
    found = {"loss": loss / total}
    if task in LANGUAGE_TASKS:
        return {**found, "perplexity": metrics.perplexity(found["loss"])}
    scores, wanted = torch.cat(predictions), torch.cat(labels)
    if task == "regression":
        return found | {
            "pearson": metrics.pearson_correlation(scores.squeeze(-1), wanted),
            "spearman": metrics.spearman_correlation(scores.squeeze(-1), wanted),
        }
    chosen, num_classes = scores.argmax(-1), scores.shape[-1]
    positive = [1] if num_classes == 2 else list(range(num_classes))  # of more, the mean of all
    parts = [metrics.f1(chosen, wanted, positive=number) for number in positive]
    return found | {
        "accuracy": metrics.accuracy(chosen, wanted),
        "f1": sum(parts) / len(parts),
        "matthews": metrics.matthews_correlation(chosen, wanted),
    }
