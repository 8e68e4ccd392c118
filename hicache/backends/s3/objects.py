"""Objects of one bucket: their names, and requests about many of them.

Names of objects are `<prefix><namespace>/<first two digits of the key>/<key>`, digests in lower-case hexadecimal. Keys
are hashes, so pages spread evenly over the 256 prefixes of a namespace, by which stores distribute load. A namespace is
one prefix, so it can be listed, purged and expired separately.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ...clock import SYSTEM_CLOCK, Clock
from ...config.s3_storage import S3StorageOptions
from ...errors import BackendUnavailable
from ..base import StoredPage
from ..errors import ErrorKind, StoreError
from .access import open_access
from .client import ObjectInfo, S3Client
from .replies import LISTED_MAX

_NAMESPACE_DIGITS = 64
_NAME = re.compile(r"([0-9a-f]{64})/([0-9a-f]{2})/(\2[0-9a-f]{62})")
# RFC 9110, 8.8.3, but without the non-ASCII bytes that it allows in a tag.
_ENTITY_TAG = re.compile(r'(?:W/)?"[!#-~]*"')
# Advice for the errors that an operator can fix.
_ADVICE: dict[str, str] = {
    ErrorKind.DNS: "the host name cannot be resolved; check endpoint_url and proxy",
    ErrorKind.CONNECTION_REFUSED: "nothing listens at that address; check endpoint_url and proxy",
    ErrorKind.TIMEOUT: "no answer came in time; check endpoint_url and the network",
    ErrorKind.UNREACHABLE: "check endpoint_url, proxy and the network",
    ErrorKind.TLS: "the TLS handshake failed; check endpoint_url and ca_file",
    ErrorKind.CERTIFICATE_EXPIRED: "the certificate of the server has expired or is not valid yet; renew it, or set "
    "the clock",
    ErrorKind.CONNECTION_LOST: "it closed the connection; check https:// against http:// in endpoint_url, and proxy",
    ErrorKind.BAD_REQUEST: "it does not accept the request; check endpoint_url, its path, and the name of the bucket",
    ErrorKind.PROTOCOL: "the reply is not from an S3 store; check endpoint_url",
    ErrorKind.NO_BUCKET: "create the bucket, or correct its name",
    ErrorKind.WRONG_CREDENTIALS: "the credentials are wrong, unknown or expired; check them",
    ErrorKind.ACCESS_DENIED: "allow s3:ListBucket, s3:GetObject, s3:PutObject and s3:DeleteObject, or "
    "s3express:CreateSession for a directory bucket",
    ErrorKind.CLOCK_SKEW: "set the clock of this machine",
    ErrorKind.WRONG_REGION: "set region to the bucket's region",
}


def explanation(kind: str) -> str:
    """See ExplainsErrors."""
    return _ADVICE.get(kind, "")


def object_name(prefix: str, namespace: bytes, key: bytes) -> str:
    """Return the name of a page's object."""
    digits = key.hex()
    return f"{prefix}{namespace.hex()}/{digits[:2]}/{digits}"


def parse_name(prefix: str, name: str) -> tuple[bytes, bytes] | None:
    """Return namespace and key of the page with that object name; None if it is not the name of a page."""
    match = _NAME.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
    return None if match is None else (bytes.fromhex(match[1]), bytes.fromhex(match[3]))


