"""A daemon's snapshot as JSON, for `/statusz` and the page at `/`.

The fields are those of `NodeStatistics`, under the same names. A mapping whose keys are pairs becomes a mapping of
mappings: `requests` is `{operation: {status: answers}}`. A breaker's state is its name in lower case.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any

from ..backends.guard import BOUNDS_S
from .statistics import NodeStatistics


def status_json(statistics: NodeStatistics) -> dict[str, Any]:
    """Return `statistics` as JSON values; `latency_bounds_s` are the upper bounds of all `counts` in it."""
    status: dict[str, Any] = _plain(statistics)
    return status | {"latency_bounds_s": list(BOUNDS_S)}


def _plain(value: Any) -> Any:
    if isinstance(value, enum.IntEnum):  # before int: readers need the name
        return value.name.lower()
    if value is None or isinstance(value, (str, int, float)):  # a StrEnum is written as its value
        return value
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return _mapping(value)
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    raise TypeError(f"a snapshot cannot hold a {type(value).__name__}")


def _mapping(values: Mapping[Any, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(key, tuple):
            first, second = key
            plain.setdefault(str(first), {})[str(second)] = _plain(value)
        else:
            plain[str(key)] = _plain(value)
    return plain
