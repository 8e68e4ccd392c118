"""Hostile configurations: each ready one, with a hostile value in each entry of the schema, in turn through a file, a
variable and a flag, loads or is refused with a ConfigError; one that loads opens or fails with a HiCacheError."""

from __future__ import annotations

import contextlib
import copy
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hicache.cache import create_cache
from hicache.cli.config import check_surroundings, effective_yaml
from hicache.config import HiCacheConfig, load_config
from hicache.config.entries import all_entries
from hicache.config.loading import PROBLEMS_MAX, VALUES_MAX
from hicache.errors import ConfigError, HiCacheError
from hicache.geometry import KVGeometry
from hicache.keys import Namespace
from tests.seeds import rng, seeds

pytestmark = pytest.mark.long

# Of a configuration, for one seed.
ENTRIES = 6
CONFIGS = sorted((Path(__file__).resolve().parent.parent / "configs").iterdir())
TEXTS = [
    "", " ", ".", "/", "a\nb", "\x1b[31m", "\x7f", "é" * 200, "\u202e", "٤", "x" * 300, "x" * 70_000, "/" * 5000,
    "1e400GiB", "9" * 400 + "GiB", "-1GiB", "nanGiB", "inf", "5s", "0x10", "1_000", "1:30", "2001-01-01", "%s", "{0}",
    "__proto__", "__class__", "a.b", "a:b", ":", "a:", ":b", "os:system", "builtins:dict", "..:x", "hicache.errors:_",
    "tcp://127.0.0.1:99999", "tcp://*:1", "ipc:///x", "http://[", "redis://[::1", "127.0.0.1:1", "redis", "levels",
    "memory", "/dev/zero", "/etc/shadow", "on", "null",
]
VALUES: list[Any] = [
    None, True, 0, -1, 1, 1.5, -0.0, 1e308, math.nan, math.inf, 10**30, -(10**30), 1 << 63, 1 << 64, 10**400, [], [[]],
    [1, None], {}, {"": 1}, {"a.b": {"c": 1}}, {"x": {"y": [1, {"q": None}]}}, [{"type": "file"}], {"type": "file"},
    [{"type": "memory"}, {"type": "memory"}], [{"type": 5}, {"type": "file", "options": {"path": ""}}],
]
# As they stand in a file, behind the name of an entry.
RAW = [
    "*a", "&a [*a]", "!!python/object:os.system x", "!!binary aGk=", "{<<: {a: 1}}", "{a: 1, a: 2}", "[{a: 1, a: 2}]",
    "{1: 2}", "{[1]: 2}", "{? {a: 1} : 2}", "[{? [a] : 2}]", "0b" + "1" * 5000, "1" + ":1" * 5000, "9" * 5000,
    "[" * 2000, "{a: " * 1000, "2001-99-99", "2001-01-01T00:00:00Z", ".nan", "-.inf", "1.0e+400", "08", "=",
    '"\\ud800"',
    "'", '"', "|", "@x", "`", "%", "? a", "\x01", "\ufffe", "0x" + "f" * 5000,
]


def with_entry(tree: dict[str, Any], name: str, value: object) -> dict[str, Any]:
    changed = copy.deepcopy(tree)
    node = changed
    *sections, last = name.split(".")
    for section in sections:
        if not isinstance(node.get(section), dict):
            node[section] = {}
        node = node[section]
    node[last] = value
    return changed


def texts_of(tree: dict[str, Any], name: str, numbers: random.Random) -> Iterator[str]:
    """Files with a hostile value in one entry."""
    yield yaml.safe_dump(with_entry(tree, name, numbers.choice([*VALUES, *TEXTS])))
    yield yaml.safe_dump(with_entry(tree, name, "HERE")).replace("HERE", numbers.choice(RAW))


def load_or_refuse(file: Path | None, **sources: dict[str, str]) -> HiCacheConfig | None:
    try:
        loaded = load_config(file, environ=sources.get("environ", {}), overrides=sources.get("overrides", {}))
    except ConfigError as error:
        assert str(error).encode()
        return None
    return loaded


