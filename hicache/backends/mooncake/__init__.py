"""The Mooncake store: pages in the memory of many nodes, over TCP or RDMA. Requires the extra `mooncake`, or
`mooncake-cpu` on a machine without CUDA."""

from .driver import MooncakeDriver

__all__ = ["MooncakeDriver"]
