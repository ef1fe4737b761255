"""The GGUF reader: every block type, and every way a file can be wrong."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from enginehouse.errors import CorruptModelError, UnsupportedModelError
from enginehouse.runtime.weights.gguf_file import CHUNK_ELEMENTS, TENSOR_TYPES, GGUFFile
from tests.support.tiny_gguf import write_gguf, write_tiny_gguf
from tests.unit.weights.block_reference import BLOCK_TYPES

TYPE_IDS = {name: number for number, (name, _, _) in TENSOR_TYPES.items()}


def random_blocks(kind: str, num_blocks: int) -> bytes:
    """Random bits, with fp16 scales that are ordinary numbers."""
    rng = np.random.default_rng(TYPE_IDS[kind])
    _, block_bytes, scale_offsets = BLOCK_TYPES[kind]
    blocks = rng.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
    for offset in scale_offsets:
        scales = rng.uniform(-2, 2, num_blocks).astype("<f2")
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(num_blocks, 2)
    return blocks.tobytes()


def raw_gguf(
    tensors: list[tuple[str, tuple[int, ...], int, bytes]], metadata: dict[str, bytes] | None = None
) -> bytes:
    """A GGUF file from parts: tensors (name, numpy shape, type number, data), metadata values with their types."""
    pairs = metadata or {}
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs))
    for key, value in pairs.items():
        header += string(key) + value
    offset, blob = 0, b""
    for name, shape, type_id, data in tensors:
        header += string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        header += struct.pack("<IQ", type_id, offset)
        blob += data + bytes(-len(data) % 32)
        offset = len(blob)
    return header + bytes(-len(header) % 32) + blob


def string(text: str | bytes) -> bytes:
    encoded = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(encoded)) + encoded


def open_bytes(tmp_path: Path, content: bytes) -> GGUFFile:
    path = tmp_path / "file.gguf"
    path.write_bytes(content)
    return GGUFFile(path)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_blocks_decode_as_their_definition_says(tmp_path: Path, kind: str) -> None:
    decode, block_bytes, _ = BLOCK_TYPES[kind]
    block_elements = TENSOR_TYPES[TYPE_IDS[kind]][1]
    blocks = random_blocks(kind, 6)
    file = open_bytes(tmp_path, raw_gguf([("t", (3, 2 * block_elements), TYPE_IDS[kind], blocks)]))
    expected = [
        value
        for start in range(0, len(blocks), block_bytes)
        for value in decode(blocks[start:][:block_bytes])
    ]
    found = file.read("t")
    assert found.shape == (3, 2 * block_elements)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found.ravel(), np.array(expected, np.float32), rtol=3e-7, atol=1e-6)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_what_the_gguf_package_quantises_reads_back(tmp_path: Path, kind: str) -> None:
    values = np.random.default_rng(0).standard_normal((48, 96)).astype(np.float32)
    path = write_gguf(tmp_path / "m.gguf", "llama", {}, {"t": values}, kind)
    found = GGUFFile(path).read("t")
    number = gguf.GGMLQuantizationType[kind]
    exact = gguf.quants.dequantize(gguf.quants.quantize(values, number), number)
    np.testing.assert_array_equal(found, exact)
    tolerance = {
        "F16": 2e-3,
        "BF16": 2e-2,
        "Q8_0": 0.02,
        "Q5_0": 0.25,
        "Q5_1": 0.2,
        "Q4_0": 0.5,
        "Q4_1": 0.35,
    }
    assert np.abs(found - values).max() < tolerance[kind]


def test_float_types_are_exact(tmp_path: Path) -> None:
    values = np.random.default_rng(1).standard_normal((5, 7))
    file = open_bytes(
        tmp_path,
        raw_gguf(
            [
                ("f32", (5, 7), 0, values.astype("<f4").tobytes()),
                ("f64", (5, 7), 28, values.astype("<f8").tobytes()),
                ("f16", (5, 7), 1, values.astype("<f2").tobytes()),
            ]
        ),
    )
    np.testing.assert_array_equal(file.read("f32"), values.astype(np.float32))
    np.testing.assert_array_equal(file.read("f64"), values.astype(np.float32))
    np.testing.assert_array_equal(file.read("f16"), values.astype(np.float16).astype(np.float32))


def test_a_tensor_larger_than_a_chunk_is_whole(tmp_path: Path) -> None:
    rows, width = CHUNK_ELEMENTS // 512 + 3, 1024
    values = np.random.default_rng(2).standard_normal((rows, width)).astype(np.float32)
    path = write_gguf(tmp_path / "m.gguf", "llama", {}, {"t": values}, "Q8_0")
    assert rows * width > 2 * CHUNK_ELEMENTS
    number = gguf.GGMLQuantizationType.Q8_0
    expected = gguf.quants.dequantize(gguf.quants.quantize(values, number), number)
    np.testing.assert_array_equal(GGUFFile(path).read("t"), expected)


def test_metadata_of_every_type(tmp_path: Path) -> None:
    scalars: dict[str, tuple[int, str, Any]] = {
        "u8": (0, "<B", 200),
        "i8": (1, "<b", -100),
        "u16": (2, "<H", 60000),
        "i16": (3, "<h", -30000),
        "u32": (4, "<I", 4_000_000_000),
        "i32": (5, "<i", -2_000_000_000),
        "f32": (6, "<f", 0.5),
        "bool": (7, "<?", True),
        "u64": (10, "<Q", 1 << 60),
        "i64": (11, "<q", -(1 << 60)),
        "f64": (12, "<d", 0.1),
    }
    values = {
        key: struct.pack("<I", kind) + struct.pack(form, value)
        for key, (kind, form, value) in scalars.items()
    }
    values["text"] = struct.pack("<I", 8) + string("héllo")
    values["texts"] = struct.pack("<IIQ", 9, 8, 3) + string("a") + string("") + string("ü")
    values["numbers"] = struct.pack("<IIQ3i", 9, 5, 3, 7, -8, 9)
    values["nested"] = (
        struct.pack("<IIQ", 9, 9, 2) + struct.pack("<IQ2B", 0, 2, 1, 2) + struct.pack("<IQB", 0, 1, 3)
    )
    metadata = open_bytes(tmp_path, raw_gguf([], values)).metadata
    assert {key: metadata[key] for key in scalars} == {key: value for key, (_, _, value) in scalars.items()}
    assert metadata["text"] == "héllo"
    assert metadata["texts"] == ["a", "", "ü"]
    assert metadata["numbers"].tolist() == [7, -8, 9]
    assert [part.tolist() for part in metadata["nested"]] == [[1, 2], [3]]


F32 = np.arange(32, dtype="<f4").tobytes()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "0 bytes"),
        (b"GGUF", "4 bytes"),
        (b"\x80\x02ckpt" + bytes(40), "no GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "metadata entries"),
        (raw_gguf([], {"k": struct.pack("<I", 8) + struct.pack("<Q", 1 << 62)}), "ends inside"),
        (raw_gguf([], {"k": struct.pack("<IIQ", 9, 4, 1 << 61)}), "values in k"),
        (raw_gguf([], {"k": struct.pack("<IIQ", 9, 8, 1 << 50)}), "strings in k"),
        (raw_gguf([], {"k": struct.pack("<IIQ", 9, 8, 1) + struct.pack("<Q", 1 << 63)}), "ends inside k"),
        (raw_gguf([], {"k": struct.pack("<I", 99)}), "unknown type 99"),
        (raw_gguf([], {"k": struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9}), "nested too deeply"),
        (raw_gguf([], {"k": struct.pack("<I", 8) + string(b"\xff\xfe")}), "not UTF-8"),
        (raw_gguf([], {"general.alignment": struct.pack("<II", 4, 0)}), "alignment"),
        (raw_gguf([], {"general.alignment": struct.pack("<II", 4, 48)}), "alignment"),
        (raw_gguf([("t", (32,), 0, F32), ("t", (32,), 0, F32)]), "appears twice"),
        (raw_gguf([("t", (1, 1, 1, 1, 32), 0, F32)]), "5 dimensions"),
        (raw_gguf([("t", (0,), 0, b"")]), "shape"),
        (raw_gguf([("t", (33,), TYPE_IDS["Q8_0"], bytes(68))]), "shape"),
        (raw_gguf([("t", (1 << 40, 1 << 40), 0, F32)]), "outside"),
        (raw_gguf([("t", (64,), 0, F32)]), "outside"),
    ],
)
def test_damage_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    with pytest.raises(CorruptModelError, match=said):
        open_bytes(tmp_path, content)


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    content = raw_gguf([("a", (32,), 0, F32), ("b", (32,), 0, F32)])
    second = content.index(string("b")) + len(string("b")) + 4 + 8 + 4
    broken = content[:second] + struct.pack("<Q", 64) + content[second + 8 :]
    with pytest.raises(CorruptModelError, match="'a' and 'b' overlap"):
        open_bytes(tmp_path, broken)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (raw_gguf([("blk.0.odd", (256,), 16, bytes(66))]), r"'blk.0.odd' has type IQ2_XXS"),
        (raw_gguf([("t", (32,), 26, F32)]), "type I32"),
        (raw_gguf([("t", (32,), 777, F32)]), "type number 777"),
    ],
)
def test_the_unsupported_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        open_bytes(tmp_path, content)


@pytest.fixture(scope="module")
def tiny_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    options = {"hidden_size": 32, "intermediate_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
    return write_tiny_gguf(path, quantization="Q8_0", **options).read_bytes()


def read_everything(path: Path) -> None:
    file = GGUFFile(path)
    try:
        for name in file.tensors:
            assert np.isfinite(file.read(name)).size
    finally:
        file.close()


def test_every_truncation_is_noticed(tmp_path: Path, tiny_bytes: bytes) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny_bytes)
    data_end = max(tensor.offset + tensor.num_bytes for tensor in GGUFFile(path).tensors.values())
    rng = np.random.default_rng(3)
    for length in [*range(200), *rng.integers(200, data_end, 400).tolist(), data_end - 1]:
        path.write_bytes(tiny_bytes[:length])
        with pytest.raises(CorruptModelError):
            GGUFFile(path)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_mutation_does_worse_than_a_named_error(
    tmp_path: Path, tiny_bytes: bytes, data: st.DataObject
) -> None:
    """Bytes anywhere in the header are overwritten: whatever results is read, or refused by a model error."""
    content = bytearray(tiny_bytes)
    for _ in range(data.draw(st.integers(1, 4))):
        where = data.draw(st.one_of(st.integers(0, 64), st.integers(0, len(content) - 9)))
        number = data.draw(
            st.sampled_from([0, 1, 0xFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1, (1 << 64) - 1])
        )
        size = data.draw(st.sampled_from([1, 4, 8]))
        content[where : where + size] = (number & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    path = tmp_path / "mutated.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        read_everything(path)
    except (CorruptModelError, UnsupportedModelError):
        pass
    finally:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak_bytes < 64 << 20
