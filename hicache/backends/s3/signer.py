"""Signatures by botocore: Signature Version 4 of the AWS API, with the keys of an identity or, for directory buckets,
those of a session.

The algorithm is in "Authenticating Requests (AWS Signature Version 4)" of the Amazon S3 API reference. Sessions are in
"CreateSession" there: their keys are valid for five minutes and for one bucket.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_VISIBLE = re.compile("[!-~]+")


@dataclass(frozen=True, slots=True)
class Credentials:
    """The keys of one identity or session. `repr` shows only the access key. Raises ValueError if the access key or the
    token is not visible ASCII, or the secret key is not printable."""

    access_key: str
    secret_key: str = field(repr=False)
    token: str | None = field(default=None, repr=False)
    is_session: bool = False

    def __post_init__(self) -> None:
        sent = (self.access_key, "-" if self.token is None else self.token)
        if not all(map(_VISIBLE.fullmatch, sent)) or not str.isprintable(self.secret_key):
            raise ValueError("contain characters that are not valid in a key; remove line ends and spaces")


class Signer:
    """Signs requests to one endpoint. `service` and `region` are parts of the signature. REQUIRES: botocore is
    installed. Thread-safe."""

    def __init__(self, service: str, region: str) -> None:
        from botocore.auth import S3ExpressAuth, S3SigV4Auth  # noqa: PLC0415 - an optional dependency
        from botocore.awsrequest import AWSRequest  # noqa: PLC0415
        from botocore.config import Config  # noqa: PLC0415

        self.service, self._region = service, region
        self._auth, self._session_auth, self._request = S3SigV4Auth, S3ExpressAuth, AWSRequest
        self._unsigned_body = Config(s3={"payload_signing_enabled": False})

    def sign(
        self, credentials: Credentials, method: str, url: str, headers: Mapping[str, str], body: bytes | None = None
    ) -> dict[str, str]:
        """Return `headers`, plus those that authenticate the request, with names in lower case. A `body` is a part of
        the signature; without one, any body may be sent.

        REQUIRES: `url` is encoded, and has neither a user nor a fragment.
        """
        request = self._request(method, url, headers=headers, data=body)
        if body is None:
            request.context["client_config"] = self._unsigned_body
        if credentials.is_session:
            self._session_auth(credentials, self.service, self._region, identity_cache=None).add_auth(request)
        else:
            self._auth(credentials, self.service, self._region).add_auth(request)
        return {name.lower(): value for name, value in request.headers.items()}
