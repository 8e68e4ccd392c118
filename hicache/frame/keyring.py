"""The keys that seal and prove frames: the current one and, while keys are being changed, another one.

A header names its key by 8 bytes of a hash, so a reader takes the right one at once and never tries both. The key of
tags and the key of encryption are named apart, and a key serves for one of the two.

Each page takes a nonce of 96 random bits. Under one key, the chance that any two of n pages share one is about
n**2 / 2**97; NIST SP 800-38D allows n = 2**32 pages a key, at which it is 2**-33. Change the key before that: it is
32 PiB of 8 MiB pages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from ..errors import InvalidInput
from .header import TagKind

FRAME_KEY_BYTES = 32
KEY_ID_BYTES = 8
NO_KEY_ID = bytes(KEY_ID_BYTES)
# The current key and one more: a change of keys needs two, and a third would be one nobody remembers to remove.
KEYS_MAX = 2
_DOMAINS = {TagKind.AES_256_GMAC: b"hicache.mac_key_id", TagKind.AES_256_GCM: b"hicache.encryption_key_id"}


def key_id(kind: TagKind, key: bytes) -> bytes:
    """The 8 bytes under which a header names `key`, which they do not betray."""
    return hashlib.sha256(_DOMAINS[kind] + key).digest()[:KEY_ID_BYTES]


def key_table(kind: TagKind, keys: Sequence[bytes]) -> Mapping[bytes, bytes]:
    """The keys by their ids, the one that seals first. Raises InvalidInput for a wrong length or too many keys."""
    what = "MAC" if kind is TagKind.AES_256_GMAC else "encryption"
    if len(keys) > KEYS_MAX:
        raise InvalidInput(f"frame: {len(keys)} {what} keys; at most the current and one more can be in use")
    for key in keys:
        if len(key) != FRAME_KEY_BYTES:
            raise InvalidInput(f"frame: the {what} key must be {FRAME_KEY_BYTES} bytes, got {len(key)}")
    return {key_id(kind, key): key for key in keys}
