"""The Mooncake backend: pages in the memory of many nodes, over TCP or RDMA. Needs the extra `mooncake`, or
`mooncake-cpu` on a machine without CUDA."""

from ...frame import FrameCodec
from .backend import MooncakeBackend, RegisteringMooncakeBackend
from .options import MIB, MooncakeOptions

__all__ = ["MooncakeBackend", "MooncakeOptions", "RegisteringMooncakeBackend", "open_mooncake_backend"]


def open_mooncake_backend(  # noqa: PLR0913  one keyword for each option, so that a typo is found before anything opens
    codec: FrameCodec,
    *,
    master: str = "127.0.0.1:50051",
    daemon: str | None = None,
    segment_bytes: int = 1024 * MIB,
    prefix: str = "hicache/",
    admin: str | None = None,
    host: str = "127.0.0.1",
    metadata: str = "P2PHANDSHAKE",
    protocol: str = "tcp",
    devices: str = "",
    staging_bytes: int = 64 * MIB,
    timeout_s: float = 2.0,
) -> MooncakeBackend:
    """The factory behind the name `mooncake`: see MooncakeOptions for what the options mean and what is raised."""
    options = MooncakeOptions(
        master, daemon, segment_bytes, prefix, admin, host, metadata, protocol, devices, staging_bytes, timeout_s
    )
    return (MooncakeBackend if daemon is not None else RegisteringMooncakeBackend)(codec, options)
