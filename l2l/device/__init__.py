"""The seam to the hardware: lanes, waits, memory and random numbers of one device.

It offers what the relay needs and no more: submit work to a lane, record an event after it, let a
lane wait for an event, take device memory, take host memory the device can reach directly, seed the
generators. There are two devices: `CudaDevice` (cuda.py), and `CheckingDevice` (checking.py), the
same engine on the CPU, which runs work as late as the waits allow and so finds the waits that are
missing. What another one would have to offer is said there.
"""

from __future__ import annotations

import torch

from l2l.device.byte_size import format_bytes, parse_bytes
from l2l.device.checking import CheckingDevice, QueuedEvent
from l2l.device.cuda import CudaDevice, busy_link, num_devices
from l2l.device.disk import Block, Disk, DiskError, DiskFolder, describe_wear
from l2l.device.operators import tensors_in
from l2l.device.pages import PAGE_BYTES, untouched_pages
from l2l.device.worker import Event, UpdateFailedError, Work

Device = CheckingDevice | CudaDevice


def open_device(device: str | torch.device | None) -> Device:
    """The device named by the user; None is the accelerator if there is one, else the CPU.

    Raises:
        ValueError: the device is not there, or of a kind this engine does not drive.
    """
    if device is None:
        device = "cuda" if num_devices() else "cpu"
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"device={device!r} is not a torch device. Try 'cuda' or 'cpu'."
        ) from error
    if wanted.type == "cpu":
        return CheckingDevice()
    if wanted.type != "cuda":
        raise ValueError(f"device={str(wanted)!r} is not supported. Expected 'cuda' or 'cpu'.")
    if (wanted.index or 0) >= num_devices():
        raise ValueError(
            f"device={str(wanted)!r} is not available: this process sees {num_devices()} CUDA "
            "device(s). Use device='cpu', or check the driver and CUDA_VISIBLE_DEVICES."
        )
    return CudaDevice(wanted)
