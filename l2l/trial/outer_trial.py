"""The code before and after the layers, run on a few rows: what it reads and changes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from torch import Tensor

from l2l.device import Device
from l2l.model import CutError, Microbatch, Partition, Readers, same
from l2l.parameter_server import ParameterServer
from l2l.run import OuterPass
from l2l.trial.repeating import TRIAL_SEED, KeptBuffers, repeats
from l2l.trial.usage import Usage, usage_of


@final
@dataclass(slots=True)
class OuterTrial:
    """Watches what the code around the layers reads."""

    _partition: Partition
    _server: ParameterServer
    _device: Device
    _outer: OuterPass

    def learn_usage(
        self, trial: Microbatch, weights: Mapping[str, Tensor]
    ) -> dict[str, Usage] | None:
        """How each unit is read; None if the epilogue needs what the prologue reads.

        Args:
            trial: a few rows, on the device.
            weights: all those around the layers, as they are bound.
        """
        kept = KeptBuffers(self._partition)
        first, second = Readers({**weights, **kept.buffers}), Readers(weights)
        # The prologue, watched, and once more to see whether it repeats itself.
        self._device.seed(TRIAL_SEED)
        with first:
            recording = self._partition.prologue(trial)
        kept.changed()
        between = kept.values()
        kept.put_back()
        self._device.seed(TRIAL_SEED)
        again = self._partition.prologue(trial)
        made = [recording.hidden, *recording.tensors]
        repeats(self._device, made, [again.hidden, *again.tensors])
        kept.changed()
        kept.put_back()
        hidden = recording.hidden
        assert hidden is not None
        first.note([hidden, *recording.tensors])

        def start() -> None:
            second.watching = True

        # The epilogue, watched from where the layers end, and once more.
        second.watching = False
        self._device.seed(TRIAL_SEED)
        with second:
            expected = self._partition.epilogue(trial, hidden, on_delivery=start)
        changed = bool(kept.changed())
        self._refuse_crossing(kept.changed(between), read=first.readings)
        kept.put_back()
        self._device.seed(TRIAL_SEED)
        repeats(self._device, expected, self._partition.epilogue(trial, hidden))
        kept.changed()
        kept.put_back()
        forms = {name: unit.form for name, unit in self._server.units.items()}
        usage = usage_of(forms, trial, first, second)
        alone = not changed and self._is_alone(trial, hidden, expected, weights, usage)
        self._outer.facts = replace(self._outer.facts, alone=alone)
        return usage if alone else None

    def _refuse_crossing(self, after: Collection[str], *, read: Collection[str]) -> None:
        """Refuse buffers that are changed after the layers and read before them.

        The code before the layers runs for all microbatches first, and again when all is done.
        """
        for owner in sorted(after):
            if owner in read or owner in self._outer.facts.changing:
                raise CutError(
                    f"the model reads or changes buffer {owner!r} before its layers and changes it "
                    "after them. All microbatches go through the code before the layers first, so "
                    "its values would differ from plain PyTorch. Use two buffers instead."
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
        self._device.seed(TRIAL_SEED)
        try:
            found = self._outer.run_epilogue(trial, hidden)
        except CutError:
            raise
        except Exception:  # it reads what is not there
            return False
        finally:
            self._partition.skeleton.bind(weights)
        return same(found, expected)
