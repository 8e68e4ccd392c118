"""`/v1`: verbs on frames of shared memory and on page bodies, and rejected requests."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hicache.frame import HEADER_BYTES
from hicache.shared_memory import Layout, Role, SharedMemory
from hicache_lab.faults import spoiled
from tests.daemon.daemons import (
    CODEC,
    FRAME_BYTES,
    NAMESPACE,
    PAYLOAD_BYTES,
    Client,
    Daemon,
    EngineMemory,
    keys_of,
    payload_of,
    read,
    sealed_page,
    write,
    write_body,
)
from tests.waiting import wait_for

SLOW = spoiled({"type": "memory"}, latency="400ms")


def _pages(content: bytes, count: int) -> tuple[bytes, list[memoryview]]:
    frames = memoryview(content)[count:]
    return content[:count], [frames[at : at + FRAME_BYTES] for at in range(0, len(frames), FRAME_BYTES)]


def test_pages_move_between_the_store_and_frames_of_an_engine(client: Client, memory: EngineMemory) -> None:
    keys = keys_of(4, "frames")
    assert memory.attach(client)[0] == 200
    for number, key in enumerate(keys):
        memory.frame(number)[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES] = payload_of(key)
    status, answer = client.verb("set", keys=keys, memory=memory.name, frames=[0, 1, 2, 3])
    assert (status, answer) == (200, {"outcomes": ["stored"] * 4, "errors": []})
    assert client.verb("exists", keys=[*keys, bytes(32)]) == (200, {"pages": 4, "errors": []})
    assert client.verb("has", keys=[bytes(32), keys[3]])[1]["stored"] == [False, True]
    answer = client.verb("get", keys=[*keys, bytes(32)], memory=memory.name, frames=[9, 8, 7, 6, 5])[1]
    assert answer["outcomes"] == ["hit"] * 4 + ["miss"]
    for number, key in zip((9, 8, 7, 6), keys, strict=True):
        assert CODEC.is_sealed(key, memory.frame(number))
        assert memory.frame(number)[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES] == payload_of(key)
    assert client.verb("delete", keys=keys[3:])[1]["pages"] == 1
    assert client.verb("exists", keys=keys)[1]["pages"] == 3


def test_pages_travel_as_bodies(client: Client) -> None:
    keys = keys_of(5, "bodies")
    assert write(client, keys) == (200, {"outcomes": ["stored"] * 5, "errors": []})
    assert write(client, keys)[1]["outcomes"] == ["present"] * 5
    status, content = read(client, [*keys, bytes(32)])
    outcomes, frames = _pages(content, 6)
    assert (status, outcomes) == (200, b"HHHHHM")
    for key, frame in zip(keys, frames, strict=True):
        assert CODEC.check(key, frame) is None
        assert frame[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES] == payload_of(key)


def test_a_body_in_small_pieces_is_stored_unchanged(daemon: Daemon, client: Client) -> None:
    """The event loop receives the first part of the body, a thread the rest. The cuts move the border between them."""
    keys = keys_of(3, "pieces")
    body = write_body(keys)
    target = f"/v1/namespaces/{NAMESPACE}/write?keys=3&timeout_s=30"
    head = f"POST {target} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with contextlib.closing(daemon.client()) as other:
        other.connect()
        for cut in (len(head), len(head) + 1, len(head) + 40, len(head) + 5000):
            other.sock.sendall((head + body)[:cut])
            wait_for(lambda: daemon.status()["in_flight_requests"] == 2)  # this one and `/statusz`
            for at in range(cut, len(head + body), 9001):
                other.sock.sendall((head + body)[at : at + 9001])
            answer = b""
            while b"}" not in answer:
                answer += other.sock.recv(4096)
            assert b"200 OK" in answer and b'"errors":[]' in answer
    assert client.verb("exists", keys=keys)[1]["pages"] == 3


def test_a_damaged_page_of_a_body_and_the_pages_after_it_are_not_stored(client: Client) -> None:
    keys = keys_of(3, "damaged")
    body = bytearray(write_body(keys))
    body[3 * 32 + FRAME_BYTES + HEADER_BYTES + 5] ^= 1
    assert write(client, keys, body=bytes(body)) == (
        200, {"outcomes": ["stored", "error", "error"], "errors": ["checksum"]},
    )
    assert client.verb("has", keys=keys)[1]["stored"] == [True, False, False]
    assert read(client, keys)[1][:3] == b"HMM"


def test_a_namespace_is_opened_once_and_keeps_its_size(client: Client) -> None:
    first, second = client.open(), client.open()
    assert first == second and first[1]["frame_bytes"] == FRAME_BYTES
    assert client.open(payload_bytes=PAYLOAD_BYTES + 1)[0] == 409


def test_an_unknown_namespace_memory_or_verb_is_an_error(client: Client, memory: EngineMemory) -> None:
    assert client.verb("exists", "cd" * 32, keys=keys_of(1))[0] == 404
    assert client.verb("get", keys=keys_of(1), memory=memory.name, frames=[0])[0] == 404
    assert client.call("GET", f"/v1/namespaces/{NAMESPACE}/nothing")[0] in (404, 405)


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"frames": [32]}, 422),
        ({"frames": [-1]}, 422),
        ({"frames": [1 << 60]}, 422),
        ({"frames": []}, 422),
        ({"frames": [0, 1]}, 422),
        ({"keys": keys_of(2), "frames": [3, 3]}, 422),
        ({"frames": [True]}, 422),
        ({"frames": [0], "timeout_s": 0}, 422),
        ({"frames": [0], "timeout_s": "nan"}, 422),
        ({"frames": [0], "more": 1}, 422),
        ({"frames": [0], "mapping": "0" * 32}, 404),
        ({"frames": [0], "memory": "../shm"}, 422),
    ],
)
def test_a_call_with_invalid_frames_or_fields_is_rejected(
    client: Client, memory: EngineMemory, fields: dict[str, Any], status: int
) -> None:
    memory.attach(client)
    found, answer = client.verb("get", **{"keys": keys_of(1), "memory": memory.name, **fields})
    assert found == status, answer
    assert set(answer) == {"error", "detail"}


@pytest.mark.parametrize("key", ["AB" * 32, "ab" * 31, "ab" * 31 + " a", "zz" * 32, 5, None])
def test_a_key_that_is_not_64_digits_in_lower_case_is_rejected_without_quoting_it(client: Client, key: Any) -> None:
    target = f"/v1/namespaces/{NAMESPACE}/exists"
    status, answer = client.call("POST", target, {"keys": ["ab" * 32, key], "timeout_s": 1})
    assert status == 422
    assert "ab" * 31 not in str(answer)


def test_a_page_that_is_its_own_parent_is_rejected_without_naming_its_key(client: Client) -> None:
    key = keys_of(1, "loop")[0]
    target = f"/v1/namespaces/{NAMESPACE}/write?keys=1&timeout_s=5&parent={key.hex()}"
    status, answer = client.call("POST", target, key + sealed_page(key))
    assert status == 422 and key.hex() not in str(answer)


def test_a_connection_stays_usable_after_a_rejected_body(client: Client) -> None:
    keys = keys_of(3, "again")
    target = f"/v1/namespaces/{'cd' * 32}/write?keys=3&timeout_s=5"
    sock = client.sock
    assert client.call("POST", target, write_body(keys))[0] == 404
    assert client.call("POST", f"/v1/namespaces/{NAMESPACE}/write?keys=2&timeout_s=5", write_body(keys))[0] == 422
    assert write(client, keys)[1]["outcomes"] == ["stored"] * 3
    assert client.sock is sock


def test_more_pages_than_fit_into_the_staging_memory_are_rejected(client: Client) -> None:
    pages_max = client.open()[1]["body_pages_max"]
    keys = keys_of(pages_max + 1, "many")
    assert read(client, keys)[0] == 413
    assert write(client, keys)[0] == 413
    assert read(client, keys[:pages_max])[1] == b"M" * pages_max


def test_memory_that_does_not_match_its_description_is_rejected(client: Client, memory: EngineMemory) -> None:
    assert memory.attach(client, pages=31)[0] == 409
    assert memory.attach(client, inode=1)[0] == 409
    assert memory.attach(client, frame_bytes=FRAME_BYTES + 1)[0] == 422
    assert memory.attach(client, device=None)[0] == 422
    assert client.call("PUT", "/v1/memory/no-such-memory", {
        "frame_bytes": FRAME_BYTES, "pages": 1, "device": 1, "inode": 1,
    })[0] == 409


def test_memory_with_frames_of_another_size_is_rejected(client: Client) -> None:
    other = EngineMemory(2, FRAME_BYTES + 4096)
    try:
        assert other.attach(client)[0] == 200
        assert client.verb("get", keys=keys_of(1), memory=other.name, frames=[0])[0] == 409
    finally:
        other.close()


def test_a_call_for_a_mapping_that_was_replaced_is_rejected(client: Client, memory: EngineMemory) -> None:
    """The control: the same call with the new mapping, or with none, is served."""
    first = memory.attach(client)[1]["mapping"]
    assert memory.attach(client)[1]["mapping"] == first  # nothing has changed
    assert client.call("DELETE", f"/v1/memory/{memory.name}")[0] == 200
    second = memory.attach(client)[1]["mapping"]
    for mapping, status in ((first, 404), (second, 200), (None, 200)):
        fields: dict[str, Any] = {
            "keys": keys_of(1), "memory": memory.name, "frames": [0], "mapping": mapping,
        }
        assert client.verb("get", **fields)[0] == status


def test_memory_is_unmapped_only_after_the_operations_on_it_have_ended(
    start: Callable[..., Daemon], memory: EngineMemory
) -> None:
    daemon = start({"pool": 0}, storage=SLOW)
    fields: dict[str, Any] = {"keys": keys_of(1), "memory": memory.name}
    with contextlib.closing(daemon.client()) as client, contextlib.closing(daemon.client()) as other:
        client.open()
        memory.attach(client)
        with ThreadPoolExecutor(1) as thread:
            reading = thread.submit(client.verb, "get", **fields, frames=[0])
            wait_for(lambda: bool(daemon.status()["clients"][0]["operations"]))
            target = f"/v1/memory/{memory.name}"
            assert other.call("DELETE", f"{target}?timeout_s=0.001")[0] == 503  # it waits at most `timeout_s`
            assert other.verb("get", **fields, frames=[1])[0] == 404
            assert other.call("DELETE", target)[0] == 200
            assert reading.result()[0] == 200
        assert daemon.status()["clients"] == []


def test_the_daemon_creates_memory_on_request_of_an_engine(client: Client) -> None:
    name = f"daemons-{os.getpid()}"
    fields = {"frame_bytes": FRAME_BYTES, "pages": 2, "shape": "11" * 32}
    assert client.call("PUT", f"/v1/memory/{name}", fields)[0] == 200
    layout = Layout(0, 2, FRAME_BYTES, b"\x11" * 32)
    memory = SharedMemory.open(name, layout, deadline=time.monotonic() + 30, role=Role.GUEST)
    memory.frames[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES] = payload_of(keys_of(1, name)[0])
    assert client.verb("set", keys=keys_of(1, name), memory=name, frames=[0])[1]["outcomes"] == ["stored"]
    memory.close()
    assert client.call("DELETE", f"/v1/memory/{name}")[0] == 200
    assert not memory.path.exists()


def test_each_verb_is_counted_under_its_name_and_status(daemon: Daemon, client: Client) -> None:
    client.verb("exists", "ef" * 32, keys=[])
    assert client.verb("clear")[0] == 200
    usage = client.call("GET", f"/v1/namespaces/{NAMESPACE}/usage")
    assert usage[0] == 200 and usage[1]["pages"] == 0
    status = daemon.status()
    assert status["requests"]["exists"]["404"] >= 1
    assert status["requests"]["clear"] == {"200": 1}
    assert sum(status["latency"]["usage"]["counts"]) == status["requests"]["usage"]["200"]
    assert status["namespaces"][0]["label"] == "tests" and status["namespaces"][0]["weights_epoch"] == 3


def test_a_label_is_shown_without_its_path_and_the_first_one_stays(daemon: Daemon, client: Client) -> None:
    for label in ("/srv/tenant-a/llama", "another name"):
        assert client.call("PUT", f"/v1/namespaces/{'1a' * 32}", {"payload_bytes": 3000, "label": label})[0] == 200
        assert [one["label"] for one in daemon.status()["namespaces"] if one["namespace"] == "1a" * 32] == ["llama"]


FAILING = spoiled({"type": "memory"}, error_share=1)


def test_a_failing_level_beside_a_working_one_costs_misses_only(
    start: Callable[..., Daemon],
) -> None:
    """Otherwise the guards of all engines would bypass the daemon, and so also the store that works."""
    levels = [{"name": "near", "type": "memory"}, {"name": "far", **FAILING}]
    daemon = start({"pool": 0}, storage={"type": "levels", "options": {"levels": levels}})
    stored, missing = keys_of(1), keys_of(1, "missing")
    with contextlib.closing(daemon.client()) as client:
        assert client.open()[0] == 200
        write(client, stored)
        for _ in range(20):  # before and after the breaker of the far store has opened
            assert _pages(read(client, [*stored, *missing])[1], 2)[0] == b"HM"
            assert client.verb("has", keys=[*stored, *missing])[1] == {"stored": [True, False], "errors": []}


def test_the_failure_of_the_only_store_is_reported_as_an_error(start: Callable[..., Daemon]) -> None:
    daemon = start({"pool": 0}, storage=FAILING)
    with contextlib.closing(daemon.client()) as client:
        assert client.open()[0] == 200
        assert _pages(read(client, keys_of(1))[1], 1)[0] == b"E"
        assert client.verb("has", keys=keys_of(1))[1]["errors"]


def test_a_short_and_plain_request_id_of_a_client_is_used(daemon: Daemon) -> None:
    def name_of(sent: str | None) -> str:
        with contextlib.closing(daemon.client()) as client:
            client.request("GET", "/readyz", headers={} if sent is None else {"x-request-id": sent})
            return str(client.getresponse().getheader("x-request-id"))

    assert name_of("step-7_of.vllm") == "step-7_of.vllm"
    made = [name_of(sent) for sent in (None, "a" * 49, "a b", "", "x]\tWARNING", keys_of(1)[0].hex())]
    assert len(set(made)) == len(made)
    assert all(one.startswith(daemon.status()["instance"][:6] + "-") for one in made)
