"""What is wrong with an entry, in the words of a person who writes configurations."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

# How the names of entries end that name a variable with a secret in it.
NAMES_VARIABLE = "_env"

# What pydantic's kinds of error mean, with what their context holds.
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
    "literal_error": "expected {expected}",
    "list_type": "expected a list",
    "model_type": "is a section; give a {class_name}, or its entries as a mapping",
    "dict_type": "is a section; give its entries as a mapping",
    "too_short": "expected at least {min_length}, got {actual_length}",
    "too_long": "expected at most {max_length}, got {actual_length}",
}


def what_is_wrong(error: Any, value: Any, path: tuple[str, ...], below: Sequence[str]) -> str:
    """Return one of pydantic's errors in words, for the `value` that a source has given to `path`; `below` are the
    entries of a section. A value that may be a secret is not quoted."""
    kind, message = error["type"], _message(error)
    if kind == "missing":
        return "is missing"
    if kind in ("model_type", "dict_type", "model_attributes_type"):
        return f"is a section: give its entries ({', '.join(below) or 'by name'}) below it"
    if kind == "string_pattern_mismatch" and path[-1].endswith(NAMES_VARIABLE):
        return "must be the name of an environment variable, not what it holds"
    message = _plain(error, message)
    # Of some values nothing is said: somebody may have put the secret where its name belongs.
    if isinstance(value, (dict, list)) or path[0] == "integrity" or path[-1].endswith(NAMES_VARIABLE):
        return message
    got = shown(value)
    near = difflib.get_close_matches(got, _choices(error), n=1)
    return (message if got in message else f"{message}; got {got}") + (f", did you mean {near[0]}?" if near else "")


def path_of(error: Any) -> tuple[str, ...]:
    """Return pydantic's location without the tags of the unions that `storage` and the parts of a composition are, and
    without the field in which a part keeps its storage."""
    loc = ("", *(str(part) for part in error["loc"]))
    clean: tuple[str, ...] = ()
    for at in range(1, len(loc)):
        is_field = loc[at] == "storage" and loc[at - 1].isdigit()
        is_tag = loc[at - 1] == "storage" and (at == 2 or loc[at - 2].isdigit())
        if not is_field and not is_tag:
            clean += (loc[at],)
    return clean


def problems_of(refused: ValidationError, section: type[BaseModel]) -> str:
    """Return what is wrong with a `section` that a program has built, for one line of a message. It quotes no text that
    may be a secret."""
    problems = []
    for error in refused.errors():
        path = path_of(error)
        got = f"; got {error['input']}" if type(error["input"]) in (int, float) else ""
        what = _plain(error, _message(error)) + got
        if error["type"] == "missing":
            what = "is missing"
        elif error["type"] == "extra_forbidden":
            what = _unknown(path[-1], _entries_at(section, error["loc"][:-1]))
        problems.append(f"{'.'.join(path)}: {what}" if path else what)
    return "; ".join(problems)


def _unknown(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
    return f"unknown entry; {hint}" if names else "unknown entry"


def _entries_at(section: type[BaseModel], loc: Sequence[int | str]) -> Sequence[str]:
    """Return the names of the entries at pydantic's location `loc` in `section`; none where no section can stand."""
    inside = [section]
    for name in loc:
        if len(inside) > 1:  # of the kinds that may stand there, this is the one that does
            kinds = ((one, get_args(one.model_fields["type"].annotation)) for one in inside)
            inside = [one for one, names in kinds if name in (names or ("plugin",))]
        elif inside and isinstance(name, str):
            field = inside[0].model_fields.get(name)
            inside = [] if field is None else list(sections_in(field.annotation))
    return list(inside[0].model_fields) if len(inside) == 1 else ()


def sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the section classes in an annotation, also those of the items of a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from sections_in(part)


def _message(error: Any) -> str:
    return str(error["msg"]).removeprefix("Value error, ")


def _plain(error: Any, message: str) -> str:
    """Pydantic's message in the words of somebody who writes configurations; its own where there are none here."""
    limits = error.get("ctx", {})
    words = _PLAIN.get(error["type"])
    return message if words is None else words.format_map(limits)


def _choices(error: Any) -> list[str]:
    expected = str(error.get("ctx", {}).get("expected", "")) if error["type"] == "literal_error" else ""
    return [part for part in expected.split("'") if part.isidentifier()]


def printable(value: Any) -> str:
    """Return `value` as text of printable characters."""
    return value if isinstance(value, str) and value.isprintable() else ascii(value)


def shown(value: Any) -> str:
    """Return `value` as printable text of at most 60 characters."""
    text = printable(value)
    return text if len(text) <= 60 else text[:57] + "..."
