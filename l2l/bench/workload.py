"""The workload of `l2l bench step`: one shape, one batch, one system in this process.

    python -m l2l.bench.workload '{"system": "engine", "workload": {"shape": "tiny"}}'

prints one line of JSON, last. The model is a Llama shape with random weights, made on the device in
bfloat16 (the fast way to have them) and then handed over: to systems that keep it in host memory it
is given there, so that nothing of it counts against their device memory. The batch is the same
random tokens in every step and for every system, and so are the first weights: losses can be
compared.

A step's time is that between two readings of the loss, as in a training script that prints it. No
other synchronisation separates the steps: a system may do work of one step under the next.
"""

from __future__ import annotations

import gc
import json
import re
import statistics
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from l2l.bench.options import option
from l2l.bench.peers import LEARNING_RATE, PEERS, NotInstalledError, Recipe, Step
from l2l.device import format_bytes, parse_bytes
from l2l.engine import Engine
from l2l.hugging_face import library
from l2l.parameter_server import AdamW

ENGINE, PLAIN = "engine", "plain"  # systems: this one, and the one that keeps all on the device
MEASURED, NOT_INSTALLED, FAILED = "measured", "not installed", "failed"  # what comes of a run
USUAL_ROWS = 8  # of a microbatch, in systems that do not plan it
LANES = ("compute", "fetch", "drain", "stash", "unstash", "update")
TRACED_STEPS = 2

Measurement = dict[str, Any]  # what one run showed, as JSON has it: `measure` has the names


class Shape(NamedTuple):
    """A Llama model, in the words of its configuration."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool = True


SHAPES = {  # hidden size, layers, heads, key-value heads, intermediate size, vocabulary
    "3.2b": Shape(3072, 28, 24, 8, 8192, 128_256),
    "7.5b": Shape(4096, 32, 32, 8, 14336, 128_256),
    "50b": Shape(8192, 58, 64, 8, 28672, 32_000, tie_word_embeddings=False),
    "1b": Shape(2048, 16, 32, 8, 8192, 128_256),
    "tiny": Shape(64, 4, 4, 2, 256, 1024),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is trained, for how long; the same for every system."""

    shape: str = option("--shape", "3.2b", choices=list(SHAPES))
    num_layers: int | None = option("--layers", None, "number of layers (default: the shape's own)")
    num_tokens: int = option("--tokens", 65_536, "tokens per step")
    length: int = option("--length", 1024, "tokens per row")
    clip_norm: float | None = option("--clip-norm", 1.0, "0: off")
    num_warm_up: int = option("--warm-up", 2, "warm-up steps")
    num_steps: int = option("--steps", 3, "timed steps")

    def __post_init__(self) -> None:
        if self.length < 2 or self.num_tokens < self.length or self.num_tokens % self.length:
            raise ValueError(
                f"{self.num_tokens} tokens in rows of {self.length}: expected at least 2 tokens a "
                "row, and a whole number of rows. Change --tokens or --length."
            )
        counts = {"warm-up": self.num_warm_up, "steps": self.num_steps, "layers": self.num_layers}
        for name, count in counts.items():
            if count is not None and count < 1:
                raise ValueError(f"--{name} {count}: expected at least 1.")
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise ValueError(f"--clip-norm {self.clip_norm}: expected a number above 0, or 0: off.")

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return self.num_tokens // self.length

    def model(self, device: torch.device) -> nn.Module:
        """The model with random weights, on a device, in bfloat16.

        Raises:
            ValueError: transformers is not there.
        """
        transformers, shape = library(), SHAPES[self.shape]
        shape = shape._replace(num_hidden_layers=self.num_layers or shape.num_hidden_layers)
        settings = {"max_position_embeddings": self.length, "use_cache": False}
        config = transformers.LlamaConfig(**shape._asdict(), **settings)
        torch.manual_seed(0)
        with device:
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation="sdpa"
            )
        return model

    def ids(self) -> Tensor:
        """The batch: random tokens, [rows, length], on the host."""
        generator = torch.Generator().manual_seed(1)
        size = (self.num_rows, self.length)
        return torch.randint(0, SHAPES[self.shape].vocab_size, size, generator=generator)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One system on the workload."""

    workload: Workload = field(default_factory=Workload)
    system: str = ENGINE
    variant: str = ""  # of another system
    microbatch_size: int | None = option(
        "--microbatch-size",
        None,
        "default: planned by the engine, 8 for the others",
        metavar="ROWS",
    )
    device_memory: str | None = None  # the engine's budget, such as "16GiB". None: its default
    moments: Literal["float32", "8bit"] = option(
        "--moments", "float32", "of the engine's AdamW", choices=["float32", "8bit"]
    )
    trace: str | None = None  # where the engine's Chrome trace goes
    started_at: float = field(default_factory=time.time)  # when the process was

    def __post_init__(self) -> None:
        if self.device_memory is not None:
            parse_bytes(self.device_memory, name="--device-memory")
        rows, size = self.workload.num_rows, self.microbatch_size
        if size is not None and (size < 1 or rows % size):
            raise ValueError(
                f"--microbatch-size {size}: expected a number of rows that divides the {rows} rows "
                "of a step."
            )

    @property
    def label(self) -> str:
        """The name of the row."""
        words = [self.system, self.variant, self.device_memory or ""]
        if self.system == ENGINE and self.moments != "float32":
            words.append(f"{self.moments} moments")
        return " ".join(word for word in words if word)

    @property
    def usual_microbatch_size(self) -> int:
        """Rows for systems that do not plan: those asked for, or the most up to 8 that divide."""
        rows = self.workload.num_rows
        usual = max(size for size in range(1, USUAL_ROWS + 1) if rows % size == 0)
        return self.microbatch_size or usual

    def to_json(self) -> str:
        """The text that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """A run from its fields; those left out have their defaults."""
        fields = json.loads(text)
        return cls(**{**fields, "workload": Workload(**fields.get("workload", {}))})


