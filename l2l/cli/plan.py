"""`l2l plan`: what an engine would do with a model, without having it."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from l2l.bench import SHAPES, Workload
from l2l.cli.plan_page import write_plan
from l2l.device import format_bytes, parse_bytes
from l2l.hugging_face import ADAPTED, Lora, first_line, library, read_config, with_lora
from l2l.page import require_library
from l2l.parameter_server import OPTIMIZERS, HostBudget
from l2l.planner import (
    H200,
    NOT_MEASURED,
    SHEETS,
    DoesNotFitError,
    Hardware,
    KeptPlans,
    Plan,
    Together,
    card,
    largest_model,
    look,
    measured_hardware,
    plan,
    with_host,
)

HELP = """Plan a training step: which layers stay on the device and which are streamed, how much is
recomputed, what takes how many bytes where, how long a step lasts and what it is bound by. Nothing
is allocated and no weights are read, so any machine can plan for any model and any device."""

EXAMPLES = """examples:
  l2l plan 3.2b --device-memory 8GiB
  l2l plan ~/models/Qwen2.5-14B --card 'RTX 4090' --lora --host-memory 64GiB
  l2l plan ~/models/Qwen2.5-14B --card all
  l2l plan ~/models/Llama-3.3-70B --device-memory 40GiB --host-memory 1TiB --clip-norm 1
  l2l plan config.json --rows 16 --length 4096 --optimizer adamw-8bit --largest

Ends with status 1 if the model does not fit, and says what would."""

LARGEST = {"adamw": "AdamW, exact", "adamw-8bit": "AdamW, 8-bit moments", "adafactor": "Adafactor"}
MAX_LAYERS = 1024
BASES = ["nf4", "int8"]
PRECISIONS = ["bfloat16", "float16", "float32"]
ASSUMED = (
    "assumed: {} devices a host, which hold the model together, each with a link of its own, and\n"
    "a host {:g} times as fast as the one measured for a single device; other hosts hold copies;\n"
    "{} between devices of a host, {} across hosts, nothing else on either. Simulated line by\n"
    "line, as a single device is; not measured."
)
NOTHING_KEPT = {"keep": 0.0, "num_kept_cells": 0}  # of results, which host memory may take
BY_SHEET = """by data sheets: nothing was measured. Of what these promise, as much is
assumed to be reached as was measured on an H200. The host is taken for that of the H200, which
updates weights faster than a desktop does: --host-rate says otherwise."""
FLAGS = {  # what errors advise, as it is said here
    r"layers='dotted\.name'": "--layer-list NAME",
    r"(device|host)_memory='([^']*)'": r"--\1-memory \2",
    r"optimizer=l2l\.AdamW\(moments='8bit'\)": "--optimizer adamw-8bit",
    r"optimizer=l2l\.Adafactor\(\)": "--optimizer adafactor",
}
WORDS = {  # what flags are called elsewhere
    **dict.fromkeys(("batch_size", "per_device_train_batch_size"), "--rows: all rows of a step"),
    "gradient_accumulation_steps": "--rows: batch size x gradient accumulation steps",
    **dict.fromkeys(("max_seq_length", "max_length", "seq_len", "block_size"), "--length"),
    **dict.fromkeys(("max_grad_norm", "grad_clip"), "--clip-norm"),
    **dict.fromkeys(("bf16", "fp16", "dtype"), "--precision"),
    "lora_r": "--lora-rank",
}
DISK = """for what host memory has no room for: room and sustained rates of reading and
writing, such as 2TB@6.5/5GB/s; or a folder, which is measured"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `l2l plan` takes."""
    words = "a Hugging Face folder with a config.json, such a file, or a benchmark shape: "
    parser.add_argument("model", metavar="MODEL", help=words + ", ".join(SHAPES))
    batch = parser.add_argument_group("the batch of a step")
    size = batch.add_mutually_exclusive_group()
    size.add_argument("--rows", type=int, help="default: 64")
    size.add_argument("--tokens", type=int, help="instead of --rows")
    batch.add_argument("--length", type=int, default=1024, help="tokens per row (default: 1024)")
    memory = partial(parser.add_argument_group("memory").add_argument, metavar="SIZE")
    memory("--device-memory", help="for the engine, such as 8GiB (default: 90%% of the device's)")
    words = "95%% of what is free if the plan is for this machine, else what is needed"
    memory("--host-memory", help=f"for the parameter server and the stash (default: {words})")
    memory("--disk", metavar="DISK", help=DISK)
    add = parser.add_argument_group("training").add_argument
    add("--optimizer", choices=list(OPTIMIZERS), default="adamw", help="default: adamw")
    words = "clip gradients by global norm; updates then run during the next forward pass"
    add("--clip-norm", type=float, metavar="NORM", help=words)
    words = "of weights on the device and on the link (default: bfloat16)"
    add("--precision", choices=PRECISIONS, default="bfloat16", help=words)
    add("--microbatch-size", type=int, metavar="ROWS", help="default: planned")
    add("--no-compile", action="store_true", help="plan for uncompiled layers")
    words = "of a model that has several, such as decoder.layers"
    add("--layer-list", metavar="NAME", help=words)
    _add_adapter(parser)
    _add_machines(parser)
    words = "also print how many layers of this shape could be trained at most"
    parser.add_argument("--largest", action="store_true", help=words)
    words = "print one line of JSON; what is for people goes to the standard error"
    parser.add_argument("--json", action="store_true", help=words)


