"""Hints for vLLM's HTTP server, by the client and the recipes of docs/hints.md and the client library of OpenAI.

The server has no storage, host memory for 15 prompts of 300 tokens, and device memory for six, so after others a prompt
hits only if host memory has kept it.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from hicache_lab.devservers.ports import LOOPBACK
from hicache_lab.engine import BUNDLED_MODEL
from tests.admin.ctl import Ctl
from tests.listening import held_ports
from tests.test_documented_commands import TEXTS
from tests.test_documented_python import blocks
from tests.waiting import wait_for

from .process import CALL_TIMEOUT_S
from .prompts import prompts, write_config
from .server import EngineServer
from .vllm_engine import hicache_connector, vllm_environ, vllm_options

MODEL = "small"
# The model has a tokenizer, but no template.
TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
IN_PAGES, PAGES = 256, 4  # of a prompt of 300 tokens, in pages of 64
HOST_PROMPTS = 15
CLIENT, *RECIPES = [block for _, block in blocks(TEXTS["docs/hints.md"])]


class Engine(NamedTuple):
    """A server, a client, and the two other ways to it."""

    client: openai.OpenAI
    admin_socket: Path
    metrics_port: int
    page: dict[str, Any]  # the names of the client of docs/hints.md

    def complete(self, asked: list[int], **extra: object) -> tuple[list[int], int]:
        """Return the output tokens, and how many tokens of the prompt were cached."""
        extra |= {"return_token_ids": True, "ignore_eos": True}
        answer: Any = self.client.completions.create(
            model=MODEL, prompt=asked, max_tokens=8, temperature=0, extra_body=extra
        )
        details = answer.usage.prompt_tokens_details
        return answer.choices[0].token_ids, (details and details.cached_tokens) or 0

    def cold(self, asked: list[int]) -> list[int]:
        """Return the output tokens without cached pages: of a tenant that has none."""
        tokens, cached = self.complete(asked, cache_salt=uuid.uuid4().hex)
        assert cached == 0
        return tokens

    def hints(self, session: str, actions: dict[str, dict[str, Any]]) -> dict[str, Any]:
        made: dict[str, Any] = self.page["hints"](session, actions)
        return made

    def counts(self) -> dict[tuple[str, str], int]:
        """Return the hints so far by action and outcome."""
        with urllib.request.urlopen(f"http://{LOOPBACK}:{self.metrics_port}/metrics", timeout=CALL_TIMEOUT_S) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        samples = [one for family in families for one in family.samples if one.name == "hicache_hints_total"]
        return {(one.labels["action"], one.labels["outcome"]): int(one.value) for one in samples}

    def counted(self, before: dict[tuple[str, str], int]) -> dict[tuple[str, str], int]:
        """Return what has been counted since then."""
        return {what: left for what, count in self.counts().items() if (left := count - before.get(what, 0))}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("hints")
    socket = folder / "admin" / "engine.sock"
    options = vllm_options(BUNDLED_MODEL, num_gpu_blocks_override=64, max_num_seqs=4)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--served-model-name", MODEL]
    for name in options.keys() - {"skip_tokenizer_init", "disable_log_stats"}:
        flag = "--" + name.replace("_", "-")
        command += [flag] if options[name] is True else [flag, str(options[name])]
    command += ["--enable-prompt-tokens-details", "--chat-template", TEMPLATE]
    with ExitStack() as stack:
        port = stack.enter_context(held_ports(1))
        config = write_config(
            folder / "hicache.yaml", host={"tokens": HOST_PROMPTS * PAGES * 64}, admin={"socket": str(socket)},
            metrics={"port": port},
        )
        command += ["--kv-transfer-config", json.dumps(hicache_connector(config))]
        server = stack.enter_context(EngineServer(command, folder=folder, environ=vllm_environ()))
        client = stack.enter_context(openai.OpenAI(base_url=f"http://{LOOPBACK}:{server.port}/v1", api_key="-"))
        page: dict[str, Any] = {}
        exec(compile(CLIENT, "docs/hints.md", "exec"), page)
        yield Engine(client, socket, port, page)


def test_a_session_that_waits_keeps_its_pages_while_20_others_pass(engine: Engine) -> None:
    """Its next turn begins with the last one and its output. LRU keeps 15 of the others instead. The announced time is
    short, because pages that are needed long after others come and go are not worth their room, and the others may
    take half as long as those before."""
    others_s = 0.0
    for hinted in (False, True):
        turn, more = prompts(f"waits: {hinted}", 2)
        wait = {"expected_s": 0.4 * others_s, "source": "a test"}
        hints = engine.hints("waits", {"session.turn": {}, "session.wait": wait}) if hinted else {}
        output = engine.cold(turn)
        assert engine.complete(turn, **hints) == (output, 0)
        began_s = time.monotonic()
        for other in prompts(f"others: {hinted}", 20):
            engine.complete(other)
        others_s = time.monotonic() - began_s
        following = [*turn, *output, *more[:40]]
        tokens, cached = engine.complete(following)
        assert cached == (IN_PAGES if hinted else 0)
        assert tokens == engine.cold(following)


@pytest.mark.parametrize("released", [True, False])
def test_a_session_that_has_ended_makes_room_for_others(engine: Engine, released: bool) -> None:
    """These are 16 prompts, and host memory has room for 15."""
    kept, ended, *others = prompts(f"ends: {released}", HOST_PROMPTS + 1)
    cold, _ = engine.complete(kept)
    engine.complete(ended, **(engine.hints("ended", {"kv.release": {}}) if released else {}))
    for other in others:
        engine.complete(other)
    assert engine.complete(kept) == (cold, IN_PAGES if released else 0)


def test_what_is_wrong_in_hints_is_counted_and_the_request_is_served(engine: Engine) -> None:
    wrong: list[tuple[object, tuple[str, str]]] = [
        ("not an envelope", ("unknown", "rejected")),
        ({"actions": 7}, ("unknown", "rejected")),
        (engine.page["envelope"]("a", {"kv.fetch": {}}), ("unknown", "rejected")),
        (engine.page["envelope"]("a", {"session.wait": {"expected_s": "soon"}}), ("session.wait", "rejected")),
    ]
    asked = prompts("wrong", 1)[0]
    expected = engine.cold(asked)
    for value, outcome in wrong:
        before = engine.counts()
        assert engine.complete(asked, kv_transfer_params={"kv_hints": value})[0] == expected
        assert engine.counted(before) == {outcome: 1}


def test_hints_without_a_request_are_answered(engine: Engine) -> None:
    send, socket = engine.page["send"], str(engine.admin_socket)
    engine.complete(prompts("posted", 1)[0], **engine.hints("posted", {"session.turn": {}}))
    (pinned,) = send(socket, "posted", {"kv.pin": {"ttl_s": 3600}})
    assert (pinned["status"], pinned["pages"], pinned["ttl_s"]) == ("clipped", PAGES, 600)
    assert send(socket, "never seen", {"kv.release": {}})[0]["status"] == "missing"
    ctl = Ctl(("--socket", socket))
    assert ctl.quick("hint", "kv.release", "--session", "posted").out == "kv.release: accepted: 4 pages\n"
    assert "hints.session_share" not in send(socket, "posted", {"kv.pin": {}})[0]["detail"]


def test_the_recipes_of_the_page_run_and_their_hints_are_carried_out(engine: Engine) -> None:
    before, text = engine.counts(), "It was a bright cold day in April, and the clocks were striking thirteen. " * 6
    messages = [{"role": "user", "content": text}]
    names = {**engine.page, "client": engine.client, "model": MODEL, "messages": messages,
             "admin_socket": str(engine.admin_socket)}
    for recipe in RECIPES:
        exec(compile(recipe, "docs/hints.md", "exec"), names)
        assert not [one for one in names.get("outcomes", []) if one["status"] in ("rejected", "missing")], recipe

    def seen() -> dict[tuple[str, str], int]:
        return engine.counted(before)

    wait_for(lambda: seen().get(("kv.release", "accepted"), 0) + seen().get(("kv.release", "clipped"), 0) == 5)
    assert not [outcome for outcome in seen() if outcome[1] in ("rejected", "missing")]
