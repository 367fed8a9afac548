"""What a task asks of the engine: a loss, what must stay together, what a batch needs besides.

Steps and evaluations know nothing else of tasks (tasks.py has the objective of each):

    engine = Engine(model, loss=objective.loss, split=objective.split)
    engine.step(objective.batch(step, batches, engine))
    objective.measures.taken().means()
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor
from typing_extensions import override

from l2l.distributed import World
from l2l.engine import Engine
from l2l.model import IGNORED, LossFunction, Split, TokenLoss
from l2l.train import losses
from l2l.train.data import Batches, num_targets, seeded
from l2l.train.evaluation import (
    accuracy,
    f1,
    matthews_correlation,
    pearson_correlation,
    perplexity,
    spearman_correlation,
)
from l2l.train.folder import TrainingError
from l2l.train.losses import Completions, Judgement
from l2l.train.measures import CHOSEN, REJECTED, Measures, added, means_of
from l2l.train.settings import PreferenceSettings

if TYPE_CHECKING:
    from l2l.train.prepared import Prepared

Batch = dict[str, Tensor]
MASKS, KEPT = 0.8, 0.1  # of hidden tokens: the mask stands there; they stand there themselves


class Objective:
    """A task that the model's own loss is for."""

    rows_together = 1
    has_reference = False  # whether batches need log-probabilities of a reference model

    def __init__(self, prepared: Prepared, world: World) -> None:
        """Nothing is noted yet."""
        self.prepared = prepared
        self.terms = prepared.settings.preference
        self.world = world
        self.measures = Measures(world)
        self.loss: LossFunction | TokenLoss | None = None  # the model's own
        self.split: Split | None = None

    def batch(self, step: int, batches: Batches, engine: Engine) -> Batch:
        """What a step is made of, counted from 0; all ranks ask together."""
        return self.ready(batches.batch(step), engine)

    def outline(self, batch: Batch) -> Batch:
        """What a step of the model's own loss would be given for a plan to be made."""
        return batch

    def widest(self, batch: Batch, engine: Engine) -> Batch:
        """As large as a step's batch will ever be, made of the widest of the data's."""
        return self.ready(batch, engine)

    def extra(self) -> dict[str, Any]:
        """What a run that goes on needs besides weights, for JSON."""
        return {}

    def restore(self, extra: Mapping[str, Any]) -> None:
        """Go on with what `extra` has given."""

    def close(self) -> None:
        """Give back what was taken."""

    def ready(self, batch: Batch, engine: Engine) -> Batch:
        """This rank's rows of a batch, with all that the loss reads; all ranks ask together."""
        del engine
        return own_rows(batch, self.world, together=self.rows_together)

    def weight(self, batch: Batch) -> int:
        """What the loss of a batch, of all ranks, is a mean over."""
        return num_targets(batch)

    def assess(self, engine: Engine, batch: Batch) -> tuple[float, Any]:
        """The loss of a batch, of all ranks; and what metrics are made of."""
        return engine.evaluate(self.ready(batch, engine)), self.measures.taken().sums()

    def metrics(self, loss: float, found: Sequence[Any]) -> dict[str, float]:
        """Of batches with this mean loss, and what was found of each."""
        return {"loss": loss, **means_of(added(found))}


@final
class Language(Objective):
    """Texts, or answers in them."""

    @override
    def metrics(self, loss: float, found: Sequence[Any]) -> dict[str, float]:
        return {"loss": loss, "perplexity": perplexity(loss)}


