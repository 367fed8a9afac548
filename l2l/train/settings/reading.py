"""From a TOML file and flags to settings, and back.

What one setting implies for another (the rows that a model is made for, the run folder) is filled
in when settings are read, so that a run's `run.toml`, written with `Settings.to_toml`, has all that
is in force. Everything that can be known to be wrong without loading anything is refused here, with
where it was set.
"""

from __future__ import annotations

import itertools
import json
import textwrap
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import PrivateAttr, ValidationError
from pydantic.config import ExtraValues
from pydantic_core import ErrorDetails

from l2l.device import num_devices
from l2l.hugging_face import read_json
from l2l.train.data import DataError, Form, did_you_mean, read_records
from l2l.train.settings import sections
from l2l.train.settings.sections import (
    CHATS,
    LANGUAGE_TASKS,
    LEARNING_RATES,
    OF_TOKENS,
    PREFERENCES,
    Section,
    taken_by,
)
from l2l.train.settings.words import answer

Table = Mapping[str, Mapping[str, Any]]  # section -> key -> value, as JSON has it
Where = Callable[[str, str], str]  # section, key -> where it was set, for people
WARM_UP_SHARE = 0.03
LENGTH = 1024
RUN_FILE = "run.toml"  # in a run's folder
SAME_RUN = {"training": ("steps", "epochs")}  # a run goes on though they have changed
RUNS = "runs"  # where run folders are if no output folder is named
HELP_WIDTH = 86
EXCLUSIVE = {  # section -> two settings, of which each says the same in its own way
    "data": ("evaluation_source", "hold_out"),
    "training": ("steps", "epochs"),
    "schedule": ("warm_up_steps", "warm_up_share"),
}
SOURCES = ("source", "evaluation_source")
REQUIRED_FLAGS = {"model": "--model FOLDER", "data": "--data FILE"}
MADE_FOR = ("max_position_embeddings", "n_positions", "model_max_length")  # tokens


class SettingsError(ValueError):
    """Settings that cannot be used; the message says where each was set and what is expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A setting from the command line; it overrides the file."""

    word: str  # --rows
    section: str
    key: str
    value: Any

    @classmethod
    def of_text(cls, text: str) -> Self:
        """What follows `--set`: section.key=value, the value as in a TOML file, or a text.

        Raises:
            SettingsError: it is something else, or there is no such setting.
        """
        name, _, value = text.partition("=")
        section, _, key = name.strip().partition(".")
        if key not in SECTIONS.get(section, ()):
            home = next((one for one, keys in SECTIONS.items() if section in keys), None)
            near = f" Did you mean {home}.{section}?" if home and not key else ""
            near = near or answer(key or section, lambda *place: ".".join(place))
            keys = SECTIONS.get(section)
            near = near or (did_you_mean(key, keys) if keys else did_you_mean(section, SECTIONS))
            raise SettingsError(
                f"--set {text}: there is no setting {name}.{near} Expected section.key=value, such "
                "as schedule.warm_up_steps=100; --help-settings lists all."
            )
        try:
            found = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            found = value
        return cls(word=f"--set {name}", section=section, key=key, value=found)


