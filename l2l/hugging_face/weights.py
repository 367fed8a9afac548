"""Weights for a model on the meta device: from safetensors files, or random, never all at once.

    files     the header of every file is read first: which tensors make which of the model, whether
              all are there, whether their shapes fit. Then each is read, handed to the parameter
              server and dropped. What the process holds is the server and one tensor of the model
    random    a module is made, handed over, dropped

Tensors that no file has (a new head, positions that are computed) are made as the model's own code
makes them (initialization.py). A weight that is missing for another reason is refused, unless the
caller allows it. Until everything has been checked the model is left alone; whatever
fails later, `undo` leaves it on the meta device as it was.
"""

from __future__ import annotations

import logging
import warnings
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from l2l.files import TensorReader
from l2l.hugging_face.adapters import followers
from l2l.hugging_face.folder import base_of, first_line, is_transformers, refuse_quantized
from l2l.hugging_face.initialization import Initialization
from l2l.hugging_face.recipes import (
    UNKNOWN_MAPPING,
    Read,
    Recipe,
    Tensors,
    may_be_missing,
    new_head,
    plain_recipe,
    recipes_for_loading,
    whole_model,
)
from l2l.hugging_face.weight_files import WeightFiles, joined, listed
from l2l.model import format_of, mean
from l2l.parameter_server import exchange, refuse_without_weights

logger = logging.getLogger("l2l")

READABLE = {torch.float64, torch.float32, torch.bfloat16, torch.float16}

SetWeight = Callable[[str, Tensor], None]


@dataclass(frozen=True, slots=True)
class RandomInit:
    """Weights as the model's own code initialises them; the seed says which."""

    seed: int = 0


# --------------------------------------------------------------------------------------------------
# The model


