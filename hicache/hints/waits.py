"""How far the times that a source announces can be trusted.

A record compares the announced waits of a source with the real ones, on a logarithmic scale, by a straight line (least
squares), whose correlation is the trust:

    exact times             1: only they count
    wrong by a factor of 3  about 0.6 on recorded agents; the line also corrects a constant factor
    noise                   0: the cache evicts as if there were no hints

A correlation that may be chance counts as 0. But while the record does not exclude that longer announcements mean
longer waits, in proportion, the trust is the weight of the line's error beside that of LRU's guess, that a page is used
again after as long as it was not used: so for a source that announces one time for its tool. A new source begins with a
few exact waits, so that its first hints count; a few wrong ones end that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# A wait counts half after about 140 further ones.
_DECAY = 0.995
# A new source has as many exact waits, around 30 seconds and a factor of e apart.
_PRIOR, _PRIOR_LOG_S = 8.0, math.log(30.0)
# A difference counts if it exceeds so many standard errors.
_ERRORS_MIN = 2.5
# The variance of the logarithm of LRU's guess: P(next use later than `a` times the age) = 1 / (1 + a), for each scale.
_GUESS_VARIANCE = math.pi**2 / 3
_S_MIN, _S_MAX = 0.1, 1e9


@dataclass(slots=True)
class WaitRecord:
    """The decayed sums over the waits of one source: x is the logarithm of an announced wait, y of the real one."""

    count: float = _PRIOR
    x: float = _PRIOR * _PRIOR_LOG_S
    y: float = _PRIOR * _PRIOR_LOG_S
    xx: float = _PRIOR * (_PRIOR_LOG_S**2 + 1)
    yy: float = _PRIOR * (_PRIOR_LOG_S**2 + 1)
    xy: float = _PRIOR * (_PRIOR_LOG_S**2 + 1)

    def add(self, announced_s: float, real_s: float) -> None:
        """Record a wait that has ended."""
        x, y = math.log(max(announced_s, _S_MIN)), math.log(max(real_s, _S_MIN))
        self.count = _DECAY * self.count + 1
        self.x, self.y = _DECAY * self.x + x, _DECAY * self.y + y
        self.xx, self.yy, self.xy = _DECAY * self.xx + x * x, _DECAY * self.yy + y * y, _DECAY * self.xy + x * y

    def expected(self, announced_s: float) -> tuple[float, float]:
        """Return the wait to expect for an announced one, in seconds, and the trust in it, from 0 to 1."""
        x, y = self.x / self.count, self.y / self.count
        xx, yy, xy = self.xx / self.count - x * x, self.yy / self.count - y * y, self.xy / self.count - x * y
        is_one = xx < 1e-9  # all announced times are equal
        slope = 1.0 if is_one else xy / xx
        rest = max(0.0, yy - (0.0 if is_one else slope * xy))
        if is_one or slope + _ERRORS_MIN * math.sqrt(rest / (self.count * xx)) >= 1:
            trust = 1 / (1 + rest / _GUESS_VARIANCE)
        elif (trust := min(1.0, xy / math.sqrt(xx * max(yy, 1e-9)))) * math.sqrt(self.count) < _ERRORS_MIN:
            return announced_s, 0.0
        log_s = y + slope * (math.log(max(announced_s, _S_MIN)) - x)
        return math.exp(max(math.log(_S_MIN), min(log_s, math.log(_S_MAX)))), trust
