"""The plain model that a PEFT model becomes when its active adapter is merged into the weights.

peft wraps modules of the model: those with adapters, those that are saved beside them. Each of them
is copied without weights, gets its present values in float32, and is merged and unwrapped by its
own code. So what is in memory at a time is what one wrapped module holds, mostly one matrix.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from l2l.hugging_face.folder import ADAPTED, base_of, first_line
from l2l.hugging_face.recipes import Tensors
from l2l.model import copy_tree


@final
class Merged:
    """A PEFT model without its adapter, and the values that its tensors have when it is merged."""

    def __init__(
        self, model: Any, weight_of: Callable[[str], Tensor], buffers: Mapping[str, Tensor]
    ) -> None:
        """Find what is wrapped; nothing is merged yet.

        Args:
            model: a `peft.PeftModel`; its own weights are not looked at.
            weight_of: gives a parameter's value by its name in that model.
            buffers: present values, by name in that model.

        Raises:
            ValueError: the adapter does not become part of weights.
        """
        if model.active_peft_config.is_prompt_learning:
            raise ValueError(
                f"the adapter is {model.active_peft_config.peft_type.value}, which is not merged "
                "into weights: it puts tokens before the first. Export it without merging."
            )
        self._weight_of, self._buffers = weight_of, buffers
        self._owners = Tensors(model).owner
        base = base_of(model)
        self._units = dict(_wrapped(base, ""))
        self._made: tuple[str, dict[str, Tensor]] = ("", {})
        self.model: Any = copy_tree(base, {})
        """The plain model; it says what there is, and has no weights of its own."""
        for path, unit in self._units.items():
            parent, _, name = path.rpartition(".")
            plain = _unwrapped(_with(unit, _empty), merge=False)
            setattr(self.model.get_submodule(parent), name, plain)
        left = (n for n, one in self.model.named_modules() if type(one).__module__[:5] == "peft.")
        if (stray := next(left, None)) is not None:
            kind = model.active_peft_config.peft_type.value
            raise ValueError(
                f"the adapter is {kind}, which peft does not merge: {stray!r} would be left over. "
                "Export it without merging."
            )
        self._untie()

    def value(self, name: str) -> Tensor:
        """A tensor of the plain model."""
        parts = name.split(".")
        paths = (".".join(parts[:number]) for number in range(len(parts)))
        path = next((one for one in paths if one in self._units), None)
        if path is None:
            return self._read(ADAPTED + name)
        if self._made[0] != path:
            self._made = ("", {})  # let go of the last one first
            self._made = (path, self._merge(path))
        return self._made[1][name[len(path) + 1 :]]

    def _merge(self, path: str) -> dict[str, Tensor]:
        def present(name: str, _: Tensor) -> Tensor:
            value = self._read(f"{ADAPTED}{path}.{name}").detach()
            single = torch.float32 if value.is_floating_point() else value.dtype
            return value.to("cpu", single, copy=True)

        unit = _with(self._units[path], present)
        try:
            with torch.no_grad():
                merged = _unwrapped(unit, merge=True)
        except Exception as error:  # whatever a kind of adapter cannot do
            raise ValueError(f"peft cannot merge {path!r}: {first_line(error)}") from error
        tensors = [*merged.named_parameters(), *merged.named_buffers()]
        return {name: tensor.detach() for name, tensor in tensors}

    def _read(self, name: str) -> Tensor:
        owner = self._owners[name]
        return self._buffers[owner] if owner in self._buffers else self._weight_of(owner)

    def _untie(self) -> None:
        """Let what an adapter has made different not be tied in the configuration any more."""
        tied: Mapping[str, str] = getattr(self.model, "all_tied_weights_keys", None) or {}
        owner = Tensors(self.model).owner
        kept = {a: b for a, b in tied.items() if owner.get(a) == owner.get(b)}
        if kept == tied:
            return
        attributes = self.model.__dict__
        attributes["all_tied_weights_keys"] = kept
        attributes["config"] = config = copy.deepcopy(self.model.config)
        for one in (config, config.get_text_config()):
            one.tie_word_embeddings = False


def _wrapped(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules that peft has put in the place of others."""
    for name, child in module.named_children():
        place = f"{path}.{name}" if path else name
        is_special = hasattr(type(child), "unload_and_optionally_merge_module")
        if is_special or hasattr(type(child), "get_base_layer"):
            yield place, child
        else:
            yield from _wrapped(child, place)


def _unwrapped(unit: Any, *, merge: bool) -> Any:
    """The module that peft has wrapped, with the adapter in its weights if it is to be merged."""
    if hasattr(type(unit), "unload_and_optionally_merge_module"):
        return unit.unload_and_optionally_merge_module(
            merge=merge, safe_merge=False, adapter_names=None
        )
    if merge:
        # Of quantized weights, which it would bring into their format again; here they are plain.
        is_wrapper = hasattr(unit, "get_apply_tensor_subclass")
        merging: Any = super(type(unit), unit) if is_wrapper else unit
        merging.merge(safe_merge=False, adapter_names=None)
    return unit.get_base_layer()


def _with(module: nn.Module, tensor_of: Callable[[str, Tensor], Tensor]) -> nn.Module:
    """A copy of a module with other tensors, each made of its name and what is there.

    It may note what is merged: lists and dicts are its own.
    """
    made = copy_tree(module, {})
    for path, child in made.named_modules():
        own = {k: copy.copy(v) for k, v in vars(child).items() if type(v) in (list, dict, set)}
        vars(child).update(own)
        registries: tuple[dict[str, Any], ...] = (child._parameters, child._buffers)
        for registry in registries:
            for local, tensor in registry.items():
                if tensor is not None:
                    value = tensor_of(f"{path}.{local}" if path else local, tensor)
                    is_parameter = registry is child._parameters
                    registry[local] = nn.Parameter(value, False) if is_parameter else value
    return made


def _empty(_: str, tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta")
