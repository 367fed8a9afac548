"""What a plan says: memory by phase, a step as lanes, what other memory would buy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from l2l.device import format_bytes
from l2l.page.curves import BLUE, COLOURS, GREEN, GREY, ORANGE, PURPLE, RED
from l2l.page.document import PLANNED, Figure, Section
from l2l.page.markup import Markup, element, in_figure, joined, table
from l2l.planner import ALWAYS, WORDS, LedgerLine, Plan, Prospect, Prospects, Simulation

INK = "#64748b"  # seen on light and on dark
UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
FAMILIES: Mapping[str, tuple[str, tuple[str, ...]]] = {  # the first whose word is in the purpose
    "optimizer state": (PURPLE, ("state", "exp_avg", "moment", "remainder", "momentum")),
    "gradients": (ORANGE, ("gradient", "staging")),
    "weights": (BLUE, ("weight", "parameter server", "master")),
    "kept results": ("#14b8a6", ("kept",)),
    "at work": ("#eab308", ("at work", "sums of slices")),
    "hidden states": (GREEN, ("cells", "recorded", "stash", "rows", "hidden", "left by")),
    "everything else": (GREY, ("",)),
}
PHASES: Mapping[str, str] = {  # as they follow each other, and for people
    "always": "all the time",
    "prologue": "embedding",
    "forward": "forward",
    "interlude": "between stacks",
    "epilogue": "head and loss",
    "backward": "backward",
}
LANES: Mapping[str, str] = {  # of a step, as people read them from above
    "compute": "device computes",
    "rework": "device updates",
    "fetch": "weights in",
    "unstash": "hidden states in",
    "lend": "optimizer state in",
    "drain": "gradients out",
    "stash": "hidden states out",
    "gather": "gather",
    "reduce": "reduce",
    "update": "host updates",
    "read": "disk reads",
    "write": "disk writes",
}
VERBS: Mapping[str, str] = {
    "forward": BLUE,
    "loss": PURPLE,
    "backward": ORANGE,
    "fetch": "#14b8a6",
    "drain": "#ec4899",
    "update": GREEN,
    "lookup": "#6366f1",
    "collect": "#eab308",
    "revise": "#84cc16",
}
MOST_SPANS = 1200  # of a lane
LEAST_IDLE = 1e-3  # of a step, that is worth a word
LEAST_GAP = 2e-4  # of a step: work of a kind that is closer is drawn as one


def ledger_section(plan: Plan, *, kind: str, peak_bytes: int = 0) -> Section:
    """What is where in each phase, against the budget, and what was measured of it."""
    phases = plan.phases()
    known = [name for name in PHASES if name in phases]
    names = [*known, *(name for name in phases if name not in PHASES)]
    most = max([*phases.values(), plan.budget_bytes or 0, peak_bytes, 1])
    unit, size = next((one for one in UNITS if most >= one[1]), UNITS[-1])
    own = [line for line in plan.ledger if line.place == "device"]
    traces = [
        _bar(family, names, [_lines(own, family, phase) for phase in names], size)
        for family in FAMILIES
    ]
    edges: list[tuple[str, int, str, str]] = [
        ("budget", plan.budget_bytes or 0, RED, "solid"),
        ("measured peak", peak_bytes, INK, "dash"),
    ]
    fullest = max(phases, key=phases.__getitem__)
    words = [
        f"{format_bytes(phases[fullest])} of device memory at most ({PHASES.get(fullest, fullest)})"
    ]
    words += [f"of a budget of {format_bytes(plan.budget_bytes)}"] if plan.budget_bytes else []
    words += [f"measured: {format_bytes(peak_bytes)}"] if peak_bytes else []
    told = f"{'; '.join(words)}."
    figure = Figure(
        name="ledger",
        about=f"Device memory by phase. {told}",
        traces=[
            *(one for one in traces if any(one["x"])),
            *(_named(name, *how) for name, at, *how in edges if at),
        ],
        layout={
            "barmode": "stack",
            "hovermode": "closest",
            "bargap": 0.35,
            "xaxis": {"title": {"text": unit}, "rangemode": "tozero"},
            "yaxis": {"autorange": "reversed", "ticksuffix": "  ", "fixedrange": True},
            "showlegend": True,
            "shapes": [_edge(at / size, *how) for _, at, *how in edges if at],
        },
        height=150 + 46 * len(names),
        zooms=False,
    )
    rows: list[list[object]] = [
        [one.place, one.phase, one.purpose, format_bytes(one.nbytes)] for one in plan.ledger
    ]
    listed = table(["place", "phase", "purpose", "size"], rows, numbers=frozenset({3}))
    host = element("p", f"Host memory: {format_bytes(plan.total_bytes('host'))}{_limit(plan)}.")
    return Section(
        name="memory",
        title="Memory by phase",
        kind=kind,
        before=element("p", told),
        figures=[figure, _host_figure(plan)],
        after=joined(host, element("details", element("summary", "every entry"), listed)),
    )


def _limit(plan: Plan) -> str:
    limit = plan.host_limit_bytes
    return f" of {format_bytes(limit)}" if limit is not None and limit < 2**60 else ""


def _host_figure(plan: Plan) -> Figure:
    own = [line for line in plan.ledger if line.place == "host"]
    unit, size = next((one for one in UNITS if plan.total_bytes("host") >= one[1]), UNITS[-1])
    traces = []
    for line in sorted(own, key=lambda one: -one.nbytes):
        colour = FAMILIES[_family(line)][0]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": in_figure(line.purpose),
                "y": ["host"],
                "x": [line.nbytes / size],
                "marker": {"color": colour, "line": {"width": 1, "color": "rgba(127,127,127,.5)"}},
                "text": [in_figure(line.purpose)],
                "textposition": "inside",
                "insidetextanchor": "middle",
                "hovertemplate": f"%{{text}}: {format_bytes(line.nbytes)}<extra></extra>",
            }
        )
    return Figure(
        name="host",
        about=f"Host memory: {format_bytes(plan.total_bytes('host'))}.",
        traces=traces,
        layout={
            "barmode": "stack",
            "hovermode": "closest",
            "xaxis": {"title": {"text": unit}, "rangemode": "tozero"},
            "yaxis": {"ticksuffix": "  ", "fixedrange": True},
            "showlegend": False,
            "uniformtext": {"minsize": 9, "mode": "hide"},
        },
        height=130,
        zooms=False,
    )


def _family(line: LedgerLine) -> str:
    return next(
        name
        for name, (_, words) in FAMILIES.items()
        if any(word in line.purpose.lower() for word in words)
    )


def _lines(own: Sequence[LedgerLine], family: str, phase: str) -> list[LedgerLine]:
    return [one for one in own if one.phase in (ALWAYS, phase) and _family(one) == family]


def _bar(
    family: str, names: Sequence[str], lines: Sequence[Sequence[LedgerLine]], size: int
) -> dict[str, Any]:
    texts = [
        "<br>".join(f"{in_figure(one.purpose)}: {format_bytes(one.nbytes)}" for one in own)
        for own in lines
    ]
    return {
        "type": "bar",
        "orientation": "h",
        "name": family,
        "y": [in_figure(PHASES.get(name, name)) for name in names],
        "x": [sum(one.nbytes for one in own) / size for own in lines],
        "marker": {"color": FAMILIES[family][0]},
        "hovertext": texts,
        "hovertemplate": "%{hovertext}<extra></extra>",
    }


def _edge(at: float, colour: str, dash: str) -> dict[str, Any]:
    """An upright line."""
    line = {"color": colour, "dash": dash, "width": 2}
    return {"type": "line", "x0": at, "x1": at, "yref": "paper", "y0": 0, "y1": 1, "line": line}


def _named(name: str, colour: str, dash: str) -> dict[str, Any]:
    """Its entry in the legend."""
    line = {"color": colour, "dash": dash, "width": 2}
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": [None],
        "y": [None],
        "line": line,
    }


# --------------------------------------------------------------------------------------------------
# A step


def step_section(plan: Plan, simulation: Simulation) -> Section:
    """One step as lanes, and what binds it."""
    traces, trace = [*_spans(simulation)], simulation.trace
    idle, seconds = trace.idle_seconds(), simulation.seconds
    waits = idle["in all"] > LEAST_IDLE * seconds
    unit, factor = ("s", 1.0) if seconds >= 1 else ("ms", 1e3)
    busy = ", ".join(f"{name} {share:.0%}" for name, share in simulation.busy.items())
    lines = [f"{_seconds(seconds)} a step, bound by {simulation.bound}. Busy: {busy}."]
    waiting = [f"{name} {_seconds(one)}" for name, one in idle.items() if name != "in all" and one]
    if waits:
        lines += [
            f"The device waits for {_seconds(idle['in all'])} of it; at work meanwhile: "
            f"{', '.join(waiting) or 'nobody'}."
        ]
    if plan.bounds is not None and plan.predicted_seconds:
        lines += [f"Of its bounds: {plan.bounds.describe(plan.predicted_seconds)}."]
    lanes = [lane for lane in LANES if any(one["y"][0] == LANES[lane] for one in traces)]
    figure = Figure(
        name="step",
        about=f"One step as a timeline of lanes. {' '.join(lines)}",
        traces=[_scaled(one, factor) for one in traces],
        layout={
            "barmode": "overlay",
            "bargap": 0.25,
            "hovermode": "closest",
            "xaxis": {"title": {"text": unit}, "range": [0, seconds * factor]},
            "yaxis": {
                "categoryorder": "array",
                "categoryarray": [LANES[lane] for lane in reversed(lanes)],
                "ticksuffix": "  ",
                "fixedrange": True,
            },
            "showlegend": True,
        },
        height=150 + 34 * len(lanes),
    )
    return Section(
        name="step",
        title="One step",
        kind=PLANNED,
        before=joined(*(element("p", line) for line in lines)),
        figures=[figure],
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _spans(simulation: Simulation) -> Iterator[dict[str, Any]]:
    """For every lane and verb its spans; what lies close together is one."""
    spans = sorted(simulation.trace.spans, key=lambda one: (one.lane, one.start))
    shown: set[str] = set()
    for lane, in_lane in groupby(spans, key=lambda one: one.lane):
        lasting = [one for one in in_lane if one.end > one.start]
        gap = LEAST_GAP * simulation.seconds
        merged = _merged(lasting, gap)
        while len(merged) > MOST_SPANS:
            gap *= 2
            merged = _merged(lasting, gap)
        for verb in dict.fromkeys(one[0] for one in merged):
            own = [one for one in merged if one[0] == verb]
            yield {
                "type": "bar",
                "orientation": "h",
                "name": verb,
                "legendgroup": verb,
                "showlegend": verb not in shown,
                "y": [LANES.get(lane, lane)] * len(own),
                "base": [start for _, start, _, _ in own],
                "x": [end - start for _, start, end, _ in own],
                "hovertext": [in_figure(text) for *_, text in own],
                "hovertemplate": "%{hovertext}<extra></extra>",
                "marker": {"color": _colour(verb), "line": {"width": 0}},
            }
            shown.add(verb)


def _colour(verb: str) -> str:
    return VERBS.get(verb) or COLOURS[sum(map(ord, verb)) % len(COLOURS)]


def _merged(spans: Sequence[Any], gap: float) -> list[tuple[str, float, float, str]]:
    """Verb, from, to, text; spans of a verb in a row are one, as long as each is short."""
    found: list[tuple[str, float, float, str]] = []
    for span in spans:
        verb = span.text.partition(" ")[0]
        text = f"{span.text}, {_seconds(span.end - span.start)}"
        if found:
            before, start, end, _ = found[-1]
            is_close = span.start - end <= gap and min(span.end - span.start, end - start) <= gap
            if before == verb and is_close:
                found[-1] = (verb, start, span.end, f"{verb}, {_seconds(span.end - start)} in all")
                continue
        found.append((verb, span.start, span.end, text))
    return found


def _scaled(trace: dict[str, Any], factor: float) -> dict[str, Any]:
    scaled = {name: [one * factor for one in trace[name]] for name in ("x", "base")}
    return {**trace, **scaled}


# --------------------------------------------------------------------------------------------------
# Budgets


def budget_section(prospects: Prospects, *, machine: str, measured: float | None = None) -> Section:
    """Speed over device memory, and what more memory would buy; `measured` tokens/s of the run."""
    plan, number = prospects.plan, prospects.plan.num_tokens or 0
    now = Prospect.of(plan)
    points = prospects.by_budget
    sizes = [one.budget_bytes / 2**30 for one in points]
    curve = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "planned",
        "x": sizes,
        "y": [number / one.seconds for one in points],
        "text": [f"bound by {in_figure(one.bound)}" for one in points],
        "hovertemplate": "%{x:.3g} GiB: %{y:,.0f} tokens/s, %{text}<extra></extra>",
        "line": {"color": ORANGE, "width": 2},
        "marker": {"size": 7, "color": ORANGE},
    }
    here = now.budget_bytes / 2**30
    traces = [curve, _dot("this plan", here, number / now.seconds, ORANGE, "circle")]
    if measured is not None:
        traces.append(_dot("measured in this run", here, measured, GREEN, "star"))
    if all(one.compute_seconds for one in points):
        words = "matrix products alone"
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": words,
                "x": sizes,
                "y": [number / one.compute_seconds for one in points],
                "line": {"color": GREY, "dash": "dot", "width": 2},
                "hovertemplate": "%{x:.3g} GiB: %{y:,.0f} tokens/s<extra></extra>",
            }
        )
    told = f"Plans of this model with this batch ({number:,} tokens a step) for {machine}."
    least = points[0]
    told += f" The smallest budget of these is {format_bytes(least.budget_bytes)}, with "
    told += f"{number / least.seconds:,.0f} tokens/s."
    figure = Figure(
        name="budget",
        about=f"Tokens per second over device memory. {told}",
        traces=traces,
        layout={
            "hovermode": "closest",
            "xaxis": {
                "type": "log",
                "title": {"text": "device memory, GiB"},
                "tickvals": sizes,
                "ticktext": [f"{one:.3g}" for one in sizes],
            },
            "yaxis": {"title": {"text": "tokens/s"}, "rangemode": "tozero"},
            "showlegend": True,
        },
        height=360,
    )
    return Section(
        name="budget",
        title="Speed over device memory",
        kind=PLANNED,
        before=element("p", told),
        figures=[figure],
        after=joined(element("h3", "What more would buy"), _purchases(prospects, now, number)),
    )


def _dot(name: str, x: float, y: float, colour: str, symbol: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [x],
        "y": [y],
        "marker": {"size": 15, "color": colour, "symbol": symbol},
        "hovertemplate": f"{name}, %{{x:.3g}} GiB: %{{y:,.0f}} tokens/s<extra></extra>",
    }


def _purchases(prospects: Prospects, now: Prospect, number: int) -> Markup:
    rows: list[list[object]] = [
        ["as it is", f"{number / now.seconds:,.0f}", "", now.bound, _memory(now)]
    ]
    for one in prospects.purchases:
        found = one.prospect
        if found is None:
            rows.append([one.name, "", "", "", one.note])
            continue
        gain = now.seconds / found.seconds - 1
        told = "no change" if abs(gain) < 0.005 else f"{gain:+.0%}"
        note = one.note or _memory(found)
        rows.append([one.name, f"{number / found.seconds:,.0f}", told, found.bound, note])
    heads = ["", "tokens/s", "change", "bound by", ""]
    return table(heads, rows, numbers=frozenset({1, 2}))


def _memory(one: Prospect) -> str:
    device, host = format_bytes(one.budget_bytes), format_bytes(one.host_bytes)
    return f"{device} on the device, {host} on the host"


def choices_section(plan: Plan, *, kind: str) -> Section:
    """What a plan has chosen."""
    rows: list[list[object]] = [[name, value] for name, value in plan.choices]
    if plan.bounds is not None:
        rows += [
            [f"at best: {WORDS[name]}", _seconds(seconds)]
            for name, seconds in plan.bounds.seconds.items()
        ]
    return Section(name="choices", title="Choices of the plan", kind=kind, after=table([], rows))
