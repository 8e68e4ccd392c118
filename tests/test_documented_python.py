"""The Python blocks of the pages are correct under `mypy --strict`, and run as written.

A block is a program: its setup, which supplies the names that a reader has, and the block. It runs on the CPU, with
small sizes (`SMALL`). `NOT_RUN` names the pages whose blocks do not run, each with the reason.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest

from hicache.shared_memory import path_of
from tests.test_documented_commands import ROOT, TEXTS

pytestmark = [pytest.mark.long, pytest.mark.servers]

# mypy without a cache reads torch for a minute.
TYPES_TIMEOUT_S = 500
RUN_TIMEOUT_S = 500
SMALL = {'"cuda"': '"cpu"', '"40GiB"': '"128MiB"', '"4GiB"': '"64MiB"'}
SMALL_CONFIG = {
    "HICACHE_HOST__SIZE": "128MiB",
    "HICACHE_STORAGE__OPTIONS__PATH": "pages",
    "HICACHE_STORAGE__OPTIONS__CAPACITY": "1GiB",
    "HICACHE_STORAGE__OPTIONS__FREE_SPACE_FLOOR": "0",
}

CONFIG = """
from hicache import HiCacheConfig, KVGeometry, Namespace, RadixKey
geometry = KVGeometry(layers=4, heads=2, head_dim=16, page_size=16, dtype="float32")
options = {
    "page_size": 16, "device": {"tokens": 1024}, "host": {"tokens": 2048},
    "storage": {"type": "file", "options": {"path": "store", "capacity": "64MiB", "free_space_floor": 0}},
}
config = HiCacheConfig.model_validate(options)
namespace = Namespace(model="weights", geometry=geometry)
rid, key = "r1", RadixKey.of(range(300))
page_size, layers, heads, kv_heads, head_dim = 16, 4, 2, 2, 16
"""
CACHE = """
import atexit
from hicache import HiRadixCache, create_cache
cache = create_cache(config, namespace)
atexit.register(cache.close)
assert isinstance(cache, HiRadixCache)
"""
SESSIONS = CONFIG + """
import atexit
from hicache import SessionCache, create_cache
cache = create_cache(HiCacheConfig.model_validate({**options, "sessions": {"enabled": True}}), namespace)
atexit.register(cache.close)
assert isinstance(cache, SessionCache)
"""
REQUEST = CONFIG + CACHE + """
import torch
request = cache.begin_request(rid, key)
assert request is not None
first, end, layer = 0, 300, 0
k = v = torch.ones(300, 2, 16)
"""
BATCH = REQUEST + """
from hicache.tiers import RequestToTokenPool
rows, request_1, request_2, q = RequestToTokenPool(2, 1024), request, request, torch.ones(301, 2, 16)
k = v = torch.ones(301, 2, 16)
taken, prompt_tokens, computed_tokens = rows.alloc(2), 300, 40
assert taken is not None
row_1, row_2 = taken
rows.write(row_1, request.pages, page_size)
rows.write(row_2, request.pages, page_size)
"""
SCALES = CONFIG + """
import torch
k_scales, v_scales, layer, slots, k = [0.5, 1.0, 0.25, 2.0], [1.0] * 4, 0, torch.arange(16, 32), torch.ones(16, 2, 16)
v = k
"""
PAGED = BATCH + """
import torch
q = k = v = torch.ones(1, 2, 16)
ids = request.pages.tolist()
class PagedKernel:
    def __init__(self, queries: torch.Tensor, indptr: torch.Tensor, pages: torch.Tensor, last: torch.Tensor,
                 page_size: int) -> None:
        assert queries.tolist() == [0, 1] and indptr.tolist() == [0, 3]
        assert pages.tolist() == ids[:3] and last.tolist() == [9]
    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], scale: float) -> torch.Tensor:
        assert kv[0][ids[2], 8].eq(1).all() and kv[0].shape[1:] == (16, 2, 16) and scale == 0.25
        return q
