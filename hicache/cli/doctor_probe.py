"""`hicache doctor`: a few pages through one store, its speed, and whether hits of that speed pay.

The store is opened as an engine opens it, behind its guard, in a namespace that only this command uses. The pages have
random keys, and are removed at the end, also after an error or an interrupt: `stop` ends the check after the call in
progress. Each call has a deadline of `CALL_S`; opening has the limits of the store.

Locking design: `run` works on one thread of any kind; `rows` is only appended to; `stop` and `ended` are events. Others
wait for `ended`: after an interrupted `join`, Python 3.11 considers the thread ended.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..backends.base import GetOutcome
from ..backends.guard.health import REJECTED, HealthState
from ..backends.guard.health import problem as advice_for
from ..backends.opening import StorageOpener
from ..backends.storage import Storage
from ..cache.break_even import BreakEven, RateEstimator, Rates, Route
from ..config.remote_storage import RemoteStorageOptions
from ..config.storage import FileStorageOptions, SharedFilesStorageOptions
from ..frame import HEADER_BYTES, FrameCodec
from ..units import counted, format_size
from .doctor_machine import Figures, Row, Subject, Verdict, failures
from .doctor_stores import CALL_S, credentials, daemon, volume
from .model_shapes import ModelShape
from .stores import StorePart

# Of Llama-3.1-8B in bf16: the pages of a check without --model.
_TOKEN_BYTES = 128 << 10
# Longer pages are shortened, and all pages of a measurement have about this size together.
_PAGE_BYTES_MAX = 16 << 20
_MEASURED_BYTES = 25 << 20
_PAGES_MAX = 16
_LABEL = "hicache doctor"
# A prefix of a usual length, and the bus of a GPU (PCIe 4.0 x16), if the configuration does not set its speed.
_PREFIX_TOKENS = 8192
_BUS_BYTES_PER_S = 20 << 30


@dataclass(slots=True)
class Measured:
    """Times of calls in seconds, each with its number of pages. `left` pages could not be removed."""

    opened_s: float
    writes: list[tuple[int, float]] = field(default_factory=list)
    reads: list[tuple[int, float]] = field(default_factory=list)
    removed_s: float = 0.0
    left: int = 0

    def figures(self, page_bytes: int) -> Figures:
        """Return the figures of the row of a store whose pages have `page_bytes` bytes."""
        found: Figures = {"page": page_bytes, "open_s": self.opened_s, "remove_s": self.removed_s, "left": self.left}
        for name, calls in (("write", self.writes), ("read", self.reads)):
            if calls:
                pages, seconds = calls[-1]
                found[f"{name}_s"] = calls[0][1]
                found[f"{name}_bytes_per_s"] = pages * page_bytes / max(seconds, 1e-9)
        estimator = RateEstimator()  # estimates the time of a read by its pages, as the cache does
        for pages, seconds in self.reads:
            estimator.observe(pages, seconds)
        if (line := estimator.line) is not None:
            found |= {"read_fixed_s": line.fixed_s, "read_page_s": line.per_unit_s, "read_pages": self.reads[-1][0]}
        return found


class StoreCheck:
    """The check of one store. See the module's docstring."""

    def __init__(self, part: StorePart, opener: StorageOpener, subject: Subject, prefill: int | None) -> None:
        self.part = part
        self.rows: list[Row] = []
        self.stop = threading.Event()
        self.ended = threading.Event()
        self._opener = opener
        self._subject = subject
        self._prefill = prefill
        token_bytes = _TOKEN_BYTES if subject.model is None else subject.model.token_bytes
        self._page_tokens = max(1, min(subject.config.page_size, _PAGE_BYTES_MAX // token_bytes))
        payload_bytes = self._page_tokens * token_bytes
        self.namespace = hashlib.sha256(f"{_LABEL} {payload_bytes}".encode()).digest()
        self._codec = opener.codec(self.namespace, payload_bytes, weights_epoch=0, label=_LABEL)

    def run(self) -> None:
        """Check the store, and remove the pages again. Blocks for some calls of `CALL_S`, and as opening does."""
        try:
            self._run()
        finally:
            self.ended.set()

    def _run(self) -> None:
        name, options = self.part.name, self.part.spec.options
        with failures(self.rows, f"{name} access"):
            self.rows += credentials(self.part)
            if isinstance(options, RemoteStorageOptions):
                self.rows.append(daemon(name, options))
        if any(row.verdict is Verdict.FAIL for row in self.rows):
            return  # opening would fail too, perhaps after half a minute
        with failures(self.rows, name):
            began_s = time.monotonic()
            with contextlib.closing(self._opener.open(self._codec, self.part.spec)) as backend:
                measured = Measured(time.monotonic() - began_s)
                if isinstance(options, FileStorageOptions | SharedFilesStorageOptions):
                    self.rows.append(volume(name, options, backend.usage().bytes))
                problem = self._exercise(backend, measured)
                self.rows.append(self._row(backend, measured, problem))
            if self._subject.model is not None and not (problem or self.stop.is_set()):
                self.rows.append(self._pays(self._subject.model, measured.reads))

    def _exercise(self, backend: Storage, measured: Measured) -> str:
        """Write pages, read them back, compare and remove them. Return the problem; empty if there is none."""
        count = max(1, min(_PAGES_MAX, _MEASURED_BYTES // self._codec.frame_bytes))
        pages = {secrets.token_bytes(32): _frame(self._codec) for _ in range(count)}
        keys = list(pages)
        try:
            return self._write(backend, pages, measured) or self._read(backend, pages, measured)
        finally:
            began_s = time.monotonic()
            backend.delete(keys, deadline=began_s + CALL_S)
            measured.removed_s = time.monotonic() - began_s
            measured.left = sum(backend.batch_has(keys, deadline=time.monotonic() + CALL_S))

    def _write(self, backend: Storage, pages: Mapping[bytes, memoryview], measured: Measured) -> str:
        """Store the first page, then the other pages."""
        keys, frames = list(pages), list(pages.values())
        for start, stop in ((0, 1), (1, len(keys))):
            if start == stop or self.stop.is_set():
                break
            parent, began_s = (keys[0] if start else None), time.monotonic()
            outcomes = backend.batch_set(keys[start:stop], frames[start:stop], parent=parent, deadline=began_s + CALL_S)
            measured.writes.append((stop - start, time.monotonic() - began_s))
            bad = [outcome for outcome in outcomes if not outcome.is_stored]
            if bad:
                return f"{counted(len(bad), 'page')} of {len(outcomes)} could not be stored: {bad[0].value}"
        return ""

    def _read(self, backend: Storage, pages: Mapping[bytes, memoryview], measured: Measured) -> str:
        """Read one page, then half of them, then all, and compare."""
        keys, frames = list(pages), list(pages.values())
        payload = slice(HEADER_BYTES, HEADER_BYTES + self._codec.payload_bytes)
        for count in (1, -(-len(keys) // 2), len(keys)):
            if self.stop.is_set():
                break
            targets, began_s = [memoryview(bytearray(frame.nbytes)) for frame in frames[:count]], time.monotonic()
            outcomes = backend.batch_get(keys[:count], targets, deadline=began_s + CALL_S)
            measured.reads.append((count, time.monotonic() - began_s))
            for outcome, frame, target in zip(outcomes, frames, targets, strict=False):
                if outcome is not GetOutcome.HIT:
                    return f"a page was stored, and reading it ended with: {outcome.value}"
                if frame[payload] != target[payload]:
                    return "a page was read with other bytes than were stored"
        return ""

    def _row(self, backend: Storage, measured: Measured, problem: str) -> Row:
        name, size, kinds = self.part.name, self._codec.payload_bytes, list(map(str, backend.statistics().errors))
        figures = measured.figures(size)
        if measured.left:
            problem = f"{problem}; " * bool(problem) + f"{counted(measured.left, 'page')} could not be removed"
        if problem:
            causes = [REJECTED, *kinds] if REJECTED in problem else kinds
            words = [one.explanation(cause) for one in backend.stores for cause in causes]
            words += [advice_for(HealthState.KEEPS_NOTHING, 0.0, cause).advice for cause in causes]
            advice = next(filter(None, words), "").removeprefix("; ")
            if measured.left:
                advice = f"remove them: hicache purge STORE --namespace {self.namespace.hex()[:12]}"
            return Row(name, Verdict.FAIL, f"{problem} (errors: {', '.join(kinds) or 'none'})", advice, figures)
        if self.stop.is_set() or not measured.reads:
            return Row(name, Verdict.FAIL, "too slow: not done in time; the pages were removed",
                       "see whether the server works, and the network", figures)
        options, pages = self.part.spec.options, counted(measured.reads[-1][0], "page")
        is_cached = isinstance(options, FileStorageOptions) and not options.direct_io
        finding = (
            f"opened in {_ms(measured.opened_s)}; a page of {format_size(size)} stored in "
            f"{_ms(measured.writes[0][1])}, read and verified in {_ms(measured.reads[0][1])}, {pages} removed in "
            f"{_ms(measured.removed_s)}; {_speed(figures['write_bytes_per_s'])} written, "
            f"{_speed(figures['read_bytes_per_s'])} read{' (from the page cache)' if is_cached else ''}"
        )
        return Row(name, Verdict.OK, finding, "", figures)

    def _pays(self, model: ModelShape, reads: Sequence[tuple[int, float]]) -> Row:
        """Decide as the cache would on an idle device, for a prefix that no tier of the engine has."""
        prefill = self._prefill
        given = Rates(prefill_tokens_per_s=prefill or 0, host_bytes_per_s=_BUS_BYTES_PER_S)
        rule = BreakEven(self._subject.config.break_even, self._codec.payload_bytes, given=given)
        for pages, seconds in reads:
            rule.observe_transfer(Route.PREFETCH, pages, seconds)
        rule.use_rates(rule.rates())
        tokens = -(-_PREFIX_TOKENS // self._page_tokens) * self._page_tokens
        pages = tokens // self._page_tokens
        fetch_s = rule.fetch_s(pages)
        assert fetch_s is not None  # all reads were made
        most = tokens / fetch_s
        name = f"{self.part.name} pays"
        bus = _speed(_BUS_BYTES_PER_S)
        finding = f"{model.name}: {format_size(model.token_bytes)} of KV per token, over a bus of {bus}"
        figures: Figures = {"token_bytes": model.token_bytes, "prefill_max": most}
        if prefill is None:
            return Row(name, Verdict.INFO, f"{finding}; on an idle device, hits pay up to a prefill of {most:,.0f} "
                       "tokens/s", "pass --prefill with the engine's tokens/s", figures)
        decision, wait_s = rule.would(Route.PREFETCH, tokens, pages), rule.lacking_s(Route.PREFETCH, tokens, pages)
        ratio = fetch_s * prefill / tokens
        finding += (
            f"; prefill of {prefill:,} tokens/s makes {_speed(prefill * model.token_bytes)}; on an idle device, "
            f"fetching {tokens:,} tokens takes {ratio:.2f} of the time of computing them: "
            f"{decision.value.replace('_', ' ')}"
        )
        figures |= {"ratio": ratio, "decision": decision.value, "wait_s": max(0.0, wait_s)}
        if decision.go:
            options = self.part.spec.options
            is_cached = isinstance(options, FileStorageOptions) and not options.direct_io
            advice = "beyond the page cache, the disk's speed counts: see it with direct_io: true" if is_cached else ""
            return Row(name, Verdict.OK, f"{finding}, up to a prefill of {most:,.0f} tokens/s", advice, figures)
        finding += f"; for a request that waits at least {_ms(wait_s)} for the device anyway, it pays"
        advice = ("hits of requests that wait less are computed: use a faster store, or break_even.mode: always, which "
                  "spares the device but makes them later")
        return Row(name, Verdict.WARN, finding, advice, figures)


def _frame(codec: FrameCodec) -> memoryview:
    """Return a frame with a random payload, which cannot be compressed."""
    frame = memoryview(bytearray(codec.frame_bytes))
    frame[HEADER_BYTES : HEADER_BYTES + codec.payload_bytes] = os.urandom(codec.payload_bytes)
    return frame


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def _speed(bytes_per_s: float | int | str | None) -> str:
    return f"{format_size(float(bytes_per_s or 0))}/s"
