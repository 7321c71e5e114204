"""Programs that are not built here: runc and busybox for nodes; Prometheus, a browser and PostgreSQL for tests.

runc needs a C compiler and libseccomp, busybox is written in C; every distribution packages both. They come from PATH
if suitable, otherwise from Debian's packages, which are downloaded and unpacked into the cache without installation.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from devcluster.errors import BuildError

_PACKAGES = ("runc", "libseccomp2", "busybox-static")
_PROMETHEUS_PACKAGES = ("prometheus",)
_BROWSER_PACKAGES = ("chromium-headless-shell", "fonts-dejavu-core")
_POSTGRES_PACKAGES = ("postgresql",)
_POSTGRES_FOLDERS = "usr/lib/postgresql/*/bin"
_FONTS = """\
<?xml version="1.0"?>
<fontconfig><dir>{fonts}</dir><dir>/usr/share/fonts</dir><cachedir>{cache}</cachedir></fontconfig>
"""
_ELF_PROGRAM_HEADER_INTERPRETER = 3


@dataclass(frozen=True, slots=True)
class SystemPrograms:
    """Paths of runc, of the folder with its libseccomp (None: the system's) and of a static busybox."""

    runc: Path
    runc_libraries: Path | None
    busybox: Path


def find_system_programs(cache: Path, *, report: Callable[[str], None]) -> SystemPrograms:
    """Find runc and busybox on this machine or in the cache. Raises BuildError with what to install."""
    runc, busybox = shutil.which("runc"), shutil.which("busybox")
    unpacked = cache / "debian"
    if runc and busybox and is_static(Path(busybox)):
        return SystemPrograms(runc=Path(runc), runc_libraries=None, busybox=Path(busybox))
    if not (unpacked / "complete").exists():
        _keep_packages(_PACKAGES, unpacked, report=report)
    return SystemPrograms(
        runc=Path(runc) if runc else _only(unpacked, ("usr/sbin/runc", "usr/bin/runc")),
        runc_libraries=None if runc else _only(unpacked, ("**/libseccomp.so.2",)).parent,
        busybox=_only(unpacked, ("bin/busybox", "usr/bin/busybox")),
    )


@dataclass(frozen=True, slots=True)
class PrometheusPrograms:
    """Paths of the server and of promtool, which checks and tests rules."""

    prometheus: Path
    promtool: Path


def find_prometheus(cache: Path, *, report: Callable[[str], None]) -> PrometheusPrograms:
    """Find Prometheus on this machine or in the cache. Raises BuildError with what to install."""
    server, tool = shutil.which("prometheus"), shutil.which("promtool")
    if server and tool:
        return PrometheusPrograms(Path(server), Path(tool))
    unpacked = _kept_whole(cache, "debian-prometheus", lambda: _PROMETHEUS_PACKAGES, report=report)
    return PrometheusPrograms(_only(unpacked, ("usr/bin/prometheus",)), _only(unpacked, ("usr/bin/promtool",)))


@dataclass(frozen=True, slots=True)
class Browser:
    """A headless Chromium and its environment variables."""

    program: Path
    environment: Mapping[str, str]


def find_browser(cache: Path, *, report: Callable[[str], None]) -> Browser:
    """Find Debian's Chromium with its missing libraries in the cache. Raises BuildError with what to install."""
    unpacked = _kept_whole(cache, "debian-browser", lambda: _lacking(_BROWSER_PACKAGES), report=report)
    program = _only(unpacked, ("usr/lib/chromium/*headless*shell", "usr/lib/chromium*/*headless*shell"))
    fonts = unpacked / "fonts.conf"
    fonts.write_text(_FONTS.format(fonts=unpacked / "usr/share/fonts", cache=unpacked / "fonts"))
    libraries = sorted({str(path.parent) for path in unpacked.glob("usr/lib/**/*.so*")})
    return Browser(program, {"LD_LIBRARY_PATH": ":".join(libraries), "FONTCONFIG_FILE": str(fonts)})


@dataclass(frozen=True, slots=True)
class PostgresPrograms:
    """Folder with initdb, pg_ctl and postgres, and their environment variables."""

    folder: Path
    environment: Mapping[str, str]


def find_postgres(cache: Path, *, report: Callable[[str], None]) -> PostgresPrograms:
    """Find PostgreSQL on this machine or in the cache. Raises BuildError with what to install."""
    for folder in sorted(Path("/").glob(_POSTGRES_FOLDERS), reverse=True):
        if (folder / "initdb").exists():
            return PostgresPrograms(folder, {})
    unpacked = _kept_whole(cache, "debian-postgres", lambda: _lacking(_POSTGRES_PACKAGES), report=report)
    libraries = sorted({str(path.parent) for path in unpacked.glob("usr/lib/**/*.so*")})
    return PostgresPrograms(_only(unpacked, (_POSTGRES_FOLDERS,)), {"LD_LIBRARY_PATH": ":".join(libraries)})


def _lacking(packages: Sequence[str]) -> list[str]:
    """Return the packages and their dependencies that this machine lacks. Raises BuildError."""
    if not shutil.which("apt-get"):
        raise BuildError(f"cannot install {', '.join(packages)}: this machine has no apt-get")
    command = ["apt-get", "-s", "install", "--no-install-recommends", "--reinstall", *packages]
    for _ in range(2):
        listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        if found := re.findall(r"^Inst (\S+) ", listed, re.MULTILINE):
            return found
        _run(["apt-get", "update", "-qq"], folder=Path("/"))
    raise BuildError(
        f"apt-get cannot find {', '.join(packages)}: check that this is Debian and that `apt-get update` works"
    )


def _kept_whole(
    cache: Path, name: str, packages: Callable[[], Sequence[str]], *, report: Callable[[str], None]
) -> Path:
    """Return the cache folder of the packages; they are unpacked beside it and moved there when complete."""
    unpacked = cache / name
    if not (unpacked / "complete").exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=cache) as folder:
            whole = Path(folder) / "whole"
            _keep_packages(packages(), whole, report=report)
            with contextlib.suppress(OSError):  # another process was faster
                whole.rename(unpacked)
    return unpacked


