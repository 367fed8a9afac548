"""Group relative policy optimization: a model learns from rewards of what it says itself.

A *rollout* has several completions of each prompt of a batch, drawn with the weights as they are,
and their rewards. The advantage of a completion is its reward less the mean of its group's, divided
by their standard deviation. With p the log-probability of a token of a completion with advantage A,
o that before the first of the rollout's steps, r that of the model that training began with:

    ratio = exp(p - o),   loss of the token = -min(ratio A, clip(ratio, 1 - e, 1 + e') A) + beta k
    k = exp(r - p) - (r - p) - 1, times ratio with `unbiased_distance`

How tokens are weighed is said by `loss` of `[grpo]`; always over the whole batch, whatever the
microbatches. What is drawn depends on the seed and the number of the rollout. One that steps are
still to be made of is in the checkpoint.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from l2l.distributed import World
from l2l.engine import Engine
from l2l.model import IGNORED, TokenLoss
from l2l.train.data import PADDED_TO, Batches
from l2l.train.generating import Sampling, seed_of
from l2l.train.measures import Measures, Sums, added, means_of
from l2l.train.objective import Batch, Objective
from l2l.train.rewards import Rewards

if TYPE_CHECKING:
    from l2l.train.prepared import Prepared

LEAST_DEVIATION = 1e-4  # is added to what advantages are divided by


@final
@dataclass(frozen=True, slots=True)
class Completed:
    """Prompts and what the model has made of them, row by row."""

    prompts: Sequence[list[int]]
    completions: Sequence[list[int]]
    rewards: Tensor  # [rows]
    each: Mapping[str, Tensor]  # by function: [rows]

    @property
    def lengths(self) -> Tensor:
        """Tokens of completions."""
        return torch.tensor([float(len(one)) for one in self.completions])

    def sums(self, ends: Collection[int]) -> Sums:
        """What people want to know of them; how far rewards spread is one number."""
        endless = torch.tensor([float(one[-1] not in ends) for one in self.completions])
        values = {
            "reward": self.rewards,
            **{f"rewards/{name}": one[~one.isnan()] for name, one in self.each.items()},
            "completions/length": self.lengths,
            "completions/clipped": endless,
        }
        found = {name: (float(one.double().sum()), one.numel()) for name, one in values.items()}
        spread = float(self.rewards.std(correction=min(1, self.rewards.numel() - 1)))
        return {**found, "reward_std": (spread, 1)}


@final
@dataclass(frozen=True, slots=True)
class Rollout:
    """What some steps are made of."""

    number: int
    batch: Batch
    facts: Mapping[str, float]  # about all of it, for people

    def table(self) -> dict[str, Any]:
        """For JSON."""
        batch = {name: _packed(one) for name, one in self.batch.items()}
        return {"number": self.number, "batch": batch, "facts": dict(self.facts)}

    @classmethod
    def of_table(cls, table: Mapping[str, Any]) -> Rollout:
        """From JSON."""
        batch = {name: _unpacked(one) for name, one in table["batch"].items()}
        return cls(table["number"], batch, table["facts"])


@final
class Grpo(Objective):
    """Rollouts, and the loss of their tokens."""

    def __init__(self, prepared: Prepared, world: World) -> None:
        super().__init__(prepared, world)
        self.loss = TokenLoss(self.judge)
        self._settings = settings = prepared.settings.grpo
        self._rewards = Rewards.of(settings.rewards, settings.reward_weights)
        self._sampling = Sampling(
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
        )
        self._tokens = Measures(world)  # log-probabilities that are asked for
        self._rollout: Rollout | None = None
        self._reference: Engine | None = None

    # -- what steps are made of --------------------------------------------------------------------

    @override
    def batch(self, step: int, batches: Batches, engine: Engine) -> Batch:
        number = step // self._settings.num_iterations
        if self._rollout is None or self._rollout.number != number:
            self._rollout = self._roll_out(number, batches, engine)
        batch, facts = self._rollout.batch, self._rollout.facts
        if step == 0 and "reference" in batch:  # it is the model itself, and nothing is to be seen
            batch = {name: one for name, one in batch.items() if name != "reference"}
            facts = {**facts, "kl": 0.0}
        self.measures.begin(batch["place"], facts)
        return batch

    @override
    def outline(self, batch: Batch) -> Batch:
        ids = F.pad(batch["input_ids"], (0, self._settings.max_new_tokens))
        ids = ids.repeat_interleave(self._settings.num_generations, dim=0)
        return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}

    @override
    def widest(self, batch: Batch, engine: Engine) -> Batch:
        outline = self.outline(batch)
        return {**outline, "place": torch.arange(len(outline["input_ids"]))}

    def _roll_out(self, number: int, batches: Batches, engine: Engine) -> Rollout:
        settings = self._settings
        seed = seed_of(self.prepared.settings.training.seed, "rollout", number)
        done = self._complete(
            batches.batch(number),
            batches.examples.records,
            engine,
            each=settings.num_generations,
            seed=seed,
        )
        batch = self._laid_out(done)
        if settings.num_iterations > 1:
            batch["old"] = self._ask(engine, batch)
        if settings.beta:
            if self._reference is None:
                loss = TokenLoss(self._note_tokens)
                self._reference = self.prepared.reference_engine(loss, beside=engine)
            batch["reference"] = self._ask(self._reference, batch)
        return Rollout(number, batch, means_of(done.sums(self.prepared.speaker.ends)))

    def _complete(
        self,
        prompts: Batch,
        records: Sequence[Mapping[str, Any]],
        engine: Engine,
        *,
        each: int,
        seed: int,
    ) -> Completed:
        """So many completions of each prompt, and what they are worth."""
        speaker = self.prepared.speaker
        rows = zip(prompts["input_ids"], prompts["attention_mask"].bool(), strict=True)
        asked = [ids[there].tolist() for ids, there in rows for _ in range(each)]
        at_once = self._settings.generated_at_once
        found = speaker.complete(engine, asked, self._sampling, seed=seed, at_once=at_once)
        numbers = prompts["example"].repeat_interleave(each).tolist()
        of_rows, column = [records[number] for number in numbers], self._prompt_column
        texts: list[Any] = [speaker.text(one) for one in found]
        if isinstance(of_rows[0][column], list):
            texts = [[{"role": "assistant", "content": text}] for text in texts]
        values = self._rewards.of_completions(
            **{name: [one.get(name) for one in of_rows] for name in of_rows[0] if name != column},
            prompts=[one[column] for one in of_rows],
            completions=texts,
            completion_ids=found,
        )
        named = dict(zip(self._rewards.functions, values.T, strict=True))
        return Completed(asked, found, self._rewards.total(values), named)

    @property
    def _prompt_column(self) -> str:
        return self.prepared.examples.columns["prompt"]

    def _advantages(self, rewards: Tensor) -> Tensor:
        groups, how = rewards.view(-1, self._settings.num_generations), self._settings.scale_rewards
        found = groups - groups.mean(1, keepdim=True)
        if how == "group":
            found = found / (groups.std(1, keepdim=True) + LEAST_DEVIATION)
        elif how == "batch":
            found = found / (rewards.std() + LEAST_DEVIATION)
        return found.view(-1)

    def _laid_out(self, done: Completed) -> Batch:
        """Rows of prompts and completions, padded on the right, and what the loss reads of them."""
        rows = [one + more for one, more in zip(done.prompts, done.completions, strict=True)]
        width = -(-max(map(len, rows)) // PADDED_TO) * PADDED_TO
        width = min(width, self.prepared.settings.training.length)
        ids = torch.full((len(rows), width), self.prepared.speaker.pad_id)
        labels, mask = torch.full_like(ids, IGNORED), torch.zeros_like(ids)
        for index, (row, prompt) in enumerate(zip(rows, done.prompts, strict=True)):
            ids[index, : len(row)] = torch.tensor(row)
            labels[index, len(prompt) : len(row)] = ids[index, len(prompt) : len(row)]
            mask[index, : len(row)] = 1
        number, lengths = len(rows), done.lengths
        of_all = torch.full((number,), number / float(lengths.sum()))
        share = {
            "grpo": 1 / lengths,
            "bnpo": of_all,
            "dr_grpo": torch.full((number,), 1 / self._settings.max_new_tokens),
        }
        advantages = self._advantages(done.rewards)
        found = {
            "input_ids": ids,
            "labels": labels,
            "attention_mask": mask,
            "advantage": advantages,
            "share": share[self._settings.loss],  # times the rows: what a token counts
            "share_of_all": of_all,
        }
        # Those that teach most come first: the first step is proven with some of the first rows.
        order = advantages.abs().argsort(descending=True, stable=True)
        return {name: one[order] for name, one in found.items()} | {"place": torch.arange(number)}

    # -- the loss ----------------------------------------------------------------------------------

    def judge(self, found: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, int]:
        """The loss, of log-probabilities; or only these, where there is no advantage."""
        if "advantage" not in batch:
            return self._note_tokens(found, batch)
        settings, advantage = self._settings, batch["advantage"].unsqueeze(1)
        there = _ahead(batch["labels"][:, 1:] != IGNORED, found)
        old = _ahead(batch["old"], found) if "old" in batch else found.detach()
        ratio, high = (found - old).exp(), settings.epsilon_high
        high = settings.epsilon if high is None else high
        clipped = ratio.clamp(1 - settings.epsilon, 1 + high)
        losses = -torch.minimum(ratio * advantage, clipped * advantage)
        measures = {"clip_ratio": (clipped * advantage < ratio * advantage) * there}
        if "reference" in batch:
            less = _ahead(batch["reference"], found) - found
            distance = less.exp() - less - 1
            weight = ratio if settings.unbiased_distance else 1.0
            losses = losses + settings.beta * distance * weight
            measures["kl"] = distance * there
        of_all = {name: one.sum(1) * batch["share_of_all"] for name, one in measures.items()}
        self.measures.note(batch["place"], of_all)
        return ((losses * there).sum(1) * batch["share"]).sum(), len(found)

    def _note_tokens(self, found: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, int]:
        tokens = F.pad(found, (0, batch["labels"].shape[1] - found.shape[1]))
        self._tokens.note(batch["place"], {"tokens": tokens})
        return found.sum(), len(found)

    def _ask(self, engine: Engine, batch: Batch) -> Tensor:
        """The log-probabilities of tokens, each where its label is predicted: [rows, positions]."""
        self._tokens.begin(batch["place"])
        names = ("input_ids", "labels", "attention_mask", "place")
        engine.evaluate({name: batch[name] for name in names})
        return self._tokens.taken().of_rows("tokens")

    # -- evaluation, going on, the end -------------------------------------------------------------

    @override
    def weight(self, batch: Batch) -> int:
        return len(batch["input_ids"])

    @override
    def assess(self, engine: Engine, batch: Batch) -> tuple[float, Any]:
        """One completion of each prompt."""
        assert self.prepared.held_out is not None
        first = int(batch["example"][0])
        seed = seed_of(self.prepared.settings.training.seed, "evaluation", first)
        records = self.prepared.held_out.records
        done = self._complete(batch, records, engine, each=1, seed=seed)
        return 0.0, done.sums(self.prepared.speaker.ends)

    @override
    def metrics(self, loss: float, found: Sequence[Any]) -> dict[str, float]:
        return means_of(added(found))

    @override
    def extra(self) -> dict[str, Any]:
        if self._settings.num_iterations == 1 or self._rollout is None:
            return {}  # the next step draws its own
        return {"rollout": self._rollout.table()}

    @override
    def restore(self, extra: Mapping[str, Any]) -> None:
        if "rollout" in extra and self._settings.num_iterations > 1:
            self._rollout = Rollout.of_table(extra["rollout"])

    @override
    def close(self) -> None:
        if self._reference is not None:
            self._reference.close(give_back=False)


def _ahead(tokens: Tensor, found: Tensor) -> Tensor:
    """As many positions as there are log-probabilities."""
    return F.pad(tokens, (0, found.shape[1] - tokens.shape[1]))


def _packed(tensor: Tensor) -> dict[str, Any]:
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    kind = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": kind, "shape": [*tensor.shape], "data": base64.b64encode(data).decode()}


def _unpacked(table: Mapping[str, Any]) -> Tensor:
    data = bytearray(base64.b64decode(table["data"]))
    return torch.frombuffer(data, dtype=getattr(torch, table["dtype"])).view(table["shape"])
