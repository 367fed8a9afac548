"""How long a schedule takes: its lines walked by the clock, given what each of them costs.

The same steps over and over, as the relay submits them, from event to event:

- each lane does its lines in order; a wait holds its lane until the action it names is done;
- a copy crosses the link inwards or outwards, or is read from a disk or written there. Either way
  does one copy at a time; a lane that has the next one ready when one of its copies ends goes on,
  else lanes come in the order in which they became ready. While both ways are busy, both are
  slower ([Note: link]);
- a step begins when the one before has ended on every lane but those of host threads, as between
  `Device.finish` and `Device.begin`. These (`LASTING`) go on in the order of their lines;
- a wait for what earlier steps did (`fetch waits last L0`) holds its lane until the last line of
  the step before that did so is done.

Nothing else is known of lines: they have lanes, and `cost` says the rest.

[Note: link] So it is in traces of an H200, whatever the priorities of the streams: lent state of
eight layers, with an update of its own for each piece, was copied in one go, and weights that were
ready after the second came after the last.

[Note: steady] The first step has no updates before it. The last of three is one like all that
follow: what a step leaves to the host is at most its own updates, and the next step's fetches wait
for those.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from l2l.planner.disk_tier import DiskTier
from l2l.schedule import LASTING, Action, Lane, Line, Schedule, Span, Trace, Wait, WaitLast

Direction = Literal["in", "out", "read", "write"]
LANES: Final = tuple(Lane)
PAIRS: Final = (("in", "out"), ("read", "write"))


@dataclass(frozen=True, slots=True)
class Cost:
    """What a line costs: time on its lane, then bytes over the link, or from and to the disk."""

    seconds: float = 0.0
    link: Direction | None = None
    nbytes: int = 0


FREE: Final = Cost()


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """How a step goes once steps follow each other."""

    seconds: float
    """From the beginning of a step to that of the next."""
    bound: str
    """What is busiest: "compute", "link", "host" or "disk"."""
    busy: dict[str, float]
    """Share of the step in which each of them is busy."""
    began: float
    """When it began, in seconds since the first step did."""
    passed: Sequence[tuple[Lane, Line, float, float]] = field(repr=False)
    """Its lines, in the order of their ends; from when to when, in seconds since then."""

    @property
    def trace(self) -> Trace:
        """Its lines; seconds since it began."""
        return Trace(
            [
                Span(lane.value, str(line), start - self.began, end - self.began)
                for lane, line, start, end in self.passed
            ]
        )


def simulate(
    schedule: Schedule,
    cost: Callable[[Action], Cost],
    *,
    fetch_rate: float,
    drain_rate: float,
    both_ways_rate: float,
    disk: DiskTier | None = None,
    num_steps: int = 3,
) -> Simulation:
    """Run a schedule several times over by the clock and look at the last.

    Args:
        schedule: one step, as it is in the middle of a run: with what the one before has left.
        cost: what a line costs.
        fetch_rate: bytes/s inwards while nothing goes outwards.
        drain_rate: bytes/s outwards while nothing comes inwards.
        both_ways_rate: bytes/s in each direction while both are busy.
        disk: how fast lines read from it and write to it.
        num_steps: how many steps; three are enough ([Note: steady]).

    Raises:
        ValueError: a wait names a line that was not given before it.
    """
    link = (fetch_rate, both_ways_rate), (drain_rate, both_ways_rate)
    ways = {"in": link[0], "out": link[1]}
    if disk is not None:
        ways["read"] = (disk.read_rate, disk.both_read_rate)
        ways["write"] = (disk.write_rate, disk.both_write_rate)
    run = _Run(schedule, cost, ways, num_steps)
    run.go()
    return run.result()


@dataclass(slots=True, eq=False)
class _Program:
    """What one lane does in every step: waits for lines of this step or an earlier, and lines."""

    lane: Lane
    items: list[tuple[int, int | None, Cost]] = field(default_factory=list)
    """A line, how many steps ago it was to be awaited (None: it is to be done), and its cost."""
    position: int = 0
    step: int = 0
    began: float = 0.0


@dataclass(slots=True, eq=False)
class _Server:
    """One direction of the link, or of the disk."""

    alone_rate: float
    both_ways_rate: float
    queue: deque[_Program] = field(default_factory=deque)
    current: _Program | None = None
    remaining_bytes: float = 0.0
    rate: float = 0.0
    since: float = 0.0
    began: float = 0.0
    version: int = 0  # of the foreseen end: it changes with the rate
    busy_seconds: float = 0.0  # in the last step


class _Run:
    """The state of a simulation."""

    def __init__(
        self,
        schedule: Schedule,
        cost: Callable[[Action], Cost],
        ways: Mapping[str, tuple[float, float]],
        num_steps: int,
    ) -> None:
        """Nothing has begun; `ways` has the rate of each alone, and while the other is busy."""
        self._lines = schedule.lines
        self._num_lines = len(self._lines)
        self._num_steps = num_steps
        costs = [cost(line) if isinstance(line, Action) else FREE for line in self._lines]
        self._programs = [_Program(lane) for lane in LANES]
        for lane, line, steps_ago in _programs(schedule):
            self._programs[lane.number].items.append((line, steps_ago, costs[line]))
        self._ways = {way: _Server(rate, min(rate, slow)) for way, (rate, slow) in ways.items()}
        names = [pair for pair in PAIRS if pair[0] in self._ways]
        self._pairs = [tuple(self._ways[way] for way in pair) for pair in names]
        self._now = 0.0
        self._events: list[tuple[float, int, _Program | None, _Server | None, int]] = []
        self._num_events = 0
        self._done = bytearray(self._num_lines * num_steps)
        self._waiting: dict[int, list[_Program]] = {}  # line of some step -> lanes it holds
        self._runnable = deque(self._programs)
        self._arrived = [0] * num_steps  # lanes at the end of each step
        self._ends: list[float] = []  # of the steps
        self._passed: list[tuple[Lane, Line, float, float]] = []  # of the last step

    def go(self) -> None:
        """Run to the end."""
        self._advance_all()
        while self._events:
            self._now, _, program, server, version = heapq.heappop(self._events)
            if program is not None:
                self._worked(program)
            elif server is not None and server.version == version:
                self._copied(server)
            self._advance_all()
        assert all(program.step == self._num_steps for program in self._programs)

    def result(self) -> Simulation:
        """The last step."""
        began = self._ends[-2] if self._num_steps > 1 else 0.0
        length = self._ends[-1] - began
        seconds = [0.0] * len(LANES)
        for lane, _, start, end in self._passed:
            seconds[lane.number] += end - start
        copying = [
            seconds[lane.number]
            for lane in LANES
            if lane is not Lane.COMPUTE and lane not in LASTING
        ]
        copying += [self._ways[way].busy_seconds for way in PAIRS[0]]
        on_disk = [self._ways[way].busy_seconds for way in PAIRS[1] if way in self._ways]
        totals = {
            "compute": seconds[Lane.COMPUTE.number],
            "link": max(copying),
            "host": seconds[Lane.UPDATE.number],
            **({"disk": max(on_disk)} if on_disk else {}),
        }
        busy = {k: total / length if length > 0 else 0.0 for k, total in totals.items()}
        bound = max(busy, key=lambda name: busy[name])
        return Simulation(seconds=length, bound=bound, busy=busy, began=began, passed=self._passed)

    # ----------------------------------------------------------------------------------------------
    # Lanes

    def _advance_all(self) -> None:
        while self._runnable:
            self._advance(self._runnable.popleft())

    def _advance(self, program: _Program) -> None:
        """Let a lane go on to its next action, or to what holds it."""
        items, done, num_lines = program.items, self._done, self._num_lines
        while program.step < self._num_steps:
            if program.position == len(items):
                if not self._end_step(program):
                    return
                continue
            line, steps_ago, cost = items[program.position]
            if steps_ago is None:
                if self._begin(program, cost):
                    return
                continue
            step = program.step - steps_ago
            if step >= 0 and not done[step * num_lines + line]:
                self._waiting.setdefault(step * num_lines + line, []).append(program)
                return
            program.position += 1

    def _end_step(self, program: _Program) -> bool:
        """A lane has done a step; whether it may go on with the next."""
        program.position = 0
        program.step += 1
        if program.lane in LASTING:
            return True
        step = program.step - 1
        self._arrived[step] += 1
        if self._arrived[step] < len(LANES) - len(LASTING):
            return False
        self._ends.append(self._now)
        self._runnable.extend(
            one for one in self._programs if one is not program and one.lane not in LASTING
        )
        return True

    def _begin(self, program: _Program, cost: Cost) -> bool:
        """Begin an action; False if it is done at once."""
        program.began = self._now
        if cost.seconds > 0:
            self._num_events += 1
            event = (self._now + cost.seconds, self._num_events, program, None, 0)
            heapq.heappush(self._events, event)
            return True
        if cost.link is not None and cost.nbytes > 0:
            self._ask(cost.link, program)
            return True
        self._finish(program)
        return False

    def _worked(self, program: _Program) -> None:
        """The time on the lane is over; bytes may follow."""
        cost = program.items[program.position][2]
        if cost.link is not None and cost.nbytes > 0:
            self._ask(cost.link, program)
        else:
            self._finish(program)
            self._runnable.append(program)

    def _finish(self, program: _Program) -> None:
        line = program.items[program.position][0]
        occurrence = program.step * self._num_lines + line
        self._done[occurrence] = 1
        if occurrence in self._waiting:
            self._runnable.extend(self._waiting.pop(occurrence))
        if program.step == self._num_steps - 1:
            self._passed.append((program.lane, self._lines[line], program.began, self._now))
        program.position += 1

    # ----------------------------------------------------------------------------------------------
    # Link

    def _ask(self, way: Direction, program: _Program) -> None:
        server = self._ways[way]
        server.queue.append(program)
        if server.current is None:
            self._serve_next(server)

    def _serve_next(self, server: _Server) -> None:
        program = server.current = server.queue.popleft() if server.queue else None
        if program is not None:
            cost = program.items[program.position][2]
            server.remaining_bytes = cost.nbytes
            server.rate, server.since, server.began = 0.0, self._now, self._now
            if cost.seconds <= 0:
                program.began = self._now
        self._set_rates()

    def _set_rates(self) -> None:
        """Foresee the ends of the copies under way, at the rates from now on."""
        for pair in self._pairs:
            self._set_rates_of(pair, both=all(server.current is not None for server in pair))

    def _set_rates_of(self, pair: tuple[_Server, ...], *, both: bool) -> None:
        for server in pair:
            rate = server.both_ways_rate if both else server.alone_rate
            if server.current is None or rate == server.rate:
                continue
            server.remaining_bytes -= server.rate * (self._now - server.since)
            server.rate, server.since = rate, self._now
            server.version += 1
            end = self._now + max(0.0, server.remaining_bytes) / rate
            self._num_events += 1
            heapq.heappush(self._events, (end, self._num_events, None, server, server.version))

    def _copied(self, server: _Server) -> None:
        program = server.current
        assert program is not None
        if program.step == self._num_steps - 1:
            server.busy_seconds += self._now - server.began
        server.version += 1
        self._finish(program)
        self._advance(program)  # a lane that has more to copy goes first
        if server.queue and server.queue[-1] is program:
            server.queue.rotate(1)
        self._serve_next(server)


def _programs(schedule: Schedule) -> Iterator[tuple[Lane, int, int | None]]:
    """What lanes do in a step, lane by lane as `_Program.items` has it."""
    number_of: dict[Action, int] = {}
    last = _last_lines(schedule)
    for number, line in enumerate(schedule.lines):
        if isinstance(line, WaitLast):
            if line.what in last:
                yield line.lane, last[line.what], 1
        elif isinstance(line, Wait):
            if line.action not in number_of:
                raise ValueError(f"'{line}' waits for a line that was not given before it")
            yield line.lane, number_of[line.action], 0
        else:
            number_of[line] = number
            yield line.lane, number, None


def _last_lines(schedule: Schedule) -> dict[str, int]:
    """For all that the next step may wait for, the last line that does so ([Note: steps])."""
    found: dict[str, int] = {}
    for number, line in enumerate(schedule.lines):
        if isinstance(line, Action):
            found |= dict.fromkeys(_carried(line), number)
    return found


def _carried(action: Action) -> list[str]:
    """What the next step may have to wait for, if it comes to that ([Note: steps])."""
    if action.kind in ("drain U.grad", "drain U.norm", "drain loss"):
        return ["drain"]
    if action.lane is Lane.WRITE and action.unit:
        return [action.places[0], action.text.split()[1]]
    if action.kind == "fetch U" and len(action.places) > 1:
        return ["fetch"]
    if action.lane is not Lane.UPDATE or not action.kind.startswith("update"):
        return []
    changes_weights = "moments" not in action.kind
    return [*([action.unit] if changes_weights else []), *action.places]
