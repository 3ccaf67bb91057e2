"""Files of tensors as we write them are what the safetensors library reads."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from framework.checkpoint_files import CheckpointError
from framework_plugins.checkpoint import tensor_file
from framework_plugins.checkpoint.tensor_file import hash_of, read_header, version_in, write_tensors
from framework_plugins.checkpoint.uncached import BUFFER

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.uint16, torch.uint32,
    torch.uint64,
)  # fmt: skip


@pytest.mark.parametrize("chunk", [8, 1 << 20])
def test_the_library_reads_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(tensor_file, "CHUNK", chunk)
    tensors = {f"a {dtype}": torch.arange(15).reshape(3, 5).to(dtype) for dtype in DTYPES}
    tensors |= {"empty": torch.empty(0, 3), "one": torch.tensor(2.5, dtype=torch.float64), "é, 'x'": torch.ones(7)}
    path = tmp_path / "x.safetensors"
    header, hashes = write_tensors(path, tensors, "step 3, life 1")
    with safe_open(path, framework="pt") as opened:
        assert set(opened.keys()) == set(tensors)
        assert opened.metadata()["format"] == "pt"
        for key, tensor in tensors.items():
            read = opened.get_tensor(key)
            assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
            assert hash_of(read) == hashes[key] == hash_of(tensor)
            assert torch.equal(read.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    written = read_header(path)
    assert hashlib.sha256(written).hexdigest() == header
    assert version_in(written) == "step 3, life 1"
    entries = {key: entry for key, entry in json.loads(written[8:]).items() if key != "__metadata__"}
    for key, entry in entries.items():
        assert (len(written) + entry["data_offsets"][0]) % max(1, tensors[key].element_size()) == 0, "aligned"
    assert path.stat().st_size == len(written) + sum(tensor.nbytes for tensor in tensors.values())


def test_the_library_reads_what_went_past_the_page_cache(tmp_path: Path) -> None:
    big = torch.arange(BUFFER // 2 + 3, dtype=torch.float32)  # two whole buffers and a rest
    path = tmp_path / "x.safetensors"
    _, hashes = write_tensors(path, {"big": big, "small": torch.ones(3)}, "")
    path.rename(tmp_path / "moved")
    with safe_open(tmp_path / "moved", framework="pt") as opened:
        assert torch.equal(opened.get_tensor("big"), big)
        assert hash_of(opened.get_tensor("small")) == hashes["small"]


def test_a_dtype_that_the_format_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="complex128 can't be saved"):
        write_tensors(tmp_path / "x.safetensors", {"x": torch.ones(2, dtype=torch.complex128)}, "")


def test_no_version_in_what_is_no_header() -> None:
    assert version_in(b"") == version_in(b"12345678[]") == version_in(b'12345678{"__metadata__": {}}') == ""
