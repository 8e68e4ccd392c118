"""Replay of request traces through the real tree, controller and storage, with every byte compared; `hicache replay`.

`trace` reads what is replayed, `synthetic` makes it up, `runner` replays it, `result` and `report` say what came of it.
"""
