"""Every wait of a schedule matters, shown by running it without.

The checking device can run any lane ahead of all others as far as its waits allow ([Note: hostile
order] in device/checking.py). Under every such order a whole schedule gives the bits of plain
PyTorch, or, where arithmetic differs, always the same bits. With one wait deleted, the order that
favours the waiting lane gives something else, or breaks: for each wait of each schedule here, in
real steps, and as text.

The models are tiny, and made so that everything that moves is needed and different: layers get a
tensor besides the hidden state (the recorded cells), each microbatch has its own rows, and two
steps with momentum are taken, so that an update that is late or skipped shows. Where norms are
drained alone, gradients are clipped by them; what the host has of units that stay on the device
counts as a result, too.
"""

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import inside
import pytest
import torch
import torch.nn.functional as F
from reference import train_plain
from sampled import sampled
from torch import Tensor, nn

import l2l
from l2l.device import CheckingDevice, QueuedEvent, Work
from l2l.engine import Engine
from l2l.model.layer_pass import Compiler
from l2l.run.stash import Stash
from l2l.schedule import Lane, Schedule, Shape, Wait, WaitLast, make_schedule, validate

WIDTH = 8
CLASSES = 3
ROWS = 5
MICROBATCH_ROWS = 2  # three microbatches, the last with one row
FEW_ROWS = 3  # two microbatches
SGD = {"lr": 0.1, "momentum": 0.9}
GOLDEN = Path(__file__).parent / "schedules" / "four_layers_three_microbatches.txt"
UNUSED = (Lane.GATHER, Lane.REDUCE)  # where there is one rank
ORDERS = (None, *(lane for lane in Lane if lane not in UNUSED))

every_order = pytest.mark.parametrize(
    "first", ORDERS, ids=lambda lane: lane.value if lane else "default"
)


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


Result = tuple[list[float], dict[str, Tensor]]
Batch = dict[str, Tensor]
Change = Callable[[nn.Module], None]
MakeSchedule = Callable[[Shape], Schedule]
Schedules = Mapping[Shape, Schedule]


# --------------------------------------------------------------------------------------------------
# Models and batches


class ScaledLayer(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, hidden: Tensor, scale: Tensor) -> Tensor:
        return hidden + scale * torch.tanh(self.linear(hidden))


class WideLayer(nn.Module):
    """Has something to keep for its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor, scale: Tensor) -> Tensor:
        return hidden + scale * self.down(torch.tanh(self.up(hidden)))


class ScaledClassifier(nn.Module):
    """Everything around the layers is one unit."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden, scale = self.entry(inputs), 1 + inputs.mean(dim=1, keepdim=True)
        for layer in self.layers:
            hidden = layer(hidden, scale)
        logits = self.head(hidden)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


WORDS = 11  # more than a step looks up
TABLE_WIDTH = 128  # of rows that can be updated apart
LENGTH = 2


class TokenClassifier(nn.Module):
    """Has a table before the layers and a head after them, which may be the table again."""

    def __init__(self, *, tied: bool, width: int = TABLE_WIDTH) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(ScaledLayer(width) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.table(ids))
        scale = 1 + ids.float().mean(dim=1)[:, None, None] / WORDS
        for layer in self.layers:
            hidden = layer(hidden, scale)
        logits = self.head(self.norm(hidden)).mean(dim=1) / LENGTH**4
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Speaker(TokenClassifier):
    """Its loss is a plain cross-entropy of its logits: the head may come in slices."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.table(ids))
        scale = 1 + ids.float().mean(dim=1)[:, None, None] / WORDS
        for layer in self.layers:
            hidden = layer(hidden, scale)
        logits = self.head(self.norm(hidden).mean(dim=1)) / LENGTH**4
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class CrossLayer(nn.Module):
    """Is given what the encoder has made."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear, self.query = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, hidden: Tensor, memory: Tensor, scale: Tensor) -> Tensor:
        shares = (self.query(hidden) @ memory.mT / WIDTH).softmax(dim=-1)
        return hidden + scale * torch.tanh(self.linear(hidden + shares @ memory))


