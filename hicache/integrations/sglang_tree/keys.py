"""The key of a prompt of SGLang. Does not import SGLang."""

from __future__ import annotations

from array import array

from ...errors import InvalidInput
from ...keys import BIGRAM_BYTES, RadixKey


def prompt_key(
    tokens: array[int], extra_key: str | None, cache_salt: str | None, *, page_size: int, bigram: bool, wide_ids: bool
) -> RadixKey | None:
    """Return the key of `tokens`; None if they are fewer than a page, or not token ids. Does not raise: such a prompt
    is computed without the cache.

    `bigram`: a position is a token and its successor. `wide_ids`: a position is one id of 64 bits, as SGLang names
    images by ids of 62 bits; then `bigram` has no effect, so a draft model may accept less after a hit.
    """
    if len(tokens) < page_size:
        return None
    try:
        if not wide_ids:
            return RadixKey.of(tokens, extra_key=extra_key, cache_salt=cache_salt or None, bigram=bigram)
        seed = RadixKey.of((0,), extra_key=extra_key, cache_salt=cache_salt or None).seed
        return RadixKey(array("q", tokens).tobytes(), seed, BIGRAM_BYTES)
    except InvalidInput:
        return None
