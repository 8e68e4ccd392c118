"""A plain Llama forward over a whole prompt in float64, written from the definition, without pages, tiles or cache."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from hicache_lab.engine import LayerKind, LlamaConfig


def reference_logits(config: LlamaConfig, tensors: Mapping[str, torch.Tensor], tokens: Sequence[int]) -> torch.Tensor:
    """Return the logits after each token, float64 `[tokens, vocab_size]`."""

    def weight(name: str) -> torch.Tensor:
        return tensors[f"{name}.weight"].double()

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.rms_norm_eps) * weight(name)

    count, dim = len(tokens), config.head_dim
    x = weight("model.embed_tokens")[list(tokens)]
    distance = torch.arange(count)[:, None] - torch.arange(count)
    for layer, kind in enumerate(config.kinds):
        name = f"model.layers.{layer}"
        h = norm(x, f"{name}.input_layernorm")
        q, k, v = (h @ weight(f"{name}.self_attn.{part}_proj").T for part in "qkv")
        gate = h @ weight(f"{name}.self_attn.decay_proj").T if kind is LayerKind.LINEAR else None
        sees = distance < (config.sliding_window or 0) if kind is LayerKind.WINDOW else distance < count
        heads = []
        for head in range(config.heads):
            shared = head * config.kv_heads // config.heads
            own, other = slice(head * dim, (head + 1) * dim), slice(shared * dim, (shared + 1) * dim)
            if gate is not None:
                heads.append(decayed(q[:, own] / math.sqrt(dim), k[:, other], v[:, other], gate[:, shared]))
                continue
            scores = turn(config, q[:, own]) @ turn(config, k[:, other]).T / math.sqrt(dim)
            scores = scores.masked_fill((distance < 0) | ~sees, -math.inf)
            heads.append(scores.softmax(-1) @ v[:, other])
        x = x + torch.cat(heads, dim=1) @ weight(f"{name}.self_attn.o_proj").T
        h = norm(x, f"{name}.post_attention_layernorm")
        gate = h @ weight(f"{name}.mlp.gate_proj").T
        up = h @ weight(f"{name}.mlp.up_proj").T
        x = x + (gate / (1 + torch.exp(-gate)) * up) @ weight(f"{name}.mlp.down_proj").T
    head_name = "model.embed_tokens" if config.tied_embeddings else "lm_head"
    return norm(x, "model.norm") @ weight(head_name).T


def decayed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Return linear attention with decay, `[tokens, head_dim]`, as one product: token s has, at t, the weight of the
    decays after s."""
    decays = torch.sigmoid(gate).log().cumsum(0) / 16
    weights = (decays[:, None] - decays).exp().tril()
    return (q @ k.T * weights) @ v


def turn(config: LlamaConfig, x: torch.Tensor) -> torch.Tensor:
    """Return the rotary embedding of `[tokens, head_dim]`: rotate each pair (i, i + head_dim / 2) by an angle."""
    half = config.head_dim // 2
    frequencies = config.rope_theta ** -(torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(len(x), dtype=torch.float64)[:, None] * frequencies
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=1)
