"""The rejection of a request: the only exception that becomes a reply other than 200."""

from __future__ import annotations

import json

from fastapi.responses import Response

from ..errors import HiCacheError


class Refused(HiCacheError):
    """A request is rejected; nothing was changed. The reply is `{"error": kind, "detail": ...}` with `status`.

    `kind` is an ErrorKind if a store would count it. `detail` says what to do, and does not quote the request.
    `retry_after_s` is the pause before the next try, 0 if another try does not help.
    """

    def __init__(self, status: int, kind: str, detail: str, retry_after_s: int = 0) -> None:
        super().__init__(detail)
        self.status = status
        self.kind = kind
        self.detail = detail
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> bytes:
        """The JSON of the answer."""
        return json.dumps({"error": self.kind, "detail": self.detail}).encode()

    def answer(self) -> Response:
        """Return the answer."""
        headers = {"retry-after": str(self.retry_after_s)} if self.retry_after_s else {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return Response(self.body, self.status, headers, "application/json")
