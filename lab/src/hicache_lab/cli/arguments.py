"""Parameter types of the laboratory's commands, in addition to those of `hicache.cli.arguments`."""

from __future__ import annotations

import math
from typing import Any

import click

from hicache.cli.arguments import UserPath

# The seeds of random number generators.
SEED_MAX = (1 << 63) - 1
DIRECTORY = UserPath(directory_only=True)


class Number(click.FloatRange):
    """A number within limits. Unlike click's, it rejects NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number
