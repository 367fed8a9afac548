"""Damage checkpoints at random, also so that their checksums are right again, and load them.

    python reproduce/damaged_checkpoints.py --tries 500

Every try damages a copy of a small checkpoint in one way, and loads it into an open engine that has
trained on its own. Either that is refused with a CheckpointError that names what is damaged, and
the engine is bit by bit what it was (weights, moments, counts of steps, buffers, layers, updates
that wait) and its next step is the one it would have made; or it is loaded, and the engine holds
exactly what the files say, as this script reads them itself. Tries run in a process of their own,
which is ended if one of them takes too long. Ends with status 1 if anything else happens.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import l2l
from l2l.checkpoint.manifest import checksum_of

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import inside

LIMIT_SECONDS = 30.0  # of a try
SAVED, OLDER = 3, 2  # steps of the checkpoints
WORDS, LENGTH, ROWS = 11, 2, 3
WIDTH = 32
PLACED = ("num_tail", "num_device_states", "num_shared", "keep", "num_kept_cells", "outer_state")
OUTCOMES = (
    "refused",
    "loaded exactly",
    "silently wrong",
    "engine changed",
    "other exceptions",
    "not named",
    "hangs",
)


class Layer(nn.Module):
    """A layer with a buffer, and with some that training changes if there is a norm."""

    def __init__(self, width: int, *, norm: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(LENGTH) if norm else nn.Identity()
        self.register_buffer("offset", torch.full((width,), 0.25))

    def forward(self, hidden: Tensor) -> Tensor:
        """The next hidden state."""
        return hidden + torch.tanh(self.linear(self.norm(hidden)) + self.offset.to(hidden.dtype))


class Model(nn.Module):
    """A table before the layers, a head after them."""

    def __init__(self, *, width: int = WIDTH, norm: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(Layer(width, norm=norm) for _ in range(3))
        self.head = nn.Linear(width, WORDS)
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The loss."""
        hidden = torch.tanh(self.table(ids))
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden * self.scale.to(hidden.dtype)).mean(dim=1)
        return {"loss": F.cross_entropy(logits, labels)}


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator),
        "labels": torch.randint(0, WORDS, (ROWS,), generator=generator),
    }


def grow(engine: l2l.Engine) -> None:
    engine.layers.grow(2)
    engine.layers.remove(1)


def freeze(engine: l2l.Engine) -> None:
    engine.layers.remove(0)
    engine.layers.freeze(0)


