"""The verbs of an engine and of an operator against a hostile server, and the texts that they cause."""

from __future__ import annotations

import itertools
import logging
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import TypeAlias

from hicache.backends.base import GetOutcome, SetOutcome, StoredPage, Usage
from hicache.backends.store import Store
from hicache.backends.stored import StoredPages
from hicache.errors import BackendUnavailable
from hicache_lab.conformance import HIT, empty_frames, full_frames, holds

Verbs: TypeAlias = dict[str, Callable[[], object]]


class Texts(logging.Handler):
    """A log handler that collects all records, and the texts of caught exceptions."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))

    def note(self, error: BaseException) -> None:
        self.texts += texts_of(error)


def texts_of(error: BaseException) -> list[str]:
    """Return the texts of an exception, its whole chain, also suppressed parts, and all their attributes."""
    texts = traceback.format_exception(error)
    link: BaseException | None = error
    while link is not None:
        texts.append(repr((link, vars(link))))
        link = link.__cause__ or link.__context__
    return texts


def engine_verbs(backend: Store, keys: list[bytes], limit_s: float) -> Verbs:
    """Return the verbs of an engine, with a deadline in `limit_s`. Each fails for a result that is not an outcome, and
    for a hit with wrong bytes."""
    codec, count = backend.codec, len(keys)

    def soon() -> float:
        return time.monotonic() + limit_s

    def get() -> list[GetOutcome]:
        frames = empty_frames(codec, count)
        outcomes = backend.batch_get(keys, frames, deadline=soon())
        assert [type(outcome) for outcome in outcomes] == [GetOutcome] * count
        for key, frame, outcome in zip(keys, frames, outcomes, strict=True):
            assert outcome is not HIT or holds(codec, key, frame)
        return outcomes

    def put() -> list[SetOutcome]:
        outcomes = backend.batch_set(keys, full_frames(codec, keys), parent=None, deadline=soon())
        assert [type(outcome) for outcome in outcomes] == [SetOutcome] * count
        return outcomes

    def has() -> None:
        assert [type(one) for one in backend.batch_has(keys, deadline=soon())] == [bool] * count

    def count_of(verb: Callable[[], object], most: float = count) -> Callable[[], None]:
        def call() -> None:
            found = verb()
            assert type(found) is int and 0 <= found <= most

        return call

    def usage() -> None:
        found = backend.usage()
        assert type(found) is Usage and found.pages >= 0 and found.bytes >= 0

    return {
        "get": get, "set": put, "has": has, "usage": usage,
        "exists": count_of(lambda: backend.batch_exists(keys, deadline=soon())),
        "delete": count_of(lambda: backend.delete(keys, deadline=soon())),
        "clear": count_of(lambda: backend.clear(deadline=soon()), float("inf")),
    }


def operator_verbs(raw: StoredPages, page: StoredPage) -> Verbs:
    """Return the verbs of an operator."""
    return {
        "list": lambda: list(itertools.islice(raw.pages(), 5000)), "read": lambda: raw.read(page, 1 << 30),
        "write": lambda: raw.write(page, b"x" * page.bytes, None), "remove": lambda: raw.remove([page]),
    }


def run_verb(name: str, verb: Callable[[], object], counts: Counter[str], texts: Texts) -> None:
    """Run one verb and count its results. It may raise BackendUnavailable only."""
    try:
        result = verb()
    except BackendUnavailable as error:
        counts[f"{name}: refused"] += 1
        texts.note(error)
    else:
        outcomes = result if isinstance(result, list) and name in ("get", "set") else ["answered"]
        counts.update(f"{name}: {outcome}" for outcome in outcomes)
