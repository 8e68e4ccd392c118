"""The frame: the format of one page in host memory, in a file, under a Redis key and in an S3 object.

    [ header 256 bytes | payload | zero padding up to a multiple of 4096 ]

A frame is either unsealed (its magic is zero) or sealed for the payload it contains. A writer of a payload must unseal
the frame first. The grammar is in docs/formats/frame.md.

A reader builds the header that it expects and compares. A stored header never determines a length, an address or an
allocation. The tag covers the fields after it and the payload as stored, so it binds a page to its key and its
namespace.

    codec         FrameCodec: encodes, seals and verifies pages
    header        the 256 bytes, the frame keys, and the reasons to reject a page
    compression   compression of payloads by zstd
    buffers       frames, pages whose payload is in foreign memory, and memory for encoded pages
"""

from .buffers import PageBuffer, PageView, fill, first_bytes, header_of, join, without_first
from .codec import FrameCodec, TagStream, unseal
from .compression import Compression
from .header import (
    FRAME_ALIGN,
    FRAME_KEY_BYTES,
    HEADER_BYTES,
    NO_PARENT,
    Damage,
    Encoding,
    FrameHeader,
    TagKind,
    frame_bytes,
    stored_time,
)

__all__ = [
    "FRAME_ALIGN", "FRAME_KEY_BYTES", "HEADER_BYTES", "NO_PARENT", "Compression", "Damage", "Encoding", "FrameCodec",
    "FrameHeader", "PageBuffer", "PageView", "TagKind", "TagStream", "fill", "first_bytes", "frame_bytes", "header_of",
    "join", "stored_time", "unseal", "without_first",
]
