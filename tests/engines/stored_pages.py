"""Pages that SGLang has stored in files, found by their keys, and damaged."""

from __future__ import annotations

from pathlib import Path

from hicache.frame import HEADER_BYTES, FrameCodec, FrameHeader, unseal
from hicache.keys import page_keys, token_bytes

from .sglang_engine import PAGE_TOKENS


def page_files(folder: Path) -> list[Path]:
    """Return the files of all pages below `folder`."""
    return [path for path in folder.rglob("*") if len(path.name.partition(".")[0]) == 64 and path.is_file()]


def stored(folder: Path) -> dict[str, Path]:
    """Return the files of pages by their keys."""
    return {path.name.partition(".")[0]: path for path in page_files(folder)}


def keys_of(prompt: list[int]) -> list[str]:
    """Return the keys of a prompt's pages, in order. SGLang's are those of HiCache's own engine."""
    return [key.hex() for key in page_keys(token_bytes(prompt), PAGE_TOKENS)]


def files_of(prompt: list[int], folder: Path) -> list[Path]:
    """Return the files of a prompt's pages, in order."""
    files = stored(folder)
    return [files[key] for key in keys_of(prompt)]


def are_stored(prompts: list[list[int]], folder: Path) -> bool:
    """True if all pages of the prompts are stored."""
    return {key for prompt in prompts for key in keys_of(prompt)} <= stored(folder).keys()


def zero(path: Path) -> None:
    """Zero the KV of a page, with a valid seal."""
    frame = memoryview(bytearray(path.read_bytes()))
    header = FrameHeader.parse(frame)
    assert header is not None
    codec = FrameCodec(header.namespace, header.payload_bytes, label="zeroed")
    frame[HEADER_BYTES:] = bytes(frame.nbytes - HEADER_BYTES)
    unseal(frame)
    path.write_bytes(codec.seal(header.page_key, frame))


def flip(path: Path) -> None:
    """Flip a bit of the KV of a page."""
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + 100] ^= 1
    path.write_bytes(data)


def swap(one: Path, two: Path) -> None:
    """Store each of two pages under the key of the other."""
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
