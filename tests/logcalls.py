"""Find the calls in the source of the package that write to the log."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# The methods of loggers and of LimitedLog, with their levels. The level of `log` is an argument.
LEVELS = {"debug": "DEBUG", "info": "INFO", "warning": "WARNING", "warn": "WARNING", "error": "ERROR",
          "exception": "ERROR", "critical": "CRITICAL", "log": "INFO"}  # fmt: skip


class LogCall(NamedTuple):
    """One call: its location, its level, and its message with `...` for each value."""

    place: str
    level: str
    message: str


def log_calls(package: Path) -> Iterator[LogCall]:
    """Yield all calls. A call whose message is not a literal has the message `?`."""
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LEVELS):
                continue
            is_limited = node.func.attr == "warn"  # of a LimitedLog; loggers have `warning`
            if not (is_limited or re.search(r"log(ger)?$", ast.unparse(node.func.value))):
                continue
            texts = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            kind_is_literal = is_limited and bool(node.args) and isinstance(node.args[0], ast.Constant)
            message = texts[kind_is_literal] if len(texts) > kind_is_literal else "?"
            shown = re.sub(r"%[-.,\d]*[sdrfx]", "...", message)
            yield LogCall(f"{path.relative_to(package.parent)}:{node.lineno}", LEVELS[node.func.attr], shown)
