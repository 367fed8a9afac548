"""The plot of `l2l bench step`: training speed over device memory, as SVG text.

Written by hand, since all it needs is two axes, a line and some labelled points. `draw` is a
function of its points and nothing else: the same points give the same text. Memory is drawn by its
logarithm, since budgets double; speed from zero, so that heights can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 900, 560  # of the picture, in pixels
LEFT, RIGHT, TOP, BOTTOM = 84, 872, 92, 492  # edges of the field
FONT_SIZE, CHARACTER_WIDTH, LABEL_HEIGHT = 12, 6.5, 15
LONGEST_WITHOUT_LEADER = 15  # pixels from a point to its label
MOST_TICKS = 10
KINDS = {  # what a point stands for: its colour, its words in the legend
    "engine": ("#c2410c", "this engine, by budget"),
    "in memory": ("#475569", "plain PyTorch, all on the device"),
    "exact": ("#1d4ed8", "other systems, exact"),
    "not exact": ("#7c3aed", "other systems, not exact"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One run in the plot."""

    label: str
    kind: str  # of KINDS
    device_bytes: float  # the budget, or else the peak
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Box:
    """A part of the picture, in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Box) -> bool:
        """Whether the two overlap."""
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )

    def nearest(self, x: float, y: float) -> tuple[float, float]:
        """Its place nearest to a place."""
        return min(max(x, self.left), self.right), min(max(y, self.top), self.bottom)

    def is_within(self, other: Box) -> bool:
        """Whether it sticks out nowhere."""
        return (
            self.left >= other.left
            and self.right <= other.right
            and self.top >= other.top
            and self.bottom <= other.bottom
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """Where a point of the data lies in the picture; memory by its logarithm, speed from zero."""

    lowest: float  # logarithms to base two, of bytes
    highest: float
    speed_step: float
    num_speed_steps: int

    @classmethod
    def around(cls, points: Sequence[Point]) -> Axes:
        """Axes that hold all points, with some room around them."""
        lowest = math.log2(min(point.device_bytes for point in points))
        highest = math.log2(max(point.device_bytes for point in points))
        room = max(0.4, 1.0 - (highest - lowest) / 2)  # two powers of two are in view at least
        most = max(point.tokens_per_second for point in points) * 1.05
        magnitude = 10.0 ** math.floor(math.log10(most / 5))
        step = next(n * magnitude for n in (1, 2, 5, 10) if n * magnitude >= most / 6)
        return cls(
            lowest=lowest - room,
            highest=highest + room,
            speed_step=step,
            num_speed_steps=math.ceil(most / step),
        )

    def place(self, device_bytes: float, tokens_per_second: float) -> tuple[float, float]:
        """Pixels from the left and from the top."""
        across = (math.log2(device_bytes) - self.lowest) / (self.highest - self.lowest)
        up = tokens_per_second / (self.speed_step * self.num_speed_steps)
        return LEFT + across * (RIGHT - LEFT), BOTTOM - up * (BOTTOM - TOP)


def draw(points: Sequence[Point], *, title: str) -> str:
    """The plot as SVG: tokens/s over device memory, the engine as a line, others as points."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, Helvetica, Arial, sans-serif" '
        f'font-size="{FONT_SIZE}" fill="#1f2937">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        text_element(
            LEFT, 34, "Training speed over device memory", font_size="18", font_weight="600"
        ),
        text_element(LEFT, 54, title, fill="#6b7280"),
    ]
    if points:
        axes = Axes.around(points)
        parts += [*_draw_axes(axes), *_draw_points(points, axes)]
        parts += _draw_legend([kind for kind in KINDS if any(p.kind == kind for p in points)])
    else:
        parts.append(
            text_element(WIDTH / 2, HEIGHT / 2, "nothing was measured", text_anchor="middle")
        )
    return "\n".join([*parts, "</svg>", ""])


