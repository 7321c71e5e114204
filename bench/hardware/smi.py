"""Output of nvidia-smi for this machine as plain values, for comparison.

Parses `nvidia-smi -q -x` and `-L` into one flat mapping per GPU, in nvidia-smi's order. Pure except `ask`.
"""

import re
import subprocess
from xml.etree import ElementTree as ET

SECONDS_MAX = 60
Facts = dict[str, str]
"""Path of an XML element below <gpu>, joined by slashes, to its text."""


def ask(*arguments: str) -> str:
    """Run nvidia-smi. Raises OSError and subprocess errors."""
    done = subprocess.run(("nvidia-smi", *arguments), capture_output=True, text=True, timeout=SECONDS_MAX, check=True)
    return done.stdout


def gpus(xml: str) -> list[Facts]:
    """Every GPU of `nvidia-smi -q -x`."""
    return [_flat(gpu) | {"id": gpu.get("id", "")} for gpu in ET.fromstring(xml).iter("gpu")]


def listed_uuids(text: str) -> list[str]:
    """Uuids of whole GPUs in `nvidia-smi -L`, in its order."""
    return re.findall(r"^GPU \d+:.*\(UUID: ([^)]+)\)", text, re.MULTILINE)


def pids(facts: Facts, xml: str) -> set[int]:
    """Processes of one GPU."""
    for gpu in ET.fromstring(xml).iter("gpu"):
        if (gpu.findtext("uuid") or "") == facts["uuid"]:
            return {int(one.findtext("pid") or 0) for one in gpu.iter("process_info")}
    return set()


def mebibytes(text: str) -> int | None:
    """The number in `81559 MiB`."""
    match = re.match(r"(\d+) MiB", text)
    return int(match[1]) if match else None


def _flat(element: ET.Element, prefix: str = "") -> Facts:
    found: Facts = {}
    for child in element:
        path = f"{prefix}{child.tag}"
        if len(child):
            found |= {key: value for key, value in _flat(child, f"{path}/").items() if key not in found}
        else:
            found.setdefault(path, (child.text or "").strip())
    return found
