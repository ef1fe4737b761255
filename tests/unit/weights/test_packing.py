"""Packed models: what is in them, and that no accident leaves a wrong one behind."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from enginehouse.errors import CorruptModelError, EnginehouseError, ModelError, SourceError
from enginehouse.runtime.models import architecture_for, load_tensor
from enginehouse.runtime.ops.layout import LinearWeight, unpack_linear
from enginehouse.runtime.packed import PackedModel, checksum, encode_manifest, open_packed, read_manifest
from enginehouse.runtime.quantization import Precision
from enginehouse.runtime.sources import cache as cache_files
from enginehouse.runtime.sources import hashes
from enginehouse.runtime.tokenizer import Tokenizer
from enginehouse.runtime.weights import packer, prepare, prepare_model
from enginehouse.runtime.weights.checkpoint import open_checkpoint
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import llama_config, write_tiny_llama

PRECISIONS: list[Precision] = ["int8", "fp32"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "tiny", seed=3)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def leftovers(cache: Path) -> list[Path]:
    return [*cache.rglob(".incomplete-*")]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_tensor_is_in_it(source: Path, precision: Precision) -> None:
    prepared = prepare_model(str(source), precision)
    model = open_packed(prepared.path)
    assert model.precision == prepared.precision == precision
    checkpoint = open_checkpoint(source)
    architecture = architecture_for(checkpoint.config)
    config = architecture.config_from_hf(checkpoint.config)
    assert model.config == prepared.config == config
    for spec in architecture.tensors(config):
        weight, bias = load_tensor(spec, checkpoint, frozenset(checkpoint.names()), architecture.prefix)
        if spec.kind != "linear":
            np.testing.assert_array_equal(model.tensor(spec.name), weight)
            continue
        found, expected = model.linear(spec.name), LinearWeight.from_float(weight, precision, bias)
        np.testing.assert_array_equal(found.data, expected.data)
        assert (found.scale is None) == (expected.scale is None) == (precision == "fp32")
        if found.scale is not None:
            np.testing.assert_array_equal(found.scale, expected.scale)
        assert np.abs(unpack_linear(found) - weight).max() <= (0 if precision == "fp32" else 0.05)


def test_arrays_are_aligned_shared_and_read_only(source: Path) -> None:
    prepared = prepare_model(str(source), "int8")
    model = open_packed(prepared.path)
    weight = model.linear("layers.0.qkv")
    norm = model.tensor("final_norm")
    assert weight.scale is not None
    for array in (weight.data, weight.scale, norm):
        assert array.ctypes.data % 64 == 0
        assert not array.flags.writeable
        assert not array.flags.owndata
    maps = Path("/proc/self/maps")
    if maps.exists():
        lines = [
            line
            for line in maps.read_text().splitlines()
            if line.endswith(str(prepared.path / "weights.bin"))
        ]
        assert lines
        assert all(line.split()[1] == "r--s" for line in lines)


def test_biases_are_packed(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", architecture="qwen2", seed=2)
    checkpoint = open_checkpoint(path)
    model = open_packed(prepare_model(str(path), "int8").path)
    expected = [checkpoint.read(f"model.layers.1.self_attn.{part}_proj.bias") for part in "qkv"]
    found = model.linear("layers.1.qkv").bias
    assert found is not None
    np.testing.assert_array_equal(
        found[: model.linear("layers.1.qkv").out_features], np.concatenate(expected)
    )
    assert model.linear("layers.1.down").bias is None


def test_gguf_and_safetensors_of_one_model_pack_to_the_same_weights(tmp_path: Path, source: Path) -> None:
    gguf = write_tiny_gguf(tmp_path / "m.gguf", seed=3)
    from_gguf, from_safetensors = (prepare_model(str(path), "int8").path for path in (gguf, source))
    assert from_gguf != from_safetensors
    assert (from_gguf / "weights.bin").read_bytes() == (from_safetensors / "weights.bin").read_bytes()
    text = "héllo the world 🎉 <|im_end|>"
    first, second = (Tokenizer.load(path) for path in (from_gguf, from_safetensors))
    for parse_special in (True, False):
        assert first.encode(text, add_special=False, parse_special=parse_special) == second.encode(
            text, add_special=False, parse_special=parse_special
        )


def test_packing_in_parts_changes_no_byte(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for precision in PRECISIONS:
        path = prepare_model(str(source), precision).path
        whole = contents(path)
        (path / "manifest.json").unlink()
        with monkeypatch.context() as patch:
            patch.setattr(packer, "CHUNK_ELEMENTS", 1)
            assert contents(prepare_model(str(source), precision).path) == whole


def test_a_second_start_does_nothing_again(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages: list[str] = []
    first = prepare_model(str(source), "int8", lambda what, _: stages.append(what))
    assert any("packing" in stage for stage in stages)

    def must_not_happen(*_: Any) -> str:
        raise AssertionError("the source was read again")

    monkeypatch.setattr(hashes, "compute_sha256", must_not_happen)
    stages.clear()
    assert prepare_model(str(source), "int8", lambda what, _: stages.append(what)) == first
    assert stages == []


def test_a_cache_that_may_only_be_read_still_serves(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare_model(str(source), "int8")
    shutil.rmtree(cache / "hashes")
    shutil.rmtree(cache / "locks")

    def refused(*_: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(cache))

    monkeypatch.setattr(hashes, "write_atomically", refused)
    monkeypatch.setattr(Path, "mkdir", refused)
    assert prepare_model(str(source), "int8") == first


def test_a_changed_source_is_packed_anew(source: Path) -> None:
    first = prepare_model(str(source), "int8")
    write_tiny_llama(source, seed=4)
    second = prepare_model(str(source), "int8")
    assert second.path != first.path
    assert (second.path / "weights.bin").read_bytes() != (first.path / "weights.bin").read_bytes()


def test_a_packed_directory_is_a_source_too(source: Path, tmp_path: Path) -> None:
    packed = prepare_model(str(source), "fp32").path
    elsewhere = packed.rename(tmp_path / "elsewhere")
    prepared = prepare_model(str(elsewhere), "int8")
    assert (prepared.path, prepared.precision) == (elsewhere, "fp32")
    (elsewhere / "weights.bin").write_bytes(bytes(prepared.packed_bytes))
    with pytest.raises(CorruptModelError):
        prepare_model(str(elsewhere), "int8")


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << (position % 8)
    path.write_bytes(content)


def truncate(path: Path, position: int) -> None:
    path.write_bytes(path.read_bytes()[:position])


@pytest.mark.parametrize("name", ["weights.bin", "manifest.json", "tokenizer.json", "tokenizer_meta.json"])
@pytest.mark.parametrize("damage", [flip, truncate])
def test_damage_anywhere_is_noticed_and_repaired(
    source: Path, name: str, damage: Callable[[Path, int], None], caplog: pytest.LogCaptureFixture
) -> None:
    path = prepare_model(str(source), "int8").path
    whole = contents(path)
    rng = np.random.default_rng(5)
    for position in [0, len(whole[name]) - 1, *rng.integers(0, len(whole[name]), 10).tolist()]:
        damage(path / name, position)
        caplog.clear()
        if name in ("weights.bin", "manifest.json"):
            with pytest.raises(CorruptModelError):
                open_packed(path)
        with caplog.at_level(logging.WARNING):
            assert prepare_model(str(source), "int8").path == path
        assert "made anew" in caplog.text
        assert contents(path) == whole


def test_missing_parts_are_noticed_and_repaired(source: Path, cache: Path) -> None:
    path = prepare_model(str(source), "int8").path
    whole = contents(path)
    for name in whole:
        (path / name).unlink()
        prepare_model(str(source), "int8")
        assert contents(path) == whole
    for file in path.iterdir():
        file.unlink()
    prepare_model(str(source), "int8")
    assert contents(path) == whole
    assert leftovers(cache) == []


def test_the_checksum_depends_on_order_and_length() -> None:
    big = np.zeros(1 << 18, np.uint64)
    big[0], big[-1] = 1, 2
    assert checksum(big) != checksum(big[::-1].copy())
    assert checksum(big) != checksum(np.append(big, np.uint64(0)))


def test_what_another_version_packed_is_packed_anew(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = prepare_model(str(source), "int8").path
    whole = contents(path)
    manifest = read_manifest(path)
    tensors = {name: entry for name, entry in manifest.tensors.items() if name != "final_norm"}
    for change in ({"layout_version": 0}, {"tensors": tensors}, {"hf_config": llama_config(max_context=64)}):
        fields = {name: getattr(manifest, name) for name in manifest.__struct_fields__}
        (path / "manifest.json").write_bytes(encode_manifest(type(manifest)(**(fields | change))))
        caplog.clear()
        prepare_model(str(source), "int8")
        assert "another version" in caplog.text
        assert contents(path) == whole


CHILD = """
import os, signal, sys, time
from pathlib import Path
from enginehouse.runtime.weights import packer, prepare_model
source, mode, sign = sys.argv[1], sys.argv[2], Path(sys.argv[3])
def on_progress(what, fraction):
    if mode == "die" and what.startswith("packing") and fraction > 0.4:
        os.kill(os.getpid(), signal.SIGKILL)
