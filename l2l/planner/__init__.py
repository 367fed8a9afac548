"""The planner: a model's costs, a machine's rates and a budget in, frozen choices out."""

from l2l.planner.bounds import Bounds
from l2l.planner.budget import Budget
from l2l.planner.decisions import STATE_ON_HOST, Decisions, Plan
from l2l.planner.disk_tier import DiskTier, first_on_disk, layers_on_disk, most_on_disk, refuse_disk
from l2l.planner.hardware import H200, Hardware
from l2l.planner.kept import KeptPlans
from l2l.planner.planning import Planning
from l2l.planner.preview import largest_model, measured_hardware, plan
from l2l.planner.problem import Together
from l2l.planner.search import DoesNotFitError
from l2l.planner.subject import Findings
