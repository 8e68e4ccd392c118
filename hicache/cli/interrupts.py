"""Commands that have something to end when they are ended: signals become KeyboardInterrupt, or are noted.

Locking design: signal handlers belong to the main thread, and so do these functions.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Have SIGTERM and the end of the terminal do what Ctrl-C does. REQUIRES: the main thread."""
    signals = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
        signals.append(signal.SIGHUP)
    before = {number: signal.signal(number, signal.default_int_handler) for number in signals}
    before[signal.SIGINT] = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def no_more_interrupts() -> None:
    """Ignore all of these from here on: ending takes seconds at most, and leaves something behind if it is cut short.

    REQUIRES: the main thread, within `interrupted_by_signals`.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def noted_signals() -> Iterator[list[int]]:
    """A list that gets the number of the first SIGINT or SIGTERM; the second one ends the process as ever."""
    noted: list[int] = []
    with ExitStack() as handlers:

        def note(number: int, _: object) -> None:
            noted.append(number)
            handlers.close()

        for number in (signal.SIGINT, signal.SIGTERM):
            handlers.callback(signal.signal, number, signal.signal(number, note))
        yield noted
