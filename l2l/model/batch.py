"""A batch, its microbatches and their outputs: checked, cut along the rows, joined, compared.

A batch is a dict of tensors that share their first dimension (entries that are not tensors, or are
scalars, go to every microbatch), or a list of such dicts, each of which is one microbatch with a
length of its own. Of a `CutBatch` (splitting.py), rows are something else than the first dimension.

The loss of a step over its microbatches is the loss of the whole batch.

A model's own loss is a mean over something: over labels that are not ignored (shifted by one for
causal models, unshifted for others), or over rows. Microbatch m must therefore count `n_m / N` with
n that something. Weighting microbatches equally is wrong as soon as padding differs between them.

[Note: counting rule] Which of the three it is, is found by experiment before the first step, on two
rows of at most `TRIAL_TOKENS` tokens, with the model's own epilogue:

- labels of integers in two dimensions: all labels are ignored but those of the first position. A
  causal loss never looks there and has nothing to average; any other loss is finite and not zero.
- then the rule is verified: the loss of two rows with different numbers of labels must be the
  weighted mean of the losses of each row alone. A loss that is not (a sum, two heads with different
  counts) is refused as soon as there is more than one microbatch to weigh.

A user's `loss` returns (sum, weight), whose quotient over the whole batch is the loss, or a scalar,
taken as a mean over rows. That is verified too, for the number of rows that microbatches have: a
loss may compare rows with each other, all of them or pairs.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from l2l.model.modules import CutError
from l2l.model.splitting import (
    Counted,
    CutBatch,
    Given,
    Whole,
    cutting_of,
    has_rows,
    is_rows,
    join_cut,
    like,
)

Microbatch = dict[str, Any]
Source = tuple[str, int]
"""A tensor of a batch: its entry, and its place there."""


def num_rows(batch: Mapping[str, Any]) -> int:
    """The rows that a batch can be cut into: the common first dimension of its tensors.

    Raises:
        ValueError: there is no tensor, the tensors disagree, or there are no rows.
    """
    if (cutting := cutting_of(batch)) is not None:
        return cutting.num_rows(batch)
    rows: dict[str, int] = {
        name: value.shape[0] for name, value in batch.items() if has_rows(value)
    }
    if len(set(rows.values())) != 1 or 0 in rows.values():
        raise ValueError(
            f"of the entries {sorted(batch)} of the batch, these have rows: {rows}. Expected a "
            "dict such as {'input_ids': tensor of [rows, length], 'labels': ...}, with the same "
            "number of rows in each tensor, and at least one. If rows are to be found otherwise, "
            "give the engine split=."
        )
    return next(iter(rows.values()))


def token_length(batch: Mapping[str, Any]) -> int:
    """Positions in a row: the second dimension of the batch's tensors of two."""
    if (cutting := cutting_of(batch)) is not None:
        return cutting.length(batch)
    lengths = [v.shape[1] for v in batch.values() if isinstance(v, Tensor) and v.dim() == 2]
    return max(lengths, default=1) or 1


def take_rows(batch: Mapping[str, Any], start: int, end: int) -> Microbatch:
    """Rows `start` to `end` of every tensor that has rows."""
    if isinstance(batch, CutBatch):
        return batch.cutting.take(batch, start, end)
    return {name: value[start:end] if has_rows(value) else value for name, value in batch.items()}


def take_positions(batch: Mapping[str, Any], positions: slice, length: int) -> Microbatch:
    """Some positions of every tensor that has so many of them in a row."""
    found = dict(batch)
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length:
            found[name] = value[:, positions]
    return like(batch, found)


def some_rows(batch: Mapping[str, Any]) -> Microbatch:
    """Two rows of a batch; where rows have different entries, such as have most of them."""
    if isinstance(batch, CutBatch):
        return batch.cutting.some(batch)
    return take_rows(batch, 0, 2)


def turned(batch: Mapping[str, Any]) -> Microbatch:
    """The rows of a batch in the opposite order, if that can be had."""
    cutting = cutting_of(batch)
    if isinstance(cutting, Counted):
        rows = reversed(range(cutting.rows))
        return join_cut([take_rows(batch, row, row + 1) for row in rows])
    turns = cutting is None
    return like(batch, {n: v.flip(0) if turns and has_rows(v) else v for n, v in batch.items()})


