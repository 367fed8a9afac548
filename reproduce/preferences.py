"""Train with preferences through `l2l train` and through TRL's own trainers, on the same batches.

    python reproduce/preferences.py [--tasks dpo orpo ...] [--steps 20]

Needs trl and datasets besides what the tests need. A small model begins with the same weights in
both, without dropout, in float32, with AdamW, clipping and a constant learning rate. TRL's trainer
is given the batches of ours in its own format, and computes losses, reference and updates itself;
for grpo these have what ours has drawn, its advantages, and the log-probabilities from before.
Shown is the largest difference of the losses of all steps, relative to them; the script ends with
status 1 if one is above 1e-5. Microbatches of ours have one pair, those of TRL all of them.
"""

import argparse
import importlib
import json
import random
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from test_training import Record, metrics_of, write_lines, write_settings, write_tiny

from l2l.train import Training
from l2l.train.settings import Settings

ROWS, LENGTH, RATE, TOLERANCE, NEW_TOKENS = 4, 64, 1e-2, 1e-5, 8
EPS = 1e-5  # of AdamW: so large that gradients which are mere rounding do not move weights
WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "ran",
    "moon",
    "sea",
    "hill",
    "mat",
    "one",
    "two",
    "three",
    "looked",
    "over",
    "at",
    "to",
    "see",
]
Batch = Mapping[str, Tensor]


# --------------------------------------------------------------------------------------------------
# Our batches in TRL's formats


def of_pairs(batch: Batch) -> dict[str, Tensor]:
    """All chosen rows, then all rejected ones."""
    order = torch.arange(len(batch["input_ids"])).view(-1, 2).T.reshape(-1)
    found = {name: batch[name][order] for name in ("input_ids", "attention_mask")}
    return {**found, "completion_mask": (batch["labels"][order] != -100).long()}


def apart(batch: Batch) -> dict[str, Tensor]:
    """Chosen and rejected rows under names of their own."""
    return {
        f"{role}_{name}": batch[name][at::2]
        for at, role in enumerate(("chosen", "rejected"))
        for name in ("input_ids", "attention_mask", "labels")
    }


def scored(batch: Batch) -> dict[str, Tensor]:
    """Pairs without anything to learn in them."""
    return {k: v for k, v in of_pairs(batch).items() if k != "completion_mask"}


def single(batch: Batch) -> dict[str, Tensor]:
    """Completions, and the unrelated ones beside them."""
    found: dict[str, Tensor] = {"label": batch["desirable"][0::2] > 0}
    for at, role in enumerate(("", "KL_")):
        found[f"{role}input_ids"] = batch["input_ids"][at::2]
        found[f"{role}attention_mask"] = batch["attention_mask"][at::2]
        found[f"{role}completion_mask"] = (batch["labels"][at::2] != -100).long()
    return found


def rolled_out(batch: Batch) -> dict[str, Tensor]:
    """Prompts padded on the left, completions on the right."""
    rows, learnt = range(len(batch["input_ids"])), batch["labels"] != -100
    found: dict[str, list[Tensor]] = {"prompt": [], "completion": [], "old": [], "reference": []}
    for row in rows:
        there = batch["attention_mask"][row].bool()
        found["prompt"].append(batch["input_ids"][row][there & ~learnt[row]].flip(0))
        found["completion"].append(batch["input_ids"][row][learnt[row]])
        ahead = learnt[row].roll(-1)  # where labels are predicted
        for name in ("old", "reference"):  # at first both are the same, and only one is there
            known = batch.get(name, batch["old"])
            found[name].append(known[row][ahead])
    padded = {k: torch.nn.utils.rnn.pad_sequence(v, batch_first=True) for k, v in found.items()}
    given = {"prompt_ids": padded["prompt"].flip(1), "completion_ids": padded["completion"]}
    masks = {
        name: torch.nn.utils.rnn.pad_sequence(
            [torch.ones(len(one), dtype=torch.long) for one in found[name]], batch_first=True
        )
        for name in ("prompt", "completion")
    }
    more = {"prompt_mask": masks["prompt"].flip(1), "completion_mask": masks["completion"]}
    return {
        **given,
        **more,
        "old_per_token_logps": padded["old"],
        "ref_per_token_logps": padded["reference"],
        "advantages": batch["advantage"],
        "num_items_in_batch": masks["completion"].sum(),
    }


