"""How much host memory a parameter server needs, before any is taken."""

from __future__ import annotations

from collections.abc import Callable

import torch

from l2l.parameter_server.adafactor import Adafactor
from l2l.parameter_server.optimizer import AdamW, Optimizer
from l2l.parameter_server.policy import UpdatePolicy
from l2l.parameter_server.unit import UnitForm

ROUNDING_BYTES = 32 << 20  # on the device, through which gradients leave in 16 bits
NUM_STAGING = 4  # gradients of layers on their way to an eager update


def host_bytes(forms: list[UnitForm], policy: UpdatePolicy) -> int:
    """Bytes of the server with its staging; stash and late updates come on top."""
    total = sum(sum(form.bytes_by_kind().values()) for form in forms)
    if policy is UpdatePolicy.ON_DEVICE:
        return total
    layers = [form.staging_layout.nbytes for form in forms if form.name.startswith("L")]
    outer = [form.staging_layout.nbytes for form in forms if not form.name.startswith("L")]
    if policy is UpdatePolicy.JUST_IN_TIME:
        return total + sum(layers) + sum(outer)
    return total + sum(outer) + max(layers) * min(NUM_STAGING, len(layers))


def alternatives(
    forms_with: Callable[[Optimizer], list[UnitForm]], policy: UpdatePolicy, link: torch.dtype
) -> dict[str, int]:
    """Bytes that other optimizers would need, by the setting that chooses them."""
    eight_bit = forms_with(AdamW(moments="8bit"))
    found = {"optimizer=l2l.AdamW(moments='8bit')": host_bytes(eight_bit, policy)}
    if policy is not UpdatePolicy.JUST_IN_TIME and link is torch.bfloat16:
        adafactor = forms_with(Adafactor())
        found["optimizer=l2l.Adafactor()"] = host_bytes(adafactor, UpdatePolicy.ON_DEVICE)
    return found
