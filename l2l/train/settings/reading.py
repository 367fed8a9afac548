"""From a TOML file and flags to settings, and back.

What one setting implies for another (the learning rate that an optimizer usually has, the arguments
it takes) is filled in when settings are read, so that a run's `run.toml`, written with
`Settings.to_toml`, has all that is in force. Everything that can be known to be wrong without
loading anything is refused here, with where it stands.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Self

from l2l.device import parse_bytes
from l2l.train.data import Columns, DataError, Form, read_records
from l2l.train.settings.sections import (
    LANGUAGE_TASKS,
    OPTIMIZERS,
    RUNS,
    CheckpointSettings,
    ColumnSettings,
    DataSettings,
    EvaluationSettings,
    MemorySettings,
    ModelSettings,
    OptimizerSettings,
    OutputSettings,
    ScheduleSettings,
    TrainingSettings,
)
from l2l.train.settings.values import (
    Key,
    SettingsError,
    did_you_mean,
    keys_of,
    plain,
    shown,
    to_toml,
)

Table = Mapping[str, Mapping[str, Any]]  # section -> key -> value, as JSON has it
Given = dict[str, dict[str, Any]]  # the same, as fields have it
WARM_UP_SHARE = 0.03
LENGTH = 1024
HELP_WIDTH = 92


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A setting from the command line; it goes before the file's."""

    word: str  # --rows
    section: str
    key: str
    value: str | bool | list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of a run."""

    model: ModelSettings
    data: DataSettings
    columns: ColumnSettings
    training: TrainingSettings
    optimizer: OptimizerSettings
    schedule: ScheduleSettings
    memory: MemorySettings
    evaluation: EvaluationSettings
    checkpoint: CheckpointSettings
    output: OutputSettings

    @classmethod
    def read(cls, path: Path | None, *, flags: Sequence[Flag] = ()) -> Self:
        """The settings of a TOML file, of flags, or of flags over a file.

        Raises:
            SettingsError: one of them cannot be, or something that they name is not there.
        """
        table: Mapping[str, Any] = {}
        if path is not None:
            try:
                table = tomllib.loads(path.read_text())
            except (OSError, UnicodeDecodeError) as error:
                is_model = (path.parent / "config.json").is_file()
                raise SettingsError(
                    f"{path} cannot be read: {error}. Expected a TOML file with the sections "
                    f"{_listed(SECTIONS)}."
                    + (f" To train the model in {path.parent}, say --model." if is_model else "")
                ) from error
            except tomllib.TOMLDecodeError as error:
                raise SettingsError(f"{path} is not TOML: {error}.") from error
        return cls(**_Reading(path=path, table=table, flags=flags).sections())

    @classmethod
    def of_table(cls, table: Table) -> Self:
        """The settings of a `table` that was checked when it was made; the disk is not looked at.

        Raises:
            SettingsError: a value cannot be.
        """
        given: Given = {
            section: {
                name: SECTIONS[section][name].parse(value, where=f"[{section}] {name}")
                for name, value in table.get(section, {}).items()
                if name in SECTIONS[section]
            }
            for section in SECTIONS
        }
        return cls(**{name: kind(**given[name]) for name, kind in KINDS.items()})

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
        found = {section: dataclasses.asdict(getattr(self, section)) for section in SECTIONS}
        return {
            section: {key: plain(value) for key, value in values.items() if value is not None}
            for section, values in found.items()
        }

    @property
    def form(self) -> Form:
        """What is made of the data's records.

        Raises:
            ValueError: columns or template are not for the task.
        """
        whole = self.data.task == "causal"  # long documents are cut into rows, not truncated
        return Form(
            task=self.data.task,
            columns=Columns(**dataclasses.asdict(self.columns)),
            max_length=None if whole else self.training.length,
            template=self.data.template,
        )

    @property
    def evaluates(self) -> bool:
        """Whether there is something to evaluate on."""
        return self.data.evaluation_source is not None or self.data.hold_out is not None

    def differences(self, earlier: Table) -> list[str]:
        """What changes the result between the `table` of earlier settings and these, by line."""
        lines = []
        for section, values in self.table().items():
            for key in SECTIONS[section].values():
                before, now = earlier.get(section, {}).get(key.name), values.get(key.name)
                if key.about.changes_result and before != now:
                    lines.append(
                        f"[{section}] {key.name} was {shown(before)} and is {shown(now)} from here"
                    )
        return lines


KINDS: Mapping[str, Any] = typing.get_type_hints(Settings)
SECTIONS: Mapping[str, Mapping[str, Key]] = {name: keys_of(kind) for name, kind in KINDS.items()}
EXCLUSIVE = (
    ("data", ("evaluation_source", "hold_out")),
    ("training", ("steps", "epochs")),
    ("schedule", ("warm_up_steps", "warm_up_share")),
)
REQUIRED_FLAGS = {("model", "folder"): "--model FOLDER", ("data", "source"): "--data FILE"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """One reading of settings: knows where each of them comes from."""

    path: Path | None
    table: Mapping[str, Any]
    flags: Sequence[Flag]

    def sections(self) -> dict[str, Any]:
        """All of it, checked."""
        given = self._of_file()
        self._add_flags(given)
        self._refuse_both(given)
        self._refuse_missing(given)
        self._fill(given)
        found = {name: kind(**given[name]) for name, kind in KINDS.items()}
        self._check(Settings(**found))
        return found

    # -- values by themselves ----------------------------------------------------------------------

    def _of_file(self) -> Given:
        given: Given = {section: {} for section in SECTIONS}
        for section, values in self.table.items():
            if section not in SECTIONS:
                self._refuse_section(section, values)
            if not isinstance(values, dict):
                raise SettingsError(
                    f"{self.path}: {section} = {shown(values)}, but {section} is a section. "
                    f"Expected a line [{section}] and its settings below."
                )
            for name, value in values.items():
                self._refuse_unknown(section, name)
                where = f"{self.path}: [{section}] {name}"
                found = SECTIONS[section][name].parse(value, where=where)
                given[section][name] = _located(found, name, self._folder)
        return given

    def _add_flags(self, given: Given) -> None:
        for flag in self.flags:
            for section, names in EXCLUSIVE:
                if section == flag.section and flag.key in names:
                    for name in names:  # a flag replaces either of the two in the file
                        if not self._flag(section, name):
                            given[section].pop(name, None)
            found = key_of(flag.section, flag.key).parse_text(flag.value, where=flag.word)
            given[flag.section][flag.key] = _located(found, flag.key, Path.cwd())

    @property
    def _folder(self) -> Path:
        assert self.path is not None
        return self.path.absolute().parent

    def _flag(self, section: str, name: str) -> Flag | None:
        found = (one for one in self.flags if (one.section, one.key) == (section, name))
        return next(found, None)

    def _where(self, section: str, name: str) -> str:
        """Where a setting stands, for an error about it."""
        flag = self._flag(section, name)
        if flag is not None:
            return flag.word
        return f"{self.path}: [{section}] {name}" if self.path else f"[{section}] {name}"

    def _refuse_section(self, name: str, value: Any) -> None:
        if isinstance(value, dict):
            raise SettingsError(
                f"{self.path}: there is no section [{name}].{did_you_mean(name, SECTIONS)} "
                f"Expected {_listed(SECTIONS)}."
            )
        homes = _homes(name)
        advice = f" Put it below [{homes[0]}]." if homes else ""
        raise SettingsError(
            f"{self.path}: {name} stands in no section.{advice} Expected every setting below one "
            f"of {_listed(SECTIONS)}."
        )

    def _refuse_unknown(self, section: str, name: str) -> None:
        known = list(SECTIONS[section])
        if name in known:
            return
        homes = _homes(name)
        advice = did_you_mean(name, known)
        if homes:
            advice = f" Did you mean {name} in [{homes[0]}]?"
        raise SettingsError(
            f"{self.path}: [{section}] has no setting {name}.{advice} Expected one of "
            f"{', '.join(known)}."
        )

    # -- values together ---------------------------------------------------------------------------

    def _refuse_both(self, given: Given) -> None:
        for section, (one, other) in EXCLUSIVE:
            if one in given[section] and other in given[section]:
                raise SettingsError(
                    f"{self._where(section, one)} and {self._where(section, other)} are both set, "
                    "but they say the same, each in its own way. Expected one of them."
                )

    def _refuse_missing(self, given: Given) -> None:
        for (section, name), flag in REQUIRED_FLAGS.items():
            if name not in given[section]:
                raise SettingsError(
                    f"[{section}] {name} is not set. Expected {flag}, or the setting in a TOML "
                    f"file. {key_of(section, name).about.words}"
                )

    def _fill(self, given: Given) -> None:
        """Add the settings that follow from others."""
        own = given["optimizer"]
        word = own.get("name", "adamw")
        defaults = OPTIMIZERS[word].defaults
        for name in own:
            if name not in {*defaults, "name", "decay_biases_and_norms"}:
                raise SettingsError(
                    f"{self._where('optimizer', name)} is not for {word}. Expected some of "
                    f"{', '.join(defaults)}."
                )
        given["optimizer"] = {**defaults, **own}
        if word == "adafactor":
            given["training"].setdefault("clip_norm", 0.0)
        if not {"steps", "epochs"} & set(given["training"]):
            given["training"]["epochs"] = 1.0
        if not {"warm_up_steps", "warm_up_share"} & set(given["schedule"]):
            given["schedule"]["warm_up_share"] = WARM_UP_SHARE
        if "length" not in given["training"]:
            given["training"]["length"] = min(LENGTH, _positions(given["model"]["folder"]))
        exact = given["training"].get("precision") == "float32"
        given["output"].setdefault("export_dtype", "float32" if exact else "bfloat16")
        given["output"].setdefault("folder", self._run_folder(given))

    def _run_folder(self, given: Given) -> Path:
        if self.path is not None:
            return self._folder / RUNS / self.path.stem
        parts = (given["model"]["folder"], Path(given["data"]["source"][0]))
        return Path.cwd() / RUNS / "-".join(part.name.partition(".")[0] for part in parts)

    def _check(self, found: Settings) -> None:
        """Refuse what only shows when settings are seen together, or the disk is looked at."""
        self._check_model(found.model)
        for name in ("source", "evaluation_source"):
            try:
                read_records(getattr(found.data, name) or found.data.source)
            except DataError as error:
                raise SettingsError(f"{self._where('data', name)}: {error}") from error
        if found.output.folder.exists() and not found.output.folder.is_dir():
            raise SettingsError(
                f"{self._where('output', 'folder')} = {shown(found.output.folder)} is a file. "
                "Expected a folder, or a path where nothing is yet."
            )
        if found.model.folder.resolve().is_relative_to(found.output.folder.resolve()):
            raise SettingsError(
                f"{self._where('output', 'folder')} = {shown(found.output.folder)} is, or holds, "
                "the folder of the model. Expected another one: a run is written there, and may "
                "be moved."
            )
        for name in ("device_memory", "host_memory"):
            self._check_size(name, getattr(found.memory, name))
        self._check_optimizer(found)
        self._check_task(found)

    def _check_model(self, model: ModelSettings) -> None:
        where = f"{self._where('model', 'folder')} = {shown(model.folder)}"
        if not model.folder.is_dir():
            raise SettingsError(
                f"{where}: there is no such folder. Expected one with a config.json. Nothing is "
                "downloaded: to have a model of the Hugging Face Hub here, say 'hf download NAME "
                "--local-dir FOLDER'."
            )
        if not (model.folder / "config.json").is_file():
            raise SettingsError(f"{where} has no config.json. Expected a Hugging Face folder.")
        if not model.random_init and not any(model.folder.glob("*.safetensors")):
            raise SettingsError(
                f"{where} has no weights. Expected model.safetensors in it, or several such files "
                "and their index, or random_init (on the command line --random-init), to begin "
                "with random weights."
            )

    def _check_size(self, name: str, value: str | None) -> None:
        try:
            fits = value is None or parse_bytes(value, name=name) >= 1
        except ValueError:
            fits = False
        if not fits:
            raise SettingsError(
                f"{self._where('memory', name)} = {shown(value)} is not a size. Expected a text "
                "like '8GiB'."
            )

    def _check_optimizer(self, found: Settings) -> None:
        own, training = found.optimizer, found.training
        if own.eps is not None and isinstance(own.eps, tuple) != (own.name == "adafactor"):
            expected = "two numbers" if own.name == "adafactor" else "one number"
            raise SettingsError(
                f"{self._where('optimizer', 'eps')} = {shown(own.eps)}: {own.name} takes "
                f"{expected}."
            )
        if own.name == "adafactor" and training.clip_norm:
            raise SettingsError(
                f"{self._where('training', 'clip_norm')} = {training.clip_norm}, but adafactor "
                "updates each layer before the whole gradient is known. Expected 0, or another "
                "optimizer."
            )
        if own.name == "adafactor" and training.precision == "float16":
            raise SettingsError(
                f'{self._where("training", "precision")} = "float16", which adafactor does not '
                'take. Expected "bfloat16" or "float32".'
            )
        try:
            own.make()
        except ValueError as error:
            raise SettingsError(f"{self._where('optimizer', 'name')}: {error}.") from error

    def _check_task(self, found: Settings) -> None:
        if found.data.packing and found.data.task not in LANGUAGE_TASKS:
            raise SettingsError(
                f"{self._where('data', 'packing')} = true, but {found.data.task} has one label for "
                f"every row. Expected false, or a task of {', '.join(LANGUAGE_TASKS)}."
            )
        try:
            found.form  # noqa: B018 (made to see whether it can be)
        except ValueError as error:
            raise SettingsError(
                f"{self.path or 'settings'}: [columns] or [data]: {error}"
            ) from error
        asked = list(found.table()["evaluation"])
        if asked and not found.evaluates:
            raise SettingsError(
                f"{self._where('evaluation', asked[0])} is set, but there is nothing to evaluate "
                "on. Expected [data] evaluation_source (--evaluation-data FILE) or hold_out too."
            )


def _located(value: Any, name: str, folder: Path) -> Any:
    """A path of a file or of the command line, as one that does not depend on where one is."""
    if isinstance(value, Path):
        return folder / value.expanduser()
    if name in ("source", "evaluation_source"):  # also names of the Hub, which are no paths
        paths = [folder / Path(one).expanduser() for one in value]
        return tuple(
            str(path) if path.exists() else one for one, path in zip(value, paths, strict=True)
        )
    return value


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
        if not isinstance(table, dict):
            continue
        found += [table[key] for key in keys if isinstance(table.get(key), int) and table[key] > 1]
    return min(found)


def _homes(name: str) -> list[str]:
    """Sections that have a setting of this name."""
    return [section for section, keys in SECTIONS.items() if name in keys]


def _listed(sections: Mapping[str, Any]) -> str:
    return ", ".join(f"[{section}]" for section in sections)


# --------------------------------------------------------------------------------------------------
# Help


def key_of(section: str, name: str) -> Key:
    """What is known of a setting."""
    return SECTIONS[section][name]


def help_text() -> str:
    """All settings with their defaults, as a TOML file in which all is commented out."""
    lines: list[str] = []
    for section, keys in SECTIONS.items():
        lines += [f"[{section}]  # {KINDS[section].__doc__}"]
        for key in keys.values():
            value = "..." if key.default in (MISSING, None) else to_toml(plain(key.default))
            words = key.about.words
            if key.about.choices:
                words += f" One of {', '.join(key.about.choices)}."
            lines += [f"# {key.name} = {value}", *_wrapped(words)]
        lines.append("")
    return "\n".join(lines)


def _wrapped(words: str) -> list[str]:
    lines, line = [], "#    "
    for word in words.split():
        if len(line) + len(word) + 1 > HELP_WIDTH:
            lines.append(line)
            line = "#    "
        line += f" {word}"
    return [*lines, line]
