"""Train a small language model through the relay on text that every machine with Python has.

`make demo` runs this: a byte-level transformer learns the standard library's own source files, on
the accelerator if there is one, else on the CPU. Only one of its layers and the next are on the
device at a time. At the end it prints what was learnt, how much device memory the step took and how
much the same step takes in plain PyTorch, and lets the trained model write a few lines.

    python examples/demo.py [--steps 150] [--folder runs/demo] [--device cpu]
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import l2l
from l2l.device import Device, format_bytes
from l2l.schedule import Lane

LENGTH, ROWS, MICROBATCH = 128, 16, 4


class Layer(nn.Module):
    """A transformer layer: causal attention, then a perceptron."""

    def __init__(self, hidden: int, heads: int) -> None:
        """Make the layer with torch's own initialisation."""
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.output = nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        """[rows, length, hidden] in and out."""
        rows, length, _ = hidden.shape
        projected = self.query_key_value(self.norm1(hidden))
        query, key, value = (
            part.view(rows, length, self.heads, -1).transpose(1, 2)
            for part in projected.chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.output(attended.transpose(1, 2).reshape(rows, length, -1))
        return hidden + self.down(F.gelu(self.up(self.norm2(hidden))))


class ByteModel(nn.Module):
    """A language model over bytes: nothing in it knows about the relay."""

    def __init__(self, *, hidden: int = 192, heads: int = 6, layers: int = 8) -> None:
        """Make a model for texts of `LENGTH` bytes."""
        super().__init__()
        self.bytes = nn.Embedding(256, hidden)
        self.positions = nn.Embedding(LENGTH, hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, 256, bias=False)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Logits, and the mean loss over the labels if they are given."""
        hidden = self.bytes(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.norm(hidden))
        if labels is None:
            return {"logits": logits}
        return {
            "loss": F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()),
            "logits": logits,
        }

    @torch.no_grad()
    def write(self, start: str, num_bytes: int) -> str:
        """Continue a text, byte by byte."""
        ids = list(start.encode())
        for _ in range(num_bytes):
            window = torch.tensor([ids[-LENGTH:]], device=self.head.weight.device)
            logits = self(window)["logits"][0, -1].float()
            ids.append(int(torch.multinomial((logits / 0.7).softmax(-1), 1)))
        return bytes(ids).decode(errors="replace")


def standard_library_text(limit_bytes: int = 4 << 20) -> bytes:
    """Source files of the standard library, in a fixed order."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes() + b"\n"
        if len(text) >= limit_bytes:
            break
    return bytes(text)


def batches(text: bytes, *, seed: int, rows: int = ROWS) -> Iterator[dict[str, Tensor]]:
    """Random windows of the text, for ever."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - LENGTH - 1, (rows,), generator=generator).tolist()
        windows = torch.stack([data[start : start + LENGTH + 1] for start in starts])
        yield {"ids": windows[:, :-1].contiguous(), "labels": windows[:, 1:].contiguous()}


def plain_peak(model: nn.Module, batch: dict[str, Tensor], *, device: Device, size: int) -> int:
    """Device memory of the same step in plain PyTorch, with microbatches of `size` rows."""
    model = copy.deepcopy(model).to(device.torch_device)

    def step() -> None:
        optimizer = torch.optim.AdamW(model.parameters())
        for start in range(0, ROWS, size):
            part = {k: v[start : start + size].to(device.torch_device) for k, v in batch.items()}
            (model(**part)["loss"] * (size / ROWS)).backward()
        optimizer.step()

    device.give_back()
    device.reset_peak()
    device.submit(Lane.COMPUTE, "plain", step)
    is_counted = device.torch_device.type == "cuda"  # what was there before
    held = 0 if is_counted else sum(parameter.nbytes for parameter in model.parameters())
    return device.peak_bytes() + held


class Display:
    """Progress: a live line on a terminal, plain lines elsewhere."""

    def __init__(self, num_steps: int) -> None:
        """Show `num_steps` steps."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = Console()
        self._num_steps = num_steps
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("", total=num_steps, numbers="")

    def __enter__(self) -> Display:
        """Start showing."""
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop showing."""
        self._progress.stop()

    def show(self, step: int, numbers: str) -> None:
        """A step is done."""
        self._progress.update(self._task, completed=step, numbers=numbers)
        if not self._console.is_terminal and (step % 10 == 0 or step == 1):
            print(f"step {step}/{self._num_steps}  {numbers}", flush=True)


def main() -> None:
    """Train, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps (default: 150)")
    parser.add_argument("--folder", type=Path, default=Path("runs/demo"), help="for the results")
    parser.add_argument("--device", default=None, help="default: the accelerator, else the CPU")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    model = ByteModel()
    untouched = copy.deepcopy(model)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    text = standard_library_text()
    print(f"{len(text):,} bytes of the standard library's source; {num_parameters:,} parameters")
    end = len(text) * 9 // 10
    stream, held_out = batches(text[:end], seed=1), next(batches(text[end:], seed=2))

    engine = l2l.Engine(
        model,
        optimizer=l2l.AdamW(lr=2e-3, weight_decay=0.01),
        device=arguments.device,
        precision="float32",
        microbatch_size=MICROBATCH,
    )
    before = engine.evaluate(held_out)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        engine.optimizer, max_lr=2e-3, total_steps=arguments.steps + 1, pct_start=0.21
    )
    started = time.perf_counter()
    with Display(arguments.steps) as display, (arguments.folder / "metrics.jsonl").open("w") as log:
        for number in range(1, arguments.steps + 1):
            report = engine.step(next(stream))
            schedule.step()
            tokens = report.num_tokens * number / (time.perf_counter() - started)
            log.write(json.dumps({"step": number, "loss": report.loss}) + "\n")
            display.show(number, f"loss {report.loss:.3f}  {tokens:,.0f} bytes/s")
    after = engine.evaluate(held_out)

    batch = next(stream)
    engine.device.reset_peak()
    engine.step(batch).loss  # noqa: B018 (reading waits for the step)
    relay_bytes = engine.device.peak_bytes()
    plan, device = engine.plan, engine.device
    engine.close()
    plain_bytes = [
        plain_peak(untouched, batch, device=device, size=size) for size in (MICROBATCH, ROWS)
    ]
    safetensors.torch.save_file(model.state_dict(), arguments.folder / "model.safetensors")
    (arguments.folder / "plan.txt").write_text(f"{plan}\n")

    print(f"\n{plan}\n")
    print("the model, an ordinary nn.Module again, writes:\n")
    print("\n".join("    " + line for line in model.write("def ", 160).splitlines()))
    print(
        f"\nheld-out loss   {before:.3f} before, {after:.3f} after "
        f"({before / math.log(2):.2f} and {after / math.log(2):.2f} bits a byte)"
        f"\ndevice peak     {format_bytes(relay_bytes)} through the relay; the same step in plain "
        f"PyTorch: {format_bytes(plain_bytes[0])} with the same microbatches "
        f"({plain_bytes[0] / relay_bytes:.1f} times as much), {format_bytes(plain_bytes[1])} with "
        f"the whole batch at once ({plain_bytes[1] / relay_bytes:.1f} times)"
        f"\nresults         {arguments.folder}: metrics.jsonl, plan.txt, model.safetensors"
    )


if __name__ == "__main__":
    main()
