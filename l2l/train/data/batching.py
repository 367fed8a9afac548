"""Batches: which examples a step gets, as a pure function of the seed and the step's number.

A *part* is an example, or, of a document that is longer than a row, one of the pieces it is cut
into. A *row* is one part; or with packing, several. Rows are drawn in an order of their own in
every epoch, and the epochs follow each other as one stream, of which step n takes the n-th batch:

    epoch 0                     epoch 1                     epoch 2
    r5 r2 r7 r0 r4 r1 r6 r3     r1 r0 r7 r6 r3 r5 r2 r4     ...
    step 0   step 1   step 2----   step 3   step 4   step 5----

So a run is resumed with the number of its step alone; no row is lost, and none comes twice within
an epoch, also where a batch spans two of them.

[Note: packing] Parts are laid end to end in rows of one length, so that little is padding. They
must not see each other. Rows say so by `position_ids` that start at 0 with every part, and by the
absence of an `attention_mask`. Models of transformers that make their masks with its
`masking_utils` then let each part see itself alone, for the attention implementations "eager",
"sdpa" and "flex_attention", as long as there is no cache (`use_cache=False`, which is what the
engine says). "flash_attention_2" and its followers do so for batches of a single row only. Models
whose layers pass on a state (Mamba, linear attention), or whose positions are not told
(ALiBi), cannot keep parts from each other. `packing_holds` tells by experiment.

The first token of a part is predicted by nothing that the part contains: its label is ignored. So
the loss of a packed row is that of its parts one by one, weighted by their labels.

Without packing, rows are padded on the right, to one of few lengths that are longer by a quarter,
or seven tokens, at most; and batches are made of rows of similar length.

Examples that belong together, such as the chosen and the rejected one of a pair, stay so: what is
drawn, sorted and counted then are the groups, and a batch has the rows of each one after the other.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import final

import torch
from torch import Tensor
from typing_extensions import override

from l2l.model import IGNORED, Rule
from l2l.train.data.examples import Examples, members

Batch = dict[str, Tensor]

PADDED_TO = 64  # long rows that are not packed have multiples of this as their length
LEAST_MULTIPLE = 8  # and short ones of this
PACKING_WINDOW = 8192  # parts that are packed together
SORTING_WINDOW = 32  # batches whose rows are sorted by length together
TRIAL_TOKENS = 16  # of each document of a trial of packing
MAX_EFFECT = 0.1  # of a document on another, against that of a text on what follows it
TOLERANCE = 0.02  # of 16-bit losses


@final
@dataclass(eq=False, repr=False)
class Batches:
    """Batches of examples, by the number of the step. Print it.

    Long documents are cut into parts, which are packed.

    Attributes:
        examples: what to learn from.
        pad_id: token that fills rows up.
        rows: of a batch; of examples that belong together, the groups.
        length: most tokens of a row; with packing, all rows have it.
        packing: whether several examples share a row ([Note: packing]).
        seed: of the order, and of what is packed with what.

    Raises:
        ValueError: examples with a label each should be packed, or are longer than a row.
    """

    examples: Examples
    _: KW_ONLY
    pad_id: int
    rows: int = 8
    length: int = 1024
    packing: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        longest = int(self.examples.lengths.max())
        if _is_whole(self.examples) and (self.packing or longest > self.length):
            raise ValueError(
                "examples with a label, or in pairs, can neither share a row nor be cut. Expected "
                f"packing=False, and length={longest} or examples with max_length={self.length}."
            )
        self._starts, self._lengths = _cut(self.examples, self.length)  # of each part
        group = self.examples.group
        if self.packing:
            self._members, self._row_ends = _pack(self._lengths, self.length, self.seed)
        else:
            self._members = torch.arange(self._starts.numel())
            self._row_ends = self._members + 1
        self.num_rows = self._row_ends.numel() // group  # of an epoch; or groups
        tokens = self._lengths[self._members].cumsum(0)[self._row_ends - 1]
        each = tokens.diff(prepend=tokens.new_zeros(1)).view(-1, group)
        self._row_tokens = each.amax(1)  # [rows of an epoch]; of groups, of the longest
        self._num_tokens = int(each.sum())
        self._order = lru_cache(maxsize=2)(self._draw)  # a batch may need an epoch and the next

    def num_steps(self, epochs: float) -> int:
        """Steps after which so many epochs are over; the last one may go on into the next epoch."""
        return max(1, math.ceil(round(epochs * self.num_rows / self.rows, 6)))

    def batch(self, step: int) -> Batch:
        """The batch of a step, from 0 on.

        `input_ids` and `labels`; with packing `position_ids`, without `attention_mask`;
        `token_type_ids` if the tokenizer made them; and what else is known of examples. All are
        int64 [rows, length], but for what is known of whole rows, such as their labels: [rows],
        int64 or float32.
        """
        first, end = step * self.rows, (step + 1) * self.rows
        chosen: list[Tensor] = []
        while first < end:
            epoch, skipped = divmod(first, self.num_rows)
            chosen.append(self._order(epoch)[skipped : skipped + end - first])
            first += chosen[-1].numel()
        return self._build(torch.cat(chosen))

    def in_order(self) -> Iterator[Batch]:
        """All rows once, in a fixed order, for evaluation; the last batch may have fewer.

        Without packing, that is the order of the examples.
        """
        return map(self._build, torch.split(torch.arange(self.num_rows), self.rows))

    def by_length(self) -> Iterator[tuple[Batch, Tensor]]:
        """All rows once, the longest first, each batch with the numbers of its examples."""
        order = self._row_tokens.argsort(descending=True, stable=True)
        for groups in torch.split(order, self.rows):
            yield self._build(groups), members(groups, self.examples.group)

    @property
    def padding(self) -> float:
        """The share of an epoch's tokens that is padding: between 0 and 1."""
        lengths = self._row_tokens[self._order(0)]
        total = sum(self._width(one) * one.numel() for one in torch.split(lengths, self.rows))
        return 1 - self._num_tokens / (total * self.examples.group)

    @override
    def __str__(self) -> str:
        """A line for people."""
        kind = f"of {self.length:,} tokens, packed" if self.packing else "padded by length"
        rows = "rows" if self.examples.group == 1 else "pairs of rows"
        return (
            f"{self.num_rows:,} {rows} {kind}, {self.padding:.1%} padding; {self.rows} a step, "
            f"{self.num_rows / self.rows:,.1f} steps an epoch"
        )

    # ----------------------------------------------------------------------------------------------

    def _draw(self, epoch: int) -> Tensor:
        """The rows of an epoch in the order in which they come."""
        generator = seeded(f"{self.seed} epoch {epoch}")
        order = torch.randperm(self.num_rows, generator=generator)
        if self.packing:
            return order
        # what completes the last batch of the epoch before; whole batches; what begins the next
        head = min(-epoch * self.num_rows % self.rows, self.num_rows)
        num_whole = (self.num_rows - head) // self.rows
        whole = order[head : head + num_whole * self.rows]
        batches = [
            window[self._row_tokens[window].argsort(stable=True)].view(-1, self.rows)
            for window in torch.split(whole, SORTING_WINDOW * self.rows)
        ]
        mixed = torch.cat(batches)[torch.randperm(num_whole, generator=generator)]
        return torch.cat([order[:head], mixed.view(-1), order[head + whole.numel() :]])

    def _width(self, row_tokens: Tensor) -> int:
        """The length of a batch of rows with so many tokens."""
        longest = int(row_tokens.max())
        return self.length if self.packing else min(self.length, padded_length(longest))

    def _build(self, groups: Tensor) -> Batch:
        examples, chosen = self.examples, members(groups, self.examples.group)
        shape = (chosen.numel(), self._width(self._row_tokens[groups]))
        ids, labels = torch.full(shape, self.pad_id), torch.full(shape, IGNORED)
        positions, mask, types = (torch.full(shape, 0) for _ in range(3))
        for row, number in enumerate(chosen.tolist()):
            at = 0
            first = int(self._row_ends[number - 1]) if number else 0
            for part in self._members[first : int(self._row_ends[number])].tolist():
                start, length = int(self._starts[part]), int(self._lengths[part])
                there, here = slice(start, start + length), slice(at, at + length)
                ids[row, here] = examples.ids[there]
                labels[row, here] = examples.ids[there]
                labels[row, at] = IGNORED
                if examples.token_targets is not None:
                    labels[row, here] = examples.token_targets[there].long()
                if examples.answers is not None:
                    labels[row, here].masked_fill_(~examples.answers[there], IGNORED)
                if examples.token_types is not None:
                    types[row, here] = examples.token_types[there]
                positions[row, here] = torch.arange(length)
                at += length
            mask[row, :at] = 1
            positions[row, at:] = torch.arange(shape[1] - at)  # padding is one more document
        if examples.targets is not None:  # every row is an example
            labels = examples.targets[chosen]
        batch = {"input_ids": ids, "labels": labels}
        if examples.records:
            batch["example"] = chosen
        batch.update({name: one[chosen] for name, one in examples.numbers.items()})
        if examples.token_types is not None:
            batch["token_type_ids"] = types
        return batch | ({"position_ids": positions} if self.packing else {"attention_mask": mask})


