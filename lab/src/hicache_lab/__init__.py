"""The laboratory: programs that try HiCache and are not part of it. The package `hicache` never imports it.

`engine` is a small engine with a model, `replay` runs traces of requests, `plan` computes sizes of tiers, `devservers`
starts real storage servers, and `cli` has the commands for them, which the `hicache` command finds by the entry-point
group `hicache.commands`. `conformance` has the tests that every store passes, and `faults` a storage type that injects
faults. `log_page` and `metrics_page` generate pages of the documentation.
"""

__version__ = "0.1.0"
