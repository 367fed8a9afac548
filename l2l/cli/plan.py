"""`l2l plan`: what an engine would do with a model, without having it."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from l2l.bench import SHAPES, Workload
from l2l.device import format_bytes, parse_bytes
from l2l.hugging_face import first_line, library, read_config
from l2l.parameter_server import OPTIMIZERS, HostBudget
from l2l.planner import (
    H200,
    DoesNotFitError,
    Hardware,
    Plan,
    Together,
    largest_model,
    measured_hardware,
    plan,
)

HELP = """Plan a training step: which layers stay on the device and which are streamed, how much is
recomputed, what takes how many bytes where, how long a step lasts and what it is bound by. Nothing
is allocated and no weights are read, so any machine can plan for any model and any device."""

EXAMPLES = """examples:
  l2l plan 3.2b --device-memory 8GiB
  l2l plan ~/models/Llama-3.3-70B --device-memory 40GiB --host-memory 1TiB --clip-norm 1
  l2l plan config.json --rows 16 --length 4096 --optimizer adamw-8bit --largest

The last line is JSON. Ends with status 1 if the model does not fit, and says what would."""

LARGEST = {"adamw": "AdamW, exact", "adamw-8bit": "AdamW, 8-bit moments", "adafactor": "Adafactor"}
MAX_LAYERS = 1024
ASSUMED = (
    "assumed: {} devices a host, which hold the model together, each with a link of its own, and\n"
    "a host {:g} times as fast as the one measured for a single device; other hosts hold copies;\n"
    "{} between devices of a host, {} across hosts, nothing else on either. Simulated line by\n"
    "line, as a single device is; not measured."
)
FLAGS = {  # what errors advise, as it is said here
    r"layers='dotted\.name'": "--layer-list NAME",
    r"(device|host)_memory='([^']*)'": r"--\1-memory \2",
    r"optimizer=l2l\.AdamW\(moments='8bit'\)": "--optimizer adamw-8bit",
    r"optimizer=l2l\.Adafactor\(\)": "--optimizer adafactor",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `l2l plan` takes."""
    parser.description, parser.epilog = HELP, EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a Hugging Face folder with a config.json, such a file, or a benchmark shape: "
        f"{', '.join(SHAPES)}",
    )
    batch = parser.add_argument_group("the batch of a step")
    size = batch.add_mutually_exclusive_group()
    size.add_argument("--rows", type=int, default=None, help="default: 64")
    size.add_argument("--tokens", type=int, default=None, help="instead of --rows")
    batch.add_argument("--length", type=int, default=1024, help="of a row (default: 1024)")
    memory = parser.add_argument_group("memory")
    memory.add_argument(
        "--device-memory",
        metavar="SIZE",
        help="that the engine may use, such as 8GiB (default: 90%% of the device's)",
    )
    memory.add_argument(
        "--host-memory",
        metavar="SIZE",
        help="for the parameter server and the stash (default: 95%% of what is free if the plan is "
        "for this machine, else not limited)",
    )
    training = parser.add_argument_group("training")
    training.add_argument(
        "--optimizer", choices=list(OPTIMIZERS), default="adamw", help="default: adamw"
    )
    training.add_argument(
        "--clip-norm",
        type=float,
        default=None,
        metavar="NORM",
        help="clip the gradient: updates then come under the next step's forward pass",
    )
    training.add_argument(
        "--precision",
        choices=["bfloat16", "float16", "float32"],
        default="bfloat16",
        help="of weights on the device and on the link (default: bfloat16)",
    )
    training.add_argument(
        "--microbatch-size", type=int, default=None, metavar="ROWS", help="default: planned"
    )
    training.add_argument("--no-compile", action="store_true", help="layers run as they are")
    training.add_argument(
        "--layer-list", metavar="NAME", help="of a model that has several, such as decoder.layers"
    )
    machine = parser.add_argument_group("the machine")
    machine.add_argument(
        "--machine",
        type=Path,
        metavar="FILE",
        help="plan for another one: its ~/.cache/l2l/hardware-*.json (default: this machine's "
        "accelerator, measured; without one an H200)",
    )
    machine.add_argument("--hardware", action="store_true", help="print what it can do")
    many = parser.add_argument_group("several devices, each with the batch above")
    many.add_argument("--world", type=int, metavar="N", help="print how 1, 2, 4, .. N would scale")
    many.add_argument("--per-host", type=int, default=8, help="devices of a host (default: 8)")
    many.add_argument(
        "--interconnect",
        default="400GB/s",
        metavar="RATE",
        help="in and out of a device, from and to others of its host (default: 400GB/s)",
    )
    many.add_argument(
        "--network",
        default="50GB/s",
        metavar="RATE",
        help="the same across hosts (default: 50GB/s)",
    )
    many.add_argument(
        "--host-speed",
        type=float,
        metavar="TIMES",
        help="how much faster a host of several devices updates than that of one (default: as many "
        "times as it has devices)",
    )
    parser.add_argument(
        "--largest",
        action="store_true",
        help="also print how many layers of this shape could be trained at most",
    )


