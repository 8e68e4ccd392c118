"""The stores of a configuration, for work on all of their pages: scrubbing and clearing.

This work opens its own drivers, separate from those that serve: it covers every namespace, and a slow or dead store
delays only its own job. Memory has no second opening; its open stores are used instead.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ..backends.registry import BackendSpec, leaf_specs, open_stored
from ..backends.storage import Storage, unique_names
from ..backends.stored import StoredPages
from ..backends.tools.hottest import HottestChains
from ..backends.tools.removal import purge_stored
from ..backends.tools.verify import Finding, PageKeys, verify_stored
from ..config import HiCacheConfig
from ..errors import AdminError, ConfigError
from .models import FINDINGS_MAX, DamagedPage, Progress

# The progress after each step of a job; closing it releases its open store.
Steps: TypeAlias = Generator[Progress, None, None]


@dataclass(frozen=True, slots=True)
class LiveStore:
    """An open store of one namespace (digest in hexadecimal): its guard, or the store itself."""

    name: str
    namespace: str
    backend: Storage


class ConfiguredStores:
    """All stores of `config` by the names of their guards; empty without storage. Opens nothing.

    Reads the keys of pages, from files or `environ`. Raises ConfigError.
    """

    def __init__(self, config: HiCacheConfig, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        self.whole = None if config.storage is None else BackendSpec.of(config.storage)
        found = [] if self.whole is None else [spec for _, spec in leaf_specs(self.whole)]
        names = unique_names([spec.name or spec.type for spec in found])
        self.specs: Mapping[str, BackendSpec] = dict(zip(names, found, strict=True))
        self._keys = PageKeys(config.integrity.keys(environ), config.storage_format.keys(environ))

    def require(self, store: str | None) -> Mapping[str, BackendSpec]:
        """Return one store, or all for None. Raises AdminError for an unknown name."""
        if store is None:
            return self.specs
        if store not in self.specs:
            known = ", ".join(self.specs) or "none: the configuration has no section `storage`"
            raise AdminError("unknown_store", f"store {store!r} does not exist; the stores are: {known}")
        return {store: self.specs[store]}

    def scrub(self, store: str | None, rate_bytes_per_s: int | None, remove: bool) -> Steps:
        """Verify every page; yield the progress after each. `remove` removes damaged pages."""
        before = Progress()
        for name, stored in self._opened(store):
            if stored is None:
                before = before.model_copy(update={"skipped": [*before.skipped, name]})
                yield before
                continue
            for step in verify_stored(stored, keys=self._keys, rate_bytes_per_s=rate_bytes_per_s, remove=remove):
                findings = before.findings
                if step.findings:
                    findings = [*findings, *(_damaged(name, found) for found in step.findings[:FINDINGS_MAX])]
                last = Progress(
                    store=name, pages=step.pages, total=step.pages_total, bytes=before.bytes + step.bytes,
                    damaged=dict(Counter(before.damaged) + step.damaged),
                    unsupported=before.unsupported + sum(step.unsupported.values()),
                    unverifiable=before.unverifiable + step.unverifiable,
                    removed=before.removed + step.removed, spared=before.spared + step.spared,
                    skipped=before.skipped,
                    findings=findings[:FINDINGS_MAX],
                )
                yield last
            before = last

    def clear(self, store: str | None, namespace: str) -> Steps:
        """Remove the pages of namespaces that begin with `namespace`; yield the progress after each page."""
        before = Progress()
        for name, stored in self._opened(store):
            if stored is None:
                continue  # its backend is used, see `LiveStore`
            for step in purge_stored(stored, namespace=namespace):
                last = Progress(
                    store=name, pages=step.seen, bytes=before.bytes + step.bytes, removed=before.removed + step.pages
                )
                yield last
            before = last

    def matching(self, store: str | None, prefix: str, namespace: str) -> Iterator[tuple[str, bytes, bytes] | None]:
        """Yield (store, namespace, key) of stored pages whose keys begin with `prefix`, None for each other page."""
        for name, stored in self._opened(store):
            for page in () if stored is None else stored.pages(namespace):
                yield (name, page.namespace, page.key) if page.key.hex().startswith(prefix) else None

    def hottest(self, namespaces: Sequence[str], top_bytes: int) -> Iterator[tuple[str, str, list[bytes]] | str | None]:
        """Yield (store, namespace, keys) of the hottest chains of all stores in turn, see `HottestChains`; the name of
        a store that cannot be listed; None for each other step."""
        chains = HottestChains(top_bytes)
        for name, stored in self._opened(None):
            if stored is None:
                yield name
                continue
            for found in chains.of(stored, [bytes.fromhex(namespace) for namespace in namespaces]):
                yield None if found is None else (name, found[0].hex(), found[1])

    def _opened(self, store: str | None) -> Iterator[tuple[str, StoredPages | None]]:
        """Yield the chosen stores, each open until the next one; None for one in memory."""
        for name, spec in self.require(store).items():
            try:
                stored = open_stored(spec)
            except ConfigError:
                yield name, None
            else:
                with contextlib.closing(stored):
                    yield name, stored


def _damaged(store: str, found: Finding) -> DamagedPage:
    return DamagedPage(store=store, namespace=found.page.namespace.hex(), key=found.page.key.hex(), damage=found.damage)
