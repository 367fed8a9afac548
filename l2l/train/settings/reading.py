"""From a TOML file and flags to settings, and back.

What one setting implies for another (the rows that a model is made for, the run folder) is filled
in when settings are read, so that a run's `run.toml`, written with `Settings.to_toml`, has all that
is in force. Everything that can be known to be wrong without loading anything is refused here, with
where it was set.
"""

from __future__ import annotations

import json
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self, cast, get_args

from pydantic import Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from l2l.train.data import DataError, Form, did_you_mean, read_records
from l2l.train.settings.sections import (
    SAME_RESULT,
    AdafactorSettings,
    AdamWSettings,
    CheckpointSettings,
    ColumnSettings,
    DataSettings,
    EvaluationSettings,
    LionSettings,
    MemorySettings,
    ModelSettings,
    OptimizerSettings,
    OutputSettings,
    ScheduleSettings,
    Section,
    SGDSettings,
    TrainingSettings,
)

Table = Mapping[str, Mapping[str, Any]]  # section -> key -> value, as JSON has it
WARM_UP_SHARE = 0.03
LENGTH = 1024
RUNS = "runs"  # where run folders are if no output folder is named
HELP_WIDTH = 92
EXCLUSIVE = (
    ("data", ("evaluation_source", "hold_out")),
    ("training", ("steps", "epochs")),
    ("schedule", ("warm_up_steps", "warm_up_share")),
)
PATHS = ("folder", "source", "evaluation_source")
REQUIRED_FLAGS = {"model": "--model FOLDER", "data": "--data FILE"}
TYPES = {
    "string": "a text",
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "array": "two numbers in brackets",
}
BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most"}


class SettingsError(ValueError):
    """Settings that cannot be used; the message says where each was set and what is expected."""