def map_batch(change: Callable[[Tensor], Tensor], batch: Mapping[str, Any]) -> Microbatch:
    """The batch with its tensors changed, also those in lists of rows."""
    found = dict(batch)
    for name, value in batch.items():
        if isinstance(value, Tensor) or is_rows(value):
            found[name] = pytree.tree_map_only(Tensor, change, value)
    return like(batch, found)


def asking_in(batch: Mapping[str, Any]) -> dict[Source, Tensor]:
    """What of a batch requires a gradient, by its entry and its place there."""
    tensors = (
        ((name, place), one)
        for name, value in batch.items()
        if isinstance(value, Tensor) or is_rows(value)
        for place, one in enumerate(pytree.tree_leaves(value))
    )
    return {key: one for key, one in tensors if isinstance(one, Tensor) and one.requires_grad}


def without_graph(batch: Mapping[str, Any]) -> Microbatch:
    """The same batch as leaves of a new graph."""
    return map_batch(lambda one: one.detach().requires_grad_(one.requires_grad), batch)


def move_batch(batch: Mapping[str, Any], device: torch.device | str) -> Microbatch:
    """The batch with its tensors on a device."""
    return map_batch(lambda tensor: tensor.to(device), batch)


def split_batch(batch: Any, *, microbatch_size: int) -> list[Microbatch]:
    """The microbatches of a batch, in order; the last of a dict may be smaller.

    Raises:
        ValueError: as `num_rows`, or the batch is neither a dict nor a list of dicts.
    """
    if isinstance(batch, Mapping):
        starts = range(0, num_rows(batch), microbatch_size)
        return [take_rows(batch, start, start + microbatch_size) for start in starts]
    is_list = isinstance(batch, list | tuple) and len(batch) > 0
    if not is_list or not all(isinstance(one, Mapping) for one in batch):
        kinds = sorted({type(one).__name__ for one in batch}) if is_list else "nothing"
        raise ValueError(
            f"the batch is a {type(batch).__name__} of {kinds}. Expected a dict of tensors, or a "
            "list of dicts, each its own microbatch."
        )
    for one in batch:
        num_rows(one)
    return [like(one, one) for one in batch]


