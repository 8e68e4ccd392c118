"""The sections `integrity` and `storage_format`: verification, compression and encryption of stored pages."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from ..units import Count, PositiveSize
from .secret import read_key
from .section import VARIABLE_PATTERN, FileSystemPath, Section


class _KeySection(Section):
    """A section that names two keys, each in a file or in a variable: the current one, and the previous one, whose
    pages are still accepted."""

    _section: ClassVar[str]
    _key: ClassVar[str]

    @model_validator(mode="after")
    def _check(self) -> _KeySection:
        names = [entry.rpartition(".")[2] for entry, _ in self.key_sources()]
        if names and all(name.startswith("previous_") for name in names):
            raise ValueError(f"{names[0]} needs {self._key}_file or {self._key}_env; new pages need a key")
        return self

    def key_sources(self) -> Iterator[tuple[str, Path | str]]:
        """Yield the full name of each entry that names a key, with the file (a path) or the variable (text) that it
        names; the current key first."""
        for entry in (f"{age}{self._key}_{kind}" for age in ("", "previous_") for kind in ("file", "env")):
            place: Path | str | None = getattr(self, entry)
            if place is not None:
                yield f"{self._section}.{entry}", place

    def keys(self, environ: Mapping[str, str] | None = None) -> tuple[bytes, ...]:
        """Return the configured keys, the current one first; none if no key is configured.

        Reads files, or `environ` (default: `os.environ`). Raises ConfigError if one is configured but cannot be had.
        """
        environ = os.environ if environ is None else environ
        return tuple(read_key(entry, place, environ) for entry, place in self.key_sources())


class IntegrityConfig(_KeySection):
    """How stored pages are verified."""

    _section, _key = "integrity", "mac_key"
    alternatives = (("mac_key_file", "mac_key_env"), ("previous_mac_key_file", "previous_mac_key_env"))

    tag: Literal["xxh3_128", "none"] = Field(
        default="xxh3_128",
        description="Checksum of every page. `none` serves unverified data: only for measurements. A MAC key replaces "
        "it by AES-256-GMAC, an encryption key by AES-256-GCM.",
    )
    verify: Literal["read", "load"] = Field(
        default="read",
        description="When pages are verified. `read`: when read from storage. `load`: also before a load from host to "
        "device, which detects damaged host memory, but takes longer (docs/benchmarks.md). Pages that are not yet "
        "stored are not covered. Not for several ranks with a cache each.",
    )
    scrub_rate: PositiveSize | None = Field(
        default=None,
        description="Bytes per second of host memory verified while the engine is idle; damaged pages are evicted. It "
        "uses a core and memory bandwidth. Not set: none.",
    )
    mac_key_file: FileSystemPath | None = Field(
        default=None,
        description="File with the MAC key: 64 hexadecimal digits or 32 raw bytes, mode 0600; the same in all engines "
        "that share the store. It prevents forgery by other writers.",
    )
    mac_key_env: str | None = Field(
        default=None, pattern=VARIABLE_PATTERN,
        description="Name of the variable with the MAC key as 64 hexadecimal digits.",
    )
    previous_mac_key_file: FileSystemPath | None = Field(
        default=None,
        description="File with the previous MAC key, whose pages are accepted during a key change "
        "(docs/formats/frame.md).",
    )
    previous_mac_key_env: str | None = Field(
        default=None, pattern=VARIABLE_PATTERN,
        description="Name of the variable with the previous MAC key.",
    )

    @property
    def verifies_host(self) -> bool:
        """True if frames on the host are verified there."""
        return self.verify == "load" or self.scrub_rate is not None


class StorageFormatConfig(_KeySection):
    """Compression and encryption of stored pages. Engines with different settings can share a store, except for
    encryption."""

    _section, _key = "storage_format", "encryption_key"
    alternatives = (
        ("encryption_key_file", "encryption_key_env"),
        ("previous_encryption_key_file", "previous_encryption_key_env"),
    )

    compression: Literal["none", "zstd"] = Field(
        default="none",
        description="`zstd` stores pages in fewer bytes, for about one second of a core per GB stored and a third of "
        "that per GB read, if storage or network is slower. Needs the extra `compression`.",
    )
    compression_level: Count = Field(
        default=1, ge=1, le=12,
        description="Level of zstd. Higher levels take several times as long and gain little or nothing for KV.",
    )
    encryption_key_file: FileSystemPath | None = Field(
        default=None,
        description="File with the encryption key, in the format of `integrity.mac_key_file`, which it replaces; the "
        "same in all engines that share the store. Only encrypted pages are accepted.",
    )
    encryption_key_env: str | None = Field(
        default=None, pattern=VARIABLE_PATTERN,
        description="Name of the variable with the encryption key as 64 hexadecimal digits.",
    )
    previous_encryption_key_file: FileSystemPath | None = Field(
        default=None,
        description="File with the previous encryption key, whose pages are read during a key change.",
    )
    previous_encryption_key_env: str | None = Field(
        default=None, pattern=VARIABLE_PATTERN,
        description="Name of the variable with the previous encryption key.",
    )
