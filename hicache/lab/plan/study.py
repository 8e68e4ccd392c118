"""One pass over a trace."""

from __future__ import annotations

from .result import Plan, PlanInputs, Requests


def make_plan(requests: Requests, inputs: PlanInputs) -> Plan:
    """Return the plan of a trace. Reads it once, and with several nodes once for each routing.

    Raises InvalidInput for an empty trace, sizes below 0, and a page size that neither divides the trace's blocks nor
    is a multiple of them.
    """
    raise NotImplementedError
