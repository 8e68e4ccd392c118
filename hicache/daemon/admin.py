"""NodeAdmin: the admin surface of a daemon.

Pins and quotas end with the process.

Locking design: `_lock` guards the table of pins and is held while the pool pins and unpins, so that a page stays pinned
as long as one pin names it. It is taken before the lock of the pool.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .. import __version__
from ..admin import models
from ..admin.stores import ConfiguredStores, LiveStore
from ..admin.target import Chain, MemoryPlaces, Places, Warmed
from ..admin.views import causes, state_of, store_status
from ..admin.work import MATCHES_MAX
from ..backends.base import Direction
from ..backends.guard import Override
from ..backends.storage import named_stores
from ..background import BackgroundTask
from ..errors import AdminError, InvalidInput
from ..ghosts import Kind
from ..hints import Demote, HintAction, HintsEnvelope, Outcome, OutcomeStatus, Pin, Prefetch, Release, hint_of
from ..units import SIZE_MAX_BYTES
from .namespace import ServedNamespace
from .node import Node

PINS_MAX = 4096
QUOTAS_MAX = 4096
# The time for one piece of a warm-up, and the most pages of it: each needs a buffer until the piece ends.
WARM_S = 10.0
WARM_PAGES_MAX = 8


@dataclass(frozen=True, slots=True, eq=False)
class _Pin:
    namespace: ServedNamespace
    keys: tuple[bytes, ...]
    pages: int
    expires_s: float


class NodeAdmin:
    """The AdminTarget of `node`. Raises ConfigError for unreadable keys."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.clock = node.clock
        self.stores = ConfiguredStores(node.config, node.environ)
        self._lock = threading.Lock()
        self._pins: dict[str, _Pin] = {}
        self._expiry = BackgroundTask("unpin", self._expire, clock=self.clock)

    def close(self, timeout_s: float) -> None:
        """End the thread; blocks."""
        self._expiry.close(timeout_s)

    # Reading

    def live_stores(self) -> Sequence[LiveStore]:
        """See AdminTarget."""
        return [
            LiveStore(name, namespace.digest, leaf)
            for namespace in self._node.namespaces()
            for name, leaf in named_stores(namespace.store)
        ]

    def status(self) -> models.Status:
        """See AdminTarget."""
        found = self._node.statistics()
        pool = found.pool
        stores = [store_status(one.namespace, leaf) for one in found.namespaces for leaf in one.stores]
        return models.Status(
            kind="daemon", version=__version__, instance=found.instance, state=state_of(found.state.value, stores),
            uptime_s=found.uptime_s, attached=self._node.storage.is_attached,
            tiers=[models.TierStatus(
                name="pool", capacity_bytes=pool.capacity_bytes, used_bytes=pool.used_bytes,
                pinned_bytes=pool.pinned_bytes, pages=pool.pages,
            )],
            namespaces=[
                models.NamespaceStatus(
                    namespace=one.namespace, label=one.label, weights_epoch=one.weights_epoch,
                    pool_bytes=one.pool_bytes, quota_bytes=one.quota_bytes, pool_hits=one.sharing.pool_hits,
                    store_hits=one.sharing.store_hits + one.sharing.shared_reads, misses=one.sharing.misses,
                )
                for one in found.namespaces
            ],
            stores=stores,
            clients=[
                models.ClientStatus(name=one.name, bytes=one.pages * one.frame_bytes, operations=one.operations,
                             is_alive=one.is_alive)
                for one in found.clients
            ],
            configured_stores=list(self.stores.specs),
            overrides={
                f"{store or '*'}/{way.value}": mode
                for (way, store), mode in self._node.storage.overrides.modes.items()
            },
        )

    def memory_places(self, request: models.LookupRequest, deadline: float) -> MemoryPlaces:
        """See AdminTarget."""
        if request.tokens is not None:
            raise AdminError("unsupported", "a daemon does not know tokens: use page keys, or an engine's socket")
        keys = [bytes.fromhex(one) for one in request.keys]
        pool, places = self._node.pool, Places()
        for namespace in self._matching(request.namespace):
            wanted = keys if request.prefix is None else pool.keys(namespace.space, request.prefix)
            for key, is_there in zip(wanted, pool.has(namespace.space, wanted), strict=True):
                if is_there and (keys or len(places) < MATCHES_MAX):
                    places[namespace.digest, key] = ["pool"]
        return MemoryPlaces(keys, places, bool(keys) or len(places) < MATCHES_MAX)

    def _matching(self, prefix: str) -> list[ServedNamespace]:
        return [namespace for namespace in self._node.namespaces() if namespace.digest.startswith(prefix)]

    def _one(self, prefix: str) -> ServedNamespace:
        found = self._matching(prefix)
        if not found:
            raise AdminError("unknown_namespace", "no open namespace begins with these digits; list the namespaces")
        if len(found) > 1:
            raise AdminError("ambiguous", f"{len(found)} namespaces begin with these digits; use more digits")
        return found[0]

    def explain(self, rid: str | None, last: int, prompt: models.LookupRequest | None = None) -> models.Explanation:
        """See AdminTarget. Has no accounts."""
        if rid is not None or prompt is not None:
            raise AdminError("unsupported", "a daemon does not know requests and prompts; use an engine's socket")
        found = self._node.statistics()
        sharing, counts = [one.sharing for one in found.namespaces], Counter[Kind]()
        for one in sharing:
            counts.update(one.missed)
        pool, storage = sum(one.pool_hits for one in sharing), sum(one.store_hits + one.shared_reads for one in sharing)
        pages, computed = pool + storage + sum(one.misses for one in sharing), causes(counts)
        total = models.Account(ago_s=found.uptime_s, tokens=pages, host=pool, storage=storage, computed=computed)
        return models.Explanation(unit="pages", total=total)

    # Memory

    def clear_memory(self, namespace: str) -> int:
        """See AdminTarget. Also removes pinned pages."""
        return sum(self._node.pool.clear(one.space) for one in self._matching(namespace))

    def stores_cleared(self, namespace: str) -> None:
        """See AdminTarget. A daemon does not cache the content of its stores."""
        for one in self._matching(namespace):
            one.space.accounts.cleared()

    def page_keys(self, chain: Chain) -> Sequence[bytes]:
        """See AdminTarget."""
        if isinstance(chain, models.TokenPrefix):
            raise AdminError(
                "unsupported", "a daemon does not know how engines hash tokens: pass page keys or --top, or use an "
                "engine's socket",
            )
        if not self._node.pool.capacity_bytes:
            raise AdminError("unsupported", "warm: this daemon has no pool; set daemon.pool and restart")
        return chain

    def warm(self, namespace: str, chain: Chain, bytes_max: int) -> Warmed:
        """See AdminTarget. Reads on the caller's thread."""
        found, keys, pool = self._one(namespace), self.page_keys(chain), self._node.pool
        page_bytes, deadline = found.wire.frame_bytes, self.clock() + WARM_S

        def pooled() -> int:
            return [*pool.has(found.space, keys), False].index(False)

        pages = after = pooled()
        if bytes_max:
            most = min(pool.room(found.space), WARM_PAGES_MAX, -(-bytes_max // page_bytes))
            found.store.warm(keys[pages : pages + most], deadline)
            after = pooled()
        else:
            for backend in found.store.slot.open_backends():
                after += backend.batch_exists(keys[pages:], deadline=deadline)
        return Warmed(after, max(0, after - pages), page_bytes, not pool.room(found.space))

    def pin(self, request: models.PinRequest) -> models.PinStatus:
        """See AdminTarget."""
        if request.tokens is not None or not request.keys:
            raise AdminError("invalid", "keys: a daemon does not know tokens; pass page keys")
        namespace = self._one(request.namespace)
        keys = tuple(bytes.fromhex(key) for key in request.keys)
        with self._lock:
            if len(self._pins) >= PINS_MAX:
                raise AdminError("too_many", f"the limit of {PINS_MAX} pins is reached; end some")
            pages = self._node.pool.pin(namespace.space, keys)
            name = secrets.token_hex(4)
            pin = _Pin(namespace, keys, pages, self.clock() + request.ttl_s)
            if pages:
                self._pins[name] = pin
        if pages:
            self._expiry.wake(pin.expires_s)
        return self._pin_status(name, pin)

    def unpin(self, pin: str) -> None:
        """See AdminTarget."""
        with self._lock:
            if pin not in self._pins:
                raise AdminError("unknown_pin", f"pin {pin[:16]!r} does not exist; list the pins")
            self._end(pin)

    def pins(self) -> Sequence[models.PinStatus]:
        """See AdminTarget."""
        with self._lock:
            found = dict(self._pins)
        return [self._pin_status(name, pin) for name, pin in found.items()]

    def _pin_status(self, name: str, pin: _Pin) -> models.PinStatus:
        present = sum(self._node.pool.has(pin.namespace.space, pin.keys))
        return models.PinStatus(
            id=name, namespace=pin.namespace.digest, pages=min(pin.pages, present), asked_pages=len(pin.keys),
            expires_in_s=max(0.0, pin.expires_s - self.clock()),
        )

    def _end(self, name: str) -> None:
        """End a pin: its pages may be evicted unless another pin has them. REQUIRES: the lock is held."""
        pin = self._pins.pop(name)
        others = {key for one in self._pins.values() if one.namespace is pin.namespace for key in one.keys}
        self._node.pool.unpin(pin.namespace.space, [key for key in pin.keys if key not in others])

    def _expire(self) -> float:
        with self._lock:
            now_s = self.clock()
            for name in [name for name, pin in self._pins.items() if pin.expires_s <= now_s]:
                self._end(name)
            return min((pin.expires_s for pin in self._pins.values()), default=math.inf)

    def hint(self, envelope: HintsEnvelope) -> Sequence[Outcome]:
        """See AdminTarget. The pool pins pages, reads them ahead and lets them go; it knows neither sessions nor who
        comes back."""
        return [self._outcome(action) for action in envelope.actions]

    def _outcome(self, action: HintAction) -> Outcome:
        def outcome(status: OutcomeStatus, detail: str = "", pages: int = 0, ttl_s: float | None = None) -> Outcome:
            return Outcome(action.action_id, action.action_type, status, detail, pages, ttl_s)

        try:
            hint = hint_of(action)
            if not isinstance(hint, (Pin, Prefetch, Release, Demote)):
                return outcome(OutcomeStatus.REJECTED, "a daemon does not order pages; send it to the engine")
            if hint.page_keys is None:
                return outcome(OutcomeStatus.REJECTED, "a daemon knows page_keys only; send it to the engine")
            if isinstance(hint, Demote) and hint.destination == "host":
                return outcome(OutcomeStatus.REJECTED, "a daemon has no device pages; send it to the engine")
            keys = [bytes.fromhex(key) for key in hint.page_keys]
            if isinstance(hint, Pin):
                made = self.pin(models.PinRequest(namespace=hint.namespace, keys=hint.page_keys, ttl_s=hint.ttl_s))
                pages, ttl_s = made.pages, hint.ttl_s
            elif isinstance(hint, Prefetch):
                pages, ttl_s = self.warm(hint.namespace, keys, SIZE_MAX_BYTES).pages, None
            elif isinstance(hint, Demote) and self._node.config.storage is None:
                return outcome(OutcomeStatus.REJECTED, "there is no store below the pool")
            else:
                pages, ttl_s = self._node.pool.drop(self._one(hint.namespace).space, keys), None
        except (InvalidInput, AdminError) as error:
            return outcome(OutcomeStatus.REJECTED, str(error))
        if not pages:
            return outcome(OutcomeStatus.MISSING, "none of the pages is here")
        is_whole = pages == len(keys)
        return outcome(OutcomeStatus.ACCEPTED if is_whole else OutcomeStatus.CLIPPED,
                       "" if is_whole else "other pages are missing or in use", pages, ttl_s)

    # Storage

    def attach(self, store: str | None) -> None:
        """See AdminTarget."""
        self._node.storage.attach(None if store is None else self.stores.specs[store])

    def detach(self) -> None:
        """See AdminTarget."""
        self._node.storage.detach()

    def override(self, store: str | None, direction: Direction, mode: Override) -> None:
        """See AdminTarget."""
        self._node.storage.force(direction, mode, store)

    # Quotas

    def quotas(self) -> Sequence[models.Quota]:
        """See AdminTarget."""
        spaces = {namespace.digest: namespace.space for namespace in self._node.namespaces()}
        return [
            models.Quota(
                namespace=digest, quota_bytes=quota_bytes,
                pool_bytes=self._node.pool.space_bytes(spaces[digest]) if digest in spaces else 0,
            )
            for digest, quota_bytes in self._node.quotas.items()
        ]

    def set_quota(self, namespace: str, quota_bytes: int | None) -> None:
        """See AdminTarget. A namespace that is not open yet needs its whole digest."""
        is_known = len(namespace) == 64 and not self._matching(namespace)
        digest = namespace if is_known else self._one(namespace).digest
        if quota_bytes is not None and digest not in self._node.quotas and len(self._node.quotas) >= QUOTAS_MAX:
            raise AdminError("too_many", f"the limit of {QUOTAS_MAX} quotas is reached; remove some")
        self._node.set_quota(digest, quota_bytes)
