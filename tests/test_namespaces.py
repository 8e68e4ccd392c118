"""Namespaces: which engines share pages, and the labels that operators see."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hicache import scales_fingerprint
from hicache.arguments import LABEL_CHARACTERS_MAX, NAME_BYTES_MAX
from hicache.errors import InvalidInput
from hicache.geometry import KVGeometry, KVLayout, PageShape, Piece
from hicache.keys import ELEMENT_ORDERS, Namespace


@pytest.mark.parametrize("layout", KVLayout)
def test_ranks_share_a_namespace_only_if_configured_and_one_of_them_writes(layout: KVLayout) -> None:
    """Also for MLA: its layout may hold an engine's opaque bytes, which differ from rank to rank."""
    shape = KVGeometry(1, 1, 8, 16, layout=layout)
    for shared, digests, writers in ((False, 2, [True, True]), (True, 1, [True, False])):
        ranks = [Namespace("m", shape, tp_rank=rank, tp_size=2, ranks_share_pages=shared) for rank in range(2)]
        assert len({rank.digest for rank in ranks}) == digests
        assert [rank.writes for rank in ranks] == writers


def test_ranks_that_share_pages_find_those_of_another_number_of_ranks() -> None:
    one, eight = (Namespace("m", KVGeometry(1, 1, 8, 16), tp_size=size, ranks_share_pages=True) for size in (1, 8))
    assert one.digest == eight.digest


def test_pipeline_and_context_ranks_have_separate_pages_if_tensor_ranks_share() -> None:
    base = Namespace("m", KVGeometry(1, 1, 8, 16), pp_size=2, cp_size=2, dcp_size=2, ranks_share_pages=True)
    ranks = [base, *(replace(base, **{name: 1}) for name in ("pp_rank", "cp_rank", "dcp_rank"))]  # type: ignore[arg-type]
    assert len({rank.digest for rank in ranks}) == 4
    assert all(rank.writes for rank in ranks)


def test_every_field_of_a_namespace_changes_its_digest() -> None:
    shape = KVGeometry(layers=2, heads=1, head_dim=8, page_size=16)
    base = Namespace(model="m", geometry=shape, tp_size=2, pp_size=2, cp_size=2, dcp_size=2)
    others = [
        replace(base, model="n"), replace(base, weights_epoch=1), replace(base, kv_scales="s"),
        replace(base, tp_rank=1), replace(base, tp_size=4), replace(base, pp_rank=1), replace(base, pp_size=4),
        replace(base, cp_rank=1), replace(base, cp_size=4), replace(base, dcp_rank=1), replace(base, dcp_size=4),
        replace(base, ranks_share_pages=True),
        *(replace(base, element_order=order) for order in ELEMENT_ORDERS[1:]),
        # The same text in one field or in another.
        replace(base, engine_layout="s"), replace(base, quantisation="s"), replace(base, key_hash="s"),
    ]
    others += [
        replace(base, geometry=replace(shape, **change))
        for change in (
            {"layers": 3}, {"heads": 2}, {"head_dim": 16}, {"page_size": 32}, {"dtype": "float16"},
            {"layout": KVLayout.MLA}, {"v_head_dim": 4},
            {"head_dim": 4, "v_head_dim": 12}, {"head_dim": 12, "v_head_dim": 4},  # as many bytes
        )
    ]
    digests = {namespace.digest for namespace in [base, *others]}
    assert len(digests) == 1 + len(others)


