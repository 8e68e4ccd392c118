"""The storage daemon: one process per node with a host pool and stores, which serves many engines over HTTP."""
