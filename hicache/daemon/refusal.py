"""Why a daemon does not do what a request asks: the one exception that becomes an answer other than 200."""

from __future__ import annotations

from ..errors import HiCacheError


class Refused(HiCacheError):
    """A request is refused; nothing was changed. The answer is `{"error": kind, "detail": ...}` with `status`.

    `kind` is an ErrorKind where a store would count it. `detail` says what to do, and quotes nothing that was sent.
    `retry_after_s` is the pause before the next try, 0 where another try does not help.
    """

    def __init__(self, status: int, kind: str, detail: str, retry_after_s: int = 0) -> None:
        super().__init__(detail)
        self.status = status
        self.kind = kind
        self.detail = detail
        self.retry_after_s = retry_after_s