class ContradictionError(ValueError):
    """Settings that contradict each other, or what is on disk.

    Attributes:
        keys: section and key of each; the message follows where they were set.
    """

    def __init__(self, message: str, *keys: tuple[str, str]) -> None:
        super().__init__(message)
        self.keys = keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A setting from the command line; it overrides the file."""

    word: str  # --rows
    section: str
    key: str
    value: str | bool | list[str]


class Settings(Section):
    """All settings of a run."""

    model: ModelSettings
    data: DataSettings
    columns: ColumnSettings
    training: TrainingSettings
    optimizer: Annotated[
        AdamWSettings | LionSettings | SGDSettings | AdafactorSettings,
        Field(discriminator="name"),
    ]
    schedule: ScheduleSettings
    memory: MemorySettings
    evaluation: EvaluationSettings
    checkpoint: CheckpointSettings
    output: OutputSettings

    @classmethod
    def read(cls, path: Path | None, *, flags: Sequence[Flag] = ()) -> Self:
        """The settings of a TOML file, of flags, or of flags over a file.

        Raises:
            SettingsError: one of them cannot be used, or something that they name is not there.
        """
        origin = _Origin(path, flags)
        table = _with_defaults(origin.table(), path)
        try:
            found = cls.model_validate(table)
            _check_disk(found)
        except ValidationError as error:
            lines = dict.fromkeys(origin.told(one, table) for one in error.errors())
            raise SettingsError("\n".join(lines)) from error
        except ContradictionError as error:
            raise SettingsError(origin.refused(error)) from error
        return found

    @classmethod
    def of_table(cls, table: Table) -> Self:
        """The settings of a `table` that was checked when it was made; the disk is not looked at.

        Raises:
            SettingsError: a value cannot be used.
        """
        sections = {section: table.get(section, {}) for section in SECTIONS}
        try:
            return cls.model_validate(sections, extra="ignore")
        except ValidationError as error:
            told = (_Origin(None, ()).told(one, sections) for one in error.errors())
            raise SettingsError("\n".join(dict.fromkeys(told))) from error

    def to_toml(self) -> str:
        """The settings in force; read from the run folder, they are these again."""
        parts = ["# The settings of this run. To go on with it: l2l train RUN_FOLDER"]
        for section, values in self.table().items():
            kept = {**values, "folder": "."} if section == "output" else values
            parts += ["", f"[{section}]"]
            parts += [f"{key} = {to_toml(value)}" for key, value in kept.items()]
        return "\n".join([*parts, ""])

    def table(self) -> dict[str, dict[str, Any]]:
        """Section -> key -> value, for JSON; what is not set is left out."""
        return self.model_dump(mode="json", exclude_none=True)

    @property
    def form(self) -> Form:
        """What is made of the data's records.

        Raises:
            ValueError: columns or template are not for the task.
        """
        whole = self.data.task == "causal"  # long documents are cut into rows, not truncated
        return Form(
            task=self.data.task,
            columns=self.columns.model_dump(exclude_none=True),
            max_length=None if whole else self.training.length,
        )

    @property
    def evaluates(self) -> bool:
        """Whether there is something to evaluate on."""
        return self.data.evaluation_source is not None or self.data.hold_out is not None

    def differences(self, earlier: Table) -> list[str]:
        """What changes the result between the `table` of earlier settings and these, by line."""
        lines = []
        for section, values in self.table().items():
            for name, key in SECTIONS[section].items():
                before, now = earlier.get(section, {}).get(name), values.get(name)
                if key.changes_result and before != now:
                    lines.append(
                        f"[{section}] {name} was {shown(before)} and is {shown(now)} from here"
                    )
        return lines

    @model_validator(mode="after")
    def _agree(self) -> Self:
        """Refuse what only shows when settings are seen together."""
        for section, pair in EXCLUSIVE:
            if all(getattr(getattr(self, section), key) is not None for key in pair):
                raise ContradictionError(
                    "are both set, but they say the same, each in its own way. Expected one of "
                    "them.",
                    *((section, key) for key in pair),
                )
        own, training = self.optimizer, self.training
        if own.name == "adafactor" and training.clip_norm:
            raise ContradictionError(
                f"= {training.clip_norm}, but adafactor updates each layer before the whole "
                "gradient is known. Expected 0, or another optimizer.",
                ("training", "clip_norm"),
            )
        if own.name == "adafactor" and training.precision == "float16":
            raise ContradictionError(
                '= "float16", which adafactor does not take. Expected "bfloat16" or "float32".',
                ("training", "precision"),
            )
        if self.data.template is not None and self.data.task != "instruct":
            raise ContradictionError(
                f"is given, but task {self.data.task!r} uses none. Leave it out, or say task "
                "'instruct'.",
                ("data", "template"),
            )
        asked = [key for key, value in self.evaluation if value is not None]
        if asked and not self.evaluates:
            raise ContradictionError(
                "is set, but there is nothing to evaluate on. Expected [data] evaluation_source "
                "(--evaluation-data FILE) or hold_out too.",
                ("evaluation", asked[0]),
            )
        for make, key in ((own.make, ("optimizer", "name")), (lambda: self.form, ("data", "task"))):
            try:
                make()
            except ValueError as error:
                raise ContradictionError(f": {str(error).removesuffix('.')}.", key) from error
        return self


# --------------------------------------------------------------------------------------------------
# What is known of each setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A setting of a section."""

    words: str  # what it is for
    schema: Mapping[str, Any]  # of JSON: type, bounds, choices
    default: Any  # as JSON has it; None: it has none, or follows from others
    changes_result: bool  # whether a run with another value ends with other weights

    @property
    def choices(self) -> list[str]:
        """The values it may have, if they can be listed."""
        found: list[str] = self.schema.get("enum", [])
        return found

    @property
    def expected(self) -> str:
        """What may be set, in words."""
        if self.choices:
            return f"one of {', '.join(map(to_toml, self.choices))}"
        kind = self.schema["type"]
        if kind == "array" and "prefixItems" not in self.schema:
            return "a text, or several in brackets"
        word = "a path in quotes" if self.schema.get("format") == "path" else TYPES[kind]
        one = self.schema.get("prefixItems", [self.schema])[0]
        bounds = [f"{text} {one[name]:g}" for name, text in BOUNDS.items() if name in one]
        return f"{word}, {' and '.join(bounds)}" if bounds else word

    @property
    def help(self) -> str:
        """What it is for, and its default if that is a value."""
        if self.default is None or self.default is False or "Default:" in self.words:
            return self.words
        return f"{self.words} Default: {self.default}."


