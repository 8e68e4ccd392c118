"""Sizes and durations as people write them: `200GiB`, `64MB`, `80%`, `5s`, `250ms`.

Binary units (KiB, MiB, GiB, TiB) are powers of 1024, decimal ones (KB, MB, GB, TB) powers of 1000. A value that a
person writes needs a unit, in a file, a variable or a flag: `--older-than 7` would mean seven seconds. Only 0 needs no
unit. A program passes bytes or seconds as numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    GetPydanticSchema,
    PlainSerializer,
    SerializationInfo,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
)
from pydantic_core import core_schema

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_NUMBER_WITH_UNIT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
_SIZE_UNITS: dict[str, float] = {
    "B": 1,
    "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": TIB,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}
_DURATION_UNITS = {"S": 1.0, "MS": 1e-3, "US": 1e-6, "M": 60.0, "MIN": 60.0, "H": 3600.0, "D": 86400.0}
_SIZE_EXAMPLES = "200GiB, 64MiB or 512B"
_DURATION_EXAMPLES = "5s, 250ms, 2h or 7d"
_SHARE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")
# More would leave too little for the system and for the growth of the process; less is a typing error.
SHARE_MIN, SHARE_MAX = 1, 95
_TEXT_MAX = 64
# A number above a pebibyte or a year is a typing error, and sums of such numbers could overflow.
SIZE_MAX_BYTES = 1 << 50
DURATION_MAX_S = 366 * 86400.0
# Every useful tier is larger. A smaller value is a wrong prefix, such as 64KB for 64GB.
TIER_BYTES_MIN = MIB
# The validation context that says that a person wrote the values.
WRITTEN = {"hicache written": True}


# The units that an error suggests for a number without one, the likeliest first.
_LIKELY_UNITS = {"size": ("GiB", "MiB", "B"), "duration": ("d", "h", "m", "s", "ms")}


def _no_unit(number: object, what: str) -> ValueError:
    text = str(number).strip()[:40]
    *most, last = (f"{text}{unit}" for unit in _LIKELY_UNITS[what])
    return ValueError(f"{text} has no unit; write {', '.join(most)} or {last}")


def _parse(text: Any, units: dict[str, float], what: str, example: str) -> Any:
    """Return the number that text means; other values as they are, except for bools."""
    if isinstance(text, bool):
        raise ValueError(f"{text} is not a valid {what}; write it like {example}")
    if not isinstance(text, str):
        return text
    match = _NUMBER_WITH_UNIT.fullmatch(text) if len(text) <= _TEXT_MAX else None
    if match is not None and not match[2]:
        if float(match[1]) == 0:
            return 0.0
        raise _no_unit(text, what)
    if match is None or match[2].upper() not in units:
        raise ValueError(f"{text[:40]!r} is not a valid {what}; write it like {example}")
    return float(match[1]) * units[match[2].upper()]


def parse_size(value: Any) -> Any:
    """Return the bytes of `"200GiB"`, or a number of bytes as it is. Raises ValueError for other text and numbers;
    passes other types through."""
    value = _parse(value, _SIZE_UNITS, "size", _SIZE_EXAMPLES)
    if not isinstance(value, (int, float)):
        return value
    if not 0 <= value <= SIZE_MAX_BYTES:  # also refuses nan
        raise ValueError("a size must be between 0 and 1024 TiB")
    return round(value)


@dataclass(frozen=True, slots=True)
class Share:
    """A share of the memory of a machine, which `host_memory.resolve` turns into bytes."""

    percent: float

    def __str__(self) -> str:
        """Return text that reads back: `80%`, `12.5%`."""
        return f"{str(self.percent).removesuffix('.0')}%"


def _size_or_share(value: Any, size_of: ValidatorFunctionWrapHandler) -> Any:
    """Return the Share of `"80%"`, or what `size_of` returns for other values."""
    if isinstance(value, str) and ("%" in value or "percent" in value):
        match = _SHARE.fullmatch(value) if len(value) <= _TEXT_MAX else None
        if match is None:
            raise ValueError(f"{value[:40]!r} is not a valid share of memory; write it like 80%")
        value = Share(float(match[1]))
    if not isinstance(value, Share):
        return size_of(value)
    if not SHARE_MIN <= value.percent <= SHARE_MAX:
        raise ValueError(
            f"{str(value)[:40]!r} must be between {SHARE_MIN}% and {SHARE_MAX}%, because the system and the process "
            "itself need memory too; write it like 80%"
        )
    return value


def parse_duration(value: Any) -> Any:
    """Return the seconds of `"250ms"`, or a number of seconds as it is. Raises ValueError for other text and numbers;
    passes other types through."""
    value = _parse(value, _DURATION_UNITS, "duration", _DURATION_EXAMPLES)
    if isinstance(value, (int, float)) and not 0 <= value <= DURATION_MAX_S:
        raise ValueError("a duration must be between 0s and 366d")
    return value


def refuse_bool(value: Any) -> Any:
    """Return `value` unless it is a bool. Python treats `true` as 1, but people who write it mean something else."""
    if isinstance(value, bool):
        raise ValueError(f"{value} is not a number")
    return value


def _with_unit(parse: Callable[[Any], Any], what: str) -> Callable[[Any, ValidationInfo], Any]:
    """Return `parse` with a check: a number other than 0 that a person wrote is rejected."""

    def check(value: Any, info: ValidationInfo) -> Any:
        parsed = parse(value)
        if isinstance(value, (int, float)) and value != 0 and info.context is WRITTEN:
            raise _no_unit(value, what)
        return parsed

    return check


def _size_of_a_tier(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, int) and info.context is WRITTEN and value < TIER_BYTES_MIN:
        raise ValueError(f"must be at least {exact_size(TIER_BYTES_MIN)}")
    return value


def format_size(size_bytes: float) -> str:
    """Return a size for people, in the largest binary unit in which it is at least one: `1536` -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def counted(number: int, noun: str) -> str:
    """Return `1 page`, `2,000 pages`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def format_share(part: int, whole: int) -> str:
    """Return `12.3 %`, or `-` if `whole` is 0."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def exact_size(size_bytes: int) -> str:
    """Return a size that `parse_size` reads back exactly: `10737418240` -> `10GiB`, `1000` -> `1000B`."""
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size_bytes and size_bytes % unit == 0:
            return f"{size_bytes // unit}{name}"
    return f"{size_bytes}B" if size_bytes else "0"


