"""What the examples of changing depth share: text that is on every machine, and their plot."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

import l2l

LENGTH = 128  # bytes of a row
HELD_OUT_ROWS = 32
Batch = dict[str, Tensor]


def standard_library_text(limit_bytes: int = 4 << 20) -> bytes:
    """Source files of the standard library, in a fixed order."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return b"\n".join(path.read_bytes() for path in paths)[:limit_bytes]


def batches(text: bytes, *, rows: int, seed: int) -> Iterator[Batch]:
    """Random windows of the text, for ever."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - LENGTH, (rows,), generator=generator).tolist()
        windows = torch.stack([data[start : start + LENGTH] for start in starts])
        yield {"input_ids": windows, "labels": windows}


def divided(*, rows: int, seed: int) -> tuple[Iterator[Batch], Batch]:
    """Batches to train with, and one of the last tenth of the text, which is held out."""
    text = standard_library_text()
    cut = len(text) * 9 // 10
    held_out = next(batches(text[cut:], rows=HELD_OUT_ROWS, seed=10_000))
    return batches(text[:cut], rows=rows, seed=seed), held_out


def set_learning_rate(engine: l2l.Engine, peak: float, progress: float) -> None:
    """Up for a twentieth of the run, then down to a tenth of the peak."""
    for group in engine.optimizer.param_groups:
        group["lr"] = peak * min(1.0, 0.05 + progress / 0.05) * (1 - 0.9 * progress)


def draw(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    *,
    width: int,
    colours: Sequence[str],
) -> str:
    """Held-out loss over each of several things, side by side, as SVG."""
    top, bottom, gap = 56, 380, 54
    whole = 20 + len(panels) * (width + gap)
    heights = [y for curves in panels.values() for one in curves.values() for _, y in one]
    low, high = math.floor(min(heights) * 10) / 10, math.ceil(max(heights) * 10) / 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole} 440" width="{whole}" '
        'font-family="system-ui, Helvetica, Arial, sans-serif" font-size="12" fill="#1f2937">',
        f'<rect width="{whole}" height="440" fill="#ffffff"/>',
    ]

    def write(x: float, y: float, words: str, look: str = 'text-anchor="middle"') -> None:
        parts.append(f'<text x="{x:.1f}" y="{y:.1f}" {look}>{words}</text>')

    def place(x: float, y: float) -> str:  # shares of the panel, to pixels
        return f"{left + x * width:.1f},{bottom - y * (bottom - top):.1f}"

    for number, (across, curves) in enumerate(panels.items()):
        left = gap + number * (width + gap)
        most = max(x for one in curves.values() for x, _ in one)
        for share in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
            y = bottom - share * (bottom - top)
            parts.append(f'<path d="M{left} {y:.1f}h{width}" stroke="#e5e7eb"/>')
            write(left - 6, y + 4, f"{low + share * (high - low):.2f}", 'text-anchor="end"')
            write(left + share * width, bottom + 18, f"{share * most:.0f}")
        write(left + width / 2, bottom + 40, across)
        for index, (name, points) in enumerate(curves.items()):
            path = " ".join(place(x / most, (y - low) / (high - low)) for x, y in points)
            look = f'fill="none" stroke="{colours[index]}" stroke-width="2"'
            parts.append(f'<polyline points="{path}" {look}/>')
            if number == 0:
                write(gap + 200 * index, 24, name, f'fill="{colours[index]}" font-weight="600"')
    write(gap, 44, "held-out loss", "")
    return "\n".join([*parts, "</svg>", ""])
