"""Describes a release: what is in the image, what it was made of, and by which digest to install it.

`python -m devcluster.release FOLDER`, after `make image` and `make chart`, reads the archives in the folder and writes
beside them

- sbom.json: CycloneDX 1.6, every Python and Debian package of the image with its version and purl;
- provenance.json: an in-toto statement with SLSA provenance 1.0 of every archive: digest, commit, locks;
- values-release.yaml: values that install the image by its digest;
- SHA256SUMS.

Equal input gives equal bytes. Signing is left to whoever publishes: for example `cosign attest --predicate`.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from devcluster.atoll_image import LOCK, ROOT, system_packages
from devcluster.errors import BuildError, DevclusterError

SOURCES: Final = ("deploy/image/requirements.lock", "deploy/image/Dockerfile", "pyproject.toml")
_PIN: Final = re.compile(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)", re.MULTILINE)


def image_digest(archive: Path) -> str:
    """Return the digest of the manifest in an OCI archive, by which a registry knows the image. Raises BuildError."""
    try:
        with tarfile.open(archive) as tar:
            index = tar.extractfile("index.json")
            manifests = json.load(index)["manifests"] if index is not None else []
            (manifest,) = manifests
            return str(manifest["digest"])
    except (OSError, KeyError, ValueError, tarfile.TarError) as error:
        raise BuildError(f"{archive} is no OCI archive of one image: {error}; make it with `make image`") from error


def sbom(lock: str, debian: Iterable[str], *, version: str) -> dict[str, Any]:
    """Return the bill of materials. lock: text of the image's lock; debian: packages as name=version."""
    python = [(name.lower(), found, f"pkg:pypi/{name.lower()}@{found}") for name, found in _PIN.findall(lock)]
    system = [
        (name, found, f"pkg:deb/debian/{name}@{found}") for name, _, found in (row.partition("=") for row in debian)
    ]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "container", "name": "atoll", "version": version}},
        "components": [
            {"type": "library", "name": name, "version": found, "purl": purl, "bom-ref": purl}
            for name, found, purl in sorted({*python, *system})
        ],
    }


def provenance(archives: Mapping[str, str], *, commit: str, sources: Mapping[str, str]) -> dict[str, Any]:
    """Return the statement of where archives come from: a commit and source files. Both mappings: name to SHA-256."""
    files = [{"name": name, "digest": {"sha256": digest}} for name, digest in sorted(sources.items())]
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in sorted(archives.items())],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "https://gpu.scheduling/make-release/v1",
                "externalParameters": {"target": "release"},
                "resolvedDependencies": [{"name": "source", "digest": {"gitCommit": commit}}, *files],
            },
            "runDetails": {"builder": {"id": "https://gpu.scheduling/make-release/v1"}},
        },
    }


def describe(folder: Path, *, debian: Sequence[str], commit: str) -> list[Path]:
    """Write the files of a release beside its archives and return them. Raises BuildError."""
    image, chart = (_one(folder, pattern) for pattern in ("atoll-*.tar", "atoll-*.tgz"))
    version = chart.name.removeprefix("atoll-").removesuffix(".tgz")
    archives = {path.name: _sha256(path) for path in (image, chart)}
    sources = {name: _sha256(ROOT / name) for name in SOURCES}
    texts = {
        "sbom.json": _json(sbom(LOCK.read_text(encoding="utf-8"), debian, version=version)),
        "provenance.json": _json(provenance(archives, commit=commit, sources=sources)),
        "values-release.yaml": yaml.safe_dump({"image": {"digest": image_digest(image)}}),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    sums = {**archives, **{name: _sha256(folder / name) for name in texts}}
    (folder / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())))
    return [folder / name for name in (*texts, "SHA256SUMS")]


def _one(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise BuildError(f"{folder} has {len(found)} archives {pattern}, a release has one: remove old ones")
    return found[0]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _json(value: object) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def _commit() -> str:
    """Return the commit that is released. Raises BuildError for a tree with changes, which nobody could build again."""
    changes = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=False)
    if changes.returncode != 0 or changes.stdout:
        raise BuildError("a release comes from a commit: this is no Git tree without changes")
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    return head.stdout.strip()


def main(arguments: Sequence[str]) -> int:
    """Describe the release in the named folder; return the exit status."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m devcluster.release FOLDER\n")
        return 2
    try:
        for path in describe(Path(arguments[0]), debian=system_packages(), commit=_commit()):
            sys.stdout.write(f"{path}\n")
    except (DevclusterError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
