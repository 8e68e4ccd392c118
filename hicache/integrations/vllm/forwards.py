"""ForwardTimes: how fast vLLM computes prompts, from the times of its steps.

A step of vLLM computes chunks of prompts, and a token (with drafts, several) of each request that decodes. Decoding
reads the KV of its requests, so such a step takes longer than its tokens show. A step that only decodes is measured
after each of them: it takes D. A mixed step takes M, which is the time T for its tokens as those of a prompt, and the
time for reading that KV, at most D. So T is between M - D and M. A sample is the middle, and only if D is at most a
sixth of M: then it differs from T by at most a tenth.

Chunks of a few thousand tokens pass that. While they do not, the last samples stay: the speed is the device's, and does
not depend on the load.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

# See the module's docstring. It also bounds the decoded tokens: if D is their computing, they count twice in T.
DECODE_SHARE_MAX = 1 / 6
# D is the median of this many steps: requests begin and end to decode, and some steps stall.
WINDOW = 7
OBSERVATIONS_MIN = 3


class Forward(NamedTuple):
    """The tokens of a step's forward: of prompts, and of requests that decode."""

    prompt_tokens: int
    decoded_tokens: int


class ForwardTimes:
    """Calls `record(tokens, seconds)` for each sample. Owned by the scheduler's thread."""

    def __init__(self, record: Callable[[int, float], None]) -> None:
        self._record = record
        self._decode_s: deque[float] = deque(maxlen=WINDOW)
        self._decode_is_due = False

    def is_wanted(self, forward: Forward) -> bool:
        """Return True if a step should be measured: a few of those that only decode, which are most steps."""
        if not forward.prompt_tokens:
            wanted, self._decode_is_due = self._decode_is_due and forward.decoded_tokens > 0, False
            return wanted
        self._decode_is_due = forward.decoded_tokens > 0
        return forward.decoded_tokens <= DECODE_SHARE_MAX * forward.prompt_tokens

    def observe(self, forward: Forward, seconds: float) -> None:
        """Process the time of a wanted step."""
        if not forward.prompt_tokens:
            self._decode_s.append(seconds)
        elif not forward.decoded_tokens:
            self._record(forward.prompt_tokens, seconds)
        elif len(self._decode_s) >= OBSERVATIONS_MIN:
            decode_s = statistics.median(self._decode_s)
            if decode_s <= DECODE_SHARE_MAX * seconds:
                self._record(sum(forward), seconds - decode_s / 2)
