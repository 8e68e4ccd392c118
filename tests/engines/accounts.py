"""Where the prompt tokens of an engine came from, by the metrics of HiCache in its process."""

from __future__ import annotations

import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client.parser import text_string_to_metric_families

from hicache_lab.devservers.ports import LOOPBACK
from tests.waiting import wait_for

from .process import CALL_TIMEOUT_S


def prompt_tokens(port: int) -> Counter[str]:
    """Return the prompt tokens so far by source: device, host, storage, or the reason and detail of computed ones."""
    with urllib.request.urlopen(f"http://{LOOPBACK}:{port}/metrics", timeout=CALL_TIMEOUT_S) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [one for family in families for one in family.samples if one.name == "hicache_prompt_tokens_total"]
    return Counter({_source(one.labels): int(one.value) for one in samples if one.value})


def _source(labels: dict[str, str]) -> str:
    if labels["source"] != "computed":
        return labels["source"]
    return " ".join(filter(None, (labels["reason"], labels["detail"])))


@contextmanager
def counting(port: int, tokens: int) -> Iterator[Counter[str]]:
    """Count requests whose prompts have `tokens` tokens. Afterwards the counter has what was counted, in all as many
    tokens. A request may be answered before it is counted, if its forward waited for its load."""
    before, counted = prompt_tokens(port), Counter[str]()

    def has_all() -> bool:
        counted.clear()
        counted.update(prompt_tokens(port) - before)
        return counted.total() >= tokens

    yield counted
    wait_for(has_all)
    assert counted.total() == tokens, counted


def cached(counted: Counter[str]) -> int:
    """Return the tokens that were not computed."""
    return sum(counted[tier] for tier in ("device", "host", "storage"))
