"""An engine that serves conversations token by token.

The KV of a token is bytes that derive from the weights and all tokens up to it; with bigram keys also from the next
token. So each token of a partial page can be compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hicache.cache import RequestKV, SessionCache
from hicache.config import HiCacheConfig
from hicache.config.schema import SessionsConfig
from hicache.keys import BIGRAM_BYTES, RadixKey
from tests.cache.world import GEOMETRY, AutoClosed, StepClock, World, every_hit
from tests.tuned import tuned

PAGE = GEOMETRY.page_size
_TOKEN_BYTES = GEOMETRY.heads * GEOMETRY.head_dim * 4


@dataclass(slots=True, eq=False)
class Talk:
    """A request that runs under the weights of `epoch`. The KV of the first `computed` of its `tokens` is written."""

    rid: str
    tokens: list[int]
    kv: RequestKV
    computed: int
    epoch: int


class Talks(AutoClosed):
    """A session cache in a small world of `parts`. All cached tokens of its requests are compared."""

    def __init__(
        self,
        *,
        sessions_max: int = 8,
        kind: type[SessionCache] = SessionCache,
        config: HiCacheConfig | None = None,
        **parts: Any,
    ) -> None:
        sessions = tuned(SessionsConfig, ttl=60.0, sessions_max=sessions_max)
        config = (config or every_hit()).model_copy(update={"sessions": sessions})
        self.clock = StepClock()
        self.world = World(config=config, kind=kind, clock=self.clock, **parts)
        assert isinstance(self.world.cache, SessionCache)
        self.cache: SessionCache = self.world.cache
        self.bigram = self.cache.tree.position_bytes == BIGRAM_BYTES
        self.wrong_tokens = self.compared_tokens = self._requests = 0
        self.world.leave()
        super().__init__()

    @property
    def free_pages(self) -> int:
        return self.world.device.allocator.free_pages

    def key(self, tokens: Sequence[int]) -> RadixKey:
        """Return the key of `tokens`, of the kind that the cache uses."""
        return RadixKey.of(tokens, bigram=self.bigram)

    def begin(self, tokens: Sequence[int], session_id: str | None = None, *, rid: str | None = None) -> Talk:
        """As `try_begin`. REQUIRES: there is room."""
        talk = self.try_begin(tokens, session_id, rid=rid)
        assert talk is not None, "no room"
        return talk

    def try_begin(self, tokens: Sequence[int], session_id: str | None = None, *, rid: str | None = None) -> Talk | None:
        """Admit a request, compare the KV of its cached tokens, compute the others. Return None without room."""
        self._requests += 1
        rid = rid or f"r{self._requests}"
        if session_id is not None:
            self.cache.join_session(rid, session_id)
        kv = self.cache.begin_request(rid, self.key(tokens))
        transfer = self.cache.start_loading()
        self.cache.check()
        if kv is None:
            return None
        for layer in range(GEOMETRY.layers if transfer is not None else 0):
            assert transfer is not None
            transfer.wait_layer(layer)
        talk = Talk(rid, list(tokens), kv, kv.cached_tokens, self.cache.weights_epoch)
        self.compare(talk)
        self.compute(talk)
        return talk

    def decode(self, talk: Talk, tokens: Sequence[int]) -> bool:
        """Generate `tokens` and compute the KV of each. Return False if there is no room for one."""
        for token in tokens:
            if not self.cache.extend(talk.kv, len(talk.tokens) + 1):
                return False
            talk.tokens.append(token)
            talk.computed -= self.bigram  # the KV of the token before depends on this one
            self.compute(talk)
        self.cache.check()
        return True

    def share(self, talk: Talk) -> None:
        """Hand the computed tokens to the tree while the request runs."""
        self.cache.cache_unfinished_req(talk.kv, self.key(talk.tokens[: talk.computed]))
        self.cache.check()

    def finish(self, talk: Talk) -> None:
        """Compare the KV of all computed tokens, and end the request with success."""
        self.compare(talk)
        self.cache.cache_finished_req(talk.kv, self.key(talk.tokens[: talk.computed]))
        self.cache.check()

    def abort(self, talk: Talk) -> None:
        self.cache.cache_finished_req(talk.kv, None)
        self.cache.check()

    def turn(self, session_id: str, tokens: Sequence[int], answer: Sequence[int] = ()) -> Talk:
        """Run a whole turn. The returned talk keeps its hit counts."""
        talk = self.begin(tokens, session_id)
        assert self.decode(talk, answer)
        self.finish(talk)
        return talk

    def compute(self, talk: Talk) -> None:
        """Write the KV of the tokens that are not computed."""
        for position, content in self._contents(talk)[talk.computed :]:
            for tensor, expected in zip(self._rows(talk, position), content, strict=True):
                tensor.copy_(torch.from_numpy(expected))
        talk.computed = len(talk.tokens)

    def compare(self, talk: Talk) -> None:
        """Compare the KV of the computed tokens; count differences in `wrong_tokens`."""
        for position, content in self._contents(talk)[: talk.computed]:
            self.compared_tokens += 1
            rows = self._rows(talk, position)
            if any(not np.array_equal(row.numpy(), part) for row, part in zip(rows, content, strict=True)):
                self.wrong_tokens += 1

    def _rows(self, talk: Talk, position: int) -> list[torch.Tensor]:
        """Return the KV bytes of one token, uint8: K, then V of each layer."""
        page, offset = int(talk.kv.pages[position // PAGE]), position % PAGE
        layers = self.world.device.blocks.layers
        return [part[offset] for (region,) in layers for part in region[page].view(2, PAGE, _TOKEN_BYTES)]

    def _contents(self, talk: Talk) -> list[tuple[int, list[np.ndarray[tuple[int], np.dtype[np.uint8]]]]]:
        """Return the position and the KV of each token: bytes per layer and buffer, from a hash over the prefix."""
        found, chain = [], talk.epoch.to_bytes(4, "little")
        parts = GEOMETRY.layers * 2
        for position, token in enumerate(talk.tokens):
            chain = hashlib.sha256(chain + token.to_bytes(4, "little")).digest()
            after = talk.tokens[position + 1 : position + 2] if self.bigram else []
            content = chain + b"".join(token.to_bytes(4, "little") for token in after)
            stream = np.frombuffer(hashlib.shake_128(content).digest(parts * _TOKEN_BYTES), dtype=np.uint8).copy()
            found.append((position, np.split(stream, parts)))
        return found

    def settle(self) -> None:
        """Step until no operation is in flight."""
        self.world.until(lambda: not self.cache.poll() and self.world.controller.idle)

    def close(self) -> None:
        """Close the cache. Assert that no page is locked, only the tree holds pages, and no token was wrong."""
        self.leave()
        self.settle()
        assert self.cache.close()
        self.cache.check()
        assert self.cache.tree.device_protected_pages == 0
        assert self.world.device.allocator.used_pages == self.cache.tree.device_evictable_pages
        assert self.wrong_tokens == 0
