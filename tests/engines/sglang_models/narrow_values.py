"""A Llama whose values have half the size of its keys: attention ignores the other half."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.models.llama import LlamaForCausalLM


class _Narrow(torch.nn.Module):
    def __init__(self, whole: RadixAttention, value_dim: int) -> None:
        super().__init__()
        self._kv_heads, self._head_dim, self._value_dim = whole.tp_k_head_num, whole.head_dim, value_dim
        self._attention = RadixAttention(
            whole.tp_q_head_num, whole.head_dim, whole.scaling, num_kv_heads=whole.tp_k_head_num,
            layer_id=whole.layer_id, v_head_dim=value_dim,
        )

    def forward(self, query: Any, keys: Any, values: Any, batch: Any) -> Any:
        narrow = values.view(len(values), self._kv_heads, self._head_dim)[..., : self._value_dim]
        attended = self._attention(query, keys, narrow.reshape(len(values), -1), batch)
        heads = attended.view(len(query), -1, self._value_dim)
        return torch.nn.functional.pad(heads, (0, self._head_dim - self._value_dim)).view(len(query), -1)


class NarrowValuesForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    """See the module's docstring. The entry `v_head_dim` of the configuration is the size of values."""

    def __init__(self, config: Any, *arguments: Any, **more: Any) -> None:
        super().__init__(config, *arguments, **more)
        for layer in self.model.layers:
            layer.self_attn.attn = _Narrow(layer.self_attn.attn, config.v_head_dim)


EntryClass = NarrowValuesForCausalLM