def exact_duration(duration_s: float) -> str:
    """Return a duration that `parse_duration` reads back: `0.25` -> `250ms`, `5.0` -> `5s`; exact to a microsecond."""
    seconds = f"{duration_s:.6f}".rstrip("0").rstrip(".")
    return f"{duration_s * 1000:.0f}ms" if re.fullmatch(r"0\.\d{1,3}", seconds) else f"{seconds}s"


def _positive(value: Any) -> Any:
    if isinstance(value, (int, float)) and value == 0:
        raise ValueError("must be more than 0")
    return value


def _written_size_or_share(size: int | Share, info: SerializationInfo) -> Any:
    if isinstance(size, Share):
        return str(size)
    return exact_size(size) if size and info.mode == "json" else size


def _or_share(size: Any) -> GetPydanticSchema:
    return GetPydanticSchema(
        lambda _, schema_of: core_schema.no_info_wrap_validator_function(_size_or_share, schema_of(size))
    )


_SIZE_SCHEMA = {"anyOf": [{"type": "integer", "const": 0}, {"type": "string", "examples": ["200GiB", "64MB"]}]}
_SHARE_SCHEMA = {"anyOf": [{"type": "integer", "const": 0}, {"type": "string", "examples": ["200GiB", "80%"]}]}
_DURATION_SCHEMA = {"anyOf": [{"type": "number", "const": 0}, {"type": "string", "examples": ["5s", "250ms"]}]}

_SIZE_TEXT = PlainSerializer(lambda size: exact_size(size) if size else 0, when_used="json")
_SHARE_TEXT = PlainSerializer(_written_size_or_share)
_DURATION_TEXT = PlainSerializer(exact_duration, when_used="json")

_WRITTEN_SIZE = BeforeValidator(_with_unit(parse_size, "size"))
_WRITTEN_DURATION = BeforeValidator(_with_unit(parse_duration, "duration"))

Size = Annotated[int, _WRITTEN_SIZE, _SIZE_TEXT, WithJsonSchema(_SIZE_SCHEMA)]
PositiveSize = Annotated[Size, AfterValidator(_positive)]
# The size of a tier or a store.
TierSize = Annotated[PositiveSize, AfterValidator(_size_of_a_tier)]
SizeOrShare = Annotated[int | Share, _or_share(Size), _SHARE_TEXT, WithJsonSchema(_SHARE_SCHEMA)]
TierSizeOrShare = Annotated[int | Share, _or_share(TierSize), _SHARE_TEXT, WithJsonSchema(_SHARE_SCHEMA)]
Duration = Annotated[float, _WRITTEN_DURATION, _DURATION_TEXT, WithJsonSchema(_DURATION_SCHEMA)]
PositiveDuration = Annotated[Duration, AfterValidator(_positive)]
Count = Annotated[int, BeforeValidator(refuse_bool)]
Number = Annotated[float, BeforeValidator(refuse_bool)]
