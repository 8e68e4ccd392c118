"""Replays in virtual time: the real scheduler, tree, controller and guard, on one thread, on a machine of given speeds.

Only what takes time is replaced: the clock, the worker threads, the copies, the store's driver and the forward. The
memory of the pools is never touched.
"""