class Settings(Section):
    """All settings of a run."""

    model: sections.ModelSettings
    data: sections.DataSettings
    columns: sections.ColumnSettings
    training: sections.TrainingSettings
    lora: sections.LoraSettings
    preference: sections.PreferenceSettings
    grpo: sections.GrpoSettings
    optimizer: sections.OptimizerSettings
    schedule: sections.ScheduleSettings
    memory: sections.MemorySettings
    evaluation: sections.EvaluationSettings
    samples: sections.SampleSettings
    checkpoint: sections.CheckpointSettings
    output: sections.OutputSettings
    _passed_over: list[tuple[Path, list[str]]] = PrivateAttr(default_factory=list)

    @classmethod
    def read(cls, path: Path | None, *, flags: Sequence[Flag] = ()) -> Self:
        """The settings of a TOML file, of flags, or of flags over a file.

        Raises:
            SettingsError: one of them cannot be used, or something that they name is not there.
        """
        origin, table = _Origin(f"{path}: " if path else "", flags), _table(path, flags)
        is_named = "folder" in table["output"] if isinstance(table["output"], dict) else True
        found = cls._made(_with_folder(table, path), origin)
        if not is_named:
            found = found._beside_others()
        problems = [*found._contradictions(origin.where), *found._not_there(origin.where)]
        if problems:
            raise SettingsError("\n".join(problems))
        return found

    def _beside_others(self) -> Self:
        """The same, in a folder of its own if the usual one has a run of other settings."""
        usual, passed_over = self.output.folder, list[tuple[Path, list[str]]]()
        names = (usual.with_name(f"{usual.name}-{number}") for number in itertools.count(2))
        for folder in itertools.chain([usual], names):
            others = self._others(folder / RUN_FILE)
            if not others:
                output = self.output.model_copy(update={"folder": folder})
                found = self.model_copy(update={"output": output})
                found._passed_over = passed_over
                return found
            passed_over.append((folder, others))
        raise AssertionError

    def _others(self, file: Path) -> list[str]:
        """What the settings in a run's file say otherwise; none if there is no such file."""
        try:
            earlier = tomllib.loads(file.read_text())
        except (OSError, ValueError):
            return []
        own = self.table()
        places = {(one, other) for one, others in SAME_RUN.items() for other in others}
        pairs = [pair for pair in self._differing(earlier) if pair not in places]
        if self.data.packing is None:
            pairs = [pair for pair in pairs if pair != ("data", "packing")]
        pairs += [
            (section, key)
            for section, key in (("model", "folder"), ("data", "source"))
            if earlier.get(section, {}).get(key) != own[section][key]
        ]
        return [self._told(earlier, *pair) for pair in pairs]

    @property
    def passed_over(self) -> Sequence[tuple[Path, list[str]]]:
        """Folders that the run would usually have, with what their runs set otherwise."""
        return tuple(self._passed_over)

    @classmethod
    def of_table(cls, table: Table) -> Self:
        """The settings of a `table` that was checked when it was made; the disk is not looked at.

        Raises:
            SettingsError: a value cannot be used.
        """
        known = {section: table.get(section, {}) for section in SECTIONS}
        return cls._made(known, _Origin(), extra="ignore")

    @classmethod
    def _made(cls, table: Table, origin: _Origin, *, extra: ExtraValues | None = None) -> Self:
        try:
            return cls.model_validate(table, extra=extra)
        except ValidationError as error:
            lines: dict[tuple[int | str, ...], str] = {}  # one for each setting
            for one in error.errors():
                lines.setdefault(one["loc"][:2], origin.told(one, table))
            raise SettingsError("\n".join(lines.values())) from error

    def to_toml(self) -> str:
        """The settings in force; read from the run folder, they are these again."""
        parts = ["# The settings of this run. To go on with it: l2l train RUN_FOLDER"]
        for section, values in self.table().items():
            kept = {**values, "folder": "."} if section == "output" else values
            parts += ["", f"[{section}]"]
            parts += [f"{key} = {to_toml(value)}" for key, value in kept.items()]
        return "\n".join([*parts, ""])

    def table(self) -> dict[str, dict[str, Any]]:
        """Section -> key -> value, for JSON; what is not set, or in force, is left out."""
        found = self.model_dump(mode="json", exclude_none=True)
        in_force = {
            "lora": self.lora.enabled,
            "preference": self.data.task in PREFERENCES,
            "grpo": self.data.task == "grpo",
            "samples": bool(self.samples.prompts),
        }
        return {name: values for name, values in found.items() if in_force.get(name, True)}

    def form(self) -> Form:
        """What is made of the data's records.

        Raises:
            ValueError: columns are not for the task.
        """
        task, columns = self.data.task, self.columns.model_dump(exclude_none=True)
        most = None if task == "causal" else self.training.length  # documents are cut into rows
        if task == "grpo":
            most = self.training.length - self.grpo.max_new_tokens
        return Form(task=task, columns=columns, max_length=most)

    def differences(self, earlier: Table) -> list[str]:
        """What changes the result between the `table` of earlier settings and these, by line."""
        return [f"{self._told(earlier, *pair)} from here" for pair in self._differing(earlier)]

    def _differing(self, earlier: Table) -> list[tuple[str, str]]:
        """Section and key of what changes the result; what is not there has its default."""
        decides = self.checkpoint.best or self.evaluation.patience is not None
        return [
            (section, name)
            for section, values in self.table().items()
            for name, key in SECTIONS[section].items()
            if ("same_result" not in key or (decides and section == "evaluation"))
            and earlier.get(section, {}).get(name, key["default"]) != values.get(name)
        ]

    def _told(self, earlier: Table, section: str, name: str) -> str:
        values = (table.get(section, {}).get(name) for table in (earlier, self.table()))
        before, now = ("not set" if one is None else to_toml(one) for one in values)
        return f"[{section}] {name} was {before} and is {now}"

    def _contradictions(self, where: Where) -> Iterator[str]:
        """What only shows when settings are seen together."""
        data, training, optimizer = self.data, self.training, self.optimizer
        for section, (one, other) in EXCLUSIVE.items():
            values = getattr(self, section)
            if None not in (getattr(values, one), getattr(values, other)):
                yield f"{where(section, one)} and {other} are both set. Set only one of them."
        if data.packing and data.task not in LANGUAGE_TASKS:
            what = "rows of its own" if data.task == "masked" else "one label per row"
            yield f"{where('data', 'packing')}: {data.task} has {what}. Set it to false."
        if data.template is not None and data.task not in CHATS:
            yield f"{where('data', 'template')} is set, but {data.task} has no chats to use it for."
        yield from self._not_taken(where)
        asked = [("evaluation", key) for key, value in self.evaluation if value is not None]
        asked = asked[:1] + [("checkpoint", "best")] * self.checkpoint.best
        for place in asked if data.evaluation_source is None and data.hold_out is None else ():
            yield (
                f"{where(*place)} is set, but there is nothing to evaluate on. "
                "Expected [data] evaluation_source (--evaluation-data FILE) or hold_out too."
            )
        if self.evaluation.answer_marker is not None and data.task != "instruct":
            yield f"{where('evaluation', 'answer_marker')} is for instruct, not {data.task}."
        if optimizer.name == "adafactor" and training.clip_norm:
            yield f"{where('training', 'clip_norm')}: adafactor updates layer by layer. Expected 0."
        if optimizer.name == "adafactor" and training.precision == "float16":
            yield f"{where('training', 'precision')}: adafactor takes bfloat16 or float32 only."
        rises = self.schedule.warm_up_steps or self.schedule.warm_up_share
        if optimizer.name == "schedule-free" and (self.schedule.shape != "constant" or rises):
            yield (
                f"{where('schedule', 'shape')}: schedule-free takes no schedule. Expected constant "
                "and no warm-up; its own is [optimizer] warmup_steps."
            )
        checks = {("optimizer", "name"): optimizer.make, ("data", "task"): self.form}
        for place, check in checks.items():
            try:
                check()
            except ValueError as error:
                yield f"{where(*place)}: {str(error).removesuffix('.')}."

    def _not_taken(self, where: Where) -> Iterator[str]:
        """What is set of the loss of preferences, but is not for it."""
        taken = PREFERENCES.get(self.data.task, {})
        for key, value in self.preference:
            if value is not None and key not in taken:
                which = f"{self.data.task} takes {', '.join(taken) or 'nothing of [preference]'}"
                yield f"{where('preference', key)} is set, but {which}."
        if self.preference.label_smoothing and self.preference.loss not in ("sigmoid", None):
            yield f'{where("preference", "label_smoothing")} is only for loss = "sigmoid".'
        if self.data.task == "grpo":
            yield from self._not_rewarding(where)
        for key in self.grpo.model_fields_set if self.data.task != "grpo" else ():
            yield f"{where('grpo', key)} is set, but the task is {self.data.task}."
        if self.optimizer.name == "adafactor" and self.data.task in OF_TOKENS:
            yield (
                f"{where('optimizer', 'name')} = adafactor, but the head comes in slices for "
                f"{self.data.task}, and adafactor needs whole gradients. Expected another one."
            )

    def _not_rewarding(self, where: Where) -> Iterator[str]:
        """What is missing for learning from rewards."""
        grpo, length = self.grpo, self.training.length
        if not grpo.rewards:
            yield f"{where('grpo', 'rewards')} is not set. Expected --reward FILE.py:FUNCTION."
        if grpo.reward_weights is not None and len(grpo.reward_weights) != len(grpo.rewards):
            yield (
                f"{where('grpo', 'reward_weights')}: found {len(grpo.reward_weights)} weights, "
                f"expected {len(grpo.rewards)}, one for each reward."
            )
        if grpo.max_new_tokens >= length:
            yield (
                f"{where('grpo', 'max_new_tokens')} = {grpo.max_new_tokens} leaves no room for "
                f"prompts in [training] length = {length}. Expected less."
            )

    def _not_there(self, where: Where) -> Iterator[str]:
        """What settings name, but the disk does not have, or not as it should be."""
        model, output = self.model.folder, self.output.folder
        place = f"{where('model', 'folder')} = {to_toml(model)}"
        if not model.is_dir():
            yield (
                f"{place}: there is no such folder. Nothing is downloaded: to have a model of the "
                "Hugging Face Hub here, say 'hf download NAME --local-dir FOLDER'."
            )
        elif not (model / "config.json").is_file():
            yield f"{place} has no config.json. Expected a Hugging Face folder."
        elif not self.model.random_init and not any(model.glob("*.safetensors")):
            yield (
                f"{place} has no weights. Expected model.safetensors in it, or several such files "
                "and their index, or random_init (--random-init), to begin with random weights."
            )
        for key in SOURCES:
            try:
                read_records(getattr(self.data, key) or self.data.source)
            except DataError as error:
                yield f"{where('data', key)}: {error}"
                break
        place = f"{where('output', 'folder')} = {to_toml(output)}"
        if output.exists() and not output.is_dir():
            yield f"{place} is a file. Expected a folder, or a path where nothing is yet."
        if model.resolve().is_relative_to(output.resolve()):
            yield f"{place} is, or holds, the folder of the model. Expected another one."


