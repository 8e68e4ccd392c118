"""The section `storage`: which backend, and its options.

Storage of the types `levels` and `sharded` is made of parts. Each part is a section like `storage` itself, with a name,
and may be composed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    Discriminator,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    Tag,
    model_serializer,
    model_validator,
)

from ..units import GIB, MIB, Count, PositiveSize, Size, TierSize
from .guard import GuardConfig
from .mooncake_storage import MooncakeStorage
from .redis_storage import RedisStorage
from .remote_storage import RemoteStorage
from .s3_storage import S3Storage
from .section import FileSystemPath, Section

# Each part costs threads and, in a sharded set, a share of every lookup; more are a slip of the hand.
PARTS_MAX = 64


class FileStorageOptions(Section):
    """Options of the `file` backend: one file per page below a directory of its own."""

    path: FileSystemPath = Field(
        description="Directory of the store, on a local disk. It must be this user's and closed to others; HiCache "
        "creates it if it is missing.",
    )
    capacity: TierSize | None = Field(
        default=10 * GIB,
        description="Bytes the store may take on disk. Beyond that the least recently used pages are removed. `null`: "
        "no limit but `free_space_floor`.",
    )
    free_space_floor: Size = Field(
        default=GIB,
        description="Bytes of the file system that stay free for others. Below that nothing is stored, whatever "
        "`capacity` says.",
    )
    io_threads: Count = Field(
        default=4, ge=1, le=64,
        description="Threads that read and write files. More keeps a fast disk busy; one core moves a few GB/s.",
    )
    direct_io: bool = Field(
        default=False,
        description="Bypass the page cache of the system. Off is faster while the store fits into free memory; on "
        "leaves that memory to others and makes speed predictable.",
    )
    sync: bool = Field(
        default=False,
        description="Wait for the disk after each page. Off, a power loss may cost the newest pages (never a wrong "
        "one); on halves the speed of writing.",
    )


class FileStorage(Section):
    """Storage in local files."""

    type: Literal["file"] = Field(
        description="Which backend: `file`, `redis`, `s3`, `mooncake`, a daemon (`remote`), a composition "
        "(`levels`, `sharded`), `memory` (this process only, for tests), the name of an installed entry point of the "
        "group `hicache.backends`, or `module:Class`.",
    )
    options: FileStorageOptions = Field(description="Options of the backend; what there is depends on `type`.")
    guard: GuardConfig = GuardConfig()


class PluginStorage(Section):
    """Storage in any other backend, which checks its options itself when it is opened."""

    type: str = Field(min_length=1, max_length=256, description="As above.")
    options: dict[str, JsonValue] = Field(default={}, description="Passed to the backend as they are.")
    guard: GuardConfig = GuardConfig()


class PartConfig(Section):
    """One part: the entries of a `storage` section, and its name. They stand side by side in a file."""

    name: str | None = Field(
        default=None, min_length=1, max_length=64,
        description="Name of the part in metrics and messages. Not set: its type, with a number from the second of a "
        "type on. In a `sharded` set it has to be given and decides which pages the part has.",
    )
    storage: AnyStorage

    @model_serializer(mode="wrap")
    def _spread_storage(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        entries: dict[str, Any] = serialize(self)
        storage = entries.pop("storage", {})  # which a section without its required entries has not
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
        raise ValueError(f"two parts are named {repeated!r}; each needs a name of its own")


class LevelsOptions(Section):
    """Options of `levels`: stores that are read in order, the fastest first."""

    levels: _Parts = Field(description="The stores, from the fastest to the largest; each as a `storage` section.")
    promote: bool = Field(
        default=True,
        description="Copy pages that were found below to the levels above that did not have them. Off leaves the first "
        "level to what is stored here, and reads the rest from below each time.",
    )
    cascade_bytes_max: PositiveSize = Field(
        default=256 * MIB,
        description="Bytes of pages that may wait to be copied to one level in the background, of each level. Promoted "
        "pages wait in host memory, stored ones in the level that has them. More rides out bursts and slow moments; "
        "beyond it copies are dropped and counted.",
    )

    @model_validator(mode="after")
    def _check(self) -> LevelsOptions:
        _refuse_equal_names(self.levels)
        return self


class ShardedOptions(Section):
    """Options of a `sharded` set: stores that have a share of the pages each."""

    parts: _Parts = Field(
        description="The stores, each as a `storage` section with a `name`. Another part takes over an even share of "
        "the pages, which are stored anew; all engines must list the same names.",
    )

    @model_validator(mode="after")
    def _check(self) -> ShardedOptions:
        if any(part.name is None for part in self.parts):
            raise ValueError("every part of a sharded set needs a name, which decides which pages it has")
        _refuse_equal_names(self.parts)
        return self


class _Composed(Section):
    @property
    def guard(self) -> GuardConfig:
        """A composition has no guard: each of its parts has one."""
        return GuardConfig()


class LevelsStorage(_Composed):
    """Storage on several levels."""

    type: Literal["levels"] = Field(description="Several stores, read in order.")
    options: LevelsOptions


class ShardedStorage(_Composed):
    """Storage spread over several places."""

    type: Literal["sharded"] = Field(description="Several stores with a share of the pages each.")
    options: ShardedOptions


def parts_of(options: object) -> Sequence[PartConfig]:
    """Return the parts of a composition of these options; none for the options of another backend."""
    if isinstance(options, LevelsOptions):
        return options.levels
    return options.parts if isinstance(options, ShardedOptions) else ()


# The sections of the built-in kinds of storage with checked options; all others are plugins.
STORAGE_SECTIONS: dict[str, type[Section]] = {
    "file": FileStorage,
    "redis": RedisStorage,
    "s3": S3Storage,
    "mooncake": MooncakeStorage,
    "remote": RemoteStorage,
    "levels": LevelsStorage,
    "sharded": ShardedStorage,
}


def _storage_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return kind if isinstance(kind, str) and kind in STORAGE_SECTIONS else "plugin"


StorageConfig: TypeAlias = (
    FileStorage | RedisStorage | S3Storage | MooncakeStorage | RemoteStorage | LevelsStorage | ShardedStorage
    | PluginStorage
)  # fmt: skip
AnyStorage: TypeAlias = Annotated[
    Annotated[FileStorage, Tag("file")]
    | Annotated[RedisStorage, Tag("redis")]
    | Annotated[S3Storage, Tag("s3")]
    | Annotated[MooncakeStorage, Tag("mooncake")]
    | Annotated[RemoteStorage, Tag("remote")]
    | Annotated[LevelsStorage, Tag("levels")]
    | Annotated[ShardedStorage, Tag("sharded")]
    | Annotated[PluginStorage, Tag("plugin")],
    Discriminator(_storage_kind),
]
# A part of a composition is any storage, and a composition is one of them.
for _section in (PartConfig, LevelsOptions, ShardedOptions, LevelsStorage, ShardedStorage):
    _section.model_rebuild(force=True)
