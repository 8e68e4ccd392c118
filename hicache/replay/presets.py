"""KV geometries of known models, for one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..geometry import KVGeometry, KVLayout
from ..keys import Namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One model on one rank. `heads` are the rank's KV heads (MLA: 1; `head_dim` is then latent and rotary dims)."""

    description: str
    layers: int
    heads: int
    head_dim: int
    dtype: str = "bfloat16"
    layout: KVLayout = KVLayout.MHA
    tp_size: int = 1

    def geometry(self, page_size: int) -> KVGeometry:
        """Return the geometry of its pages."""
        return KVGeometry(self.layers, self.heads, self.head_dim, page_size, self.dtype, self.layout)

    def namespace(self, name: str, page_size: int) -> Namespace:
        """Return the namespace of its replays. It differs from those of real engines, because replayed pages do not
        contain KV."""
        return Namespace(
            f"hicache replay of {name}",
            self.geometry(page_size),
            tp_size=self.tp_size,
            ranks_share_pages=self.layout is KVLayout.MLA,  # each rank has the whole latent
        )


# Shapes from the models' published config.json files.
PRESETS: Mapping[str, Preset] = {
    "tiny": Preset(
        description="no real model: so little KV that a laptop replays real traces", layers=4, heads=1, head_dim=8
    ),
    "qwen2.5-7b": Preset(description="Qwen2.5-7B: 28 layers, 4 KV heads of 128", layers=28, heads=4, head_dim=128),
    "llama-3.1-8b": Preset(description="Llama-3.1-8B: 32 layers, 8 KV heads of 128", layers=32, heads=8, head_dim=128),
    "llama-3.1-70b-tp8": Preset(
        description="Llama-3.1-70B on 8 ranks: 80 layers, 1 of 8 KV heads of 128",
        layers=80, heads=1, head_dim=128, tp_size=8,
    ),
    "llama-3.1-70b": Preset(
        description="Llama-3.1-70B: 80 layers, 8 KV heads of 128", layers=80, heads=8, head_dim=128
    ),
    "qwen3-8b": Preset(description="Qwen3-8B: 36 layers, 8 KV heads of 128", layers=36, heads=8, head_dim=128),
    "qwen3-32b": Preset(description="Qwen3-32B: 64 layers, 8 KV heads of 128", layers=64, heads=8, head_dim=128),
    "gpt-oss-20b": Preset(description="gpt-oss-20b: 24 layers, 8 KV heads of 64", layers=24, heads=8, head_dim=64),
    "gpt-oss-120b": Preset(description="gpt-oss-120b: 36 layers, 8 KV heads of 64", layers=36, heads=8, head_dim=64),
    "deepseek-v3": Preset(
        description="DeepSeek-V3 (MLA): 61 layers, a latent of 512 and 64 rotary dims",
        layers=61, heads=1, head_dim=576, layout=KVLayout.MLA,
    ),
}  # fmt: skip
