"""`hicache serve`: the storage daemon of a node, in the foreground until SIGTERM."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from ..config import FILE_VARIABLE, HiCacheConfig, load_config
from ..daemon.server import serve as run
from .arguments import FILE
from .config import parse_settings
from .log_options import log_options, start_log


@click.command()
@click.option("-c", "--config", "path", type=FILE, required=True, envvar=FILE_VARIABLE, show_envvar=True,
              help="Configuration file.")
@click.option("--set", "settings", multiple=True, metavar="ENTRY=VALUE", help="Such as daemon.pool=8GiB.")
@log_options
def serve(path: Path, settings: tuple[str, ...], **log: Any) -> None:
    """Run the storage daemon of this node until SIGTERM.

    Engines use it with storage of type `remote`. docs/daemon.md describes it.
    """
    overrides = parse_settings(settings)

    def load() -> HiCacheConfig:
        config = load_config(path, environ=os.environ, overrides=overrides)
        start_log(config.logging, **log)
        return config

    run(load)
