"""Performing a schedule: the relay, its passes and updates, slots, cells, what a step reports."""

from l2l.run.decoding import Decoding
from l2l.run.lookup import HostRows, TableLookup
from l2l.run.outer_pass import OuterPass, Piece, with_shifted_labels
from l2l.run.outline import Outline, tensors_in
from l2l.run.parts import Parts
from l2l.run.program import Facts, HeadOfWords, Program, Usage
from l2l.run.relay import Relay
from l2l.run.report import StepReport
from l2l.run.scaler import Scaler
from l2l.run.seeds import PROLOGUE_SEED, mix_seed
from l2l.run.skips import Skips
from l2l.run.stash import Stash, parse_policy
from l2l.run.step import Step
from l2l.run.transfer import Transfer
