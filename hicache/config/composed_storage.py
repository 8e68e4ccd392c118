"""The section `storage` of types `levels`, `mirror` and `sharded`: several stores that are used as one.

Each part is a section like `storage` itself, with two entries more, and may be composed again. The union of all kinds
of storage is in `storage`, which completes the classes here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import Field, model_validator

from ..units import MIB, Count, PositiveSize
from .guard import GuardConfig
from .section import Section

if TYPE_CHECKING:
    from .storage import AnyStorage

# Each part costs threads and, in a sharded set, a share of every lookup; more are a slip of the hand.
PARTS_MAX = 64
# The entry below `options` that lists the parts, by type of storage.
PARTS_ENTRY = {"levels": "levels", "mirror": "parts", "sharded": "parts"}


class PartConfig(Section):
    """One part: the entries of a `storage` section, and these. They stand side by side in a file."""

    name: str | None = Field(
        default=None, min_length=1, max_length=64,
        description="Name of the part in metrics and messages. Not set: its type, with a number from the second of a "
        "type on. In a `sharded` set it has to be given and decides which pages the part has.",
    )
    optional: bool = Field(
        default=False,
        description="Start without this part if it cannot be opened, and take it in once it can. Off, the start fails, "
        "which shows a mistake at once.",
    )
    storage: AnyStorage

    @model_validator(mode="before")
    @classmethod
    def _gather_storage(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        own = {name: data[name] for name in ("name", "optional") if name in data}
        return {**own, "storage": {name: value for name, value in data.items() if name not in own}}

    @property
    def may_come_late(self) -> bool:
        """True if this part, or a part inside it, is optional."""
        return self.optional or any(part.may_come_late for part in parts_of(self.storage.options))


_Parts: TypeAlias = Annotated[list[PartConfig], Field(min_length=2, max_length=PARTS_MAX)]


def _refuse_equal_names(parts: Sequence[PartConfig]) -> None:
    names = [part.name for part in parts if part.name is not None]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise ValueError(f"two parts are named {repeated!r}; each needs a name of its own")


def parts_of(options: object) -> Sequence[PartConfig]:
    """Return the parts of a composition of these options; none for the options of another backend."""
    if isinstance(options, LevelsOptions):
        return options.levels
    return options.parts if isinstance(options, (MirrorOptions, ShardedOptions)) else ()


class CopyOptions(Section):
    """How pages move between levels."""

    promote: bool = Field(
        default=True,
        description="Copy pages that were found below to the levels above that did not have them. Off leaves the first "
        "level to what is stored here, and reads the rest from below each time.",
    )
    write: Literal["through", "on_eviction", "selective"] = Field(
        default="through",
        description="When a page is copied to the levels below. `through`: once it is stored, so that others find it "
        "there and nothing is lost with the first level. `selective`: once it was read `selective_hits` times, which "
        "spares the lower levels what nobody asks for again. `on_eviction`: when the level above evicts it, which "
        "makes the most of both capacities; the first level must be `file` or `memory`.",
    )
    selective_hits: Count = Field(
        default=2, ge=1, le=1 << 30, description="Reads of a page before `write: selective` copies it.",
    )
    cascade_bytes_max: PositiveSize = Field(
        default=256 * MIB,
        description="Bytes of host memory for pages on their way to one level in the background, of each level. More "
        "rides out bursts and slow moments; beyond it copies are dropped and counted.",
    )


class LevelsOptions(CopyOptions):
    """Options of `levels`: stores that are read in order, the fastest first."""

    levels: _Parts = Field(description="The stores, from the fastest to the largest; each as a `storage` section.")

    @model_validator(mode="after")
    def _check(self) -> LevelsOptions:
        _refuse_equal_names(self.levels)
        if self.write == "on_eviction" and any(part.may_come_late for part in self.levels[:-1]):
            raise ValueError("with write: on_eviction only the last level may be optional; the others are heard")
        return self


class MirrorOptions(Section):
    """Options of a `mirror`: stores that all have every page."""

    parts: _Parts = Field(description="The stores, each as a `storage` section.")
    write_quorum: Count = Field(
        default=1, ge=1, le=PARTS_MAX,
        description="Parts that must have stored a page for it to count as stored. More survives the loss of that many "
        "less one; a part that is down then turns stores away.",
    )
    repair_bytes_max: PositiveSize = Field(
        default=256 * MIB,
        description="Bytes of host memory for pages that one part lacks and gets from another in the background, of "
        "each part. Beyond it repairs are dropped and made at a later read.",
    )

    @model_validator(mode="after")
    def _check(self) -> MirrorOptions:
        _refuse_equal_names(self.parts)
        if self.write_quorum > len(self.parts):
            raise ValueError(f"write_quorum {self.write_quorum} can never be reached with {len(self.parts)} parts")
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


class MirrorStorage(_Composed):
    """Storage of every page in several places."""

    type: Literal["mirror"] = Field(description="Several stores with the same pages.")
    options: MirrorOptions


class ShardedStorage(_Composed):
    """Storage spread over several places."""

    type: Literal["sharded"] = Field(description="Several stores with a share of the pages each.")
    options: ShardedOptions
