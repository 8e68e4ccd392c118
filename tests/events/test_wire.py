"""Batches as bytes: decoding by HiCache and by other consumers, and rejected batches."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import InvalidInput
from hicache.events import Cleared, Event, Medium, Origin, Removed, Stored
from hicache.events.blocks import BlockEvent
from hicache.events.wire import WireForm, decode_batch, encode_batch
from hicache.keys import RadixKey, page_keys, token_bytes

TOKENS = token_bytes(range(1, 9))
KEYS = tuple(page_keys(TOKENS, 4))
PAIRS = RadixKey.of([*range(1, 9), 9], bigram=True).tokens
SEED = bytes(range(32))
OF_SEED = tuple(page_keys(TOKENS, 4, SEED))
ORIGIN = Origin(7, "lora", "salt", "session")
EVENTS: tuple[Event, ...] = (
    Stored(Medium.DEVICE, KEYS, None, b"", TOKENS, 4),
    Stored(Medium.HOST, KEYS[1:], KEYS[0], b"", TOKENS[16:], 4),
    Stored(Medium.STORAGE, OF_SEED, None, SEED, TOKENS, 4),
    Stored(Medium.DEVICE, tuple(page_keys(PAIRS, 8)), None, b"", PAIRS, 4),
    Removed(Medium.HOST, KEYS),
    Cleared(),
)
NAMED = (Stored(Medium.DEVICE, OF_SEED, None, SEED, TOKENS, 4, ORIGIN),)
OPEN = WireForm(tenants=True)


def test_written_values_are_read_back() -> None:
    assert decode_batch(encode_batch(EVENTS, 12.5)) == EVENTS
    assert decode_batch(encode_batch(NAMED, 12.5, OPEN)) == NAMED
    assert decode_batch(encode_batch(EVENTS, 12.5, WireForm(media="sglang"))) == EVENTS


def as_maps(events: Iterable[Event | BlockEvent], form: WireForm = OPEN) -> list[dict[str, Any]]:
    """Return the events of a batch, without the fields that only HiCache reads."""
    _, found, _ = msgspec.msgpack.decode(encode_batch(events, 1.0, form))
    return [{name: value for name, value in event.items() if name != "hicache"} for event in found]


def test_a_page_hash_is_the_first_64_bits_of_its_key() -> None:
    first, second, *_, removed, cleared = as_maps(EVENTS)
    numbers = [int.from_bytes(key[:8], "big", signed=True) for key in KEYS]
    assert (first["block_hashes"], first["parent_block_hash"]) == (numbers, None)
    assert (second["block_hashes"], second["parent_block_hash"]) == (numbers[1:], numbers[0])
    assert removed == {"type": "BlockRemoved", "block_hashes": numbers, "medium": "CPU"}
    assert cleared == {"type": "AllBlocksCleared"}


class SglangRouter:
    """The rules of SGLang's router for the media of a page (`Tiers` in its `tree.rs`): a page that is stored on an
    unknown medium is dropped, and one that is removed from an unknown medium is removed from all."""

    known = frozenset({"GPU", "CPU_PINNED", "DISK", "EXTERNAL"})

    def __init__(self, media: str) -> None:
        self.form = WireForm(media=media)
        self.pages: dict[int, set[str]] = {}

    def media_after(self, event: Event) -> set[str]:
        """Apply an event. Return the media of the first page."""
        (one,) = as_maps([event], self.form)
        medium = {one["medium"]}
        for page in one["block_hashes"]:
            on = self.pages.get(page, set())
            stored = one["type"] == "BlockStored"
            self.pages[page] = on | (medium & self.known) if stored else on - (medium & self.known or self.known)
        return self.pages[int.from_bytes(KEYS[0][:8], "big", signed=True)]


def test_an_eviction_hides_no_other_medium_from_sglangs_router() -> None:
    router = SglangRouter("sglang")
    for medium in Medium:
        router.media_after(EVENTS[0]._replace(medium=medium))  # type: ignore[union-attr]
    assert router.media_after(Removed(Medium.HOST, KEYS)) == {"GPU", "EXTERNAL"}
    assert router.media_after(Removed(Medium.DEVICE, KEYS)) == {"EXTERNAL"}
    assert router.media_after(Removed(Medium.STORAGE, KEYS)) == set()
    # vLLM's names hide what the device still has.
    router = SglangRouter("vllm")
    router.media_after(EVENTS[0])
    assert router.media_after(Removed(Medium.HOST, KEYS)) == set()


def test_token_ids_are_single_integers_also_for_bigram_keys() -> None:
    assert [event["token_ids"] for event in as_maps(EVENTS[:4])] == [
        list(range(1, 9)), list(range(5, 9)), list(range(1, 9)), list(range(1, 9)),
    ]


def test_without_token_ids_neither_tokens_nor_seeds_are_written() -> None:
    payload = encode_batch(EVENTS, 1.0, WireForm(token_ids=False))
    assert SEED not in payload
    events = decode_batch(payload)
    assert events[2] == Stored(Medium.STORAGE, OF_SEED, None, b"", b"", 4)
    assert SEED in encode_batch(EVENTS, 1.0)  # negative control


def test_salts_and_sessions_are_written_only_if_enabled_and_adapters_always() -> None:
    payload = encode_batch(NAMED, 1.0)
    assert b"salt" not in payload.replace(b"cache_salt", b"") and b"session" not in payload
    (event,) = as_maps(NAMED, WireForm())
    assert (event["lora_id"], event["lora_name"], event["extra_keys"]) == (7, "lora", [["lora", SEED], ["lora"]])
    (event,) = as_maps(NAMED)
    assert (event["cache_salt"], event["session_id"], event["extra_keys"]) == (
        "salt", "session", [["lora", "salt"], ["lora"]],
    )


@pytest.mark.parametrize(
    ("origin", "extra_keys"),
    [(Origin(), [[SEED], None]), (Origin(lora_name="lora"), [["lora"], ["lora"]]),
     (Origin(cache_salt="salt"), [["salt"], None])],
)
def test_the_extra_keys_name_adapter_and_salt(origin: Origin, extra_keys: object) -> None:
    (event,) = as_maps([NAMED[0]._replace(origin=origin)])
    assert event["extra_keys"] == extra_keys
    assert "extra_keys" not in as_maps(EVENTS[:1])[0]


def stored(own: object = (), **changes: object) -> dict[str, object]:
    fields: dict[str, object] = {
        "type": "BlockStored", "block_hashes": [5], "parent_block_hash": None, "token_ids": [1, 2, 3, 4],
        "block_size": 4, "lora_id": None, "medium": "GPU", "lora_name": None, "hicache": own or [KEYS[0]],
    }
    return fields | changes


def removed(**changes: object) -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": [5], "medium": "GPU", "hicache": KEYS[0]} | changes


def decoded(*events: object) -> tuple[Event, ...]:
    return decode_batch(msgspec.msgpack.encode((1.0, events, None)))


def test_unknown_fields_are_skipped() -> None:
    assert decoded(stored(group_idx=1)) == decoded(stored()) == decoded(stored([KEYS[0], None, b"", None, 0, 8]))
    assert decoded(removed(locality="LOCAL")) == (Removed(Medium.DEVICE, KEYS[:1]),)


def test_an_event_without_a_medium_means_the_device() -> None:
    assert decoded(removed(medium=None)) == (Removed(Medium.DEVICE, KEYS[:1]),)


@pytest.mark.parametrize(
    "event",
    [
        stored(block_hashes=[]), stored(block_hashes=[KEYS[0]]), stored(block_hashes=[7, 8]), stored(block_size=0),
        stored([b"short"]), stored([KEYS[0], b"short"]), stored([KEYS[0], None, b"short"]), stored([KEYS[0], 5]),
        stored([KEYS[0], None, None]), stored([KEYS[0], None, b"", 2**32]), stored([KEYS[0], None, b"", -1]),
        stored([b"", None, b"", None, 4]), stored([KEYS[0], None, b"", None, -4]), stored([b"x", None, b"", None, 4]),
        stored(block_hashes=[], hicache=[b""]), stored(hicache=None), stored(hicache=KEYS[0]), removed(hicache=None),
        removed(hicache=[KEYS[0]]), removed(hicache=b"short"), stored(parent_block_hash="x"), stored(token_ids=[1]),
        stored(token_ids=[1, 2, [3, 4], 5]), stored(token_ids=[-1, 2, 3, 4]), stored(token_ids=[2**32, 2, 3, 4]),
        stored(medium="TAPE"), stored(type="Other"), stored(lora_name=5), stored(cache_salt=b"x"), {},
        {"type": "BlockStored"}, {"type": "BlockRemoved", "block_hashes": 5}, ["AllBlocksCleared"], [], 5, None,
    ],
)
def test_an_invalid_event_is_rejected(event: object) -> None:
    with pytest.raises(InvalidInput, match="KV events"):
        decoded(event)


@pytest.mark.parametrize("payload", [b"", b"\xc1", msgspec.msgpack.encode([1.0]), msgspec.msgpack.encode({"ts": 1})])
def test_an_invalid_batch_is_rejected(payload: bytes) -> None:
    with pytest.raises(InvalidInput, match="not a batch"):
        decode_batch(payload)


@given(st.data())
def test_damaged_batches_raise_only_the_typed_error(data: st.DataObject) -> None:
    whole = encode_batch(EVENTS, 1.0)
    damaged = bytearray(whole[: data.draw(st.integers(0, len(whole)))])
    for _ in range(data.draw(st.integers(0, 4))):
        if damaged:
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode_batch(bytes(damaged))
    except InvalidInput:
        pass


@pytest.mark.parametrize("start", ["", "93cb" + "00" * 8 + "91", "93cb" + "00" * 8 + "91" + "82a178"])
def test_a_deeply_nested_batch_raises_the_typed_error(start: str) -> None:
    """The nesting is the whole batch, an event, or a skipped field."""
    with pytest.raises(InvalidInput, match="not a batch of events"):
        decode_batch(bytes.fromhex(start) + b"\x91" * 100_000 + b"\xc0\xc0")


@given(st.binary(max_size=300), st.sampled_from([b"", b"\x93\xcb" + bytes(8), b"\x93\xcb" + bytes(8) + b"\x91\x8b"]))
def test_any_bytes_decode_or_raise_the_typed_error(noise: bytes, start: bytes) -> None:
    try:
        decode_batch(start + noise)
    except InvalidInput:
        pass


def test_text_that_is_not_utf_8_raises_the_typed_error() -> None:
    whole = encode_batch([Removed(Medium.DEVICE, (bytes(32),))], 1.0)
    with pytest.raises(InvalidInput, match="not a batch of events"):
        decode_batch(whole.replace(b"GPU", b"G\x80U"))


def test_the_worked_example_on_the_format_page_is_correct(repository: Path) -> None:
    page = (repository / "docs/formats/kv_events.md").read_text()
    event = Stored(
        Medium.DEVICE, tuple(page_keys(token_bytes([1, 2, 3, 4]), 4)), None, b"", token_bytes([1, 2, 3, 4]), 4
    )
    payload = encode_batch([event], 1.5)
    shown = re.findall(r"```hex\n(.*?)```", page, flags=re.DOTALL)
    assert bytes.fromhex("".join(shown)) == payload
    assert f"{len(payload)} bytes" in page
