"""The section `storage`: the backend and its options.

Storage of the types `levels` and `sharded` consists of parts. Each part is a section like `storage` itself, with a
name, and may itself be composed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, get_args

from pydantic import Field, GetCoreSchemaHandler, GetPydanticSchema, JsonValue, model_serializer, model_validator
from pydantic_core.core_schema import CoreSchema, tagged_union_schema

from ..units import GIB, MIB, Count, PositiveDuration, PositiveSize, Size, TierSize
from .guard import GuardConfig
from .mooncake_storage import MooncakeStorage
from .redis_storage import RedisStorage
from .remote_storage import RemoteStorage
from .s3_storage import S3Storage
from .section import FileSystemPath, Section

# Each part costs threads and, in a sharded set, a share of every lookup; more are a mistake.
PARTS_MAX = 64


class FileStorageOptions(Section):
    """Options of the `file` backend: one file per page in its own directory."""

    path: FileSystemPath
    """Directory of the store, on a local disk, of this user and closed to others; created if missing. Only one machine
    can use it at a time; `shared_files` is for several. In a volume or a directory that users share, the store is
    `hicache` below it (docs/formats/file_store.md)."""
    capacity: TierSize | None = 10 * GIB
    """Limit of the store's size; beyond it the least recently used pages are removed. `null`: only `free_space_floor`
    limits it."""
    eviction_policy: Literal["lru", "adaptive"] = "adaptive"
    """The pages that are removed first. `lru`: the least recently used. `adaptive`: as `lru`, but keeps what S3-FIFO or
    ARC would keep, if one of them has more hits; takes at most 20 MB. Needs a `capacity`. Each process knows only its
    own uses."""
    max_age: PositiveDuration | None = Field(default=None, ge=60)
    """Pages are removed this long after they were stored, also if they are used (docs/storage.md). Not set: age does
    not matter."""
    free_space_floor: Size = GIB
    """Space of the file system that stays free for other programs; more if they write much."""
    io_threads: Count = Field(default=4, ge=1, le=64)
    """Threads that read and write files. More keeps a fast disk busy; one core transfers a few GB/s."""
    direct_io: bool = False
    """Bypass the page cache. Off is faster while the store fits into free memory; on leaves that memory to other
    programs."""
    sync: bool = False
    """Wait for the disk after each page. Off, a power failure may lose the newest pages; on halves the write speed."""


class FileStorage(Section):
    """Storage in local files."""

    type: Literal["file"]
    """The backend: `file`, `shared_files`, `redis`, `s3`, `mooncake`, a daemon (`remote`), a composition (`levels`,
    `sharded`), `memory` (for tests), an installed entry point of `hicache.backends`, or `module:Class`."""
    options: FileStorageOptions
    """Options of the backend; they depend on `type`."""
    guard: GuardConfig = GuardConfig()


class SharedFilesStorageOptions(Section):
    """Options of the `shared_files` backend: one file per page in a directory that several machines share."""

    path: FileSystemPath
    """Directory of the store on a shared file system; created if missing, in an existing directory. New files get the
    permissions of those who can write to it (docs/formats/shared_files.md)."""
    capacity: TierSize = 10 * GIB
    """Limit of the store's size, the same in all engines; beyond it the least recently used pages are removed
    (docs/storage.md)."""
    eviction_policy: Literal["lru", "adaptive"] = "lru"
    """The pages that are removed first. `lru`: the least recently used. `adaptive`: as `lru`, but keeps what S3-FIFO or
    ARC would keep, if one of them has more hits for all engines; takes at most 20 MB. The engine that sweeps applies
    it, so set the same in all."""
    max_age: PositiveDuration | None = Field(default=None, ge=60)
    """Pages are removed this long after they were stored, also if they are used (docs/storage.md). Not set: age does
    not matter."""
    free_space_floor: Size = GIB
    """Space of the file system that stays free for other programs, checked at each listing."""
    io_threads: Count = Field(default=8, ge=1, le=256)
    """Calls of the file system in flight, each with a thread and a buffer of one page. More hides latency. When all of
    them hang, the store fails at once."""


class SharedFilesStorage(Section):
    """Storage in a shared directory."""

    type: Literal["shared_files"]
    """As above."""
    options: SharedFilesStorageOptions
    """Options of the backend."""
    guard: GuardConfig = GuardConfig()


class PluginStorage(Section):
    """Storage in any other backend, which checks its options when it is opened."""

    type: str = Field(min_length=1, max_length=256)
    """As above."""
    options: dict[str, JsonValue] = Field(default={})
    """Passed to the backend unchanged."""
    guard: GuardConfig = GuardConfig()


class PartConfig(Section):
    """One part: the entries of a `storage` section, and its name, side by side."""

    name: str | None = Field(default=None, min_length=1, max_length=64)
    """Name of the part in metrics and messages. Required in a `sharded` set, where it determines the part's pages. Not
    set: its type, with a number from the second of a type on."""
    storage: AnyStorage

    @model_serializer(mode="wrap")
    def _spread_storage(self, serialize: Callable[[PartConfig], dict[str, Any]]) -> dict[str, Any]:
        entries = serialize(self)
        storage = entries.pop("storage", {})  # missing if required entries are missing
        return {**entries, **storage}

    @model_validator(mode="before")
    @classmethod
    def _gather_storage(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        storage = dict(data)
        return {"name": storage.pop("name", None), "storage": storage}


_Parts: TypeAlias = Annotated[list[PartConfig], Field(min_length=2, max_length=PARTS_MAX)]


def _refuse_equal_names(parts: Sequence[PartConfig]) -> None:
    names = [part.name for part in parts if part.name is not None]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise ValueError(f"two parts are named {repeated!r}; each needs its own name")


class LevelsOptions(Section):
    """Options of `levels`: stores that are read in order, the fastest first."""

    levels: _Parts
    """The stores, from the fastest to the largest; each as a `storage` section."""
    promote: bool = True
    """Copy pages read from a lower level to the levels above. Off, the first level only has pages stored by this
    engine."""
    cascade_bytes_max: PositiveSize = 256 * MIB
    """Limit, for each level, of bytes waiting to be copied to it; further copies are dropped and counted. Promoted
    pages wait in host memory, stored ones in the level that has them."""

    @model_validator(mode="after")
    def _check(self) -> LevelsOptions:
        _refuse_equal_names(self.levels)
        return self


class ShardedOptions(Section):
    """Options of a `sharded` set: stores with a share of the pages each."""

    parts: _Parts
    """The stores, each as a `storage` section with a `name`; the same names in all engines. A new part gets an even
    share of the pages, which are stored again."""

    @model_validator(mode="after")
    def _check(self) -> ShardedOptions:
        if any(part.name is None for part in self.parts):
            raise ValueError("every part of a sharded set needs a name, which determines its pages")
        _refuse_equal_names(self.parts)
        return self


class _Composed(Section):
    # A composition is not guarded, its parts are.
    guard: ClassVar[GuardConfig] = GuardConfig()


class LevelsStorage(_Composed):
    """Storage on several levels."""

    type: Literal["levels"]
    """Several stores, read in order."""
    options: LevelsOptions


class ShardedStorage(_Composed):
    """Storage distributed over several stores."""

    type: Literal["sharded"]
    """Several stores with a share of the pages each."""
    options: ShardedOptions


def parts_of(options: object) -> Sequence[PartConfig]:
    """Return the parts of a composition with these options; empty for other backends."""
    if isinstance(options, LevelsOptions):
        return options.levels
    return options.parts if isinstance(options, ShardedOptions) else ()


def max_age_of(storage: AnyStorage | None) -> float:
    """Return the age in seconds after which no store has a page; infinite if one keeps pages of any age."""
    if storage is not None and (parts := parts_of(storage.options)):
        return max(max_age_of(part.storage) for part in parts)
    return getattr(storage and storage.options, "max_age", None) or math.inf


StorageConfig: TypeAlias = (
    FileStorage | SharedFilesStorage | RedisStorage | S3Storage | MooncakeStorage | RemoteStorage | LevelsStorage
    | ShardedStorage | PluginStorage
)
# The sections of the built-in types of storage, whose options are checked; all others are plugins.
STORAGE_SECTIONS: dict[str, type[Section]] = {
    get_args(section.model_fields["type"].annotation)[0]: section
    for section in get_args(StorageConfig) if section is not PluginStorage
}


def _kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return kind if isinstance(kind, str) and kind in STORAGE_SECTIONS else "plugin"


def _by_kind(_: Any, schema_of: GetCoreSchemaHandler) -> CoreSchema:
    sections = {**STORAGE_SECTIONS, "plugin": PluginStorage}
    return tagged_union_schema({kind: schema_of(section) for kind, section in sections.items()}, _kind)


AnyStorage: TypeAlias = Annotated[StorageConfig, GetPydanticSchema(_by_kind)]
# A part of a composition is any storage, including a composition.
for _section in (PartConfig, LevelsOptions, ShardedOptions, LevelsStorage, ShardedStorage):
    _section.model_rebuild(force=True)
