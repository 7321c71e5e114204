"""Folders of development clusters on this machine.

Two roots: the cache (binaries and images, kept between clusters, safe to delete) and the state (one folder per running
cluster, removed with it).
"""

from __future__ import annotations

import os
from pathlib import Path

MODULES = Path(__file__).parent / "modules"


def cache_root() -> Path:
    """Return $ATOLL_CACHE, or the folder atoll in the user's cache folder (XDG)."""
    return _root("ATOLL_CACHE", "XDG_CACHE_HOME", ".cache")


def state_root() -> Path:
    """Return $ATOLL_STATE, or the folder atoll in the user's state folder (XDG)."""
    return _root("ATOLL_STATE", "XDG_STATE_HOME", ".local/state")


def _root(own_variable: str, xdg_variable: str, below_home: str) -> Path:
    own = os.environ.get(own_variable)
    if own:
        return Path(own).resolve()
    xdg = os.environ.get(xdg_variable)
    base = Path(xdg) if xdg else Path.home() / below_home
    return (base / "atoll").resolve()
