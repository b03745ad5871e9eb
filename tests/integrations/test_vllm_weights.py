"""A digest of the files of weights: another one whenever they are others, at the same path and with the same times."""
from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shmkv.integrations.vllm import weights
from shmkv.integrations.vllm.weights import PLACE_NBYTES, PLACES, UNKNOWN, Adapters, digest_of, found_in, weight_files, weights_of

TENSORS, NBYTES = 8, 1 << 16
COMMIT, BLOB = "c" * 40, "b" * 64


def safetensors(path: Path, seed: int = 0) -> Path:
    """A file of that format, of random bytes."""
    offsets = [[number * NBYTES, (number + 1) * NBYTES] for number in range(TENSORS)]
    header = json.dumps({f"layer.{number}": {"dtype": "U8", "shape": [NBYTES], "data_offsets": each}
                         for number, each in enumerate(offsets)}).encode()
    data = np.random.default_rng(seed).bytes(TENSORS * NBYTES)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder of a model in two files, with an index."""
    folder = tmp_path / "model"
    for number in range(2):
        safetensors(folder / f"model-{number}.safetensors", number)
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "config.json").write_text("{}")
    return folder


def with_its_times(change: Callable[[Path], object], path: Path) -> None:
    """Change a file so that its times tell nothing."""
    status = path.stat()
    change(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        byte = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), at)


@pytest.mark.parametrize("change", [
    lambda path: safetensors(path, 7), lambda path: flip(path, 10), lambda path: flip(path, path.stat().st_size - 1),
    lambda path: flip(path, path.stat().st_size - PLACE_NBYTES), lambda path: path.write_bytes(path.read_bytes() + b"\0")])
def test_other_weights_at_the_same_path_have_another_digest(model: Path, change: Callable[[Path], object]) -> None:
    before = weights_of(str(model))
    assert weights_of(str(model)) == before
    with_its_times(change, model / "model-1.safetensors")
    assert weights_of(str(model)) != before


def test_bytes_between_the_places_that_are_read_are_told_by_the_time_of_the_change(model: Path) -> None:
    path = model / "model-0.safetensors"
    before = weights_of(str(model))
    data = path.stat().st_size - TENSORS * NBYTES
    step = (TENSORS * NBYTES - PLACE_NBYTES) // (PLACES // 3 - 1)
    assert step > PLACE_NBYTES
    with_its_times(lambda path: flip(path, data + (step + PLACE_NBYTES) // 2 + 1), path)
    assert weights_of(str(model)) == before, "or there is no such place"
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    assert weights_of(str(model)) != before


def test_each_layer_of_a_model_is_looked_at(model: Path) -> None:
    """A training changes all numbers of what it changes."""
    path, before = model / "model-0.safetensors", weights_of(str(model))
    header = path.stat().st_size - TENSORS * NBYTES
    content = path.read_bytes()
    for tensor in range(TENSORS):
        begin = header + tensor * NBYTES
        trained = content[:begin] + bytes(byte ^ 1 for byte in content[begin:begin + NBYTES]) + content[begin + NBYTES:]
        with_its_times(lambda path, trained=trained: path.write_bytes(trained), path)      # type: ignore[misc]
        assert weights_of(str(model)) != before
    with_its_times(lambda path: path.write_bytes(content), path)
    assert weights_of(str(model)) == before


def test_a_link_that_leads_to_other_weights(model: Path, tmp_path: Path) -> None:
    other, link = tmp_path / "other", tmp_path / "link"
    safetensors(other / "model.safetensors", 3)
    link.symlink_to(model)
    before = weights_of(str(link))
    assert before == weights_of(str(model))
    link.unlink()
    link.symlink_to(other)
    assert weights_of(str(link)) == weights_of(str(other)) != before


def test_a_copy_with_its_times_is_alike_and_other_names_or_an_other_index_are_not(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    before = weights_of(str(model))
    assert weights_of(str(copy)) == before
    (copy / "tokenizer.json").write_text("{}")
    assert weights_of(str(copy)) == before, "what is no weights is left out"
    with_its_times(lambda path: path.write_text("[]"), copy / "model.safetensors.index.json")
    assert weights_of(str(copy)) != before
    os.rename(model / "model-0.safetensors", model / "model-2.safetensors")
    assert weights_of(str(model)) != before


@pytest.mark.parametrize("name", ["model.gguf", "pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_files_of_other_formats(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(os.urandom(100_000))
    assert weight_files(tmp_path) == [path]
    assert weights_of(str(path)) == weights_of(str(tmp_path)) != UNKNOWN
    before = weights_of(str(path))
    with_its_times(lambda path: flip(path, 99_999), path)
    assert weights_of(str(path)) != before


@pytest.mark.parametrize("content", [b"", b"1234567", (1 << 60).to_bytes(8, "little") + b"short", b"\0" * 8])
def test_files_that_are_not_what_their_name_says(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert len(weights_of(str(tmp_path))) == 32


def test_weights_that_cannot_be_looked_at_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in (str(tmp_path), str(tmp_path / "nothing"), "nobody/has-this-model", "s3://bucket/model", "~nobody/x", "x" * 300):
        caplog.clear()
        assert [weights_of(name) for _ in range(2)] == [UNKNOWN] * 2
        assert len(caplog.records) == 1
        assert f"the files of the weights of {name!r} cannot be looked at" in caplog.text


def hub(cache: Path, blob: str, seed: int) -> Path:
    """A hub's cache with one model, as it is downloaded: names that link to blobs."""
    repository = cache / "models--some--model"
    path = safetensors(repository / "blobs" / blob, seed)
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs") / blob)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    os.utime(path, ns=(seed, seed))
    return snapshot


