"""L3 storage: the contract (`base`), its implementations, and the registry that finds them by name."""

from .base import BackendStatistics, GetOutcome, SetOutcome, StorageBackend, Usage

__all__ = ["BackendStatistics", "GetOutcome", "SetOutcome", "StorageBackend", "Usage"]
