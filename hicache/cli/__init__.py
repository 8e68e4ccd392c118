"""The `hicache` command, `main.main`; the module of a subcommand is imported at its use."""