def test_two_downloads_of_a_model_are_alike(tmp_path: Path) -> None:
    one, other, third = hub(tmp_path / "1", BLOB, 1), hub(tmp_path / "2", BLOB, 1), hub(tmp_path / "3", "d" * 64, 1)
    os.utime(other / "model.safetensors", ns=(5, 5))
    assert weights_of(str(one)) == weights_of(str(other)) != weights_of(str(third))


def test_the_name_of_a_hub_is_what_lies_in_its_cache(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    snapshot = hub(tmp_path, BLOB, 1)
    assert found_in("some/model", None, str(tmp_path)) == snapshot
    assert found_in("some/model", COMMIT, str(tmp_path)) == snapshot
    assert found_in("some/other", None, str(tmp_path)) is None
    assert weights_of("some/model", None, str(tmp_path)) == digest_of(weight_files(snapshot))


def test_an_adapter_that_changes_is_not_shared_any_more(tmp_path: Path, caplog: pytest.LogCaptureFixture,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    path = safetensors(tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 16}')
    adapters, made = Adapters(), digest_of(weight_files(tmp_path))
    with monkeypatch.context() as patched:
        first = adapters.weights_of(str(tmp_path))
        patched.setattr(weights, "digest_of", lambda _: pytest.fail("made again for a request"))
        assert [adapters.weights_of(str(tmp_path)) for _ in range(3)] == [first] * 3 == [made] * 3
    safetensors(path, 1)
    assert [adapters.weights_of(str(tmp_path)) for _ in range(2)] == [None] * 2
    assert caplog.text.count("have changed") == 1
    # Another engine, which begins with the new files, has another digest; so has one with another scale.
    second = Adapters().weights_of(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 32}')
    assert len({made, second, Adapters().weights_of(str(tmp_path)), None}) == 4


def test_an_adapter_that_is_not_there_yet_is_looked_at_again(tmp_path: Path) -> None:
    adapters, folder = Adapters(), tmp_path / "later"
    assert adapters.weights_of(str(folder)) == UNKNOWN
    safetensors(folder / "adapter_model.safetensors")
    assert adapters.weights_of(str(folder)) == digest_of(weight_files(folder))
