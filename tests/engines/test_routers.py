"""The KV indexer of NVIDIA Dynamo follows HiCache's events: its scores are what the engine then serves.

A score counts tokens that are on the device; there or on the host; and there, on the host or on storage.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hicache.backends.storage import Storage
from hicache.config import EventsConfig
from hicache.events import EventStream, Medium, PageBlocks, Removed
from hicache.events.publisher import EventPublisher
from hicache.keys import PAGE_KEY_BYTES, RadixKey, page_keys, token_bytes
from tests.cache.host_world import PAGE_TOKENS, HostWorld, memory_backend
from tests.cache.world import World
from tests.tuned import tuned
from tests.waiting import wait_for

from .dynamo_index import DynamoIndex
from .process import EngineProcess, engine_environ
from .prompts import prompt, write_config
from .vllm_engine import BLOCK_TOKENS, hicache_connector, vllm_environ, vllm_options

# The cached tokens of a prompt of 300: in blocks of 32 on the device, and in pages of 64 on the other tiers.
ON_DEVICE, IN_PAGES = 288, 256
# The device has room for three prompts, L2 for six and the files for about ten.
DEVICE_BLOCKS, HOST_TOKENS, STORE = 36, 24 * 64, "5MiB"
OTHERS_MAX = 40
# The blocks of the engine without a model: two in a page.
BLOCK = PAGE_TOKENS // 2


class RoutedEngine:
    """An engine with HiCache, whose blocks have `block_tokens`, and an index of its events."""

    def __init__(self, process: EngineProcess, index: DynamoIndex, block_tokens: int = BLOCK_TOKENS) -> None:
        self.process = process
        self.block_tokens = block_tokens
        self.others: list[list[int]] = []
        self._markers = itertools.count()
        self.follow(index)

    def follow(self, index: DynamoIndex) -> None:
        """Use `index` from now on. It requests the batches from before its subscription when it gets one after it."""
        self.index = index
        first = self._serve_marker()
        wait_for(lambda: index.scores(first)[0] == self.block_tokens, self._serve_marker, pause_s=0.5)

    def _serve_marker(self) -> list[int]:
        """Serve a new prompt of one block, and return it."""
        marker = prompt(f"marker {next(self._markers)}", self.block_tokens)
        self.serve(marker)
        return marker

    def serve(self, asked: list[int]) -> int:
        """Return how many tokens of the prompt were cached."""
        (answer,) = self.process.call("generate", prompts=[asked], tokens=1)
        return int(answer["cached"])

    def scores(self, asked: list[int]) -> tuple[int, int, int]:
        """Return the scores after the events of all requests so far."""
        marker = self._serve_marker()
        wait_for(lambda: self.index.scores(marker)[0] == self.block_tokens)
        return self.index.scores(asked)

    def fill(self, asked: list[int], tier: int) -> None:
        """Serve other prompts, and wait until they are stored, until `asked` has left the tier by its scores."""
        while self.scores(asked)[tier]:
            assert len(self.others) < OTHERS_MAX
            self.others.append(other := prompt(f"other {len(self.others)}"))
            self.serve(other)
            wait_for(lambda other=other: self.scores(other)[2] >= IN_PAGES)  # type: ignore[misc]


# Forbids network namespaces to itself, then needs one.
FORBIDDEN = """
import ctypes
from pathlib import Path
from tests.engines.dynamo_index import _CLONE_NEWUSER, enter_network_namespace
assert ctypes.CDLL(None).unshare(_CLONE_NEWUSER) == 0
Path("/proc/sys/user/max_net_namespaces").write_text("0")
enter_network_namespace()
"""


def test_without_network_namespaces_the_indexer_does_not_start_and_the_reason_is_shown() -> None:
    """It would listen on all addresses of the machine."""
    command = [sys.executable, "-c", FORBIDDEN]
    found = subprocess.run(command, env=engine_environ(), capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert "cannot make a network namespace" in found.stderr


def test_a_router_scores_what_vllm_serves_from_each_tier(llama: Path, tmp_path: Path) -> None:
    files = {"path": str(tmp_path / "store"), "capacity": STORE, "free_space_floor": 0}
    config = write_config(
        tmp_path / "hicache.yaml", host={"tokens": HOST_TOKENS}, storage={"type": "file", "options": files}
    )
    ends = {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/replay"}
    options = vllm_options(
        llama, kv_transfer_config=hicache_connector(config), num_gpu_blocks_override=DEVICE_BLOCKS,
        kv_events_config={"enable_kv_cache_events": True, "publisher": "zmq", **ends},
    )
    environ = vllm_environ(processes=False)
    with (
        EngineProcess("tests.engines.vllm_engine", options, folder=tmp_path, environ=environ) as vllm,
        DynamoIndex(**ends, block_size=BLOCK_TOKENS, folder=tmp_path) as index,
    ):
        engine, asked, once = RoutedEngine(vllm, index), prompt("routed"), prompt("served once")
        assert engine.serve(asked) == 0
        assert engine.scores(asked) == (ON_DEVICE, ON_DEVICE, ON_DEVICE)
        engine.fill(asked, 0)
        assert index.scores(asked) == (0, IN_PAGES, IN_PAGES)
        assert engine.serve(asked) == IN_PAGES
        engine.fill(asked, 1)
        assert index.scores(asked) == (0, 0, IN_PAGES)
        assert engine.serve(asked) == IN_PAGES
        assert engine.scores(asked) == (ON_DEVICE, ON_DEVICE, ON_DEVICE)
        assert engine.serve(once) == 0
        engine.fill(once, 2)  # a store keeps pages that were read longer
        assert engine.serve(once) == 0

        # A router that starts later learns the same from the batches that vLLM still has.
        with DynamoIndex(**ends, block_size=BLOCK_TOKENS, folder=tmp_path) as later:
            engine.follow(later)
            seen = [asked, once, *engine.others]
            engine.scores(asked)
            assert [later.scores(each) for each in seen] == [index.scores(each) for each in seen]
            for each in seen:  # on all mixtures of tiers, because each prompt evicts others
                assert engine.scores(each)[2] == engine.serve(each)


def test_a_router_scores_what_vllm_serves_from_storage_for_a_model_with_windows(
    hybrid_model: Path, tmp_path: Path
) -> None:
    files = {"path": str(tmp_path / "store"), "capacity": "1GiB", "free_space_floor": 0}
    config = write_config(
        tmp_path / "hicache.yaml", host={"size": "6MiB"}, storage={"type": "file", "options": files}
    )
    ends = {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/replay"}
    options = vllm_options(
        hybrid_model, kv_transfer_config=hicache_connector(config),
        kv_events_config={"enable_kv_cache_events": True, "publisher": "zmq", **ends},
    )
    environ = vllm_environ(processes=False, zeros=tmp_path / "zeros")
    with (
        EngineProcess("tests.engines.vllm_engine", options, folder=tmp_path, environ=environ) as vllm,
        DynamoIndex(**ends, block_size=BLOCK_TOKENS, folder=tmp_path) as index,
    ):
        engine, asked = RoutedEngine(vllm, index), prompt("routed")
        assert engine.serve(asked) == 0
        wait_for(lambda: engine.scores(asked)[2] >= IN_PAGES)
        engine.fill(asked, 1)
        assert index.scores(asked) == (0, 0, IN_PAGES)
        assert engine.serve(asked) == IN_PAGES


class BlockEngine:
    """A HostCache that publishes the blocks of an engine without a model. The same store serves later engines."""

    def __init__(self, folder: Path, backend: Storage, **options: object) -> None:
        stream = EventStream(1 << 20)
        ends = {"endpoint": f"ipc://{folder}/events", "replay_endpoint": f"ipc://{folder}/replay"}
        self.publisher = EventPublisher(
            stream, tuned(EventsConfig, **{**ends, "snapshot_interval": 0.01, **options}), given_keys=True
        )
        self.world = HostWorld(host_pages=1024, backend=backend, position_bytes=PAGE_KEY_BYTES)
        self.world.cache.record_events(stream, self.publisher)

    def key(self, tokens: list[int]) -> RadixKey:
        hashes = page_keys(token_bytes(tokens), BLOCK)
        return RadixKey.of_hashes(hashes[1::2])

    def describe(self, tokens: list[int]) -> None:
        """Describe all pages of a prompt, as a connector does."""
        hashes = page_keys(token_bytes(tokens), BLOCK)

        def blocks_of(page: int) -> PageBlocks:
            parent = hashes[2 * page - 1] if page else None
            part = token_bytes(tokens[page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS])
            return PageBlocks(b"".join(hashes[2 * page : 2 * page + 2]), parent, part, (None, None))

        self.world.cache.describe_blocks(self.key(tokens), 0, blocks_of)

    def write(self, tokens: list[int], *, describes: bool = True) -> None:
        if describes:
            self.describe(tokens)
        self.world.write("writer", self.key(tokens))
        self.world.cache.abort("writer")
        self.world.settle()

    def served(self, tokens: list[int]) -> int:
        """Return how many tokens of a prompt the cache has after its prefetch."""
        key = self.key(tokens)
        self.describe(tokens)
        self.world.prefetch("reader", key)
        return self.world.load("reader", key) * PAGE_TOKENS

    def close(self) -> None:
        self.world.close()


@contextmanager
def indexed(folder: Path, block_size: int) -> Iterator[DynamoIndex]:
    ends = {"endpoint": f"ipc://{folder}/events", "replay_endpoint": f"ipc://{folder}/replay"}
    with DynamoIndex(**ends, block_size=block_size, folder=folder) as index:
        yield index


def tokens(*pages: int) -> list[int]:
    """Return a prompt of whole pages, each filled with one number."""
    return [page for page in pages for _ in range(PAGE_TOKENS)]


def test_a_router_learns_the_tree_from_a_snapshot_and_forgets_a_restarted_engine(tmp_path: Path) -> None:
    backend = memory_backend()
    first, second = tokens(1, 2, 3), tokens(4, 5)
    engine = BlockEngine(tmp_path, backend, replay_buffer=1)  # too small for a replay
    engine.write(first)
    with indexed(tmp_path, BLOCK) as index:
        engine.write(second)
        numbers = itertools.count(100)
        wait_for(
            lambda: index.scores(first)[1:] == (12, 12) and index.scores(second)[1:] == (8, 8),
            lambda: engine.write(tokens(next(numbers))), pause_s=0.05,
        )
        engine.close()
        engine = BlockEngine(tmp_path, backend)
        wait_for(lambda: index.scores(first) == (0, 0, 0), lambda: engine.write(tokens(next(numbers))), pause_s=0.05)
        assert engine.served(first) == 12
        wait_for(lambda: index.scores(first) == (0, 12, 12))
        engine.close()


def test_a_router_ignores_pages_without_tokens(tmp_path: Path) -> None:
    """As with `events.token_ids: false`; the page after it is the control."""
    engine = BlockEngine(tmp_path, memory_backend())
    numbers = itertools.count(100)
    with indexed(tmp_path, BLOCK) as index:
        engine.write(tokens(1, 2, 3), describes=False)
        engine.write(tokens(4, 5))
        wait_for(
            lambda: index.scores(tokens(4, 5))[1:] == (8, 8), lambda: engine.write(tokens(next(numbers))), pause_s=0.05
        )
        assert index.scores(tokens(1, 2, 3)) == (0, 0, 0)
        assert engine.served(tokens(1, 2, 3)) == 12
        engine.close()


def test_a_router_scores_what_a_cache_of_tokens_has(tmp_path: Path) -> None:
    stream = EventStream(1 << 20)
    ends = {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/replay"}
    publisher = EventPublisher(stream, EventsConfig.model_validate(ends))
    world = World(backend=memory_backend(), device_pages=32, host_pages=32)
    world.cache.record_events(stream, publisher)
    asked = tokens(1, 2, 3)
    with indexed(tmp_path, PAGE_TOKENS) as index:
        world.serve("r", RadixKey.of([*asked, 9]))
        world.settle()
        # Each event is a batch; one after the subscription makes the indexer request those before it.
        absent = Removed(Medium.HOST, (bytes(PAGE_KEY_BYTES),))
        wait_for(lambda: index.scores(asked) == (12, 12, 12), lambda: stream.put(absent), pause_s=0.05)
        world.leave_l1()
        wait_for(lambda: index.scores(asked) == (0, 12, 12))
        world.forget()
        wait_for(lambda: index.scores(asked) == (0, 0, 12))
        assert world.serve("again", RadixKey.of([*asked, 9])).storage_hit_tokens == 12
        world.close()
