"""Configuration: the precedence of its sources, and errors that list all problems with location and advice."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hicache.cli.config import effective_yaml
from hicache.config import FileStorageOptions, HiCacheConfig, HostConfig, foreign, load_config, read_key_file
from hicache.config.entries import all_entries, entry_names
from hicache.config.guard import GuardConfig
from hicache.config.integrity import IntegrityConfig
from hicache.config.redis_storage import RedisStorage, RedisStorageOptions
from hicache.config.removed import REMOVED
from hicache.config.s3_storage import S3StorageOptions
from hicache.config.section import Section
from hicache.config.storage import STORAGE_SECTIONS, FileStorage, PluginStorage
from hicache.errors import ConfigError, InvalidInput
from hicache.units import Share
from tests.log_records import messages_of, records_of

GIB = 1 << 30
HEX_KEY = "0123456789abcdef" * 4

Load = Callable[..., HiCacheConfig]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Loads YAML text, variables (without prefix) and flags."""

    def load(
        text: str | bytes = "", environ: Mapping[str, str] | None = None, overrides: Mapping[str, str] | None = None
    ) -> HiCacheConfig:
        file = tmp_path / "test.yaml"
        file.write_bytes(text.encode() if isinstance(text, str) else text)
        variables = {f"HICACHE_{name}": value for name, value in (environ or {}).items()}
        return load_config(file, environ={"PATH": "/bin", **variables}, overrides=overrides or {})

    return load


@pytest.fixture
def refused(load: Load) -> Callable[..., list[str]]:
    """The lines of the error, without its head."""

    def refused(*args: object, **kwargs: object) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load(*args, **kwargs)
        return [line.strip() for line in str(caught.value).splitlines()[1:]]

    return refused


# Sources and precedence


@pytest.mark.parametrize("text", ["# nothing\n", "host:\n  # size: 4GiB\n", "storage: {type: memory, guard: }"])
def test_missing_values_have_defaults(load: Load, text: str) -> None:
    storage = PluginStorage(type="memory") if "memory" in text else None
    assert load(text) == HiCacheConfig(storage=storage)
    assert load_config(None, environ={"HOME": "x", "HICACHED": "y"}, overrides={}) == HiCacheConfig()


def test_a_variable_is_stronger_than_the_file_and_a_flag_than_both(load: Load) -> None:
    text = "page_size: 16\nhost: {size: 1GiB}\ntransfer: {io_workers: 1}"
    config = load(text, {"PAGE_SIZE": "32", "HOST__SIZE": "2GiB"}, {"page_size": "128"})
    assert (config.page_size, config.host.size, config.transfer.io_workers) == (128, 2 * GIB, 1)


def test_a_stronger_source_replaces_alternatives_options_and_sections(load: Load) -> None:
    config = load("host: {ratio: 4}", {"HOST__SIZE": "2GiB"})
    assert (config.host.size, config.host.tokens, config.host.ratio) == (2 * GIB, None, None)
    text = "storage: {type: file, options: {path: /data}}"
    assert load(text, {"STORAGE__TYPE": "memory"}).storage == PluginStorage(type="memory")
    assert load(text, {"STORAGE": "null"}).storage is None
    config = load("storage_format: {encryption_key_file: /a}", {"STORAGE_FORMAT__ENCRYPTION_KEY_ENV": "MY_KEY"})
    assert config.storage_format.encryption_key_file is None
    assert config.storage_format.keys({"MY_KEY": HEX_KEY}) == (bytes.fromhex(HEX_KEY),)


def test_a_path_alone_reads_the_variables_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "test.yaml"
    file.write_text("page_size: 16")
    monkeypatch.setenv("HICACHE_WRITE_POLICY", "write_back")
    config = load_config(str(file))
    assert (config.page_size, config.write_policy) == (16, "write_back")
    assert load_config(file, environ={}).write_policy == HiCacheConfig().write_policy


@pytest.mark.parametrize("bad", [{"path": 5}, {"path": ""}, {"path": b"a"}, {"environ": 5}, {"overrides": ["a=b"]},
                                 {"overrides": {"page_size": 16}}, {"overrides": {5: "a"}}], ids=str)
def test_an_argument_of_the_wrong_type_is_a_typed_error(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="pass"):
        load_config(**{"path": None} | bad)


# Values


@pytest.mark.parametrize("text", ["1%", "12.5%", "80%", "33.333333333333336%", "95%"])
def test_a_share_of_memory_stays_a_share_in_every_source_and_form(load: Load, text: str) -> None:
    sources = [
        load(f"host: {{size: {text}}}\ndaemon: {{pool: '{text}'}}"),
        load("", {"HOST__SIZE": text, "DAEMON__POOL": text}),
        load("", None, {"host.size": text, "daemon.pool": text}),
        HiCacheConfig.model_validate({"host": {"size": text}, "daemon": {"pool": f" {text[:-1]} % "}}),
    ]
    for config in sources:
        assert config.host == HostConfig(size=Share(float(text[:-1]))) and config.host.ratio is None
        assert config.daemon.pool == config.host.size != HostConfig(size="80GiB").size
        assert yaml.safe_load(effective_yaml(config))["host"]["size"] == text
        for dumped in (config.model_dump(), config.model_dump(mode="json")):
            assert dumped["daemon"]["pool"] == text
            assert HiCacheConfig.model_validate(dumped) == config == load(effective_yaml(config))
    assert load("daemon: {pool: 0}").model_dump(mode="json")["daemon"]["pool"] == 0


