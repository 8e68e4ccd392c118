"""Opens and closes a backend in a process of its own, and says how many sockets it listens on: `open N closed N`."""

from __future__ import annotations

import os
import sys

from hicache.backends.mooncake import open_mooncake_backend
from hicache.backends.testing import NAMESPACE, PAYLOAD_BYTES, STORED, full_frames, make_keys, soon
from hicache.frame import FrameCodec
from hicache.units import MIB

_LISTEN = "0A"


def listening() -> int:
    """How many TCP sockets of this process listen."""
    own = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            own.add(target[len("socket:[") : -1])
    count = 0
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table, encoding="ascii") as lines:
            fields = [line.split() for line in lines][1:]
        count += sum(field[3] == _LISTEN and field[9] in own for field in fields)
    return count


def main() -> None:
    codec = FrameCodec(NAMESPACE, PAYLOAD_BYTES)
    backend = open_mooncake_backend(codec, master=sys.argv[1], segment_bytes=16 * MIB, staging_bytes=MIB)
    keys = make_keys(2)
    assert backend.batch_set(keys, full_frames(codec, keys), parent=None, deadline=soon()) == [STORED] * 2
    print("open", listening())
    backend.close()
    print("closed", listening())


if __name__ == "__main__":
    main()
