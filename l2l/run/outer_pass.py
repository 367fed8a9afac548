"""Prologue and epilogue: the model's own code around the layers, on one microbatch.

Only the units that a phase reads are on the device for it. The rest of what the code sees is a
*placeholder*, NaN without memory; lookups in a table that is not there are answered
(interception.py).

[Note: pieces] The epilogue of a language model makes logits, words times tokens of them, several
times over. Where its loss is a plain cross-entropy they are put off and made for some tokens at a
time (interception.py). Otherwise the whole epilogue runs in pieces, each with its backward pass at
once: some rows of the microbatch, or, where that was proven on a trial to give the same
(trial.py), some positions of a row. A causal loss is then given its labels already shifted. The
losses of pieces add up like those of microbatches: each counts n / N. Where logits are put off, the
rest of the epilogue, whose values are as large as hidden states, runs in larger pieces: *parts*.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from l2l.model import (
    IGNORED,
    Answers,
    Asked,
    Head,
    HostMirror,
    Key,
    Lookup,
    Microbatch,
    Question,
    Recording,
    Route,
    Rule,
    completed,
    given_loss,
    has_flat_numbers,
    leaves,
    like,
    num_rows,
    require_loss,
    take_gradients,
    take_positions,
    take_rows,
)
from l2l.run.outline import Outline
from l2l.run.parts import Parts
from l2l.run.program import Program
from l2l.run.step import Step
from l2l.schedule import NOTHING

MAX_PIECE_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a microbatch, and some positions of them."""

    rows: slice
    positions: slice | None = None

    def of(self, hidden: Tensor) -> Tensor:
        """The piece of a hidden state, or of its gradient."""
        return hidden[self.rows] if self.positions is None else hidden[self.rows, self.positions]

    def cut(self, microbatch: Mapping[str, Any], length: int) -> Microbatch:
        """The piece of a batch."""
        found = take_rows(microbatch, self.rows.start, self.rows.stop)
        return found if self.positions is None else take_positions(found, self.positions, length)


