"""The files of a release: what is in the image, where it comes from, and by which digest to install it."""

import hashlib
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from devcluster import chart
from devcluster.errors import BuildError
from devcluster.images import assemble, compressed
from devcluster.release import describe, image_digest

DEBIAN = ("libstdc++6=14.2.0-19", "python3-minimal=3.13.5-1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an image and a chart, as `make image` and `make chart` leave it."""
    (tmp_path / "atoll-0.1.0.tar").write_bytes(assemble("atoll:0.1.0", layers=[compressed(b"layer")], start={}))
    (tmp_path / "atoll-0.1.0.tgz").write_bytes(b"chart")
    return tmp_path


def written(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def test_a_release_says_what_it_is_made_of(folder: Path) -> None:
    """Every package of the lock and of Debian by version; archives by digest; the commit; sums of all files."""
    files = describe(folder, debian=DEBIAN, commit="c0ffee")

    purls = {component["purl"] for component in written(folder, "sbom.json")["components"]}
    assert {"pkg:deb/debian/libstdc++6@14.2.0-19", "pkg:deb/debian/python3-minimal@3.13.5-1"} <= purls
    assert sum(purl.startswith("pkg:pypi/aiohttp@") for purl in purls) == 1
    statement = written(folder, "provenance.json")
    assert {subject["name"] for subject in statement["subject"]} == {"atoll-0.1.0.tar", "atoll-0.1.0.tgz"}
    assert statement["predicate"]["buildDefinition"]["resolvedDependencies"][0]["digest"] == {"gitCommit": "c0ffee"}
    sums = dict(reversed(line.split("  ")) for line in (folder / "SHA256SUMS").read_text().splitlines())
    assert sums.keys() == {"atoll-0.1.0.tar", "atoll-0.1.0.tgz", *(file.name for file in files[:-1])}
    assert all(hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest for name, digest in sums.items())
    before = {file.name: file.read_bytes() for file in files}
    assert {file.name: file.read_bytes() for file in describe(folder, debian=DEBIAN, commit="c0ffee")} == before


def test_the_digest_is_that_of_the_manifest(folder: Path) -> None:
    """A registry computes the same, so the values name the image that was described."""
    digest = image_digest(folder / "atoll-0.1.0.tar")
    with tarfile.open(folder / "atoll-0.1.0.tar") as tar:
        manifest = tar.extractfile(f"blobs/{digest.replace(':', '/')}")
        assert manifest is not None
        assert digest == f"sha256:{hashlib.sha256(manifest.read()).hexdigest()}"

    describe(folder, debian=DEBIAN, commit="c0ffee")

    images = {
        container["image"]
        for body in yaml.safe_load_all(chart.render("--values", folder / "values-release.yaml"))
        if body and body["kind"] in {"Deployment", "DaemonSet"}
        for container in body["spec"]["template"]["spec"]["containers"]
        if container["name"] != "kube-scheduler"
    }
    assert images == {f"atoll@{digest}"}


@pytest.mark.parametrize("name", ["atoll-0.1.0.tar", "atoll-0.1.0.tgz"])
def test_half_a_release_is_refused(folder: Path, name: str) -> None:
    """So is one with two versions, and one whose image is none."""
    (folder / name).rename(folder / "gone")
    with pytest.raises(BuildError, match="has 0 archives"):
        describe(folder, debian=DEBIAN, commit="c0ffee")


def test_what_is_no_image_is_refused(folder: Path) -> None:
    """The message says how to make one."""
    (folder / "atoll-0.1.0.tar").write_bytes(b"no tar")
    with pytest.raises(BuildError, match="make image"):
        describe(folder, debian=DEBIAN, commit="c0ffee")
