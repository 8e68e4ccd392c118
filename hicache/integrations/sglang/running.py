"""The configuration of the running SGLang that identifies its weights. Imports SGLang."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from sglang.srt.runtime_context import get_lora, get_model, get_serving, get_spec
from sglang.version import __version__ as sglang_version

from ...config import HiCacheConfig
from ..options import engine_config, model_identity
from .identity import EngineIdentity

logger = logging.getLogger(__name__)

OPTIONS = "--hicache-storage-backend-extra-config"
# Each process of an engine on a node serves metrics on its own port.
PROCESSES_MAX = 64
# Shorter pages need a file or an object for a few tokens each.
_PAGE_TOKENS_MIN = 16


def page_config(extra: Mapping[str, object], page_tokens: int) -> HiCacheConfig:
    """Return HiCache's configuration for SGLang's pages. Reads the file. Raises as `engine_config`."""
    if page_tokens < _PAGE_TOKENS_MIN:
        logger.warning(
            "pages have %d tokens, and each is an object in storage: start SGLang with --page-size 64", page_tokens
        )
    return engine_config(OPTIONS, extra, page_tokens, whole_page=True)


def weight_version() -> str:
    """Return the version that SGLang's users give to updates of weights."""
    return str(get_serving().weight_version)


def running_engine(extra: Mapping[str, object] | None, label: str | None) -> EngineIdentity:
    """Read SGLang's configuration. Blocks while weights are read for the first time. Raises ConfigError if the weights
    cannot be identified."""
    model, adapters, draft = get_model(), get_lora().lora_paths or (), get_spec().speculative_draft_model_path
    scales = model.quantization_param_path
    weights = [model_identity(OPTIONS, extra, model.model_path, _commit(model.model_path, model.revision))]
    # SGLang's keys contain an adapter's name and path; and a draft model's KV may be part of a page.
    for path in (*sorted(adapter.lora_path for adapter in adapters), *([draft] if draft else [])):
        weights.append(model_identity(OPTIONS, None, path, _commit(path, None)))
    return EngineIdentity(
        version=sglang_version, weights=" ".join(weights), weight_version=weight_version(),
        label=label or model.model_path, kv_cache_dtype=str(model.kv_cache_dtype),
        quantization=str(model.quantization or ""),
        kv_scales=hashlib.sha256(Path(scales).read_bytes()).hexdigest() if scales is not None else "",
        overrides={"arguments": model.json_model_override_args, "dtype": model.dtype},
    )


def _commit(model: str, revision: str | None) -> str | None:
    """Return the commit of a downloaded model of a hub, or None."""
    if Path(model).exists():
        return None
    found = try_to_load_from_cache(model, "config.json", revision=revision)
    return Path(found).parent.name if isinstance(found, str) else None
