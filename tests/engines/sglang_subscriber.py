"""Follow a publisher of KV events with the subscriber of SGLang's UMBP store. Print each of its reports as a line.

    python tests/engines/sglang_subscriber.py tcp://127.0.0.1:5557

Ends at the end of its input. The server and its package `mori` need AMD hardware, so this program replaces both.
"""

from __future__ import annotations

import sys
import types

tiers = types.ModuleType("mori.umbp")
tiers.UMBPTierType = types.SimpleNamespace(HBM="HBM", DRAM="DRAM")  # type: ignore[attr-defined]
sys.modules["mori"] = mori = types.ModuleType("mori")
sys.modules["mori.umbp"] = mori.umbp = tiers  # type: ignore[attr-defined]

from sglang.srt.mem_cache.storage.umbp.umbp_store import KVEventsSubscriber  # noqa: E402 (needs the modules above)


class Client:
    """The replacement of the server."""

    def report_external_kv_blocks(self, hashes: list[str], tier: str) -> bool:
        """Print cached blocks."""
        print("report", tier, *hashes, flush=True)
        return True

    def revoke_external_kv_blocks(self, hashes: list[str], tier: str) -> bool:
        """Print removed blocks."""
        print("revoke", tier, *hashes, flush=True)
        return True

    def revoke_all_external_kv_blocks_at_tier(self, tier: str) -> bool:
        """Print that all blocks of a tier were removed."""
        print("clear", tier, flush=True)
        return True


if __name__ == "__main__":
    subscriber = KVEventsSubscriber(Client(), sys.argv[1], "kv-events", 10, dp_rank=1)
    subscriber.start()
    sys.stdin.read()
    subscriber.stop()
