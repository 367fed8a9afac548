"""What has happened in a run, over its steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from l2l.page.document import MEASURED, Figure, Section
from l2l.page.markup import Markup, element, in_figure

Record = Mapping[str, Any]
Point = tuple[float, float | None]

MOST_POINTS = 1500  # of a curve; of longer ones, the lowest and the highest of some steps
MOST_COLUMNS = 300  # of a map of layers
MOST_CURVES = 12  # in a figure
BLUE, ORANGE, GREEN, PURPLE, RED, GREY = (
    "#3b82f6",
    "#f97316",
    "#10b981",
    "#a855f7",
    "#ef4444",
    "#94a3b8",
)
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, "#14b8a6", "#eab308", "#ec4899", "#6366f1", RED, GREY)
OF_EVERY_EVALUATION = frozenset({"kind", "step", "seconds", "loss", "perplexity"})
OF_EVERY_STEP = OF_EVERY_EVALUATION | {
    *("learning_rate", "gradient_norm", "layer_norms", "tokens", "compiled", "skipped"),
    *("bound", "share_of_bound", "loss_scale", "disk_written", "peak_bytes"),
}
STEP_AXIS = {"title": {"text": "step"}, "rangemode": "tozero"}
MARKS = {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True}


def number(value: Any) -> float | None:
    """A number of a record, if it is one and finite."""
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_one and math.isfinite(value) else None


def of_kind(records: Iterable[Record], kind: str) -> list[Record]:
    """The lines of a kind."""
    return [one for one in records if one["kind"] == kind]


def run_sections(records: Sequence[Record]) -> Iterator[Section]:
    """All that the lines of metrics.jsonl have to show."""
    steps = of_kind(records, "step")
    yield _losses(records, steps)
    if not steps:
        return
    yield _rates(steps)
    yield _norms(steps)
    layers = _layers(steps)
    if layers is not None:
        yield layers
    yield _speeds(steps)
    more = _more(records, steps)
    if more is not None:
        yield more


# --------------------------------------------------------------------------------------------------
# Curves


def points_of(records: Iterable[Record], name: str) -> list[Point]:
    """Step and value."""
    return [(one["step"], number(one.get(name))) for one in records if name in one]


def thinned(points: Sequence[Point]) -> list[Point]:
    """Few enough to be drawn: of neighbours the lowest and the highest, in their order."""
    if len(points) <= 2 * MOST_POINTS:
        return list(points)
    found: list[Point] = []
    for part in _parts(points, MOST_POINTS):
        known = [one for one in part if one[1] is not None]
        ends = {min(known, key=_value), max(known, key=_value)} if known else {part[0]}
        found += sorted(ends, key=lambda one: one[0])
    return found


def means(points: Sequence[Point]) -> list[Point]:
    """Few enough to be drawn: of neighbours the mean."""
    if len(points) <= 2 * MOST_POINTS:
        return list(points)
    found: list[Point] = []
    for part in _parts(points, MOST_POINTS):
        known = [value for _, value in part if value is not None]
        found.append((part[-1][0], sum(known) / len(known) if known else None))
    return found


def _value(point: Point) -> float:
    assert point[1] is not None
    return point[1]


def _parts(points: Sequence[Any], number: int) -> Iterator[Sequence[Any]]:
    edges = [round(index * len(points) / number) for index in range(number + 1)]
    return (points[a:b] for a, b in pairwise(edges) if a < b)


def _curve(name: str, points: Sequence[Point], colour: str, **more: Any) -> dict[str, Any]:
    line = {"color": colour, "width": more.pop("width", 2)}
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": [step for step, _ in points],
        "y": [value for _, value in points],
        "line": line,
        **more,
    }


def _each_and_smooth(points: Sequence[Point], colour: str) -> list[dict[str, Any]]:
    """A curve, and the running mean that the page makes of it."""
    return [
        _curve("each step", thinned(points), colour, width=1, opacity=0.35),
        _curve("running mean", means(points), colour, meta={"smooth": True}),
    ]


def _axis(name: str, *, is_log: bool = False) -> dict[str, Any]:
    shown = {"type": "log"} if is_log else {}
    return {"title": {"text": name}, **shown}


def _losses(records: Sequence[Record], steps: Sequence[Record]) -> Section:
    points, evaluations = points_of(steps, "loss"), of_kind(records, "evaluation")
    judged = points_of(evaluations, "loss")
    traces = _each_and_smooth(points, ORANGE)
    traces[0]["name"], traces[1]["name"] = "training", "training, running mean"
    if judged:
        dots = {"mode": "lines+markers", "marker": {"size": 7, "color": BLUE}}
        traces.append(_curve("evaluation", judged, BLUE, **dots))
    skipped = [one["step"] for one in steps if one.get("skipped")]
    traces += _marks("skipped steps", skipped, RED, "x")
    saved = [one["step"] for one in of_kind(records, "checkpoint")]
    traces += _marks("checkpoints", saved, GREY, "triangle-up")
    known = [value for _, value in points if value is not None]
    words = "No step has been read yet."
    if known:
        words = (
            f"{known[0]:.4f} at first, {known[-1]:.4f} at last, {min(known):.4f} at least, over "
            f"{len(steps):,} steps"
        )
        words += f"; {len(skipped):,} of them skipped." if skipped else "; none skipped."
    held = [value for _, value in judged if value is not None]
    if held:
        words += f" Evaluations: {held[0]:.4f} at first, {held[-1]:.4f} at last, {min(held):.4f} "
        words += "at best."
    figure = Figure(
        name="loss",
        about=f"Loss over steps. {words}",
        traces=traces,
        layout={"xaxis": STEP_AXIS, "yaxis": _axis("loss"), "yaxis2": MARKS},
        height=380,
    )
    return Section(
        name="loss",
        title="Loss",
        kind=MEASURED,
        before=element("p", words),
        controls=_CONTROLS,
        figures=[figure],
    )


_CONTROLS = element(
    "div",
    element(
        "label",
        "smoothing ",
        element("input", type="range", id="smoothing", min=0, max=25, value=5),
        Markup('<output for="smoothing" id="smoothing-words">5%</output>'),
    ),
    element("label", element("input", type="checkbox", id="logarithmic"), " logarithmic"),
    class_="controls",
)


def _marks(name: str, steps: Sequence[float], colour: str, symbol: str) -> list[dict[str, Any]]:
    """Marks along the lower edge."""
    if not steps:
        return []
    few = [part[0] for part in _parts(steps, min(len(steps), MOST_COLUMNS))]
    mark = {"color": colour, "symbol": symbol, "size": 8}
    shown = {"mode": "markers", "marker": mark, "yaxis": "y2", "hovertemplate": "step %{x}"}
    points: list[Point] = [(step, 0.025) for step in few]
    return [_curve(name, points, colour, **shown)]


def _rates(steps: Sequence[Record]) -> Section:
    points = points_of(steps, "learning_rate")
    figure = Figure(
        name="rate",
        about="Learning rate over steps.",
        traces=[_curve("learning rate", thinned(points), GREEN)],
        layout={
            "xaxis": STEP_AXIS,
            "yaxis": {**_axis(""), "rangemode": "tozero", "exponentformat": "e"},
            "showlegend": False,
        },
        height=260,
    )
    last = next((value for _, value in reversed(points) if value is not None), None)
    told = "" if last is None else f"{last:.3g} at last."
    return Section(
        name="rate",
        title="Learning rate",
        kind=MEASURED,
        before=element("p", told),
        figures=[figure],
        is_half=True,
    )


def _norms(steps: Sequence[Record]) -> Section:
    points = points_of(steps, "gradient_norm")
    known = sorted(value for _, value in points if value is not None)
    told = ""
    if known:
        told = (
            f"{known[len(known) // 2]:.3g} in the middle, {known[-1]:.3g} at most, before clipping."
        )
    figure = Figure(
        name="norm",
        about=f"Norm of the gradient over steps. {told}",
        traces=_each_and_smooth(points, PURPLE),
        layout={"xaxis": STEP_AXIS, "yaxis": _axis("", is_log=True), "showlegend": False},
        height=260,
    )
    return Section(
        name="norm",
        title="Gradient norm",
        kind=MEASURED,
        before=element("p", told),
        figures=[figure],
        is_half=True,
    )


def _speeds(steps: Sequence[Record]) -> Section:
    points: list[Point] = []
    for one in steps:
        seconds, tokens = number(one.get("seconds")), number(one.get("tokens"))
        points.append((one["step"], tokens / seconds if seconds and tokens is not None else None))
    known = sorted(value for _, value in points if value is not None)
    told = f"{known[len(known) // 2]:,.0f} tokens/s in the middle" if known else ""
    lanes = [one["bound"] for one in steps if one.get("bound")]
    share = number(steps[-1].get("share_of_bound"))
    if lanes and share is not None:
        told += f"; the last step was bound by {lanes[-1]}, at {share:.0%} of its measured rate"
    figure = Figure(
        name="speed",
        about=f"Tokens per second over steps. {told}",
        traces=_each_and_smooth(points, BLUE),
        layout={
            "xaxis": STEP_AXIS,
            "yaxis": {**_axis(""), "rangemode": "tozero"},
            "showlegend": False,
        },
        height=260,
    )
    return Section(
        name="speed",
        title="Tokens per second",
        kind=MEASURED,
        before=element("p", f"{told}." if told else ""),
        figures=[figure],
        is_half=True,
    )


def _more(records: Sequence[Record], steps: Sequence[Record]) -> Section | None:
    """Metrics that only some tasks have."""
    evaluations, traces = of_kind(records, "evaluation"), list[dict[str, Any]]()
    for of, known, style in (
        (evaluations, OF_EVERY_EVALUATION, {"mode": "lines+markers"}),
        (steps, OF_EVERY_STEP, {"opacity": 0.6, "width": 1}),
    ):
        names = dict.fromkeys(name for one in of for name in one if name not in known)
        where = "evaluation" if of is evaluations else "training"
        for name in names:
            points = [point for point in points_of(of, name) if point[1] is not None]
            if points and len(traces) < MOST_CURVES:
                colour = COLOURS[len(traces) % len(COLOURS)]
                label = in_figure(f"{name}, {where}")
                traces.append(_curve(label, thinned(points), colour, **style))
    if not traces:
        return None
    told = "What this task measures besides its loss, in evaluations and in training."
    figure = Figure(
        name="metrics",
        about=told,
        traces=traces,
        layout={"xaxis": STEP_AXIS, "yaxis": _axis(""), "showlegend": True},
        height=260,
    )
    return Section(
        name="metrics",
        title="Metrics",
        kind=MEASURED,
        before=element("p", told),
        figures=[figure],
        is_half=True,
    )


# --------------------------------------------------------------------------------------------------
# Layers


def _layers(steps: Sequence[Record]) -> Section | None:
    """The norm of every layer's gradient over time, as a map."""
    known = [(one["step"], one["layer_norms"]) for one in steps if _is_list(one.get("layer_norms"))]
    if not known:
        return None
    columns = [
        (part[-1][0], _largest([norms for _, norms in part]))
        for part in _parts(known, min(len(known), MOST_COLUMNS))
    ]
    number_of = max(len(norms) for _, norms in columns)
    rows = [
        [norms[layer] if layer < len(norms) else None for _, norms in columns]
        for layer in range(number_of)
    ]
    flat = [value for row in rows for value in row if value]
    if not flat:
        return None
    low, high = math.log10(min(flat)), math.log10(max(flat))
    ticks = _ticks(low, high)
    thick = {"tickvals": [math.log10(one) for one in ticks], "ticktext": [f"{t:g}" for t in ticks]}
    trace = {
        "type": "heatmap",
        "x": [step for step, _ in columns],
        "y": list(range(number_of)),
        "z": [[math.log10(value) if value else None for value in row] for row in rows],
        "customdata": rows,
        "colorscale": "Viridis",
        "colorbar": {"thickness": 12, "outlinewidth": 0, **thick},
        "hovertemplate": "step %{x}, layer %{y}: %{customdata:.3g}<extra></extra>",
    }
    last = columns[-1][1]
    ranked = sorted((value, layer) for layer, value in enumerate(last) if value)
    told = "The first layer is at the bottom; colours are logarithmic."
    if ranked:
        (least, lowest), (most, highest) = ranked[0], ranked[-1]
        told = f"At last {most:.3g} in layer {highest} and {least:.3g} in layer {lowest}. {told}"
    figure = Figure(
        name="layers",
        about=f"Gradient norm by layer over steps. {told}",
        traces=[trace],
        layout={"xaxis": {"title": {"text": "step"}}, "yaxis": _axis("layer")},
        height=max(260, min(560, 140 + 9 * number_of)),
    )
    return Section(
        name="layers",
        title="Gradient norm by layer",
        kind=MEASURED,
        before=element("p", told),
        figures=[figure],
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _largest(lists: Sequence[Sequence[Any]]) -> list[float | None]:
    """Of every layer, of some steps."""
    found: list[float | None] = []
    for layer in range(max(map(len, lists))):
        values = (number(norms[layer]) for norms in lists if layer < len(norms))
        found.append(max((one for one in values if one is not None), default=None))
    return found


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between two powers of ten."""
    steps = [
        digit * 10.0**power
        for power in range(math.floor(low), math.ceil(high) + 1)
        for digit in (1, 2, 5)
    ]
    found = [one for one in steps if low <= math.log10(one) <= high]
    while len(found) > 8:
        found = found[::3] if len(found) > 12 else found[::2]
    return found or [10.0**low]
