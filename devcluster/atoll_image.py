"""Builds Atoll's image without a container engine. Layers: Debian's Python, locked dependencies, Atoll's packages.

Uses this machine's Debian package index and deploy/image/requirements.lock, and writes an OCI archive for
`ctr images import`, `docker load` or `podman load`. Layers are cached by their content. The image starts the same
command as deploy/image/Dockerfile; a test compares the two.

`python -m devcluster.atoll_image FILE` writes it to a file.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from devcluster.build import Report, report_to_stderr
from devcluster.errors import BuildError, DevclusterError
from devcluster.images import Layer, assemble, compressed, folder_tar, write_whole
from devcluster.paths import cache_root
from devcluster.system_programs import unpack_packages

REFERENCE = "docker.io/library/atoll:0.1.0"
TRAINER = "localhost/trainer:1"
ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "deploy" / "image" / "requirements.lock"
PACKAGES = ("topology", "atoll", "extender", "webhook", "agent", "controllers", "jobs", "pipelines", "atollctl")
START: Mapping[str, Any] = {
    "Entrypoint": ["python", "-m"],
    "Cmd": ["atollctl", "--help"],
    "User": "65532:65532",
    "WorkingDir": "/opt/atoll/app",
    "Env": [
        "PATH=/opt/atoll/bin:/usr/bin:/bin",
        "PYTHONPATH=/opt/atoll/app:/opt/atoll/lib",
        "PYTHONDONTWRITEBYTECODE=1",
        "PYTHONUNBUFFERED=1",
    ],
}

_SYSTEM = ("python3-minimal", "libpython3-stdlib", "libstdc++6")
"""numpy needs C++."""
_UNNEEDED = ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/lintian", "usr/share/bug")
_PLATFORMS = ("manylinux_2_17", "manylinux_2_28", "manylinux_2_34", "manylinux2014")


def write_atoll_image(
    target: Path, *, reference: str = REFERENCE, cache: Path | None = None, report: Report = report_to_stderr
) -> None:
    """Write the archive of Atoll's image. Raises BuildError with what is missing and what to do."""
    folder = (cache or cache_root()) / "images"
    system, packages = _system_layer(folder, report=report)
    python = _python_version(packages)
    layers = [
        system,
        _kept(folder, "libraries", f"{python} {LOCK.read_text()}", lambda: _library_tar(python), report=report),
        compressed(_application_tar()),
    ]
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, assemble(reference, layers=layers, start=START))


def write_trainer_image(target: Path, *, report: Report = report_to_stderr) -> None:
    """Write the archive of a training's image: Debian's Python, the worker, and examples/worker/train.py, which it
    starts. Raises BuildError."""
    system, _packages = _system_layer(cache_root() / "images", report=report)
    with tempfile.TemporaryDirectory(prefix="atoll-image-") as scratch:
        worker = Path(scratch) / "worker"
        shutil.copytree(ROOT / "worker", worker, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "examples" / "worker" / "train.py", scratch)
        training = compressed(folder_tar(Path(scratch), below="opt/training"))
    start = {"Cmd": ["python3", "train.py"], "WorkingDir": "/opt/training", "Env": ["PATH=/usr/bin:/bin"]}
    write_whole(target, assemble(TRAINER, layers=[system, training], start=start))


def _system_layer(folder: Path, *, report: Report) -> tuple[Layer, list[str]]:
    """Return the layer with Debian's Python, and its packages."""
    folder.mkdir(parents=True, exist_ok=True)
    packages = system_packages()
    if not _find(folder, "system", "\n".join(packages)):
        # The package index of this machine may be empty, or list versions that the archive no longer has.
        subprocess.run(["apt-get", "update", "-qq"], capture_output=True, check=False)
        packages = system_packages()
    return _kept(folder, "system", "\n".join(packages), lambda: _system_tar(packages), report=report), packages


def _kept(folder: Path, name: str, key: str, make: Callable[[], bytes], *, report: Report) -> Layer:
    """Return a layer from the cache, made if missing; its file name holds the digest of its tar."""
    stem = _stem(name, key)
    for path in _find(folder, name, key):
        return Layer(path.read_bytes(), f"sha256:{path.name.removeprefix(f'{stem}-').removesuffix('.tar.gz')}")
    report(f"Atoll's image: building the layer of its {name}")
    layer = compressed(make())
    write_whole(folder / f"{stem}-{layer.tar_digest.removeprefix('sha256:')}.tar.gz", layer.content)
    return layer


def _stem(name: str, key: str) -> str:
    return f"layer-{name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def _find(folder: Path, name: str, key: str) -> list[Path]:
    return sorted(folder.glob(f"{_stem(name, key)}-*.tar.gz"))


def system_packages() -> list[str]:
    """Return Debian's Python and its dependencies as name=version in installation order; empty if apt has none."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise BuildError(
            "this machine has no apt-get or dpkg-deb: build deploy/image/Dockerfile with a container engine instead"
        )
    command = ["apt-get", "-s", "-o", "Dir::State::status=/dev/null", "install", "--no-install-recommends", *_SYSTEM]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    packages = re.findall(r"^Inst (\S+) \((\S+)", listed.stdout, re.MULTILINE)
    return [f"{name}={version}" for name, version in packages]


def _python_version(packages: Sequence[str]) -> str:
    found = re.search(r"^python(3\.\d+)-minimal=", "\n".join(packages), re.MULTILINE)
    if found is None:
        raise BuildError(
            f"apt-get cannot find {', '.join(_SYSTEM)}: check that this is Debian and that `apt-get update` works"
        )
    return found.group(1)


def _system_tar(packages: Sequence[str]) -> bytes:
    with tempfile.TemporaryDirectory(prefix="atoll-image-") as scratch:
        root = Path(scratch) / "root"
        unpack_packages(packages, root)
        for name in _UNNEEDED:
            shutil.rmtree(root / name, ignore_errors=True)
        bin_folder = root / "opt" / "atoll" / "bin"
        bin_folder.mkdir(parents=True)
        (bin_folder / "python").symlink_to("/usr/bin/python3")
        return folder_tar(root, folders=("tmp", "etc", "proc", "sys", "dev"))


def _library_tar(python: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="atoll-image-") as scratch:
        target = Path(scratch) / "lib"
        machine = os.uname().machine
        platforms = [word for platform in _PLATFORMS for word in ("--platform", f"{platform}_{machine}")]
        install = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-compile"]
        wheels = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms]
        locked = ["--require-hashes", "--no-deps", "-r", str(LOCK), "--target", str(target)]
        done = subprocess.run([*install, *wheels, *locked], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BuildError(f"cannot install {LOCK.name}: {done.stderr.strip()[-500:]}")
        shutil.rmtree(target / "bin", ignore_errors=True)
        return folder_tar(target, below="opt/atoll/lib")


def _application_tar() -> bytes:
    with tempfile.TemporaryDirectory(prefix="atoll-image-") as scratch:
        for package in PACKAGES:
            shutil.copytree(ROOT / package, Path(scratch) / package, ignore=shutil.ignore_patterns("__pycache__"))
        return folder_tar(Path(scratch), below="opt/atoll/app")


def main(arguments: Sequence[str]) -> int:
    """Write the image to the named file; return the exit status."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m devcluster.atoll_image FILE\n")
        return 2
    target = Path(arguments[0])
    try:
        write_atoll_image(target)
    except (DevclusterError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{target}: {REFERENCE}, {target.stat().st_size / 1e6:.0f} MB\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
