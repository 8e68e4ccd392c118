"""An unmodified SGLang with HiCache as its tree: hits from each tier, and what a store may do.

SGLang compares its slots after each step, and ends if one is lost; HiCache checks its books (see `tree_environ`). The
control is `test_zeroed_pages_change_the_tokens`: it shows that the engine reads stored KV.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache_lab.devservers.ports import LOOPBACK
from tests.daemon.daemons import Daemon
from tests.listening import held_ports
from tests.waiting import wait_for

from .accounts import cached, counting
from .model import save_model
from .process import EngineFailed, EngineProcess
from .prompts import prompts, write_config
from .sglang_engine import PAGE_TOKENS, SPAWNS, tree_environ, tree_options
from .sglang_tree import CACHED, TreeProcess, files, push_out, tiers, tokens
from .stored_pages import are_stored, files_of, flip, stored, swap, zero

FROM_L1, FROM_L2, FROM_L3 = {"device": CACHED}, {"host": CACHED}, {"storage": CACHED}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TreeProcess]:
    with TreeProcess(tmp_path_factory.mktemp("sglang-tree")) as process:
        yield process


def cold(
    engine: TreeProcess, llama: Path, asked: list[list[int]], config: dict[str, object], folder: Path
) -> list[object]:
    """Begin an engine, compute prompts, and wait until their pages are stored. Return the tokens."""
    engine.begin(llama, config)
    answers = engine.ask(asked)
    assert tiers(answers) == [{}] * len(asked)
    wait_for(lambda: are_stored(asked, folder))
    return tokens(answers)


def test_tokens_are_equal_from_each_tier_and_after_a_restart(engine: TreeProcess, llama: Path, tmp_path: Path) -> None:
    asked = prompts("tiers", 3)
    engine.begin_without_cache(llama)
    expected = tokens(engine.ask(asked))
    assert cold(engine, llama, asked, files(tmp_path), tmp_path) == expected
    found = engine.ask(asked)
    assert (tokens(found), tiers(found)) == (expected, [FROM_L1] * 3)
    push_out(engine)
    found = engine.ask(asked)
    assert (tokens(found), tiers(found)) == (expected, [FROM_L2] * 3)
    engine.begin(llama, files(tmp_path))
    found = engine.ask(asked)
    assert (tokens(found), tiers(found)) == (expected, [FROM_L3] * 3)


def test_the_output_of_a_request_is_cached_for_the_next_turn(engine: TreeProcess, llama: Path, tmp_path: Path) -> None:
    """A turn and its output fill pages, as the last output token is computed with the next turn."""
    (turn,) = prompts("turns", 1, 10 * PAGE_TOKENS)
    engine.begin(llama, files(tmp_path))
    (first,) = engine.ask_together([{"prompt": turn}], tokens=2 * PAGE_TOKENS + 1)
    (second,) = engine.ask([[*turn, *first["tokens"], *prompts("more", 1, 40)[0]]])
    assert second["tiers"] == {"device": 12 * PAGE_TOKENS}


def test_zeroed_pages_change_the_tokens(engine: TreeProcess, llama: Path, tmp_path: Path) -> None:
    """The control: pages with a valid seal but wrong KV give wrong tokens."""
    asked = prompts("zeroed", 1)
    expected = cold(engine, llama, asked, files(tmp_path), tmp_path)
    for path in files_of(asked[0], tmp_path):
        zero(path)
    engine.begin(llama, files(tmp_path))
    found = engine.ask(asked)
    assert tiers(found) == [FROM_L3]
    assert tokens(found) != expected


def test_flipped_bytes_and_swapped_pages_cost_only_hits(engine: TreeProcess, llama: Path, tmp_path: Path) -> None:
    asked = prompts("damaged", 2)
    expected = cold(engine, llama, asked, files(tmp_path), tmp_path)
    flip(files_of(asked[0], tmp_path)[4])
    swap(*files_of(asked[1], tmp_path)[6:8])
    engine.begin(llama, files(tmp_path))
    found = engine.ask(asked)
    assert tokens(found) == expected
    assert tiers(found) == [{"storage": 4 * PAGE_TOKENS}, {"storage": 6 * PAGE_TOKENS}]


def test_kept_host_memory_serves_the_engine_after_a_killed_one(engine: TreeProcess, llama: Path) -> None:
    """HiCache verifies the pages of kept memory before their first use, and reports them as those of storage."""
    asked = prompts("kept", 3)
    name = f"test-{uuid.uuid4().hex}"
    config = {"host": {"size": "16MiB", "shared": {"name": name, "keep": True}}}
    engine.begin(llama, config)
    expected = tokens(engine.ask(asked))
    push_out(engine)  # so that all pages are on L2
    try:
        engine.begin(llama, config)  # kills the one before
        found = engine.ask(asked)
    finally:
        engine.call("end")
        for path in Path("/dev/shm").glob(f"hicache.{name}*"):
            path.unlink()
    assert (tokens(found), tiers(found)) == (expected, [FROM_L3] * 3)


def test_after_a_flush_pages_come_from_files(engine: TreeProcess, llama: Path, tmp_path: Path) -> None:
    asked = prompts("flush", 2)
    expected = cold(engine, llama, asked, files(tmp_path), tmp_path)
    engine.flush()
    found = engine.ask(asked)
    assert (tokens(found), tiers(found)) == (expected, [FROM_L3] * 2)


def test_after_a_sleep_nothing_of_l1_is_used(engine: TreeProcess, llama: Path, tmp_path: Path) -> None:
    """SGLang flushes once it has unmapped the memory, and asserts before that nothing is in flight."""
    asked = prompts("sleep", 2)
    expected = cold(engine, llama, asked, files(tmp_path), tmp_path)
    engine.flush()
    for _ in range(2):
        engine.call("sleep")
        found = engine.ask(asked)
        assert (tokens(found), tiers(found)) == (expected, [FROM_L3] * 2)
        engine.flush()  # so that nothing is in flight


def test_new_weights_never_get_kv_of_others(
    engine: TreeProcess, llama: Path, other_llama: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Neither that of the old weights, nor that of other new ones of an engine before."""
    asked = prompts("new weights", 1)
    config, third_llama = files(tmp_path), save_model(tmp_path_factory.mktemp("third-llama"), seed=2)
    expected = {}
    for model in (llama, other_llama, third_llama):
        engine.begin_without_cache(model)
        expected[model] = tokens(engine.ask(asked))
    assert cold(engine, llama, asked, config, tmp_path) == expected[llama]
    for model in (other_llama, third_llama):
        engine.begin(llama, config)
        update(engine, model)
        for _ in range(2):
            assert tokens(engine.ask(asked)) == expected[model]
            push_out(engine)
        engine.flush()
        assert tokens(engine.ask(asked)) == expected[model]


