"""The fake driver library, built for the tests (see `fake_cuda.c`)."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("fake_cuda.c")


def compiler() -> str:
    """Return the C compiler; skip the test if it is not installed."""
    found = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if found is None:
        pytest.skip("needs a C compiler, for the fake driver library")
    return found


class FakeCuda:
    """One build of the library. `definitions` are passed to the preprocessor."""

    def __init__(self, folder: Path, *definitions: str) -> None:
        self.path = str(folder / f"libfakecuda{'-'.join(definitions)}.so")
        flags = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", *(f"-D{name}" for name in definitions)]
        subprocess.run([compiler(), *flags, str(SOURCE), "-o", self.path], check=True)
        self._library = ctypes.CDLL(self.path)

    def reset(self) -> None:
        """Reset all state."""
        self._library.fake_reset()

    def fail(self, function: str, status: int, *, call: int = 1) -> None:
        """Let the `call`-th call of a function from now on return `status`."""
        self._library.fake_fail(function.encode(), call, status)

    def limit(self, size_bytes: int) -> None:
        """Reject larger registrations."""
        self._library.fake_limit(ctypes.c_size_t(size_bytes))

    def slow(self, microseconds: int) -> None:
        """Let each call take this long."""
        self._library.fake_sleep(microseconds)

    def not_ready(self, value: bool) -> None:
        """Set whether events are reported as not passed."""
        self._library.fake_not_ready(int(value))

    def without_host_pointers(self) -> None:
        """Give registered host memory other addresses on the device."""
        self._library.fake_without_host_pointers()

    def number(self, name: str) -> int:
        """Return a counter, or the last value of an argument, of the library."""
        return int(self._library.fake_number(name.encode()))


@pytest.fixture(scope="session")
def built_fake_cuda(tmp_path_factory: pytest.TempPathFactory) -> FakeCuda:
    return FakeCuda(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def fake_cuda(built_fake_cuda: FakeCuda) -> Iterator[FakeCuda]:
    """A driver of CUDA 12.8 or later, with its state reset."""
    built_fake_cuda.reset()
    yield built_fake_cuda
    built_fake_cuda.reset()
