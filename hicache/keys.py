"""Page identity: token ids in, chained SHA-256 page keys out, and the namespace that stored pages live in.

    page_key[i] = SHA-256( page_key[i-1] || tokens of page i as uint32 little endian )

`page_key[-1]` is empty, or the 32-byte seed that `extra_key` (LoRA adapter) and `cache_salt` (tenant) make, so equal
tokens under two seeds share neither a key nor a tree node. Without a seed the keys agree with SGLang's. A partial last
page has no key.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .arguments import encoded, instance, whole
from .errors import InvalidInput
from .geometry import KVGeometry, KVLayout

if TYPE_CHECKING:
    import torch

PAGE_KEY_BYTES = 32
TOKEN_BYTES = 4
BIGRAM_BYTES = 2 * TOKEN_BYTES
# Engines keep token ids in int32 tensors, so an id beyond this range is a mistake and not a bigger vocabulary.
TOKEN_ID_MAX = 2**31 - 1
# Part of every namespace digest: a change of the frame or of the key scheme puts old pages out of reach.
FORMAT_VERSION = 2
# The header of a frame has 64 bits for it.
EPOCH_MAX = 2**64 - 1

_PACKED = np.dtype("<u4")
_UNSIGNED: dict[int, np.dtype[Any]] = {4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}
_SIGNED: dict[int, np.dtype[Any]] = {4: np.dtype(np.int32), 8: np.dtype(np.int64)}

# The optional native helper: int64 to uint32 bytes in one pass (numpy: three), None if an id is out of range.
narrow: Callable[[npt.NDArray[Any]], bytes | None] | None = None
with contextlib.suppress(ImportError):
    from . import _narrow

    narrow = _narrow.narrow

TokenInput: TypeAlias = "Sequence[int] | array.array[int] | npt.NDArray[Any] | torch.Tensor"


def token_bytes(tokens: TokenInput) -> bytes:
    """Token ids as uint32 little endian, 4 bytes each.

    Takes a sequence of int, an `array.array`, or a one-dimensional integer numpy array or torch tensor (a tensor on a
    device is copied to the host, which waits for it). Mutates nothing. Raises InvalidInput for no tokens, another
    dtype or shape, and ids outside 0 .. 2**31 - 1.
    """
    unsigned = _as_unsigned(tokens)
    if narrow is not None and unsigned.itemsize == 8:
        packed = narrow(unsigned)
        if packed is not None:
            return packed
    position = unsigned.argmax()
    if unsigned[position] > TOKEN_ID_MAX:
        token = unsigned.view(_SIGNED[unsigned.itemsize])[position]
        raise InvalidInput(f"tokens: id {token} at position {position} is outside 0 .. {TOKEN_ID_MAX}")
    return unsigned.astype(_PACKED, copy=False).tobytes()


def _as_unsigned(tokens: TokenInput) -> npt.NDArray[Any]:
    """The ids as contiguous uint32 or uint64. A negative id becomes a very large one: one check finds both mistakes."""
    if isinstance(tokens, array.array) and tokens.typecode == "q" and tokens:  # what engines hold
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
            raise InvalidInput("tokens: a masked array does not say which ids are valid; pass the ids themselves")
        return tokens
    if isinstance(tokens, array.array) and tokens.typecode != "u":  # of characters
        return np.frombuffer(tokens, dtype=tokens.typecode) if len(tokens) else np.empty(0, np.int64)
    if type(tokens).__module__.partition(".")[0] == "torch":
        return _host_array(tokens)
    if isinstance(tokens, (str, bytes, bytearray, memoryview, array.array)):
        raise InvalidInput(f"tokens: expected token ids, got {type(tokens).__name__}; tokenize the text first")
    if not isinstance(tokens, Sequence):  # a set, for one, has no order
        raise InvalidInput(f"tokens: expected a sequence of token ids, got {type(tokens).__name__}; pass a list")
    try:
        return np.frombuffer(array.array("q", tokens), dtype=np.int64) if len(tokens) else np.empty(0, np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInput(f"tokens: expected integers in 0 .. {TOKEN_ID_MAX}: {error}") from error


def _host_array(tokens: Any) -> npt.NDArray[Any]:
    """The ids of a torch tensor. Raises InvalidInput for anything else of torch, and for a tensor without content."""
    dtype = getattr(tokens, "dtype", type(tokens).__name__)
    if str(dtype) not in ("torch.int8", "torch.uint8", "torch.int16", "torch.int32", "torch.int64"):
        raise InvalidInput(f"tokens: expected integers, got {dtype}; convert them to int32 or int64")
    try:
        return np.asarray(tokens.detach().cpu().numpy())
    except (TypeError, RuntimeError) as error:
        raise InvalidInput(f"tokens: this tensor cannot be read as an array; pass a dense one: {error}") from error


def page_keys(tokens: bytes, page_size: int, prior: bytes = b"") -> list[bytes]:
    """Keys of the full pages in `tokens` (uint32 little endian), `page_size` tokens each, chained from `prior`.

    A page of n bigrams is 2 n tokens here: both of each pair are hashed, as SGLang does.
    `prior` is the key of the page before the first one, or the seed, or empty. Costs about 0.4 us per 64-token page.
    Raises InvalidInput if `prior` is neither empty nor 32 bytes.
    """
    if len(prior) not in (0, PAGE_KEY_BYTES):
        raise InvalidInput(f"page_keys: prior must be empty or {PAGE_KEY_BYTES} bytes, got {len(prior)}")
    page_bytes = page_size * TOKEN_BYTES
    # A void array hands out its elements as bytes objects in one call, faster than a slice per page.
    pages = np.frombuffer(tokens, dtype=f"V{page_bytes}", count=len(tokens) // page_bytes).tolist()
    sha256, key = hashlib.sha256, prior
    return [key := sha256(key + page).digest() for page in pages]


class PageChain:
    """The page keys of a run of one whole page or more, hashed when first asked for, by whichever thread that is.

    `tokens` and `page_size` are as in `page_keys`; `prior` too, or it is the chain of the run before this one. `keys`
    are given where they are known.

    No lock: each field is one reference, `_prior` names the key before the run at all times, and two threads that hash
    at once find the same keys.
    """

    __slots__ = ("_keys", "_page_size", "_prior", "_tokens")

    def __init__(
        self, tokens: bytes, page_size: int, prior: bytes | PageChain, keys: list[bytes] | None = None
    ) -> None:
        self._tokens = tokens
        self._page_size = page_size
        self._prior = prior
        self._keys = keys

    @property
    def pages(self) -> int:
        """Pages of the run."""
        return len(self._tokens) // (self._page_size * TOKEN_BYTES)

    @property
    def hashed(self) -> list[bytes] | None:
        """The keys, None if nobody has asked for them yet."""
        return self._keys

    def keys(self) -> list[bytes]:
        """The keys; not to be written to."""
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
        """The chain of the first `pages` pages."""
        keys = None if self._keys is None else self._keys[:pages]
        return PageChain(self._tokens[: pages * self._page_size * TOKEN_BYTES], self._page_size, self._prior, keys)

    def prior_key(self) -> bytes:
        """The key of the page before the run, or the seed, or empty."""
        prior = self._prior
        return prior if isinstance(prior, bytes) else prior.keys()[-1]


@dataclass(frozen=True, slots=True)
class RadixKey:
    """A prompt as the tree sees it: `tokens` (uint32 little endian) under `seed` (empty, or 32 bytes).

    A position is one token (`position_bytes` 4), or for EAGLE, whose draft KV at a position depends on the next token
    as well, the pair of a token and its successor (8): n tokens make n - 1 positions, and pages, tree and storage keys
    are made of pairs. Raises InvalidInput for bytes that are no whole positions and for a seed of another length.
    """

    tokens: bytes
    seed: bytes = b""
    position_bytes: int = TOKEN_BYTES

    def __post_init__(self) -> None:
        if type(self.tokens) is not bytes or type(self.seed) is not bytes or type(self.position_bytes) is not int:
            raise InvalidInput("radix key: tokens and seed are bytes and position_bytes an int; use `RadixKey.of`")
        if len(self.seed) not in (0, PAGE_KEY_BYTES) or self.position_bytes not in (TOKEN_BYTES, BIGRAM_BYTES):
            raise InvalidInput(
                f"radix key: {len(self.seed)} bytes of seed (0 or 32), {self.position_bytes} bytes a position (4 or 8)"
            )
        if len(self.tokens) % self.position_bytes:
            raise InvalidInput(f"radix key: {len(self.tokens)} bytes are no whole positions of {self.position_bytes}")

    @classmethod
    def of(
        cls, tokens: TokenInput, *, extra_key: str | None = None, cache_salt: str | None = None, bigram: bool = False
    ) -> RadixKey:
        """The key of a prompt. Raises InvalidInput as `token_bytes` and `namespace_seed` do."""
        path = token_bytes(tokens)
        seed = b"" if extra_key is None and cache_salt is None else namespace_seed(extra_key, cache_salt)
        return cls(_pairs(path), seed, BIGRAM_BYTES) if bigram else cls(path, seed)

    def __len__(self) -> int:
        """Positions, which is what may be cached."""
        return len(self.tokens) // self.position_bytes

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt: positions, and for bigrams the last token, which begins no pair."""
        return len(self) + (self.position_bytes == BIGRAM_BYTES)

    def head(self, positions: int) -> RadixKey:
        """The first `positions` positions."""
        return RadixKey(self.tokens[: positions * self.position_bytes], self.seed, self.position_bytes)

    def continues(self, other: RadixKey) -> bool:
        """Whether this and `other` are of one prompt: one kind and seed, and the longer begins with the shorter."""
        return (self.seed, self.position_bytes) == (other.seed, other.position_bytes) and (
            self.tokens.startswith(other.tokens) or other.tokens.startswith(self.tokens)
        )

    def extended(self, tokens: TokenInput) -> RadixKey:
        """This prompt followed by more tokens, under the same seed.

        Raises InvalidInput for a bigram key of one token, which does not know its token: make a new key instead.
        """
        more = token_bytes(tokens)
        if self.position_bytes == BIGRAM_BYTES:
            if not self.tokens:
                raise InvalidInput("radix key: a bigram key of one token cannot be extended; make one of all tokens")
            more = _pairs(self.tokens[-TOKEN_BYTES:] + more)
        return RadixKey(self.tokens + more, self.seed, self.position_bytes)


