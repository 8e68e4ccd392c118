"""Device memory as blocks: tensors of an engine, or of our own pool, viewed as rows of bytes.

A layer is one or more regions. A region is a tensor in which each block is one piece of memory; there may be gaps
between blocks. The layouts of engines as layers:

    SGLang, K and V `[slots, heads, dim]`                 [k[layer], v[layer]], slots_per_block=page_size
    vLLM `[2, blocks, block, heads, dim]`                 [kv[layer][0], kv[layer][1]]
    vLLM `[blocks, 2, block, heads, dim]`                 [kv[layer]]
    vLLM `[blocks, layers, 2, block, heads, dim]`         [kv[:, layer]]

The engine defines the order of the elements inside a block: copies only move bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..arguments import instance, whole
from ..errors import InvalidInput


class EngineBlocks:
    """Views of the blocks of all layers; nothing is copied or allocated.

    Dimension 0 of each tensor counts blocks; with `slots_per_block`, it counts slots, and a block has that many slots.
    `first` is the smallest block id that may be copied. All regions have the same number of blocks and the same device.
    Raises InvalidInput if they differ, or if a block is not one piece of memory in a region.
    """

    def __init__(self, layers: Sequence[Sequence[torch.Tensor]], *, first: int = 0, slots_per_block: int = 1) -> None:
        slots = whole("blocks: slots_per_block", slots_per_block, 1)
        if not isinstance(layers, list | tuple) or not layers:
            raise InvalidInput("blocks: got an empty list of layers; pass a list of layers, each a list of regions")
        # uint8 [count, bytes] for each region of each layer; rows are contiguous, the stride between rows is arbitrary.
        self.layers = tuple(_regions(number, layer, slots) for number, layer in enumerate(layers))
        self.count = len(self.layers[0][0])
        self.device = self.layers[0][0].device
        self.first = whole("blocks: first", first, 0, self.count - 1)
        # Bytes of one block in each layer.
        self.layer_bytes = tuple(sum(region.shape[1] for region in layer) for layer in self.layers)
        for number, layer in enumerate(self.layers):
            for region in layer:
                if len(region) != self.count or region.device != self.device:
                    raise InvalidInput(
                        f"blocks: layer {number} has {len(region)} blocks on {region.device}, layer 0 has {self.count} "
                        f"on {self.device}; all regions need the same blocks on one device"
                    )


def _regions(number: int, layer: Sequence[torch.Tensor], slots_per_block: int) -> tuple[torch.Tensor, ...]:
    # A tensor is a sequence over its first dimension, too; but only one layout has the regions there. So reject it.
    if not isinstance(layer, list | tuple) or not layer:
        raise InvalidInput(f"blocks: layer {number} is not a list of regions; pass [tensor], or [k, v]")
    name = f"blocks: layer {number}, region"
    return tuple(_rows(f"{name} {index}", region, slots_per_block) for index, region in enumerate(layer))


def _rows(name: str, tensor: torch.Tensor, slots_per_block: int) -> torch.Tensor:
    """View `tensor` as uint8 `[blocks, bytes]`. Raises InvalidInput if a block is not one piece."""
    shape = tuple(instance(name, tensor, torch.Tensor).shape)
    if not shape or not tensor.numel() or shape[0] % slots_per_block:
        raise InvalidInput(
            f"{name}: shape {list(shape)} does not hold whole blocks; dimension 0 must count "
            + ("blocks" if slots_per_block == 1 else f"slots and be a multiple of {slots_per_block}")
        )
    if slots_per_block > 1:
        tensor = tensor.view(-1, slots_per_block, *shape[1:])
    count, stride = tensor.shape[0], tensor.stride(0)
    elements = math.prod(tensor.shape[1:])
    inner = [dim for dim in range(1, tensor.ndim) if tensor.shape[dim] > 1]
    expected = 1
    for dim in sorted(inner, key=tensor.stride):
        if tensor.stride(dim) != expected:
            raise _scattered(name, tensor, dim, expected)
        expected *= tensor.shape[dim]
    if count > 1 and stride < elements:
        raise _scattered(name, tensor, 0, elements)
    return tensor.as_strided((count, elements), (stride, 1)).view(torch.uint8)


def _scattered(name: str, tensor: torch.Tensor, dim: int, expected: int) -> InvalidInput:
    """Return the error for a dimension `dim` whose stride is not `expected`, the elements of the smaller dimensions."""
    stride, steps = tensor.stride(dim), list(tensor.stride())
    if stride < expected:
        change = f"entries of dimension {dim} overlap; give each its own memory"
    elif tensor.shape[0] > 1 and stride > tensor.stride(0):
        change = (
            f"blocks are interleaved along dimension {dim} (stride {stride}, blocks have {tensor.stride(0)}); allocate "
            f"the tensor with dimension {dim} inside the block, so that its stride is {expected}"
        )
    else:
        change = f"dimension {dim} has a gap (stride {stride} instead of {expected}); pass the tensor with its padding"
    return InvalidInput(
        f"{name}: shape {list(tensor.shape)}, stride {steps}: a block is not one piece of memory: {change}"
    )