"""
POOLS = CONFIG + """
import torch
window_geometry, window, slots = KVGeometry(layers=2, heads=2, head_dim=16, page_size=16), 64, 40
state_layers, state_shape, prompt_tokens, device = 3, (2, 16, 16), 300, torch.device("cpu")
"""
SLOTS = CONFIG + CACHE + """
import torch
device, prefix_lens, seq_lens, extend_tokens = "cpu", torch.tensor([0]), torch.tensor([20]), 20
last_loc, new_last_loc, draft_last_loc = torch.tensor([-1]), torch.tensor([35]), torch.tensor([36])
"""
RANKS = CONFIG + """
from pathlib import Path
from torch import distributed
from hicache import create_cache
distributed.init_process_group("gloo", init_method="file://" + str(Path("ranks").resolve()), rank=0, world_size=1)
"""
HOST = CONFIG + """
from hicache.tiers import HostPool
pool, start_page, seconds, prompt_tokens, left_tokens = HostPool(geometry, 128), 0, 0.001, 289, 0
key = RadixKey.of(range(288))
"""
WORKERS = """
import numpy as np
import torch
from hicache import HiCacheConfig, Piece
page_tokens, pages, ranks, rank, k, model, fence = 32, 64, 1, 0, 2, "weights", None
pieces = tuple(Piece(f"{block}.{layer}", 2 * 16 * 2 * 8 * 4) for block in range(k) for layer in range(4))
layers = [torch.zeros(2, 64, 16, 2, 8) for _ in range(4)]
config = HiCacheConfig.model_validate({"page_size": page_tokens})
device_blocks, host_blocks = np.arange(4, dtype=np.int32), np.arange(4, dtype=np.int32)
"""
BACKEND = """
from hicache.backends.memory import MemoryDriver
from hicache.frame import FrameCodec
class MyDriver(MemoryDriver):
    def __init__(self, codec: FrameCodec, path: object) -> None:
        super().__init__()
