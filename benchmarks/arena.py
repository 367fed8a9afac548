"""How fast host memory is made ready for the device: our arena against torch's pinned allocator.

python benchmarks/arena.py [--gib 16]
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from l2l.device import CudaDevice
from l2l.parameter_server.host_memory import Arena


def main() -> None:
    """Take the same amount both ways."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=int, default=16)
    arguments = parser.parse_args()
    device = CudaDevice(torch.device("cuda"))
    torch.zeros(1, device="cuda")
    arena = Arena(device)
    found = {}
    for gib in (1, arguments.gib):
        start = time.perf_counter()
        arena.take("registered", gib << 30, torch.uint8, registered=True)
        found[f"arena, registered, {gib} GiB"] = gib / (time.perf_counter() - start)
        start = time.perf_counter()
        arena.take("plain", gib << 30, torch.uint8, registered=False)
        found[f"arena, not registered, {gib} GiB"] = gib / (time.perf_counter() - start)
    start = time.perf_counter()
    held = torch.empty(4 << 30, dtype=torch.uint8, pin_memory=True)
    found["torch pinned, 4 GiB"] = 4 / (time.perf_counter() - start)
    del held
    for name, rate in found.items():
        print(f"{name:<36}{rate:8.1f} GiB/s")
    print(json.dumps(found))
    device.close()


if __name__ == "__main__":
    main()