@dataclass(frozen=True)
class Kind:
    """An engine, and what becomes of its layers before it is saved."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    change: Callable[[l2l.Engine], None] = lambda _: None


KINDS = {
    "AdamW, float32": Kind(),
    "AdamW, bfloat16, clipped": Kind({"precision": "bfloat16", "clip_norm": 0.1}),
    "AdamW, 8 bits": Kind(
        {"precision": "bfloat16", "optimizer": l2l.AdamW(lr=1e-2, moments="8bit")}
    ),
    "AdamW, float16": Kind({"precision": "float16"}),
    "SGD": Kind({"optimizer": l2l.SGD(lr=0.1, momentum=0.9)}),
    "Lion": Kind({"precision": "bfloat16", "optimizer": l2l.Lion(lr=1e-3)}),
    "Adafactor": Kind({"precision": "bfloat16", "optimizer": l2l.Adafactor()}),
    "buffers that change": Kind({"clip_norm": 0.1}, {"norm": True}),
    "grown": Kind({"clip_norm": 0.1}, {"norm": True}, grow),
    "frozen": Kind({"precision": "bfloat16"}, change=freeze),
    "wider": Kind(model={"width": 2 * WIDTH}),
    "wider and grown": Kind(model={"width": 2 * WIDTH}, change=grow),
}
TRIED = [name for name in KINDS if not name.startswith("wider")]


def make(kind: Kind, *, seed: int) -> l2l.Engine:
    torch.manual_seed(seed)
    settings = {
        "precision": "float32",
        "optimizer": l2l.AdamW(lr=1e-2),
        "microbatch_size": 2,
        "device": "cpu",
        **kind.settings,
    }
    return l2l.Engine(Model(**kind.model), seed=7 + seed, **settings)


def prepare(folder: Path, name: str) -> None:
    """Two checkpoints of a kind."""
    kind = KINDS[name]
    with make(kind, seed=0) as engine:
        engine.step(batch(0))
        kind.change(engine)
        for step in (OLDER, SAVED):
            while engine.step_number < step:
                engine.step(batch(engine.step_number))
            engine.save(folder / name / str(step), extra={"epoch": 1, "rows": [1, 2.5, None]})


@contextlib.contextmanager
def own_engine(name: str) -> Iterator[l2l.Engine]:
    """An engine that has trained on its own."""
    engine = make(KINDS[name], seed=1)
    try:
        engine.step(batch(10))
        yield engine
    finally:
        engine.close(give_back=False)


# --------------------------------------------------------------------------------------------------
# What an engine holds, and what files say


def contents(engine: l2l.Engine) -> dict[str, Any]:
    """All there is of an engine; updates that wait are left to wait."""
    inside.finish_step(engine)
    server, model = inside.server(engine), inside.model(engine)
    found: dict[str, Any] = {
        "step": engine.step_number,
        "seed": inside.seed(engine),
        "state": inside.state(engine),
        "groups": engine.optimizer.numbers(),
        "layers": engine.layers.state(),
        "waiting": sorted(server.waiting),
        "units": list(server.units),
        "modules": [id(module) for module in model.modules()],
        "flags": [(name, p.requires_grad) for name, p in model.named_parameters()],
        "decisions": inside.planning(engine).decisions,
        "scale": None if inside.scaler(engine) is None else asdict(inside.scaler(engine).scale),
    }
    for name, buffer in model.named_buffers():
        found[f"the model's {name}"] = buffer.clone()
    for name, buffer in inside.present_buffers(engine).items():
        found[f"buffer {name}"] = buffer.clone()
    for unit in server.units:
        image = server.image(unit)
        found |= {f"{unit} {name}": tensor.clone() for name, tensor in image.tensors.items()}
        found[f"{unit} steps"] = dict(image.steps)
    return found


def differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    keys = dict.fromkeys((*expected, *found))
    return [key for key in keys if not same(found.get(key), expected.get(key))]


def same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and bool(one == other)
    return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)


def bits(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def wrongly_loaded(engine: l2l.Engine, folder: Path) -> list[str]:
    """What an engine has otherwise than the files that it has loaded."""
    manifest = json.loads((folder / "manifest.json").read_text())
    state, wrong = manifest["state"], list[str]()
    inside.finish_step(engine)

    def compare(what: str, found: object, expected: object) -> None:
        if not same(found, expected):
            wrong.append(what)

    compare("step", engine.step_number, manifest["step"])
    compare("seed", inside.seed(engine), state["seed"])
    compare("waiting", list(inside.server(engine).waiting), [])
    compare("origins", list(engine.layers.origins), state["layers"]["origins"])
    compare("frozen", list(engine.layers.frozen), state["layers"]["frozen"])
    groups = json.loads(json.dumps(engine.optimizer.numbers()))
    if [set(one) for one in groups] == [set(one) for one in state["groups"]]:
        compare("groups", groups, state["groups"])
    if inside.scaler(engine) is not None:
        compare("scale", asdict(inside.scaler(engine).scale), state["loss_scale"])
    decisions = inside.planning(engine).decisions
    for name in ("piece_tokens", *PLACED):
        if name in state["choices"] and state["choices"].get("device_memory") is None:
            compare(name, getattr(decisions, name), state["choices"][name])
    present = inside.present_buffers(engine)
    buffers = load_file(folder / "buffers.safetensors")
    own = dict(inside.model(engine).named_buffers())
    for name, value in buffers.items():
        compare(f"buffer {name}", present.get(name, own[name]), value)
    units = [name for name in manifest["files"] if name != "buffers"]
    compare("units", set(inside.server(engine).units), set(units))
    for unit in units:
        image = inside.server(engine).image(unit)
        tensors, steps = load_file(folder / f"{unit}.safetensors"), manifest["files"][unit]["steps"]
        found, expected = dict(image.tensors), dict(tensors)
        if state["link"] != str(inside.link(engine)).removeprefix("torch."):
            found, expected = (in_float32(one, image.steps) for one in (found, tensors))
            expected = {k: v.to(found[k].dtype) if k in found else v for k, v in expected.items()}
        compare(f"{unit} names", set(found), set(expected))
        for name in found.keys() & expected.keys():
            compare(f"{unit} {name}", found[name].clone(), expected[name])
        for name, number in image.steps.items():
            compare(f"{unit} {name} steps", number, steps.get("", steps.get(name)))
    return wrong


def in_float32(tensors: Mapping[str, Tensor], trained: Mapping[str, int]) -> dict[str, Tensor]:
    """The tensors of a unit with float32 masters for what is trained, whatever its precision."""
    found = {k: v for k, v in tensors.items() if not k.endswith(("|remainders", "|masters"))}
    for name in trained:
        weight = tensors[name]
        if f"{name}|remainders" in tensors:
            upper = weight.view(torch.int16).to(torch.int32) << 16
            lower = tensors[f"{name}|remainders"].to(torch.int32)
            found[name] = (upper + lower).view(torch.float32)
        else:
            found[name] = tensors.get(f"{name}|masters", weight.float())
    return found


# --------------------------------------------------------------------------------------------------
# Damages


@dataclass(frozen=True)
class Place:
    """A copy of a checkpoint to damage, and others."""

    folder: Path
    others: Path  # checkpoints by kind and step
    name: str
    draw: random.Random

    @property
    def manifest(self) -> Path:
        """Its manifest."""
        return self.folder / "manifest.json"

    def tensors(self) -> Path:
        """One of its files of tensors."""
        return self.draw.choice(sorted(self.folder.glob("*.safetensors")))

    def file(self) -> Path:
        """One of all its files."""
        return self.manifest if self.draw.random() < 0.3 else self.tensors()

    def read(self) -> dict[str, Any]:
        """What the manifest says."""
        found: dict[str, Any] = json.loads(self.manifest.read_text())
        return found

    def seal(self, body: dict[str, Any]) -> None:
        """Write a manifest with a checksum that is right."""
        body.pop("checksum", None)
        self.manifest.write_text(json.dumps({**body, "checksum": checksum_of(body)}))

    def seal_file(self, path: Path) -> None:
        """Let the manifest know a file as it is now."""
        body, data = self.read(), path.read_bytes()
        record = body["files"][path.stem]
        record["bytes"], record["checksum"] = len(data), f"{zlib.crc32(data):08x}"
        self.seal(body)


Damage = Callable[[Place], Path | None]  # returns the file that must be named, if it is known
DAMAGES: dict[str, Damage] = {}


def damage(name: str) -> Callable[[Damage], Damage]:
    def note(function: Damage) -> Damage:
        DAMAGES[name] = function
        return function

    return note


@damage("a flipped bit")
def flipped(place: Place) -> Path:
    path = place.file()
    data = bytearray(path.read_bytes())
    data[place.draw.randrange(len(data))] ^= 1 << place.draw.randrange(8)
    path.write_bytes(data)
    return path


@damage("cut short, empty, or longer")
def cut(place: Place) -> Path:
    path = place.file()
    size = path.stat().st_size
    os.truncate(path, place.draw.choice([0, 1, 8, size // 2, size - 1, size + 1, 2 * size]))
    return path


@damage("a missing file")
def missing(place: Place) -> Path:
    path = place.file()
    path.unlink()
    return path


@damage("a file too many")
def surplus(place: Place) -> None:
    shutil.copy(place.tensors(), place.folder / "L77.safetensors")
    (place.folder / "notes.txt").write_text("mine")


@damage("two files exchanged")
def exchanged(place: Place) -> Path:
    one, other = place.draw.sample(sorted(place.folder.glob("L*.safetensors")), 2)
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)
    return min(one, other)


@damage("a file of another step or kind")
def foreign(place: Place) -> Path:
    path = place.file()
    names = [place.name, place.draw.choice(list(KINDS))]
    found = place.others / place.draw.choice(names) / str(OLDER) / path.name
    if found.exists():
        shutil.copy(found, path)
    else:
        path.write_bytes(b"of something else")
    return None if path == place.manifest else path


@damage("a pipe, a device, a folder")
def special(place: Place) -> Path:
    path = place.file()
    path.unlink()
    kind = place.draw.choice(["pipe", "device", "folder"])
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to(place.draw.choice(["/dev/zero", "/dev/null", "/dev/tty", "/dev/urandom"]))
    else:
        path.mkdir()
    return path


@damage("a link")
def link(place: Place) -> Path | None:
    path = place.file()
    elsewhere = place.folder.with_name("elsewhere")
    shutil.copy(path, elsewhere)
    path.unlink()
    kind = place.draw.choice(["whole", "dangling", "circle"])
    path.symlink_to({"whole": elsewhere, "dangling": "gone", "circle": path.name}[kind])
    return path


@damage("no manifest's JSON")
def no_json(place: Place) -> Path:
    deep, text = 100_000, place.manifest.read_text()
    place.manifest.write_text(
        place.draw.choice(
            [
                "[" * deep + "]" * deep,
                '{"format": "l2l checkpoint", "version": 1, "extra": ' + '{"a":' * deep,
                text.replace('"step": 3', '"step": 3, "step": 3'),
                text.replace('"step": 3', '"step": NaN'),
                text.replace('"step": 3', '"step": 1e999'),
                text.replace('"step": 3', '"step": ' + "9" * 5000),
                text.replace('"epoch": 1', '"epoch": -Infinity'),
                text.replace('"epoch": 1', '"epoch": ' + "[" * 900 + "]" * 900),
                "\ufeff" + text,
                text + "{}",
                '"l2l checkpoint"',
                "null",
            ]
        )
    )
    return place.manifest


@damage("bytes that are no text")
def no_text(place: Place) -> Path:
    data = place.manifest.read_bytes()
    place.manifest.write_bytes(
        place.draw.choice([b"\xff\xfe" + data, data.decode().encode("utf-16")])
    )
    return place.manifest


STRANGE: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 7, 2**31, 2**63, 2**64, 10**30, -(2**63)),
    *(0.5, 1e308, -0.0, "", "a", "1", "float16", "bfloat16", "../L0", "/etc/passwd", "\ud800"),
    *([], {}, [None], [[]], {"": -1}, {"a": 1}, [0, 0], [1, 0], [10**9], "f" * 8, "0" * 9),
)


def nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of everything in a manifest."""
    if path:
        yield path
    if isinstance(value, list):
        value = dict(enumerate(value))
    for key, one in value.items() if isinstance(value, dict) else ():
        yield from nodes(one, (*path, key))