if mode == "race":
    pack = packer.pack
    def slow_pack(*args, **kwargs):
        print("packs", flush=True)
        time.sleep(0.5)
        return pack(*args, **kwargs)
    packer.pack = slow_pack
    print("ready", flush=True)
    while not sign.exists():
        time.sleep(0.005)
print(prepare_model(source, "int8", on_progress).path)
"""


def child(source: Path, mode: str, sign: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, str(source), mode, str(sign)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_two_processes_pack_once(source: Path, tmp_path: Path, cache: Path) -> None:
    sign = tmp_path / "go"
    processes = [child(source, "race", sign) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    sign.touch()
    outputs = [process.communicate(timeout=60)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sum(output.count("packs") for output in outputs) == 1
    assert outputs[0][-1] == outputs[1][-1]
    open_packed(outputs[0][-1])
    assert leftovers(cache) == []


def test_a_process_killed_while_packing_leaves_nothing_wrong(
    source: Path, tmp_path: Path, cache: Path
) -> None:
    process = child(source, "die", tmp_path / "unused")
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert leftovers(cache)
    path = prepare_model(str(source), "int8").path
    open_packed(path)
    assert leftovers(cache) == []


def test_what_others_abandoned_long_ago_is_removed(source: Path, cache: Path) -> None:
    fresh, old = (cache / "packed" / f".incomplete-other-int8-v1.1.{name}" for name in ("fresh", "old"))
    for path in (fresh, old):
        path.mkdir(parents=True)
        (path / "weights.bin").touch()
    os.utime(old, (0, 0))
    prepare_model(str(source), "int8")
    assert leftovers(cache) == [fresh]


def test_a_full_disk_is_said_before_anything_is_written(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = cache_files.shutil.disk_usage(source)
    monkeypatch.setattr(cache_files.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(
        SourceError,
        match=r"disk is full: 136\.\d kB are needed for .*packed, and 1.0 kB are free.*ENGINEHOUSE_CACHE",
    ):
        prepare_model(str(source), "int8")
    assert leftovers(cache) == []


def test_a_disk_that_fills_while_packing_is_said_and_cleaned(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullDisk:
        def __init__(self, file: BinaryIO) -> None:
            self.file, self.left = file, 50_000

        def write(self, content: Any) -> int:
            self.left -= memoryview(content).nbytes
            if self.left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self.file.write(content)

    writer = packer._ArrayWriter
    with monkeypatch.context() as patch:
        patch.setattr(packer, "_ArrayWriter", lambda file: writer(FullDisk(file)))  # type: ignore[arg-type]
        with pytest.raises(SourceError, match=r"disk is full.*models rm"):
            prepare_model(str(source), "int8")
    assert leftovers(cache) == []
    assert not any(prepare.packed_dir().iterdir())
    open_packed(prepare_model(str(source), "int8").path)


def test_a_cache_that_cannot_be_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ENGINEHOUSE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(SourceError, match="ENGINEHOUSE_CACHE"):
        prepare_model(str(source), "int8")


@pytest.mark.parametrize(
    "change", [{"num_hidden_layers": 10**9}, {"intermediate_size": 1 << 40}, {"vocab_size": 321}]
)
def test_a_configuration_larger_than_the_weights_is_refused(
    tmp_path: Path, cache: Path, change: dict[str, int]
) -> None:
    directory = write_tiny_llama(tmp_path / "m")
    (directory / "config.json").write_text(json.dumps(llama_config() | change))
    with pytest.raises(CorruptModelError):
        prepare_model(str(directory), "int8")
    assert leftovers(cache) == []


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_json_does_worse_than_a_named_error(source: Path, data: st.DataObject) -> None:
    """One value anywhere in a model's JSON files is replaced by another: packed, or refused by a model error."""
    path = source / data.draw(st.sampled_from(sorted(file.name for file in source.glob("*.json"))))
    original = path.read_text()
    document = json.loads(original)
    node, keys = document, sorted(document)
    while True:
        key = data.draw(st.sampled_from(keys))
        inner = node[key]
        if not isinstance(inner, dict | list) or not inner or data.draw(st.booleans()):
            break
        node, keys = inner, sorted(inner) if isinstance(inner, dict) else list(range(len(inner)))
    odd = [None, True, -1, 3, 2**63, 0.5, float("nan"), "", "silu", [], {}, [1], {"a": 1}, [{}]]
    node[key] = data.draw(st.sampled_from(odd))
    path.write_text(json.dumps(document))
    with contextlib.suppress(ModelError):
        prepare_model(str(source), "int8")
    path.write_text(original)


def test_the_worker_imports_nothing_that_reads_other_formats() -> None:
    code = (
        "import sys, enginehouse.runtime.packed; "
        "print(*[m for m in ('gguf', 'huggingface_hub', 'tokenizers', 'jinja2', 'filelock', 'httpx2', 'rich') "
        "if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "\n"
    )


def test_a_name_that_is_not_there(source: Path) -> None:
    model: PackedModel = open_packed(prepare_model(str(source), "int8").path)
    with pytest.raises(EnginehouseError, match=r"no tensor 'layers\.9\.qkv'"):
        model.linear("layers.9.qkv")