def test_a_share_that_a_program_makes_has_the_same_limits() -> None:
    with pytest.raises(ConfigError, match=r"'95\.5%' must be between 1% and 95%"):
        HostConfig(size=Share(95.5))
    with pytest.raises(ConfigError, match="must be between"):
        HostConfig(size=Share(float("nan")))


def test_the_json_schema_shows_a_size_and_a_share() -> None:
    schema = HiCacheConfig.model_json_schema()["$defs"]
    assert "80%" in str(schema["HostConfig"]["properties"]["size"])
    assert "80%" in str(schema["DaemonConfig"]["properties"]["pool"])
    assert "80%" not in str(schema["DeviceConfig"]["properties"]["size"])


def test_values_are_read_with_their_units_and_switches_without_quotes(load: Load) -> None:
    config = load("host: {size: 200GiB, pin: off}\ntransfer: {storage_deadline: 250ms, shutdown_deadline: 3s}")
    assert (config.host.size, config.host.pin) == (200 * GIB, "off")
    assert (config.transfer.storage_deadline, config.transfer.shutdown_deadline) == (0.25, 3.0)
    assert load("eviction_policy: my.package:Policy").eviction_policy == "my.package:Policy"
    assert (HostConfig().ratio, HostConfig(tokens=4096).ratio) == (2.0, None)


def test_options_of_the_file_backend_are_read_with_their_units(load: Load) -> None:
    config = load("storage: {type: file, options: {path: /data, capacity: 5GiB, sync: true}}")
    assert isinstance(config.storage, FileStorage)
    assert config.storage.options == FileStorageOptions(path=Path("/data"), capacity="5GiB", sync=True)
    assert (config.storage.options.capacity, config.storage.options.free_space_floor) == (5 * GIB, GIB)


def test_a_section_built_by_a_program_is_checked_like_a_file() -> None:
    with pytest.raises(ConfigError) as refused:
        FileStorageOptions(path="", io_threads=65, capacty=1)  # type: ignore[call-arg]
    assert str(refused.value) == (
        "FileStorageOptions: path: the path is empty; write . for the working directory; "
        "io_threads: must be at most 64; got 65; capacty: unknown entry; did you mean capacity?"
    )
    with pytest.raises(ConfigError, match=r"HiCacheConfig: storage\.options\.capacity: 'lots' is not a valid size"):
        HiCacheConfig(storage={"type": "file", "options": {"path": "/x", "capacity": "lots"}})


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"sessions": {"tll": 1}}, r"sessions\.tll: unknown entry; did you mean ttl\?"),
        ({"storage": {"type": "file", "options": {"path": "/x", "syncc": 1}}}, r"syncc: .* did you mean sync\?"),
        ({"storage": {"type": "mine:Store", "guard": {"in_flght": 1}}}, r"in_flght: .* did you mean in_flight\?"),
        ({"ranks": {"x": 1}}, r"ranks\.x: unknown entry; there are deadline$"),
        ({"host": 5}, "host: is a section: write its entries .size, tokens, ratio, pin, shared. below it"),
        ({"storage": {"type": "mine:Store", "options": 5}}, "options: is a section: write its entries .by name."),
    ],
)
def test_an_error_deep_in_a_section_names_what_there_is_at_that_place(entries: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HiCacheConfig(**entries)


@pytest.mark.parametrize(
    ("section", "entry"),
    [(RedisStorageOptions, "url"), (RedisStorageOptions, "password_env"), (S3StorageOptions, "endpoint_url"),
     (S3StorageOptions, "access_key_env"), (IntegrityConfig, "tag"), (IntegrityConfig, "mac_key_env")],
)
def test_the_error_of_a_section_that_a_program_builds_holds_no_secret(section: type[Section], entry: str) -> None:
    with pytest.raises(ConfigError) as refused:
        section(**{entry: "hush hush"})
    assert "hush" not in str(refused.value) and refused.value.__context__ is None


def test_options_of_other_backends_are_passed_unchanged(load: Load) -> None:
    config = load("storage: {type: 'mine:Store', options: {url: x, depth: {n: 1}}}", {"STORAGE__OPTIONS__TRIES": "3"})
    assert config.storage is not None
    assert config.storage.options == {"url": "x", "depth": {"n": 1}, "tries": 3}


def test_a_configuration_cannot_be_changed_after_loading() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        HiCacheConfig().page_size = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    "text",
    ["host: {size: 3GiB}\nmetrics: {port: 0}", "storage: {type: file, options: {path: /x, capacity: 1048577B}}",
     "storage: {type: memory, options: {a: [1, {b: null}]}}\ntransfer: {storage_deadline: 1.5s}", ""],
)
def test_the_effective_configuration_loads_to_an_equal_one(load: Load, text: str) -> None:
    config = load(text)
    assert load(effective_yaml(config)) == config


