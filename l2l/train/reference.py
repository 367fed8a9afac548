"""What a reference model says of the data: the model as it was before training, asked once.

It is the model that training begins with, with an adapter's modules switched off, in an engine of
its own that holds frozen weights; that is gone before training begins. Of every example it gives
the sum of the log-probabilities of the completion. They are kept in the run folder, in one file
that is whole or not there, with a key of all that they depend on: a run that is resumed reads them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor

from l2l.distributed import World
from l2l.engine import Engine
from l2l.files import TensorReader, beside, kinds_of, sync, write_tensors
from l2l.model import TokenLoss
from l2l.train.data import Examples
from l2l.train.folder import RunFolder
from l2l.train.losses import Completions
from l2l.train.measures import Measures
from l2l.train.objective import own_rows
from l2l.train.prepared import Prepared

Known = tuple[Tensor, Tensor | None]
"""Of the examples that are trained on, and of those that are held out."""
REFERENCE, SUFFIX = "reference", ".safetensors"


@final
class References:
    """Owner of what the reference model says of a run's data."""

    def __init__(self, prepared: Prepared, folder: RunFolder, world: World) -> None:
        """Nothing is read or computed yet."""
        self._prepared, self._world = prepared, world
        self._measures = Measures(world)
        self._sets = {"training": prepared.examples, "evaluation": prepared.held_out}
        self._folder = folder.root
        self._file = self._folder / f"{REFERENCE}-{self._key()}{SUFFIX}"

    def read(self) -> Known | None:
        """What is kept of it, if that is of this model and these data.

        Raises:
            TensorFileError: it cannot be read.
        """
        if not self._file.exists():
            return None
        read = TensorReader(dict.fromkeys(self._sets, self._file))
        names = kinds_of(self._file)
        return read("training"), read("evaluation") if "evaluation" in names else None

    def compute(self) -> Known:
        """Ask the model; all ranks must do so together.

        Raises:
            ValueError: it does not fit.
        """
        with self._prepared.reference_engine(TokenLoss(self._note)) as engine:
            found = {
                name: None if examples is None else self._of(engine, examples)
                for name, examples in self._sets.items()
            }
            engine.close(give_back=False)
        assert found["training"] is not None
        return found["training"], found["evaluation"]

    def write(self, known: Known) -> None:
        """Keep it, in place of what was kept of other models or data.

        Raises:
            TensorFileError: the disk does not take it.
        """
        tensors = {n: t for n, t in zip(self._sets, known, strict=True) if t is not None}
        partial = beside(self._file)
        write_tensors(partial, tensors)
        partial.replace(self._file)
        sync(self._folder)
        for other in self._folder.glob(f"{REFERENCE}-*"):
            if other != self._file:
                other.unlink()

    # ----------------------------------------------------------------------------------------------

    def _key(self) -> str:
        """A text that differs if anything does that the numbers depend on."""
        prepared, settings = self._prepared, self._prepared.settings
        model = settings.model
        files = sorted(model.folder.glob("*.safetensors"))
        weights = [(one.name, one.stat().st_size, one.stat().st_mtime_ns) for one in files]
        facts = {
            "model": prepared.identity["model"],
            "weights": [] if model.random_init else weights,
            "seed": settings.training.seed,  # of weights that no file has
            "precision": settings.training.precision,
            "data": [one and one.fingerprint() for one in self._sets.values()],
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    def _note(self, found: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, int]:
        sums = Completions.of(found, batch).sums
        self._measures.note(batch["place"], {"sum": sums})
        return sums.sum(), len(sums)

    def _of(self, engine: Engine, examples: Examples) -> Tensor:
        """The sums of all examples; those of a batch are of similar length."""
        found = torch.empty(len(examples))
        for batch, places in self._prepared.batches_of(examples).by_length():
            own = own_rows({**batch, "place": places}, self._world)
            self._measures.begin(own["place"])
            engine.evaluate(own)
            here = own["place"], self._measures.taken().of_rows("sum")
            for at, sums in self._world.gather_facts(here):
                found[at] = sums
        return found
