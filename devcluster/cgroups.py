"""Cgroup folders of a cluster's nodes, in every hierarchy of this machine (version 1, 2 or both).

A node's cgroup root has a name like /atoll-demo-dgx1. A killed cluster leaves only these folders outside its
namespaces.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

_BUSY_SECONDS_MAX = 30.0
_BUSY_PAUSE_SECONDS = 0.05


def hierarchies(mounts: str) -> list[Path]:
    """Return the mount points of all cgroup hierarchies in the text of /proc/mounts, without duplicates."""
    rows = [line.split() for line in mounts.splitlines()]
    return list(dict.fromkeys(Path(row[1]) for row in rows if len(row) > 2 and row[2] in ("cgroup", "cgroup2")))


def create(root: str) -> None:
    """Create the folder in every hierarchy; a v1 cpuset refuses processes until its cpus and memory nodes are set."""
    for hierarchy in hierarchies(Path("/proc/mounts").read_text()):
        folder = hierarchy / root.lstrip("/")
        folder.mkdir(exist_ok=True)
        for file in ("cpuset.cpus", "cpuset.mems"):
            parent, own = hierarchy / file, folder / file
            if parent.exists() and own.exists() and not own.read_text().strip():
                own.write_text(parent.read_text())
        controllers = hierarchy / "cgroup.controllers"
        if controllers.exists():
            wanted = " ".join(f"+{name}" for name in controllers.read_text().split())
            with contextlib.suppress(OSError):
                (hierarchy / "cgroup.subtree_control").write_text(wanted)


def remove(root: str) -> bool:
    """Remove the folder and its subfolders from every hierarchy; return True if all are gone.

    Waits a moment, since killed processes keep them busy.
    """
    deadline = time.monotonic() + _BUSY_SECONDS_MAX
    tops = [hierarchy / root.lstrip("/") for hierarchy in hierarchies(Path("/proc/mounts").read_text())]
    for top in tops:
        for folder, _, _ in os.walk(top, topdown=False):
            _remove_one(Path(folder), deadline=deadline)
    return not any(top.exists() for top in tops)


def process_count(root: str) -> int:
    """Count the processes in the folder and its subfolders; the maximum over all hierarchies."""
    counts = [0]
    for hierarchy in hierarchies(Path("/proc/mounts").read_text()):
        files = (hierarchy / root.lstrip("/")).rglob("cgroup.procs")
        counts.append(sum(len(file.read_text().split()) for file in files))
    return max(counts)


def _remove_one(folder: Path, *, deadline: float) -> None:
    while True:
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > deadline:
                return
            time.sleep(_BUSY_PAUSE_SECONDS)
        else:
            return
