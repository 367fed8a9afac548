"""What saving in the background costs, on the shape of the step benchmark.

    python benchmarks/saving.py --folder FOLDER_ON_A_DISK [--shape 3.2b] [--tokens 65536]

Steps without saving; steps while a checkpoint is written, with all the host memory there is; the
same with none to spare, so that updates wait for the disk. Prints for each how much longer the
steps took, how long updates waited and how long that was expected to be, how far the process grew,
and whether every tensor in the files is the one the engine had after the step that was saved. The
last line is JSON.
"""

import argparse
import json
import shutil
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import torch

import l2l
from l2l.bench.workload import SHAPES, Workload
from l2l.checkpoint.checkpoint import Checkpoint

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import inside

NUM_THREADS = 8


def resident_bytes() -> int:
    """Anonymous memory of this process: without pages of files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of a tensor's bytes."""
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy().data)


def held(engine: l2l.Engine) -> dict[str, int]:
    """Checksums of all tensors the engine has now."""
    inside.server(engine).settle_all()
    tensors = {
        f"{unit} {name}": tensor
        for unit in inside.server(engine).units
        for name, tensor in inside.server(engine).image(unit).tensors.items()
    }
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return dict(zip(tensors, pool.map(checksum, tensors.values()), strict=True))


def written(folder: Path, units: list[str]) -> dict[str, int]:
    """Checksums of all tensors in a checkpoint."""
    checkpoint = Checkpoint(folder)

    def of_unit(unit: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, tensor in checkpoint.read(unit, checkpoint.kinds(unit)):
            found[f"{unit} {name}"] = checksum(tensor)
        return found

    found: dict[str, int] = {}
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for one in pool.map(of_unit, units):
            found |= one
    return found


def timed_steps(engine: l2l.Engine, batch: dict[str, torch.Tensor], number: int) -> float:
    """Seconds of a step, over some."""
    began = time.perf_counter()
    for _ in range(number):
        report = engine.step(batch)
    _ = report.loss
    return (time.perf_counter() - began) / number


def save(engine: l2l.Engine, batch: dict[str, torch.Tensor], folder: Path, usual: float) -> dict:
    """Save beside steps."""
    before = resident_bytes()
    began = time.perf_counter()
    saving = engine.save(folder, background=True)
    ends, most = [began], before
    while not saving.is_done or len(ends) < 3:
        _ = engine.step(batch).loss
        ends.append(time.perf_counter())
        most = max(most, resident_bytes())
    seconds, steps = ends[-1] - began, len(ends) - 1
    saving.wait()
    return {
        "gigabytes": round(saving.num_bytes / 1e9, 2),
        "steps": steps,
        "seconds_a_step": round(seconds / steps, 3),
        "longer": round(seconds / steps / usual - 1, 4),
        "each": [round(end - start, 2) for start, end in pairwise(ends)],
        "writing_seconds": round(saving.seconds, 2),
        "waited_seconds": round(saving.stall_seconds, 2),
        "lost_seconds": round(seconds - steps * usual, 2),
        "expected_wait_seconds": round(saving.expected_stall_seconds, 2),
        "grown_gigabytes": round((most - before) / 1e9, 2),
    }


def is_of_one_step(engine: l2l.Engine, batch: dict[str, torch.Tensor], folder: Path) -> bool:
    """Save beside steps once more, and compare what is written with what the engine had."""
    expected = held(engine)
    saving = engine.save(folder, background=True)
    for _ in range(2):
        engine.step(batch)
    saving.wait()
    return written(folder, list(inside.server(engine).units)) == expected


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
    parser.add_argument("--device", default=None)
    parser.add_argument("--device-memory", default=None)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", choices=("with spare memory", "without"), default=None)
    options = parser.parse_args()
    workload = Workload(
        shape=options.shape,
        num_layers=options.layers,
        num_tokens=options.tokens,
        length=options.length,
    )
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = workload.model(torch.device(device))
    ids = torch.randint(0, 1000, (options.tokens // options.length, options.length))
    batch = {"input_ids": ids, "labels": ids}
    results = {}
    with l2l.Engine(
        model,
        optimizer=l2l.AdamW(lr=1e-5),
        clip_norm=1.0,
        device=device,
        device_memory=options.device_memory,
    ) as engine:
        timed_steps(engine, batch, 3)
        engine.prepare_saving()
        began = time.perf_counter()
        inside.server(engine).spare.wait()
        print(f"spare memory was ready after {time.perf_counter() - began:.1f} s", flush=True)
        usual = timed_steps(engine, batch, options.steps)
        print(f"without saving: {usual:.3f} s a step", flush=True)
        for name in ("with spare memory", "without"):
            if options.only not in (None, name):
                continue
            if name == "without":
                inside.persistence(engine).spare_bytes = lambda: 0
            folder = options.folder / "saved"
            results[name] = save(engine, batch, folder, usual)
            print(f"{name}: {results[name]}", flush=True)
            shutil.rmtree(folder)
            results[name]["is_of_one_step"] = is_of_one_step(engine, batch, folder)
            shutil.rmtree(folder)
            print(f"of exactly one step: {results[name]['is_of_one_step']}", flush=True)
    print(json.dumps({"usual": usual, **results}))


if __name__ == "__main__":
    main()
