"""An engine with other layers: its model, its units and all that works on them follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from torch import nn

from l2l.checkpoint import Expected
from l2l.engine.condition import Condition
from l2l.engine.layers import Layers, Layout, changed_model
from l2l.engine.network import Network
from l2l.engine.placement import Placement
from l2l.engine.resources import Resources, server_bytes
from l2l.model import Partition
from l2l.parameter_server import Members, Move, PrecisionPolicy, UnitForm, forms_of


@final
@dataclass(frozen=True, eq=False)
class Surgery:
    """Changes the layers of an engine, between steps."""

    resources: Resources
    network: Network
    condition: Condition
    placement: Placement
    layers: Layers

    def change(self, layout: Layout) -> None:
        """Become an engine with other layers; if that cannot be, nothing has changed.

        Raises:
            ValueError: it cannot be.
        """
        has, network, old = self.resources, self.network, self.network.partition
        self.condition.refuse_if_unusable()
        self._refuse(layout)
        network.persistence.finish()
        self.condition.finish_step()
        self.placement.leave()
        network.give_back_buffers()
        with changed_model(has.model, old.list_name, layout):
            partition, members, forms = self._with_layers(layout, has.precision)
            has.host_budget.check(server_bytes(forms, has.policy, has.world), alternatives={})
            has.transfer.let_go_of_staging()
            has.server.rearrange(_moves_for(layout, old, partition, forms))
        # The model and the server have the new layers now; everything else follows.
        has.optimizer.regroup(members)
        self.layers.origins = tuple(place.origin for place in layout)
        network.build(partition)
        network.bind()
        has.planning.adapt(partition, {form.name: form for form in forms})

    def expected(self, layout: Layout | None, *, link: str) -> Expected:
        """What a checkpoint of a precision must hold if the engine had these layers.

        Raises:
            ValueError: it cannot have them.
        """
        has, partition = self.resources, self.network.partition
        forms = [unit.form for unit in has.server.units.values()]
        precision = PrecisionPolicy.for_model(has.model, precision=link)
        if layout is not None:
            self._refuse(layout)
            with changed_model(has.model, partition.list_name, layout, keep=False):
                partition, _, forms = self._with_layers(layout, precision)
        elif precision != has.precision:
            kinds = {form.name: form.state_kinds for form in forms}
            forms = [
                replace(form, state_kinds=kinds[form.name])
                for form in self._forms(partition, precision)
            ]
        return Expected(
            forms={form.name: form for form in forms},
            outer_buffers=self.network.partition.skeleton.buffers(),
            layer_buffers={k: v for one in partition.layer_tensors for k, v in one.buffers.items()},
        )

    def _refuse(self, layout: Layout) -> None:
        """Refuse layers that the engine cannot have."""
        self.network.depth.check(len(layout))
        is_shared = self.resources.world.share.number > 1
        if is_shared and any(place.frozen is not None for place in layout):
            raise ValueError(
                "several ranks hold the layers together, cut where nothing was frozen. Freeze "
                "them before the engine is made."
            )
        for position, place in enumerate(layout):
            if place.module is not None:
                self.network.trial.refuse_layer(place.module, position)

    def _with_layers(
        self, layout: Layout, precision: PrecisionPolicy
    ) -> tuple[Partition, Members, list[UnitForm]]:
        """What the model, which has these layers now, is made of."""
        model, old = self.resources.model, self.network.partition
        new = Partition(model, layers=old.list_name, like=old)
        members = self.resources.optimizer.members_of(model, _models_for(layout, old, new))
        return new, members, self._forms(new, precision, members)

    def _forms(
        self, partition: Partition, precision: PrecisionPolicy, members: Members | None = None
    ) -> list[UnitForm]:
        return forms_of(
            partition,
            optimizer=self.resources.server.optimizer,
            settings=self.resources.optimizer.settings(members),
            precision=precision,
            num_shares=self.resources.world.share.number,
        )


def _moves_for(
    layout: Layout, old: Partition, new: Partition, forms: Sequence[UnitForm]
) -> list[Move]:
    """What becomes of the layers' units when the layers change."""
    moves = []
    for place, tensors, form in zip(layout, new.layer_tensors, forms, strict=False):
        names: dict[str, str] = {}
        if place.source is not None:
            theirs = old.layer_tensors[place.source]
            names = dict(zip(tensors.parameters, theirs.parameters, strict=True))
            names |= zip(tensors.buffers, theirs.buffers, strict=True)
        moves.append(
            Move(
                form=form,
                source=None if place.source is None else f"L{place.source}",
                is_copy=place.is_copy,
                keeps_state=place.keeps_state,
                names=names,
                tensors=tensors,
            )
        )
    return moves


def _models_for(
    layout: Layout, old: Partition, new: Partition
) -> dict[nn.Parameter, nn.Parameter | None]:
    """For the parameters of the new layers, those that they are alike, if any."""
    found: dict[nn.Parameter, nn.Parameter | None] = {}
    for place, tensors in zip(layout, new.layer_tensors, strict=True):
        if place.source is None:
            found |= dict.fromkeys(tensors.parameters.values())
        else:
            theirs = old.layer_tensors[place.source].parameters.values()
            found |= zip(tensors.parameters.values(), theirs, strict=True)
    return found