@final
class Masked(Objective):
    """Tokens that are hidden, by all others: which ones is drawn anew for every step."""

    def __init__(self, prepared: Prepared, world: World) -> None:
        super().__init__(prepared, world)
        if prepared.tokenizer.mask_token_id is None:
            raise TrainingError(
                "masked needs a token that hides others, and the tokenizer has none (mask_token). "
                "Expected the tokenizer of a model that was trained so, or --task causal."
            )

    @override
    def batch(self, step: int, batches: Batches, engine: Engine) -> Batch:
        del engine
        return own_rows(self._hidden(batches.batch(step), str(step)), self.world)

    @override
    def ready(self, batch: Batch, engine: Engine) -> Batch:
        return super().ready(self._to_evaluate(batch), engine)

    @override
    def weight(self, batch: Batch) -> int:
        return int((self._to_evaluate(batch)["labels"] != IGNORED).sum())

    def _to_evaluate(self, batch: Batch) -> Batch:
        """The same texts hide the same tokens every time."""
        words = hashlib.sha256(batch["input_ids"].numpy().tobytes()).hexdigest()
        return self._hidden(batch, words)

    @override
    def assess(self, engine: Engine, batch: Batch) -> tuple[float, Any]:
        return engine.evaluate(self.ready(batch, engine)), None

    @override
    def metrics(self, loss: float, found: Sequence[Any]) -> dict[str, float]:
        return {"loss": loss, "perplexity": perplexity(loss)}

    def _hidden(self, batch: Batch, drawn_by: str) -> Batch:
        """Hide some tokens: most by the mask, some by any other, and some not, as BERT learns."""
        tokenizer, settings = self.prepared.tokenizer, self.prepared.settings
        generator = seeded(f"{settings.training.seed} masked {drawn_by}")
        ids = batch["input_ids"]
        special = torch.isin(ids, torch.tensor(tokenizer.all_special_ids))
        chances = torch.rand(ids.shape, generator=generator)
        chances[special | (batch["attention_mask"] == 0)] = 2.0  # never
        hidden = chances < settings.data.masked_share
        least = chances.argmin(1, keepdim=True)
        hidden |= torch.zeros_like(hidden).scatter(1, least, value=True) & (chances < 1.0)
        kind = torch.rand(ids.shape, generator=generator)
        others = torch.randint(len(tokenizer), ids.shape, generator=generator)
        found = torch.where(hidden & (kind < MASKS), tokenizer.mask_token_id, ids)
        found = torch.where(hidden & (kind >= MASKS + KEPT), others, found)
        return {**batch, "input_ids": found, "labels": ids.masked_fill(~hidden, IGNORED)}


class Scored(Objective, ABC):
    """Rows with a label each, and the scores that the model gives them."""

    @override
    def assess(self, engine: Engine, batch: Batch) -> tuple[float, Any]:
        own = self.ready(batch, engine)
        outputs = engine.predict(own)
        here = (float(outputs.loss) * len(own["labels"]), outputs.logits.float())
        everybody = self.world.gather_facts(here)
        loss = sum(part for part, _ in everybody) / len(batch["labels"])
        return loss, (torch.cat([scores for _, scores in everybody]), batch["labels"])

    @override
    def metrics(self, loss: float, found: Sequence[Any]) -> dict[str, float]:
        scores, wanted = (torch.cat(parts) for parts in zip(*found, strict=True))
        return {"loss": loss, **self.compare(scores, wanted)}

    @abstractmethod
    def compare(self, scores: Tensor, wanted: Tensor) -> dict[str, float]:
        """The metrics of scores, by what they should have been."""


@final
class Regression(Scored):
    """Numbers."""

    @override
    def compare(self, scores: Tensor, wanted: Tensor) -> dict[str, float]:
        numbers = scores.squeeze(-1)
        found = {"pearson": pearson_correlation(numbers, wanted)}
        return {**found, "spearman": spearman_correlation(numbers, wanted)}


@final
class Classification(Scored):
    """Classes."""

    @override
    def compare(self, scores: Tensor, wanted: Tensor) -> dict[str, float]:
        chosen, is_binary = scores.argmax(-1), scores.shape[-1] == 2
        occurring = sorted({*chosen.tolist(), *wanted.tolist()})
        positive = [1] if is_binary else occurring  # of more, the mean of those there are
        parts = [f1(chosen, wanted, positive=number) for number in positive]
        found = {"accuracy": accuracy(chosen, wanted), "f1": sum(parts) / len(parts)}
        return {**found, "matthews": matthews_correlation(chosen, wanted)}


