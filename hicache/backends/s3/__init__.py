"""The S3 store: pages as objects of a bucket, shared by all engines that can reach it."""

from .driver import S3Driver

__all__ = ["S3Driver"]
