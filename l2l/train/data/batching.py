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

Without packing, rows are padded on the right, to a multiple of 64 tokens unless told otherwise so
that there are few lengths, and batches are made of rows of similar length.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from typing_extensions import override

from l2l.model import IGNORED, Rule
from l2l.train.data.examples import Examples

Batch = dict[str, Tensor]

PACKING_WINDOW = 8192  # parts that are packed together
SORTING_WINDOW = 32  # batches whose rows are sorted by length together
TRIAL_TOKENS = 16  # of each document of a trial of packing
MAX_EFFECT = 0.1  # of a document on another, against that of a text on what follows it
TOLERANCE = 0.02  # of 16-bit losses


@dataclass(frozen=True, slots=True)
class _Parts:
    """Ranges of tokens that stay together."""

    starts: Tensor  # [parts], int64: the first token
    lengths: Tensor  # [parts], int64
    examples: Tensor  # [parts], int64: what they are parts of


@final
class Batches:
    """Batches of examples, by the number of the step. Print it."""

    def __init__(
        self,
        examples: Examples,
        *,
        pad_id: int,
        rows: int = 8,
        length: int = 1024,
        packing: bool = True,
        padded_to: int = 64,
        seed: int = 0,
    ) -> None:
        """Cut long documents into parts, and pack.

        Args:
            examples: what to learn from.
            pad_id: token that fills rows up.
            rows: of a batch.
            length: most tokens of a row; with packing, all rows have it.
            packing: whether several examples share a row ([Note: packing]).
            padded_to: without packing, the length of a batch is a multiple of this.
            seed: of the order, and of what is packed with what.

        Raises:
            ValueError: a number is too small, or examples with a label each should be packed or
                are longer than a row.
        """
        if rows < 1 or length < 2 or padded_to < 1:
            raise ValueError(
                f"rows={rows}, length={length}, padded_to={padded_to}; expected at least 1 row of "
                "at least 2 tokens, padded to a multiple of at least 1."
            )
        if examples.targets is not None and packing:
            raise ValueError(
                f"task {examples.task!r} has one label a row, so examples cannot share rows. Say "
                "packing=False."
            )
        longest = int(examples.lengths.max())
        if examples.targets is not None and longest > length:
            raise ValueError(
                f"the longest example has {longest} tokens, and rows have {length}. Examples with "
                f"a label cannot be cut: make them with max_length={length}, or say length="
                f"{longest}."
            )
        self._examples, self._pad_id, self._seed = examples, pad_id, seed
        self._rows, self._length, self._packing = rows, length, packing
        self._padded_to = padded_to
        self._parts = _cut(examples, length)
        if packing:
            generator = _generator(seed, "packing", 0)
            self._members, self._row_ends = _pack(self._parts.lengths, length, generator)
        else:
            self._members = torch.arange(self._parts.starts.numel())
            self._row_ends = self._members + 1
        tokens = self._parts.lengths[self._members].cumsum(0)[self._row_ends - 1]
        self._row_tokens = tokens.diff(prepend=tokens.new_zeros(1))  # [rows of an epoch]
        self._orders: dict[int, Tensor] = {}

    @property
    def num_rows(self) -> int:
        """Rows of an epoch."""
        return self._row_ends.numel()

    @property
    def steps_per_epoch(self) -> int:
        """Steps after which every row has been seen; the last one may go on into the next epoch."""
        return self.num_steps(1)

    def num_steps(self, epochs: float) -> int:
        """Steps after which so many epochs are over."""
        return max(1, math.ceil(round(epochs * self.num_rows / self._rows, 6)))

    def epoch(self, step: int) -> float:
        """How many epochs have passed before a step."""
        return step * self._rows / self.num_rows

    def batch(self, step: int) -> Batch:
        """The batch of a step, from 0 on.

        `input_ids` and `labels`; with packing `position_ids`, without `attention_mask`; and
        `token_type_ids` if the tokenizer made them. All are int64 [rows, length], but for the
        labels of whole rows: [rows], int64 or float32.
        """
        return self._build(self._rows_of(step))

    def num_tokens(self, step: int) -> int:
        """Tokens of the batch of a step, without padding."""
        return int(self._row_tokens[self._rows_of(step)].sum())

    def in_order(self) -> Iterator[Batch]:
        """All rows once, in a fixed order, for evaluation; the last batch may have fewer.

        Without packing, that is the order of the examples.
        """
        for chosen in torch.split(torch.arange(self.num_rows), self._rows):
            yield self._build(chosen)

    def fingerprint(self) -> str:
        """A short text that differs if any step would get another batch."""
        settings = (
            self._rows,
            self._length,
            self._packing or self._padded_to,
            self._seed,
            self._pad_id,
        )
        text = f"{self._examples.fingerprint()} {settings}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def padding(self) -> float:
        """The share of an epoch's tokens that is padding: between 0 and 1."""
        lengths = self._row_tokens[self._order(0)]
        batches = torch.split(lengths, self._rows)
        total: int = sum(self._width(one) * one.numel() for one in batches)
        return 1 - int(lengths.sum()) / total

    @override
    def __str__(self) -> str:
        """A line for people."""
        kind = f"of {self._length:,} tokens, packed" if self._packing else "padded by length"
        return (
            f"{self.num_rows:,} rows {kind}, {self.padding:.1%} padding; {self._rows} rows a step, "
            f"{self.num_rows / self._rows:,.1f} steps an epoch"
        )

    # ----------------------------------------------------------------------------------------------

    def _rows_of(self, step: int) -> Tensor:
        if step < 0:
            raise ValueError(f"step={step}; steps are numbered from 0 on.")
        first, end = step * self._rows, (step + 1) * self._rows
        chosen: list[Tensor] = []
        while first < end:
            epoch, skipped = divmod(first, self.num_rows)
            taken = min(end - first, self.num_rows - skipped)
            chosen.append(self._order(epoch)[skipped : skipped + taken])
            first += taken
        return torch.cat(chosen)

    def _order(self, epoch: int) -> Tensor:
        """The rows of an epoch in the order in which they come."""
        if epoch not in self._orders:
            while len(self._orders) > 1:  # a batch may need this epoch and the one before
                del self._orders[min(self._orders)]
            self._orders[epoch] = self._draw(epoch)
        return self._orders[epoch]

    def _draw(self, epoch: int) -> Tensor:
        generator = _generator(self._seed, "epoch", epoch)
        order = torch.randperm(self.num_rows, generator=generator)
        if self._packing:
            return order
        # what completes the last batch of the epoch before; whole batches; what begins the next
        head = min(-epoch * self.num_rows % self._rows, self.num_rows)
        num_whole = (self.num_rows - head) // self._rows
        whole = order[head : head + num_whole * self._rows]
        batches = [
            window[self._row_tokens[window].argsort(stable=True)].view(-1, self._rows)
            for window in torch.split(whole, SORTING_WINDOW * self._rows)
        ]
        mixed = torch.cat(batches)[torch.randperm(num_whole, generator=generator)]
        return torch.cat([order[:head], mixed.view(-1), order[head + whole.numel() :]])

    def _width(self, row_tokens: Tensor) -> int:
        """The length of a batch of rows with so many tokens."""
        if self._packing:
            return self._length
        multiple = -(-int(row_tokens.max()) // self._padded_to) * self._padded_to
        return min(self._length, multiple)

    def _build(self, chosen: Tensor) -> Batch:
        examples = self._examples
        shape = (chosen.numel(), self._width(self._row_tokens[chosen]))
        ids = torch.full(shape, self._pad_id)
        labels = torch.full(shape, IGNORED)
        positions = torch.zeros(shape, dtype=torch.int64)
        mask = torch.zeros(shape, dtype=torch.int64)
        types = None if examples.token_types is None else torch.zeros(shape, dtype=torch.int64)
        for row, number in enumerate(chosen.tolist()):
            at = 0
            for part in self._parts_of(number):
                start, length = int(self._parts.starts[part]), int(self._parts.lengths[part])
                there, here = slice(start, start + length), slice(at, at + length)
                ids[row, here] = examples.ids[there].long()
                labels[row, here] = self._labels(there)
                positions[row, here] = torch.arange(length)
                if types is not None and examples.token_types is not None:
                    types[row, here] = examples.token_types[there].long()
                at += length
            mask[row, :at] = 1
            positions[row, at:] = torch.arange(shape[1] - at)  # padding is one more document
        batch = {"input_ids": ids, "labels": labels}
        if examples.targets is not None:
            batch["labels"] = examples.targets[self._parts.examples[self._members[chosen]]]
        if types is not None:
            batch["token_type_ids"] = types
        return {
            **batch,
            **({"position_ids": positions} if self._packing else {"attention_mask": mask}),
        }

    def _parts_of(self, row: int) -> list[int]:
        first = int(self._row_ends[row - 1]) if row else 0
        return self._members[first : int(self._row_ends[row])].tolist()

    def _labels(self, tokens: slice) -> Tensor:
        """Labels of a part: none for its first token."""
        labels = self._examples.ids[tokens].long()
        if self._examples.answers is not None:
            labels[~self._examples.answers[tokens]] = IGNORED
        labels[0] = IGNORED
        return labels


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
    try:
        packed = [_loss_of_second(evaluate, one, second, apart) for one in (first, other)]
        as_one = [_loss_of_second(evaluate, one, second, joined) for one in (first, other)]
        alone = _loss_of_second(evaluate, first[:, :0], second, apart[:, :length])
    except (TypeError, ValueError) as error:
        if "position_ids" in str(error):  # the model does not take them
            return False
        raise
    leaks = abs(packed[0] - packed[1]) > MAX_EFFECT * abs(as_one[0] - as_one[1])
    return not leaks and abs(packed[0] - alone) <= TOLERANCE * max(1.0, abs(alone))


# --------------------------------------------------------------------------------------------------


def _generator(seed: int, purpose: str, number: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed} {purpose} {number}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))


