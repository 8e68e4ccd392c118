"""`hicache doctor`: the rows, and the checks of the machine against the sizes of a configuration. Nothing here opens a
store; memory is not allocated."""

from __future__ import annotations

import contextlib
import enum
import importlib
import importlib.util
import itertools
import os
import platform
import pwd
import resource
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

from .. import __version__
from ..backends.errors import StoreError
from ..backends.http import user_of_peer
from ..config import HiCacheConfig
from ..config.addresses import default_socket
from ..config.mooncake_storage import MooncakeStorageOptions
from ..errors import HiCacheError
from ..host_memory import RESERVE_BYTES, SHM, host_memory, resolve
from ..keys import hash_pages
from ..numa import numa_node
from ..units import Share, format_size
from .config import check_surroundings
from .model_shapes import ModelShape
from .stores import StorePart

# The advice leaves the engine itself a bit more than `RESERVE_BYTES`.
_ADVISED_SHARE = 0.8
# A clock outside is wrong: certificates, signatures and ages of pages are then wrong too.
_YEARS = range(2025, 2100)
# A process that listens accepts within moments.
_CONNECT_S = 1.0
# The packages on which a report about a failure may depend.
_PACKAGES = (
    "numpy", "torch", "vllm", "sglang", "redis", "botocore", "mooncake-transfer-engine",
    "mooncake-transfer-engine-non-cuda", "cryptography", "zstandard", "pydantic", "uvicorn",
)


class Verdict(enum.StrEnum):
    """The verdict of a row."""

    OK = "ok"
    INFO = "info"  # a fact; nothing in the configuration depends on it
    WARN = "warn"  # works, but not as well or as long as the configuration suggests
    FAIL = "fail"  # will not work


Figures: TypeAlias = dict[str, float | int | str | None]


@dataclass(frozen=True, slots=True)
class Row:
    """One finding. `figures` are its numbers for programs, in bytes, seconds, and bytes per second."""

    check: str
    verdict: Verdict
    finding: str
    advice: str = ""
    figures: Figures = field(default_factory=dict)


@contextlib.contextmanager
def failures(rows: list[Row], check: str) -> Iterator[None]:
    """Turn an exception into a row of the check, because other checks are useful without it."""
    try:
        yield
    except (HiCacheError, StoreError, OSError) as error:
        rows.append(Row(check, Verdict.FAIL, str(error)))
    except Exception as error:  # a thread may end here, and a backend of another package may raise anything
        rows.append(Row(check, Verdict.FAIL, f"{type(error).__name__}: {error}", "this is a bug: report it"))


@dataclass(frozen=True, slots=True)
class Subject:
    """The configuration, its stores (the parts of a composition by themselves), and the model, if it is named. `ranks`
    are the processes on this machine that have an L2 each."""

    config: HiCacheConfig
    parts: Sequence[StorePart]
    model: ModelShape | None = None
    ranks: int = 1

    @property
    def is_daemons(self) -> bool:
        """True for a configuration of `hicache serve`: it has a section `daemon`."""
        return "daemon" in self.config.model_fields_set

    @property
    def is_engines(self) -> bool:
        """True for a configuration of an engine. One file may be both."""
        names_tiers = bool({"host", "device"} & self.config.model_fields_set)
        return not self.is_daemons or names_tiers or any(part.spec.type == "remote" for part in self.parts)

    @property
    def device_bytes(self) -> int | None:
        """The size of L1, if the configuration sets it and the bytes of a token are known."""
        return self._bytes(self.config.device.size, self.config.device.tokens)

    @property
    def host_bytes(self) -> int | None:
        """The size of L2 of all ranks, as for L1."""
        host = self.config.host
        if host.size is None and host.tokens is None and self.device_bytes is not None:
            size: int | None = int(self.device_bytes * (host.ratio or 0))
        elif isinstance(host.size, Share):
            size = resolve(host.size, "L2", shared=self.uses_shm)
        else:
            size = self._bytes(host.size, host.tokens)
        return None if size is None else self.ranks * size

    @property
    def uses_shm(self) -> bool:
        """True if L2 is in /dev/shm, or would be under the installed vLLM."""
        return self.config.host.shared.name is not None or importlib.util.find_spec("vllm") is not None

    @property
    def daemon_socket(self) -> Path | None:
        """The socket of the daemon that this configuration starts."""
        return self.config.daemon.socket or default_socket()

    def _bytes(self, size: int | None, tokens: int | None) -> int | None:
        if tokens is not None and self.model is not None:
            return tokens * self.model.token_bytes
        return size


