"""Hints: what the harness of an agent or a router knows about prompts and a cache cannot guess.

An envelope of hints has the form that vLLM and SGLang carry with a request as `kv_hints`. This package has its words
and answers, and how far the times that a source announces can be trusted; `hicache.cache.hints` executes the actions.
docs/hints.md is the page for those who send hints.
"""

from .envelope import (
    ACTIONS_MAX,
    KINDS,
    Demote,
    Hint,
    HintAction,
    HintsEnvelope,
    Outcome,
    OutcomeStatus,
    Pin,
    Prefetch,
    Release,
    Retain,
    Turn,
    Wait,
    envelope_of,
    hint_of,
)
from .waits import WaitRecord

__all__ = [
    "ACTIONS_MAX", "KINDS", "Demote", "Hint", "HintAction", "HintsEnvelope", "Outcome", "OutcomeStatus",
    "Pin", "Prefetch", "Release", "Retain", "Turn", "Wait", "WaitRecord", "envelope_of", "hint_of",
]
