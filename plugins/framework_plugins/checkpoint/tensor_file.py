"""One rank's tensors in one safetensors file, hashed on the way; https://github.com/huggingface/safetensors.

The library reads such files. It doesn't write them here: its `save_file` (0.8) takes 1.0 s for 250 MB where plain
writes take 0.15 s (four ranks on two cores), and makes the header itself, which then can't be hashed beforehand.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from framework.checkpoint_files import CheckpointError, sync_folder
from framework_plugins.checkpoint.uncached import UncachedFile

VERSION = "version"
"""Key of the state's version, in words, in an index and in the metadata of each tensor file."""
CHUNK = 1 << 20
"""Bytes that are hashed and written at a time: still in a cache when they are written, and steps come in between."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], version: str) -> tuple[str, dict[str, str]]:
    """Write a file and flush it to disk.

    Args:
        path: of the file; an older one is replaced.
        tensors: key -> contiguous CPU tensor.
        version: of the state, in words.

    Returns:
        SHA-256 of the header, and of each tensor's bytes, as they were in memory before they were written.

    Raises:
        OSError: it can't be written (full disk).
        CheckpointError: safetensors has no such dtype.
    """
    ordered = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))  # each aligned to its own size
    header, hashes = header_of({key: tensors[key] for key in ordered}, version), {}
    with UncachedFile(path) as file:
        file.write(memoryview(header))
        for key in ordered:
            left, digest = _bytes(tensors[key]), hashlib.sha256()
            while left:
                digest.update(left[:CHUNK])
                file.write(left[:CHUNK])
                left = left[CHUNK:]
            hashes[key] = digest.hexdigest()
    sync_folder(path.parent)
    return hashlib.sha256(header).hexdigest(), hashes


def header_of(tensors: Mapping[str, Tensor], version: str) -> bytes:
    """Return what stands before the tensors: the length of a JSON text (8 bytes, little endian), and that text."""
    text: dict[str, object] = {"__metadata__": {"format": "pt", VERSION: version}}
    end = 0
    for key, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        text[key] = {"dtype": _spelling(tensor.dtype), "shape": list(tensor.shape), "data_offsets": [begin, end]}
    content = json.dumps(text, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)
    return len(content).to_bytes(8, "little") + content


@cache
def _spelling(dtype: torch.dtype) -> str:
    """Return the library's own name of a dtype."""
    try:
        made = save({"x": torch.empty(0, dtype=dtype)})
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"Tensors of {dtype} can't be saved: safetensors doesn't know it") from error
    return str(json.loads(made[8 : 8 + int.from_bytes(made[:8], "little")])["x"]["dtype"])


def read_header(path: Path) -> bytes:
    """Return everything before the tensors of a file, as `header_of` makes it."""
    with path.open("rb") as file:
        length = file.read(8)
        return length + file.read(min(int.from_bytes(length, "little"), path.stat().st_size))


def version_in(header: bytes) -> str:
    """Return the version that a file says its state is of; empty if it doesn't say."""
    try:
        return str(json.loads(header[8:])["__metadata__"][VERSION])
    except (ValueError, KeyError, TypeError):
        return ""


def hash_of(tensor: Tensor) -> str:
    """Return the SHA-256 of a contiguous CPU tensor's bytes; other threads may run meanwhile."""
    return hashlib.sha256(_bytes(tensor)).hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)
