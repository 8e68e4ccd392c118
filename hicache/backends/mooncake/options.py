"""What follows from the options of a Mooncake store."""

from __future__ import annotations

import math

from ...config.addresses import Address, split_address
from ...config.mooncake_storage import MooncakeStorageOptions

# Of the master's HTTP server, as Mooncake has it.
_ADMIN_PORT = 9003


def admin_address(options: MooncakeStorageOptions) -> Address:
    """Host and port of the master's HTTP server."""
    if options.admin is not None:
        return split_address(options.admin)
    return Address(split_address(options.master).host, _ADMIN_PORT)


def environment(options: MooncakeStorageOptions) -> dict[str, str]:
    """What the library wants to find in the environment before it is loaded. What is set there already stays."""
    whole_s = math.ceil(options.timeout)
    timeout_ms = str(math.ceil(options.timeout * 1000))
    return {
        "MC_RPC_TIMEOUT_MS": timeout_ms,
        "MC_RPC_CONNECT_TIMEOUT_MS": timeout_ms,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": str(whole_s),
        "MC_TCP_STATUS_TIMEOUT_SEC": str(whole_s),
        # Longer than the two above: the connection of a slow transfer is closed before the transfer is given up,
        # so nothing is written into a frame after that.
        "MC_SLICE_TIMEOUT": str(whole_s + 1),
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
        "MC_LOG_LEVEL": "ERROR",
    }