def _keys(kind: type[Section]) -> dict[str, Key]:
    schemas = kind.model_json_schema()["properties"]
    return {name: _key(field, schemas[name]) for name, field in kind.model_fields.items()}


def _key(field: FieldInfo, schema: Mapping[str, Any]) -> Key:
    kinds = (one for one in schema.get("anyOf", [schema]) if one.get("type") != "null")
    return Key(
        words=" ".join((field.description or "").split()),
        schema=next(kinds),
        default=schema.get("default"),
        changes_result=SAME_RESULT not in field.metadata,
    )


def _optimizer_keys() -> dict[str, dict[str, Key]]:
    """Settings of each optimizer by its name, and of all by an empty name."""
    found = {"": _keys(OptimizerSettings)}
    for kind in get_args(Settings.model_fields["optimizer"].annotation):
        keys = _keys(kind)
        found |= dict.fromkeys(get_args(kind.model_fields["name"].annotation), keys)
        for name, key in keys.items():  # which have no default that holds for all optimizers
            found[""].setdefault(name, replace(key, default=None))
    return found


OPTIMIZER_KEYS = _optimizer_keys()
SECTIONS: Mapping[str, Mapping[str, Key]] = {
    name: OPTIMIZER_KEYS[""]
    if name == "optimizer"
    else _keys(cast(type[Section], field.annotation))
    for name, field in Settings.model_fields.items()
}


# --------------------------------------------------------------------------------------------------
# Where settings come from


@dataclass(frozen=True, slots=True)
class _Origin:
    """A file and flags; knows which of them has set what."""

    path: Path | None
    flags: Sequence[Flag]

    def table(self) -> dict[str, Any]:
        """What both say, not yet checked; a path no longer depends on where one is.

        Raises:
            SettingsError: the file cannot be read.
        """
        read = {} if self.path is None else _load(self.path)
        found = {section: read.pop(section, {}) for section in SECTIONS} | read
        for values in found.values():
            if self.path is not None and isinstance(values, dict):
                values.update(_located(values, self.path.absolute().parent))
        for flag in self.flags:
            values = found[flag.section]
            if not isinstance(values, dict):
                continue
            for section, names in EXCLUSIVE:
                if section == flag.section and flag.key in names:
                    for name in names:  # a flag replaces either of the two in the file
                        if self._flag(section, name) is None:
                            values.pop(name, None)
            values.update(_located({flag.key: _parsed(flag)}, Path.cwd()))
        return found

    def _flag(self, section: str, key: str) -> Flag | None:
        return next((one for one in self.flags if (one.section, one.key) == (section, key)), None)

    def where(self, section: str, key: str) -> str:
        """Where a setting was set, for an error about it."""
        flag = self._flag(section, key)
        return flag.word if flag is not None else f"{self._file}[{section}] {key}"

    @property
    def _file(self) -> str:
        return f"{self.path}: " if self.path else ""

    def refused(self, error: ContradictionError) -> str:
        """The whole message."""
        gap = "" if str(error).startswith(":") else " "
        return f"{' and '.join(self.where(*key) for key in error.keys)}{gap}{error}"

    def told(self, error: ErrorDetails, table: Mapping[str, Any]) -> str:
        """What pydantic has found, for people: where, what, what is expected."""
        cause = error.get("ctx", {}).get("error")
        if isinstance(cause, ContradictionError):
            return self.refused(cause)
        section, *rest = map(str, error["loc"])
        if not rest and "union_tag" not in error["type"]:
            return self._told_of_section(section, table[section])
        keys = SECTIONS[section]
        if section == "optimizer" and rest:
            keys = OPTIMIZER_KEYS[rest.pop(0)]
        key, *_ = rest or ["name"]
        if key not in table[section]:
            return (
                f"[{section}] {key} is not set. Expected {REQUIRED_FLAGS.get(section, 'it')}, or "
                f"the setting in a TOML file. {keys[key].words}"
            )
        if key not in keys:
            return self._told_of_unknown(section, key, keys, table)
        value, known = table[section][key], keys[key]
        begin = f"{self.where(section, key)} = {shown(value)}"
        if cause is not None and key != "folder":
            return f"{begin} {cause}"
        near = did_you_mean(str(value), known.choices)
        other = section == "optimizer" and key not in OptimizerSettings.model_fields
        whose = f" for {table[section]['name']}" if other else ""
        words = key_of(section, key).words
        return f"{begin}: expected {known.expected}{whose}.{near} {key}: {words}"

    def _told_of_section(self, name: str, value: Any) -> str:
        if name in SECTIONS:
            return (
                f"{self._file}{name} = {shown(value)}, but {name} is a section. Expected a line "
                f"[{name}] and its settings below."
            )
        if isinstance(value, dict):
            near = did_you_mean(name, SECTIONS)
            return f"{self._file}there is no section [{name}].{near} Expected {_listed()}."
        advice = f" Put it below [{home}]." if (home := _home(name)) else ""
        return (
            f"{self._file}{name} is outside every section.{advice} Expected every setting below "
            f"one of {_listed()}."
        )

    def _told_of_unknown(
        self, section: str, key: str, keys: Mapping[str, Key], table: Mapping[str, Any]
    ) -> str:
        if key in SECTIONS[section]:  # of another optimizer
            taken = ", ".join(name for name in keys if name != "name")
            optimizer = table[section]["name"]
            return f"{self.where(section, key)} is not for {optimizer}. Expected some of {taken}."
        home = _home(key)
        advice = f" Did you mean {key} in [{home}]?" if home else did_you_mean(key, keys)
        return (
            f"{self._file}[{section}] has no setting {key}.{advice} Expected one of "
            f"{', '.join(keys)}."
        )


