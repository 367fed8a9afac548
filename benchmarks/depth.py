"""What a step costs that leaves layers out: seconds, and weights fetched, against layers run.

    python benchmarks/depth.py [--shape 3.2b] [--tokens 65536] [--device-memory 16GiB]

One engine; steps with all layers, then with three quarters, half and a quarter of them, evenly
spread. A step has a part that does not depend on layers (embedding, head, loss), so that time is
compared with a line through the first and the last row. Fetches are counted in a trace and must be
those of the schedule. The last line is JSON.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

import l2l
from l2l.bench.workload import SHAPES, Workload
from l2l.schedule import Action, parse_line

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import inside


def spread(number: int, num_layers: int) -> list[int]:
    """So many layers, evenly spread."""
    return sorted({round((i + 0.5) * num_layers / number - 0.5) for i in range(number)})


def measure(
    engine: l2l.Engine, batch: dict[str, torch.Tensor], layers: list[int], steps: int
) -> dict[str, float]:
    """Seconds of a step, and fetches of layers in one."""
    for _ in range(2):
        _ = engine.step(batch, layers=layers).loss
    began = time.perf_counter()
    for _ in range(steps):
        _ = engine.step(batch, layers=layers).loss
    seconds = (time.perf_counter() - began) / steps
    with engine.trace() as trace:
        engine.step(batch, layers=layers)
    lines = [parse_line(span.text) for span in trace.spans]
    fetched = [one.unit for one in lines if isinstance(one, Action) and one.kind == "fetch U"]
    schedule = inside.schedules(engine)[next(reversed(inside.schedules(engine)))]
    asked = [one.unit for one in schedule.actions if one.kind == "fetch U"]
    return {
        "layers": len(layers),
        "seconds": seconds,
        "fetched": sum(unit.startswith("L") for unit in fetched),
        "in_the_schedule": sum(unit.startswith("L") for unit in asked),
    }


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="3.2b", choices=SHAPES)
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--device-memory", default=None)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    workload = Workload(
        shape=options.shape,
        num_layers=options.layers,
        num_tokens=options.tokens,
        length=options.length,
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = workload.model(device)
    ids = torch.randint(0, 1000, (options.tokens // options.length, options.length))
    batch = {"input_ids": ids, "labels": ids}
    with l2l.Engine(
        model,
        optimizer=l2l.AdamW(lr=1e-5),
        clip_norm=1.0,
        device=device.type,
        device_memory=options.device_memory,
    ) as engine:
        total = len(engine.layers)
        numbers = dict.fromkeys(max(1, total * part // 4) for part in (4, 3, 2, 1))
        found = [measure(engine, batch, spread(n, total), options.steps) for n in numbers]
    first, last = found[0], found[-1]
    slope = (first["seconds"] - last["seconds"]) / max(1, first["layers"] - last["layers"])
    print("| layers | seconds a step | of the line | fetches | in the schedule |")
    print("|---|---|---|---|---|")
    for one in found:
        line = last["seconds"] + slope * (one["layers"] - last["layers"])
        one["of_the_line"] = one["seconds"] / line
        print(
            f"| {one['layers']} | {one['seconds']:.3f} | {one['of_the_line']:.1%} | "
            f"{one['fetched']} | {one['in_the_schedule']} |"
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
