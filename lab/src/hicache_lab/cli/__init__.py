"""The commands of the laboratory: `hicache demo`, `replay`, `trace` and `dev-up`."""
