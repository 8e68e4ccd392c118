"""The envelope of hints, its actions and their answers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import InvalidInput
from hicache.hints import ACTIONS_MAX, KINDS, Hint, HintAction, HintsEnvelope, Pin, envelope_of, hint_of
from hicache.hints.envelope import KEYS_MAX, TOKENS_MAX

# What each action needs besides its target.
NEEDED: dict[str, dict[str, Any]] = {"session.wait": {"expected_s": 5}}
SALT, TOKEN, KEY = "salt of a tenant", 987654321, "5e" * 32


@dataclass
class EngineAction:
    """An action as an engine has it: `vllm.v1.kv_hints.KvHintAction`, and that of SGLang."""

    action_id: str
    action_type: str
    action_version: str = "1.0"
    payload: dict[str, Any] = field(default_factory=dict)


@dataclass
class EngineEnvelope:
    """An envelope as an engine has it, with a field that HiCache does not know."""

    protocol_version: str = "0.1"
    message_id: str = "m1"
    actions: list[EngineAction] = field(default_factory=list)
    priority: int = 3


def hint(action_type: str, version: str = "1.0", **payload: Any) -> Hint:
    return hint_of(HintAction(action_id="a", action_type=action_type, action_version=version, payload=payload))


def test_an_object_of_an_engine_and_json_give_the_same_envelope() -> None:
    entries: dict[str, Any] = {"action_id": "1", "action_type": "kv.pin", "payload": {"ttl_s": 5, "session_id": "s"}}
    found = envelope_of(EngineEnvelope(actions=[EngineAction(**entries)]))
    assert found == envelope_of({"message_id": "m1", "actions": [entries]})
    assert found.actions[0].action_version == "1.0"
    assert hint_of(found.actions[0]) == Pin(session_id="s", ttl_s=5)
    assert envelope_of(found) is found


@pytest.mark.parametrize("value", [None, 5, "kv.pin", b"{}", [], {"actions": 5}, {"actions": [5]}, {"actions": [{}]},
                                   {"actions": [{"action_id": "", "action_type": "kv.pin"}]},
                                   {"protocol_version": 1, "actions": []}])
def test_another_form_is_invalid_input(value: object) -> None:
    with pytest.raises(InvalidInput, match=r"^hints: "):
        envelope_of(value)


def test_an_envelope_has_a_limit_of_actions() -> None:
    action = {"action_id": "1", "action_type": "kv.release"}
    assert len(envelope_of({"actions": [action] * ACTIONS_MAX}).actions) == ACTIONS_MAX
    with pytest.raises(InvalidInput, match="actions"):
        envelope_of({"actions": [action] * (ACTIONS_MAX + 1)})


@pytest.mark.parametrize("kind", KINDS)
def test_later_versions_may_add_fields_to_a_payload_and_to_an_envelope(kind: str) -> None:
    assert hint(kind, "1.7", session_id="s", later=1, **NEEDED.get(kind, {})).session_id == "s"
    assert envelope_of({"actions": [], "later": 1}) == HintsEnvelope(actions=[])


@pytest.mark.parametrize("kind", ["kv.fetch", "kv.share", "KV.PIN", "x" * 200])
def test_an_unknown_action_is_named_with_those_that_are_known(kind: str) -> None:
    with pytest.raises(InvalidInput, match=r"not supported; known are kv\.retain") as raised:
        hint(kind)
    assert len(str(raised.value)) < 250


@pytest.mark.parametrize("version", ["2.0", "0.9", "x", "10.1"])
def test_another_version_is_answered_with_the_one_to_send(version: str) -> None:
    with pytest.raises(InvalidInput, match=r"is not supported; send 1\.0"):
        hint("kv.pin", version)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("kv.pin", {"ttl_s": 0}, "ttl_s"),
    ("kv.pin", {"ttl_s": -1}, "ttl_s"),
    ("kv.retain", {"ttl_s": float("nan")}, "ttl_s"),
    ("kv.retain", {"ttl_s": float("inf")}, "ttl_s"),
    ("kv.retain", {"value": 0}, "value"),
    ("kv.retain", {"value": 1.5}, "value"),
    ("kv.prefetch", {"destination": "storage"}, "destination"),
    ("kv.prefetch", {"needed_in_s": -1}, "needed_in_s"),
    ("kv.demote", {"destination": "device"}, "destination"),
    ("session.wait", {}, "expected_s"),
    ("session.wait", {"expected_s": "soon"}, "expected_s"),
    ("session.wait", {"expected_s": 1e300}, "expected_s"),
    ("kv.release", {"session_id": ""}, "session_id"),
    ("kv.release", {"session_id": "s" * 257}, "session_id"),
    ("kv.release", {"tokens": []}, "tokens"),
    ("kv.release", {"tokens": [1.0]}, "tokens"),
    ("kv.release", {"tokens": [True]}, "tokens"),
    ("kv.release", {"tokens": [1 << 31]}, "tokens"),
    ("kv.release", {"tokens": [-1]}, "tokens"),
    ("kv.release", {"page_keys": ["00"]}, "page_keys"),
    ("kv.release", {"page_keys": [KEY.upper()]}, "page_keys"),
    ("kv.release", {"page_keys": [KEY] * (KEYS_MAX + 1)}, "page_keys"),
    ("kv.release", {"cache_salt": "s" * 1025}, "cache_salt"),
    ("kv.release", {"tokens": [1], "page_keys": [KEY]}, "pass one of them"),
]


@pytest.mark.parametrize(("kind", "payload", "says"), WRONG)
def test_a_wrong_payload_says_which_entry_is_wrong(kind: str, payload: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=f"payload: .*{says}"):
        hint(kind, **payload)


def test_tokens_have_a_limit() -> None:
    with pytest.raises(InvalidInput, match="tokens"):
        hint("kv.release", tokens=[1] * (TOKENS_MAX + 1))


@pytest.mark.parametrize("payload", [
    {"tokens": [TOKEN, "x", 1 << 40]}, {"tokens": TOKEN}, {"tokens": [TOKEN], "page_keys": [KEY]},
    {"page_keys": [KEY, KEY[:-1]]}, {"session_id": SALT * 40}, {"cache_salt": SALT * 100}, {"cache_salt": [SALT]},
    {"extra_key": {"x": SALT}}, {"namespace": SALT}, {"destination": SALT}, {"value": SALT}, {"ttl_s": SALT},
    {"expected_s": SALT, "source": [SALT]},
])
def test_an_error_contains_neither_tokens_nor_keys_nor_salts(payload: dict[str, Any]) -> None:
    messages = []
    for kind in KINDS:
        try:
            hint(kind, **payload)
        except InvalidInput as error:
            messages.append(str(error))
    assert messages
    for secret in (SALT, str(TOKEN), str(1 << 40), KEY[:32]):
        assert not any(secret in message for message in messages)


def test_a_salt_is_not_shown() -> None:
    assert SALT not in repr(hint("kv.pin", cache_salt=SALT))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
)
FIELDS = [*Pin.model_fields, "value", "destination", "needed_in_s", "expected_s", "source"]


@given(kind=st.sampled_from(list(KINDS)), payload=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=5))
def test_any_payload_is_a_hint_or_invalid_input(kind: str, payload: dict[str, Any]) -> None:
    try:
        found = hint(kind, **payload)
    except InvalidInput as error:
        assert len(str(error)) < 1000
        return
    assert isinstance(found, KINDS[kind])
    assert found.is_explicit == (payload.get("tokens") is not None or payload.get("page_keys") is not None)


@given(value=st.fixed_dictionaries({}, optional={"protocol_version": JSON, "message_id": JSON, "actions": JSON}) | JSON)
def test_any_json_is_an_envelope_or_invalid_input(value: object) -> None:
    try:
        found = envelope_of(value)
    except InvalidInput:
        return
    assert len(found.actions) <= ACTIONS_MAX
    assert envelope_of(json.loads(found.model_dump_json())).actions == found.actions