GRPO = {"epsilon": 0.05, "epsilon_high": 0.1, "num_generations": 4, "num_iterations": 2}
TRL = {  # name -> module, class, settings of ours, settings of TRL, form of batches
    "dpo": ("trl", "DPO", {"beta": 0.3}, {"beta": 0.3}, of_pairs),
    "dpo ipo": ("trl", "DPO", {"loss": "ipo"}, {"loss_type": ["ipo"]}, of_pairs),
    "dpo hinge": ("trl", "DPO", {"loss": "hinge"}, {"loss_type": ["hinge"]}, of_pairs),
    "orpo": ("trl.experimental.orpo", "ORPO", {"odds_ratio_weight": 0.2}, {"beta": 0.2}, apart),
    "simpo": (
        "trl.experimental.cpo",
        "CPO",
        {"beta": 2.0, "gamma": 1.0},
        {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.0},
        apart,
    ),
    "kto": ("trl", "KTO", {"desirable_weight": 1.5}, {"desirable_weight": 1.5}, single),
    "reward": (
        "trl",
        "Reward",
        {"center_rewards": 0.01},
        {"center_rewards_coefficient": 0.01},
        scored,
    ),
    "grpo": ("trl", "GRPO", {}, {"loss_type": "dapo"}, rolled_out),
    "grpo dr": ("trl", "GRPO", {"loss": "dr_grpo"}, {"loss_type": "dr_grpo"}, rolled_out),
    "grpo by rows": (
        "trl",
        "GRPO",
        {"loss": "grpo", "temperature": 1.3, "beta": 0.1},
        {"loss_type": "grpo", "temperature": 1.3, "beta": 0.1},
        rolled_out,
    ),
}
REWARD = """
def digits(prompts, completions, **_):
    return [sum(one.isdigit() for one in text) / 8 for text in completions]
"""


# --------------------------------------------------------------------------------------------------
# Both runs


def write_data(folder: Path) -> None:
    """Pairs and single completions, drawn by chance."""
    drawn = random.Random(0)

    def words() -> str:
        return " " + " ".join(drawn.choices(WORDS, k=drawn.randint(2, 12)))

    pairs = [
        {"prompt": f"say {n}:{words()}", "chosen": words(), "rejected": words()} for n in range(90)
    ]
    for task in ("dpo", "orpo", "simpo", "reward", "grpo"):
        write_lines(folder / f"{task}.jsonl", pairs)
    (folder / "rewards.py").write_text(REWARD)
    single = [
        {"prompt": p["prompt"], "completion": p["chosen"], "label": n % 3 > 0}
        for n, p in enumerate(pairs)
    ]
    write_lines(folder / "kto.jsonl", single)


