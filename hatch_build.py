"""Build hooks. One compiles `native/*.c` if the machine can; if not, everything works the same, only slower.

A wheel carries the library, an editable install gets it beside the modules. `HICACHE_NATIVE=0` leaves it out. A wheel
also carries the ready configurations, which an editable install finds in `configs/`.

The other one puts the project's addresses from pyproject.toml into the metadata of the package.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
    from hatchling.metadata.plugin.interface import MetadataHookInterface
except ImportError:  # the tests import this module too, where the build backend is not installed
    BuildHookInterface = MetadataHookInterface = object

LIBRARY = "_native.abi3.so"
COMPILE_S_MAX = 120.0


def compile_native(root: Path, library: Path) -> bool:
    """Make `library` from the C source under `root`; False, and no file, if that is not possible here."""
    library.unlink(missing_ok=True)  # one of an earlier build would be imported
    if not sys.platform.startswith("linux") or os.environ.get("HICACHE_NATIVE") == "0":
        return False
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    include = sysconfig.get_path("include")
    sources = [str(source) for source in sorted((root / "native").glob("*.c"))]
    # Named, so that `make wheel` can tell which glibc it needs.
    libc = ["-Wl,--no-as-needed", "-lc"]
    command = [*compiler, "-O3", "-shared", "-fPIC", f"-I{include}", *sources, "-o", str(library), *libc]
    try:
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=COMPILE_S_MAX)
    except (OSError, subprocess.SubprocessError):
        library.unlink(missing_ok=True)
        return False
    return True


def project_urls(addresses: Mapping[str, str]) -> dict[str, str]:
    """Return the links of the package; an empty address has none."""
    site = addresses["documentation"].rstrip("/")
    urls = {"Homepage": site, "Documentation": site, "Changelog": site and f"{site}/CHANGELOG.html",
            "Source": addresses["source"], "Issues": addresses["issues"]}
    return {name: url for name, url in urls.items() if url}


class LinksHook(MetadataHookInterface):  # type: ignore[misc]
    """Named in pyproject.toml, in the table with the addresses."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by the build backend when it reads the metadata."""
        metadata["urls"] = project_urls(self.config)


class NativeHook(BuildHookInterface):  # type: ignore[misc]
    """Named in pyproject.toml."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by the build backend before it collects files."""
        root = Path(self.root)
        if version == "editable":
            compile_native(root, root / "hicache" / LIBRARY)
            return
        build_data["force_include"][str(root / "configs")] = "hicache/configs"
        self._folder = tempfile.TemporaryDirectory()
        library = Path(self._folder.name) / LIBRARY
        if compile_native(root, library):
            build_data["pure_python"] = False
            build_data["tag"] = "cp311-abi3-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["force_include"][str(library)] = f"hicache/{LIBRARY}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called by the build backend when the wheel is written."""
        if version != "editable":
            self._folder.cleanup()
