"""Damage model folders in many ways and see what `l2l train` says of each.

    python reproduce/damaged_model_folders.py

Makes two tiny models, one with its weights in several files and one in a single file, and trains
each for a step from a copy in which one thing is wrong. The command must refuse it with a message
that names the file, and without a traceback; or end as the undamaged one does, where what was
damaged is not needed. Prints a table; ends with status 1 if a damage is passed over in silence,
shows a traceback, or is refused without the file's name.
"""

import argparse
import contextlib
import io
import json
import shutil
import sys
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from l2l import cli

WORDS = ["the", "a", "layer", "weight", "runs", "waits", "goes", "comes", "over", "under"]
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
JSON_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")

ALLOWED = {  # folders without it are whole, and have another tokenizer
    ("tokenizer_config.json", "gone"),
    ("tokenizer_config.json", "an empty object"),
}

Damage = Callable[[Path], None]


@dataclass(frozen=True)
class Case:
    """One thing that is wrong with one file of a model."""

    model: str
    file: str
    name: str
    damage: Damage

    @property
    def kind(self) -> str:
        """What the table counts together."""
        return "shard" if self.file.startswith("model-") else self.file


# --------------------------------------------------------------------------------------------------
# Damages


def content(data: bytes) -> Damage:
    return lambda path: _write(path, data)


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def bytes_of(change: Callable[[bytes], bytes]) -> Damage:
    return lambda path: _write(path, change(path.read_bytes()))


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def table(change: Callable[[dict[str, Any]], Any]) -> Damage:
    """Change the object in a JSON file."""

    def damage(path: Path) -> None:
        found = json.loads(path.read_text())
        replaced = change(found)
        path.write_text(json.dumps(found if replaced is None else replaced))

    return damage


def set_to(key: str, value: Any) -> Damage:
    return table(lambda found: found.update({key: value}))


def header(change: Callable[[dict[str, Any]], Any]) -> Damage:
    """Change the header of a safetensors file."""

    def damage(path: Path) -> None:
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        found = json.loads(data[8 : 8 + length])
        change(found)
        text = json.dumps(found).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    return damage


def first_tensor(key: str, value: Any) -> Damage:
    def change(found: dict[str, Any]) -> None:
        name = sorted(name for name in found if name != "__metadata__")[0]
        found[name][key] = value

    return header(change)


def drop_first(found: dict[str, Any]) -> None:
    del found[sorted(name for name in found if name != "__metadata__")[0]]