class Translator(nn.Module):
    """Two lists of layers, and code of its own between them."""

    def __init__(self, *, contrasts: bool = False) -> None:
        super().__init__()
        self.encoder_entry, self.decoder_entry = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.encoder = nn.ModuleList(ScaledLayer() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.decoder = nn.ModuleList(CrossLayer() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.loss = contrast if contrasts else F.cross_entropy

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        memory, scale = self.encoder_entry(inputs), 1 + inputs.mean(dim=(1, 2))[:, None, None]
        for layer in self.encoder:
            memory = layer(memory, scale)
        memory, hidden = self.norm(memory), torch.tanh(self.decoder_entry(inputs.flip(1)))
        for layer in self.decoder:
            hidden = layer(hidden, memory, scale)
        logits = self.head(hidden.mean(dim=1))
        return {"loss": self.loss(logits, labels), "logits": logits}


class TokenTranslator(nn.Module):
    """Encoder, decoder and head have one table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, TABLE_WIDTH)
        self.encoder = nn.ModuleList([ScaledLayer(TABLE_WIDTH)])
        self.decoder = nn.ModuleList([CrossLayer(TABLE_WIDTH)])
        self.norm = nn.LayerNorm(TABLE_WIDTH)
        self.head = nn.Linear(TABLE_WIDTH, WORDS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor, answers: Tensor, labels: Tensor) -> dict[str, Tensor]:
        memory = torch.tanh(self.table(ids))
        scale = 1 + ids.float().mean(dim=1)[:, None, None] / WORDS
        memory = torch.tanh(self.encoder[0](memory, scale))
        hidden = self.decoder[0](torch.tanh(self.table(answers)), memory, scale)
        logits = self.head(self.norm(hidden)).mean(dim=1) / LENGTH**4
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class TwiceClassifier(ScaledClassifier):
    """Calls each layer twice."""

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden, scale = self.entry(inputs), 1 + inputs.mean(dim=1, keepdim=True)
        for layer in (*self.layers, *self.layers):
            hidden = layer(hidden, scale)
        logits = self.head(hidden)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class ContrastiveClassifier(ScaledClassifier):
    """Its loss compares rows with each other."""

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = super().forward(inputs, labels)["logits"]
        return {"loss": contrast(logits, labels), "logits": logits}


def contrast(logits: Tensor, labels: Tensor) -> Tensor:
    found = F.normalize(logits, dim=-1)
    return F.cross_entropy(found @ found.T, torch.arange(len(found)))


def build() -> nn.Module:
    torch.manual_seed(0)
    return ScaledClassifier([ScaledLayer() for _ in range(4)])


def build_three() -> nn.Module:
    torch.manual_seed(0)
    return ScaledClassifier([ScaledLayer() for _ in range(3)])


def build_wide() -> nn.Module:
    torch.manual_seed(0)
    return ScaledClassifier([WideLayer() for _ in range(3)])


def build_tied() -> nn.Module:
    torch.manual_seed(0)
    return TokenClassifier(tied=True)


def build_untied(width: int = TABLE_WIDTH) -> nn.Module:
    torch.manual_seed(0)
    return TokenClassifier(tied=False, width=width)


def build_of(kind: type[nn.Module], **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    if issubclass(kind, ScaledClassifier):
        settings["layers"] = [ScaledLayer() for _ in range(3)]
    return kind(**settings)


def make_batch(seed: int, rows: int = ROWS) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {
        "inputs": torch.randn(rows, WIDTH, generator=generator),
        "labels": torch.randint(0, CLASSES, (rows,), generator=generator),
    }


def make_tokens(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(0, WORDS, (FEW_ROWS, LENGTH), generator=generator),
        "labels": torch.randint(0, WORDS, (FEW_ROWS,), generator=generator),
    }


def make_pairs(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    answers = torch.randint(0, WORDS, (FEW_ROWS, LENGTH), generator=generator)
    return {"answers": answers, **make_tokens(seed)}


def make_sequences(seed: int, rows: int = FEW_ROWS) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, LENGTH + 1, WIDTH, generator=generator)
    return {**make_batch(seed, rows), "inputs": inputs}


def leave(model: nn.Module) -> None:
    """Change nothing."""


def freeze_below(model: nn.Module) -> None:
    for module in (model.entry, model.head, *model.layers[:2]):
        module.requires_grad_(False)


# --------------------------------------------------------------------------------------------------
# Every wait matters


@dataclasses.dataclass(frozen=True)
class Case:
    """A schedule to take waits from, and the engine it is run with."""

    schedule: MakeSchedule = make_schedule
    build: Callable[[], nn.Module] = build
    batch: Callable[[int], Batch] = make_batch
    change: Change = leave
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    num_steps: int = 2
    kinds: tuple[str, ...] = ()  # of waits that the case is here for


def plain_result(case: Case) -> Result:
    model = case.build()
    case.change(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(trained, foreach=False, **SGD)
    if case.settings.get("optimizer") == ADAMW:
        optimizer = torch.optim.AdamW(trained, foreach=False, lr=ADAMW.lr)
    batches = [case.batch(seed) for seed in range(case.num_steps)]
    size = case.settings.get("microbatch_size", MICROBATCH_ROWS)
    losses = train_plain(model, batches, optimizer=optimizer, rule="rows", size=size)
    return losses, model.state_dict()


def make_engine(model: nn.Module, first: Lane | None, **settings: Any) -> Engine:
    defaults = {
        "optimizer": l2l.SGD(**SGD),
        "microbatch_size": MICROBATCH_ROWS,
        "precision": "float32",
        "kernel": "readable",
        "prove": False,  # schedules here are for one batch, and some are wrong on purpose
    }
    if settings.get("disk") == ".":  # one of its own: an engine that fails may not be gone yet
        settings["disk"] = tempfile.mkdtemp(dir=".")
    return inside.engine(model, **{"device": CheckingDevice(first=first), **defaults, **settings})


@contextmanager
def scheduled(make: MakeSchedule) -> Iterator[list[Shape]]:
    """Let engines run the schedules that `make` makes; gives the shapes they asked for."""
    shapes: list[Shape] = []

    def make_and_note(shape: Shape) -> Schedule:
        shapes.append(shape)
        return make(shape)

    with mock.patch(inside.MAKE_SCHEDULE, make_and_note):
        yield shapes


def engine_result(
    case: Case, make: MakeSchedule, first: Lane | None, *, expected: Result | None = None
) -> Result:
    """Losses, weights and norms of some steps, all submitted before anything is read.

    With `expected` it ends after the first step with another loss: that says enough.
    """
    model = case.build()
    case.change(model)
    with scheduled(make) as shapes:
        engine = make_engine(model, first, **case.settings)
        reports = []
        for seed in range(case.num_steps):
            reports.append(engine.step(case.batch(seed)))
            if expected is not None and reports[-1].loss != expected[0][seed]:
                return [report.loss for report in reports], {}
        losses = [report.loss for report in reports]
        norms = torch.tensor([report.gradient_norm for report in reports])
        # What the host would have if the engine had to be left now.
        units = inside.server(engine).units
        mirrored = {f"{unit} mirrored": units[unit].weights for unit in shapes[-1].on_device}
        mirrored = {name: weights.clone() for name, weights in mirrored.items()}
        engine.close()
    return losses, {**model.state_dict(), **mirrored, "norms": norms}


def is_same(found: Result, expected: Result) -> bool:
    return found[0] == expected[0] and all(
        torch.equal(tensor, found[1][name]) for name, tensor in expected[1].items()
    )


def is_near(found: Result, expected: Result) -> bool:
    return found[0] == pytest.approx(expected[0], rel=1e-5) and all(
        torch.allclose(found[1][name], tensor, atol=1e-5) for name, tensor in expected[1].items()
    )


def schedules_of(case: Case) -> dict[Shape, Schedule]:
    """The schedules of a case's steps, that of the last step last."""
    model = case.build()
    case.change(model)
    with scheduled(case.schedule) as shapes, make_engine(model, None, **case.settings) as engine:
        for seed in range(case.num_steps):
            engine.step(case.batch(seed))
    return {shape: case.schedule(shape) for shape in shapes}


def with_numbers(**numbers: int) -> MakeSchedule:
    return lambda shape: make_schedule(dataclasses.replace(shape, **numbers))


def golden_schedule(shape: Shape) -> Schedule:
    return Schedule.parse(
        GOLDEN.read_text(), dataclasses.replace(shape, num_cells=4, num_staging=2)
    )


CASES = {
    "golden": Case(golden_schedule),
    "engine": Case(build=build_three),
    "tightest": Case(
        with_numbers(
            num_slots=1, num_cells=3, num_recorded_cells=1, num_gradient_slots=1, num_staging=1
        ),
        build=build_three,
    ),
    "frozen": Case(with_numbers(num_cells=4, num_gradient_slots=1), change=freeze_below),
    "stash_on_device": Case(golden_schedule, settings={"stash": "device"}),
    "encoder_decoder": Case(
        with_numbers(num_cells=4, num_recorded_cells=2),
        build=partial(build_of, Translator),
        batch=make_sequences,
    ),
}


ADAMW = l2l.AdamW(lr=0.01)
NATIVE = {"optimizer": ADAMW, "kernel": "native", "clip_norm": 0.05}
DISK = (
    "update waits fetch U.state",
    "write waits update U host",
    "read waits drain U.state",
)
WEIGHTS_ON_DISK = {"num_on_disk": 2, "num_weights_on_disk": 3}
HALVES = ("fetch waits update U host late weights", "drain waits update U host late moments")

LATER = {  # the waits are those of the second step, which settles what the first has left
    "just in time": Case(
        build=build_three,
        batch=partial(make_batch, rows=FEW_ROWS),
        settings={"update": "just in time"},
    ),
    "clipped": Case(
        build=build_three,
        batch=partial(make_batch, rows=FEW_ROWS),
        settings={"overrides": {"num_cells": 3}, "clip_norm": 0.05},
    ),
    "on the device": Case(
        build=build_three,
        batch=partial(make_batch, rows=FEW_ROWS),
        settings={"overrides": {"num_cells": 3}, "optimizer": l2l.Adafactor(lr=0.05)},
    ),
    "untied table on the host": Case(
        build=build_untied,
        batch=make_tokens,
        settings={"embedding": "host"},
        kinds=("unstash waits lookup m", "stash waits backward Pro m", "update waits drain v m"),
    ),
    "tied table on the host, clipped": Case(
        build=build_tied,
        batch=make_tokens,
        settings={"embedding": "host", "clip_norm": 0.05},
        kinds=(
            "unstash waits lookup m",
            "update waits drain v m",
            "fetch waits update U host late",
        ),
    ),
    "tail": Case(
        build=build_three,
        batch=partial(make_batch, rows=FEW_ROWS),
        settings={"overrides": {"num_tail": 1, "num_cells": 3}},
    ),
    "tail of all": Case(
        build=build_three,
        batch=partial(make_batch, rows=FEW_ROWS),
        settings={"overrides": {"num_tail": 3}, "clip_norm": 0.05},
    ),
    "tail with state": Case(
        build=build_three,
        batch=partial(make_batch, rows=FEW_ROWS),
        settings={"overrides": {"num_tail": 1, "num_device_states": 1, "num_cells": 3}},
        kinds=("compute waits order U late", "drain waits update U device late"),
    ),
    "tail with state, native": Case(
        build=build_three,
        batch=partial(make_batch, rows=FEW_ROWS),
        settings={
            "overrides": {"num_tail": 2, "num_device_states": 1, "num_cells": 3},
            "optimizer": l2l.AdamW(lr=0.01),
            "kernel": "native",
            "clip_norm": 0.05,
        },
        kinds=("fetch waits update U host late", "drain waits update U device late"),
    ),
    "all around with state": Case(
        build=build_untied,
        batch=make_tokens,
        settings={"overrides": {"outer_state": True}, "clip_norm": 0.05},
        kinds=(
            "compute waits order U late",
            "drain waits update U device late",
            "drain waits backward Pro m",
        ),
    ),
    "shared updates": Case(
        build=build_untied,
        batch=make_tokens,
        settings={"overrides": {"num_shared": 1, "num_pieces": 6}, "clip_norm": 0.05},
        kinds=(
            "rework waits fetch U.all:p",
            "drain waits update U:p device late",
            "lend waits drain U.all:p",
        ),
    ),
    "shared updates at once": Case(
        build=build_untied,
        batch=make_tokens,
        settings={"overrides": {"num_shared": 1, "num_pieces": 6}},
        kinds=(
            "rework waits fetch U.state:p",
            "rework waits order U",
            "drain waits update U:p device",
            "fetch waits drain U.all:p",
        ),
    ),
    "shared updates at once, shared memory": Case(
        build=build_untied,
        batch=make_tokens,
        settings={
            "overrides": {"num_shared": 2, "num_pieces": 5, "num_late": 2, "shares_memory": True}
        },
        kinds=("rework waits fetch U.all:p", "rework waits fetch U.state:p", "fetch waits take"),
    ),
    "shared memory": Case(
        build=build_untied,
        batch=make_tokens,
        settings={"overrides": {"shares_memory": True}, "embedding": "device"},
        kinds=("fetch waits take", "compute waits drain U.grad"),
    ),
    "all together": Case(
        build=build_tied,
        batch=make_tokens,
        settings={
            "embedding": "host",
            "overrides": {
                "num_tail": 1,
                "num_device_states": 1,
                "num_shared": 1,
                "num_pieces": 4,
                "shares_memory": True,
                "num_cells": 3,
            },
            "clip_norm": 0.05,
        },
        kinds=(
            "unstash waits lookup m",
            "drain waits update U device late",
            "drain waits update U:p device late",
        ),
    ),
    "tied head in slices, clipped": Case(
        build=partial(build_of, Speaker, tied=True),
        batch=make_tokens,
        settings={
            "embedding": "host",
            "overrides": {"num_head_slices": 3, "num_cells": 4},
            "clip_norm": 0.05,
        },
        kinds=(
            "compute waits fetch U:p",
            "drain waits backward U:p m",
            "fetch waits update U host late",
            "fetch waits release U:p",
            "compute waits drain U.grad:p",
        ),
    ),
    "head in slices, at once": Case(
        build=partial(build_of, Speaker, tied=False, width=WIDTH),
        batch=make_tokens,
        settings={"overrides": {"num_head_slices": 2, "num_cells": 4, "num_gradient_slots": 1}},
        kinds=("update waits drain U.grad:p", "fetch waits release U:p"),
    ),
    "on disk": Case(
        with_numbers(num_disk_buffers=2),
        build=build_three,
        batch=partial(make_batch, rows=FEW_ROWS),
        settings={"overrides": {"num_on_disk": 3, "num_cells": 3}, "disk": "."},
        kinds=DISK,
    ),
    "on disk, clipped": Case(
        build=build_three,
        batch=partial(make_batch, rows=FEW_ROWS),
        settings={**NATIVE, "overrides": {"num_on_disk": 2, "num_cells": 3}, "disk": "."},
        kinds=("update waits fetch U.state", "write waits update U host late"),
    ),
    "weights on disk": Case(
        with_numbers(num_disk_buffers=2, num_weight_buffers=2),
        build=build_three,
        batch=partial(make_batch, rows=FEW_ROWS),
        settings={"overrides": {**WEIGHTS_ON_DISK, "num_cells": 3}, "disk": "."},
        kinds=(
            "fetch waits fetch U.weights",
            "update waits fetch U.weights",
            "read waits drain U.weights",
            "write waits update U host",
        ),
    ),
    "weights on disk, clipped": Case(
        with_numbers(num_weight_buffers=2),
        build=build_three,
        batch=partial(make_batch, rows=FEW_ROWS),
        settings={**NATIVE, "overrides": {**WEIGHTS_ON_DISK, "num_cells": 3}, "disk": "."},
        kinds=(
            "update waits fetch U.weights",
            "write waits fetch U",
            "fetch waits update U host late",
        ),
    ),
    "stash on disk": Case(
        build=build_three,
        batch=partial(make_batch, rows=FEW_ROWS),
        settings={"overrides": {"stash_values": 1, "num_cells": 3}, "disk": "."},
        kinds=(
            "write waits drain v m",
            "stash waits drain v.stash m",
            "read waits fetch v m",
            "unstash waits fetch v.stash m",
        ),
    ),
    "in halves": Case(
        build=build_three,
        batch=partial(make_batch, rows=FEW_ROWS),
        settings={
            "optimizer": ADAMW,
            "overrides": {"halves": True, "num_cells": 3},
            "update": "just in time",
        },
        kinds=HALVES,
    ),
    "in halves, native": Case(
        build=build_three,
        batch=partial(make_batch, rows=FEW_ROWS),
        settings={**NATIVE, "overrides": {"halves": True, "num_cells": 3}},
        kinds=HALVES,
    ),
    "in halves, but for the last": Case(
        build=build_three,
        batch=partial(make_batch, rows=FEW_ROWS),
        settings={**NATIVE, "overrides": {"halves": True, "num_whole": 1, "num_cells": 3}},
        kinds=HALVES,
    ),
    "in halves, 8-bit": Case(
        build=build_three,
        batch=partial(make_batch, rows=FEW_ROWS),
        settings={
            **NATIVE,
            "optimizer": l2l.AdamW(lr=0.01, moments="8bit"),
            "overrides": {"halves": True},
        },
        kinds=HALVES,
    ),
    "in halves, some of them": Case(
        build=build_three,
        batch=partial(make_batch, rows=FEW_ROWS),
        settings={
            "optimizer": ADAMW,
            "overrides": {"halves": True, "num_late": 2, "num_cells": 3},
            "update": "eager",
        },
        kinds=(*HALVES, "update waits drain U.grad"),
    ),
    "in halves, tail": Case(
        build=build_three,
        batch=partial(make_batch, rows=FEW_ROWS),
        settings={**NATIVE, "overrides": {"halves": True, "num_tail": 1, "num_cells": 3}},
        kinds=HALVES,
    ),
    "in halves, untied table on the host": Case(
        build=build_untied,
        batch=make_tokens,
        settings={
            "optimizer": ADAMW,
            "embedding": "host",
            "overrides": {"halves": True},
            "update": "just in time",
        },
        kinds=(*HALVES, "unstash waits lookup m", "update waits drain v m"),
    ),
    "in halves, tied table on the host, clipped": Case(
        build=build_tied,
        batch=make_tokens,
        settings={**NATIVE, "embedding": "host", "overrides": {"halves": True}},
        kinds=(*HALVES, "unstash waits lookup m", "update waits drain v m"),
    ),
    "in halves, all together": Case(
        build=build_tied,
        batch=make_tokens,
        settings={
            **NATIVE,
            "embedding": "host",
            "overrides": {
                "halves": True,
                "num_tail": 1,
                "num_device_states": 1,
                "num_shared": 1,
                "num_pieces": 4,
                "shares_memory": True,
                "num_cells": 3,
            },
        },
        kinds=(
            *HALVES,
            "unstash waits lookup m",
            "drain waits update U device late",
            "drain waits update U:p device late",
        ),
    ),
}
BETWEEN = ("compute waits fetch v m", "unstash waits backward Int m")
ROUTES = {  # other ways through the layers, or to the loss
    "encoder and decoder, just in time, tail": Case(
        build=partial(build_of, Translator),
        batch=make_sequences,
        settings={"update": "just in time", "overrides": {"num_tail": 1, "num_cells": 3}},
        kinds=BETWEEN,
    ),
    "encoder and decoder, table on the host, clipped": Case(
        build=partial(build_of, TokenTranslator),
        batch=make_pairs,
        settings={"embedding": "host", "clip_norm": 0.05},
        kinds=("unstash waits lookup m", *BETWEEN),
    ),
    "layers called twice": Case(
        build=partial(build_of, TwiceClassifier), batch=partial(make_batch, rows=FEW_ROWS)
    ),
    "layers called twice, in halves": Case(
        build=partial(build_of, TwiceClassifier),
        batch=partial(make_batch, rows=FEW_ROWS),
        settings={
            "optimizer": ADAMW,
            "overrides": {"halves": True, "num_slots": 1},
            "update": "just in time",
        },
        kinds=HALVES,
    ),
    "layers called twice, on the device": Case(
        build=partial(build_of, TwiceClassifier),
        batch=partial(make_batch, rows=FEW_ROWS),
        settings={"overrides": {"num_cells": 4}, "optimizer": l2l.Adafactor(lr=0.05)},
        kinds=("drain waits update U device", "fetch waits drain U free"),
    ),
    "a loss that compares rows": Case(
        build=partial(build_of, ContrastiveClassifier),
        batch=partial(make_batch, rows=4),
        settings={"overrides": {"num_cells": 3}},
    ),
    "encoder and decoder, a loss that compares rows": Case(
        build=partial(build_of, Translator, contrasts=True),
        batch=make_sequences,
        settings={"overrides": {"num_cells": 5}},
        kinds=BETWEEN,
    ),
}
KEPT = Case(
    build=build_wide,
    batch=partial(make_batch, rows=2),
    settings={
        "microbatch_size": 1,
        "compile": "aot_eager_decomp_partition",
        "overrides": {"keep": 0.3, "num_kept_cells": 2, "num_cells": 12},  # nothing else moves
    },
)

every_case = pytest.mark.parametrize("name", CASES)


@every_order
@every_case
def test_every_order_that_waits_allow_gives_the_bits_of_plain_pytorch(
    name: str, first: Lane | None
) -> None:
    case = CASES[name]
    assert is_same(engine_result(case, case.schedule, first), plain_result(case))


def without(schedule: Schedule, position: int) -> Schedule:
    lines = schedule.lines[:position] + schedule.lines[position + 1 :]
    return dataclasses.replace(schedule, lines=lines)


def waits_that_are_not_missed(
    is_right: Callable[[MakeSchedule, Lane], bool], schedules: Schedules
) -> list[str]:
    """Waits of the last schedule without which a run still gives the right bits.

    Already in the one order that favours the lane which no longer waits.
    """
    shape, schedule = list(schedules.items())[-1]
    survivors = []
    for position, wait in enumerate(schedule.lines):
        if not isinstance(wait, Wait):
            continue
        broken = without(schedule, position)
        with pytest.raises(ValueError, match="is not ordered after"):
            validate(broken)
        try:
            survives = is_right(chosen({**schedules, shape: broken}), wait.lane)
        except (AssertionError, KeyError, RuntimeError):  # not resident; not written; no memory
            continue
        if survives:
            survivors.append(f"{position}: {wait}")
    return survivors


def chosen(schedules: Schedules) -> MakeSchedule:
    """Those of the given schedules; what was left may be named in another order."""

    def in_order(shape: Shape) -> Shape:
        return dataclasses.replace(shape, pending=tuple(sorted(shape.pending)))

    given = {in_order(shape): schedule for shape, schedule in schedules.items()}
    return lambda shape: given.get(in_order(shape)) or make_schedule(shape)


def kinds_of_waits(schedule: Schedule) -> list[str]:
    """Of each wait the lane that waits, and the kind of the line it waits for."""
    waits = [line for line in schedule.lines if isinstance(line, Wait)]
    return [f"{wait.lane.value} waits {wait.action.kind}" for wait in waits]


def assert_every_wait_is_missed(case: Case, *expected: Result) -> list[str]:
    """Try all orders, then delete each wait in turn; gives the kinds of waits there were.

    Results are `expected` of as many steps as they have losses; most waits are missed in the first.
    """
    schedules = schedules_of(case)
    last = list(schedules.values())[-1]
    kinds = kinds_of_waits(last)

    def is_right(make: MakeSchedule, first: Lane) -> bool:
        return all(
            is_same(
                engine_result(
                    dataclasses.replace(case, num_steps=len(one[0])), make, first, expected=one
                ),
                one,
            )
            for one in expected
        )

    for first in {action.lane for action in last.actions}:
        assert is_right(chosen(schedules), first), f"{first}: none is deleted"
    survivors = waits_that_are_not_missed(is_right, schedules)
    assert not survivors, f"{len(survivors)} of {len(kinds)} waits were not missed: {survivors}"
    return kinds


@pytest.mark.parametrize(
    "name",
    sampled([name for name in CASES if name != "stash_on_device"], lambda name: name != "frozen"),
)
def test_a_step_fails_when_any_wait_is_deleted(name: str) -> None:
    case = CASES[name]
    one_step = plain_result(dataclasses.replace(case, num_steps=1))
    assert len(assert_every_wait_is_missed(case, one_step, plain_result(case))) > 50


THOROUGH = {  # whose lines others have, too
    "just in time",
    "clipped",
    "untied table on the host",
    "tail",
    "tail with state",
    "shared memory",
    "tied head in slices, clipped",
    "in halves, tied table on the host, clipped",
    "encoder and decoder, table on the host, clipped",
    "a loss that compares rows",
    "tail with state, native",
    "shared updates",
    "shared updates at once",
    "in halves",
    "in halves, native",
    "in halves, but for the last",
    "in halves, 8-bit",
    "in halves, some of them",
    "in halves, tail",
    "in halves, untied table on the host",
    "encoder and decoder, just in time, tail",
    "layers called twice, in halves",
    "layers called twice, on the device",
}


@pytest.mark.parametrize("name", sampled(LATER, lambda name: name not in THOROUGH))
def test_a_step_that_leaves_or_settles_updates_fails_when_any_wait_is_deleted(name: str) -> None:
    case = LATER[name]
    expected = engine_result(case, make_schedule, None)
    if case.settings.get("optimizer") in (None, ADAMW) and "clip_norm" not in case.settings:
        agrees = is_near if "slices" in name else is_same  # words are added up slice by slice
        assert agrees(expected, plain_result(case))
    if "fetch waits update U host late weights" in case.kinds:
        assert is_same(expected, engine_result(case, with_numbers(halves=False), None))
    kinds = assert_every_wait_is_missed(case, expected)
    assert set(case.kinds) <= set(kinds)
    assert len(kinds) > (5 if name == "tail of all" else 20)


@pytest.mark.parametrize("name", sampled(ROUTES, lambda name: name not in THOROUGH))
def test_a_step_along_another_route_fails_when_any_wait_is_deleted(name: str) -> None:
    """All rows at once give the bits of plain PyTorch; microbatches add up in another order."""
    case = ROUTES[name]
    expected = engine_result(case, make_schedule, None)
    if case.settings.get("optimizer") in (None, ADAMW) and "clip_norm" not in case.settings:
        whole = dataclasses.replace(case, settings={**case.settings, "microbatch_size": ROWS})
        assert is_same(engine_result(whole, make_schedule, None), plain_result(whole))
        assert is_near(expected, plain_result(whole))
    (shape, *_) = schedules_of(case)
    assert shape.num_microbatches == 2
    assert bool(shape.stacks) == ("decoder" in name)
    assert bool(shape.repeated) == ("twice" in name)
    assert shape.joint == ("compares rows" in name)
    kinds = assert_every_wait_is_missed(case, expected)
    assert set(case.kinds) <= set(kinds)
    assert len(kinds) > 30


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_step_that_keeps_results_fails_when_any_wait_is_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("l2l.model.layer_pass.SMALL_BYTES", 0)  # the tensors here are all small
    compiler = Compiler(backend=KEPT.settings["compile"])
    monkeypatch.setattr(inside.COMPILER, lambda **_: compiler)  # compiles once for all
    kept: list[int] = []
    put = Stash.put

    def put_and_note(stash: Stash, cell: str, value: str, tensors: list[Tensor]) -> None:
        put(stash, cell, value, tensors)
        kept.extend([len(tensors)] if value.startswith("k") else [])

    monkeypatch.setattr(Stash, "put", put_and_note)
    expected = engine_result(KEPT, make_schedule, None)
    assert is_near(expected, plain_result(KEPT))
    lines = [str(line) for schedule in schedules_of(KEPT).values() for line in schedule.actions]
    for verb, kind in (("drain", "k0"), ("fetch", "k0"), ("forward", "K"), ("backward", "K")):
        assert any(line.startswith(verb) and f" {kind}" in line for line in lines)
    assert len(assert_every_wait_is_missed(KEPT, expected)) > 20
    assert set(kept) == {1}, "every pass kept something"


def test_the_golden_schedule_has_waits_of_every_kind() -> None:
    (schedule,) = schedules_of(CASES["golden"]).values()
    assert set(kinds_of_waits(schedule)) == {
        "fetch waits release U",  # the slot is reused
        "compute waits fetch U",  # the weights are there
        "compute waits drain U.grad",  # the gradient slot is reused
        "compute waits drain v m",  # the cell is reused
        "compute waits fetch v m",  # the value is there
        "stash waits forward Pro m",
        "stash waits forward U m",
        "stash waits loss m",
        "stash waits backward U m",
        "unstash waits drain v m",  # the value is kept, or the cell is reused
        "unstash waits forward U m",  # the cell is reused
        "unstash waits loss m",
        "unstash waits backward U m",
        "drain waits loss m",  # the losses are there
        "drain waits backward U m",
        "drain waits backward Pro m",
        "drain waits update U host",  # the staging is reused
        "update waits drain U.grad",
    }


EVALUATED = {
    "new": Case(with_numbers(num_cells=4), build=build_three, num_steps=0),
    "tied table on the host": dataclasses.replace(
        LATER["tied table on the host, clipped"], num_steps=1
    ),
    "tied table on the host, in halves": LATER["in halves, tied table on the host, clipped"],
    "tail with state": dataclasses.replace(LATER["tail with state"], num_steps=1),
    "layers called twice": dataclasses.replace(ROUTES["layers called twice"], num_steps=0),
    "weights on disk": dataclasses.replace(LATER["weights on disk, clipped"], num_steps=1),
    "stash on disk": dataclasses.replace(LATER["stash on disk"], num_steps=0),
    "encoder and decoder, a loss that compares rows": dataclasses.replace(
        ROUTES["encoder and decoder, a loss that compares rows"], num_steps=0
    ),
}


def evaluated(case: Case, make: MakeSchedule, first: Lane | None) -> tuple[Result, list[Shape]]:
    """A loss and outputs, perhaps after a step; the shapes of schedules, the evaluation's last."""
    model = case.build()
    with scheduled(make) as shapes:
        engine = make_engine(model, first, **case.settings)
        for seed in range(case.num_steps):
            engine.step(case.batch(seed))
        loss = engine.evaluate(case.batch(1))
        asked = list(shapes)
        logits = engine.predict(case.batch(2))["logits"]
        engine.close()
    return ([loss], {**model.state_dict(), "logits": logits}), asked


@pytest.mark.parametrize("name", EVALUATED)
def test_an_evaluation_fails_when_any_wait_is_deleted(name: str) -> None:
    case = EVALUATED[name]
    expected, shapes = evaluated(case, case.schedule, None)
    schedules = {shape: case.schedule(shape) for shape in shapes}
    assert not shapes[-1].training
    for first in Lane:
        assert is_same(evaluated(case, chosen(schedules), first)[0], expected)
    assert not waits_that_are_not_missed(
        lambda make, first: is_same(evaluated(case, make, first)[0], expected), schedules
    )


# --------------------------------------------------------------------------------------------------
# From step to step


def test_a_fetch_that_does_not_wait_for_the_last_update_gets_stale_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case()
    expected = plain_result(case)
    assert is_same(engine_result(case, make_schedule, Lane.FETCH), expected)
    wait = CheckingDevice.wait

    def wait_for_no_update(device: CheckingDevice, lane: Lane, event: QueuedEvent) -> None:
        if (lane, event.lane) != (Lane.FETCH, Lane.UPDATE):
            wait(device, lane, event)

    monkeypatch.setattr(CheckingDevice, "wait", wait_for_no_update)
    losses, weights = engine_result(case, make_schedule, Lane.FETCH)
    assert losses[0] == expected[0][0]
    assert losses[1] != expected[0][1]
    assert not is_same((losses, weights), expected)


def test_a_drain_waits_for_updates_of_a_step_with_other_layers() -> None:
    """The host may still read the staging of a layer that the next step leaves out."""

    def result(make: MakeSchedule) -> Result:
        model = build_three()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers" in name)  # else these would be waited for
        with scheduled(make):
            engine = make_engine(model, Lane.DRAIN)
            losses = [
                engine.step(make_batch(seed), layers=layers).loss
                for seed, layers in enumerate(([2], [0, 1, 2], [2]))
            ]
            engine.close()
        return losses, model.state_dict()

    one_staging = with_numbers(num_staging=1)

    def hasty(shape: Shape) -> Schedule:
        made = one_staging(shape)
        lines = [x for x in made.lines if not (isinstance(x, WaitLast) and x.lane is Lane.DRAIN)]
        return dataclasses.replace(made, lines=tuple(lines))

    expected = result(make_schedule)
    assert is_same(result(one_staging), expected)
    assert not is_same(result(hasty), expected)


class Asynchronous(CheckingDevice):
    """Drains end when the next step needs the device, as on an accelerator; the host is fast."""

    has_finished = False

    def finish(self) -> None:
        for lane in Lane:
            if lane not in (Lane.UPDATE, Lane.DRAIN):
                self._advance(lane, self._queues[lane].num_submitted)
        self.has_finished = True

    def submit(self, lane: Lane, text: str, work: Work) -> None:
        if self.has_finished and lane is not Lane.UPDATE:
            self.has_finished = False
            self._advance(Lane.DRAIN, self._queues[Lane.DRAIN].num_submitted)
        super().submit(lane, text, work)
        if lane is Lane.UPDATE:  # at once, but for its waits
            self._advance(lane, self._queues[lane].num_submitted)


@pytest.mark.parametrize("settings", [{}, {"optimizer": ADAMW, "overrides": {"num_tail": 1}}])
def test_late_updates_wait_for_the_drains_of_the_step_before(settings: dict[str, Any]) -> None:
    def result(make: MakeSchedule) -> Result:
        model, device = build_three(), Asynchronous(first=Lane.UPDATE)
        with scheduled(make):
            engine = make_engine(model, None, device=device, clip_norm=0.05, **settings)
            losses = [engine.step(make_batch(seed)).loss for seed in range(3)]
            engine.close()
        return losses, model.state_dict()

    def hasty(shape: Shape) -> Schedule:
        made = make_schedule(shape)
        lines = [line for line in made.lines if str(line) != "update waits last drain"]
        assert len(lines) == len(made.lines) - bool(shape.pending)
        return dataclasses.replace(made, lines=tuple(lines))

    expected = result(make_schedule)
    assert all(tensor.isfinite().all() for tensor in expected[1].values())
    assert not is_same(result(hasty), expected)


@every_order
def test_evaluating_between_steps_sees_the_updated_weights(first: Lane | None) -> None:
    model = build()
    engine = make_engine(model, first)
    engine.step(make_batch(0))
    between = engine.evaluate(make_batch(1))
    engine.step(make_batch(1))
    engine.close()

    plain = build()
    optimizer = torch.optim.SGD(plain.parameters(), foreach=False, **SGD)
    settings = {"optimizer": optimizer, "rule": "rows", "size": MICROBATCH_ROWS}
    train_plain(plain, [make_batch(0)], **settings)
    assert train_plain(plain, [make_batch(1)], **settings) == [between]
    for name, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


def test_gradients_of_rows_looked_up_twice_add_up_as_in_plain_pytorch() -> None:
    """Those of the decoder before those of the encoder."""
    case = Case(
        build=partial(build_of, TokenTranslator),
        batch=make_pairs,
        settings={"embedding": "host", "microbatch_size": FEW_ROWS},
        num_steps=5,
    )
    assert is_same(engine_result(case, make_schedule, None), plain_result(case))


@every_order
def test_the_device_updates_layers_of_fewer_blocks_than_pieces(first: Lane | None) -> None:
    """The last pieces are empty."""
    case = Case(
        build=build_three,
        batch=partial(make_batch, rows=FEW_ROWS),
        settings={"overrides": {"num_shared": 2, "num_pieces": 4}, "update": "just in time"},
        num_steps=3,
    )
    assert is_same(engine_result(case, make_schedule, first), plain_result(case))


class IdleLayer(ScaledLayer):
    """Has a parameter that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.ones(WIDTH))


def build_idle() -> nn.Module:
    torch.manual_seed(0)
    return ScaledClassifier([IdleLayer() for _ in range(3)])


@every_order
def test_the_device_updates_at_once_only_what_got_a_gradient(first: Lane | None) -> None:
    overrides = {"num_shared": 3, "num_pieces": 2}
    case = Case(
        build=build_idle,
        batch=partial(make_batch, rows=FEW_ROWS),
        settings={"overrides": overrides, "optimizer": ADAMW},
        num_steps=3,
    )
    assert is_same(engine_result(case, make_schedule, first), plain_result(case))
    with make_engine(case.build(), first, **case.settings) as engine:
        for seed in range(case.num_steps):
            engine.step(case.batch(seed))
        inside.server(engine).settle_all()
        steps = inside.server(engine).units["L1"].steps
        assert {name.rpartition(".")[2]: number for name, number in steps.items()} == {
            "weight": 3,
            "bias": 3,
            "idle": 0,
        }


@every_order
def test_a_step_looks_up_updated_rows_also_of_a_narrow_table(first: Lane | None) -> None:
    """Its rows cannot be updated apart, so all of it is updated before the lookup."""
    case = Case(
        build=partial(build_untied, width=WIDTH),
        batch=make_tokens,
        settings={"embedding": "host"},
        num_steps=3,
    )
    assert is_same(engine_result(case, make_schedule, first), plain_result(case))


# --------------------------------------------------------------------------------------------------
# The checking device


def test_lanes_that_wait_for_each_other_are_a_deadlock() -> None:
    device = CheckingDevice(first=Lane.COMPUTE)
    device.wait(Lane.COMPUTE, QueuedEvent(device, Lane.FETCH, 2))
    device.submit(Lane.COMPUTE, "release L0 S0", lambda: None)
    device.wait(Lane.FETCH, device.record(Lane.COMPUTE))
    device.submit(Lane.FETCH, "fetch L1 S0", lambda: None)
    with pytest.raises(RuntimeError, match="deadlock: the compute lane waits for itself"):
        device.finish()


def test_a_schedule_in_which_a_wait_comes_before_its_line_does_not_run() -> None:
    """So a schedule cannot tell two lanes to wait for each other."""

    def crossed(shape: Shape) -> Schedule:
        lines = list(make_schedule(shape).lines)
        wait = next(n for n, line in enumerate(lines) if isinstance(line, Wait))
        action = lines.index(lines[wait].action)
        lines.insert(action, lines.pop(wait))
        return Schedule(shape=shape, lines=tuple(lines))

    with pytest.raises(KeyError):
        engine_result(Case(), crossed, Lane.COMPUTE)


def test_a_favoured_lane_runs_ahead_as_far_as_its_waits_allow() -> None:
    def order(first: Lane, *, waits: bool) -> list[str]:
        device, done = CheckingDevice(first=first), []
        for name in ("fetch L0", "fetch L1"):
            device.submit(Lane.FETCH, name, lambda name=name: done.append(name))
            fetched = device.record(Lane.FETCH)
            if waits:
                device.wait(Lane.COMPUTE, fetched)
            name = name.replace("fetch", "forward")
            device.submit(Lane.COMPUTE, name, lambda name=name: done.append(name))
        device.finish()
        return done

    each, fetches, passes = "fetch L0,forward L0", "fetch L0,fetch L1", "forward L0,forward L1"
    assert ",".join(order(Lane.FETCH, waits=True)) == f"{fetches},{passes}"
    assert ",".join(order(Lane.COMPUTE, waits=True)) == f"{each},{each.replace('0', '1')}"
    assert ",".join(order(Lane.COMPUTE, waits=False)) == f"{passes},{fetches}"


@pytest.mark.parametrize("first", [None, Lane.COMPUTE], ids=["default", "compute"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
def test_memory_is_nan_until_it_is_written(first: Lane | None, dtype: torch.dtype) -> None:
    device = CheckingDevice(first=first)
    for buffer in (device.empty(512), device.host_empty(512, registered=True)):
        assert buffer.dtype is torch.uint8
        assert buffer.view(dtype).isnan().all()
        buffer.zero_()
        device.poison(buffer)
        assert buffer.view(dtype).isnan().all()
    assert device.host_record(2, 3).isnan().all()
    assert device.host_record(2, 3).shape == (2, 3)
    device.close()


@every_order
def test_released_slots_are_nan(first: Lane | None) -> None:
    with make_engine(build(), first) as engine:
        engine.step(make_batch(0))
        slots = inside.weight_slots(engine)
        assert set(slots) == {"S0", "S1", "SO"}
        for slot in slots.values():
            assert slot.view(torch.float32).isnan().all()


@every_order
def test_slots_of_units_with_state_stay_and_shared_places_go(first: Lane | None) -> None:
    case = LATER["tail with state"]
    with make_engine(case.build(), first, **case.settings) as engine:
        engine.step(case.batch(0))
        slots = inside.weight_slots(engine)
        assert set(slots) == {"S0", "S1", "SL2", "SO"}
        held = {name for name, slot in slots.items() if not slot.view(torch.float32).isnan().all()}
        assert held == {"SL2"}
    case = LATER["shared memory"]
    with make_engine(case.build(), first, **case.settings) as engine:
        engine.step(case.batch(0))
        assert set(inside.places(engine)) == {"S0", "S1", "ST0", "G0", "G1", "GT0"}


def test_values_kept_outside_cells_are_nan_after_the_step() -> None:
    with scheduled(golden_schedule), make_engine(build(), None) as engine:
        engine.step(make_batch(0))
        pooled = [buffer for buffers in inside.stash(engine)._pool.values() for buffer in buffers]
        assert len(pooled) > 10
        for buffer in pooled:
            assert buffer.view(torch.float32).isnan().all()
