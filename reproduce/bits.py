"""Train many small models in many settings and note every bit of what comes out.

    python reproduce/bits.py --write bits.json
    python reproduce/bits.py --compare bits.json
    python reproduce/bits.py --compare bits.json --only "overrides / words"

A change that is not meant to alter results must leave all of this as it was, on one machine. Each
case trains a small model on the CPU for a few steps and gives four hashes (SHA-256):

    losses    of each step and evaluation, and what else a case has looked at on its way
    weights   the model's state_dict, buffers too, once the engine is closed
    moments   all tensors of a checkpoint: weights as they run, what makes them masters, optimizer
              state, buffers; with the number of updates that each parameter has had
    norms     of gradients and updates, of each step, and whether it was skipped

Every family of tests/families.py is there, and for a few small models what takes other code: all
optimizers, precisions and kernels; when and where updates happen; where tables and hidden states
are; how many microbatches there are; the choices of a plan; frozen parameters and groups; layers
that come and go or are left out; checkpoints; compiled layers; several ranks. A case that raises is
noted with its error. Only what the package shows is used. `--compare` prints each case that differs
and the parts that do, and ends with status 1 if there is any.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import itertools
import json
import logging
import multiprocessing
import os
import platform
import shutil
import struct
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

import l2l

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import inside
from families import (
    FAMILIES,
    IGNORED,
    LAYERS,
    VOCABULARY,
    Batch,
    Family,
    build_gpt2,
    build_llama,
    prepare,
)

PARTS = ("losses", "weights", "moments", "norms")
RAISED = "raises"
STEPS, ROWS, LENGTH, WIDTH = 4, 4, 12, 128  # of this width, single rows of a table are updated
CLIP = 0.1  # so small that every step is clipped
LONGEST_SECONDS = 120  # for ranks that wait for each other
BACKEND = "aot_eager_decomp_partition"  # the partitioner that "inductor" has, without its kernels

Found = dict[str, str]
Settings = Mapping[str, Any]

# --------------------------------------------------------------------------------------------------
# A model with what the families do not have


class Spoil(torch.autograd.Function):
    """Lets everything pass, but for a gradient that is to be spoilt."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, spoilt: Tensor) -> Tensor:
        """The same value."""
        ctx.save_for_backward(spoilt)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The same gradient, or none that is a number."""
        return torch.where(ctx.saved_tensors[0], torch.nan, gradient), None


class Layer(nn.Module):
    """Draws random numbers, changes a buffer, and has a parameter that gets no gradient."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH // 2, WIDTH)
        self.idle = nn.Parameter(torch.ones(3))
        self.dropout = nn.Dropout(0.2)

    def forward(self, hidden: Tensor, spoilt: Tensor) -> Tensor:
        """The hidden state after the layer."""
        centred = hidden - 0.1 * self.seen.to(hidden.dtype)
        if self.training:
            self.seen.mul_(0.9).add_(hidden.detach().float().mean((0, 1)), alpha=0.1)
        inner = Spoil.apply(torch.tanh(self.up(self.norm(centred))), spoilt[0] == self.number)
        return hidden + self.dropout(self.down(self.dropout(inner)))


class Words(nn.Module):
    """Two tables, layers, a head that may be the first table again; `spoilt` names a layer."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer(number) for number in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(
        self, ids: Tensor, places: Tensor, labels: Tensor, spoilt: Tensor
    ) -> dict[str, Tensor]:
        """The loss of the words that are not ignored."""
        hidden = self.table(ids) + self.places(places)
        for layer in self.layers:
            hidden = layer(hidden, spoilt)
        logits = self.head(nn.functional.dropout(self.norm(hidden), 0.1, self.training))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def words_batch(rows: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(0, VOCABULARY, (2, rows, LENGTH), generator=generator)
    labels[:, ::4] = IGNORED
    places = torch.arange(LENGTH).expand(rows, LENGTH).contiguous()
    return {"ids": ids, "places": places, "labels": labels, "spoilt": torch.full((rows,), -1)}


def spoilt_batch(number: int, layer: int) -> Batch:
    return {**words_batch(ROWS, number), "spoilt": torch.full((ROWS,), layer)}


def long_batch(rows: int, seed: int = 0) -> Batch:
    ids = torch.randint(0, VOCABULARY, (rows, 256), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


WORDS = Family("words", partial(prepare, Words), words_batch, "tokens")
TIED_WORDS = replace(WORDS, name="words_tied", build=partial(prepare, partial(Words, tied=True)))
DROPPING = replace(
    FAMILIES["gpt2"],
    name="gpt2_dropping",
    build=partial(build_gpt2, resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3),
)
LONG = Family(
    "llama_long",  # long enough that what a layer keeps is not small
    partial(build_llama, intermediate_size=1024, max_position_embeddings=256),
    long_batch,
    "shifted",
)
TIED, UNTIED, BERT = (
    FAMILIES["llama_tied"],
    FAMILIES["llama_untied"],
    FAMILIES["bert_classification"],
)
LISTS = {"llama_tied": "model.layers", "words": "layers"}

# --------------------------------------------------------------------------------------------------
# A case and its run

Begin = Callable[[Family, Path], tuple[nn.Module, dict[str, Any]]]
Course = Callable[["Run"], None]


def built(family: Family, folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    return family.build(), {}


def train(run: Run) -> None:
    for number in range(STEPS):
        run.step(number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is trained, and how."""

    name: str
    family: Family
    settings: Settings = field(default_factory=dict)
    course: Course = train
    begin: Begin = built
    """Gives the model, and settings that depend on it."""
    num_ranks: int = 0
    """How many train together; 0: there is no process group."""


