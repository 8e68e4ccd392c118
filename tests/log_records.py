"""The log of one module in a test: threads of earlier tests, such as those of a store's guard, may log too."""

from __future__ import annotations

import logging

import pytest


def records_of(caplog: pytest.LogCaptureFixture, module: str) -> list[logging.LogRecord]:
    """Return the records so far of the module with this name in the package `hicache`."""
    return [record for record in caplog.records if record.name == f"hicache.{module}"]


def messages_of(caplog: pytest.LogCaptureFixture, module: str) -> list[str]:
    return [record.getMessage() for record in records_of(caplog, module)]
