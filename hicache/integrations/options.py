"""The configuration of a cache that an engine opens: a file that the engine's own flags name."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..arguments import instance
from ..config import HiCacheConfig, load_config
from ..errors import ConfigError
from ..fingerprint import model_fingerprint


def engine_config(
    where: str, extra: Mapping[str, object] | None, block_tokens: int, *, whole_page: bool = False
) -> HiCacheConfig:
    """Return the configuration that the entry `config` of the engine's `extra` options names, for blocks of
    `block_tokens` tokens.

    Without the entry it is the file that HICACHE_CONFIG_FILE names, if any; `HICACHE_*` variables change entries. Where
    `page_size` is not configured, it is the default rounded up to whole blocks, or with `whole_page` one block. Reads
    the file. Raises ConfigError for a page size that is not whole blocks, or not the one block; `where` names the flag
    in messages.
    """
    path = None if extra is None else extra.get("config")
    if path is not None and not isinstance(path, str):
        raise ConfigError(f"{where}: config: {type(path).__name__} is not a path; name a file, such as hicache.yaml")
    config = load_config(path)
    if "page_size" not in config.model_fields_set:
        blocks = 1 if whole_page else -(-config.page_size // block_tokens)
        return config.model_copy(update={"page_size": blocks * block_tokens})
    if whole_page and config.page_size != block_tokens:
        raise ConfigError(
            f"page_size: configured as {config.page_size}, but a page of the engine has {block_tokens} tokens; "
            "leave page_size out, or set both to the same number"
        )
    if config.page_size % block_tokens:
        raise ConfigError(
            f"page_size: {config.page_size} tokens are not whole blocks of the engine, which have {block_tokens}; "
            f"use a multiple of {block_tokens}, or leave page_size out"
        )
    return config


def known_options(where: str, extra: Mapping[str, object] | None, known: frozenset[str]) -> None:
    """Raise ConfigError for an entry of `extra` that is not in `known`, since an engine passes any entry on."""
    for name in instance(where, dict(extra or {}), dict):
        if name not in known:
            raise ConfigError(f"{where}: {name!r} is not an option of HiCache; use {', '.join(sorted(known))}")


def model_identity(where: str, extra: Mapping[str, object] | None, model: str, commit: str | None) -> str:
    """Return what names the weights of `model` in a namespace: the entry `model` of `extra`, the fingerprint of a local
    folder, or the name on a hub with the commit of its snapshot.

    Blocks while the weights of a folder are read the first time. Raises ConfigError if none of the three is known,
    because pages of two models would mix.
    """
    named = None if extra is None else extra.get("model")
    if named is not None:
        return instance(f"{where}: model", named, str)
    if os.path.isdir(model):
        return model_fingerprint(model)
    if commit:
        return f"{model}@{commit}"
    raise ConfigError(
        f"{where}: the weights of {model!r} have no folder and no commit to tell them by; add the option 'model' with "
        "a name that changes whenever the weights do"
    )
