"""The bytes of pages: every kind of wrong page is detected, with the number of wrong bytes."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable

import numpy as np
import pytest
import torch

from hicache.errors import InvalidInput
from hicache.geometry import KVGeometry, KVLayout
from hicache.tiers import KVPool, create_device_pool
from hicache.types import PageIds
from hicache_lab.replay.stand_in import PageBytes, page_seeds

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
        """Return the pages of one layer, uint8 `[pages + 1, bytes]`."""
        (region,) = self.pool.blocks.layers[layer]
        return region

    def wrong(self) -> list[int]:
        """Return the number of wrong bytes of each page, over all layers."""
        total, expected = np.zeros(PAGES, np.int64), self.bytes.expected(self.pages, self.seeds)
        for layer in range(self.pool.geometry.layers):
            total += self.bytes.wrong_bytes(layer, expected)
        return [int(count) for count in total]


@pytest.fixture(params=[MHA, MLA], ids=["mha", "mla"])
def filled(request: pytest.FixtureRequest) -> Filled:
    return Filled(request.param)


def test_only_the_requested_pages_are_written_and_they_are_correct(filled: Filled) -> None:
    assert not filled.block(0)[0].any()
    filled.bytes.fill(ids(), filled.seeds[:0])
    assert filled.wrong() == [0] * PAGES
    assert filled.bytes.wrong_bytes(0, filled.bytes.expected(ids(), filled.seeds[:0])).shape == (0,)


def flip(blocks: list[torch.Tensor]) -> None:
    blocks[1][3, 17] ^= 1


def replace_by_another(blocks: list[torch.Tensor]) -> None:
    blocks[0][3] = blocks[0][5]


def swap(blocks: list[torch.Tensor]) -> None:
    blocks[2][3], blocks[2][5] = blocks[2][5].clone(), blocks[2][3].clone()


def shift(blocks: list[torch.Tensor], by: int) -> None:
    blocks[0][3] = blocks[0][3].roll(by)


def take_another_layer(blocks: list[torch.Tensor]) -> None:
    blocks[1][3] = blocks[0][3]


def put_k_for_v(blocks: list[torch.Tensor]) -> None:
    k, v = blocks[0][3].chunk(2)
    v[:] = k


def leave_half_out(blocks: list[torch.Tensor]) -> None:
    blocks[0][3, blocks[0].shape[1] // 2 :] = 0


@pytest.mark.parametrize(
    ("damage", "least", "most"),
    [(flip, 0, 0), (replace_by_another, 0.95, 1), (swap, 0.95, 1), (take_another_layer, 0.95, 1), (put_k_for_v, 0.4, 1),
     (leave_half_out, 0.475, 0.5), *((functools.partial(shift, by=by), 0.9, 1) for by in (1, 2, 8, 16, 64))],
)
def test_every_kind_of_damage_is_detected_in_all_changed_bytes(
    filled: Filled, damage: Callable[[list[torch.Tensor]], None], least: float, most: float
) -> None:
    """`least` and `most` are shares of the page's bytes in one layer; a flipped bit is one byte."""
    damage([filled.block(layer) for layer in range(filled.pool.geometry.layers)])
    wrong, size = filled.wrong(), filled.block(0).shape[1]
    assert max(1, least * size) <= wrong[2] <= max(1, most * size)
    assert [wrong[page] for page in (0, 1, 3, 5)] == [0] * 4
    assert (wrong[4] > 0) == (damage is swap)


def test_old_bytes_of_a_reused_page_are_wrong_bytes(filled: Filled) -> None:
    filled.seeds = page_seeds([hashlib.sha256(b"new").digest()] * PAGES)
    assert min(filled.wrong()) > 0


def test_pages_of_one_prefix_and_different_tokens_have_different_bytes() -> None:
    seeds = page_seeds(keys(PAGES))
    assert len(set(seeds.tolist())) == PAGES


def test_blocks_that_are_not_whole_words_are_rejected() -> None:
    pool = create_device_pool(KVGeometry(layers=1, heads=1, head_dim=3, page_size=1), 2)
    with pytest.raises(InvalidInput, match="multiple of 8"):
        PageBytes(pool)
