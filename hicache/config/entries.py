"""The schema seen as a flat list of entries with dotted names, for error messages and for the documentation."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Union

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ..units import Unit, exact_duration, exact_size
from .schema import HiCacheConfig
from .storage import STORAGE_SECTIONS, FileStorage, PartConfig
from .wording import sections_in

_BOUND_SHOWN_MAX = 65536
# Accepts any name; the schema shows the only one it knows the options of.
_TYPE_DESCRIPTION = FileStorage.model_fields["type"].description


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """One entry: its dotted name, what may stand there, its default as text (None: it must be given)."""

    name: str
    accepts: str
    default: str | None
    description: str


@functools.cache
def all_entries(storage: str = "file") -> tuple[EntryInfo, ...]:
    """Every entry in the order of the schema, with the options of this type of storage; of a plugin, those of `file`.
    """
    return tuple(_walk(HiCacheConfig, "", STORAGE_SECTIONS.get(storage, FileStorage)))


def part_entries() -> tuple[EntryInfo, ...]:
    """What a part of a composition has beside the entries of a `storage` section."""
    return tuple(entry for entry in _walk(PartConfig, "", FileStorage) if "." not in entry.name)


@functools.cache
def entry_names(storage: str = "file") -> tuple[str, ...]:
    """The dotted names of all entries and sections, with this type of storage."""
    leaves = [entry.name for entry in all_entries(storage)]
    sections = {name.rpartition(".")[0] for name in leaves} - {""}
    return (*leaves, *sorted(sections))


def names_below(names: Iterable[str], path: tuple[str, ...]) -> tuple[str, ...]:
    """What of the dotted `names` stands directly below section `path`; empty if that is no section."""
    prefix = "".join(f"{name}." for name in path)
    below = (name.removeprefix(prefix).partition(".")[0] for name in names if name.startswith(prefix))
    return tuple(dict.fromkeys(below))


def format_value(value: Any, annotation: Any) -> str:
    """A value as a person would write it into the file, sizes and durations with their unit."""
    unit = _unit(annotation)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if unit is Unit.BYTES:
        return exact_size(value)
    return exact_duration(value) if unit is Unit.SECONDS else str(value)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section class behind an annotation, None for a plain entry."""
    return None if typing.get_origin(annotation) is list else next(sections_in(annotation), None)


def _walk(section: type[BaseModel], prefix: str, storage: type[BaseModel]) -> Iterator[EntryInfo]:
    for name, field in section.model_fields.items():
        below = storage if name == "storage" else section_of(field.annotation)
        if below is not None:
            yield from _walk(below, f"{prefix}{name}.", storage)
            continue
        default = None if field.is_required() else format_value(field.default, _full(field))
        if default == "null":
            default = "not set"
        yield EntryInfo(prefix + name, _accepts(field), default, field.description or "")


def _full(field: FieldInfo) -> Any:
    """The annotation with the metadata that pydantic has moved into the field."""
    return Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation


def _unit(annotation: Any) -> Unit | None:
    parts: list[Any] = [*typing.get_args(annotation), *getattr(annotation, "__metadata__", ())]
    for part in parts:
        found = part if isinstance(part, Unit) else _unit(part)
        if found is not None:
            return found
    return None


def _accepts(field: FieldInfo) -> str:
    annotation = _full(field)
    unit = _unit(annotation)
    if unit is not None:
        return "size" if unit is Unit.BYTES else "duration"
    choices = _literals(annotation)
    if choices and field.description != _TYPE_DESCRIPTION:
        return ", ".join(f"`{choice}`" for choice in choices)
    if typing.get_origin(_base(annotation)) is list:
        return "list"
    words = {int: "integer", float: "number", bool: "`true`, `false`", Path: "path"}.get(_base(annotation), "text")
    bounds = {name: getattr(part, name) for part in _metadata(annotation) for name in ("ge", "gt", "le", "lt")
              if getattr(part, name, None) is not None}  # fmt: skip
    if not {"le", "lt"} & bounds.keys():
        return words
    low = f"{bounds['ge']}" if "ge" in bounds else f"more than {bounds['gt']}"
    if "lt" in bounds:
        return f"{words}, {low} to less than {bounds['lt']}"
    # Large upper bounds only catch slips of the hand; in a table they distract.
    return f"{words}, {low} to {bounds['le']}" if bounds["le"] <= _BOUND_SHOWN_MAX else f"{words}, from {low}"


def _literals(annotation: Any) -> tuple[str, ...]:
    if typing.get_origin(annotation) is typing.Literal:
        return typing.get_args(annotation)
    return tuple(choice for part in typing.get_args(annotation) for choice in _literals(part))


def _base(annotation: Any) -> Any:
    origin = typing.get_origin(annotation)
    if origin is Annotated or origin is Union or origin is types.UnionType:
        return _base(next(part for part in typing.get_args(annotation) if part is not type(None)))
    return annotation


def _metadata(annotation: Any) -> list[Any]:
    found = list(getattr(annotation, "__metadata__", ()))
    for part in found[:]:
        found += getattr(part, "metadata", ())  # a FieldInfo inside Annotated
    for part in typing.get_args(annotation):
        found += _metadata(part)
    return found


