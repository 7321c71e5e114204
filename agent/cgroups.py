"""Pods that have a cgroup on this machine, with and without processes in it.

Reads the mounted cgroup file systems (v1: one tree per controller; v2: one tree; hybrid: both) below the kubelet's
cgroup root. Gives pod UIDs, or None if the kubelet's trees cannot be found or read. Understands both drivers: cgroupfs
`kubepods/burstable/pod<uid>`, systemd
`kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<uid>.slice` with underscores in the uid.

On cgroup v1 the kernel hides processes of other process namespaces, so the agent must run in the host's.
"""

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUP_MOUNT = Path("/sys/fs/cgroup")
SERVICES = "system.slice"
PODS_MAX = 4096
"""More pod cgroups than any kubelet runs; a tree with more is not a kubelet's."""
FOLDERS_MAX = 20_000

_UID = r"[0-9a-f]{8}(?:[-_]?[0-9a-f]{4}){3}[-_]?[0-9a-f]{12}"
_POD_FOLDER = re.compile(rf"(?:.*kubepods(?:-besteffort|-burstable)?-)?pod(?P<uid>{_UID})(?:\.slice)?")
_POD_PATH = re.compile(rf"(?:^|[/-])pod(?P<uid>{_UID})(?:\.slice)?(?:[/:]|$)", re.MULTILINE)
_STRAY_FOLDER = re.compile(rf"(?:.*-)?kubepods-(?:.*-)?pod(?P<uid>{_UID})\.slice(?::.*)?")
_QOS_FOLDER = re.compile(r"(?:.*kubepods-)?(?:besteffort|burstable)(?:\.slice)?")
_VANISHED = frozenset({errno.ENOENT, errno.ENODEV})


@dataclass(frozen=True, slots=True)
class CgroupReading:
    """populated: pods with at least one process. empty: pods whose cgroup exists without any process."""

    populated: frozenset[str]
    empty: frozenset[str]


def read_cgroups(root: str = "/", *, mount: Path = CGROUP_MOUNT) -> CgroupReading | None:
    """Find pod cgroups below the kubelet's cgroup root in every mounted hierarchy.

    None (nothing is known) if no hierarchy has the kubelet's tree or one could not be read.
    """
    populated: set[str] = set()
    empty: set[str] = set()
    try:
        hierarchies = _hierarchies(mount)
        trees = [tree for hierarchy in hierarchies for tree in _kubepods_trees(root, hierarchy)]
        for folder in (*trees, *hierarchies):
            found = _stray_folders(folder) if folder in hierarchies else _pod_folders(folder)
            _collect_pods(folder, found, populated=populated, empty=empty)
    except OSError:
        return None
    return CgroupReading(frozenset(populated), frozenset(empty - populated)) if trees else None


def pod_uid_of(cgroup_text: str) -> str | None:
    """Uid of the pod that a process belongs to, from the text of its /proc/<pid>/cgroup; None for a process outside
    pods."""
    match = _POD_PATH.search(cgroup_text)
    return _plain_uid(match["uid"]) if match else None


def _kubepods_trees(root: str, hierarchy: Path) -> list[Path]:
    parts = [part for part in root.split("/") if part]
    escaped = [part.replace("-", "_") for part in parts]
    slices = ["-".join(escaped[: depth + 1]) + ".slice" for depth in range(len(parts))]
    below_mount = (
        Path(*parts, "kubepods"),
        Path(*slices, "-".join((*escaped, "kubepods.slice"))),
    )
    return [tree for tree in map(hierarchy.joinpath, below_mount) if tree.is_dir()]


def _hierarchies(mount: Path) -> list[Path]:
    """Trees below the mount: the mount itself on v2, else one per controller; links such as `cpu` are followed once."""
    if (mount / "cgroup.procs").exists():
        return [mount]
    folders = sorted({entry.resolve() for entry in mount.iterdir()})
    return [folder for folder in folders if (folder / "cgroup.procs").exists()]


def _collect_pods(tree: Path, found: Iterator[tuple[Path, str]], *, populated: set[str], empty: set[str]) -> None:
    for folder, uid in found:
        if len(populated) + len(empty) >= PODS_MAX:
            raise OSError(f"more than {PODS_MAX} pod cgroups below {tree}")
        if uid not in populated:
            (populated if _has_process(folder) else empty).add(uid)


def _pod_folders(tree: Path) -> Iterator[tuple[Path, str]]:
    for folder in (tree, *(entry for entry in _folders(tree) if _QOS_FOLDER.fullmatch(entry.name))):
        for entry in _folders(folder):
            match = _POD_FOLDER.fullmatch(entry.name)
            if match:
                yield entry, _plain_uid(match["uid"])


def _stray_folders(hierarchy: Path) -> Iterator[tuple[Path, str]]:
    """Yield containers outside of the pods' cgroups: at the top, among the services, or in the runtime's own cgroup."""
    services = hierarchy / SERVICES
    places = [hierarchy, services, *(entry for entry in _folders(services) if entry.name.endswith(".service"))]
    for place in places:
        for entry in _folders(place):
            match = _STRAY_FOLDER.fullmatch(entry.name)
            if match:
                yield entry, _plain_uid(match["uid"])


def _folders(folder: Path) -> list[Path]:
    """Subfolders of a folder; none if it has vanished."""
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError as error:
        if error.errno in _VANISHED:
            return []
        raise


def _has_process(folder: Path) -> bool:
    """True if a process runs in the cgroup or below; on v2 the kernel says so in one file."""
    events = _text(folder / "cgroup.events")
    return "populated 1" in events.splitlines() if events is not None else _has_listed_process(folder)


def _has_listed_process(folder: Path) -> bool:
    pending = [folder]
    for _ in range(FOLDERS_MAX):
        if not pending:
            return False
        current = pending.pop()
        if (_text(current / "cgroup.procs") or "").strip():
            return True
        pending += _folders(current)
    raise OSError(f"more than {FOLDERS_MAX} folders below {folder}")


def _text(path: Path) -> str | None:
    """Content of a file; None if it does not exist or its cgroup was removed during the read."""
    try:
        return path.read_text()
    except OSError as error:
        if error.errno in _VANISHED:
            return None
        raise


def _plain_uid(text: str) -> str:
    """Spell a uid as the API does; a static pod's uid is a hash without dashes and stays unchanged."""
    return text.replace("_", "-")