def chosen(place: Place, body: dict[str, Any]) -> tuple[Any, Any]:
    """Something in a manifest: what it is in, and its key."""
    body.pop("checksum")
    top = place.draw.choice(["step", "state", "state", "files", "version", "extra"])
    *path, last = place.draw.choice(list(nodes({top: body[top]})))
    holder: Any = body
    for key in path:
        holder = holder[key]
    return holder, last


@damage("a field of the manifest, sealed again")
def edited(place: Place) -> None:
    body = place.read()
    holder, key = chosen(place, body)
    holder[key] = place.draw.choice(STRANGE)
    place.seal(body)


@damage("a field that is gone, sealed again")
def removed(place: Place) -> None:
    body = place.read()
    holder, key = chosen(place, body)
    value = holder.pop(key)
    if isinstance(holder, dict) and place.draw.random() < 0.5:
        holder[f"{key}s"] = value
    place.seal(body)


@damage("numbers within reason, sealed again")
def plausible(place: Place) -> None:
    body, draw = place.read(), place.draw
    state = body["state"]
    draw.choice(
        [
            lambda: body.update(step=draw.randrange(SAVED, 10**12)),
            lambda: state.update(seed=draw.randrange(2**40)),
            lambda: state["groups"][0].update(lr=draw.random()),
            lambda: body["extra"].update(epoch=draw.random()),
            lambda: body["files"]["L0"].update(steps={"": draw.randrange(SAVED)}),
        ]
    )()
    place.seal(body)