def _load(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path} is not TOML: {error}.") from error
    except (OSError, UnicodeDecodeError) as error:
        is_model = (path.parent / "config.json").is_file()
        raise SettingsError(
            f"{path} cannot be read: {error}. Expected a TOML file with the sections {_listed()}."
            + (f" To train the model in {path.parent}, say --model." if is_model else "")
        ) from error


def _parsed(flag: Flag) -> Any:
    """A flag's value as TOML would have it: a number where one is expected."""
    if isinstance(flag.value, str) and key_of(flag.section, flag.key).schema["type"] in (
        "integer",
        "number",
    ):
        for kind in (int, float):
            with suppress(ValueError):
                return kind(flag.value)
    return flag.value


def _located(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Values whose paths do not depend on where one is."""

    def locate(key: str, text: Any) -> Any:
        if key not in PATHS or not isinstance(text, str) or not text:
            return text
        path = folder / Path(text).expanduser()
        return str(path) if key == "folder" or path.exists() else text  # else a name of the Hub

    return {
        key: [locate(key, one) for one in value] if isinstance(value, list) else locate(key, value)
        for key, value in values.items()
    }


def _with_defaults(table: dict[str, Any], path: Path | None) -> dict[str, Any]:
    """Settings with those that follow from others; `path` is of their file."""

    def default(section: str, key: str, value: Any, *, instead: str = "") -> None:
        values = table[section]
        if isinstance(values, dict) and instead not in values:
            values.setdefault(key, value)

    def said(section: str, key: str) -> Any:
        return table[section].get(key) if isinstance(table[section], dict) else None

    default("optimizer", "name", "adamw")
    default("training", "epochs", 1.0, instead="steps")
    default("schedule", "warm_up_share", WARM_UP_SHARE, instead="warm_up_steps")
    if said("optimizer", "name") == "adafactor":
        default("training", "clip_norm", 0.0)
    exact = said("training", "precision") == "float32"
    default("output", "export_dtype", "float32" if exact else "bfloat16")
    folder, source = said("model", "folder"), said("data", "source")
    if isinstance(folder, str):
        default("training", "length", min(LENGTH, _positions(Path(folder))))
    if path is not None:
        runs, name = path.absolute().parent, path.stem
    else:
        first = source[0] if isinstance(source, list) and source else source
        parts = (Path(str(part)).name.partition(".")[0] for part in (folder, first))
        runs, name = Path.cwd(), "-".join(parts)
    default("output", "folder", str(runs / RUNS / name))
    return table


def _positions(folder: Path) -> int:
    """Tokens that the model in a folder, and its tokenizer, are made for."""
    names = {
        "config.json": ("max_position_embeddings", "n_positions"),
        "tokenizer_config.json": ("model_max_length",),
    }
    found = [LENGTH]
    for file, keys in names.items():
        try:
            table = json.loads((folder / file).read_text())
        except (OSError, ValueError, RecursionError):  # said later, by who needs it
            continue
        if isinstance(table, dict):
            sizes = (table.get(key) for key in keys)
            found += [size for size in sizes if isinstance(size, int) and size > 1]
    return min(found)


def _check_disk(found: Settings) -> None:
    """Look for what settings name.

    Raises:
        ContradictionError: it is not there, or not what it should be.
    """
    model, output = found.model.folder, found.output.folder
    key = ("model", "folder")
    if not model.is_dir():
        raise ContradictionError(
            f"= {shown(model)}: there is no such folder. Expected one with a config.json. Nothing "
            "is downloaded: to have a model of the Hugging Face Hub here, say 'hf download NAME "
            "--local-dir FOLDER'.",
            key,
        )
    if not (model / "config.json").is_file():
        raise ContradictionError(
            f"= {shown(model)} has no config.json. Expected a Hugging Face folder.", key
        )
    if not found.model.random_init and not any(model.glob("*.safetensors")):
        raise ContradictionError(
            f"= {shown(model)} has no weights. Expected model.safetensors in it, or several such "
            "files and their index, or random_init (on the command line --random-init), to begin "
            "with random weights.",
            key,
        )
    for name in ("source", "evaluation_source"):
        try:
            read_records(getattr(found.data, name) or found.data.source)
        except DataError as error:
            raise ContradictionError(f": {error}", ("data", name)) from error
    key = ("output", "folder")
    if output.exists() and not output.is_dir():
        raise ContradictionError(
            f"= {shown(output)} is a file. Expected a folder, or a path where nothing is yet.", key
        )
    if model.resolve().is_relative_to(output.resolve()):
        raise ContradictionError(
            f"= {shown(output)} is, or holds, the folder of the model. Expected another one: a run "
            "is written there, and may be moved.",
            key,
        )


# --------------------------------------------------------------------------------------------------
# Words


def _home(name: str) -> str | None:
    """The first section that has a setting of this name."""
    return next((section for section, keys in SECTIONS.items() if name in keys), None)


def _listed() -> str:
    return ", ".join(f"[{section}]" for section in SECTIONS)


def key_of(section: str, name: str) -> Key:
    """What is known of a setting."""
    return SECTIONS[section][name]


def help_text() -> str:
    """All settings with their defaults, as a TOML file in which all is commented out."""
    lines: list[str] = []
    for section, keys in SECTIONS.items():
        kind: Any = Settings.model_fields[section].annotation
        about = OptimizerSettings if section == "optimizer" else kind
        lines += [f"[{section}]  # {about.__doc__}"]
        for name, key in keys.items():
            value = "..." if key.default is None else to_toml(key.default)
            words = key.words
            if key.choices:
                words += f" One of {', '.join(key.choices)}."
            lines.append(f"# {name} = {value}")
            lines += textwrap.wrap(
                words, HELP_WIDTH, initial_indent="#     ", subsequent_indent="#     "
            )
        lines.append("")
    return "\n".join(lines)


def shown(value: Any) -> str:
    """A value as a TOML file has it."""
    if value is None:
        return "not set"
    try:
        return to_toml(str(value) if isinstance(value, Path) else value)
    except TypeError:
        return str(value)


def to_toml(value: Any) -> str:
    """A value of JSON as TOML has it."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
