"""vLLM on HiCache with a file store. Three engines share the files: one in a single process, vLLM's HTTP server, and
one with two tensor-parallel workers. The server loads layer by layer, the others asynchronously.

Each test has its own prompts and takes its reference from a cold run. `test_zeroed_frames_change_the_tokens` is the
control: it shows that the engine reads the loaded KV.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families

from hicache.frame import NO_PARENT, FrameHeader
from hicache_lab.devservers.ports import LOOPBACK
from tests.admin.ctl import Ctl
from tests.listening import held_ports
from tests.waiting import wait_for

from .accounts import cached, counting
from .process import EngineProcess
from .prompts import prompt, prompts, write_config
from .server import EngineServer
from .vllm_engine import HOOKS, hicache_connector, vllm_environ, vllm_options

# The cached tokens of a prompt of 300: in blocks of 32 on the device, and in pages of 64 on the other tiers.
ON_DEVICE, IN_PAGES = 288, 256
PAGES = IN_PAGES // 64
# Room for 16 pages, so that a few prompts evict earlier pages.
HOST = {"tokens": 1024}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store") / "pages"


@pytest.fixture(scope="module")
def config(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = {"path": str(store), "capacity": "1GiB", "free_space_floor": 0}
    path = tmp_path_factory.mktemp("config") / "hicache.yaml"
    return write_config(path, host=HOST, storage={"type": "file", "options": options})


def start(model: Path, config: Path, folder: Path, metrics_port: int = 0, **options: object) -> EngineProcess:
    kv = hicache_connector(config)
    options = vllm_options(model, kv_transfer_config=kv, worker_extension_cls=HOOKS, **options)
    environ = vllm_environ(processes=False, HICACHE_ADMIN__SOCKET=str(folder / "admin" / "engine.sock"))
    if metrics_port:
        environ["HICACHE_METRICS__PORT"] = str(metrics_port)
    return EngineProcess("tests.engines.vllm_engine", options, folder=folder, environ=environ)


@pytest.fixture(scope="module")
def vllm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def ports() -> Iterator[tuple[int, int]]:
    """Of the metrics of HiCache in `vllm` and in `server`."""
    with held_ports(2) as first:
        yield first, first + 1


@pytest.fixture(scope="module")
def vllm(llama: Path, config: Path, vllm_folder: Path, ports: tuple[int, int]) -> Iterator[EngineProcess]:
    with start(llama, config, vllm_folder, ports[0]) as engine:
        yield engine


@pytest.fixture(scope="module")
def workers(llama: Path, config: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with start(llama, config, tmp_path_factory.mktemp("workers"), tensor_parallel_size=2) as engine:
        yield engine


@pytest.fixture(scope="module")
def subscriber() -> Iterator[zmq.Socket[bytes]]:
    """A socket to which the server's publisher connects, as vLLM does to an address without a "*". It holds its port
    from before the server starts, and receives nothing until it subscribes."""
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.bind_to_random_port(f"tcp://{LOOPBACK}")
        yield socket


@pytest.fixture(scope="module")
def server(
    llama: Path, config: Path, subscriber: zmq.Socket[bytes], ports: tuple[int, int],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[EngineServer]:
    endpoint = subscriber.getsockopt_string(zmq.LAST_ENDPOINT)
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--served-model-name", "small"]
    for name, value in vllm_options(llama).items():
        if name != "disable_log_stats":
            flag = "--" + name.replace("_", "-")
            command += [flag] if value is True else [flag, str(value)]
    command += ["--kv-transfer-config", json.dumps(hicache_connector(config, load="layerwise"))]
    command += ["--kv-events-config", json.dumps(events), "--enable-prompt-tokens-details"]
    environ = vllm_environ(HICACHE_METRICS__PORT=str(ports[1]))
    with EngineServer(command, folder=tmp_path_factory.mktemp("server"), environ=environ) as server:
        yield server


def pages_in(store: Path) -> set[Path]:
    """Return the files of pages."""
    return {path for path in store.glob("*/*/*") if re.fullmatch("[0-9a-f]{64}", path.name)}


def generate(vllm: EngineProcess, *asked: list[int], salt: str | None = None) -> tuple[list[list[int]], list[int]]:
    """Return the output tokens of each prompt, and how many of its tokens were cached."""
    found = vllm.call("generate", prompts=list(asked), salt=salt)
    return [each["tokens"] for each in found], [each["cached"] for each in found]


def complete(server: EngineServer, asked: list[int], **fields: object) -> tuple[list[int], int]:
    """Return the same from the HTTP server, for one prompt."""
    body = {"model": "small", "prompt": asked, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}
    answer = server.post("/v1/completions", **body, return_token_ids=True)
    assert answer["usage"]["prompt_tokens"] == len(asked)
    details = answer["usage"]["prompt_tokens_details"] or {}
    return answer["choices"][0]["token_ids"], details.get("cached_tokens", 0)


def stored(vllm: EngineProcess, store: Path, asked: list[int]) -> tuple[list[int], set[Path]]:
    """Compute a new prompt and wait until it is stored. Return the output tokens and the files of its pages."""
    before = pages_in(store)
    ((tokens,), cached) = generate(vllm, asked)
    assert cached == [0]
    wait_for(lambda: len(pages_in(store) - before) == PAGES)
    return tokens, pages_in(store) - before


def in_order(pages: set[Path]) -> list[str]:
    """Return the keys of a chain, root first."""
    below = {header.parent_key: header.page_key for page in pages if (header := FrameHeader.parse(page.read_bytes()))}
    keys = [NO_PARENT]
    while keys[-1] in below:
        keys.append(below[keys[-1]])
    return [key.hex() for key in keys[1:]]


def on_host_only(vllm: EngineProcess) -> None:
    wait_for(lambda: bool(vllm.call("reset")))


def in_storage_only(vllm: EngineProcess, name: str) -> None:
    """Evict earlier prompts from host memory by other prompts, and reset the device."""
    generate(vllm, *prompts(f"filler of {name}", 5))
    on_host_only(vllm)


def test_tokens_are_equal_cold_and_from_device_host_and_files(vllm: EngineProcess, store: Path) -> None:
    asked = prompt("equal")
    cold, _ = stored(vllm, store, asked)
    assert generate(vllm, asked) == ([cold], [ON_DEVICE])
    on_host_only(vllm)
    assert generate(vllm, asked) == ([cold], [IN_PAGES])
    in_storage_only(vllm, "equal")
    from_files = vllm.call("metrics").get("vllm:prompt_tokens_cached_by_source disk", 0)
    assert generate(vllm, asked) == ([cold], [IN_PAGES])
    assert vllm.call("metrics")["vllm:prompt_tokens_cached_by_source disk"] == from_files + IN_PAGES


def test_after_a_warm_up_the_first_request_hits_host_memory(
    vllm: EngineProcess, store: Path, vllm_folder: Path
) -> None:
    ctl, asked = Ctl(("--socket", str(vllm_folder / "admin" / "engine.sock"))), prompt("warm-up")
    cold, pages = stored(vllm, store, asked)
    on_host_only(vllm)
    ctl.quick("clear", "--pool", "--yes")
    warmed = ctl.quick("--json", "warm", *in_order(pages)).json["progress"]  # the engine is idle
    assert (warmed["pages"], warmed["total"], warmed["skipped"]) == (PAGES, PAGES, [])
    from_files = vllm.call("metrics").get("vllm:prompt_tokens_cached_by_source disk", 0)
    assert generate(vllm, asked) == ([cold], [IN_PAGES])
    assert vllm.call("metrics").get("vllm:prompt_tokens_cached_by_source disk", 0) == from_files


def test_hints_of_the_python_api_name_the_session_that_later_hints_find(
    vllm: EngineProcess, vllm_folder: Path
) -> None:
    """test_vllm_hints.py has those of the HTTP server."""

    def hint(action: str, session: str, code: int = 0) -> tuple[str, int]:
        (outcome,) = ctl.quick("--json", "hint", action, "--session", session, code=code).json
        return outcome["status"], outcome["pages"]

    def from_files() -> float:
        return float(vllm.call("metrics").get("vllm:prompt_tokens_cached_by_source disk", 0))

    ctl, read = Ctl(("--socket", str(vllm_folder / "admin" / "engine.sock"))), from_files()
    turn: dict[str, Any] = {"prompts": [prompt("hinted")], "hints": {"session.turn": {"session_id": "an agent"}}}
    (cold,) = vllm.call("generate", **turn)
    assert hint("kv.pin", "an agent") == ("accepted", PAGES)
    in_storage_only(vllm, "hinted")
    assert vllm.call("generate", **turn) == [{**cold, "cached": IN_PAGES}] and from_files() == read
    assert hint("kv.release", "an agent") == ("accepted", PAGES)
    assert hint("kv.release", "unknown", code=1) == ("missing", 0)


def test_zeroed_frames_change_the_tokens(vllm: EngineProcess, store: Path) -> None:
    asked = prompt("zeroed")
    cold, _ = stored(vllm, store, asked)
    on_host_only(vllm)
    assert vllm.call("workers", method="hicache_zero_frames") != [0]
    tokens, cached = generate(vllm, asked)
    assert cached == [IN_PAGES] and tokens != [cold]


def test_equal_prompts_at_once_are_loaded_once(vllm: EngineProcess, store: Path) -> None:
    asked = prompt("at once")
    cold, _ = stored(vllm, store, asked)
    on_host_only(vllm)
    loaded = vllm.call("metrics")["vllm:hicache_loaded_pages"]
    tokens, cached = generate(vllm, asked, asked, asked)
    assert tokens == [cold] * 3 and min(cached) >= IN_PAGES
    assert vllm.call("metrics")["vllm:hicache_loaded_pages"] == loaded + PAGES


def test_prompts_with_different_salts_do_not_share_pages(vllm: EngineProcess, store: Path) -> None:
    asked = prompt("salt")
    cold, _ = stored(vllm, store, asked)
    on_host_only(vllm)
    assert generate(vllm, asked, salt="another tenant") == ([cold], [0])


def test_a_server_reads_pages_stored_by_another_engine(vllm: EngineProcess, server: EngineServer, store: Path) -> None:
    asked = prompt("from the first")
    cold, _ = stored(vllm, store, asked)
    assert complete(server, asked) == (cold, IN_PAGES)
    assert complete(server, asked) == (cold, ON_DEVICE)


def test_an_engine_reads_pages_stored_by_a_server(vllm: EngineProcess, server: EngineServer, store: Path) -> None:
    asked, before = prompt("from the server"), pages_in(store)
    cold, cached = complete(server, asked)
    assert cached == 0
    wait_for(lambda: len(pages_in(store) - before) == PAGES)
    assert generate(vllm, asked) == ([cold], [IN_PAGES])


@pytest.mark.parametrize("damaged", [1, PAGES])
def test_damaged_files_are_misses(vllm: EngineProcess, server: EngineServer, store: Path, damaged: int) -> None:
    """`test_a_server_reads_pages_stored_by_another_engine` is the control."""
    asked = prompt(f"damaged {damaged}")
    cold, files = stored(vllm, store, asked)
    for path in sorted(files)[:damaged]:
        content = bytearray(path.read_bytes())
        content[-5000] ^= 1
        path.write_bytes(content)
    tokens, cached = complete(server, asked)
    assert tokens == cold and cached <= (PAGES - damaged) * 64


def test_the_metrics_of_a_server_count_loads_of_hicache(vllm: EngineProcess, server: EngineServer, store: Path) -> None:
    asked = prompt("counted")
    stored(vllm, store, asked)
    before = counters(server)
    complete(server, asked)
    after = counters(server)
    assert after["vllm:hicache_loaded_pages_total"] - before["vllm:hicache_loaded_pages_total"] == PAGES
    assert after["vllm:hicache_loaded_bytes_total"] > before["vllm:hicache_loaded_bytes_total"]
    assert after["vllm:hicache_loaded_seconds_total"] > before["vllm:hicache_loaded_seconds_total"]
    hits = "vllm:external_prefix_cache_hits_total"
    assert after[hits] - before[hits] == IN_PAGES


def test_prompt_tokens_add_up_to_those_of_vllm_by_source_and_reason(
    vllm: EngineProcess, store: Path, ports: tuple[int, int]
) -> None:
    asked = prompt("accounts")

    def account(turn: list[int], *others: list[int]) -> dict[str, int]:
        """Serve prompts. vLLM counts as many tokens, and as many cached ones."""
        sent, before = [turn, *others], vllm.call("metrics")
        with counting(ports[0], sum(map(len, sent))) as counted:
            _, from_cache = generate(vllm, *sent)
        after = vllm.call("metrics")
        vllm_counted = [after[name] - before[name] for name in ("vllm:prompt_tokens", "vllm:prompt_tokens_cached")]
        assert cached(counted) == sum(from_cache)
        assert [counted.total(), cached(counted)] == vllm_counted
        return dict(counted)

    tail = len(asked) - IN_PAGES
    with counting(ports[0], len(asked)) as counted:
        _, files = stored(vllm, store, asked)
    assert counted == {"new": IN_PAGES, "tail": tail}
    assert account(asked) == {"device": ON_DEVICE, "tail": len(asked) - ON_DEVICE}
    on_host_only(vllm)
    assert account(asked) == {"host": IN_PAGES, "tail": tail}
    assert account([*asked[:100], 7, *asked[101:]]) == {"device": 96, "new": IN_PAGES - 96, "tail": tail}
    assert account([7, *asked[1:]]) == {"new": IN_PAGES, "tail": tail}  # a date at the begin of a system prompt
    assert account(asked[:20]) == {"tail": 20}
    assert account(*prompts("accounts at once", 3))["new"] == 3 * IN_PAGES
    in_storage_only(vllm, "accounts")
    assert account(asked) == {"storage": IN_PAGES, "tail": tail}
    for path in files:
        path.unlink()
    in_storage_only(vllm, "accounts again")
    assert account(asked) == {"evicted storage": IN_PAGES, "tail": tail}


def test_prompt_tokens_add_up_to_the_usage_of_a_server(
    vllm: EngineProcess, server: EngineServer, store: Path, ports: tuple[int, int]
) -> None:
    asked = prompt("accounts of a server")
    stored(vllm, store, asked)

    def account(asked: list[int], **fields: object) -> dict[str, int]:
        with counting(ports[1], len(asked)) as counted:
            _, from_cache = complete(server, asked, **fields)
        assert cached(counted) == from_cache
        return dict(counted)

    tail = len(asked) - IN_PAGES
    assert account(asked) == {"storage": IN_PAGES, "tail": tail}
    assert account(asked, max_tokens=1) == {"device": ON_DEVICE, "tail": len(asked) - ON_DEVICE}
    assert account(asked, prompt_logprobs=1) == {"unshared": IN_PAGES, "tail": tail}
    assert account(asked, cache_salt="another tenant") == {"new": IN_PAGES, "tail": tail}
    assert account([7, *asked[1:]], max_tokens=1) == {"new": IN_PAGES, "tail": tail}


def test_subscribers_get_events_of_pages_on_the_host_and_in_files(
    server: EngineServer, subscriber: zmq.Socket[bytes]
) -> None:
    found: set[str] = set()
    subscriber.subscribe(b"")
    numbers = itertools.count()

    def receive() -> None:
        """Send a new prompt and read events. Events from before the subscription are lost."""
        complete(server, prompt(f"events {next(numbers)}"))
        while subscriber.poll(0):
            _, _, payload = subscriber.recv_multipart()
            _, events, *_ = msgspec.msgpack.decode(payload)
            found.update(event["medium"] for event in events if event["type"] == "BlockStored")

    wait_for(lambda: {"GPU", "CPU", "STORAGE"} <= found, receive, pause_s=0.05)


def test_engines_with_different_page_layouts_do_not_share_pages(
    vllm: EngineProcess, workers: EngineProcess, store: Path
) -> None:
    """A page of two workers has the same key and size, but another order of bytes."""
    asked = prompt("order")
    cold, _ = stored(vllm, store, asked)
    assert stored(workers, store, asked)[0] == cold


def test_two_workers_give_equal_tokens_cold_and_from_host_and_files(workers: EngineProcess, store: Path) -> None:
    asked = prompt("workers")
    cold, _ = stored(workers, store, asked)
    on_host_only(workers)
    assert generate(workers, asked) == ([cold], [IN_PAGES])
    in_storage_only(workers, "workers")
    assert generate(workers, asked) == ([cold], [IN_PAGES])


def test_zeroed_frames_of_one_worker_change_the_tokens(workers: EngineProcess, store: Path) -> None:
    asked = prompt("zeroed on one")
    cold, _ = stored(workers, store, asked)
    on_host_only(workers)
    workers.call("workers", method="hicache_zero_frames", rank=1)
    tokens, cached = generate(workers, asked)
    assert cached == [IN_PAGES] and tokens != [cold]


def test_a_load_that_fails_on_one_worker_is_computed(workers: EngineProcess, store: Path) -> None:
    asked = prompt("failing on one")
    cold, _ = stored(workers, store, asked)
    on_host_only(workers)
    workers.call("workers", method="hicache_fail_loads", count=1, rank=1)
    assert generate(workers, asked) == ([cold], [0])
    on_host_only(workers)
    assert generate(workers, asked) == ([cold], [IN_PAGES])


def test_older_pages_are_not_used_after_a_reset_of_the_connector(vllm: EngineProcess, store: Path) -> None:
    """Must be one of the last two tests: afterwards the engines do not share pages."""
    asked = prompt("reset")
    cold, files = stored(vllm, store, asked)
    wait_for(lambda: bool(vllm.call("reset", connector=True)))
    assert generate(vllm, asked) == ([cold], [0])
    wait_for(lambda: all(path.exists() for path in files))
    on_host_only(vllm)
    assert generate(vllm, asked) == ([cold], [IN_PAGES])


def test_a_reset_that_fails_because_a_save_holds_blocks_succeeds_after_a_step(vllm: EngineProcess) -> None:
    """In one process a save ends only in a step, so waiting does not help: see docs/engines.md."""
    names = vllm.call("add", prompts=[prompt("held", 64)], tokens=1)
    vllm.call("run", names=names, steps_max=1)  # the save has begun
    if not vllm.call("reset", connector=True):
        assert not vllm.call("reset", connector=True)
    vllm.call("run", names=[])  # steps until the save has ended
    assert vllm.call("reset", connector=True)


def counters(server: EngineServer) -> dict[str, float]:
    """Return the samples of /metrics, summed by name."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(server.get("/metrics")):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values