def _draw_axes(axes: Axes) -> Iterator[str]:
    for number in range(axes.num_speed_steps + 1):
        speed = number * axes.speed_step
        _, y = axes.place(1.0, speed)
        yield line_element(LEFT, y, RIGHT, y, colour="#e5e7eb" if number else "#6b7280")
        yield text_element(
            LEFT - 10, y + 4, f"{speed:,g}" if speed < 1 else f"{speed:,.0f}", text_anchor="end"
        )
    powers = range(math.ceil(axes.lowest), math.floor(axes.highest) + 1)
    for power in powers[:: math.ceil(len(powers) / MOST_TICKS)]:
        x, _ = axes.place(2.0**power, 0)
        yield line_element(x, BOTTOM, x, BOTTOM + 5, colour="#6b7280")
        yield text_element(x, BOTTOM + 20, _power_of_two(power), text_anchor="middle")
    yield text_element(
        (LEFT + RIGHT) / 2,
        HEIGHT - 22,
        "device memory: the budget where one was given, else the peak (logarithmic)",
        text_anchor="middle",
    )
    middle = (TOP + BOTTOM) / 2
    turn = f"rotate(-90 22 {middle:.0f})"
    yield text_element(22, middle, "tokens/s", text_anchor="middle", transform=turn)


def _draw_points(points: Sequence[Point], axes: Axes) -> Iterator[str]:
    places = [axes.place(point.device_bytes, point.tokens_per_second) for point in points]
    line = sorted(
        place for point, place in zip(points, places, strict=True) if point.kind == "engine"
    )
    if len(line) > 1:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in line)
        colour = KINDS["engine"][0]
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>'
    taken = [Box(x - 6, y - 6, x + 6, y + 6) for x, y in [*places, *_along(line)]]
    for point, (x, y) in zip(points, places, strict=True):
        colour = KINDS[point.kind][0]
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}" stroke="#ffffff"/>'
        box = _free_box(x, y, width=len(point.label) * CHARACTER_WIDTH, taken=taken)
        taken.append(box)
        end_x, end_y = box.nearest(x, y)
        if math.dist((x, y), (end_x, end_y)) > LONGEST_WITHOUT_LEADER:
            yield line_element(x, y, end_x, end_y, colour=colour)
        yield text_element(box.left, box.bottom - 4, point.label, fill=colour)


def _along(line: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Places on the line, close enough that no label fits between."""
    for (x, y), (next_x, next_y) in pairwise(line):
        count = max(1, math.ceil(math.dist((x, y), (next_x, next_y)) / 10))
        for number in range(count):
            share = number / count
            yield x + share * (next_x - x), y + share * (next_y - y)


def _free_box(x: float, y: float, *, width: float, taken: Sequence[Box]) -> Box:
    """Room for a label near its point: right, left, above or below, further off as needed."""
    field = Box(LEFT, TOP, RIGHT, BOTTOM)
    offers: list[Box] = []
    for distance in (0, 12, 24, 36, 48):
        for down in dict.fromkeys((-distance, distance)):
            top = y + down - LABEL_HEIGHT / 2
            lefts = [x + 9, x - 9 - width]
            if distance:
                lefts.append(x - width / 2)
            offers += [Box(left, top, left + width, top + LABEL_HEIGHT) for left in lefts]
    inside = [box for box in offers if box.is_within(field)] or offers
    return next((box for box in inside if not any(map(box.meets, taken))), inside[0])


def _draw_legend(kinds: Sequence[str]) -> Iterator[str]:
    x = float(LEFT)
    for kind in kinds:
        colour, words = KINDS[kind]
        if kind == "engine":
            yield line_element(x - 2, 72, x + 14, 72, colour=colour, width=2.5)
        yield f'<circle cx="{x + 6:.1f}" cy="72" r="5" fill="{colour}" stroke="#ffffff"/>'
        yield text_element(x + 20, 76, words)
        x += 20 + len(words) * CHARACTER_WIDTH + 18


def line_element(
    x: float, y: float, to_x: float, to_y: float, *, colour: str, width: float = 1
) -> str:
    """A straight line of a drawing."""
    return (
        f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="{colour}" '
        f'stroke-width="{width}"/>'
    )


def text_element(x: float, y: float, words: str, **attributes: str) -> str:
    """Words in a drawing."""
    named = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:.1f}" y="{y:.1f}"{named}>{escape(words)}</text>'


def _power_of_two(power: int) -> str:
    """Bytes for the axis: `512 MiB`, `4 GiB`."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    unit = min(power // 10, len(units) - 1)
    return f"{2 ** (power - 10 * unit)} {units[unit]}"
