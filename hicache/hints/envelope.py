"""The envelope of hints, its actions and their outcomes.

Envelope, names of actions and outcomes follow the public proposals for vLLM and SGLang (vllm#53421, #57103;
sglang#36224). Their engines leave the payloads to the cache, so those are defined here:

    kv.retain      value, ttl_s        evict it after other pages
    kv.pin         ttl_s               do not evict it from L2
    kv.prefetch    destination, needed_in_s
    kv.demote      destination         leave L1, or also L2; storage keeps it
    kv.release                         evict it first
    session.turn                       the request is one of this session
    session.wait   expected_s, source  a signal: the session returns in about this time

A payload also names its target: `session_id`, `page_keys`, or without a request `tokens`. Without these, and for the
`session_id` of a request's own envelope, the target is the prefix of that request as it is when it ends.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from ..errors import InvalidInput
from ..units import DURATION_MAX_S

ACTIONS_MAX = 64
TOKENS_MAX = 1 << 20
KEYS_MAX = 4096
ACTION_VERSION = "1.0"

Seconds: TypeAlias = Annotated[float, Field(ge=0, le=DURATION_MAX_S, allow_inf_nan=False)]
Name: TypeAlias = Annotated[str, Field(min_length=1, max_length=256)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)


class HintAction(_Model):
    """One action: its type and version say what the payload means."""

    action_id: Name
    action_type: Name
    action_version: Name = ACTION_VERSION
    payload: dict[str, Any] = {}


class HintsEnvelope(_Model):
    """Hints that arrive together, with a request or alone."""

    protocol_version: Name = "0.1"
    message_id: Annotated[str, Field(max_length=256)] = ""
    actions: Annotated[list[HintAction], Field(max_length=ACTIONS_MAX)] = []


class HintTarget(_Model):
    """The pages that an action is about. `tokens` and `page_keys` begin at the start of a prompt; `extra_key` and
    `cache_salt` are those of its requests; `namespace` has the first digits of a daemon's namespace. Unknown fields
    are ignored, so that later versions can add some."""

    session_id: Name | None = None
    tokens: Annotated[list[Annotated[int, Field(strict=True, ge=0, lt=1 << 31)]],
                      Field(min_length=1, max_length=TOKENS_MAX)] | None = None
    page_keys: Annotated[list[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]],
                         Field(min_length=1, max_length=KEYS_MAX)] | None = None
    namespace: Annotated[str, Field(pattern=r"^[0-9a-f]*$", max_length=64)] = ""
    extra_key: Annotated[str, Field(max_length=1024)] | None = None
    cache_salt: Annotated[SecretStr, Field(max_length=1024)] | None = None

    @model_validator(mode="after")
    def _check(self) -> HintTarget:
        if self.tokens is not None and self.page_keys is not None:
            raise ValueError("tokens and page_keys: pass one of them")
        return self

    @property
    def is_explicit(self) -> bool:
        """True if the payload has the prompt itself."""
        return self.tokens is not None or self.page_keys is not None


class Retain(HintTarget):
    """Evict the pages later than others, and those with a smaller `value` before them, for `ttl_s` seconds."""

    value: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    ttl_s: Annotated[Seconds, Field(gt=0)] = 60.0


class Pin(HintTarget):
    """Keep the pages on L2 until `ttl_s` seconds after their last use."""

    ttl_s: Annotated[Seconds, Field(gt=0)] = 60.0


class Prefetch(HintTarget):
    """Bring the pages to a tier, in time for a request that comes in `needed_in_s` seconds."""

    destination: Literal["device", "host"] = "host"
    needed_in_s: Seconds = 0.0


class Demote(HintTarget):
    """Let the pages leave the tiers above a tier."""

    destination: Literal["host", "storage"] = "host"


class Release(HintTarget):
    """Evict the pages before others: they are not used again."""


class Turn(HintTarget):
    """The request belongs to `session_id`, for hints that come without a request. All hints of a request say so."""


class Wait(HintTarget):
    """The session comes back in about `expected_s` seconds. `source` names who estimates the time; the record of a
    source decides how much its times count."""

    expected_s: Seconds
    source: Name | None = None


Hint: TypeAlias = Retain | Pin | Prefetch | Demote | Release | Turn | Wait

KINDS: Mapping[str, type[Hint]] = {
    "kv.retain": Retain, "kv.pin": Pin, "kv.prefetch": Prefetch, "kv.demote": Demote, "kv.release": Release,
    "session.turn": Turn, "session.wait": Wait,
}


class OutcomeStatus(enum.StrEnum):
    """What became of an action."""

    ACCEPTED = "accepted"
    CLIPPED = "clipped"  # carried out for fewer pages or a shorter time
    DEFERRED = "deferred"  # carried out later: when the request ends, or shortly before the pages are needed
    REJECTED = "rejected"
    MISSING = "missing"  # the pages are not here


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answer to an action. `pages` and `ttl_s` are what was granted; `detail` says why it was not more."""

    action_id: str
    action_type: str
    status: OutcomeStatus
    detail: str = ""
    pages: int = 0
    ttl_s: float | None = None


def envelope_of(value: object) -> HintsEnvelope:
    """Return an envelope from JSON values, or from an object with its fields, such as those of vLLM and SGLang. Raises
    InvalidInput for another form."""
    if isinstance(value, HintsEnvelope):
        return value
    try:
        return HintsEnvelope.model_validate(value, from_attributes=not isinstance(value, Mapping))
    except ValidationError as error:
        raise InvalidInput(f"hints: {_problems(error)}") from None


def hint_of(action: HintAction) -> Hint:
    """Return the typed payload of an action. Raises InvalidInput for an action or a version that is not supported, and
    for a wrong payload."""
    kind = KINDS.get(action.action_type)
    if kind is None:
        raise InvalidInput(f"{action.action_type[:64]!r} is not supported; known are {', '.join(KINDS)}")
    if action.action_version.split(".")[0] != ACTION_VERSION.split(".", maxsplit=1)[0]:
        raise InvalidInput(f"version {action.action_version[:16]!r} is not supported; send {ACTION_VERSION}")
    try:
        return kind.model_validate(action.payload)
    except ValidationError as error:
        raise InvalidInput(f"payload: {_problems(error)}") from None


def _problems(error: ValidationError) -> str:
    """Return the problems without the values, which may be tokens and salts."""
    found = [f"{'.'.join(map(str, one['loc'])) or 'envelope'}: {one['msg']}" for one in error.errors()]
    return "; ".join(found[:5])
