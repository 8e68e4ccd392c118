"""Verifies the engine's invariant; see `scheduler`. Only tests and idle engines pay for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from ..errors import InvariantError
from ..tiers import RequestToTokenPool, token_slots
from .requests import Request


def check_requests(
    running: Sequence[Request], waiting: Sequence[Request], rows: RequestToTokenPool, page_size: int
) -> None:
    """Raises InvariantError if requests, pages and the request table do not fit together. Mutates nothing."""
    if any(request.kv is not None or request.row is not None for request in waiting):
        raise InvariantError("engine: a waiting request holds pages or a row")
    used = [request.row for request in running]
    if len(set(used)) != len(used) or rows.table.shape[0] - rows.free_rows != len(used):
        raise InvariantError(f"engine: {len(used)} requests run, but the rows in use are others")
    own: Counter[int] = Counter()
    for request in running:
        _check_running(request, rows, page_size)
        kv = request.held_kv()
        own.update(kv.pages[kv.shared_pages :].tolist())
    if any(count > 1 for count in own.values()):
        raise InvariantError("engine: two requests own the same page")


def _check_running(request: Request, rows: RequestToTokenPool, page_size: int) -> None:
    kv = request.held_kv()
    if not kv.shared_pages * page_size <= request.kv_tokens <= len(kv.pages) * page_size:
        raise InvariantError(f"engine: {request.rid} has KV of {request.kv_tokens} tokens in {len(kv.pages)} pages")
    if not request.prefilling and request.kv_tokens != len(request.tokens) - 1:
        raise InvariantError(f"engine: {request.rid} decodes without the KV of all its tokens")
    slots = torch.from_numpy(token_slots(kv.pages, page_size))[: rows.table.shape[1]]
    if request.row is None or not torch.equal(rows.table[request.row, : len(slots)].cpu(), slots):
        raise InvariantError(f"engine: the row of {request.rid} does not name its pages")
