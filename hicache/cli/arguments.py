"""Parameter types of several commands: paths, sizes, durations, counts and namespaces."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from ..config.files import expanded
from ..units import parse_duration, parse_size

# The seeds of random number generators.
SEED_MAX = (1 << 63) - 1


class UserPath(click.Path):
    """A path that is not empty: the system treats an empty one as the working directory.

    `file_only` rejects directories, `directory_only` existing files. Does not open anything.
    """

    def __init__(self, *, file_only: bool = False, directory_only: bool = False) -> None:
        super().__init__(path_type=Path, dir_okay=not file_only, file_okay=not directory_only)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        text = os.fspath(value)
        if not text.strip():
            self.fail("the path is empty; write . for the working directory", param, ctx)
        try:
            os.fsencode(text)
        except UnicodeEncodeError:
            self.fail("the path contains half a surrogate pair", param, ctx)
        if "\0" in text:
            self.fail("a path cannot contain a null byte", param, ctx)
        try:
            value = expanded(text)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return super().convert(value, param, ctx)


class Quantity(click.ParamType):  # type: ignore[type-arg]  # older clicks cannot be subscripted
    """A size or a duration as text with its unit."""

    def __init__(self, name: str, parse: Callable[[Any], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class NamespacePrefix(click.ParamType):  # type: ignore[type-arg]  # older clicks cannot be subscripted
    """The beginning of a namespace's digest, in lower case."""

    name = "hex"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        text = str(value).lower()
        if not 1 <= len(text) <= 64 or text.strip("0123456789abcdef"):
            self.fail(f"{str(value)[:70]!r} is not 1 to 64 hexadecimal digits", param, ctx)
        return text


class Number(click.FloatRange):
    """A number within limits. Unlike click's, it rejects NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


def is_dash(path: Path) -> bool:
    """Return True if an argument is `-`, standard input or output. For a file of that name, write `./-`."""
    return str(path) == "-"


@contextlib.contextmanager
def read_dash(path: Path | None) -> Iterator[Path | None]:
    """Yield a regular file to read instead of `path`: a copy of standard input if it is `-`, otherwise `path`.

    Blocks until the input ends. It is a copy because the readers reject pipes and need the size.
    """
    if path is None or not is_dash(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="hicache-") as folder:
        copy = Path(folder, "standard-input")
        with copy.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        yield copy


PATH = UserPath()
FILE = UserPath(file_only=True)
DIRECTORY = UserPath(directory_only=True)
SIZE = Quantity("size", parse_size)
DURATION = Quantity("duration", parse_duration)