def measure(run: Run) -> Measurement:
    """Run one system on the workload, in this process.

    Raises:
        NotInstalledError: the system is not there.
    """
    workload = run.workload
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    start = time.perf_counter()
    model, ids = workload.model(device), workload.ids()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if run.system != PLAIN:
        model.cpu()
    forget_peak(device)
    handed_over = time.perf_counter()
    engine = make_engine(model, run, device) if run.system == ENGINE else None
    if engine is not None:
        step = _engine_step(engine, ids)
    else:
        recipe = Recipe(ids, run.usual_microbatch_size, workload.clip_norm, device)
        step = PEERS[run.system, run.variant].make(model, recipe)
    built = time.perf_counter()
    losses, marks, first_step_ended_at = _train(step, workload, device)
    seconds = [later - earlier for earlier, later in pairwise(marks)][-workload.num_steps :]
    reserved, allocated = _peaks(device)
    if engine is not None and reserved is None:
        reserved = engine.device.peak_bytes()
    return {
        "step_seconds": statistics.median(seconds),
        "all_step_seconds": seconds,
        "tokens_per_second": workload.num_tokens / statistics.median(seconds),
        "losses": losses,  # of every step, warm-up included
        "device_peak_bytes": reserved,  # from the driver. None: the CPU, where nobody counts
        "device_allocated_bytes": allocated,  # of them in tensors
        "host_peak_bytes": host_peak_bytes(),
        "model_seconds": handed_over - start,  # until the model with random weights was there
        "build_seconds": built - handed_over,  # what the system prepares before its first step
        "first_step_seconds": first_step_ended_at - run.started_at,  # of the process, to its end
        "num_parameters": num_parameters,
        "microbatch_size": run.microbatch_size if engine else run.usual_microbatch_size,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch_version": torch.__version__,
        **_engine_facts(engine, step, run.trace),
    }


def make_engine(model: nn.Module, run: Run, device: torch.device) -> Engine:
    """The engine for a run; with a budget the process is held to it from here on.

    Raises:
        ValueError: the budget is more than the device has.
    """
    if run.device_memory is not None and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        budget = parse_bytes(run.device_memory, name="--device-memory")
        if budget > total:
            raise ValueError(
                f"--device-memory {run.device_memory}: the device has {format_bytes(total)}. Give "
                "at most that."
            )
        torch.cuda.set_per_process_memory_fraction(budget / total)
    return Engine(
        model,
        optimizer=AdamW(lr=LEARNING_RATE, moments=run.moments),
        clip_norm=run.workload.clip_norm,
        device=device,
        device_memory=run.device_memory,
        microbatch_size=run.microbatch_size,
    )


def _engine_step(engine: Engine, ids: Tensor) -> Step:
    batch = {"input_ids": ids, "labels": ids}
    return lambda: engine.step(batch).loss


def _engine_facts(engine: Engine | None, step: Step, trace_path: str | None) -> Measurement:
    """What only the engine tells: its plan, and how busy its lanes are in two more steps."""
    if engine is None:
        return {"plan": None, "predicted_seconds": None, "bounds": None, "busy": {}}
    with engine.trace() as trace:
        for _ in range(TRACED_STEPS):
            step()
    if trace_path is not None:
        trace.write(Path(trace_path))
    plan = engine.plan
    return {
        "plan": str(plan),
        "predicted_seconds": plan.predicted_seconds,
        "bounds": None if plan.bounds is None else asdict(plan.bounds),
        "busy": busy_lanes(trace),
    }


def busy_lanes(trace: Any) -> dict[str, float]:
    """Share of the time of a trace in which each lane was busy."""
    return {lane: trace.busy_seconds(lane) / max(trace.seconds, 1e-9) for lane in LANES}


def _train(
    step: Step, workload: Workload, device: torch.device
) -> tuple[list[float], list[float], float]:
    """The losses, when each was read, and when the first step had ended."""
    losses, marks, first_step_ended_at = [], [], 0.0
    for number in range(workload.num_warm_up + workload.num_steps):
        losses.append(step())
        marks.append(time.perf_counter())
        if number == 0:  # always a warm-up
            _synchronize(device)
            first_step_ended_at = time.time()
    _synchronize(device)
    return losses, marks, first_step_ended_at


# -------------------------------------------------------------------------------------------------


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forget_peak(device: torch.device) -> None:
    """Let what is measured begin with a device in which nothing is left."""
    gc.collect()
    _synchronize(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _peaks(device: torch.device) -> tuple[int, int] | tuple[None, None]:
    """The most device memory that was reserved, and allocated."""
    if device.type != "cuda":
        return None, None
    return torch.cuda.max_memory_reserved(device), torch.cuda.max_memory_allocated(device)


def host_peak_bytes() -> int | None:
    """The most resident memory that this process had. None: the system does not say."""
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(found[1]) * 1024 if found else None


def main(arguments: Sequence[str]) -> int:
    """Measure one run, given as JSON; the last line printed is JSON too.

    It has a `status`, and a `measurement` or else a `note`.
    """
    try:
        line = {"status": MEASURED, "measurement": measure(Run.from_json(arguments[0]))}
    except NotInstalledError:
        line = {"status": NOT_INSTALLED}
    except Exception as error:  # whatever another system raises is its row in the table
        traceback.print_exc()
        first = next(iter(str(error).strip().splitlines()), "")
        line = {"status": FAILED, "note": f"{type(error).__name__}: {first}"}
    print(json.dumps(line), flush=True)
    return 1 if line["status"] == FAILED else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
