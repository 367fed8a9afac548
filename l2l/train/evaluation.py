"""How good a model is: the metrics of its task, over batches that go through the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from l2l.distributed import World
from l2l.engine import Engine
from l2l.train import metrics
from l2l.train.data import num_targets
from l2l.train.settings import LANGUAGE_TASKS

BEST = {  # by task: what says how good a model is, and whether more of it is better
    "causal": ("loss", False),
    "instruct": ("loss", False),
    "classification": ("accuracy", True),
    "regression": ("pearson", True),
}


def evaluate(
    engine: Engine,
    batches: Iterable[dict[str, Tensor]],
    *,
    task: str,
    stopped: Callable[[], bool],
    world: World | None = None,
) -> dict[str, float] | None:
    """The task's metrics over batches; None if `stopped` says so on the way.

    Several ranks divide the rows of every batch; all of them get the metrics.
    """
    world = world or World()
    loss = total = 0.0
    predictions: list[Tensor] = []
    labels: list[Tensor] = []
    for batch in batches:
        if stopped():
            return None
        weight, own = num_targets(batch), own_rows(batch, world)
        if task in LANGUAGE_TASKS:
            loss += weight * engine.evaluate(own)
        else:
            outputs, rows = engine.predict(own), len(own["labels"])
            said = (float(outputs.loss) * rows, outputs.logits.float())
            everybody = world.gather_facts(said)
            loss += weight * sum(part for part, _ in everybody) / len(batch["labels"])
            predictions += [scores for _, scores in everybody]
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
    occurring = sorted({*chosen.tolist(), *wanted.tolist()})
    positive = [1] if num_classes == 2 else occurring  # of more, the mean of those there are
    parts = [metrics.f1(chosen, wanted, positive=number) for number in positive]
    return found | {
        "accuracy": metrics.accuracy(chosen, wanted),
        "f1": sum(parts) / len(parts),
        "matthews": metrics.matthews_correlation(chosen, wanted),
    }


def own_rows(batch: dict[str, Tensor], world: World) -> dict[str, Tensor]:
    """The rows of a batch that a rank goes through: as many as the others, or one more or less."""
    number = len(batch["input_ids"])
    start, stop = (number * rank // world.size for rank in (world.rank, world.rank + 1))
    return {name: value[start:stop] for name, value in batch.items()}
