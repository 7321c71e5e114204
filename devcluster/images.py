"""Builds container images without a registry: OCI archives of static programs.

Returns a tar file in OCI layout for `ctr images import`. Equal input gives equal bytes, so cached archives never become
stale.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

BUSYBOX = "localhost/busybox:1"
CUDA = "localhost/cuda:1"
"""busybox with the variable that CUDA images set: all GPUs."""
PAUSE = "localhost/pause:1"

_MEDIA = "application/vnd.oci.image"


@dataclass(frozen=True, slots=True)
class Image:
    """An image of one layer: files (path in the image -> program on this machine), links (path -> target), command."""

    reference: str
    files: Mapping[str, Path]
    command: Sequence[str]
    links: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


def ensure_images(cache: Path, *, pause: Path, busybox: Path, flock: Path, cuda: bool = False) -> list[Path]:
    """Return the archives of the images that every node has; write missing ones."""
    small = busybox_image(busybox, flock)
    greedy = replace(small, reference=CUDA, environment={"NVIDIA_VISIBLE_DEVICES": "all"})
    images = [Image(reference=PAUSE, files={"pause": pause}, command=["/pause"]), small, *([greedy] if cuda else [])]
    return [ensure_image(cache, image) for image in images]


def busybox_image(busybox: Path, flock: Path) -> Image:
    """Image with a shell, the usual small commands, and `flock -n FD`, which Debian's static busybox lacks."""
    applets = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split()
    links = {f"bin/{applet}": "busybox" for applet in applets if applet not in {"busybox", "flock"}}
    files = {"bin/busybox": busybox, "bin/flock": flock}
    return Image(reference=BUSYBOX, files=files, links=links, command=["/bin/sh"])


def archive(image: Image) -> bytes:
    """Build the OCI archive of an image with one layer; reproducible."""
    variables = ["PATH=/bin", *(f"{name}={value}" for name, value in image.environment.items())]
    start = {"Cmd": list(image.command), "Env": variables, "WorkingDir": "/"}
    return assemble(image.reference, layers=[compressed(_layer(image))], start=start)


@dataclass(frozen=True, slots=True)
class Layer:
    """A compressed layer, and the digest of its tar, which the image's configuration lists."""

    content: bytes
    tar_digest: str


def compressed(tar: bytes) -> Layer:
    """Compress a tar into a layer; reproducible."""
    return Layer(gzip.compress(tar, compresslevel=6, mtime=0), f"sha256:{hashlib.sha256(tar).hexdigest()}")


def assemble(reference: str, *, layers: Sequence[Layer], start: Mapping[str, Any]) -> bytes:
    """Build the OCI archive of an image for this machine's architecture; `start` is the image's `config` object."""
    config = _json(
        {
            "architecture": "amd64" if os.uname().machine == "x86_64" else "arm64",
            "os": "linux",
            "config": dict(start),
            "rootfs": {"type": "layers", "diff_ids": [layer.tar_digest for layer in layers]},
        }
    )
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": f"{_MEDIA}.manifest.v1+json",
            "config": _descriptor(config, "config.v1+json"),
            "layers": [_descriptor(layer.content, "layer.v1.tar+gzip") for layer in layers],
        }
    )
    entry = _descriptor(manifest, "manifest.v1+json")
    entry["annotations"] = {
        "io.containerd.image.name": reference,
        "org.opencontainers.image.ref.name": reference.rpartition(":")[2],
    }
    contents = (config, *(layer.content for layer in layers), manifest)
    blobs = {f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}": blob for blob in contents}
    index = {"schemaVersion": 2, "mediaType": f"{_MEDIA}.index.v1+json", "manifests": [entry]}
    files = {"oci-layout": _json({"imageLayoutVersion": "1.0.0"}), "index.json": _json(index), **blobs}
    return _tar([(_file_entry(name, len(content), mode=0o644), content) for name, content in files.items()])


def folder_tar(root: Path, *, below: str = "", folders: Sequence[str] = ()) -> bytes:
    """Build a reproducible tar of a folder below the path `below`, owned by root, without times.

    `folders` are further folders of the image; tmp is writable for everybody.
    """
    entries = [(_folder_entry(name), b"") for name in folders]
    for path in sorted(root.rglob("*")):
        name = str(Path(below) / path.relative_to(root))
        if path.is_symlink():
            entries.append((_link_entry(name, str(path.readlink())), b""))
        elif path.is_dir():
            entries.append((_folder_entry(name), b""))
        elif path.is_file():
            content = path.read_bytes()
            mode = 0o755 if path.stat().st_mode & 0o111 else 0o644
            entries.append((_file_entry(name, len(content), mode=mode), content))
    return _tar(entries)


def program_image(reference: str, program: Path) -> Image:
    """Image with one static program that it starts."""
    return Image(reference=reference, files={f"bin/{program.name}": program}, command=[f"/bin/{program.name}"])


def ensure_image(cache: Path, image: Image) -> Path:
    """Return the archive of an image with one layer; write it if missing."""
    facts = (image.reference, image.command, sorted(image.links.items()), sorted(image.environment.items()))
    digest = hashlib.sha256(repr(facts).encode())
    for name, program in sorted(image.files.items()):
        digest.update(name.encode() + program.read_bytes())
    folder = cache / "images"
    target = folder / f"{image.reference.replace('/', '-').replace(':', '-')}-{digest.hexdigest()[:12]}.tar"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(target, archive(image))
    return target


def write_whole(target: Path, content: bytes) -> None:
    """Write a file atomically."""
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    unfinished.write_bytes(content)
    unfinished.rename(target)


def _layer(image: Image) -> bytes:
    folders = sorted({str(Path(name).parent) for name in (*image.files, *image.links)} - {"."} | {"tmp", "etc"})
    entries = [(_folder_entry(name), b"") for name in folders]
    for name, program in sorted(image.files.items()):
        content = program.read_bytes()
        entries.append((_file_entry(name, len(content), mode=0o755), content))
    entries += [(_link_entry(name, target), b"") for name, target in sorted(image.links.items())]
    return _tar(entries)


def _tar(entries: Sequence[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for entry, content in entries:
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _file_entry(name: str, size: int, *, mode: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = size, mode
    return entry


def _folder_entry(name: str) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
    return entry


def _link_entry(name: str, target: str) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, target, 0o777
    return entry


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _descriptor(content: bytes, kind: str) -> dict[str, Any]:
    digest = hashlib.sha256(content).hexdigest()
    return {"mediaType": f"{_MEDIA}.{kind}", "digest": f"sha256:{digest}", "size": len(content)}
