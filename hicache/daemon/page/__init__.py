"""The page of the daemon at `/`, and the history that it polls beside `/statusz`.

The page is three static files beside this module. It loads nothing from elsewhere, and its Content-Security-Policy lets
it run nothing but these files.
"""

from __future__ import annotations

import functools
from importlib import resources
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from ..history import History

_TYPES = {"index.html": "text/html", "page.css": "text/css", "page.js": "text/javascript"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # a daemon that was updated serves another page
}


def page_router(history: History) -> APIRouter:
    """Return the routes of the page and of `/history`. None of them blocks: the files are read here."""
    router = APIRouter()
    for name, kind in _TYPES.items():
        path = "/" if name == "index.html" else f"/{name}"
        content = resources.files(__name__).joinpath(name).read_bytes()
        answer = functools.partial(_file, content, f"{kind}; charset=utf-8")
        router.add_api_route(path, answer, include_in_schema=False, response_model=None)

    @router.get("/history", tags=["probes"])
    async def last_hour(since: Annotated[float, Query(ge=0, allow_inf_nan=False)] = 0) -> dict[str, Any]:
        """Return the samples of the last hour after `since`, in seconds since 1970, and recent faults."""
        return history.as_json(since)

    return router


async def _file(content: bytes, kind: str) -> Response:
    return Response(content, media_type=kind, headers=_HEADERS)
