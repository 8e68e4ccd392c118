"""Names of objects: `<prefix><namespace>/<first two digits of the key>/<key>`, digests in lower-case hexadecimal.

Keys are hashes, so pages spread evenly over the 256 prefixes of a namespace, by which stores divide their load; a
namespace is one prefix, so that it can be listed, purged and expired by itself.
"""

from __future__ import annotations

import re

_NAME = re.compile(r"([0-9a-f]{64})/([0-9a-f]{2})/(\2[0-9a-f]{62})")


def object_name(prefix: str, namespace: bytes, key: bytes) -> str:
    """The name of a page."""
    digits = key.hex()
    return f"{prefix}{namespace.hex()}/{digits[:2]}/{digits}"


def parse_name(prefix: str, name: str) -> tuple[bytes, bytes] | None:
    """Namespace and key of the page of that name, None if it is none of ours."""
    match = _NAME.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
    return None if match is None else (bytes.fromhex(match[1]), bytes.fromhex(match[3]))
