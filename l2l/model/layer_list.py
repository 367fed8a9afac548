"""Finding the list of layers in a model: the one that holds most parameters, or the one named."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


class CutError(ValueError):
    """The model cannot be cut into prologue, layers and epilogue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A list of modules that may be the layers."""

    name: str
    length: int
    num_parameters: int


def find_layers(model: nn.Module, name: str | None) -> str:
    """The dotted name of the list of layers.

    Raises:
        ValueError: there is none, more than one, or the name given is not one.
    """
    candidates = [
        Candidate(
            name=path,
            length=len(module),
            num_parameters=sum(parameter.numel() for parameter in module.parameters()),
        )
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and path and len(module)
    ]
    total = sum(parameter.numel() for parameter in model.parameters())
    seen = "\n".join(
        f"    {c.name}: {c.length} modules, {c.num_parameters:,} of {total:,} parameters"
        for c in sorted(candidates, key=lambda c: -c.num_parameters)[:12]
    )
    if name is not None:
        if name in {candidate.name for candidate in candidates}:
            return name
        raise CutError(
            f"layers={name!r} is not a list of layers of {type(model).__name__}. Expected the "
            f"dotted name of an nn.ModuleList or nn.Sequential. Seen:\n{seen or '    none'}"
        )
    if not candidates:
        raise CutError(
            f"{type(model).__name__} has no list of layers: expected an nn.ModuleList or "
            f"nn.Sequential that holds most of its parameters, found none among "
            f"{[name for name, _ in model.named_children()]}. Put the layers into an "
            "nn.ModuleList, and if there are several lists name one with layers='dotted.name'."
        )
    best = max(candidates, key=lambda c: (c.num_parameters, -len(c.name)))
    others = [
        c
        for c in candidates
        if not c.name.startswith(best.name + ".")
        and not best.name.startswith(c.name + ".")
        and c is not best
        and c.num_parameters > total / 10
    ]
    if others:
        raise CutError(
            f"{type(model).__name__} has more than one list of layers; only one can be streamed. "
            f"Name it with layers='dotted.name'; the others then stay with the prologue or "
            f"epilogue, on the device. Seen:\n{seen}"
        )
    return best.name