def configuration(subject: Subject) -> Iterator[Row]:
    """Check key files, the modules of backends and the addresses of events."""
    check_surroundings(subject.config)
    kinds = [name for name, is_one in (("an engine", subject.is_engines), ("a daemon", subject.is_daemons)) if is_one]
    if subject.is_daemons:
        user = daemon_user(subject.daemon_socket)
        kinds[-1] += f" ({'not running' if user is None else f'{user} runs it now'}, {subject.daemon_socket})"
    yield Row("configuration", Verdict.OK, f"of {' and '.join(kinds)}; its backends, keys and addresses are usable")


def versions(_: Subject) -> Iterator[Row]:
    """Show versions, system and user, for a report."""
    found: Figures = {"hicache": __version__, "python": platform.python_version(), "kernel": platform.release()}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    helper = "with" if hash_pages is not None else "without"
    listed = ", ".join(f"{name} {version}" for name, version in found.items())
    yield Row("versions", Verdict.INFO, f"{listed}; {helper} the native helper; as {user_name(os.geteuid())} on "
              f"{platform.machine()}", "", found)


def user_name(user: int) -> str:
    """Return the name of a user, or its number in words."""
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"


def clock(_: Subject) -> Iterator[Row]:
    """Check the year."""
    now = time.gmtime()
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", now)
    if now.tm_year in _YEARS:
        yield Row("clock", Verdict.OK, shown)
    else:
        yield Row("clock", Verdict.FAIL, shown, "set it: TLS, S3's signatures and the ages of pages depend on it")


def memory(subject: Subject) -> Iterator[Row]:
    """Compare the sizes of L2, of the daemon and of stores in memory with the machine and the cgroup."""
    config, found, needs = subject.config, host_memory(), dict[str, int]()
    if subject.is_engines and subject.host_bytes is not None and config.prefix_cache:
        needs["host.size"] = subject.host_bytes
    if subject.is_daemons:
        needs |= {"daemon.pool": resolve(config.daemon.pool, "daemon.pool"), "daemon.staging": config.daemon.staging}
    for part in subject.parts:
        if part.spec.type == "memory" and part.capacity_bytes:
            needs[f"storage {part.name}"] = part.capacity_bytes
        elif isinstance(part.spec.options, MooncakeStorageOptions):
            needs[f"storage {part.name}"] = part.spec.options.segment + part.spec.options.staging
    figures: Figures = {"total": found.total_bytes, "available": found.available_bytes, "limit": found.limit_bytes}
    limit = "no cgroup limit" if found.limit_bytes is None else f"a cgroup limit of {format_size(found.limit_bytes)}"
    machine = f"{format_size(found.total_bytes)}, {format_size(found.available_bytes)} available, {limit}"
    if not needs:
        unknown = "; the engine decides the size of L2 (host.ratio)" if subject.is_engines else ""
        yield Row("memory", Verdict.INFO, machine + unknown, "", figures)
        return
    need = sum(needs.values())
    rank = (" of one rank" if subject.ranks == 1 else f" of {subject.ranks} ranks") if "host.size" in needs else ""
    shares = {"host.size": config.host.size, "daemon.pool": config.daemon.pool}
    written = {name: f"{share} = " for name, share in shares.items() if isinstance(share, Share)}
    listed = ", ".join(f"{name} {written.get(name, '')}{format_size(size)}" for name, size in needs.items())
    what = f"{format_size(need)}{rank} ({listed})"
    runs = subject.is_daemons and daemon_user(subject.daemon_socket) is not None
    largest = max(needs, key=lambda name: needs[name])
    most = found.usable_bytes if runs or _is_mapped(config) else min(found.usable_bytes, found.available_bytes)
    verdict, advice = Verdict.OK, ""
    if need + RESERVE_BYTES > most:
        room = max(0, int(_ADVISED_SHARE * most) - need + needs[largest])
        room //= subject.ranks if largest == "host.size" else 1
        verdict = Verdict.FAIL
        advice = f"lower {largest} to at most {format_size(room)}, or give this process more memory"
    yield Row("memory", verdict, f"needs {what}; the machine has {machine}", advice, {**figures, "needed": need})


def _is_mapped(config: HiCacheConfig) -> bool:
    """True if the engine's shared memory exists, so that its size is no longer available."""
    name = config.host.shared.name
    return name is not None and any(itertools.chain(SHM.glob(f"hicache.{name}"), SHM.glob(f"hicache.{name}[.-]*")))