class Run:
    """One case: its engine, and what was seen of it."""

    def __init__(self, case: Case, folder: Path) -> None:
        """Make the engine."""
        self.case, self.family, self.folder = case, case.family, folder
        self.rank = dist.get_rank() if case.num_ranks else 0
        self.reports: list[l2l.StepReport] = []
        self.seen = hashlib.sha256()
        self.begin()

    def begin(self, **more: Any) -> None:
        """A fresh model in a fresh engine."""
        folder = tempfile.mkdtemp(dir=self.folder)
        self.model, of_model = self.case.begin(self.family, Path(folder))
        given = {"device": "cpu", "precision": "float32", "microbatch_size": 2, "seed": 3}
        given |= {"optimizer": OPTIMIZERS["AdamW"], "embedding": "device"}
        self.given = {**given, **self.case.settings, **of_model, **more}
        self.engine = inside.engine(self.model, layers=self.family.layers, **self.given)

    def batch(self, number: int, rows: int = ROWS) -> Batch:
        """The rows of a step, of which every rank has its own."""
        batch = self.family.batch(rows, seed=number)
        if self.given["precision"] == "bfloat16":  # models take images and the like as they run
            batch = {k: v.bfloat16() if v.is_floating_point() else v for k, v in batch.items()}
        if self.case.num_ranks < 2:
            return batch
        own = slice(self.rank, None, self.case.num_ranks)
        return {name: value[own] for name, value in batch.items()}

    def step(self, number: int, batch: Any = None, **words: Any) -> None:
        """Train; the report is looked at when all is done."""
        batch = self.batch(number) if batch is None else batch
        self.reports.append(self.engine.step(batch, **words))

    def see(self, name: str, value: Any) -> None:
        """Note something besides losses."""
        if isinstance(value, Tensor):
            add_tensor(self.seen, name, value)
        elif isinstance(value, Mapping):
            for key, one in value.items():
                self.see(f"{name} {key}", one)
        else:
            add_text(self.seen, name, repr(value))

    def finish(self) -> Found:
        """Save, close, and hash all that there is."""
        saved = self.folder / "saved at the end"
        self.engine.save(saved)
        losses, norms = self.seen, hashlib.sha256()
        for report in self.reports:
            add_numbers(losses, [report.loss, report.loss_scale, report.num_tokens])
            add_text(norms, str(report.layers), str(report.skip_reason))
            add_numbers(norms, [report.gradient_norm])
            add_numbers(norms, itertools.chain(*sorted(report.layer_norms.items())))
            add_numbers(norms, itertools.chain(*sorted(report.update_norms.items())))
        self.engine.close()
        weights = hashlib.sha256()
        for name, tensor in self.model.state_dict().items():
            add_tensor(weights, name, tensor)
        found = {"losses": losses, "weights": weights, "norms": norms}
        found["moments"] = self.files_of(saved)
        return {part: found[part].hexdigest() for part in PARTS}

    def files_of(self, checkpoint: Path) -> Any:
        """A hash of all tensors of a checkpoint, and of the number of updates of each parameter."""
        found = hashlib.sha256()
        if self.rank:  # the first one knows when all have written
            return found
        for path in sorted(checkpoint.glob("*.safetensors")):
            add_text(found, path.name)
            for name, tensor in sorted(load_file(path).items()):
                add_tensor(found, name, tensor)
        files = json.loads((checkpoint / "manifest.json").read_text())["files"]
        steps = {name: files[name].get("steps") for name in sorted(files)}
        add_text(found, json.dumps(steps, sort_keys=True))
        return found


def add_text(to: Any, *words: str) -> None:
    for word in words:
        to.update(struct.pack("<q", len(word.encode())) + word.encode())


def add_numbers(to: Any, numbers: Iterable[float]) -> None:
    for number in numbers:
        to.update(struct.pack("<d", number))


def add_tensor(to: Any, name: str, tensor: Tensor) -> None:
    add_text(to, name, str(tensor.dtype), str(tuple(tensor.shape)))
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    to.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")


def perform(case: Case, folder: Path) -> Found:
    """Run a case; what it raises is what was found."""
    run = None
    torch.manual_seed(0)
    folder.mkdir(exist_ok=True)  # ranks share it
    try:
        run = Run(case, folder)
        case.course(run)
        return run.finish()
    except Exception as error:
        text = str(error).replace(str(folder), "FOLDER")
        return {RAISED: f"{type(error).__name__}: {text}"}
    finally:
        if run is not None:
            with contextlib.suppress(Exception):
                run.engine.close()


