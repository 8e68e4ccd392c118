"""The speeds of a machine: times of prefills, and speeds as text and as reports."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from hicache.errors import ConfigError
from hicache_lab.speeds import ComputeSpeed, Speeds, StorageSpeed, bandwidth, measured_storage, storage_speed


def test_a_prefill_takes_its_tokens_and_the_pairs_that_it_attends_to() -> None:
    speed = ComputeSpeed(tokens_per_s=100, pairs_per_s=10)
    # Tokens 3 and 4 of a prompt attend to 3 and 4 tokens.
    assert speed.prefill_s(2, 2) == 2 / 100 + 7 / 10
    assert speed.prefill_s(0, 4) == pytest.approx(speed.prefill_s(0, 2) + speed.prefill_s(2, 2))
    assert ComputeSpeed().prefill_s(5, 10) == 0.0


def test_the_speed_of_a_store_is_read_from_text_and_keeps_what_the_text_does_not_name() -> None:
    base = StorageSpeed(read_bytes_per_s=1.0, write_bytes_per_s=2.0, fixed_s=3.0, parallel=4)
    assert storage_speed("read=3GB/s, fixed=2s", base) == StorageSpeed(
        read_bytes_per_s=3e9, write_bytes_per_s=2.0, fixed_s=2.0, parallel=4
    )
    assert storage_speed("", base) == base
    assert storage_speed("write=1MiB/s,parallel=16").parallel == 16
    assert storage_speed("links=1").links == 1 and storage_speed("").links == 2
    assert bandwidth("800MiB/s") == 800 * 2**20


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("read=3GB", "write it like 3GB/s"), ("read=3/s", "has no unit"), ("read=0B/s", "above zero"),
        ("fixed=7", "has no unit"), ("parallel=0", "whole number from 1"), ("parallel=many", "whole number from 1"),
        ("links=3", "links must be 1, of one disk, or 2"), ("speed=1GB/s", "is not one of read="),
        ("read", "is not one of read="), ("read=1GB/s,read=2GB/s", "twice"),
    ],
)
def test_a_bad_speed_is_an_error_that_says_how_to_write_it(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        storage_speed(text)


def report(directory: Path, *figures: Mapping[str, object]) -> Path:
    path = directory / "report.json"
    path.write_text(json.dumps({"rows": [{"figures": one} for one in figures]}))
    return path


def test_a_report_of_doctor_gives_the_speeds_of_its_first_store(tmp_path: Path) -> None:
    store = {"page": 1000, "write_bytes_per_s": 2e6, "read_fixed_s": 0.004, "read_page_s": 0.001, "read_pages": 16}
    speed = measured_storage(report(tmp_path, {"total": 5}, store, {**store, "page": 7}))
    assert speed == StorageSpeed(read_bytes_per_s=1e6, write_bytes_per_s=2e6, fixed_s=0.004, parallel=16)


def test_another_file_is_not_a_report(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no store that was read"):
        measured_storage(report(tmp_path, {"total": 5}))
    with pytest.raises(ConfigError, match="not positive"):
        measured_storage(
            report(tmp_path, {"page": 1, "read_page_s": -1, "write_bytes_per_s": 1, "read_fixed_s": 0, "read_pages": 1})
        )
    other = tmp_path / "other"
    for text in ("", "[]", '{"rows": 3}', '{"rows": [{}]}'):
        other.write_text(text)
        with pytest.raises(ConfigError, match="is not a report"):
            measured_storage(other)
    with pytest.raises(ConfigError, match="cannot be read"):
        measured_storage(tmp_path / "missing")


def test_the_default_speeds_are_those_that_the_options_name() -> None:
    named, default = storage_speed("read=3GB/s,write=1GB/s,fixed=100us,parallel=4"), Speeds().storage
    assert named.fixed_s == pytest.approx(default.fixed_s)
    assert replace(named, fixed_s=0.0) == replace(default, fixed_s=0.0)
    assert Speeds().host_bytes_per_s == bandwidth("25GB/s")
