"""SGLang's scheduler under random traffic, in its own process. For test_sglang_tree_random.py.

All of the scheduler is SGLang's own: admission, chunks, decoding, retraction, aborts, its allocator, its pools, its
leak checks after each step, and the tree that `options` name. Only the model is replaced: its forward writes KV that is
a function of the tokens before it, and so is its next token. Each forward compares the KV that it reads. Free slots are
overwritten after each step, so a slot that is used after it was freed has wrong bytes too.
"""

from __future__ import annotations

import random
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from .process import serve

# Float32 has all integers below 2**24.
_HASHES = 1 << 23
_TOKENS = 9  # few, so that prompts also share prefixes by chance
_NAMESPACES = ((None, None), (None, None), ("adapter", None), (None, "tenant"), ("adapter", "tenant"))
_CONVERSATIONS = 8
_PROMPT_TOKENS_MAX = 100
_TURN_TOKENS_MAX = 30
_OUTPUT_TOKENS_MAX = 24
_RUN_TIMEOUT_S = 60.0
# The pause of a step without a batch, so that the threads of the tiers get the interpreter.
_REST_S = 0.001


class WrongBytes(Exception):
    """A forward read KV of other tokens."""


class Forward:
    """Replaces SGLang's model worker. `requests` are those that it has computed."""

    def __init__(self, worker: Any) -> None:
        self.requests: dict[str, Any] = {}
        self._worker = worker
        self._pool = worker.model_runner.token_to_kv_pool
        self._rows = worker.model_runner.req_to_token_pool.req_to_token
        self._hashes: dict[str, list[int]] = {}

    def forward_batch_generation(self, batch: Any, **_: object) -> Any:
        """Compare the KV before the tokens of the batch, and write theirs. Return the next tokens."""
        import torch  # noqa: PLC0415
        from sglang.srt.managers.utils import GenerationBatchResult  # noqa: PLC0415

        # As SGLang's worker for models without generation, this one does not say which load the batch waits for.
        known = [self._prefixes(*each) for each in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True)]
        computed = [1] * len(known) if batch.forward_mode.is_decode() else batch.extend_lens
        new = torch.cat([hashes[-count:] for hashes, count in zip(known, computed, strict=True)])
        for layer in range(self._pool.layer_num):
            for sign, buffer in ((1, self._pool.get_key_buffer(layer)), (-1, self._pool.get_value_buffer(layer))):
                for request, hashes, count in zip(batch.reqs, known, computed, strict=True):
                    before = hashes[:-count]
                    read = buffer[self._rows[request.kv.req_pool_idx, : len(before)].long()]
                    wrong = (read != _values(before, layer, sign, buffer)).flatten(1).any(1).nonzero()
                    if len(wrong):
                        token = int(wrong[0])
                        raise WrongBytes(f"{request.rid}: token {token} of {len(before)}, layer {layer}: {read[token]}")
                buffer[batch.out_cache_loc] = _values(new, layer, sign, buffer)
        return GenerationBatchResult(next_token_ids=torch.stack([3 + hashes[-1] % _TOKENS for hashes in known]))

    def _prefixes(self, request: Any, tokens: int) -> Any:
        """Return a hash of each prefix of the first `tokens` tokens, with the namespace."""
        import torch  # noqa: PLC0415

        self.requests[request.rid] = request
        namespace = request.extra_key, request.cache_salt
        hashes = self._hashes.setdefault(request.rid, [1 + _NAMESPACES.index(namespace)])
        for token in (request.origin_input_ids + request.output_ids)[len(hashes) - 1 : tokens]:
            hashes.append((hashes[-1] * 31337 + token * 7919) % _HASHES)
        return torch.tensor(hashes[1 : tokens + 1])

    def overwrite(self, slots: Any) -> None:
        """Write wrong bytes."""
        for buffer in (*self._pool.k_buffer, *self._pool.v_buffer):
            buffer[slots] = 0.5


