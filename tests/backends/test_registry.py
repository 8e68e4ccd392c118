"""Backends by name: built-in, from another module, and with wrong names or options."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from hicache.backends.file import FileDriver
from hicache.backends.memory import MemoryDriver
from hicache.backends.mooncake.driver import MooncakeDriver
from hicache.backends.redis import RedisDriver
from hicache.backends.registry import BackendSpec, check_backend, open_spec
from hicache.backends.s3 import S3Driver
from hicache.backends.storage import StoreGroup
from hicache.clock import SYSTEM_CLOCK, Clock
from hicache.config import HiCacheConfig, Section
from hicache.errors import ConfigError, InvalidInput, NotOurs
from hicache.frame import FrameCodec
from hicache.units import Count, Duration
from hicache_lab.clocks import ManualClock
from hicache_lab.conformance import driver_of, open_backend

from ._files import CODEC, PAGE


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("flie", "did you mean 'file'"),
        ("memroy", "did you mean 'memory'"),
        ("zzz", "known are"),
        ("no.such.module:Class", "cannot be loaded"),
        ("hicache.backends.memory:Nothing", "cannot be loaded"),
        (":", "cannot be loaded"),
        (".relative:Class", "cannot be loaded"),
        ("hicache.backends.registry:ENTRY_POINT_GROUP", "not a class or a function"),
    ],
)
def test_a_wrong_name_is_rejected_with_a_hint(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_backend(name, CODEC, {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "x", "capasity": 5}, "did you mean capacity"),
        ({"path": "x", "zzz": 5}, "there are path, capacity"),
        ({}, "path"),
        ({"path": "x", "capacity": "many"}, "capacity"),
        ({"path": "x", "io_threads": 0}, "io_threads"),
    ],
)
def test_wrong_options_are_rejected_before_a_store_is_opened(
    tmp_path: Path, options: dict[str, object], message: str
) -> None:
    if "path" in options:
        options = {**options, "path": str(tmp_path / "s")}
    for open_it in (check_backend, partial(open_backend, codec=CODEC)):
        with pytest.raises(ConfigError, match=message):
            open_it("file", options=options)
    assert list(tmp_path.iterdir()) == []


def test_a_storage_failure_keeps_its_own_error(tmp_path: Path) -> None:
    (tmp_path / "something").write_text("")
    with pytest.raises(NotOurs):
        open_backend("file", CODEC, {"path": str(tmp_path)})


def not_a_backend(codec: object) -> object:
    """A factory that is not annotated to return a backend."""
    return codec


@pytest.mark.parametrize(
    "name",
    ["json:loads", "builtins:dict", "builtins:print", "pathlib:Path", "tests.backends.test_registry:not_a_backend"],
)
def test_a_factory_that_makes_no_driver_is_rejected_before_it_is_called(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a Driver"):
        check_backend(name, {})
    with pytest.raises(ConfigError, match="is not a Driver"):
        open_backend(name, CODEC, {})


def makes_memory(codec: FrameCodec) -> MemoryDriver:
    """A factory annotated to return a backend."""
    return MemoryDriver()


class _Late:
    """A factory that is an object."""

    def __call__(self, codec: FrameCodec) -> MemoryDriver:
        """Make the backend."""
        return MemoryDriver()


late = _Late()


class Abstract(StoreGroup):
    """A backend without the abstract methods."""

    def __init__(self, codec: FrameCodec) -> None:
        super().__init__(codec, None)


def fails(codec: FrameCodec) -> MemoryDriver:
    """A factory whose call raises TypeError."""
    raise TypeError("5 is no codec")


def lies(codec: FrameCodec) -> MemoryDriver:
    """A factory that does not return its annotated type."""
    return "a store"  # type: ignore[return-value]


@pytest.mark.parametrize("name", ["makes_memory", "late"])
def test_a_factory_annotated_to_return_a_backend_is_accepted(name: str) -> None:
    check_backend(f"tests.backends.test_registry:{name}", {})
    driver_of(open_backend(f"tests.backends.test_registry:{name}", CODEC, {}), MemoryDriver)


@pytest.mark.parametrize(
    ("name", "message"), [("Abstract", "abstract"), ("fails", "5 is no codec"), ("lies", "made a str")]
)
def test_a_backend_that_cannot_be_made_is_a_configuration_error(name: str, message: str) -> None:
    check_backend(f"tests.backends.test_registry:{name}", {})
    with pytest.raises(ConfigError, match=message):
        open_backend(f"tests.backends.test_registry:{name}", CODEC, {})


class ShelfOptions(Section):
    """Options of a backend of another package, as a section."""

    shelves: Count = Field(default=1, ge=1, le=3)
    patience: Duration = 1.0


class Shelf(MemoryDriver):
    """A backend that takes a section."""

    def __init__(self, codec: FrameCodec, options: ShelfOptions) -> None:
        super().__init__()
        self.options = options


SHELF = "tests.backends.test_registry:Shelf"


def test_a_backend_of_another_package_may_take_a_section_which_is_checked_before_it_is_opened() -> None:
    backend = open_backend(SHELF, CODEC, {"shelves": 2, "patience": "250ms"})
    assert driver_of(backend, Shelf).options == ShelfOptions(shelves=2, patience=0.25)
    driver_of(open_backend(SHELF, CODEC, ShelfOptions()), Shelf)
    with pytest.raises(ConfigError, match=f"backend {SHELF}: shelves: must be at most 3; got 4"):
        check_backend(SHELF, {"shelves": 4})
    with pytest.raises(ConfigError, match="shelfs: unknown entry; did you mean shelves"):
        check_backend(SHELF, {"shelfs": 2})
    with pytest.raises(ConfigError, match="does not take a HiCacheConfig; pass options by name"):
        check_backend(SHELF, HiCacheConfig())


def by_keyword(codec: FrameCodec, name: str = "shelf", *, chosen: ShelfOptions | None = None) -> Shelf:
    """A factory whose section is not its second parameter."""
    assert name == "shelf" and chosen is not None
    return Shelf(codec, chosen)


def needs_more(codec: FrameCodec, options: ShelfOptions, more: int) -> MemoryDriver:
    """A factory with a required parameter that no configuration can give."""
    raise NotImplementedError


class Timed(MemoryDriver):
    """A driver that takes a clock."""

    def __init__(self, codec: FrameCodec, *, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__()
        self.clock = clock


def test_a_factory_with_a_clock_gets_that_of_its_store_also_as_a_part() -> None:
    clock, timed = ManualClock(), f"{__name__}:Timed"
    parts = {"levels": [{"type": "memory"}, {"type": timed}]}
    with closing(open_spec(BackendSpec("levels", parts), CODEC, clock)) as pair:
        assert driver_of(pair.stores[1], Timed).clock is clock
        assert [store._clock for store in pair.stores] == [clock, clock]
    with closing(open_spec(BackendSpec(timed), CODEC)) as store:
        assert driver_of(store, Timed).clock is SYSTEM_CLOCK
    with pytest.raises(ConfigError, match="it takes none"):
        check_backend(timed, {"clok": 1})


def test_a_section_goes_to_the_parameter_that_is_annotated_with_it() -> None:
    backend = open_backend("tests.backends.test_registry:by_keyword", CODEC, {"shelves": 2})
    assert driver_of(backend, Shelf).options.shelves == 2
    with pytest.raises(ConfigError, match="missing a required argument: 'more'"):
        check_backend("tests.backends.test_registry:needs_more", {"shelves": 2})


def test_a_store_with_a_section_is_limited_like_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "shelf-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf\nVersion: 1\n")
    (package / "entry_points.txt").write_text(f"[hicache.backends]\nshelf = {SHELF}\n")
    monkeypatch.syspath_prepend(tmp_path)
    options = {"shelves": 2, "capacity": 4 * PAGE}
    check_backend("shelf", options)
    backend = open_backend("shelf", CODEC, options)
    driver_of(backend, Shelf)
    assert backend.usage().capacity_bytes == 4 * PAGE
    backend.close()
    with pytest.raises(ConfigError, match="capacty: unknown entry"):
        check_backend("shelf", {"capacty": 1})


@pytest.mark.parametrize("kind", [FileDriver, RedisDriver, S3Driver, MooncakeDriver])
def test_a_store_takes_only_its_own_section(kind: type[Any]) -> None:
    with pytest.raises(InvalidInput, match=r"options: a value of type dict is not valid; pass a \w+StorageOptions"):
        kind(CODEC, {"path": "x"})
