"""Transfers of NIXL between buffers and files.

NIXL reports a fault of one file as one error of the whole transfer, and cancels the rest of it. It accepts the release
of a transfer in flight, and writes to its buffers afterwards. So `move` waits until its transfer has ended: a transfer
that never ends keeps its call, and its buffers, like a read of a hanging disk.

Locking design: no mutable state. The agent locks itself (`NIXL_THREAD_SYNC_STRICT`).
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
from nixl import _bindings
from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

from hicache.backoff import Backoff
from hicache.errors import BackendUnavailable, ConfigError

# A buffer, and the descriptor of the file at whose start its bytes are.
Move: TypeAlias = tuple[memoryview, int]

# A short transfer takes about 0.1 ms. A thread that polls without pauses would use a core.
_POLL_S_FIRST, _POLL_S_MAX = 0.00005, 0.002
# NIXL logs to standard output, where commands print their results. Its lines go to the log of the program instead.
logging.getLogger("nixl").handlers.clear()
logging.getLogger("nixl").propagate = True
# They have no common base class.
_NIXL_ERRORS = tuple(kind for name, kind in vars(_bindings).items() if re.fullmatch("nixl.*Error", name))


def _open_agent(plugin: str, params: Mapping[str, object]) -> Any:
    texts = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in params.items()}
    if plugin == "OBJ":
        raise ConfigError(
            "nixl store: plugin OBJ reports an S3 object that is shorter than requested as complete, and leaves old "
            "bytes in the memory after its end; use the backend s3"
        )
    if texts.get("use_posix_aio") in ("true", "1"):
        raise ConfigError("nixl store: params: use_posix_aio fails all transfers after one error; use use_uring")
    # The progress thread would use a core all the time.
    config = nixl_agent_config(False, backends=[], sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
    agent = nixl_agent(secrets.token_hex(8), config)
    if plugin not in agent.get_plugin_list():
        known = ", ".join(agent.get_plugin_list())
        raise ConfigError(f"nixl store: NIXL has no plugin {plugin[:64]!r}; use a file plug-in of {known}")
    try:
        agent.create_backend(plugin, texts)
    except _NIXL_ERRORS as error:
        raise BackendUnavailable(f"nixl store: plugin {plugin} does not start: {error}; see NIXL's log") from error
    if not {"DRAM_SEG", "FILE_SEG"} <= set(agent.get_backend_mem_types(plugin)):
        raise ConfigError(f"nixl store: plugin {plugin} does not move files; use POSIX or another file plug-in")
    return agent


class Transfers:
    """An agent with one plug-in, whose `params` are texts, numbers or booleans. Thread-safe.

    Raises ConfigError for a plug-in that is not suitable, BackendUnavailable for one that does not start here.
    """

    def __init__(self, plugin: str, params: Mapping[str, object]) -> None:
        self._only = [plugin]
        self._agent = _open_agent(plugin, params)

    def move(self, operation: str, moves: Iterable[Move]) -> bool:
        """READ files into buffers, or WRITE them, in one transfer. Return True if all bytes were moved.

        Blocks until NIXL does not access the buffers any more. Registers and deregisters them, which takes
        microseconds. REQUIRES: no other transfer uses the same buffers.
        """
        agent, only, registered = self._agent, self._only, []
        spans = [(np.frombuffer(buffer, np.uint8).ctypes.data, buffer.nbytes, fd) for buffer, fd in moves]
        try:
            registered.append(agent.register_memory([(at, size, 0, "") for at, size, _ in spans], "DRAM", only))
            registered.append(agent.register_memory([(0, size, fd, "") for _, size, fd in spans], "FILE", only))
            memory = agent.get_xfer_descs([(at, size, 0) for at, size, _ in spans], "DRAM")
            files = agent.get_xfer_descs([(0, size, fd) for _, size, fd in spans], "FILE")
            transfer = agent.initialize_xfer(operation, memory, files, agent.name, backends=only)
            pause, state = Backoff(_POLL_S_FIRST, _POLL_S_MAX), agent.transfer(transfer)
            while state == "PROC":
                time.sleep(pause.next_s())
                state = agent.check_xfer_state(transfer)
            return bool(state == "DONE")
        except _NIXL_ERRORS:
            return False
        finally:
            for descriptors in registered:
                agent.deregister_memory(descriptors, only)
