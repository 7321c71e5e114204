"""Building the mock library with the machine's C compiler.

In: a folder. Out: the path of `libnvidia-ml.so.1` in it. Compiled anew only where the source is newer.
"""

import os
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("nvml.c")
LIBRARY = "libnvidia-ml.so.1"
MACHINE_VARIABLE = "ATOLL_MOCK_NVML"
COMPILE_SECONDS_MAX = 120


class CompilerMissing(Exception):
    """No C compiler is on PATH."""


def build(folder: Path) -> Path:
    """Compile the library into a folder and return its path. Raises CompilerMissing and subprocess errors."""
    target = folder / LIBRARY
    if target.exists() and target.stat().st_mtime >= SOURCE.stat().st_mtime:
        return target
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise CompilerMissing("gcc is not on PATH; install it (apt-get install gcc libc6-dev) and run again")
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"{LIBRARY}.{os.getpid()}"
    options = ("-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Wno-format-truncation", f"-Wl,-soname,{LIBRARY}")
    subprocess.run((compiler, *options, "-o", str(made), str(SOURCE)), check=True, timeout=COMPILE_SECONDS_MAX)
    made.replace(target)
    return target


def environment(library: Path, machine_file: Path) -> dict[str, str]:
    """What a program's environment needs so that its bindings load the library and play the machine."""
    folders = [str(library.parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {"LD_LIBRARY_PATH": ":".join(folders), MACHINE_VARIABLE: str(machine_file)}
