"""A directory of secrets as Kubernetes mounts it: files are links through `..data`, and a change moves that link."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from pathlib import Path


class MountedSecret:
    """The files `contents`, by name, in `folder`. Like the kubelet, `replace` writes all files into a new directory,
    moves `..data` to it by a rename, and removes the previous directory."""

    def __init__(self, folder: Path, contents: Mapping[str, str | bytes], mode: int = 0o400) -> None:
        self.folder = folder
        self._mode = mode
        self._numbers = itertools.count()
        folder.mkdir(mode=0o755, exist_ok=True)
        self.replace(contents)
        for name in contents:
            (folder / name).symlink_to(Path("..data", name))

    def __getitem__(self, name: str) -> Path:
        """The path of a file, which is the same after a change."""
        return self.folder / name

    def replace(self, contents: Mapping[str, str | bytes]) -> None:
        """Change all files at once."""
        data = self.folder / "..data"
        before = data.resolve() if data.is_symlink() else None
        made = self.folder / f"..{next(self._numbers)}"
        made.mkdir()
        for name, content in contents.items():
            file = made / name
            file.write_bytes(content if isinstance(content, bytes) else content.encode())
            file.chmod(self._mode)
        link = self.folder / "..data_tmp"
        link.symlink_to(made.name)
        os.replace(link, data)
        if before is not None:
            for file in before.iterdir():
                file.unlink()
            before.rmdir()
