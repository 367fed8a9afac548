"""Performing a schedule: the relay, its passes and updates, slots, cells, what a step reports."""

from l2l.run.lookup import HostRows, TableLookup
from l2l.run.outer_pass import OuterFacts, OuterPass, Piece, with_shifted_labels
from l2l.run.relay import Relay, Scaler
from l2l.run.report import StepReport
from l2l.run.skips import Skips
from l2l.run.stash import Stash, parse_policy
from l2l.run.step import Step
from l2l.run.transfer import Transfer
from l2l.run.updates import PROLOGUE_SEED, Updates, mix_seed

__all__ = [
    "PROLOGUE_SEED",
    "HostRows",
    "OuterFacts",
    "OuterPass",
    "Piece",
    "Relay",
    "Scaler",
    "Skips",
    "Stash",
    "Step",
    "StepReport",
    "TableLookup",
    "Transfer",
    "Updates",
    "mix_seed",
    "parse_policy",
    "with_shifted_labels",
]