# --------------------------------------------------------------------------------------------------
# Courses: what happens between steps


def look_between(run: Run) -> None:
    for number in range(STEPS):
        run.step(number)
        for rows in (3, 4):
            run.see("evaluated", run.engine.evaluate(run.batch(10 * rows + number, rows=rows)))
        if number == 1:
            outputs = run.engine.predict(run.batch(20))
            run.see("logits", outputs["logits"])
        if number == 2:
            run.see("weights", run.engine.state_dict())
            if run.case.num_ranks < 2:  # else each has only a part
                run.see("first", next(run.model.parameters()).detach().clone())
                for index, state in run.engine.optimizer.state_dict()["state"].items():
                    run.see(f"state {index}", state)
    run.see("choices", run.engine.plan.choices)


def follow_schedule(run: Run) -> None:
    schedule = torch.optim.lr_scheduler.LambdaLR(run.engine.optimizer, lambda n: 0.5**n)
    for number in range(STEPS):
        run.step(number)
        schedule.step()


def insert_copies(run: Run) -> None:
    run.step(0)
    run.engine.layers.insert(1, copy_of=2)
    run.step(1)
    run.engine.layers.insert(4, copy_of=0, moments="fresh")
    run.step(2)
    run.step(3)


def insert_module(run: Run) -> None:
    run.step(0)
    module = copy.deepcopy(run.family.build().get_submodule(LISTS[run.family.name])[1])
    run.engine.layers.insert(2, module)
    run.step(1)
    run.step(2)


def remove_layers(run: Run) -> None:
    run.step(0)
    run.engine.layers.remove(0)
    run.step(1)
    run.engine.layers.remove(1)
    run.step(2)


def grow(run: Run) -> None:
    run.step(0)
    run.step(1)
    run.engine.layers.grow(2)
    run.step(2)
    run.see("evaluated", run.engine.evaluate(run.batch(9)))
    run.step(3)


def freeze_and_thaw(run: Run) -> None:
    run.step(0)
    run.engine.layers.freeze([0, 2])
    run.step(1)
    run.engine.layers.thaw(0)
    run.step(2)
    run.step(3)


def choose_layers(run: Run) -> None:
    for number, chosen in enumerate(([0, 1, 2], [0, 2], [1], None)):
        run.step(number, layers=chosen)
    run.see("evaluated", run.engine.evaluate(run.batch(9), layers=[0, 2]))


def change_depth(run: Run) -> None:
    run.step(0)
    run.engine.depth = l2l.StochasticDepth(last=0.3)
    run.step(1)
    run.step(2)
    run.engine.depth = l2l.AllLayers()
    run.step(3)


def save_beside(run: Run) -> None:
    run.step(0)
    run.engine.prepare_saving()
    run.step(1)
    saving = run.engine.save(run.folder / "beside", background=True)
    run.step(2)
    run.step(3)
    saving.wait()
    run.see("beside", run.files_of(run.folder / "beside").hexdigest())


def load_again(run: Run) -> None:
    run.step(0)
    run.step(1)
    run.engine.save(run.folder / "middle", extra={"rows": [1, 2]})
    run.step(2)
    run.see("extra", run.engine.load(run.folder / "middle"))
    run.step(2)
    run.step(3)


def load_elsewhere(run: Run) -> None:
    """In a fresh engine, of another seed, after layers have changed."""
    run.step(0)
    run.engine.layers.insert(1, copy_of=0)
    run.step(1)
    run.engine.save(run.folder / "middle")
    run.engine.close()
    run.begin(seed=8)
    run.engine.load(run.folder / "middle")
    run.step(2)
    run.step(3)


def load_in_bfloat16(run: Run) -> None:
    """What was saved in another precision."""
    run.step(0)
    run.step(1)
    run.engine.save(run.folder / "middle")
    run.engine.close()
    run.begin(precision="bfloat16")
    run.engine.load(run.folder / "middle")
    run.step(2)
    run.step(3)


def close_with_updates(run: Run) -> None:
    """Updates that wait are done when an engine is closed; then another one."""
    run.step(0)
    run.step(1)
    run.engine.close()
    run.see("closed", run.model.state_dict())
    run.begin()
    run.step(2)


def export(run: Run) -> None:
    run.step(0)
    run.step(1)
    for dtype in (None, "bfloat16"):
        folder = run.folder / f"exported {dtype}"
        run.engine.export(folder, dtype=dtype, shard_bytes=20_000)
        for path in sorted(folder.glob("*.safetensors")) if run.rank == 0 else ():
            run.see(path.name, load_file(path))
    run.step(2)


def give_microbatches(run: Run) -> None:
    """A list of them, of several sizes; then batches that grow and shrink."""
    for number in range(2):
        batch = run.batch(number, rows=6)
        parts = [{k: v[cut] for k, v in batch.items()} for cut in (slice(0, 1), slice(1, 6))]
        run.step(number, parts)
    for number, rows in enumerate((7, 2), start=2):
        run.step(number, run.batch(number, rows=rows))


