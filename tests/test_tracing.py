"""Switching spans on, and where they go."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest

from hicache.backends.opening import StorageOpener
from hicache.config import HiCacheConfig
from hicache.frame import FrameCodec
from tests.spans import Recorder, Spans, attributes_of, recording

# The store of an engine, without torch, whose import takes seconds.
ENGINE = """
import sys
from hicache import tracing
from hicache.backends.opening import StorageOpener
from hicache.config import HiCacheConfig
from hicache.frame import FrameCodec
config = HiCacheConfig(storage={"type": "memory"}, tracing={"enabled": ENABLED})
store = StorageOpener(config).open(FrameCodec(bytes(32), 64))
assert store.batch_exists([bytes(32)], deadline=float("inf")) == 0
store.close()
"""
ON, OFF = ENGINE.replace("ENABLED", "True"), ENGINE.replace("ENABLED", "False")
PROVIDER = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
"""
PRINT = """
print([span.name for span in exporter.get_finished_spans()])
"""


def run(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, **environ},
    )


def test_without_tracing_a_cache_does_not_import_opentelemetry() -> None:
    count = "print(sum(name.split('.')[0] == 'opentelemetry' for name in sys.modules), tracing.headers())"
    assert run(OFF + count).stdout == "0 {}\n"
    assert run(ON + count).stdout != "0 {}\n"


@pytest.mark.parametrize("missing", ["opentelemetry", "opentelemetry.sdk"])
def test_without_the_extra_the_error_names_it(missing: str) -> None:
    result = run(
        f"import sys; sys.modules['{missing}'] = None\n{ON}", OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1"
    )
    assert "MissingPackage: tracing.enabled: needs the package opentelemetry" in result.stderr
    assert "install the extra tracing, in a clone by pip" in result.stderr


def test_variables_that_the_sdk_rejects_are_an_error() -> None:
    result = run(
        ON, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1", OTEL_BSP_MAX_QUEUE_SIZE="1",
        OTEL_BSP_MAX_EXPORT_BATCH_SIZE="2",
    )
    assert "ConfigError: tracing.enabled: the SDK rejects a variable OTEL_" in result.stderr


def test_the_spans_of_an_engine_go_to_its_provider() -> None:
    with recording() as recorder:
        result = run(PROVIDER + ON + PRINT, OTEL_EXPORTER_OTLP_ENDPOINT=recorder.url)
        assert result.stdout == "['hicache.store.exists']\n", result.stderr
        assert not recorder.bodies


def test_a_provider_that_is_set_later_gets_the_next_spans() -> None:
    result = run(ON.replace("assert", f"{PROVIDER}assert") + PRINT)
    assert result.stdout == "['hicache.store.exists']\n", result.stderr


@pytest.mark.parametrize(
    ("variables", "service"),
    [({}, "hicache"), ({"OTEL_SERVICE_NAME": "chat"}, "chat"),
     ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=chat"}, "chat")],
)
def test_a_process_without_a_provider_exports_at_its_end(variables: dict[str, str], service: str) -> None:
    with recording() as recorder:
        result = run(ON, OTEL_EXPORTER_OTLP_ENDPOINT=recorder.url, **variables)
        assert result.returncode == 0, result.stderr
        assert _names(recorder) == ["store.exists"] and recorder.services == {service}


def test_without_an_endpoint_a_process_exports_nothing() -> None:
    assert run(ON + "print(tracing._provider)").stdout == "None\n"


def test_the_standard_sampler_applies() -> None:
    with recording() as recorder:
        run(ON, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=f"{recorder.url}/v1/traces", OTEL_TRACES_SAMPLER="always_off")
        assert not recorder.bodies


def test_each_verb_of_a_store_counts_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    made = FrameCodec(bytes(32), 64)
    store = StorageOpener(HiCacheConfig(storage={"type": "memory"})).open(made)
    keys = [bytes([number]) * 32 for number in range(1, 4)]
    frames = [memoryview(bytearray(made.frame_bytes)) for _ in keys]
    spans = Spans(monkeypatch)
    store.batch_set(keys[:2], frames[:2], parent=None, deadline=math.inf)
    store.batch_exists(keys, deadline=math.inf)
    store.batch_has(keys[1:], deadline=math.inf)
    store.batch_get(keys, frames, deadline=math.inf)
    store.batch_touch(keys[:2], deadline=math.inf)
    store.batch_touch(keys[2:], deadline=math.inf)
    store.delete(keys[1:], deadline=math.inf)
    store.clear(deadline=math.inf)
    store.close()
    spans.check()
    found = [(span.name.rpartition(".")[2], attributes_of(span)) for span in spans.ended]
    assert [(verb, values["pages"], values["hit_pages"]) for verb, values in found] == [
        ("set", 2, 2), ("exists", 3, 2), ("exists", 2, 1), ("get", 3, 2), ("touch", 2, 2), ("touch", 1, 0),
        ("delete", 2, 1), ("delete", 0, 1),
    ]
    moved = [values["bytes"] for verb, values in found if verb in ("set", "get")]
    assert moved == [2 * made.frame_bytes, 3 * made.frame_bytes]


def _names(recorder: Recorder) -> list[str]:
    return [name for name, *_ in recorder.spans()]
