"""Recognises what is often found under the name of a safetensors file, to say so instead of "bad header length"."""

from __future__ import annotations

import re

_LFS = (b"version https://git-lfs", b"version https://hawser")
_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"PK\x03\x04", "a zip archive, probably a PyTorch pickle checkpoint, not a safetensors file: convert it"),
    (b"PK\x05\x06", "an empty zip archive, not a safetensors file"),
    (b"GGUF", "a GGUF file, not a safetensors file"),
    (b"\x89HDF\r\n", "an HDF5 file, not a safetensors file"),
    (b"\x93NUMPY", "a NumPy array file, not a safetensors file"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive, not a safetensors file: unpack it"),
)
# Begin like a possible header length, so they count only where the length is impossible.
_SHORT_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"\x80\x02", "a pickle, probably an old PyTorch checkpoint, not a safetensors file: convert it"),
    (b"\x80\x04", "a pickle, not a safetensors file: convert it"),
    (b"\x1f\x8b", "a gzip archive, not a safetensors file: unpack it"),
)
_MARKUP = re.compile(rb"(?:\xef\xbb\xbf)?\s*<(?:!doctype|html|head|body|\?xml|error|!--)", re.IGNORECASE)
_LFS_SIZE = re.compile(rb"^size (\d{1,20})$", re.MULTILINE)
_TEXT = re.compile(rb"(?:\xef\xbb\xbf)?(?:[\t\n\r\x20-\x7e]{8}|[\t\n\r\x20-\x7e]{1,7}\Z)")


def impostor(raw: bytes) -> str | None:
    """Return what a file that has no valid header is, judged by its first bytes; None if it looks like nothing known.

    Examples:
        >>> impostor(b"GGUF" + bytes(8))
        'a GGUF file, not a safetensors file'
    """
    if any(raw.startswith(magic) for magic in _LFS):
        size = _LFS_SIZE.search(raw[:1024])
        of = f" to {size[1].decode()} bytes" if size else ""
        return f"a Git LFS pointer{of}, not the file itself: run `git lfs pull` in the repository"
    # Every header length below the format's cap has a NUL among its 8 bytes.
    magics = _MAGIC if b"\0" in raw[:8] else _MAGIC + _SHORT_MAGIC
    known = next((text for magic, text in magics if raw.startswith(magic)), None)
    if known is not None or b"\0" in raw[:8]:
        return known
    if _MARKUP.match(raw):
        return "an HTML or XML page, probably an error page saved by a download, not a safetensors file"
    if _TEXT.match(raw):
        kind = "JSON text, probably a server's answer" if raw.lstrip()[:1] in (b"{", b"[") else "plain text"
        return f"{kind}, not a safetensors file: {_first_line(raw)}"
    return None


def _first_line(raw: bytes) -> str:
    longest = 80  # characters, so that the message stays one line
    return repr(raw[:longest].decode("utf-8", "replace").strip().split("\n", 1)[0])