@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize("ready", CONFIGS, ids=lambda path: path.name)
def test_a_hostile_value_in_any_entry_is_accepted_or_rejected(ready: Path, seed: int, tmp_path: Path) -> None:
    numbers, tree = rng(seed), yaml.safe_load(ready.read_text())
    file, again = tmp_path / "fuzz.yaml", tmp_path / "again.yaml"
    for entry in numbers.sample(all_entries(tree["storage"]["type"]), ENTRIES):
        for text in texts_of(tree, entry.name, numbers):
            file.write_text(text)
            loaded = load_or_refuse(file)
            if loaded is not None:
                again.write_text(effective_yaml(loaded))
                assert load_or_refuse(again) == loaded
        text, variable = numbers.choice([*TEXTS, *RAW]), f"HICACHE_{entry.name.upper().replace('.', '__')}"
        load_or_refuse(None, environ={variable: text})
        loaded = load_or_refuse(None, overrides={entry.name: text})
        if loaded is not None:
            with contextlib.suppress(ConfigError):
                check_surroundings(loaded)


STORES: dict[str, dict[str, Any]] = {
    "file": {"capacity": "1MiB", "free_space_floor": 0},
    "redis": {"url": "redis://127.0.0.1:1", "timeout": "200ms"},
    "s3": {"bucket": "pages", "endpoint_url": "http://127.0.0.1:1", "timeout": "200ms"},
    "memory": {"capacity": 1 << 20},
}
# Sizes of memory: a hostile one may be there.
SIZES = ("device.size", "device.tokens", "host.size", "host.tokens", "host.ratio", "page_size")


@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize("store", STORES)
def test_a_configuration_that_loads_opens_or_fails_with_a_typed_error(
    store: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, kind = rng(seed), store.partition(" ")[0]
    options = STORES[store] | ({"path": str(tmp_path / "pages")} if kind == "file" else {})
    tree = {"page_size": 16, "device": {"tokens": 64}, "host": {"tokens": 64},
            "storage": {"type": kind, "options": options}}
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    monkeypatch.chdir(tmp_path)
    names = [entry.name for entry in all_entries(kind) if entry.name not in SIZES]
    for name in [*numbers.sample(names, ENTRIES), *(name for name in names if name.endswith("region"))]:
        for value in numbers.sample([*VALUES, *TEXTS], 4):
            (tmp_path / "fuzz.yaml").write_text(yaml.safe_dump(with_entry(tree, name, value)))
            config = load_or_refuse(tmp_path / "fuzz.yaml")
            if config is not None:
                opens_or_fails(config)


def opens_or_fails(config: HiCacheConfig) -> None:
    namespace = Namespace("fuzz", KVGeometry(2, 1, 4, config.page_size, "float32"))
    try:
        create_cache(config, namespace).close()
    except HiCacheError as error:
        assert str(error).encode()


@pytest.mark.parametrize("value", [1 << 50, "1024TiB", 1 << 40])
@pytest.mark.parametrize("entry", ["device.size", "device.tokens", "host.size", "host.tokens"])
def test_a_size_beyond_all_memory_is_a_typed_error(tmp_path: Path, entry: str, value: object) -> None:
    section, _, name = entry.partition(".")
    tree = {"page_size": 16, "device": {"tokens": 64}, "host": {"tokens": 64}, section: {name: value}}
    (tmp_path / "fuzz.yaml").write_text(yaml.safe_dump(tree))
    config = load_or_refuse(tmp_path / "fuzz.yaml")
    if config is not None:
        opens_or_fails(config)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("x: [" + ",".join("1" * 500_000), f"more than {VALUES_MAX} names and values"),
        ("x: {" + ",".join(f"a{i}: 1" for i in range(80_000)), f"more than {VALUES_MAX} names and values"),
        ("\n".join(f"a{i}: 1" for i in range(1500)), f"more than {PROBLEMS_MAX} problems"),
        ("\n".join("a: 1" for _ in range(1500)), f"more than {PROBLEMS_MAX} problems"),
        ("page_size: 1" + ":1" * 400_000, "page_size: expected a whole number"),
        ("page_size: 0b" + "1" * 1_000_000, "page_size: expected a whole number"),
        ('host: {size: "' + " " * 500_000 + '"}', "host.size"),
        ("write_policy: " + "write_bac" * 100_000, "write_policy: expected"),
        ("? " + "page_siz" * 100_000 + "\n: 1", "unknown entry"),
        ("a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\n", "aliases"),
        ("storage: {type: levels, options: {levels: [{type: file, type: memory}, {type: memory}]}}", "given twice"),
    ],
)
def test_a_small_file_takes_little_time_and_memory_to_refuse(tmp_path: Path, text: str, what: str) -> None:
    """Without a bound, these take from twenty seconds to hours."""
    (tmp_path / "bomb.yaml").write_text(text)
    with pytest.raises(ConfigError, match=what) as caught:
        load_config(tmp_path / "bomb.yaml", environ={}, overrides={})
    assert len(str(caught.value)) < 100_000
