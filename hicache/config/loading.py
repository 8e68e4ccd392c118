"""Bringing the sources of a configuration together: a YAML file, then `HICACHE_*` variables, then flags.

Each source becomes a list of entries (path, value, origin); later ones replace earlier ones entry by entry. Problems
are collected through all steps, so that one error lists everything that is wrong, each with where it comes from.

A variable or flag value is read like a YAML scalar (`5`, `true`, `null`), anything else is text. Variables nest with
two underscores: `HICACHE_HOST__SIZE=4GiB`. A variable with the prefix that matches no entry is refused as a typo, but
for those that hold secrets: the ones that entries ending in `_env` name, wherever these stand.
"""

from __future__ import annotations

import difflib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from pydantic import ValidationError

from ..arguments import file_path, instance
from ..errors import ConfigError
from ..units import counted
from .entries import entry_names, names_below, part_entries
from .files import open_regular
from .schema import HiCacheConfig
from .section import ALTERNATIVES
from .storage import PARTS_ENTRY
from .wording import NAMES_VARIABLE, path_of, printable, shown, what_is_wrong

ENVIRON_PREFIX = "HICACHE_"
# A configuration has some hundred entries; more than this is another file given by mistake.
FILE_BYTES_MAX = 1 << 20
# A file of that size can hold half a million values, which take minutes and hundreds of megabytes.
VALUES_MAX = 10_000
# A person mends them one by one; each takes milliseconds to explain.
PROBLEMS_MAX = 100
# Numbers, dates and booleans are shorter. What is longer is text: a number with 100,000 digits takes minutes.
_NUMBER_CHARACTERS_MAX = 64
# Of a name that may be a typo of another one.
_TYPO_CHARACTERS_MAX = 200
# How alike (0 to 1) two names must be for one to be a typo of the other; below 0.7 suggestions look random.
_LIKENESS_MIN = 0.7
_STORAGE_TYPE, _STORAGE_OPTIONS = ("storage", "type"), ("storage", "options")

EntryPath: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True, order=True)
class _Problem:
    path: EntryPath
    what: str
    origin: str

    def __str__(self) -> str:
        names = [shown(name) if name else "''" for name in self.path]
        where = f"{'.'.join(names)}: " if names else ""
        return where + self.what + (f" ({self.origin})" if self.origin else "")


@dataclass(frozen=True, slots=True)
class _Entry:
    path: EntryPath
    value: Any
    origin: str


def load_config(
    path: str | os.PathLike[str] | None,
    *,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, str] | None = None,
) -> HiCacheConfig:
    """Return the configuration in the file `path` (None: no file), changed by variables in `environ`, then by
    `overrides`.

    `load_config(path)` reads the variables of this process, as the command line does; pass `environ={}` to read none.
    `overrides` maps dotted paths to text (`{"host.size": "4GiB"}`). Variables without the prefix `HICACHE_` are
    ignored. Reads the file; mutates nothing. Raises ConfigError that lists every problem, InvalidInput for arguments of
    another type.
    """
    environ = os.environ if environ is None else instance("environ", environ, Mapping)  # type: ignore[type-abstract]
    overrides = {} if overrides is None else instance("overrides", overrides, Mapping)  # type: ignore[type-abstract]
    for name, text in overrides.items():
        instance(f"overrides: {shown(instance('overrides: name', name, str))}", text, str)
    merge = _Merge()
    if path is not None:
        merge.add(_file_entries(file_path("config file", path), merge.problems))
    merge.add(_environ_entries(environ, merge.problems))
    merge.add([_Entry(tuple(name.split(".")), _scalar(text), f"flag --set {shown(name)}")
               for name, text in overrides.items()])  # fmt: skip
    merge.drop_secret_variables()
    config: HiCacheConfig | None = None
    try:
        config = HiCacheConfig.model_validate(merge.tree)
        merge.refuse_less_than_a_page(config)
    except ValidationError as refused:
        explained = (problem for error in refused.errors() for problem in merge.explain(error))
        merge.problems += itertools.islice(explained, PROBLEMS_MAX + 1)
    merge.require_no_problem()
    assert config is not None
    return config