def read_file(key: bytes) -> bytes | None: ...
def write_file(key: bytes, data: bytes) -> None: ...
"""
SERVER = """
from hicache_lab.devservers.ports import free_ports
from types import SimpleNamespace
server = SimpleNamespace(port=free_ports(1)[0])
"""
VLLM = """
from types import SimpleNamespace
results = iter([False, True])
llm = SimpleNamespace(reset_prefix_cache=lambda reset_connector: next(results))
llm.llm_engine = SimpleNamespace(step=lambda: None)
"""
HINTS = """
from typing import Any
client: Any = None
model, admin_socket, messages = "", "", [{"role": "user", "content": ""}]
def hints(session_id: str, actions: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {}
def send(admin_socket: str, session_id: str, actions: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return []
"""
# A little of each public trace, in the columns and fields that its page names.
SESSION_FILES = """
import json
from pathlib import Path
def leaf(t: float, tokens: int, *hash_ids: int) -> dict[str, object]:
    return {"t": t, "type": "s", "model": "m", "in": tokens, "out": 9, "hash_ids": hash_ids, "api_time": 1.0}
Path("traces").mkdir()
for name in "ab":
    sub = {"t": 5.0, "type": "subagent", "agent_id": "1", "requests": [leaf(1.5, 64, 7)]}
    turns = [leaf(0.0, 150, 1, 2), leaf(4.0, 192, 1, 2, 3), sub, leaf(9.0, 193, 1, 4, 3)]
    trace = {"id": name, "block_size": 64, "hash_id_scope": "local", "requests": turns}
    Path("traces", f"{name}.json").write_text(json.dumps(trace))
"""
SESSION_LINES = """
import json
from pathlib import Path
def encode(messages: list[dict[str, str]]) -> list[int]:
    return [ord(letter) for message in messages for letter in message["content"]]
rows = [("a", 70, 0.0), ("b", 70, None), ("a", 140, 2.5)]
Path("train.jsonl").write_text("".join(json.dumps({
    "session_id": session, "model": "m", "input": [{"role": "user", "content": "x" * letters}], "output_length": 100,
    "pre_gap": gap}) + "\\n" for session, letters, gap in rows))
"""
LENGTHS = """
from pathlib import Path
Path("AzureLLMInferenceTrace_conv.csv").write_text(
    "TIMESTAMP,ContextTokens,GeneratedTokens\\n2023-11-16 18:15:46.6805900,600,44\\n2023-11-16 18:15:50.9951690,0,1\\n"
    "2023-11-16 18:15:47.6805900+00:00,512,109\\n2023-11-16 18:15:48+00:00,1,5\\n")
"""
# The setup of each block, in the order of the page.
SETUPS = {
    "README.md": ["prompt_tokens = list(range(300))"],
    "docs/backends/redis.md": [""],
    "docs/backends/s3.md": [""],
    "docs/backends/writing.md": [BACKEND],
    "docs/embedding.md": [
        CONFIG + "from hicache_lab.engine import BUNDLED_MODEL as folder", REQUEST, BATCH, PAGED, SCALES, POOLS,
        SESSIONS, SLOTS, CONFIG + CACHE, RANKS, CONFIG + CACHE + "capacity_bytes = 1 << 20",
        CONFIG + "from hicache import create_cache",
    ],
    "docs/engines.md": [VLLM],
    "docs/explain.md": [""],
    "docs/hints.md": ["", *[HINTS] * 4],
    "docs/host_cache.md": [HOST, WORKERS],
    "docs/reliability.md": [CONFIG + CACHE],
    "docs/servers.md": ["", SERVER],
    "docs/traces.md": [SESSION_FILES, SESSION_LINES, LENGTHS],
    "docs/tracing.md": [CONFIG + CACHE],
}
NOT_RUN = {
    "docs/hints.md": "it needs an engine: tests/engines/test_vllm_hints.py",
    "docs/backends/redis.md": "it needs an account of a cloud; tests/backends/redis/test_redis_credentials.py has a "
    "provider on a real server",
    "docs/backends/s3.md": "tests/backends/s3/test_s3_http.py runs it on a real server",
}


class Program(NamedTuple):
    """A block of a page: the line after which it begins, its setup and its text."""

    page: str
    line: int
    setup: str
    text: str

    @property
    def source(self) -> str:
        """The whole program. The future import lets setups use later names."""
        return f"from __future__ import annotations\n{self.setup}\n{self.text}"

    @property
    def name(self) -> str:
        return f"{re.sub(r'[^a-z]+', '_', self.page.lower())}_{self.line}"


def blocks(text: str) -> list[tuple[int, str]]:
    """Return the Python blocks of a page, each with the number of its first line."""
    found = re.finditer(r"^ *```python\n(.*?)^ *```$", text, flags=re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, one.start()) + 1, textwrap.dedent(one[1])) for one in found]


PROGRAMS = [
    Program(page, line, setup, block)
    for page, text in TEXTS.items()
    for (line, block), setup in zip(blocks(text), SETUPS.get(page, []), strict=True)
]
RUN = [program for program in PROGRAMS if program.page not in NOT_RUN]


def type_errors(programs: list[Program], folder: Path) -> str:
    """Check the types of all programs in one run, with the settings of this project. Return the errors."""
    files = [folder / f"{program.name}.py" for program in programs]
    for file, program in zip(files, programs, strict=True):
        file.write_text(program.source)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), *map(str, files)], cwd=ROOT,
        env={**os.environ, "MYPYPATH": f"{ROOT}:{folder}"}, capture_output=True, text=True, check=False,
        timeout=TYPES_TIMEOUT_S,
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_the_types_of_all_blocks_are_correct(tmp_path: Path) -> None:
    assert not (errors := type_errors(PROGRAMS, tmp_path)), errors


def test_a_wrong_type_is_noticed(tmp_path: Path) -> None:
    """The control: what an engine's author would write from an earlier text of the guide."""
    text = "k, v = cache.device.get_kv_buffer(0)"
    assert '"KVPool" has no attribute "get_kv_buffer"' in type_errors([Program("a", 1, CONFIG + CACHE, text)], tmp_path)


# Runs each block in a child of one process, which has imported what takes long.
RUNNER = """
import os, sys
import torch, hicache.cache, hicache_lab.engine
for name in sys.argv[1:]:
    child = os.fork()
    if not child:
        os.chdir(name)
        with open("block.py") as file:
            source = file.read()
        exec(compile(source, name, "exec"), {"__name__": "__main__"})
        sys.exit()
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{name} failed")
"""


@pytest.mark.parametrize("page", sorted({program.page for program in RUN}))
def test_the_blocks_of_a_page_run(page: str, tmp_path: Path) -> None:
    name = f"test-documented-{os.getpid()}"
    programs = [program for program in RUN if program.page == page]
    for program in programs:
        folder = tmp_path / program.name
        folder.mkdir()
        (folder / "configs").symlink_to(ROOT / "configs")
        (folder / "hicache.yaml").write_text("page_size: 16\ndevice: {tokens: 1024}\n")
        source = re.sub("|".join(SMALL), lambda found: SMALL[found[0]], program.source)
        (folder / "block.py").write_text(source.replace("my-engine", name))
    environ = {**os.environ, "PYTHONPATH": str(ROOT)} | (SMALL_CONFIG if page == "README.md" else {})
    try:
        done = subprocess.run(
            [sys.executable, "-c", RUNNER, *(program.name for program in programs)], cwd=tmp_path, env=environ,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=RUN_TIMEOUT_S,
            stdin=subprocess.DEVNULL, check=False,
        )
    finally:
        path_of(name).unlink(missing_ok=True)
    assert done.returncode == 0, done.stdout


def test_reasons_and_setups_are_not_stale() -> None:
    assert {program.page for program in PROGRAMS} == set(SETUPS) >= set(NOT_RUN)
    assert all(any(small in program.text for program in RUN) for small in SMALL)
