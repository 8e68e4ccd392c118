"""The laboratory: programs that try the product and are not part of it. No module outside imports it.

`engine` is a small engine with a model, `replay` runs traces of requests, `devservers` starts real storage servers, and
`cli` has the commands for them. `hicache.cli.main` finds those commands by their names in a table.
"""