def any_json() -> Iterator[tuple[str, Damage]]:
    yield "gone", Path.unlink
    yield "empty", content(b"")
    yield "cut in half", bytes_of(lambda data: data[: len(data) // 2])
    yield "last bytes cut", bytes_of(lambda data: data.rstrip()[:-1])
    yield "more behind", bytes_of(lambda data: data + b"}")
    yield "not UTF-8 at first", bytes_of(lambda data: b"\xff" + data)
    yield "not UTF-8 within", bytes_of(lambda data: data.replace(b'": "', b'": "\xe9', 1))
    yield "zeros", bytes_of(lambda data: bytes(len(data)))
    yield "a list", content(b"[1, 2]")
    yield "a text", content(b'"config"')
    yield "a number", content(b"7")
    yield "null", content(b"null")
    yield "an empty object", content(b"{}")
    yield "nested", content(b"[" * 100_000 + b"]" * 100_000)
    yield "an endless number", content(b'{"a": ' + b"9" * 5000 + b"}")
    yield "HTML", content(b"<!doctype html><title>404</title>")
    yield "a pointer", content(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
    yield "a folder", folder_instead


def config_damages() -> Iterator[tuple[str, Damage]]:
    wrong: dict[str, list[Any]] = {
        "hidden_size": ["16", -16, 0, None, [16], 17, 1 << 40],
        "num_hidden_layers": ["2", -1, None, 2.5, [], 3],
        "num_attention_heads": [0, 3, "two"],
        "vocab_size": [0, "many", -5, None, 4],
        "model_type": ["unheard of", 7, None, "", ["llama"]],
        "hidden_act": ["unheard of", 3],
        "intermediate_size": [0.5, "x"],
        "max_position_embeddings": ["far", -1],
        "dtype": ["floaty", 16],
        "label2id": [[1], "x", {"a": "b"}],
        "quantization_config": [{"quant_method": "gptq", "bits": 4}],
        "architectures": [7],
    }
    for key, values in wrong.items():
        for value in values:
            yield f"{key} = {json.dumps(value)}", set_to(key, value)


def tokenizer_damages() -> Iterator[tuple[str, Damage]]:
    yield "no model", table(lambda found: found.pop("model") and None)
    yield "unknown model", table(lambda found: found["model"].update(type="Unheard"))
    yield "vocabulary a list", table(lambda found: found["model"].update(vocab=["the"]))
    yield "texts as numbers", table(lambda found: found["model"].update(vocab={"the": "one"}))
    yield "negative numbers", table(lambda found: found["model"].update(vocab={"the": -1}))
    yield "no vocabulary", table(lambda found: found["model"].pop("vocab") and None)
    yield "unknown pretokenizer", set_to("pre_tokenizer", {"type": "Unheard"})
    yield "added tokens a text", set_to("added_tokens", "none")
    yield "normalizer a number", set_to("normalizer", 3)
    large = {word: 10_000 + number for number, word in enumerate(["<unk>", "<end>", *WORDS])}
    yield "tokens of another model", table(lambda found: found["model"].update(vocab=large))


def tokenizer_config_damages() -> Iterator[tuple[str, Damage]]:
    yield "eos_token = 5", set_to("eos_token", 5)
    yield "eos_token = []", set_to("eos_token", [])
    yield "model_max_length a text", set_to("model_max_length", "long")
    yield "model_max_length = -3", set_to("model_max_length", -3)
    yield "added_tokens_decoder a list", set_to("added_tokens_decoder", [1])
    yield "tokenizer_class = 3", set_to("tokenizer_class", 3)


def weight_damages() -> Iterator[tuple[str, Damage]]:
    yield "empty", content(b"")
    yield "four bytes", content(b"abcd")
    yield "zeros", bytes_of(lambda data: bytes(len(data)))
    yield "header cut", bytes_of(lambda data: data[:40])
    yield "tensors cut", bytes_of(lambda data: data[:-7])
    yield "half", bytes_of(lambda data: data[: len(data) // 2])
    yield "more behind", bytes_of(lambda data: data + b"1234")
    yield "header too long", bytes_of(lambda data: (1 << 60).to_bytes(8, "little") + data[8:])
    yield "header no JSON", bytes_of(lambda data: data[:8] + b"<" + data[9:])
    yield "HTML", content(b"<!doctype html><title>404</title>")
    yield "a pointer", content(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
    yield "a folder", folder_instead
    yield "unknown dtype", first_tensor("dtype", "F5")
    yield "integers", first_tensor("dtype", "I32")
    yield "shape", first_tensor("shape", [1, 2, 3])
    yield "negative shape", first_tensor("shape", [-1, 4])
    yield "offsets", first_tensor("data_offsets", [4, 2])
    yield "offsets behind", first_tensor("data_offsets", [1 << 40, 1 << 41])
    yield "a tensor gone", header(drop_first)
    yield "header a list", bytes_of(lambda data: (2).to_bytes(8, "little") + b"[]" + data[8:])


def index_damages() -> Iterator[tuple[str, Damage]]:
    def first(found: dict[str, Any], file: Any) -> None:
        found["weight_map"][sorted(found["weight_map"])[0]] = file

    yield "no weight_map", table(lambda found: found.pop("weight_map") and None)
    yield "weight_map a list", set_to("weight_map", ["a"])
    yield "weight_map a text", set_to("weight_map", "a")
    yield "weight_map empty", set_to("weight_map", {})
    yield "a file not there", table(lambda found: first(found, "model-9.safetensors"))
    yield "a file elsewhere", table(lambda found: first(found, "../model.safetensors"))
    yield "a number for a file", table(lambda found: first(found, 7))
    yield (
        "another file",
        table(lambda found: first(found, sorted(set(found["weight_map"].values()))[-1])),
    )
    yield (
        "a tensor not there",
        table(
            lambda found: found["weight_map"].update(ghost=sorted(found["weight_map"].values())[0])
        ),
    )


def cases() -> list[Case]:
    found = [
        Case(model, file, name, damage)
        for model in ("llama", "bert")
        for file in JSON_FILES
        for name, damage in any_json()
        if (file, name) not in ALLOWED
    ]
    found += [Case("llama", INDEX, name, damage) for name, damage in any_json()]
    found += [Case("llama", "generation_config.json", name, one) for name, one in any_json()]
    more = {
        "config.json": config_damages,
        "tokenizer.json": tokenizer_damages,
        "tokenizer_config.json": tokenizer_config_damages,
        INDEX: index_damages,
        "model-00002-of-00005.safetensors": weight_damages,
    }
    found += [Case("llama", file, *one) for file, damages in more.items() for one in damages()]
    found += [Case("bert", SINGLE, *one) for one in (*weight_damages(), ("gone", Path.unlink))]
    return found


# --------------------------------------------------------------------------------------------------
# Models, and what is said of them


def prepare(folder: Path) -> None:
    """Two models, and data for them."""
    vocabulary = {word: number for number, word in enumerate(["<unk>", "<end>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "vocab_size": len(vocabulary)}
    torch.manual_seed(0)
    made = {
        "llama": transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**sizes, max_position_embeddings=64, eos_token_id=1)
        ),
        "bert": transformers.BertModel(
            transformers.BertConfig(**sizes, max_position_embeddings=64, pad_token_id=1)
        ),
    }
    for name, model in made.items():
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            unk_token="<unk>",
            eos_token="<end>",
            pad_token="<end>",
            model_max_length=64,
        ).save_pretrained(folder / name)
        model.save_pretrained(folder / name, max_shard_size="6KB" if name == "llama" else "1GB")
    lines = [{"text": f"{one} {other}", "label": one} for one in WORDS[:2] for other in WORDS]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def train(model: Path, folder: Path, *, task: str) -> tuple[int, str, str]:
    """Exit status, what was said of errors, and the loss of the first step."""
    output = folder / "run"
    shutil.rmtree(output, ignore_errors=True)
    words = ["train", "--model", model, "--data", folder / "data.jsonl", "--task", task]
    words += ["--output", output, "--steps", 1, "--rows", 2, "--precision", "float32"]
    errors = io.StringIO()
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(errors),
        warnings.catch_warnings(action="default"),
    ):
        try:
            status = cli.main([str(word) for word in words])
        except SystemExit as left:
            status = int(left.code or 0)
        except BaseException as error:
            status, text = 1, f"Traceback: {type(error).__name__}: {error}"
            errors.write(text)
    metrics = output / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.is_file() else []
    losses = [str(json.loads(line).get("loss")) for line in lines if '"step"' in line]
    return status, errors.getvalue(), losses[0] if losses else ""


def outcome(case: Case, folder: Path, expected: dict[str, str]) -> tuple[str, str]:
    """What came of a damage, and what was said."""
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder / case.model, copy)
    case.damage(copy / case.file)
    task = "causal" if case.model == "llama" else "classification"
    status, said, loss = train(copy, folder, task=task)
    if "Traceback" in said:
        return "traceback", said
    if status == 0:
        return ("not needed" if loss == expected[case.model] else "silent"), said
    return ("named" if case.file in said else "not named"), said


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--every", type=int, default=1, help="take every so manyth damage only")
    parser.add_argument("--show", action="store_true", help="print what is said of each")
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    wrong = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        expected = {}
        for model, task in (("llama", "causal"), ("bert", "classification")):
            status, said, expected[model] = train(folder / model, folder, task=task)
            if status != 0:
                print(said)
                return 1
        for case in cases()[:: options.every]:
            found, said = outcome(case, folder, expected)
            counts[case.kind][found] += 1
            text = f"{case.model} {case.file}, {case.name}: {found}: {said.strip()[:600]}"
            if found not in ("named", "not needed"):
                wrong.append(text)
            if options.show:
                print(text.replace(name, ""), flush=True)
    columns = ("named", "not needed", "not named", "traceback", "silent")
    print("".join([f"{'file':32}{'tries':>7}", *(f"{column:>12}" for column in columns)]))
    for kind, one in [*counts.items(), ("all", sum(counts.values(), Counter()))]:
        numbers = [one.total(), *(one[column] for column in columns)]
        print("".join([f"{kind:32}{numbers[0]:>7}", *(f"{n:>12}" for n in numbers[1:])]))
    for text in wrong:
        print(text.replace("\n", "\n    "), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
