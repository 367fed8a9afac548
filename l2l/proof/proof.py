"""One engine's proof: which code was proven, against what, and what it means if it differs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from l2l.model import (
    IGNORED,
    Microbatch,
    Rule,
    has_rows,
    move_batch,
    num_rows,
    same,
    take_rows,
    trial_batch,
)
from l2l.proof.evidence import ODD_FACTOR, TOLERANCE, Evidence, ProofError, check
from l2l.proof.memory import ProofMemory, key_of
from l2l.proof.reference import Reference, SeedOf, Subject

logger = logging.getLogger("l2l")

FLOAT16_SCALE = 256.0  # of losses: with it hardly any gradient is zero or infinite
HOST_TOLERANCE = 0.1  # of 16-bit gradients, where one run was on the host: other kernels

Batches = Mapping[str, Any] | Sequence[Mapping[str, Any]]
Path = tuple[object, ...]
Buffers = Callable[[], Mapping[str, Tensor]]
Run = Callable[[Evidence, Sequence[Microbatch], int], float]
"""Runs microbatches through the engine, with what their loss averages over; adds gradients to the
evidence, and returns what they must be multiplied with."""


@final
@dataclass(eq=False, kw_only=True)
class Proof(Subject):
    """Owner of what an engine has proven."""

    link: torch.dtype
    memory: ProofMemory
    _keys: dict[Path, str | None] = field(default_factory=dict, init=False)
    _done: set[Path] = field(default_factory=set, init=False)
    _agreed: set[Path] = field(default_factory=set, init=False)  # by all ranks
    _reference: Reference | None = field(default=None, init=False)  # None: cannot be compared
    _theirs: Evidence | None = field(default=None, init=False)
    on_host: bool = field(default=False, init=False)
    """Whether the model's own code ran there, without random numbers."""

    def is_done(self, batch: Batches, path: Path) -> bool:
        """Whether the code that a path names was proven, for all ranks."""
        if path not in self._agreed:
            if path not in self._done:
                first = batch if isinstance(batch, Mapping) else batch[0]
                key = key_of(self.model, loss_function=self.loss_function, batch=first, path=path)
                self._keys[path] = key
                if self.memory.has(key):
                    self._done.add(path)
            if all(self.server.world.gather_facts(path in self._done)):
                self._agreed.add(path)
        return path in self._agreed

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
                rows = self.server.world.gather_facts(proof_rows(batch, rule, cut=short))[0]
                self.on_host = on_host
                self._reference = Reference(
                    self,
                    rows=rows,
                    rule=rule,
                    buffers=buffers,
                    seed_of=seed_of,
                    on_host=on_host,
                    room=max(0, ((room or 0) - self._least_bytes()) // 2),
                )
                try:
                    self._theirs = self._reference.run(self._scale)
                except torch.OutOfMemoryError as error:
                    failure = error
                    break
                except Exception as error:  # rows this short, or the model's own code at all
                    failure = error
                    continue
                return
        self._give_up(f"the model's own code fails on a few rows: {failure}")

    def _places(self, room: int | None) -> tuple[bool, ...]:
        """Where the model's own code may run: on the device, if it has room; else on the host."""
        if self.device.torch_device.type == "cpu":
            return (False,)
        return (False, True) if room is None or self._least_bytes() <= room else (True,)

    def _least_bytes(self) -> int:
        sizes = {n: u.form.weight_layout.nbytes for n, u in self.server.units.items()}
        around = sum(nbytes for name, nbytes in sizes.items() if not name.startswith("L"))
        return 2 * around + 5 * max(nbytes for name, nbytes in sizes.items() if name[0] == "L")

    @property
    def _scale(self) -> float:
        return FLOAT16_SCALE if self.link is torch.float16 else 1.0

    def _give_up(self, reason: str) -> None:
        self._reference = None
        logger.warning(
            "the first step is not compared with plain PyTorch: %s. Compare a few steps of a small "
            "version of this model yourself.",
            reason,
        )

    def check(self, rule: Rule, path: Path, run: Run, buffers: Buffers) -> None:
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
        if self._reference is not None:
            assert theirs is not None
            gather, failure = self.server.world.gather_facts, None
            mine = self._evidence(rule, self._reference.rows, run, buffers)
            is_finite = all(gather(theirs.is_finite))
            try:
                if is_finite:
                    self._compare(mine, theirs, self._reference)
            except ProofError as error:
                failure = str(error)
            for found in gather(failure):
                if found is not None:
                    raise ProofError(found)
            if is_finite:
                self.memory.add(self._keys.get(path))
            else:
                self._give_up("the model's own code has a loss or a gradient that is not finite")
        self._done.add(path)

    def _compare(self, mine: Evidence, theirs: Evidence, reference: Reference) -> None:
        def noise(wanted: bool) -> Evidence | None:  # noqa: FBT001
            wanted = any(self.server.world.gather_facts(wanted))
            return reference.run(self._scale * ODD_FACTOR) if wanted else None

        wide = self.on_host and self.link is not torch.float32
        tolerance = HOST_TOLERANCE if wide else TOLERANCE[self.link]
        order = [name for name, _ in self.model.named_parameters()]
        check(mine, theirs, tolerance=tolerance, order=order, noise=noise)

    def _evidence(
        self, rule: Rule, rows: Sequence[Microbatch], run: Run, buffers: Buffers
    ) -> Evidence:
        """The engine's, or a refusal: the model's own code runs the same rows."""
        before = {owner: buffer.clone() for owner, buffer in buffers().items()}
        mine = Evidence(torch.device("cpu") if self.on_host else self.device.torch_device)
        try:
            factor = run(mine, rows, rule.total(rows))
            mine.buffers = {
                owner: buffer.to("cpu", copy=True)
                for owner, buffer in buffers().items()
                if not same(buffer, before[owner])
            }
        except (ValueError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ProofError(
                f"the engine fails where the model's own code does not: {type(error).__name__}: "
                f"{error}. Nothing has been changed; please report the model."
            ) from error
        finally:
            for owner, buffer in buffers().items():
                buffer.copy_(before[owner])
        return mine.scaled(factor)


def proof_rows(batch: Batches, rule: Rule, *, cut: bool) -> list[Microbatch]:
    """Two microbatches of two rows, which differ where they can; of an unknown rule, one.

    Args:
        batch: as a step is given it.
        rule: what the loss averages over.
        cut: whether rows of tokens are cut short.
    """
    if isinstance(batch, Mapping):
        first, second = take_rows(batch, 0, 2), take_rows(batch, 2, 4)
        if num_rows(batch) < 4:  # the same rows, the other way round
            second = {n: v.flip(0) if has_rows(v) else v for n, v in first.items()}
    else:
        first, second = dict(batch[0]), dict(batch[-1])
    parts = [trial_batch(one, cut=cut) for one in (first, second)]
    for part in parts:  # something to learn from, also if the first tokens are a prompt
        if not rule.count(part):
            part["labels"] = torch.where(part["labels"] == IGNORED, 0, part["labels"])
    return [move_batch(part, "cpu") for part in (parts[:1] if rule is Rule.UNKNOWN else parts)]
