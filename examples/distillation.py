"""Distillation: a small model learns from a large one, of which nothing is trained.

    python examples/distillation.py [--plain] [--steps 200] [--teacher-steps 200]

A byte-level Llama of 6 layers, the teacher, learns the sources of Python's standard library. Then
one of 2 layers learns from the same text and from what the teacher says of every next byte: its
loss is a part of the usual one, and a part of how far its words are from the teacher's.

The teacher is in an engine of its own, frozen, at the bytes of its weights, and has the student's
device memory in turns. Of every batch it leaves its last hidden states, a vector for each position,
on the host. The student's model has a frozen copy of the teacher's head beside its own, so that it
makes the teacher's words where it makes its own: for a microbatch at a time. Logits of all words
are never kept. Without `--plain` the lines below `engine` are others than in plain PyTorch.

The last line is JSON: the held-out loss of the teacher, and of the student before and after.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Iterable
from typing import Any

import torch
from byte_text import LENGTH, divided
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import l2l

IGNORED = -100
Batch = dict[str, Tensor]


class Distilled(nn.Module):
    """A student, and the head of its teacher."""

    def __init__(self, student: Any, head: nn.Module, *, temperature: float, share: float) -> None:
        """`share` is that of the distance to the teacher's words; the rest is the usual loss."""
        super().__init__()
        self.student = student
        self.head_of_teacher = copy.deepcopy(head).requires_grad_(requires_grad=False)
        self.temperature, self.share = temperature, share

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        taught: Tensor | None = None,
        shift_labels: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """The loss; without what the teacher has `taught`, its last hidden states, the usual one.

        `shift_labels` stand where they are needed already: some positions of a row may be given.
        """
        wanted = (
            F.pad(labels[:, 1:], (0, 1), value=IGNORED) if shift_labels is None else shift_labels
        )
        logits = self.student(input_ids=input_ids).logits.float()
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED)
        if taught is None:
            return {"loss": loss}
        theirs = self.head_of_teacher(taught).float() / self.temperature
        own = (logits / self.temperature).log_softmax(-1)
        apart = F.kl_div(own, theirs.log_softmax(-1), log_target=True, reduction="none").sum(-1)
        counts = wanted != IGNORED
        distance = (apart * counts).sum() / counts.sum() * self.temperature**2
        return {"loss": (1 - self.share) * loss + self.share * distance}


def make_model(num_layers: int, width: int) -> LlamaForCausalLM:
    """A small Llama over bytes."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
        initializer_range=0.06,
    )
    return LlamaForCausalLM(config)


def teach(teacher: Any, batches: Iterable[Batch], **settings: Any) -> None:
    """Let the teacher learn; of use here only, where no trained one is at hand."""
    with l2l.Engine(teacher, optimizer=l2l.AdamW(lr=3e-3), **settings) as engine:
        for batch in batches:
            engine.step(batch)


def distil(
    student: Distilled, teacher: Any, batches: Iterable[Batch], *, plain: bool, **settings: Any
) -> list[float]:
    """Train the student; the losses. `settings` are those of its engine."""
    trained = [one for one in student.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-3, weight_decay=0.01)
    losses = []
    if plain:
        student.train()
        for batch in batches:
            with torch.no_grad():
                taught = teacher.model(input_ids=batch["input_ids"]).last_hidden_state
            loss = student(**batch, taught=taught)["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses
    teacher.requires_grad_(requires_grad=False)
    precision = settings.get("precision", "bfloat16")
    with (
        l2l.Engine(student, optimizer=optimizer, **settings) as engine,
        l2l.Engine(teacher.model, device_memory=engine, precision=precision) as knowing,
    ):
        for batch in batches:
            taught = knowing.predict({"input_ids": batch["input_ids"]}).last_hidden_state
            losses.append(engine.step({**batch, "taught": taught}).loss)
    return losses


def main() -> None:
    """Teach, distil, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plain", action="store_true", help="distil in plain PyTorch")
    parser.add_argument("--steps", type=int, default=200, help="of the student")
    parser.add_argument("--teacher-steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=8, help="of a batch")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--device-memory", default=None, help="such as 2GiB, for both models")
    options = parser.parse_args()
    torch.manual_seed(0)
    teacher: Any = make_model(6, 128)
    student = Distilled(make_model(2, 96), teacher.lm_head, temperature=2.0, share=0.5)
    settings = {"precision": options.precision, "device_memory": options.device_memory}
    stream, held_out = divided(rows=options.rows, seed=1)

    def loss_of(model: Callable[..., Any]) -> float:
        with torch.no_grad():
            return float(model(**held_out)["loss"])

    before = loss_of(student)
    teach(teacher, (next(stream) for _ in range(options.teacher_steps)), **settings)
    student.head_of_teacher.load_state_dict(teacher.lm_head.state_dict())
    batches = (next(stream) for _ in range(options.steps))
    losses = distil(student, teacher, batches, plain=options.plain, **settings)
    print(f"loss of the first step {losses[0]:.4f}, of the last {losses[-1]:.4f}")
    found = {"teacher": loss_of(teacher), "before": before, "after": loss_of(student)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
