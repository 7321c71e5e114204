"""Image archives that are assembled here instead of pulled from a registry."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from devcluster.images import Image, archive
from devcluster.system_programs import is_static


@pytest.fixture
def image(tmp_path: Path) -> Image:
    """An image of one program and one link."""
    (tmp_path / "tool").write_bytes(b"program")
    return Image(
        reference="localhost/tool:1",
        files={"bin/tool": tmp_path / "tool"},
        links={"bin/sh": "tool"},
        command=["/bin/sh"],
    )


def members(content: bytes) -> dict[str, bytes]:
    """Names and contents of a tar's files."""
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        return {entry.name: file.read() for entry in tar if (file := tar.extractfile(entry)) is not None}


def test_the_same_image_gives_the_same_bytes(image: Image, tmp_path: Path) -> None:
    """An archive in the cache is good for ever, whenever its files were touched."""
    first = archive(image)
    os.utime(tmp_path / "tool", (1, 1))

    assert archive(image) == first


def test_an_image_may_bring_variables(image: Image) -> None:
    """As images for CUDA do; what a pod sets stands above them."""
    files = members(archive(replace(image, environment={"NVIDIA_VISIBLE_DEVICES": "all"})))
    entry = json.loads(files["index.json"])["manifests"][0]
    manifest = json.loads(files[f"blobs/sha256/{entry['digest'].removeprefix('sha256:')}"])
    config = json.loads(files[f"blobs/sha256/{manifest['config']['digest'].removeprefix('sha256:')}"])

    assert config["config"]["Env"] == ["PATH=/bin", "NVIDIA_VISIBLE_DEVICES=all"]


def test_digests_lead_from_the_index_to_the_program(image: Image) -> None:
    """containerd refuses an archive in which any digest or size is wrong."""
    files = members(archive(image))
    entry = json.loads(files["index.json"])["manifests"][0]
    manifest = json.loads(files[f"blobs/sha256/{entry['digest'].removeprefix('sha256:')}"])
    layer = files[f"blobs/sha256/{manifest['layers'][0]['digest'].removeprefix('sha256:')}"]
    config = json.loads(files[f"blobs/sha256/{manifest['config']['digest'].removeprefix('sha256:')}"])
    plain = gzip.decompress(layer)

    assert entry["annotations"]["io.containerd.image.name"] == "localhost/tool:1"
    assert manifest["layers"][0]["size"] == len(layer)
    assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(plain).hexdigest()}"]
    assert config["config"]["Cmd"] == ["/bin/sh"]
    with tarfile.open(fileobj=io.BytesIO(plain)) as tar:
        assert tar.getmember("bin/tool").mode == 0o755
        assert tar.getmember("bin/sh").linkname == "tool"
        assert tar.getmember("tmp").mode == 0o1777


def test_only_programs_without_a_loader_are_static(tmp_path: Path) -> None:
    """A program that needs a loader would not start in an image that holds nothing else."""
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\n")

    assert not is_static(script)
    assert not is_static(Path("/bin/ls"))
