"""Which layers are alike: by what they hold, not by where it lies."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from l2l.model.structures import Likeness, Template


class Holder:
    """An object of a class of one's own."""

    def __init__(self, **entries: Any) -> None:
        vars(self).update(entries)


class Slotted:
    """One without a dict."""

    __slots__ = ("gain",)

    def __init__(self, gain: float) -> None:
        self.gain = gain


class Counting(list[int]):
    """A list that knows more than its entries."""


class Guarding:
    """Says itself what a copy of it is made of."""

    def __reduce__(self) -> Any:
        return Guarding, ()


def scaled(gain: float) -> Callable[[float], float]:
    return lambda value: value * gain


def layers_with(*values: Any) -> list[nn.Module]:
    made = [nn.Sequential(nn.Linear(4, 4)) for _ in values]
    for layer, value in zip(made, values, strict=True):
        layer[0].held = value
    return made


def likeness(layers: list[nn.Module]) -> Likeness:
    paths = [f"model.layers.{number}" for number in range(len(layers))]
    return Likeness(layers, paths=paths, numbers=range(len(layers)))


ALIKE = {
    "numbers": lambda: {"a": [1, 2.0, None], "b": (torch.bfloat16, torch.device("cpu"))},
    "words": lambda: {"others", "some"},
    "objects": lambda: Holder(gain=1.0, inside=Holder(words=["a"])),
    "slots": lambda: Slotted(2.0),
    "lists": lambda: Counting([1, 2]),
    "closures": lambda: scaled(2.0),
    "parts": lambda: functools.partial(scaled(2.0), value=3.0),
}


@pytest.mark.parametrize("kind", ALIKE)
def test_what_holds_the_same_is_alike(kind: str) -> None:
    first, second = likeness(layers_with(ALIKE[kind](), ALIKE[kind]())).structures
    assert first == second


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        ({"a": 1}, {"a": 2}),
        (Holder(gain=1.0), Holder(gain=2.0)),
        (Holder(inside=Holder(gain=1.0)), Holder(inside=Holder(gain=2.0))),
        (Holder(), Slotted(1.0)),
        (Slotted(1.0), Slotted(2.0)),
        (Counting([1]), Counting([2])),
        (scaled(1.0), scaled(2.0)),
        (torch.zeros(2), torch.zeros(2)),
        (threading.Lock(), threading.Lock()),
        (torch.Generator(), torch.Generator()),
        (Guarding(), Guarding()),
        (nn.Identity, nn.Dropout),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_differs_or_does_not_show_is_not(one: Any, other: Any) -> None:
    first, second, third = likeness(layers_with(one, other, one)).structures
    assert first == third
    assert first != second


def test_a_layer_may_hold_its_own_parts() -> None:
    """Methods that were replaced are bound to parts of the layer; the last one's to another's."""
    made = layers_with(0, 0, 0)
    for layer in made[:2]:
        layer.forward = functools.partial(type(layer[0]).forward, layer[0])
    made[2].forward = functools.partial(type(made[0][0]).forward, made[0][0])
    first, second, third = likeness(made).structures
    assert first == second != third


def test_what_several_layers_hold_together_is_known_by_what_it_is() -> None:
    """Whatever becomes of it: configs change when layers are added."""
    config = Holder(num_layers=2)
    before = likeness(layers_with(config, config)).structures
    config.num_layers = 3
    after = likeness(layers_with(config, config, config)).structures
    assert {*before} == {*after}
    assert len({*after}) == 1


def test_a_layer_has_its_own_name_and_number_while_the_module_of_others_runs_it() -> None:
    held = [{"name": f"layers.{number}.held", "kind": "linear"} for number in range(2)]
    layers = layers_with(*held)
    for number, layer in enumerate(layers):
        layer[0].layer_idx = number
    found = likeness(layers)
    assert found.structures[0] == found.structures[1]
    module = layers[0]
    template = Template(module, {}, found.own(1, module))
    assert {name for _, name, _ in template.own} == {"held", "layer_idx"}
    with template.tensors({}):
        assert (module[0].held, module[0].layer_idx) == (held[1], 1)
    assert (module[0].held, module[0].layer_idx) == (held[0], 0)
    assert not found.own(0, module)


def test_other_names_tell_layers_apart() -> None:
    assert len({*likeness(layers_with("layers.7.held", "layers.8.held")).structures}) == 2
    assert len({*likeness(layers_with("layers.0", "layers.01")).structures}) == 2
    named = [Holder(name=f"layers.{number}") for number in range(2)]
    assert len({*likeness(layers_with(*named)).structures}) == 2, "the first one's would be seen"
    assert len({*likeness(layers_with(*([one.name, len] for one in named))).structures}) == 2
