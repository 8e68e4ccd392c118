"""Shapes of pages: pieces, their places, and shapes that cannot exist."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import InvalidInput
from hicache.geometry import KVGeometry, KVLayout, PageShape, Piece, page_shape


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=40))
def test_pieces_follow_each_other_without_a_gap(sizes: list[int]) -> None:
    shape = PageShape(16, [Piece(f"p{number}", size) for number, size in enumerate(sizes)])  # type: ignore[arg-type]
    assert [end - begin for begin, end in itertools.pairwise(shape.offsets)] == sizes
    assert (shape.offsets[0], shape.offsets[-1]) == (0, shape.payload_bytes)
    assert shape.payload_bytes == sum(sizes)


@pytest.mark.parametrize("layout", KVLayout)
def test_a_geometry_has_one_piece_per_layer(layout: KVLayout) -> None:
    geometry = KVGeometry(layers=3, heads=2, head_dim=8, page_size=16, layout=layout)
    shape = page_shape(geometry)
    assert (shape.tokens, len(shape.pieces)) == (16, 3)
    assert {piece.bytes for piece in shape.pieces} == {geometry.layer_bytes}
    assert shape.payload_bytes == geometry.payload_bytes
    assert page_shape(shape) is shape


def test_heads_of_v_and_k_may_differ_in_size() -> None:
    geometry = KVGeometry(layers=2, heads=3, head_dim=24, page_size=4, v_head_dim=16)
    assert geometry.layer_bytes == 4 * 3 * (24 + 16) * 2 and geometry.value_dim == 16
    equal = KVGeometry(layers=2, heads=3, head_dim=24, page_size=4, v_head_dim=24)
    assert equal == KVGeometry(layers=2, heads=3, head_dim=24, page_size=4) and equal.value_dim == 24
    assert equal.layer_bytes == equal.blocks_per_layer * equal.block_bytes
    for wrong in (0, -1, 1.5):
        with pytest.raises(InvalidInput, match="v_head_dim"):
            KVGeometry(layers=2, heads=3, head_dim=24, page_size=4, v_head_dim=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="leave it out"):
        KVGeometry(layers=2, heads=1, head_dim=24, page_size=4, layout=KVLayout.MLA, v_head_dim=16)


def test_numbers_of_numpy_make_the_same_shape_and_exact_sizes() -> None:
    piece = Piece("kv", np.int16(30_000))  # type: ignore[arg-type]
    shape = PageShape(np.int8(16), (piece,) * 3)  # type: ignore[arg-type]
    assert shape == PageShape(16, (Piece("kv", 30_000),) * 3)
    assert shape.payload_bytes == 90_000 and type(shape.payload_bytes) is int


@pytest.mark.parametrize(
    ("name", "size"),
    [("", 8), (None, 8), (b"kv", 8), ("\ud800", 8), ("x" * 70_000, 8), ("kv", 0), ("kv", -1), ("kv", 1.0),
     ("kv", True), ("kv", None), ("kv", "8"), ("kv", 2**63)],
)
def test_an_invalid_piece_is_rejected(name: Any, size: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^piece: "):
        Piece(name, size)


@pytest.mark.parametrize(
    ("tokens", "pieces"),
    [(0, (Piece("kv", 8),)), (1025, (Piece("kv", 8),)), (16.0, (Piece("kv", 8),)), (16, ()), (16, None), (16, 5),
     (16, Piece("kv", 8)), (16, (8, 8)), (16, ("kv",)), (16, (Piece("kv", 8), None))],
)
def test_an_invalid_shape_is_rejected(tokens: Any, pieces: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^page shape: "):
        PageShape(tokens, pieces)


@pytest.mark.parametrize("shape", [None, 5, (Piece("kv", 8),), Piece("kv", 8)])
def test_invalid_page_shapes_are_rejected(shape: Any) -> None:
    with pytest.raises(InvalidInput, match="PageShape"):
        page_shape(shape)
