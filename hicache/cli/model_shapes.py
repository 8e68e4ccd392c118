"""The KV of a model, for estimates: bytes per token of a well-known model, or of a `config.json` of Hugging Face."""

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
from ..replay.presets import PRESETS

# A configuration has a few KiB.
_FILE_BYTES_MAX = 1 << 20
_DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's name, and the KV bytes of one token in all layers."""

    name: str
    token_bytes: int


def model_shape(named: str, dtype: str | None = None) -> ModelShape:
    """Return the shape of one of the models of `hicache replay`, or of the `config.json` at a path (the file or its
    folder). `dtype` is that of the KV cache: by default the file's, or bfloat16. Raises ConfigError."""
    known = PRESETS.get(named.lower())
    if known is not None:
        return _shape(named, replace(known, dtype=dtype or known.dtype).geometry(1))
    path = Path(named, "config.json") if Path(named).is_dir() else Path(named)
    data = _read(path)
    try:
        return _shape(model_label(str(path.absolute().parent)), _geometry(json.loads(data), dtype))
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError, RecursionError) as error:
        raise ConfigError(f"model {named[:200]!r}: its configuration does not describe attention; name one of "
                          f"{', '.join(PRESETS)}") from error  # fmt: skip


def _shape(name: str, geometry: KVGeometry) -> ModelShape:
    return ModelShape(name, geometry.token_bytes)


def _read(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read(_FILE_BYTES_MAX)
    except OSError as error:
        raise ConfigError(f"model {str(path)[:200]!r}: is neither a file that can be read nor one of "
                          f"{', '.join(PRESETS)}") from error  # fmt: skip


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
