"""Settings of a training run: one TOML file, flags over it, all checked before anything is loaded.

sections   the sections of the file: pydantic models, every key explained once
reading    files and flags -> settings, and back to TOML

[model]                      run.toml
folder = "models/llama"
[data]
source = "alpaca.jsonl.gz"   relative to the TOML file
task = "instruct"
[training]
steps = 300
"""

from l2l.train.settings.reading import SECTIONS as SECTIONS
from l2l.train.settings.reading import Flag as Flag
from l2l.train.settings.reading import Settings as Settings
from l2l.train.settings.reading import SettingsError as SettingsError
from l2l.train.settings.reading import help_text as help_text
from l2l.train.settings.reading import key_of as key_of
from l2l.train.settings.sections import LANGUAGE_TASKS as LANGUAGE_TASKS
from l2l.train.settings.sections import ScheduleSettings as ScheduleSettings