def _values(hashes: Any, layer: int, sign: int, buffer: Any) -> Any:
    """Return the KV of the tokens with these prefixes, each number of it different."""
    import torch  # noqa: PLC0415

    columns = torch.arange(buffer[0].numel()).view(buffer[0].shape)
    return (sign * (hashes.view(-1, 1, 1) + layer + columns)).to(buffer.dtype)


class Traffic:
    """Random requests, aborts, pauses and flushes between the steps of a scheduler."""

    def __init__(self, scheduler: Any, forward: Forward) -> None:
        self.counts: Counter[str] = Counter()
        self._scheduler, self._forward = scheduler, forward
        self._cache = getattr(scheduler.tree_cache, "cache", None)
        self._number = 0

    def begin(self, seed: int, steps: int, overwrite: bool) -> None:
        """Act for `steps` steps; then wait until all requests have ended. `overwrite`: damage used slots too, from the
        middle on."""
        self.counts.clear()
        self._forward.requests.clear()
        self._random = random.Random(seed)
        self._steps = steps
        self._asked: list[Any] = []
        self._flushing = False
        self._damage_from = steps // 2 if overwrite else 0
        self._deadline_s = time.monotonic() + _RUN_TIMEOUT_S

    def between_steps(self) -> None:
        """Check all, then act at random. End the scheduler's loop when the requests of the last steps have ended."""
        scheduler = self._scheduler
        self._overwrite()
        if self._cache is not None:
            self._cache.check()
        self._steps -= 1
        if time.monotonic() > self._deadline_s:
            raise TimeoutError("the scheduler does not become idle")
        if scheduler.last_batch is None:
            time.sleep(_REST_S)
        if scheduler._engine_paused:
            self._resume()
        elif self._steps > 0:
            self._act()
        elif scheduler.is_fully_idle():
            self._end()

    def _overwrite(self) -> None:
        import torch  # noqa: PLC0415

        allocator = self._scheduler.token_to_kv_pool_allocator
        pages = allocator.get_all_free_pages()
        if 0 < self._steps <= self._damage_from:
            pages = torch.arange(allocator.size // allocator.page_size + 1)
        self._forward.overwrite((pages[:, None] * allocator.page_size + torch.arange(allocator.page_size)).flatten())

    def _act(self) -> None:
        draw = self._random.random()
        if self._flushing:
            if self._scheduler.is_fully_idle():
                self._flushing = not self._scheduler.flush_cache()
                self.counts["flushes"] += 1
        elif draw < 0.3:
            self._ask()
        elif draw < 0.34:
            self._abort()
        elif draw < 0.35:
            self._pause()
        elif draw < 0.36:
            self._flushing = True

    def _ask(self) -> None:
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput  # noqa: PLC0415
        from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: PLC0415

        draw = self._random
        tokens: list[int] = []
        namespace = draw.choice(_NAMESPACES)
        if self._asked and draw.random() < 0.8:  # a turn of a conversation, or a branch of it
            earlier = draw.choice(self._asked[-_CONVERSATIONS:])
            tokens = [*earlier.origin_input_ids, *earlier.output_ids]
            if draw.random() < 0.3:
                tokens = tokens[: draw.randint(0, len(tokens))]
            if draw.random() < 0.9:
                namespace = earlier.extra_key, earlier.cache_salt
        tokens += [3 + draw.randrange(_TOKENS) for _ in range(draw.randint(1, _TURN_TOKENS_MAX))]
        self._number += 1
        sampling = SamplingParams(max_new_tokens=draw.randint(1, _OUTPUT_TOKENS_MAX), temperature=0, ignore_eos=True)
        sampling.normalize(None)
        self._scheduler.handle_generate_request(
            TokenizedGenerateReqInput(
                rid=f"{self._number}.", input_text=None, input_ids=array("q", tokens[:_PROMPT_TOKENS_MAX]),
                input_embeds=None, mm_inputs=None, token_type_ids=None, sampling_params=sampling,
                return_logprob=False, logprob_start_len=-1, top_logprobs_num=0, token_ids_logprob=None, stream=False,
                extra_key=namespace[0], cache_salt=namespace[1],
            )
        )
        self._asked.append(self._scheduler.waiting_queue[-1])
        self.counts["requests"] += 1

    def _abort(self) -> None:
        from sglang.srt.managers.io_struct import AbortReq  # noqa: PLC0415

        self._scheduler.abort_request(AbortReq(rid=f"{self._number - self._random.randrange(6)}."))
        self.counts["aborts"] += 1

    def _pause(self) -> None:
        """Take all requests off the device. They begin again at the next step."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput  # noqa: PLC0415

        self._scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        self.counts["pauses"] += 1

    def _resume(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput  # noqa: PLC0415

        self._scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

    def _compare_account(self, request: Any, account: Any) -> None:
        """Compare HiCache's account of a request that has run with SGLang's own numbers, which are those of its first
        attempt; HiCache's account is that of the last one."""
        ours = account.tokens, account.cached
        if not request.retracted_stain and ours != (len(request.origin_input_ids), request.cached_tokens):
            raise AssertionError(f"{account}: SGLang has {len(request.origin_input_ids)}, {request.cached_tokens}")
        if account.tokens != account.cached + sum(account.computed.values()):
            raise AssertionError(f"{account}: its sources do not add up")
        self.counts["accounts"] += 1
        for (reason, _), tokens in account.computed.items():
            self.counts[reason] += tokens

    def _end(self) -> None:
        """Count hits, and check that a flush frees all slots."""
        scheduler = self._scheduler
        for request in self._forward.requests.values():
            self.counts["retracted"] += request.retracted_stain
            for tier in ("device", "host", "storage"):
                self.counts[tier] += getattr(request, f"cached_tokens_{tier}")
            if self._cache is not None:
                self._compare_account(request, self._cache.explainer.recent[request.rid])
        free = scheduler.flush_cache() and scheduler.token_to_kv_pool_allocator.available_size()
        if free != scheduler.max_total_num_tokens:
            raise AssertionError(f"{free} of {scheduler.max_total_num_tokens} tokens are free after a flush")
        scheduler.gracefully_exit = True


def scheduled(options: dict[str, Any]) -> Any:
    """Return SGLang's scheduler with a real model. It calls `between_steps` in place of reading its sockets."""
    from sglang.srt.managers.scheduler import Scheduler  # noqa: PLC0415
    from sglang.srt.mem_cache.cpp_utils.native_hash import get_native_hash  # noqa: PLC0415
    from sglang.srt.plugins import load_plugins  # noqa: PLC0415
    from sglang.srt.runtime_context import SpawnRanks, publish  # noqa: PLC0415
    from sglang.srt.server_args import PortArgs, ServerArgs  # noqa: PLC0415

    class Driven(Scheduler):  # type: ignore[misc]
        between_steps: Callable[[], None]

        def ingest_requests(self, stop_at_pause: bool = False) -> list[object]:
            self.between_steps()
            return []

    get_native_hash([0], None)  # compiled at its first use
    load_plugins()
    arguments = ServerArgs(**options)
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    return Driven(arguments, PortArgs.init_new(arguments))


def start(options: dict[str, Any]) -> Mapping[str, Callable[..., object]]:
    scheduler = scheduled(options)
    scheduler.model_worker = forward = Forward(scheduler.tp_worker)
    traffic = Traffic(scheduler, forward)
    scheduler.between_steps = traffic.between_steps

    def run(seed: int, steps: int, overwrite: bool = False) -> dict[str, int]:
        """Return what the traffic was: requests, and cached tokens by tier."""
        scheduler.gracefully_exit = False
        traffic.begin(seed, steps, overwrite)
        scheduler.event_loop_normal()
        return dict(traffic.counts)

    return {"run": run}


if __name__ == "__main__":
    serve(start)