def test_every_part_of_a_page_shape_changes_the_digest() -> None:
    shapes: list[KVGeometry | PageShape] = [
        PageShape(16, pieces)
        for pieces in (
            (Piece("a", 8), Piece("b", 24)), (Piece("b", 24), Piece("a", 8)), (Piece("b", 8), Piece("a", 24)),
            (Piece("a", 24), Piece("b", 8)), (Piece("ab", 32),), (Piece("a", 8), Piece("b", 20), Piece("c", 4)),
        )
    ]
    shapes += [PageShape(8, (Piece("a", 8), Piece("b", 24))), PageShape(16, (Piece("a8b", 32),))]
    attention = KVGeometry(layers=2, heads=1, head_dim=8, page_size=16)
    shapes += [attention, attention.shape]  # the same bytes, described both ways
    assert len({Namespace("m", shape).digest for shape in shapes}) == len(shapes)
    assert Namespace("m", attention).shape == Namespace("m", attention.shape).shape == attention.shape


def test_pieces_cannot_be_encoded_as_other_pieces() -> None:
    """A name may hold the very bytes that the encoding has between the names of two pieces."""
    between = "\x05\x00\x01\x00\x00\x00bytes1\x04\x00\x01\x00\x00\x00name"
    two, one = (Piece("a", 1), Piece("b", 1)), (Piece(f"a{between}b", 1),)
    assert Namespace("m", PageShape(16, two)).digest != Namespace("m", PageShape(16, one)).digest


IMPOSSIBLE_NAMESPACES: list[dict[str, Any]] = [
    *({"model": bad} for bad in ("", None, 5, b"m", "\ud800", "m" * (NAME_BYTES_MAX + 1))),
    *({"geometry": bad} for bad in (None, 5, "shape", (Piece("kv", 8),))),
    *({"weights_epoch": bad} for bad in (-1, 2**64, 10**5000, 1.0, float("nan"), True, "1", None)),
    *({name: bad} for name in ("kv_scales", "engine_layout", "quantisation", "key_hash")
      for bad in (None, 5, "\ud800", "x" * (NAME_BYTES_MAX + 1))),
    *({"element_order": bad} for bad in (None, 5, "", "dim_heads_tokens", "x" * NAME_BYTES_MAX)),
    *({"ranks_share_pages": bad} for bad in (None, 0, 1, "yes")),
    *({"label": bad} for bad in (None, 5)),
    *({f"{kind}_rank": bad} for kind in ("tp", "pp", "cp", "dcp") for bad in (2, -1, 0.5, False, "0", None)),
    *({f"{kind}_size": bad} for kind in ("tp", "pp", "cp", "dcp") for bad in (0, -1, 2.0, True, 10**5000, None)),
]

IMPOSSIBLE_GEOMETRIES: list[dict[str, Any]] = [
    *({"layers": bad} for bad in (0, -1, True, 1.0, float("nan"), "1", None, 10**5000)),
    {"heads": -1}, {"head_dim": 2**21}, {"page_size": 4096}, {"page_size": 0.5},
    *({"dtype": bad} for bad in ("float64", 5, None, ["float32"])),
    *({"layout": bad} for bad in ("mla", None, 1)),
]


def test_an_invalid_namespace_is_rejected() -> None:
    base = Namespace(model="m", geometry=KVGeometry(1, 1, 8, 16), tp_size=2)
    for change in IMPOSSIBLE_NAMESPACES:
        with pytest.raises(InvalidInput) as caught:
            pytest.fail(f"accepted: {replace(base, **change)!r:.200}")
        assert len(str(caught.value)) < 200


def test_a_label_may_contain_text_that_utf_8_cannot_encode() -> None:
    """It is the name of a folder as a rule, and no part of what must agree."""
    shape = KVGeometry(1, 1, 8, 16)
    assert Namespace("m", shape, label="\udcff").digest == Namespace("m", shape).digest


COMMIT = "0e9e39f249a16976918f6564b8830bc894c89659"

LABELS = {
    "llama": "llama",
    "meta-llama/Llama-3.1-8B": "Llama-3.1-8B",
    "/srv/tenant-a/models/llama/": "llama",
    f"/srv/hub/models--meta-llama--Llama-3.1-8B/snapshots/{COMMIT}/": "Llama-3.1-8B",
    f"models--gpt2/snapshots/{COMMIT}": COMMIT,
    "with a line\nand \x1b[31m and \u202e": "with a line?and ?[31m and ?",
    "x" * 300: "x" * LABEL_CHARACTERS_MAX,
    "///": "",
}


