"""Events name the origin of their pages: adapter and tenant as named by the engine, and the session of a turn."""

from __future__ import annotations

import pytest

from hicache.cache import recorder
from hicache.cache.recorder import EventRecorder
from hicache.errors import InvalidInput
from hicache.events import EventReader, EventStream, Medium, Origin, Stored
from hicache.keys import RadixKey
from tests.cache.talks import Talks
from tests.cache.world import World


def read(reader: EventReader) -> list[tuple[Medium, Origin]]:
    return [(event.medium, event.origin) for event in reader.drain(100) if isinstance(event, Stored)]


def recorded(world: World | Talks) -> EventReader:
    stream = EventStream(1 << 20)
    world.cache.record_events(stream)
    return stream.subscribe()


def test_events_name_the_adapter_and_the_tenant_of_pages_on_each_medium() -> None:
    world = World()
    reader = recorded(world)
    world.cache.name_origin(extra_key="adapter-7", cache_salt="salt", lora_id=7, lora_name="adapter")
    named = RadixKey.of(range(9), extra_key="adapter-7", cache_salt="salt")
    world.serve("a", named)
    world.settle()
    origin = Origin(7, "adapter", "salt", extra_key="adapter-7")
    assert set(read(reader)) == {(Medium.DEVICE, origin), (Medium.HOST, origin)}
    for number, other in enumerate([RadixKey.of(range(9)), RadixKey.of(range(9), extra_key="adapter-7")]):
        world.serve(f"b{number}", other)
    assert {origin for _, origin in read(reader)} == {Origin()}


def test_a_snapshot_names_the_origins_too() -> None:
    world = World()
    reader = recorded(world)
    world.cache.name_origin(extra_key="adapter-7", lora_name="adapter")
    world.serve("a", RadixKey.of(range(9), extra_key="adapter-7"))
    read(reader)
    reader.request_snapshot()
    world.cache.poll()
    assert {origin for _, origin in read(reader)} == {Origin(lora_name="adapter", extra_key="adapter-7")}


def test_events_of_pages_that_a_turn_computes_name_its_session() -> None:
    talks = Talks()
    reader = recorded(talks)
    talks.cache.open_session("s")
    talks.turn("s", list(range(1, 20)))
    assert {origin for medium, origin in read(reader) if medium is Medium.DEVICE} == {Origin(session_id="s")}
    talks.cache.open_session("t")
    talks.turn("t", [*range(1, 20), *range(50, 60)])
    events = read(reader)
    assert {origin for medium, origin in events if medium is Medium.DEVICE} == {Origin(session_id="t")}


def test_the_number_of_names_is_limited_and_the_oldest_is_dropped_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "ORIGINS_MAX", 2)
    names = EventRecorder(EventStream(1 << 20))
    for number in range(3):
        names.describe(f"adapter-{number}", None, number, None)
    assert [origin.lora_id for origin in names._origins.values()] == [1, 2]


def test_a_name_of_a_wrong_type_is_rejected_and_the_repr_shows_no_secret() -> None:
    world = World()
    recorded(world)
    for bad in ({"lora_id": "7"}, {"lora_name": 7}, {"extra_key": ""}):
        with pytest.raises(InvalidInput):
            world.cache.name_origin(**bad)
    named = Origin(7, "adapter", "salt", "session", "key")
    assert repr(named) == "Origin(lora_id, lora_name, cache_salt, session_id, extra_key)"
