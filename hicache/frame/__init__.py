"""The frame: one page in the form in which it lies in host memory, in a file, under a Redis key or in an S3 object.

    [ header 256 bytes | payload | zero padding up to a multiple of 4096 ]

A frame is either unsealed (its magic is zero) or sealed for exactly the payload it holds. Whoever writes a payload
unseals the frame first. The grammar is in docs/formats/frame.md.

A reader builds the header it expects and compares: nothing in a stored header steers a length, an address or an
allocation. The tag covers the header behind it and the payload as stored, so a page is bound to its key and its
namespace.

    codec         FrameCodec: encodes and seals pages, and proves what comes back
    header        the 256 bytes, the keys that they name, and why a page is refused
    compression   payloads made shorter by zstd
    buffers       frames, pages whose payload is in foreign memory, and memory for encoded pages
"""

from .buffers import PageBuffer, PageView, fill, first_bytes, header_of, without_first
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
)

__all__ = [
    "FRAME_ALIGN",
    "FRAME_KEY_BYTES",
    "HEADER_BYTES",
    "NO_PARENT",
    "Compression",
    "Damage",
    "Encoding",
    "FrameCodec",
    "FrameHeader",
    "PageBuffer",
    "PageView",
    "TagKind",
    "TagStream",
    "fill",
    "first_bytes",
    "frame_bytes",
    "header_of",
    "unseal",
    "without_first",
]