@pytest.mark.parametrize("given", LABELS)
def test_a_label_is_the_last_part_of_a_path_with_printable_characters(given: str) -> None:
    namespace = Namespace("m", KVGeometry(1, 1, 8, 16), label=given)
    assert namespace.label == LABELS[given] == replace(namespace).label
    assert namespace.digest == replace(namespace, label="").digest == namespace.labelled("other").digest
    assert namespace.labelled(None) is namespace and namespace.labelled("other").name == "other"


def test_without_a_label_a_namespace_is_named_after_its_model_and_a_fingerprint_is_short() -> None:
    shape = KVGeometry(1, 1, 8, 16)
    assert Namespace("a model", shape).name == "a model" and Namespace("/srv/a model", shape).name == "a model"
    assert Namespace("3f" * 32, shape).name == "3f" * 6
    assert Namespace("3f" * 32, shape, label="llama").name == "llama"


def test_a_text_of_another_class_counts_as_its_characters() -> None:
    class Layout(str):
        def __str__(self) -> str:
            return "Layout.DEFAULT"

    class Index:
        def __index__(self) -> int:
            return 3

    shape, epoch = KVGeometry(1, 1, 8, 16), Index()
    namespace = Namespace("m", shape, engine_layout=Layout("HND"), weights_epoch=epoch)  # type: ignore[arg-type]
    assert namespace.digest == Namespace("m", shape, engine_layout="HND", weights_epoch=3).digest
    assert namespace.digest != Namespace("m", shape, engine_layout=Layout("NHD"), weights_epoch=3).digest


def test_numbers_of_numpy_make_the_same_namespace_and_exact_sizes() -> None:
    shape = KVGeometry(np.int8(100), np.int8(100), np.int8(8), np.int16(16))  # type: ignore[arg-type]
    assert shape == KVGeometry(100, 100, 8, 16) and type(shape.payload_bytes) is int
    epoch: Any = np.uint64(2**64 - 1)
    assert Namespace("m", shape, weights_epoch=epoch).digest == Namespace("m", shape, weights_epoch=2**64 - 1).digest


def test_an_invalid_geometry_is_rejected() -> None:
    base = KVGeometry(layers=1, heads=1, head_dim=8, page_size=16)
    for change in IMPOSSIBLE_GEOMETRIES:
        with pytest.raises(InvalidInput):
            pytest.fail(f"accepted: {replace(base, **change)!r:.200}")


def test_different_scales_of_kv_have_different_fingerprints() -> None:
    scales: list[tuple[list[float], list[float]]] = [
        ([2.0, 3.0], [1.0, 1.0]), ([3.0, 2.0], [1.0, 1.0]), ([1.0, 1.0], [2.0, 3.0]), ([2.0, 3.0, 1.0], [1.0]),
        ([2.0, 3.0], []), ([2.0, 3.0 + 2**-22], []), ([2.0], [3.0]),
    ]
    found = {scales_fingerprint(*some) for some in scales}
    assert len(found) == len(scales) and all(len(bytes.fromhex(name)) == 32 for name in found)
    assert scales_fingerprint([2, 3]) == scales_fingerprint([2.0, 3.0]) == scales_fingerprint([2.0, 3.0 + 2**-40]), (
        "the same numbers in float32 make the same pages"
    )
    assert scales_fingerprint([1.0, 1], [1.0, 1]) == scales_fingerprint([1.0]) == "", "the bytes of KV without scales"
    for bad in (0.0, -1.0, math.nan, math.inf, "1"):
        with pytest.raises(InvalidInput, match="KV scale"):
            scales_fingerprint([1.0, 2.0], [1.0, bad])  # type: ignore[list-item]