def read_tree(path: Path) -> dict[str, Any]:
    """Return the entries in the file `path`, as sections in sections. They are not checked against the schema.

    Reads the file. Raises ConfigError that lists every problem, as `load_config` does.
    """
    merge = _Merge()
    merge.add(_file_entries(path, merge.problems))
    merge.require_no_problem()
    return merge.tree


def entry_of_variable(variable: str) -> EntryPath | None:
    """The entry that an environment variable gives, whether there is such an entry or not; None for other variables.

    `HICACHE_HOST__SIZE` is `("host", "size")`, and so is `HICACHE_host__size`.
    """
    if not variable.startswith(ENVIRON_PREFIX):
        return None
    return tuple(variable.removeprefix(ENVIRON_PREFIX).lower().split("__"))


class _Merge:
    """The entries so far: `tree` nested as pydantic takes it, `origins` by path for error messages. `secrets` are the
    variables that any source has named for a secret, also where a stronger one has replaced that entry.

    Invariant: the paths in `origins` are the leaves of `tree`.
    """

    def __init__(self) -> None:
        self.tree: dict[str, Any] = {}
        self.origins: dict[EntryPath, str] = {}
        self.problems: list[_Problem] = []
        self.secrets: set[str] = set()

    def require_no_problem(self) -> None:
        """Raise ConfigError that lists the problems so far."""
        problems = sorted(set(self.problems))
        if not problems:
            return
        listed = [str(problem) for problem in problems[:PROBLEMS_MAX]]
        more = len(problems) > PROBLEMS_MAX
        amount = f"more than {PROBLEMS_MAX} problems; the first are" if more else counted(len(problems), "problem")
        raise ConfigError("\n  ".join([f"the configuration has {amount}:", *listed]))

    def add(self, entries: list[_Entry]) -> None:
        """Put the entries of one source over those of weaker ones."""
        self.secrets.update(_named_variables([{entry.path[-1]: entry.value} for entry in entries]))
        self._displace({entry.path: entry.value for entry in entries})
        for entry in entries:
            self._put(entry)

    def _displace(self, given: Mapping[EntryPath, Any]) -> None:
        """Remove what the new source replaces by other means: an alternative, or the options of another backend."""
        for section, names in ((section, names) for section, groups in ALTERNATIVES.items() for names in groups):
            if any(given.get((*section, name)) is not None for name in names):
                for name in names:
                    self._remove((*section, name))
        old = self.tree.get("storage")
        if _STORAGE_TYPE in given and isinstance(old, dict) and old.get("type") != given[_STORAGE_TYPE]:
            self._remove(_STORAGE_OPTIONS)

    def _remove(self, path: EntryPath) -> None:
        node: Any = self.tree
        for name in path[:-1]:
            node = node.get(name) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node.pop(path[-1], None)
        for known in [known for known in self.origins if known[: len(path)] == path]:
            del self.origins[known]

    def _put(self, entry: _Entry) -> None:
        node = self.tree
        for depth, name in enumerate(entry.path[:-1], start=1):
            if node.get(name) is None:
                node[name] = {}
                self.origins.pop(entry.path[:depth], None)
            node = node[name]
            if not isinstance(node, dict):
                section = ".".join(entry.path[:depth])
                self.problems.append(_Problem(entry.path, f"{section} is a value and holds no entries", entry.origin))
                return
        if entry.path[-1] in node:
            self._remove(entry.path)
        node[entry.path[-1]] = entry.value
        self.origins[entry.path] = entry.origin

    def drop_secret_variables(self) -> None:
        """Forget the variables that entries like `integrity.mac_key_env` name: they are secrets and no entries."""
        for name in self.secrets:
            path = entry_of_variable(name)
            if path is not None and self.origins.get(path) == _origin_of_variable(name):
                self._remove(path)
                self._prune(path[:-1])

    def _prune(self, path: EntryPath) -> None:
        if path and not any(known[: len(path)] == path for known in self.origins):
            self._remove(path)
            self._prune(path[:-1])

    def explain(self, error: Any) -> Iterator[_Problem]:
        """The problems in one pydantic error: several if an unknown section has several entries."""
        path = path_of(error)
        lead, names = self._names_around(path)
        if error["type"] != "extra_forbidden":
            inside = names_below(names, path[len(lead) :])
            yield _Problem(path, what_is_wrong(error, self._value(path), path, inside), self._origin(path))
            return
        below = [known for known in self.origins if known[: len(path)] == path] or [path]
        for known in below:
            yield _Problem(known, _unknown(known, len(path), lead, names), self._origin(known))

    def _names_around(self, path: EntryPath) -> tuple[EntryPath, Sequence[str]]:
        """Where `path` leads to and the names of the entries and sections there: nowhere and all of them, or the
        innermost part of a composition and the names in it."""
        storage, lead, rest = self.tree.get("storage"), path[:1], path[1:]
        while True:
            kind = str(storage.get("type")) if isinstance(storage, dict) else ""
            parts = PARTS_ENTRY.get(kind)
            if path[:1] != ("storage",) or parts is None or rest[:2] != ("options", parts) or len(rest) < 3:
                break
            lead, rest = (*lead, *rest[:3]), rest[3:]
            storage = self._value(lead)
        if len(lead) < 2:
            return (), entry_names(kind)
        inside = [name.removeprefix("storage.") for name in entry_names(kind) if name.startswith("storage.")]
        return lead, [*(entry.name for entry in part_entries()), *inside]

    def refuse_less_than_a_page(self, config: HiCacheConfig) -> None:
        """Note tiers that would have no page at all. Not in the schema, whose errors know no path across sections."""
        for section, tokens in (("device", config.device.tokens), ("host", config.host.tokens)):
            if tokens is not None and tokens < config.page_size:
                path = (section, "tokens")
                what = f"is less than one page; got {tokens}, page_size is {config.page_size}"
                self.problems.append(_Problem(path, what, self._origin(path)))

    def _origin(self, path: EntryPath) -> str:
        """Where `path` was given; for a section, or an entry that is missing in it, where that section was given."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.origins:
                return self.origins[path[:end]]
            below = {origin: None for known, origin in self.origins.items() if end and known[:end] == path[:end]}
            if below:
                return ", ".join(below)
        return ""

    def _value(self, path: EntryPath) -> Any:
        node: Any = self.tree
        for name in path:
            if isinstance(node, list):
                node = node[int(name)] if name.isdigit() and int(name) < len(node) else None
            else:
                node = node.get(name) if isinstance(node, dict) else None
        return node


def _named_variables(nodes: list[Any]) -> Iterator[str]:
    """The values of all entries in the trees `nodes` that name a variable. Uses up the list."""
    for node in nodes:  # which grows meanwhile
        if isinstance(node, list):
            nodes += node
        elif isinstance(node, dict):
            nodes += node.values()
            named = (value for name, value in node.items() if str(name).endswith(NAMES_VARIABLE))
            yield from (value for value in named if isinstance(value, str))


def _unknown(path: EntryPath, known_depth: int, lead: EntryPath, names: Sequence[str]) -> str:
    """What to say about `path`, whose first `known_depth` names lead out of the schema, where `names` follow `lead`."""
    whole = "".join(f"{name}." for name in lead)
    path, known_depth = path[len(lead) :], known_depth - len(lead)
    prefix, name, rest = path[: known_depth - 1], path[known_depth - 1], path[known_depth:]
    siblings = names_below(names, prefix)
    dotted = ".".join(path)
    candidates = {entry: _likeness(dotted, entry) for entry in names if not dotted.startswith(entry + ".")}
    # A slip in one name is likelier than a wrong section, and the more so the longer the path around it is.
    candidates |= {".".join((*prefix, near, *rest)): _likeness(name, near) + 0.1 for near in siblings}
    if rest:
        candidates = {entry: likeness for entry, likeness in candidates.items() if entry in names}
    nearest = max(candidates, key=lambda entry: candidates[entry])
    if candidates[nearest] >= _LIKENESS_MIN:
        return f"unknown entry; did you mean {whole}{nearest}?"
    return f"unknown entry; {'.'.join((*lead, *prefix)) or 'the configuration'} has: {', '.join(siblings)}"


def _likeness(left: str, right: str) -> float:
    if len(left) > _TYPO_CHARACTERS_MAX:
        return 0.0
    return difflib.SequenceMatcher(None, left, right).ratio()


def _file_entries(path: Path, problems: list[_Problem]) -> list[_Entry]:
    file_name = f"file {printable(str(path))}"

    def refuse(what: str, line: int | None = None) -> list[_Entry]:
        problems.append(_Problem((), what, f"{file_name}, line {line}" if line else file_name))
        return []

    try:
        with open_regular(path) as file:
            data = file.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            return refuse(f"is larger than {FILE_BYTES_MAX >> 20} MiB and so no configuration")
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
    except (yaml.YAMLError, ValueError) as error:  # ValueError: no UTF-8, an impossible date, a number of 5000 digits
        return refuse(f"is not valid YAML: {shown(str(error).splitlines()[0])}")
    except RecursionError:
        return refuse("is nested too deeply")


class _Loader(yaml.SafeLoader):
    """The safe loader without what a configuration does not need: aliases can make a small file huge or endless, and
    explicit tags reach constructors that fail in undocumented ways. It bounds the number of values, takes long scalars
    for text, and refuses a name that is given twice in a section of a list."""

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
        if isinstance(event, yaml.ScalarEvent) and not event.value.isascii():
            try:
                event.value.encode()
            except UnicodeEncodeError:
                raise yaml.MarkedYAMLError(problem="text with half a surrogate pair", problem_mark=mark) from None
        return super().compose_node(parent, index)


def _flatten(
    node: yaml.MappingNode, loader: _Loader, prefix: EntryPath, file_name: str, problems: list[_Problem]
) -> Iterator[_Entry]:
    """The leaves below `node`; duplicate names and names that are not text become problems."""
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
            problems.append(_Problem(path, f"is given twice, before in line {seen[name]}", origin))
            continue
        seen[name] = line
        if isinstance(value_node, yaml.MappingNode) and value_node.value:
            yield from _flatten(value_node, loader, path, file_name, problems)
            continue
        value = loader.construct_object(value_node, deep=True)
        # A section with all its entries commented out says nothing; `storage` may be null.
        if value is not None or path == ("storage",) or not names_below(entry_names(), path):
            yield _Entry(path, value, origin)


def _origin_of_variable(variable: str) -> str:
    return f"variable {shown(variable)}"


def _environ_entries(environ: Mapping[str, str], problems: list[_Problem]) -> list[_Entry]:
    entries = []
    for variable in sorted(environ):
        path = entry_of_variable(variable)
        if path is None:
            continue
        origin = _origin_of_variable(variable)
        try:
            environ[variable].encode()
            variable.encode()
        except UnicodeEncodeError:
            problems.append(_Problem(tuple(map(shown, path)), "is not valid UTF-8", origin))
            continue
        entries.append(_Entry(path, _scalar(environ[variable]), origin))
    return entries


def _scalar(text: str) -> Any:
    """A value as YAML reads it without quotes: null, a boolean, a number, or else the text itself. Nothing is text as
    well and not null: an empty variable must not unset the file of a key."""
    if not text:
        return text
    loader = _Loader("")
    tag: str = loader.resolve(yaml.ScalarNode, text, (True, False))
    if tag.rpartition(":")[2] not in ("null", "bool", "int", "float"):
        return text
    try:
        return loader.construct_object(yaml.ScalarNode(tag, text))
    except ValueError:
        return text
