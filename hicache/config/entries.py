"""The schema seen as a flat list of entries with dotted names, for error messages and for the documentation."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel

from .schema import HiCacheConfig
from .storage import STORAGE_SECTIONS, FileStorage, PartConfig
from .wording import sections_in

_BOUND_SHOWN_MAX = 65536
_WORDS = {"integer": "integer", "number": "number", "boolean": "`true`, `false`", "array": "list"}


class EntryInfo(NamedTuple):
    """One entry: its dotted name, the values that it accepts, its default as text."""

    name: str
    accepts: str
    default: str
    description: str


@functools.cache
def all_entries(storage: str = "file") -> tuple[EntryInfo, ...]:
    """Return all entries in the order of the schema, with the options of this type of storage (a plugin: `file`)."""
    return tuple(_walk(HiCacheConfig, "", STORAGE_SECTIONS.get(storage, FileStorage)))


def part_entries() -> tuple[EntryInfo, ...]:
    """Return the entries that a part of a composition has and a section `storage` does not."""
    return tuple(entry for entry in _walk(PartConfig, "", FileStorage) if "." not in entry.name)


@functools.cache
def entry_names(storage: str = "file") -> tuple[str, ...]:
    """Return the dotted names of all entries and sections, with this type of storage."""
    leaves = [entry.name for entry in all_entries(storage)]
    sections = {name.rpartition(".")[0] for name in leaves} - {""}
    return (*leaves, *sorted(sections))


def _walk(section: type[BaseModel], prefix: str, storage: type[BaseModel]) -> Iterator[EntryInfo]:
    whole = section.model_json_schema()
    schemas = whole.get("$defs", {}).get(section.__name__, whole)["properties"]
    defaults = section.model_construct().model_dump(mode="json", warnings=False)
    for name, field in section.model_fields.items():
        accepts = _accepts(schemas[name])
        below = storage if name == "storage" else next(sections_in(field.annotation), None)
        if below is not None and accepts != "list":
            yield from _walk(below, f"{prefix}{name}.", storage)
            continue
        default = "required" if field.is_required() else _shown(defaults[name])
        yield EntryInfo(prefix + name, accepts, default, schemas[name].get("description", ""))


def _shown(default: Any) -> str:
    if default is None:
        return "not set"
    return str(default).lower() if isinstance(default, bool) else str(default)


def _accepts(schema: dict[str, Any]) -> str:
    kinds = [kind for kind in _kinds(schema) if kind.get("type") != "null"]
    first = kinds[0]
    if "examples" in kinds[-1]:  # a number with a unit
        if any("%" in example for example in kinds[-1]["examples"]):
            return "size or share"
        return "size" if first["type"] == "integer" else "duration"
    if "enum" in first:
        return ", ".join(f"`{choice}`" for choice in first["enum"])
    words = "path" if first.get("format") == "path" else _WORDS.get(first.get("type", ""), "text")
    if not {"maximum", "exclusiveMaximum"} & first.keys():
        return words
    low = f"{first['minimum']}" if "minimum" in first else f"more than {first['exclusiveMinimum']}"
    if "exclusiveMaximum" in first:
        return f"{words}, {low} to less than {first['exclusiveMaximum']}"
    # Large upper limits only catch typing errors; they would distract in a table.
    high = first["maximum"]
    return f"{words}, {low} to {high}" if high <= _BOUND_SHOWN_MAX else f"{words}, from {low}"


def _kinds(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the alternatives of a JSON schema."""
    if "anyOf" not in schema:
        yield schema
    for alternative in schema.get("anyOf", ()):
        yield from _kinds(alternative)