# --------------------------------------------------------------------------------------------------
# What is known of each setting


def _schemas(section: Any) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = section.model_json_schema()["properties"]
    for schema in found.values():
        schema |= schema.get("anyOf", [{}])[0]  # what it is if it is set
        schema["description"] = words = " ".join(schema["description"].split())
        default = schema.setdefault("default")
        is_said = default is None or default is False or "Default:" in words
        schema["help"] = words if is_said else f"{words} Default: {default}."
    return found


# Section -> key -> its JSON schema: type, description, default (None: it has none, or follows from
# others), perhaps enum and same_result; and a description with the default, help.
SECTIONS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    name: _schemas(field.annotation) for name, field in Settings.model_fields.items()
}


def help_text() -> str:
    """All settings with their defaults, as a TOML file in which all is commented out."""
    lines: list[str] = []
    for section, keys in SECTIONS.items():
        lines.append(f"[{section}]  # {Settings.model_fields[section].annotation.__doc__}")
        for name, key in keys.items():
            words, default = key["description"], key["default"]
            words += f" One of {', '.join(key['enum'])}." if "enum" in key else ""
            lines.append(f"# {name} = {'...' if default is None else to_toml(default)}")
            lines.append(textwrap.indent(textwrap.fill(words, HELP_WIDTH), "#     "))
        lines.append("")
    return "\n".join(lines)


