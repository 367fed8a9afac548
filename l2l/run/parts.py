"""What lines work with: made before the first step, shared by all that perform them."""

from __future__ import annotations

from dataclasses import dataclass

from l2l.device import Device
from l2l.model import Compiler, LossFunction, Partition
from l2l.parameter_server import HostGradients, ParameterServer
from l2l.run.lookup import HostRows
from l2l.run.stash import Stash
from l2l.run.transfer import Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A model, where it runs, and who owns which memory."""

    partition: Partition
    device: Device
    server: ParameterServer
    transfer: Transfer
    stash: Stash
    rows: HostRows
    compiler: Compiler
    loss_function: LossFunction | None  # None: the model's own
    gradients: HostGradients | None = None  # that wait for the user's own code
