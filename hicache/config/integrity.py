"""The sections `integrity` and `storage_format`: verification, compression and encryption of stored pages."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from ..units import PositiveSize
from .secret import read_keys
from .section import VARIABLE_PATTERN, FileSystemPath, Section


class _KeySection(Section):
    """A section with a key, in a file or in a variable. A second key there is the previous one, whose pages are still
    accepted."""

    _section: ClassVar[str]
    _key: ClassVar[str]

    @property
    def key_source(self) -> tuple[str, Path | str] | None:
        """The full name of the entry that names the keys, and the file (a path) or the variable (text) that it names;
        None without keys."""
        for entry in (f"{self._key}_file", f"{self._key}_env"):
            place: Path | str | None = getattr(self, entry)
            if place is not None:
                return f"{self._section}.{entry}", place
        return None

    def keys(self, environ: Mapping[str, str] | None = None) -> tuple[bytes, ...]:
        """Return the configured keys, the current one first; none if no key is configured.

        Reads a file, or `environ` (default: `os.environ`). Raises ConfigError as `read_keys`.
        """
        source = self.key_source
        return () if source is None else read_keys(*source, os.environ if environ is None else environ)


class IntegrityConfig(_KeySection):
    """How stored pages are verified."""

    _section, _key = "integrity", "mac_key"
    alternatives = (("mac_key_file", "mac_key_env"),)

    tag: Literal["xxh3_128", "none"] = "xxh3_128"
    """Checksum of every page. `none` serves unverified data: only for measurements. A MAC key replaces it by
    AES-256-GMAC, an encryption key by AES-256-GCM."""
    verify: Literal["read", "load"] = "read"
    """When pages are verified. `read`: when read from storage. `load`: also before a load from host to device, which
    detects damaged host memory, but takes longer (docs/benchmarks.md). Pages that are not yet stored are not covered.
    Not for several ranks with a cache each."""
    scrub_rate: PositiveSize | None = None
    """Bytes per second of host memory verified while the engine is idle; damaged pages are evicted. It uses a core and
    memory bandwidth. Not set: none."""
    mac_key_file: FileSystemPath | None = None
    """File with the MAC key: 64 hexadecimal digits or 32 raw bytes, mode 0600; the same in all engines that share the
    store, if others can write to it: they cannot forge pages then. During a key change, a second line has the previous
    key, whose pages are accepted (docs/formats/frame.md)."""
    mac_key_env: str | None = Field(default=None, pattern=VARIABLE_PATTERN)
    """Name of the variable with the MAC key as 64 hexadecimal digits, and perhaps the previous key."""

    @property
    def verifies_host(self) -> bool:
        """True if frames on the host are verified there."""
        return self.verify == "load" or self.scrub_rate is not None


class StorageFormatConfig(_KeySection):
    """Compression and encryption of stored pages. Engines with different settings can share a store, except for
    encryption."""

    _section, _key = "storage_format", "encryption_key"
    alternatives = (("encryption_key_file", "encryption_key_env"),)

    compression: Literal["none", "zstd"] = "none"
    """`zstd` stores pages in fewer bytes, for about one second of a core per GB stored and a third of that per GB read,
    if storage or network is slower. Needs the extra `compression`."""
    encryption_key_file: FileSystemPath | None = None
    """File with the encryption key, in the format of `integrity.mac_key_file`, which it replaces; the same in all
    engines that share the store, if others can read it. Only encrypted pages are accepted."""
    encryption_key_env: str | None = Field(default=None, pattern=VARIABLE_PATTERN)
    """Name of the variable with the encryption key as 64 hexadecimal digits, and perhaps the previous key."""
