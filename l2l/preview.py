"""A plan for a model that is not there: nothing is allocated, nothing runs.

The model may be on the meta device; of a real one only the shapes are looked at. What an engine
finds out by running a few rows is assumed here: that the epilogue does without the prologue, and
that a loss over tokens can be taken in pieces. `Engine.plan` has the facts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from l2l.batch import Microbatch
from l2l.carving import CarvedModel, Recording
from l2l.device import num_devices, open_device
from l2l.hardware import H200, Hardware, known_hardware
from l2l.host_memory import HostBudget
from l2l.interception import Readers
from l2l.loss import trial_batch
from l2l.outer_pass import OuterFacts
from l2l.parameter_server import (
    Optimizer,
    ServerOptimizer,
    UnitForm,
    UpdatePolicy,
    groups_of,
    load_kernel,
)
from l2l.planner import DoesNotFitError, Plan
from l2l.planning import FREE_SHARE, Planning, parse_budget
from l2l.precision import PrecisionPolicy
from l2l.rehearsal import Usage, outer_units, usage_of
from l2l.units import forms_of

LARGE_UNIT_BYTES = 16 << 20


def plan(
    model: nn.Module,
    batch: Mapping[str, Tensor] | None = None,
    *,
    num_rows: int = 8,
    length: int = 1024,
    optimizer: Optimizer | None = None,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    microbatch_size: int | None = None,
    precision: str | torch.dtype = "bfloat16",
    clip_norm: float | None = None,
    layers: str | None = None,
    compile: bool = True,  # noqa: A002 (torch's name for torch's thing)
    hardware: Hardware | None = None,
) -> Plan:
    """The plan that an engine would make, without allocating anything.

    Args:
        model: any model an engine takes, also on the meta device.
        batch: one step's tensors, on any device; None: `num_rows` rows of `length` tokens.
        num_rows: of the batch.
        length: of a row, in tokens.
        optimizer: as for the engine.
        device_memory: as for the engine; None: 90% of the device's.
        host_memory: as for the engine.
        microbatch_size: as for the engine.
        precision: as for the engine.
        clip_norm: as for the engine.
        layers: as for the engine.
        compile: whether layers are compiled.
        hardware: rates to plan with. None: those of this machine's accelerator, measured; without
            one, those of an H200.

    Raises:
        ValueError: nothing fits, or the model cannot be cut.
    """
    policy_of = PrecisionPolicy.for_model(model, precision=precision)
    carved = CarvedModel(model, layers=layers)
    description, groups = groups_of(optimizer, model)
    policy = UpdatePolicy.choose(
        None, optimizer=description, clip_norm=clip_norm, link=policy_of.link
    )
    names = {parameter: name for name, parameter in model.named_parameters()}
    settings = ServerOptimizer(groups, description.defaults, names=names).settings()
    forms = {
        form.name: form
        for form in forms_of(carved, optimizer=description, settings=settings, precision=policy_of)
    }
    if hardware is None:
        kernel = load_kernel()
        hardware = known_hardware(open_device(None), kernel) if num_devices() else H200
    budget = parse_budget(device_memory) or int(FREE_SHARE * hardware.device_bytes)
    if batch is None:
        ids = torch.empty((num_rows, length), dtype=torch.int64, device="meta")
        batch = {"input_ids": ids, "labels": ids}
    preview = _Preview(carved, forms, dict(batch))
    planning = Planning(
        carved=carved,
        forms=forms,
        device=None,
        optimizer=description,
        policy=policy,
        kernel=None,
        budget=budget,
        host_limit=HostBudget.of(host_memory, model_bytes=0).limit_bytes,
        compiled=compile,
        overrides={},
        hardware=hardware,
    )
    usage = preview.usage()

    def looked_up(name: str) -> bool:
        large = forms[name].weight_layout.nbytes >= LARGE_UNIT_BYTES
        return large and policy is not UpdatePolicy.ON_DEVICE

    tokens = _over_tokens(batch)
    planning.make(
        batch,
        rows=microbatch_size,
        outer=outer_units(forms, usage, looked_up),
        usage=usage,
        facts=OuterFacts(alone=True, within_rows=tokens, puts_off=tokens),
        record=preview.record,
        buffer_bytes=sum(b.nbytes for b in carved.outer_tensors.buffers.values()),
    )
    return planning.plan(
        arena={},
        reserved={},
        choices=(
            ("layers", f"{carved.list_name}, {carved.num_layers} of them"),
            ("parameters", f"{sum(p.numel() for p in model.parameters()):,}"),
            ("precision", str(policy_of.link).removeprefix("torch.")),
            ("update", policy.value),
            ("for", hardware.device_name),
        ),
        peak_bytes=0,
    )


def _over_tokens(batch: Mapping[str, Tensor]) -> bool:
    labels = batch.get("labels")
    return labels is not None and labels.dim() == 2


class _Preview:
    """Runs the code around the layers on the CPU, with weights that take no memory."""

    def __init__(
        self, carved: CarvedModel, forms: Mapping[str, UnitForm], batch: Mapping[str, Any]
    ) -> None:
        self._carved = carved
        self._forms = forms
        self._batch = batch
        self._weights = {
            name: tensor
            for unit, form in forms.items()
            if not unit.startswith("L")
            for name, tensor in _hollow(form, "cpu").items()
        }
        carved.set_training(True)
        carved.skeleton.bind(self._weights)
        buffers = carved.outer_tensors.buffers
        carved.skeleton.bind(
            {
                name: torch.ones(buffer.shape, dtype=buffer.dtype) if buffer.is_meta else buffer
                for name, buffer in buffers.items()
            }
        )

    def _run_layer(self, index: int, args: Any, kwargs: Any) -> Any:
        part = self._carved.layers[index]
        part.bind(_hollow(self._forms[f"L{index}"], "meta"))
        args, kwargs = pytree.tree_map_only(Tensor, lambda one: one.to("meta"), (args, kwargs))
        return part.module(*args, **kwargs)

    def record(self, microbatch: Mapping[str, Any]) -> Recording:
        """What a prologue run yields for rows of this shape."""
        with torch.no_grad():
            return self._carved.prologue(_zeros(microbatch), learn=self._run_layer)

    def usage(self) -> dict[str, Usage]:
        """Which units are read before the layers, and which after."""
        trial = _zeros(trial_batch(self._batch, cut=True))
        before, after = Readers(self._weights), Readers(self._weights)
        with torch.no_grad():
            self._carved.prologue(trial, learn=self._run_layer)
            with before:
                hidden = self._carved.prologue(trial).hidden
            assert hidden is not None
            after.watching = False

            def start() -> None:
                after.watching = True

            with after:
                self._carved.epilogue(trial, hidden, on_delivery=start)
        return usage_of(self._forms, trial, before, after)


def _zeros(batch: Mapping[str, Any]) -> Microbatch:
    """A batch of this shape, of zeros."""
    return {
        name: torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }


def _hollow(form: UnitForm, device: str) -> dict[str, Tensor]:
    """A unit's tensors without memory."""
    return {
        field.name: torch.zeros((), dtype=segment.dtype, device=device).expand(field.shape)
        for segment in form.weight_layout.segments
        for field in segment.fields
    }


def largest_model(
    make: Callable[[int], nn.Module], *, most_layers: int = 4096, **settings: Any
) -> tuple[int, Plan] | None:
    """The most layers of a shape that can be trained, and their plan.

    Args:
        make: the model with so many layers, on the meta device.
        most_layers: where to stop looking.
        settings: as for `plan`.
    """
    found: tuple[int, Plan] | None = None
    low, high = 1, most_layers
    while low <= high:
        number = (low + high) // 2
        try:
            one = plan(make(number), **settings)
        except DoesNotFitError:
            one = None
        limit = HostBudget.of(settings.get("host_memory"), model_bytes=0).limit_bytes
        if one is not None and one.total_bytes("host") <= limit:
            found, low = (number, one), number + 1
        else:
            high = number - 1
    return found
