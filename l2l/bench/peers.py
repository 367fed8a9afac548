"""Other systems on the workload of `l2l bench step`: each takes a model and returns its step.

A step goes over the whole batch in microbatches, clips, updates with AdamW, and returns the loss of
the batch. Every system is called the way its own documentation says, with its fastest setting that
keeps its promise; where it has two promises there are two variants. What a system does not keep of
exact training (float32 master weights, AdamW with float32 moments, no stale weights) is its
`caveat`. None of them is needed by this package: they are looked for when they are asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

LEARNING_RATE = 1e-5
Step = Callable[[], float]  # one optimizer step over the batch; the loss


class NotInstalledError(Exception):
    """A system that was asked for is not there."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What every system is given besides the model."""

    ids: Tensor  # [rows, length], on the host; inputs and labels
    microbatch_size: int  # divides the rows
    clip_norm: float | None
    device: torch.device

    @property
    def num_microbatches(self) -> int:
        """How many of them make the batch."""
        return len(self.ids) // self.microbatch_size

    def microbatches(self) -> Iterator[Tensor]:
        """The parts of the batch, on the device."""
        for ids in torch.split(self.ids, self.microbatch_size):
            yield ids.to(self.device, non_blocking=True)

    def clip(self, parameters: list[nn.Parameter]) -> None:
        """Clip the gradients, if that was asked for."""
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self.clip_norm)


@dataclass(frozen=True, slots=True)
class Peer:
    """One variant of one system."""

    make: Callable[[nn.Module, Recipe], Step]
    caveat: str = ""  # why it is not exact; empty: it is


# ---- plain PyTorch: everything on the device ----------------------------------------------------


def plain(model: Any, recipe: Recipe, *, variant: str) -> Step:
    """A loop in plain PyTorch; weights, gradients and moments stay on the device, in bfloat16."""
    model.train()
    if variant.endswith("recompute"):
        model.gradient_checkpointing_enable()
    if variant.startswith("compiled"):
        for layer in model.model.layers:
            layer.compile()  # torch.compile of the layer's forward
    return _loop(model, recipe)


def _loop(
    model: nn.Module, recipe: Recipe, *, announce_last: Callable[[bool], None] | None = None
) -> Step:
    """Forward and backward for every microbatch, then clip and update.

    `announce_last`, where given, is told before each microbatch whether it is the last.
    """
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)

    def step() -> float:
        total = torch.zeros((), device=recipe.device)
        for number, ids in enumerate(recipe.microbatches(), start=1):
            if announce_last is not None:
                announce_last(number == recipe.num_microbatches)
            loss = model(input_ids=ids, labels=ids).loss / recipe.num_microbatches
            loss.backward()
            total += loss.detach()
        recipe.clip(parameters)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(total)

    return step


# ---- FSDP2: sharded over one process, offloaded to the host -------------------------------------


def fsdp2(model: Any, recipe: Recipe) -> Step:
    """PyTorch's own fully_shard with the offload policy, float32 masters on the host."""
    from torch.distributed import init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    on_accelerator = recipe.device.type == "cuda"
    # Clipping reduces norms of gradients that lie on the host: both backends are needed.
    init_process_group("cpu:gloo,cuda:nccl" if on_accelerator else "gloo")
    model.float().train()
    model.gradient_checkpointing_enable()
    shard = partial(
        fully_shard,
        mesh=init_device_mesh(recipe.device.type, (1,)),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        offload_policy=CPUOffloadPolicy(pin_memory=on_accelerator),
    )
    for layer in model.model.layers:
        shard(layer)
    shard(model)
    for buffer in model.buffers():
        buffer.data = buffer.to(recipe.device)
    # Gradients leave the device once a step, not after every microbatch.
    return _loop(model, recipe, announce_last=model.set_requires_gradient_sync)


# ---- DeepSpeed: ZeRO with offload ---------------------------------------------------------------


def deepspeed(model: Any, recipe: Recipe, *, stage: int) -> Step:
    """ZeRO with the optimizer on the host; stage 3 has the parameters there too."""
    library = _installed("deepspeed")
    model.train()
    model.gradient_checkpointing_enable()
    host = {"device": "cpu", "pin_memory": recipe.device.type == "cuda"}
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True}
    zero["offload_optimizer"] = host
    if stage == 3:
        zero["offload_param"] = host
    engine, *_ = library.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": recipe.microbatch_size,
            "gradient_accumulation_steps": recipe.num_microbatches,
            "gradient_clipping": recipe.clip_norm or 0.0,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
            "zero_optimization": zero,
            "steps_per_print": 10**9,
        },
    )

    def step() -> float:
        total = torch.zeros((), device=recipe.device)
        for ids in recipe.microbatches():
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)  # divides by the number of microbatches
            engine.step()  # updates after the last of them
            total += loss.detach() / recipe.num_microbatches
        return float(total)

    return step


# ---- RoundPipe: all microbatches of a stage before the next -------------------------------------


def roundpipe(model: nn.Module, recipe: Recipe, *, stale: bool) -> Step:
    """RoundPipe's own preset for Llama; its default trains on weights that are one step old."""
    preset, optimizers, configuration, wrapper = (
        _installed(f"roundpipe.{name}")
        for name in ("models.llama", "optim", "run_config", "wrapper")
    )
    # Nothing is padded here. Without a mask attention takes its causal path, as in all the others;
    # the preset's own call does not fit present versions of transformers.
    preset.create_causal_mask = lambda **_: None
    wrapped = wrapper.wrap_model_to_roundpipe(
        model,
        use_sequential_preset=True,
        optim_dtype=torch.float32,
        model_run_config=configuration.RoundPipeRunConfig(num_microbatch=recipe.num_microbatches),
    )
    parameters = list(wrapped.optim_parameters())
    optimizer = optimizers.Adam(
        parameters, lr=LEARNING_RATE, weight_decay=0.01, decoupled_weight_decay=True
    )

    def update() -> None:
        recipe.clip(parameters)
        optimizer.step()
        optimizer.zero_grad()

    def step() -> float:
        loss = wrapped.forward_backward(
            input_kwargs={"input_ids": recipe.ids, "labels": recipe.ids, "return_logits": False},
            loss_fn=lambda outputs, _: outputs.loss / recipe.num_microbatches,
        )
        wrapped.step(update, is_async=stale)
        return float(loss)

    return step


def _installed(name: str) -> Any:
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        raise NotInstalledError(name)
    return importlib.import_module(name)


# -------------------------------------------------------------------------------------------------

PLAIN_VARIANTS = ("compiled", "compiled-recompute", "eager", "eager-recompute")
PEERS = {  # by system and variant
    **{
        ("plain", variant): Peer(partial(plain, variant=variant), "no float32 master")
        for variant in PLAIN_VARIANTS
    },
    ("fsdp2", "offload"): Peer(fsdp2),
    ("deepspeed", "zero-3"): Peer(partial(deepspeed, stage=3)),
    ("deepspeed", "zero-2"): Peer(partial(deepspeed, stage=2)),
    ("roundpipe", "synchronous"): Peer(partial(roundpipe, stale=False)),
    ("roundpipe", "default"): Peer(partial(roundpipe, stale=True), "weights one step stale"),
}
