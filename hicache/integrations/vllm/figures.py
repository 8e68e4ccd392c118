"""HiCache's copies in vLLM's own statistics: the log line of connectors, and counters in vLLM's Prometheus metrics.

Tiers, storage and the rest are in HiCache's own metrics, which the section `metrics` of its configuration enables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

# Name and description, for each direction.
_COUNTED = (("pages", "Pages copied"), ("bytes", "Bytes copied"), ("seconds", "Seconds of copies on the slowest rank"))
_DIRECTIONS = (("loaded", "from host memory to the device"), ("saved", "from the device to host memory"))


@dataclass
class CopyStats(KVConnectorStats):
    """Sums over copies, by name: `loaded_pages`, `loaded_bytes`, `loaded_seconds`, and the same for `saved`."""

    def reset(self) -> None:
        self.data.clear()

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, amount in other.data.items():
            self.data[name] = self.data.get(name, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(amount, 4) for name, amount in self.data.items()}


class CopyPromMetrics(KVConnectorPromMetrics):
    """The sums of `CopyStats` as counters `vllm:hicache_*`, for each engine."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._counters: dict[str, dict[int, Any]] = {}
        for name, where in _DIRECTIONS:
            for unit, what in _COUNTED:
                counter: Counter = self._counter_cls(
                    name=f"vllm:hicache_{name}_{unit}", documentation=f"{what} {where}.", labelnames=self._labelnames
                )
                self._counters[f"{name}_{unit}"] = {
                    engine: counter.labels(*values) for engine, values in self.per_engine_labelvalues.items()
                }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, amount in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(amount)