def write_models(folder: Path) -> None:
    """The same weights with a head for words, and with one for a score."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(folder / "model", attention_dropout=0.0)
    config.initializer_range = 0.2
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    words = transformers.AutoModelForCausalLM.from_config(config)
    config.num_labels, config.pad_token_id = 1, 1
    scores = transformers.AutoModelForSequenceClassification.from_config(config)
    for name, model in {"words": words, "scores": scores}.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def ours(name: str, folder: Path, steps: int) -> tuple[list[float], list[Batch]]:
    """Losses of `l2l train`, and its batches."""
    task = name.partition(" ")[0]
    run = folder / name.replace(" ", "-")
    run.mkdir()
    section: dict[str, Any] = {"preference": TRL[name][2]}
    if task == "grpo":
        rewards = {"rewards": [f"{folder}/rewards.py:digits"], "max_new_tokens": NEW_TOKENS}
        section = {"grpo": {**GRPO, **rewards, **TRL[name][2]}}
    path = write_settings(
        folder,
        run,
        task=task,
        model={"folder": str(model_of(name, folder)), "random_init": False},
        training={"rows": ROWS, "length": LENGTH, "steps": steps, "microbatch_size": 1},
        optimizer={"learning_rate": RATE, "weight_decay": 0.0, "eps": EPS},
        schedule={"shape": "constant", "warm_up_steps": 0},
        **section,
        checkpoint={"every_steps": 0},
        output={"export": False},
    )
    training = Training(Settings.read(path), display=Record())
    batches: list[Batch] = []
    if task == "grpo":
        make: Callable[..., Batch] = training._objective.batch

        def noted(*args: Any) -> Batch:
            batches.append(make(*args))
            return batches[-1]

        training._objective.batch = noted  # type: ignore[method-assign,assignment]
    else:
        batches += [training._prepared.batches.batch(step) for step in range(steps)]
    training.run()
    return [record["loss"] for record in metrics_of(run, "step")], batches


def theirs(name: str, folder: Path, batches: list[Batch]) -> list[float]:
    """Losses of TRL's trainer."""
    module, kind, _, settings, form = TRL[name]
    library, datasets = importlib.import_module(module), importlib.import_module("datasets")
    datasets.disable_progress_bars()
    base: Any = getattr(library, f"{kind}Trainer")

    class Trainer(base):
        def _prepare_inputs(self, inputs: Any) -> Any:
            """GRPO: what was drawn, in place of drawing."""
            if kind != "GRPO":
                return super()._prepare_inputs(inputs)
            return given[self.state.global_step]

        def get_train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(given, batch_size=None)  # as they are

    if kind == "GRPO":
        settings = {**settings, **GRPO, "max_completion_length": NEW_TOKENS}
    else:
        settings = {**settings, "max_length": LENGTH}
    given: Any = [{k: v.clone() for k, v in form(batch).items()} for batch in batches]
    task = name.partition(" ")[0]
    lines = (folder / f"{task}.jsonl").read_text().splitlines()[: 2 * ROWS]
    model_folder = model_of(name, folder)
    heads = {"words": "AutoModelForCausalLM", "scores": "AutoModelForSequenceClassification"}
    load: Callable[..., Any] = getattr(transformers, heads[model_folder.name]).from_pretrained
    more: dict[str, Any] = {"ref_model": load(model_folder).eval()} if task == "dpo" else {}
    if task == "grpo":
        more = {"reward_funcs": [lambda completions, **_: [0.0] * len(completions)]}
    trainer = Trainer(
        model=load(model_folder),
        args=getattr(library, f"{kind}Config")(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=ROWS,
            max_steps=len(batches),
            learning_rate=RATE,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            adam_epsilon=EPS,
            max_grad_norm=1.0,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
            **settings,
        ),
        train_dataset=datasets.Dataset.from_list([json.loads(line) for line in lines]),
        processing_class=transformers.AutoTokenizer.from_pretrained(model_folder, pad_token="</s>"),
        **more,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    losses: list[float] = []
    compute: Callable[..., Any] = trainer.compute_loss

    def noted(*args: Any, **more: Any) -> Any:
        found = compute(*args, **more)
        losses.append(float((found[0] if isinstance(found, tuple) else found).detach()))
        return found

    trainer.compute_loss = noted
    trainer.train()
    return losses


def model_of(name: str, folder: Path) -> Path:
    """The folder of the model that a task trains."""
    return folder / ("scores" if name == "reward" else "words")


def main() -> int:
    """Compare; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", nargs="+", choices=TRL, default=[*TRL])
    parser.add_argument("--steps", type=int, default=20)
    parsed = parser.parse_args()
    is_close = True
    with tempfile.TemporaryDirectory() as name:
        folder = write_tiny(Path(name))
        write_data(folder)
        write_models(folder)
        for task in parsed.tasks:
            own, batches = ours(task, folder, parsed.steps)
            other = theirs(task, folder, batches)
            assert len(own) == len(other) == parsed.steps
            # Losses of grpo are near 0: what advantages are made of is about 1.
            unit = 1.0 if task.startswith("grpo") else 0.0
            far = max(abs(a - b) / max(unit, abs(b)) for a, b in zip(own, other, strict=True))
            print(f"{task:<12} {own[0]:.6f} to {own[-1]:.6f}: differs by at most {far:.1e}")
            is_close = is_close and far <= TOLERANCE
    return 0 if is_close else 1


if __name__ == "__main__":
    sys.exit(main())
