"""The base of all sections of the configuration."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from ..errors import ConfigError
from ..units import refuse_bool
from .files import usable
from .wording import problems_of

S = TypeVar("S", bound="Section")

TOKENS_MAX = 1 << 40
# The values of entries ending in `_env`: a name that every shell can set. Most secrets do not match.
VARIABLE_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]{0,127}$"


def yaml_switch(value: Any) -> Any:
    """Return text for the booleans as which YAML reads `on` and `off` without quotes."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


Tokens: TypeAlias = Annotated[int, Field(ge=1, le=TOKENS_MAX), BeforeValidator(refuse_bool)]
FileSystemPath: TypeAlias = Annotated[
    Path, BeforeValidator(lambda path: usable(str(path)) if isinstance(path, str | Path) else path)
]


class Section(BaseModel):
    """A group of entries. It is checked when it is built, by `load_config` or by a program with keywords, which may
    also be text with units (`capacity="10GiB"`). Immutable.

    The text below an entry is its description. Numbers for which users have no better values are not entries but
    constants of the class (`ClassVar`), beside the entries that they work with. A derived class sets others.

    Raises ConfigError that names every wrong entry. It does not quote text that may be a secret, only numbers, sizes,
    durations and names of hosts, policies and parts.
    """

    # Groups of alternative entries: at most one of each group may be set, and one from a stronger source (such as a
    # flag) replaces another from a weaker one (the file).
    alternatives: ClassVar[tuple[tuple[str, ...], ...]] = ()

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True,
                              ser_json_inf_nan="constants")

    def __init__(self, **entries: Any) -> None:
        try:
            super().__init__(**entries)
            return
        except ValidationError as refused:
            problems = problems_of(refused, type(self))
        # Outside the handler, so that the exception chain does not contain the values.
        raise ConfigError(f"{type(self).__name__}: {problems}")

    # Pydantic then checks a section inside another one, which keeps the paths of errors.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @model_validator(mode="after")
    def _refuse_two_of_a_group(self: S) -> S:
        for names in self.alternatives:
            given = [name for name in names if getattr(self, name) is not None]
            if len(given) > 1:
                raise ValueError(f"set at most one of {', '.join(names)}, not {' and '.join(given)}")
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: Any, /) -> dict[str, Any]:
        schema: dict[str, Any] = handler(core)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, text in _descriptions(cls.__module__).get(cls.__name__, {}).items():
            properties[name]["description"] = text
        return schema


@functools.cache
def _descriptions(module: str) -> Mapping[str, Mapping[str, str]]:
    """Return the texts below the entries of each class of a module. Pydantic's `use_attribute_docstrings` would parse
    all sources at import."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {
        section.name: {
            entry.target.id: " ".join(str(text.value.value).split())
            for entry, text in pairwise(section.body)
            if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)
            and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        }
        for section in ast.walk(tree) if isinstance(section, ast.ClassDef)
    }


class ServerOptions(Section):
    """Options of the stores whose opening can be bounded: those on servers, except Mooncake (see its page)."""

    # Limits the opening of a store whose server accepts connections and does not answer: an engine waits for it when it
    # starts, and a working server needs milliseconds.
    open_timeout: ClassVar[float] = 5.0
    # Limits the opening of a connection, if it has its own limit. A host that has not accepted one after two resent
    # packets (at 1 and 3 s) is unreachable; longer distances take a few hundred milliseconds.
    connect_timeout: ClassVar[float] = 2.0


def build(section: type[S], entries: Mapping[str, object], where: str) -> S:
    """Return the section with these entries. Raises ConfigError that begins with `where`."""
    try:
        return section.model_validate(dict(entries))
    except ValidationError as refused:
        problems = problems_of(refused, section)
    raise ConfigError(f"{where}: {problems}")
