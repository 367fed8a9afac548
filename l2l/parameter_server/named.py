"""All optimizers, by the names that settings and the command line have for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from l2l.parameter_server.adafactor import Adafactor
from l2l.parameter_server.muon import Muon
from l2l.parameter_server.optimizer import Optimizer
from l2l.parameter_server.optimizers import SGD, AdamW, Lion, ScheduleFreeAdamW

OPTIMIZERS: Mapping[str, Callable[..., Optimizer]] = {
    "adamw": AdamW,
    "adamw-8bit": partial(AdamW, moments="8bit"),
    "adafactor": Adafactor,
    "lion": Lion,
    "muon": Muon,
    "schedule-free": ScheduleFreeAdamW,
    "sgd": SGD,
}
