"""Blocks of an engine, in the layouts of SGLang and vLLM, copied through windows into host frames."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
import torch

from hicache.errors import InvalidInput
from hicache.geometry import PageShape, Piece
from hicache.tiers import CopyEngine, EngineBlocks, HostPool, HostWindow
from hicache.tiers.copy_cpu import CpuCopyEngine
from hicache.types import PageIds
from tests.tiers.simulated_device import simulated_copies

LAYERS, BLOCKS, BLOCK, HEADS, DIM = 3, 7, 4, 2, 8
# K and V of one block in one layer, bfloat16.
LAYER_BYTES = 2 * BLOCK * HEADS * DIM * 2

Make = Callable[[EngineBlocks, HostWindow], CopyEngine]


def ids(*blocks: int) -> PageIds:
    return np.array(blocks, dtype=np.int32)


def noise(*shape: int, seed: int) -> torch.Tensor:
    """Return a bfloat16 tensor of random bits."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (*shape[:-1], 2 * shape[-1]), dtype=torch.uint8, generator=generator).view(
        torch.bfloat16
    )


class Layout(NamedTuple):
    """An engine's tensors as blocks, and the engine's access to K and V `[block, heads, dim]` of (layer, block)."""

    blocks: EngineBlocks
    kv: Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]

    def bytes(self, layer: int, block: int) -> bytes:
        """Return K and V of one block, as the engine reads them."""
        return b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in self.kv(layer, block))


