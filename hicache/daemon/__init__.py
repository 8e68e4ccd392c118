"""The storage daemon: one process of a node that owns a host pool and stores, and serves many engines over HTTP."""
