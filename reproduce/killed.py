"""Kill a training run at random instants and see that nothing is lost.

    python reproduce/killed.py --kills 50
    python reproduce/killed.py --kills 10 --ranks 2
    python reproduce/killed.py --kills 200 --disk

Trains a small model with `l2l train` once undisturbed. Then again and again, each time killed with
SIGKILL by this process, at an instant drawn evenly from the time the undisturbed run took, so also
while Python starts, while a checkpoint is loaded, and while one is written; the next start goes on
from what is there. A run that reaches its end is compared with the undisturbed one, bit by bit:
weights, moments, step counts, metrics; then a fresh one begins. There is no hook in the code that
is killed. Ends with status 1 if anything differs.

With several ranks one of them is killed each time, and torchrun starts all of them again.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, PreTrainedTokenizerFast

MAX_RESTARTS = 1000
WORDS = [
    "the",
    "a",
    "layer",
    "weight",
    "runs",
    "waits",
    "goes",
    "comes",
    "over",
    "under",
    "before",
    "after",
    "host",
    "device",
    "and",
    "or",
]
SETTINGS = """
[model]
folder = "model"
random_init = true

[data]
source = "data.txt"

[training]
steps = {steps}
rows = 4
length = 32
device = "cpu"
precision = "bfloat16"

[optimizer]
learning_rate = 1e-3

[checkpoint]
every_steps = 2

[output]
export_dtype = "float32"
tensorboard = false
"""

ON_DISK = """
[memory]
host_memory = "2400KiB"
disk = "disk"
"""


def prepare(folder: Path, *, steps: int, disk: bool = False) -> None:
    """A model's config, a tokenizer, data and settings."""
    folder.mkdir(parents=True)
    vocabulary = {word: number for number, word in enumerate(["<unk>", "<end>", *WORDS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>", pad_token="<end>"
    ).save_pretrained(folder / "model")
    LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=12 if disk else 4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(vocabulary),
        attention_dropout=0.1,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder / "model")
    words = random.Random(0)
    texts = [" ".join(words.choices(WORDS, k=words.randint(3, 20))) for _ in range(400)]
    (folder / "data.txt").write_text("\n\n".join(texts))
    (folder / "run.toml").write_text(SETTINGS.format(steps=steps) + (ON_DISK if disk else ""))


def start(folder: Path, output: Path, log: Path, *, ranks: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m"]
    if ranks > 1:
        command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [f"--max-restarts={MAX_RESTARTS}", "-m"]
    command += ["l2l", "train", str(folder / "run.toml"), "--output", str(output)]
    with log.open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file)


def kill(process: subprocess.Popen[bytes], *, ranks: int, chance: random.Random) -> bool:
    """Kill a run, or one of its ranks; whether it must be started again."""
    if ranks == 1:
        process.send_signal(signal.SIGKILL)
        process.wait()
        return True
    while process.poll() is None:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        if children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(chance.choice(children)), signal.SIGKILL)
            break
        time.sleep(0.05)  # none runs just now
    return False


def differences(output: Path, expected: Path) -> list[str]:
    """What the last checkpoint, the exported model and the metrics have otherwise."""
    found = []
    for part in (f"checkpoints/{last_step(expected)}", "model"):
        for path in sorted((expected / part).glob("*.safetensors")):
            other = output / part / path.name
            if not other.exists():
                found.append(f"{other} is missing")
            elif path.read_bytes() != other.read_bytes():
                found.append(f"{other} differs")
    if metrics(output) != metrics(expected):
        found.append(f"{output / 'metrics.jsonl'} differs")
    return found


def last_step(output: Path) -> str:
    return (output / "checkpoints" / "latest").read_text().strip()


def metrics(output: Path) -> list[dict[str, object]]:
    """Losses and gradient norms, without times."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    kept = ("step", "loss", "gradient_norm", "learning_rate")
    return [
        {key: one[key] for key in kept if key in one} for one in lines if "gradient_norm" in one
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/killed"))
    parser.add_argument("--ranks", type=int, default=1)
    words = "what host memory is given no room for lies on disk: state and weights of most layers"
    parser.add_argument("--disk", action="store_true", help=words)
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    prepare(options.folder, steps=options.steps, disk=options.disk)
    log, expected = options.folder / "log.txt", options.folder / "undisturbed"
    began = time.perf_counter()
    if start(options.folder, expected, log, ranks=options.ranks).wait() != 0:
        print(log.read_text()[-2000:])
        return 1
    seconds = time.perf_counter() - began
    print(f"undisturbed: {options.steps} steps in {seconds:.1f} s", flush=True)
    instants, num_kills, num_runs, wrong = random.Random(options.seed), 0, 0, list[str]()
    while num_kills < options.kills or num_runs == 0:
        output, num_own = options.folder / f"run-{num_runs}", 0
        process, began = start(options.folder, output, log, ranks=options.ranks), time.monotonic()
        while True:
            try:
                limit = instants.uniform(0, seconds) if num_kills < options.kills else None
                if process.wait(timeout=limit) != 0:
                    print(log.read_text()[-2000:])
                    return 1
                break
            except subprocess.TimeoutExpired:
                if kill(process, ranks=options.ranks, chance=instants):
                    process = start(options.folder, output, log, ranks=options.ranks)
                num_kills, num_own = num_kills + 1, num_own + 1
        if num_own == 0:  # too late: the undisturbed run took longer than this one
            seconds = min(seconds, time.monotonic() - began)
        found = differences(output, expected)
        wrong += found
        num_runs += 1
        verdict = "; ".join(found) or "bit by bit the same"
        print(f"run {num_runs}, killed {num_own} times: {verdict}", flush=True)
        shutil.rmtree(output)
    print(json.dumps({"kills": num_kills, "runs": num_runs, "differences": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
