"""The directions of a guard, and what an operator may want of each."""

from __future__ import annotations

import enum


class Direction(enum.StrEnum):
    """Which way pages go. Lookups read, removals write."""

    READ = "read"
    WRITE = "write"


class Override(enum.StrEnum):
    """What the operator wants of one direction."""

    AUTO = "auto"  # the breaker decides
    ON = "on"  # every call passes, whatever happened to those before it
    OFF = "off"  # no call passes
