"""Sections of the configuration with other constants than their own."""

from __future__ import annotations

import functools
from typing import Any, TypeVar, cast

from hicache.config import Section

S = TypeVar("S", bound=Section)


def tuned(section: type[S], **values: Any) -> S:
    """Return a section with these entries and constants."""
    constants = {name: value for name, value in values.items() if name not in section.model_fields}
    entries = {name: value for name, value in values.items() if name in section.model_fields}
    return cast(S, _derived(section, **constants)(**entries))


@functools.cache  # equal sections have one class
def _derived(section: type[Section], **constants: Any) -> Any:
    assert constants.keys() <= section.__class_vars__, f"not constants of {section.__name__}: {[*constants]}"
    return type(section.__name__, (section,), {"__module__": __name__, **constants})
