"""Parameter types of several commands: paths, sizes, durations and namespaces."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from ..config.files import usable
from ..units import parse_duration, parse_size


class UserPath(click.Path):
    """A path that is not empty: the system treats an empty one as the working directory.

    `file_only` rejects directories, `directory_only` existing files. Does not open anything.
    """

    def __init__(self, *, file_only: bool = False, directory_only: bool = False) -> None:
        super().__init__(path_type=Path, dir_okay=not file_only, file_okay=not directory_only)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            value = usable(os.fspath(value))
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
SIZE = Quantity("size", parse_size)
DURATION = Quantity("duration", parse_duration)