def shared_memory(subject: Subject) -> Iterator[Row]:
    """Compare `host.shared` with the room in /dev/shm, where vLLM's L2 is in any case."""
    if not subject.is_engines:
        return
    place, name, size = os.statvfs(SHM), subject.config.host.shared.name, subject.host_bytes
    free, total = place.f_bavail * place.f_frsize, place.f_blocks * place.f_frsize
    finding = f"{format_size(total)}, {format_size(free)} free"
    figures: Figures = {"total": total, "free": free, "needed": size}
    if size is None or not subject.uses_shm:
        yield Row("/dev/shm", Verdict.INFO, f"{finding}; not used without host.shared, except under vLLM", "", figures)
    elif size <= free or _is_mapped(subject.config):
        yield Row("/dev/shm", Verdict.OK, f"{finding}; L2 needs {format_size(size)}", "", figures)
    else:
        who = "host.shared" if name is not None else "vLLM"
        advice = (f"lower host.size, or mount a larger /dev/shm: docker run --shm-size {-(-size // 2**30) + 1}g, or an "
                  "emptyDir with medium: Memory")
        verdict = Verdict.FAIL if name is not None else Verdict.WARN
        yield Row("/dev/shm", verdict, f"{finding}; {who} needs {format_size(size)}", advice, figures)


def locked_memory(subject: Subject) -> Iterator[Row]:
    """Compare RLIMIT_MEMLOCK with the memory that RDMA registers. CUDA's pinned memory does not count."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = "unlimited" if limit == resource.RLIM_INFINITY else format_size(limit)
    options = [one.spec.options for one in subject.parts if isinstance(one.spec.options, MooncakeStorageOptions)]
    need = sum(one.segment + one.staging for one in options if one.protocol == "rdma")
    if not need:
        yield Row("memlock", Verdict.INFO, f"{shown}; memory pinned by CUDA does not count", "", {"limit": limit})
        return
    need += subject.host_bytes or 0
    is_enough = limit == resource.RLIM_INFINITY or limit >= need
    advice = "" if is_enough else "ulimit -l unlimited; systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1"
    yield Row("memlock", Verdict.OK if is_enough else Verdict.FAIL, f"{shown}; RDMA registers {format_size(need)}",
              advice, {"limit": limit, "needed": need})


def device(subject: Subject) -> Iterator[Row]:
    """Compare torch and CUDA with L1, and show the NUMA nodes."""
    if not subject.is_engines:
        return
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        yield Row("torch", Verdict.WARN, "not installed", "an engine needs it; the daemon and the tools do not")
        return
    host, l1, is_cuda = subject.config.host, subject.config.device, torch.cuda.is_available()
    if not is_cuda:
        needs_cuda = host.pin == "on" or l1.memory_fraction is not None
        advice = "run on a machine with a GPU, or remove host.pin and device.memory_fraction" if needs_cuda else ""
        yield Row("device", Verdict.FAIL if needs_cuda else Verdict.INFO,
                  f"torch {torch.__version__} finds no CUDA device; L1 is then in host memory", advice)
    elif host.pin == "off":
        yield Row("device", Verdict.FAIL, "host.pin is off, but there is a CUDA device", "set host.pin to auto")
    for number in range(torch.cuda.device_count() if is_cuda else 0):
        from ..tiers.cuda_driver import CudaDriver  # noqa: PLC0415 - needs torch

        yield gpu(torch.cuda, number, CudaDriver(number).pci_bus_id(), subject.device_bytes)
    yield Row("numa", Verdict.INFO, f"nodes online: {_nodes()}")


def gpu(cuda: Any, number: int, bus: str, need: int | None) -> Row:
    """Compare the memory of a device, of torch's module `cuda`, with the size of L1."""
    free, total = cuda.mem_get_info(number)
    node = numa_node(bus)
    where = bus if node is None else f"{bus}, NUMA node {node}"
    finding = f"{cuda.get_device_name(number)} ({where}): {format_size(free)} of {format_size(total)} free"
    figures: Figures = {"free": free, "total": total, "needed": need}
    if need is None or need <= free:
        return Row(f"device cuda:{number}", Verdict.OK, finding, "", figures)
    verdict = Verdict.FAIL if need > total else Verdict.WARN
    return Row(f"device cuda:{number}", verdict, f"{finding}; L1 needs {format_size(need)}",
               "lower device.size; weights and activations need room too", figures)


def _nodes() -> str:
    try:
        return Path("/sys/devices/system/node/online").read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"


def daemon_user(path: Path | None) -> str | None:
    """Return the user of the process that listens on a Unix socket; None without one."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_CONNECT_S)
            connection.connect(os.fspath(path or ""))
            user = user_of_peer(connection)
    except OSError:
        return None
    return user_name(user)


CHECKS = (configuration, versions, clock, memory, shared_memory, locked_memory, device)