def split_into(batch: Any, number: int, *, microbatch_size: int) -> tuple[list[Microbatch], int]:
    """A batch in exactly so many microbatches, and how many of them are real.

    Other ranks have more rows. With too few of its own, a rank goes through its last microbatch
    once more for each that is missing; what comes of it counts nothing.
    """
    found = split_batch(batch, microbatch_size=microbatch_size)
    if len(found) < number and isinstance(batch, Mapping):
        rows = num_rows(batch)
        parts = min(rows, number)
        ends = [rows * index // parts for index in range(parts + 1)]
        found = [take_rows(batch, ends[i], ends[i + 1]) for i in range(parts)]
    return [*found, *(like(found[-1], found[-1]) for _ in range(number - len(found)))], len(found)


def can_join(microbatches: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the rows of microbatches make one batch: of one length, and such as can be joined."""
    if any(isinstance(one, CutBatch) for one in microbatches):
        try:
            join_cut(microbatches)
        except ValueError:
            return False
    names = set(microbatches[0]).intersection(*microbatches)
    return all(
        one[name].shape[1:] == microbatches[0][name].shape[1:]
        for one in microbatches
        for name in names
        if has_rows(one[name])
    )


def no_rows(outputs: Any) -> Any:
    """Outputs without their rows; scalars are zero."""
    return pytree.tree_map_only(
        Tensor, lambda one: one[:0] if one.dim() else torch.zeros_like(one), outputs
    )


def join_outputs(outputs: list[Any], shares: list[float]) -> Any:
    """One set of outputs for the whole batch: rows joined, scalars averaged by the shares.

    Raises:
        ValueError: the outputs hold something whose rows cannot be joined.
    """

    def join(first: Any, *others: Any) -> Any:
        leaves = [first, *others]
        if not isinstance(first, Tensor | bool | int | float | str | None):
            raise ValueError(
                f"the model returns {type(first).__name__}, whose rows cannot be joined over the "
                "microbatches. Return a dict, a tuple or a ModelOutput, or let one microbatch hold "
                "all rows."
            )
        if not isinstance(first, Tensor):
            return first
        if first.dim() == 0:
            weighted = [leaf * share for leaf, share in zip(leaves, shares, strict=True)]
            return torch.stack(weighted).sum()
        if len({leaf.shape[1:] for leaf in leaves}) > 1:
            raise ValueError(
                "the outputs of the microbatches have different lengths and cannot be joined. "
                "Call predict for each, or pad them to one length."
            )
        return torch.cat(leaves)

    return outputs[0] if len(outputs) == 1 else pytree.tree_map(join, *outputs)


def same(first: Any, second: Any) -> bool:
    """Whether two nested values have the same tensors in them, wherever these are.

    NaN is like NaN, and what is no tensor is like anything else that is none.
    """
    pairs = [pytree.tree_leaves(first), pytree.tree_leaves(second)]
    return len(pairs[0]) == len(pairs[1]) and all(map(_same_tensor, *pairs))


def _same_tensor(first: Any, second: Any) -> bool:
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return isinstance(first, Tensor) == isinstance(second, Tensor)
    if first.shape != second.shape or first.dtype is not second.dtype:
        return False
    second = second.to(first.device)
    return torch.equal(first.isnan(), second.isnan()) and torch.equal(
        first.nan_to_num(), second.nan_to_num()
    )


# --------------------------------------------------------------------------------------------------
# The loss


IGNORED = -100
TRIAL_TOKENS = 16
MIN_TRIAL_ROWS = 6  # of all parts: two may be told apart so well that a loss of both is nothing
MAX_TRIAL_ROWS = 16  # of one
SINGLE_TOLERANCE = 2e-6
HALF_TOLERANCE = 2e-2

LossFunction = Callable[[Any, Mapping[str, Any]], Tensor | tuple[Tensor, Any]]


class Rule(enum.Enum):
    """What a loss averages over."""

    ROWS = "rows"
    LABELS = "labels that are not ignored"
    SHIFTED_LABELS = "labels that are not ignored, from the second position on"
    SUM_AND_WEIGHT = "the weights that the user's loss returns"
    UNKNOWN = "none of the rules that were tried"

    def count(self, microbatch: Mapping[str, Any]) -> int:
        """What a microbatch's mean is over."""
        labels, cutting = microbatch.get("labels"), cutting_of(microbatch)
        if self not in (Rule.LABELS, Rule.SHIFTED_LABELS) or not isinstance(labels, Tensor):
            return num_rows(microbatch) if cutting is None else cutting.num_counted(microbatch)
        return int(((labels if self is Rule.LABELS else labels[..., 1:]) != IGNORED).sum())

    def total(self, microbatches: Sequence[Microbatch]) -> int:
        """What the loss of some microbatches is a mean over; 0: every label is ignored."""
        is_known = self not in (Rule.SUM_AND_WEIGHT, Rule.UNKNOWN)
        return sum(map(self.count, microbatches)) if is_known else 1

    def ignored_targets(self, microbatches: Sequence[Microbatch]) -> str | None:
        """The name of targets that losses ignore although their rows are counted; None: none."""
        for microbatch in microbatches if self is Rule.ROWS else ():
            for name, value in microbatch.items():
                integers = isinstance(value, Tensor) and not value.is_floating_point()
                if integers and bool((value == IGNORED).any()):
                    return name
        return None

    def why_not_counted(self, microbatches: Sequence[Microbatch]) -> str | None:
        """Why nobody knows how many rows these have, over which it averages; None: it is known."""
        cuttings = map(cutting_of, microbatches if self is Rule.ROWS else ())
        unsure = any(isinstance(one, Whole) and not one.is_sure for one in cuttings)
        if len(microbatches) < 2 or not unsure:
            return None
        return (
            f"the loss of {len(microbatches)} microbatches averages over rows, and how many these "
            "have is not certain: their tensors differ in the first dimension, and none is called "
            "'labels' or 'input_ids'. Pass loss=(outputs, batch) -> (sum, weight), or split= with "
            "an attribute num_rows, a function of a batch."
        )

    def refuse_uncountable(self, *, num_microbatches: int, total: int, ignored: str | None) -> None:
        """Refuse a batch whose loss cannot be put together from those of its microbatches.

        Args:
            num_microbatches: of all ranks.
            total: of all ranks.
            ignored: of any rank (`ignored_targets`).

        Raises:
            ValueError: it is such a batch.
        """
        advice = "pass loss=(outputs, batch) -> (sum, weight), or let one microbatch hold all rows."
        if self is Rule.UNKNOWN and num_microbatches > 1:
            raise ValueError(
                f"the losses of {num_microbatches} microbatches cannot be combined into that of "
                "the whole batch: it is neither a mean over rows nor over non-ignored labels; "
                f"{advice}"
            )
        if ignored is not None and num_microbatches > 1:
            what = "its loss is taken as a mean over rows; "
            if ignored != "labels":
                what = "only targets called 'labels' are counted. Rename it, "
            raise ValueError(
                f"{ignored!r} contains {IGNORED}, which losses ignore, but {what}{advice}"
            )
        if total == 0:
            raise ValueError(
                f"every label of the batch is ignored ({IGNORED}), so there is nothing to average. "
                "Expected at least one label to learn from."
            )

    def output_shares(self, microbatches: Sequence[Microbatch]) -> list[float]:
        """What each microbatch's own loss counts in the outputs of a prediction.

        Where no rule makes it the loss of the whole batch, the loss of several microbatches is NaN.
        """
        number, total = len(microbatches), self.total(microbatches)
        if self in (Rule.UNKNOWN, Rule.SUM_AND_WEIGHT):
            return [1.0 if number == 1 else math.nan] * number
        if total == 0 or (number > 1 and self.ignored_targets(microbatches) is not None):
            return [math.nan] * number
        return [self.count(microbatch) / total for microbatch in microbatches]


def require_loss(outputs: Any) -> Tensor:
    """The loss in a model's outputs: `.loss`, `["loss"]`, a scalar, or a tuple that begins so.

    Raises:
        ValueError: there is none.
    """
    found = getattr(outputs, "loss", None)
    if isinstance(outputs, Tensor):
        found = outputs
    elif isinstance(outputs, Mapping):
        found = outputs.get("loss")
    elif isinstance(outputs, tuple | list):
        found = next(iter(outputs), None)
    if not isinstance(found, Tensor) or found.dim() > 0:
        raise ValueError(
            f"the model returned {type(outputs).__name__} without a loss. Expected 'labels' in the "
            "batch and a model that returns outputs.loss, or loss=(outputs, batch) -> "
            "(sum, weight) given to the engine."
        )
    return found


def given_loss(function: LossFunction, outputs: Any, batch: Mapping[str, Any]) -> tuple[Any, Any]:
    """What a user's loss makes of outputs: (sum, weight), or (a mean over rows, None).

    Raises:
        ValueError: it is neither.
    """
    found = function(outputs, batch)
    is_pair = isinstance(found, tuple) and len(found) == 2
    loss, weight = found if is_pair else (found, None)
    is_number = not isinstance(weight, Tensor) or weight.dim() == 0
    if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point() or not is_number:
        raise ValueError(
            f"the function given as loss= returns {_described(found)}. Expected (sum, weight), a "
            "tensor without dimensions and a number, or one such tensor: a mean over rows."
        )
    return loss, weight


def _described(value: Any) -> str:
    """A value in a few words."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_described, value))})"
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}, {str(value.dtype).removeprefix('torch.')}"
    return type(value).__name__


def trial_batch(microbatch: Mapping[str, Any], *, cut: bool) -> Microbatch:
    """Two rows of a microbatch; `cut`: of a language model, with few tokens."""
    rows = some_rows(microbatch)
    can_join = cutting_of(rows) is None or isinstance(cutting_of(rows), Counted)
    rows = join_rows([rows, rows]) if num_rows(rows) == 1 and can_join else rows
    return shortened(rows) if cut else rows


def join_rows(parts: Sequence[Mapping[str, Any]]) -> Microbatch:
    """The rows of all parts.

    Raises:
        ValueError: they are not cut so that they can be joined.
    """
    if any(isinstance(part, CutBatch) for part in parts):
        return join_cut(parts)
    return {
        name: torch.cat([part[name] for part in parts]) if has_rows(value) else value
        for name, value in parts[0].items()
    }


def shortened(microbatch: Microbatch) -> Microbatch:
    """Rows of a language model with few tokens; of anything else, as they are."""
    if isinstance(microbatch, CutBatch):  # tokens belong to something else in it
        return microbatch
    tensors = [value for value in microbatch.values() if has_rows(value)]
    integers = all(one.dim() == 2 and not one.is_floating_point() for one in tensors)
    if not integers or len({one.shape[1] for one in tensors}) != 1:
        return microbatch
    return {n: v[:, :TRIAL_TOKENS] if has_rows(v) else v for n, v in microbatch.items()}


Measure = Callable[[Microbatch, int], tuple[float, float, bool]]
"""A user's loss of some rows: sum, weight (1 for a scalar), whether it computes in float32."""


def compare_cut_loss(rule: Rule, microbatches: Sequence[Microbatch], loss: Measure) -> str | None:
    """Whether a user's loss is made of those of microbatches; None, or why it is not.

    Tried with some rows of the first two, or of more if these have one or two each: so few that
    pairs and other groups stay together where they do in a microbatch, or, if these show a
    difference, all of them.

    Args:
        rule: how losses of microbatches are put together.
        microbatches: of the batch.
        loss: gives the loss of rows, with a seed for what it draws.
    """
    rows = num_rows(microbatches[0])
    few = rows if rows <= MAX_TRIAL_ROWS else MAX_TRIAL_ROWS + rows % MAX_TRIAL_ROWS
    first, second, *others = microbatches[: max(2, MIN_TRIAL_ROWS // rows)]
    alike = (one for one in others if num_rows(one) == rows and can_join([first, one]))
    chosen = [first, second, *alike]
    verdict = None
    for number in dict.fromkeys((few, rows)):
        parts = [take_rows(one, 0, number) for one in chosen]
        for cut in (True, False):  # of fixed length, it may not take a few tokens
            verdict = compare_parts(rule, [shortened(p) if cut else p for p in parts], loss)
            if verdict is None:
                return None
    return (
        f"loss= cannot be cut into microbatches of {rows} rows: {verdict}. A loss sees the rows of "
        "one microbatch at a time, so rows that it compares with each other must be in the same: "
        "give microbatch_size=all rows of a batch, for pairs an even one, or let the loss return "
        "(sum, weight) whose sums and weights over microbatches add up."
    )


def has_masks(microbatch: Mapping[str, Any]) -> bool:
    """Whether there are truth values for positions of rows."""
    tensors = (one for one in microbatch.values() if has_rows(one))
    return any(one.dtype is torch.bool and one.dim() > 1 for one in tensors)


def compare_parts(rule: Rule, parts: Sequence[Microbatch], loss: Measure) -> str | None:
    """Whether the loss of all parts is made of theirs; None, or why it is not."""
    try:
        whole = join_rows(parts)
        found = loss(whole, 1)
    except CutError:
        raise
    except Exception:  # rows of different lengths; or it fails in the step too, and says so itself
        return None
    counts = [num_rows(part) for part in parts]
    try:
        losses = [loss(part, 1) for part in parts]
    except CutError:
        raise
    except Exception as error:
        return f"on {counts[0]} rows alone it fails ({type(error).__name__}: {error})"
    shares = [1.0 if rule is Rule.SUM_AND_WEIGHT else n / sum(counts) for n in counts]
    terms = [one[0] * share for one, share in zip(losses, shares, strict=True)]
    weights = [one[1] * share for one, share in zip(losses, shares, strict=True)]
    tolerance = SINGLE_TOLERANCE if found[2] else HALF_TOLERANCE
    compares = rule is Rule.ROWS  # perhaps, as in `find_rule`
    if compares and not any([found[0], *terms]):
        return "it is 0 of all rows that were tried, and of each part of them, which tells nothing"
    for mine, own in ((found[0], terms), (found[1], weights)):
        scale = max(abs(mine), *map(abs, own), 0.0 if compares else 1 / 200)
        if math.isfinite(mine + sum(own)) and abs(mine - sum(own)) > tolerance * scale:
            if loss(whole, 2) != found:
                return None  # it draws random numbers, so there is nothing to compare
            return (
                f"that of {sum(counts)} rows is {found[0]:.6g}, and {sum(terms):.6g} put "
                f"together from {' and '.join(map(str, counts))} of them"
            )
    return None


def find_rule(
    trial: Microbatch, loss: Callable[[Microbatch], float], *, is_single: bool
) -> tuple[Rule, bool]:
    """Find and verify what a model's loss averages over ([Note: counting rule]).

    Args:
        trial: two rows.
        loss: gives the loss of rows.
        is_single: whether it computes in float32.

    Returns:
        the rule, and whether that is final: with weights that give no finite loss it is a guess.
    """
    labels = trial.get("labels")
    rule, parts = Rule.ROWS, list[Microbatch]()
    if isinstance(labels, Tensor) and not labels.is_floating_point():
        rule = Rule.LABELS
        chosen = torch.where(labels == IGNORED, 0, labels)
        if labels.dim() == 2 and labels.shape[1] > 1:
            first_only = torch.full_like(labels, IGNORED)
            first_only[:, 0] = chosen[:, 0]
            alone = loss(like(trial, {**trial, "labels": first_only}))
            if math.isnan(alone) or alone == 0.0:
                rule = Rule.SHIFTED_LABELS
        parts, trial = _by_labels(trial, chosen)
    if num_rows(trial) > 1:
        parts = [take_rows(trial, 0, 1), take_rows(trial, 1, 2)]
    if not parts:  # it cannot be tried; more rows may tell more, if they can be cut
        return Rule.UNKNOWN, not isinstance(cutting_of(trial), Given)
    counts = [rule.count(part) for part in parts]
    terms = [count * loss(part) for count, part in zip(counts, parts, strict=True)]
    expected = sum(terms) / max(1, sum(counts))
    found = loss(trial)
    if not math.isfinite(found) or not math.isfinite(expected):
        is_told = math.isfinite(found) and num_rows(trial) == 1  # by labels alone
        return (Rule.UNKNOWN if is_told else rule), False
    compares = rule is Rule.ROWS  # perhaps: a contrastive loss is small of two rows, and 0 of one
    if compares and found == expected == 0.0:
        return Rule.UNKNOWN, False
    # 16-bit losses carry two to three digits; most wrong rules are off by far more.
    tolerance = SINGLE_TOLERANCE if is_single else HALF_TOLERANCE
    least = 0.0 if compares else tolerance / 200
    close = math.isclose(found, expected, rel_tol=tolerance, abs_tol=least)
    return (rule if close else Rule.UNKNOWN), True


def _by_labels(trial: Microbatch, labels: Tensor) -> tuple[list[Microbatch], Microbatch]:
    """Rows with some of their labels, then with the others, and with both; the rest is ignored.

    In two dimensions they are three of the first row and one of the last, so that rows differ in
    their number. Where rows cannot be cut, the loss of these shows what it averages over.
    """
    few, first = torch.full_like(labels, IGNORED), torch.zeros_like(labels, dtype=torch.bool)
    if labels.dim() == 2 and labels.shape[1] > 1:
        first[0, : 3 if len(labels) > 1 else min(3, labels.shape[1] - 1)] = True
        few[-1, -1] = labels[-1, -1]
        few = torch.where(first, labels, few)
    elif labels.dim() == 1:
        first[:1], few = True, labels
    else:
        return [], trial
    halves = few.masked_fill(~first, IGNORED), few.masked_fill(first, IGNORED)
    parts = [like(trial, {**trial, "labels": one}) for one in halves]
    return parts, like(trial, {**trial, "labels": few})
