"""Models with several stacks, or a loss over all rows: tokens a second beside plain PyTorch.

    python benchmarks/stacks.py                         every row
    python benchmarks/stacks.py --rows t5 --small       a small version of each, to see it run

For each row, plain PyTorch in memory (bfloat16 weights and moments, no float32 masters; recomputing
layers where `--recompute` says so) and the engine (float32 masters) train the same shape on the
same random batch, clipped. Printed are tokens of the decoder, or of the language model, a second,
the device's peak and what the plan had expected. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import transformers as tf

WORDS = 32_128


@dataclass(frozen=True, slots=True)
class Row:
    """What is trained, within which budget."""

    make: Callable[[bool], Any]  # a model, small or not
    batch: Callable[[bool], dict[str, torch.Tensor]]
    budget: str
    plain_rows: int  # of a microbatch of plain PyTorch


def t5(small: bool) -> Any:  # noqa: FBT001
    """The shape of T5-3B."""
    sizes = {"d_model": 256, "d_ff": 512, "num_layers": 2, "num_heads": 4}
    if not small:
        sizes = {"d_model": 1024, "d_ff": 16_384, "num_layers": 24, "num_heads": 32}
    config = tf.T5Config(
        vocab_size=WORDS, d_kv=128, dropout_rate=0.0, decoder_start_token_id=0, **sizes
    )
    return tf.T5ForConditionalGeneration(config)


def t5_batch(small: bool) -> dict[str, torch.Tensor]:  # noqa: FBT001
    """Rows of 512 tokens, in and out."""
    rows, length = (4, 64) if small else (64, 512)
    ids = torch.randint(1, WORDS, (rows, length), generator=torch.manual_seed(1))
    labels = torch.randint(1, WORDS, (rows, length), generator=torch.manual_seed(2))
    return {"input_ids": ids, "labels": labels}


IMAGE = 32_000


def llava(small: bool) -> Any:  # noqa: FBT001
    """The shape of LLaVA 1.5 7B: CLIP-L with 336 pixels, a projector, Llama 7B."""
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
              "num_attention_heads": 2, "image_size": 56, "patch_size": 14}  # fmt: skip
    text = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip
    if not small:
        vision = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
                  "num_attention_heads": 16, "image_size": 336, "patch_size": 14}  # fmt: skip
        text = {"hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 32}  # fmt: skip
    config = tf.LlavaConfig(
        vision_config=tf.CLIPVisionConfig(projection_dim=64, **vision).to_dict(),
        text_config=tf.LlamaConfig(vocab_size=32_064, use_cache=False, **text).to_dict(),
        image_token_index=IMAGE,
        image_token_id=IMAGE,
    )
    return tf.LlavaForConditionalGeneration(config)


def llava_batch(small: bool) -> dict[str, torch.Tensor]:  # noqa: FBT001
    """An image in every row."""
    rows, length, pixels = (4, 64, 56) if small else (16, 1024, 336)
    patches = (pixels // 14) ** 2
    ids = torch.randint(3, IMAGE, (rows, length), generator=torch.manual_seed(1))
    ids[:, 4 : 4 + patches] = IMAGE
    labels = torch.where(ids == IMAGE, -100, ids)
    images = torch.randn(rows, 3, pixels, pixels, generator=torch.manual_seed(2))
    return {"input_ids": ids, "pixel_values": images.bfloat16(), "labels": labels}


def mixture(small: bool) -> Any:  # noqa: FBT001
    """5.8 billion parameters: 16 layers of 64 experts, with router losses."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8}  # fmt: skip
    if not small:
        sizes = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 16,
                 "num_attention_heads": 16, "num_key_value_heads": 4,
                 "num_experts": 64}  # fmt: skip
    config = tf.Qwen3MoeConfig(
        vocab_size=WORDS,
        intermediate_size=1024,
        head_dim=128,
        num_experts_per_tok=8,
        output_router_logits=True,
        use_cache=False,
        **sizes,
    )
    return tf.Qwen3MoeForCausalLM(config)


