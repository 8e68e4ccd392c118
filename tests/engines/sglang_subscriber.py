"""Follows a publisher of KV events with SGLang's own subscriber, the one of its UMBP store, and prints what that
reports to its server, a line each:

    python tests/engines/sglang_subscriber.py tcp://127.0.0.1:5557

Ends when its input does. The server and its package `mori` need AMD's hardware, so both are replaced here.
"""

from __future__ import annotations

import sys
import types

tiers = types.ModuleType("mori.umbp")
tiers.UMBPTierType = types.SimpleNamespace(HBM="HBM", DRAM="DRAM")  # type: ignore[attr-defined]
sys.modules["mori"] = mori = types.ModuleType("mori")
sys.modules["mori.umbp"] = mori.umbp = tiers  # type: ignore[attr-defined]

from sglang.srt.mem_cache.storage.umbp.umbp_store import KVEventsSubscriber  # noqa: E402 (needs what is above)


class Client:
    """In place of the server."""

    def report_external_kv_blocks(self, hashes: list[str], tier: str) -> bool:
        """Blocks that are there."""
        print("report", tier, *hashes, flush=True)
        return True

    def revoke_external_kv_blocks(self, hashes: list[str], tier: str) -> bool:
        """Blocks that have left."""
        print("revoke", tier, *hashes, flush=True)
        return True

    def revoke_all_external_kv_blocks_at_tier(self, tier: str) -> bool:
        """All blocks have left."""
        print("clear", tier, flush=True)
        return True


if __name__ == "__main__":
    subscriber = KVEventsSubscriber(Client(), sys.argv[1], "kv-events", 10, dp_rank=1)
    subscriber.start()
    sys.stdin.read()
    subscriber.stop()
