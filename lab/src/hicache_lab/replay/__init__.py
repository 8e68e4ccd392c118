"""Replay of request traces through the real tree, controller and storage, with every byte compared; `hicache replay`.

`runner` replays a trace of `lab/traces`, `result` and `report` have the results.
"""
