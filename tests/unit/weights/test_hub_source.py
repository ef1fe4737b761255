"""Models from a server that speaks the Hugging Face hub's protocol."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import file_download

from enginehouse.errors import ChecksumError, CorruptModelError, SourceError, UnsupportedModelError
from enginehouse.runtime.packed import open_packed
from enginehouse.runtime.sources import fetch_source, parse_source
from enginehouse.runtime.weights import prepare_model
from enginehouse.runtime.weights.inventory import cached_models, find_cached, remove_cached
from tests.support.local_servers import Hub, model_hub
from tests.support.tiny_encoders import encoder_named, write_tiny_encoder
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import write_tiny_llama


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with model_hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        for name in ("HTTP_PROXY", "http_proxy", "HF_HUB_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        # The library waits a second before it goes on with an interrupted transfer.
        impatient = SimpleNamespace(**(vars(time) | {"sleep": lambda _: None}))
        monkeypatch.setattr(file_download, "time", impatient)
        yield running


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def tiny(tmp_path: Path) -> dict[str, bytes]:
    return files_of(write_tiny_llama(tmp_path / "tiny", seed=1))


def fetch(text: str, **options: bool) -> Path:
    return fetch_source(parse_source(text), **options)


def test_only_the_needed_files_are_fetched_and_only_once(hub: Hub, tiny: dict[str, bytes]) -> None:
    extra = {
        "README.md": b"hello",
        "pytorch_model.bin": b"pickle",
        "onnx/model.onnx": b"x",
        "original/consolidated.safetensors": b"x",
    }
    commit = hub.add("org/tiny", tiny | extra)
    path = fetch("hf:org/tiny")
    assert files_of(path) == tiny
    assert path.name == commit
    requests = dict(hub.requests)
    assert requests["GET model.safetensors"] == 1
    assert fetch("hf:org/tiny") == path
    assert dict(hub.requests) == requests
    open_packed(prepare_model("hf:org/tiny", "int8").path)
    assert dict(hub.requests) == requests


def test_shards_follow_the_index(hub: Hub, tmp_path: Path) -> None:
    sharded = files_of(write_tiny_llama(tmp_path / "m", num_shards=3))
    hub.add("org/sharded", sharded | {"model.fp16.safetensors": b"another copy"})
    assert files_of(fetch("hf:org/sharded")) == sharded


def test_an_encoder_comes_with_its_pooling(hub: Hub, tmp_path: Path) -> None:
    directory = write_tiny_encoder(encoder_named("bert-mean-norm"), tmp_path / "encoder")
    files = {
        str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }
    hub.add("org/encoder", files | {"README.md": b"hello", "onnx/model.onnx": b"x", "vocab.txt": b"x"})
    encoder = prepare_model("hf:org/encoder", "fp32").config.encoder
    assert encoder is not None
    assert (encoder.pooling, encoder.normalize, encoder.max_input) == ("mean", True, 64)
    assert not {"GET README.md", "GET onnx/model.onnx", "GET vocab.txt"} & set(hub.requests)


def test_other_pooling_is_another_model(tmp_path: Path) -> None:
    directory = write_tiny_encoder(encoder_named("bert-mean-norm"), tmp_path / "encoder")
    paths = {prepare_model(str(directory), "fp32").path}
    for name, text in (
        ("sentence_bert_config.json", '{"max_seq_length": 32}'),
        ("1_Pooling/config.json", '{"pooling_mode_cls_token": true}'),
        ("modules.json", '[{"path": "", "type": "sentence_transformers.models.Transformer"}]'),
    ):
        (directory / name).write_text(text)
        paths.add(prepare_model(str(directory), "fp32").path)
    assert len(paths) == 4
    for text in ("{}", "[1]", "[", '[{"type": "x.Pooling", "path": "../elsewhere"}]'):
        (directory / "modules.json").write_text(text)
        with pytest.raises(CorruptModelError, match=r"modules\.json"):
            prepare_model(str(directory), "fp32")


def test_a_gguf_file_of_a_repository(hub: Hub, tmp_path: Path) -> None:
    content = write_tiny_gguf(tmp_path / "m.gguf").read_bytes()
    hub.add("org/gguf", {"m-Q8_0.gguf": content, "m-F32.gguf": b"other", "config.json": b"{}"})
    assert fetch("hf:org/gguf/m-Q8_0.gguf").read_bytes() == content
    assert hub.requests["GET m-F32.gguf"] == 0
    with pytest.raises(SourceError, match=r"no m-Q2\.gguf; it has m-Q8_0\.gguf, m-F32\.gguf"):
        fetch("hf:org/gguf/m-Q2.gguf")
    with pytest.raises(SourceError, match=r"name one: hf:org/gguf/m-Q8_0\.gguf"):
        fetch("hf:org/gguf")


def test_revisions(hub: Hub, tiny: dict[str, bytes], tmp_path: Path) -> None:
    newer = files_of(write_tiny_llama(tmp_path / "newer", seed=2))
    old = hub.add("org/tiny", tiny)
    hub.add("org/tiny", tiny, revision="v1")
    assert files_of(fetch("hf:org/tiny")) == tiny
    hub.add("org/tiny", newer)
    hub.add("org/tiny", newer, revision="refs/pr/7")
    assert files_of(fetch("hf:org/tiny@v1")) == tiny
    assert files_of(fetch(f"hf:org/tiny@{old}")) == tiny
    assert files_of(fetch("hf:org/tiny@refs/pr/7")) == newer
    assert files_of(fetch("hf:org/tiny")) == tiny, "a start does not ask the hub again"
    assert files_of(fetch("hf:org/tiny", refresh=True)) == newer
    assert files_of(fetch("hf:org/tiny")) == newer
    with pytest.raises(SourceError, match="no revision 'v9'"):
        fetch("hf:org/tiny@v9")


def test_an_interrupted_transfer_goes_on(
    hub: Hub, tiny: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The library goes on after the last whole chunk; one of 10 MB would be larger than our file.
    monkeypatch.setattr(file_download.constants, "DOWNLOAD_CHUNK_SIZE", 4096)
    hub.add("org/tiny", tiny)
    hub.faults.cuts += [30_000, 10_000, 50_000]
    assert files_of(fetch("hf:org/tiny")) == tiny
    assert hub.faults.cuts == []
    assert hub.requests["resumed"] == 3


def test_a_transfer_that_never_ends_well_is_an_error_and_the_next_try_starts_clean(
    hub: Hub, tiny: dict[str, bytes], tmp_path: Path
) -> None:
    hub.add("org/tiny", tiny)
    hub.faults.cuts += [0] * 100
    with pytest.raises(SourceError, match=r"hf:org/tiny.*(network|try again)"):
        fetch("hf:org/tiny")
    assert cached_models() == []
    assert not list((tmp_path / "hub").rglob("*.incomplete"))
    hub.faults.cuts.clear()
    assert files_of(fetch("hf:org/tiny")) == tiny


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_content_with_another_hash_is_refused_and_not_kept(
    hub: Hub, tiny: dict[str, bytes], name: str
) -> None:
    hub.add("org/tiny", tiny)
    hub.listed_instead[name] = tiny[name][:-1] + b"?"
    for _ in range(2):
        with pytest.raises(ChecksumError, match=f"{name} does not have the hash"):
            fetch("hf:org/tiny")
    del hub.listed_instead[name]
    assert files_of(fetch("hf:org/tiny")) == tiny


def test_content_shorter_than_announced_is_refused(
    hub: Hub, tiny: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support import local_servers

    hub.add("org/tiny", tiny)
    whole = local_servers._HubHandler.answer

    def wrong_length(self, status, body=b"", headers=None, size=None):  # type: ignore[no-untyped-def]
        if self.command == "HEAD" and body[8:9] == b"{" and len(body) > 4096:
            size = len(body) + 5
        whole(self, status, body, headers, size)

    with monkeypatch.context() as patch:
        patch.setattr(local_servers._HubHandler, "answer", wrong_length)
        with pytest.raises(SourceError, match=r"broke off.*try again"):
            fetch("hf:org/tiny")
    assert files_of(fetch("hf:org/tiny")) == tiny


FETCH = """
import sys
from enginehouse.runtime.sources import fetch_source, parse_source
print(fetch_source(parse_source(sys.argv[1])))
"""


def test_two_processes_fetch_once(hub: Hub, tiny: dict[str, bytes]) -> None:
    hub.add("org/tiny", tiny)
    hub.faults.bytes_per_s = 400_000
    command = [sys.executable, "-c", FETCH, "hf:org/tiny"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0] == outputs[1]
    assert hub.requests["GET model.safetensors"] == 1
    assert hub.requests["info"] == 1


def test_a_process_killed_in_the_middle(hub: Hub, tiny: dict[str, bytes], tmp_path: Path) -> None:
    hub.add("org/tiny", tiny)
    hub.faults.bytes_per_s = 200_000
    process = subprocess.Popen([sys.executable, "-c", FETCH, "hf:org/tiny"])
    while hub.requests["GET model.safetensors"] == 0:
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert cached_models() == []
    hub.faults.bytes_per_s = None
    assert files_of(fetch("hf:org/tiny")) == tiny


def test_progress_grows_over_all_files(hub: Hub, tiny: dict[str, bytes]) -> None:
    hub.add("org/tiny", tiny | {"tokenizer.model": bytes(100_000)})
    seen: dict[str, list[float]] = {}
    fetch_source(parse_source("hf:org/tiny"), lambda what, done: seen.setdefault(what, []).append(done))
    label = next(what for what in seen if what.startswith("downloading hf:org/tiny"))
    assert seen[label] == sorted(seen[label])
    assert seen[label][-1] == 1
    assert len({done for done in seen[label] if 0 < done < 1}) >= 2


def test_what_is_not_there_is_named(hub: Hub, tiny: dict[str, bytes]) -> None:
    with pytest.raises(SourceError, match=r"no model 'org/nothing'.*HF_TOKEN"):
        fetch("hf:org/nothing")
    hub.add("org/pickled", {"config.json": b"{}", "pytorch_model.bin": b"x"})
    with pytest.raises(UnsupportedModelError, match=r"only pickled weights \(pytorch_model\.bin\)"):
        fetch("hf:org/pickled")
    hub.add("org/data", {"README.md": b"x"})
    with pytest.raises(SourceError, match=r"has no model\.safetensors"):
        fetch("hf:org/data")
    hub.add("org/gated", tiny)
    hub.repositories["org/gated"].gated = True
    with pytest.raises(SourceError, match="gated: accept its terms"):
        fetch("hf:org/gated")


def test_without_network(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(SourceError, match=r"cannot fetch hf:org/tiny from http://127\.0\.0\.1:9.*network"):
        fetch("hf:org/tiny")


def test_removing_takes_the_files_out_of_the_shared_cache(
    hub: Hub, tiny: dict[str, bytes], tmp_path: Path
) -> None:
    hub.add("org/tiny", tiny)
    hub.add("org/other", {"m.gguf": b"weights"})
    first, other = fetch("hf:org/tiny"), fetch("hf:org/other/m.gguf")
    prepare_model("hf:org/tiny", "int8")
    model = find_cached("hf:org/tiny")
    assert model.fetched_bytes == sum(map(len, tiny.values()))
    assert [copy.precision for copy in model.packed] == ["int8"]
    remove_cached(model)
    assert not first.exists()
    assert not (tmp_path / "hub" / "models--org--tiny").exists()
    assert other.read_bytes() == b"weights"
    assert [left.source for left in cached_models()] == ["hf:org/other/m.gguf"]


def test_removing_keeps_what_another_revision_shares(hub: Hub, tiny: dict[str, bytes]) -> None:
    hub.add("org/tiny", tiny)
    changed = tiny | {"generation_config.json": b"{}"}
    hub.add("org/tiny", changed, revision="v2")
    fetch("hf:org/tiny")
    second = fetch("hf:org/tiny@v2")
    remove_cached(find_cached("hf:org/tiny"))
    assert files_of(second) == changed
