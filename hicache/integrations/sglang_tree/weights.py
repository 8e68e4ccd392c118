"""Whether the weights of an SGLang engine have changed since the last look.

SGLang flushes its tree for new weights and at the request of a user, and does not say why. After the first kind, no
older page may be served; after the second, storage stays valid. So the weights themselves are compared: SGLang's name
and version of them, and a checksum of all bytes.

The checksum reads the weights in pieces of 4 MiB, on their device. With x[i] the words of a piece, as int32, and a[i]
and b[i] two tables of random int64:

    sums of a piece = ( sum of x[i] a[i], sum of x[i] b[i] )    modulo 2^64
    checksum        = SHA-256( names, types, shapes and strides of all tensors || sums of all pieces )

Two pieces that differ have equal sums with a probability of at most 2^-66: the difference of two words is not zero and
below 2^32, so it is an odd number times at most 2^31, and each table makes the sums of the differences zero with a
probability of at most 2^-33 (multilinear hashing: Lemire and Kaser, Strongly universal string hashing is fast, 2014).
This holds for any two contents that were chosen without knowledge of the tables. The tables are random, and stay in
this process.

It sees what the modules have registered as parameters and buffers. Tensors that SGLang derives from them, such as the
absorbed projections of MLA, follow from those.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

logger = logging.getLogger(__name__)

# A piece takes 4 MiB, the two tables 16 MiB, and the products of a piece another 16 MiB: small beside the free memory
# of a device, and large enough for its bandwidth.
_WORDS_MAX = 1 << 20
_WORD_BYTES = 4


class WeightsWatch:
    """Watches `models`, which is called at each look, because an engine may replace them. `version` returns the names
    of the weights. If not `readable`, the engine may have unmapped the weights, so they are never touched.

    The scheduler's thread owns it.
    """

    def __init__(
        self, models: Callable[[], Sequence[torch.nn.Module]], version: Callable[[], object], *, readable: bool = True
    ) -> None:
        self._models = models
        self._version = version
        self._readable = readable
        numbers = bytearray(os.urandom(2 * 8 * _WORDS_MAX))
        self._tables = torch.frombuffer(numbers, dtype=torch.int64).view(2, _WORDS_MAX)
        self._last = self._look()

    @classmethod
    def of_worker(cls, worker: Any) -> WeightsWatch:
        """Watch the models of SGLang's `TpModelWorker`. Not readable with flags that unmap or offload weights, or share
        them with another process."""
        from sglang.srt.runtime_context import get_exec, get_model, get_serving  # noqa: PLC0415

        features, offload = get_exec().features, get_exec().offload
        moves = features.enable_memory_saver or offload.cpu_offload_gb > 0 or offload.offload_group_size > 0
        shares = get_model().weight_cache_mode != "off" or offload.ple_offload_embedding
        return cls(
            lambda: [runner.model for _, runner in worker.weight_update_runners()],
            lambda: (get_model().model_path, get_serving().weight_version), readable=not moves and not shares,
        )

    def changed(self) -> bool:
        """Return True if the weights may have changed since the last call, or since the start. True if they cannot be
        read.

        Blocks while it reads all weights: a GPU moves about 12 times their bytes, most of them within its cache, and a
        core of a CPU reads about 0.5 GB/s. REQUIRES: no thread writes weights. With several ranks, each one looks at
        its own shard: the weights have changed if they have on any rank.
        """
        before, self._last = self._last, self._look()
        return self._last is None or self._last != before

    def _look(self) -> tuple[object, bytes] | None:
        """Return the names and the checksum; None if the weights cannot be read."""
        if not self._readable:
            return None
        try:
            with torch.no_grad():
                return self._version(), self._checksum()
        except (RuntimeError, NotImplementedError, TypeError) as error:  # torch's, of a kind of tensor without bytes
            logger.warning("the weights cannot be read, so each flush is taken as one for new weights: %s", error)
            return None

    def _checksum(self) -> bytes:
        hashed = hashlib.sha256()
        sums: dict[torch.device, _Sums] = {}
        for number, model in enumerate(self._models()):
            for name, parameter in itertools.chain(model.named_parameters(), model.named_buffers()):
                tensor = parameter.detach()
                if tensor.numel() and not tensor.data_ptr():
                    raise TypeError(f"{name} has no memory of its own")
                device = tensor.device
                hashed.update(repr((number, name, tensor.dtype, tensor.shape, tensor.stride(), device)).encode())
                if device not in sums:
                    sums[device] = _Sums(self._tables, device)
                for piece in _pieces(tensor):
                    sums[device].add(piece)
        for each in sums.values():
            hashed.update(each.bytes())
        return hashed.digest()


class _Sums:
    """The sums of pieces on one device. Waits for all streams of the device first: they may have written weights."""

    def __init__(self, tables: torch.Tensor, device: torch.device) -> None:
        torch.get_device_module(device).synchronize()
        self._tables = tables.to(device)
        self._products = torch.empty_like(self._tables)
        self._sums: list[torch.Tensor] = []

    def add(self, piece: torch.Tensor) -> None:
        """Add the two sums of a piece, 1-D uint8, whose last word is filled up with zeros."""
        missing = -len(piece) % _WORD_BYTES
        if missing or piece.storage_offset() % _WORD_BYTES:
            piece = torch.cat((piece, piece.new_zeros(missing)))
        words = piece.view(torch.int32)
        products = self._products[:, : len(words)]
        torch.mul(words, self._tables[:, : len(words)], out=products)
        self._sums.append(torch.sum(products, -1))

    def bytes(self) -> bytes:
        """Return all sums in order. Waits for the device."""
        return torch.stack(self._sums).cpu().numpy().tobytes()


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield all bytes of `tensor` in the order of its strides, as 1-D uint8 tensors of at most a piece. Copies at most
    one piece at a time."""
    tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    piece_bytes = _WORDS_MAX * _WORD_BYTES
    if tensor.is_contiguous():
        flat = tensor.as_strided((tensor.numel(),), (1,))  # `view` keeps the stride of a single element
        yield from torch.split(flat.view(torch.uint8), piece_bytes)
    elif tensor.nbytes <= piece_bytes:
        yield tensor.contiguous().view(-1).view(torch.uint8)
    else:
        rows = piece_bytes * len(tensor) // tensor.nbytes
        for part in torch.split(tensor, rows) if rows else torch.unbind(tensor):
            yield from _pieces(part)
