"""Pages in a directory that several machines share: NFS, Lustre, CephFS, GlusterFS, WekaFS, GPFS, 3FS."""

from .driver import SharedFilesDriver

__all__ = ["SharedFilesDriver"]
