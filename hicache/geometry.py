"""The shape of one page: its size in bytes, and the offsets of its pieces.

A page is an ordered list of contiguous pieces, so any run of pieces is contiguous too. `PageShape` is that list. It
does not depend on attention: K and V of different sizes, layers of different length, an indexer's bytes or an engine's
own blocks are all pieces. `KVGeometry` describes a model with equal layers, in terms of attention. It has one piece per
layer: the K block followed by the V block (MHA), or one latent block (MLA). Each block has `page_size x heads x
head_dim` elements (V: `v_head_dim`), contiguous, as in the device pool of that layer.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from enum import Enum

from .arguments import encoded, instance, whole
from .errors import InvalidInput

# Bytes of one element, by torch's name of the dtype. A daemon without torch also computes sizes.
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1}

PAGE_SIZE_MAX = 1024
# Far above any model.
_SIZE_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a page that one copy moves. `name` describes its content (`kv`, `latent`, `rank0.layer3`).

    Raises InvalidInput for an empty name, and for fewer than 1 byte.
    """

    name: str
    bytes: int

    def __post_init__(self) -> None:
        encoded("piece: name", self.name)
        # Stored as an int: sizes made of numpy integers would overflow without an error.
        object.__setattr__(self, "bytes", whole("piece: bytes", self.bytes, 1))


@dataclass(frozen=True, slots=True)
class PageShape:
    """The pieces of a page of `tokens` tokens, in payload order. Raises InvalidInput for an impossible shape."""

    tokens: int
    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", whole("page shape: tokens", self.tokens, 1, PAGE_SIZE_MAX))
        try:
            pieces = tuple(self.pieces)
        except TypeError as error:
            raise InvalidInput(f"page shape: pieces: a {type(self.pieces).__name__}; pass a list of Piece") from error
        if not 1 <= len(pieces) <= _SIZE_MAX:
            raise InvalidInput(f"page shape: {len(pieces)} pieces; use 1 to {_SIZE_MAX}")
        for piece in pieces:
            instance("page shape: piece", piece, Piece)
        object.__setattr__(self, "pieces", pieces)

    @property
    def payload_bytes(self) -> int:
        """Bytes of one page."""
        return sum(piece.bytes for piece in self.pieces)

    @property
    def offsets(self) -> tuple[int, ...]:
        """The offset of each piece in the payload, in bytes, followed by the end of the last piece."""
        return tuple(itertools.accumulate((piece.bytes for piece in self.pieces), initial=0))


class KVLayout(Enum):
    """The layout in which attention stores its cache."""

    MHA = "mha"  # a K and a V block per layer (multi-head and grouped-query attention)
    MLA = "mla"  # one latent block per layer (multi-head latent attention)


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """The shape of the KV cache of one rank.

    `heads` and `head_dim` are those of this rank (MLA: heads = 1, head_dim = latent dim). `v_head_dim` is for MHA whose
    V heads have another size than its K heads; it is stored as None if both are equal. Raises InvalidInput for an
    impossible shape.

        >>> llama_8b = KVGeometry(layers=32, heads=8, head_dim=128, page_size=64)
        >>> llama_8b.payload_bytes
        8388608
    """

    layers: int
    heads: int
    head_dim: int
    page_size: int
    dtype: str = "bfloat16"
    layout: KVLayout = KVLayout.MHA
    v_head_dim: int | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "head_dim", "page_size"):
            # Stored as an int: sizes made of numpy integers would overflow without an error.
            object.__setattr__(self, name, whole(f"geometry: {name}", getattr(self, name), 1, _SIZE_MAX))
        if self.page_size > PAGE_SIZE_MAX:
            raise InvalidInput(f"geometry: page_size {self.page_size} is over {PAGE_SIZE_MAX}; 16 to 256 is usual")
        instance("geometry: layout", self.layout, KVLayout)
        if instance("geometry: dtype", self.dtype, str) not in DTYPE_BYTES:
            raise InvalidInput(f"geometry: unknown dtype {self.dtype!r}; known: {', '.join(sorted(DTYPE_BYTES))}")
        if self.v_head_dim is not None:
            v_head_dim = whole("geometry: v_head_dim", self.v_head_dim, 1, _SIZE_MAX)
            if self.layout is KVLayout.MLA:
                raise InvalidInput("geometry: v_head_dim is for MHA; with MLA, V is a part of the latent: leave it out")
            object.__setattr__(self, "v_head_dim", None if v_head_dim == self.head_dim else v_head_dim)

    @property
    def value_dim(self) -> int:
        """The size of a V head: `v_head_dim`, or `head_dim` if that is None."""
        return self.v_head_dim or self.head_dim

    @property
    def blocks_per_layer(self) -> int:
        """2 (K and V) for MHA, 1 for MLA."""
        return 2 if self.layout is KVLayout.MHA else 1

    @property
    def block_bytes(self) -> int:
        """Bytes of the K or latent block of one page and layer. The V block has the same size unless `v_head_dim` is
        set."""
        return self.page_size * self.heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def layer_bytes(self) -> int:
        """Bytes of one page in one layer: one piece of a layer-wise copy."""
        if self.layout is KVLayout.MLA:
            return self.block_bytes
        return self.block_bytes // self.head_dim * (self.head_dim + self.value_dim)

    @property
    def payload_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return self.layers * self.layer_bytes

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token over all layers."""
        return self.payload_bytes // self.page_size

    @property
    def shape(self) -> PageShape:
        """The same page as pieces: one per layer."""
        name = "kv" if self.layout is KVLayout.MHA else "latent"
        return PageShape(self.page_size, (Piece(name, self.layer_bytes),) * self.layers)


def page_shape(page: PageShape | KVGeometry) -> PageShape:
    """Return the shape of a page from a PageShape or KVGeometry. Raises InvalidInput for any other type."""
    if isinstance(page, KVGeometry):
        return page.shape
    return instance("page shape or KVGeometry", page, PageShape)