# What is refused


def test_all_problems_are_reported_at_once_with_their_sources(refused: Callable[..., list[str]]) -> None:
    lines = refused(
        "page_size: 0\nhost:\n  szie: 4GiB\nstorage:\n  type: file\n  options: {capacity: lots}\n",
        {"TRANSFER__IO_WORKERS": "many", "HSOT__SIZE": "1"},
        {"integrity.tga": "none"},
    )
    for expected, origin in [
        ("page_size: must be at least 1; got 0", "test.yaml, line 1)"),
        ("host.szie: unknown entry; did you mean host.size?", "test.yaml, line 3)"),
        ("storage.options.path: is missing", "test.yaml, line 6)"),
        ("storage.options.capacity: 'lots' is not a valid size; write it like 200GiB", "test.yaml, line 6)"),
        ("transfer.io_workers: expected a whole number; got many", "(variable HICACHE_TRANSFER__IO_WORKERS)"),
        ("hsot.size: unknown entry; did you mean host.size?", "(variable HICACHE_HSOT__SIZE)"),
        ("integrity.tga: unknown entry; did you mean integrity.tag?", "(flag --set integrity.tga)"),
    ]:
        assert any(line.startswith(expected) and line.endswith(origin) for line in lines), (expected, lines)
    assert len(lines) == 7


@pytest.mark.parametrize(
    ("typo", "nearest"),
    [("pagesize", "page_size"), ("host_size", "host.size"), ("hosts.size", "host.size"),
     ("prefetch.treshold_tokens", "prefetch.threshold_tokens"),
     ("storage.options.capasity", "storage.options.capacity"),
     ("strage.options.path", "storage.options.path"), ("metrics.prot", "metrics.port")],
)
def test_the_error_for_a_typo_has_the_nearest_valid_name(
    refused: Callable[..., list[str]], typo: str, nearest: str
) -> None:
    file = "storage: {type: file, options: {path: /x}}"
    (line,) = refused(file, None, {typo: "1"})
    assert f"did you mean {nearest}?" in line
    variable = typo.upper().replace(".", "__")
    if "__" in variable:
        (line,) = refused(file, {variable: "1"})
        assert f"did you mean {nearest}?" in line


@pytest.mark.parametrize(
    ("variable", "hint"),
    [("PAGESIZE", "HICACHE_PAGESIZE (did you mean HICACHE_PAGE_SIZE?)"),
     ("HOST_SIZE", "HICACHE_HOST_SIZE (did you mean HICACHE_HOST__SIZE?)"),
     ("RATIO", "HICACHE_RATIO (hicache_ratio is host.ratio here)")],
)
def test_a_variable_without_two_underscores_that_matches_no_entry_is_ignored_with_a_warning(
    load: Load, caplog: pytest.LogCaptureFixture, variable: str, hint: str
) -> None:
    assert load("", {variable: "not a size"}) == load("")
    assert messages_of(caplog, "config.loading") == [
        f"environment variables that are not entries of the configuration are ignored: {hint}"
    ]


