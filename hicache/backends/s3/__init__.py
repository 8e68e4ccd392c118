"""The S3 backend: pages as objects of a bucket, shared by all engines that can reach it."""

from .backend import S3Backend
from .raw import S3RawStore

__all__ = ["S3Backend", "S3RawStore"]
