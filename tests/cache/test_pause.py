"""How long a failing direction is left alone."""

from __future__ import annotations

from hicache.cache.pause import PAUSE_S_MAX, PAUSE_S_MIN, Pause


class Clock:
    """Time that moves when the test says so."""

    def __init__(self) -> None:
        self.time_s = 100.0

    def __call__(self) -> float:
        return self.time_s


def test_each_further_failure_after_a_pause_doubles_the_next_one_up_to_a_limit() -> None:
    clock = Clock()
    pause = Pause(clock)
    lengths = []
    for _ in range(12):
        pause.failed()
        begin = clock.time_s
        while pause.active:
            clock.time_s += PAUSE_S_MIN / 2
        lengths.append(round((clock.time_s - begin) / PAUSE_S_MIN))
    assert lengths[:4] == [1, 2, 4, 8]
    assert lengths[-1] == round(PAUSE_S_MAX / PAUSE_S_MIN)


def test_many_operations_that_fail_in_one_outage_count_once() -> None:
    clock = Clock()
    pause = Pause(clock)
    for _ in range(64):
        pause.failed()
    clock.time_s += PAUSE_S_MIN
    assert not pause.active


def test_a_success_ends_the_pause_and_makes_the_next_one_short() -> None:
    clock = Clock()
    pause = Pause(clock)
    for _ in range(6):
        pause.failed()
        clock.time_s += PAUSE_S_MAX
    pause.failed()
    pause.succeeded()
    assert not pause.active
    pause.failed()
    clock.time_s += PAUSE_S_MIN
    assert not pause.active
