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

from .checkpoint import Checkpoint, LayerKind, LlamaConfig, kv_scales, load_checkpoint
from .model import TILE, LlamaModel
from .options import EngineOptions
from .scheduler import SHARED_PAGES, Engine
from .trailing import TrailingLayers

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
    divided by the scales of the checkpoint, if it has any. A model with windows or states gets trailing pools of
    `options.trailing_slots` slots, in addition to L1. Raises ConfigError, CapacityError and BackendError with the
    necessary change, InvalidInput for an unknown `kv_dtype`. After an error no thread is left running.
    """
    if config.bigram_keys:
        raise ConfigError("bigram_keys: this engine does not draft tokens; remove the entry")
    options = options or EngineOptions()
    checkpoint = load_checkpoint(model) if isinstance(model, Path) else model
    shape = checkpoint.config
    columns = -(-shape.context_tokens // TILE) * TILE
    trailing = None
    if shape.layers_of(LayerKind.FULL) < shape.layers:
        slots = options.trailing_slots or _enough_slots(shape, config.page_size, options)
        trailing = TrailingLayers(
            shape, config.page_size, slots, options.running_max, columns, dtype=kv_dtype, device=device
        )
    label = "bundled" if model == BUNDLED_MODEL else checkpoint.label
    # The model's fingerprint covers the scales in its files, but not those of a checkpoint that was changed in memory.
    scales = scales_fingerprint(*kv_scales(shape, checkpoint.tensors, kv_dtype))
    geometry = shape.geometry(config.page_size, kv_dtype)
    namespace = Namespace(checkpoint.fingerprint, geometry, kv_scales=scales, label=label)
    cache = create_cache(config, namespace, device=device, trailing=() if trailing is None else trailing.pools)
    with ExitStack() as undo:
        undo.callback(cache.close)
        if not isinstance(cache.device, MHATokenToKVPool):
            raise InvalidInput("engine: a Llama model needs an MHA pool")
        rows = RequestToTokenPool(options.running_max, columns, cache.device.device)
        engine = Engine(LlamaModel(shape, checkpoint.tensors, cache.device, rows, trailing), cache, options)
        undo.pop_all()
    return engine


def _enough_slots(shape: LlamaConfig, page_size: int, options: EngineOptions) -> int:
    """Return the default of `EngineOptions.trailing_slots`."""
    trailing_pages = max(1, -(-(shape.sliding_window or 1) // page_size))
    chunk_pages = -(-options.prefill_tokens_max // page_size)
    # The pages of a chunk keep their slots until the request's next forward. Each request has a partial page.
    return 2 * chunk_pages + options.running_max * (trailing_pages + SHARED_PAGES + 1)
