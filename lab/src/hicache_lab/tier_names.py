"""The names of the tiers in reports: for programs, and for people."""

from __future__ import annotations

from collections.abc import Mapping

TIER_NAMES: Mapping[str, str] = {"device": "L1 device", "host": "L2 host", "storage": "L3 storage"}
TIERS = tuple(TIER_NAMES)
