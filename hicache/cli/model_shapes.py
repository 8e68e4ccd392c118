"""The KV of models: the geometries of well-known ones, and the bytes per token of a `config.json` of Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..arguments import model_label
from ..config.files import open_regular
from ..errors import ConfigError
from ..geometry import DTYPE_BYTES, KVGeometry, KVLayout

# A configuration has a few KiB.
_FILE_BYTES_MAX = 1 << 20
_DTYPE = "bfloat16"


# One rank of each model, in pages of one token, from the models' published config.json files. `tiny` is not a real
# model: it has so little KV that a laptop replays real traces.
PRESETS: Mapping[str, KVGeometry] = {
    "tiny": KVGeometry(4, 1, 8, 1),
    "qwen2.5-7b": KVGeometry(28, 4, 128, 1),
    "llama-3.1-8b": KVGeometry(32, 8, 128, 1),
    "llama-3.1-70b-tp8": KVGeometry(80, 1, 128, 1),
    "llama-3.1-70b": KVGeometry(80, 8, 128, 1),
    "qwen3-8b": KVGeometry(36, 8, 128, 1),
    "qwen3-32b": KVGeometry(64, 8, 128, 1),
    "gpt-oss-20b": KVGeometry(24, 8, 64, 1),
    "gpt-oss-120b": KVGeometry(36, 8, 64, 1),
    "deepseek-v3": KVGeometry(61, 1, 576, 1, layout=KVLayout.MLA),
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's name, and the KV bytes of one token in all layers."""

    name: str
    token_bytes: int


def model_shape(named: str, dtype: str | None = None, *, ranks: int = 1) -> ModelShape:
    """Return the shape of one of the models of `hicache replay`, or of the `config.json` at a path (the file or its
    folder), on one of `ranks` that share its KV heads. `dtype` is that of the KV cache: by default the file's, or
    bfloat16. Raises ConfigError."""
    known = PRESETS.get(named.lower())
    if known is not None:
        return _shape(named, replace(known, dtype=dtype or known.dtype), ranks)
    path = Path(named, "config.json") if Path(named).is_dir() else Path(named)
    data = _read(path)
    try:
        return _shape(model_label(str(path.absolute().parent)), _geometry(json.loads(data), dtype), ranks)
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError, RecursionError) as error:
        raise ConfigError(f"model {named[:200]!r}: its configuration does not describe attention; name one of "
                          f"{', '.join(PRESETS)}") from error


def _shape(name: str, geometry: KVGeometry, ranks: int) -> ModelShape:
    # Ranks beyond the number of heads have copies of them; those of MLA have equal latents.
    return ModelShape(name, replace(geometry, heads=max(1, geometry.heads // ranks)).token_bytes)


def _read(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read(_FILE_BYTES_MAX)
    except OSError as error:
        raise ConfigError(f"model {str(path)[:200]!r}: is neither a file that can be read nor one of "
                          f"{', '.join(PRESETS)}") from error


def _geometry(model: Mapping[str, Any], dtype: str | None) -> KVGeometry:
    """Return the geometry of a configuration with the entries of transformers. Others raise builtin errors."""
    model = model.get("text_config") or model  # the language model of one that also reads images
    layers = model["num_hidden_layers"]
    own = model.get("dtype") or model.get("torch_dtype")
    dtype = dtype or (own if own in DTYPE_BYTES else _DTYPE)
    if model.get("kv_lora_rank"):
        return KVGeometry(layers, 1, model["kv_lora_rank"] + model["qk_rope_head_dim"], 1, dtype, KVLayout.MLA)
    heads = model["num_attention_heads"]
    size = model.get("head_dim") or model["hidden_size"] // heads
    return KVGeometry(layers, model.get("num_key_value_heads") or heads, size, 1, dtype)
