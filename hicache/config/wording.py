"""Error messages about entries, for people who write configurations."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from ..units import exact_duration, exact_size, parse_duration, parse_size
from .removed import removed

# The endings of entries that name a variable with a secret.
NAMES_VARIABLE = "_env"

# Messages for pydantic's kinds of error, with values of their context.
_PLAIN = {
    **dict.fromkeys(("int_parsing", "int_parsing_size", "int_type", "int_from_float"), "expected a whole number"),
    **dict.fromkeys(("float_parsing", "float_type"), "expected a number"),
    **dict.fromkeys(("bool_parsing", "bool_type"), "expected true or false"),
    **dict.fromkeys(("path_type", "string_type"), "expected text"),
    "string_unicode": "is not valid Unicode",
    "finite_number": "expected a finite number",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    **dict.fromkeys(("literal_error", "enum"), "expected {expected}"),
    "list_type": "expected a list",
    "too_short": "expected at least {min_length}, got {actual_length}",
    "too_long": "expected at most {max_length}, got {actual_length}",
}


def locate(section: type[BaseModel], loc: Sequence[int | str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return a file's path for pydantic's location `loc` in `section`, and the names of the entries there; empty where
    a section is not possible.

    The path omits the tags of the unions of `storage` and of the parts of a composition, and the field in which a part
    keeps its storage.
    """
    path: tuple[str, ...] = ()
    kinds = [section]
    beside: tuple[str, ...] = ()  # the entries of a part in addition to those of its storage
    for at, name in enumerate(loc):
        tagged = [kind for kind in kinds if name in _tags(kind)] if len(kinds) > 1 else []
        if tagged:
            kinds = tagged
            continue
        is_hidden = name == "storage" and at > 0 and isinstance(loc[at - 1], int)
        beside = tuple(field for kind in kinds for field in kind.model_fields if is_hidden and field != name)
        path += () if is_hidden else (str(name),)
        if isinstance(name, str):
            fields = [kind.model_fields[name] for kind in kinds if name in kind.model_fields]
            kinds = list(dict.fromkeys(inside for field in fields for inside in sections_in(field.annotation)))
    if loc and isinstance(loc[-1], int):  # a part
        return path, locate(section, (*loc, "storage"))[1]
    return path, tuple(dict.fromkeys((*beside, *(name for kind in kinds for name in kind.model_fields))))


# A user and perhaps a password in a URL.
_LOGIN = re.compile(r"://[^/]*@")


def _tags(kind: type[BaseModel]) -> tuple[str, ...]:
    """Return the tags of a type of storage in the union of all."""
    field = kind.model_fields.get("type")
    return () if field is None else get_args(field.annotation) or ("plugin",)


def sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the section classes in an annotation, also those of the items of a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from sections_in(part)


def problems_of(refused: ValidationError, section: type[BaseModel]) -> str:
    """Return the errors of a `section` that a program has built, on one line. Quotes no text that may be a secret."""
    problems = []
    for error in refused.errors():
        path, names = locate(section, error["loc"])
        if error["type"] == "extra_forbidden":
            what = removed(path, whole=False) or _unknown(path[-1], locate(section, error["loc"][:-1])[1])
        else:
            what = what_is_wrong(error, path, names, quote_text=False)
        problems.append(f"{'.'.join(path)}: {what}" if path else what)
    return "; ".join(problems)


def what_is_wrong(error: Any, path: Sequence[str], names: Sequence[str], *, quote_text: bool) -> str:
    """Return the message for one of pydantic's errors at `path`; `names` are the entries of a section. The value is
    quoted unless it may be a secret; without `quote_text`, only numbers are."""
    kind, value = error["type"], error["input"]
    if kind == "missing":
        return "is missing"
    if kind in ("model_type", "dict_type", "model_attributes_type"):
        return f"is a section: write its entries ({', '.join(names) or 'by name'}) below it"
    names_secret = bool(path) and path[-1].endswith(NAMES_VARIABLE)
    if kind == "string_pattern_mismatch" and names_secret:
        return "must be the name of an environment variable, not its value"
    message = str(error["msg"]).removeprefix("Value error, ")
    words, context = _PLAIN.get(kind), error.get("ctx", {})
    if words is not None:
        message = words.format_map({name: _as_written(limit, value) for name, limit in context.items()})
    # Some values are not quoted: a user may have set the secret instead of its name.
    is_quoted = quote_text and not isinstance(value, (dict, list)) and path[0] != "integrity" and not names_secret
    is_quoted = is_quoted and not _LOGIN.search(str(value))
    if not is_quoted and (quote_text or type(value) not in (int, float)):
        return message
    got = shown(value)
    choices = re.findall("'([^']*)'", str(context.get("expected", ""))) if kind in ("literal_error", "enum") else []
    near = difflib.get_close_matches(got, choices, n=1)
    return (message if got in message else f"{message}; got {got}") + (f", did you mean {near[0]}?" if near else "")


def _as_written(limit: Any, value: Any) -> Any:
    """Return a limit with a unit if `value` is text with one: a duration or a size."""
    for parse, exact in ((parse_duration, exact_duration), (parse_size, exact_size)):
        with suppress(ValueError, TypeError):
            if isinstance(value, str) and isinstance(parse(value), int | float):
                return exact(limit)
    return limit


def _unknown(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
    return f"unknown entry; {hint}" if names else "unknown entry"


def printable(value: Any) -> str:
    """Return `value` as text of printable characters."""
    return value if isinstance(value, str) and value.isprintable() else ascii(value)


def shown(value: Any) -> str:
    """Return `value` as printable text of at most 60 characters."""
    text = printable(value)
    return text if len(text) <= 60 else text[:57] + "..."
