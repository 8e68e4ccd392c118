"""Pages as bodies of requests and replies, for engines on other hosts, through staging memory.

The wire codec verifies a client's pages before they are stored. Pages from a store are sealed for the wire unless they
already are: pages of a store with MACs or encryption do not have the checksum that clients need.

Locking design: coroutines on the event loop; verbs and seals run on threads of the namespace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from ..backends.base import GetOutcome, SetOutcome
from ..backends.errors import ErrorKind
from ..backends.remote.bodies import OUTCOME_BYTES
from ..frame import NO_PARENT, FrameCodec, FrameHeader, TagKind
from ..frame.header import HEADER_BYTES
from ..keys import PAGE_KEY_BYTES
from .namespace import ServedNamespace
from .node import Node
from .protocol import Refused
from .staging import Staging


def _frames(piece: memoryview, frame_bytes: int) -> list[memoryview]:
    return [piece[start : start + frame_bytes] for start in range(0, len(piece), frame_bytes)]


class PagesAnswer(Response):
    """The answer to `read`: reads into staging memory, then sends from there."""

    def __init__(
        self, node: Node, namespace: ServedNamespace, staging: Staging, keys: Sequence[bytes], deadline: float
    ) -> None:
        super().__init__(media_type="application/octet-stream")
        self._node, self._namespace, self._staging = node, namespace, staging
        self._keys, self._deadline = keys, deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer. Raises Refused before anything was sent."""
        found, keys = self._namespace, self._keys
        size = found.wire.frame_bytes
        async with self._staging.piece(len(keys) * size, self._deadline) as piece:
            frames = _frames(piece, size)

            def read(errors: list[str]) -> list[GetOutcome]:
                outcomes = found.store.batch_get(keys, frames, deadline=self._deadline, errors=errors)
                for key, frame, outcome in zip(keys, frames, outcomes, strict=True):
                    if outcome is GetOutcome.HIT:
                        _seal_for_wire(found.wire, key, frame)
                return outcomes

            outcomes, _ = await self._node.call(found, read)
            hits = [frame for frame, outcome in zip(frames, outcomes, strict=True) if outcome is GetOutcome.HIT]
            words = b"".join(OUTCOME_BYTES[outcome] for outcome in outcomes)
            length = len(words) + len(hits) * size
            headers = [(b"content-type", b"application/octet-stream"), (b"content-length", b"%d" % length)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": words, "more_body": True})
            if hits:
                await scope["state"]["connection"].send_pages(send, hits)
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def write_pages(  # noqa: PLR0917 - a request and its destination
    node: Node, namespace: ServedNamespace, staging: Staging, request: Request, count: int, parent: bytes | None,
    deadline: float, are_copies: bool,
) -> tuple[list[SetOutcome], list[str]]:
    """Receive `count` keys and frames, verify and store them; return their outcomes and the kinds of errors.

    Raises Refused.
    """
    wire = namespace.wire
    size = wire.frame_bytes
    if request.headers.get("content-length") != str(count * (PAGE_KEY_BYTES + size)):
        detail = f"body: must have a content-length of {PAGE_KEY_BYTES + size} bytes for each key"
        raise Refused(422, ErrorKind.BAD_REQUEST, detail)
    async with staging.piece(count * size, deadline) as piece:
        frames, tags = _frames(piece, size), [wire.stream() for _ in range(count)]
        names = bytearray(count * PAGE_KEY_BYTES)
        connection: Any = request.scope["state"]["connection"]
        await connection.receive_pages(request.receive, [memoryview(names), *frames], [None, *tags])
        keys = [bytes(names[start : start + PAGE_KEY_BYTES]) for start in range(0, len(names), PAGE_KEY_BYTES)]

        def store(errors: list[str]) -> tuple[list[SetOutcome], bool]:
            sound = 0
            for key, frame, tag in zip(keys, frames, tags, strict=True):
                if wire.accept(key, frame, size, tag) is not None:
                    break
                sound += 1
            outcomes: list[SetOutcome] = []
            if sound:
                pages = [wire.copy_in(frame) if are_copies else frame for frame in frames[:sound]]
                outcomes = namespace.store.batch_set(
                    keys[:sound], pages, parent=parent, deadline=deadline, errors=errors
                )
            return outcomes + [SetOutcome.ERROR] * (count - sound), sound < count

        (outcomes, is_damaged), errors = await node.call(namespace, store)
        return outcomes, [*errors, ErrorKind.CHECKSUM] if is_damaged else errors


def _seal_for_wire(wire: FrameCodec, key: bytes, frame: memoryview) -> None:
    header = FrameHeader.parse(bytes(frame[:HEADER_BYTES]))
    if header is None or header.tag_kind is not TagKind.XXH3_128:
        parent = None if header is None or header.parent_key == NO_PARENT else header.parent_key
        wire.seal(key, frame, parent=parent)