class Objects:
    """See the module's docstring. Thread-safe. All verbs block up to the deadline and raise StoreError. `client` makes
    the plain requests; `close` closes it.

    The constructor lists one object, within `open_timeout`. It raises BackendUnavailable if that fails, and as
    `open_access`.
    """

    def __init__(self, options: S3StorageOptions, clock: Clock = SYSTEM_CLOCK) -> None:
        deadline = clock() + options.open_timeout
        access = open_access(options, deadline, clock)
        self.client = S3Client(access)
        self._is_directory = access.is_directory
        self._prefix = options.prefix
        self._is_conditional = True
        try:
            self.client.list(options.prefix, None, 1, deadline=deadline)
        except StoreError as error:
            self.client.close()
            where = f"s3 store: bucket {options.bucket!r} at {options.endpoint_url or 'AWS'}"
            advice = _ADVICE.get(error.kind, "try again when the store works")
            raise BackendUnavailable(f"{where}: {error}; {advice}") from error

    def put_new(self, name: str, body: Sequence[memoryview], *, deadline: float) -> bool:
        """Store an object unless it exists; return False if it exists. If the server does not support conditional
        writes, look it up first; then two writers at the same moment may both store theirs."""
        if self._is_conditional:
            try:
                return self.client.put(name, body, if_absent=True, deadline=deadline)
            except StoreError as error:
                if error.kind not in (ErrorKind.UNSUPPORTED, ErrorKind.BAD_REQUEST):
                    raise
        if self.client.head(name, deadline=deadline) is not None:
            return False
        self.client.put(name, body, if_absent=False, deadline=deadline)
        # The server rejected the condition: the same page was stored without it.
        self._is_conditional = False
        return True

    def remove_same(self, name: str, found: ObjectInfo, *, deadline: float) -> bool:
        """Remove an object if it is still the `found` one; return False if it is not. It is looked up first, because a
        gateway may have answered the read, and some servers ignore the condition of a removal. A tag that is not a
        valid entity tag is only compared here, and not sent."""
        if self.client.head(name, deadline=deadline) != found:
            return False
        try:
            if _ENTITY_TAG.fullmatch(found.etag):
                return self.client.remove(name, found.etag, deadline=deadline)
        except StoreError as error:
            if error.kind not in (ErrorKind.UNSUPPORTED, ErrorKind.BAD_REQUEST):
                raise
        return self.client.remove(name, "", deadline=deadline)

    def remove_many(self, names: Sequence[str], *, deadline: float) -> list[str]:
        """Remove any number of objects; return the error kind of each one not removed."""
        kinds: list[str] = []
        for first in range(0, len(names), LISTED_MAX):
            some = names[first : first + LISTED_MAX]
            found = self.client.remove_many(some, deadline=deadline)
            if len(found) > len(some):
                raise StoreError(ErrorKind.PROTOCOL, f"{len(found)} of {len(some)} objects were not removed")
            kinds += found
        return kinds

    def name(self, namespace: bytes, key: bytes) -> str:
        """Return the name of a page's object."""
        return object_name(self._prefix, namespace, key)

    def pages(self, namespace: str, *, deadline: float) -> Iterator[StoredPage]:
        """Yield the pages whose namespace, in hexadecimal, starts with `namespace`. One request per LISTED_MAX pages.

        A listing whose tokens form a cycle is an error. Brent's algorithm finds the cycle (An improved Monte Carlo
        factorization algorithm, 1980): each token is compared with an earlier one, which is replaced after 1, 2, 4, ...
        tokens.
        """
        listed = f"{namespace}/" if len(namespace) == _NAMESPACE_DIGITS else namespace
        if self._is_directory and len(namespace) < _NAMESPACE_DIGITS:
            listed = ""  # directory buckets accept only prefixes that end with a slash
        token: str | None = None
        mark: str | None = None
        steps, steps_max = 0, 1
        while True:
            listing = self.client.list(self._prefix + listed, token, LISTED_MAX, deadline=deadline)
            for entry in listing.objects:
                ids = parse_name(self._prefix, entry.name)
                if ids is not None and ids[0].hex().startswith(namespace):
                    yield StoredPage(*ids, entry.size_bytes, entry.modified_s, stored_s=entry.modified_s)
            token = listing.next_token
            if token is None:
                return
            if token == mark:
                raise StoreError(ErrorKind.PROTOCOL, "the listing repeats an earlier token, so it would never end")
            steps += 1
            if steps == steps_max:
                mark, steps, steps_max = token, 0, 2 * steps_max

    def close(self) -> None:
        """Close the connections. REQUIRES: no call is in flight."""
        self.client.close()
