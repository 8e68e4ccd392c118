"""OpenTelemetry spans, off until `enable`: the only module that imports OpenTelemetry, and only when spans are on.

    span           surrounds a block, which becomes the parent of the spans inside it
    begin, end     a span that begins and ends in different calls
    context_of     the parent that W3C headers name
    carried        a function that another thread calls for the current span

Without a given parent, the current span is the parent; without that, the span begins a trace.

Attributes are numbers, and names of stores and outcomes. Tokens, keys, salts, request ids and paths are never
attributes, and exceptions are not recorded, because their messages may contain such values. docs/tracing.md lists the
spans.

Locking design: `_tracer` and `_provider` are single references. Any thread makes spans; a span that `begin` returns
belongs to one thread at a time.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TypeVar

from . import __version__
from .errors import ConfigError, MissingPackage, install_hint

if TYPE_CHECKING:
    from opentelemetry.context import Context as Context  # noqa: PLC0414 - for annotations of other modules, as Span
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as Span  # noqa: PLC0414
    from opentelemetry.trace import Tracer

T = TypeVar("T")

# The variables of an endpoint: an engine's process with one of them exports spans.
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
# Enough to send a full queue to a collector that works; a process does not wait longer for one that hangs.
_FLUSH_S = 5.0
_OFF = nullcontext()

_tracer: Tracer | None = None
_provider: TracerProvider | None = None  # made by `enable`


def enable(*, exports: bool = False) -> None:
    """Make spans from now on, in this process. They go to its TracerProvider, even if that is set later.

    If none is set, and with `exports` or an OTLP endpoint in the environment, HiCache sets up the SDK for its own spans
    as the standard OTEL_ variables say; `shut_down` ends it. Does nothing if spans are on. Raises MissingPackage, a
    ConfigError, without the extra `tracing`, and ConfigError for OTEL_ variables that the SDK rejects.
    """
    global _tracer, _provider  # noqa: PLW0603
    if _tracer is not None:
        return
    try:
        from opentelemetry import trace  # noqa: PLC0415

        provider = trace.get_tracer_provider()
        if isinstance(provider, trace.ProxyTracerProvider) and (exports or any(map(os.environ.get, _ENDPOINTS))):
            provider = _provider = _exporting()
    except ModuleNotFoundError as error:
        raise MissingPackage(f"tracing.enabled: needs the package {error.name}; {install_hint('tracing')}") from error
    except ValueError as error:
        raise ConfigError(f"tracing.enabled: the SDK rejects a variable OTEL_...: {error}; correct it") from error
    _tracer = provider.get_tracer("hicache", __version__)


def _exporting() -> TracerProvider:
    """Return a provider that exports by OTLP. It is not the process's: other libraries would add their spans, with
    paths and queries in them."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    resource = Resource.create()
    if str(resource.attributes.get("service.name", "unknown_service")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "hicache"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    atexit.register(shut_down)
    return provider


def shut_down() -> None:
    """Export the remaining spans if `enable` has set up the SDK; blocks for at most 5 s. Called at the end of the
    process; call it before `os._exit`."""
    global _provider
    provider, _provider = _provider, None
    if provider is not None:
        thread = threading.Thread(target=provider.shutdown, name="hicache-spans", daemon=True)
        thread.start()
        thread.join(_FLUSH_S)


def span(name: str, parent: Context | None = None, **attributes: int | str) -> AbstractContextManager[Span | None]:
    """Return a context manager: the span `hicache.NAME`, which is the current span in its block; None when off."""
    if _tracer is None:
        return _OFF
    return _tracer.start_as_current_span(
        f"hicache.{name}", parent, attributes=_named(attributes), record_exception=False, set_status_on_exception=False
    )


def begin(name: str, parent: Context | None = None, **attributes: int | str) -> Span | None:
    """Start a span that is not the current one; None when off. It needs an `end`."""
    return None if _tracer is None else _tracer.start_span(f"hicache.{name}", parent, attributes=_named(attributes))


def note(span: Span | None, **attributes: int | str) -> None:
    """Add attributes to a span."""
    if span is not None:
        span.set_attributes(_named(attributes))


def end(span: Span | None, **attributes: int | str) -> None:
    """Add attributes to a span, and end it."""
    if span is not None:
        note(span, **attributes)
        span.end()


def end_usage(
    span: Span, input_tokens: int, read_tokens: int, written_tokens: int, computed: Mapping[str, int]
) -> None:
    """End the span of a request, with its tokens by the names of OpenTelemetry's conventions for generative AI
    (https://opentelemetry.io/docs/specs/semconv/gen-ai/), and the computed ones by reason."""
    span.set_attributes({
        "gen_ai.usage.input_tokens": input_tokens,
        "gen_ai.usage.cache_read.input_tokens": read_tokens,
        "gen_ai.usage.cache_creation.input_tokens": written_tokens,
    })
    end(span, **{f"computed.{reason}": tokens for reason, tokens in computed.items()})


def _named(attributes: Mapping[str, int | str]) -> dict[str, int | str]:
    return {f"hicache.{name}": value for name, value in attributes.items()}


def under(span: Span | None) -> Context | None:
    """Return the context of children of a span."""
    if span is None:
        return None
    from opentelemetry.trace import set_span_in_context  # noqa: PLC0415

    return set_span_in_context(span)


def context_of(headers: Mapping[str, str] | None) -> Context | None:
    """Return the parent that `traceparent` and `tracestate` (W3C Trace Context, https://www.w3.org/TR/trace-context/)
    name; None when off and without headers. Invalid headers begin a trace."""
    if _tracer is None or not headers:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

    texts = {name: text for name in ("traceparent", "tracestate") if isinstance(text := headers.get(name), str)}
    return TraceContextTextMapPropagator().extract(texts)


def headers() -> dict[str, str]:
    """Return the W3C headers of the current span; empty when off."""
    found: dict[str, str] = {}
    if _tracer is not None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

        TraceContextTextMapPropagator().inject(found)
    return found


def carried(work: Callable[[int], T]) -> Callable[[int], T]:
    """Return `work` for other threads: its spans are children of the span that is current now."""
    if _tracer is None:
        return work
    from opentelemetry.context import attach, detach, get_current  # noqa: PLC0415

    context = get_current()

    def with_context(number: int) -> T:
        token = attach(context)
        try:
            return work(number)
        finally:
            detach(token)

    return with_context
