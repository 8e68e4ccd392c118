"""Token ids of any type that an engine has, as bytes."""

from __future__ import annotations

import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import InvalidInput
from ..lazy import native

if TYPE_CHECKING:
    import torch

TOKEN_BYTES = 4
# Engines keep token ids in int32 tensors, so an id outside this range is an error of the caller.
TOKEN_ID_MAX = 2**31 - 1

_PACKED = np.dtype("<u4")
_UNSIGNED: dict[int, np.dtype[Any]] = {4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}
_SIGNED: dict[int, np.dtype[Any]] = {4: np.dtype(np.int32), 8: np.dtype(np.int64)}

# The optional native helper: int64 to uint32 bytes in one pass (numpy: three), None if an id is out of range.
pack_token_ids: Callable[[npt.NDArray[Any]], bytes | None] | None = native("pack_token_ids")

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