def test_the_variables_of_a_kubernetes_service_named_hicache_change_nothing(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    ports = (f"PORT_9470_TCP{end}" for end in ("", "_PORT", "_ADDR", "_PROTO"))
    service = dict.fromkeys(("PORT", "SERVICE_HOST", "SERVICE_PORT", *ports), "tcp://10.0.0.1:9470")
    for _ in range(2):
        assert load("page_size: 32", service).page_size == 32
    (record,) = records_of(caplog, "config.loading")  # one for all of them, and for all times that they are seen
    assert record.levelname == "WARNING" and "HICACHE_PORT, " in record.getMessage()


@pytest.mark.parametrize(
    ("text", "problem"),
    [("host: {size: 64}", "host.size: 64 has no unit; write 64GiB, 64MiB or 64B"),
     ("host: {size: '64'}", "host.size: 64 has no unit; write 64GiB, 64MiB or 64B"),
     ("host: {size: 64KB}", "host.size: must be at least 1MiB; got 64KB"),
     ("host: {size: 0%}", "host.size: '0%' must be between 1% and 95%, because the system"),
     ("host: {size: 0.99%}", "host.size: '0.99%' must be between 1% and 95%"),
     ("host: {size: 96%}", "host.size: '96%' must be between 1% and 95%"),
     ("host: {size: abc%}", "host.size: 'abc%' is not a valid share of memory; write it like 80%"),
     ("host: {size: 80 percent}", "host.size: '80 percent' is not a valid share of memory; write it like 80%"),
     ("daemon: {pool: -5%}", "daemon.pool: '-5%' is not a valid share of memory; write it like 80%"),
     ("host: {size: 0.8}", "host.size: 0.8 has no unit"),
     ("host: {size: {percent: 80}}", "host.size: expected a whole number"),
     ("device: {size: 80%}", "device.size: '80%' is not a valid size"),
     ("host: {size: 80%, tokens: 5000}", "host: set at most one of size, tokens, ratio, not size and tokens"),
     ("host: {size: 80%, shared: {name: x, owner: daemon}}", "host: size: the daemon creates the memory"),
     ("storage: {type: file, options: {path: /x, capacity: 500}}", "storage.options.capacity: 500 has no unit; write"),
     ("storage: {type: levels, options: {levels: [{type: memory}, {type: file, options: {path: /x, capacity: 5}}]}}",
      "storage.options.levels.1.options.capacity: 5 has no unit; write 5GiB"),
     ("transfer: {storage_deadline: 10}", "transfer.storage_deadline: 10 has no unit; write 10d, 10h, 10m, 10s"),
     ("prefetch: {timeout_base: 0.5}", "prefetch.timeout_base: 0.5 has no unit; write 0.5d, 0.5h, 0.5m")],
)
def test_a_written_size_or_duration_needs_a_unit(
    refused: Callable[..., list[str]], text: str, problem: str
) -> None:
    (line,) = refused(text)
    assert line.startswith(problem)


def test_a_variable_and_a_flag_need_a_unit_too(refused: Callable[..., list[str]]) -> None:
    (line,) = refused("", {"HOST__SIZE": "64"})
    assert line == "host.size: 64 has no unit; write 64GiB, 64MiB or 64B (variable HICACHE_HOST__SIZE)"
    (line,) = refused("", None, {"sessions.ttl": "600"})
    assert line.startswith("sessions.ttl: 600 has no unit")


def test_zero_needs_no_unit_and_programs_pass_numbers(load: Load) -> None:
    load("storage: {type: file, options: {path: /x, free_space_floor: 0}}\nprefetch: {timeout_per_1024_tokens: 0}")
    assert HostConfig(size=4096).size == 4096


@pytest.mark.parametrize("text", ["064", "-010", "0_7", "1:30", "1:30.5", "12:34:56"])
def test_a_number_that_yaml_reads_in_another_base_is_rejected_with_advice(
    refused: Callable[..., list[str]], text: str
) -> None:
    for line in (f"page_size: {text}", f"storage: {{type: memory, options: {{sizes: [{text}]}}}}"):
        (found,) = refused(line)
        assert f"{text} would be a number in base 8 or 60; write it without a leading zero or colon" in found


def test_numbers_with_one_meaning_are_accepted(load: Load) -> None:
    accepted = {"0x40": 64, "0b1000000": 64, "1_0": 10, "+64": 64, "089": 89, "64.0": 64, "'064'": 64}
    assert {text: load(f"page_size: {text}").page_size for text in accepted} == accepted
    assert load("", {"PAGE_SIZE": "064"}).page_size == 64, "a variable is text, not YAML"


@pytest.mark.parametrize("path", ["file:/abs?mode=ro", "file:cache", "FILE:///x", "s3://bucket/pages"])
@pytest.mark.parametrize("entry", [
    "storage: {type: file, options: {path: 'PATH'}}", "integrity: {mac_key_file: 'PATH'}",
    "storage: {type: remote, options: {socket: 'PATH'}}", "daemon: {socket: 'PATH'}",
    "storage: {type: redis, options: {url: 'redis://h', password_file: 'PATH'}}",
])
def test_a_url_is_not_a_path(
    refused: Callable[..., list[str]], load: Load, entry: str, path: str
) -> None:
    (found,) = refused(entry.replace("PATH", path))
    assert "a URL is not a path; write /a/path without a scheme, or ./ before" in found
    load(entry.replace("PATH", "./file:/abs"))


def test_a_login_in_a_path_is_not_quoted(refused: Callable[..., list[str]]) -> None:
    (found,) = refused("storage: {type: file, options: {path: 'redis://user:very-secret@host/0'}}")
    assert "a URL is not a path" in found and "secret" not in found


def test_a_home_directory_is_found_in_every_path(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load("storage: {type: file, options: {path: ~/pages}}\nintegrity: {mac_key_file: ~/mac.key}")
    assert isinstance(config.storage, FileStorage)
    assert (config.storage.options.path, config.integrity.mac_key_file) == (tmp_path / "pages", tmp_path / "mac.key")
    assert FileStorageOptions(path=Path("~")).path == tmp_path
    with pytest.raises(ConfigError, match="~no-such-user is not a user with a home directory; write the whole path"):
        load("storage: {type: file, options: {path: ~no-such-user/x}}")


def test_without_an_argument_a_variable_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "named.yaml").write_text("page_size: 32\nhost: {size: 3}")
    (tmp_path / "given.yaml").write_text("page_size: 48")
    monkeypatch.setenv("HOME", str(tmp_path))
    named = {"HICACHE_CONFIG_FILE": "~/named.yaml"}
    assert load_config(None, environ=named, overrides={"host.size": "2GiB"}).page_size == 32
    assert load_config(tmp_path / "given.yaml", environ=named).page_size == 48
    assert load_config(None, environ={}).page_size == 64
    with pytest.raises(ConfigError, match=r"host.size: 3 has no unit.*~/named.yaml of HICACHE_CONFIG_FILE, line 2"):
        load_config(None, environ=named)
    with pytest.raises(ConfigError, match=r"cannot be read: .*none.yaml of HICACHE_CONFIG_FILE"):
        load_config(None, environ={"HICACHE_CONFIG_FILE": "/none.yaml"})
    with pytest.raises(ConfigError, match="HICACHE_CONFIG_FILE is empty"):
        load_config(None, environ={"HICACHE_CONFIG_FILE": ""})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("hicache_ratio", "hicache_ratio is host.ratio here"),
        ("--hicache-size", "hicache_size is host.size here, with a unit"),
        ("max_local_cpu_size", "is host.size here"),
        ("chunk_size", "is page_size here"),
        ("local_disk", "is storage.options.path here"),
        ("remote_url", "is storage.options.url here, of storage.type: redis"),
        ("host.hicache_ratio", "is host.ratio here"),
        ("enable_hierarchical_cache", "has no counterpart: host memory is always used"),
    ],
)
def test_the_error_for_a_name_of_another_project_has_ours(
    refused: Callable[..., list[str]], name: str, hint: str
) -> None:
    (line,) = refused("", None, {name: "1"})
    assert "unknown entry; " in line and hint in line


