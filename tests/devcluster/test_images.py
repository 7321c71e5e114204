"""Image archives that are built locally instead of pulled from a registry."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from atoll import VERSION
from devcluster import atoll_image
from devcluster.images import Image, archive, folder_tar
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


def test_a_folder_gives_the_same_layer_whenever_and_by_whomever_it_was_made(tmp_path: Path) -> None:
    """Times and owners are left out, links stay links, what was executable is."""
    for name in ("first", "second"):
        root = tmp_path / name
        (root / "bin").mkdir(parents=True)
        (root / "bin" / "tool").write_bytes(b"program")
        (root / "bin" / "tool").chmod(0o700)
        (root / "bin" / "link").symlink_to("tool")
    os.utime(tmp_path / "second" / "bin" / "tool", (1, 1))
    first, second = (folder_tar(tmp_path / name, below="opt", folders=("tmp",)) for name in ("first", "second"))

    assert first == second
    with tarfile.open(fileobj=io.BytesIO(first)) as tar:
        entries = {entry.name: entry for entry in tar}
    assert {name: entry.mode for name, entry in entries.items()} == {
        "tmp": 0o1777,
        "opt/bin": 0o755,
        "opt/bin/link": 0o777,
        "opt/bin/tool": 0o755,
    }
    assert entries["opt/bin/link"].linkname == "tool"
    assert {(entry.uid, entry.gid, entry.mtime) for entry in entries.values()} == {(0, 0, 0)}


def test_the_assembled_image_starts_what_the_dockerfile_says() -> None:
    """Whichever way an image was made, the manifests run it."""
    lines = (atoll_image.ROOT / "deploy" / "image" / "Dockerfile").read_text().splitlines()
    said = dict(line.split(" ", 1) for line in lines if line.split(" ")[0] in {"ENTRYPOINT", "CMD", "USER", "WORKDIR"})
    copied = {line.split(" ")[1] for line in lines if line.startswith("COPY") and "/opt/atoll/app/" in line}

    assert json.loads(said["ENTRYPOINT"]) == atoll_image.START["Entrypoint"]
    assert json.loads(said["CMD"]) == atoll_image.START["Cmd"]
    assert said["USER"] == atoll_image.START["User"]
    assert said["WORKDIR"] == atoll_image.START["WorkingDir"]
    assert copied == set(atoll_image.PACKAGES)


def test_the_assembled_image_has_the_name_that_the_manifests_ask_for() -> None:
    """Without a registry in its name an image is looked for as Docker's."""
    asked = re.findall(r"image: (atoll:\S+)", (atoll_image.ROOT / "deploy" / "controllers.yaml").read_text())

    assert [f"docker.io/library/{name}" for name in asked] == [atoll_image.REFERENCE]


def test_the_command_line_runs_with_the_packages_of_the_image_alone(tmp_path: Path) -> None:
    """The image has neither devcluster nor the metadata of a package; `atoll version` says the release."""
    with tarfile.open(fileobj=io.BytesIO(atoll_image._application_tar())) as tar:
        tar.extractall(tmp_path, filter="data")
    libraries = sysconfig.get_path("purelib")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}/opt/atoll/app:{libraries}"}
    python = [sys.executable, "-S", "-m", "atollctl"]  # -S: without this checkout, which is installed as editable
    version, told = (
        subprocess.run(
            [*python, word], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout
        for word in ("version", "--help")
    )

    assert version == f"{VERSION}\n"
    assert "job" in told
    assert not re.search(r"\bdev\b", told)


def test_there_is_one_version() -> None:
    """The package, the code and the chart have the same."""
    project = tomllib.loads((atoll_image.ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = (atoll_image.ROOT / "deploy" / "chart" / "Chart.yaml").read_text()

    assert (project, re.findall(r"^appVersion: (.*)", chart, re.MULTILINE)) == (VERSION, [VERSION])
