"""The planner: a model's costs, a machine's rates and a budget in, frozen choices out."""

from l2l.planner.bounds import WORDS, Bounds
from l2l.planner.budget import Budget
from l2l.planner.cards import NOT_MEASURED, SHEETS, card, with_host
from l2l.planner.decisions import ALWAYS, STATE_ON_HOST, Decisions, LedgerLine, Plan
from l2l.planner.disk_tier import DiskTier, first_on_disk, layers_on_disk, most_on_disk, refuse_disk
from l2l.planner.hardware import H200, Hardware
from l2l.planner.kept import KeptPlans
from l2l.planner.planning import Planning
from l2l.planner.preview import Preview, largest_model, look, measured_hardware, plan
from l2l.planner.problem import Together
from l2l.planner.prospects import Prospect, Prospects, Purchase, foresee
from l2l.planner.search import DoesNotFitError
from l2l.planner.simulation import Simulation
from l2l.planner.subject import Findings
