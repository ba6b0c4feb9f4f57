"""The digest of a checkpoint: the same for the same weights anywhere, another for any change that training
makes.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from kvtier.clients import InvalidRequest
from kvtier.clients.weights import SAMPLE_BYTES, checkpoint_digest, find_checkpoint

TENSORS = {"model.embed": 40_000, "model.layers.0.k_proj": 100_000, "model.norm": 64}


def write_checkpoint(folder: Path, seed: int = 1, config: str = '{"rope_theta": 1e6}') -> Path:
    """Write a safetensors file of TENSORS (float32, random) and a config, by the format's specification."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config)
    (folder / "tokenizer.json").write_text("{}")
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, num_elements in TENSORS.items():
        header[name] = {
            "dtype": "F32",
            "shape": [num_elements],
            "data_offsets": [offset, offset + 4 * num_elements],
        }
        offset += 4 * num_elements
    packed = json.dumps(header).encode()
    data = np.random.default_rng(seed).random(offset // 4, np.float32).tobytes()
    (folder / "model.safetensors").write_bytes(len(packed).to_bytes(8, "little") + packed + data)
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model")


def test_the_same_weights_elsewhere_have_the_same_digest(checkpoint: Path, tmp_path: Path) -> None:
    first = checkpoint_digest(checkpoint)
    assert len(first) == 32
    assert checkpoint_digest(shutil.copytree(checkpoint, tmp_path / "copy")) == first
    (checkpoint / "tokenizer.json").write_text('{"changed": true}')  # does not change the KV of given tokens
    (checkpoint / "README.md").write_text("words")
    assert checkpoint_digest(checkpoint) == first
    assert checkpoint_digest(checkpoint, whole=True) != first  # never taken for each other


def test_other_weights_of_the_same_shapes_differ(checkpoint: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "fine-tuned", seed=2)
    sizes = [(file.name, file.stat().st_size) for file in sorted(checkpoint.iterdir())]
    assert sizes == [(file.name, file.stat().st_size) for file in sorted(other.iterdir())]
    assert checkpoint_digest(other) != checkpoint_digest(checkpoint)


@pytest.mark.parametrize("name", TENSORS)
def test_one_merged_tensor_is_enough(checkpoint: Path, name: str) -> None:
    before = checkpoint_digest(checkpoint)
    file = checkpoint / "model.safetensors"
    raw = bytearray(file.read_bytes())
    base = 8 + int.from_bytes(raw[:8], "little")
    start, end = json.loads(raw[8:base])[name]["data_offsets"]
    tensor = np.frombuffer(raw, np.float32, (end - start) // 4, base + start)
    tensor += np.float32(0.25)  # dense, as training and merging are
    file.write_bytes(raw)
    assert checkpoint_digest(checkpoint) != before


def test_the_config_counts(checkpoint: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", config='{"rope_theta": 5e5}')
    assert checkpoint_digest(other) != checkpoint_digest(checkpoint)


def test_whole_sees_a_single_byte_between_the_samples(checkpoint: Path) -> None:
    before = checkpoint_digest(checkpoint, whole=True)
    file = checkpoint / "model.safetensors"
    raw = bytearray(file.read_bytes())
    base = 8 + int.from_bytes(raw[:8], "little")
    raw[base + SAMPLE_BYTES + 10] ^= 1
    file.write_bytes(raw)
    assert checkpoint_digest(checkpoint, whole=True) != before


def test_other_formats_are_sampled(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    raw = bytearray(np.random.default_rng(3).integers(0, 256, 1_000_000, np.uint8).tobytes())
    file.write_bytes(raw)
    first = checkpoint_digest(file)
    raw[-1] ^= 1
    file.write_bytes(raw)
    assert checkpoint_digest(file) != first
    tiny = tmp_path / "tiny.bin"
    tiny.write_bytes(b"x")
    assert len(checkpoint_digest(tiny)) == 32


def test_what_is_no_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no weights in"):
        checkpoint_digest(tmp_path)
    cut = tmp_path / "model.safetensors"
    for raw in (b"", b"\x00" * 8, (1 << 40).to_bytes(8, "little"), (4).to_bytes(8, "little") + b"nope"):
        cut.write_bytes(raw)
        with pytest.raises(InvalidRequest, match="download complete"):
            checkpoint_digest(tmp_path)


def test_find_local_hub_and_nothing(checkpoint: Path, tmp_path: Path) -> None:
    assert find_checkpoint(str(checkpoint)) == checkpoint
    environment = {"HF_HOME": str(tmp_path / "hf")}
    hub = tmp_path / "hf" / "hub" / "models--org--name"
    snapshot = hub / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("abc123\n")
    assert find_checkpoint("org/name", None, environment) == snapshot
    assert find_checkpoint("org/name", "abc123", environment) == snapshot
    assert find_checkpoint("org/name", None, {"HF_HUB_CACHE": str(tmp_path / "hf" / "hub")}) == snapshot
    for model, revision in (("org/name", "dev"), ("org/other", None)):
        with pytest.raises(InvalidRequest, match="give their folder, or a digest"):
            find_checkpoint(model, revision, environment)
