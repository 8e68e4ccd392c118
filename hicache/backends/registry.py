"""Backends by name: built-in, from an entry point of another package, or `module:Class`.

A factory makes a `Driver`; those of the built-in compositions make a `StoreGroup`. It is a class, or a function
annotated to return one, so that a configuration can be checked without opening a store. It takes a codec and its
options: as keywords, or as one section if a parameter is annotated with a class derived from `hicache.config.Section`,
which then checks them. Built-in factories take the sections of the configuration. A factory with a parameter that is
annotated with `Clock` gets the clock of its store. Other packages add a factory in the entry-point group
`hicache.backends`; its name does not replace a built-in one.

`hicache ls` and similar commands call the factory of a driver that `Inspects` its store without a codec (None). If such
a factory does not take the keyword `capacity`, its store gets a limit: see `limit`.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeAlias, TypeVar, cast, get_args, get_origin, get_type_hints

from ..clock import SYSTEM_CLOCK, Clock
from ..config.guard import GuardConfig
from ..config.section import Section, build
from ..config.storage import STORAGE_SECTIONS, StorageConfig, parts_of
from ..errors import ConfigError, InvalidInput
from ..frame import FrameCodec
from ..units import parse_size
from .driver import Driver, Inspects
from .limit import CapacityLimit
from .retention import Retention
from .storage import Storage, StoreGroup
from .store import UNGUARDED, Store
from .stored import StoredPages

ENTRY_POINT_GROUP = "hicache.backends"
_CAPACITY = "capacity"

T = TypeVar("T")

Factory: TypeAlias = Callable[..., Driver[Any] | StoreGroup]
# The options of a backend: a checked section, or the keywords of a plug-in.
Options: TypeAlias = Section | Mapping[str, object]

# The factories of the built-in backends. A backend is imported at its first use.
_BUILT_IN: Mapping[str, str] = {
    "memory": "hicache.backends.memory:open_memory",
    "file": "hicache.backends.file:FileDriver",
    "shared_files": "hicache.backends.shared_files:SharedFilesDriver",
    "levels": "hicache.backends.compose:open_levels",
    "sharded": "hicache.backends.compose:open_sharded",
    "redis": "hicache.backends.redis:RedisDriver",
    "s3": "hicache.backends.s3:S3Driver",
    "mooncake": "hicache.backends.mooncake:MooncakeDriver",
    "remote": "hicache.backends.remote:RemoteDriver",
}
# The built-in backends for commands: those whose stores outlive an engine and can be listed.
_INSPECTED = frozenset({"file", "shared_files", "redis", "s3", "mooncake"})
# The built-in backends whose `capacity` is enforced by `limit`, because their servers have no such limit.
_LIMITED = frozenset({"redis", "s3", "shared_files"})
# The built-in backends with a `max_age`. Redis removes expired pages itself; in the others a sweep does.
_AGED = frozenset({"file", "redis", "s3", "shared_files"})


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """A backend that can be opened: its type, its options, and the section of its guard.

    `options` are a section, or keywords, which become a section if the backend takes one. `guard` None opens it without
    a guard, for tests and measurements. `name` is its name in metrics and messages, None for its type.
    """

    type: str
    options: Options = field(default_factory=dict)
    guard: GuardConfig | None = field(default_factory=GuardConfig)
    name: str | None = None

    @classmethod
    def of(cls, storage: StorageConfig, name: str | None = None) -> BackendSpec:
        """Return the spec of a section `storage`."""
        return cls(storage.type, storage.options, storage.guard, name)


def part_specs(type_name: str, options: Options) -> dict[str, BackendSpec]:
    """Return the parts of a built-in composition by their names; empty for any other backend. Opens nothing.

    A part without a name is named after its type, a second one of that type `<type>-2`. Raises ConfigError.
    """
    found: dict[str, BackendSpec] = {}
    for part in parts_of(_checked(type_name, options)) if type_name in STORAGE_SECTIONS else ():
        kind = part.storage.type
        number = 1 + sum(taken == kind or taken.startswith(f"{kind}-") for taken in found)
        name = part.name or (kind if number == 1 else f"{kind}-{number}")
        if name in found:
            raise ConfigError(f"backend {type_name}: two of its parts are named {name!r}; rename one of them")
        found[name] = BackendSpec.of(part.storage, name)
    return found


def leaf_specs(spec: BackendSpec, name: str | None = None) -> Iterator[tuple[str, BackendSpec]]:
    """Yield a store with `name` (by default its type), or all stores of a composition with names such as `a/b`."""
    parts = part_specs(spec.type, spec.options)
    if not parts:
        yield name or spec.type, spec
    for own, part in parts.items():
        yield from leaf_specs(part, own if name is None else f"{name}/{own}")


def _checked(type_name: str, options: Options, factory: Callable[..., object] | None = None) -> Options:
    """Return the options in the form of the backend: the section of a built-in one, or the one that `factory` declares,
    otherwise keywords.

    Raises ConfigError for options that the section rejects.
    """
    known: Any = STORAGE_SECTIONS.get(type_name)
    section: Any = _section_of(factory) if known is None else known.model_fields["options"].annotation
    if section is not None and isinstance(options, section):
        return cast(Options, options)
    if not isinstance(options, Mapping):
        raise ConfigError(f"backend {type_name}: does not take a {type(options).__name__}; pass options by name")
    return options if section is None else cast(Options, build(section, options, f"backend {type_name}"))


def _section_of(factory: Callable[..., object] | None) -> type[Section] | None:
    return next(iter(_parameters(factory, Section).values()), None)


def _parameters(factory: Callable[..., object] | None, base: type[T]) -> dict[str, type[T]]:
    """Return the parameters of a factory that are annotated with `base` or a class derived from it."""
    try:
        hints = get_type_hints(cast(Any, factory).__init__ if isinstance(factory, type) else factory)
    except (AttributeError, NameError, TypeError):
        hints = {}  # for example a name that only type checkers know
    return {
        name: kind
        for name, hint in hints.items()
        for kind in (hint, *get_args(hint))  # the arguments of `Section | None`
        if name != "return" and isinstance(kind, type) and issubclass(kind, base)
    }


def open_spec(spec: BackendSpec, codec: FrameCodec, clock: Clock = SYSTEM_CLOCK) -> Storage:
    """Open the store of `spec`, or its composition, whose parts are stores. Blocks as the constructors do.

    Raises ConfigError for an unknown name, options that the backend does not take or rejects, and a factory that does
    not make a Driver; BackendError as the backend does.
    """
    factory, own, capacity_bytes = _resolve(spec.type, spec.options)
    made: object = _call(spec.type, factory, own, codec, clock)
    if isinstance(made, StoreGroup):
        return made
    if not isinstance(made, Driver):
        raise ConfigError(f"backend {spec.type}: its factory made a {type(made).__name__}, not a Driver")
    guard, limit = spec.guard or UNGUARDED, None
    if capacity_bytes is not None:
        try:
            stored = StoredPages(cast(Inspects, made), spec.name or spec.type, clock)
            limit = CapacityLimit(
                codec, stored, capacity_bytes=cast(int, capacity_bytes), clock=clock,
                adaptive=spec.type == "shared_files" and cast(Any, own).eviction_policy == "adaptive",
            )
        except InvalidInput as error:
            made.close()
            raise ConfigError(f"backend {spec.type}: {error}") from error
    retention = None
    max_age_s: float | None = cast(Any, own).max_age if spec.type in _AGED else None
    if max_age_s is not None:
        listed = None if spec.type == "redis" else StoredPages(cast(Inspects, made), spec.name or spec.type, clock)
        retention = Retention(codec.namespace, listed, max_age_s=max_age_s, clock=clock)
        if limit is not None:
            retention.on_removed = limit.sweep_soon
    return Store(made, codec, guard, name=spec.name or spec.type, limit=limit, retention=retention, clock=clock)


def check_backend(type_name: str, options: Options) -> None:
    """Check that the factory of `type_name` makes backends and takes `options`, also for parts of a composition.
    Imports it, but opens nothing.

    Raises ConfigError for an unknown name, a factory that does not make drivers, and options that it does not take.
    """
    _resolve(type_name, options)


def _resolve(type_name: str, options: Options) -> tuple[Factory, Options, object]:
    """Return the factory, its options, and the limit for the backend or None. Also checks the parts of a composition.
    Raises ConfigError."""
    factory = _factory(type_name)
    made = _check_result(type_name, factory)
    own = options
    if type_name not in STORAGE_SECTIONS and made is not None and issubclass(made, Inspects):
        own = _without_capacity(factory, options)
    checked = _checked(type_name, own, factory)
    capacity_bytes: object = None
    if own is not options or (type_name == "memory" and isinstance(options, Mapping)):
        try:
            size = parse_size(cast(Mapping[str, object], options).get(_CAPACITY))
        except ValueError as error:
            raise ConfigError(f"backend {type_name}: {_CAPACITY}: {error}") from error
        capacity_bytes = size if own is not options else None
    elif type_name in _LIMITED:
        capacity_bytes = cast(Any, checked).capacity
    keywords = _keywords(factory, checked)
    try:
        inspect.signature(factory).bind(None, **keywords)
    except ValueError:
        pass  # an extension type without a signature reports unknown options itself
    except TypeError as error:
        clocks = _parameters(factory, Clock)
        names = [name for name in [*inspect.signature(factory).parameters][1:] if name not in clocks]
        near = [found for name in keywords if name not in names for found in difflib.get_close_matches(name, names, 1)]
        hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(names) or 'none'}"
        raise ConfigError(f"backend {type_name}: {error}; {hint}") from error
    for name, part in part_specs(type_name, checked).items():
        try:
            check_backend(part.type, part.options)
        except ConfigError as error:
            raise ConfigError(f"backend {type_name}, part {name}: {error}") from error
    return factory, checked, capacity_bytes


def _call(
    type_name: str, factory: Callable[..., T], options: Options, codec: FrameCodec | None, clock: Clock = SYSTEM_CLOCK
) -> T:
    """Return the result of the factory for its options. It gets `clock` if it takes one."""
    try:
        return factory(codec, **_keywords(factory, options), **dict.fromkeys(_parameters(factory, Clock), clock))
    except (InvalidInput, TypeError) as error:
        raise ConfigError(f"backend {type_name}: {error}") from error


def _keywords(factory: Callable[..., object], options: Options) -> Mapping[str, object]:
    if not isinstance(options, Section):
        return options
    return {next(iter(_parameters(factory, Section)), "options"): options}


def _without_capacity(factory: Callable[..., object], options: Options) -> Options:
    """Return a plug-in's options without the limit for `CapacityLimit`; the same object without a limit."""
    if not isinstance(options, Mapping) or _CAPACITY not in options:
        return options
    section = _section_of(factory)
    try:
        taken = inspect.signature(factory).parameters if section is None else section.model_fields
    except (TypeError, ValueError):
        return options  # an extension type without a signature
    return options if _CAPACITY in taken else {name: value for name, value in options.items() if name != _CAPACITY}