def test_the_suggested_names_for_foreign_ones_exist() -> None:
    known = {name for kind in STORAGE_SECTIONS for name in entry_names(kind)}
    assert {entry for entry, _ in foreign.ENTRIES.values()} <= known
    assert not known & foreign.ENTRIES.keys()


def test_a_tier_of_one_page_is_valid(load: Load) -> None:
    assert load("page_size: 16\ndevice: {tokens: 16}\nhost: {tokens: 16}").host.tokens == 16


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("host: {size: 1GiB, tokens: 5}", "host: set at most one of size, tokens, ratio, not size and tokens"),
        ("host: {ratio: null}", "host: set one of size, tokens, ratio"),
        ("device: {size: 1GiB, tokens: 5}", "device: set at most one of size, tokens"),
        ("device: {size: 1GiB, memory_fraction: 0.9}", "device: set at most one of size, tokens, memory_fraction"),
        ("device: {memory_fraction: 1}", "device.memory_fraction: must be less than 1.0"),
        ("device: {memory_fraction: 0}", "device.memory_fraction: must be more than 0.0"),
        ("device: {memory_fraction: 90%}", "device.memory_fraction: expected a number; got 90%"),
        ("integrity: {mac_key_file: a, mac_key_env: B}", "integrity: set at most one of"),
        ("storage_format: {encryption_key_file: a, encryption_key_env: B}", "storage_format: set at most one of"),
        ("storage_format: {compression: gzip}", "storage_format.compression: expected 'none' or 'zstd'; got gzip"),
        ("page_size: 2000", "page_size: must be at most 1024; got 2000"),
        ("page_size: true", "page_size: True is not a number"),
        ("page_size: .nan", "page_size: expected a finite number"),
        ("host: {ratio: .inf}", "host.ratio: expected a finite number"),
        ("host: {size: -1}", "host.size: a size must be between 0 and 1024 TiB; got -1"),
        ("host: {size: 0}", "host.size: must be more than 0"),
        ("transfer: {storage_deadline: 0s}", "transfer.storage_deadline: must be more than 0"),
        ("prefetch: {host_share: 1.5}", "prefetch.host_share: must be at most 1.0"),
        ("integrity: {mac_key_file: \"a\\0\"}", "integrity.mac_key_file: a path cannot contain a null byte"),
        ("page_size: 16.5", "page_size: expected a whole number; got 16.5"),
        ("prefetch: {host_share: half}", "prefetch.host_share: expected a number; got half"),
        ("storage: {type: file, options: {path: /x, sync: maybe}}",
         "storage.options.sync: expected true or false; got maybe"),
        ("metrics: {host: 5}", "metrics.host: expected text; got 5"),
        ("host: {pin: never}", "host.pin: expected 'auto', 'on' or 'off'; got never"),
        ("host: {ratio: 0}", "host.ratio: must be more than 0"),
        ("device: {tokens: 63}", "device.tokens: is less than one page; got 63, page_size is 64"),
        ("page_size: 256\nhost: {tokens: 255}", "host.tokens: is less than one page; got 255, page_size is 256"),
        ("host: {xyzzy: 1}", "host.xyzzy: unknown entry; host has: size, tokens, ratio, pin"),
        ("host: {pin: atuo}", "host.pin: expected 'auto', 'on' or 'off'; got atuo, did you mean auto?"),
        ("eviction_policy: slruu", "eviction_policy: 'slruu' is not an eviction policy; did you mean 'slru'?"),
        ("page_size: 16\nhost: {}\npage_size: 32", "page_size: is given twice, first in line 1"),
        ("storage: {type: file, options: {path: /data, io_threads: 65}}",
         "storage.options.io_threads: must be at most 64; got 65"),
        ("integrity: {mac_key_file: a}\nstorage_format: {encryption_key_file: b}",
         "integrity and storage_format: set a MAC key or an encryption key"),
        ("host: 5", "host: is a section: write its entries (size, tokens, ratio, pin, shared)"),
        ("storage: 5", "storage: is a section"),
        ("storage: {options: {path: /x}}", "storage.type: is missing"),
        ("storage: {type: file}", "storage.options: is missing"),
        ("1: 2", "1: an entry's name must be text"),
        ("[1, 2]", "must hold entries"),
        ("a: [", "is not valid YAML"),
        ("a: &x 1\nb: *x", "is not valid YAML: aliases (*name) are not supported"),
        ("page_size: !!int '5'", "is not valid YAML: tags (!name) are not supported"),
        ("page_size: \"\\ud800\"", "is not valid YAML: text with half a surrogate pair"),
        (b"page_size: \xff", "is not valid YAML"),
        ("[" * 5000, "is nested too deeply"),
        ("page_size: " + "9" * 5000, "page_size: expected a whole number; got 999"),
        ("#" * (1 << 20) + "\n#", "is larger than 1 MiB"),
    ],
)
def test_impossible_jobs_are_rejected_with_the_reason(
    refused: Callable[..., list[str]], text: str | bytes, what: str
) -> None:
    (line,) = refused(text)
    assert line.startswith(what)
    assert "test.yaml" in line or line.startswith("integrity and")


