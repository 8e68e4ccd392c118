"""A small reference engine: a real Llama forward over the paged pools, and a plain scheduler over the cache.

It shows how an engine uses the cache, and it tests the cache: its results have the same bits whether a prefix was
computed or came from any tier (`model` explains why). It is not optimised for speed.
"""

from .checkpoint import Checkpoint, LayerKind, LlamaConfig, load_checkpoint, load_tokenizer
from .factory import BUNDLED_MODEL, create_engine
from .interface import Batch, Model, Output
from .model import TILE, LlamaModel, Span
from .options import EngineOptions
from .requests import EngineStatistics, FinishReason, Request, RequestRecord, Update
from .sampling import Sampling, greedy
from .scheduler import Engine
from .trailing import TrailingLayers

__all__ = [
    "BUNDLED_MODEL",
    "TILE",
    "Batch",
    "Checkpoint",
    "Engine",
    "EngineOptions",
    "EngineStatistics",
    "FinishReason",
    "LayerKind",
    "LlamaConfig",
    "LlamaModel",
    "Model",
    "Output",
    "Request",
    "RequestRecord",
    "Sampling",
    "Span",
    "TrailingLayers",
    "Update",
    "create_engine",
    "greedy",
    "load_checkpoint",
    "load_tokenizer",
]
