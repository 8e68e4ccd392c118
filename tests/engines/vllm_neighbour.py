"""A connector beside HiCache's under vLLM's MultiConnector. It transfers nothing, and has a handshake that only its own
kind can read, as the connectors of disaggregated prefill have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    SupportsHMA,
)


@dataclass
class NeighbourAddress(KVConnectorHandshakeMetadata):
    """The handshake of a worker."""


class NeighbourStep(KVConnectorMetadata):
    """Nothing to do."""


class Neighbour(KVConnectorBase_V1, SupportsHMA):
    """See the module's docstring."""

    def get_handshake_metadata(self) -> NeighbourAddress:
        return NeighbourAddress()

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        foreign = [one for one in metadata.values() if not isinstance(one, NeighbourAddress)]
        if foreign:
            raise ValueError(f"{foreign} is the handshake of another connector")

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> NeighbourStep:
        return NeighbourStep()

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None