def give_no_rows(run: Run) -> None:
    """More rows for one rank than for the other, which has none at last."""
    for number, rows in enumerate((4, 3, 1)):
        run.step(number, run.batch(number, rows=rows))


def spoil_gradients(run: Run) -> None:
    """The gradient of a layer is not finite, in the second step."""
    run.step(0)
    run.step(1, spoilt_batch(1, 1))
    run.step(2)
    run.step(3)


def spoil_and_load(run: Run) -> None:
    """The same where it is an error, known a little later; then from the checkpoint."""
    run.step(0)
    run.engine.save(run.folder / "middle")
    try:
        run.engine.step(spoilt_batch(1, 1))
        for number in range(2, 6):
            run.engine.step(run.batch(number))
    except Exception as error:
        run.see(type(error).__name__, str(error))
    run.see("state", run.engine.state)
    run.engine.load(run.folder / "middle")
    run.step(1)
    run.step(2)


COURSES: dict[str, Course] = {
    "looked at between": look_between,
    "schedule": follow_schedule,
    "copies inserted": insert_copies,
    "module inserted": insert_module,
    "removed": remove_layers,
    "grown": grow,
    "frozen and thawed": freeze_and_thaw,
    "chosen layers": choose_layers,
    "depth changed": change_depth,
    "saved beside": save_beside,
    "loaded again": load_again,
    "loaded elsewhere": load_elsewhere,
    "loaded in bfloat16": load_in_bfloat16,
    "closed between": close_with_updates,
    "exported": export,
    "microbatches given": give_microbatches,
}

# --------------------------------------------------------------------------------------------------
# Beginnings: models that are not as they were built


def frozen(trained: Callable[[int, str], bool], family: Family, folder: Path) -> Any:
    """A model of which only some parameters are trained, by their number and name."""
    model = family.build()
    for number, (name, parameter) in enumerate(model.named_parameters()):
        parameter.requires_grad_(trained(number, name))
    return model, {}


def in_sixteen_bits(family: Family, folder: Path) -> Any:
    return family.build().to(torch.bfloat16), {}


def torch_groups(family: Family, folder: Path) -> Any:
    """Groups of a torch optimizer: no decay on norms and biases, another learning rate."""
    model = family.build()
    matrices = [one for one in model.parameters() if one.ndim > 1]
    others = [one for one in model.parameters() if one.ndim <= 1]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0, "lr": 1e-2}]
    return model, {"optimizer": torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.1)}


def torch_sgd(family: Family, folder: Path) -> Any:
    model = family.build()
    return model, {"optimizer": torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)}


def group_of(name: str, parameter: nn.Parameter) -> dict[str, Any] | None:
    """What differs for a parameter."""
    if parameter.ndim == 1:
        return {"weight_decay": 0.0, "lr": 1e-2}
    return {"lr": 1e-4} if "embed" in name or "table" in name else None


def on_meta(family: Family) -> nn.Module:
    model = family.build()
    with torch.device("meta"):
        return type(model)(copy.deepcopy(model.config))


def from_folder(family: Family, folder: Path) -> Any:
    family.build().save_pretrained(folder, max_shard_size="20KB")
    return on_meta(family), {"weights": folder}


def from_nothing(family: Family, folder: Path) -> Any:
    return on_meta(family), {"weights": l2l.RandomInit(seed=4)}


def recording(family: Family, folder: Path) -> Any:
    return family.build(), {"optimizer": l2l.RecordGradients()}


def record_gradients(run: Run) -> None:
    """Gradients of steps that change nothing."""
    for number in range(2):
        run.step(number)
        run.engine.state_dict()  # after all updates
        for name, gradient in sorted(run.given["optimizer"].gradients.items()):
            run.see(name, gradient)


BEGINNINGS: dict[str, Begin] = {
    "every second frozen": partial(frozen, lambda number, name: number % 2 == 0),
    "only the last layer": partial(frozen, lambda number, name: "layers.2" in name),
    "only the first layer": partial(frozen, lambda number, name: "layers.0" in name),
    "only some matrices": partial(frozen, lambda number, name: "q_proj" in name or "up" in name),
    "only around the layers": partial(frozen, lambda number, name: "layers" not in name),
    "model in bfloat16": in_sixteen_bits,
    "groups of torch": torch_groups,
}

# --------------------------------------------------------------------------------------------------
# Settings

