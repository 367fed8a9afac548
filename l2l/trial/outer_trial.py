"""The code before and after the layers, run on a few rows: what it reads, what the loss counts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from l2l.device import Device
from l2l.model import (
    IGNORED,
    NOT_COUNTED,
    Asked,
    CutError,
    Head,
    Key,
    LossFunction,
    Microbatch,
    Partition,
    Question,
    Readers,
    Reading,
    Route,
    Rule,
    TokenLoss,
    Words,
    add_words,
    coefficients,
    completed,
    find_rule,
    first_sums,
    given_loss,
    like,
    log_probabilities,
    move_batch,
    require_loss,
    same,
    take_rows,
    unwind_words,
    watching,
)
from l2l.parameter_server import ParameterServer, UnitForm
from l2l.run import HeadOfWords, OuterPass, Piece, TableLookup, Usage, with_shifted_labels
from l2l.trial.layer_trial import TRIAL_SEED, LayerTrial, repeats, same_rows

logger = logging.getLogger("l2l")

NO_ENDS: Mapping[Key, Tensor] = {}
PROOF_TOLERANCE = 0.02  # of 16-bit losses and gradients
ROW_TOLERANCE = {True: 0.02, False: 0.1}  # in float32; in 16 bits, where tokens change experts
TRIAL_SCALE = 0.5  # a loss is multiplied with something in every step; so it is in the trial


@final
class KeptBuffers:
    """The buffers around the layers, with the values that they have now."""

    def __init__(self, partition: Partition) -> None:
        self._skeleton = partition.skeleton
        self.buffers = self._skeleton.buffers()
        self._before = {owner: buffer.clone() for owner, buffer in self.buffers.items()}

    def now(self) -> dict[str, Tensor]:
        """Copies of their present values, also of those that the model's code has replaced."""
        self._skeleton.take_over(self.buffers)
        return {owner: buffer.clone() for owner, buffer in self.buffers.items()}

    def put_back(self) -> None:
        """Bind these buffers again, with the values that they had."""
        self._skeleton.bind(self.buffers)
        for owner, buffer in self._before.items():
            self.buffers[owner].copy_(buffer)

    def changed(
        self, now: Mapping[str, Tensor], since: Mapping[str, Tensor] | None = None
    ) -> frozenset[str]:
        """Buffers that have other values now than they had when they were kept, or since."""
        before = self._before if since is None else since
        return frozenset(o for o, value in now.items() if not torch.equal(value, before[o]))


