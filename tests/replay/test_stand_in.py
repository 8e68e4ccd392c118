"""Bytes of pages: every way in which a page can be wrong is found, with the number of bytes."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from hicache.errors import InvalidInput
from hicache.geometry import KVGeometry, KVLayout
from hicache.replay.stand_in import PageBytes, page_seeds
from hicache.tiers import KVPool, create_device_pool
from hicache.types import PageIds

MHA = KVGeometry(layers=3, heads=2, head_dim=8, page_size=16)
MLA = KVGeometry(layers=3, heads=1, head_dim=24, page_size=16, layout=KVLayout.MLA)
PAGES = 6


def ids(*pages: int) -> PageIds:
    return np.array(pages, np.int32)


def keys(count: int) -> list[bytes]:
    return [hashlib.sha256(bytes([i])).digest() for i in range(count)]


class Filled:
    """A pool whose pages 1 to 6 are filled."""

    def __init__(self, geometry: KVGeometry) -> None:
        self.pool: KVPool = create_device_pool(geometry, PAGES)
        self.bytes = PageBytes(self.pool)
        self.pages = ids(*range(1, PAGES + 1))
        self.seeds = page_seeds(keys(PAGES))
        self.bytes.fill(self.pages, self.seeds)

    def block(self, layer: int) -> torch.Tensor:
        """The pages of one layer, uint8 `[pages + 1, bytes]`."""
        (region,) = self.pool.blocks.layers[layer]
        return region

    def wrong(self) -> list[int]:
        """Wrong bytes by page, over all layers."""
        total, expected = np.zeros(PAGES, np.int64), self.bytes.expected(self.pages, self.seeds)
        for layer in range(self.pool.geometry.layers):
            total += self.bytes.wrong_bytes(layer, expected)
        return [int(count) for count in total]


@pytest.fixture(params=[MHA, MLA], ids=["mha", "mla"])
def filled(request: pytest.FixtureRequest) -> Filled:
    return Filled(request.param)


def test_what_was_filled_is_right(filled: Filled) -> None:
    assert filled.wrong() == [0] * PAGES


def test_only_the_pages_asked_for_are_written(filled: Filled) -> None:
    assert not filled.block(0)[0].any()
    filled.bytes.fill(ids(), filled.seeds[:0])
    assert filled.wrong() == [0] * PAGES


def test_no_pages_have_no_wrong_bytes(filled: Filled) -> None:
    assert filled.bytes.wrong_bytes(0, filled.bytes.expected(ids(), filled.seeds[:0])).shape == (0,)


def test_one_flipped_bit_is_one_wrong_byte(filled: Filled) -> None:
    filled.block(1)[3, 17] ^= 1
    assert filled.wrong() == [0, 0, 1, 0, 0, 0]


def test_another_page_of_the_pool_is_wrong_in_nearly_every_byte(filled: Filled) -> None:
    filled.block(0)[2] = filled.block(0)[5]
    size = filled.block(0).shape[1]
    assert 0.95 * size < filled.wrong()[1] <= size


def test_swapped_pages_are_wrong_both(filled: Filled) -> None:
    block = filled.block(2)
    block[1], block[2] = block[2].clone(), block[1].clone()
    wrong = filled.wrong()
    assert wrong[0] > 0 and wrong[1] > 0 and wrong[2:] == [0] * 4


@pytest.mark.parametrize("shift_bytes", [1, 2, 8, 16, 64])
def test_a_shifted_page_is_wrong(filled: Filled, shift_bytes: int) -> None:
    filled.block(0)[4] = filled.block(0)[4].roll(shift_bytes)
    assert filled.wrong()[3] > 0.9 * filled.block(0).shape[1]


def test_a_layer_in_the_place_of_another_is_wrong(filled: Filled) -> None:
    filled.block(1)[1] = filled.block(0)[1]
    assert filled.wrong()[0] > 0


def test_k_in_the_place_of_v_is_wrong() -> None:
    filled = Filled(MHA)
    k, v = filled.block(0)[1].chunk(2)
    v[:] = k
    assert filled.wrong()[0] > 0


def test_a_page_that_is_half_there_is_wrong_in_the_other_half(filled: Filled) -> None:
    half = filled.block(0).shape[1] // 2
    filled.block(0)[6, half:] = 0
    assert 0.95 * half < filled.wrong()[5] <= half


def test_what_a_page_held_before_is_wrong(filled: Filled) -> None:
    filled.seeds = page_seeds([hashlib.sha256(b"new").digest()] * PAGES)
    assert min(filled.wrong()) > 0


def test_pages_of_one_prefix_and_different_tokens_have_different_bytes() -> None:
    seeds = page_seeds(keys(PAGES))
    assert len(set(seeds.tolist())) == PAGES


def test_blocks_that_are_no_whole_words_are_refused() -> None:
    pool = create_device_pool(KVGeometry(layers=1, heads=1, head_dim=3, page_size=1), 2)
    with pytest.raises(InvalidInput, match="multiple of 8"):
        PageBytes(pool)
