"""Files of a running cluster on disk, and their removal.

Each cluster has one folder in the state root: cluster.json (the record), control.sock, lock, logs, and the data of its
parts. The supervisor holds the lock while it runs, so a free lock means a dead cluster; process ids are not used.
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
    """A node of a running cluster; its number determines address and pod network."""

    name: str
    profile: str
    number: int
    labels: dict[str, str] = field(default_factory=dict)
    cpu: int | None = None
    memory_bytes: int | None = None
    nvidia: str = ""


@dataclass(frozen=True, slots=True)
class ClusterRecord:
    """Data needed to attach to a running cluster."""

    name: str
    kubernetes: str
    port: int
    persistent: bool
    binaries: dict[str, str]
    nodes: tuple[NodeRecord, ...] = ()
    ip_family: str = "ipv4"
    feature_gates: tuple[str, ...] = ()


def check_name(name: str, *, what: str) -> str:
    """Return the name if it is valid in cgroups, file names and objects. Raises ClusterStateError with the rule."""
    if not _NAME.fullmatch(name):
        raise ClusterStateError(f"{what} name {name!r} is not 1 to 24 characters out of a-z, 0-9 and inner dashes")
    return name


def cluster_folder(name: str) -> Path:
    """Return a cluster's folder, which may not exist."""
    return state_root() / check_name(name, what="cluster")


def socket_path(folder: Path) -> Path:
    """Return the path of a cluster's control socket. Raises ClusterStateError if it is too long for the kernel."""
    path = folder / "control.sock"
    if len(os.fsencode(path)) > _SOCKET_PATH_BYTES_MAX:
        raise ClusterStateError(f"{path} exceeds {_SOCKET_PATH_BYTES_MAX} bytes: set ATOLL_STATE to a shorter folder")
    return path


def claim_folder(name: str) -> tuple[Path, IO[str]]:
    """Create and lock the folder of a new cluster. Raises ClusterStateError if one of that name exists.

    Every process that inherits the open file holds the lock; it is released when the last one ends.
    """
    folder = cluster_folder(name)
    socket_path(folder)
    with _root_lock(folder.parent):
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            raise ClusterStateError(
                f"cluster {name!r} is running already: stop it with `atoll dev down {name}` first"
            ) from None
        lock = (folder / "lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return folder, lock


def write_record(folder: Path, record: ClusterRecord) -> None:
    """Write the record atomically."""
    unfinished = folder / ".cluster.json"
    unfinished.write_text(json.dumps(asdict(record), indent=1))
    unfinished.rename(folder / "cluster.json")


def read_record(folder: Path) -> ClusterRecord:
    """Read a cluster's record. Raises ClusterStateError if there is none."""
    try:
        fields: dict[str, Any] = json.loads((folder / "cluster.json").read_text())
    except FileNotFoundError:
        raise ClusterStateError(f"no cluster {folder.name!r} is running") from None
    nodes = tuple(NodeRecord(**node) for node in fields.pop("nodes"))
    gates = tuple(fields.pop("feature_gates", ()))
    return ClusterRecord(**fields, nodes=nodes, feature_gates=gates)


def cgroup_root(cluster: str, node: str) -> str:
    """Return the cgroup that contains all pods of a node."""
    return f"/atoll-{cluster}-{node}"


def running_clusters() -> list[ClusterRecord]:
    """Return the clusters whose supervisor runs."""
    found = []
    for folder in _folders():
        with contextlib.suppress(ClusterStateError):
            if is_alive(folder):
                found.append(read_record(folder))
    return found


def is_alive(folder: Path) -> bool:
    """True if a process holds the cluster's lock."""
    try:
        with (folder / "lock").open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def sweep() -> list[str]:
    """Remove the leftovers of clusters whose supervisor was killed; return their names."""
    swept = []
    with _root_lock(state_root()):
        for folder in _folders():
            if not is_alive(folder):
                remove_cluster_folder(folder)
                swept.append(folder.name)
    return swept


def remove_cluster_folder(folder: Path) -> None:
    """Remove a dead cluster's cgroups, then its folder; the folder names the cgroups, so a later sweep can retry."""
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
    """Allow one claim or sweep at a time, so that a sweep never removes a folder that is being claimed."""
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
