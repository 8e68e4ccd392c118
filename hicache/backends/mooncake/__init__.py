"""The Mooncake backend: pages in the memory of many nodes, over TCP or RDMA. Requires the extra `mooncake`, or
`mooncake-cpu` on a machine without CUDA."""

from .backend import MooncakeBackend

__all__ = ["MooncakeBackend"]