def test_a_variable_that_is_not_text_is_refused(refused: Callable[..., list[str]]) -> None:
    (line,) = refused("", {"METRICS__HOST": "\udcff"})
    assert "not valid UTF-8" in line


@pytest.mark.parametrize("secret", [HEX_KEY, "hunter-2", "x" * 300])
@pytest.mark.parametrize(
    "text",
    ["integrity: {mac_key_env: %s}", "storage_format: {encryption_key_env: %s}",
     "storage: {type: redis, options: {url: 'redis://h', password_env: %s}}",
     "storage: {type: redis, options: {url: 'redis://h', sentinel_password_env: %s}}",
     "storage: {type: levels, options: {levels: "
     "[{type: memory}, {type: redis, options: {url: 'redis://h', password_env: %s}}]}}"],
)
def test_an_error_about_the_name_of_a_variable_does_not_repeat_what_stands_there(
    refused: Callable[..., list[str]], text: str, secret: str
) -> None:
    (line,) = refused(text % f"'{secret}'")
    assert "_env: must be the name of an environment variable, not its value (file" in line
    assert secret[:8] not in line


# The schema itself


def test_every_entry_is_described() -> None:
    assert all(len(entry.description) > 20 for entry in all_entries())
    assert len(set(entry_names())) == len(entry_names())


def test_the_documentation_is_the_one_generated_from_the_schema(repository: Path) -> None:
    from hicache.cli.config import markdown  # noqa: PLC0415

    assert (repository / "docs/configuration.md").read_text() == markdown()


# The MAC key


