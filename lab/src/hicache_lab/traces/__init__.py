"""Request traces: read and written by `trace`, made by `synthetic` and `stress`, turned into tokens by `tokens`."""
