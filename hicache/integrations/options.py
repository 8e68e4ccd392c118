"""The configuration of a cache in an engine, a file named in the engine's flags; the hints of vLLM's requests."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol

from ..arguments import instance
from ..config import HiCacheConfig, load_config
from ..errors import ConfigError
from ..fingerprint import loaded_fingerprint, process_start_ns


def engine_config(
    where: str, extra: Mapping[str, object] | None, block_tokens: int, *, whole_page: bool = False
) -> HiCacheConfig:
    """Return the configuration in the file of the entry `config` in the engine's `extra` options, for blocks of
    `block_tokens` tokens.

    Without the entry, HICACHE_CONFIG_FILE may name the file; `HICACHE_*` variables change entries. Without a configured
    `page_size`, it is the default rounded up to whole blocks, or with `whole_page` one block. Reads the file. Raises
    ConfigError for a page size that is not whole blocks, or not one block; `where` is the flag's name in messages.
    """
    path = None if extra is None else extra.get("config")
    if path is not None and not isinstance(path, str):
        raise ConfigError(f"{where}: config: {type(path).__name__} is not a path; set a file, such as hicache.yaml")
    config = load_config(path)
    if "page_size" not in config.model_fields_set:
        blocks = 1 if whole_page else -(-config.page_size // block_tokens)
        return config.model_copy(update={"page_size": blocks * block_tokens})
    if whole_page and config.page_size != block_tokens:
        raise ConfigError(
            f"page_size: {config.page_size} is configured, but a page of the engine has {block_tokens} tokens; "
            "remove page_size, or set both to the same number"
        )
    if config.page_size % block_tokens:
        raise ConfigError(
            f"page_size: {config.page_size} is not a multiple of the engine's block size {block_tokens}; use a "
            "multiple of it, or remove page_size"
        )
    return config


def known_options(where: str, extra: Mapping[str, object] | None, known: frozenset[str]) -> None:
    """Raise ConfigError for an entry of `extra` that is not in `known`, because engines do not check entries."""
    for name in instance(where, dict(extra or {}), dict):
        if name not in known:
            raise ConfigError(f"{where}: {name!r} is not an option of HiCache; use {', '.join(sorted(known))}")


def model_identity(where: str, extra: Mapping[str, object] | None, model: str, commit: str | None) -> str:
    """Return the identity of `model`'s weights for a namespace: the entry `model` of `extra`, the fingerprint of a
    local folder, or the name on a hub with the commit of its snapshot. It is unique if the folder has changed since
    this process started, because the engine may have loaded other weights.

    Blocks while the weights of a folder are read for the first time. Raises ConfigError without any of these, because
    pages of two models would be mixed up.
    """
    named = None if extra is None else extra.get("model")
    if named is not None:
        return instance(f"{where}: model", named, str)
    if os.path.isdir(model):
        return loaded_fingerprint(model, process_start_ns())
    if commit:
        return f"{model}@{commit}"
    raise ConfigError(
        f"{where}: the weights of {model!r} cannot be identified without a folder or a commit; set the option 'model' "
        "to a name that changes whenever the weights do"
    )


class HintedRequest(Protocol):
    """The parts of vLLM's requests that may have hints."""

    @property
    def kv_hints(self) -> object:
        """Of the Python API."""

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """Of both: vLLM's HTTP server passes no `kv_hints`."""


def hints_of(request: HintedRequest) -> object:
    """Return the envelope of hints of a request of vLLM, or None. Dynamo names the entry `kv_hint`."""
    params = request.kv_transfer_params or {}
    return request.kv_hints or params.get("kv_hints") or params.get("kv_hint")
