"""`hicache serve`: the storage daemon of a node, in the foreground until SIGTERM."""

from __future__ import annotations

import os
from pathlib import Path

import click

from ..config import load_config
from ..daemon.node import Node
from ..daemon.server import serve as serve_node
from .arguments import FILE
from .config import parse_settings


@click.command()
@click.option("-c", "--config", "path", type=FILE, required=True, help="Configuration file.")
@click.option("--set", "settings", multiple=True, metavar="ENTRY=VALUE", help="Such as daemon.pool=8GiB.")
def serve(path: Path, settings: tuple[str, ...]) -> None:
    """Run the storage daemon of this node until SIGTERM.

    Engines reach it through their storage of type `remote`. docs/daemon.md describes it.
    """
    serve_node(Node(load_config(path, environ=os.environ, overrides=parse_settings(settings))))
