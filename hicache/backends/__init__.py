"""L3 storage: the contract (`base`), its implementations, and the registry that finds them by name."""
