"""Builds the mock of AMD's library with every function that the installed bindings look up.

Returns the path of `libamd_smi.so`. Raises BindingsMissing if the module amdsmi is not installed.
"""

import re
from importlib.util import find_spec
from pathlib import Path

from devcluster.mock_nvml.library import compiled
from devcluster.mock_nvml.library import environment as machine_environment

SOURCE = Path(__file__).with_name("amdsmi.c")
LIBRARY = "libamd_smi.so"
STUBS = "stubs.c"
_LOOKED_UP = re.compile(r"_libraries\['libamd_smi\.so'\]\.(\w+)")
_DEFINED = re.compile(r"^int (amdsmi_\w+)\(", re.MULTILINE)


class BindingsMissing(Exception):
    """The module amdsmi is not installed."""


def build(folder: Path) -> Path:
    """Compile the library into a folder and return its path. Raises BindingsMissing, CompilerMissing and subprocess
    errors."""
    spec = find_spec("amdsmi")
    if spec is None or spec.origin is None:
        raise BindingsMissing("the module amdsmi is not installed; make setup installs it")
    looked_up = set(_LOOKED_UP.findall(Path(spec.origin).with_name("amdsmi_wrapper.py").read_text()))
    others = sorted(looked_up - set(_DEFINED.findall(SOURCE.read_text())))
    text = "".join(f"int {name}(void) {{ return 2; }}\n" for name in others)
    folder.mkdir(parents=True, exist_ok=True)
    stubs = folder / STUBS
    if not stubs.exists() or stubs.read_text() != text:
        stubs.write_text(text)
    return compiled(folder / LIBRARY, (SOURCE, stubs))


def environment(library: Path, machine_file: Path) -> dict[str, str]:
    """Environment with which AMD's bindings load the library and see the machine."""
    found = machine_environment(library, machine_file, variable="ATOLL_MOCK_AMDSMI")
    return found | {"ROCM_PATH": str(library.parent), "ROCM_HOME": str(library.parent)}
