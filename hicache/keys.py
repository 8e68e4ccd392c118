"""Page identity: chained SHA-256 page keys of token ids, and the namespace of stored pages.

    page_key[i] = SHA-256( page_key[i-1] || tokens of page i as uint32 little endian )

`page_key[-1]` is empty, or a 32-byte seed made of `extra_key` (LoRA adapter) and `cache_salt` (tenant). So equal tokens
under two seeds share neither a key nor a tree node. Without a seed, the keys are the same as SGLang's. A partial last
page does not have a key.

An engine with its own page hashes passes them instead of tokens (`RadixKey.of_hashes`). They become the page keys.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .arguments import LABEL_CHARACTERS_MAX, encoded, instance, model_label, whole
from .errors import InvalidInput
from .geometry import KVGeometry, PageShape, page_shape

if TYPE_CHECKING:
    import torch

PAGE_KEY_BYTES = 32
TOKEN_BYTES = 4
BIGRAM_BYTES = 2 * TOKEN_BYTES
# Engines keep token ids in int32 tensors, so an id outside this range is an error of the caller.
TOKEN_ID_MAX = 2**31 - 1
# Part of every namespace digest: after a change of the frame or of the key scheme, old pages are not found.
FORMAT_VERSION = 3
# The field in the header of a frame has 64 bits.
EPOCH_MAX = 2**64 - 1
# The order of the elements inside a piece; the last value is for pieces without such an order.
ELEMENT_ORDERS = ("tokens_heads_dim", "heads_tokens_dim", "packed")

_PACKED = np.dtype("<u4")
_UNSIGNED: dict[int, np.dtype[Any]] = {4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}
_SIGNED: dict[int, np.dtype[Any]] = {4: np.dtype(np.int32), 8: np.dtype(np.int64)}

# The optional native helper. int64 to uint32 bytes in one pass (numpy: three), None if an id is out of range:
pack_token_ids: Callable[[npt.NDArray[Any]], bytes | None] | None = None
# and the keys of many pages in one call (hashlib: one call each), None if the processor lacks SHA-256 instructions.
hash_pages: Callable[[bytes, int, bytes], list[bytes] | None] | None = None
with contextlib.suppress(ImportError, AttributeError):  # an older build may lack a function
    from . import _native

    pack_token_ids = _native.pack_token_ids
    hash_pages = _native.hash_pages

TokenInput: TypeAlias = "Sequence[int] | array.array[int] | npt.NDArray[Any] | torch.Tensor"


def token_bytes(tokens: TokenInput) -> bytes:
    """Return token ids as uint32 little endian, 4 bytes each.

    Accepts a sequence of int, an `array.array`, or a one-dimensional integer numpy array or torch tensor. A tensor on a
    device is copied to the host, which blocks. Mutates nothing. Raises InvalidInput for an empty prompt, another dtype
    or shape, and ids outside 0 .. 2**31 - 1.
    """
    unsigned = _as_unsigned(tokens)
    if pack_token_ids is not None and unsigned.itemsize == 8:
        packed = pack_token_ids(unsigned)
        if packed is not None:
            return packed
    position = unsigned.argmax()
    if unsigned[position] > TOKEN_ID_MAX:
        token = unsigned.view(_SIGNED[unsigned.itemsize])[position]
        raise InvalidInput(f"tokens: id {token} at position {position} is outside 0 .. {TOKEN_ID_MAX}")
    return unsigned.astype(_PACKED, copy=False).tobytes()


def _as_unsigned(tokens: TokenInput) -> npt.NDArray[Any]:
    """Return the ids as contiguous uint32 or uint64. A negative id becomes a very large one, so that one check finds
    both kinds of invalid ids."""
    if isinstance(tokens, array.array) and tokens.typecode == "q" and tokens:  # the usual type in engines
        return np.frombuffer(tokens, _UNSIGNED[8])
    values = _as_array(tokens)
    if values.ndim != 1:
        raise InvalidInput(f"tokens: expected one dimension, got shape {values.shape}; pass one prompt at a time")
    if values.size == 0:
        raise InvalidInput("tokens: the prompt is empty; a key needs at least one token")
    if values.dtype.kind not in "iu":
        raise InvalidInput(f"tokens: expected integers, got dtype {values.dtype}; convert them to int32 or int64")
    if values.itemsize < TOKEN_BYTES or not values.dtype.isnative:
        values = values.astype(np.int64)
    return np.ascontiguousarray(values).view(_UNSIGNED[values.itemsize])


def _as_array(tokens: TokenInput) -> npt.NDArray[Any]:
    if isinstance(tokens, np.ndarray):
        if isinstance(tokens, np.ma.MaskedArray):
            raise InvalidInput("tokens: a masked array is not supported; pass an array of the valid ids")
        return tokens
    if isinstance(tokens, array.array) and tokens.typecode != "u":  # of characters
        return np.frombuffer(tokens, dtype=tokens.typecode) if len(tokens) else np.empty(0, np.int64)
    if type(tokens).__module__.partition(".")[0] == "torch":
        return _host_array(tokens)
    if isinstance(tokens, (str, bytes, bytearray, memoryview, array.array)):
        raise InvalidInput(f"tokens: expected token ids, got {type(tokens).__name__}; tokenize the text first")
    if not isinstance(tokens, Sequence):  # a set, for example, is not ordered
        raise InvalidInput(f"tokens: expected a sequence of token ids, got {type(tokens).__name__}; pass a list")
    try:
        return np.frombuffer(array.array("q", tokens), dtype=np.int64) if len(tokens) else np.empty(0, np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInput(f"tokens: expected integers in 0 .. {TOKEN_ID_MAX}: {error}") from error


def _host_array(tokens: Any) -> npt.NDArray[Any]:
    """Return the ids of a torch tensor. Raises InvalidInput for other types of torch, and for a tensor without data."""
    dtype = getattr(tokens, "dtype", type(tokens).__name__)
    if str(dtype) not in ("torch.int8", "torch.uint8", "torch.int16", "torch.int32", "torch.int64"):
        raise InvalidInput(f"tokens: expected integers, got {dtype}; convert them to int32 or int64")
    try:
        return np.asarray(tokens.detach().cpu().numpy())
    except (TypeError, RuntimeError) as error:
        raise InvalidInput(f"tokens: this tensor cannot be read as an array; pass a dense one: {error}") from error


def page_keys(tokens: bytes, page_size: int, prior: bytes = b"") -> list[bytes]:
    """Return the keys of the full pages in `tokens` (uint32 little endian), `page_size` tokens each, chained from
    `prior`.

    A page of n bigrams has 2 n tokens here: both tokens of each pair are hashed, as in SGLang. `prior` is the key of
    the page before the first one, or the seed, or empty. Takes about 0.5 us per 64-token page; half of that with the
    native helper, which releases the interpreter's lock. Raises InvalidInput if `prior` is neither empty nor 32 bytes.
    """
    if len(prior) not in (0, PAGE_KEY_BYTES):
        raise InvalidInput(f"page_keys: prior must be empty or {PAGE_KEY_BYTES} bytes, got {len(prior)}")
    page_bytes = page_size * TOKEN_BYTES
    if hash_pages is not None and (keys := hash_pages(tokens, page_bytes, prior)) is not None:
        return keys
    # A void array returns its elements as bytes objects in one call, which is faster than a slice per page.
    pages = np.frombuffer(tokens, dtype=f"V{page_bytes}", count=len(tokens) // page_bytes).tolist()
    sha256, key = hashlib.sha256, prior
    return [key := sha256(key + page).digest() for page in pages]


def split_keys(joined: bytes) -> list[bytes]:
    """Return the page keys in `joined`, 32 bytes each."""
    pages: list[bytes] = np.frombuffer(joined, dtype=f"V{PAGE_KEY_BYTES}").tolist()
    return pages


def key_page_bytes(page_size: int, position_bytes: int) -> int:
    """Return the bytes of one page of `page_size` tokens in a `RadixKey` of this kind: its positions, or its page
    key."""
    return PAGE_KEY_BYTES if position_bytes == PAGE_KEY_BYTES else page_size * position_bytes


class PageChain:
    """The page keys of a run of one or more whole pages. They are hashed at the first use, on the thread of that use.

    `tokens` and `page_size` are as in `page_keys`. `prior` is as in `page_keys`, or the chain of the previous run.
    `keys` are passed if they are known.

    No lock: each field is one reference, `_prior` always names the key before the run, and two threads that hash at the
    same time compute the same keys.
    """

    __slots__ = ("_keys", "_page_size", "_prior", "_tokens")

    def __init__(
        self, tokens: bytes, page_size: int, prior: bytes | PageChain, keys: list[bytes] | None = None
    ) -> None:
        self._tokens = tokens
        self._page_size = page_size
        self._prior = prior
        self._keys = keys

    def __repr__(self) -> str:
        return f"PageChain({self.pages} pages, {'not hashed' if self._keys is None else 'hashed'})"

    @property
    def pages(self) -> int:
        """Pages of the run."""
        return len(self._tokens) // (self._page_size * TOKEN_BYTES)

    @property
    def hashed(self) -> list[bytes] | None:
        """The keys, or None if they are not hashed yet."""
        return self._keys

    def keys(self) -> list[bytes]:
        """Return the keys. Do not modify the list."""
        missing: list[PageChain] = []
        chain = self
        while (keys := chain._keys) is None:
            missing.append(chain)
            prior = chain._prior
            if isinstance(prior, bytes):
                keys = [prior]
                break
            chain = prior
        for chain in reversed(missing):
            chain._prior = keys[-1]
            chain._keys = keys = page_keys(chain._tokens, chain._page_size, keys[-1])
        return keys

    def head(self, pages: int) -> PageChain:
        """Return the chain of the first `pages` pages."""
        keys = None if self._keys is None else self._keys[:pages]
        return PageChain(self._tokens[: pages * self._page_size * TOKEN_BYTES], self._page_size, self._prior, keys)

    def prior_key(self) -> bytes:
        """Return the key of the page before the run, or the seed, or empty bytes."""
        prior = self._prior
        return prior if isinstance(prior, bytes) else prior.keys()[-1]


@dataclass(frozen=True, slots=True)
class RadixKey:
    """The tree's key of a prompt: `tokens` under `seed` (empty, or 32 bytes). Its repr shows lengths but not tokens.

    `position_bytes` is the kind of the key:
    - 4: a position is one token, uint32 little endian.
    - 8: a position is a token and its successor. This is for EAGLE, whose draft KV at a position also depends on the
      next token. n tokens make n - 1 positions; pages, tree and storage keys consist of pairs.
    - 32: a position is a whole page, and its bytes are the page key, which the engine passes (`of_hashes`). The tokens
      are unknown and the seed is empty.

    Raises InvalidInput for bytes that are not whole positions, for a seed of another length and for another kind.
    """

    tokens: bytes
    seed: bytes = b""
    position_bytes: int = TOKEN_BYTES

    def __post_init__(self) -> None:
        if type(self.tokens) is not bytes or type(self.seed) is not bytes or type(self.position_bytes) is not int:
            raise InvalidInput("radix key: tokens and seed are bytes and position_bytes an int; use `RadixKey.of`")
        if len(self.seed) not in (0, PAGE_KEY_BYTES) or self.position_bytes not in _KINDS:
            raise InvalidInput(
                f"radix key: the seed has {len(self.seed)} bytes and a position {self.position_bytes}; use 0 or "
                "32 bytes for the seed, and 4, 8 or 32 for a position"
            )
        if self.seed and self.is_given:
            raise InvalidInput("radix key: given page keys have no seed; pass extra_key and cache_salt to `of_hashes`")
        if len(self.tokens) % self.position_bytes:
            raise InvalidInput(f"radix key: {len(self.tokens)} bytes are not whole positions of {self.position_bytes}")

    def __repr__(self) -> str:
        seed = "" if self.is_given else ", with a seed" if self.seed else ", no seed"
        return f"RadixKey({len(self)} {_KINDS[self.position_bytes]}{seed})"

    @classmethod
    def of(
        cls, tokens: TokenInput, *, extra_key: str | None = None, cache_salt: str | None = None, bigram: bool = False
    ) -> RadixKey:
        """Return the key of a prompt. Raises InvalidInput as `token_bytes` and `namespace_seed` do."""
        path = token_bytes(tokens)
        seed = b"" if extra_key is None and cache_salt is None else namespace_seed(extra_key, cache_salt)
        return cls(_pairs(path), seed, BIGRAM_BYTES) if bigram else cls(path, seed)

    @classmethod
    def of_hashes(
        cls, hashes: Sequence[bytes], *, extra_key: str | None = None, cache_salt: str | None = None
    ) -> RadixKey:
        """Return the key of a prompt from the engine's hashes of its whole pages: 32 bytes each, in order. The sequence
        may be empty.

        Each hash must cover all tokens from the start of the prompt to the end of its page, the adapter and the tenant.
        Then the hash itself is the page key. If the engine's hashes do not cover adapter and tenant, pass them here:
        page keys become SHA-256(seed || hash), so equal hashes under two seeds do not share pages on any tier.
        `Namespace.key_hash` names the algorithm of the hashes. Raises InvalidInput unless the hashes are distinct and
        have 32 bytes each, and as `namespace_seed` does.
        """
        if isinstance(hashes, (str, bytes, bytearray, memoryview)) or not isinstance(hashes, Sequence):
            raise InvalidInput(f"hashes: expected a sequence of bytes, got {type(hashes).__name__}; pass a list")
        for number, page in enumerate(hashes):
            if type(page) is not bytes or len(page) != PAGE_KEY_BYTES:
                found = f"{len(page)} bytes" if type(page) is bytes else f"a value of type {type(page).__name__}"
                raise InvalidInput(f"hashes: page {number} has {found}; pass {PAGE_KEY_BYTES} bytes for each page")
        if len(set(hashes)) != len(hashes):
            raise InvalidInput("hashes: two pages have the same hash; a hash covers all tokens before the page too")
        seed = namespace_seed(extra_key, cache_salt)
        keys = [hashlib.sha256(seed + page).digest() for page in hashes] if seed else hashes
        return cls(b"".join(keys), b"", PAGE_KEY_BYTES)

    def __len__(self) -> int:
        """Return the number of positions: the part of the prompt that can be cached."""
        return len(self.tokens) // self.position_bytes

    @property
    def is_given(self) -> bool:
        """True if the engine passed page keys. Then `tokens` contains them, and the tokens of the prompt are
        unknown."""
        return self.position_bytes == PAGE_KEY_BYTES

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of the prompt: the positions, plus one for bigrams, whose last token starts no pair.

        Raises InvalidInput for given page keys.
        """
        if self.is_given:
            raise InvalidInput(
                "key: the tokens of a prompt with given page keys are unknown; "
                "use a cache that takes given page keys, or `RadixKey.of`"
            )
        return len(self) + (self.position_bytes == BIGRAM_BYTES)

    def pages(self, page_size: int) -> int:
        """Return the number of whole pages of `page_size` tokens."""
        return len(self.tokens) // key_page_bytes(page_size, self.position_bytes)

    def page_keys(self, page_size: int, prior: bytes, start_page: int, end_page: int) -> list[bytes]:
        """Return the keys of the whole pages from `start_page` up to `end_page`: the given ones, or hashed from
        `prior`.

        `prior` is as in `page_keys`.
        """
        size = key_page_bytes(page_size, self.position_bytes)
        run = self.tokens[start_page * size : end_page * size]
        return split_keys(run) if self.is_given else page_keys(run, size // TOKEN_BYTES, prior)

    def head(self, positions: int) -> RadixKey:
        """Return the key of the first `positions` positions."""
        return RadixKey(self.tokens[: positions * self.position_bytes], self.seed, self.position_bytes)

    def continues(self, other: RadixKey) -> bool:
        """Return True if both keys have the same kind and seed, and the shorter one is a prefix of the longer one."""
        return (self.seed, self.position_bytes) == (other.seed, other.position_bytes) and (
            self.tokens.startswith(other.tokens) or other.tokens.startswith(self.tokens)
        )

    def extended(self, tokens: TokenInput) -> RadixKey:
        """Return the key of this prompt followed by more tokens, under the same seed.

        Raises InvalidInput for a bigram key of one token, which does not contain its token, and for given page keys:
        make a new key instead.
        """
        if self.is_given:
            raise InvalidInput("radix key: given page keys cannot be extended by tokens; make a key of all hashes")
        more = token_bytes(tokens)
        if self.position_bytes == BIGRAM_BYTES:
            if not self.tokens:
                raise InvalidInput("radix key: a bigram key of one token cannot be extended; make one of all tokens")
            more = _pairs(self.tokens[-TOKEN_BYTES:] + more)
        return RadixKey(self.tokens + more, self.seed, self.position_bytes)


# The name of a position of each kind of key.
_KINDS = {TOKEN_BYTES: "tokens", BIGRAM_BYTES: "bigrams", PAGE_KEY_BYTES: "given page keys"}


def _pairs(path: bytes) -> bytes:
    """Return the overlapping pairs of uint32 tokens: a b c -> a b, b c."""
    tokens = np.frombuffer(path, dtype="<u4")
    return np.stack((tokens[:-1], tokens[1:]), axis=1).tobytes()


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

    The bytes: `geometry` is the shape of one rank's page. `element_order`, one of `ELEMENT_ORDERS`, is the order of the
    elements inside a piece. `engine_layout` is an engine's own name for the content and layout of a page, such as
    "vllm/HNC/bf16/block16", or empty for the layout of `hicache.tiers`; with a `PageShape` it must include the dtype.
    `quantisation` names the scheme of a quantised cache, `kv_scales` is a fingerprint of its scales.

    The keys: `key_hash` names the algorithm and the seed of page keys that the engine passes (`RadixKey.of_hashes`); it
    is empty for HiCache's own chain of tokens.

    The rank: tensor parallel (`tp`), pipeline (`pp`), context parallel (`cp`) and decode context parallel (`dcp`). Each
    rank has its own pages, unless `ranks_share_pages` is set: then all tensor-parallel ranks hold the same bytes (the
    latent of MLA, or one page that all of them fill) and have one namespace for any number of ranks.

    `label` names the model for people: on pages, in tables, logs and stores. It may be the path of its folder, of which
    only the last part is kept (`model_label`), and may differ between engines. Raises InvalidInput for a field of
    another type or range.
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
        page_shape(self.geometry)
        object.__setattr__(self, "weights_epoch", require_epoch(self.weights_epoch))
        for kind in ("tp", "pp", "cp", "dcp"):
            rank, size = (whole(f"namespace: {name}", getattr(self, name)) for name in (f"{kind}_rank", f"{kind}_size"))
            if not rank < size:
                raise InvalidInput(f"namespace: {kind}_rank {rank} is not below {kind}_size {size}")
            object.__setattr__(self, f"{kind}_rank", rank)
            object.__setattr__(self, f"{kind}_size", size)
        tagged = _tagged("hicache.namespace", [*self._identity(), *_shape_fields(self.geometry)])
        object.__setattr__(self, "digest", hashlib.sha256(tagged).digest())

    def _identity(self) -> list[tuple[str, bytes]]:
        """Return all fields that must agree, except the shape of a page. Without the rank if ranks share pages."""
        names = [
            "model", "weights_epoch", "kv_scales", "pp_rank", "pp_size", "cp_rank", "cp_size", "dcp_rank", "dcp_size",
            "element_order", "engine_layout", "quantisation", "key_hash",
            *(() if self.ranks_share_pages else ("tp_rank", "tp_size")),
        ]  # fmt: skip
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
        return page_shape(self.geometry)

    @property
    def writes(self) -> bool:
        """True if this rank stores pages. If ranks share pages, only the first one stores them."""
        return not self.ranks_share_pages or self.tp_rank == 0


def _shape_fields(geometry: KVGeometry | PageShape) -> list[tuple[str, bytes]]:
    """Return tokens and pieces in order, and the fields of a KVGeometry: the same bytes described as PageShape and as
    KVGeometry have different namespaces."""
    shape = page_shape(geometry)
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
