"""Builds the programs of a development cluster into the cache, once.

Every program is built under a temporary name and renamed when complete, so an interrupted build continues where it
stopped; the folder is keyed by all inputs (module files, Go version, flags), so a change never uses a stale binary. A
lock on the module's folder prevents concurrent builds of the same program.

`python -m devcluster.build` fills the cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from devcluster.errors import BuildError
from devcluster.paths import MODULES, cache_root
from devcluster.programs import DEFAULT_KUBERNETES, Program, helm_program, owner_programs, programs_for, s3_program
from devcluster.toolchain import Toolchain, find_toolchain

Report = Callable[[str], None]

_BUILD_FLAGS = ("-trimpath", "-buildvcs=false", "-mod=readonly")
_EXTRAS = ("kwok", "kueue", "helm", "s3", "owners")
_FROM_ASSETS = ("etcd", "kube-apiserver", "kubectl")
_SECONDS = {
    "helm": 120,
    "etcd": 30,
    "kube-apiserver": 290,
    "kube-controller-manager": 110,
    "kubectl": 45,
    "kubelet": 45,
    "containerd": 60,
    "kwok": 80,
    "kueue": 205,
    "jobset": 185,
    "lws": 10,
    "mpi-operator": 155,
    "trainer": 20,
    "kuberay": 220,
    "appwrapper": 290,
}
"""Measured build time on two cores with an empty cache. Other programs reuse these builds: `_SECONDS_OTHERS`."""
_SECONDS_OTHERS = 5
_REPORT_EVERY_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Binaries:
    """Path of each program of a cluster."""

    paths: Mapping[str, Path]

    def __getitem__(self, name: str) -> Path:
        """Path of a program; a KeyError is a bug of ours, not a user error."""
        return self.paths[name]


def report_to_stderr(line: str) -> None:
    """Print a line of progress to standard error; the default report."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def ensure_binaries(
    kubernetes: str = DEFAULT_KUBERNETES,
    *,
    real_nodes: bool = True,
    kwok: bool = False,
    nvidia: bool = False,
    kueue: bool = False,
    cache: Path | None = None,
    report: Report = report_to_stderr,
) -> Binaries:
    """Return every program of such a cluster; build missing ones. Raises BuildError with the program and the cause."""
    cache = cache or cache_root()
    found = assets_from_environment(os.environ, kubernetes=kubernetes, report=report)
    rows = programs_for(kubernetes, real_nodes=real_nodes, kwok=kwok, nvidia=nvidia, kueue=kueue)
    built = _ensure([row for row in rows if row.name not in found], cache=cache, report=report)
    return Binaries(paths={**found, **built})


def ensure_helm(*, cache: Path | None = None, report: Report = report_to_stderr) -> Path:
    """Return Helm; build it if missing. Raises BuildError."""
    return _ensure([helm_program()], cache=cache or cache_root(), report=report)["helm"]


def ensure_s3(*, cache: Path | None = None, report: Report = report_to_stderr) -> Path:
    """Return the S3 server; build it if missing. Raises BuildError."""
    return _ensure([s3_program()], cache=cache or cache_root(), report=report)["versitygw"]


def ensure_owner(name: str, *, cache: Path | None = None, report: Report = report_to_stderr) -> Path:
    """Return an operator that owns pods of gangs; build it if missing. Raises BuildError."""
    rows = [row for row in owner_programs() if row.name == name]
    return _ensure(rows, cache=cache or cache_root(), report=report)[name]


def folder_name(row: Program, *, go_version: str, modules: Path = MODULES) -> str:
    """Cache folder of a program: module name, and a hash of the module's files, Go version and flags."""
    flags = f"{row.link_flags} with C" if row.needs_c else row.link_flags
    digest = hashlib.sha256(f"{go_version} {' '.join(_BUILD_FLAGS)} {flags}".encode())
    for file in sorted(path for path in (modules / row.module).rglob("*") if path.is_file()):
        digest.update(f"\0{file.relative_to(modules)}\0".encode())
        digest.update(file.read_bytes())
    return f"{row.module}-{digest.hexdigest()[:12]}"


def assets_from_environment(environment: Mapping[str, str], *, kubernetes: str, report: Report) -> dict[str, Path]:
    """Programs from the folder in KUBEBUILDER_ASSETS, if its API server has the wanted minor version."""
    value = environment.get("KUBEBUILDER_ASSETS")
    if not value:
        return {}
    folder = Path(value)
    server = folder / "kube-apiserver"
    if not os.access(server, os.X_OK):
        report(f"KUBEBUILDER_ASSETS={folder} has no kube-apiserver: building it")
        return {}
    answer = subprocess.run([server, "--version"], capture_output=True, text=True, check=False).stdout.strip()
    version = re.search(r"v(\d+\.\d+)\.", answer)
    if version is None or not kubernetes.startswith(f"{version.group(1)}."):
        report(f"KUBEBUILDER_ASSETS={folder} has {answer or 'no version'}, wanted {kubernetes}: building it")
        return {}
    return {name: folder / name for name in _FROM_ASSETS if os.access(folder / name, os.X_OK)}


