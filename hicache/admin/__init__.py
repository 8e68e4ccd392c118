"""The admin surface: what an operator asks of a running daemon, or of the cache inside an engine, over HTTP."""
