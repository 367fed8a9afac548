"""Before the first step: learn from a few rows what no inspection of the model can tell.

On two rows, with the real weights, on the device:

- how layers of each structure return their hidden state, by running one of each, and whether they
  draw random numbers;
- which buffers the prologue and the layers change when training;
- which units around the layers are read before them, which after, and which tables by lookup of an
  entry of the batch alone (interception.py);
- whether the epilogue does without the prologue: it must give the same bits with nothing of the
  prologue's units there. If it does not, all units around the layers stay for the whole step;
- what the model's loss averages over ([Note: counting rule] in loss.py), and whether it may be
  taken over positions of a row, piece by piece ([Note: pieces] in outer_pass.py).

Buffers that layers change stay on the device from then on, in the relay; all other buffers of a
layer travel with its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from l2l.batch import Microbatch, take_rows
from l2l.byte_size import format_bytes
from l2l.carving import CarvedModel, Recording, Returns, attributes_of
from l2l.compiled_layer import Compiler
from l2l.device import Device
from l2l.interception import Head, Readers, Reading
from l2l.layer_list import CutError
from l2l.lookup import TableLookup
from l2l.loss import IGNORED, Rule, find_rule, require_loss, trial_batch
from l2l.outer_pass import OuterFacts, OuterPass, Piece, with_shifted_labels
from l2l.parameter_server import ParameterServer, UnitForm
from l2l.relay import Relay
from l2l.schedule import OuterUnit

LARGE_UNIT_BYTES = 16 << 20  # a smaller table is not worth a lookup on the host
PROOF_TOLERANCE = 0.02  # of 16-bit losses and gradients
TRIAL_MARGIN = 1.5  # of weights, for what is computed with them
TRIAL_SCALE = 0.5  # a loss is multiplied with something in every step; so it is in the trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """How one unit around the layers is read."""

    before: bool  # the layers, other than by lookup
    after: bool
    lookups: tuple[TableLookup, ...] = ()


@final
class Rehearsal:
    """Runs the parts of the model once, slowly, and remembers what was learnt."""

    def __init__(
        self,
        *,
        carved: CarvedModel,
        server: ParameterServer,
        device: Device,
        relay: Relay,
        outer: OuterPass,
        compiler: Compiler,
    ) -> None:
        self._carved = carved
        self._server = server
        self._device = device
        self._relay = relay
        self._outer = outer
        self._compiler = compiler
        self._changing: dict[str, list[int]] = {}  # structure -> positions among buffers
        self.usage: dict[str, Usage] = {}
        self.alone = False
        self.done = False
        self.trial: Microbatch | None = None  # a few rows, on the host, once there were any
        self.rule: Rule | None = None
        self.rule_is_final = False

    def run(self, microbatch: Microbatch, *, needs_loss: bool) -> None:
        """Learn what is not known yet; `needs_loss` asks for the counting rule too."""
        wants_rule = needs_loss and not self.rule_is_final
        if self.done and not wants_rule:
            return
        self._server.settle_all()
        self.trial = {
            k: v.cpu() if isinstance(v, Tensor) else v
            for k, v in trial_batch(microbatch, cut=False).items()
        }
        if self._server.world.is_parallel:  # all ranks learn the same: from rows of the first
            rows = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in microbatch.items()}
            microbatch = self._server.world.gather_facts(take_rows(rows, 0, 2))[0]
        with self._device.private_random_state(), torch.no_grad():
            try:
                self._learn(trial_batch(microbatch, cut=True), wants_rule=wants_rule)
            except CutError:
                raise
            except torch.OutOfMemoryError as error:
                self._outer.bind_only({})
                raise ValueError(self._needs()) from error
            except Exception:  # a model of fixed length cannot run a few tokens
                self._learn(trial_batch(microbatch, cut=False), wants_rule=wants_rule)
        self._outer.bind_only({})  # let go of the copies on the device
        self.done = True

    def _needs(self) -> str:
        """What a device must have room for, of which this one has too little."""
        sizes = {name: unit.form.weight_layout.nbytes for name, unit in self._server.units.items()}
        around = sum(nbytes for name, nbytes in sizes.items() if not name.startswith("L"))
        largest = max(nbytes for name, nbytes in sizes.items() if name.startswith("L"))
        least = round(TRIAL_MARGIN * (around + largest)) + self._device.growth_bytes
        return (
            "the device has too little memory to try the model on a few rows: weights around the "
            f"layers take {format_bytes(around)}, the largest layer {format_bytes(largest)}. Give "
            f"device_memory={format_bytes(least)} or more, if the device has it."
        )

    def record(self, microbatch: Microbatch) -> Recording:
        """What a prologue run yields for these rows, on the device."""
        self._server.settle_all()
        with self._device.private_random_state(), torch.no_grad():
            self._carved.set_training(True)
            self._bind(self._weights())
            found = self._carved.prologue(self._on_device(microbatch))
        self._outer.bind_only({})
        return found

    def outer_units(self, looked_up: Callable[[str], bool]) -> tuple[OuterUnit, ...]:
        """Units around the layers, with the tables for which `looked_up` says so on the host."""
        forms = {name: unit.form for name, unit in self._server.units.items()}
        return outer_units(forms, self.usage, looked_up)

    def refuse_layer(self, module: nn.Module, position: int) -> None:
        """Refuse a module that does not run where a layer runs; nothing is known before a step.

        Raises:
            ValueError: it fails there, or returns something else than a hidden state.
        """
        if self.trial is None:
            return
        recording = self.record(self.trial)
        index = min(position, self._carved.num_layers - 1)
        dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)

        def given(tensor: Tensor) -> Tensor:
            return tensor.cpu().to(dtype) if tensor.is_floating_point() else tensor.cpu()

        assert recording.hidden is not None
        hidden, recorded = given(recording.hidden), [given(one) for one in recording.tensors]
        args, kwargs = recording.calls[index].arguments(hidden, recorded)
        try:
            with self._device.private_random_state(), torch.no_grad():
                output = Returns.unwrap(module(*args, **kwargs))
        except Exception as error:
            raise ValueError(
                f"{type(module).__name__} does not run in the place of layer {index}, whose hidden "
                f"state is {list(hidden.shape)}: {error}"
            ) from error
        if output.shape != hidden.shape:
            raise ValueError(
                f"{type(module).__name__} returns {list(output.shape)} where layer {index} is "
                f"given {list(hidden.shape)}. Expected the same shape."
            )

    def present_buffers(self) -> dict[str, Tensor]:
        """Buffers on the device, as training has left them."""
        found = dict(self._carved.skeleton.buffers())
        for buffers in self._relay.layer_buffers.values():
            found |= buffers
        return found

    def resident_buffer_bytes(self) -> int:
        """Bytes of `present_buffers`."""
        return sum(buffer.nbytes for buffer in self.present_buffers().values())

    # ----------------------------------------------------------------------------------------------

    def _weights(self) -> dict[str, Tensor]:
        """Copies of the weights around the layers, on the device."""
        found: dict[str, Tensor] = {}
        for name, unit in self._server.units.items():
            if not name.startswith("L"):
                weights = self._server.whole(name).weights.to(self._device.torch_device)
                found |= unit.form.weight_layout.views(weights)
        return found

    def _bind(self, weights: Mapping[str, Tensor]) -> None:
        self._carved.skeleton.bind(weights)

    def _on_device(self, microbatch: Mapping[str, Any]) -> Microbatch:
        return {
            name: value.to(self._device.torch_device) if isinstance(value, Tensor) else value
            for name, value in microbatch.items()
        }

    def _learn(self, trial: Microbatch, *, wants_rule: bool) -> None:
        trial = self._on_device(trial)
        weights = self._weights()
        self._bind(weights)
        if not self.done:
            self._learn_layers(trial)
            self._learn_usage(trial, weights)
        if wants_rule:
            self.rule, self.rule_is_final = self._learn_rule(trial)
            self._outer.facts.within_rows = self.alone and self._pieces_agree(trial)
            self._outer.facts.puts_off = (
                self.alone and self._outer.may_put_off and self._putting_off_agrees(trial, weights)
            )

    def _learn_layers(self, trial: Microbatch) -> None:
        outer = self._carved.skeleton.buffers()
        before = {name: buffer.clone() for name, buffer in outer.items()}
        self._carved.set_training(True)
        with torch.enable_grad():  # nothing requires gradients: only to see whether that is undone
            self._carved.prologue(trial, learn=self._run_layer)
        for structure in self._carved.changing_input:  # it would write into a cell
            self._compiler.refuse(structure)
        changing = frozenset(
            name for name, buffer in outer.items() if not torch.equal(buffer, before[name])
        )
        self._outer.facts = OuterFacts(changing=changing)
        for name in changing:
            outer[name].copy_(before[name])
        for index, structure in enumerate(self._carved.structures):
            tensors = self._carved.layer_tensors[index].buffers
            owners = list(tensors)
            own = [owners[position] for position in self._changing.get(structure, [])]
            if own:
                self._relay.layer_buffers[index] = {
                    owner: tensors[owner].detach().to(self._device.torch_device, copy=True)
                    for owner in own
                }

    def _run_layer(self, index: int, args: Any, kwargs: Any) -> Any:
        part, structure = self._carved.layers[index], self._carved.structures[index]
        unit = self._server.whole(f"L{index}")
        weights = unit.form.weight_layout.views(unit.weights.to(self._device.torch_device))
        part.bind(weights)
        before = [buffer.clone() for buffer in part.buffers().values()]
        given = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))
        attributes, form = attributes_of(part.module), pytree.tree_structure((args, kwargs))
        num_draws = self._device.random_numbers.num_draws
        self._device.seed(1)
        value = part.module(*args, **kwargs)
        if pytree.tree_structure((args, kwargs)) != form:
            raise CutError(
                f"layer {index} adds to its arguments. What layers leave there is lost: let them "
                "return what the model needs of them, as part of the hidden state."
            )
        written = {
            path.partition(".")[0] or name
            for (path, name), found in attributes_of(part.module).items()
            if (path, name) not in attributes or found != attributes[path, name]
        }
        for other, stub in zip(self._carved.structures, self._carved.stubs, strict=True):
            if other == structure:
                stub.note_written(written)
        changed = [
            position
            for position, (old, new) in enumerate(zip(before, part.buffers().values(), strict=True))
            if not torch.equal(old, new)
        ]
        self._changing[structure] = changed
        self._device.seed(1)
        again = part.module(*given[0], **given[1])
        repeats = self._repeats(value, again)
        if not repeats or self._device.random_numbers.num_draws > num_draws:
            self._compiler.note_random(structure)
        if changed:
            self._compiler.refuse(structure)
        return value

    def _repeats(self, first: Any, again: Any) -> bool:
        """Whether two runs from the same seed agree ([Note: others' generators])."""
        one, other = pytree.tree_leaves(first), pytree.tree_leaves(again)
        if len(one) == len(other) and all(map(_same, one, other)):
            return True
        self._device.random_numbers.seeds_defaults = True
        return False

    def _learn_usage(self, trial: Microbatch, weights: Mapping[str, Tensor]) -> None:
        outer = self._carved.skeleton.buffers()
        before = {name: buffer.clone() for name, buffer in outer.items()}
        first, second = Readers(weights), Readers(weights)
        self._device.seed(1)
        with first:
            recording = self._carved.prologue(trial)
        self._device.seed(1)
        again = self._carved.prologue(trial)
        self._repeats([recording.hidden, *recording.tensors], [again.hidden, *again.tensors])
        hidden = recording.hidden
        assert hidden is not None
        first.note_given([hidden, *recording.tensors])

        def start() -> None:
            second.watching = True

        second.watching = False
        self._device.seed(1)
        with second:
            expected = self._carved.epilogue(trial, hidden, on_delivery=start)
        self._device.seed(1)
        self._repeats(expected, self._carved.epilogue(trial, hidden))
        changed = any(not torch.equal(outer[name], value) for name, value in before.items())
        for name, value in before.items():
            outer[name].copy_(value)
        forms = {name: unit.form for name, unit in self._server.units.items()}
        usage = usage_of(forms, trial, first, second)
        self.alone = not changed and self._is_alone(trial, hidden, expected, weights, usage)
        if self.alone:
            self.usage = usage
        self._outer.facts = replace(self._outer.facts, alone=self.alone)

    def _is_alone(
        self,
        trial: Microbatch,
        hidden: Tensor,
        expected: Any,
        weights: Mapping[str, Tensor],
        usage: Mapping[str, Usage],
    ) -> bool:
        """Whether the epilogue gives the same without the units that only the prologue reads."""
        present = {
            owner: weights[owner]
            for name, one in usage.items()
            if one.after
            for owner in self._server.units[name].form.weight_layout.names
        }
        self._outer.facts = replace(self._outer.facts, alone=True)
        self._outer.bind_only(present)
        self._device.seed(1)
        try:
            found = self._outer.run_epilogue(trial, hidden)
        except CutError:
            raise
        except Exception:  # it reads what is not there
            return False
        finally:
            self._bind(weights)
        mine, theirs = pytree.tree_leaves(found), pytree.tree_leaves(expected)
        return len(mine) == len(theirs) and all(map(_same, mine, theirs))

    def _learn_rule(self, trial: Microbatch) -> tuple[Rule, bool]:
        self._carved.set_training(False)
        function = self._outer.loss_function
        if function is not None:
            hidden = self._carved.prologue(trial).hidden
            assert hidden is not None
            found = function(self._carved.epilogue(trial, hidden), trial)
            return (Rule.SUM_AND_WEIGHT if isinstance(found, tuple) else Rule.ROWS), True

        def loss(batch: Microbatch) -> float:
            hidden = self._carved.prologue(batch).hidden
            assert hidden is not None
            return float(require_loss(self._carved.epilogue(batch, hidden)))

        hidden = self._carved.prologue(trial).hidden
        assert hidden is not None
        try:
            return find_rule(trial, loss, is_single=hidden.dtype is torch.float32)
        except IndexError:  # the loss ignores another number than what the trial has put there
            return Rule.UNKNOWN, True

    def _pieces_agree(self, trial: Microbatch) -> bool:
        """Whether the loss, and its gradient, may be taken position by position."""
        labels = trial.get("labels")
        if self.rule not in (Rule.LABELS, Rule.SHIFTED_LABELS) or self._outer.loss_function:
            return False
        assert isinstance(labels, Tensor)
        self._carved.set_training(False)
        hidden = self._carved.prologue(trial).hidden
        if labels.dim() != 2 or hidden is None or hidden.is_nested or hidden.dim() != 3:
            return False
        length = labels.shape[1]
        if length < 4 or hidden.shape[1] != length:
            return False
        trial = {**trial, "labels": torch.where(labels == IGNORED, 0, labels)}
        whole = trial
        if self.rule is Rule.SHIFTED_LABELS:
            trial = with_shifted_labels(trial)
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(hidden.shape, generator=generator).to(hidden)
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
        near = abs(float(loss) - float(expected[0])) <= PROOF_TOLERANCE * abs(float(expected[0]))
        difference = (gradient - expected[1]).float().norm()
        return near and float(difference) <= PROOF_TOLERANCE * float(expected[1].float().norm())

    def _putting_off_agrees(self, trial: Microbatch, weights: Mapping[str, Tensor]) -> bool:
        """Whether loss and gradient are the same with logits put off, and any are.

        The gradient of the hidden state shows that of the logits, from which that of the head's
        weight is made too.
        """
        if self.rule in (None, Rule.UNKNOWN) or self._outer.loss_function is not None:
            return False
        self._carved.set_training(False)
        hidden = self._carved.prologue(trial).hidden
        assert hidden is not None
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(hidden.shape, generator=generator).to(hidden)
        used: list[Tensor] = []

        def add(outputs: Tensor, inputs: Tensor) -> None:
            used.append(outputs)

        head = Head(add=add, scale=TRIAL_SCALE, num_rows=5, compiled=False)
        matrices = [
            weights[owner]
            for name, one in self.usage.items()
            if one.after
            for owner in self._server.units[name].form.weight_layout.names
            if weights[owner].dim() == 2
        ]
        heads = {id(matrix): head for matrix in matrices}
        try:
            expected = self._loss_and_gradient(trial, noise)
            found = self._loss_and_gradient(trial, noise, heads=heads)
        except CutError:
            raise
        except Exception:  # the model's code does something else with its logits
            return False
        return bool(used) and all(map(_close, found, expected))

    def _loss_and_gradient(
        self, batch: Microbatch, hidden: Tensor, *, heads: Mapping[int, Head] | None = None
    ) -> tuple[Tensor, Tensor]:
        leaf = hidden.detach().clone().requires_grad_()
        with torch.enable_grad():
            loss = require_loss(self._outer.run_epilogue(batch, leaf, heads=heads)).float()
            (gradient,) = torch.autograd.grad([loss * TRIAL_SCALE], [leaf])
        return loss.detach(), gradient


def _close(found: Tensor, expected: Tensor) -> bool:
    """Whether two results are the same but for rounding to 16 bits."""
    difference = (found.float() - expected.float()).norm()
    return float(difference) <= PROOF_TOLERANCE * float(expected.float().norm())


def outer_units(
    forms: Mapping[str, UnitForm], usage: Mapping[str, Usage], looked_up: Callable[[str], bool]
) -> tuple[OuterUnit, ...]:
    """Units around the layers, with the tables for which `looked_up` says so on the host."""
    found = []
    for name, form in forms.items():
        if name.startswith("L"):
            continue
        one = usage.get(name, Usage(before=True, after=True))
        on_host = bool(one.lookups) and not one.before and looked_up(name)
        found.append(
            OuterUnit(
                name=name,
                in_prologue=one.before or (bool(one.lookups) and not on_host),
                in_epilogue=one.after,
                looked_up=on_host,
                trained=bool(form.trained.names),
            )
        )
    return tuple(found)


def usage_of(
    forms: Mapping[str, UnitForm], batch: Mapping[str, Any], before: Readers, after: Readers
) -> dict[str, Usage]:
    """How every unit around the layers was read before and after them."""
    return {
        name: _usage(name, form.weight_layout.names, batch, before, after)
        for name, form in forms.items()
        if not name.startswith("L")
    }


def _usage(
    unit: str,
    owners: tuple[str, ...],
    batch: Mapping[str, Any],
    before: Readers,
    after: Readers,
) -> Usage:
    lookups: list[TableLookup] = []
    otherwise = False
    for owner in owners:
        reading = before.readings.get(owner, Reading())
        otherwise |= reading.otherwise
        for lookup in reading.lookups:
            names = [
                name
                for name, value in batch.items()
                if isinstance(value, Tensor) and lookup.is_by(value)
            ]
            names.sort(key=lambda name: batch[name] is not lookup.ids)  # entries may share memory
            otherwise |= not names
            lookups += [
                TableLookup(unit=unit, owner=owner, name=name, padding_idx=lookup.padding_idx)
                for name in names[:1]
            ]
    return Usage(
        before=otherwise,
        after=any(owner in after.readings for owner in owners),
        lookups=tuple(lookups),
    )


def _same(first: Any, second: Any) -> bool:
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return isinstance(first, Tensor) == isinstance(second, Tensor)
    if first.shape != second.shape:
        return False
    return torch.equal(first.isnan(), second.isnan()) and torch.equal(
        torch.nan_to_num(first), torch.nan_to_num(second)
    )
