"""The model as it is cut now, what works on it, and what of it is on the device.

Decide, then do: a trial finds `Facts`, the plan decides by them, and every step is given a
`Program` of its own. Other layers are another network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import Tensor

from l2l.checkpoint import Persistence
from l2l.engine.depth import Choice
from l2l.engine.resources import Resources
from l2l.hugging_face import export_model
from l2l.model import Modes, Partition, Route, asking_in, format_of, like, plain_values
from l2l.parameter_server import Part, divided, formats_in, units_of, values_of
from l2l.planner import KeptPlans, Plan
from l2l.proof import Proof, ProofMemory
from l2l.run import Facts, OuterPass, Parts, Program, Relay, TableLookup
from l2l.schedule import Schedule, Shape, make_schedule
from l2l.trial import Trial

PROVEN = ProofMemory.of_user()
PLANS = KeptPlans.of_user()
MAX_SCHEDULES = 32  # that are kept


@final
class Network:
    """Owner of the parts that belong to the present layers, and of what stays on the device."""

    def __init__(self, resources: Resources, partition: Partition) -> None:
        """Nothing is known of the layers yet, whose weights are in the server."""
        has, device, server = resources, resources.device, resources.server
        self._has, self._server, self.partition = has, server, partition
        parts = Parts(
            partition=partition,
            device=device,
            server=server,
            transfer=has.transfer,
            stash=has.stash,
            rows=has.rows,
            compiler=has.compiler,
            loss_function=has.loss,
            gradients=has.gradients,
        )
        self.parts, self.outer = parts, OuterPass(parts)
        scale_of = None if has.scaler is None else has.scaler.scale_of
        self.relay = Relay(parts, self.outer, scale_of)
        self.trial = Trial(parts, self.outer)
        self.persistence = Persistence(
            server=server,
            partition=partition,
            optimizer=has.optimizer,
            loss_scale=None if has.scaler is None else has.scaler.scale,
            link=has.precision.link,
            spare_bytes=has.spare_bytes,
        )
        self.proof = Proof(
            model=has.model,
            partition=partition,
            server=server,
            device=device,
            loss_function=has.loss,
            link=has.precision.link,
            memory=PROVEN,
        )
        self.modes = Modes(has.model)
        self.facts = Facts()
        self._kind: frozenset[str] | None = None  # entries of batches that the facts are about
        self._known: dict[frozenset[str], Facts] = {}  # of other kinds
        self.schedules: dict[Shape, Schedule] = {}
        self.lengths: str | None = None  # how the last batch was cut, where rows differ in length
        self.is_placed = False  # whether everything follows the choices
        self._held: frozenset[str] = frozenset()  # units that the last step has left on the device
        server.reader.watch(has.model)
        if has.gradients is not None:
            owned = (tensors.parameters for _, tensors in units_of(partition))
            has.gradients.follow({k: one for own in owned for k, one in own.items()})
        # Let the code around the layers see buffers on the device.
        buffers = partition.outer_tensors.buffers.items()
        partition.skeleton.bind(
            {name: one.detach().to(device.torch_device, copy=True) for name, one in buffers}
        )

    @property
    def route(self) -> Route:
        """How the model's code runs its layers; straight until something else is known."""
        return self.facts.route or self.partition.straight

    def running(self) -> AbstractContextManager[None]:
        """While the block runs, nobody reads the model's own parameters; it has those it had."""
        return self._server.reader.running()

    def learn(self, rows: Mapping[str, Any], *, needs_loss: bool) -> Facts:
        """Try some rows, unless all is known of their kind.

        Batches with other entries, such as text without images, may run other code, and those with
        more entries may take another loss. Gradients take other ways if entries ask for theirs.
        """
        asking = {f"gradient of {name}" for name, _ in asking_in(rows)}
        kinds = self._server.world.gather_facts(frozenset(rows) | asking)  # ranks learn together
        kind, before = frozenset[str]().union(*kinds), None
        if self._kind is not None and self._may_be_others(kind, needs_loss=needs_loss):
            before = self._kind, self.facts
            self._known[self._kind] = self.facts
            self.leave()
            self.facts = self._known.get(kind, Facts())
            self._kind = kind
        elif not self.facts.rows or (needs_loss and self.facts.rule is None):
            self._kind = kind
        if self.is_placed and self.trial.must_run(self.facts, needs_loss=needs_loss):
            self.leave()  # a trial is planned for nothing beside it
        is_first, knew_loss = not self.facts.rows, self.facts.rule is not None
        self.facts = self.trial.run(like(rows, rows), self.facts, needs_loss=needs_loss)
        if before is not None and self.facts.says(before[1]):  # they are of one kind
            self.facts, self._kind = before[1], kind | before[0]
            del self._known[before[0]]
        if not is_first and not knew_loss and self.facts.rule is not None:
            self._has.planning.forget()  # it was for no loss
        if is_first:
            changing, device = self.facts.changing_in_layers, self._has.device.torch_device
            self.relay.buffers.keep(changing, device)
        return self.facts

    def _may_be_others(self, kind: frozenset[str], *, needs_loss: bool) -> bool:
        """Whether the facts are not those of batches with these entries."""
        if kind == self._kind:
            return False
        has_more = needs_loss and self.facts.rule is not None and not kind <= (self._kind or kind)
        return has_more or kind in self._known or self.route != self.partition.straight

    def learn_pointwise(self) -> None:
        """Find what of the layers may run in tiles, once rows are long."""
        if not self.facts.pointwise:
            self.facts = self.trial.pointwise(self.facts)

    # ----------------------------------------------------------------------------------------------
    # What is on the device from step to step

    def leave(self) -> None:
        """Bring everything that stays on the device from step to step back to the host."""
        self.is_placed = False
        self._server.settle_all()
        for name in self._server.units:  # also of a plan whose first step has failed
            self._server.place_state(name, torch.device("cpu"))
        self._held = frozenset()
        for part in self.partition.layers:  # views into slots would keep their memory
            part.let_go()
        self._has.transfer.clear()
        self._has.stash.leave()

    def enter(self) -> None:
        """Let everything follow the choices."""
        shape, device = self.shape(1, training=True), self._has.device
        if self._server.disk is not None:
            units, before = self._server.units, self._server.before_change
            wanted: dict[Part, frozenset[str]] = {
                "state": shape.on_disk,
                "weights": shape.weights_on_disk,
            }
            self._server.disk.place(units, wanted, before)
        for unit in shape.units_of(shape.shared):
            self._server.register(unit, device)
        for name in shape.on_device:
            self._server.place_state(name, device.torch_device)
        self.is_placed = True

    def note_run(self, program: Program) -> None:
        """A program has run, and has left on the device what it says."""
        self._held = frozenset(program.shape.on_device)

    def may_fuse(self) -> bool:
        """Whether a forward side may take the loss: its gradients are whole then, and go alone."""
        outer = self.shape(1, training=True).outer
        stays = any(unit.stays and unit.trained for unit in outer)
        whole = self.facts.whole_route or self.route
        return not stays and whole.runs_as(self.route)

    def shape(
        self,
        num_microbatches: int,
        *,
        training: bool,
        joint: bool = False,
        keep_outputs: bool = False,
        side: str = "",
        asks_inputs: bool = False,
    ) -> Shape:
        """The shape of the next step if it runs all layers."""
        return self._has.planning.shape(
            self.facts,
            num_microbatches,
            training=training,
            joint=joint,
            whole_head=keep_outputs,
            side=side,
            asks_inputs=asks_inputs,
            before=(
                self._held,
                () if side in ("outputs", "backward") else tuple(self._server.waiting),
            ),
        )

    def program(
        self,
        num_microbatches: int,
        choice: Choice,
        *,
        seed: int,
        keep_outputs: bool = False,
        side: str = "",
        **kind: bool,
    ) -> Program:
        """What the next step runs by; its schedule is kept for steps of the same shape."""
        decisions = self._has.planning.decisions
        shape = self.shape(num_microbatches, keep_outputs=keep_outputs, side=side, **kind)
        if len(choice.layers) < self.partition.num_layers:
            shape = shape.only(self._calls_of(choice.layers))
        if shape not in self.schedules:
            if len(self.schedules) == MAX_SCHEDULES:
                del self.schedules[next(iter(self.schedules))]  # the oldest
            self.schedules[shape] = make_schedule(shape)
        return Program(
            schedule=self.schedules[shape],
            seed=seed,
            facts=self.facts,
            route=(self.facts.whole_route if keep_outputs else None) or self.route,
            lookups=self.lookups(shape),
            keep=0.0 if side else decisions.keep,
            tile_tokens=decisions.tile_tokens,
            piece_tokens=decisions.piece_tokens,
            part_tokens=decisions.part_tokens,
            compiles_loss=self._has.compiler.is_on,
        )

    def _calls_of(self, layers: Sequence[int]) -> tuple[int, ...]:
        """The calls of some layers, where the others may be left out."""
        route = self.route
        if not route.may_leave_out:
            raise ValueError(
                "layers cannot be left out of this model: they hand on more than a hidden state, "
                "or are called several times. Run all of them."
            )
        return tuple(call for call, layer in enumerate(route.layers) if layer in layers)

    def lookups(self, shape: Shape) -> tuple[TableLookup, ...]:
        """Those that the host answers."""
        units = [unit.name for unit in shape.outer if unit.looked_up]
        return tuple(one for name in units for one in self.facts.usage[name].lookups)

    def plan(self) -> Plan:
        """What is placed where, in bytes, and the choices made."""
        has, partition, rule = self._has, self.partition, self.facts.rule
        forms = [unit.form for unit in self._server.units.values()]
        return has.planning.plan(
            arena=has.arena.bytes_by_name,
            reserved={
                **has.transfer.bytes_by_place(),
                "boundary cells": has.stash.cell_bytes(),
                "buffers": self.buffer_bytes(),
            },
            choices=(
                ("layers", f"{partition.list_name}, {partition.num_layers} of them"),
                ("precision", str(has.precision.link).removeprefix("torch.")),
                *formats_in(forms),
                *divided(has.server.optimizer, has.optimizer.settings(), forms),
                ("microbatch", has.planning.microbatch(has.microbatch_size)),
                *([("rows of different length", self.lengths)] if self.lengths else ()),
                *([("device memory", has.turns.described)] if has.turns.described else ()),
                ("stash", has.stash.policy),
                ("update", has.policy.value),
                ("loss averages over", rule.value if rule else "?"),
                ("layers run", has.compiler.describe()),
            ),
            peak_bytes=has.device.peak_bytes(),
            first_step=tuple(has.timeline.seconds.items()),
        )

    # ----------------------------------------------------------------------------------------------
    # Weights and buffers, for others

    def buffers(self) -> dict[str, Tensor]:
        """Buffers on the device, as training has left them."""
        return self.relay.buffers.present()

    def buffer_bytes(self) -> int:
        """Bytes of `buffers`."""
        return sum(buffer.nbytes for buffer in self.buffers().values())

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and weights of all parameters, once all updates are done, unit by unit."""
        for name, tensors in units_of(self.partition):
            value = self._server.with_masters(name).value
            for owner, parameter in tensors.parameters.items():
                weight = value(owner).detach()
                if (known := format_of(weight)) is not None:
                    yield owner, known.to_read(weight)
                    continue
                yield owner, weight.to(device="cpu", dtype=parameter.dtype, copy=True)

    def state_dict(self, weights: dict[str, Tensor]) -> dict[str, Any]:
        """What the model's own would be with these weights, and with the present buffers."""
        model, present = self._has.model, self.buffers()
        names = {id(tensor): name for name, tensor in model.named_buffers()}
        names |= {id(tensor): name for name, tensor in model.named_parameters()}
        found: dict[str, Any] = {}
        for key, value in model.state_dict(keep_vars=True).items():
            name = names.get(id(value), "")
            if name in weights:
                value = weights[name]
            elif isinstance(value, Tensor):
                value = present.get(name, value).detach().to(device="cpu", copy=True)
            found[key] = value
        return found

    def export(self, folder: Any, **options: Any) -> None:
        """Write a folder that others read, once all updates are done: see `export_model`."""
        with values_of(self._server) as value:
            if value is None:  # another rank writes
                return
            model, buffers = self._has.model, self.buffers()

            def weight_of(owner: str) -> Tensor:
                return plain_values(value(owner))

            with torch._C.DisableTorchFunctionSubclass():  # of the model, names and shapes only
                export_model(model, folder, weight_of=weight_of, buffers=buffers, **options)

    def give_back(self) -> None:
        """Move all weights and buffers back into the model."""
        for name, tensors in units_of(self.partition):
            self._server.give_back(tensors.parameters, name)
        self.give_back_buffers()

    def show_buffers(self) -> None:
        """Let the model's own buffers be as they are, if training changes any."""
        facts = self.facts  # code after the layers that changes some does not run alone
        if any(facts.changing) or facts.changing_in_layers or not facts.alone:
            self.give_back_buffers()

    def give_back_buffers(self) -> None:
        """Let the model's own buffers be as training has left them."""
        for owner, buffer in self.buffers().items():
            module, _, local = owner.rpartition(".")
            target = self._has.model.get_submodule(module)._buffers[local]
            if target is not None:
                target.copy_(buffer)

    def close(self) -> None:
        """Let go of everything, the device too."""
        has = self._has
        for part in (self.partition, has.transfer, has.stash, self.relay, has.device, self._server):
            part.close()
