"""Records the spans of a test, or receives those of other processes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider

from hicache import tracing
from hicache.backends.calls import CallResult
from hicache.cache.prefetch_states import State
from hicache.cache.statistics import SKIP_REASONS
from hicache.ghosts import Reason
from hicache.hints import KINDS, OutcomeStatus
from hicache_lab.devservers.ports import LOOPBACK

# All attributes of spans, see docs/tracing.md.
COUNTS = frozenset({
    "pages", "hit_pages", "bytes", "pool_hits", "store_hits", "misses", "shared_reads", "shared_writes", "status",
    *(f"gen_ai.usage.{name}input_tokens" for name in ("", "cache_read.", "cache_creation.")),
    *(f"computed.{reason}" for reason in Reason),
})
OUTCOMES = frozenset({
    *CallResult, *SKIP_REASONS, "loaded", "failed", "cancelled", State.ARRIVED.value, State.ENDED.value, *OutcomeStatus,
})
ACTIONS = frozenset({*KINDS, "unknown"})
STORES = frozenset({"memory", "file", "remote", "storage", "troubled"})
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}


class Spans(SpanProcessor):
    """Switches spans on until the end of a test. `ended` has them in the order of their ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(self)
        monkeypatch.setattr(tracing, "_tracer", provider.get_tracer("hicache"))
        self.tracer = provider.get_tracer("an engine")
        self.ended: list[ReadableSpan] = []
        self._lock = threading.Lock()
        self._open = 0

    def on_start(self, span: Span, parent_context: object = None) -> None:
        with self._lock:
            self._open += 1

    def on_end(self, span: ReadableSpan) -> None:
        with self._lock:
            self._open -= 1
            self.ended.append(span)

    def named(self, name: str) -> list[dict[str, object]]:
        """Return the attributes of the ended spans of a name, both without the prefix."""
        return [attributes_of(span) for span in self.ended if span.name == f"hicache.{name}"]

    def usage(self) -> list[tuple[object, ...]]:
        """Return the tokens of the requests that have ended: of the prompt, read, written, and computed by reason."""
        names = [f"gen_ai.usage.{name}input_tokens" for name in ("", "cache_read.", "cache_creation.")]
        return [
            (*(found.pop(name) for name in names), {name.removeprefix("computed."): found[name] for name in found})
            for found in self.named("request")
        ]

    def check(self) -> None:
        """Assert that all spans have ended, and that their attributes are counts and known names."""
        assert not self._open
        for span in self.ended:
            assert not span.events and span.status.description is None
            for name, value in attributes_of(span).items():
                if name in COUNTS:
                    assert type(value) is int, (span.name, name)
                else:
                    assert value in {"store": STORES, "outcome": OUTCOMES, "action": ACTIONS}[name], (span.name, name)

    def trees(self) -> str:
        """Return the spans with a parent elsewhere, and below each its children, in the order of their starts."""
        ids = {span.context.span_id for span in self.ended}
        return "".join(self._tree(span, "") for span in self._sorted() if parent_of(span) not in ids)

    def _tree(self, span: ReadableSpan, indent: str) -> str:
        words = [f"{name}={value}" for name, value in attributes_of(span).items()]
        children = [child for child in self._sorted() if parent_of(child) == span.context.span_id]
        line = " ".join([span.name.removeprefix("hicache."), *words])
        return f"{indent}{line}\n" + "".join(self._tree(child, indent + "  ") for child in children)

    def _sorted(self) -> list[ReadableSpan]:
        return sorted(self.ended, key=lambda span: span.start_time or 0)


def attributes_of(span: ReadableSpan) -> dict[str, object]:
    """Return the attributes of a span, without the prefix of their names."""
    return {name.removeprefix("hicache."): value for name, value in (span.attributes or {}).items()}


def parent_of(span: ReadableSpan) -> int | None:
    """Return the id of the parent of a span."""
    return None if span.parent is None else span.parent.span_id


def trace_of(span: ReadableSpan) -> str:
    """Return the id of the trace of a span, as W3C headers have it."""
    return f"{span.context.trace_id:032x}"


class Recorder(ThreadingHTTPServer):
    """An HTTP server that keeps the headers and bodies of requests, and replies `{}`. A collector for OTLP exporters,
    whose messages are decoded by the classes of their authors."""

    def __init__(self) -> None:
        recorder = self
        self.headers: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        self.services: set[str] = set()  # of the spans that `spans` has returned

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                recorder.headers.append({name.lower(): value for name, value in self.headers.items()})
                recorder.bodies.append(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_: object) -> None:
                pass

        super().__init__((LOOPBACK, 0), Handler)

    @property
    def url(self) -> str:
        """The address of the server."""
        return f"http://{LOOPBACK}:{self.server_address[1]}"

    def spans(self) -> Iterator[tuple[str, str, str, dict[str, int | str]]]:
        """Yield name, trace, parent and attributes of the received spans."""
        for body in list(self.bodies):
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                names = {one.key: one.value.string_value for one in resource.resource.attributes}
                self.services.add(names["service.name"])
                for span in (span for scope in resource.scope_spans for span in scope.spans):
                    values = {
                        one.key.removeprefix("hicache."): one.value.string_value or one.value.int_value
                        for one in span.attributes
                    }
                    yield span.name.removeprefix("hicache."), span.trace_id.hex(), span.parent_span_id.hex(), values


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Run a recorder for the block."""
    with Recorder() as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        try:
            yield made
        finally:
            made.shutdown()
            thread.join()
