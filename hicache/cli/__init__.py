"""The `hicache` command. `main` is the entry point; a subcommand's module is imported only when it is used."""
