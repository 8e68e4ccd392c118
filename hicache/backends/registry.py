"""Backends by name: built in, from an entry point of another package, or `module:Class`.

A factory is a class derived from `StorageBackend`, or a function `(codec, **options)` that is annotated to return one,
so that a configuration can be checked without opening a store. Other packages add one under the entry-point group
`hicache.backends`; a name there does not replace a built-in one. Under the same name in the group `hicache.raw_stores`
they may add a function `(**options) -> RawStore` of the same options, so that `hicache ls` and its like know the store.

A store that can be listed and has no option `capacity_bytes` gets one: see `limit`.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeAlias, cast, get_origin, get_type_hints

from ..errors import ConfigError, InvalidInput
from ..frame import FrameCodec
from .base import Composite, StorageBackend
from .faults import FaultOptions, FaultyBackend
from .guard import GuardedBackend, GuardOptions, guards_of
from .limit import LimitedBackend
from .raw import RawStore

ENTRY_POINT_GROUP = "hicache.backends"
RAW_ENTRY_POINT_GROUP = "hicache.raw_stores"
_CAPACITY = "capacity_bytes"

Factory: TypeAlias = Callable[..., StorageBackend]


# Where the factories of the built-in backends are. A backend is imported when it is asked for.
_BUILT_IN: Mapping[str, str] = {
    "memory": "hicache.backends.memory:MemoryBackend",
    "file": "hicache.backends.file:open_file_backend",
    "levels": "hicache.backends.compose:open_levels",
    "mirror": "hicache.backends.compose:open_mirror",
    "sharded": "hicache.backends.compose:open_sharded",
    "redis": "hicache.backends.redis:open_redis_backend",
    "s3": "hicache.backends.s3:open_s3_backend",
    "mooncake": "hicache.backends.mooncake:open_mooncake_backend",
}
# Where what opens a built-in store for its operator is: a function of the same options that returns a RawStore.
_RAW: Mapping[str, str] = {
    "file": "hicache.backends.file.raw:open_raw",
    "redis": "hicache.backends.redis.raw:open_raw",
    "s3": "hicache.backends.s3:open_raw",
    "mooncake": "hicache.backends.mooncake.raw:open_raw",
}
# The built-in backends that are made of others, and the option that lists those.
_PARTS_OPTION: Mapping[str, str] = {"levels": "levels", "mirror": "parts", "sharded": "parts"}
_PART_ENTRIES = ("name", "type", "options", "guard", "optional")
# Each part costs threads and, in a sharded set, a share of every lookup; more are a slip of the hand.
PARTS_MAX = 64


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """A backend that can be opened: its type, and what its factory and its guard take.

    `guard` holds keyword options of `GuardOptions`; None opens it without a guard, for tests and for measuring. `name`
    is how it is called in metrics and messages, None for its type.
    """

    type: str
    options: Mapping[str, object] = field(default_factory=dict)
    guard: Mapping[str, object] | None = field(default_factory=dict)
    name: str | None = None


@dataclass(frozen=True, slots=True)
class PartSpec:
    """One part of a composition. `optional`: the composition opens without it, and takes it in when it can be opened.
    """

    name: str
    backend: BackendSpec
    optional: bool = False

    @property
    def may_come_late(self) -> bool:
        """Whether it, or a part inside it, is optional."""
        inside = part_specs(self.backend.type, self.backend.options)
        return self.optional or any(part.may_come_late for part in inside)


def part_specs(type_name: str, options: Mapping[str, object]) -> list[PartSpec]:
    """The parts that a built-in composition is configured with; none for any other backend. Opens nothing.

    A part is a mapping with `type` and, if need be, `name`, `options`, `guard` and `optional`. One without a name is
    called like its type, a second one of that type `<type>-2`. Raises ConfigError.
    """
    option = _PARTS_OPTION.get(type_name)
    if option is None:
        return []
    listed = options.get(option)
    if not isinstance(listed, Sequence) or isinstance(listed, str) or not 2 <= len(listed) <= PARTS_MAX:
        raise ConfigError(f"backend {type_name}: {option} must list 2 to {PARTS_MAX} backends")
    found: dict[str, PartSpec] = {}
    for number, entry in enumerate(listed):
        part = _part_spec(f"backend {type_name}: {option}.{number}", entry, found)
        if part.name in found:
            raise ConfigError(f"backend {type_name}: two of its {option} are named {part.name!r}; rename one of them")
        found[part.name] = part
    return list(found.values())


def _part_spec(where: str, entry: object, others: Mapping[str, object]) -> PartSpec:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("type"), str):
        raise ConfigError(f"{where}: must be a backend, with its type and options")
    for unknown in set(entry) - set(_PART_ENTRIES):
        raise ConfigError(f"{where}: unknown entry {unknown!r}; a part has {', '.join(_PART_ENTRIES)}")
    kind, options, guard = entry["type"], entry.get("options", {}), entry.get("guard", {})
    if not isinstance(options, Mapping) or not (guard is None or isinstance(guard, Mapping)):
        raise ConfigError(f"{where}: options and guard must be sections")
    name, optional = entry.get("name"), entry.get("optional", False)
    if name is None:
        number = 1 + sum(taken == kind or taken.startswith(f"{kind}-") for taken in others)
        name = kind if number == 1 else f"{kind}-{number}"
    if not isinstance(name, str) or not name or not isinstance(optional, bool):
        raise ConfigError(f"{where}: name must be text, optional true or false")
    return PartSpec(name, BackendSpec(kind, options, guard, name), optional)


def open_spec(spec: BackendSpec, codec: FrameCodec) -> StorageBackend:
    """Open what `spec` describes, behind its guard. Blocks and raises as `open_backend`, also for the guard's options.

    What is composed of several backends gets no guard of its own: each part has one.
    """
    options = None if spec.guard is None else _guard_options(spec)
    backend = open_backend(spec.type, codec, spec.options)
    if options is None or (isinstance(backend, Composite) and (len(backend.parts) > 1 or any(guards_of(backend)))):
        return backend
    if options.inject is not None:
        backend = FaultyBackend(backend, FaultOptions(**cast(Any, options.inject)))
    return GuardedBackend(backend, options, name=spec.name or spec.type)


def _guard_options(spec: BackendSpec) -> GuardOptions:
    try:
        options = GuardOptions(**cast(Any, spec.guard))
        FaultOptions(**cast(Any, options.inject or {}))
    except (InvalidInput, TypeError) as error:
        raise ConfigError(f"backend {spec.name or spec.type}: {error}") from error
    return options


def open_backend(type_name: str, codec: FrameCodec, options: Mapping[str, object]) -> StorageBackend:
    """Open the backend `type_name` with `options`. Blocks as its constructor does.

    Raises ConfigError for a name nobody knows, options the backend does not take or refuses, and a factory that does
    not make a StorageBackend; BackendError as the backend does.
    """
    factory = check_backend(type_name, options)
    own, capacity_bytes = _split_capacity(type_name, factory, options)
    try:
        backend: object = factory(codec, **own)
    except (InvalidInput, TypeError) as error:
        raise ConfigError(f"backend {type_name}: {error}") from error
    if not isinstance(backend, StorageBackend):
        raise ConfigError(f"backend {type_name}: its factory made a {type(backend).__name__}, not a StorageBackend")
    if capacity_bytes is None:
        return backend
    spec = BackendSpec(type_name, own)
    try:
        return LimitedBackend(backend, lambda: open_raw(spec), capacity_bytes=cast(int, capacity_bytes))
    except InvalidInput as error:
        backend.close()
        raise ConfigError(f"backend {type_name}: {error}") from error


def _split_capacity(
    type_name: str, factory: Factory, options: Mapping[str, object]
) -> tuple[Mapping[str, object], object]:
    """The options that the factory takes, and the limit to put around what it makes, None for none."""
    if _CAPACITY not in options or _raw_place(type_name) is None or _takes_capacity(factory):
        return options, None
    return {name: value for name, value in options.items() if name != _CAPACITY}, options[_CAPACITY]


def _takes_capacity(factory: Callable[..., object]) -> bool:
    try:
        return _CAPACITY in inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return True  # an extension type without a signature; it says so itself if it does not


def _raw_place(type_name: str) -> EntryPoint | None:
    """Where what opens the raw store of a backend is; None if there is none."""
    built_in = _RAW.get(type_name)
    if built_in is not None:
        return EntryPoint(type_name, built_in, RAW_ENTRY_POINT_GROUP)
    return next(iter(entry_points(group=RAW_ENTRY_POINT_GROUP, name=type_name)), None)


def check_backend(type_name: str, options: Mapping[str, object]) -> Factory:
    """The factory of `type_name`, found to be one and to take `options`. Imports it, and opens nothing.

    Raises ConfigError for a name nobody knows, for what makes no StorageBackend, and for options it does not take; in
    all this, parts of a composition are looked at as well.
    """
    factory = _factory(type_name)
    _check_result(type_name, factory)
    _check_options(type_name, factory, _split_capacity(type_name, factory, options)[0])
    for part in part_specs(type_name, options):
        try:
            check_backend(part.backend.type, part.backend.options)
        except ConfigError as error:
            raise ConfigError(f"backend {type_name}, part {part.name}: {error}") from error
    return factory


def open_raw(spec: BackendSpec) -> RawStore:
    """The store of `spec` as its operator sees it. Blocks as the backend's constructor does.

    Raises ConfigError for a backend that has no such view, or refuses its options; BackendError as the backend does.
    """
    place = _raw_place(spec.type)
    if place is None:
        known = sorted({*_RAW, *(point.name for point in entry_points(group=RAW_ENTRY_POINT_GROUP))})
        raise ConfigError(f"backend {spec.type}: cannot be listed; {', '.join(known)} can")
    factory = cast(Callable[..., RawStore], _load(spec.type, place))
    options = dict(spec.options)
    if not _takes_capacity(factory):
        options.pop(_CAPACITY, None)  # a limit that engines keep
    try:
        return factory(**options)
    except (InvalidInput, TypeError) as error:
        raise ConfigError(f"backend {spec.type}: {error}") from error


def backend_names() -> list[str]:
    """All names that `open_backend` knows on this machine, but for `module:Class`."""
    return sorted({*_BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def _factory(type_name: str) -> Factory:
    built_in = _BUILT_IN.get(type_name)
    if built_in is not None:
        return _load(type_name, EntryPoint(type_name, built_in, ENTRY_POINT_GROUP))
    points = entry_points(group=ENTRY_POINT_GROUP, name=type_name)
    if points:
        return _load(type_name, next(iter(points)))
    if ":" in type_name:
        return _load(type_name, EntryPoint(type_name, type_name, ENTRY_POINT_GROUP))
    known = backend_names()
    near = difflib.get_close_matches(type_name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}, or module:Class"
    raise ConfigError(f"backend {type_name!r} is not known; {hint}")


def _load(type_name: str, point: EntryPoint) -> Factory:
    module, _, attribute = point.value.partition(":")
    try:
        found: object = importlib.import_module(module.strip())
        for name in attribute.strip().split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError, SyntaxError, TypeError, ValueError) as error:
        raise ConfigError(f"backend {type_name}: {point.value} cannot be loaded: {error}") from error
    if not callable(found):
        raise ConfigError(f"backend {type_name}: {point.value} is no class or function")
    return cast(Factory, found)


def _check_result(type_name: str, factory: Factory) -> None:
    made: object = factory
    if not isinstance(factory, type):
        function = factory if inspect.isroutine(factory) else type(factory).__call__
        try:
            made = get_type_hints(inspect.unwrap(function)).get("return")
        except (AttributeError, NameError, TypeError):
            return  # a name that only type checkers see, say; `open_backend` looks at what is made
    made = get_origin(made) or made
    if not (isinstance(made, type) and issubclass(made, StorageBackend)):
        raise ConfigError(
            f"backend {type_name}: is not a StorageBackend; name a class derived from "
            "hicache.backends.base.StorageBackend, or a function annotated to return one"
        )


def _check_options(type_name: str, factory: Factory, options: Mapping[str, object]) -> None:
    """Refuse unknown and missing options by name, before anything is opened."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return  # an extension type without a signature says so itself
    parameters = list(signature.parameters.values())[1:]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        names = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
        for name in options:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(names) or 'none'}"
                raise ConfigError(f"backend {type_name}: unknown option {name!r}; {hint}")
    try:
        signature.bind(None, **options)
    except TypeError as error:
        raise ConfigError(f"backend {type_name}: {error}") from error
