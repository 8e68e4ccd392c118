"""The measurement of SGLang's prefill speed, on a CPU and with the events of a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from hicache.integrations.sglang_tree.prefill import PrefillClock


@dataclass
class Request:
    prefix_len: int
    extend_end: int | None


@dataclass
class Event:
    """An event of a device; `passed` once the work before it has ended."""

    at_ms: float
    passed: bool = False

    def query(self) -> bool:
        return self.passed

    def elapsed_time(self, end: Event) -> float:
        return end.at_ms - self.at_ms


class Device:
    """Records an event every 10 ms."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def record(self) -> Any:
        self.events.append(Event(10.0 * len(self.events)))
        return self.events[-1]


@pytest.fixture
def samples() -> list[tuple[int, float]]:
    return []


def clock_of(samples: list[tuple[int, float]], device: Device | None = None) -> PrefillClock:
    return PrefillClock(lambda *sample: samples.append(sample), None if device is None else device.record)


def test_a_sample_has_the_tokens_of_all_requests_of_the_batch(samples: list[tuple[int, float]]) -> None:
    clock = clock_of(samples)
    clock.add(Request(64, 300))
    clock.add(Request(0, 100))
    clock.begins(loads=False)
    clock.ended()
    clock.ended()
    assert [tokens for tokens, _ in samples] == [336] and samples[0][1] >= 0


def test_a_batch_that_waits_for_a_load_or_computes_nothing_is_not_a_sample(samples: list[tuple[int, float]]) -> None:
    clock = clock_of(samples)
    clock.add(Request(0, 100))
    clock.begins(loads=True)
    clock.ended()
    clock.begins(loads=False)
    clock.ended()
    assert samples == []


def test_a_batch_that_also_decodes_is_not_a_sample_and_the_next_one_is(samples: list[tuple[int, float]]) -> None:
    clock = clock_of(samples)
    for tokens in (100, 50):
        clock.add(Request(0, tokens))
        clock.begins(loads=False)
        if tokens == 100:
            clock.leave_out()
        clock.ended()
    assert [tokens for tokens, _ in samples] == [50]


def test_a_request_that_was_retracted_before_its_batch_counts_nothing(samples: list[tuple[int, float]]) -> None:
    clock = clock_of(samples)
    clock.add(Request(0, None))
    clock.add(Request(0, 50))
    clock.begins(loads=False)
    clock.ended()
    assert [tokens for tokens, _ in samples] == [50]


def test_on_a_device_a_sample_counts_once_its_events_have_passed(samples: list[tuple[int, float]]) -> None:
    device = Device()
    clock = clock_of(samples, device)
    clock.add(Request(0, 100))
    clock.begins(loads=False)
    clock.ended()
    assert samples == []
    for event in device.events:
        event.passed = True
    clock.ended()
    assert samples == [(100, 0.01)]
