"""The section `storage`: which backend, and its options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Field, JsonValue, Tag

from ..units import GIB, Count, PositiveSize, Size
from .composed_storage import (
    LevelsOptions,
    LevelsStorage,
    MirrorOptions,
    MirrorStorage,
    PartConfig,
    ShardedOptions,
    ShardedStorage,
)
from .guard import GuardConfig
from .mooncake_storage import MooncakeStorage
from .redis_storage import RedisStorage
from .s3_storage import S3Storage
from .section import FileSystemPath, Section


class FileStorageOptions(Section):
    """Options of the `file` backend: one file per page below a directory of its own."""

    path: FileSystemPath = Field(
        description="Directory of the store, on a local disk. It must be this user's and closed to others; HiCache "
        "creates it if it is missing.",
    )
    capacity: PositiveSize | None = Field(
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
        description="Which backend: `file`, `redis`, `s3`, `mooncake`, a composition (`levels`, `mirror`, `sharded`), "
        "`memory` (this process only, for tests), the name of an installed entry point of the group "
        "`hicache.backends`, or `module:Class`.",
    )
    options: FileStorageOptions = Field(description="Options of the backend; what there is depends on `type`.")
    guard: GuardConfig = GuardConfig()


class PluginStorage(Section):
    """Storage in any other backend, which checks its options itself when it is opened."""

    type: str = Field(min_length=1, max_length=256, description="As above.")
    options: dict[str, JsonValue] = Field(default={}, description="Passed to the backend as they are.")
    guard: GuardConfig = GuardConfig()


# The sections of the built-in kinds of storage with checked options; all others are plugins.
STORAGE_SECTIONS: dict[str, type[Section]] = {
    "file": FileStorage,
    "redis": RedisStorage,
    "s3": S3Storage,
    "mooncake": MooncakeStorage,
    "levels": LevelsStorage,
    "mirror": MirrorStorage,
    "sharded": ShardedStorage,
}


def _storage_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return kind if isinstance(kind, str) and kind in STORAGE_SECTIONS else "plugin"


StorageConfig: TypeAlias = (
    FileStorage | RedisStorage | S3Storage | MooncakeStorage | LevelsStorage | MirrorStorage | ShardedStorage
    | PluginStorage
)  # fmt: skip
AnyStorage: TypeAlias = Annotated[
    Annotated[FileStorage, Tag("file")]
    | Annotated[RedisStorage, Tag("redis")]
    | Annotated[S3Storage, Tag("s3")]
    | Annotated[MooncakeStorage, Tag("mooncake")]
    | Annotated[LevelsStorage, Tag("levels")]
    | Annotated[MirrorStorage, Tag("mirror")]
    | Annotated[ShardedStorage, Tag("sharded")]
    | Annotated[PluginStorage, Tag("plugin")],
    Discriminator(_storage_kind),
]
# A part of a composition is any storage, and a composition is one of them.
for _section in (
    PartConfig, LevelsOptions, MirrorOptions, ShardedOptions, LevelsStorage, MirrorStorage, ShardedStorage,
):  # fmt: skip
    _section.model_rebuild(force=True, _types_namespace={"AnyStorage": AnyStorage})