def padded_length(length: int) -> int:
    """The length that rows of so many tokens are filled up to, where they are not packed."""
    eighth = 1 << max(0, (length - 1).bit_length() - 3)
    multiple = min(PADDED_TO, max(LEAST_MULTIPLE, eighth))
    return -(-length // multiple) * multiple


def num_targets(batch: Mapping[str, Tensor]) -> int:
    """What the loss of a batch is a mean over, to average the losses of several batches by."""
    causal = batch["labels"].dim() == 2
    return (Rule.SHIFTED_LABELS if causal else Rule.ROWS).count(batch)


def packing_holds(evaluate: Callable[[Batch], float], batch: Mapping[str, Tensor]) -> bool:
    """Whether a model keeps the documents of a packed row from each other, found by experiment.

    Two rows of two documents each, of 16 tokens, are evaluated: the loss of the second document
    must not change with the words of the first. It would, by far more than rounding does, if both
    were one text, which is evaluated too for comparison; and it must be the loss of the second
    document alone. That takes five evaluations.

    Args:
        evaluate: gives the loss of a batch, in evaluation mode: `Engine.evaluate`; or of a plain
            model of transformers, `lambda batch: model(**batch, use_cache=False).loss.item()`.
        batch: packed, for its words.
    """
    tokens = batch["input_ids"].reshape(-1)
    words = torch.unique(torch.cat([tokens, tokens.new_tensor([0, 1])]))  # at least two
    length = max(2, min(TRIAL_TOKENS, batch["input_ids"].shape[1] // 2))
    enough = tokens.repeat(-(-4 * length // tokens.numel()))[: 4 * length]
    first, second = enough.view(2, 2, length)  # [rows, tokens] each
    other = words[(torch.searchsorted(words, first) + 1) % words.numel()]
    apart = torch.arange(length).repeat(2, 2)
    joined = torch.arange(2 * length).repeat(2, 1)

    def loss_of_second(before: Tensor, positions: Tensor) -> float:
        ids = torch.cat([before, second], dim=1)
        labels = ids.clone()
        labels[:, : before.shape[1] + 1] = IGNORED
        return evaluate({"input_ids": ids, "labels": labels, "position_ids": positions.clone()})

    try:
        packed = [loss_of_second(one, apart) for one in (first, other)]
        as_one = [loss_of_second(one, joined) for one in (first, other)]
        alone = loss_of_second(first[:, :0], apart[:, :length])
    except (TypeError, ValueError) as error:
        if "position_ids" in str(error):  # the model does not take them
            return False
        raise
    leaks = abs(packed[0] - packed[1]) > MAX_EFFECT * abs(as_one[0] - as_one[1])
    return not leaks and abs(packed[0] - alone) <= TOLERANCE * max(1.0, abs(alone))


# --------------------------------------------------------------------------------------------------


def seeded(words: str) -> torch.Generator:
    """Random numbers that follow from a text."""
    digest = hashlib.sha256(words.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))


def _cut(examples: Examples, length: int) -> tuple[Tensor, Tensor]:
    """First token and length of parts of at most `length` that have something to learn.

    Raises:
        ValueError: nothing is left.
    """
    numbers = (examples.lengths + length - 1) // length  # of parts of each example
    owners = torch.arange(len(examples)).repeat_interleave(numbers)
    ordinal = torch.arange(owners.numel()) - (numbers.cumsum(0) - numbers)[owners]
    starts = examples.offsets[owners] + ordinal * length
    lengths = (examples.offsets[owners + 1] - starts).clamp(max=length)
    if _is_whole(examples):
        return starts, lengths
    learnt = lengths - 1
    if examples.answers is not None:
        before = torch.cat([torch.zeros(1, dtype=torch.int64), examples.answers.cumsum(0)])
        learnt = before[starts + lengths] - before[starts + 1]
    useful = learnt > 0
    if not useful.any():
        what = f"none of {len(examples)} examples has a token to learn after its first one"
        raise ValueError(f"{what}. Expected texts of at least two tokens, or answers.")
    return starts[useful], lengths[useful]


def _is_whole(examples: Examples) -> bool:
    """Whether each has a row of its own: one with a label, of a pair, or for rewards."""
    has_labels = examples.targets is not None or examples.token_targets is not None
    return has_labels or examples.group > 1 or bool(examples.records)


def _pack(lengths: Tensor, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Put parts together in rows.

    Parts come in random order; those of a window are placed longest first, each in the row where it
    leaves least room.

    Returns:
        the parts, row by row, and for each row the place after its last one.
    """
    rows: list[list[int]] = []
    order = torch.randperm(lengths.numel(), generator=seeded(f"{seed} packing 0"))
    for window in torch.split(order, PACKING_WINDOW):
        window = window[lengths[window].argsort(descending=True, stable=True)]
        rooms: list[tuple[int, int]] = []  # (tokens left, row), sorted
        for part, size in zip(window.tolist(), lengths[window].tolist(), strict=True):
            place = bisect_left(rooms, (size, 0))
            if place < len(rooms):
                room, row = rooms.pop(place)
                rows[row].append(part)
            else:
                room, row = length, len(rows)
                rows.append([part])
            if room > size:
                insort(rooms, (room - size, row))
    ends = torch.tensor([len(row) for row in rows]).cumsum(0)
    return torch.tensor([part for row in rows for part in row]), ends
