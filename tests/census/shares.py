"""How much of every class is streamed at its real size, that of its default config.

Models are made on the meta device and cut as the engine would by default; nothing runs.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from l2l.model import Partition

from .cases import ALL_KINDS, Case, cases
from .table import markdown

BEGIN, END = "<!-- shares: begin -->", "<!-- shares: end -->"
ENOUGH = 0.85


def heads(model: nn.Module) -> set[str]:
    """Names of output embeddings: matrices with a row for every word, like the tables."""
    try:
        found = model.get_output_embeddings()
    except Exception:  # has none
        return set()
    own = {id(parameter) for parameter in found.parameters()} if found is not None else set()
    return {name for name, parameter in model.named_parameters() if id(parameter) in own}


def share_of(case: Case) -> tuple[int, int, float]:
    """Lists of layers, parameters, and of those outside embeddings the share that is streamed."""
    model_class = getattr(transformers, case.name)
    config_class = model_class.config_class or CONFIG_MAPPING[case.model_type]
    with torch.device("meta"):
        model = model_class(config_class())
    partition = Partition(model, layers=None)
    tables = {*partition.tables, *heads(model)}
    streamed = {name: p for one in partition.layer_tensors for name, p in one.parameters.items()}
    around = sum(
        p.numel() for name, p in partition.outer_tensors.parameters.items() if name not in tables
    )
    own = sum(p.numel() for p in streamed.values())
    total = sum(p.numel() for p in model.parameters())
    return len(partition.lists), total, own / max(1, own + around)


def shares() -> Iterator[tuple[str, int, int, float]]:
    """Every class that has a real size, once."""
    known: set[str] = set()
    for case in (one for kind in ALL_KINDS for one in cases(kind)):
        if case.name in known:
            continue
        known.add(case.name)
        try:
            yield case.name, *share_of(case)
        except Exception as error:
            print(f"{case.name}: {type(error).__name__}: {error}"[:160], file=sys.stderr)


def table_of_shares() -> str:
    """In Markdown: how many classes stream enough, and those that do not."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    found = sorted(shares(), key=lambda one: one[3])
    several = [share for _, lists, _, share in found if lists > 1]
    lines = (
        [name, lists, f"{total / 1e9:.2f}", f"{100 * share:.1f}%"]
        for name, lists, total, share in found
        if share < ENOUGH
    )
    return (
        f"{len(found)} classes; {len(several)} of them have several lists of layers, and of these "
        f"{sum(share >= ENOUGH for share in several)} stream at least {ENOUGH:.0%} of their "
        "parameters outside embeddings. All classes that stream less:\n\n"
        + markdown(["class", "lists", "billion parameters", "streamed"], lines)
    )
