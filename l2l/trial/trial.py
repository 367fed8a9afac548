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

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from l2l.device import Device, format_bytes
from l2l.model import (
    IGNORED,
    Compiler,
    CutError,
    Head,
    Measured,
    Microbatch,
    Partition,
    Readers,
    Reading,
    Recording,
    Returns,
    Rule,
    State,
    attributes_of,
    compare_cut_loss,
    find_rule,
    first_argument,
    named_arguments,
    num_elements,
    num_rows,
    objects_in,
    require_loss,
    states_of,
    take_rows,
    trial_batch,
)
from l2l.parameter_server import ParameterServer, UnitForm
from l2l.run import OuterFacts, OuterPass, Piece, Relay, TableLookup, with_shifted_labels
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
class Trial:
    """Runs the parts of the model once, slowly, and remembers what was learnt."""

    def __init__(
        self,
        *,
        partition: Partition,
        server: ParameterServer,
        device: Device,
        relay: Relay,
        outer: OuterPass,
        compiler: Compiler,
    ) -> None:
        self._partition = partition
        self._server = server
        self._device = device
        self._relay = relay
        self._outer = outer
        self._compiler = compiler
        self._changing: dict[str, list[int]] = {}  # structure -> positions among buffers
        self._left: dict[int, tuple[State, int]] = {}  # objects before a layer changed them
        self._checked_rows = {0}  # of microbatches that a given loss may be cut into; 0: of one
        self._reshaped: str | None = None  # a layer that changes the shape of the hidden state
        self.usage: dict[str, Usage] = {}
        self.alone = False
        self.done = False
        self.trial: Microbatch | None = None  # a few rows, on the host, once there were any
        self.cut = True  # whether a few tokens of a row were enough
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
        few, whole = trial_batch(microbatch, cut=True), trial_batch(microbatch, cut=False)
        with self._device.private_random_state(), torch.no_grad():
            try:
                self._learn(few, wants_rule=wants_rule)
            except torch.OutOfMemoryError as error:
                self._outer.bind_only({})
                raise ValueError(self._needs()) from error
            except Exception as error:  # a model of fixed length cannot run a few tokens
                if isinstance(error, CutError) and num_elements(few) == num_elements(whole):
                    raise
                self.cut = False
                self._learn(whole, wants_rule=wants_rule)
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
        with self._device.private_random_state(), torch.no_grad(), self._untouched():
            self._partition.set_training(True)
            self._bind(self._weights())
            found = self._partition.prologue(self._on_device(microbatch))
        self._outer.bind_only({})
        return found

    def why_not_cut(self, microbatches: Sequence[Microbatch]) -> str | None:
        """Why a given loss over these microbatches is not that of the batch; None: it is.

        As with the model's own ([Note: counting rule] in loss.py), the layers are left out.
        """
        function, rule = self._outer.loss_function, self.rule
        if function is None or rule is None:
            return None
        rows = num_rows(microbatches[0]) if len(microbatches) > 1 else 0
        is_known = rows in self._checked_rows
        if all(self._server.world.gather_facts(is_known)):  # ranks bring their weights together
            return None
        self._server.settle_all()

        def loss(part: Microbatch, seed: int) -> Measured:
            self._device.seed(seed)
            part = self._on_device(part)
            hidden = self._partition.prologue(part).hidden
            assert hidden is not None
            found = function(self._partition.epilogue(part, hidden), part)
            total, weight = found if isinstance(found, tuple) else (found, 1.0)
            is_single = hidden.dtype is torch.float32
            return Measured(total=float(total), weight=float(weight), is_single=is_single)

        with self._device.private_random_state(), torch.no_grad(), self._untouched():
            self._partition.set_training(False)
            self._bind(self._weights())
            verdict = None if is_known else compare_cut_loss(rule, microbatches, loss)
        self._outer.bind_only({})
        if verdict is None:
            self._checked_rows.add(rows)
        return verdict

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
        index = min(position, self._partition.num_layers - 1)
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
        found = dict(self._partition.skeleton.buffers())
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
                whole = self._server.whole(name).weights
                weights = whole.to(self._device.torch_device, copy=True)
                found |= unit.form.weight_layout.views(weights)
        return found

    def _bind(self, weights: Mapping[str, Tensor]) -> None:
        self._partition.skeleton.bind(weights)

    def _on_device(self, microbatch: Mapping[str, Any]) -> Microbatch:
        return {
            name: value.to(self._device.torch_device) if isinstance(value, Tensor) else value
            for name, value in microbatch.items()
        }

    def _learn(self, trial: Microbatch, *, wants_rule: bool) -> None:
        trial = self._on_device(trial)
        weights = self._weights()
        self._bind(weights)
        with self._untouched():
            if not self.done:
                self._learn_layers(trial)
                self._learn_usage(trial, weights)
            if not wants_rule:
                return
            self.rule, self.rule_is_final = self._learn_rule(trial)
            self._outer.facts.within_rows = self.alone and self._pieces_agree(trial)
            self._outer.facts.puts_off = (
                self.alone and self._outer.may_put_off and self._putting_off_agrees(trial, weights)
            )

    @contextlib.contextmanager
    def _untouched(self) -> Iterator[None]:
        """Leave buffers around the layers, and attributes, as they were, whatever happens."""
        kept = self._partition.skeleton.buffers()
        before = {owner: buffer.clone() for owner, buffer in kept.items()}
        try:
            with self._partition.attributes_kept():
                yield
        finally:
            self._put_back(kept, before)

    def _put_back(self, kept: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> None:
        """Bind these buffers around the layers again, with these values."""
        self._partition.skeleton.bind(kept)
        for owner, buffer in before.items():
            kept[owner].copy_(buffer)

    def _changed(self, kept: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> set[str]:
        """Buffers around the layers that have other values than before."""
        self._partition.skeleton.take_over(kept)
        return {owner for owner, buffer in kept.items() if not torch.equal(buffer, before[owner])}

    def _learn_layers(self, trial: Microbatch) -> None:
        kept = self._partition.skeleton.buffers()
        before = {owner: buffer.clone() for owner, buffer in kept.items()}
        self._partition.set_training(True)
        self._left.clear()
        self._reshaped = None
        try:
            with torch.enable_grad():  # nothing requires gradients: to see whether that is undone
                self._partition.prologue(trial, learn=self._run_layer, meet=self._meet)
        except BaseException:
            self._partition.forget()  # what was learnt: the next batch is to be tried as the first
            raise
        for structure in self._partition.changing_input:  # it would write into a cell
            self._compiler.refuse(structure)
        changing = frozenset(self._changed(kept, before))
        self._put_back(kept, before)
        self._outer.facts = OuterFacts(changing=changing)
        for index, structure in enumerate(self._partition.structures):
            tensors = self._partition.layer_tensors[index].buffers
            owners = list(tensors)
            own = [owners[position] for position in self._changing.get(structure, [])]
            if own:
                self._relay.layer_buffers[index] = {
                    owner: tensors[owner].detach().to(self._device.torch_device, copy=True)
                    for owner in own
                }

    def _run_layer(self, index: int, args: Any, kwargs: Any) -> Any:
        part, structure = self._partition.layers[index], self._partition.structures[index]
        weights = self._layer_weights(index)
        part.bind(weights)
        buffers = part.buffers()
        before = {owner: buffer.clone() for owner, buffer in buffers.items()}
        given = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))
        attributes, form = attributes_of(part.module), pytree.tree_structure((args, kwargs))
        states = states_of(named_arguments(part.module, args, kwargs))
        num_draws = self._device.random_numbers.num_draws
        self._device.seed(1)
        value = self._try_layer(index, args, kwargs)
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
        for other, stub in zip(self._partition.structures, self._partition.stubs, strict=True):
            if other == structure:
                stub.note_written(written)
        part.take_over(buffers)
        changed = [
            position
            for position, owner in enumerate(before)
            if not torch.equal(before[owner], buffers[owner])
        ]
        self._changing[structure] = changed
        for state in states:
            if state.is_past():
                self._left.setdefault(id(state.value), (state, index))
        self._meet(index, args, kwargs)
        part.bind(weights)
        self._refuse_written(index, (args, kwargs), given=given, value=value)
        self._device.seed(1)
        again = part.module(*given[0], **given[1])
        repeats = self._repeats(value, again)
        if not repeats or self._device.random_numbers.num_draws > num_draws:
            self._compiler.note_random(structure)
        if changed:
            self._compiler.refuse(structure)
        return value

    def _try_layer(self, index: int, args: Any, kwargs: Any) -> Any:
        """Run a layer; what it returns."""
        try:
            value = self._partition.layers[index].module(*args, **kwargs)
        except Exception as error:
            if self._reshaped is None:
                raise
            raise CutError(
                f"layer {index} does not run on the hidden state that enters the first layer: "
                f"{self._reshaped}. Expected layers that keep the shape of their hidden state; "
                "name another list with layers='dotted.name'."
            ) from error
        given, hidden = first_argument(args, kwargs), Returns.unwrap(value)
        if given.shape != hidden.shape:
            shapes = f"is given {list(given.shape)} and returns {list(hidden.shape)}"
            self._reshaped = f"layer {index} {shapes}"
        return value

    def _meet(self, index: int, args: Any, kwargs: Any) -> None:
        """Refuse a layer that reads what another one, or itself, has left in an object.

        It is run with the objects as they are, and as they were before anything was left in them.
        """
        if not self._left:
            return
        given = named_arguments(self._partition.layers[index].module, args, kwargs)
        met = [self._left[id(v)] for _, v, _ in objects_in(given) if id(v) in self._left]
        if not met:
            return
        now = [before.now() for before, _ in met]
        found = self._output(index, args, kwargs)
        for before, _ in met:
            before.restore()
        try:
            reads = not _same(self._output(index, args, kwargs), found)
        except Exception:  # what it reads is not there
            reads = True
        for state in now:
            state.restore()
        if reads:
            before, layer = met[0]
            kind = type(given.get(before.name, before.value)).__name__
            raise CutError(
                f"layer {layer} changes its argument {before.name!r} ({kind}), and layer {index} "
                "reads what it has left there. Only the hidden state goes from layer to layer: "
                "gradients through anything else would be lost. Turn off what shares it, or give "
                "layers tensors that are made before the first of them."
            )

    def _output(self, index: int, args: Any, kwargs: Any) -> Tensor:
        """What a layer makes of another hidden state than the one that is given."""
        hidden = first_argument(args, kwargs)
        other = hidden * 1.25 + 0.25 if hidden.is_floating_point() else hidden
        part = self._partition.layers[index]
        part.bind(self._layer_weights(index))
        self._device.seed(1)
        return Returns.unwrap(
            part.module(
                *(other if value is hidden else value for value in args),
                **{name: other if value is hidden else value for name, value in kwargs.items()},
            )
        )

    def _layer_weights(self, index: int) -> dict[str, Tensor]:
        """A copy on the device of a layer's weights and buffers, into which it may write."""
        unit = self._server.whole(f"L{index}")
        weights = unit.weights.to(self._device.torch_device, copy=True)
        return unit.form.weight_layout.views(weights)

    def _refuse_written(self, index: int, now: Any, *, given: Any, value: Any) -> None:
        """Refuse a layer that writes into a tensor besides its hidden state and reads it again."""
        hidden = first_argument(*now)
        pairs = zip(pytree.tree_leaves(now), pytree.tree_leaves(given), strict=True)
        if all(new is hidden or _same(old, new) for new, old in pairs):
            return
        original = first_argument(*given)
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda one: original.clone() if one is hidden else one.clone(), now
        )
        self._device.seed(1)
        again = self._partition.layers[index].module(*args, **kwargs)
        if not _same(Returns.unwrap(value), Returns.unwrap(again)):
            raise CutError(
                f"layer {index} writes into a tensor that it is given besides its hidden state, "
                "and would find it changed when it is run again. Let it work on a copy."
            )

    def _repeats(self, first: Any, again: Any) -> bool:
        """Whether two runs from the same seed agree ([Note: others' generators])."""
        one, other = pytree.tree_leaves(first), pytree.tree_leaves(again)
        if len(one) == len(other) and all(map(_same, one, other)):
            return True
        self._device.random_numbers.seeds_defaults = True
        return False

    def _learn_usage(self, trial: Microbatch, weights: Mapping[str, Tensor]) -> None:
        kept = self._partition.skeleton.buffers()
        before = {owner: buffer.clone() for owner, buffer in kept.items()}
        first, second = Readers({**weights, **kept}), Readers(weights)
        self._device.seed(1)
        with first:
            recording = self._partition.prologue(trial)
        self._changed(kept, before)
        between = {owner: buffer.clone() for owner, buffer in kept.items()}
        self._put_back(kept, before)
        self._device.seed(1)
        again = self._partition.prologue(trial)
        self._repeats([recording.hidden, *recording.tensors], [again.hidden, *again.tensors])
        self._changed(kept, before)
        self._put_back(kept, before)
        hidden = recording.hidden
        assert hidden is not None
        first.note_given([hidden, *recording.tensors])

        def start() -> None:
            second.watching = True

        second.watching = False
        self._device.seed(1)
        with second:
            expected = self._partition.epilogue(trial, hidden, on_delivery=start)
        changed = bool(self._changed(kept, before))
        self._refuse_crossing(self._changed(kept, between), read=first.readings)
        self._put_back(kept, before)
        self._device.seed(1)
        self._repeats(expected, self._partition.epilogue(trial, hidden))
        self._changed(kept, before)
        self._put_back(kept, before)
        forms = {name: unit.form for name, unit in self._server.units.items()}
        usage = usage_of(forms, trial, first, second)
        self.alone = not changed and self._is_alone(trial, hidden, expected, weights, usage)
        if self.alone:
            self.usage = usage
        self._outer.facts = replace(self._outer.facts, alone=self.alone)

    def _refuse_crossing(self, after: set[str], *, read: Mapping[str, Reading]) -> None:
        """Refuse buffers that are changed after the layers and read before them.

        The code before the layers runs for all microbatches first, and again when all is done.
        """
        for owner in sorted(after):
            if owner in read or owner in self._outer.facts.changing:
                raise CutError(
                    f"the model reads or changes buffer {owner!r} before its layers and changes it "
                    "after them. Microbatches pass each of these together, so its values would be "
                    "others than in plain PyTorch. Let one of them have a buffer of its own."
                )

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
        self._partition.set_training(False)
        function = self._outer.loss_function
        if function is not None:
            hidden = self._partition.prologue(trial).hidden
            assert hidden is not None
            found = function(self._partition.epilogue(trial, hidden), trial)
            return (Rule.SUM_AND_WEIGHT if isinstance(found, tuple) else Rule.ROWS), True

        def loss(batch: Microbatch) -> float:
            hidden = self._partition.prologue(batch).hidden
            assert hidden is not None
            return float(require_loss(self._partition.epilogue(batch, hidden)))

        hidden = self._partition.prologue(trial).hidden
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
        self._partition.set_training(False)
        hidden = self._partition.prologue(trial).hidden
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
        self._partition.set_training(False)
        hidden = self._partition.prologue(trial).hidden
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
