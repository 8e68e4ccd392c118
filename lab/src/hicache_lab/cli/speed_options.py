"""The options of `hicache replay --virtual` and `hicache plan` for the speeds of a machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from hicache.cli.arguments import FILE, Quantity

from ..speeds import ComputeSpeed, Speeds, StorageSpeed, bandwidth, measured_storage, storage_speed
from .arguments import Number

Command = TypeVar("Command", bound=Callable[..., Any])
# Larger numbers are mistakes; sums and products of smaller ones stay exact.
RATE_MAX = 1e15
_DEFAULT = Speeds()


class _StorageSpeed(click.ParamType):  # type: ignore[type-arg]  # older clicks cannot be subscripted
    """Text such as `read=3GB/s,write=1GB/s,fixed=100us`, checked and kept as text."""

    name = "speed"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            storage_speed(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return str(value)


_OPTIONS = (
    click.option("--attention-rate", type=Number(1, RATE_MAX), metavar="PAIRS",
                 help="Attended token pairs computed per second, which makes long prompts slower per token.  "
                 "[default: part of the prefill rate]"),
    click.option("--host-bandwidth", type=Quantity("speed", bandwidth), metavar="SPEED",
                 help=f"Copies between device and host, per direction.  "
                 f"[default: {_DEFAULT.host_bytes_per_s / 1e9:.0f}GB/s]"),
    click.option("--storage", "storage", type=_StorageSpeed(), metavar="SPEEDS",
                 help="Speed of the store.  [default: read=3GB/s,write=1GB/s,fixed=100us,parallel=4,links=2]"),
    click.option("--like", type=FILE, metavar="FILE",
                 help="Take the speed of the store from a report of `hicache doctor --json`."),
)
NAMES = ("attention_rate", "host_bandwidth", "storage", "like")


def option_group(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Return a decorator that adds all `options` to a command, in this order of its help."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


# Their values are the arguments of `speeds_of`.
speed_options = option_group(*_OPTIONS)


def speeds_of(
    prefill_rate: float | None, attention_rate: float | None, host_bandwidth: float | None, storage: str | None,
    like: Path | None,
) -> Speeds:
    """Return the speeds that the options name. What `--storage` names has precedence over `--like`. Raises ConfigError
    for a bad report."""
    store: StorageSpeed = _DEFAULT.storage if like is None else measured_storage(like)
    if storage is not None:
        store = storage_speed(storage, store)
    return Speeds(
        compute=ComputeSpeed(tokens_per_s=prefill_rate, pairs_per_s=attention_rate),
        host_bytes_per_s=host_bandwidth or _DEFAULT.host_bytes_per_s,
        storage=store,
    )
