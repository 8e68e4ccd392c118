"""The sections `integrity` and `storage_format`: how stored pages are proved, shortened and hidden."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import Field, model_validator

from ..units import Count
from .secret import key_from_environ, read_key_file
from .section import VARIABLE_PATTERN, FileSystemPath, Section

# The full name of an entry, and the file (a path) or the variable (text) that it names.
KeySource: TypeAlias = tuple[str, Path | str]


class IntegrityConfig(Section):
    """How a stored page proves that it is the page asked for."""

    tag: Literal["xxh3_128", "none"] = Field(
        default="xxh3_128",
        description="Checksum of every page. `none` saves the checksum and serves whatever the store returns: only for "
        "measuring. With a MAC key the tag is AES-256-GMAC, with an encryption key AES-256-GCM, whatever stands here.",
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

    @model_validator(mode="after")
    def _check(self) -> IntegrityConfig:
        self.refuse_two_of("integrity")
        _refuse_only_previous(self, "mac_key")
        return self

    def mac_keys(self, environ: Mapping[str, str] | None = None) -> tuple[bytes, ...]:
        """The configured keys, the one that seals first; none if no key is configured.

        Reads files, or `environ` (default: `os.environ`). Raises ConfigError if one is configured but cannot be had.
        """
        return tuple(_read(source, environ) for source in self.key_sources())

    def key_sources(self) -> Iterator[KeySource]:
        """Where the keys are, the current one first."""
        return _sources(self, "integrity", "mac_key")


class StorageFormatConfig(Section):
    """In which form pages lie in storage. Engines with different forms can share a store, but for encryption."""

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

    @model_validator(mode="after")
    def _check(self) -> StorageFormatConfig:
        self.refuse_two_of("storage_format")
        _refuse_only_previous(self, "encryption_key")
        return self

    def encryption_keys(self, environ: Mapping[str, str] | None = None) -> tuple[bytes, ...]:
        """The configured keys, the one that encrypts first; none if no key is configured. As `mac_keys`."""
        return tuple(_read(source, environ) for source in self.key_sources())

    def key_sources(self) -> Iterator[KeySource]:
        """Where the keys are, the current one first."""
        return _sources(self, "storage_format", "encryption_key")


def read_key(source: KeySource, environ: Mapping[str, str]) -> bytes:
    """The key in a source. Raises ConfigError if it cannot be had."""
    entry, place = source
    what = "encryption key" if "encryption" in entry else "MAC key"
    if isinstance(place, Path):
        return read_key_file(place, f"{what} file")
    return key_from_environ(place, environ, what, entry)


def _read(source: KeySource, environ: Mapping[str, str] | None) -> bytes:
    return read_key(source, os.environ if environ is None else environ)


def _sources(section: Section, section_name: str, key_name: str) -> Iterator[KeySource]:
    for name in (key_name, f"previous_{key_name}"):
        for entry in (f"{name}_file", f"{name}_env"):
            place: Path | str | None = getattr(section, entry)
            if place is not None:
                yield f"{section_name}.{entry}", place


def _refuse_only_previous(section: Section, key_name: str) -> None:
    names = [entry.rpartition(".")[2] for entry, _ in _sources(section, "", key_name)]
    if names and all(name.startswith("previous_") for name in names):
        raise ValueError(f"{names[0]} is given without {key_name}_file or {key_name}_env; new pages need a key")