def to_toml(value: Any) -> str:
    """A value as a TOML file has it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {to_toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(to_toml, value))}]"
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")


# --------------------------------------------------------------------------------------------------
# Where settings come from


@dataclass(frozen=True, slots=True)
class _Origin:
    """Knows what was set by a flag, and what in a file."""

    file: str = ""  # how an error about something in it begins
    flags: Sequence[Flag] = ()

    def where(self, section: str, key: str) -> str:
        """Where a setting was set, for an error about it."""
        words = (flag.word for flag in self.flags if (flag.section, flag.key) == (section, key))
        return next(words, f"{self.file}[{section}] {key}")

    def told(self, error: ErrorDetails, table: Mapping[str, Any]) -> str:
        """What pydantic has found, for people: where, what, what is expected."""
        section, *rest = map(str, error["loc"])
        keys: Mapping[str, Any] = SECTIONS[section] if rest else SECTIONS
        key = rest[0] if rest else section
        if key not in keys:
            home = next((name for name, known in SECTIONS.items() if key in known), None)
            near = f" Did you mean {key} in [{home}]?" if home else did_you_mean(key, keys)
            near = answer(key, lambda place, name: f"{name} in [{place}]") or near
            what = f"[{section}] has no setting {key}" if rest else f"{key} is no section"
            return f"{self.file}{what}.{near} Expected one of {', '.join(keys)}."
        if not rest:
            return f"{self.file}{key} is a section. Expected a line [{key}], and settings below it."
        words = keys[key]["description"]
        if key not in table[section]:
            flag = REQUIRED_FLAGS.get(section, "it")
            return f"[{section}] {key} is not set. Expected {flag}, or it in a TOML file. {words}"
        value = table[section][key]
        why = error["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
        near = did_you_mean(str(value), keys[key].get("enum", ()))
        begin = f"{self.where(section, key)} = {to_toml(value)}: {why.removesuffix('.')}"
        return f"{begin}.{near} {key}: {words}"


def _table(path: Path | None, flags: Sequence[Flag]) -> dict[str, Any]:
    """What a file and flags say, and what follows from it, not yet checked; paths are absolute.

    Raises:
        SettingsError: the file cannot be read.
    """
    here = Path.cwd()
    folder = path.absolute().parent if path else here
    table = {section: {} for section in SECTIONS} | (_load(path) if path else {})
    # what should be a section and is none is left as it is, and refused when it is checked
    found = defaultdict(dict, {k: v for k, v in table.items() if isinstance(v, dict)})
    for values in found.values():
        values.update({key: _located(key, value, folder) for key, value in values.items()})
    for flag in flags:  # each replaces what is in the file, and what excludes it
        pair = EXCLUSIVE.get(flag.section, ())
        for key in pair if flag.key in pair else ():
            found[flag.section].pop(key, None)
    for flag in flags:
        found[flag.section][flag.key] = _located(flag.key, _parsed(flag), here)
    _fill(found)
    return table


def _with_folder(table: dict[str, Any], path: Path | None) -> dict[str, Any]:
    """The same with the usual run folder if none is named: called as the file, or what it has."""
    found = defaultdict(dict, {k: v for k, v in table.items() if isinstance(v, dict)})
    model, source = found["model"].get("folder"), found["data"].get("source")
    first = source[0] if isinstance(source, list) and source else source
    parts = (Path(str(part)).name.partition(".")[0] for part in (model, first))
    runs = (path.absolute().parent if path else Path.cwd()) / RUNS
    found["output"].setdefault("folder", str(runs / (path.stem if path else "-".join(parts))))
    return table


def _load(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path} is not TOML: {error}.") from error
    except (OSError, UnicodeDecodeError) as error:
        is_model = (path.parent / "config.json").is_file()
        advice = f" To train the model in {path.parent}, say --model." if is_model else ""
        what = f"{path} cannot be read: {error}. Expected a TOML file.{advice}"
        raise SettingsError(what) from error


def _parsed(flag: Flag) -> Any:
    """A flag's value as TOML would have it: a number where one is expected."""
    kind = SECTIONS[flag.section][flag.key]["type"]
    if isinstance(flag.value, str) and kind in ("integer", "number"):
        for number in (int, float):
            with suppress(ValueError):
                return number(flag.value)
    return flag.value


