"""The planner: a model's costs, a machine's rates and a budget in, frozen choices out."""

from l2l.planner.cost_model import CostModel
from l2l.planner.decisions import ALWAYS, STATE_ON_HOST, Decisions, LedgerLine, Plan, ScalingPoint
from l2l.planner.hardware import H200, Hardware
from l2l.planner.planning import Planning, parse_budget
from l2l.planner.preview import largest_model, measured_hardware, plan
from l2l.planner.problem import CostCurve, LayerCosts, Problem, Together, UnitSize
from l2l.planner.search import Candidate, DoesNotFitError, find_plan

__all__ = [
    "ALWAYS",
    "H200",
    "STATE_ON_HOST",
    "Candidate",
    "CostCurve",
    "CostModel",
    "Decisions",
    "DoesNotFitError",
    "Hardware",
    "LayerCosts",
    "LedgerLine",
    "Plan",
    "Planning",
    "Problem",
    "ScalingPoint",
    "Together",
    "UnitSize",
    "find_plan",
    "largest_model",
    "measured_hardware",
    "parse_budget",
    "plan",
]
