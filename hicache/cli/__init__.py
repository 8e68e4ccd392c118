"""The `hicache` command. `main` is the entry point; the module of a subcommand is imported at its use."""
