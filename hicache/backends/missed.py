"""Why storage does not have a page, from the outcomes and errors of its calls, in the words of `PageAccounts`."""

from __future__ import annotations

from collections.abc import Sequence

from ..ghosts import Kind, PageAccounts, Reason
from .base import GetOutcome, SetOutcome
from .errors import ErrorKind

DAMAGED: Kind = (Reason.DAMAGED, "")
UNAVAILABLE: Kind = (Reason.UNAVAILABLE, "")


def answer_of(errors: Sequence[str], step: str) -> Kind | None:
    """Return why a call with these errors did not find a page; None if storage said that it does not have it."""
    if not errors:
        return None
    is_late = ErrorKind.DEADLINE in errors or ErrorKind.TIMEOUT in errors
    return (Reason.LATE, step) if is_late else UNAVAILABLE


def loss_of(outcome: SetOutcome, errors: Sequence[str]) -> Kind | None:
    """Return why a page will be missed after a write; None: storage has it."""
    if outcome is SetOutcome.REJECTED:
        return Reason.NOT_STORED, "full"
    return None if outcome.is_stored else (Reason.NOT_STORED, "paused" if "guard_open" in errors else "failed")


def note_reads(
    accounts: PageAccounts, keys: Sequence[bytes], outcomes: Sequence[GetOutcome], errors: Sequence[str]
) -> None:
    """Record what a read shows of its pages, and count those that it did not get."""
    found = list(zip(keys, outcomes, strict=True))
    for outcome, loss in ((GetOutcome.HIT, None), (GetOutcome.CORRUPT, DAMAGED)):
        accounts.left([key for key, one in found if one is outcome], loss)
    accounts.missing([key for key, one in found if one is not GetOutcome.HIT], answer_of(errors, "read"))


def note_writes(
    accounts: PageAccounts, keys: Sequence[bytes], outcomes: Sequence[SetOutcome], errors: Sequence[str]
) -> None:
    """Record why pages of a write will be missed."""
    for outcome in set(outcomes):
        written = [key for key, one in zip(keys, outcomes, strict=True) if one is outcome]
        accounts.left(written, loss_of(outcome, errors))
