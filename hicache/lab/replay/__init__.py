"""Replay of request traces through the real tree, controller and storage, with every byte compared; `hicache replay`.

`trace` reads a trace, `synthetic` generates one, `runner` replays it, `result` and `report` have the results.
"""