def mixture_batch(small: bool) -> dict[str, torch.Tensor]:  # noqa: FBT001
    """Rows of 1,024 tokens."""
    rows, length = (4, 64) if small else (32, 1024)
    ids = torch.randint(1, WORDS, (rows, length), generator=torch.manual_seed(1))
    return {"input_ids": ids, "labels": ids}


ROWS = {
    "t5": Row(t5, t5_batch, "8GiB", 8),
    "llava": Row(llava, llava_batch, "8GiB", 2),
    "mixture": Row(mixture, mixture_batch, "12GiB", 4),
}


def made(row: Row, small: bool) -> Any:  # noqa: FBT001
    """A model with random weights in bfloat16, made on the device."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = row.make(small)
    torch.set_default_dtype(torch.float32)
    return model.train()


def spread(marks: list[float], tokens: int) -> dict[str, Any]:
    """What a list of times says."""
    seconds = [later - earlier for earlier, later in pairwise(marks)]
    middle = statistics.median(seconds)
    return {
        "step_s": round(middle, 3),
        "tokens_per_s": round(tokens / middle),
        "spread_s": [round(min(seconds), 3), round(max(seconds), 3)],
    }


def plain(row: Row, small: bool, steps: int, recompute: bool) -> dict[str, Any]:  # noqa: FBT001
    """Plain PyTorch, with accumulation over microbatches."""
    model = made(row, small)
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    batch = {name: one.cuda() for name, one in row.batch(small).items()}
    rows = len(batch["labels"])
    torch.cuda.reset_peak_memory_stats()
    marks, losses = [], []
    for _ in range(2 + steps):
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for start in range(0, rows, row.plain_rows):
            part = {name: one[start : start + row.plain_rows] for name, one in batch.items()}
            loss = model(**part).loss * (len(part["labels"]) / rows)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(total))
        marks.append(time.perf_counter())
    found = spread(marks[1:], batch["labels"].numel())
    return found | {
        "peak_GiB": round(torch.cuda.max_memory_reserved() / 2**30, 2),
        "losses": [losses[0], losses[-1]],
    }


def ours(row: Row, small: bool, steps: int, **settings: Any) -> dict[str, Any]:  # noqa: FBT001
    """The engine, within its budget."""
    import l2l

    model = made(row, small).to("cpu")
    torch.cuda.empty_cache()
    batch = row.batch(small)
    torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    logging.basicConfig(level=logging.INFO)
    with l2l.Engine(
        model,
        optimizer=l2l.AdamW(lr=1e-5),
        device_memory=row.budget,
        clip_norm=1.0,
        **settings,
    ) as engine:
        losses = [engine.step(batch).loss]
        first = time.perf_counter() - begin
        losses.append(engine.step(batch).loss)
        marks = [time.perf_counter()]
        for _ in range(steps):
            losses.append(engine.step(batch).loss)
            marks.append(time.perf_counter())
        plan = engine.plan
        print(plan, flush=True)
        return spread(marks, batch["labels"].numel()) | {
            "first_s": round(first, 1),
            "expected_s": round(plan.predicted_seconds or 0.0, 3),
            "peak_GiB": round(torch.cuda.max_memory_reserved() / 2**30, 2),
            "losses": [losses[0], losses[-1]],
            "streamed": round(engine.streamed_share, 3),
        }


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--recompute", nargs="*", choices=ROWS, default=[])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", choices=("plain", "ours"))
    given = parser.parse_args()
    results = []
    for name in given.rows:
        row, runs = ROWS[name], {}
        if given.only != "ours":
            runs["plain"] = lambda row=row, name=name: plain(
                row, given.small, given.steps, name in given.recompute
            )
        if given.only != "plain":
            runs["ours"] = lambda row=row: ours(row, given.small, given.steps)
            runs["ours, unproven"] = lambda row=row: ours(
                row, given.small, given.steps, prove=False
            )
        for kind, run in runs.items():
            if kind == "ours, unproven" and "ProofError" not in results[-1].get("error", ""):
                continue
            try:
                found = run()
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"[:1500]}
            results.append({"row": name, "system": kind, **found})
            print(json.dumps(results[-1]), flush=True)
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(1.0)
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
