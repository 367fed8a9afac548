"""Rows of one padded batch that differ in length: which share a microbatch, without padding.

A batch comes as a dict of tensors that are padded to the longest row, with an `attention_mask`.
Rows of similar length share a microbatch, whose tensors are cut to the positions that some row of
it needs; it has as many rows as make up the planned number of tokens. Which rows go where is data,
a function of the batch and of that number alone:

    ########----------          ########          rows 0 and 3, positions 0 to 8
    ###---------------    ->    ######
    ##----------------          ###               rows 1 and 2, positions 0 to 3
    ######------------          ##

A position is needed if its mask is 1, if its label counts, or if the one after it has a label that
counts, which a causal model predicts here. What no row needs is left out on either side, never in
the middle. Only entries that are known are cut: one of another name may mean anything.

Whether a model computes the same without such positions is not known here: see engine/lengths.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, final

import torch
from torch import Tensor

from l2l.model.batch import IGNORED, Microbatch, take_positions, token_length
from l2l.model.splitting import cutting_of, has_rows

MASK, LABELS = "attention_mask", "labels"
BY_POSITION = ("input_ids", "inputs_embeds", MASK, "token_type_ids", "position_ids", LABELS)
CUT_TO = 16  # widths of microbatches are multiples of this, so that there are few
FIXED_SHARE = 8  # a microbatch costs as much as this part of the planned tokens, whatever is in it
WORTH = 0.9  # of the positions, that a batch must come down to
PADS = 3  # a trial's rows have so many times their length of padding
TRIAL_LENGTHS = (8, 12)


@final
@dataclass(frozen=True, slots=True)
class Group:
    """Rows that share a microbatch, and the positions that they need."""

    rows: tuple[int, ...]
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        """Positions that are computed."""
        return len(self.rows) * (self.end - self.start)


@final
@dataclass(frozen=True, slots=True)
class Grouping:
    """Which rows of a batch go to which microbatch."""

    groups: tuple[Group, ...]
    num_rows: int
    length: int
    num_needed: int  # positions that are no padding

    @property
    def num_tokens(self) -> int:
        """Positions that are computed."""
        return sum(group.num_tokens for group in self.groups)

    @property
    def computed_share(self) -> float:
        """Of the positions of the batch."""
        return self.num_tokens / (self.num_rows * self.length)

    @property
    def sides(self) -> frozenset[str]:
        """Where positions are left out: "left", "right"."""
        left = any(group.start for group in self.groups)
        right = any(group.end < self.length for group in self.groups)
        return frozenset(["left"] * left + ["right"] * right)

    def take(self, batch: Mapping[str, Any]) -> list[Microbatch]:
        """The microbatches of the batch."""
        return [_taken(batch, group, self.length) for group in self.groups]

    def describe(self) -> str:
        """A few words for people."""
        before = 1 - self.num_needed / (self.num_rows * self.length)
        return (
            f"share microbatches by tokens: {1 - self.num_needed / self.num_tokens:.0%} of what is "
            f"computed is padding, of the batch {before:.0%}"
        )


def _taken(batch: Mapping[str, Any], group: Group, length: int) -> Microbatch:
    chosen = torch.tensor(group.rows)
    rows = {name: one[chosen] if has_rows(one) else one for name, one in batch.items()}
    return take_positions(rows, slice(group.start, group.end), length)


def group_by_tokens(batch: Any, tokens: int) -> Grouping | None:
    """Microbatches of about so many tokens; None: there is too little to gain, or it is not known.

    Args:
        batch: as a step is given it.
        tokens: that a microbatch is planned for.
    """
    needed = _needed(batch) if isinstance(batch, Mapping) else None
    if needed is None or not bool(needed.any(1).all()):
        return None
    number, length = needed.shape
    starts, ends = needed.int().argmax(1), length - needed.flip(1).int().argmax(1)
    widths = [-(-one // CUT_TO) * CUT_TO for one in (ends - starts).tolist()]
    order = sorted(range(number), key=lambda row: -widths[row])
    classes = [(width, [*rows]) for width, rows in groupby(order, key=lambda row: widths[row])]
    groups = []
    for rows in _parted(classes, tokens):
        start, end = int(starts[rows].min()), int(ends[rows].max())
        wide = -(-(end - start) // CUT_TO) * CUT_TO
        end = min(length, start + wide)
        groups.append(Group(tuple(sorted(rows)), max(0, min(start, end - wide)), end))
    found = Grouping(tuple(groups), number, length, int((ends - starts).sum()))
    return found if found.computed_share <= WORTH else None


def _parted(classes: list[tuple[int, list[int]]], tokens: int) -> list[list[int]]:
    """Rows of microbatches: neighbours by width, such that least is computed, all costs told.

    Args:
        classes: widths, the largest first, and the rows that have each.
        tokens: that a microbatch has at most, if it has several rows.
    """
    best: list[tuple[float, int]] = [(0.0, 0)]  # of the first classes: cost, where the last begins
    for end in range(1, len(classes) + 1):
        costs, count = [], 0
        for start in range(end - 1, -1, -1):
            width, rows = classes[start]
            count += len(rows)
            number = -(-count // max(1, tokens // width))
            cost = count * width + number * tokens / FIXED_SHARE
            costs.append((best[start][0] + cost, start))
        best.append(min(costs))
    found: list[list[int]] = []
    end = len(classes)
    while end:
        start = best[end][1]
        rows = [row for _, some in classes[start:end] for row in some]
        most = max(1, tokens // classes[start][0])
        found[:0] = [rows[first : first + most] for first in range(0, len(rows), most)]
        end = start
    return found


def _needed(batch: Mapping[str, Any]) -> Tensor | None:
    """Which positions of rows are no padding, [rows, length]; None: nobody knows."""
    mask = batch.get(MASK)
    if cutting_of(batch) is not None or not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    number, length = mask.shape
    tensors = {name: one for name, one in batch.items() if has_rows(one)}
    if not all(
        len(one) == number and _is_known(name, one, length) for name, one in tensors.items()
    ):
        return None
    mask = mask.cpu()
    needed = mask != 0
    if mask.is_floating_point() or not bool((mask.int() == needed).all()):
        return None
    labels = tensors.get(LABELS)
    if labels is not None and labels.dim() == 2 and labels.shape[1] == length:
        counts = labels.cpu() != IGNORED
        needed = needed | counts
        needed[:, :-1] |= counts[:, 1:]
    return needed


def _is_known(name: str, one: Tensor, length: int) -> bool:
    """Whether it is known what an entry has for positions."""
    if one.dim() < 2 or length not in one.shape[1:]:
        return one.dim() < 2 or name not in BY_POSITION  # labels of another length are of a decoder
    whole = name == LABELS and one.is_floating_point()  # one number for each class
    return (
        name in BY_POSITION and one.shape[1] == length and length not in one.shape[2:] and not whole
    )


def padded_pair(batch: Mapping[str, Any], side: str) -> tuple[Microbatch, Microbatch] | None:
    """Two short rows with much padding on a side, and the same rows without what neither needs.

    Their tokens and their padding are the batch's. None: no row has padding there.
    """
    needed = _needed(batch)
    assert needed is not None
    length = needed.shape[1]
    starts, ends = needed.int().argmax(1), length - needed.flip(1).int().argmax(1)
    room = starts if side == "left" else length - ends
    padded = int(room.argmax())
    if not room[padded]:
        return None
    pad = int(starts[padded]) - 1 if side == "left" else int(ends[padded])
    chosen = [padded, int(room.argmin())]
    width, places = TRIAL_LENGTHS[-1] * (1 + PADS), list[list[tuple[int, int]]]()
    for row, most in zip(chosen, TRIAL_LENGTHS, strict=True):
        start, end = int(starts[row]), int(ends[row])
        first = start if side == "left" else max(start, end - most)
        own = [(row, at) for at in range(first, min(end, first + most))]
        pads = [(padded, pad)] * (width - len(own))
        places.append([*pads, *own] if side == "left" else [*own, *pads])
    rows, at = torch.tensor(places).unbind(2)

    def picked(name: str, one: Any) -> Any:
        if not has_rows(one):
            return one
        is_by_position = name in BY_POSITION and one.dim() > 1
        return one.cpu()[rows, at] if is_by_position else one.cpu()[chosen]

    pair = {name: picked(name, one) for name, one in batch.items()}
    need = _needed(pair)
    assert need is not None
    some = need.any(0).nonzero().flatten()
    kept = slice(int(some[0]), int(some[-1]) + 1)
    trimmed = take_positions(pair, kept, width)
    return (pair, trimmed) if token_length(trimmed) < width else None