def _located(key: str, value: Any, folder: Path) -> Any:
    """A value that, if it is a path, does not depend on where one is."""
    if key in ("folder", "disk") and isinstance(value, str) and value:
        return str(folder / Path(value).expanduser())
    if key == "rewards" and isinstance(value, list):
        return [
            str(folder / Path(one).expanduser()) if isinstance(one, str) else one for one in value
        ]
    if key not in SOURCES or not isinstance(value, str | list):
        return value
    sources = [value] if isinstance(value, str) else value
    paths = [folder / Path(str(one)).expanduser() for one in sources]  # or names of the Hub
    return [str(p) if one and p.exists() else one for one, p in zip(sources, paths, strict=True)]


def _fill(found: Mapping[str, dict[str, Any]]) -> None:
    """Set what follows from other settings."""
    optimizer, training, output = found["optimizer"], found["training"], found["output"]
    lora = found["lora"]
    if lora.setdefault("enabled", bool(lora)) is True and isinstance(lora.get("rank", 16), int):
        lora.setdefault("alpha", 2.0 * lora.get("rank", 16))
    preference = PREFERENCES.get(str(found["data"].get("task")), {})
    found["preference"].update({**preference, **found["preference"]})
    if found["samples"]:
        found["samples"].setdefault("chat", found["data"].get("task") == "instruct")
    kind = str(optimizer.setdefault("name", "adamw"))
    if kind == "muon" and "learning_rate" in optimizer:
        optimizer.setdefault("others_learning_rate", optimizer["learning_rate"])
    if kind == "schedule-free":
        found["schedule"].setdefault("shape", "constant")
        found["schedule"].setdefault("warm_up_steps", 0)
    optimizer.update({**(taken_by(kind) if kind in LEARNING_RATES else {}), **optimizer})
    if kind == "adafactor":
        training.setdefault("clip_norm", 0.0)
    if "steps" not in training:
        training.setdefault("epochs", 1.0)
    if str(training.get("device", "" if num_devices() else "cpu")).startswith("cpu"):
        training.setdefault("precision", "float32")
    if "warm_up_steps" not in found["schedule"]:
        found["schedule"].setdefault("warm_up_share", WARM_UP_SHARE)
    is_exact = training.get("precision") == "float32" or lora["enabled"]
    output.setdefault("export_dtype", "float32" if is_exact else "bfloat16")
    folder = found["model"].get("folder")
    if isinstance(folder, str):
        training.setdefault("length", _length(Path(folder)))


def _length(folder: Path) -> int:
    """Tokens that the model in a folder, and its tokenizer, are made for; at most the usual."""
    found: list[Any] = [LENGTH]
    for file in ("config.json", "tokenizer_config.json"):
        with suppress(ValueError):  # said later, by who needs the file
            found += map(read_json(folder / file).get, MADE_FOR)
    return min(size for size in found if isinstance(size, int) and size > 1)
