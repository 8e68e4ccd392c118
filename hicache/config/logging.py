"""The section `logging`: the log of HiCache's programs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .section import Section


class LoggingConfig(Section):
    """The log of `hicache serve` and of the other commands. An engine that embeds a cache sets up its own."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info",
        description="The lowest level that is written. `info`: one line at the start and one for each change of "
        "state. `-v` and `--log-level` override it.",
    )
    format: Literal["text", "json"] = Field(
        default="text", description="`text`: lines for people. `json`: one object per line, for log collectors."
    )
