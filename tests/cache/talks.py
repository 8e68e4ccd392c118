"""An engine's side of conversations, token by token.

The KV of a token is bytes derived from the weights and all tokens up to it, with bigram keys from the next one too, so
every single token of a partial page can be compared.
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
from tests.cache.world import GEOMETRY, Ending, World, every_hit

PAGE = GEOMETRY.page_size
_TOKEN_BYTES = GEOMETRY.heads * GEOMETRY.head_dim * 4


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(slots=True, eq=False)
class Talk:
    """A request that runs under the weights of `epoch`: its tokens so far, the KV of the first `computed` of which is
    written.
    """

    rid: str
    tokens: list[int]
    kv: RequestKV
    computed: int
    epoch: int


class Talks(Ending):
    """A session cache in a small world of `parts`, and requests whose every cached token is compared."""

    def __init__(
        self,
        *,
        sessions_max: int = 8,
        kind: type[SessionCache] = SessionCache,
        config: HiCacheConfig | None = None,
        **parts: Any,
    ) -> None:
        sessions = SessionsConfig(ttl=60.0, sessions_max=sessions_max)
        config = (config or every_hit()).model_copy(update={"sessions": sessions})
        self.world = World(config=config, kind=kind, **parts)
        assert isinstance(self.world.cache, SessionCache)
        self.cache: SessionCache = self.world.cache
        self.bigram = self.cache.tree.position_bytes == BIGRAM_BYTES
        self.clock = Clock()
        self.cache.clock = self.clock
        self.wrong_tokens = self.compared_tokens = self._requests = 0
        self.world.leave()
        super().__init__()

    @property
    def free_pages(self) -> int:
        return self.world.device.allocator.free_pages

    def key(self, tokens: Sequence[int]) -> RadixKey:
        """The key of `tokens`, of the kind the cache takes."""
        return RadixKey.of(tokens, bigram=self.bigram)

    def begin(self, tokens: Sequence[int], session_id: str | None = None, *, rid: str | None = None) -> Talk:
        """`try_begin` where there is room."""
        talk = self.try_begin(tokens, session_id, rid=rid)
        assert talk is not None, "no room"
        return talk

    def try_begin(self, tokens: Sequence[int], session_id: str | None = None, *, rid: str | None = None) -> Talk | None:
        """Admit a request, compare the KV of its cached tokens and compute the others of its prompt."""
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
        """Generate `tokens`, with KV of all of them; False if there was no room for one."""
        for token in tokens:
            if not self.cache.extend(talk.kv, len(talk.tokens) + 1):
                return False
            talk.tokens.append(token)
            talk.computed -= self.bigram  # the KV of the token before depends on this one
            self.compute(talk)
        self.cache.check()
        return True

    def share(self, talk: Talk) -> None:
        """Hand what is computed to the tree while the request runs."""
        self.cache.cache_unfinished_req(talk.kv, self.key(talk.tokens[: talk.computed]))
        self.cache.check()

    def finish(self, talk: Talk) -> None:
        """End a request that went well, its KV compared to the last token."""
        self.compare(talk)
        self.cache.cache_finished_req(talk.kv, self.key(talk.tokens[: talk.computed]))
        self.cache.check()

    def abort(self, talk: Talk) -> None:
        self.cache.cache_finished_req(talk.kv, None)
        self.cache.check()

    def turn(self, session_id: str, tokens: Sequence[int], answer: Sequence[int] = ()) -> Talk:
        """A whole turn; the returned talk keeps its hit counts."""
        talk = self.begin(tokens, session_id)
        assert self.decode(talk, answer)
        self.finish(talk)
        return talk

    def compute(self, talk: Talk) -> None:
        """Write the KV of the tokens that have none."""
        for position, content in self._contents(talk)[talk.computed :]:
            for tensor, expected in zip(self._rows(talk, position), content, strict=True):
                tensor.copy_(torch.from_numpy(expected))
        talk.computed = len(talk.tokens)

    def compare(self, talk: Talk) -> None:
        """Compare the KV of the tokens that have some."""
        for position, content in self._contents(talk)[: talk.computed]:
            self.compared_tokens += 1
            rows = self._rows(talk, position)
            if any(not np.array_equal(row.numpy(), part) for row, part in zip(rows, content, strict=True)):
                self.wrong_tokens += 1

    def _rows(self, talk: Talk, position: int) -> list[torch.Tensor]:
        """The KV bytes of one token, K and then V of each layer, uint8."""
        page, offset = int(talk.kv.pages[position // PAGE]), position % PAGE
        layers = self.world.device.blocks.layers
        return [part[offset] for (region,) in layers for part in region[page].view(2, PAGE, _TOKEN_BYTES)]

    def _contents(self, talk: Talk) -> list[tuple[int, list[np.ndarray[tuple[int], np.dtype[np.uint8]]]]]:
        """Position and KV of each token: bytes per layer and buffer, from a hash chained over the tokens before."""
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
        """Step until no operation is under way."""
        self.world.until(lambda: not self.cache.poll() and self.world.controller.idle)

    def close(self) -> None:
        """Close everything, and find that nothing is locked and nothing but the tree holds a page."""
        self.leave()
        self.settle()
        assert self.cache.close()
        self.cache.check()
        assert self.cache.tree.device_protected_pages == 0
        assert self.world.device.allocator.used_pages == self.cache.tree.device_evictable_pages
        assert self.wrong_tokens == 0
