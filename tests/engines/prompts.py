"""Prompts for small models, and the configuration of the cache in tests with engines."""

from __future__ import annotations

import random
from pathlib import Path

import yaml

from .model import VOCABULARY


def prompt(name: str, tokens: int = 300) -> list[int]:
    """Return random tokens that depend only on the name. A longer prompt of a name begins with the shorter one."""
    draws = random.Random(name)
    return [draws.randrange(3, VOCABULARY) for _ in range(tokens)]  # the first three token ids are special


def prompts(name: str, count: int, tokens: int = 300) -> list[list[int]]:
    return [prompt(f"{name} {number}", tokens) for number in range(count)]


def write_config(path: Path, **entries: object) -> Path:
    """Write a configuration that fetches every stored page, and return `path`."""
    defaults = {"page_size": 64, "host": {"size": "16MiB"}, "break_even": {"mode": "always"}}
    prefetch = {"prefetch": {"policy": "wait_complete", "threshold_tokens": 64}}
    path.write_text(yaml.safe_dump({**defaults, **prefetch, **entries}))
    return path
