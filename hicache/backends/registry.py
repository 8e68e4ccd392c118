"""Backends by name: built in, from an entry point of another package, or `module:Class`.

A factory is a class derived from `StorageBackend`, or a function that is annotated to return one, so that a
configuration can be checked without opening a store. It takes a codec and its options: as keywords, or as one section
if a parameter is annotated with a class derived from `hicache.config.Section`, which then checks them. The
built-in ones take the sections of the configuration. Other packages add a factory under the entry-point group
`hicache.backends`; a name there does not replace a built-in one. Under the same name in the group `hicache.raw_stores`
they may add a function of the same options that makes a RawStore, so that `hicache ls` and its like know the store.

A store that can be listed and whose factory takes no keyword `capacity_bytes` gets one: see `limit`.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeAlias, TypeVar, cast, get_args, get_origin, get_type_hints

from ..config.guard import GuardConfig
from ..config.section import Section, build
from ..config.storage import STORAGE_SECTIONS, PartConfig, StorageConfig, parts_of
from ..errors import ConfigError, InvalidInput
from ..frame import FrameCodec
from .base import Composite, StorageBackend
from .faults import FaultyBackend
from .guard import GuardedBackend, guards_of
from .limit import LimitedBackend
from .raw import RawStore

ENTRY_POINT_GROUP = "hicache.backends"
RAW_ENTRY_POINT_GROUP = "hicache.raw_stores"
_CAPACITY = "capacity_bytes"

T = TypeVar("T")

Factory: TypeAlias = Callable[..., StorageBackend]
# The options of a backend: a checked section, or the keywords of a plug-in.
Options: TypeAlias = Section | Mapping[str, object]

# Where the factories of the built-in backends are. A backend is imported when it is asked for.
_BUILT_IN: Mapping[str, str] = {
    "memory": "hicache.backends.memory:MemoryBackend",
    "file": "hicache.backends.file:FileBackend",
    "levels": "hicache.backends.compose:open_levels",
    "sharded": "hicache.backends.compose:open_sharded",
    "redis": "hicache.backends.redis:RedisBackend",
    "s3": "hicache.backends.s3:S3Backend",
    "mooncake": "hicache.backends.mooncake:MooncakeBackend",
    "remote": "hicache.backends.remote:RemoteBackend",
}
# Where the RawStore of a built-in store is, which takes the same section.
_RAW: Mapping[str, str] = {
    "file": "hicache.backends.file.raw:FileRaw",
    "redis": "hicache.backends.redis.raw:RedisRawStore",
    "s3": "hicache.backends.s3:S3RawStore",
    "mooncake": "hicache.backends.mooncake.raw:MooncakeRawStore",
}
# The built-in backends whose section has a `capacity` that `limit` keeps: their servers have no such limit.
_LIMITED = frozenset({"redis", "s3"})


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """A backend that can be opened: its type, its options, and the section of its guard.

    `options` are a section, or keywords, from which a section is made where the backend takes one. `guard` None opens
    it without a guard, for tests and for measuring. `name` is how it is called in metrics and messages, None for its
    type.
    """

    type: str
    options: Options = field(default_factory=dict)
    guard: GuardConfig | None = field(default_factory=GuardConfig)
    name: str | None = None

    @classmethod
    def of(cls, storage: StorageConfig, name: str | None = None) -> BackendSpec:
        """Return what a section `storage` describes."""
        return cls(storage.type, storage.options, storage.guard, name)


def part_specs(type_name: str, options: Options) -> dict[str, BackendSpec]:
    """Return the parts of a built-in composition by their names; none for any other backend. Opens nothing.

    A part without a name is called like its type, a second one of that type `<type>-2`. Raises ConfigError.
    """
    found: dict[str, BackendSpec] = {}
    for part in parts_of(_checked(type_name, options)) if type_name in STORAGE_SECTIONS else ():
        name = _part_name(part, found)
        if name in found:
            raise ConfigError(f"backend {type_name}: two of its parts are named {name!r}; rename one of them")
        found[name] = BackendSpec.of(part.storage, name)
    return found


def _part_name(part: PartConfig, others: Mapping[str, object]) -> str:
    kind = part.storage.type
    number = 1 + sum(taken == kind or taken.startswith(f"{kind}-") for taken in others)
    return part.name or (kind if number == 1 else f"{kind}-{number}")


def _checked(type_name: str, options: Options, factory: Callable[..., object] | None = None) -> Options:
    """The options as the backend takes them: the section of a built-in one, or that `factory` declares, else keywords.

    Raises ConfigError for options that the section refuses.
    """
    known: Any = STORAGE_SECTIONS.get(type_name)
    section: Any = _section_parameter(factory)[1] if known is None else known.model_fields["options"].annotation
    checked: Options = options
    if section is None or not isinstance(options, section):
        if not isinstance(options, Mapping):
            raise ConfigError(f"backend {type_name}: takes no {type(options).__name__}; give its options by name")
        checked = options if section is None else build(section, options, f"backend {type_name}")
    return checked


def _section_parameter(factory: Callable[..., object] | None) -> tuple[str, type[Section] | None]:
    """The parameter of a factory that is annotated with a section, and the section; None for it in one with keywords.
    """
    try:
        hints = get_type_hints(cast(Any, factory).__init__ if isinstance(factory, type) else factory)
    except (AttributeError, NameError, TypeError):
        hints = {}  # a name that only type checkers see, say
    for name, hint in hints.items():
        for kind in (hint, *get_args(hint)):  # the arguments of `Section | None`
            if name != "return" and isinstance(kind, type) and issubclass(kind, Section):
                return name, kind
    return "options", None


def open_spec(spec: BackendSpec, codec: FrameCodec) -> StorageBackend:
    """Open what `spec` describes, behind its guard. Blocks and raises as `open_backend`, also for the guard's options.

    What is composed of several backends gets no guard of its own: each part has one.
    """
    backend = open_backend(spec.type, codec, spec.options)
    guard = spec.guard
    if guard is None or (isinstance(backend, Composite) and (len(backend.parts) > 1 or any(guards_of(backend)))):
        return backend
    if guard.inject.is_on:
        backend = FaultyBackend(backend, guard.inject)
    return GuardedBackend(backend, guard, name=spec.name or spec.type)


def open_backend(type_name: str, codec: FrameCodec, options: Options) -> StorageBackend:
    """Open the backend `type_name` with `options`. Blocks as its constructor does.

    Raises ConfigError for an unknown name, options the backend does not take or refuses, and a factory that does not
    make a StorageBackend; BackendError as the backend does.
    """
    factory, own, capacity_bytes = _resolve(type_name, options)
    backend: object = _call(type_name, factory, own, codec)
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


def check_backend(type_name: str, options: Options) -> None:
    """Check that the factory of `type_name` makes backends and takes `options`. Imports it, and opens nothing.

    Raises ConfigError for an unknown name, for a factory that makes no StorageBackend, and for options it does not
    take; in all this, parts of a composition are looked at as well.
    """
    _resolve(type_name, options)


def _resolve(type_name: str, options: Options) -> tuple[Factory, Options, object]:
    """Return the factory, the options that it takes, and the limit to put around the backend, None for none. Checks the
    parts of a composition too. Raises ConfigError."""
    factory = _factory(type_name)
    _check_result(type_name, factory)
    own = options
    if type_name not in STORAGE_SECTIONS and _raw_place(type_name) is not None:
        own = _without_capacity(factory, options)
    checked = _checked(type_name, own, factory)
    capacity_bytes: object = None
    if own is not options:
        capacity_bytes = cast(Mapping[str, object], options)[_CAPACITY]
    elif type_name in _LIMITED:
        capacity_bytes = cast(Any, checked).capacity
    keywords = _keywords(factory, checked)
    try:
        inspect.signature(factory).bind(None, **keywords)
    except ValueError:
        pass  # an extension type without a signature says itself which options it does not take
    except TypeError as error:
        names = list(inspect.signature(factory).parameters)[1:]  # the first one is the codec
        near = [found for name in keywords if name not in names for found in difflib.get_close_matches(name, names, 1)]
        hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(names) or 'none'}"
        raise ConfigError(f"backend {type_name}: {error}; {hint}") from error
    for name, part in part_specs(type_name, checked).items():
        try:
            check_backend(part.type, part.options)
        except ConfigError as error:
            raise ConfigError(f"backend {type_name}, part {name}: {error}") from error
    return factory, checked, capacity_bytes


def _call(type_name: str, factory: Callable[..., T], options: Options, *arguments: object) -> T:
    """Return what the factory makes of `arguments` and its options."""
    try:
        return factory(*arguments, **_keywords(factory, options))
    except (InvalidInput, TypeError) as error:
        raise ConfigError(f"backend {type_name}: {error}") from error


def _keywords(factory: Callable[..., object], options: Options) -> Mapping[str, object]:
    return {_section_parameter(factory)[0]: options} if isinstance(options, Section) else options


def _without_capacity(factory: Callable[..., object], options: Options) -> Options:
    """Return a plug-in's options without the limit that is put around it; the same object if there is none."""
    if not isinstance(options, Mapping) or _CAPACITY not in options:
        return options
    section = _section_parameter(factory)[1]
    try:
        taken = inspect.signature(factory).parameters if section is None else section.model_fields
    except (TypeError, ValueError):
        return options  # an extension type without a signature
    return options if _CAPACITY in taken else {name: value for name, value in options.items() if name != _CAPACITY}


