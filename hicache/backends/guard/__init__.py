"""What keeps a failing store from harming the engine: admission, breakers, health and probes, as parts of a `Store`."""

from ...config.guard import Override
from ..base import Direction
from ..calls import CallResult, Refusal, Verb
from .admission import GuardStatistics
from .health import CONFIRM_S, IDLE, HealthState, StoreHealth, StoreProblem, grouped

__all__ = [
    "CONFIRM_S", "IDLE", "CallResult", "Direction", "GuardStatistics", "HealthState", "Override", "Refusal",
    "StoreHealth", "StoreProblem", "Verb", "grouped",
]