OPTIMIZERS: dict[str, Any] = {
    "AdamW": l2l.AdamW(lr=3e-3, weight_decay=0.05),
    "8-bit": l2l.AdamW(lr=3e-3, weight_decay=0.05, moments="8bit"),
    "SGD": l2l.SGD(lr=0.05),
    "momentum": l2l.SGD(lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "Nesterov": l2l.SGD(lr=0.05, momentum=0.9, nesterov=True),
    "Lion": l2l.Lion(lr=1e-3, weight_decay=0.1),
    "Adafactor": l2l.Adafactor(lr=1e-2, weight_decay=0.01),
}
PRECISIONS = ("float32", "bfloat16", "float16")
CLIPPED: Settings = {"clip_norm": CLIP}
EVERYTHING: Settings = {
    "num_tail": 1,
    "num_device_states": 1,
    "num_shared": 1,
    "num_pieces": 4,
    "halves": True,
    "shares_memory": True,
    "num_cells": 3,
    "piece_tokens": 5,
}
OVERRIDES: dict[str, Settings] = {
    "one slot": {"num_slots": 1},
    "tightest": {"num_slots": 1, "num_cells": 3, "num_gradient_slots": 1},
    "many cells": {"num_cells": 20, "num_slots": 3, "num_gradient_slots": 3},
    "tail of one": {"num_tail": 1},
    "tail of all": {"num_tail": 3},
    "state of one": {"num_tail": 2, "num_device_states": 1},
    "state of all": {"num_tail": 3, "num_device_states": 3},
    "state around": {"outer_state": True},
    "all state": {"num_tail": 3, "num_device_states": 3, "outer_state": True},
    "pieces": {"piece_tokens": 5},
    "pieces of rows": {"piece_tokens": 12},
    "some late": {"num_late": 2},
    "shared": {"num_shared": 2},
    "all shared, in three": {"num_shared": 3, "num_pieces": 3},
    "shared and late": {"num_shared": 2, "num_late": 2, "num_pieces": 5},
    "halves": {"halves": True},
    "halves, some late": {"halves": True, "num_late": 2},
    "halves but one": {"halves": True, "num_whole": 1},
    "halves, tail": {"halves": True, "num_tail": 1},
    "halves, shared": {"halves": True, "num_shared": 1},
    "memory shared": {"shares_memory": True},
    "memory shared, tail": {"shares_memory": True, "num_tail": 1},
    "memory shared, updates too": {"shares_memory": True, "num_shared": 2, "num_late": 2},
    "kept": {"keep": 0.5, "num_kept_cells": 2},
    "everything": EVERYTHING,
}
BASES: dict[str, Settings] = {
    "eager": {},
    "clipped": CLIPPED,
    "rows on the host": {"embedding": "host"},
    "rows on the host, clipped, readable": {
        **CLIPPED,
        "embedding": "host",
        "kernel": "readable",
    },
    "rows on the host, clipped, bfloat16": {
        **CLIPPED,
        "embedding": "host",
        "precision": "bfloat16",
    },
    "8-bit, bfloat16, clipped": {
        **CLIPPED,
        "precision": "bfloat16",
        "optimizer": OPTIMIZERS["8-bit"],
    },
    "Lion, bfloat16": {"precision": "bfloat16", "optimizer": OPTIMIZERS["Lion"]},
    "momentum, readable": {"optimizer": OPTIMIZERS["momentum"], "kernel": "readable"},
    "float16": {"precision": "float16"},
}
ADAFACTOR: Settings = {"optimizer": OPTIMIZERS["Adafactor"], "precision": "bfloat16"}
ON_DEVICE = ("one slot", "tightest", "tail of one", "tail of all", "pieces", "memory shared")
"""Overrides that optimizers without state on the host have, too."""
PLANS: dict[str, Settings] = {
    "eager": {},
    "clipped": CLIPPED,
    "halves": {**CLIPPED, "embedding": "host", "overrides": {"halves": True}},
    "resident": {**CLIPPED, "overrides": {"num_tail": 2, "num_device_states": 1}},
    "shared": {**CLIPPED, "overrides": {"num_shared": 2, "num_pieces": 3}},
    "8-bit, bfloat16": {"precision": "bfloat16", "optimizer": OPTIMIZERS["8-bit"]},
    "Adafactor, bfloat16": ADAFACTOR,
    "float16": {"precision": "float16"},
}
REFUSED: dict[str, Settings] = {
    "Adafactor clipped": {**CLIPPED, "optimizer": OPTIMIZERS["Adafactor"]},
    "Adafactor in float16": {"precision": "float16", "optimizer": OPTIMIZERS["Adafactor"]},
    "eager and clipped": {**CLIPPED, "update": "eager"},
    "eager and skipping": {"nonfinite": "skip", "update": "eager"},
    "a choice that is none": {"overrides": {"tail": 1}},
    "no rows": {"microbatch_size": 0},
    "no such precision": {"precision": "float8"},
    "too little host memory": {"host_memory": "1KiB"},
}
DEPTHS: dict[str, Any] = {
    "stochastic": l2l.StochasticDepth(last=0.3),
    "stochastic, given": l2l.StochasticDepth(survival=[1.0, 0.4, 0.6]),
    "progressive": l2l.ProgressiveLayerDropping(final=0.3, rate=0.5),
    "sampled": l2l.SampledArchitecture([[0, 1], [2]]),
}
NOT_FINITE: dict[str, Settings] = {
    "skipped": {"nonfinite": "skip"},
    "clipped": CLIPPED,
    "halves": {"nonfinite": "skip", "overrides": {"halves": True}},
    "rows on the host": {"nonfinite": "skip", "embedding": "host"},
    "device state": {"nonfinite": "skip", "overrides": {"num_tail": 2, "num_device_states": 2}},
    "shared": {"nonfinite": "skip", "overrides": {"num_shared": 2}},
    "float16": {"precision": "float16"},
}
STOPPED: dict[str, Settings] = {
    "eager": {},
    "rows on the host": {"embedding": "host"},
    "device state": {"overrides": {"num_tail": 3, "num_device_states": 3}},
    "shared": {"overrides": {"num_shared": 3}},
    "Adafactor": ADAFACTOR,
}
COMPILED: dict[str, Settings] = {
    "streamed": {"compile": BACKEND},
    "kept, tail, clipped": {
        **CLIPPED,
        "compile": BACKEND,
        "embedding": "host",
        "overrides": {"num_tail": 1, "keep": 0.3, "num_kept_cells": 2, "piece_tokens": 12},
    },
    "bfloat16": {"compile": "aot_eager", "precision": "bfloat16"},
}
TOGETHER: dict[str, Settings] = {
    "eager": {},
    "clipped": CLIPPED,
    "8-bit, bfloat16, tail": {
        "precision": "bfloat16",
        "optimizer": OPTIMIZERS["8-bit"],
        "overrides": {"num_tail": 1},
    },
    "halves, Lion": {
        **CLIPPED,
        "optimizer": OPTIMIZERS["Lion"],
        "overrides": {"halves": True, "num_late": 2},
    },
    "Adafactor": {"optimizer": OPTIMIZERS["Adafactor"]},
    "float16": {"precision": "float16"},
    "stochastic depth": {**CLIPPED, "depth": l2l.StochasticDepth(last=0.3)},
}


def sum_and_weight(outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """A loss of the user, for models that predict the next word."""
    labels = batch["labels"][:, 1:]
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    total = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
    return total, (labels != IGNORED).sum()


def mean_of_rows(outputs: Any, batch: Batch) -> Tensor:
    """A loss of the user that averages over rows."""
    return nn.functional.multi_margin_loss(outputs["logits"].float(), batch["labels"])


# --------------------------------------------------------------------------------------------------
# All cases


def all_cases() -> Iterator[Case]:
    yield from of_families()
    yield from of_optimizers()
    yield from of_places()
    yield from of_overrides()
    yield from of_models()
    yield from of_courses()
    yield from of_losses()
    yield from of_ranks()


def of_families() -> Iterator[Case]:
    settings: dict[str, Settings] = {
        "float32": {},
        "bfloat16, clipped, rows on the host": BASES["rows on the host, clipped, bfloat16"],
        "state on the device": {"overrides": OVERRIDES["state of one"], "microbatch_size": 3},
    }
    for family in (*FAMILIES.values(), WORDS, TIED_WORDS, DROPPING):
        for name, given in settings.items():
            yield Case(name=f"families / {family.name} / {name}", family=family, settings=given)


def of_optimizers() -> Iterator[Case]:
    for family, (name, optimizer), precision, clipped, kernel in itertools.product(
        (TIED, UNTIED, WORDS), OPTIMIZERS.items(), PRECISIONS, (False, True), ("native", "readable")
    ):
        if name == "Adafactor" and (clipped or precision == "float16" or kernel == "readable"):
            continue
        given = {"optimizer": optimizer, "precision": precision, "kernel": kernel}
        words = [family.name, name, precision, *(["clipped"] if clipped else []), kernel]
        yield Case(
            name=f"optimizers / {' / '.join(words)}",
            family=family,
            settings={**given, **(CLIPPED if clipped else {})},
        )
    for (name, optimizer), precision, where in itertools.product(
        OPTIMIZERS.items(), PRECISIONS, ("all state", "all shared, in three", "halves")
    ):
        if name != "Adafactor":
            yield Case(
                name=f"optimizers / on the device / {name} / {precision} / {where}",
                family=WORDS,
                settings={
                    "optimizer": optimizer,
                    "precision": precision,
                    "overrides": OVERRIDES[where],
                    "update": "just in time" if where == "halves" else None,
                },
            )


def of_places() -> Iterator[Case]:
    for family, update, embedding, stash, rows in itertools.product(
        (TIED, WORDS), ("eager", "just in time"), ("host", "device"), ("host", "device"), (4, 2, 1)
    ):
        given = {"update": update, "embedding": embedding, "stash": stash, "microbatch_size": rows}
        for precision in ("float32", "bfloat16"):
            number = ROWS // rows
            words = (family.name, update, f"rows {embedding}", f"stash {stash}", precision)
            yield Case(
                name=f"places / {' / '.join(words)} / {number} microbatches",
                family=family,
                settings={**given, "precision": precision},
            )


def of_overrides() -> Iterator[Case]:
    for family, (base, given), (name, overrides) in itertools.product(
        (TIED, WORDS), BASES.items(), OVERRIDES.items()
    ):
        yield Case(
            name=f"overrides / {family.name} / {base} / {name}",
            family=family,
            settings={**given, "overrides": overrides},
        )
    for family, name in itertools.product((TIED, WORDS), ON_DEVICE):
        yield Case(
            name=f"overrides / {family.name} / Adafactor / {name}",
            family=family,
            settings={**ADAFACTOR, "overrides": OVERRIDES[name]},
        )
    planned = {"microbatch_size": None, "overrides": {"microbatch_tokens": 24}}
    yield Case(name="overrides / planned rows", family=TIED, settings=planned)
    yield Case(name="overrides / all rows", family=TIED, settings={"microbatch_size": None})


def of_models() -> Iterator[Case]:
    for family, (name, begin), (plan, given) in itertools.product(
        (TIED, WORDS), BEGINNINGS.items(), PLANS.items()
    ):
        if name == "groups of torch" and "optimizer" in given:
            continue
        yield Case(
            name=f"models / {family.name} / {name} / {plan}",
            family=family,
            settings=given,
            begin=begin,
        )
    for (name, optimizer), precision in itertools.product(OPTIMIZERS.items(), PRECISIONS[:2]):
        given = {"optimizer": replace(optimizer, groups=group_of), "precision": precision}
        yield Case(name=f"models / groups / {name} / {precision}", family=TIED, settings=given)
    others: dict[str, Begin] = {
        "SGD of torch": torch_sgd,
        "from a folder": from_folder,
        "from nothing": from_nothing,
    }
    for (name, begin), precision in itertools.product(others.items(), PRECISIONS):
        given = {"precision": precision}
        yield Case(name=f"models / {name} / {precision}", family=TIED, settings=given, begin=begin)
    for name, given in REFUSED.items():
        yield Case(name=f"models / refused / {name}", family=TIED, settings=given)
    for family in (TIED, UNTIED, WORDS):
        yield Case(
            name=f"models / {family.name} / gradients recorded",
            family=family,
            begin=recording,
            course=record_gradients,
        )


def of_courses() -> Iterator[Case]:
    for family, (name, course), (plan, given) in itertools.product(
        (TIED, WORDS), COURSES.items(), PLANS.items()
    ):
        yield Case(
            name=f"courses / {family.name} / {name} / {plan}",
            family=family,
            settings=given,
            course=course,
        )
    for (name, course), plan in itertools.product(COURSES.items(), ("eager", "halves")):
        if course in (insert_copies, grow, remove_layers, load_elsewhere):
            yield Case(
                name=f"courses / gemma3 / {name} / {plan}",
                family=FAMILIES["gemma3"],  # its config has a list with an entry for every layer
                settings=PLANS[plan],
                course=course,
            )
    for family, (name, depth), (plan, given) in itertools.product(
        (TIED, WORDS), DEPTHS.items(), PLANS.items()
    ):
        yield Case(
            name=f"depth / {family.name} / {name} / {plan}",
            family=family,
            settings={**given, "depth": depth},
        )
    for kind, course, kinds in (
        ("skipped", spoil_gradients, NOT_FINITE),
        ("stopped", spoil_and_load, STOPPED),
    ):
        for name, given in kinds.items():
            yield Case(
                name=f"not finite / {kind} / {name}", family=WORDS, settings=given, course=course
            )


def of_losses() -> Iterator[Case]:
    for pieces, family in itertools.product((None, 5), (UNTIED, WORDS)):
        given = {"loss": sum_and_weight, "overrides": {"piece_tokens": pieces}}
        name = f"losses / {family.name} / a sum and its weight / pieces of {pieces}"
        yield Case(name=name, family=family, settings=given)
    for name, given in PLANS.items():
        given = {**given, "loss": mean_of_rows}
        yield Case(name=f"losses / a mean of rows / {name}", family=BERT, settings=given)
    for name, given in COMPILED.items():
        yield Case(name=f"compiled / llama_tied / {name}", family=TIED, settings=given)
    given = {"compile": BACKEND, "overrides": {"num_tail": 1}}
    yield Case(name="compiled / gpt2_dropping", family=DROPPING, settings=given)
    overrides = {"keep": 0.5, "num_kept_cells": 1, "num_cells": 3}
    given = {"compile": BACKEND, "overrides": overrides}
    yield Case(name="compiled / llama_long", family=LONG, settings=given)
    given = {"compile": "aot_eager"}
    yield Case(name="compiled / grown", family=TIED, settings=given, course=grow)


def of_ranks() -> Iterator[Case]:
    for number, family in itertools.product((1, 2), (TIED, WORDS)):
        for name, given in TOGETHER.items():
            yield Case(
                name=f"ranks / {number} / {family.name} / {name}",
                family=family,
                settings={**given, "group_size": number, "microbatch_size": 1},
                num_ranks=number,
            )
    courses = (look_between, grow, choose_layers, save_beside, load_again, export, give_no_rows)
    for course in courses:
        yield Case(
            name=f"ranks / 2 / llama_tied / {course.__name__}",
            family=TIED,
            settings={**CLIPPED, "microbatch_size": 1},
            course=course,
            num_ranks=2,
        )
    yield Case(
        name="ranks / 2 / llama_tied / copies",
        family=TIED,
        settings={**CLIPPED, "microbatch_size": 1, "group_size": 1},
        num_ranks=2,
    )


# --------------------------------------------------------------------------------------------------
# Running all of them


def be_rank(rank: int, size: int, cases: Sequence[Case], folder: Path) -> None:
    """One of several processes; leaves what it has found."""
    store, found = f"file://{folder / 'store'}", dict[str, Found]()
    dist.init_process_group("gloo", store, rank=rank, world_size=size)
    for number, case in enumerate(cases):
        found[case.name] = perform(case, folder / str(number))
        (folder / f"found-{rank}.json").write_text(json.dumps(found))
        if RAISED in found[case.name] and size > 1:
            os._exit(1)  # others may wait for this one
    dist.barrier()
    dist.destroy_process_group()


def perform_together(size: int, cases: Sequence[Case], folder: Path) -> dict[str, Found]:
    """Cases of several ranks, in processes that are forked while nothing runs here."""
    folder.mkdir()
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=be_rank, args=(n, size, cases, folder)) for n in range(size)]
    for process in ranks:
        process.start()
    end = time.monotonic() + LONGEST_SECONDS
    while any(one.is_alive() for one in ranks) and not any(one.exitcode for one in ranks):
        time.sleep(0.05)
        if time.monotonic() > end:
            break
    for process in ranks:
        process.kill()
        process.join()
    paths = [folder / f"found-{rank}.json" for rank in range(size)]
    found = [json.loads(path.read_text()) if path.exists() else {} for path in paths]
    missing = {RAISED: "not reached"}
    return {case.name: joined([one.get(case.name, missing) for one in found]) for case in cases}


