"""KV events: what appeared where."""

from __future__ import annotations

import enum


class Medium(enum.Enum):
    """Where pages are."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"
