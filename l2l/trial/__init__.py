"""The trial: what a model does, found by trying two rows."""

from l2l.trial.trial import Trial
from l2l.trial.usage import outer_units, usage_of
