"""Settings of a training run: one TOML file, flags over it, all checked before anything is loaded.

sections   the sections of the file: pydantic models, every key explained once
words      what settings are called elsewhere
reading    files and flags -> settings, and back to TOML

[model]                      run.toml
folder = "models/llama"
[data]
source = "alpaca.jsonl.gz"   relative to the TOML file
task = "instruct"
[training]
steps = 300
"""

from l2l.train.settings.reading import SECTIONS, Flag, Settings, SettingsError, help_text, to_toml
from l2l.train.settings.sections import (
    CHATS,
    LANGUAGE_TASKS,
    PREFERENCES,
    GrpoSettings,
    PreferenceSettings,
    SampleSettings,
    ScheduleSettings,
)
from l2l.train.settings.words import answer
