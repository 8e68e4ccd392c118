"""NUMA: the node of a device, and memory on that node.

A copy between a device and memory of another node crosses the link between the sockets, which is slower than the
device's own and is shared with all other traffic between them.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import platform
import re
from pathlib import Path

from .mapping import address_of

logger = logging.getLogger(__name__)

# More than any kernel has (CONFIG_NODES_SHIFT is at most 10).
NODES_MAX = 1024
# DOMAIN:BUS:DEVICE.FUNCTION in hexadecimal digits. CUDA writes capitals, NVML eight digits of the domain.
_PCI_ID = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", re.IGNORECASE)
_MBIND = {"x86_64": 237, "aarch64": 235}
# Not MPOL_BIND: when its node is full, the kernel kills the process, even if other nodes have free memory. A pool may
# be larger than a node, and a page on another node is slower but right.
_MPOL_PREFERRED = 1
_MASK_WORD_BITS = 64


def numa_node(pci_bus_id: str, sysfs: Path = Path("/sys")) -> int | None:
    """Return the NUMA node of a PCI device, such as `0000:3B:00.0`. Return None if only one node is online, or if the
    system does not know the node of the device. Reads files below `sysfs`."""
    match = _PCI_ID.fullmatch(pci_bus_id)
    if match is None:
        return None
    device = f"{int(match[1], 16):04x}:{match[2].lower()}"
    try:
        online = (sysfs / "devices/system/node/online").read_text().strip()
        node = int((sysfs / "bus/pci/devices" / device / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return None if online.isdecimal() or node < 0 else node  # several nodes are a list, such as 0-1 or 0,8


def bind(mapping: mmap.mmap, node: int) -> bool:
    """Prefer NUMA node `node` for the pages of a mapping. The kernel uses other nodes once this one is full.

    Return False, with a warning in the log, if the kernel rejects the policy; pages then come from any node. Does not
    move pages: call it before they are touched. For a mapping of shared memory it sets the policy of the file.
    """
    view = memoryview(mapping)
    return _bind(address_of(view), view.nbytes, node)


def bind_file(descriptor: int, size_bytes: int, node: int) -> bool:
    """Like `bind`, for the first `size_bytes` of a file in shared memory, which may still be empty. The kernel keeps
    the policy with the file, for all processes that allocate memory in it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    # Not the mmap module: it rejects a mapping beyond the end of the file.
    arguments = ctypes.c_size_t(size_bytes), 0, mmap.MAP_SHARED, descriptor, ctypes.c_long(0)
    address = libc.mmap(None, *arguments)
    if address == ctypes.c_void_p(-1).value:
        return _refused(node, ctypes.get_errno())
    try:
        return _bind(address, size_bytes, node)
    finally:
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes))


def _bind(address: int, size_bytes: int, node: int) -> bool:
    number = _MBIND.get(platform.machine())
    if number is None:
        return _refused(node, errno.ENOSYS)
    words = node // _MASK_WORD_BITS + 1
    mask = (ctypes.c_uint64 * words)()
    mask[-1] = 1 << node % _MASK_WORD_BITS
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel reads one bit less than the number of bits passed to it.
    bits = ctypes.c_ulong(words * _MASK_WORD_BITS + 1)
    where = ctypes.c_void_p(address), ctypes.c_ulong(size_bytes)
    if libc.syscall(ctypes.c_long(number), *where, ctypes.c_long(_MPOL_PREFERRED), mask, bits, ctypes.c_long(0)):
        return _refused(node, ctypes.get_errno())
    return True


def _refused(node: int, error: int) -> bool:
    logger.warning("host memory is not bound to NUMA node %d: mbind: %s", node, os.strerror(error))
    return False