def slots_of_sglang(seed: int) -> Layout:
    """`[slots, heads, dim]`, K and V separate, for each layer."""
    k = [noise(BLOCKS * BLOCK, HEADS, DIM, seed=seed + layer) for layer in range(LAYERS)]
    v = [noise(BLOCKS * BLOCK, HEADS, DIM, seed=seed + layer + 50) for layer in range(LAYERS)]

    def kv(layer: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        slots = slice(block * BLOCK, (block + 1) * BLOCK)
        return k[layer][slots], v[layer][slots]

    return Layout(EngineBlocks(list(zip(k, v, strict=True)), slots_per_block=BLOCK), kv)


def k_and_v_outermost(seed: int) -> Layout:
    """`[2, blocks, block, heads, dim]` for each layer."""
    tensors = [noise(2, BLOCKS, BLOCK, HEADS, DIM, seed=seed + layer) for layer in range(LAYERS)]
    blocks = EngineBlocks([[tensor[0], tensor[1]] for tensor in tensors])
    return Layout(blocks, lambda layer, block: (tensors[layer][0, block], tensors[layer][1, block]))


def k_and_v_inside(seed: int) -> Layout:
    """`[blocks, 2, block, heads, dim]` for each layer."""
    tensors = [noise(BLOCKS, 2, BLOCK, HEADS, DIM, seed=seed + layer) for layer in range(LAYERS)]
    blocks = EngineBlocks([[tensor] for tensor in tensors])
    return Layout(blocks, lambda layer, block: (tensors[layer][block, 0], tensors[layer][block, 1]))


def across_layers(seed: int) -> Layout:
    """`[blocks, layers, 2, block, heads, dim]`: the layers of a block are contiguous."""
    tensor = noise(BLOCKS, LAYERS, 2, BLOCK, HEADS, DIM, seed=seed)
    blocks = EngineBlocks([[tensor[:, layer]] for layer in range(LAYERS)])
    return Layout(blocks, lambda layer, block: (tensor[block, layer, 0], tensor[block, layer, 1]))


LAYOUTS = [slots_of_sglang, k_and_v_outermost, k_and_v_inside, across_layers]


@pytest.fixture(
    params=[CpuCopyEngine, partial(simulated_copies, path="direct"), partial(simulated_copies, path="staged")],
    ids=["cpu", "direct", "staged"],
)
def engine(request: pytest.FixtureRequest) -> Make:
    make: Make = request.param
    return make


def shape(blocks_per_page: int, ranks: int = 1) -> PageShape:
    pieces = [
        Piece(f"rank{rank}.layer{layer}", LAYER_BYTES)
        for rank, _, layer in product(range(ranks), range(blocks_per_page), range(LAYERS))
    ]
    return PageShape(BLOCK * blocks_per_page, tuple(pieces))


@pytest.mark.parametrize("blocks_per_page", [1, 3])
@pytest.mark.parametrize("target", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("source", LAYOUTS, ids=lambda layout: layout.__name__)
def test_a_block_survives_a_round_trip_into_every_layout(
    source: Callable[[int], Layout], target: Callable[[int], Layout], blocks_per_page: int, engine: Make
) -> None:
    host = HostPool(shape(blocks_per_page), 6)
    window = HostWindow(host, blocks_per_page=blocks_per_page)
    before, after = source(0), target(1000)
    written, expected = ids(5, 0, 6, 2), ids(1, 6, 3, 0)
    on_host = ids(4, 0, 5, 1)
    untouched = [after.bytes(layer, block) for layer in range(LAYERS) for block in (2, 4, 5)]
    out, back = engine(before.blocks, window), engine(after.blocks, window)
    assert out.backup(written, on_host).wait(10)
    transfer = back.load(on_host, expected)
    for layer in range(LAYERS):
        transfer.wait_layer(layer)
        for here, there in zip(written.tolist(), expected.tolist(), strict=True):
            assert after.bytes(layer, there) == before.bytes(layer, here)
    assert [after.bytes(layer, block) for layer in range(LAYERS) for block in (2, 4, 5)] == untouched
    assert out.close(10) and back.close(10)


def test_a_page_is_ordered_by_rank_then_block_then_layer(engine: Make) -> None:
    """Two ranks share one frame, each with its own window; a page is three blocks of the engine."""
    host = HostPool(shape(3, ranks=2), 2)
    windows = [HostWindow(host, rank * 3 * LAYERS, 3 * LAYERS, 3) for rank in range(2)]
    ranks = [k_and_v_inside(0), slots_of_sglang(1000)]
    copies = [engine(rank.blocks, window) for rank, window in zip(ranks, windows, strict=True)]
    for rank in copies:
        assert rank.backup(ids(6, 1, 4), ids(3, 4, 5)).wait(10)
    expected = [rank.bytes(layer, block) for rank in ranks for block in (6, 1, 4) for layer in range(LAYERS)]
    assert bytes(host.payload(1)) == b"".join(expected)
    assert not any(host.payload(0))
    first, second = ([rank.bytes(layer, 6) for layer in range(LAYERS)] for rank in ranks)
    for rank in copies:
        assert rank.load(ids(3), ids(0)).wait(10)
    assert [ranks[0].bytes(layer, 0) for layer in range(LAYERS)] == first
    assert [ranks[1].bytes(layer, 0) for layer in range(LAYERS)] == second
    assert all([rank.close(10) for rank in copies])


def test_layers_of_different_length_are_runs_of_whole_pieces(engine: Make) -> None:
    """K and V of different sizes, a latent, and a layer with an indexer's bytes, which is opaque."""
    k, v = noise(BLOCKS, BLOCK, DIM, seed=1), noise(BLOCKS, BLOCK, DIM // 2, seed=2)
    latent = noise(BLOCKS, BLOCK, 12, seed=3)
    kv, indexer = noise(BLOCKS, 2, BLOCK, DIM, seed=4), torch.arange(BLOCKS * 5, dtype=torch.uint8).view(BLOCKS, 5)
    blocks = EngineBlocks([[k, v], [latent], [kv, indexer]])
    assert blocks.layer_bytes == (96, 96, 133)
    by_layer = (Piece("kv", 96), Piece("latent", 96), Piece("kv and indexer", 133))
    finer = (Piece("k", 64), Piece("v", 32), Piece("latent", 96), Piece("kv", 128), Piece("indexer", 5))
    for pieces in (by_layer, finer):
        host = HostPool(PageShape(BLOCK, pieces), 2)
        copies = engine(blocks, HostWindow(host))
        assert copies.backup(ids(3), ids(1)).wait(10)
        parts = [part[3].contiguous().view(torch.uint8).numpy().tobytes() for part in (k, v, latent, kv, indexer)]
        assert bytes(host.payload(1)) == b"".join(parts)
        assert copies.load(ids(1), ids(5)).wait(10)
        assert all(torch.equal(part[5].view(torch.uint8), part[3].view(torch.uint8)) for part in (k, latent, indexer))
        copies.close(10)


def test_blocks_may_have_gaps_between_them_and_any_element_order_inside() -> None:
    wide = torch.zeros(BLOCKS, 2 * DIM)
    assert EngineBlocks([[wide[:, DIM:]]]).layer_bytes == (4 * DIM,)
    heads_first = torch.arange(BLOCKS * HEADS * BLOCK * DIM).view(BLOCKS, HEADS, BLOCK, DIM)
    seen = EngineBlocks([[heads_first.transpose(1, 2)]]).layers[0][0]  # as an engine shows it to its kernels
    assert torch.equal(seen[3].view(torch.int64), heads_first[3].flatten())
    assert seen.data_ptr() == heads_first.data_ptr(), "a view, not a copy"


def test_an_engine_s_inference_tensors_are_copied_outside_of_inference_mode(engine: Make) -> None:
    with torch.inference_mode():
        blocks = EngineBlocks([[torch.zeros(4, 8)], [torch.zeros(4, 3), torch.ones(4, 5)]])
    host = HostPool(PageShape(1, (Piece("kv", 32),) * 2), 2)
    copies = engine(blocks, HostWindow(host))
    assert copies.backup(ids(3), ids(0)).wait(10)
    assert copies.load(ids(0), ids(1)).wait(10)
    copies.close(10)


HEADS_OUTERMOST = torch.zeros(HEADS, BLOCKS, BLOCK, DIM).transpose(0, 1)
SLOTS_INTERLEAVED = torch.zeros(BLOCK, BLOCKS, HEADS, DIM).transpose(0, 1)
PADDED = torch.zeros(BLOCKS, BLOCK, HEADS, DIM)[..., : DIM - 2]
TWICE = torch.zeros(BLOCKS, 1, DIM).expand(BLOCKS, BLOCK, DIM)
SHARED = torch.zeros(1, BLOCK, DIM).expand(BLOCKS, BLOCK, DIM)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (HEADS_OUTERMOST, r"region 0: shape \[7, 2, 4, 8\], stride \[32, 224, 8, 1\].*dimension 1 inside .* 32"),
        (SLOTS_INTERLEAVED, r"shape \[7, 4, 2, 8\], stride \[16, 112, 8, 1\].*dimension 1 inside the block.* 16"),
        (PADDED, r"dimension 2 has a gap \(stride 8 instead of 6\); pass the tensor with its padding"),
        (TWICE, "dimension 1 overlap"),
        (SHARED, "dimension 0 overlap"),
        (torch.zeros(0, 8), "does not hold whole blocks"),
        (torch.tensor(1.0), "does not hold whole blocks"),
    ],
    ids=["heads outermost", "slots interleaved", "padded", "slots overlap", "blocks overlap", "empty", "scalar"],
)
def test_a_layout_with_scattered_blocks_is_rejected_with_a_fix(
    tensor: torch.Tensor, words: str
) -> None:
    with pytest.raises(InvalidInput, match=words):
        EngineBlocks([[torch.zeros(BLOCKS, 8)], [tensor]])


def test_layers_that_differ_in_blocks_or_device_are_rejected() -> None:
    good = torch.zeros(BLOCKS, 8)
    with pytest.raises(InvalidInput, match="layer 1 has 6 blocks on cpu, layer 0 has 7"):
        EngineBlocks([[good], [good[1:]]])
    with pytest.raises(InvalidInput, match="layer 1 has 7 blocks on meta, layer 0 has 7 on cpu"):
        EngineBlocks([[good], [good.to("meta")]])
    with pytest.raises(InvalidInput, match="slots and be a multiple of 4"):
        EngineBlocks([[good]], slots_per_block=4)


def test_layers_that_do_not_match_the_window_are_rejected_with_both_sizes() -> None:
    host = HostPool(PageShape(1, (Piece("first", 16), Piece("second", 24), Piece("third", 8))), 1)
    half, whole = torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, 4, dtype=torch.float64)
    CpuCopyEngine(EngineBlocks([[half], [whole]]), HostWindow(host)).close(10)
    for layers, words in (
        ([[whole], [half]], r"layer 0 has 32 bytes .* \(first, second\) have 40"),
        ([[half], [half]], r"layer 1 has 16 bytes .* \(second\) have 24"),
        ([[half]], "1 layers have 16 bytes in a block, the window has 48: piece second has no layer"),
        ([[half], [whole], [half]], r"layer 2 has 16 bytes .* \(none\) have 0"),
    ):
        with pytest.raises(InvalidInput, match=words):
            CpuCopyEngine(EngineBlocks(layers), HostWindow(host))


def test_a_window_outside_the_pages_is_rejected() -> None:
    host = HostPool(PageShape(2, (Piece("a", 8), Piece("b", 16), Piece("a", 8), Piece("b", 24))), 1)
    assert HostWindow(host, 0, 2).block_bytes == 24
    for arguments, words in (
        ((0, 3, 2), "3 pieces are not 2 blocks"),
        ((0, 4, 2), "are not 2 runs of the same sizes"),
        ((4,), "first_piece: 4"),
        ((1, 4), "pieces: 4"),
        ((0, 2, 3), "blocks_per_page: 3"),
    ):
        with pytest.raises(InvalidInput, match=words):
            HostWindow(host, *arguments)
    with pytest.raises(InvalidInput, match="HostPool"):
        HostWindow(host.buffer)  # type: ignore[arg-type]
