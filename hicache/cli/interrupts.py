"""Signals for commands that must clean up at their end: they become KeyboardInterrupt, or are recorded.

Locking design: signal handlers belong to the main thread, and so do these functions.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Make SIGTERM and the end of the terminal act like Ctrl-C. REQUIRES: the main thread.

    An exception after such a signal is KeyboardInterrupt for the caller: a C library that the signal interrupts may
    replace it by an error of its own, as PyTorch does.
    """
    is_interrupted = False

    def interrupt(_: int, __: object) -> None:
        nonlocal is_interrupted
        is_interrupted = True
        raise KeyboardInterrupt

    with ExitStack() as handlers:
        for number in _SIGNALS:
            if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN:  # ignored as under nohup
                handlers.callback(signal.signal, number, signal.signal(number, interrupt))
        try:
            yield
        except Exception as error:
            if is_interrupted:
                raise KeyboardInterrupt from error
            raise


def no_more_interrupts() -> None:
    """Ignore all of these signals from here on: cleaning up takes at most seconds, and must not be interrupted.

    REQUIRES: the main thread, within `interrupted_by_signals`.
    """
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def noted_signals() -> Iterator[list[int]]:
    """Yield a list that gets the number of the first SIGINT or SIGTERM; the second one ends the process as usual."""
    noted: list[int] = []
    with ExitStack() as handlers:

        def note(number: int, _: object) -> None:
            noted.append(number)
            handlers.close()

        for number in (signal.SIGINT, signal.SIGTERM):
            handlers.callback(signal.signal, number, signal.signal(number, note))
        yield noted