def update(engine: TreeProcess, model: Path) -> None:
    """Load other weights in place. Retry, because SGLang fails while a request is still in flight."""
    wait_for(lambda: engine.call("update_weights", model=str(model)) == "", pause_s=0.05)


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_each_write_policy_stores_pages_when_it_says(
    engine: TreeProcess, llama: Path, tmp_path: Path, policy: str
) -> None:
    asked = prompts(policy, 2)
    engine.begin(llama, {**files(tmp_path), "write_policy": policy})
    expected = tokens(engine.ask(asked))
    if policy == "write_through":
        wait_for(lambda: are_stored(asked, tmp_path))
    else:
        assert not stored(tmp_path)
    if policy == "write_through_selective":
        assert tiers(engine.ask(asked)) == [FROM_L1] * 2
        wait_for(lambda: are_stored(asked, tmp_path))
    push_out(engine)
    wait_for(lambda: are_stored(asked, tmp_path))
    found = engine.ask(asked)
    assert (tokens(found), tiers(found)) == (expected, [FROM_L2] * 2)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    storage = {"type": "file", "options": {"path": str(tmp_path / "pages"), "free_space_floor": 0}}
    with (
        tempfile.TemporaryDirectory(prefix="hc-") as short,  # the path of a Unix socket has at most 107 bytes
        Daemon(Path(short), storage=storage) as made,
    ):
        yield made


def test_a_daemon_that_hangs_dies_and_comes_back_costs_only_hits(
    engine: TreeProcess, llama: Path, daemon: Daemon, tmp_path: Path
) -> None:
    """Also of an engine that starts without it, and of requests that are aborted while they wait for it."""
    asked = prompts("faults", 2)
    storage = {"type": "remote", "options": {"socket": str(daemon.socket), "timeout": "500ms"}}
    prefetch = {"policy": "timeout", "threshold_tokens": 64}
    config = {"storage": storage, "prefetch": prefetch, "transfer": {"storage_deadline": "1s"}}
    expected = cold(engine, llama, asked, config, tmp_path)

    def again() -> list[dict[str, int]]:
        engine.flush()
        found = engine.ask(asked)
        assert tokens(found) == expected
        return tiers(found)

    wait_for(lambda: again() == [FROM_L3] * 2)
    daemon.pause()
    assert again() == [{}] * 2
    daemon.signal(signal.SIGCONT)
    wait_for(lambda: again() == [FROM_L3] * 2)
    daemon.kill()
    assert again() == [{}] * 2
    engine.begin(llama, config)
    assert again() == [{}] * 2
    daemon.start()
    wait_for(lambda: again() == [FROM_L3] * 2)
    daemon.pause()
    engine.flush()
    waiting = [{"prompt": each, "rid": f"waits-{number}", "abort_after_s": 0.1} for number, each in enumerate(asked)]
    assert [answer["end"] for answer in engine.ask_together(waiting)] == ["abort"] * 2
    assert again() == [{}] * 2


