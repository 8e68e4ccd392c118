"""What a command that takes long shows without a terminal. The bar is seen in the tests of `verify`."""

from __future__ import annotations

import pytest

from hicache.cli import progress
from hicache.cli.progress import Told, follow


def tell(step: int) -> Told:
    return Told(step, 3 if step else None, f"{step} found")


def test_a_line_now_and_then_goes_to_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PLAIN_INTERVAL_S", 0.0)
    assert follow(iter([0, 1, 3]), "counting", tell) == 3
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == [
        "counting: 0 pages, 0 found", "counting: 1 of 3 pages, 1 found", "counting: 3 of 3 pages, 3 found",
    ]  # fmt: skip


def test_what_is_done_soon_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert follow(iter([0, 1, 2]), "counting", tell) == 2
    assert capsys.readouterr().err == ""
