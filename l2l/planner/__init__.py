"""The planner: a model's costs, a machine's rates and a budget in, frozen choices out."""

from l2l.planner.cost_model import CostModel as CostModel
from l2l.planner.plan import ALWAYS as ALWAYS
from l2l.planner.plan import STATE_ON_HOST as STATE_ON_HOST
from l2l.planner.plan import Decisions as Decisions
from l2l.planner.plan import LedgerLine as LedgerLine
from l2l.planner.plan import Plan as Plan
from l2l.planner.plan import ScalingPoint as ScalingPoint
from l2l.planner.problem import CostCurve as CostCurve
from l2l.planner.problem import LayerCosts as LayerCosts
from l2l.planner.problem import Problem as Problem
from l2l.planner.problem import Together as Together
from l2l.planner.problem import UnitSize as UnitSize
from l2l.planner.search import Candidate as Candidate
from l2l.planner.search import DoesNotFitError as DoesNotFitError
from l2l.planner.search import find_plan as find_plan

__all__ = [
    "ALWAYS",
    "STATE_ON_HOST",
    "Candidate",
    "CostCurve",
    "CostModel",
    "Decisions",
    "DoesNotFitError",
    "LayerCosts",
    "LedgerLine",
    "Plan",
    "Problem",
    "ScalingPoint",
    "Together",
    "UnitSize",
    "find_plan",
]
