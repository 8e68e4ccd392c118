"""The namespace of stored pages: everything that two engines must agree on, and the seed of an adapter and a tenant."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ..arguments import LABEL_CHARACTERS_MAX, encoded, instance, model_label, whole
from ..errors import InvalidInput
from ..geometry import KVGeometry, PageShape, Piece, page_shape

# Part of every namespace digest: after a change of the frame or of the key scheme, old pages are not found.
FORMAT_VERSION = 3
# The field in the header of a frame has 64 bits.
EPOCH_MAX = 2**64 - 1
# The order of the elements inside a piece; the last value is for pieces without such an order.
ELEMENT_ORDERS = ("tokens_heads_dim", "heads_tokens_dim", "packed")


def namespace_seed(extra_key: str | None = None, cache_salt: str | None = None) -> bytes:
    """Return the seed of a (LoRA adapter, tenant) pair: empty if both are None, else 32 bytes.

    Raises InvalidInput for an empty string (a tenant whose salt is missing must not share pages with requests without a
    salt), for text that is not valid UTF-8 or longer than `NAME_BYTES_MAX`, and for another type.
    """
    named = (("extra_key", extra_key), ("cache_salt", cache_salt))
    fields = [(name, encoded(name, value)) for name, value in named if value is not None]
    return hashlib.sha256(_tagged("hicache.seed", fields)).digest() if fields else b""


def _tagged(domain: str, fields: Sequence[tuple[str, bytes]]) -> bytes:
    """Return a domain-separated, length-prefixed encoding: two different field lists never have the same bytes."""
    parts = [struct.pack("<H", len(domain)), domain.encode()]
    for name, value in fields:
        parts += [struct.pack("<HI", len(name), len(value)), name.encode(), value]
    return b"".join(parts)


def require_epoch(epoch: object, *, above: int = -1) -> int:
    """Return `epoch`, a count of weight updates, as an int.

    Raises InvalidInput unless it is an integer above `above` that fits into the header of a frame.
    """
    count = whole("weights epoch", epoch, 0, EPOCH_MAX)
    if count <= above:
        raise InvalidInput(f"weights epoch {count} is not above {above}; count every update")
    return count


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything that two engines must agree on before one of them may read a page that the other one stored.

    The weights: `model` is a fingerprint of them, `weights_epoch` counts their updates.

    The bytes: `geometry` is the shape of one rank's page. If a model has several pools, it is that of its KV pool, and
    `more_pieces` are those of the other pools, which follow in each page; `create_cache` adds them. `element_order`,
    one of `ELEMENT_ORDERS`, is the order of the elements inside a piece. `engine_layout` is an engine's own name for
    the content and layout of a page, such as "vllm/HNC/bf16/block16", or empty for the layout of `hicache.tiers`; with
    a `PageShape` it must include the dtype. `quantisation` names the scheme of a quantised cache, `kv_scales` is the
    `scales_fingerprint` of its scales.

    The keys: `key_hash` names the algorithm and the seed of page keys that the engine passes (`RadixKey.of_hashes`); it
    is empty for HiCache's own chain of tokens.

    The rank: tensor parallel (`tp`), pipeline (`pp`), context parallel (`cp`) and decode context parallel (`dcp`). Each
    rank has its own pages, unless `ranks_share_pages` is set: then all tensor-parallel ranks hold the same bytes (the
    latent of MLA, or one page that all of them fill) and have one namespace for any number of ranks.

    `label` names the model for people: on pages, in tables, logs and stores. It may be the path of its folder, of which
    only the last part is used (`model_label`), and may differ between engines. Raises InvalidInput for a field of
    another type or range.

        >>> from hicache import KVGeometry
        >>> geometry = KVGeometry(layers=32, heads=8, head_dim=128, page_size=64)
        >>> Namespace(model="sha256 of the weights", geometry=geometry, label="llama").digest.hex()[:8]
        '4b1b1f91'
    """

    model: str
    geometry: KVGeometry | PageShape
    weights_epoch: int = 0
    kv_scales: str = ""
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    dcp_rank: int = 0
    dcp_size: int = 1
    ranks_share_pages: bool = False
    element_order: str = ELEMENT_ORDERS[0]
    engine_layout: str = ""
    quantisation: str = ""
    key_hash: str = ""
    more_pieces: tuple[Piece, ...] = ()
    label: str = field(default="", compare=False)
    digest: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        encoded("namespace: model", self.model)  # not empty: pages of two models would mix
        for name in ("kv_scales", "engine_layout", "quantisation", "key_hash"):
            encoded(f"namespace: {name}", getattr(self, name), least=0)
        if instance("namespace: element_order", self.element_order, str) not in ELEMENT_ORDERS:
            known = ", ".join(ELEMENT_ORDERS)
            raise InvalidInput(f"namespace: element_order {self.element_order[:40]!r} is not known; use one of {known}")
        instance("namespace: ranks_share_pages", self.ranks_share_pages, bool)
        object.__setattr__(self, "label", model_label(instance("namespace: label", self.label, str)))
        instance("namespace: more_pieces", self.more_pieces, tuple)
        shape = self.shape  # raises for a geometry or a piece of another type
        object.__setattr__(self, "weights_epoch", require_epoch(self.weights_epoch))
        for kind in ("tp", "pp", "cp", "dcp"):
            rank, size = (whole(f"namespace: {name}", getattr(self, name)) for name in (f"{kind}_rank", f"{kind}_size"))
            if not rank < size:
                raise InvalidInput(f"namespace: {kind}_rank {rank} is not below {kind}_size {size}")
            object.__setattr__(self, f"{kind}_rank", rank)
            object.__setattr__(self, f"{kind}_size", size)
        tagged = _tagged("hicache.namespace", [*self._identity(), *_shape_fields(self.geometry, shape)])
        object.__setattr__(self, "digest", hashlib.sha256(tagged).digest())

    def _identity(self) -> list[tuple[str, bytes]]:
        """Return all fields that must agree, except the shape of a page. Without the rank if ranks share pages."""
        names = [
            "model", "weights_epoch", "kv_scales", "pp_rank", "pp_size", "cp_rank", "cp_size", "dcp_rank", "dcp_size",
            "element_order", "engine_layout", "quantisation", "key_hash",
            *(() if self.ranks_share_pages else ("tp_rank", "tp_size")),
        ]
        return [("format_version", str(FORMAT_VERSION).encode()), *_texts(self, names)]

    @property
    def name(self) -> str:
        """The label; without one `model`, of a fingerprint only the first 12 digits."""
        model = model_label(self.model)
        return self.label or (model if len(model) < LABEL_CHARACTERS_MAX else model[:12])

    def labelled(self, label: str | None) -> Namespace:
        """Return this namespace with another label, or unchanged for None. The digest stays the same."""
        return self if label is None else replace(self, label=label)

    @property
    def shape(self) -> PageShape:
        """The pieces of one page."""
        shape = page_shape(self.geometry)
        return PageShape(shape.tokens, (*shape.pieces, *self.more_pieces)) if self.more_pieces else shape

    @property
    def writes(self) -> bool:
        """True if this rank stores pages. If ranks share pages, only the first one stores them."""
        return not self.ranks_share_pages or self.tp_rank == 0


def _shape_fields(geometry: KVGeometry | PageShape, shape: PageShape) -> list[tuple[str, bytes]]:
    """Return tokens and pieces in order, and the fields of a KVGeometry: the same bytes described as PageShape and as
    KVGeometry have different namespaces."""
    pieces = [pair for piece in shape.pieces for pair in _texts(piece, ("name", "bytes"))]
    fields = [*_texts(shape, ("tokens",)), ("pieces", _tagged("hicache.pieces", pieces))]
    if isinstance(geometry, KVGeometry):
        fields.append(("layout", geometry.layout.value.encode()))
        names = ("dtype", "layers", "heads", "head_dim", *(("v_head_dim",) if geometry.v_head_dim else ()))
        fields += _texts(geometry, names)
    return fields


def _texts(source: object, names: Iterable[str]) -> list[tuple[str, bytes]]:
    # Not `str` of a text: of an enum with text values it returns the name of the member.
    fields = [(name, getattr(source, name)) for name in names]
    return [(name, field.encode() if isinstance(field, str) else str(field).encode()) for name, field in fields]
