"""Why tokens are computed: `/v1/explain` of an engine and of a daemon, `hicache ctl explain` and `advise`."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

import pytest
from pydantic import BaseModel

from hicache.admin import serve_configured
from hicache.admin.advice import ADVICE, advise
from hicache.admin.models import ACCOUNTS_MAX, Account, Cause, Explanation
from hicache.backends.base import Direction, SetOutcome
from hicache.cache import create_host_cache
from hicache.cache.explain import RECENT_MAX
from hicache.config import HiCacheConfig
from hicache.config.schema import AdminConfig
from hicache.config.storage import FileStorageOptions
from hicache.ghosts import KINDS, Reason
from hicache.keys import RadixKey
from tests.admin.ctl import Ctl
from tests.admin.running import IDS, KEYS, PROMPT, RunningEngine, ask, file_config
from tests.cache.test_prefetch import RejectingBackend
from tests.cache.test_prefetch_waits import known_rates
from tests.cache.world import (
    NAMESPACE,
    AutoClosed,
    GatedBackend,
    ShiftedClock,
    World,
    codec,
    every_hit,
    filled,
    prefetch,
    prompt,
)
from tests.daemon.daemons import Daemon
from tests.daemon.traffic import BusyDaemon
from tests.waiting import wait_for

TAIL = {"reason": "tail", "detail": "", "tokens": 1}
# 24 pages of four tokens.
LONG = prompt(*range(1, 25))


@pytest.fixture(autouse=True)
def close_worlds() -> Iterator[None]:
    AutoClosed.alive.clear()
    yield
    while AutoClosed.alive:
        AutoClosed.alive[0].close()


def explained(engine: RunningEngine, query: str = "") -> Any:
    return engine.ask("GET", f"/v1/explain?{query}")


def foreseen(engine: RunningEngine, **body: Any) -> Any:
    (account,) = engine.ask("POST", "/v1/explain", body)["accounts"]
    return account


# An engine


def test_accounts_have_the_source_of_each_token_and_sum_up_in_the_total(engine: RunningEngine) -> None:
    engine.serve("a", PROMPT)
    engine.settle()
    engine.serve("b/1 2", PROMPT)
    found = explained(engine, "last=9")
    second, first = found["accounts"]
    assert (first["rid"], first["tokens"], first["device"], first["written"]) == ("a", 17, 0, 16)
    assert first["diverged_at"] == 0 and first["age_s"] is None
    assert first["computed"] == [{"reason": "new", "detail": "", "tokens": 16}, TAIL]
    assert (second["rid"], second["device"], second["written"]) == ("b/1 2", 16, 0) and second["computed"] == [TAIL]
    total = found["total"]
    assert (found["unit"], total["tokens"], total["device"]) == ("tokens", 34, 16)
    assert total["host"] == total["storage"] == 0
    assert total["computed"] == [{"reason": "new", "detail": "", "tokens": 16}, TAIL | {"tokens": 2}]
    assert 0 <= second["ago_s"] <= first["ago_s"] <= total["ago_s"] < 3600
    assert [one["rid"] for one in explained(engine, "last=1")["accounts"]] == ["b/1 2"]
    assert [one["rid"] for one in explained(engine, "rid=b%2F1+2")["accounts"]] == ["b/1 2"]
    assert explained(engine)["accounts"] == []
    refused = engine.ask("GET", "/v1/explain?rid=c-secret", code=404)
    assert refused["error"] == "unknown_request" and "c-secret" not in refused["detail"]
    assert "last" in engine.ask("GET", "/v1/explain?last=-1", code=422)["detail"]
    assert ACCOUNTS_MAX == RECENT_MAX


def test_the_total_is_that_of_the_last_hour(engine: RunningEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"s": 0.0}
    monkeypatch.setattr(engine.cache.controller, "time_s", lambda: clock["s"])
    for minute, tokens in ((0, 17), (1, 34), (59, 51), (61, 51), (200, 17)):
        clock["s"] = 60.0 * minute + 1
        engine.serve(f"r{minute}", PROMPT)
        total = explained(engine)["total"]
        assert (total["tokens"], total["ago_s"]) == (tokens, {0: 0, 1: 60, 59: 3540, 61: 3600, 200: 0}[minute])
    clock["s"] += 4000
    assert explained(engine)["total"]["tokens"] == 0


def test_what_would_happen_to_a_prompt_is_foreseen_and_not_counted(engine: RunningEngine) -> None:
    """The control: the request itself has the account that was foreseen."""
    longer = {"ids": [*IDS, 7, 7, 7, 7, 8, 8]}
    for account in (foreseen(engine, tokens=longer), foreseen(engine, tokens={"ids": [5]})):
        assert {one["reason"] for one in account["computed"]} <= {"new", "tail"}
    engine.serve("a", PROMPT)
    engine.settle()
    before = engine.call(lambda: [node.last_access for node in engine.cache.tree.nodes()])
    on_l1 = foreseen(engine, tokens=longer)
    assert (on_l1["device"], on_l1["host"], on_l1["storage"], on_l1["diverged_at"]) == (16, 0, 0, 16)
    assert [(one["reason"], one["tokens"]) for one in on_l1["computed"]] == [("new", 4), ("tail", 2)]
    whole = foreseen(engine, tokens={"ids": IDS})
    assert (whole["device"], whole["computed"]) == (12, [TAIL | {"tokens": 4}])
    engine.call(lambda: engine.cache.evict(2))
    on_l2 = foreseen(engine, tokens=longer)
    assert (on_l2["device"], on_l2["host"]) == (0, 16)
    assert engine.call(lambda: [node.last_access for node in engine.cache.tree.nodes()][-1]) in before
    engine.call(engine.cache.clear)
    stored = foreseen(engine, tokens=longer)
    assert (stored["storage"], stored["device"], stored["tokens"]) == (16, 0, 22)
    engine.ask("PUT", "/breakers", {"store": "file", "mode": "off"}, 204)
    wait_for(lambda: engine.call(lambda: not engine.cache.controller.gate.may(Direction.READ)))
    paused = [(one["reason"], one["tokens"]) for one in foreseen(engine, tokens=longer)["computed"]]
    assert paused == [("evicted", 16), ("unavailable", 4), ("tail", 2)]
    engine.ask("PUT", "/breakers", {"store": "file", "mode": "auto"}, 204)
    assert explained(engine, "last=9")["total"]["tokens"] == 17, "nothing was counted"
    engine.serve("b", RadixKey.of(longer["ids"]))
    (account,) = explained(engine, "rid=b")["accounts"]
    assert {name: account[name] for name in ("storage", "computed")} == {
        name: stored[name] for name in ("storage", "computed")
    }
    assert "page keys" in engine.ask("POST", "/v1/explain", {"keys": KEYS}, 409)["detail"]


def test_a_cache_of_page_keys_foresees_a_prompt_by_them(tmp_path: Path) -> None:
    """As under vLLM."""
    config, namespace = file_config(tmp_path), replace(NAMESPACE, key_hash="sha256")
    with (
        create_host_cache(config, namespace) as cache, ThreadPoolExecutor() as pool,
        cast(Any, serve_configured(config, cache, namespace)) as server,
    ):
        answer = pool.submit(ask, server.path, "POST", "/v1/explain", {"keys": KEYS})
        wait_for(answer.done, cache.poll)
        (account,) = answer.result()[1]["accounts"]
        assert (account["tokens"], account["computed"]) == (16, [{"reason": "new", "detail": "", "tokens": 16}])


def test_request_ids_are_not_logged(
    engine: RunningEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if another uvicorn of the engine's process logs its requests."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(logging.getLogger("uvicorn.access"), "propagate", True)
    engine.serve("r-secret", PROMPT)
    explained(engine, "rid=r-secret")
    foreseen(engine, tokens={"ids": IDS, "cache_salt": "tenant-7"})
    lines = [(one.levelno, one.getMessage()) for one in caplog.records if "explain" in one.getMessage()]
    assert lines == [(logging.DEBUG, f"admin: uid {os.geteuid()}: {how} '/v1/explain': ok") for how in ("GET", "POST")]
    assert "secret" not in caplog.text and "tenant-7" not in caplog.text


def test_ctl_explains_a_request_the_last_ones_and_a_prompt(engine: RunningEngine, tmp_path: Path) -> None:
    ctl = Ctl(("--socket", str(engine.config.admin.socket)))
    assert ctl.quick("explain", "--last", "3").out == "no requests\n"
    assert ctl.quick("advise").out == "nothing but the ends of prompts was computed in the last hour\n"
    engine.serve("chat/1 \x1b[2J", PROMPT)
    engine.settle()
    engine.serve("chat-2", prompt(1, 2, 3, 5))
    lines = ctl("explain", "--last", "5").out.splitlines()
    assert lines[0].split() == ["REQUEST", "AGO", "TOKENS", "L1", "L2", "STORAGE", "COMPUTED"]
    assert lines[1].split()[:1] + lines[1].split()[2:] == ["chat-2", "17", "12", "0", "0", "new", "4;", "tail", "1"]
    assert lines[2].startswith("chat/1 \\x1b[2J ") and len(lines) == 3
    one = ctl.quick("explain", "chat-2").out.splitlines()
    assert one[0].startswith("17 tokens, ") and one[0].endswith("s ago")
    assert [line.split() for line in one[1:]] == [
        ["SOURCE", "TOKENS", "SHARE"], ["device", "12", "70.6", "%"], ["computed:", "new", "4", "23.5", "%"],
        ["computed:", "tail", "1", "5.9", "%"], ["equals", "another", "prompt", "up", "to", "token", "12"],
    ]
    assert ctl.quick("--json", "explain", "chat/1 \x1b[2J").json["accounts"][0]["rid"] == "chat/1 \x1b[2J"
    assert ["device", "12", "35.3", "%"] in [line.split() for line in ctl.quick("explain").out.splitlines()]
    engine.call(engine.cache.clear)
    engine.ask("POST", "/detach", {}, 204)
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps(IDS))
    shown = ctl.quick("explain", "--tokens", str(file)).out
    assert "computed: evicted, cleared" in shown and "the first missing page left 0s before" in shown
    assert "one of RID" in ctl.quick("explain", "a", "--last", "2", code=2).err
    assert "among the last 1,024" in ctl.quick("explain", "unknown", code=2).err


# A daemon


def test_a_daemon_counts_pages_and_has_no_accounts(scratch: Path) -> None:
    with BusyDaemon(scratch) as daemon:
        daemon.serve(engines=1, rounds=1)
        status, found = daemon.ask("GET", "/v1/explain?last=5")
        assert status == 200 and (found["unit"], found["accounts"]) == ("pages", [])
        total = found["total"]
        assert total["host"] + total["storage"] == 24 and total["tokens"] == 28, "four pages are unknown"
        for method, target, body in (("GET", "?rid=a", None), ("POST", "", {"keys": KEYS})):
            status, refused = cast(Daemon, daemon).ask(method, f"/v1/explain{target}", body)
            assert (status, refused["error"]) == (409, "unsupported") and "an engine's socket" in refused["detail"]
        shown = Ctl(("--socket", str(daemon.socket))).quick("explain").out
        assert "28 pages, " in shown and ["SOURCE", "PAGES", "SHARE"] in [line.split() for line in shown.splitlines()]


# Advice


def advice(world: World, folder: Path) -> list[dict[str, Any]]:
    """Return the answer of `hicache ctl advise` about a world."""
    config = world.cache.config.model_copy(update={"admin": AdminConfig(socket=folder / "sockets" / "engine.sock")})
    with ThreadPoolExecutor() as pool, cast(Any, serve_configured(config, world.cache, NAMESPACE)) as server:
        ctl = Ctl(("--socket", str(server.path)))
        found = pool.submit(ctl.quick, "--json", "advise")
        wait_for(found.done, world.step)
        text = pool.submit(ctl.quick, "advise")
        wait_for(text.done, world.step)
    answer: list[dict[str, Any]] = found.result().json
    shares = [line for line in text.result().out.splitlines() if not line.startswith(" ")]
    assert [line.split(":")[0] for line in shares] == [
        ", ".join(filter(None, (one["reason"], one["detail"]))) for one in answer
    ]
    return answer


def late_read(page_s: float, read_s: float) -> Callable[[], World]:
    """A read that hangs for longer than its request waits, by measured speeds of the engine and the store."""

    def make() -> World:
        backend, clock = filled(GatedBackend(), LONG), ShiftedClock()
        config = every_hit(prefetch=prefetch(timeout_base=5, timeout_per_1024_tokens=0))
        rates = known_rates(page_s, read_s)
        rates._always.update(rates._tiers)
        world = World(device_pages=64, host_pages=64, backend=backend, config=config, clock=clock, break_even=rates)
        backend.reads.clear()
        assert world.cache.prefetch_from_storage("a", LONG)
        world.until(backend.entered.is_set)
        assert not world.cache.check_prefetch_progress("a")
        clock.shift_s += 100
        world.arrive("a")
        world.cache.cache_finished_req(world.begin("a", LONG), LONG)
        backend.reads.set()
        return world

    return make


def small_l2() -> World:
    world = World(device_pages=8, host_pages=12)
    for number in range(40):
        world.serve(f"r{number}", prompt(*range(10 * (number % 8), 10 * (number % 8) + 6)))
        world.settle()
    return world


def dates(common: int = 40) -> World:
    """A few equal tokens, two tokens of the date, and a long rest that is equal in each call."""
    world = World(device_pages=256, host_pages=2000)
    for day in range(12):
        world.serve(f"r{day}", RadixKey.of([1] * common + [1000 + day, 2000 + day] + [3] * 400))
        world.settle()
    return world


def chats() -> World:
    """The control of `dates`: prompts that have nothing in common."""
    world = World(device_pages=256, host_pages=2000)
    for day in range(12):
        world.serve(f"r{day}", RadixKey.of([1000 + day] + [3] * 400))
        world.settle()
    return world


def paused_store() -> World:
    world = World(backend=filled(GatedBackend(), LONG), device_pages=64, host_pages=64)
    world.controller.gate.failed(Direction.READ)
    world.step()
    world.cache.prefetch_from_storage("a", LONG)
    world.cache.cache_finished_req(world.begin("a", LONG), LONG)
    return world


def full_store() -> World:
    backend = RejectingBackend(codec())
    backend.rejection, backend.rejections = SetOutcome.REJECTED, math.inf
    clock = ShiftedClock()
    world = World(backend=backend, device_pages=64, host_pages=64, clock=clock)
    for number in range(4):
        world.serve(f"r{number}", LONG)
        world.forget()
        clock.shift_s += 700  # after the back-off
    return world


def new_weights() -> World:
    world = World(device_pages=64, host_pages=64)
    for epoch in range(1, 4):
        world.serve(f"r{epoch}", LONG)
        world.settle()
        world.cache.update_weights(epoch)
    world.serve("last", LONG)
    return world


@pytest.mark.usefixtures("long_back_off")
@pytest.mark.parametrize(
    ("make", "kind", "says"),
    [
        (small_l2, "evicted, host", "raise `host.size`"),
        (late_read(page_s=0.1, read_s=1.0), "late, read", "store is slower than computing"),
        (late_read(page_s=1.0, read_s=0.1), "late, read", "raise `prefetch.timeout_base`"),
        (dates, "new", "up to token 40 and differ from there on"),
        (partial(dates, 3), "new", "up to token 3 and differ from there on"),
        (chats, "new", "Nothing to change."),
        (paused_store, "unavailable", "`hicache ctl status`"),
        (full_store, "not_stored, full", "raise `storage.options.capacity`"),
        (new_weights, "other_weights", "Nothing to change."),
    ],
    ids=["small-l2", "slow-store", "short-timeout", "dates", "first-page", "chats", "paused", "full", "weights"],
)
def test_the_first_advice_suits_the_situation(
    make: Callable[[], World], kind: str, says: str, tmp_path: Path
) -> None:
    world = make()
    first, *others = advice(world, tmp_path)
    assert ", ".join(filter(None, (first["reason"], first["detail"]))) == kind and says in first["advice"], first
    assert len(others) <= 2 and all(one["reason"] != "tail" for one in others)


def test_each_kind_has_one_advice_with_entries_that_exist() -> None:
    assert {kind for kind in KINDS if kind in ADVICE or kind[0] in ADVICE} == set(KINDS)
    assert {key for key in ADVICE if isinstance(key, tuple)} <= set(KINDS)
    nothing = {kind for kind in KINDS if (ADVICE.get(kind) or ADVICE[kind[0]]) == "Nothing to change."}
    assert nothing == {(Reason.EVICTED, "cleared"), *(
        (reason, "") for reason in (Reason.NEW, Reason.OTHER_WEIGHTS, Reason.UNSHARED, Reason.TAIL)
    )}
    names = {name for text in ADVICE.values() for name in text.split("`")[1::2] if not name.startswith("hicache ctl")}
    assert len(names) > 10
    for name in names:
        assert _exists(HiCacheConfig, name.partition(":")[0]) or name in FileStorageOptions.model_fields, name
    assert not _exists(HiCacheConfig, "host.sise")


def _exists(section: Any, name: str) -> bool:
    first, _, rest = name.partition(".")
    if name.startswith("storage.options."):
        return name.removeprefix("storage.options.") in FileStorageOptions.model_fields
    field = section.model_fields.get(first)
    if field is None:
        return False
    kinds = [one for one in (field.annotation, *get_args(field.annotation)) if isinstance(one, type)]
    return not rest or any(issubclass(one, BaseModel) and _exists(one, rest) for one in kinds)


def test_advice_to_a_daemon_names_its_pool() -> None:
    total = Account(ago_s=1, tokens=9, host=0, storage=0, computed=[
        Cause(reason=Reason.EVICTED, detail="host", tokens=9)
    ])
    ((_, text),) = advise(Explanation(unit="pages", total=total))
    assert "`daemon.pool`" in text and "host.size" not in text
