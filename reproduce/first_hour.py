"""A newcomer's first hour: ten tasks, in a new environment with nothing but the wheel.

    python reproduce/first_hour.py --torch 2.13.0
    python reproduce/first_hour.py --here

Builds the wheel, makes a virtual environment in `--folder` and installs the wheel there with the
extras `train`, `report` and `peft`; with `--here` tasks use the environment that runs this script.
Then does what a newcomer would, with commands as the README has them, on a small model without
weights, chats and labelled texts that are made here. Each task is checked by what it has left or
said, not only by its status. Prints a table with the seconds of each, those in which Python and
its libraries are loaded among them, and ends with status 1 if a task fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = """
import sys
from pathlib import Path
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
folder = Path(sys.argv[1])
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
letters = pre_tokenizers.ByteLevel.alphabet()
tokenizer.train_from_iterator(["good bad"], trainers.BpeTrainer(
    vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=letters))
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
fast.chat_template = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}</s>{% endgeneration %}{% else %}{{ m['content'] }} {% endif %}{% endfor %}")
fast.save_pretrained(folder)
config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, vocab_size=300, bos_token_id=0, eos_token_id=1)
LlamaForCausalLM(config).save_pretrained(folder)
"""
LOADS = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
ids = tokenizer("user: say 1 assistant: ", return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(ids, max_new_tokens=8, do_sample=False)[0]))
"""
OWN = """
import torch
from torch import nn
import l2l

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.head = nn.Linear(32, 4)
    def forward(self, inputs, labels):
        for layer in self.layers:
            inputs = inputs + torch.tanh(layer(inputs))
        return {"loss": nn.functional.cross_entropy(self.head(inputs), labels)}

torch.manual_seed(0)
inputs = torch.randn(64, 32)
batch = {"inputs": inputs, "labels": inputs[:, :4].argmax(1)}
with l2l.Engine(Own(), optimizer=l2l.AdamW(lr=1e-2), precision="float32") as engine:
    losses = [engine.step(batch).loss for _ in range(20)]
print("learnt" if losses[-1] < 0.5 * losses[0] else "not learnt")
"""