def _ensure(wanted: Sequence[Program], *, cache: Path, report: Report) -> dict[str, Path]:
    toolchain = find_toolchain(cache, report=report)
    targets = {row: cache / "bin" / folder_name(row, go_version=toolchain.version) / row.name for row in wanted}
    _build_missing(targets, toolchain=toolchain, report=report)
    return {row.name: target for row, target in targets.items()}


def expected_seconds(names: Iterable[str]) -> int:
    """Build time of the named programs in seconds, on two cores with an empty cache."""
    return sum(_SECONDS.get(name, _SECONDS_OTHERS) for name in names)


def _build_missing(targets: Mapping[Program, Path], *, toolchain: Toolchain, report: Report) -> None:
    missing = {row: target for row, target in targets.items() if not target.exists()}
    names = [row.name for row in missing]
    if missing:
        minutes = math.ceil(expected_seconds(names) / 60)
        report(f"programs to build, once: {len(missing)}, about {minutes} minutes on two cores")
    for number, (row, target) in enumerate(missing.items()):
        with _module_lock(target.parent, report=report):
            if target.exists():
                continue
            started = time.monotonic()

            def progress(seconds: float, *, row: Program = row, number: int = number) -> None:
                percent = percent_built(names, number, seconds=seconds)
                report(f"{percent:3d} %  building {row.name} ({row.package}), for {seconds:.0f} s")

            build_program(row, target, toolchain=toolchain, progress=progress)
            size = target.stat().st_size / 1e6
            percent = percent_built(names, number + 1)
            report(f"{percent:3d} %  {row.name}: {size:.0f} MB in {time.monotonic() - started:.0f} s")


def percent_built(names: Sequence[str], done: int, *, seconds: float = 0) -> int:
    """Progress of a build by expected time: `done` programs are built, the next one has run for `seconds`."""
    begun = min(seconds, 0.9 * expected_seconds(names[done : done + 1]))
    return int(100 * (expected_seconds(names[:done]) + begun) / max(expected_seconds(names), 1))


def build_program(
    row: Program, target: Path, *, toolchain: Toolchain, progress: Callable[[float], None] = lambda _: None
) -> None:
    """Build one program; the target appears complete or not at all. Raises BuildError with the compiler's output.

    `progress` is called with the seconds spent so far, at the start and every minute.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{row.name}.unfinished")
    flags = (*_BUILD_FLAGS, "-ldflags", row.link_flags, "-o", str(unfinished))
    command = [toolchain.command, "build", *flags, row.package]
    environment = {**os.environ, "CGO_ENABLED": str(int(row.needs_c)), "GOFLAGS": "", "GOWORK": "off"}
    pipe = subprocess.PIPE
    try:
        with subprocess.Popen(
            command, cwd=MODULES / row.module, env=environment, stdout=pipe, stderr=pipe, text=True
        ) as process:
            said = _wait(process, progress)
        if process.returncode != 0:
            raise BuildError(f"cannot build {row.name} from {row.package}: {said.strip()[-1500:]}")
        unfinished.rename(target)
    finally:
        unfinished.unlink(missing_ok=True)


def _wait(process: subprocess.Popen[str], progress: Callable[[float], None]) -> str:
    """Wait for the process and return its standard error; an interrupt kills the process."""
    started = time.monotonic()
    try:
        while True:
            progress(time.monotonic() - started)
            try:
                return process.communicate(timeout=_REPORT_EVERY_SECONDS)[1]
            except subprocess.TimeoutExpired:
                continue
    except BaseException:
        process.kill()
        raise


@contextmanager
def _module_lock(folder: Path, *, report: Report) -> Iterator[None]:
    """Lock a module's folder: builds of one module wait for each other, builds of different modules do not."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"another build of {folder.name} is running: waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def main(arguments: list[str]) -> int:
    """Build everything for the named versions (default: one).

    The words 'kwok' (fake nodes), 'kueue', 'helm', 's3' (S3 server for the checkpoint tests) and 'owners' (operators
    that own pods of gangs) add those programs.
    """
    kwok, kueue, helm, s3, owners = (extra in arguments for extra in _EXTRAS)
    versions = [argument for argument in arguments if argument not in _EXTRAS] or [DEFAULT_KUBERNETES]
    try:
        if helm:
            ensure_helm()
        if s3:
            ensure_s3()
        if owners:
            for row in owner_programs():
                ensure_owner(row.name)
        for version in versions:
            binaries = ensure_binaries(version, kwok=kwok, nvidia=True, kueue=kueue)
            report_to_stderr(f"Kubernetes {version}: {len(binaries.paths)} programs ready in {cache_root() / 'bin'}")
    except BuildError as error:
        report_to_stderr(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
