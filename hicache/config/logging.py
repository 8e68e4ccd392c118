"""The section `logging`: how programs of HiCache write their log."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .section import Section


class LoggingConfig(Section):
    """The log of `hicache serve` and of the other commands. An engine that embeds a cache sets up its own."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info",
        description="What is written: this level and above. `info` has one line at the start and one for each change "
        "of state; `debug` has more than an operator wants. The flags `-v` and `--log-level` go before it.",
    )
    format: Literal["text", "json"] = Field(
        default="text", description="`text`: a line for people. `json`: one JSON object a line, for a log collector."
    )