def _add_machines(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the machine").add_mutually_exclusive_group()
    words = "plan for common cards, by their data sheets: 'RTX 4090', a100-80gb, several, or all"
    group.add_argument("--card", nargs="+", metavar="NAME", help=words)
    words = "plan for another machine, described by its ~/.cache/l2l/hardware-*.json (default: "
    words += "this machine's measured accelerator, or an H200 if there is none)"
    group.add_argument("--machine", type=Path, metavar="FILE", help=words)
    add = parser.add_argument_group("of the machine").add_argument
    words = "what exact AdamW reads and writes a second on the host, such as 40GB/s: l2l bench host"
    add("--host-rate", metavar="RATE", help=f"{words} (default: as measured)")
    add("--hardware", action="store_true", help="print the machine's rates")
    add = parser.add_argument_group("several devices, each with the batch above").add_argument
    add("--world", type=int, metavar="N", help="print how 1, 2, 4, .. N would scale")
    add("--per-host", type=int, default=8, help="devices of a host (default: 8)")
    words = "bandwidth per direction between devices of the same host (default: 400GB/s)"
    add("--interconnect", default="400GB/s", metavar="RATE", help=words)
    words = "the same across hosts (default: 50GB/s)"
    add("--network", default="50GB/s", metavar="RATE", help=words)
    words = "how much faster a host of several devices updates than that of one (default: as many "
    add("--host-speed", type=float, metavar="TIMES", help=words + "times as it has devices)")


def _add_adapter(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("an adapter").add_argument
    words = "train an adapter (LoRA) beside all linear weights, which stay as they are"
    add("--lora", action="store_true", help=words)
    add("--lora-rank", type=int, default=16, metavar="N", help="default: 16")
    words = "keep the linear weights of the layers in 4 bits (nf4) or 8 (int8) beside it"
    add("--base", choices=BASES, help=words)
    words = "also write a page to look at: memory by phase, a step, what other budgets would bring"
    parser.add_argument("--html", type=Path, metavar="FILE", help=words)


def answer_to(key: str) -> str:
    """What an unknown flag is called here, as a sentence; empty if that is not known."""
    return f" Here it is {WORDS[key]}." if key in WORDS else ""


def run(parsed: argparse.Namespace) -> int:
    """`l2l plan`; returns the exit status."""
    if parsed.html is not None:
        require_library()
    try:
        with contextlib.redirect_stdout(sys.stderr if parsed.json else sys.stdout):
            found = _planned(parsed)
    except ValueError as error:
        raise ValueError(_with_flags(str(error))) from error
    if parsed.json:
        print(json.dumps(found))
    return 0 if found["fits"] else 1


def _planned(parsed: argparse.Namespace) -> dict[str, Any]:
    """Print all that was asked for; returns it as data."""
    if parsed.base is not None and not parsed.lora:
        raise ValueError("--base is of weights that are not trained: expected --lora beside it.")
    lora = Lora(rank=parsed.lora_rank, alpha=2.0 * parsed.lora_rank) if parsed.lora else None
    source, num_rows = Source(parsed.model, parsed.length, lora), _num_rows(parsed)
    machines = _machines(parsed)
    if parsed.hardware:
        print("\n".join(f"{machine or measured_hardware() or H200}\n" for machine in machines))
    model: Any = source.make(None)
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(most, int) and parsed.length > most:
        kind = type(model).__name__
        print(f"note: rows of {parsed.length} tokens, but {kind} is made for {most}")
    settings = {
        "batch": _batch(model, num_rows, parsed.length),
        "device_memory": parsed.device_memory,
        "microbatch_size": parsed.microbatch_size,
        "precision": parsed.precision,
        "base": parsed.base,
        "compile": not parsed.no_compile,
        "layers": _layer_list(parsed),
        "hardware": machines[0],
    }
    parameters = sum(parameter.numel() for parameter in model.parameters())
    found: dict[str, Any] = {"model": parsed.model, "parameters": parameters}
    if len(machines) > 1:
        return found | _compare(parsed, model, settings, machines)
    machine = machines[0] or measured_hardware() or H200
    found |= {"machine": machine.device_name, **_plan(parsed, model, settings)}
    if parsed.largest:
        found["largest"] = _largest(parsed, source, settings)
    return {**found, "hardware": asdict(machine)} if parsed.hardware else found


def _machines(parsed: argparse.Namespace) -> list[Hardware | None]:
    """What the plan is for, which is said; None: this machine, or an H200."""
    found: list[Hardware | None] = [None]
    if parsed.card is not None:
        names = list(SHEETS) if parsed.card == ["all"] else parsed.card
        found = [card(name) for name in names]
        print(f"for {names[0] if len(names) == 1 else f'{len(names)} cards'}: {BY_SHEET}")
    elif parsed.machine is not None:
        found = [_read_machine(parsed.machine)]
        print(f"for {found[0].device_name}, as {parsed.machine} has it" if found[0] else "")
    elif (here := measured_hardware()) is not None:
        print(f"for this machine: {here.device_name}")
    else:
        print(f"for {H200.device_name}: there is no accelerator here, and neither --card nor")
        print("--machine says for which one")
    if parsed.host_rate is None:
        return found
    rate = parse_bytes(parsed.host_rate.removesuffix("/s"), name="--host-rate")
    return [with_host(machine or measured_hardware() or H200, rate) for machine in found]


def _compare(
    parsed: argparse.Namespace,
    model: nn.Module,
    settings: dict[str, Any],
    machines: Sequence[Hardware | None],
) -> dict[str, Any]:
    """Print and return what fits which of several cards."""
    print(
        f"{'':<18}{'device memory':>24}{'host memory':>14}{'s a step':>10}{'tokens/s':>10}  bound"
    )
    rows: list[dict[str, Any]] = []
    for machine in machines:
        assert machine is not None
        name = machine.device_name.removesuffix(NOT_MEASURED)
        row: dict[str, Any] = {"machine": machine.device_name, "fits": False}
        try:
            made = _make_plan(parsed, model, {**settings, "hardware": machine})
        except DoesNotFitError as error:
            row["reason"] = _with_flags(str(error))
            print(f"{name:<18}does not fit: {row['reason'].partition('. ')[0]}")
        else:
            row |= {"fits": True, **_facts(made)}
            device = " of ".join(
                format_bytes(row[f"device_{key}"]) for key in ("bytes", "budget_bytes")
            )
            seconds, speed = row["predicted_seconds"], row["tokens_per_second"]
            text = f"{name:<18}{device:>24}{format_bytes(row['host_bytes']):>14}"
            print(f"{text}{seconds:>10.2f}{speed:>10,.0f}  {made.bound}", flush=True)
        rows.append(row)
    return {"fits": any(row["fits"] for row in rows), "cards": rows}


def _is_unlimited(parsed: argparse.Namespace, settings: dict[str, Any]) -> bool:
    """Whether nobody knows how much host memory there is: then only what is needed is planned."""
    is_here = settings["hardware"] is None and measured_hardware() is not None
    return parsed.host_memory is None and not is_here


def _asked(parsed: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """What `plan` and `look` are asked for."""
    return {
        "overrides": NOTHING_KEPT if _is_unlimited(parsed, settings) else None,
        "optimizer": OPTIMIZERS[parsed.optimizer](),
        "clip_norm": parsed.clip_norm or None,
        "host_memory": parsed.host_memory,
        "disk": parsed.disk,
        **settings,
    }


def _make_plan(parsed: argparse.Namespace, model: nn.Module, settings: dict[str, Any]) -> Plan:
    return plan(model, world=_world(parsed), **_asked(parsed, settings))


def _plan(parsed: argparse.Namespace, model: nn.Module, settings: dict[str, Any]) -> dict[str, Any]:
    """Print the plan, or what would fit."""
    try:
        made = _make_plan(parsed, model, settings)
    except DoesNotFitError as error:
        reason = _with_flags(str(error))
        print(reason, file=sys.stderr)
        return {"fits": False, "reason": reason}
    print(made)
    if _is_unlimited(parsed, settings):
        print("host memory is what is needed: a step may be faster with more of it (--host-memory)")
    found = {"fits": True, **_facts(made), "choices": dict(made.choices)}
    if parsed.html is not None:
        preview = look(model, kept=KeptPlans.of_user(), **_asked(parsed, settings))
        found["html"] = write_plan(parsed.html, parsed.model, preview)
    if made.scaling:
        speed = parsed.host_speed or parsed.per_host
        print(ASSUMED.format(parsed.per_host, speed, parsed.interconnect, parsed.network))
        found["scaling"] = [asdict(point) for point in made.scaling]
    return found


def _layer_list(parsed: argparse.Namespace) -> str | None:
    name: str | None = parsed.layer_list
    return f"{ADAPTED}{name}" if name is not None and parsed.lora else name


def _world(parsed: argparse.Namespace) -> Together | None:
    if parsed.world is None:
        return None
    if parsed.world < 1 or parsed.per_host < 1:
        raise ValueError("--world and --per-host must be at least 1.")
    return Together(
        num_ranks=parsed.world,
        per_host=parsed.per_host,
        near_rate=parse_bytes(parsed.interconnect.removesuffix("/s"), name="--interconnect"),
        far_rate=parse_bytes(parsed.network.removesuffix("/s"), name="--network"),
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
        "bounds": None if made.bounds is None else asdict(made.bounds),
        "num_tokens": tokens,
        "device_bytes": made.total_bytes("device"),
        "device_budget_bytes": made.budget_bytes,
        "host_bytes": made.total_bytes("host"),
        **(_disk_record(made) if made.disk_read_bytes else {}),
    }


def _disk_record(made: Plan) -> dict[str, int]:
    return {
        "disk_read_bytes": made.disk_read_bytes,
        "disk_written_bytes": made.disk_written_bytes,
    }


def _largest(
    parsed: argparse.Namespace, source: Source, settings: dict[str, Any]
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
            **settings,
        )
        row: dict[str, Any] = {"optimizer": word, "layers": 0, "parameters": 0}
        text = "none: not even a few layers fit"
        if found is not None:
            number, made = found
            parameters = int(dict(made.choices)["parameters"].replace(",", ""))
            row |= {"layers": number, "parameters": parameters, **_facts(made)}
            more = " or more" if number == MAX_LAYERS else ""
            text = f"{number:>5,} layers{more}, {parameters / 1e9:,.1f} billion parameters"
            text += f", {row['tokens_per_second']:,.0f} tokens/s with all of them streamed"
            text += "; cannot clip" if parsed.clip_norm and clips is None else ""
        print(f"  {name:<22}{text}")
        rows.append(row)
    return rows


def _read_machine(path: Path) -> Hardware:
    try:
        return Hardware.of_json(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--machine {path} cannot be read: {error}. Expected the file that l2l has written on "
            "the other machine when it was measured: ~/.cache/l2l/hardware-*.json."
        ) from error


def _num_rows(parsed: argparse.Namespace) -> int:
    rows = 64 if parsed.rows is None else parsed.rows
    if rows < 1:
        raise ValueError(f"--rows {rows}: expected at least 1.")
    tokens = rows * parsed.length if parsed.tokens is None else parsed.tokens
    return Workload(num_tokens=tokens, length=parsed.length).num_rows


# --------------------------------------------------------------------------------------------------
# The model


class Source:
    """Where a model comes from: it can be made with any number of layers, without memory.

    Attributes:
        period: after how many layers they repeat.
    """

    def __init__(self, word: str, length: int, lora: Lora | None = None) -> None:
        """The model that the user named.

        Raises:
            ValueError: there is no such model.
        """
        self._word, self._length, self._lora, self.period = word, length, lora, 1
        if word in SHAPES:
            return
        path = Path(word).expanduser()
        if not path.exists():
            raise ValueError(
                f"MODEL {word!r} is not there. Expected a folder with a config.json, such a file, "
                f"or one of the shapes {', '.join(SHAPES)}. Nothing is downloaded: to have a model "
                "of the Hugging Face Hub here, say 'hf download NAME config.json'."
            )
        self._config = read_config(path)
        kinds = getattr(self._config.get_text_config(), "layer_types", None) or [""]
        repeats = (period for period in range(1, len(kinds)) if kinds[period:] == kinds[:-period])
        self.period = next(repeats, len(kinds))

    def make(self, num_layers: int | None) -> nn.Module:
        """The model on the meta device; None: with as many layers as it has.

        Raises:
            ValueError: transformers does not make it, or peft no adapter of it.
        """
        model = self._plain(num_layers)
        return model if self._lora is None else with_lora(model, self._lora, task="causal").train()

    def _plain(self, num_layers: int | None) -> nn.Module:
        """The model without an adapter.

        Raises:
            ValueError: transformers does not make it.
        """
        if self._word in SHAPES:
            settings = {"length": self._length, "num_tokens": self._length}
            workload = Workload(shape=self._word, num_layers=num_layers, **settings)
            return workload.model(torch.device("meta"))
        config = self._config if num_layers is None else _with_layers(self._config, num_layers)
        transformers = library()
        name = next(iter(config.architectures or ()), None) or ""
        kind = getattr(transformers, name, None) if "For" in name or "LM" in name else None
        try:
            with torch.device("meta"):
                make = kind or transformers.AutoModelForCausalLM.from_config
                model: nn.Module = make(config)
        except (ValueError, TypeError, AttributeError, ImportError) as error:
            raise ValueError(
                f"{self._word}: transformers {transformers.__version__} makes no model of "
                f"{name or type(config).__name__}: {first_line(error)} Expected an architecture of "
                "transformers; code of its own in a model folder is not run. Plan such a model "
                "from Python: l2l.plan(model)."
            ) from error
        return model.train()


def _with_layers(config: Any, number: int) -> Any:
    """A configuration with another number of layers; lists with an entry for each are repeated."""
    if config.get_text_config() is not config or not getattr(config, "num_hidden_layers", None):
        raise ValueError(
            f"{type(config).__name__} does not say in num_hidden_layers how many layers there are, "
            "so no deeper model can be made of it. Leave out --largest."
        )
    entries = config.to_dict()
    for name, value in entries.items():
        if isinstance(value, list) and len(value) == config.num_hidden_layers:
            entries[name] = list(itertools.islice(itertools.cycle(value), number))
    names = {"num_hidden_layers", *config.attribute_map}
    entries = {name: value for name, value in entries.items() if name not in names}
    depth = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    return type(config)(**{**entries, depth: number})


def _batch(model: nn.Module, num_rows: int, length: int) -> dict[str, Tensor]:
    """One step's tensors, without values."""
    config, main = getattr(model, "config", None), getattr(model, "main_input_name", "input_ids")
    tokens = torch.empty((num_rows, length), dtype=torch.int64, device="meta")
    if main == "input_ids":
        whole_rows = "SequenceClassification" in type(model).__name__
        labels = torch.empty_like(tokens[:, 0] if whole_rows else tokens)
        return {"input_ids": tokens, "labels": labels}
    side = getattr(config, "image_size", None)
    if main == "pixel_values" and isinstance(side, int):
        channels = getattr(config, "num_channels", 3)
        pixels = torch.empty((num_rows, channels, side, side), device="meta")
        return {"pixel_values": pixels, "labels": torch.empty_like(tokens[:, 0])}
    raise ValueError(
        f"{type(model).__name__} takes {main!r}, of which the command line knows no shape. "
        "Expected a model of tokens or images. Plan it from Python: l2l.plan(model, batch=...)."
    )