def _pairs(path: bytes) -> bytes:
    """Overlapping pairs of uint32 tokens: a b c -> a b, b c."""
    tokens = np.frombuffer(path, dtype="<u4")
    return np.stack((tokens[:-1], tokens[1:]), axis=1).tobytes()


def namespace_seed(extra_key: str | None = None, cache_salt: str | None = None) -> bytes:
    """The seed of a (LoRA adapter, tenant) pair: empty for neither, else 32 bytes.

    Raises InvalidInput for an empty string, since a tenant whose salt got lost must not land among those who have none,
    for text that has no UTF-8 or is longer than `NAME_BYTES_MAX`, and for another type.
    """
    named = (("extra_key", extra_key), ("cache_salt", cache_salt))
    fields = [(name, encoded(name, value)) for name, value in named if value is not None]
    return hashlib.sha256(_tagged("hicache.seed", fields)).digest() if fields else b""


def _tagged(domain: str, fields: Sequence[tuple[str, bytes]]) -> bytes:
    """Domain-separated, length-prefixed encoding: two different field lists never encode to the same bytes."""
    parts = [struct.pack("<H", len(domain)), domain.encode()]
    for name, value in fields:
        parts += [struct.pack("<HI", len(name), len(value)), name.encode(), value]
    return b"".join(parts)


