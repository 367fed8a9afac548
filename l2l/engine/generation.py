"""Generating with a model that is larger than the device: its own `generate`, layer by layer.

The model's code decodes as it always does, with its own cache, its own way to sample, and all
options that it knows. Only its layers are not there: they are stubs, and each call of one is a pass
through a layer whose weights have come a layer ahead (`l2l.run.Decoding`). All rows decode
together, so weights cross the link once a token. Layers for which there is room stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from torch import Tensor
from torch.utils import _pytree as pytree

from l2l.device import format_bytes
from l2l.engine.condition import Condition
from l2l.run import Decoding
from l2l.schedule import Lane, OuterUnit, Shape

NUM_SLOTS = 2
MAX_TOKENS = 8192  # of prompts, that pass a layer at once
WORKING_VALUES = 24  # hidden states that a layer makes of them at once, about
LOGIT_BYTES = 14  # of each word, for each row: in 16 bits, in float32, and what samplers make
LIBRARY_BYTES = 96 << 20


@final
@dataclass(frozen=True, eq=False)
class Generation:
    """Runs the model's own `generate` with layers that come and go."""

    condition: Condition

    def generate(self, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """What `model.generate` gives, on the host.

        Raises:
            ValueError: the model has no such method, or the device no room.
        """
        condition, has = self.condition, self.condition.has
        network = condition.network
        model: Any = network.partition.skeleton.module
        if not hasattr(model, "generate"):
            raise ValueError(
                f"{type(model).__name__} has no method 'generate'. Expected a model with one, as "
                "those of transformers have; for one forward pass use engine.predict."
            )
        if has.world.is_parallel:
            raise ValueError("engine.generate is for one process; found several ranks.")
        with network.running():
            condition.refuse_if_unusable()
            has.turns.take(condition)
            condition.finish_step()
            network.leave()
            device = has.device.torch_device
            args, options = pytree.tree_map_only(Tensor, lambda t: t.to(device), (args, options))
            rows, length = _size_of(args, options)
            if rows * length > MAX_TOKENS and _may_be_cut(options):
                options.setdefault("prefill_chunk_size", max(1, MAX_TOKENS // rows))
            try:
                shape = self._shape(rows, length, options)
                with self._layers_called(shape):
                    found = model.generate(*args, **options)
            except BaseException:
                has.device.abort()
                raise
            finally:
                network.leave()
            return pytree.tree_map_only(Tensor, lambda t: t.cpu(), found)

    @contextmanager
    def _layers_called(self, shape: Shape) -> Iterator[Decoding]:
        """Inside the block stubs run their layers; weights around the layers are there."""
        condition, has = self.condition, self.condition.has
        network, device = condition.network, has.device
        has.transfer.reserve(shape)
        decoding = Decoding(
            network.parts,
            slots=[f"S{index}" for index in range(min(shape.num_slots, len(shape.streamed)))],
            staying=shape.tail,
        )
        network.partition.set_training(False)
        device.begin()
        try:
            for name in (*shape.units_of(shape.tail), *(unit.name for unit in shape.outer)):
                fetch = partial(has.transfer.fetch, name, f"S{name}")
                if has.server.whole(name).blocks:  # the next one comes into the same buffer
                    device.submit(Lane.FETCH, f"fetch {name} S{name}", fetch)
                    device.record(Lane.FETCH).synchronize()
                else:
                    fetch()
            if has.server.disk is not None:
                has.server.disk.put_away()
            network.outer.bind(",".join(f"S{unit.name}" for unit in shape.outer))
            with network.partition.called_by(decoding.call):
                yield decoding
        finally:
            device.finish()
            network.outer.bind_only({})

    def _shape(self, rows: int, length: int, options: dict[str, Any]) -> Shape:
        """Which layers stay: the last ones, as many as there is room for.

        Raises:
            ValueError: there is no room for the others.
        """
        has, network = self.condition.has, self.condition.network
        sizes = {n: u.form.weight_layout.nbytes for n, u in has.server.units.items()}
        number = network.partition.num_layers
        layers = [sizes[f"L{index}"] for index in range(number)]
        around = sum(nbytes for name, nbytes in sizes.items() if not name.startswith("L"))
        outer = tuple(OuterUnit(name=name) for name in sizes if not name.startswith("L"))
        room = has.planning.room_for_tensors()
        staying: int | None = number
        if room is not None:
            others = has.turns.bytes_of_others(self.condition)
            needs = around + network.buffer_bytes() + others + LIBRARY_BYTES
            needs += self._working_bytes(rows, length, options)
            staying = _most_staying(layers, room - needs)
            if staying is None:
                least = needs + NUM_SLOTS * max(layers)
                raise ValueError(
                    f"generating for {rows} rows takes {format_bytes(least)} of the device "
                    f"(weights around the layers {format_bytes(around)}, two layers "
                    f"{format_bytes(NUM_SLOTS * max(layers))}, cache and logits the rest), found "
                    f"{format_bytes(max(0, room))} beside context and libraries. Generate for "
                    "fewer rows at a time, or give a larger device_memory."
                )
        assert staying is not None
        return Shape(
            layers=tuple(range(number)),
            num_microbatches=1,
            num_slots=max(1, min(NUM_SLOTS, number - staying)),
            num_tail=staying,
            training=False,
            outer=outer,
        )

    def _working_bytes(self, rows: int, length: int, options: dict[str, Any]) -> int:
        """About what cache, logits and a layer at work take."""
        partition = self.condition.network.partition
        config: Any = getattr(partition.skeleton.module, "config", None)
        if hasattr(config, "get_text_config"):
            config = config.get_text_config(decoder=True)

        def number(name: str, default: int) -> int:
            return _largest(config, name) or default

        width, itemsize = number("hidden_size", 1024), self.condition.has.precision.link.itemsize
        heads = number("num_attention_heads", 1)
        keys = number("num_key_value_heads", heads) * number("head_dim", width // heads)
        most = options.get("max_length") or length + (options.get("max_new_tokens") or 20)
        copies = rows * (options.get("num_beams") or 1) * (options.get("num_return_sequences") or 1)
        # A cache grows by copying: for a moment a layer's is there twice.
        cache = 2 * keys * itemsize * copies * most * (partition.num_layers + 1)
        tokens = max(copies, min(rows * length, max(rows, MAX_TOKENS)))
        logits = LOGIT_BYTES * number("vocab_size", 0) * copies
        return cache + WORKING_VALUES * width * itemsize * tokens + logits


def _may_be_cut(options: dict[str, Any]) -> bool:
    """Whether prompts may pass in chunks, as transformers does it: words, into a cache."""
    return options.get("use_cache") is not False and options.get("inputs_embeds") is None


def _largest(config: Any, name: str) -> int:
    """A number in a config, the largest where layers have their own; 0: it is not there."""
    found = list[Any]()
    for one in (config, *(getattr(config, "per_layer_config", None) or ())):
        with suppress(RuntimeError):  # as transformers refuses it where it is not one for all
            value = getattr(one, name, None)
            found += value if isinstance(value, list | tuple) else [value]
    return max((one for one in found if isinstance(one, int)), default=0)


def _size_of(args: tuple[Any, ...], options: dict[str, Any]) -> tuple[int, int]:
    """Rows and positions of the prompts."""
    given = [*args[:1], *(options.get(name) for name in ("inputs", "input_ids", "inputs_embeds"))]
    tensors = [one for one in given if isinstance(one, Tensor) and one.dim() > 1]
    if not tensors:
        others = [one for one in options.values() if isinstance(one, Tensor) and one.dim() > 1]
        return (others[0].shape[0], 1) if others else (1, 1)
    return tensors[0].shape[0], tensors[0].shape[1]


def _most_staying(layers: list[int], room: int) -> int | None:
    """How many of the last layers may stay in this room; None: not even two come and go."""
    if sum(layers) <= room:
        return len(layers)
    for staying in reversed(range(len(layers))):
        streamed = layers[: len(layers) - staying]
        slots = min(NUM_SLOTS, len(streamed)) * max(streamed)
        if slots + sum(layers[len(streamed) :]) <= room:
            return staying
    return None
