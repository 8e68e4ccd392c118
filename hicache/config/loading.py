"""Merges the sources of a configuration: a YAML file, then `HICACHE_*` variables, then flags.

Each source becomes a list of entries (path, value, origin); later entries replace earlier ones. Errors of all steps are
collected, so that one exception lists all of them with their origins.

A variable or flag value is read like a YAML scalar (`5`, `true`, `null`); other values are text. Variables nest with
two underscores: `HICACHE_HOST__SIZE=4GiB`. An unknown variable with two underscores is rejected as a typo, unless an
entry ending in `_env` names it for a secret. An unknown variable without them is ignored with a warning: Kubernetes
sets `HICACHE_PORT` and others in every container beside a service `hicache`.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import yaml
from pydantic import ValidationError

from ..arguments import file_path, instance
from ..errors import ConfigError
from ..units import WRITTEN, counted
from .entries import entry_names
from .files import expanded, open_regular
from .foreign import foreign_name
from .removed import removed
from .schema import HiCacheConfig
from .wording import NAMES_VARIABLE, locate, printable, shown, what_is_wrong

_log = logging.getLogger(__name__)

ENVIRON_PREFIX = "HICACHE_"
# The variable with the path of the file, if the caller does not pass one.
FILE_VARIABLE = "HICACHE_CONFIG_FILE"
# Variables with the prefix that are not entries; the build of the package reads the second.
_NOT_ENTRIES = frozenset({FILE_VARIABLE, "HICACHE_NATIVE"})
# The most ignored variables that a warning lists: a service with a port has seven.
_IGNORED_SHOWN_MAX = 12
# A configuration has about a hundred entries; more than this is another file, given by mistake.
FILE_BYTES_MAX = 1 << 20
# A file of that size can hold half a million values, which take minutes and hundreds of megabytes.
VALUES_MAX = 10_000
# Users fix errors one by one; explaining each takes milliseconds.
PROBLEMS_MAX = 100
# Numbers, dates and booleans are shorter. Longer values are text: a number with 100,000 digits takes minutes.
_NUMBER_CHARACTERS_MAX = 64
# Numbers that YAML 1.1 reads in base 8 or 60, and that people write in base 10 or as times: 064 is 52, 1:30 is 90. Not
# 0x40, 0b1000000 and 1_000, which have one meaning.
_OTHER_BASE = re.compile(r"[-+]?(?:0[0-7_]+|[1-9][0-9_]*(?::[0-5]?[0-9])+|[0-9][0-9_]*(?::[0-5]?[0-9])+\.[0-9_]*)")
# The longest name that is compared with others as a possible typo.
_TYPO_CHARACTERS_MAX = 200
# The similarity (0 to 1) of a name and its typo; below 0.7 suggestions look random.
_LIKENESS_MIN = 0.7
_STORAGE_TYPE, _STORAGE_OPTIONS = ("storage", "type"), ("storage", "options")

EntryPath: TypeAlias = tuple[str, ...]


class _Problem(NamedTuple):
    path: EntryPath
    what: str
    origin: str

    def __str__(self) -> str:
        names = [shown(name) if name else "''" for name in self.path]
        where = f"{'.'.join(names)}: " if names else ""
        return where + self.what + (f" ({self.origin})" if self.origin else "")


class _Entry(NamedTuple):
    path: EntryPath
    value: Any
    origin: str


# By path; a path is never the beginning of another.
_Entries: TypeAlias = dict[EntryPath, _Entry]


def load_config(
    path: str | os.PathLike[str] | None, *, environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, str] | None = None,
) -> HiCacheConfig:
    """Return the configuration in the file `path`, changed by variables in `environ`, then by `overrides`. Without a
    path, HICACHE_CONFIG_FILE in `environ` may name the file.

    `load_config(path)` reads the variables of this process, as the command line does; pass `environ={}` to read none.
    `overrides` maps dotted paths to text (`{"host.size": "4GiB"}`). Variables without the prefix `HICACHE_` are
    ignored. Reads the file; changes nothing. Raises ConfigError that lists every error, InvalidInput for other types.
    """
    environ = os.environ if environ is None else instance("environ", environ, Mapping)  # type: ignore[type-abstract]
    overrides = {} if overrides is None else instance("overrides", overrides, Mapping)  # type: ignore[type-abstract]
    for name, text in overrides.items():
        instance(f"overrides: {shown(instance('overrides: name', name, str))}", text, str)
    problems: list[_Problem] = []
    in_file = _file_entries(*_file_of(path, environ), problems)
    flags = [_Entry(tuple(name.split(".")), _scalar(text), f"flag --set {shown(name)}")
             for name, text in sorted(overrides.items())]
    entries = _merged([in_file, _environ_entries(environ, in_file, flags, problems), flags], problems)
    config: HiCacheConfig | None = None
    try:
        config = HiCacheConfig.model_validate(_tree(entries), context=WRITTEN)
        problems += _tiers_below_a_page(config, entries)
    except ValidationError as refused:
        explained = (problem for error in refused.errors() for problem in _explain(error, entries))
        problems += itertools.islice(explained, PROBLEMS_MAX + 1)
    _require_none(problems)
    assert config is not None
    return config


def read_tree(path: Path) -> dict[str, Any]:
    """Return the entries in the file `path`, as nested sections, without checking them against the schema.

    Reads the file. Raises ConfigError that lists every error, as `load_config` does.
    """
    problems: list[_Problem] = []
    entries = _merged([_file_entries(*_file_of(path, {}), problems)], problems)
    _require_none(problems)
    return _tree(entries)


def entry_of_variable(variable: str) -> EntryPath | None:
    """Return the path that an environment variable sets, even if the entry does not exist; None for other variables.

    `HICACHE_HOST__SIZE` is `("host", "size")`, and so is `HICACHE_host__size`.
    """
    if not variable.startswith(ENVIRON_PREFIX):
        return None
    return tuple(variable.removeprefix(ENVIRON_PREFIX).lower().split("__"))


def _require_none(problems: list[_Problem]) -> None:
    """Raise ConfigError that lists the problems, if there are any."""
    if not problems:
        return
    found = sorted(set(problems))
    listed = [str(problem) for problem in found[:PROBLEMS_MAX]]
    more = len(found) > PROBLEMS_MAX
    amount = f"more than {PROBLEMS_MAX} problems; the first are" if more else counted(len(found), "problem")
    raise ConfigError("\n  ".join([f"the configuration has {amount}:", *listed]))


def _merged(sources: Iterable[Sequence[_Entry]], problems: list[_Problem]) -> _Entries:
    """Return the entries of all sources, the weakest first: each entry replaces the same one and its alternatives."""
    merged: _Entries = {}
    for source in sources:
        replaced = _replaced({entry.path: entry.value for entry in source}, merged)
        merged = {path: known for path, known in merged.items()
                  if not any(path[:end] in replaced for end in range(len(path), 0, -1))}
        for entry in source:
            _put(entry, merged, problems)
    return merged


def _replaced(given: Mapping[EntryPath, Any], weaker: _Entries) -> set[EntryPath]:
    """Return the entries that a source replaces: the same ones, alternatives, and the options of another backend."""
    replaced = set(given)
    for name, field in HiCacheConfig.model_fields.items():
        for group in getattr(field.annotation, "alternatives", ()):
            paths = {(name, entry) for entry in group}
            if any(given.get(path) is not None for path in paths):
                replaced |= paths
    old = weaker.get(_STORAGE_TYPE)
    if _STORAGE_TYPE in given and (old is None or old.value != given[_STORAGE_TYPE]):
        replaced.add(_STORAGE_OPTIONS)
    return replaced


def _put(entry: _Entry, entries: _Entries, problems: list[_Problem]) -> None:
    for depth in range(1, len(entry.path)):
        above = entries.get(entry.path[:depth])
        if above is not None and above.value not in (None, {}):
            section = ".".join(above.path)
            problems.append(_Problem(entry.path, f"{section} is a value and cannot have entries", entry.origin))
            return
        entries.pop(entry.path[:depth], None)
    entries[entry.path] = entry


def _tree(entries: _Entries) -> dict[str, Any]:
    """Return the entries as nested sections."""
    tree: dict[str, Any] = {}
    for entry in entries.values():
        section = tree
        for name in entry.path[:-1]:
            section = section.setdefault(name, {})
        section[entry.path[-1]] = entry.value
    return tree


def _explain(error: Any, entries: _Entries) -> Iterator[_Problem]:
    """Yield the problems in one pydantic error: several if an unknown section has several entries."""
    path, names = locate(HiCacheConfig, error["loc"])
    if error["type"] != "extra_forbidden":
        yield _Problem(path, what_is_wrong(error, path, names, quote_text=True), _origin(path, entries))
        return
    _, siblings = locate(HiCacheConfig, error["loc"][:-1])
    for known in [known for known in entries if known[: len(path)] == path] or [path]:
        what = removed(known) or _unknown(known, len(path), siblings, entries)
        yield _Problem(known, what, _origin(known, entries))


def _unknown(path: EntryPath, known_depth: int, siblings: Sequence[str], entries: _Entries) -> str:
    """Return the message for `path`, which leaves the schema after `known_depth` names, among `siblings`."""
    prefix, name, rest = path[: known_depth - 1], path[known_depth - 1], path[known_depth:]
    foreign = foreign_name(name)
    if foreign is not None:
        return f"unknown entry; {foreign}"
    # A typo in one name is more likely than a wrong section, especially in a long path.
    candidates = {".".join((*prefix, near, *rest)): _likeness(name, near) + 0.1 for near in siblings}
    if not any(part.isdigit() for part in prefix):  # a part of a composition has its own entries
        kind = entries.get(_STORAGE_TYPE)
        names, dotted = entry_names(str(kind.value) if kind else ""), ".".join(path)
        if rest:
            candidates = {entry: likeness for entry, likeness in candidates.items() if entry in names}
        elsewhere = {entry: _likeness(dotted, entry) for entry in names if not dotted.startswith(entry + ".")}
        candidates = elsewhere | candidates
    nearest = max(candidates, key=lambda entry: candidates[entry])
    if candidates[nearest] >= _LIKENESS_MIN:
        return f"unknown entry; did you mean {nearest}?"
    return f"unknown entry; {'.'.join(prefix) or 'the configuration'} has: {', '.join(siblings)}"


def _likeness(left: str, right: str) -> float:
    if len(left) > _TYPO_CHARACTERS_MAX:
        return 0.0
    return difflib.SequenceMatcher(None, left, right).ratio()


def _origin(path: EntryPath, entries: _Entries) -> str:
    """Return the origin of `path`; for a section, or a missing entry in it, the origin of that section."""
    for end in range(len(path), 0, -1):
        origins: dict[str, str] = {}
        for known, entry in entries.items():
            if known[:end] == path[:end]:
                origins.setdefault(entry.origin.partition(", line ")[0], entry.origin)  # for a file, its first line
        if origins:
            return ", ".join(origins.values())
    return ""


def _tiers_below_a_page(config: HiCacheConfig, entries: _Entries) -> Iterator[_Problem]:
    """Yield tiers without a single page. Not in the schema, because it compares two sections."""
    for section, tokens in (("device", config.device.tokens), ("host", config.host.tokens)):
        if tokens is not None and tokens < config.page_size:
            path = (section, "tokens")
            what = f"is less than one page; got {tokens}, page_size is {config.page_size}"
            yield _Problem(path, what, _origin(path, entries))


def _named_variables(nodes: list[Any]) -> Iterator[str]:
    """Yield the values of all entries in the trees `nodes` that name a variable. Extends the list."""
    for node in nodes:  # the loop appends to it
        if isinstance(node, list):
            nodes += node
        elif isinstance(node, dict):
            nodes += node.values()
            named = (value for name, value in node.items() if str(name).endswith(NAMES_VARIABLE))
            yield from (value for value in named if isinstance(value, str))


def _file_of(path: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> tuple[Path | None, str]:
    """Return the file to read, if any, and its name in messages."""
    if path is not None:
        chosen = file_path("config file", path)
        return chosen, f"file {printable(str(chosen))}"
    named = environ.get(FILE_VARIABLE)
    if named is None:
        return None, ""
    if not named.strip():
        raise ConfigError(f"{FILE_VARIABLE} is empty; unset it, or set the path of a configuration")
    return Path(named), f"file {printable(named)} of {FILE_VARIABLE}"


def _file_entries(path: Path | None, file_name: str, problems: list[_Problem]) -> list[_Entry]:
    if path is None:
        return []

    def refuse(what: str, line: int | None = None) -> list[_Entry]:
        problems.append(_Problem((), what, f"{file_name}, line {line}" if line else file_name))
        return []

    try:
        with open_regular(expanded(str(path))) as file:
            data = file.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            return refuse(f"is larger than {FILE_BYTES_MAX >> 20} MiB; it is not a configuration")
        loader = _Loader(data.decode())
        node = loader.get_single_node()
        if node is None:
            return []
        if not isinstance(node, yaml.MappingNode):
            return refuse("must hold entries like `page_size: 64`", node.start_mark.line + 1)
        return list(_flatten(node, loader, (), file_name, problems))
    except OSError as error:
        return refuse(f"cannot be read: {error.strerror}")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        return refuse(f"is not valid YAML: {error.problem or error.context}", mark.line + 1 if mark else None)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, an invalid date, a number of 5000 digits
        return refuse(f"is not valid YAML: {shown(str(error).splitlines()[0])}")
    except RecursionError:
        return refuse("is nested too deeply")


class _Loader(yaml.SafeLoader):
    """The safe loader without aliases, which can make a small file huge or endless, and without explicit tags, whose
    constructors fail in undocumented ways. It limits the number of values, reads long scalars as text, and rejects
    duplicate names in a section of a list, and numbers in base 8 or 60."""

    values = 0

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        if kind is yaml.ScalarNode and len(value) > _NUMBER_CHARACTERS_MAX:
            return self.DEFAULT_SCALAR_TAG
        return super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            is_name = key.tag == self.DEFAULT_SCALAR_TAG
            if not is_name or key.value in seen:
                what = "is given twice" if is_name else "must be text; put it into quotes"
                raise yaml.MarkedYAMLError(problem=f"the name {shown(key.value)} {what}", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        mark = event.start_mark
        self.values += 1
        if self.values > VALUES_MAX:
            raise yaml.MarkedYAMLError(problem=f"more than {VALUES_MAX} names and values", problem_mark=mark)
        if isinstance(event, yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not supported", problem_mark=mark)
        if getattr(event, "tag", None) is not None:
            raise yaml.MarkedYAMLError(problem="tags (!name) are not supported", problem_mark=mark)
        is_plain = isinstance(event, yaml.ScalarEvent) and event.style is None
        if is_plain and len(event.value) <= _NUMBER_CHARACTERS_MAX and _OTHER_BASE.fullmatch(event.value):
            what = f"{shown(event.value)} would be a number in base 8 or 60; write it without a leading zero or colon, "
            raise yaml.MarkedYAMLError(problem=f"{what}or put it into quotes if it is text", problem_mark=mark)
        if isinstance(event, yaml.ScalarEvent) and not event.value.isascii():
            try:
                event.value.encode()
            except UnicodeEncodeError:
                raise yaml.MarkedYAMLError(problem="text with half a surrogate pair", problem_mark=mark) from None
        return super().compose_node(parent, index)


def _flatten(
    node: yaml.MappingNode, loader: _Loader, prefix: EntryPath, file_name: str, problems: list[_Problem]
) -> Iterator[_Entry]:
    """Yield the leaves below `node`; duplicate names and names that are not text become problems."""
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        origin = f"{file_name}, line {line}"
        if key_node.tag != loader.DEFAULT_SCALAR_TAG:
            name = key_node.value if isinstance(key_node, yaml.ScalarNode) else "?"
            problems.append(_Problem((*prefix, str(name)), "an entry's name must be text; put it into quotes", origin))
            continue
        name, path = key_node.value, (*prefix, key_node.value)
        if name in seen:
            problems.append(_Problem(path, f"is given twice, first in line {seen[name]}", origin))
            continue
        seen[name] = line
        if isinstance(value_node, yaml.MappingNode) and value_node.value:
            yield from _flatten(value_node, loader, path, file_name, problems)
            continue
        value = loader.construct_object(value_node, deep=True)
        # A section with all its entries commented out is ignored; `storage` may be null.
        if value is not None or path == ("storage",) or not locate(HiCacheConfig, path)[1]:
            yield _Entry(path, value, origin)


def _environ_entries(
    environ: Mapping[str, str], in_file: list[_Entry], flags: list[_Entry], problems: list[_Problem]
) -> list[_Entry]:
    """Return the entries from variables, except for variables that an entry of any source names for a secret. Log the
    ignored ones."""
    entries = {}
    for variable in sorted(environ):
        path = entry_of_variable(variable)
        if path is None or variable in _NOT_ENTRIES:
            continue
        origin = f"variable {shown(variable)}"
        try:
            environ[variable].encode()
            variable.encode()
        except UnicodeEncodeError:
            problems.append(_Problem(tuple(map(shown, path)), "is not valid UTF-8", origin))
            continue
        entries[variable] = _Entry(path, _scalar(environ[variable]), origin)
    for secret in _named_variables([{one.path[-1]: one.value} for one in (*in_file, *entries.values(), *flags)]):
        entries.pop(secret, None)
    ignored = [name for name, entry in entries.items()
               if len(entry.path) == 1 and entry.path[0] not in HiCacheConfig.model_fields
               and removed(entry.path) is None]
    for name in ignored:
        del entries[name]
    if ignored:
        _warn_of_ignored(tuple(ignored))
    return list(entries.values())


@functools.cache  # once per set of names: commands load a configuration several times
def _warn_of_ignored(variables: tuple[str, ...]) -> None:
    shown_names = []
    for variable in variables[:_IGNORED_SHOWN_MAX]:
        name = variable.removeprefix(ENVIRON_PREFIX).lower()
        near = difflib.get_close_matches(name[:_TYPO_CHARACTERS_MAX], entry_names(), n=1, cutoff=_LIKENESS_MIN)
        meant = foreign_name(name)
        if meant is None and near:
            meant = f"did you mean {ENVIRON_PREFIX}{near[0].upper().replace('.', '__')}?"
        shown_names.append(shown(variable) + (f" ({meant})" if meant else ""))
    more = len(variables) - len(shown_names)
    _log.warning(
        "environment variables that are not entries of the configuration are ignored: %s%s",
        ", ".join(shown_names), f" and {more} more" if more else "",
    )


def _scalar(text: str) -> Any:
    """Return a value as YAML reads it without quotes: null, a boolean, a number, otherwise the text. Empty text stays
    text: an empty variable must not unset the file of a key. So does a number that YAML reads in another base, which is
    in base 10 then."""
    if not text or _OTHER_BASE.fullmatch(text):
        return text
    loader = _Loader("")
    tag: str = loader.resolve(yaml.ScalarNode, text, (True, False))
    if tag.rpartition(":")[2] not in ("null", "bool", "int", "float"):
        return text
    try:
        return loader.construct_object(yaml.ScalarNode(tag, text))
    except ValueError:
        return text