def test_retained_pages_stay_while_others_pass(engine: TreeProcess, llama: Path) -> None:
    """Host memory has room for ten prompts. Without the hint, it keeps ten of the others."""
    engine.begin_without_cache(llama)
    asked = prompts("retained", 2)
    expected = tokens(engine.ask(asked))
    engine.begin(llama, {"host": {"tokens": 10 * CACHED}})
    action = {"action_id": "1", "action_type": "kv.retain", "action_version": "1.0", "payload": {"ttl_s": 300}}
    hints = {"protocol_version": "0.1", "message_id": "", "actions": [action]}
    found = []
    for turn, kv_hints in zip(asked, (None, hints), strict=True):
        engine.ask([turn], kv_hints=kv_hints)
        for other in prompts(f"others of {turn[0]}", 14):
            engine.ask_together([{"prompt": other}], tokens=1)
        found += engine.ask([turn])
    assert tiers(found) == [{}, FROM_L2]
    assert tokens(found) == expected


def test_processes_that_sglang_spawns_have_the_tree(llama: Path, tmp_path: Path) -> None:
    """The other engines fork their processes, which inherit what the first one has imported."""
    asked = prompts("spawned", 1)
    config = write_config(tmp_path / "tree.yaml", page_size=PAGE_TOKENS, **files(tmp_path / "pages"))
    options, environ = tree_options(llama, sleep_on_idle=True), tree_environ(config, **{SPAWNS: "1"})
    with EngineProcess("tests.engines.sglang_engine", options, folder=tmp_path, environ=environ) as engine:
        expected = engine.call("together", requests=[{"prompt": asked[0]}])
        found = engine.call("together", requests=[{"prompt": asked[0]}])
    assert (tokens(found), tiers(found)) == (tokens(expected), [FROM_L1])


def test_operators_find_pin_and_warm_a_prompt_and_read_the_prefill_speed(
    engine: TreeProcess, llama: Path, tmp_path: Path
) -> None:
    asked, store = prompts("operators", 8), tmp_path / "pages"
    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps(asked[0]))
    with tempfile.TemporaryDirectory(prefix="hc-") as private, held_ports(1) as port:
        socket = Path(private) / "engine.sock"

        def ctl(*words: str) -> str:
            command = [sys.executable, "-m", "hicache", "ctl", "--socket", str(socket), *words]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        def metric(name: str) -> float:
            with urllib.request.urlopen(f"http://{LOOPBACK}:{port}/metrics", timeout=60) as answer:
                lines = answer.read().decode().splitlines()
            return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

        config = {"admin": {"socket": str(socket)}, "metrics": {"port": port}, **files(store)}
        engine.begin(llama, config, max_total_tokens=4096)
        engine.ask(asked)
        wait_for(lambda: are_stored(asked, store))
        assert metric("hicache_break_even_prefill_tokens_per_second") > 0
        found = ctl("lookup", "--tokens", str(prompt))
        assert found.count("device, file") == CACHED // PAGE_TOKENS
        assert ctl("hint", "kv.retain", "--tokens", str(prompt)) == "kv.retain: accepted: 18 pages, 1m\n"
        ctl("pin", "--tokens", str(prompt), "--ttl", "1h")
        assert metric("hicache_pinned_bytes") > 0
        engine.flush()
        ctl("warm", "--tokens", str(prompt))
        assert tiers(engine.ask(asked[:1])) == [{"host": CACHED}]
        assert metric('hicache_hit_tokens_total{tier="host"}') == CACHED


def test_prompt_tokens_add_up_to_those_of_sglang_by_source_and_reason(
    engine: TreeProcess, llama: Path, tmp_path: Path
) -> None:
    (asked,) = prompts("accounts", 1)
    with held_ports(1) as port:

        def account(asked: list[int]) -> dict[str, int]:
            with counting(port, len(asked)) as counted:
                (answer,) = engine.ask([asked])
            assert cached(counted) == answer["cached"]
            return dict(counted)

        engine.begin(llama, {"metrics": {"port": port}, **files(tmp_path)}, chunked_prefill_size=128)
        tail = len(asked) - CACHED
        assert account(asked) == {"new": CACHED, "tail": tail}
        assert account(asked) == {"device": CACHED, "tail": tail}
        assert account([*asked[:100], 7, *asked[101:]]) == {"device": 96, "new": CACHED - 96, "tail": tail}
        assert account([7, *asked[1:]]) == {"new": CACHED, "tail": tail}  # a date at the begin of a system prompt
        assert account(asked[:10]) == {"tail": 10}
        push_out(engine)
        assert account(asked) == {"host": CACHED, "tail": tail}
        wait_for(lambda: are_stored([asked], tmp_path))
        engine.flush()
        assert account(asked) == {"storage": CACHED, "tail": tail}
        for path in files_of(asked, tmp_path):
            path.unlink()
        engine.flush()
        assert account(asked) == {"evicted cleared": CACHED, "tail": tail}


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"enable_hierarchical_cache": False}, "without it SGLang does not load from host memory; set it"),
        ({"hicache_storage_backend_extra_config": '{"confg": "x"}'}, "'confg' is not an option of HiCache"),
    ],
)
def test_a_setting_that_the_tree_cannot_have_is_refused_with_what_to_do(
    flags: dict[str, Any], line: str, llama: Path, tmp_path: Path
) -> None:
    with TreeProcess(tmp_path) as process, pytest.raises(EngineFailed, match=line):
        process.begin(llama, files(tmp_path / "pages"), **flags)