class FirstHour:
    """A folder of a newcomer, and where the commands are."""

    def __init__(self, folder: Path, binaries: Path) -> None:
        self.folder, self.binaries = folder, binaries
        self.rows: list[tuple[str, float, str]] = []  # task, seconds, what is wrong with it

    def command(self, *words: str) -> subprocess.Popen[str]:
        """Start a command of the environment in the newcomer's folder."""
        program = str(self.binaries / words[0])
        environment = {**os.environ, "HOME": str(self.folder)}  # no cache of somebody's
        environment.pop("PYTHONPATH", None)
        return subprocess.Popen(
            [program, *words[1:]],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def said(self, *words: str) -> str:
        """What a command says; it must end well."""
        process = self.command(*words)
        text = process.communicate()[0]
        if process.returncode:
            raise AssertionError(f"{' '.join(words)} ended with {process.returncode}:\n{text}")
        return text

    def task(self, name: str, work: Callable[[], bool]) -> None:
        """Do a task, and note how long it took."""
        began = time.perf_counter()
        try:
            wrong = "" if work() else "not as expected"
        except AssertionError as error:
            wrong = str(error)
        self.rows.append((name, time.perf_counter() - began, wrong))
        print(f"{name:<46}{self.rows[-1][1]:>7.1f} s  {wrong or 'done'}", flush=True)

    # -- the tasks ---------------------------------------------------------------------------------

    def fine_tune(self) -> bool:
        """A chat model."""
        text = self.said("l2l", "train", *CHATS, "--steps", STEPS, "--output", "chat")
        return "the trained model is in" in text and (self.folder / "chat" / "model").is_dir()

    def lora(self) -> bool:
        """An adapter, and the model with it merged."""
        words = ("--steps", "5", "--lora", "--learning-rate", "2e-3", "--output", "adapter")
        self.said("l2l", "train", *CHATS, *words)
        self.said("l2l", "export", "adapter", "merged", "--merge")
        adapter = self.folder / "adapter" / "model" / "adapter_config.json"
        return adapter.is_file() and (self.folder / "merged" / "config.json").is_file()

    def classify(self) -> bool:
        """Texts, with accuracy on others."""
        words = ("--evaluation-data", "labels.csv", "--task", "classification", "--steps", "30")
        words += ("--learning-rate", "3e-3", "--output", "classes")
        text = self.said("l2l", "train", "--model", "model", "--data", "labels.csv", *words)
        return "accuracy" in text

    def go_on(self) -> bool:
        """A run that was stopped by Ctrl-C: as one that was not."""
        words = (*CHATS, "--steps", STEPS, "--set", "checkpoint.every_steps=5")
        process = self.command("l2l", "train", *words, "--output", "stopped")
        metrics = self.folder / "stopped" / "metrics.jsonl"
        while process.poll() is None and not (
            metrics.exists() and '"step": 6' in metrics.read_text()
        ):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        stopped = process.communicate()[0]
        self.said("l2l", "train", "stopped")
        return "Go on with" in stopped and self._losses("stopped") == self._losses("chat")

    def _losses(self, run: str) -> list[float]:
        lines = (self.folder / run / "metrics.jsonl").read_text().splitlines()
        found = [json.loads(line) for line in lines]
        return [one["loss"] for one in found if one["kind"] == "step"]

    def evaluate(self) -> bool:
        """How good a model is, on data that are held out."""
        words = ("--set", "data.hold_out=0.2", "--set", "evaluation.every_steps=5", "--steps", "10")
        text = self.said("l2l", "train", *CHATS, *words, "--output", "evaluated")
        return text.count("evaluation after step") == 3

    def look(self) -> bool:
        """At the report, and its page."""
        found = json.loads(self.said("l2l", "report", "chat", "--json").splitlines()[-1])
        self.said("l2l", "report", "chat", "--html", "--no-plans")
        page = (self.folder / "chat" / "report.html").read_text()
        return (
            found["steps"] == int(STEPS)
            and "</html>" in page
            and Path(found["plot"]).suffix == ".svg"
        )

    def load(self) -> bool:
        """The result in transformers alone."""
        return bool(self.said("python", "-c", LOADS, "chat/model").strip())

    def plan(self) -> bool:
        """Of 14 billion parameters for a card of 24 GB, with an SSD for what 64 GB cannot hold."""
        words = ("--card", "RTX 4090", "--host-memory", "64GB", "--disk", "2TB@6.5/5GB/s", "--json")
        text = self.said("l2l", "plan", "14b.json", "--rows", "64", "--length", "1024", *words)
        found = json.loads(text.splitlines()[-1])
        return bool(found["fits"]) and found["disk_read_bytes"] > 0

    def own(self) -> bool:
        """A module of one's own, from Python."""
        return self.said("python", "-c", OWN).split()[-1] == "learnt"

    def why_slow(self) -> bool:
        """What binds a step, and what would help: in the plan, and beside the choices."""
        words = ("--device-memory", "2GiB", "--rows", "8", "--card", "RTX 3060")
        text = self.said("l2l", "plan", "3.2b", *words)
        return "bound" in text and "of its bounds:" in text

    def prepare(self) -> None:
        """A model, chats, labelled texts, and the shape of a large model."""
        self.said("python", "-c", MODEL, "model")
        with (self.folder / "chats.jsonl").open("w") as file:
            for number in range(60):
                asked = {"role": "user", "content": f"say {number}"}
                said = {"role": "assistant", "content": f"{number} it is"}
                file.write(json.dumps({"messages": [asked, said]}) + "\n")
        rows = (f"{word} {number},{word}" for number in range(40) for word in ("good", "bad"))
        (self.folder / "labels.csv").write_text("\n".join(["text,label", *rows]) + "\n")
        shape = {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40}
        shape |= {"num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128}
        shape |= {"vocab_size": 151936, "model_type": "qwen3"}
        (self.folder / "14b.json").write_text(json.dumps(shape))


STEPS = "80"
CHATS = ("--model", "model", "--data", "chats.jsonl", "--task", "instruct", "--rows", "4")
TASKS = {
    "fine-tune a chat model": FirstHour.fine_tune,
    "train an adapter, merge it": FirstHour.lora,
    "classify texts": FirstHour.classify,
    "stop a run, and go on": FirstHour.go_on,
    "evaluate on held-out data": FirstHour.evaluate,
    "look at the report and its page": FirstHour.look,
    "load the result in transformers": FirstHour.load,
    "plan 14B for 24 GB, 64 GB and an SSD": FirstHour.plan,
    "train a module of one's own": FirstHour.own,
    "find out what binds a step": FirstHour.why_slow,
}


def install(folder: Path, torch: str | None) -> Path:
    """A new environment with the wheel; where its commands are."""
    built = folder / "wheel"
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "-w",
        str(built),
        str(ROOT),
    ]
    subprocess.run(build, check=True)
    venv.create(folder / "environment", with_pip=True)
    binaries = folder / "environment" / "bin"
    (wheel,) = built.glob("*.whl")
    words = [f"l2l[train,report,peft] @ {wheel.as_uri()}"]
    words += [] if torch is None else [f"torch=={torch}"]
    subprocess.run(
        [str(binaries / "python"), "-m", "pip", "install", "--quiet", *words], check=True
    )
    return binaries


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/first_hour"))
    parser.add_argument("--torch", metavar="VERSION", help="of torch; default: what pip chooses")
    parser.add_argument("--here", action="store_true", help="install nothing")
    options = parser.parse_args()
    folder: Path = options.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    began = time.perf_counter()
    binaries = Path(sys.executable).parent if options.here else install(folder, options.torch)
    print(f"{'installing':<46}{time.perf_counter() - began:>7.1f} s", flush=True)
    hour = FirstHour(folder, binaries)
    hour.prepare()
    for name, work in TASKS.items():
        hour.task(name, lambda work=work: work(hour))
    print(f"{'all of it':<46}{time.perf_counter() - began:>7.1f} s")
    return int(any(wrong for _, _, wrong in hour.rows))


if __name__ == "__main__":
    sys.exit(main())
