"""Files of a running cluster on disk, and their removal.

One folder per cluster below the state root: cluster.json (the record), control.sock, lock, logs, and the data of its
parts. The supervisor holds the lock while it lives, so a free lock means a dead cluster: process ids are not trusted.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from devcluster import cgroups
from devcluster.errors import ClusterStateError
from devcluster.paths import state_root

_SOCKET_PATH_BYTES_MAX = 107
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,22}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A node of a running cluster: its number decides address and pod network."""

    name: str
    profile: str
    number: int
    labels: dict[str, str] = field(default_factory=dict)
    cpu: int | None = None
    memory_bytes: int | None = None
    nvidia: str = ""


@dataclass(frozen=True, slots=True)
class ClusterRecord:
    """Everything needed to attach to a running cluster."""

    name: str
    kubernetes: str
    port: int
    persistent: bool
    binaries: dict[str, str]
    nodes: tuple[NodeRecord, ...] = ()


def check_name(name: str, *, what: str) -> str:
    """The name, if it can be part of cgroups, file names and objects. Raises ClusterStateError with the rule."""
    if not _NAME.fullmatch(name):
        raise ClusterStateError(f"{what} name {name!r} is not 1 to 24 characters out of a-z, 0-9 and inner dashes")
    return name


def cluster_folder(name: str) -> Path:
    """The folder of a cluster, whether or not it exists."""
    return state_root() / check_name(name, what="cluster")


def socket_path(folder: Path) -> Path:
    """The control socket of a cluster. Raises ClusterStateError where the kernel could not take so long a path."""
    path = folder / "control.sock"
    if len(os.fsencode(path)) > _SOCKET_PATH_BYTES_MAX:
        raise ClusterStateError(f"{path} exceeds {_SOCKET_PATH_BYTES_MAX} bytes: set ATOLL_STATE to a shorter folder")
    return path


def claim_folder(name: str) -> tuple[Path, IO[str]]:
    """Make the folder of a new cluster and lock it. Raises ClusterStateError where one of that name exists.

    The lock belongs to whoever inherits the open file, and ends with the last of them.
    """
    folder = cluster_folder(name)
    socket_path(folder)
    with _root_lock(folder.parent):
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            raise ClusterStateError(
                f"cluster {name!r} is running already: stop it first, `atoll dev down {name}`"
            ) from None
        lock = (folder / "lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return folder, lock


def write_record(folder: Path, record: ClusterRecord) -> None:
    """Write the record whole or not at all."""
    unfinished = folder / ".cluster.json"
    unfinished.write_text(json.dumps(asdict(record), indent=1))
    unfinished.rename(folder / "cluster.json")


def read_record(folder: Path) -> ClusterRecord:
    """The record of a cluster. Raises ClusterStateError where there is none."""
    try:
        fields: dict[str, Any] = json.loads((folder / "cluster.json").read_text())
    except FileNotFoundError:
        raise ClusterStateError(f"no cluster {folder.name!r} is running") from None
    nodes = tuple(NodeRecord(**node) for node in fields.pop("nodes"))
    return ClusterRecord(**fields, nodes=nodes)


def cgroup_root(cluster: str, node: str) -> str:
    """The cgroup below which everything of a node's pods lives."""
    return f"/atoll-{cluster}-{node}"


def running_clusters() -> list[ClusterRecord]:
    """The clusters whose supervisor lives."""
    found = []
    for folder in _folders():
        with contextlib.suppress(ClusterStateError):
            if is_alive(folder):
                found.append(read_record(folder))
    return found


def is_alive(folder: Path) -> bool:
    """Whether somebody holds the cluster's lock."""
    try:
        with (folder / "lock").open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def sweep() -> list[str]:
    """Remove what clusters left whose supervisor was killed; give their names."""
    swept = []
    with _root_lock(state_root()):
        for folder in _folders():
            if not is_alive(folder):
                remove_cluster_folder(folder)
                swept.append(folder.name)
    return swept


def remove_cluster_folder(folder: Path) -> None:
    """Remove a dead cluster's cgroups, then its folder, which names the cgroups: a later sweep tries again."""
    nodes: tuple[NodeRecord, ...] = ()
    with contextlib.suppress(ClusterStateError):
        nodes = read_record(folder).nodes
    busy = [node for node in nodes if not cgroups.remove(cgroup_root(folder.name, node.name))]
    if not busy:
        shutil.rmtree(folder, ignore_errors=True)


def _folders() -> list[Path]:
    root = state_root()
    return sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []


@contextmanager
def _root_lock(root: Path) -> Iterator[None]:
    """One at a time claims or sweeps below the root, or a sweep could meet a folder that is being claimed."""
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