def pieces(num_rows: int, length: int, *, tokens: int | None, within_rows: bool) -> list[Piece]:
    """Cut a microbatch into pieces of about so many tokens; None is all in one."""
    if tokens is None or num_rows * length <= tokens:
        return [Piece(slice(0, num_rows))]
    if length <= tokens or not within_rows:
        size = max(1, tokens // length)
        return [Piece(slice(i, min(i + size, num_rows))) for i in range(0, num_rows, size)]
    number = -(-length // tokens)
    size = -(-length // number)
    return [
        Piece(slice(row, row + 1), slice(start, min(start + size, length)))
        for row in range(num_rows)
        for start in range(0, length, size)
    ]


def with_shifted_labels(microbatch: Mapping[str, Any]) -> Microbatch:
    """A batch whose labels stand where a causal loss needs them, for positions to be cut out."""
    labels = microbatch["labels"]
    shifted = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    return like(microbatch, {**microbatch, "labels": shifted, "shift_labels": shifted})


@dataclass(slots=True)
class Outer:
    """What the code before a stack, or after the last one, is given besides the batch."""

    stack: int
    rows: list[Tensor] = field(default_factory=list)  # that the host has looked up
    ends: dict[Key, Tensor] = field(default_factory=dict)  # what the stack before it has made
    rides: dict[Key, Tensor] = field(default_factory=dict)  # what earlier ones have made
    asides: dict[Key, Tensor] = field(default_factory=dict)
    asking: dict[Any, Tensor] = field(default_factory=dict)  # of the batch, what has a gradient

    @property
    def delivered(self) -> dict[Key, Tensor]:
        """What earlier layers have returned."""
        return {**self.rides, **self.asides, **self.ends}

    @property
    def is_one_hidden_state(self) -> bool:
        """Whether there is nothing but a hidden state, which may be cut into pieces."""
        return len(self.ends) == 1 and not self.rides and not self.asides

    def leaves(self) -> Iterator[tuple[tuple[str, Any], Tensor]]:
        """All of it, by kind and key."""
        for kind, found in (("end", self.ends), ("ride", self.rides), ("aside", self.asides)):
            yield from (((kind, key), one) for key, one in found.items())
        yield from ((("row", i), one) for i, one in enumerate(self.rows))
        yield from ((("input", source), one) for source, one in self.asking.items())

    def piece(self, part: Piece) -> Outer:
        """The same for a piece of the rows, as leaves of another graph."""
        ends = {
            key: part.of(one).detach().requires_grad_(one.requires_grad)
            for key, one in self.ends.items()
        }
        return replace(self, ends=ends)


def joined(outers: Sequence[Outer], dimensions: Mapping[Key, int]) -> Outer:
    """What all microbatches hand over, as leaves of one graph; what has no rows is one for all."""

    def join(found: Sequence[Mapping[Key, Tensor]]) -> dict[Key, Tensor]:
        return {
            key: _cat([each[key] for each in found], dimensions[key]) if key in dimensions else one
            for key, one in found[0].items()
        }

    return Outer(
        outers[0].stack,
        ends=join([one.ends for one in outers]),
        rides=join([one.rides for one in outers]),
        asides=join([one.asides for one in outers]),
        asking={(s, m): one for m, own in enumerate(outers) for s, one in own.asking.items()},
    )


def _cat(parts: list[Tensor], dimension: int) -> Tensor:
    whole = torch.cat([part.detach() for part in parts], dimension)
    return whole.requires_grad_(parts[0].requires_grad)


def parted(
    found: Mapping[Any, Tensor], outers: Sequence[Outer], dimensions: Mapping[Key, int]
) -> Iterator[dict[Any, Tensor]]:
    """The gradients of `joined`, of every microbatch; that of what has no rows is the first's."""
    starts = dict.fromkeys(found, 0)
    for index, outer in enumerate(outers):
        own: dict[Any, Tensor] = {}
        for leaf, one in outer.leaves():
            if ("input", (leaf[1], index)) in found:
                own[leaf] = found["input", (leaf[1], index)]
            if leaf not in found:
                continue
            dimension = dimensions.get(leaf[1])
            if dimension is None:
                own |= {leaf: found[leaf]} if index == 0 else {}
                continue
            size = one.shape[dimension]
            own[leaf] = found[leaf].narrow(dimension, starts[leaf], size)
            starts[leaf] += size
        yield own


@final
class OuterPass:
    """Runs prologue, epilogue and the prologue backward."""

    def __init__(self, parts: Parts, *, puts_off: bool | None = None) -> None:
        """`puts_off` says whether logits may be; None: on an accelerator."""
        self._partition, self._device = parts.partition, parts.device
        self._server, self._transfer = parts.server, parts.transfer
        self.loss_function = parts.loss_function
        # Elsewhere bits come first.
        self.may_put_off = parts.device.torch_device.type != "cpu" if puts_off is None else puts_off
        self._placeholders: dict[str, Tensor] = {}

    def bind(self, slots: str) -> dict[str, Tensor]:
        """Let the code see what is in the slots, and placeholders for what is not."""
        bound: dict[str, Tensor] = dict(self._all_placeholders())
        for unit in _outer_units(slots):
            trained = self._server.units[unit].form.trained.names
            bound |= leaves(self._transfer.views(unit, f"S{unit}"), trained)
        self._partition.skeleton.bind(bound)
        return bound

    def bind_only(self, present: Mapping[str, Tensor]) -> None:
        """Let the code see these, and placeholders for everything else."""
        self._partition.skeleton.bind({**self._all_placeholders(), **present})

    def _all_placeholders(self) -> dict[str, Tensor]:
        if not self._placeholders:
            for name, unit in self._server.units.items():
                if name.startswith("L"):
                    continue
                for owner in unit.form.owners:
                    nothing = unit.form.nothing(owner, self._device.torch_device)
                    self._placeholders[owner] = nothing
        return self._placeholders

    def prologue(self, step: Step, inputs: Microbatch, host: Microbatch, outer: Outer) -> Recording:
        """Run the code before a stack; with graph when training: that shows what requires one.

        Args:
            step: by whose program it runs.
            inputs: the microbatch, on the device.
            host: the same on the host.
            outer: what the code is given besides.
        """
        program = step.program
        answers = Answers(
            rows=self.rows_of(program, inputs, outer.rows), heads={}, absent=self._absent()
        )
        watched = answers if program.facts.alone else contextlib.nullcontext()
        with torch.set_grad_enabled(step.training), watched, self._mirrored(inputs, host):
            recording = self._partition.prologue(
                inputs, program.route, stack=outer.stack, delivered=outer.delivered
            )
        if outer.stack < program.route.num_stacks - 1:
            for rows in outer.rows:
                recording.ride(rows)
        return recording

    def rows_of(
        self, program: Program, inputs: Microbatch, rows: Sequence[Tensor]
    ) -> dict[int, Callable[[Lookup], Tensor]]:
        """Answers to lookups in tables that are not there, by `id` of what stands for them."""
        waiting = list(zip(program.lookups, rows, strict=False))

        def answer(owner: str) -> Callable[[Lookup], Tensor]:
            def found(lookup: Lookup) -> Tensor:
                for index, (expected, leaf) in enumerate(waiting):
                    if expected.owner == owner and lookup.is_by(inputs[expected.name]):
                        del waiting[index]
                        return leaf.view(*lookup.ids.shape, leaf.shape[-1])
                raise RuntimeError(
                    f"the model looks up rows of {owner!r} with a tensor of shape "
                    f"{tuple(lookup.ids.shape)} that is not in the batch, which it did not do for "
                    "the first batch. Pass execution=l2l.Execution(embedding='device') to keep the "
                    "table on the device."
                )

            return found

        owners = {one.owner for one in program.lookups}
        return {id(self._placeholders[owner]): answer(owner) for owner in owners}

    def _mirrored(
        self, inputs: Microbatch, host: Microbatch
    ) -> contextlib.AbstractContextManager[object]:
        if self._device.torch_device.type == "cpu":  # nobody waits
            return contextlib.nullcontext()
        return HostMirror(inputs, host)

    def _absent(self) -> dict[int, str]:
        return {id(tensor): owner for owner, tensor in self._placeholders.items()}

    def run_epilogue(
        self,
        inputs: Microbatch,
        delivered: Tensor | Mapping[Key, Tensor],
        route: Route | None = None,
        *,
        alone: bool,
        host: Microbatch | None = None,
        heads: Mapping[int, Head | None] | None = None,
        asked: Asked | None = None,
    ) -> Any:
        """Run the model's code after the layers, perhaps without the prologue's units (`alone`).

        Losses of `heads` that something stands for are added to `asked`.
        """
        mirror = self._mirrored(inputs, host or {})
        if not alone:
            with mirror:
                return self._partition.epilogue(inputs, delivered, route)
        tables = [owner for owner in self._partition.tables if owner in self._placeholders]
        unseen: dict[int, Callable[[Lookup], Tensor]] = {
            id(self._placeholders[owner]): _no_rows for owner in tables
        }
        asked = [] if asked is None else asked
        answers = Answers(rows=unseen, heads=heads or {}, absent={}, asked=asked)

        def begun() -> None:
            unseen.clear()
            answers.absent = self._absent()

        with answers, mirror:
            return self._partition.epilogue(inputs, delivered, route, on_delivery=begun)

    def ask(self, step: Step, m: int, outer: Outer, inputs: Microbatch) -> Question:
        """Run the model's code after the layers, and see what loss of its head it asks for.

        The head is not there: it comes in slices.
        """
        head, host, route = step.program.facts.head, step.microbatches[m], step.program.route
        assert head is not None
        asked: Asked = []
        outputs = self.run_epilogue(
            inputs,
            outer.delivered,
            route,
            alone=True,
            host=host,
            heads={id(self._placeholders[head.owner]): None},
            asked=asked,
        )
        question = asked[0][0] if len(asked) == 1 else None
        if question is not None and self.loss_function is None:
            given = [leaf for _, leaf in outer.leaves()]
            question = question.made_into(require_loss(outputs), given)
        if question is None:
            raise RuntimeError(
                "the model makes something else of its head's loss than it did when it was tried. "
                "Pass execution=l2l.Execution(overrides={'num_head_slices': 0}) to keep its head "
                "whole."
            )
        return question

    def epilogue(
        self,
        step: Step,
        m: int,
        outer: Outer,
        *,
        inputs: Microbatch,
        bound: Mapping[str, Tensor],
        slots: str,
        gradients: str,
        loss_scale: float,
        host: Microbatch | None = None,
    ) -> dict[Any, Tensor]:
        """The losses of a microbatch, piece by piece, each with its backward pass.

        Args:
            step: whose losses and gradients are added to.
            m: the microbatch.
            outer: what the layers have returned.
            inputs: the microbatch, on the device.
            bound: what the code sees, by owner (`bind`).
            slots: weight slots of the units here.
            gradients: gradient slots of the units here.
            loss_scale: what the loss is multiplied with.
            host: all rows, of a joint loss.

        Returns:
            gradients of what the layers have returned, by the names of `Outer.leaves`.
        """
        units = _outer_units(gradients)
        collected: dict[Any, Tensor] = {}
        known: dict[Any, Tensor] = {}  # of the batch, what earlier pieces have found
        for part, own, on_device, share in self._cut(step, m, outer, inputs, host):
            piece = outer if part is None else outer.piece(part)
            heads = self._heads(step, bound, slots, trained=units, scale=share * loss_scale)
            asked: Asked = []
            outputs = self._outputs(step, piece, on_device, own, heads, asked)
            loss = self.take_loss(step, m, outputs, on_device, share, asked)
            if step.program.shape.fused and step.outline is None:
                step.outline = Outline.of(outputs, require_loss(outputs))
            if loss_scale != 1.0:
                loss = loss.float() * loss_scale  # a float16 cannot hold the product
            del outputs
            wanted: dict[Any, Tensor] = {
                owner: bound[owner]
                for unit in units
                for owner in self._server.units[unit].form.trained.names
            }
            leaves = {leaf: one for leaf, one in piece.leaves() if one.requires_grad}
            found = take_gradients(
                [loss], [torch.ones_like(loss)], {**wanted, **leaves}, sums=known
            )
            known = {leaf: found[leaf] for leaf in leaves if leaf in found and leaf[0] == "input"}
            for unit in units:
                own = {
                    n: found[n] for n in self._server.units[unit].form.trained.names if n in found
                }
                received = step.received.setdefault(unit, set())
                if own:
                    self._transfer.accumulate(unit, f"G{unit}", own, received=received)
            of_leaves = {leaf: found[leaf] for leaf in leaves if leaf in found}
            if part is None:
                return of_leaves
            for leaf, gradient in of_leaves.items():
                if leaf in known:
                    collected[leaf] = gradient
                    continue
                whole = next(iter(outer.ends.values()))
                if leaf not in collected:
                    collected[leaf] = torch.zeros_like(whole)
                part.of(collected[leaf]).copy_(gradient)
        return collected

    def _outputs(
        self,
        step: Step,
        outer: Outer,
        inputs: Microbatch,
        host: Microbatch,
        heads: Mapping[int, Head],
        asked: Asked | None = None,
    ) -> Any:
        program = step.program
        return self.run_epilogue(
            inputs,
            outer.delivered,
            program.route,
            alone=program.facts.alone,
            host=host,
            heads=heads,
            asked=asked,
        )

    def score(
        self,
        step: Step,
        m: int,
        outer: Outer,
        *,
        inputs: Microbatch,
        bound: Mapping[str, Tensor],
        slots: str,
        host: Microbatch | None = None,
    ) -> None:
        """The losses of a microbatch, without gradients; arguments as for `epilogue`."""
        heads = self._heads(step, bound, slots, trained=[], scale=1.0)
        for part, own, on_device, share in self._cut(step, m, outer, inputs, host):
            piece = outer if part is None else outer.piece(part)
            outputs = self._outputs(step, piece, on_device, own, heads)
            self.take_loss(step, m, outputs, on_device, share)

    def _cut(
        self,
        step: Step,
        m: int,
        outer: Outer,
        inputs: Microbatch,
        all_rows: Microbatch | None = None,
    ) -> Iterator[tuple[Piece | None, Microbatch, Microbatch, float]]:
        """Pieces with their part of the batch, on the host and on the device, and their share.

        A piece that is the whole microbatch is None.
        """
        if step.num_own is not None and m >= step.num_own:
            return
        if all_rows is not None:
            yield None, all_rows, inputs, 1.0
            return
        host: Mapping[str, Any] = step.microbatches[m]
        rule, program, facts = step.rule, step.program, step.program.facts
        whole = rule is Rule.UNKNOWN or not facts.alone or any(facts.changing)
        whole = whole or not outer.is_one_hidden_state or not program.route.is_straight
        hidden = next(iter(outer.ends.values()), None)
        found: list[Piece] = []
        if not whole and hidden is not None:
            length = hidden.shape[1] if hidden.dim() > 2 else 1
            tokens = program.part_tokens if facts.puts_off else program.piece_tokens
            if tokens is not None and rule is Rule.ROWS and _ignores(host):
                tokens = None  # what the loss ignores is not counted, so pieces cannot be weighed
            if num_rows(host) != hidden.shape[0]:
                tokens = None  # nobody knows which rows of the one are which of the other
            within_rows = facts.within_rows and not has_flat_numbers(host, rows=hidden.shape[0])
            found = pieces(hidden.shape[0], length, tokens=tokens, within_rows=within_rows)
        within = any(piece.positions is not None for piece in found)
        if within and rule is Rule.SHIFTED_LABELS:
            host, inputs = with_shifted_labels(host), with_shifted_labels(inputs)
        if len(found) <= 1:
            if (share := step.share(host)) != 0.0:
                yield None, dict(host), inputs, share
            return
        for piece in found:
            part = piece.cut(host, length)
            if within and rule is Rule.SHIFTED_LABELS:
                share = int((part["labels"] != IGNORED).sum()) / step.total
            else:
                share = step.share(part)
            if share != 0.0:  # without labels a loss is 0/0 and has no part in N
                yield piece, part, piece.cut(inputs, length), share

    def take_loss(
        self,
        step: Step,
        m: int,
        outputs: Any,
        inputs: Microbatch,
        share: float,
        asked: Asked | None = None,
    ) -> Tensor:
        """Note the loss of a piece, with what stands for parts of it; what is differentiated."""
        weight: Any = None
        if self.loss_function is None:
            loss = completed(require_loss(outputs), asked or [])
        else:
            loss, weight = given_loss(self.loss_function, outputs, inputs)
        if weight is not None and not step.divide_by_weight:
            loss, weight = loss / weight, None
        weight = 1.0 if weight is None else weight
        scaled = loss * share
        step.device_losses[m, 0] += scaled.detach()
        step.device_losses[m, 1] += weight.detach() if isinstance(weight, Tensor) else weight
        return scaled

    def _heads(
        self,
        step: Step,
        bound: Mapping[str, Tensor],
        slots: str,
        *,
        trained: Sequence[str],
        scale: float,
    ) -> dict[int, Head]:
        """Weights whose products are put off; gradients are wanted of `trained` units."""
        heads: dict[int, Head] = {}
        for unit in _outer_units(slots) if step.program.facts.puts_off else ():
            form = self._server.units[unit].form
            for owner in form.owners:
                if bound[owner].dim() != 2 or owner in form.formats:
                    continue
                add = None
                if unit in trained and owner in form.trained.names:
                    received = step.received.setdefault(unit, set())
                    add = self._transfer.product_sum(unit, f"G{unit}", owner, received=received)
                rows, compiled = step.program.piece_tokens, step.program.compiles_loss
                heads[id(bound[owner])] = Head(
                    add=add, scale=scale, num_rows=rows or MAX_PIECE_TOKENS, compiled=compiled
                )
        return heads

    def close(self) -> None:
        """Let go of the placeholders."""
        self._placeholders.clear()


def _outer_units(slots: str) -> list[str]:
    """Units around the layers, of slots as a line names them."""
    return [slot[1:] for slot in slots.split(",") if slot != NOTHING and slot[1] != "L"]


def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """What stands for values nobody looks at: NaN shows even through a factor of zero."""
    if not dtype.is_floating_point:
        return torch.zeros((), dtype=dtype, device=device)
    return torch.full((), torch.nan, dtype=dtype, device=device)


def _no_rows(lookup: Lookup) -> Tensor:
    shape = (*lookup.ids.shape, lookup.weight.shape[1])
    return _nothing(lookup.weight.dtype, lookup.weight.device).repeat(shape)


def _ignores(microbatch: Mapping[str, Any]) -> bool:
    """Whether there are targets that losses ignore."""
    return any(
        isinstance(value, Tensor)
        and not value.is_floating_point()
        and bool((value == IGNORED).any())
        for value in microbatch.values()
    )
