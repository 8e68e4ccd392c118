"""Reloads the configuration of a running daemon: some entries change at once, others need a restart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..admin.stores import ConfiguredStores
from ..backends.base import Direction
from ..backends.registry import check_backend
from ..config import HiCacheConfig
from .node import Node

# The entries that a reload changes; the command applies `logging`. The contents of files of tokens and certificates are
# read again without a reload too.
RELOADED = frozenset({
    "daemon.hosts", "daemon.token_file", "daemon.token_env", "daemon.admin_token_file", "daemon.admin_token_env",
    "daemon.namespaces_max", "daemon.connections_max", "daemon.client_timeout", "daemon.drain_timeout", "logging.level",
    "logging.format",
})
# The entries of a guard, anywhere in `storage`.
_OVERRIDES = (".guard.read", ".guard.write")


def changed_entries(old: HiCacheConfig, new: HiCacheConfig) -> tuple[list[str], list[str]]:
    """Return the dotted names of different entries: those that a reload changes, and those that need a restart. A store
    of another type is one entry."""
    before, after = (dict(_flat(config.model_dump(mode="json"), "")) for config in (old, new))
    differing = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    others = tuple(name.removesuffix("type") for name in differing if name.endswith(".type"))
    changed = sorted({next((one[:-1] for one in others if name.startswith(one)), name) for name in differing})
    now = [name for name in changed if name in RELOADED or name.endswith(_OVERRIDES)]
    return now, [name for name in changed if name not in now]


def apply(node: Node, new: HiCacheConfig) -> tuple[list[str], list[str]]:
    """Apply the entries that a reload changes; return as `changed_entries`. Raises ConfigError, changing nothing."""
    if new.storage is not None:
        check_backend(new.storage.type, new.storage.options)
    now, later = changed_entries(node.config, new)
    values = {name.rpartition(".")[2]: getattr(new.daemon, name.rpartition(".")[2])
              for name in now if name.startswith("daemon.")}
    daemon = node.config.daemon.model_copy(update=values)
    updates: dict[str, Any] = {"daemon": daemon, "logging": new.logging}
    if any(name.endswith(_OVERRIDES) for name in now) and not any(name.startswith("storage.") for name in later):
        updates["storage"] = new.storage
    node.reconfigure(node.config.model_copy(update=updates))
    if "storage" in updates:
        _override(node, new)
    return now, later


def _override(node: Node, config: HiCacheConfig) -> None:
    """Set the overrides of open stores from the configuration, in the order of its stores."""
    specs = list(ConfiguredStores(config).specs.values())
    for namespace in node.namespaces():
        for guard, spec in zip(namespace.store.stores, specs, strict=False):
            if spec.guard is not None:
                guard.override(Direction.READ, spec.guard.read)
                guard.override(Direction.WRITE, spec.guard.write)


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(inner, Mapping) for inner in value):
        for number, inner in enumerate(value):
            yield from _flat(inner, f"{name}.{number}")
    else:
        yield name, value
