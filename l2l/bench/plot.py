"""Plots as SVG text, by matplotlib: speeds over device memory, and curves such as losses.

The same points give the same text, so a plot in a repository changes only with what it shows. Words
stay words: they can be searched for, and found by tests.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple, cast

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLE: dict[Any, Any] = {
    "axes.edgecolor": "#6b7280",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "grid.color": "#e5e7eb",
    "legend.columnspacing": 1.5,
    "legend.frameon": False,
    "legend.handletextpad": 0.4,
    "path.simplify": False,  # every value is drawn
    "svg.fonttype": "none",  # words, not outlines
    "svg.hashsalt": "l2l",  # the same names of elements each time
    "text.color": "#1f2937",
    "text.parse_math": False,
    "ytick.major.size": 0,
}
FIELD = (0.09, 0.12, 0.88, 0.72)  # of the picture: left, bottom, width, height
GREY = "#6b7280"
SIDES = {"left": 7, "right": -7, "center": 0}  # how a label is aligned, and how far off that is
HEIGHTS = (0, 10, -10, 20, -20, 30, -30, 40, -40)  # of a label over its point
LONGEST_WITHOUT_LEADER = 14
KINDS = {  # what a point stands for: its colour, its words in the legend
    "engine": ("#c2410c", "this engine, by budget"),
    "in memory": ("#475569", "plain PyTorch, all on the device"),
    "exact": ("#1d4ed8", "other systems, exact"),
    "not exact": ("#7c3aed", "other systems, not exact"),
}


class PlotError(RuntimeError):
    """Nothing can be drawn; the message says what to install."""


class Point(NamedTuple):
    """One run in the plot of speeds."""

    label: str
    kind: str  # of KINDS
    place: tuple[float, float]  # bytes on the device, the budget or else the peak; tokens/s


class Curve(NamedTuple):
    """Values over steps."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    label: str = ""  # in the legend; empty: not there
    width: float = 1.5  # of the line; 0: points only
    opacity: float = 1.0
    point_size: float = 0.0


def draw(points: Sequence[Point], *, title: str) -> str:
    """Tokens/s over device memory, the engine as a line, others as points.

    Raises:
        PlotError: matplotlib is not installed.
    """

    def fill(axes: Axes) -> None:
        from matplotlib.ticker import FuncFormatter, LogLocator

        places = [point.place for point in points]
        sizes = [math.log2(size) for size, _ in places]
        room = max(0.4, 1.0 - (max(sizes) - min(sizes)) / 2)  # two powers of two are in view
        axes.set_xscale("log", base=2)
        axes.set_xlim(2 ** (min(sizes) - room), 2 ** (max(sizes) + room))
        axes.set_ylim(0, 1.05 * max(speed for _, speed in places))
        axes.xaxis.set_major_locator(LogLocator(base=2, numticks=10))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: _power_of_two(size)))
        axes.set_xlabel("device memory: the budget if one was given, else the peak (logarithmic)")
        axes.set_ylabel("tokens/s")
        for kind, (colour, words) in KINDS.items():
            own = sorted(point.place for point in points if point.kind == kind)
            form = "o-" if kind == "engine" else "o"
            if own:
                axes.plot(*zip(*own, strict=True), form, color=colour, label=words, gid=kind)
        _label(axes, points)

    heading, empty = "Training speed over device memory", "nothing was measured"
    return _drawn(fill if points else None, heading=heading, title=title, empty=empty)


def draw_curves(
    curves: Sequence[Curve], *, heading: str, title: str, unit: str, from_zero: bool = False
) -> str:
    """Values over steps.

    Raises:
        PlotError: matplotlib is not installed.
    """

    def fill(axes: Axes) -> None:
        for curve in curves:
            axes.plot(
                *(zip(*curve.points, strict=True) if curve.points else ([], [])),
                color=curve.colour,
                linestyle="-" if curve.width else "",
                linewidth=curve.width,
                alpha=curve.opacity,
                marker="o" if curve.point_size else "",
                markersize=curve.point_size,
                label=curve.label or "_",
                gid=curve.name,
                clip_on=False,
            )
        axes.set_xlim(left=0)
        if from_zero:
            axes.set_ylim(bottom=0)
        axes.set_xlabel("step")
        axes.set_ylabel(unit)

    known = any(curve.points for curve in curves)
    return _drawn(fill if known else None, heading=heading, title=title, empty="no step yet")


def _drawn(fill: Callable[[Axes], None] | None, *, heading: str, title: str, empty: str) -> str:
    """A picture as SVG; `fill` draws into its field, None: there is nothing to be drawn."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter
    except ModuleNotFoundError as error:
        raise PlotError(
            f"plots need {error.name}, which is not installed. Install it with: pip install "
            "'l2l[plot]'"
        ) from error
    with matplotlib.rc_context(STYLE), io.StringIO() as file:
        figure = Figure(figsize=(9, 5.6))
        FigureCanvasAgg(figure)  # knows how large words are
        left, top = FIELD[0], 0.94
        figure.text(left, top, heading, fontsize=13, fontweight="bold")
        figure.text(left, top - 0.04, title, color=GREY)
        if fill is None:
            figure.text(0.5, 0.5, empty, horizontalalignment="center")
        else:
            axes = figure.add_axes(FIELD)
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
            fill(axes)
            axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=len(KINDS))
        figure.savefig(file, format="svg", metadata={"Date": None})
        return file.getvalue()


def _label(axes: Axes, points: Sequence[Point]) -> None:
    """Write labels near their points: where nothing else is, further off as needed."""
    from matplotlib.path import Path
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    on_screen = axes.transData.transform
    line = sorted(point.place for point in points if point.kind == "engine")
    curve = Path(on_screen(line)) if line else None
    taken = [
        Bbox.from_bounds(x - 6, y - 6, 12, 12)
        for x, y in on_screen([point.place for point in points])
    ]
    field = axes.get_window_extent()
    renderer = cast(Any, axes.figure.canvas).get_renderer()

    def is_free(box: Bbox) -> bool:
        inside = field.x0 <= box.x0 and box.x1 <= field.x1 and field.y0 <= box.y0 <= field.y1
        crossed = curve is not None and curve.intersects_bbox(box, filled=False)
        return inside and not crossed and not box.count_overlaps(taken)

    for point in points:
        colour = KINDS[point.kind][0]
        note = axes.annotate(
            point.label,
            point.place,
            textcoords="offset points",
            xytext=(0, 0),
            verticalalignment="center",
            color=colour,
            arrowprops={"arrowstyle": "-", "color": colour, "shrinkA": 0, "shrinkB": 4},
        )
        for up, (side, across) in product(HEIGHTS, SIDES.items()):
            note.set(horizontalalignment=side, position=(across, up))
            note.update_positions(renderer)
            box = Text.get_window_extent(note)  # without the leader
            if is_free(box):
                break
        taken.append(box)
        assert note.arrow_patch is not None
        note.arrow_patch.set_visible(abs(up) > LONGEST_WITHOUT_LEADER)


def _power_of_two(size: float) -> str:
    """Bytes for the axis: `512 MiB`, `4 GiB`."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    unit = min(int(math.log2(size)) // 10, len(units) - 1)
    return f"{size / 1024**unit:g} {units[unit]}"
