"""Builds mock libraries with the machine's C compiler.

Returns the path of the library; compiles only if a source is newer.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("nvml.c")
MACHINE = Path(__file__).with_name("machine.h")
LIBRARY = "libnvidia-ml.so.1"
MACHINE_VARIABLE = "ATOLL_MOCK_NVML"
COMPILE_SECONDS_MAX = 120


class CompilerMissing(Exception):
    """No C compiler is on PATH."""


def build(folder: Path, *, driver: str = "") -> Path:
    """Compile the library into a folder and return its path. Raises CompilerMissing and subprocess errors.

    driver: version of the only driver with which the library works; empty for any.
    """
    defines = (f'-DDRIVER="{driver}"',) if driver else ()
    return compiled(folder / LIBRARY, (SOURCE,), defines=defines)


def compiled(target: Path, sources: Sequence[Path], *, warns: bool = True, defines: Sequence[str] = ()) -> Path:
    """Compile sources into a shared library if one of them is newer; return its path. Raises CompilerMissing and
    subprocess errors."""
    if target.exists() and all(target.stat().st_mtime >= one.stat().st_mtime for one in (*sources, MACHINE)):
        return target
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise CompilerMissing("gcc is not on PATH; install it (apt-get install gcc libc6-dev) and run again")
    target.parent.mkdir(parents=True, exist_ok=True)
    made = target.with_name(f"{target.name}.{os.getpid()}")
    warnings = ("-Wall", "-Wextra", "-Wno-format-truncation") if warns else ("-w",)
    options = ("-shared", "-fPIC", "-O2", *defines, *warnings, f"-Wl,-soname,{target.name}")
    command = (compiler, *options, "-o", str(made), *map(str, sources))
    subprocess.run(command, check=True, timeout=COMPILE_SECONDS_MAX)
    made.replace(target)
    return target


def environment(library: Path, machine_file: Path, *, variable: str = MACHINE_VARIABLE) -> dict[str, str]:
    """Environment with which a program's bindings load the library and see the machine."""
    folders = [str(library.parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {"LD_LIBRARY_PATH": ":".join(folders), variable: str(machine_file)}
