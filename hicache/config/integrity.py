"""The sections `integrity` and `storage_format`: how stored pages are proved, shortened and hidden."""

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
    """A section that names two keys, each in a file or in a variable: the current one, and the one before it, which is
    still believed."""

    _section: ClassVar[str]
    _key: ClassVar[str]

    @model_validator(mode="after")
    def _check(self) -> _KeySection:
        names = [entry.rpartition(".")[2] for entry, _ in self.key_sources()]
        if names and all(name.startswith("previous_") for name in names):
            raise ValueError(f"{names[0]} is given without {self._key}_file or {self._key}_env; new pages need a key")
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
    """How a stored page proves that it is the page asked for."""

    _section, _key = "integrity", "mac_key"
    alternatives = (("mac_key_file", "mac_key_env"), ("previous_mac_key_file", "previous_mac_key_env"))

    tag: Literal["xxh3_128", "none"] = Field(
        default="xxh3_128",
        description="Checksum of every page. `none` saves the checksum and serves whatever the store returns: only for "
        "measuring. With a MAC key the tag is AES-256-GMAC, with an encryption key AES-256-GCM, whatever stands here.",
    )
    verify: Literal["read", "load"] = Field(
        default="read",
        description="When pages are verified. `read`: when they come from storage. `load`: once more when they go from "
        "host memory to the device, which finds damage of that memory; a damaged page is computed again. A load then "
        "takes longer, see docs/benchmarks.md. Pages that carry no tag, such as those that are not stored yet, are not "
        "covered. Not for several ranks, each with a cache of its own.",
    )
    scrub_rate: PositiveSize | None = Field(
        default=None,
        description="Bytes per second of host memory that are verified while the engine has nothing else to do, in "
        "turn; damaged pages leave. It finds faulty memory before a request needs the page, and takes that much of a "
        "core and of the memory's bandwidth. Covers what `verify: load` covers. Not set: none.",
    )
    mac_key_file: FileSystemPath | None = Field(
        default=None,
        description="File with the MAC key: 64 hexadecimal digits or 32 raw bytes, mode 0600. With a key, whoever can "
        "write the store cannot make a page that is believed. Every engine that shares the store needs the same key.",
    )
    mac_key_env: str | None = Field(
        default=None, pattern=VARIABLE_PATTERN,
        description="Name of the environment variable that holds the MAC key as 64 hexadecimal digits. A file is "
        "safer: child processes inherit variables.",
    )
    previous_mac_key_file: FileSystemPath | None = Field(
        default=None,
        description="File with a second MAC key, whose pages are believed too while keys are being changed; new pages "
        "get the first. docs/formats/frame.md tells the steps. Remove it afterwards: what it sealed is then a miss.",
    )
    previous_mac_key_env: str | None = Field(
        default=None, pattern=VARIABLE_PATTERN,
        description="Name of the environment variable that holds the second MAC key.",
    )

    @property
    def verifies_host(self) -> bool:
        """True if frames on the host are verified there."""
        return self.verify == "load" or self.scrub_rate is not None


class StorageFormatConfig(_KeySection):
    """In which form pages are stored. Engines with different forms can share a store, but for encryption."""

    _section, _key = "storage_format", "encryption_key"
    alternatives = (
        ("encryption_key_file", "encryption_key_env"),
        ("previous_encryption_key_file", "previous_encryption_key_env"),
    )

    compression: Literal["none", "zstd"] = Field(
        default="none",
        description="`zstd` stores what it can in fewer bytes, so that more fits and less is moved; it costs a core "
        "about a second per GB stored, and a third of that per GB read. Worth it where storage or network is slower "
        "than that. Needs the extra `compression`; whoever reads such pages needs it too.",
    )
    compression_level: Count = Field(
        default=1, ge=1, le=12,
        description="Level of zstd. On KV, higher takes several times as long and wins little or nothing.",
    )
    encryption_key_file: FileSystemPath | None = Field(
        default=None,
        description="File with the encryption key: 64 hexadecimal digits or 32 raw bytes, mode 0600. With a key, pages "
        "are encrypted by AES-256-GCM, which also proves them, and no other page is believed. It takes the place of "
        "the MAC key. Every engine that shares the store needs the same key.",
    )
    encryption_key_env: str | None = Field(
        default=None, pattern=VARIABLE_PATTERN,
        description="Name of the environment variable that holds the encryption key as 64 hexadecimal digits. A file "
        "is safer: child processes inherit variables.",
    )
    previous_encryption_key_file: FileSystemPath | None = Field(
        default=None,
        description="File with a second encryption key, whose pages are read too while keys are being changed; new "
        "pages get the first. docs/formats/frame.md tells the steps.",
    )
    previous_encryption_key_env: str | None = Field(
        default=None, pattern=VARIABLE_PATTERN,
        description="Name of the environment variable that holds the second encryption key.",
    )