def open_stored(spec: BackendSpec) -> StoredPages:
    """Open the pages of the store of `spec` for an operator. Blocks as the backend's factory does.

    Raises ConfigError if the store cannot be listed or rejects its options; BackendError as the backend does.
    """
    factory, own, _ = _resolve(spec.type, spec.options)
    made = _check_result(spec.type, factory)
    if spec.type == "file":  # without the lock of an engine
        place = EntryPoint("file", "hicache.backends.file.inspection:FileInspection", ENTRY_POINT_GROUP)
        factory = cast(Factory, _load("file", place))
    elif spec.type not in _INSPECTED and (spec.type in _BUILT_IN or made is None or not issubclass(made, Inspects)):
        raise ConfigError(f"backend {spec.type}: cannot be listed; use one of {', '.join(sorted(_INSPECTED))}")
    return StoredPages(cast(Inspects, _call(spec.type, factory, own, None)), spec.name or spec.type)


def backend_names() -> list[str]:
    """Return all names that `open_spec` knows on this machine, without `module:Class`."""
    return sorted({*_BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def _factory(type_name: str) -> Factory:
    place = _BUILT_IN.get(type_name)
    points = [] if place else list(entry_points(group=ENTRY_POINT_GROUP, name=type_name))
    if place or points or ":" in type_name:
        point = points[0] if points else EntryPoint(type_name, place or type_name, ENTRY_POINT_GROUP)
        return cast(Factory, _load(type_name, point))
    known = backend_names()
    near = difflib.get_close_matches(type_name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}, or module:Class"
    raise ConfigError(f"backend {type_name!r} is not known; {hint}")


def _load(type_name: str, point: EntryPoint) -> Callable[..., object]:
    module, _, attribute = point.value.partition(":")
    try:
        found: object = importlib.import_module(module.strip())
        for name in attribute.strip().split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError, SyntaxError, TypeError, ValueError) as error:
        raise ConfigError(f"backend {type_name}: {point.value} cannot be loaded: {error}") from error
    if not callable(found):
        raise ConfigError(f"backend {type_name}: {point.value} is not a class or a function")
    return found


def _check_result(type_name: str, factory: Factory) -> type | None:
    """Return the class of what the factory makes, None if that is not known before. Raises ConfigError for another
    class than a Driver or a StoreGroup."""
    made: object = factory
    if not isinstance(factory, type):
        function = factory if inspect.isroutine(factory) else type(factory).__call__
        try:
            made = get_type_hints(inspect.unwrap(function)).get("return")
        except (AttributeError, NameError, TypeError):
            return None  # for example a name that only type checkers know; `open_spec` checks the result
    made = get_origin(made) or made
    if not (isinstance(made, type) and issubclass(made, (StoreGroup, Driver))):
        raise ConfigError(
            f"backend {type_name}: is not a Driver; use a class with the functions of hicache.backends.driver.Driver, "
            "or a function annotated to return one"
        )
    return made
