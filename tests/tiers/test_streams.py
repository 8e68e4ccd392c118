"""The code of the CUDA copy engine on a simulated device, in seeded interleavings of streams and threads.

An engine computes on its own stream, backs up pages, frees them, loads others into them and reads these, while earlier
work is still queued. Pages and frames carry stamps. The next owner of a freed page or frame overwrites it at once. A
copy that runs too early, too late or after its end shows as a wrong stamp. TEST_SEED=n replays a seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from hicache.config import TransferConfig
from hicache.errors import TransferError
from hicache.geometry import PageShape, Piece
from hicache.tiers import EngineBlocks, Fence, HostPool, HostWindow, Transfer, copy_paths
from hicache.tiers.copy_cuda import CudaCopyEngine, StreamTransfer
from hicache.tiers.copy_paths import CopyPath
from hicache.types import PageIds
from tests.seeds import seeds
from tests.tiers.simulated_device import Finding, SimulatedRuntime, SimulatedThread, Turns

pytestmark = pytest.mark.long

SEEDS = 100
ACTIONS = 40
PAGES, FRAMES = 14, 12


class Simulation:
    """The simulation of one seed. `dropped` is an omitted wait; `kind` may have other mistakes."""

    def __init__(
        self,
        seed: int,
        path: str,
        *,
        dropped: tuple[str, str] | None = None,
        fail_rate: float | None = None,
        kind: type[CudaCopyEngine] = CudaCopyEngine,
    ) -> None:
        self.turns = Turns(seed)
        self.random = numbers = random.Random(seed)
        rate = numbers.choice([0, 0, 0.1]) if fail_rate is None else fail_rate
        self.layers = numbers.randint(1, 4)
        sizes = [[numbers.choice([3, 8, 16]) for _ in range(numbers.randint(1, 2))] for _ in range(self.layers)]
        tensors = [[torch.full((PAGES + 1, size), 0xEE, dtype=torch.uint8) for size in layer] for layer in sizes]
        self.regions: list[list[Any]] = [[tensor.numpy() for tensor in layer] for layer in tensors]
        self.host = HostPool(PageShape(1, tuple(Piece("kv", sum(layer)) for layer in sizes)), FRAMES)
        self.host.frames_per_chunk = numbers.choice([2, FRAMES])
        self.runtime = SimulatedRuntime(self.turns, fail_rate=0.0, dropped=dropped)
        begin, size = self.host.buffer.ctypes.data, self.host.frames_per_chunk * self.host.frame_bytes
        end = begin + self.host.capacity_bytes
        self.runtime.registered = lambda at: (at - begin) // size if begin <= at < end else None
        slot_bytes = -(-max(sum(layer) for layer in sizes) // 16) * 16 * numbers.choice([1, 1, 3])
        self.copies = kind(
            EngineBlocks(tensors, first=1), HostWindow(self.host), TransferConfig(path=path),
            runtime=self.runtime, thread=partial(SimulatedThread, self.turns), slot_bytes=slot_bytes,
        )
        self.runtime._fail_rate = rate
        self.runtime.started = True
        self.stamp = 0
        self.pages: dict[int, int] = {}  # the stamps of pages with content
        self.frames: dict[int, int] = {}
        self.lent_pages: set[int] = set()
        self.lent_frames: set[int] = set()
        self.backups: list[tuple[Transfer, list[int], list[int]]] = []
        self.loads: list[tuple[Transfer, list[int], list[int]]] = []
        self.verified = self.untimed = 0
        for frame in range(FRAMES // 2):
            self._overwrite(frame)
        self.fence = self.runtime.record(self.runtime.compute)  # one event, recorded again after each forward

    def run(self) -> None:
        actions = [self.forward, self.backup, self.load, self.free_pages, self.free_frame, self.poll]
        try:
            for _ in range(ACTIONS):
                self.random.choice(actions)()
                for _ in range(self.random.choice([0, 1, 5])):
                    self.turns.pause()
            self.forward()
            assert self.copies.close(10)
            self.poll()
            assert not self.backups and not self.loads
            while self.turns.step():
                pass
        finally:
            self.turns.end()

    # Actions of the engine

    def forward(self) -> None:
        """Read all pages with content, layer by layer after the loads, and write some free pages."""
        free = [page for page in range(1, PAGES + 1) if page not in self.pages and page not in self.lent_pages]
        written = {page: self._new_stamp() for page in free[: self.random.randint(0, 4)]}
        read, arriving = dict(self.pages), []
        for transfer, pages, frames in self.loads:
            arriving.append((transfer, dict(zip(pages, (self.frames[frame] for frame in frames), strict=True))))
        for layer in range(self.layers):
            for transfer, content in arriving:
                try:
                    transfer.wait_layer(layer, self.runtime.compute)  # type: ignore[arg-type]
                except TransferError:
                    content.clear()
            for content in [read, *(content for _, content in arriving)]:
                self.runtime.compute.steps.append(partial(self._reads, layer, dict(content)))
            self.runtime.compute.steps.append(partial(self._writes, layer, written))
        self.pages |= written
        self.runtime.record_again(self.fence, self.runtime.compute)
        if self.random.random() < 0.5:
            self.turns.pause()

    def backup(self) -> None:
        pages = [page for page in self.pages if page not in self.lent_pages]
        frames = [frame for frame in range(FRAMES) if frame not in self.frames and frame not in self.lent_frames]
        count = min(len(pages), len(frames), self.random.randint(1, 8))
        if count:
            pages, frames = self.random.sample(pages, count), self.random.sample(frames, count)
            transfer = self.copies.backup(np.array(pages), np.array(frames), after=self.fence)
            self._lend(pages, frames)
            self.backups.append((transfer, pages, frames))

    def load(self) -> None:
        """Load into free pages, which queued forwards may still read."""
        pages = [page for page in range(1, PAGES + 1) if page not in self.pages and page not in self.lent_pages]
        frames = [frame for frame in self.frames if frame not in self.lent_frames]
        count = min(len(pages), len(frames), self.random.randint(1, 8))
        if count:
            pages, frames = self.random.sample(pages, count), self.random.sample(frames, count)
            transfer = self.copies.load(np.array(frames), np.array(pages), after=self.fence)
            self._lend(pages, frames)
            self.loads.append((transfer, pages, frames))

    def free_pages(self) -> None:
        """Free some pages. The next owner is a forward or a load, which runs after the fence."""
        free = [page for page in self.pages if page not in self.lent_pages]
        for page in self.random.sample(free, self.random.randint(0, len(free))):
            del self.pages[page]

    def free_frame(self) -> None:
        """Free a frame. The next owner is the host, which writes at once."""
        free = [frame for frame in self.frames if frame not in self.lent_frames]
        if free:
            self._overwrite(self.random.choice(free))

    def poll(self) -> None:
        for transfers in (self.backups, self.loads):
            for entry in [entry for entry in transfers if entry[0].done()]:
                transfers.remove(entry)
                self._ended(entry[0], entry[1], entry[2], is_load=transfers is self.loads)

    def _ended(self, transfer: Transfer, pages: list[int], frames: list[int], *, is_load: bool) -> None:
        self.lent_pages -= set(pages)
        self.lent_frames -= set(frames)
        self.untimed += transfer.error is None and transfer.seconds is None
        for page, frame in zip(pages, frames, strict=True):
            if is_load:
                if transfer.error is None:
                    self.pages[page] = self.frames[frame]
                elif self.random.random() < 0.5:
                    self._hand_on(page)
                if self.random.random() < 0.5:
                    self._overwrite(frame)
            elif transfer.error is None:
                self.frames[frame] = self.pages[page]
                self._require_frame(frame)
            else:
                self._overwrite(frame)
        for frame in self.frames:
            self._require_frame(frame)

    # Bytes

    def _new_stamp(self) -> int:
        self.stamp += 1
        return self.stamp

    def _content(self, stamp: int, layer: int, region: int) -> Any:
        size = self.regions[layer][region].shape[1]
        return np.random.default_rng([stamp, layer, region]).integers(0, 256, size, dtype=np.uint8)

    def _reads(self, layer: int, content: dict[int, int]) -> bool:
        for page, stamp in content.items():
            for number, region in enumerate(self.regions[layer]):
                if not np.array_equal(region[page], self._content(stamp, layer, number)):
                    raise Finding(f"a forward read other bytes in layer {layer} of page {page}")
                self.verified += 1
        return True

    def _writes(self, layer: int, content: dict[int, int]) -> bool:
        for page, stamp in content.items():
            for number, region in enumerate(self.regions[layer]):
                region[page] = self._content(stamp, layer, number)
        return True

    def _hand_on(self, page: int) -> None:
        """Give the page of a failed load to a forward at once: no part of the load may write it after that."""
        self.pages[page] = self._new_stamp()
        for layer in range(self.layers):
            self.runtime.compute.steps.append(partial(self._writes, layer, {page: self.pages[page]}))

    def _overwrite(self, frame: int) -> None:
        """Give a frame to its next owner, which writes at once."""
        self.frames[frame] = self._new_stamp()
        self.host.payload(frame)[:] = self._payload(self.frames[frame])

    def _payload(self, stamp: int) -> bytes:
        return b"".join(
            bytes(self._content(stamp, layer, region))
            for layer in range(self.layers)
            for region in range(len(self.regions[layer]))
        )

    def _require_frame(self, frame: int) -> None:
        if bytes(self.host.payload(frame)) != self._payload(self.frames[frame]) and frame not in self.lent_frames:
            raise Finding(f"frame {frame} holds other bytes")

    def _lend(self, pages: list[int], frames: list[int]) -> None:
        self.lent_pages |= set(pages)
        self.lent_frames |= set(frames)


PATHS = ["direct", "staged"]


@pytest.mark.parametrize("path", PATHS)
def test_every_page_is_correct_in_every_interleaving(path: str) -> None:
    verified = 0
    for seed in seeds(SEEDS):
        simulation = Simulation(seed, path)
        try:
            simulation.run()
        except BaseException as finding:
            raise AssertionError(f"TEST_SEED={seed} replays this: {finding}") from finding
        verified += simulation.verified
        assert simulation.untimed == 0
    assert verified > SEEDS


def test_a_call_of_the_direct_path_has_few_copies_and_every_page_is_correct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_paths, "DIRECT_CALL_MAX", 3)
    longest = 0
    for seed in range(SEEDS // 10):
        simulation = Simulation(seed, "direct")
        simulation.run()
        longest = max(longest, simulation.runtime.longest_call)
    assert longest == 3


def found(seeds_max: int, make: Callable[[int], Simulation]) -> str | None:
    """Return the first finding of any seed."""
    for seed in range(seeds_max):
        try:
            make(seed).run()
        except Finding as finding:
            return str(finding)
    return None


# Negative controls: every wait of the engine is needed

# Streams: direct: own 1 backs up, own 2 loads; staged: own 1 and 2 back up, own 3 and 4 load. Waits of the host are
# "main" (the ack), "copy thread" (a buffer of ids) and "synchronize" (after an error).
DIRECT = [
    ("own 1", "compute"), ("own 2", "compute"), ("compute", "own 2"), ("main", "own 1"),
    ("main", "own 2"), ("synchronize", "own 1"), ("synchronize", "own 2"),
]
STAGED = [
    ("own 1", "compute"), ("own 3", "compute"), ("compute", "own 4"),
    ("own 2", "own 1"), ("own 1", "own 2"), ("own 4", "own 3"), ("own 3", "own 4"),
    ("main", "own 2"), ("main", "own 4"), ("copy thread", "own 1"), ("copy thread", "own 3"),
    ("synchronize", "own 1"), ("synchronize", "own 2"), ("synchronize", "own 3"), ("synchronize", "own 4"),
]


@pytest.mark.parametrize(
    ("path", "wait"), [("direct", wait) for wait in DIRECT] + [("staged", wait) for wait in STAGED], ids=str
)
def test_an_omitted_wait_is_found(path: str, wait: tuple[str, str]) -> None:
    fail_rate = 0.2 if wait[0] == "synchronize" else 0.0
    assert found(8 * SEEDS, partial(Simulation, path=path, dropped=wait, fail_rate=fail_rate))


@pytest.mark.parametrize("path", PATHS)
def test_the_list_of_waits_is_complete(path: str) -> None:
    made: set[tuple[str, str]] = set()
    for seed in range(30):
        simulation = Simulation(seed, path)
        simulation.run()
        made |= simulation.runtime.waits
    assert made == set(DIRECT if path == "direct" else STAGED)


class _WaitsBeforeRecord(StreamTransfer):
    """Waits for the event of a layer even if it is not recorded yet; on CUDA that does nothing."""

    def _wait_layer(self, layer: int, stream: Any) -> None:
        if layer < len(self._by_layer):
            super()._wait_layer(layer, stream)


class _EagerEngine(CudaCopyEngine):
    def load(self, host_blocks: PageIds, blocks: PageIds, *, after: Fence | None = None) -> Transfer:
        transfer = super().load(host_blocks, blocks, after=after)
        transfer.__class__ = _WaitsBeforeRecord
        return transfer


class _OneBatch(CudaCopyEngine):
    """Copies all pages in one call, also across registrations."""

    def _make_paths(self, config: TransferConfig, slot_bytes: int) -> list[CopyPath]:
        self._pieces.batches = lambda host_blocks: [np.arange(len(host_blocks))]  # type: ignore[method-assign]
        return super()._make_paths(config, slot_bytes)


@pytest.mark.parametrize("path", PATHS)
def test_a_call_that_crosses_a_registration_boundary_is_found(path: str) -> None:
    assert found(8 * SEEDS, partial(Simulation, path=path, kind=_OneBatch, fail_rate=0.0))


@pytest.mark.parametrize("path", PATHS)
def test_a_wait_for_a_layer_whose_event_is_not_recorded_yet_is_found(path: str) -> None:
    assert found(8 * SEEDS, partial(Simulation, path=path, kind=_EagerEngine, fail_rate=0.0))


@pytest.mark.parametrize("path", PATHS)
def test_failed_submissions_release_their_events(path: str) -> None:
    simulation = Simulation(1, path, fail_rate=0.0)
    simulation.runtime._fail_rate = 0.03
    pages, ended, made = np.arange(1, 9, dtype=np.int32), [], []
    for _ in range(120):
        load = simulation.copies.load(pages - 1, pages)
        assert load.wait(10)
        ended.append(load.error is None)
        made.append(simulation.runtime.made)
    assert 10 < sum(ended) < 110 and made[60] == made[-1]
    assert simulation.copies.close(10)
    simulation.turns.end()
