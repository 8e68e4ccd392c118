"""Copies on a CUDA device: right bytes by both paths, in order against compute, and each wait is needed.

    make gpu

`tests/tiers/test_streams.py` tests the same in seeded interleavings, on a simulated device. Here the device is real and
streams are slowed down.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Literal

import numpy as np
import pytest
import torch

from hicache.config import TransferConfig
from hicache.errors import InvalidInput
from hicache.geometry import KVGeometry, KVLayout
from hicache.tiers import HostPool, HostWindow, KVPool, create_device_pool
from hicache.tiers.copy_cuda import CudaCopyEngine
from tests.gpu.slow_runtime import STALL_CYCLES, SlowRuntime
from tests.steps import StepCounter

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

Path = Literal["direct", "staged"]
PATHS: list[Path] = ["direct", "staged"]
WAIT_S = 60.0
LAYERS = 4
# Contents never repeat: memory that is allocated again may still hold those of an earlier test.
SEEDS = itertools.count()


def geometry(
    page_size: int, layout: KVLayout = KVLayout.MHA, dtype: str = "bfloat16", layers: int = LAYERS
) -> KVGeometry:
    """Llama-3.1-8B or DeepSeek-V3, with fewer layers."""
    heads, dim = (8, 128) if layout is KVLayout.MHA else (1, 576)
    return KVGeometry(layers=layers, heads=heads, head_dim=dim, page_size=page_size, dtype=dtype, layout=layout)


class Rig:
    """L1 and L2 of `pages` pages on one device, and a copy engine between them."""

    def __init__(
        self, shape: KVGeometry, pages: int, path: Path, *, device: int = 0, slow: tuple[int, ...] = (),
        dropped: tuple[int | str, int | str] | None = None,
    ) -> None:
        self.device = torch.device("cuda", device)
        self.pool: KVPool = create_device_pool(shape, pages, self.device)
        self.host = HostPool(shape, pages, pin=self.device)
        self.pages = np.arange(1, pages + 1, dtype=np.int32)
        self.frames = np.random.default_rng(0).permutation(pages).astype(np.int32)
        self.runtime = SlowRuntime(self.device, slow=slow, dropped=dropped)
        self.copies = CudaCopyEngine(
            self.pool.blocks, HostWindow(self.host), TransferConfig(path=path), runtime=self.runtime
        )

    def content(self) -> list[torch.Tensor]:
        """Random bytes for all pages, `[pages, bytes]` for each layer, on the device."""
        numbers = torch.Generator(self.device).manual_seed(next(SEEDS))
        shape = len(self.pages), self.pool.blocks.layer_bytes[0]
        return [
            torch.randint(0, 256, shape, dtype=torch.uint8, device=self.device, generator=numbers)
            for _ in self.pool.blocks.layers
        ]

    def write(self, content: list[torch.Tensor]) -> None:
        """Queue a forward that writes `content` to all pages."""
        for (region,), layer in zip(self.pool.blocks.layers, content, strict=True):
            region[1:].copy_(layer)

    def in_frames(self, content: list[torch.Tensor]) -> bool:
        """True if the frames hold `content`."""
        payloads = torch.cat([layer.cpu() for layer in content], dim=1).numpy()
        return all(
            bytes(self.host.payload(frame)) == payload.tobytes()
            for frame, payload in zip(self.frames.tolist(), payloads, strict=True)
        )

    def stall(self) -> None:
        """Queue a stall on the engine's stream."""
        torch.cuda._sleep(STALL_CYCLES)  # type: ignore[no-untyped-call]

    def fence(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event


def round_trip(rig: Rig) -> list[str]:
    """Back up pages that a slow forward writes, overwrite them, and load the first content again over pages that a slow
    forward still reads. Return the errors found, as text."""
    first, second = rig.content(), rig.content()
    torch.cuda.synchronize(rig.device)
    wrong = []
    rig.stall()
    rig.write(first)
    backup = rig.copies.backup(rig.pages, rig.frames, after=rig.fence())
    assert backup.wait(WAIT_S) and backup.error is None
    if not rig.in_frames(first):
        wrong.append("the backup")
    # The next steps need correct frames, even if the backup was wrong.
    payloads = torch.cat([layer.cpu() for layer in first], dim=1).numpy()
    for page, frame in enumerate(rig.frames.tolist()):
        rig.host.payload(frame)[:] = payloads[page].tobytes()
    rig.write(second)
    torch.cuda.synchronize(rig.device)
    rig.stall()
    read_before = [region[1:].clone() for (region,) in rig.pool.blocks.layers]
    load = rig.copies.load(rig.frames, rig.pages, after=rig.fence())
    read_after = []
    for layer, (region,) in enumerate(rig.pool.blocks.layers):
        load.wait_layer(layer, torch.cuda.current_stream(rig.device))
        read_after.append(region[1:].clone())
    torch.cuda.synchronize(rig.device)
    if not all(map(torch.equal, read_before, second)):
        wrong.append("the read before the load")
    if not all(map(torch.equal, read_after, first)):
        wrong.append("the read after the load")
    assert load.wait(WAIT_S) and load.error is None
    # Without a wait, the last event can be passed before the first.
    assert wrong or (load.seconds is not None and backup.seconds is not None)
    return wrong


@pytest.fixture(autouse=True)
def memory_is_given_back() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
@pytest.mark.parametrize("layout", KVLayout)
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_pages_of_every_size_survive_a_round_trip(
    path: Path, page_size: int, layout: KVLayout, dtype: str
) -> None:
    rig = Rig(geometry(page_size, layout, dtype), 50, path)
    assert round_trip(rig) == []
    assert rig.copies.close(WAIT_S)


@pytest.mark.parametrize("path", PATHS)
def test_a_gibibyte_survives_a_round_trip(path: Path) -> None:
    shape = geometry(16, layers=32)
    rig = Rig(shape, (1 << 30) // shape.payload_bytes, path)
    assert round_trip(rig) == []
    assert rig.copies.close(WAIT_S)


# Our streams are numbered in order of creation. Direct: 0 backs up, 1 loads. Staged: 0 gathers, 1 copies to the host, 2
# copies to the device, 3 scatters.
@pytest.mark.parametrize(("path", "slow"), [("direct", (0,)), ("direct", (1,)), *(("staged", (n,)) for n in range(4))])
def test_a_stall_of_any_stream_changes_no_byte(path: Path, slow: tuple[int, ...]) -> None:
    rig = Rig(geometry(16), 40, path, slow=slow)
    assert round_trip(rig) == []
    assert rig.copies.close(WAIT_S)


@pytest.mark.parametrize(
    ("path", "slow", "dropped"),
    [
        ("direct", (), (0, "fence")), ("direct", (), (1, "fence")), ("direct", (1,), ("engine", 1)),
        ("staged", (), (0, "fence")), ("staged", (), (2, "fence")), ("staged", (3,), ("engine", 3)),
        ("staged", (0,), (1, 0)), ("staged", (2,), (3, 2)),
    ],
)
def test_an_omitted_wait_is_detected_on_the_device(
    path: Path, slow: tuple[int, ...], dropped: tuple[int | str, int | str]
) -> None:
    rig = Rig(geometry(16), 40, path, slow=slow, dropped=dropped)
    assert round_trip(rig) != []
    assert rig.copies.close(WAIT_S)


@pytest.mark.parametrize("path", PATHS)
def test_a_submit_does_not_block_the_scheduler_thread(path: Path) -> None:
    rig = Rig(geometry(16), 40, path)
    fence = rig.fence()
    torch.cuda.set_sync_debug_mode("error")
    try:
        rig.stall()
        backup = rig.copies.backup(rig.pages, rig.frames, after=fence)
        load = rig.copies.load(rig.frames, rig.pages, after=fence)
        backup.done()
        for layer in range(LAYERS):
            load.wait_layer(layer, torch.cuda.current_stream(rig.device))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert backup.wait(WAIT_S) and load.wait(WAIT_S) and rig.copies.close(WAIT_S)


def test_copies_can_be_submitted_by_a_thread_that_has_not_used_the_device() -> None:
    rig = Rig(geometry(16), 40, "direct")
    content = rig.content()
    rig.write(content)
    fence = rig.fence()
    ended: list[bool] = []
    thread = threading.Thread(
        target=lambda: ended.append((backup := rig.copies.backup(rig.pages, rig.frames, after=fence)).wait(WAIT_S)
                                    and backup.seconds is not None)
    )
    thread.start()
    thread.join()
    assert ended == [True] and rig.in_frames(content) and rig.copies.close(WAIT_S)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("path", PATHS)
def test_copies_use_their_device_even_if_another_is_current(path: Path) -> None:
    rig = Rig(geometry(16), 40, path, device=1)
    with torch.cuda.device(1):
        content = rig.content()
        rig.write(content)
        fence = rig.fence()
    with torch.cuda.device(0):
        torch.zeros(1, device="cuda:0")
        assert rig.copies.backup(rig.pages, rig.frames, after=fence).wait(WAIT_S)
        for (region,) in rig.pool.blocks.layers:
            region.zero_()
        torch.cuda.synchronize(rig.device)
        load = rig.copies.load(rig.frames, rig.pages)
        read = []
        for layer, (region,) in enumerate(rig.pool.blocks.layers):
            load.wait_layer(layer, torch.cuda.default_stream(rig.device))
            with torch.cuda.device(1):
                read.append(region[1:].clone())
        torch.cuda.synchronize(rig.device)
    assert all(map(torch.equal, read, content))
    assert rig.in_frames(content) and rig.copies.close(WAIT_S)


def test_a_fence_of_another_type_or_never_recorded_is_rejected() -> None:
    rig = Rig(geometry(16), 4, "direct")
    with pytest.raises(InvalidInput, match="record an Event"):
        rig.copies.require_fence(StepCounter().fence(0))
    with pytest.raises(InvalidInput, match="never recorded"):
        rig.copies.require_fence(torch.cuda.Event())  # type: ignore[no-untyped-call]
    assert rig.copies.close(WAIT_S)


def test_a_host_pool_that_is_not_pinned_is_rejected() -> None:
    shape = geometry(16)
    pool = create_device_pool(shape, 4, "cuda:0")
    with pytest.raises(InvalidInput, match="not pinned"):
        CudaCopyEngine(pool.blocks, HostWindow(HostPool(shape, 4)))


def test_the_path_is_measured_and_chosen_at_start(caplog: pytest.LogCaptureFixture) -> None:
    for page_size, expected in ((256, "direct"), (1, "staged")):
        shape = geometry(page_size)
        pool, host = create_device_pool(shape, 4, "cuda:0"), HostPool(shape, 4, pin=torch.device("cuda", 0))
        with caplog.at_level("INFO", logger="hicache"):
            copies = CudaCopyEngine(pool.blocks, HostWindow(host))
        assert copies.path == expected and f"are {expected}" in caplog.text
        assert copies.close(WAIT_S)


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
def test_copies_and_kernels_access_only_their_own_memory() -> None:
    here = f"{__file__}::test_pages_of_every_size_survive_a_round_trip"
    command = ["compute-sanitizer", "--error-exitcode", "9", sys.executable, "-m", "pytest", "-q", here]
    done = subprocess.run([*command, "-k", "16-staged"], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
