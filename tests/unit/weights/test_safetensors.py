"""Safetensors files and directories: dtypes, shards, and every way they can be wrong."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from enginehouse.errors import CorruptModelError, SourceError, UnsupportedModelError
from enginehouse.runtime.weights.checkpoint import open_checkpoint
from enginehouse.runtime.weights.safetensors_checkpoint import SafetensorsCheckpoint
from enginehouse.runtime.weights.safetensors_file import SafetensorsFile
from tests.support.tiny_models import (
    encode_floats,
    llama_config,
    llama_tensors,
    write_safetensors,
    write_tiny_llama,
)


def file_of(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def open_bytes(tmp_path: Path, content: bytes) -> SafetensorsFile:
    path = tmp_path / "file.safetensors"
    path.write_bytes(content)
    return SafetensorsFile(path)


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_dtypes_become_fp32(tmp_path: Path, dtype: str) -> None:
    values = np.random.default_rng(0).standard_normal((6, 10)).astype(np.float32)
    scalar = np.array(2.5, np.float32)
    write_safetensors(tmp_path / "m.safetensors", {"matrix": values, "scalar": scalar}, dtype)
    file = SafetensorsFile(tmp_path / "m.safetensors")
    if dtype == "BF16":
        words = np.frombuffer(encode_floats(values, dtype), "<u2").astype(np.uint32) << 16
        expected = words.view(np.float32).reshape(values.shape)
        assert np.abs(expected - values).max() < 0.02
    else:
        expected = values.astype({"F64": "f8", "F32": "f4", "F16": "f2"}[dtype]).astype(np.float32)
    np.testing.assert_array_equal(file.read("matrix"), expected)
    assert file.read("matrix").dtype == np.float32
    assert file.read("scalar").shape == ()
    assert float(file.read("scalar")) == 2.5


def test_other_dtypes_are_listed_but_not_read(tmp_path: Path) -> None:
    header = {"mask": entry("BOOL", [4], 0, 4), "w": entry("F32", [1], 4, 8)}
    file = open_bytes(tmp_path, file_of(header, bytes(8)))
    assert sorted(file.tensors) == ["mask", "w"]
    assert file.read("w").tolist() == [0.0]
    with pytest.raises(UnsupportedModelError, match="'mask' has dtype BOOL"):
        file.read("mask")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "0 bytes"),
        (b"\xff" * 16, "does not fit"),
        ((1 << 40).to_bytes(8, "little") + bytes(20), "does not fit"),
        (file_of(b"not json"), "not JSON"),
        (file_of(b"\xff\xff\xff"), "not JSON"),
        (file_of(b"[" * 5000), "not JSON"),
        (file_of([]), "no JSON object"),
        (file_of({"t": 5}), "no dtype"),
        (file_of({"t": {"dtype": "F32"}}), "shape and data_offsets"),
        (file_of({"t": entry("F32", [-1], 0, 4)}, bytes(4)), "shape and data_offsets"),
        (file_of({"t": entry("F32", [True], 0, 4)}, bytes(4)), "shape and data_offsets"),
        (file_of({"t": entry("F32", [1.0], 0, 4)}, bytes(4)), "shape and data_offsets"),  # type: ignore[list-item]
        (file_of({"t": entry("F32", [2], 0, 8)}, bytes(4)), "outside the file"),
        (file_of({"t": entry("F32", [1], 4, 0)}, bytes(4)), "outside the file"),
        (file_of({"t": entry("F32", [3], 0, 4)}, bytes(4)), "takes 4 bytes"),
        (file_of({"t": entry("F32", [1 << 40, 1 << 40], 0, 4)}, bytes(4)), "takes 4 bytes"),
        (file_of({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, bytes(12)), "overlaps"),
        (file_of({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 8, 12)}, bytes(12)), "hole"),
        (file_of({"a": entry("F32", [1], 0, 4)}, bytes(12)), "end at"),
        (file_of(b'{"a": 1, "a": 2}'), "twice"),
    ],
)
def test_damage_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    with pytest.raises(CorruptModelError, match=said):
        open_bytes(tmp_path, content)


@pytest.fixture(scope="module")
def tiny_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    directory = write_tiny_llama(
        tmp_path_factory.mktemp("tiny"), num_layers=1, hidden_size=16, intermediate_size=16
    )
    return (directory / "model.safetensors").read_bytes()


def test_every_truncation_is_noticed(tmp_path: Path, tiny_bytes: bytes) -> None:
    rng = np.random.default_rng(1)
    for length in [*range(64), *rng.integers(64, len(tiny_bytes), 300).tolist(), len(tiny_bytes) - 1]:
        with pytest.raises(CorruptModelError):
            open_bytes(tmp_path, tiny_bytes[:length])


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_mutation_does_worse_than_a_named_error(
    tmp_path: Path, tiny_bytes: bytes, data: st.DataObject
) -> None:
    content = bytearray(tiny_bytes)
    header_bytes = int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        where = data.draw(st.integers(0, header_bytes + 7))
        content[where] = data.draw(st.one_of(st.integers(0, 255), st.sampled_from(b'0123456789-.{}[]",: e')))
    tracemalloc.start()
    try:
        file = open_bytes(tmp_path, bytes(content))
        for name in file.tensors:
            file.read(name)
    except (CorruptModelError, UnsupportedModelError):
        pass
    finally:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak_bytes < 64 << 20


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_directory_gives_all_tensors(tmp_path: Path, num_shards: int) -> None:
    checkpoint = open_checkpoint(write_tiny_llama(tmp_path / "m", seed=4, num_shards=num_shards))
    config = llama_config()
    tensors = llama_tensors(config, seed=4)
    assert checkpoint.config == config
    assert sorted(checkpoint.names()) == sorted(tensors)
    for name, tensor in tensors.items():
        assert checkpoint.shape(name) == tensor.shape
        np.testing.assert_array_equal(checkpoint.read(name), tensor)
    files = checkpoint.tokenizer_files()
    assert files.directory == tmp_path / "m"
    assert files.gguf_metadata is None


def test_the_hash_follows_everything_that_matters(tmp_path: Path) -> None:
    def hash_after(change: Any) -> str:
        directory = tmp_path / f"m{len(list(tmp_path.iterdir()))}"
        change(write_tiny_llama(directory, num_shards=2))
        return SafetensorsCheckpoint(directory).source_hash

    plain = hash_after(lambda directory: None)
    assert hash_after(lambda directory: (directory / "README.md").write_text("hello")) == plain
    other_weights = hash_after(lambda directory: write_tiny_llama(directory, seed=1, num_shards=2))
    other_config = hash_after(
        lambda directory: (directory / "config.json").write_text(json.dumps(llama_config(max_context=99)))
    )
    other_tokenizer = hash_after(lambda directory: (directory / "tokenizer_config.json").write_text("{}"))
    new_template = hash_after(lambda directory: (directory / "chat_template.jinja").write_text("x"))
    assert len({plain, other_weights, other_config, other_tokenizer, new_template}) == 5


def test_a_damaged_directory_is_named(tmp_path: Path) -> None:
    def broken(name: str, content: str | None) -> Path:
        directory = write_tiny_llama(tmp_path / f"m{len(list(tmp_path.iterdir()))}", num_shards=2)
        (directory / name).unlink()
        if content is not None:
            (directory / name).write_text(content)
        return directory

    index = "model.safetensors.index.json"
    cases: list[tuple[str, str | None, type[Exception], str]] = [
        ("config.json", None, SourceError, "no config.json"),
        ("config.json", "{", CorruptModelError, "not JSON"),
        ("config.json", "[]", CorruptModelError, "no JSON object"),
        (index, "{}", CorruptModelError, "no weight_map"),
        (index, '{"weight_map": {"a": 5}}', CorruptModelError, "no file name"),
        (index, '{"weight_map": {"a": "../../etc/passwd"}}', CorruptModelError, "no file name"),
        (index, '{"weight_map": {"a": "gone.safetensors"}}', CorruptModelError, "is missing"),
        (
            index,
            '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}',
            CorruptModelError,
            "no tensor 'a'",
        ),
        (index, None, SourceError, "several safetensors files"),
        ("model-00002-of-00002.safetensors", None, CorruptModelError, "is missing"),
    ]
    for name, content, error, said in cases:
        with pytest.raises(error, match=said):
            SafetensorsCheckpoint(broken(name, content))


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path / "m")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match="pickled"):
        open_checkpoint(directory)


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="does not exist"):
        open_checkpoint(tmp_path / "nothing")
