"""Plans the tiers of a cache from a trace, without running it: what each tier is worth at each size."""

from .result import Plan, PlanInputs
from .study import make_plan

__all__ = ["Plan", "PlanInputs", "make_plan"]
