"""SGLang's native radix tree as a peer, loaded from its unpacked wheel.

pip download --no-deps sglang==0.5.23 && unzip sglang-*.whl -d DIR
python -m lab.benchmarks.tree --peer DIR
"""

from __future__ import annotations

import array
import importlib.util
from pathlib import Path
from typing import Any

import torch


class NativeTree:
    """The calls of a scheduler, made directly through the bindings: no adapter adds time."""

    def __init__(self, bindings: Any, page_size: int, policy: str = "lru") -> None:
        self._bindings = bindings
        options = bindings.TreeCoreInitParamsBinding(eviction_policy=policy, page_size=page_size, device="cpu")
        self._tree = bindings.RustUnifiedTreeCoreBinding(options, [0])

    def insert(self, tokens: array.array[int], slots: torch.Tensor) -> None:
        """Insert a prompt with its token slots (int64)."""
        self._tree.insert(self._bindings.InsertParamsBinding(key=tokens, value=slots))

    def match(self, tokens: array.array[int]) -> int:
        """Return the length of the cached prefix in tokens."""
        return int(self._tree.match_prefix(self._bindings.MatchParamsBinding(key=tokens)).device_prefix_len)

    def match_with_slots(self, tokens: array.array[int]) -> torch.Tensor:
        """Return the token slots of the cached prefix. A match alone does not return them, and a scheduler needs them.
        """
        found = self._tree.match_prefix(self._bindings.MatchParamsBinding(key=tokens))
        slots: torch.Tensor = self._tree.collect_full_device_indices(
            found.last_device_node_id, self._tree.root_node_handle()
        )
        return slots

    def evict(self, tokens: int) -> int:
        """Evict leaves until `tokens` tokens are free."""
        tracker = {0: 0}
        self._tree.evict_device_start(0, tokens)
        while True:
            step = self._tree.evict_device_next_node(0, tracker)
            if step.node_id is None:
                if not step.made_progress:
                    break
                continue
            for component, count in self._tree.evict_device_leaf(step.node_id).tracker.items():
                tracker[component] += count
        self._tree.evict_device_end(0)
        return tracker[0]


def load_bindings(wheel: Path) -> Any:
    """Return the extension module of an unpacked wheel. Raises FileNotFoundError if it is missing."""
    matches = list(wheel.rglob("rust_tree_core/mem_cache*.so"))
    if not matches:
        raise FileNotFoundError(f"{wheel} does not contain rust_tree_core/mem_cache*.so; unpack the wheel there")
    spec = importlib.util.spec_from_file_location("mem_cache", matches[0])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