@final
@dataclass(frozen=True, slots=True)
class OuterTrial:
    """Runs the model without its layers; all weights around them must be bound."""

    _partition: Partition
    _server: ParameterServer
    _device: Device
    _outer: OuterPass
    _layers: LayerTrial
    _route: Route

    def changing(self, trial: Microbatch) -> tuple[frozenset[str], ...]:
        """Buffers that the code before each stack changes, and that before it does not."""
        found: list[frozenset[str]] = []
        kept = KeptBuffers(self._partition)
        _, delivered = self._layers.through(trial, self._route)
        for stack in range(self._route.num_stacks):
            kept.put_back()
            self._partition.prologue(trial, self._route, stack=stack, delivered=delivered)
            now = kept.changed(kept.now())
            found.append(now - frozenset[str]().union(*found))
        kept.put_back()
        return tuple(found)

    def rows_in(self, trial: Microbatch) -> tuple[bool, dict[Key, int]]:
        """Whether what the layers return for a row depends on others, and which dimension is rows.

        Of what has no rows, there is none.
        """
        kept, draws = KeptBuffers(self._partition), self._device.random_numbers.num_draws
        both = self._layers.through(trial, self._route)[1]
        is_random = self._device.random_numbers.num_draws > draws
        if is_random:  # masks differ with the number of rows
            self._partition.set_training(False)
            both = self._layers.through(trial, self._route)[1]
        try:
            one = self._layers.through(take_rows(trial, 0, 1), self._route)[1]
        except Exception:  # the model takes no single row
            return False, {key: 0 for key in both if key not in self._route.shared}
        finally:
            self._partition.set_training(True)
            kept.put_back()
        dimensions: dict[Key, int] = {}
        is_mixed = False
        for key in self._route.needs[-1] & one.keys():
            sizes = zip(one[key].shape, both[key].shape, strict=True)
            place = next((i for i, (a, b) in enumerate(sizes) if a != b), None)
            if place is not None:
                dimensions[key] = place
                first = both[key].narrow(place, 0, one[key].shape[place])
                is_float = first.is_floating_point()
                is_mixed |= is_float and not same_rows(one[key], first)
        return is_mixed, dimensions

    def learn_usage(
        self, trial: Microbatch, weights: Mapping[str, Tensor], changing: Collection[str]
    ) -> dict[str, Usage] | None:
        """How each unit is read; None if the epilogue needs what the prologue reads.

        Args:
            trial: a few rows, on the device.
            weights: all those around the layers, as they are bound.
            changing: buffers that the prologue changes.
        """
        kept, partition = KeptBuffers(self._partition), self._partition
        first, second = Readers({**weights, **kept.buffers}), Readers(weights)

        route, last = self._route, self._route.num_stacks - 1
        recordings, delivered = self._layers.through(trial, route)
        kept.put_back()

        def prologue() -> list[Tensor | None]:
            recording = partition.prologue(trial, route, stack=last, delivered=delivered)
            return [recording.hidden, *recording.tensors]

        def start() -> None:
            second.watching = True

        def watched(readers: Readers, run: Callable[[], Any]) -> tuple[Any, dict[str, Tensor]]:
            """What a run gives, and buffers after it; once more to see whether it repeats."""
            self._device.seed(TRIAL_SEED)
            with readers:
                found = run()
            after = kept.now()
            kept.put_back()
            self._device.seed(TRIAL_SEED)
            repeats(self._device, found, run())
            kept.put_back()
            return found, after

        made, between = watched(first, prologue)
        first.note(made)
        for recording in recordings:
            first.note(recording.tensors)
        if route.is_straight:  # what enters the layers stands for what leaves them
            delivered = {key: one for key in route.ends(last) if (one := made[0]) is not None}
        second.watching = False  # until the layers end
        expected, after = watched(
            second, lambda: partition.epilogue(trial, delivered, route, on_delivery=start)
        )
        for owner in sorted(kept.changed(after, since=between)):
            if owner in first.readings or owner in changing:
                raise CutError(
                    f"the model reads or changes buffer {owner!r} before its layers and changes it "
                    "after them. The code before the layers runs for all microbatches first, so "
                    "its values would differ from plain PyTorch. Use two buffers instead."
                )
        forms = {name: unit.form for name, unit in self._server.units.items()}
        usage = usage_of(forms, trial, first, second)
        is_alone = not kept.changed(after) and self._is_alone(
            trial, delivered, expected, weights, usage
        )
        return usage if is_alone else None

    def _is_alone(
        self,
        trial: Microbatch,
        delivered: Mapping[Key, Tensor],
        expected: Any,
        weights: Mapping[str, Tensor],
        usage: Mapping[str, Usage],
    ) -> bool:
        """Whether the epilogue gives the same without the units that only the prologue reads.

        Those that interludes read are there for the whole step, but for what is only looked up.
        """
        present = {owner: weights[owner] for owner in self.read_after(usage)}
        if not self._route.is_straight:
            present |= {owner: weights[owner] for owner in self._read_before(usage)}
        self._outer.bind_only(present)
        self._device.seed(TRIAL_SEED)
        try:
            found = self._outer.run_epilogue(trial, delivered, self._route, alone=True)
        except CutError:
            raise
        except Exception:  # it reads what is not there
            return False
        finally:
            self._partition.skeleton.bind(weights)
        return same(found, expected)

    def read_after(self, usage: Mapping[str, Usage]) -> list[str]:
        """What the epilogue's units hold."""
        forms = (self._server.units[n].form for n, one in usage.items() if one.after)
        return [owner for form in forms for owner in form.owners]

    def _read_before(self, usage: Mapping[str, Usage]) -> list[str]:
        """What units hold that the code before the layers reads, other than by lookup."""
        forms = (self._server.units[n].form for n, one in usage.items() if one.before)
        return [owner for form in forms for owner in form.owners]

    # ----------------------------------------------------------------------------------------------
    # The loss

    def _ends(self, batch: Microbatch) -> dict[Key, Tensor]:
        """What the layers return for these rows, or what stands for it."""
        return self._layers.through(batch, self._route)[1]

    def _epilogue(self, batch: Microbatch) -> Any:
        return self._partition.epilogue(batch, self._ends(batch), self._route)

    @property
    def _last(self) -> Key:
        """The hidden state that the last layer returns."""
        return self._route.ends(self._route.num_stacks - 1)[0]

    def measure(
        self, function: LossFunction, part: Microbatch, seed: int
    ) -> tuple[float, float, bool]:
        """The user's loss of some rows."""
        self._device.seed(seed)
        part = move_batch(part, self._device.torch_device)
        ends = self._ends(part)
        with watching(function) as seen:
            outputs = self._partition.epilogue(part, ends, self._route)
        total, weight = given_loss(function, seen(outputs), part)
        return float(total), 1.0 if weight is None else float(weight), _are_single(ends)

    def find_rule(self, trial: Microbatch) -> tuple[Rule, bool]:
        """What the loss averages over, and whether another batch cannot tell more."""
        function, ends = self._outer.loss_function, self._ends(trial)
        if function is not None:
            leaves = {key: _leaf(one) for key, one in ends.items()}
            with torch.enable_grad(), watching(function) as seen:
                outputs = self._partition.epilogue(trial, leaves, self._route)
            with torch.enable_grad():
                total, weight = given_loss(function, seen(outputs), trial)
            if not total.requires_grad:
                logger.warning(
                    "the function given as loss= returns a loss that requires no gradient: nothing "
                    "is trained by it. Does it detach what it is given?"
                )
            return (Rule.ROWS if weight is None else Rule.SUM_AND_WEIGHT), True

        def loss(batch: Microbatch) -> float:
            return float(require_loss(self._epilogue(batch)))

        left = self._route.needed_asides(self._route.num_stacks)
        if any(key not in self._route.constant for key in left):
            return Rule.UNKNOWN, True  # router losses are too small a share of a loss to be seen
        try:
            return find_rule(trial, loss, is_single=_are_single(ends))
        except CutError:
            raise
        except (IndexError, RuntimeError):  # the model does not take the labels of the trial
            return Rule.UNKNOWN, True

    def why_not_joint(self, trial: Microbatch, dimensions: Mapping[Key, int]) -> str | None:
        """Why what layers make of two rows is not made of what they make of each; None: it is.

        Only then may a loss be taken over what they make of all microbatches. Where random numbers
        are drawn, there is nothing to compare.

        Args:
            trial: two rows.
            dimensions: of rows, in what layers return for the code after them.
        """
        drawn = self._device.random_numbers.num_draws
        batches = [trial, *(take_rows(trial, row, row + 1) for row in range(2))]
        try:
            whole, *parts = (self._layers.through(one, self._route)[1] for one in batches)
        except Exception:  # the model takes no single row
            return None
        if self._device.random_numbers.num_draws > drawn:
            return None
        tolerance = ROW_TOLERANCE[_are_single(whole)]
        for key in sorted(self._route.needs[-1] & whole.keys()):
            own, dimension = [part[key] for part in parts], dimensions.get(key)
            made = own if dimension is None else [torch.cat(own, dimension)]
            if all(one.shape == whole[key].shape for one in made) and all(
                _close(one, whole[key], tolerance) for one in made
            ):
                continue
            if dimension is None:
                return (
                    "the layers return something for it that has no rows and depends on them (a "
                    "mean over rows, say), of which every microbatch has another. Return it for "
                    "every row"
                )
            return (
                "what the model makes of a row before its loss depends on the other rows (it takes "
                "a mean over rows, say), of which a microbatch has some. Compare rows in the loss"
            )
        return None

    def pieces_agree(self, trial: Microbatch, rule: Rule) -> bool:
        """Whether the loss, and its gradient, may be taken position by position."""
        if rule not in (Rule.LABELS, Rule.SHIFTED_LABELS) or self._outer.loss_function:
            return False
        if not self._route.is_straight:
            return False
        labels, hidden = trial["labels"], self._ends(trial)[self._last]
        if labels.dim() != 2 or hidden.is_nested or hidden.dim() != 3:
            return False
        length = labels.shape[1]
        if length < 4 or hidden.shape[1] != length:
            return False
        whole = trial = like(trial, {**trial, "labels": torch.where(labels == IGNORED, 0, labels)})
        if rule is Rule.SHIFTED_LABELS:
            trial = with_shifted_labels(trial)
        noise = _noise_like(hidden)
        try:
            expected = self._loss_and_gradient(whole, noise)
            total = int((trial["labels"] != IGNORED).sum())
            loss, gradient = torch.zeros(()), torch.zeros_like(noise)
            for row in range(noise.shape[0]):
                for positions in (slice(0, length // 3), slice(length // 3, length)):
                    piece = Piece(slice(row, row + 1), positions)
                    part = piece.cut(trial, length)
                    share = int((part["labels"] != IGNORED).sum()) / total
                    one, own = self._loss_and_gradient(part, piece.of(noise))
                    loss = loss + one.cpu() * share
                    piece.of(gradient).copy_(own * share)
        except Exception:  # the model's code does not take such pieces
            return False
        return all(map(_close, (loss, gradient), (expected[0].cpu(), expected[1])))

    def putting_off_agrees(self, trial: Microbatch, rule: Rule, matrices: Sequence[Tensor]) -> bool:
        """Whether loss and gradient are the same with logits put off, and any are.

        The gradient of the hidden state shows that of the logits, from which that of the head's
        weight is made too.

        Args:
            trial: a few rows, on the device.
            rule: what the loss averages over.
            matrices: weights that may be the head's.
        """
        if self._outer.loss_function is not None:
            return False
        if not self._route.gives[self._route.end(self._route.num_stacks - 1)]:
            return False
        ends, used = self._ends(trial), list[Tensor]()
        noise = _noise_like(ends[self._last])

        def add(outputs: Tensor, inputs: Tensor) -> None:
            used.append(outputs)

        head = Head(add=add, scale=TRIAL_SCALE, num_rows=5, compiled=False)
        heads = {id(matrix): head for matrix in matrices}
        try:
            expected = self._loss_and_gradient(trial, noise, ends)
            found = self._loss_and_gradient(trial, noise, ends, heads=heads)
        except CutError:
            raise
        except Exception:  # the model's code does something else with its logits
            return False
        return bool(used) and all(map(_close, found, expected))

    def find_head(self, trial: Microbatch, weights: Mapping[str, Tensor]) -> HeadOfWords | None:
        """A head whose loss, and gradient, are the same slice by slice; None: there is none.

        Args:
            trial: a few rows, on the device.
            weights: what the epilogue reads, by owner.
        """
        end = self._route.gives[self._route.end(self._route.num_stacks - 1)]
        function = self._outer.loss_function
        if not end or not (function is None or isinstance(function, TokenLoss)):
            return None
        owners = {id(weight): owner for owner, weight in weights.items()}
        trial = _with_all_labels(trial)
        ends = {key: _leaf(one) for key, one in self._ends(trial).items()}
        leaf = _noise_like(ends[self._last]).requires_grad_()
        heads, asked = {id(w): None for w in weights.values() if w.dim() == 2}, Asked()
        try:
            expected = self._loss_and_gradient(trial, leaf.detach(), ends)
            with torch.enable_grad():
                delivered = {**ends, self._last: leaf}
                outputs = self._outer.run_epilogue(
                    trial, delivered, self._route, alone=True, heads=heads, asked=asked
                )
                question = asked[0][0] if len(asked) == 1 else None
                if question is not None and function is None:
                    loss = require_loss(outputs)  # 0: nothing is added to the head's
                    own = question.made_into(loss, [*delivered.values()])
                    question = own if not loss else None
        except CutError:
            raise
        except Exception:  # the model's code does something else with its logits
            return None
        if question is None or (function is not None and not _is_by_rows(question, trial)):
            return None
        head = HeadOfWords(owners[id(question.weight)], owners.get(id(question.bias)))
        is_known = (question.bias is None) == (head.bias is None)
        units = self._server.units.items()
        tables = [unit.form.owners for name, unit in units if name.startswith("T")]
        if not is_known or (head.owner,) not in tables:
            return None
        found = _in_slices(question, leaf)
        return head if all(map(_close, found, expected)) else None

    def _loss_and_gradient(
        self,
        batch: Microbatch,
        hidden: Tensor,
        ends: Mapping[Key, Tensor] = NO_ENDS,
        *,
        heads: Mapping[int, Head] | None = None,
    ) -> tuple[Tensor, Tensor]:
        leaf = hidden.detach().clone().requires_grad_()
        delivered = {**ends, self._last: leaf}
        asked = Asked()
        with torch.enable_grad():
            outputs = self._outer.run_epilogue(
                batch, delivered, self._route, alone=True, heads=heads, asked=asked
            )
            loss = completed(require_loss(outputs), asked).float()
            (gradient,) = torch.autograd.grad([loss * TRIAL_SCALE], [leaf])
        return loss.detach(), gradient


def _is_by_rows(question: Question, trial: Microbatch) -> bool:
    """Whether the loss takes the labels of one row after the other."""
    labels = trial.get("labels")
    if not isinstance(labels, Tensor) or labels.dim() != 2 or len(question.labels) % len(labels):
        return False
    asked = [row[row != NOT_COUNTED].tolist() for row in question.labels.view(len(labels), -1)]
    targets = [
        [row[row != question.ignored].tolist() for row in one] for one in (labels, labels[:, 1:])
    ]
    return asked in targets


def _with_all_labels(batch: Microbatch) -> Microbatch:
    """The same with none of its labels ignored: those of a few tokens may all be."""
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return batch
    return like(batch, {**batch, "labels": torch.where(labels == IGNORED, 0, labels)})


def _in_slices(question: Question, leaf: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of a head in two slices, and the gradient of what the epilogue was given."""
    given, labels = question.given.detach(), question.labels
    half, counts = -(-len(question.weight) // 2), question.counts(1.0)
    slices = [
        Words(
            weight=question.weight[start : start + half],
            first=start,
            bias=None if question.bias is None else question.bias[start : start + half],
            pointwise=question.pointwise,
        )
        for start in (0, half)
    ]
    sums = first_sums(counts)
    for words in slices:
        sums = add_words(words, given, labels, sums)
    found, norm = log_probabilities(sums)
    of_tokens, gradient = coefficients(norm, -counts * TRIAL_SCALE), None
    for words in slices:
        gradient = unwind_words(words, given, labels, of_tokens, so_far=gradient)
    (of_leaf,) = torch.autograd.grad([question.given], [leaf], [gradient])
    return -(found * counts).sum(), of_leaf


def _are_single(ends: Mapping[Key, Tensor]) -> bool:
    """Whether layers compute in float32."""
    return all(one.dtype is torch.float32 for one in ends.values() if one.is_floating_point())


def _close(found: Tensor, expected: Tensor, tolerance: float = PROOF_TOLERANCE) -> bool:
    """Whether two results are the same but for rounding, by default to 16 bits."""
    difference = (found.float() - expected.float()).norm()
    return float(difference) <= tolerance * float(expected.float().norm())


def _leaf(tensor: Tensor) -> Tensor:
    """The same as a leaf of a graph, as far as it may be one."""
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _noise_like(hidden: Tensor) -> Tensor:
    """A hidden state of random numbers, always the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(hidden.shape, generator=generator).to(hidden)


def usage_of(
    forms: Mapping[str, UnitForm], batch: Mapping[str, Any], before: Readers, after: Readers
) -> dict[str, Usage]:
    """How every unit around the layers was read before and after them."""
    found = {}
    for unit, form in forms.items():
        if unit.startswith("L"):
            continue
        owners, lookups = form.owners, list[TableLookup]()
        readings = {owner: before.readings.get(owner, Reading()) for owner in owners}
        otherwise = any(reading.otherwise for reading in readings.values())
        for owner, lookup in ((o, one) for o, r in readings.items() for one in r.lookups):
            entries = [(k, v) for k, v in batch.items() if isinstance(v, Tensor)]
            entries.sort(key=lambda entry: entry[1] is not lookup.ids)  # they may share memory
            name = next((name for name, value in entries if lookup.is_by(value)), None)
            if name is None:
                otherwise = True
            else:
                padding = lookup.padding_idx
                lookups.append(TableLookup(unit=unit, owner=owner, name=name, padding_idx=padding))
        after_too = any(owner in after.readings for owner in owners)
        found[unit] = Usage(before=otherwise, after=after_too, lookups=tuple(lookups))
    return found