def _raw_place(type_name: str) -> EntryPoint | None:
    """Where what opens the raw store of a backend is; None if there is none."""
    built_in = _RAW.get(type_name)
    if built_in is not None:
        return EntryPoint(type_name, built_in, RAW_ENTRY_POINT_GROUP)
    return next(iter(entry_points(group=RAW_ENTRY_POINT_GROUP, name=type_name)), None)


def open_raw(spec: BackendSpec) -> RawStore:
    """The store of `spec` as its operator sees it. Blocks as the backend's constructor does.

    Raises ConfigError for a backend that has no such view, or refuses its options; BackendError as the backend does.
    """
    place = _raw_place(spec.type)
    if place is None:
        known = sorted({*_RAW, *(point.name for point in entry_points(group=RAW_ENTRY_POINT_GROUP))})
        raise ConfigError(f"backend {spec.type}: cannot be listed; {', '.join(known)} can")
    factory = cast(Callable[..., RawStore], _load(spec.type, place))
    is_built_in = spec.type in STORAGE_SECTIONS
    own = spec.options if is_built_in else _without_capacity(factory, spec.options)  # a limit that engines keep
    return _call(spec.type, factory, _checked(spec.type, own, factory))


def backend_names() -> list[str]:
    """All names that `open_backend` knows on this machine, but for `module:Class`."""
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
