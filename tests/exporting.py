"""An engine with an exporter of metrics, in its own process: `python -m tests.exporting REQUESTS`.

The port comes from the configuration in the environment. The process prints the port and ends when its standard input
ends.
"""

from __future__ import annotations

import os
import sys
from contextlib import closing

from hicache.config import load_config
from hicache.metrics import serve_configured
from tests.cache.world import World, prompt


def main() -> None:
    """See the module's docstring."""
    config = load_config(None, environ=os.environ, overrides={})
    with closing(World()) as world:
        server = serve_configured(config, world.cache.statistics)
        assert server is not None
        with server:
            for number in range(int(sys.argv[1])):
                world.serve(str(number), prompt(number))
            print(server.port, flush=True)
            sys.stdin.read()


if __name__ == "__main__":
    main()
