"""Tokens, page keys, seeds and namespaces."""

from __future__ import annotations

import array
import hashlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache.arguments import NAME_BYTES_MAX
from hicache.errors import InvalidInput
from hicache.keys import (
    PageChain,
    RadixKey,
    TokenInput,
    chain,
    namespace_seed,
    page_keys,
    token_bytes,
    token_ids,
)

TOKENS = [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.fixture(scope="module", params=["numpy", "native"], autouse=True)
def _native(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test of this module runs without and with the native helper."""
    helper = request.getfixturevalue("native") if request.param == "native" else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_ids, "pack_token_ids", getattr(helper, "pack_token_ids", None))
        patch.setattr(chain, "hash_pages", getattr(helper, "hash_pages", None))
        yield


def hashlib_keys(pages: bytes, page_bytes: int, prior: bytes) -> list[bytes]:
    """The definition of page keys."""
    starts = range(0, len(pages) - page_bytes + 1, page_bytes)
    return [prior := hashlib.sha256(prior + pages[start : start + page_bytes]).digest() for start in starts]


@pytest.fixture(scope="module")
def hash_pages(native: Any) -> Any:
    """That of the helper."""
    if native.hash_pages(b"", 1, b"") is None:
        pytest.skip("the processor has no instructions for SHA-256")
    return native.hash_pages


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 2**31 - 1), min_size=1, max_size=300))
def test_only_values_outside_the_range_are_rejected(tokens: list[int]) -> None:
    wrong = [number for number, token in enumerate(tokens) if not 0 <= token < 2**31]
    if wrong:
        with pytest.raises(InvalidInput, match="outside"):
            token_bytes(array.array("q", tokens))
    else:
        assert token_bytes(array.array("q", tokens)) == np.array(tokens, dtype="<u4").tobytes()


@pytest.mark.parametrize("bit", [31, 32, 63])
@pytest.mark.parametrize("position", [0, 63, 1000])
def test_high_bits_beyond_the_range_are_not_lost(bit: int, position: int) -> None:
    tokens = np.zeros(1001, dtype=np.uint64)
    tokens[position] = 1 << bit
    with pytest.raises(InvalidInput, match=f"position {position} "):
        token_bytes(array.array("q", tokens.astype(np.int64).tolist()))


def test_the_helper_rejects_memory_that_is_not_contiguous(native: Any) -> None:
    pack_token_ids = native.pack_token_ids
    with pytest.raises(BufferError):
        pack_token_ids(memoryview(bytes(64))[::2])
    with pytest.raises(TypeError):
        pack_token_ids(5)
    assert pack_token_ids(b"") == b""


@pytest.mark.parametrize("prior", [b"", bytes(range(32))], ids=["no prior", "prior"])
def test_the_helper_hashes_as_hashlib_does(hash_pages: Any, prior: bytes) -> None:
    """Each length of a page modulo the 64 bytes of a block, with all there is to pad."""
    some = np.random.default_rng(5).bytes(40_000)
    for page_bytes in (*range(1, 330), 4096, 13_000):
        for count in (0, 1, 3):
            run = some[: page_bytes * count + page_bytes // 2]  # a part of a page has no key
            assert hash_pages(run, page_bytes, prior) == hashlib_keys(run, page_bytes, prior), (page_bytes, count)


def test_the_helper_rejects_lengths_that_are_not_pages(hash_pages: Any) -> None:
    for page_bytes, prior in ((0, b""), (-4, b""), (4, bytes(31)), (4, bytes(33))):
        with pytest.raises(ValueError, match="hash_pages: pass pages"):
            hash_pages(bytes(64), page_bytes, prior)
    with pytest.raises(BufferError):
        hash_pages(memoryview(bytes(64))[::2], 4, b"")


def test_other_threads_run_while_the_helper_hashes_a_long_run(hash_pages: Any) -> None:
    """The interpreter makes no thread give up its lock within an hour. A main thread that wakes up late finds the run
    hashed, so there are some tries; with the lock held all of them fail."""
    run, interval = bytes(32 << 20), sys.getswitchinterval()

    def interrupts() -> bool:
        begun, ended = threading.Event(), threading.Event()

        def work() -> None:
            begun.set()
            hash_pages(run, 64, b"")
            ended.set()

        thread = threading.Thread(target=work)
        thread.start()
        begun.wait()
        early = not ended.is_set()
        thread.join()
        return early

    sys.setswitchinterval(3600)
    try:
        assert any(interrupts() for _ in range(20))
    finally:
        sys.setswitchinterval(interval)


def test_a_processor_without_the_instructions_has_the_same_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = token_bytes(range(1000))
    expected = hashlib_keys(packed, 64, b"")
    assert page_keys(packed, 16) == expected
    monkeypatch.setattr(chain, "hash_pages", lambda tokens, page_bytes, prior: None)
    assert page_keys(packed, 16) == expected


def test_ids_in_the_other_byte_order_are_the_same_ids() -> None:
    for kind in (">i8", ">u4", ">i2"):
        assert token_bytes(np.array(TOKENS, dtype=kind)) == token_bytes(TOKENS)
    assert token_bytes(np.array([1 << 24], dtype=">i4")) == token_bytes([1 << 24])


def test_page_keys_have_the_published_values() -> None:
    first, second = page_keys(token_bytes(TOKENS), 4)
    assert first.hex() == "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72"
    assert second.hex() == "4ebfa8a1f3c341517621838c6e1b9aa350307e3f00b3cbd1a07ef740f54396d6"


@pytest.mark.parametrize(
    "tokens",
    [
        TOKENS,
        tuple(TOKENS),
        range(1, 9),
        array.array("i", TOKENS),
        array.array("q", TOKENS),
        array.array("H", TOKENS),
        np.array(TOKENS),
        np.array(TOKENS, dtype=np.int16),
        np.array(TOKENS, dtype=np.uint64),
        np.repeat(np.array(TOKENS), 2)[::2],
        torch.tensor(TOKENS),
        torch.tensor(TOKENS, dtype=torch.int32),
        torch.tensor(TOKENS, dtype=torch.uint8),
    ],
    ids=lambda tokens: type(tokens).__name__,
)
def test_all_kinds_of_tokens_are_the_same_bytes(tokens: TokenInput) -> None:
    assert token_bytes(tokens) == np.array(TOKENS, dtype="<u4").tobytes()


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "empty"),
        (np.empty(0, np.int64), "empty"),
        (torch.empty(0, dtype=torch.int64), "empty"),
        ([1, -2], "position 1"),
        (np.array([5, 2**31]), "position 1"),
        (np.array([-1], dtype=np.int16), "position 0"),
        ([2**70], "expected integers"),
        ([1.5], "expected integers"),
        (["a"], "expected integers"),
        ("text", "tokenize"),
        (b"text", "tokenize"),
        (array.array("u", "text"), "tokenize"),
        (np.array([1.0]), "dtype float64"),
        (np.array([True]), "dtype bool"),
        (torch.tensor([1.0]), "float32"),
        (torch.tensor([True]), "bool"),
        (np.array([[1, 2]]), "shape"),
        (torch.tensor([[1, 2]]), "shape"),
        (7, "expected"),
        (None, "expected"),
        (bytearray(16), "tokenize"),
        (memoryview(bytes(12)), "tokenize"),
        (torch.Size([1, 2]), "Size"),
        (torch.int64, "dtype"),
        (torch.empty(2, dtype=torch.int64, device="meta"), "dense"),
        (torch.tensor([1, 2]).to_sparse(), "dense"),
        ([None], "expected integers"),
        ({1, 2}, "expected a sequence"),
        (frozenset((1, 2)), "expected a sequence"),
        ({1: 2}, "expected a sequence"),
        ({1: 2}.values(), "expected a sequence"),
        (np.ma.array([1, 2], mask=[False, True]), "masked"),
        ([float("nan")], "expected integers"),
    ],
)
def test_bad_tokens_are_refused_with_a_typed_error(tokens: TokenInput, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        token_bytes(tokens)


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=80), st.integers(1, 20), st.integers(0, 80))
def test_keys_chain_over_any_cut(tokens: list[int], page_size: int, cut: int) -> None:
    data = token_bytes(tokens)
    keys = page_keys(data, page_size)
    assert len(keys) == len(tokens) // page_size
    cut = min(cut, len(keys))
    if cut:
        assert page_keys(data[cut * page_size * 4 :], page_size, keys[cut - 1]) == keys[cut:]
    if keys:
        expected = hashlib.sha256(data[: page_size * 4]).digest()
        assert keys[0] == expected


def test_a_prior_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(InvalidInput):
        page_keys(token_bytes(TOKENS), 4, b"short")


def test_different_namespaces_have_different_seeds() -> None:
    seeds = {
        namespace_seed(*pair)
        for pair in [(None, None), ("a", None), (None, "a"), ("a", "a"), ("ab", None), ("a", "b"), ("b", "a")]
    }
    assert len(seeds) == 7
    assert namespace_seed() == b""


@pytest.mark.parametrize("name", ["extra_key", "cache_salt"])
@pytest.mark.parametrize(
    "value",
    ["\ud800", "a\udfff", "", 5, 0, b"bytes", ["a"], 1.5, True, np.array(["a", "b"]), "x" * (NAME_BYTES_MAX + 1)],
    ids=lambda value: f"{type(value).__name__}-{len(value) if isinstance(value, str) else ''}",
)
def test_a_salt_that_cannot_be_hashed_is_refused_by_name_and_not_shown(name: str, value: Any) -> None:
    with pytest.raises(InvalidInput, match=f"^{name}: ") as caught:
        RadixKey.of(TOKENS, **{name: value})
    assert "xx" not in str(caught.value)


def test_the_longest_salt_makes_a_seed() -> None:
    assert len(namespace_seed(cache_salt="x" * NAME_BYTES_MAX)) == 32
    assert namespace_seed(cache_salt="\U0001f600") != namespace_seed(cache_salt="?")


@pytest.mark.parametrize(
    ("tokens", "seed", "position_bytes"),
    [
        (b"12345", b"", 4), (b"1234", b"tenant", 4), (b"1234", b"x" * 33, 4), (b"1234", b"", 5), (b"1234", b"", 4.0),
        ("1234", b"", 4), (bytearray(4), b"", 4), (None, b"", 4), (b"1234", "", 4), (b"1234", None, 4),
        (np.zeros(4, np.uint8), b"", 4),
    ],
    ids=str,
)
def test_a_malformed_radix_key_is_refused(tokens: Any, seed: Any, position_bytes: Any) -> None:
    with pytest.raises(InvalidInput):
        RadixKey(tokens, seed, position_bytes)


def test_plain_and_bigram_keys_of_the_same_bytes_do_not_continue_each_other() -> None:
    bigram = RadixKey.of([1, 2, 3], bigram=True)
    assert bigram.continues(bigram.head(1))
    assert not bigram.continues(RadixKey(bigram.tokens))


HASHES = [hashlib.sha256(bytes([number])).digest() for number in range(5)]


def test_hashes_of_the_engine_are_the_page_keys_as_they_are() -> None:
    key = RadixKey.of_hashes(HASHES)
    assert key.pages(16) == key.pages(64) == len(key) == 5
    assert key.page_keys(16, b"", 1, 3) == HASHES[1:3]
    assert key.head(2) == RadixKey.of_hashes(tuple(HASHES[:2])) and key.continues(key.head(2))
    assert RadixKey.of_hashes([]).pages(16) == 0


@pytest.mark.parametrize("bigram", [False, True])
def test_whole_pages_and_their_keys_are_those_of_the_tokens(bigram: bool) -> None:
    key = RadixKey.of(list(range(8)), bigram=bigram, cache_salt="a")
    whole_keys = page_keys(key.tokens, 3 * (1 + bigram), key.seed)
    assert key.pages(3) == len(whole_keys) == 2
    assert key.page_keys(3, key.seed, 0, 2) == whole_keys
    assert key.page_keys(3, whole_keys[0], 1, 2) == whole_keys[1:]


def test_equal_hashes_under_two_seeds_have_no_page_key_in_common() -> None:
    names: list[dict[str, str]] = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"extra_key": "a"}]
    keys = [RadixKey.of_hashes(HASHES, **name).page_keys(16, b"", 0, 5) for name in names]
    assert len({page for one in keys for page in one}) == 4 * 5
    assert keys[1][0] == hashlib.sha256(namespace_seed(cache_salt="a") + HASHES[0]).digest()


@pytest.mark.parametrize(
    ("hashes", "message"),
    [
        (b"x" * 64, "sequence of bytes"), ("x" * 64, "sequence of bytes"), (None, "sequence of bytes"),
        (set(HASHES), "sequence of bytes"), ([HASHES[0], b"short"], "page 1 has 5 bytes"), ([7], "of type int"),
        (["x" * 32], "of type str"), ([bytearray(32)], "of type bytearray"), ([*HASHES, HASHES[2]], "same hash"),
        (np.zeros((2, 32), np.uint8), "sequence of bytes"),
    ],
)
def test_hashes_of_another_form_are_refused(hashes: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        RadixKey.of_hashes(hashes)


def test_given_page_keys_have_no_tokens() -> None:
    key = RadixKey.of_hashes(HASHES)
    with pytest.raises(InvalidInput, match="a cache of page keys"):
        _ = key.prompt_tokens
    with pytest.raises(InvalidInput, match="all hashes"):
        key.extended([1])
    with pytest.raises(InvalidInput, match="of_hashes"):
        RadixKey(key.tokens, bytes(32), key.position_bytes)


def test_a_key_shows_lengths_and_neither_tokens_nor_hashes() -> None:
    tokens = list(range(424242, 424242 + 100_000))
    assert repr(RadixKey.of(tokens, cache_salt="a", bigram=True)) == "RadixKey(99999 bigrams, with a seed)"
    assert repr(RadixKey.of_hashes(HASHES)) == "RadixKey(5 page keys)"
    assert repr(PageChain(token_bytes(tokens), 100, b"")) == "PageChain(1000 pages, not hashed)"


def test_a_key_grows_with_its_request() -> None:
    key = RadixKey.of([1, 2], cache_salt="a").extended([3])
    assert key == RadixKey.of([1, 2, 3], cache_salt="a")
    assert len(key) == 3
