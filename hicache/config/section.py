"""What all sections of the configuration have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from ..units import refuse_bool

# Entries that say the same thing in different ways: at most one of each group may be given, and one given by a
# stronger source (a flag, say) takes the place of another given by a weaker one (the file).
ALTERNATIVES: dict[tuple[str, ...], tuple[tuple[str, ...], ...]] = {
    ("device",): (("size", "tokens", "memory_fraction"),),
    ("host",): (("size", "tokens", "ratio"),),
    ("integrity",): (("mac_key_file", "mac_key_env"), ("previous_mac_key_file", "previous_mac_key_env")),
    ("storage_format",): (
        ("encryption_key_file", "encryption_key_env"),
        ("previous_encryption_key_file", "previous_encryption_key_env"),
    ),
}
TOKENS_MAX = 1 << 40
# What entries ending in `_env` take: a name that every shell can set. Most secrets are none.
VARIABLE_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]{0,127}$"


def yaml_switch(value: Any) -> Any:
    """YAML reads `on` and `off` without quotes as booleans."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def _check_path(value: Any) -> Any:
    # Before it is a Path, for which nothing and the working directory are the same.
    if isinstance(value, str) and not value.strip():
        raise ValueError("the path is empty; write . for the working directory")
    if "\0" in str(value):
        raise ValueError("a path cannot hold a null byte")
    return value


Tokens: TypeAlias = Annotated[int, Field(ge=1, le=TOKENS_MAX), BeforeValidator(refuse_bool)]
FileSystemPath: TypeAlias = Annotated[Path, BeforeValidator(_check_path)]


class Section(BaseModel):
    """A group of entries."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    def refuse_two_of(self, section: str) -> None:
        """Raises ValueError if two entries of this section say the same thing in different ways."""
        for names in ALTERNATIVES[(section,)]:
            given = [name for name in names if getattr(self, name) is not None]
            if len(given) > 1:
                raise ValueError(f"give at most one of {', '.join(names)}; there are {' and '.join(given)}")
