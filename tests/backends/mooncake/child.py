"""Open and close a backend in a separate process; print the number of its listening sockets: `open N closed N`."""

from __future__ import annotations

import os
import sys

from hicache.backends.mooncake import MooncakeDriver
from hicache.config import MooncakeStorageOptions
from hicache.frame import FrameCodec
from hicache.units import MIB
from hicache_lab.conformance import NAMESPACE, PAYLOAD_BYTES, STORED, full_frames, make_keys, soon, store_of
from hicache_lab.devservers.ports import listening


def main() -> None:
    codec = FrameCodec(NAMESPACE, PAYLOAD_BYTES)
    backend = store_of(MooncakeDriver, codec, MooncakeStorageOptions(master=sys.argv[1], segment=16 * MIB, staging=MIB))
    keys = make_keys(2)
    assert backend.batch_set(keys, full_frames(codec, keys), parent=None, deadline=soon()) == [STORED] * 2
    print("open", len(listening(os.getpid())))
    backend.close()
    print("closed", len(listening(os.getpid())))


if __name__ == "__main__":
    main()