def is_static(program: Path) -> bool:
    """True if a 64-bit ELF program needs no loader, so that it runs in an otherwise empty image."""
    with program.open("rb") as file:
        header = file.read(64)
        if header[:5] != b"\x7fELF\x02":
            return False
        offset, size, count = *struct.unpack_from("<Q", header, 32), *struct.unpack_from("<HH", header, 54)
        file.seek(offset)
        table = file.read(size * count)
    kinds = [struct.unpack_from("<I", table, index * size)[0] for index in range(count)]
    return _ELF_PROGRAM_HEADER_INTERPRETER not in kinds


def _keep_packages(packages: Sequence[str], target: Path, *, report: Callable[[str], None]) -> None:
    """Unpack packages into a folder of the cache and mark it as complete."""
    report(f"unpacking {', '.join(packages)} into {target}")
    unpack_packages(packages, target)
    (target / "complete").touch()


def unpack_packages(packages: Sequence[str], target: Path) -> None:
    """Replace a folder's content with Debian's packages, without their dependencies. Raises BuildError."""
    wanted = ", ".join(packages)
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise BuildError(f"{wanted} or a part of it is missing: install it with this machine's package manager")
    shutil.rmtree(target, ignore_errors=True)
    downloads = target / "downloads"
    downloads.mkdir(parents=True)
    if _run(["apt-get", "download", *packages], folder=downloads) is not None:
        _run(["apt-get", "update", "-qq"], folder=downloads)
        problem = _run(["apt-get", "download", *packages], folder=downloads)
        if problem is not None:
            raise BuildError(f"cannot download {wanted}: {problem}; install {wanted}")
    for package in sorted(downloads.glob("*.deb")):
        problem = _run(["dpkg-deb", "-x", str(package), str(target)], folder=target)
        if problem is not None:
            raise BuildError(f"cannot unpack {package.name}: {problem}")
    shutil.rmtree(downloads)


def _run(command: Sequence[str], *, folder: Path) -> str | None:
    """Run a command; return None on success, otherwise the end of its error output."""
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return None if result.returncode == 0 else result.stderr.strip()[-500:]


def _only(folder: Path, patterns: Sequence[str]) -> Path:
    for pattern in patterns:
        for found in sorted(folder.glob(pattern)):
            return found
    raise BuildError(f"none of {', '.join(patterns)} in {folder}: remove that folder and try again")
