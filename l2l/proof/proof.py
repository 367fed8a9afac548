"""One engine's proof: which code was proven, against what, and what it means if it differs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from l2l.device import Device
from l2l.distributed import World
from l2l.model import LossFunction, Microbatch, Partition, Rule, same, total_count
from l2l.parameter_server import ParameterServer
from l2l.proof.evidence import ODD_FACTOR, TOLERANCE, Evidence, ProofError, check
from l2l.proof.memory import ProofMemory, key_of
from l2l.proof.reference import Reference, SeedOf
from l2l.proof.rows import Batches, proof_rows

logger = logging.getLogger("l2l")

FLOAT16_SCALE = 256.0  # of losses: with it hardly any gradient is zero or infinite
HOST_TOLERANCE = 0.1  # of 16-bit gradients, where one run was on the host: other kernels

Run = Callable[[Evidence, Sequence[Microbatch], int], float]
"""Runs microbatches through the engine, with what their loss averages over; adds gradients to the
evidence, and returns what they must be multiplied with."""


@final
class Proof:
    """Owner of what an engine has proven."""

    def __init__(
        self,
        *,
        model: nn.Module,
        partition: Partition,
        server: ParameterServer,
        device: Device,
        loss_function: LossFunction | None,
        link: torch.dtype,
        memory: ProofMemory,
    ) -> None:
        self._model = model
        self._partition = partition
        self._server = server
        self._device = device
        self._loss_function = loss_function
        self._link = link
        self._memory = memory
        self._known: dict[tuple[object, ...], str | None] = {}  # keys of what was asked for
        self._done: set[tuple[object, ...]] = set()
        self._agreed: set[tuple[object, ...]] = set()  # by all ranks, which have the same paths
        self._reference: Reference | None = None
        self._theirs: Evidence | None = None
        self._shares: list[float] = []
        self.microbatches: list[Microbatch] = []
        self.on_host = False  # whether the model's own code ran there, without random numbers

    @property
    def _world(self) -> World:
        return self._server.world

    def is_done(self, batch: Batches, path: tuple[object, ...]) -> bool:
        """Whether the code that a path names was proven, for all ranks."""
        if path not in self._agreed and all(self._world.gather_facts(self._is_done(batch, path))):
            self._agreed.add(path)
        return path in self._agreed

    def _is_done(self, batch: Batches, path: tuple[object, ...]) -> bool:
        if path not in self._done:
            first = batch if isinstance(batch, Mapping) else batch[0]
            key = key_of(self._model, loss_function=self._loss_function, batch=first, path=path)
            self._known[path] = key
            if self._memory.has(key):
                self._done.add(path)
        return path in self._done

    def see(
        self,
        batch: Batches,
        rule: Rule,
        *,
        cut: bool,
        buffers: Mapping[str, Tensor],
        seed_of: SeedOf,
        room: int | None,
    ) -> None:
        """Run the model's own code, with the present weights; nothing else may be on the device.

        Args:
            batch: the first one.
            rule: what its loss averages over.
            cut: whether a few tokens of a row are enough for the model.
            buffers: as training has left them.
            seed_of: as of `Reference`.
            room: device memory that there is; None: no limit is known.
        """
        failure: Exception | None = None
        for on_host in self._places(room):
            for short in (True, False) if cut else (False,):
                rows = self._world.gather_facts(proof_rows(batch, rule, cut=short))[0]
                shares = _shares(rows, rule)
                self._reference = Reference(
                    model=self._model,
                    partition=self._partition,
                    server=self._server,
                    device=self._device,
                    loss_function=self._loss_function,
                    buffers=buffers,
                    seed_of=seed_of,
                    on_host=on_host,
                    room=self._cache_bytes(room),
                )
                self.microbatches, self._shares, self.on_host = rows, shares, on_host
                try:
                    self._theirs = self._run_reference(rule, self._scale)
                except torch.OutOfMemoryError as error:
                    failure = error
                    break
                except Exception as error:  # rows this short, or the model's own code at all
                    failure = error
                    continue
                return
        self._theirs = Evidence(torch.device("cpu"))
        self._give_up(f"the model's own code fails on a few rows: {failure}")

    def _places(self, room: int | None) -> tuple[bool, ...]:
        """Where the model's own code may run: on the device, if it has room; else on the host."""
        if self._device.torch_device.type == "cpu":
            return (False,)
        return (False, True) if room is None or self._least_bytes() <= room else (True,)

    def _least_bytes(self) -> int:
        sizes = {n: u.form.weight_layout.nbytes for n, u in self._server.units.items()}
        around = sum(nbytes for name, nbytes in sizes.items() if not name.startswith("L"))
        return 2 * around + 5 * max(nbytes for name, nbytes in sizes.items() if name[0] == "L")

    def _cache_bytes(self, room: int | None) -> int:
        if room is None or self._device.torch_device.type == "cpu":
            return 0
        return max(0, (room - self._least_bytes()) // 2)

    @property
    def _scale(self) -> float:
        return FLOAT16_SCALE if self._link is torch.float16 else 1.0

    def _run_reference(self, rule: Rule, factor: float) -> Evidence:
        assert self._reference is not None
        units = {o: u for u in self._server.units.values() for o in u.form.trained.names}

        def piece_of(owner: str, gradient: Tensor) -> Tensor:
            unit = units[owner]
            return gradient.reshape(-1)[unit.form.trained.piece(owner, unit.share)]

        return self._reference.run(
            self.microbatches,
            self._shares,
            divide_by_weight=rule is Rule.SUM_AND_WEIGHT,
            factor=factor,
            piece_of=piece_of,
        )

    def _give_up(self, reason: str) -> None:
        self.microbatches = []
        logger.warning(
            "the first step is not compared with plain PyTorch: %s. Compare a few steps of a small "
            "version of this model yourself.",
            reason,
        )

    def check(self, rule: Rule, path: tuple[object, ...], run: Run, buffers: Buffers) -> None:
        """Run the engine on the same rows and compare; it must be left as it was.

        Args:
            rule: what the loss averages over.
            path: what is proven by it.
            run: the engine's run.
            buffers: gives those that training changes, as they are now.

        Raises:
            ProofError: the engine does not compute what the model's own code does.
        """
        theirs, self._theirs = self._theirs, None  # weights change
        assert theirs is not None
        if self.microbatches:
            mine, failure = self._evidence_of(rule, run, buffers), None
            is_finite = all(self._world.gather_facts(theirs.is_finite))
            try:
                if is_finite:
                    self._compare(mine, theirs, rule)
            except ProofError as error:
                failure = str(error)
            found = [one for one in self._world.gather_facts(failure) if one is not None]
            if found:
                raise ProofError(found[0])
            if is_finite:
                self._memory.add(self._known.get(path))
            else:
                self._give_up("the model's own code has a loss or a gradient that is not finite")
        self._done.add(path)

    def _compare(self, mine: Evidence, theirs: Evidence, rule: Rule) -> None:
        def noise(wanted: bool) -> Evidence | None:  # noqa: FBT001
            if not any(self._world.gather_facts(wanted)):
                return None
            return self._run_reference(rule, self._scale * ODD_FACTOR)

        order = [name for name, _ in self._model.named_parameters()]
        check(mine, theirs, tolerance=self._tolerance, order=order, noise=noise)

    def _evidence_of(self, rule: Rule, run: Run, buffers: Buffers) -> Evidence:
        """The engine's, or a refusal: the model's own code runs the same rows."""
        try:
            return self._evidence(rule, run, buffers)
        except (ValueError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ProofError(
                f"the engine fails where the model's own code does not: {type(error).__name__}: "
                f"{error}. Nothing has been changed; please report the model."
            ) from error

    @property
    def _tolerance(self) -> float:
        wide = self.on_host and self._link is not torch.float32
        return HOST_TOLERANCE if wide else TOLERANCE[self._link]

    def _evidence(self, rule: Rule, run: Run, buffers: Buffers) -> Evidence:
        before = {owner: buffer.clone() for owner, buffer in buffers().items()}
        mine = Evidence(torch.device("cpu") if self.on_host else self._device.torch_device)
        try:
            factor = run(mine, self.microbatches, total_count(rule, self.microbatches))
            mine.buffers = {
                owner: buffer.to("cpu", copy=True)
                for owner, buffer in buffers().items()
                if not same(buffer, before[owner])
            }
        finally:
            for owner, buffer in buffers().items():
                buffer.copy_(before[owner])
        return mine.scaled(factor)


Buffers = Callable[[], Mapping[str, Tensor]]


def _shares(rows: Iterable[Microbatch], rule: Rule) -> list[float]:
    """What the loss of each microbatch counts."""
    rows = list(rows)
    if rule in (Rule.SUM_AND_WEIGHT, Rule.UNKNOWN):
        return [1.0] * len(rows)
    total = total_count(rule, rows)
    return [total_count(rule, [one]) / max(1, total) for one in rows]
