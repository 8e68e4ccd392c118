"""The Mooncake backend: pages in the memory of many nodes, over TCP or RDMA. Needs the extra `mooncake`, or
`mooncake-cpu` on a machine without CUDA."""

from ...config.mooncake_storage import MooncakeStorageOptions
from ...frame import FrameCodec
from .backend import MooncakeBackend, RegisteringMooncakeBackend

__all__ = ["MooncakeBackend", "RegisteringMooncakeBackend", "open_mooncake_backend"]


def open_mooncake_backend(codec: FrameCodec, options: MooncakeStorageOptions) -> MooncakeBackend:
    """The factory behind the name `mooncake`: with a daemon, no memory of this process is registered."""
    return (MooncakeBackend if options.daemon is not None else RegisteringMooncakeBackend)(codec, options)