@damage("names of files, sealed again")
def renamed(place: Place) -> None:
    body = place.read()
    files, old = body["files"], place.draw.choice(list(body["files"]))
    names = [
        "../L0",
        "/etc/passwd",
        "L0/../L0",
        "",
        ".",
        "L9",
        "T3",
        "X",
        "L0-1of2",
        "L-1",
        "L\u0661",
    ]
    files[place.draw.choice(names)] = files.pop(old)
    place.seal(body)


@damage("shares that are not there, sealed again")
def shares(place: Place) -> None:
    body = place.read()
    number = place.draw.choice([2, 1_000_000, 10**12])
    body["state"]["num_shares"] = number
    if place.draw.random() < 0.5:
        body["files"] = {
            name if name == "buffers" else f"{name}-1of{number}": one
            for name, one in body["files"].items()
        }
        for path in place.folder.glob("[LOT]*.safetensors"):
            path.rename(path.with_name(f"{path.stem}-1of{number}.safetensors"))
    place.seal(body)


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    found: dict[str, Any] = json.loads(data[8 : 8 + length])
    return found, data[8 + length :]


def write_header(path: Path, header: bytes, data: bytes) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


@damage("a header of tensors, sealed again")
def header(place: Place) -> None:
    path, draw = place.tensors(), place.draw
    found, data = header_of(path)
    names = [name for name in found if name != "__metadata__"]
    name = draw.choice(names)
    one, other = found[name], found[draw.choice(names)]
    numel = 1
    for size in one["shape"]:
        numel *= size

    def exchange() -> None:
        one["data_offsets"], other["data_offsets"] = other["data_offsets"], one["data_offsets"]

    draw.choice(
        [
            lambda: one.update(
                dtype=draw.choice(["I32", "F16", "BF16", "I8", "U8", "F4", "BOOL", 3])
            ),
            lambda: one.update(
                shape=draw.choice([[numel], [numel, 1], [1, numel], [-1], [2**62, 4]])
            ),
            lambda: one.update(
                data_offsets=draw.choice([[0, 0], [-1, 5], [0, 2**63], [5, 1], None])
            ),
            lambda: found.update({f"{name}x": found.pop(name)}),
            lambda: found.pop(name),
            exchange,
            lambda: found.update({"__metadata__": {"a": "b"}}),
        ]
    )()
    write_header(path, json.dumps(found).encode(), data)
    place.seal_file(path)


