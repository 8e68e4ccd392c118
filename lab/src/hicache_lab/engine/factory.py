"""Creates an engine from a configuration and a model folder."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch

from hicache.cache import create_cache
from hicache.config import HiCacheConfig
from hicache.errors import ConfigError, InvalidInput
from hicache.fingerprint import scales_fingerprint
from hicache.keys import Namespace
from hicache.tiers import MHATokenToKVPool, RequestToTokenPool

from .checkpoint import Checkpoint, kv_scales, load_checkpoint
from .model import TILE, LlamaModel
from .options import EngineOptions
from .scheduler import Engine

# A small model in the package, so that an engine runs without a download.
BUNDLED_MODEL = Path(__file__).parent / "assets" / "model"


def create_engine(
    config: HiCacheConfig,
    model: Path | Checkpoint = BUNDLED_MODEL,
    *,
    options: EngineOptions | None = None,
    device: torch.device | str = "cpu",
    kv_dtype: str = "float32",
) -> Engine:
    """Load `model` (a folder, or a loaded checkpoint), and build its cache as configured and the engine.

    `kv_dtype` is the dtype of KV on all tiers; a narrower one than float32 saves memory and rounds. KV in float8 is
    divided by the scales of the checkpoint, if it has any. Raises ConfigError, CapacityError and BackendError with the
    necessary change, InvalidInput for an unknown `kv_dtype`. After an error no thread is left running.
    """
    if config.bigram_keys:
        raise ConfigError("bigram_keys: this engine does not draft tokens; remove the entry")
    options = options or EngineOptions()
    checkpoint = load_checkpoint(model) if isinstance(model, Path) else model
    geometry = checkpoint.config.geometry(config.page_size, kv_dtype)
    label = "bundled" if model == BUNDLED_MODEL else checkpoint.label
    # The model's fingerprint covers the scales in its files, but not those of a checkpoint that was changed in memory.
    scales = scales_fingerprint(*kv_scales(checkpoint.config, checkpoint.tensors, kv_dtype))
    namespace = Namespace(checkpoint.fingerprint, geometry, kv_scales=scales, label=label)
    cache = create_cache(config, namespace, device=device)
    with ExitStack() as undo:
        undo.callback(cache.close)
        if not isinstance(cache.device, MHATokenToKVPool):
            raise InvalidInput("engine: a Llama model needs an MHA pool")
        columns = -(-checkpoint.config.context_tokens // TILE) * TILE
        rows = RequestToTokenPool(options.running_max, columns, cache.device.device)
        engine = Engine(LlamaModel(checkpoint.config, checkpoint.tensors, cache.device, rows), cache, options)
        undo.pop_all()
    return engine
