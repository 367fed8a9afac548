"""The trial: what a model does, found by trying two rows."""

from l2l.trial.discovery import find_route, pointwise_parts, run_through
from l2l.trial.outer_trial import usage_of
from l2l.trial.trial import Trial