def run(parsed: argparse.Namespace) -> int:
    """`l2l plan`; returns the exit status."""
    try:
        hardware, notes = _machine(parsed.machine)
        source = Source.of(parsed.model, parsed.length)
        num_rows = _num_rows(parsed)
        settings = {
            "device_memory": parsed.device_memory,
            "microbatch_size": parsed.microbatch_size,
            "precision": parsed.precision,
            "compile": not parsed.no_compile,
            "layers": parsed.layer_list,
        }
        print("\n".join(notes))
        if parsed.hardware:
            print(f"{hardware or H200}\n")
        model = source.make(None)
        _warn_of_length(model, parsed.length)
        settings["batch"] = _batch(model, num_rows, parsed.length)
        found: dict[str, Any] = {
            "model": parsed.model,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "machine": (hardware or H200).device_name,
        }
        fits = _plan(parsed, model, hardware, settings, found)
        if parsed.largest:
            found["largest"] = _largest(parsed, source, hardware, settings)
    except ValueError as error:
        print(_with_flags(str(error)), file=sys.stderr)
        return 2
    if parsed.hardware:
        found["hardware"] = asdict(hardware or H200)
    print(json.dumps(found))
    return 0 if fits else 1


def _plan(
    parsed: argparse.Namespace,
    model: nn.Module,
    hardware: Hardware | None,
    settings: Mapping[str, Any],
    found: dict[str, Any],
) -> bool:
    """Print the plan and note it; False if nothing fits."""
    try:
        made = plan(
            model,
            optimizer=OPTIMIZERS[parsed.optimizer](),
            clip_norm=parsed.clip_norm or None,
            host_memory=parsed.host_memory,
            hardware=hardware,
            world=_world(parsed),
            **settings,
        )
    except DoesNotFitError as error:
        reason = _with_flags(str(error))
        print(reason, file=sys.stderr)
        found |= {"fits": False, "reason": reason}
        return False
    print(made)
    found |= {"fits": True, **_facts(made)}
    if made.scaling:
        speed = parsed.host_speed or parsed.per_host
        print(ASSUMED.format(parsed.per_host, speed, parsed.interconnect, parsed.network))
        found["scaling"] = [asdict(point) for point in made.scaling]
    return True


def _world(parsed: argparse.Namespace) -> Together | None:
    if parsed.world is None:
        return None
    if parsed.world < 1 or parsed.per_host < 1:
        raise ValueError("--world and --per-host must be at least 1.")
    rates = {
        name: parse_bytes(text.removesuffix("/s"), name=f"--{name}")
        for name, text in (("interconnect", parsed.interconnect), ("network", parsed.network))
    }
    return Together(
        num_ranks=parsed.world,
        per_host=parsed.per_host,
        near_rate=rates["interconnect"],
        far_rate=rates["network"],
        host_speed=parsed.host_speed,
    )


