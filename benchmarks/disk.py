"""What optimizer state on disk costs, beside what the disk can do.

    python benchmarks/disk.py --folder FOLDER_ON_THE_DISK [--shape 3.2b] [--tokens 65536]

Steps with all state in memory; steps with that of some layers on disk; and, in the same run, blocks
of the same sizes read and written without any step: reading alone, writing alone, and both at the
same time. Prints a table with seconds and bytes a second of each, bytes counted where they reach
the system beside those that the kernel has counted for this process (/proc/self/io), how busy the
lanes were, and whether losses are the same. The last line is JSON.
"""

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import l2l
from l2l.bench.workload import SHAPES, Workload
from l2l.device import PAGE_BYTES, DiskFolder, format_bytes
from l2l.parameter_server import block_bytes

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import inside

ROUNDS = 3  # of raw requests


def kernel_bytes() -> tuple[int, int]:
    """What this process has had read from disks, and written there, as the kernel counts."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]), int(lines["write_bytes"])


@contextmanager
def made(options: argparse.Namespace, workload: Workload, *, on_disk: int) -> Iterator[l2l.Engine]:
    """An engine with the state of so many layers on disk."""
    more: dict[str, Any] = {"disk": options.folder} if on_disk else {}
    chosen = {"num_device_states": 0, "num_shared": 0, "outer_state": False}
    chosen |= {"num_on_disk": on_disk} if on_disk else {}
    engine = l2l.Engine(
        workload.model(torch.device(options.device)),
        optimizer=l2l.AdamW(lr=1e-5),
        clip_norm=options.clip_norm or None,
        device=options.device,
        device_memory=options.device_memory,
        host_memory=options.host_memory,
        prove=False,
        execution=l2l.Execution(overrides=chosen),
        **more,
    )
    try:
        yield engine
    finally:
        engine.close(give_back=False)


def steps(engine: l2l.Engine, batch: dict[str, torch.Tensor], number: int) -> dict[str, Any]:
    """Seconds a step, losses, and bytes."""
    for _ in range(2):
        engine.step(batch).loss  # noqa: B018 (reading it waits)
    disk = inside.server(engine).disk
    count = (lambda: (0, 0)) if disk is None else lambda: own_bytes(disk.folder)
    inside.finish_step(engine)
    before, kernel, losses, seconds = count(), kernel_bytes(), list[float](), list[float]()
    with engine.trace() as trace:
        for _ in range(number):
            start = time.perf_counter()
            losses.append(engine.step(batch).loss)
            seconds.append(time.perf_counter() - start)
        inside.finish_step(engine)
    after, found = count(), kernel_bytes()
    return {
        "seconds": statistics.median(seconds),
        "losses": losses,
        "read": (after[0] - before[0]) // number,
        "written": (after[1] - before[1]) // number,
        "kernel_read": (found[0] - kernel[0]) // number,
        "kernel_written": (found[1] - kernel[1]) // number,
        "planned": engine.plan.disk_read_bytes,
        "expected": engine.plan.predicted_seconds,
        "busy": {
            lane: trace.busy_seconds(lane) / trace.seconds
            for lane in ("compute", "update", "read", "write")
        },
    }


def own_bytes(folder: DiskFolder) -> tuple[int, int]:
    """What was read and written, as it is counted where it reaches the system."""
    return folder.num_read_bytes, folder.num_written_bytes


def raw(folder: Path, sizes: list[int]) -> dict[str, float]:
    """Bytes a second of blocks like these, without steps."""
    disk = DiskFolder(l2l.Disk(folder))
    memory = []
    for _ in range(2):
        pages = torch.zeros(max(sizes) + PAGE_BYTES, dtype=torch.uint8)
        memory.append(pages[-pages.data_ptr() % PAGE_BYTES :][: max(sizes)])
    memory[1].random_(generator=torch.Generator().manual_seed(0))
    try:
        blocks = [disk.make(size) for size in sizes]

        def write() -> None:
            for block in blocks:
                disk.write(block, memory[1][: block.nbytes])

        def read() -> None:
            for block in blocks:
                disk.read(block, memory[0][: block.nbytes])

        write()  # makes their room
        found = {"reads": rate(sum(sizes), read), "writes": rate(sum(sizes), write)}

        def note(name: str, work: Callable[[], None]) -> None:
            found[name] = rate(sum(sizes), work)

        both = (("reads beside writes", read), ("writes beside reads", write))
        threads = [threading.Thread(target=note, args=one) for one in both]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        disk.close()
    return found


def rate(nbytes: int, work: Callable[[], None]) -> float:
    """Bytes a second of some work, done again and again."""
    start = time.perf_counter()
    for _ in range(ROUNDS):
        work()
    return ROUNDS * nbytes / (time.perf_counter() - start)


def show(results: dict[str, Any]) -> None:
    """Print the table."""
    for name in ("memory", "disk"):
        if name in results:
            one = results[name]
            busy = ", ".join(f"{lane} {share:.0%}" for lane, share in one["busy"].items())
            print(f"state in {name}: {one['seconds']:.3f} s a step; busy: {busy}")
    disk, apart = results["disk"], results["raw"]
    print(f"a step reads {format_bytes(disk['read'])}, the plan says {disk['planned']:,} bytes")
    for way, both in (("read", "reads beside writes"), ("written", "writes beside reads")):
        own, kernel = disk[way] / disk["seconds"], disk[f"kernel_{way}"]
        verb = {"read": "reads", "written": "writes"}[way]
        print(
            f"{way:<8}{format_bytes(disk[way]):>12} a step ({format_bytes(kernel)} by the "
            f"kernel's count), {own / 1e6:,.0f} MB/s; raw {apart[verb] / 1e6:,.0f} alone, "
            f"{apart[both] / 1e6:,.0f} MB/s with the other way"
        )
    if "memory" in results:
        same = disk["losses"] == results["memory"]["losses"]
        print(f"losses are {'the same' if same else 'DIFFERENT'}")


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--shape", default="3.2b", choices=SHAPES)
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--device-memory", default=None)
    parser.add_argument("--host-memory", default=None)
    parser.add_argument("--clip-norm", type=float, default=0.0)
    parser.add_argument("--on-disk", type=int, default=None, help="layers (default: all)")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--skip-memory", action="store_true", help="where all does not fit there")
    options = parser.parse_args()
    workload = Workload(
        shape=options.shape,
        num_layers=options.layers,
        num_tokens=options.tokens,
        length=options.length,
    )
    ids = torch.randint(0, 1000, (options.tokens // options.length, options.length))
    batch = {"input_ids": ids, "labels": ids}
    number = options.on_disk or options.layers or SHAPES[options.shape].num_hidden_layers
    results: dict[str, Any] = {}
    if not options.skip_memory:
        with made(options, workload, on_disk=0) as engine:
            results["memory"] = steps(engine, batch, options.steps)
    with made(options, workload, on_disk=number) as engine:
        results["disk"] = steps(engine, batch, options.steps)
        units = inside.server(engine).units.values()
        sizes = [block_bytes(unit.held) for unit in units if unit.block is not None]
    results["raw"] = raw(options.folder, sizes)
    show(results)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
