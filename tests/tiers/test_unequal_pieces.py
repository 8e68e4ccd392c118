"""Pages of unequal pieces: their locations in a host frame, their verification, and their way through a store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hicache import HiCacheConfig, open_storage
from hicache.backends.base import GetOutcome, SetOutcome
from hicache.frame import Encoding, FrameHeader
from hicache.geometry import PageShape, Piece
from hicache.keys import Namespace
from hicache.tiers import HostPool
from hicache_lab.conformance import make_keys, soon
from tests.backends._files import page_files

# K and V of different head sizes, an indexer's bytes of an odd length, and an engine's own block.
SHAPE = PageShape(16, (Piece("k", 4096), Piece("v", 1024), Piece("indexer", 23), Piece("opaque", 3001)))
NAMESPACE = Namespace("m", SHAPE, element_order="packed", engine_layout="test/unequal")


def fill(pool: HostPool, page: int) -> None:
    """Write each piece of `page` by its own slice, with bytes that name the page and the piece."""
    for number in range(len(SHAPE.pieces)):
        pool.buffer[page, pool.piece_slice(number)] = 16 * page + number + 1


def expected(page: int) -> bytes:
    return b"".join(bytes([16 * page + number + 1]) * piece.bytes for number, piece in enumerate(SHAPE.pieces))


def test_any_run_of_pieces_is_one_slice() -> None:
    pool = HostPool(SHAPE, 1)
    fill(pool, 0)
    for first in range(4):
        for count in range(1, 5 - first):
            run = pool.buffer[0, pool.piece_slice(first, count)].tobytes()
            assert run == b"".join(
                pool.buffer[0, pool.piece_slice(number)].tobytes() for number in range(first, first + count)
            )


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_pages_go_through_a_store_without_a_cache(tmp_path: Path, compression: str) -> None:
    root = tmp_path / "store"
    config = HiCacheConfig.model_validate({
        "page_size": 16, "storage_format": {"compression": compression},
        "storage": {"type": "file", "options": {"path": str(root), "capacity": "1MiB", "free_space_floor": 0}},
    })
    keys, pages = make_keys(3), np.arange(3, dtype=np.int32)
    written, read = HostPool(SHAPE, 3), HostPool(SHAPE, 3)
    for page in range(3):
        fill(written, page)
    for pool, storing in ((written, True), (read, False)):  # the store is closed between them
        store = open_storage(config, NAMESPACE)
        if storing:
            assert store.batch_set(keys, pool.frames(pages), parent=None, deadline=soon()) == [SetOutcome.STORED] * 3
        else:
            assert store.batch_get(keys, pool.frames(pages), deadline=soon()) == [GetOutcome.HIT] * 3
        store.close()
    assert [bytes(read.payload(page)) for page in range(3)] == [expected(page) for page in range(3)]
    # The elements of a PageShape have no known length, so their bytes are not sorted into planes.
    headers = [FrameHeader.parse(path.read_bytes()) for path in page_files(root)]
    encoding = Encoding.ZSTD if compression == "zstd" else Encoding(0)
    assert [header and header.encoding for header in headers] == [encoding] * 3
