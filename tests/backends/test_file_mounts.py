"""The type of a file system, by its mount, and which types machines share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hicache.backends.file.mounts import file_system, is_shared, mount_id, type_of
from tests.fuse import mounted

# The device of a btrfs subvolume is not in this file, and a mount may have optional fields, or cover another one.
MOUNTINFO = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
31 22 0:27 /@home /home rw,relatime - btrfs /dev/vdb rw,subvol=/@home
40 22 0:51 / /mnt/a\\040b rw shared:7 master:2 - nfs4 server:/export rw,vers=4.2
41 40 0:54 / /mnt/a\\040b rw - fuse.bindfs /export rw
"""


@pytest.mark.parametrize(
    ("mount", "kind"), [("22", "ext4"), ("31", "btrfs"), ("40", "nfs4"), ("41", "fuse.bindfs"), ("4", "unknown"),
                        ("", "unknown")],
)
def test_the_type_is_in_the_line_of_the_mount(mount: str, kind: str) -> None:
    assert type_of(mount, MOUNTINFO) == kind


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "ceph", "lustre", "9p", "virtiofs", "gfs2", "fuse",
                                  "fuse.s3fs"])
def test_network_and_cluster_file_systems_and_fuse_are_shared(kind: str) -> None:
    assert is_shared(kind)


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "fuseblk", "fuse.fuse-overlayfs",
                                  "unknown"])
def test_disks_memory_and_the_roots_of_containers_are_not_shared(kind: str) -> None:
    assert not is_shared(kind)


def test_a_missing_path_has_the_type_of_its_nearest_parent(tmp_path: Path) -> None:
    assert file_system(Path("/proc/self")) == "proc"
    assert file_system(Path("/dev/shm/none/pages")) == "tmpfs"
    (tmp_path / "file").touch()
    assert file_system(tmp_path / "file" / "pages") == file_system(tmp_path)


def test_a_real_mount_has_its_own_number_and_type(tmp_path: Path) -> None:
    (source := tmp_path / "source").mkdir()
    with mounted(source, target := tmp_path / "target"):
        fds = [os.open(path, os.O_PATH) for path in (source, target)]
        try:
            assert len({mount_id(fd) for fd in fds}) == 2
        finally:
            for fd in fds:
                os.close(fd)
        assert is_shared(file_system(target / "none" / "pages"))
    assert not is_shared(file_system(target))