def require_epoch(epoch: object, *, above: int = -1) -> int:
    """Return `epoch`, a count of weight updates, as an int.

    Raises InvalidInput unless it is an integer above `above` that the header of a frame can carry.
    """
    count = whole("weights epoch", epoch, 0, EPOCH_MAX)
    if count <= above:
        raise InvalidInput(f"weights epoch {count} is not above {above}; count every update")
    return count


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything two engines must agree on before one may read a page the other stored.

    `model` is a fingerprint of the weights, `weights_epoch` counts their updates, `kv_scales` fingerprints the scales
    of a quantised cache. `geometry` is one rank's, so ranks have namespaces of their own; but for the tensor-parallel
    ranks of an MLA model, which all hold the same latent pages and share one. `label` names the model for people who
    look at a store, and is no part of what must agree. Raises InvalidInput for a field of another type or range.
    """

    model: str
    geometry: KVGeometry
    weights_epoch: int = 0
    kv_scales: str = ""
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    label: str = field(default="", compare=False)
    digest: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        encoded("namespace: model", self.model)  # not empty: pages of two models would mix
        encoded("namespace: kv_scales", self.kv_scales, least=0)
        instance("namespace: label", self.label, str)
        instance("namespace: geometry", self.geometry, KVGeometry)
        require_epoch(self.weights_epoch)
        for name in ("tp_rank", "tp_size", "pp_rank", "pp_size"):
            object.__setattr__(self, name, whole(f"namespace: {name}", getattr(self, name)))
        for rank, size in (("tp_rank", "tp_size"), ("pp_rank", "pp_size")):
            if not 0 <= getattr(self, rank) < getattr(self, size):
                raise InvalidInput(f"namespace: {rank} {getattr(self, rank)} is not below {size} {getattr(self, size)}")
        shape = self.geometry
        tp_rank, tp_size = (self.tp_rank, self.tp_size) if shape.layout is KVLayout.MHA else (0, 1)
        fields = {
            "format_version": FORMAT_VERSION,
            "model": self.model,
            "weights_epoch": self.weights_epoch,
            "dtype": shape.dtype,
            "kv_scales": self.kv_scales,
            "layout": shape.layout.value,
            "page_size": shape.page_size,
            "layers": shape.layers,
            "heads": shape.heads,
            "head_dim": shape.head_dim,
            "tp_rank": tp_rank,
            "tp_size": tp_size,
            "pp_rank": self.pp_rank,
            "pp_size": self.pp_size,
        }
        tagged = _tagged("hicache.namespace", [(name, str(value).encode()) for name, value in fields.items()])
        object.__setattr__(self, "digest", hashlib.sha256(tagged).digest())

    @property
    def writes(self) -> bool:
        """Whether this rank stores pages: of ranks that share a namespace, the first one does."""
        return self.geometry.layout is KVLayout.MHA or self.tp_rank == 0