@final
class Incoming:
    """The values of a model on the meta device, checked and still to come."""

    def __init__(
        self,
        model: nn.Module,
        weights: Path | str | RandomInit,
        *,
        seed: int = 0,
        allow_missing: bool = False,
    ) -> None:
        """Find out where every value comes from; nothing is changed.

        Args:
            model: on the meta device.
            weights: a folder, a file, or random ones.
            seed: of what no file has.
            allow_missing: whether that may be more than a new head, and what has other shapes.

        Raises:
            ValueError: something is missing or does not fit, by name.
        """
        self._model = model
        self._tensors = Tensors(model)
        present = [name for name, one in self._tensors.parameters.items() if not one.is_meta]
        if present:
            number = f"{len(present)} of {len(self._tensors.parameters)} parameters"
            raise ValueError(
                f"weights= was given, but {number} already have values (first: {present[0]!r}). "
                "Build it on the meta device (l2l.hugging_face.empty_model), or leave out weights="
            )
        self._deliveries: list[tuple[Recipe, dict[str, str]]] = []
        """Recipes, and which of their results are wanted: the recipe's name -> the model's."""
        self._swapped: list[tuple[Tensor, Tensor]] = []
        known = (n for n, p in self._tensors.parameters.items() if format_of(p) is not None)
        if isinstance(weights, RandomInit):
            if (name := next(known, None)) is not None:
                raise ValueError(
                    f"weights={weights}, but {name!r} is quantized: there are no random weights in "
                    "that format. Make the model of a folder without quantization_config, and say "
                    "base='nf4'."
                )
            seed = weights.seed
        else:
            self._path = Path(weights).expanduser()
            self._find(allow_misfits=allow_missing)
        found = {owner for _, owners in self._deliveries for owner in owners.values()}
        self._missing = [
            name for name, one in self._tensors.all.items() if one.is_meta and name not in found
        ]
        if not isinstance(weights, RandomInit):
            self._report_missing(allow_missing=allow_missing)
        self._followers = followers(model)
        following = {name for one in self._followers.values() for name, _ in one}
        self._missing = [name for name in self._missing if name not in following]
        self._initialization = Initialization(model, seed=seed)

    @classmethod
    def of(cls, model: nn.Module, weights: object, **options: Any) -> Incoming | None:
        """What is still to come; None if the model has its weights.

        Raises:
            ValueError: the model has no weights, or has and is given others.
        """
        if weights is None:
            refuse_without_weights(model)
            return None
        if not isinstance(weights, Path | str | RandomInit):
            raise ValueError(
                f"weights={weights!r} is not known. Expected a folder or file with safetensors, "
                "or l2l.RandomInit(seed=0)."
            )
        return cls(model, weights, **options)

    def fill_buffers(self) -> None:
        """Give the model's buffers their values: they are small, and stay in the model.

        Raises:
            ValueError: a file cannot be read, or nothing fills a buffer that no file has.
        """

        def receive(name: str, value: Tensor) -> None:
            buffer, own = self._tensors.buffers[name], value.clone()
            torch.utils.swap_tensors(buffer, own)  # type: ignore[no-untyped-call]
            self._swapped.append((buffer, own))

        self._hand_over(self._tensors.buffers, receive)
        self._fill(self._tensors.buffers, torch.device("cpu"), receive)

    def deliver(self, set_weight: SetWeight, device: torch.device) -> None:
        """Hand over the parameters one by one.

        Args:
            set_weight: takes a parameter's name, the first one if it is tied, and its value, which
                is dropped when it returns.
            device: where values are made that are in no file.

        Raises:
            ValueError: a file cannot be read, has numbers of a kind that cannot be trained, or
                nothing fills a parameter that no file has.
        """

        def receive(name: str, value: Tensor) -> None:
            set_weight(name, value)
            for follower, make in self._followers.get(name, ()):
                set_weight(follower, make(value))

        # What no file has comes first, because it may not be possible.
        self._fill(self._tensors.parameters, device, receive)
        self._hand_over(self._tensors.parameters, receive)

    def undo(self) -> None:
        """Leave the model on the meta device, as it was."""
        for buffer, before in self._swapped:
            torch.utils.swap_tensors(buffer, before)  # type: ignore[no-untyped-call]
        self._swapped.clear()
        for parameter in self._tensors.parameters.values():
            if not parameter.is_meta:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                exchange(parameter, empty)
                mean(parameter, None)

    # ----------------------------------------------------------------------------------------------

    def _find(self, *, allow_misfits: bool) -> None:
        """Find out what the files have for the model."""
        files = self._files = WeightFiles(self._path)
        refuse_quantized(files.folder)
        self._read: Read = TensorReader(files.place_of)
        recipes, unexpected, empty = self._recipes()
        order = {name: index for index, name in enumerate(files.shapes)}
        recipes.sort(key=lambda recipe: order.get(recipe.sources[0], 0))
        self._match(recipes, empty, allow_misfits=allow_misfits)
        if unexpected:
            found = f"{self._path} has {len(unexpected)} tensors for which "
            found += f"{type(self._model).__name__} has no place, not used: {listed(unexpected)}"
            warnings.warn(found, stacklevel=5)

    def _recipes(self) -> tuple[list[Recipe], Sequence[str], Read]:
        """What the files' tensors make, which of them make nothing, and a reader of shapes."""
        files, known = self._files, self._tensors.owner
        if not is_transformers(base_of(self._model)):
            recipes = [plain_recipe(name, name) for name in files.shapes if name in known]
            return recipes, [name for name in files.shapes if name not in known], files.empty
        try:
            return *recipes_for_loading(self._model, files.shapes), files.empty
        except UNKNOWN_MAPPING as error:
            logger.warning(
                "this transformers does not say how it maps names (%s): from_pretrained loads the "
                "whole model first, which needs its memory besides the server's",
                first_line(error),
            )
        recipes, self._read = whole_model(self._model, files.folder)
        return recipes, (), lambda name: self._read(name).to("meta")

    def _match(self, recipes: Iterable[Recipe], empty: Read, *, allow_misfits: bool) -> None:
        """Say what is wanted of which recipe; of misfits nothing, if they are allowed."""
        found: dict[str, tuple[Recipe, str]] = {}
        wrong: list[str] = []
        for recipe in recipes:
            owners: dict[str, str] = {}
            for name, tensor in recipe.make(empty).items():
                owner = self._tensors.owner[name]
                expected = self._tensors.all[owner].shape
                if tensor.shape != expected:
                    wrong.append(f"{name!r} is {list(tensor.shape)}, expected {list(expected)}")
                elif owner in found:
                    self._refuse_different(owner, found[owner], (recipe, name))
                else:
                    found[owner] = recipe, name
                    owners[name] = owner
            self._deliveries.append((recipe, owners))
        if wrong and not allow_misfits:
            raise ValueError(
                f"{self._path} does not fit {type(self._model).__name__}: {joined(wrong)}. "
                "Expected the weights of a model with this configuration (config.json). For a head "
                "of other classes pass allow_missing_weights=True (l2l train: "
                "--allow-missing-weights): what does not fit then begins with random values."
            )

    def _refuse_different(
        self, owner: str, one: tuple[Recipe, str], other: tuple[Recipe, str]
    ) -> None:
        """Refuse a tied parameter that is in the files twice, with different values."""
        first, second = (recipe.make(self._read)[name] for recipe, name in (one, other))
        if not torch.equal(first, second):
            raise ValueError(
                f"{self._path} has different values for {one[1]!r} and {other[1]!r}, which are "
                f"tied in this model (as {owner!r}). Expected equal ones, or a model that does not "
                "tie them: set tie_word_embeddings to false in its configuration."
            )

    def _report_missing(self, *, allow_missing: bool) -> None:
        """Say what begins with random values.

        Raises:
            ValueError: it is more than a new head, and that is not allowed.
        """
        tensors, kind, path = self._tensors, type(self._model).__name__, self._path
        saved = [
            name for name in tensors.all if name in tensors.parameters or name in tensors.saved
        ]
        expected = [name for name in saved if not may_be_missing(self._model, name)]
        missing = set(self._missing)
        lost = [name for name in expected if name in missing]
        if not allow_missing and 2 * len(lost) > len(expected):
            raise ValueError(
                f"{path} has {len(expected) - len(lost)} of the {len(expected)} tensors of {kind}. "
                f"Missing: {listed(lost)}. Expected the weights of this model (config.json), or "
                "of one that it adds a head to."
            )
        new = new_head(self._model, expected, missing, folder=path)
        # Buffers that were not learnt are computed, so that those of a new model are right.
        learnt = ("running_mean", "running_var")
        trained = [one for one in lost if one in tensors.parameters or one.endswith(learnt)]
        damage = [name for name in trained if name not in new]
        if damage and not allow_missing:
            files = sorted({file.name for file in self._files.place_of.values()})
            raise ValueError(
                f"{path} is missing {len(damage)} tensors of {kind} that do not belong to a new "
                f"head: {listed(damage)}. The safetensors files ({joined(files)}) should contain "
                "all that config.json needs: download the folder again. To initialize randomly, "
                "pass allow_missing_weights=True (l2l train: --allow-missing-weights)."
            )
        if lost:
            found = f"{path} does not have {len(lost)} tensors of {kind}, which begin with random "
            warnings.warn(f"{found}values and must be trained: {listed(lost)}", stacklevel=5)

    def _hand_over(self, wanted: Container[str], receive: SetWeight) -> None:
        """Make what files have, and hand it over one by one."""
        for recipe, owners in self._deliveries:
            chosen = {name: owner for name, owner in owners.items() if owner in wanted}
            made = recipe.make(self._read) if chosen else {}
            for name, owner in chosen.items():
                like, value = self._tensors.all[owner], made.pop(name)
                if like.is_floating_point() and value.dtype not in READABLE:
                    place = self._files.place_of.get(recipe.sources[0], self._path)
                    raise ValueError(
                        f"{place}: {owner!r} is stored as {value.dtype}. Expected float32, "
                        "bfloat16 or float16: quantised weights cannot be trained."
                    )
                receive(owner, value.to(like.dtype))

    def _fill(self, wanted: Container[str], device: torch.device, receive: SetWeight) -> None:
        """Make what no file has, module by module."""
        modules: dict[str, list[str]] = defaultdict(list)
        for name in self._missing:
            if name in wanted:
                modules[name.rpartition(".")[0]].append(name)
        for path, names in modules.items():
            made = self._initialization.make(path, names, device)
            for name in names:
                receive(name, made.pop(name))