def joined(found: Sequence[Found]) -> Found:
    """What several ranks have found, as one."""
    keys = dict.fromkeys(key for one in found for key in one)
    texts = {key: " ".join(one.get(key, "") for one in found) for key in keys}
    if RAISED in texts:
        return {RAISED: "; ".join(one.get(RAISED, "nothing") for one in found)}
    return {key: hashlib.sha256(text.encode()).hexdigest() for key, text in texts.items()}


def perform_all(cases: Sequence[Case], folder: Path) -> dict[str, Found]:
    """What was found in each case; says how far it is."""
    found: dict[str, Found] = {}
    for size in sorted({case.num_ranks for case in cases} - {0}):
        group = [case for case in cases if case.num_ranks == size]
        found |= perform_together(size, group, folder / f"ranks-{size}")
    alone = [case for case in cases if not case.num_ranks]
    for number, case in enumerate(alone):
        found[case.name] = perform(case, folder / str(number))
        shutil.rmtree(folder / str(number))
        if sys.stderr.isatty():
            print(f"\r{number + 1} of {len(alone)}", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print("\r", end="", file=sys.stderr)
    return {case.name: found[case.name] for case in cases}


def machine() -> dict[str, str]:
    """What the bits may depend on, besides the code."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": platform.machine(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
    }


def print_differences(found: Mapping[str, Found], expected: Mapping[str, Found]) -> int:
    """One line for each case that differs; how many there are."""
    number = 0
    for name in dict.fromkeys((*expected, *found)):
        if name not in found or name not in expected:
            print(f"{name}: {'missing now' if name in expected else 'not in the file'}")
            number += 1
            continue
        parts = [
            part for part in (*PARTS, RAISED) if found[name].get(part) != expected[name].get(part)
        ]
        if parts:
            number += 1
            print(f"{name}: {', '.join(parts)}")
            for when, one in (("before", expected[name]), ("now", found[name])):
                if RAISED in parts and RAISED in one:
                    print(f"  {when}: {one[RAISED]}")
    return number


def main() -> int:
    """Write a file, or compare with one; 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--write", type=Path, metavar="FILE", help="note what is found")
    wanted.add_argument("--compare", type=Path, metavar="FILE", help="compare with what was noted")
    wanted.add_argument("--list", action="store_true", help="names of all cases")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with this in their names")
    words = parser.parse_args()
    cases = [case for case in all_cases() if words.only in case.name]
    assert len({case.name for case in cases}) == len(cases)
    if words.list:
        print("\n".join(case.name for case in cases))
        return 0
    if words.write and not words.write.absolute().parent.is_dir():
        parser.error(f"there is no folder {words.write.absolute().parent}")
    noted = json.loads(words.compare.read_text()) if words.compare else {}
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("error", message="the native host kernel")  # else it is another one
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HOME"] = folder  # where nothing was proven before
        found = perform_all(cases, Path(folder))
    raised = sum(RAISED in one for one in found.values())
    print(f"{len(found)} cases, {raised} that raise, {time.perf_counter() - start:.0f} s")
    if words.write:
        words.write.write_text(json.dumps({"machine": machine(), "cases": found}, indent=1))
        return 0
    if noted["machine"] != machine():
        print(f"noted on another machine: {noted['machine']}, this one is {machine()}")
    expected = {name: one for name, one in noted["cases"].items() if words.only in name}
    number = print_differences(found, expected)
    print(f"{number} differ")
    return int(number > 0)


if __name__ == "__main__":
    sys.exit(main())
