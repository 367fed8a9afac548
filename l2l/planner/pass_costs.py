"""Costs of the passes of single layers, each reckoned once."""

from __future__ import annotations

from l2l.planner.layer_cost import PassCost
from l2l.planner.problem import CostCurve, Problem


class PassCosts:
    """What a pass of a layer costs; `kind` is a field of `LayerCosts`."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._largest: dict[tuple[str, range, int], PassCost] = {}
        self._costs: dict[tuple[int, str, float], PassCost] = {}

    def at(self, kind: str, layer: int, rows: float) -> PassCost:
        """The cost of a pass of a layer."""
        costs = self._problem.costs[layer]
        key = (id(costs), kind, rows)
        if key not in self._costs:
            line: CostCurve = getattr(costs, kind)
            self._costs[key] = line.at(rows)
        return self._costs[key]

    def largest(self, kind: str, layers: range, rows: int) -> PassCost:
        """The pass that takes most memory, of those of some layers."""
        key = (kind, layers, rows)
        if key not in self._largest:
            distinct = {id(self._problem.costs[index]): index for index in layers}
            found = (self.at(kind, index, rows) for index in distinct.values())
            self._largest[key] = max(found, key=lambda cost: cost.working_bytes)
        return self._largest[key]