def _with_flags(text: str) -> str:
    for words, flag in FLAGS.items():
        text = re.sub(words, flag, text)
    return text


def _facts(made: Plan) -> dict[str, Any]:
    seconds, tokens = made.predicted_seconds, made.num_tokens
    assert seconds is not None
    assert tokens is not None
    return {
        "predicted_seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "bound": made.bound,
        "num_tokens": tokens,
        "device_bytes": made.total_bytes("device"),
        "device_budget_bytes": made.budget_bytes,
        "host_bytes": made.total_bytes("host"),
        "choices": dict(made.choices),
    }


def _largest(
    parsed: argparse.Namespace,
    source: Source,
    hardware: Hardware | None,
    settings: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Print and return the most layers of a shape that would fit, for some optimizers."""
    host = HostBudget.of(parsed.host_memory, model_bytes=0)
    print(f"\nmost layers in {format_bytes(host.limit_bytes)} of host memory ({host.rule}),")
    print("with the stash of such a batch; smaller batches leave room for more:")
    rows = []
    for word, name in LARGEST.items():
        clips = parsed.clip_norm if word != "adafactor" else None
        found = largest_model(
            source.make,
            host_memory=host.limit_bytes,
            most_layers=MAX_LAYERS,
            period=source.period,
            optimizer=OPTIMIZERS[word](),
            clip_norm=clips or None,
            hardware=hardware,
            **settings,
        )
        row: dict[str, Any] = {"optimizer": word, "layers": 0, "parameters": 0}
        text = "none: not even a few layers fit"
        if found is not None:
            number, made = found
            parameters = int(dict(made.choices)["parameters"].replace(",", ""))
            facts = {key: value for key, value in _facts(made).items() if key != "choices"}
            row |= {"layers": number, "parameters": parameters, **facts}
            more = " or more" if number == MAX_LAYERS else ""
            text = f"{number:>5,} layers{more}, {parameters / 1e9:,.1f} billion parameters"
            text += f", {row['tokens_per_second']:,.0f} tokens/s with all of them streamed"
            text += "; cannot clip" if parsed.clip_norm and clips is None else ""
        print(f"  {name:<22}{text}")
        rows.append(row)
    return rows


def _machine(path: Path | None) -> tuple[Hardware | None, list[str]]:
    """The machine to plan for, None for this one or an H200, and what to say about it."""
    if path is None:
        here = measured_hardware()
        if here is not None:
            return None, [f"for this machine: {here.device_name}"]
        return None, [
            f"for {H200.device_name}: there is no accelerator here, and no --machine was given"
        ]
    try:
        found = Hardware.of_json(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--machine {path} cannot be read: {error}. Expected the file that l2l has written on "
            "the other machine when it was measured: ~/.cache/l2l/hardware-*.json."
        ) from error
    return found, [f"for {found.device_name}, as {path} has it"]


def _num_rows(parsed: argparse.Namespace) -> int:
    if parsed.length < 2:
        raise ValueError(f"--length {parsed.length}: expected at least 2 tokens a row.")
    if parsed.tokens is None:
        rows = 64 if parsed.rows is None else parsed.rows
        if rows < 1:
            raise ValueError(f"--rows {rows}: expected at least 1.")
        return int(rows)
    if parsed.tokens < parsed.length or parsed.tokens % parsed.length:
        raise ValueError(
            f"--tokens {parsed.tokens} in rows of {parsed.length}: expected a whole number of "
            "rows. Change --tokens or --length, or say --rows."
        )
    return int(parsed.tokens // parsed.length)


# --------------------------------------------------------------------------------------------------
# The model


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a model comes from: it can be made with any number of layers, without memory."""

    make: Callable[[int | None], nn.Module]  # None: as many as it has
    period: int  # after how many layers they repeat

    @classmethod
    def of(cls, word: str, length: int) -> Source:
        """The model that the user named.

        Raises:
            ValueError: there is no such model.
        """
        if word in SHAPES:
            return cls(make=lambda number: _shape(word, number, length), period=1)
        path = Path(word).expanduser()
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise ValueError(
                f"MODEL {word!r}: {path} is not there. Expected a folder with a config.json, such "
                f"a file, or one of the shapes {', '.join(SHAPES)}. Nothing is downloaded: to have "
                "a model of the Hugging Face Hub here, say 'hf download NAME config.json'."
            )
        config = read_config(path)
        kinds = getattr(config.get_text_config(), "layer_types", None) or [""]
        return cls(make=lambda number: _from_config(path, config, number), period=_period(kinds))


def _period(kinds: list[str]) -> int:
    """After how many entries a list repeats."""
    for period in range(1, len(kinds)):
        if all(one == other for one, other in zip(kinds, kinds[period:], strict=False)):
            return period
    return len(kinds)


def _shape(name: str, num_layers: int | None, length: int) -> nn.Module:
    workload = Workload(shape=name, num_layers=num_layers, length=length, num_tokens=length)
    return workload.model(torch.device("meta"))


def _with_layers(config: Any, number: int) -> Any:
    """A configuration with another number of layers; lists with an entry for each are repeated."""
    entries = config.to_dict()
    text = config.get_text_config()
    if text is not config or not getattr(config, "num_hidden_layers", None):
        raise ValueError(
            f"{type(config).__name__} does not say in num_hidden_layers how many layers there are, "
            "so no deeper model can be made of it. Leave out --largest."
        )
    for name, value in entries.items():
        if isinstance(value, list) and len(value) == config.num_hidden_layers:
            entries[name] = list(itertools.islice(itertools.cycle(value), number))
    names = {"num_hidden_layers", *config.attribute_map}
    entries = {name: value for name, value in entries.items() if name not in names}
    depth = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    return type(config)(**{**entries, depth: number})


def _from_config(path: Path, config: Any, num_layers: int | None) -> nn.Module:
    """The model of a configuration, on the meta device."""
    if num_layers is not None:
        config = _with_layers(config, num_layers)
    transformers = library()
    name = next(iter(config.architectures or ()), None)
    kind = getattr(transformers, name, None) if name and ("For" in name or "LM" in name) else None
    try:
        with torch.device("meta"):
            if kind is None:
                model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
            else:
                model = kind(config)
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        raise ValueError(
            f"{path}: transformers {transformers.__version__} makes no model of "
            f"{name or type(config).__name__}: {first_line(error)} Expected an architecture of "
            "transformers; code of its own in a model folder is not run. Plan such a model from "
            "Python: l2l.plan(model)."
        ) from error
    return model.train()


def _warn_of_length(model: nn.Module, length: int) -> None:
    config: Any = model.config
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    if isinstance(most, int) and length > most:
        print(f"note: rows of {length} tokens, but {type(model).__name__} is made for {most}")


def _batch(model: nn.Module, num_rows: int, length: int) -> dict[str, Tensor]:
    """One step's tensors, without values."""

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device="meta")

    config, main = getattr(model, "config", None), getattr(model, "main_input_name", "input_ids")
    if main == "input_ids":
        whole_rows = "SequenceClassification" in type(model).__name__
        labels = integers(num_rows) if whole_rows else integers(num_rows, length)
        return {"input_ids": integers(num_rows, length), "labels": labels}
    side = getattr(config, "image_size", None)
    if main == "pixel_values" and isinstance(side, int):
        channels = getattr(config, "num_channels", 3)
        pixels = torch.empty((num_rows, channels, side, side), device="meta")
        return {"pixel_values": pixels, "labels": integers(num_rows)}
    raise ValueError(
        f"{type(model).__name__} takes {main!r}, of which the command line knows no shape. "
        "Expected a model of tokens or images. Plan it from Python: l2l.plan(model, batch=...)."
    )