@damage("no header of tensors, sealed again")
def no_header(place: Place) -> None:
    path, deep = place.tensors(), 100_000
    _, data = header_of(path)
    text = place.draw.choice([b"[" * deep, b'{"a":' * deep, b"", b"null", b"[]", b"\xff", b"{}"])
    write_header(path, text, data)
    if place.draw.random() < 0.3:
        path.write_bytes((2**62).to_bytes(8, "little") + data)
    place.seal_file(path)


@damage("other tensors, sealed again")
def other_tensors(place: Place) -> None:
    path, draw = place.tensors(), place.draw
    tensors = load_file(path)
    name = draw.choice(list(tensors))
    value = tensors[name]
    tensors[name] = draw.choice(
        [
            value.to(draw.choice([torch.float64, torch.float32, torch.bfloat16, torch.int32])),
            torch.cat([value.view(-1), value.view(-1)]),
            value.view(-1)[:1].clone(),
            value.unsqueeze(0),
            torch.randint(0, 100, value.shape).to(value.dtype),
        ]
    )
    if draw.random() < 0.3:
        tensors[draw.choice([f"{name}|exp_avg", "layers.9.weight"])] = torch.ones(3)
    elif draw.random() < 0.3:
        del tensors[name]
    save_file(tensors, path)
    place.seal_file(path)


@damage("two files exchanged, sealed again")
def exchanged_again(place: Place) -> None:
    exchanged(place)
    for path in sorted(place.folder.glob("L*.safetensors")):
        place.seal_file(path)


@damage("a file of another step or kind, sealed again")
def foreign_again(place: Place) -> None:
    path = place.tensors()
    names = [place.name, place.draw.choice(list(KINDS))]
    found = place.others / place.draw.choice(names) / str(OLDER) / path.name
    if found.exists():
        shutil.copy(found, path)
    place.seal_file(path)


@damage("all of another step or kind")
def other_checkpoint(place: Place) -> None:
    name = place.draw.choice([*KINDS, place.name, "wider", "wider and grown"])
    shutil.rmtree(place.folder)
    shutil.copytree(place.others / name / str(OLDER), place.folder)


# --------------------------------------------------------------------------------------------------
# Tries