def _cut(examples: Examples, length: int) -> _Parts:
    """Parts of at most `length` tokens, without those of which nothing can be learnt.

    Raises:
        ValueError: nothing is left.
    """
    numbers = (examples.lengths + length - 1) // length  # of parts of each example
    owners = torch.arange(len(examples)).repeat_interleave(numbers)
    ordinal = torch.arange(owners.numel()) - (numbers.cumsum(0) - numbers)[owners]
    starts = examples.offsets[owners] + ordinal * length
    lengths = torch.minimum(examples.offsets[owners + 1] - starts, torch.tensor(length))
    parts = _Parts(starts, lengths, owners)
    if examples.targets is not None:
        return parts
    learnt = lengths - 1
    if examples.answers is not None:
        before = torch.cat([torch.zeros(1, dtype=torch.int64), examples.answers.cumsum(0)])
        learnt = before[starts + lengths] - before[starts + 1]
    useful = learnt > 0
    if not bool(useful.any()):
        raise ValueError(
            f"none of {len(examples)} examples has a token to learn after its first one. Expected "
            "texts of at least two tokens, or answers."
        )
    return _Parts(starts[useful], lengths[useful], owners[useful])


def _pack(lengths: Tensor, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Put parts together in rows.

    Parts come in random order; those of a window are placed longest first, each in the row where it
    leaves least room.

    Returns:
        the parts, row by row, and for each row the place after its last one.
    """
    rows: list[list[int]] = []
    order = torch.randperm(lengths.numel(), generator=generator)
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


def _loss_of_second(
    evaluate: Callable[[Batch], float], first: Tensor, second: Tensor, positions: Tensor
) -> float:
    ids = torch.cat([first, second], dim=1)
    labels = ids.clone()
    labels[:, : first.shape[1] + 1] = IGNORED
    return evaluate({"input_ids": ids, "labels": labels, "position_ids": positions.clone()})
