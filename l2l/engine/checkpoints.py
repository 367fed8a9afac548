"""Saving an engine and going on from what was saved, with the choices that matter to the bits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from l2l.checkpoint import Checkpoint, CheckpointError, Saving
from l2l.engine.condition import Condition
from l2l.engine.guard import Guard, guarded
from l2l.engine.layers import Layers, Layout, change, expected_with

logger = logging.getLogger("l2l")

PLACED = (
    "num_tail",
    "num_device_states",
    "num_shared",
    "keep",
    "num_kept_cells",
    "outer_state",
    "num_head_slices",
)
"""Choices by which a layer is computed, or updated, by other code: the same but for last bits."""


@final
@dataclass(frozen=True, eq=False)
class Checkpoints:
    """Saves an engine, and loads it: everything that is needed to go on exactly."""

    condition: Condition
    layers: Layers
    _guard: Guard

    @property
    def num_bytes(self) -> int:
        """What a checkpoint takes on the disk, but for its headers."""
        network = self.condition.network
        return network.persistence.num_bytes + network.buffer_bytes()

    def prepare(self) -> None:
        """Take the memory that saving in the background needs."""
        self.condition.refuse_unless_training("engine.prepare_saving")
        self.condition.refuse_if_unusable()
        self.condition.network.persistence.prepare(self._order_of_change())

    @guarded("engine.save")
    def save(
        self,
        folder: Path,
        extra: Mapping[str, Any],
        then: Callable[[], None] | None,
        *,
        background: bool,
    ) -> Saving:
        """Begin to write a checkpoint: the state as it is now.

        Raises:
            CheckpointError: that cannot begin, or an earlier one could not be written.
        """
        condition, has, network = self.condition, self.condition.has, self.condition.network
        condition.refuse_unless_training("engine.save")
        condition.refuse_if_unusable()
        network.persistence.finish()
        condition.finish_step()
        shape = network.shape(1, training=True)
        saving = network.persistence.save(
            folder,
            step=condition.step_number,
            state={
                "seed": condition.seed,
                "choices": self._choices(),
                "layers": self.layers.state(),
            },
            buffers=network.buffers(),
            order=self._order_of_change(),
            at_once=frozenset([*shape.on_device, *shape.units_of(shape.shared)]),
            extra=extra,
            then=then,
            step_seconds=has.planning.step_seconds(),
            background=background,
        )
        if not background:  # whoever waits does not do it, with signals that are not held
            has.server.settle_all()
        return saving

    def load(self, folder: Path) -> dict[str, Any]:
        """Go on from a checkpoint; returns the `extra` it was saved with.

        Raises:
            CheckpointError: it is damaged, or of another model or optimizer; nothing has changed.
        """
        condition = self.condition
        condition.refuse_unless_training("engine.load")
        condition.refuse_if_unusable(or_torn=False)
        try:
            condition.network.persistence.finish()
        except CheckpointError as error:
            logger.warning("%s", error)
        # Everything that can be wrong with it is looked for before anything changes.
        checkpoint = Checkpoint(folder)
        condition.network.persistence.check_files(checkpoint)
        layout = self._checked_layout(checkpoint)
        if layout is not None:
            self._follow_layers(layout, checkpoint)
        condition.begin_anew()
        network = condition.network
        network.leave()
        try:
            network.persistence.load(checkpoint)
            network.persistence.load_buffers(checkpoint, network.buffers())
        except CheckpointError as error:
            raise CheckpointError(
                f"{error} Part of it had already been loaded: load this or another checkpoint."
            ) from error
        state = checkpoint.manifest.state
        self._adopt(state["choices"])
        condition.go_on_from(checkpoint.manifest.step, state["seed"])
        condition.has.server.reader.forget()
        return dict(checkpoint.manifest.extra)

    def _order_of_change(self) -> list[str]:
        """Units, those first that a step changes first."""
        shape = self.condition.network.shape(1, training=True)
        rows = [unit.name for unit in shape.outer if unit.looked_up]
        first = [*rows, *shape.late_units[::-1], *shape.drained_units]
        return list(dict.fromkeys([*first, *self.condition.has.server.units]))

    # ----------------------------------------------------------------------------------------------
    # Layers

    def _checked_layout(self, checkpoint: Checkpoint) -> Layout | None:
        """The layers to have before a checkpoint is loaded; None: as they are. Changes nothing.

        Raises:
            CheckpointError: the engine would not be one that it fits.
        """
        state, condition = checkpoint.manifest.state, self.condition
        found = state.get("layers") if condition.state == "open" else None
        try:
            layout = None if found is None else self.layers.layout_of(found)
            expected = expected_with(condition, layout, link=state["link"])
        except ValueError as error:
            raise CheckpointError(f"{checkpoint.folder}: {error}") from error
        condition.network.persistence.check(checkpoint, expected)
        return layout

    def _follow_layers(self, layout: Layout, checkpoint: Checkpoint) -> None:
        """Have the layers that a checkpoint has."""
        server = self.condition.has.server
        units = server.units
        try:
            change(self.condition, layout)
        except BaseException as error:
            if server.units is not units:
                self.condition.tear()
            if isinstance(error, ValueError):
                raise CheckpointError(f"{checkpoint.folder}: {error}") from error
            raise
        logger.info("%s: the engine now has %s.", checkpoint.folder, self.layers)

    # ----------------------------------------------------------------------------------------------
    # Choices

    def _choices(self) -> dict[str, Any]:
        """Choices that change the last bits of results."""
        has, network = self.condition.has, self.condition.network
        decisions, lookups = (
            has.planning.decisions,
            network.lookups(network.shape(1, training=True)),
        )
        return {
            "microbatch_size": has.microbatch_size,
            "microbatch_tokens": decisions.microbatch_tokens,
            "piece_tokens": decisions.piece_tokens,
            "tile_tokens": decisions.tile_tokens,
            "compiled": has.compiler.is_on,
            "compiled_since": self.condition.compiled_since,
            "looked_up": sorted({lookup.unit for lookup in lookups}),
            "device_memory": has.planning.budget.given,
            "depth": repr(self.condition.depth),
            **{name: getattr(decisions, name) for name in PLACED},
        }

    def _adopt(self, choices: Mapping[str, Any]) -> None:
        """Go on with the choices of a checkpoint, and say where that is not possible."""
        own, has = self._choices(), self.condition.has
        bits = ": results may differ in their last bits"
        for name, also in {"microbatch_size": bits, "compiled": bits, "depth": ""}.items():
            if (found := choices.get(name, own[name])) != own[name]:
                said = "the checkpoint was made with %s=%s, this engine has %s%s."
                logger.warning(said, name, found, own[name], also)
        if (since := choices.get("compiled_since")) is not None:
            said = "the checkpoint's run had compiled layers from step %s on%s."
            logger.info(said, since + 1, bits)
        names = ["piece_tokens"] if has.microbatch_size else ["microbatch_tokens", "piece_tokens"]
        names += ["tile_tokens"] if choices.get("tile_tokens") else []
        if choices.get("device_memory") == own["device_memory"]:
            names += [name for name in PLACED if name in choices]
        elif has.compiler.is_on:
            logger.warning(
                "the checkpoint was made with device_memory=%s, this engine has %s. Layers are "
                "placed anew, so results may differ in their last bits.",
                choices.get("device_memory"),
                own["device_memory"],
            )
        has.planning.adopt({name: choices[name] for name in names})
