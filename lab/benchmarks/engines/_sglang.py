"""SGLang's file store `HiCacheFile` as a peer, from the installed package or an unpacked wheel.

Importing one of SGLang's packages imports the whole engine. The file store needs only two of its modules, so these are
loaded by their paths, below empty packages of the same names. Only one function is replaced: it parses sizes, and is
not called here.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

Layout = Literal["page_first", "layer_first"]
_PACKAGES = (
    "sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.mem_cache", "sglang.srt.mem_cache.storage",
    "sglang.srt.mem_cache.storage.file",
)


@contextmanager
def _bare_packages(package: Path) -> Iterator[None]:
    """Make the packages importable without running them. Restores `sys.modules` at the end."""
    before = dict(sys.modules)
    try:
        for name in _PACKAGES:
            module = types.ModuleType(name)
            module.__path__ = [str(package.joinpath(*name.split(".")[1:]))]
            sys.modules[name] = module
        common = types.ModuleType("sglang.srt.utils.common")
        common.human_readable_int = int  # type: ignore[attr-defined]
        sys.modules[common.__name__] = common
        yield
    finally:
        for name in set(sys.modules) - set(before):
            if name.partition(".")[0] == "sglang":
                del sys.modules[name]
        sys.modules.update(before)


def open_file_store(package: Path, folder: str) -> Any:
    """Open SGLang's `HiCacheFile` on `folder`, as one rank of a model with heads does, without a size limit."""
    with _bare_packages(package):
        storage: Any = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
        config = storage.HiCacheStorageConfig(
            tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
            enable_storage_metrics=False, is_page_first_layout=True, model_name="bench",
            extra_config={"file_storage_path": folder},
        )
        return storage.HiCacheFile(config)


class HostPool:
    """Pages in host memory in a layout of SGLang, all touched. `save` and `load` work as SGLang's threads do for a
    store without zero copy. For a store with zero copy, it behaves as SGLang's `HostKVCache`.

    `kv_buffer` is [2, pages * tokens, layers, heads, dim] (page_first) or [2, layers, pages * tokens, heads, dim].
    """

    def __init__(self, layout: Layout, pages: int, *, tokens: int, layers: int, heads: int, dim: int) -> None:
        self.layout: str = layout
        self.pages, self.page_size, self.dtype = pages, tokens, torch.bfloat16
        slots = pages * tokens
        self.slot_used = torch.zeros(slots, dtype=torch.bool)
        self._is_page_first = layout == "page_first"
        self._page_shape = (2, tokens, layers, heads, dim) if self._is_page_first else (2, layers, tokens, heads, dim)
        shape = (2, slots, layers, heads, dim) if self._is_page_first else (2, layers, slots, heads, dim)
        self.kv_buffer = torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16).view(self.dtype)

    @property
    def page_bytes(self) -> int:
        return self.kv_buffer.nbytes // self.pages

    @property
    def indices(self) -> torch.Tensor:
        """Return the indices of all tokens, page by page."""
        return torch.arange(self.pages * self.page_size)

    def _page(self, page: int) -> torch.Tensor:
        tokens = slice(page * self.page_size, (page + 1) * self.page_size)
        return self.kv_buffer[:, tokens] if self._is_page_first else self.kv_buffer[:, :, tokens]

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Return addresses and lengths of the pieces of these tokens' pages, in the order of a flat copy."""
        pages = [index // self.page_size for index in indices[:: self.page_size].tolist()]
        pieces = [piece for page in pages for piece in self._page(page).flatten(0, 0 if self._is_page_first else 1)]
        return [piece.data_ptr() for piece in pieces], [piece.nbytes for piece in pieces]

    def save(self, store: Any, keys: Sequence[str]) -> None:
        """Store all pages as SGLang's backup thread does."""
        data = [self._page(page).flatten() for page in range(len(keys))]
        assert store.batch_set(keys, data)

    def load(self, store: Any, keys: Sequence[str]) -> None:
        """Read all pages as SGLang's prefetch thread does."""
        empty = [torch.zeros(self._page_shape, dtype=self.dtype).flatten() for _ in keys]
        found = store.batch_get(keys, empty)
        for page, data in enumerate(found):
            self._page(page)[:] = data.reshape(self._page_shape)