class Tries:
    """Makes tries by their number, in a process of its own."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._seed = folder, seed
        self._next: dict[str, dict[str, Any]] = {}

    def make(self, number: int) -> tuple[str, str, str]:
        """The kind of damage, the outcome, and what is to be said of it."""
        draw = random.Random(f"{self._seed} {number}")
        kind, damage_name = draw.choice(TRIED), list(DAMAGES)[number % len(DAMAGES)]
        torch.manual_seed(number)
        with tempfile.TemporaryDirectory(dir=self._folder) as scratch:
            copy = Path(scratch) / "checkpoint"
            shutil.copytree(self._folder / "whole" / kind / str(SAVED), copy)
            place = Place(copy, self._folder / "whole", kind, draw)
            named = DAMAGES[damage_name](place)
            outcome, told = self._load(kind, copy, named)
        return damage_name, outcome, f"{kind}: {told}"

    def _load(self, kind: str, folder: Path, named: Path | None) -> tuple[str, str]:
        with own_engine(kind) as engine:
            before = contents(engine)
            try:
                engine.load(folder)
            except l2l.CheckpointError as error:
                message = str(error)
                changed = differences(contents(engine), before) or self._stepped(engine, kind)
                if changed:
                    return "engine changed", f"{changed}: {message}"
                is_named = str(folder if named is None else named) in message
                return ("refused" if is_named else "not named"), message
            except BaseException:
                return "other exceptions", traceback.format_exc()
            wrong = wrongly_loaded(engine, folder)
            if wrong:
                return "silently wrong", str(wrong)
            try:
                engine.step(batch(20))
            except BaseException:
                return "other exceptions", f"in the step after it: {traceback.format_exc()}"
            return "loaded exactly", ""

    def _stepped(self, engine: l2l.Engine, kind: str) -> list[str]:
        """Step; what is otherwise than in an engine that was left alone."""
        if kind not in self._next:
            with own_engine(kind) as alone:
                self._next[kind] = self._after_a_step(alone)
        return differences(self._after_a_step(engine), self._next[kind])

    @staticmethod
    def _after_a_step(engine: l2l.Engine) -> dict[str, Any]:
        loss = engine.step(batch(11)).loss
        inside.finish_step(engine)
        inside.server(engine).settle_all()
        found = contents(engine)
        del found["modules"]
        return {**found, "loss": loss}


def serve(connection: Any, folder: Path, seed: int) -> None:
    torch.set_num_threads(1)
    tries = Tries(folder, seed)
    while (number := connection.recv()) is not None:
        connection.send(tries.make(number))


def all_tries(folder: Path, *, number: int, seed: int) -> Iterator[tuple[str, str, str]]:
    """The results of tries; a process that is stuck, or has died, is started again."""
    context, worker, connection = multiprocessing.get_context("spawn"), None, None
    for index in range(number):
        if worker is None:
            connection, other = context.Pipe()
            worker = context.Process(target=serve, args=(other, folder, seed), daemon=True)
            worker.start()
            other.close()  # so that its end is seen
        assert connection is not None
        name, limit = list(DAMAGES)[index % len(DAMAGES)], LIMIT_SECONDS
        connection.send(index)
        try:
            if connection.poll(limit + (60 if index == 0 else 0)):  # it must begin first
                yield connection.recv()
                continue
            yield name, "hangs", f"try {index}"
        except EOFError:
            yield name, "other exceptions", f"try {index}: the process has died"
        worker.kill()
        worker.join()
        worker = None
    if worker is not None and connection is not None:
        connection.send(None)
        worker.join()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tries", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts, told = Counter[tuple[str, str]](), list[str]()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name in KINDS:
            prepare(folder / "whole", name)
        for name, outcome, text in all_tries(folder, number=options.tries, seed=options.seed):
            counts[name, outcome] += 1
            if outcome not in ("refused", "loaded exactly"):
                told.append(f"{name}: {outcome}: {text}")
                print(told[-1], file=sys.stderr, flush=True)
    width = max(map(len, DAMAGES))
    print(f"{'damage':{width}}  tries  " + "  ".join(OUTCOMES))
    for name in (*DAMAGES, "all"):
        found = [
            sum(n for (d, o), n in counts.items() if name in (d, "all") and o == outcome)
            for outcome in OUTCOMES
        ]
        columns = "  ".join(
            f"{n:{len(outcome)}}" for n, outcome in zip(found, OUTCOMES, strict=True)
        )
        print(f"{name:{width}}  {sum(found):5}  {columns}")
    totals = {
        outcome: sum(n for (_, o), n in counts.items() if o == outcome) for outcome in OUTCOMES
    }
    print(json.dumps({"tries": options.tries, **totals}))
    return 1 if told else 0


if __name__ == "__main__":
    raise SystemExit(main())