def _key_file(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("content", [bytes.fromhex(HEX_KEY), HEX_KEY.encode(), f" {HEX_KEY.upper()}\n".encode()])
def test_a_key_file_holds_raw_bytes_or_hexadecimal_digits(tmp_path: Path, content: bytes) -> None:
    path = _key_file(tmp_path / "key", content)
    config = HiCacheConfig.model_validate({"integrity": {"mac_key_file": str(path)}})
    assert config.integrity.keys() == (bytes.fromhex(HEX_KEY),)


@pytest.mark.parametrize("content", [b"", b"short", HEX_KEY.encode()[:-1], b"g" * 64, b"\0" * 33, b"a" * 4096,
                                     f"{HEX_KEY}\n{HEX_KEY[1:]}".encode(), f"{HEX_KEY}\n".encode() * 3])
def test_a_key_file_without_a_key_is_refused_and_not_quoted(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ConfigError, match="is neither") as caught:
        read_key_file(_key_file(tmp_path / "key", content), "MAC key file")
    assert len(content) < 4 or content.decode() not in str(caught.value)


def test_a_key_file_that_others_own_or_may_use_is_rejected(tmp_path: Path) -> None:
    for mode in (0o604, 0o660, 0o644, 0o602, 0o450, *([] if os.geteuid() == 0 else [0o640])):
        with pytest.raises(ConfigError, match="chmod 600"):
            read_key_file(_key_file(tmp_path / "key", HEX_KEY.encode(), mode), "MAC key file")
    path = _key_file(tmp_path / "key", HEX_KEY.encode())
    if os.geteuid() != 0:
        assert read_key_file(path, "MAC key file")  # only root can give files away
        return
    os.chown(path, 12345, -1)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        read_key_file(path, "MAC key file")


def test_a_key_comes_from_the_named_variable_which_is_not_reported_as_a_typo(load: Load) -> None:
    config = load("integrity: {mac_key_env: HICACHE_KEY}", {"KEY": HEX_KEY})
    assert config.integrity.keys({"HICACHE_KEY": HEX_KEY}) == (bytes.fromhex(HEX_KEY),)
    with pytest.raises(ConfigError, match="HICACHE_KEY: is not set"):
        config.integrity.keys({})
    with pytest.raises(ConfigError, match="is not 64"):
        config.integrity.keys({"HICACHE_KEY": "\udcff"})


LONG_NAME = "A_NAME_THAT_IS_TOO_LONG_TO_BE_SHOWN_" + "X" * 60


@pytest.mark.parametrize("name", ["SECRET", "s3__secret", LONG_NAME])
@pytest.mark.parametrize(
    "text",
    ["integrity: {mac_key_env: HICACHE_%s}",
     "storage: {type: redis, options: {url: 'redis://h', password_env: HICACHE_%s}}",
     "storage: {type: s3, options: {bucket: pages, access_key_env: A, secret_key_env: HICACHE_%s}}",
     "storage: {type: 'mine:Store', options: {login: {token_env: HICACHE_%s}}}",
     "storage: {type: levels, options: {levels: [{type: memory}, {type: levels, options: {levels: "
     "[{type: memory}, {type: redis, options: {url: 'redis://h', password_env: HICACHE_%s}}]}}]}}"],
)
def test_a_variable_named_for_a_secret_is_not_reported_as_a_typo(
    load: Load, refused: Callable[..., list[str]], text: str, name: str
) -> None:
    assert load(text % name, {name: "hunter2"}) == load(text % name)
    (line,) = refused(text % name, {f"{name}__X": "hunter2"})  # no entry names this variable
    assert "unknown entry" in line and "hunter2" not in line


def test_a_variable_stays_named_for_a_secret_where_another_source_replaces_the_entry(load: Load) -> None:
    text = "storage: {type: redis, options: {url: 'redis://h', password_env: HICACHE_SECRET}}"
    assert load(text, {"SECRET": "hunter2"}, {"storage.type": "memory"}).storage == PluginStorage(type="memory")
    text = "integrity: {mac_key_env: HICACHE_SECRET}"
    assert load(text, {"SECRET": HEX_KEY}, {"integrity.mac_key_file": "/x"}).integrity.mac_key_env is None


def test_a_section_in_thousands_of_sections_is_only_unknown(refused: Callable[..., list[str]]) -> None:
    (line,) = refused("", {"__".join(["A"] * 5000): "1"})
    assert line.startswith("a.a.a.") and "unknown entry" in line


def test_a_variable_is_named_for_a_secret_by_another_variable_too(load: Load) -> None:
    text = "storage: {type: redis, options: {url: 'redis://h'}}"
    config = load(text, {"STORAGE__OPTIONS__PASSWORD_ENV": "HICACHE_SECRET", "SECRET": "hunter2"})
    assert isinstance(config.storage, RedisStorage)
    assert config.storage.options.password_env == "HICACHE_SECRET"


def test_the_previous_key_comes_second(tmp_path: Path, load: Load) -> None:
    other = "cd" * 32
    file = _key_file(tmp_path / "key", f"{HEX_KEY}\n{other}\n".encode())
    assert HiCacheConfig().integrity.keys({}) == HiCacheConfig().storage_format.keys({}) == ()
    for section, name in (("integrity", "mac_key"), ("storage_format", "encryption_key")):
        for text in (f"{section}: {{{name}_file: {file}}}", f"{section}: {{{name}_env: HICACHE_KEYS}}"):
            config = load(text)
            read = config.integrity.keys if name == "mac_key" else config.storage_format.keys
            assert read({"HICACHE_KEYS": f"{HEX_KEY} {other}"}) == (bytes.fromhex(HEX_KEY), bytes.fromhex(other))
        with pytest.raises(ConfigError, match=f"is not set; export it, or remove {section}.{name}_env"):
            read({})


# Removed entries

GONE = sorted(REMOVED)
# What an entry of a store needs beside it.
BUCKET: dict[str, Any] = {"type": "s3", "options": {"bucket": "pages"}}


def nested(name: str, value: object) -> dict[str, Any]:
    """Return the tree of a configuration with this entry."""
    first, *rest = name.split(".")
    inner = nested(".".join(rest), value) if rest else value
    if first == "storage":
        assert isinstance(inner, dict)
        return {"storage": {**BUCKET, **inner, "options": BUCKET["options"] | inner.get("options", {})}}
    return {first: inner}


def in_parts(name: str, value: object) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the entry of a store in each kind of composition, and in one inside another one, with its path."""
    part = {**nested(name, value)["storage"], "name": "a"}
    below = name.removeprefix("storage.")
    shards = {"type": "sharded", "options": {"parts": [{"type": "memory", "name": "b"}, part]}}
    yield f"storage.options.parts.1.{below}", {"storage": shards}
    yield f"storage.options.levels.0.{below}", {"storage": {"type": "levels", "options": {
        "levels": [part, {"type": "memory"}]}}}
    yield f"storage.options.levels.1.options.parts.1.{below}", {"storage": {"type": "levels", "options": {
        "levels": [{"type": "memory"}, shards]}}}


@pytest.mark.parametrize("name", GONE)
def test_a_removed_entry_is_refused_in_each_source_with_what_replaced_it(
    refused: Callable[..., list[str]], name: str
) -> None:
    expected = f"{name}: was removed: {REMOVED[name]} ("
    base = yaml.safe_dump({"storage": BUCKET}) if name.startswith("storage.") else ""
    for where, source in (
        ("file", (yaml.safe_dump(nested(name, 1)),)),
        ("variable", (base, {name.replace(".", "__").upper(): "1"})),
        ("flag", (base, None, {name: "1"})),
    ):
        (line,) = refused(*source)
        assert line.startswith(expected) and where in line.removeprefix(expected)
    with pytest.raises(ConfigError, match=re.escape(f"{name}: was removed: {REMOVED[name]}")):
        HiCacheConfig(**nested(name, 1))


@pytest.mark.parametrize("name", [name for name in GONE if name.startswith("storage.")])
def test_a_removed_entry_of_a_store_is_refused_in_parts(refused: Callable[..., list[str]], name: str) -> None:
    for path, tree in in_parts(name, 1):
        (line,) = refused(yaml.safe_dump(tree))
        assert line.startswith(f"{path}: was removed: {REMOVED[name]} (")


def test_all_entries_of_a_removed_section_are_refused(refused: Callable[..., list[str]]) -> None:
    lines = refused("schedule: {policy: fcfs, deep: {er: 1}}")
    assert [line.partition(": was removed: the engine schedules;")[0] for line in lines] == [
        "schedule.deep.er", "schedule.policy"
    ]


def test_a_section_built_by_a_program_refuses_its_removed_entries() -> None:
    with pytest.raises(ConfigError, match=r"^GuardConfig: retry_share: was removed: one call in ten"):
        GuardConfig(retry_share=0.5)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="S3StorageOptions: open_timeout: was removed"):
        S3StorageOptions(bucket="pages", open_timeout=1)  # type: ignore[call-arg]


def test_no_removed_entry_exists() -> None:
    names = {name for kind in STORAGE_SECTIONS for name in entry_names(kind)}
    assert not names & set(GONE)
    assert not [name for name in names for gone in GONE if name.startswith(f"{gone}.")]


# Anything at all

_names = st.sampled_from([part for name in entry_names() for part in name.split(".")])
_scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.dates(), st.binary(max_size=4),
    st.sampled_from(["4GiB", "5s", "file", "memory", "auto", "/x"]),
)
_trees = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_names | st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.long
@given(text=st.text() | st.binary() | st.text(alphabet="{}[]:,-&*!|>'\"%@`#?<\n a1.~", max_size=40))
def test_any_text_is_a_configuration_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str | bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode(errors="surrogatepass"))
    try:
        assert isinstance(load_config(file, environ={}, overrides={}), HiCacheConfig)
    except ConfigError as error:
        assert str(error).encode()  # can be printed


@pytest.mark.long
@given(tree=st.dictionaries(_names, _trees, max_size=4))
def test_any_yaml_document_is_a_configuration_or_refused(
    tmp_path_factory: pytest.TempPathFactory, tree: dict[str, object]
) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    file.write_text(yaml.safe_dump(tree))
    try:
        config = load_config(file, environ={}, overrides={})
    except ConfigError as error:
        assert str(error).encode()
    else:
        file.write_text(effective_yaml(config))
        assert load_config(file, environ={}, overrides={}) == config


@pytest.mark.long
@given(
    environ=st.dictionaries(st.text(max_size=12).map("HICACHE_{}".format) | st.text(max_size=4), st.text(max_size=8)),
    overrides=st.dictionaries(st.sampled_from(entry_names()) | st.text(max_size=8), st.text(max_size=8)),
)
def test_any_variables_and_flags_are_a_configuration_or_refused(
    environ: dict[str, str], overrides: dict[str, str]
) -> None:
    try:
        load_config(None, environ=environ, overrides=overrides)
    except ConfigError as error:
        assert str(error).encode()
