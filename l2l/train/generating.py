"""What a model says: completions of prompts, for people to read, to be judged, to learn from.

What is drawn depends on a seed and on nothing else, so a run that is resumed draws the same again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

import torch
from torch import Tensor

from l2l.engine import Engine
from l2l.files import write_file
from l2l.train.data import Examples
from l2l.train.folder import RunFolder
from l2l.train.progress import Record, line_of, read_metrics
from l2l.train.settings import SampleSettings

Prompt = Sequence[int]
MATCH_ROWS = 16  # prompts that are answered together for an exact match


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn; with a temperature of 0 the likeliest is taken."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0

    def options(self, heat: float) -> dict[str, Any]:
        """The same for `generate` of transformers, of logits that have a temperature already."""
        drawn: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None}
        if self.temperature:
            heat = self.temperature / heat
            drawn = {"do_sample": True, "temperature": heat, "top_p": self.top_p}
        # what the model's own generation_config.json may say besides does not count
        plain = {"top_k": 0 if self.temperature else None, "repetition_penalty": 1.0, "min_p": None}
        return {**drawn, **plain, "max_new_tokens": self.max_new_tokens}


@final
@dataclass(frozen=True, slots=True)
class Speaker:
    """Completes prompts with a model that an engine has."""

    tokenizer: Any
    pad_id: int
    ends: frozenset[int]  # tokens after which a completion is over
    heat: float = 1.0  # temperature that the model's logits have already

    def complete(
        self,
        engine: Engine,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        seed: int,
        at_once: int | None = None,
    ) -> list[list[int]]:
        """A completion of each prompt, with the token that ends it if there is one.

        Args:
            engine: that has the model.
            prompts: their tokens.
            sampling: how tokens are drawn.
            seed: of what is drawn; random numbers of others are left alone.
            at_once: prompts that are completed together. None: all.
        """
        kind = engine.device.torch_device
        with torch.random.fork_rng([] if kind.type == "cpu" else [kind], device_type=kind.type):
            torch.manual_seed(seed)
            size, found = at_once or len(prompts), list[list[int]]()
            for first in range(0, len(prompts), size):
                found += self._together(engine, prompts[first : first + size], sampling)
            return found

    def _together(
        self, engine: Engine, prompts: Sequence[Prompt], sampling: Sampling
    ) -> list[list[int]]:
        prompts = [prompt or [self.pad_id] for prompt in prompts]
        width = max(map(len, prompts))
        ids = torch.full((len(prompts), width), self.pad_id)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        found = engine.generate(
            input_ids=ids,
            attention_mask=mask,
            pad_token_id=self.pad_id,
            eos_token_id=sorted(self.ends) or None,
            **sampling.options(self.heat),
        )
        return [self._up_to_end(row[width:].tolist()) for row in found]

    def _up_to_end(self, ids: list[int]) -> list[int]:
        end = next((index for index, one in enumerate(ids) if one in self.ends), len(ids) - 1)
        return ids[: end + 1]

    def text(self, ids: Sequence[int]) -> str:
        """Without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


def seed_of(seed: int, purpose: str, number: int) -> int:
    """A seed of its own for everything that is drawn."""
    digest = hashlib.sha256(f"{seed} {purpose} {number}".encode()).digest()
    return int.from_bytes(digest[:7], "little")


# --------------------------------------------------------------------------------------------------
# Samples


@final
class Samples:
    """Completions of a few prompts from time to time, in samples.jsonl and on the display.

    Lines are as in metrics.jsonl, and are dropped as these are when a run goes on.
    """

    def __init__(
        self, folder: RunFolder, settings: SampleSettings, speaker: Speaker, *, seed: int, step: int
    ) -> None:
        """The run goes on after a step: later lines go."""
        self._settings, self._speaker, self._seed = settings, speaker, seed
        self._file = folder.samples_file
        self._lines = [one for one in read_metrics(self._file) if step and one["step"] <= step]
        self._steps = {one["step"] for one in self._lines}

    def is_due_after(self, step: int, *, num_steps: int) -> bool:
        """Whether there should be some, and are none yet."""
        every = self._settings.every_steps
        due = step in (0, num_steps) or bool(every and step % every == 0)
        return bool(self._settings.prompts) and due and step not in self._steps

    def draw(self, engine: Engine, step: int) -> list[Record]:
        """Complete the prompts as the model is now, and write that down."""
        settings, speaker = self._settings, self._speaker
        sampling = Sampling(
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
        )
        prompts = [self._tokens(prompt) for prompt in settings.prompts]
        seed = seed_of(self._seed, "sample", step)
        found = speaker.complete(engine, prompts, sampling, seed=seed)
        drawn = [
            {"kind": "sample", "step": step, "prompt": prompt, "completion": speaker.text(ids)}
            for prompt, ids in zip(settings.prompts, found, strict=True)
        ]
        self._lines += drawn
        self._steps.add(step)
        write_file(self._file, "".join(map(line_of, self._lines)))
        return drawn

    def _tokens(self, prompt: str) -> list[int]:
        tokenizer = self._speaker.tokenizer
        if self._settings.chat:
            prompt = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
        ids: list[int] = tokenizer(prompt, add_special_tokens=not self._settings.chat)["input_ids"]
        return ids


# --------------------------------------------------------------------------------------------------
# Exact matches


def exact_match(
    engine: Engine, speaker: Speaker, examples: Examples, marker: str, *, max_new_tokens: int
) -> float:
    """The share of examples whose last answer is given exactly.

    Prompts are answered greedily. Compared is what follows the last marker, up to the end of its
    line, without space around it; or all of the answer, if it should have no marker.
    """
    asked = [_asked(examples, speaker, start, end) for start, end in pairwise(examples.offsets)]
    asked.sort(key=lambda one: len(one[0]), reverse=True)  # those of a length together
    sampling, right = Sampling(max_new_tokens=max_new_tokens), 0
    for first in range(0, len(asked), MATCH_ROWS):
        part = asked[first : first + MATCH_ROWS]
        found = speaker.complete(engine, [prompt for prompt, _ in part], sampling, seed=0)
        for (_, wanted), ids in zip(part, found, strict=True):
            sought = marker if marker in wanted else ""
            right += _answer_in(speaker.text(ids), sought) == _answer_in(wanted, sought)
    return right / len(asked)


def _asked(
    examples: Examples, speaker: Speaker, start: Tensor, end: Tensor
) -> tuple[list[int], str]:
    """What comes before the last answer of an example, and that answer."""
    assert examples.answers is not None
    ids, learnt = examples.ids[start:end], examples.answers[start:end]
    last = int(learnt.nonzero()[-1])
    before = (~learnt[:last]).nonzero()
    begin = int(before[-1]) + 1 if before.numel() else 0
    return ids[:begin].tolist(), speaker.text(ids[begin : last + 1].tolist())


def _answer_in(text: str, marker: str) -> str | None:
    """What follows the last marker, on its line; None: it is not there. All, if it is empty."""
    if not marker:
        return text.strip()
    _, found, after = text.rpartition(marker)
    return after.partition("\n")[0].strip() if found else None