@final
class MultiLabel(Scored):
    """Any number of classes."""

    @override
    def compare(self, scores: Tensor, wanted: Tensor) -> dict[str, float]:
        chosen = (scores > 0).long()
        exact = (chosen == wanted.long()).all(-1)
        found = f1(chosen, wanted.long())
        return {"f1": found, "accuracy": exact.double().mean().item()}


@final
class WordClassification(Objective):
    """Classes of words."""

    @override
    def weight(self, batch: Batch) -> int:
        return int((batch["labels"] != IGNORED).sum())

    @override
    def assess(self, engine: Engine, batch: Batch) -> tuple[float, Any]:
        own = self.ready(batch, engine)
        outputs = engine.predict(own)
        there = own["labels"] != IGNORED
        here = float(outputs.loss) * int(there.sum()), outputs.logits.argmax(-1).cpu()[there]
        everybody = self.world.gather_facts((*here, own["labels"][there]))
        loss = sum(part for part, _, _ in everybody) / max(1, self.weight(batch))
        chosen = torch.cat([one for _, one, _ in everybody])
        return loss, (chosen, torch.cat([one for _, _, one in everybody]))

    @override
    def metrics(self, loss: float, found: Sequence[Any]) -> dict[str, float]:
        chosen, wanted = (torch.cat(parts) for parts in zip(*found, strict=True))
        occurring = sorted({*chosen.tolist(), *wanted.tolist()})
        parts = [f1(chosen, wanted, positive=number) for number in occurring]
        return {"loss": loss, "accuracy": accuracy(chosen, wanted), "f1": sum(parts) / len(parts)}


@final
class Pairs:
    """Cuts batches between pairs of rows."""

    def __call__(self, batch: Mapping[str, Any], start: int, end: int) -> Mapping[str, Any]:
        """Some of the pairs."""
        return {name: value[2 * start : 2 * end] for name, value in batch.items()}

    def num_rows(self, batch: Mapping[str, Any]) -> int:
        """How many there are."""
        return len(batch["input_ids"]) // 2


class PairObjective(Objective):
    """The chosen and the rejected row of a pair, in turn."""

    rows_together = 2
    formula: staticmethod[[Completions, Mapping[str, Any], PreferenceSettings], Judgement]

    def __init__(self, prepared: Prepared, world: World) -> None:
        super().__init__(prepared, world)
        self.loss, self.split = TokenLoss(self.judge), Pairs()

    @override
    def ready(self, batch: Batch, engine: Engine) -> Batch:
        own = super().ready({**batch, "place": torch.arange(len(batch["input_ids"]))}, engine)
        self.measures.begin(own["place"][0::2])
        return own

    @override
    def weight(self, batch: Batch) -> int:
        return len(batch["input_ids"]) // 2

    def judge(self, found: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, int]:
        """The loss, of log-probabilities."""
        rows = Completions.of(found, batch)
        better, worse = rows.sums[0::2], rows.sums[1::2]
        more = {"logps/chosen": better, "logps/rejected": worse}
        return self.noted(self.formula(rows, batch, self.terms), batch, more)

    def noted(
        self, judgement: Judgement, batch: Mapping[str, Any], more: Mapping[str, Tensor]
    ) -> tuple[Tensor, int]:
        """Note the rewards of pairs; their loss, and how many they are."""
        losses, rewards = judgement
        better, worse = rewards[0::2], rewards[1::2]
        measures = {
            CHOSEN: better,
            REJECTED: worse,
            "rewards/accuracies": (better > worse).float(),
            **more,
        }
        self.measures.note(batch["place"][0::2], measures)
        return losses.sum(), len(losses)


@final
class Dpo(PairObjective):
    """Direct preference optimization."""

    formula = staticmethod(losses.dpo)

    def __init__(self, prepared: Prepared, world: World) -> None:
        super().__init__(prepared, world)
        self.has_reference = not self.terms.reference_free


@final
class Simpo(PairObjective):
    """Simple preference optimization."""

    formula = staticmethod(losses.simpo)


