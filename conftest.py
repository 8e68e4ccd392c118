"""Common fixtures of `tests` and `lab/tests`, and the settings of random tests.

`SOAK_FACTOR` (default 1) multiplies the number of examples of hypothesis and of `tests.seeds`; `make soak` sets it. A
failing hypothesis test prints the decorator that replays it. With factor 1, hypothesis draws the same examples in each
run; with a larger factor, it draws new ones.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from hatch_build import LIBRARY, compile_native
from hicache_lab.devservers import DevService
from tests.daemon.daemons import Daemon

# Fixtures for all tests.
pytest_plugins = ["tests.servers"]

# The workers of `make test` share the cores: more than one thread of torch in each would only wait.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A background run may have been started with these signals ignored, and commands under test would inherit that.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _handler)

# Fixtures of `tests.servers` that start a server.
_SERVERS = frozenset({
    "valkey", "old_redis", "redis_cluster", "redis_sentinel", "seaweed", "mooncake_master", "mooncake_daemon",
})

SOAK_FACTOR = int(os.environ.get("SOAK_FACTOR", "1"))

settings.register_profile(
    "hicache",
    max_examples=100 * SOAK_FACTOR,
    derandomize=SOAK_FACTOR == 1,
    database=None,
    deadline=None,  # no test asserts a time
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("hicache")


def pytest_configure(config: pytest.Config) -> None:
    """Give torch's compiler a directory that is removed at the end: an import of it, also of a test's module or of a
    process under test, creates one in the temporary directory."""
    folder = tempfile.mkdtemp(prefix="hc-")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    config.add_cleanup(partial(shutil.rmtree, folder, ignore_errors=True))


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that start servers: tests with a fixture of a server, and modules that import a server class. Run
    long tests first, so that no worker runs one alone at the end."""
    with_classes: dict[object, bool] = {}
    for item in items:
        assert isinstance(item, pytest.Function)
        module = item.module
        if module not in with_classes:
            with_classes[module] = any(_is_server(value) for value in vars(module).values())
        if with_classes[module] or not _SERVERS.isdisjoint(item.fixturenames):
            item.add_marker("servers")
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def _is_server(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, (DevService, Daemon))


@pytest.fixture(scope="session")
def repository() -> Path:
    """Return the root of the source tree."""
    return Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def native(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Compile the native helper and return its module."""
    library = tmp_path_factory.mktemp("native") / LIBRARY
    if not compile_native(repository, library):
        pytest.skip("no C compiler is installed")
    spec = importlib.util.spec_from_file_location("_native", library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def log() -> Iterator[logging.Logger]:
    """HiCache's logger, whose settings a command or an engine in this process may change, as those of libraries' lines.
    """
    logger, root = logging.getLogger("hicache"), logging.getLogger()
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    yield logger
    logger.handlers, logger.propagate = handlers, propagate
    logger.setLevel(level)
    for handler in [one for one in root.handlers if one.get_name() == "hicache"]:
        root.removeHandler(handler)
    logging.captureWarnings(False)


@pytest.fixture(scope="session", autouse=True)
def own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give the tests and their processes a cache directory other than the user's."""
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def soak_factor() -> int:
    """Return the factor by which random tests are longer than usual."""
    return SOAK_FACTOR


@pytest.fixture
def threads_switch_often() -> Iterator[None]:
    """Make the interpreter switch threads every few instructions, to provoke races."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def long_back_off(monkeypatch: pytest.MonkeyPatch) -> float:
    """Make the pause after a failed operation on storage longer than any test. Return its length in seconds."""
    for name in ("BACKOFF_S_MIN", "BACKOFF_S_MAX"):
        monkeypatch.setattr(f"hicache.controller.gate.{name}", 600.0)
    return 600.0


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Create an empty directory with a short path. The path of a Unix socket has at most 107 bytes, and `tmp_path` of a
    pytest-xdist worker uses most of them."""
    with tempfile.TemporaryDirectory(prefix="hc-") as folder:
        yield Path(folder)
