"""Saved matrices like users', printed from known machines."""

from topology.model import Machine
from topology.profiles import profile


def saved(name: str) -> str:
    """Return what `nvidia-smi topo -m` prints on a known machine."""
    return printed(profile(name).machine)


def printed(machine: Machine) -> str:
    """Return what `nvidia-smi topo -m` prints on the machine, with a legend."""
    lines = ["\t" + "\t".join(f"GPU{number}" for number in range(machine.count)) + "\tCPU Affinity\tNUMA Affinity"]
    for number, row in enumerate(machine.links):
        node = machine.numa[number]
        lines.append("\t".join([f"GPU{number}", *row, "0-7", "N/A" if node is None else str(node)]))
    return "\n".join([*lines, "", "Legend:", "", "  X    = Self", "  NV#  = Connection of # NVLinks", ""])
