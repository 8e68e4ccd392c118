"""The admin surface of a cache inside an engine, on a Unix socket.

Its routes run on a thread of this module. Work for the scheduler thread goes through the cache's mailbox, which `poll`
serves; statistics, and lookups, scrubs and removals in stores, do not need the scheduler.

Locking design: `_lock` guards the table of pins. The scheduler thread owns the Pin objects, which are used only through
the mailbox. A warm-up reads pages on the thread of its job, into pages that the scheduler has reserved.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, TypeVar

import uvicorn
from fastapi import FastAPI

from .. import __version__
from ..backends.base import Direction
from ..backends.guard import Override
from ..backends.rotated import Rotated
from ..backends.storage import named_stores
from ..cache import HiRadixCache, HostCache, Pin, TierStatistics, TreeCache
from ..cache.explain import PromptTokens, StorageAnswer
from ..cache.factory import storage_opener
from ..cache.mailbox import Steps
from ..cache.tiered import Warming
from ..config import HiCacheConfig
from ..config.secret import read_secret
from ..errors import AdminError
from ..ghosts import Reason
from ..hints import HintsEnvelope, Outcome
from ..keys import BIGRAM_BYTES, PAGE_KEY_BYTES, Namespace, RadixKey
from . import models
from .access import AdminAccess, PeerProtocol
from .router import AdminSurface
from .sockets import PrivateSocket
from .stores import ConfiguredStores, LiveStore
from .target import Chain, MemoryPlaces, Places, Warmed
from .views import causes, state_of, store_status
from .work import MATCHES_MAX

logger = logging.getLogger(__name__)
T = TypeVar("T")

# The time for the scheduler to serve a request. A step of an engine takes milliseconds; the first compilation of a
# model may take longer than this.
SCHEDULER_TIMEOUT_S = 5.0
PINS_MAX = 1024
# The pause before a request that must be served is made again.
RETRY_S = 0.1
CONNECTIONS_MAX = 32
CLOSE_S = 3.0


class EmbeddedCache:
    """The AdminTarget of `cache`, which was built from `config` and `namespace`. Raises ConfigError."""

    def __init__(
        self, cache: HiRadixCache | HostCache, config: HiCacheConfig, namespace: Namespace,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._cache = cache
        self._config = config
        self._namespace = namespace.labelled(config.model_label)
        self._environ = dict(os.environ if environ is None else environ)
        self.clock = cache.controller.clock
        self.stores = ConfiguredStores(config, self._environ)
        self._instance = secrets.token_hex(8)
        self._started_s = self.clock()
        self._lock = threading.Lock()
        self._pins: dict[str, tuple[Pin, int]] = {}

    @property
    def _digest(self) -> str:
        return replace(self._namespace, weights_epoch=self._cache.weights_epoch).digest.hex()

    # Reading

    def live_stores(self) -> Sequence[LiveStore]:
        """See AdminTarget."""
        backend = self._cache.controller.backend
        if backend is None:
            return ()
        space = backend.codec.namespace.hex()
        return [LiveStore(name, space, leaf) for name, leaf in named_stores(backend)]

    def status(self) -> models.Status:
        """See AdminTarget. Does not need the scheduler."""
        cache, found, digest = self._cache, self._cache.statistics(), self._digest
        page_bytes = found.host.page_bytes
        stores = [store_status(digest, leaf) for leaf in found.controller.backends]
        hits = {tier: tokens // cache.page_size for tier, tokens in found.hit_tokens.items()}
        in_memory, stored = hits.get("device", 0) + hits.get("host", 0), hits.get("storage", 0)
        return models.Status(
            kind="embedded", version=__version__, instance=self._instance, state=state_of("ready", stores),
            uptime_s=self.clock() - self._started_s, attached=cache.storage.attached,
            tiers=[
                _tier("device", found.device, 0), _tier("host", found.host, found.pinned_pages)
            ] if found.device.capacity_pages else [_tier("host", found.host, found.pinned_pages)],
            namespaces=[models.NamespaceStatus(
                namespace=digest, label=self._namespace.name,
                weights_epoch=found.weights_epoch, pool_bytes=found.host.cached_pages * page_bytes, quota_bytes=None,
                pool_hits=in_memory, store_hits=stored,
                misses=found.prompt_tokens // cache.page_size - in_memory - stored,
            )],
            stores=stores,
            clients=[], configured_stores=list(self.stores.specs),
            overrides={f"{store or '*'}/{way.value}": mode for (way, store), mode in cache.storage.overrides.items()},
        )

    def memory_places(self, request: models.LookupRequest, deadline: float) -> MemoryPlaces:
        """See AdminTarget. Walks the tree in slices, one per step of the scheduler; for tokens it follows one path."""
        timeout_s = max(0.0, deadline - self.clock())
        if request.tokens is not None:
            key = self._key(request.tokens)
            keys = self._page_keys(key)
            found = self._ask(lambda: self._cache.tree.peek(key), timeout_s)
            tiers = ["device"] * found.device_pages + ["host"] * found.host_pages
            space = self._digest
            return MemoryPlaces(keys, {(space, one): [tier] for one, tier in zip(keys, tiers, strict=False)}, True)
        keys = [bytes.fromhex(one) for one in request.keys]
        if not self._digest.startswith(request.namespace):
            return MemoryPlaces(keys, {}, True)
        wanted, prefix = frozenset(keys), request.prefix

        def is_wanted(page: bytes) -> bool:
            return page in wanted if prefix is None else page.hex().startswith(prefix)

        places, complete = self._ask(self._walk(is_wanted, len(wanted) or MATCHES_MAX), timeout_s)
        return MemoryPlaces(keys, places, complete)

    def _walk(self, is_wanted: Callable[[bytes], bool], most: int) -> Generator[None, None, tuple[Places, bool]]:
        """Visit every node, a few per step. Nodes that are split or removed during the walk may be missed."""
        tree, space, places = self._cache.tree, self._digest, Places()
        stack = tree.roots()
        while stack and tree is self._cache.tree:
            node = stack.pop()
            stack.extend(node.children.values())
            tiers = [tier for tier, pages in (("device", node.device), ("host", node.host)) if pages is not None]
            if tiers:
                for page in tree.page_keys(node):
                    if is_wanted(page):
                        places[space, page] = tiers
                        if len(places) >= most:
                            return places, not stack
            yield
        return places, True

    def explain(self, rid: str | None, last: int, prompt: models.LookupRequest | None = None) -> models.Explanation:
        """See AdminTarget."""
        cache, explainer, gate = self._cache, self._cache.explainer, self._cache.controller.gate
        now_s, key, pages = cache.controller.time_s(), RadixKey.of_hashes([]), 0
        if prompt is not None:
            chain = prompt.tokens or [bytes.fromhex(key) for key in prompt.keys]
            key, pages = self._chain_key(chain), self.warm("", chain, 0).pages

        def read() -> list[PromptTokens]:
            known, hour = explainer.recent, explainer.last_hour(now_s)
            if prompt is None:
                return [hour, *([*reversed(known.values())][:last] if rid is None else filter(None, [known.get(rid)]))]
            answer = StorageAnswer(pages, gate.may(Direction.READ) or not gate.attached, (Reason.UNAVAILABLE, ""))
            return [hour, explainer.foresee(key, cache.tree, answer, now_s)]

        total, *found = [_account(one, now_s) for one in self._ask(read)]
        if rid is not None and not found:
            raise AdminError("unknown_request", "no request with this id is among the last 1,024")
        rates, token_bytes = cache.break_even.statistics().rates, cache.host.payload_bytes / cache.page_size
        return models.Explanation(
            unit="tokens", total=total, accounts=found, prefill_tokens_per_s=rates.prefill_tokens_per_s,
            storage_tokens_per_s=rates.storage_bytes_per_s / token_bytes,
        )

    # Memory

    def clear_memory(self, namespace: str) -> int:
        """See AdminTarget. Counts copies: a page on L1 and on L2 counts twice."""
        self._require_alone("clear")
        if not self._digest.startswith(namespace):
            return 0

        def clear() -> int:
            tree = self._cache.tree
            copies = tree.device_pages_total + tree.host_pages
            self._cache.clear()
            return copies

        return self._ask(clear)

    def stores_cleared(self, namespace: str) -> None:
        """See AdminTarget: pages in memory are stored again at their next use."""

        def forget() -> None:
            self._cache.tree.stored.forget_all()  # of the current tree when the scheduler serves this

        if self._digest.startswith(namespace) and not self._cache.controller.has_ranks:
            self._ask(forget)

    def page_keys(self, chain: Chain) -> Sequence[bytes]:
        """See AdminTarget. Page keys are for an engine that makes them, and tokens for every other one."""
        self._require_alone("warm")
        return self._page_keys(self._chain_key(chain))

    def warm(self, namespace: str, chain: Chain, bytes_max: int) -> Warmed:
        """See AdminTarget. Pages on L1 or L2 count as in memory; pages are read to L2, on the caller's thread."""
        cache, key = self._cache, self._chain_key(chain)
        keys, page_bytes = self._page_keys(key), cache.host.frame_bytes
        started = self._ask(lambda: cache.begin_warming(key, keys, -(-bytes_max // page_bytes)))
        pages, read_pages, backend = started.start_page, 0, cache.controller.backend
        if started.read is not None:
            try:
                cache.controller.read_apart(started.read)
            finally:
                read_pages = self._end_warming(started)
        elif not bytes_max and backend is not None:
            read_pages = backend.batch_exists(keys[pages:], deadline=self.clock() + SCHEDULER_TIMEOUT_S)
        return Warmed(pages + read_pages, read_pages, page_bytes, not cache.host.allocator.free_pages)

    def _end_warming(self, started: Warming) -> int:
        """See `TieredCache.end_warming`. Asks until the scheduler has served it, however late that is, or the cache is
        closed: else its pages would stay reserved."""
        while True:
            try:
                return self._ask(lambda: self._cache.end_warming(started))
            except AdminError as error:
                if error.kind == "closed":
                    raise
                self.clock.sleep(RETRY_S)

    def pin(self, request: models.PinRequest) -> models.PinStatus:
        """See AdminTarget. A pin ends `ttl_s` after a request has used all of it."""
        cache = self._cache
        self._require_alone("pin")
        with self._lock:
            if len(self._pins) >= PINS_MAX:
                raise AdminError("too_many", f"the limit of {PINS_MAX} pins is reached; end some")
        keys = [bytes.fromhex(key) for key in request.keys]
        key = self._chain_key(keys if request.tokens is None else request.tokens)
        made = self._ask(lambda: cache.pin(key, request.ttl_s))
        if made is None:
            raise AdminError("too_many", "pins would use more than `pin_host_share` of L2; end some, or raise it")
        name = secrets.token_hex(4)
        with self._lock:
            self._pins[name] = made, key.pages(cache.page_size)
        return self._pin_status(name, made, key.pages(cache.page_size))

    def unpin(self, pin: str) -> None:
        """See AdminTarget."""
        with self._lock:
            found = self._pins.get(pin)
        if found is None:
            raise AdminError("unknown_pin", f"pin {pin[:16]!r} does not exist; list the pins")
        self._ask(found[0].release)
        with self._lock:
            self._pins.pop(pin, None)

    def pins(self) -> Sequence[models.PinStatus]:
        """See AdminTarget. Forgets ended pins."""
        with self._lock:
            self._pins = {name: found for name, found in self._pins.items() if found[0].active}
            return [self._pin_status(name, pin, asked) for name, (pin, asked) in self._pins.items()]

    def _pin_status(self, name: str, pin: Pin, asked_pages: int) -> models.PinStatus:
        left_s = max(0.0, pin.expires_at - self._cache.controller.time_s())
        return models.PinStatus(
            id=name, namespace=self._digest, pages=pin.pages, asked_pages=asked_pages, expires_in_s=left_s
        )

    def hint(self, envelope: HintsEnvelope) -> Sequence[Outcome]:
        """See AdminTarget."""
        self._require_alone("hint")
        return self._ask(lambda: self._cache.hint(envelope))

    # Storage

    def attach(self, store: str | None) -> None:
        """See AdminTarget."""
        self._require_alone("attach")
        spec = None if store is None else self.stores.specs[store]
        opener = storage_opener(self._config, self._namespace, self._environ, spec, self.clock)
        self._ask(lambda: self._cache.storage.attach(opener))

    def detach(self) -> None:
        """See AdminTarget."""
        self._require_alone("detach")
        self._ask(self._cache.storage.detach)

    def override(self, store: str | None, direction: Direction, mode: Override) -> None:
        """See AdminTarget."""
        self._ask(lambda: self._cache.storage.override(direction, mode, store))

    def quotas(self) -> Sequence[models.Quota]:
        """See AdminTarget."""
        return ()

    def set_quota(self, namespace: str, quota_bytes: int | None) -> NoReturn:
        """See AdminTarget: an embedded cache has one namespace."""
        raise AdminError("unsupported", "an embedded cache has one namespace; quotas are for the pool of a daemon")

    # Inside

    def _ask(self, work: Callable[[], T] | Steps[T], timeout_s: float = SCHEDULER_TIMEOUT_S) -> T:
        return self._cache.mailbox.ask(work, min(timeout_s, SCHEDULER_TIMEOUT_S))

    def _require_alone(self, what: str) -> None:
        if self._cache.controller.has_ranks:
            raise AdminError(
                "unsupported", f"{what}: all ranks of this engine must do this in the same step, which only the engine "
                "itself can do (`bypass` and `breaker` work: a direction that is off on one rank is off on all)",
            )

    def _key(self, tokens: models.TokenPrefix) -> RadixKey:
        positions = self._cache.tree.position_bytes
        if positions == PAGE_KEY_BYTES:
            raise AdminError("unsupported", "tokens: this engine uses its own page hashes; pass page keys")
        salt = None if tokens.cache_salt is None else tokens.cache_salt.get_secret_value()
        return RadixKey.of(tokens.ids, extra_key=tokens.extra_key, cache_salt=salt, bigram=positions == BIGRAM_BYTES)

    def _chain_key(self, chain: Chain) -> RadixKey:
        if isinstance(chain, models.TokenPrefix):
            return self._key(chain)
        if self._cache.tree.position_bytes != PAGE_KEY_BYTES:
            raise AdminError(
                "unsupported", "this cache finds pages by tokens, not by page keys; pass --tokens or --prompts"
            )
        return RadixKey.of_hashes(chain)

    def _page_keys(self, key: RadixKey) -> list[bytes]:
        return key.page_keys(self._cache.page_size, key.seed, 0, key.pages(self._cache.page_size))


def _account(found: PromptTokens, now_s: float) -> models.Account:
    values = {name: getattr(found, name) for name in models.Account.model_fields if hasattr(found, name)}
    return models.Account(**values | {"ago_s": max(0.0, now_s - found.time_s), "computed": causes(found.computed)})


def _tier(name: str, found: TierStatistics, pinned_pages: int) -> models.TierStatus:
    return models.TierStatus(
        name="device" if name == "device" else "host", capacity_bytes=found.capacity_pages * found.page_bytes,
        used_bytes=(found.capacity_pages - found.free_pages) * found.page_bytes,
        pinned_bytes=pinned_pages * found.page_bytes, pages=found.cached_pages,
    )


class AdminServer(AbstractContextManager["AdminServer"]):
    """Serves the admin surface of an embedded cache. A context manager; close it before the cache."""

    def __init__(self, target: EmbeddedCache, socket: PrivateSocket, access: AdminAccess) -> None:
        self.path = socket.path
        self._socket = socket
        self._surface = AdminSurface(target, access)
        app = FastAPI(title="HiCache admin", version=__version__, docs_url=None, redoc_url=None)
        app.include_router(self._surface.router)
        self._server = uvicorn.Server(uvicorn.Config(
            app, http=PeerProtocol, loop="asyncio", lifespan="off", log_config=None, access_log=False,
            limit_concurrency=CONNECTIONS_MAX, timeout_graceful_shutdown=1,
        ))
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [socket.socket]}, name="hicache-admin", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening, cancel jobs and end the threads. Idempotent. Blocks for seconds at most."""
        self._server.should_exit = True
        self._thread.join(CLOSE_S)
        self._surface.close(CLOSE_S)
        self._socket.close()

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def serve(
    config: HiCacheConfig, path: Path, cache: TreeCache | HostCache, namespace: Namespace,
    environ: Mapping[str, str] | None,
) -> AdminServer | None:
    """Serve the admin surface of `cache` at `path`. See `hicache.admin.serve_configured`."""
    if not isinstance(cache, (HiRadixCache, HostCache)):
        logger.warning("admin.socket is ignored: a cache with prefix_cache off does not have an admin surface")
        return None
    variables, section = os.environ if environ is None else environ, config.admin
    token = Rotated(
        "admin token", [section.token_file],
        lambda: read_secret("admin token", section.token_env, section.token_file, variables),
    )
    target = EmbeddedCache(cache, config, namespace, variables)
    return AdminServer(target, PrivateSocket(path, "admin.socket"), AdminAccess(token.get))
