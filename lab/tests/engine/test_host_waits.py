"""A forward queues its work and does not wait for the device. Only reading its tokens waits.

The tensors of these tests are on `meta`, a device that has shapes and no values, so every operation that copies a value
to the host raises. Blocking copies to the device are detected by their arguments. `tests/gpu/test_engine.py` tests the
same on a CUDA device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hicache.cache import RequestKV
from hicache.tiers import MHATokenToKVPool, RequestToTokenPool
from hicache_lab.engine import TILE, LlamaModel, Request, Sampling
from hicache_lab.engine.sampling import greedy
from lab.tests.engine.world import TINY, random_tensors


class HostWaitError(Exception):
    """A copy between host and device makes the host wait."""


class NoTensorsOfLists(TorchFunctionMode):
    """Raises HostWaitError for `torch.tensor` on a device, which copies from pageable memory. On `meta` it copies
    nothing, so NoHostWaits would not detect it."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in {torch.tensor, torch.as_tensor, torch.asarray} and result.device.type != "cpu":
            raise HostWaitError(f"{func.__name__} on {result.device}")
        return result


class NoHostWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises HostWaitError for a copy between devices without `non_blocking`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        if len({tensor.device for tensor in tensors}) > 1:
            given = {named.name: value for named, value in zip(func._schema.arguments, args, strict=False)}
            if not {**given, **(kwargs or {})}.get("non_blocking"):
                raise HostWaitError(f"{func} between {sorted({str(tensor.device) for tensor in tensors})}")
            self.copies += 1
        return result


def model_on_meta() -> LlamaModel:
    pool = MHATokenToKVPool(TINY.geometry(16, "float32"), 96, "meta")
    rows = RequestToTokenPool(8, -(-TINY.context_tokens // TILE) * TILE, "meta")
    return LlamaModel(TINY, random_tensors(TINY), pool, rows)


def request(rid: str, tokens: int, computed: int, temperature: float = 0.0) -> Request:
    """Return a running request with `computed` computed tokens."""
    kv = cast("RequestKV", SimpleNamespace(pages=np.arange(1, tokens // 16 + 2, dtype=np.int32)))
    return Request(
        rid, 0, [1] * tokens, tokens, 9, False, b"", 0.0, Sampling(temperature), kv=kv, kv_tokens=computed,
        prefill_end=tokens,
    )


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_batch_is_computed_without_a_wait_until_its_tokens_are_read(temperature: float) -> None:
    model = model_on_meta()
    batch = [
        (request("prefill", 200, 0, temperature), 100),
        (request("behind-a-prefix", 133, 64), 69),
        (request("decode", 301, 300, temperature), 1),
    ]
    with NoTensorsOfLists(), NoHostWaits() as mode:
        for some, _ in batch:
            model.begin(some)
        output = model.compute(batch)
        assert model.fence() is None  # none on a device without streams
        for some, _ in batch:
            model.place(some)
            model.end(some)
    assert mode.copies > len(batch)
    with pytest.raises((RuntimeError, NotImplementedError), match="meta tensor"):
        output.wait()


WAITS: list[Callable[[torch.Tensor], object]] = [
    lambda there: there.sum().item(),
    lambda there: bool(there.any()),
    lambda there: there.tolist(),
    lambda there: there.cpu(),
    lambda there: there[there > 0],
    lambda there: there.nonzero(),
    lambda there: torch.equal(there, there),
    lambda there: torch.tensor([1.0, 2.0], device=there.device),
    lambda there: torch.zeros(4).to(there.device),
    lambda there: there.copy_(torch.zeros(4)),
    lambda there: there.__setitem__(slice(0, 2), torch.zeros(2)),
    greedy,
]


@pytest.mark.parametrize("wait", WAITS)
def test_operations_that_make_the_host_wait_are_detected(wait: Callable[[torch.Tensor], object]) -> None:
    there = torch.zeros(4, device="meta") if wait is not greedy else torch.zeros((2, 4), device="meta")
    with pytest.raises((HostWaitError, RuntimeError, NotImplementedError)), NoTensorsOfLists(), NoHostWaits():
        wait(there)