@final
class Orpo(PairObjective):
    """Odds ratio preference optimization: of chosen rows, every token is learnt besides."""

    formula = staticmethod(losses.orpo)

    @override
    def ready(self, batch: Batch, engine: Engine) -> Batch:
        answers, there = batch["labels"] != IGNORED, batch["attention_mask"].bool()
        labels = batch["input_ids"].masked_fill(~there, IGNORED)
        labels[1::2].masked_fill_(~answers[1::2], IGNORED)
        share = self.weight(batch) / int((labels[0::2, 1:] != IGNORED).sum())
        shares = torch.full((len(labels),), share)
        more = {"labels": labels, "answers": answers, "learnt_share": shares}
        return super().ready({**batch, **more}, engine)


@final
class Reward(PairObjective):
    """Scores of a model with one output, of which the better one's should be larger."""

    def __init__(self, prepared: Prepared, world: World) -> None:
        super().__init__(prepared, world)
        self.loss = self.compare

    @override
    def ready(self, batch: Batch, engine: Engine) -> Batch:
        return super().ready({k: v for k, v in batch.items() if k != "labels"}, engine)

    @override
    def outline(self, batch: Batch) -> Batch:
        return {**batch, "labels": torch.zeros(len(batch["labels"]))}

    def compare(self, outputs: Any, batch: Mapping[str, Any]) -> tuple[Tensor, int]:
        """The loss, of what the model returns."""
        scores = outputs.logits.float().squeeze(-1)
        return self.noted(losses.bradley_terry(scores, self.terms), batch, {})


@final
class Kto(Objective):
    """Single completions; before each step it is measured how far the model has moved.

    Rows come in turn with the unrelated ones, of which that is measured: in an evaluation of their
    own, over the whole batch and all ranks. The step is made of the others.
    """

    rows_together = 2
    has_reference = True

    def __init__(self, prepared: Prepared, world: World) -> None:
        super().__init__(prepared, world)
        self.loss = TokenLoss(self.judge)

    @override
    def ready(self, batch: Batch, engine: Engine) -> Batch:
        rows = super().ready(batch, engine)
        own, unrelated = ({name: one[at::2] for name, one in rows.items()} for at in (0, 1))
        moved = max(0.0, engine.evaluate(unrelated))
        number = len(own["input_ids"])
        places = torch.arange(number)
        self.measures.begin(places)
        return {**own, "moved": torch.full((number,), moved), "place": places}

    @override
    def weight(self, batch: Batch) -> int:
        return len(batch["input_ids"]) // 2

    def judge(self, found: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, int]:
        """The loss, of log-probabilities; of unrelated rows, how far they have moved."""
        rows = Completions.of(found, batch)
        if "moved" not in batch:
            return (rows.sums - batch["reference"]).sum(), len(rows.sums)
        each, rewards = losses.kto(rows, batch, self.terms)
        good = batch["desirable"] > 0
        measures = {
            CHOSEN: rewards.where(good, torch.nan),
            REJECTED: rewards.where(~good, torch.nan),
            "logps/chosen": rows.sums.where(good, torch.nan),
            "logps/rejected": rows.sums.where(~good, torch.nan),
            "kl": batch["moved"],
        }
        self.measures.note(batch["place"], measures)
        return each.sum(), len(each)


def evaluate(
    engine: Engine, batches: Iterable[Batch], *, objective: Objective, stops: Callable[[], bool]
) -> dict[str, float] | None:
    """The task's metrics over batches; None if `stops` says so on the way.

    Several ranks divide the rows of every batch; all of them get the metrics.
    """
    loss, total, found = 0.0, 0, list[Any]()
    for batch in batches:
        if stops():
            return None
        own, seen = objective.assess(engine, batch)
        weight = objective.weight(batch)
        loss, total = loss + weight * own, total + weight
        found.append(seen)
    return objective.metrics(loss / total, found)


def own_rows(batch: Batch, world: World, *, together: int = 1) -> Batch:
    """The rows of a batch that a rank goes through: as many as the others, or one more or less.

    So many rows, one after the other, are never parted.
    """
    number = len(batch["input_ids"]) // together
    start, stop = (number * rank // world.size * together for rank in (world.rank, world.rank + 1))
    return {name: value[start:stop] for name, value in batch.items()}
