"""Finds requests in the logs of engines: vLLM's with prompts at level DEBUG, and SGLang's at level 3 in JSON.

- vLLM 0.32 (`vllm/entrypoints/serve/utils/request_logger.py`) logs one line for the prompt of a request, and one for
  its output, or one for each delta of a stream. The lines are text, or JSON with `--logging-config.formatter json`.
- SGLang 0.5.23 (`sglang/srt/utils/request_logger.py`) logs the events `request.received` and `request.finished`. The
  token ids of a prompt that arrived as text are only in the second one, and only if the client asked for them.

A prompt can contain text that looks like a log line. So a message is recognized only at the beginning of its line, and
token ids are read from its end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeAlias

# The prefix of a line, which the engine, systemd or a container runtime writes.
_PREFIX_BYTES_MAX = 512
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_TIME = re.compile(r"(?:(\d{4})-)?(\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?")
_VLLM_LOGGER = "request_logger"
_VLLM_TEXT = re.compile(r"request_logger\.py:\d+\] ")
_VLLM_PROMPT = re.compile(r"Request (\S+) details: prompt: ")
_VLLM_RECEIVED = re.compile(r"Received request (\S+): params: ")
_VLLM_OUTPUT = re.compile(r"Generated response (\S+)( \(streaming delta\)| \(streaming complete\))? details: ")
# Calls of vLLM's tokenizer and health checks of SGLang, which compute nothing or next to nothing.
_NOT_GENERATED = ("tokenize-", "HEALTH_CHECK")

VLLM_LEVEL = "start vLLM with --enable-log-requests --log-level DEBUG"
VLLM_EMBEDS = "the prompt is embeddings, which have no token ids"
SGLANG_LEVEL = "start SGLang with --log-requests --log-requests-level 3 --log-requests-format json"
SGLANG_TEXT = (
    "the prompt arrived at SGLang as text; use /v1/chat/completions, send input_ids, or let clients set "
    "return_prompt_token_ids (/generate) or return_token_ids (/v1/completions)"
)
CUT = (
    "the line is cut; let the engine write to a file, or raise the limit of the log (LineMax of journald), and do not "
    "set --max-log-len"
)
NO_TIME = "the line has no date and time; use the engine's own log format"


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request arrived. `time_s` is local time in seconds since an arbitrary point. Without `token_ids`, `missing`
    says why, and what to do."""

    request: str
    time_s: float
    token_ids: list[Any] | None
    missing: str = ""


@dataclass(frozen=True, slots=True)
class Output:
    """`tokens` more tokens were generated for a request. `prompt_ids` are those of its prompt, if they are known only
    now."""

    request: str
    tokens: int
    is_last: bool
    prompt_ids: list[Any] | None = None


Event: TypeAlias = Arrival | Output


def events(line: bytes) -> list[Event]:
    """Return the events of one line of a log, none if it is not of a request."""
    prefix = line[:_PREFIX_BYTES_MAX]
    if b"request_logger.py:" in prefix:
        text = _COLOR.sub("", line.decode(errors="replace"))
        found = _VLLM_TEXT.search(text)
        return [] if found is None else list(_vllm(text[found.end() :].rstrip(), text[: found.start()]))
    if b" Receive: obj=" in prefix:
        return [Arrival("", 0, None, SGLANG_LEVEL)]
    start = prefix.find(b"{")
    if start < 0:
        return []
    try:
        fields = json.loads(line[start:])
    except (ValueError, RecursionError):
        is_cut = b'"event": "request.received"' in prefix
        return [Arrival("", 0, None, CUT)] if is_cut else []
    return list(_json(fields)) if isinstance(fields, dict) else []


def _json(fields: dict[str, Any]) -> Iterator[Event]:
    event, message = fields.get("event"), fields.get("message")
    if event == "request.received" and isinstance(fields.get("obj"), dict):
        yield from _sglang_received(fields, fields["obj"])
    elif event == "request.finished" and isinstance(fields.get("out"), dict):
        yield from _sglang_finished(fields, fields["out"])
    elif isinstance(message, str) and str(fields.get("name")).endswith(_VLLM_LOGGER):
        yield from _vllm(message, str(fields.get("asctime")))


def _vllm(message: str, prefix: str) -> Iterator[Event]:
    """Yield the event of a message of vLLM's request logger. `prefix` contains its time."""
    if found := _VLLM_PROMPT.match(message):
        ids_text, is_whole, _ = message.rpartition(", prompt_token_ids: ")[2].partition(", prompt_embeds shape: ")
        if ids_text == "None":
            ids, missing = None, VLLM_EMBEDS
        else:
            ids = _listed(ids_text) if is_whole else None
            missing = CUT if ids is None else ""
        if not found[1].startswith(_NOT_GENERATED):
            yield _arrival(found[1], prefix, ids, missing)
    elif found := _VLLM_RECEIVED.match(message):
        # Follows the line above at level DEBUG.
        if not found[1].startswith(_NOT_GENERATED):
            yield _arrival(found[1], prefix, None, VLLM_LEVEL)
    elif found := _VLLM_OUTPUT.match(message):
        ids = _listed(message.rpartition("output_token_ids: ")[2])
        yield Output(found[1], len(ids or ()), is_last=found[2] is None or "delta" not in found[2])


def _sglang_received(fields: dict[str, Any], obj: dict[str, Any]) -> Iterator[Event]:
    """Yield the arrivals of a request, which may be a batch. At level 2, a list has `...` in place of its middle."""
    names, prompts = fields.get("rid"), obj.get("input_ids")
    if isinstance(names, str):
        names, prompts = [names], [prompts]
    elif not isinstance(names, list):
        return
    for name, ids in zip(names, prompts if isinstance(prompts, list) else [None] * len(names), strict=False):
        if str(name).startswith(_NOT_GENERATED):
            continue
        is_whole = isinstance(ids, list) and "..." not in ids
        missing = "" if is_whole else SGLANG_TEXT if "input_ids" in obj and ids is None else SGLANG_LEVEL
        yield _arrival(str(name), str(fields.get("timestamp")), ids if is_whole else None, missing)


def _sglang_finished(fields: dict[str, Any], out: dict[str, Any]) -> Iterator[Event]:
    meta, ids = out.get("meta_info"), out.get("prompt_token_ids")
    tokens = meta.get("completion_tokens") if isinstance(meta, dict) else None
    is_whole = isinstance(ids, list) and "..." not in ids
    yield Output(
        str(fields.get("rid")), tokens if type(tokens) is int else 0, is_last=True, prompt_ids=ids if is_whole else None
    )


def _listed(text: str) -> list[Any] | None:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, list) else None


def _arrival(request: str, time: str, ids: list[Any] | None, missing: str) -> Arrival:
    time_s = _time_s(time)
    return Arrival(request, 0, None, NO_TIME) if time_s is None else Arrival(request, time_s, ids, missing)


def _time_s(text: str) -> float | None:
    """Return the first time in a text. A date without a year, as vLLM writes it, is of the last 12 months."""
    found = _TIME.search(text)
    if found is None:
        return None
    now = datetime.now()
    # A 29 February is in one of at most eight years, and the clock of another host may be ahead.
    for year in [int(found[1])] if found[1] else range(now.year, now.year - 9, -1):
        try:
            time = datetime.fromisoformat(f"{year:04}-{found[2]}.{(found[3] or '').ljust(6, '0')}")
        except ValueError:
            continue
        if found[1] or time <= now + timedelta(days=1):
            return (time - datetime.min) / timedelta(seconds=1)
    return None
