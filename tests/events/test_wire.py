"""Batches as bytes: what we read back, what other consumers' types read, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import InvalidInput
from hicache.events import Cleared, Event, Medium, Removed, Stored
from hicache.events.wire import decode_batch, encode_batch
from hicache.keys import page_keys, token_bytes

TOKENS = token_bytes(range(1, 9))
KEYS = tuple(page_keys(TOKENS, 4))
SEED = bytes(range(32))
EVENTS: tuple[Event, ...] = (
    Stored(Medium.DEVICE, KEYS, None, b"", TOKENS, 4),
    Stored(Medium.HOST, KEYS[1:], KEYS[0], b"", TOKENS[16:], 4),
    Stored(Medium.STORAGE, tuple(page_keys(TOKENS, 4, SEED)), None, SEED, TOKENS, 4),
    Stored(Medium.DEVICE, tuple(page_keys(TOKENS, 4)), None, b"", TOKENS, 2),  # bigrams
    Removed(Medium.HOST, KEYS),
    Cleared(),
)


class ArrayEvent(msgspec.Struct, array_like=True, tag=True):
    """How consumers of positional events declare them."""


class BlockStored(ArrayEvent):
    """Of the time before `medium` had a companion."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[Any]
    block_size: int
    lora_id: int | None
    medium: str | None


class BlockRemoved(ArrayEvent):
    """Pages that left."""

    block_hashes: list[bytes]
    medium: str | None


class AllBlocksCleared(ArrayEvent):
    """All pages that left."""


class ArrayBatch(msgspec.Struct, array_like=True):
    """How consumers declare the envelope."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def test_what_was_written_is_read_back() -> None:
    assert decode_batch(encode_batch(EVENTS, 12.5)) == EVENTS


def test_other_consumers_read_the_batch() -> None:
    batch = msgspec.msgpack.decode(encode_batch(EVENTS, 1.0), type=ArrayBatch)
    assert (batch.ts, batch.data_parallel_rank) == (1.0, None)
    first, second, third, bigrams, removed, cleared = batch.events
    assert first == BlockStored(list(KEYS), None, list(range(1, 9)), 4, None, "GPU")
    assert second == BlockStored([KEYS[1]], KEYS[0], [5, 6, 7, 8], 4, None, "CPU")
    assert isinstance(third, BlockStored) and (third.parent_block_hash, third.medium) == (None, "STORAGE")
    assert msgspec.msgpack.decode(encode_batch(EVENTS, 1.0))[1][2][-2:] == [None, [[SEED], None]]
    assert isinstance(bigrams, BlockStored) and bigrams.token_ids == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert removed == BlockRemoved(list(KEYS), "CPU")
    assert cleared == AllBlocksCleared()


def test_without_token_ids_neither_tokens_nor_seeds_are_written() -> None:
    payload = encode_batch(EVENTS, 1.0, token_ids=False)
    assert SEED not in payload
    events = decode_batch(payload)
    assert events[2] == Stored(Medium.STORAGE, tuple(page_keys(TOKENS, 4, SEED)), None, b"", b"", 4)
    assert SEED in encode_batch(EVENTS, 1.0)  # negative control


def stored(**changes: object) -> list[object]:
    fields: dict[str, object] = {
        "type": "BlockStored", "block_hashes": [KEYS[0]], "parent_block_hash": None, "token_ids": [1, 2, 3, 4],
        "block_size": 4, "lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": None,
    }  # fmt: skip
    return list((fields | changes).values())


def decoded(*events: object) -> tuple[Event, ...]:
    return decode_batch(msgspec.msgpack.encode((1.0, events, None)))


def test_fields_from_the_future_are_skipped() -> None:
    assert decoded(stored(group_idx=1)) == decoded(stored())
    assert decoded(["BlockRemoved", [KEYS[0]], "GPU", 7]) == (Removed(Medium.DEVICE, KEYS[:1]),)


def test_an_event_without_a_medium_is_of_the_device() -> None:
    assert decoded(["BlockRemoved", [KEYS[0]]], ["BlockRemoved", [KEYS[0]], None]) == 2 * (
        Removed(Medium.DEVICE, KEYS[:1]),
    )


@pytest.mark.parametrize(
    "event",
    [
        stored(block_hashes=[]), stored(block_hashes=[b"short"]), stored(block_hashes=[7]), stored(block_size=0),
        stored(parent_block_hash=b""), stored(token_ids=[1]), stored(token_ids=[1, 2, [3, 4], 5]),
        stored(token_ids=[-1, 2, 3, 4]), stored(token_ids=[2**32, 2, 3, 4]), stored(token_ids=[[1, 2, 3]] * 4),
        stored(medium="TAPE"), stored(extra_keys=[["salt"]]), stored(extra_keys=[[b"short"]]), stored(type="Other"),
        *(stored(extra_keys=[[seed]]) for seed in (None, 0, "", False)),
        {"type": "AllBlocksCleared"}, ["BlockStored"], ["BlockRemoved", 5], [], {}, 5, None,
    ],
)  # fmt: skip
def test_what_is_no_event_is_refused(event: object) -> None:
    with pytest.raises(InvalidInput, match="KV events"):
        decoded(event)


@pytest.mark.parametrize("payload", [b"", b"\xc1", msgspec.msgpack.encode([1.0]), msgspec.msgpack.encode({"ts": 1})])
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(InvalidInput, match="not a batch"):
        decode_batch(payload)


@given(st.data())
def test_damaged_batches_raise_nothing_but_the_typed_error(data: st.DataObject) -> None:
    whole = encode_batch(EVENTS, 1.0)
    damaged = bytearray(whole[: data.draw(st.integers(0, len(whole)))])
    for _ in range(data.draw(st.integers(0, 4))):
        if damaged:
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode_batch(bytes(damaged))
    except InvalidInput:
        pass


@pytest.mark.parametrize("start", ["", "93cb" + "00" * 8 + "91", "93cb" + "00" * 8 + "91" + "99a178"])
def test_a_batch_that_nests_deeply_is_the_typed_error(start: str) -> None:
    """As the whole, as an event, and as a field that is skipped."""
    with pytest.raises(InvalidInput, match="not a batch of events"):
        decode_batch(bytes.fromhex(start) + b"\x91" * 100_000 + b"\xc0\xc0")


@given(st.binary(max_size=300), st.sampled_from([b"", b"\x93\xcb" + bytes(8), b"\x93\xcb" + bytes(8) + b"\x91\x98"]))
def test_any_bytes_are_a_batch_or_the_typed_error(noise: bytes, start: bytes) -> None:
    try:
        decode_batch(start + noise)
    except InvalidInput:
        pass


def test_text_that_is_no_utf_8_is_the_typed_error() -> None:
    whole = encode_batch([Removed(Medium.DEVICE, (bytes(32),))], 1.0)
    with pytest.raises(InvalidInput, match="not a batch of events"):
        decode_batch(whole.replace(b"GPU", b"G\x80U"))


def test_the_worked_example_of_the_format_page_is_true(repository: Path) -> None:
    page = (repository / "docs/formats/kv_events.md").read_text()
    event = Stored(
        Medium.DEVICE, tuple(page_keys(token_bytes([1, 2, 3, 4]), 4)), None, b"", token_bytes([1, 2, 3, 4]), 4
    )
    payload = encode_batch([event], 1.5)
    shown = re.findall(r"```hex\n(.*?)```", page, flags=re.DOTALL)
    assert bytes.fromhex("".join(shown)) == payload
    assert f"{len(payload)} bytes" in page
