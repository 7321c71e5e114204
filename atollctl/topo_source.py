"""The machine that `atoll topo` and `atoll choose` show: from a saved matrix, a known machine or a node's report.

Every function returns a frozen MachineSource or raises InputError, whose message the user sees. `read_text`,
`read_offline` and `read_node` do I/O; the rest is pure.
"""

import codecs
import itertools
import re
import sys
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, Final, TextIO

import pydantic

from atoll.api.node_status import GpuNodeStatus
from atoll.cluster.health import judge
from atoll.cluster.machines import NodeDevices, node_devices
from atoll.kube import paths
from atoll.kube.client import ApiClient
from atoll.kube.errors import KubeError, NotFound
from atollctl.sentences import sentence
from topology.errors import TopologyError
from topology.links import clean_cell
from topology.model import DEVICES_MAX, Machine, positions_of
from topology.profiles import Profile, profile, profile_names
from topology.quality import rate
from topology.rates import rates_known
from topology.topo_text import TEXT_MAX, TopologyText, machine_of, read_topology

LINE_LENGTH_MAX: Final = 4096
"""Limit; a row of 64 GPUs and 64 adapters with its CPU lists has some two thousand characters."""
ID_DIGITS_MAX: Final = 5
TITLE_LENGTH_MAX: Final = 72
TEXT_SHOWN_MAX: Final = 2048
_LEGEND: Final = re.compile(r"^[ \t]*(NIC\d{1,5}): (\S{1,63})[ \t\r]*$", re.MULTILINE)
HOW_TO_SAVE: Final = "save the output of `nvidia-smi topo -m` unchanged"
RELATIVE: Final = "The generation of the links is unknown, so bandwidths are relative; give --model."
RELATIVE_STILL: Final = "The model is not known to have such links, so bandwidths are relative."
SLOW_SOCKETS: Final = (
    "Traffic between sockets counts at the slowest known rate, because a saved matrix does not show its speed."
)


class InputError(Exception):
    """Invalid input; the message says what is wrong and what to do instead."""


@dataclass(frozen=True, slots=True)
class AdapterRelations:
    """One network adapter by its name, and its PCIe relation to each position."""

    name: str
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MachineSource:
    """One machine. ids: the GPU number of each position; cards: product or model name, empty where unknown; unusable:
    positions that are unhealthy, cordoned or split into MIG instances; remarks: sentences that every answer must
    include; adapters: network adapters with their PCIe relation to each position."""

    name: str
    machine: Machine
    ids: tuple[int, ...]
    cards: str = ""
    unusable: tuple[int, ...] = ()
    remarks: tuple[str, ...] = ()
    adapters: tuple[AdapterRelations, ...] = ()

    @property
    def rates_known(self) -> bool:
        """True if bandwidths are in GB/s."""
        return rates_known(self.machine)

    def ids_of(self, positions: tuple[int, ...]) -> tuple[int, ...]:
        """GPU numbers of positions."""
        return tuple(self.ids[position] for position in positions)

    def bandwidth(self, gbps: float) -> str:
        """A ring bandwidth in words: GB/s if the rates are known, else as a multiple of the best pair's."""
        if self.rates_known:
            return f"{round(gbps, 1):g} GB/s"
        unit = best_pair_gbps(self.machine)
        return f"{gbps / unit:.2g} x the best pair" if unit else "unknown"


@lru_cache(maxsize=16)
def best_pair_gbps(machine: Machine) -> float:
    """Ring bandwidth of the best pair, the unit of relative bandwidths; 0 without a pair."""
    pairs = itertools.combinations(range(machine.count), 2)
    return max((rate(machine, pair).ring_gbps for pair in pairs), default=0.0)


def source_of_text(text: str, *, name: str, model: str = "") -> MachineSource:
    """The machine of a saved matrix. Raises InputError."""
    if any(len(line) > LINE_LENGTH_MAX for line in text.splitlines()):
        raise InputError(f"{printable(name)} has a line of more than {LINE_LENGTH_MAX} characters; {HOW_TO_SAVE}")
    known = known_model(model) if model else None
    try:
        matrix = read_topology(text)
        geometry = _geometry(matrix, known)
    except TopologyError as error:
        raise InputError(f"{printable(name)}: {printable(str(error))}") from error
    ids = _ids(matrix)
    remarks = [_disagreement(ids[first], ids[second]) for first, second in matrix.asymmetric]
    if matrix.strange:
        remarks.append(f"Not understood and counted as SYS: {printable(', '.join(matrix.strange))[:TITLE_LENGTH_MAX]}.")
    if matrix.rowless:
        remarks.append(f"Left out, because they have no row: {printable(', '.join(matrix.rowless))}.")
    if not rates_known(geometry):
        remarks.append(RELATIVE if known is None else RELATIVE_STILL)
    elif any("SYS" in row for row in geometry.links):
        remarks.append(SLOW_SOCKETS)
    return MachineSource(
        name=printable(name),
        machine=geometry,
        ids=ids,
        cards=known.product_name if known is not None else "",
        remarks=tuple(remarks),
        adapters=_adapters_of_text(matrix, text),
    )


def source_of_profile(name: str) -> MachineSource:
    """A known machine. Raises InputError."""
    try:
        known = profile(name)
    except TopologyError as error:
        raise InputError(printable(str(error))) from error
    return MachineSource(
        name=known.name, machine=known.machine, ids=tuple(range(known.machine.count)), cards=known.product_name
    )


def source_of_report(status: GpuNodeStatus) -> MachineSource:
    """The machine in a node's report. Raises InputError if there is nothing to draw."""
    name = printable(status.metadata.name)
    devices = node_devices(status)
    if devices is None or not devices.devices:
        raise InputError(
            f"the report of node {name} shows no GPUs that can be drawn (1 to {DEVICES_MAX} with ids of their own); "
            f"see `kubectl describe gpunodestatus {name}`"
        )
    cards = dict.fromkeys(device.product_name or device.model for device in devices.devices)
    source = MachineSource(
        name=name,
        machine=devices.machine,
        ids=tuple(device.id for device in devices.devices),
        cards=printable(", ".join(cards)),
        unusable=positions_of(devices.all & ~devices.usable),
    )
    remarks = () if source.rates_known else ("The agent could not read the generation: bandwidths are relative.",)
    return replace(source, remarks=remarks + _standing_remarks(status, devices), adapters=_adapters_of(status))


def _adapters_of(status: GpuNodeStatus) -> tuple[AdapterRelations, ...]:
    """Adapters of a report whose cells are in the order of its devices."""
    report = status.status
    if report is None:
        return ()
    told = (nic for nic in report.links.nics if len(nic.cells) == len(report.devices))
    return tuple(AdapterRelations(printable(nic.name), tuple(map(clean_cell, nic.cells))) for nic in told)


def _adapters_of_text(matrix: TopologyText, text: str) -> tuple[AdapterRelations, ...]:
    """Adapters of a matrix, with the names of its legend if there is one."""
    names = dict(_LEGEND.findall(text))
    return tuple(
        AdapterRelations(printable(names.get(nic.name, nic.name)), tuple(map(clean_cell, nic.cells)))
        for nic in matrix.nics
    )


def _standing_remarks(status: GpuNodeStatus, devices: NodeDevices) -> tuple[str, ...]:
    """Why GPUs are not given out, and notable states of the others."""
    standings = judge(status).standings
    told = ((device.id, standings[device.uuid]) for device in devices.devices)
    return tuple(
        printable(f"GPU {number} is {standing.state}" + (f": {standing.reason}" if standing.reason else ""))
        for number, standing in told
        if standing.reason or not standing.may_be_given_out
    )


def known_model(text: str) -> Profile:
    """A known machine with GPUs of that model: product name, slug or a part such as `H100`.

    Raises InputError if there is none, or if several differ in link or PCIe generation.
    """
    slug = "-".join(re.findall(r"[a-z0-9]+", text.lower()))
    found = [known for known in map(profile, profile_names()) if slug and f"-{slug}-" in f"-{known.model}-"]
    if not found:
        models = sorted({profile(name).model for name in profile_names()})
        raise InputError(f"no GPU model {printable(text)!r} is known; use one of {', '.join(models)}")
    if len({_generation(known) for known in found}) > 1:
        models = sorted({known.model for known in found})
        raise InputError(f"the model {printable(text)!r} is ambiguous; use one of {', '.join(models)}")
    return found[0]


def printable(text: str) -> str:
    """The text on one line, without characters special to a terminal or XML; long text is cut."""
    return "".join(character if character.isprintable() else "?" for character in text[:TEXT_SHOWN_MAX])


def shortened(text: str) -> str:
    """Text cut to the length of a title."""
    return text if len(text) <= TITLE_LENGTH_MAX else f"{text[: TITLE_LENGTH_MAX - 1]}…"


def gpus_text(ids: tuple[int, ...]) -> str:
    """GPU numbers with the word before them."""
    return f"GPU{'s' if len(ids) > 1 else ''} {ranges(ids)}"


def ranges(ids: tuple[int, ...]) -> str:
    """Numbers for people, such as `0-3, 7`."""
    runs: list[list[int]] = []
    for number in sorted(ids):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(texts)


def _geometry(matrix: TopologyText, known: Profile | None) -> Machine:
    """The model gives generations and the vendor; the rest is specific to this machine and stays unknown."""
    facts = known.machine if known is not None else None
    geometry = machine_of(
        matrix,
        nvlink_generation=facts.nvlink_generation if facts else None,
        link_gbps=facts.link_gbps if facts else None,
        pcie_generation=facts.pcie_generation if facts else None,
    )
    is_amd = any(cell.startswith("XGMI") for row in geometry.links for cell in row)
    return replace(geometry, vendor=facts.vendor if facts else "amd" if is_amd else geometry.vendor)


def _ids(matrix: TopologyText) -> tuple[int, ...]:
    digits = [label.removeprefix("GPU") for label in matrix.labels]
    if too_long := next((text for text in digits if len(text) > ID_DIGITS_MAX), None):
        raise InputError(f"GPU{printable(too_long)[:12]}... is no number of a GPU; {HOW_TO_SAVE}")
    ids = tuple(int(text) for text in digits)
    if len(set(ids)) < len(ids):
        raise InputError(f"two GPUs have the same number; {HOW_TO_SAVE}")
    return ids


def _disagreement(first: int, second: int) -> str:
    return f"GPUs {first} and {second} disagree about their link; the weaker side counts."


def _generation(known: Profile) -> tuple[int | None, float | None, int | None, str]:
    facts = known.machine
    return facts.nvlink_generation, facts.link_gbps, facts.pcie_generation, facts.vendor


UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
"""First bytes of a text saved by PowerShell."""


def read_text(path: Path) -> str:
    """Read a saved matrix; `-` is standard input. Raises InputError if it cannot be read or is too large."""
    try:
        if str(path) == "-":
            data = _standard_input().read(TEXT_MAX + 1)
        else:
            with path.open("rb") as file:
                data = file.read(TEXT_MAX + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot read {printable(str(path))}: {reason}") from error
    if len(data) > TEXT_MAX:
        raise InputError(f"{printable(str(path))} is larger than {TEXT_MAX} bytes, as no link matrix is; {HOW_TO_SAVE}")
    return data.decode("utf-16" if data[:2] in UTF_16 else "utf-8", errors="replace")


def _standard_input() -> BinaryIO:
    stream: TextIO | None = sys.stdin
    if stream is None:
        raise InputError("standard input is closed; give a file to --from")
    return stream.buffer


def read_offline(from_file: Path | None, profile_name: str | None, model: str, *, or_this: str = "") -> MachineSource:
    """The machine of exactly one of file and profile. Raises InputError, which also suggests `or_this`."""
    if profile_name is not None and (from_file is not None or model):
        raise InputError("a known machine has its own GPUs; leave out --from and --model")
    if profile_name is not None:
        return source_of_profile(profile_name)
    if from_file is None:
        files = "--from FILE with a saved `nvidia-smi topo -m`, or --profile NAME"
        raise InputError(f"no machine is named; give {or_this}{files}")
    name = "standard input" if str(from_file) == "-" else from_file.name
    return source_of_text(read_text(from_file), name=name, model=model)


def refuse_options_of_files(from_file: Path | None, profile_name: str | None, model: str) -> None:
    """Raise InputError if a node and another source are given."""
    if from_file is not None or profile_name is not None or model:
        raise InputError("a node has its own GPUs; leave out --from, --profile and --model")


async def read_node(node: str, kubeconfig: Path | None, context: str | None) -> MachineSource:
    """The machine in the node's report. Raises InputError."""
    name = printable(node)
    if node in {"", ".", ".."}:
        raise InputError(f"{name!r} is not a node name")
    try:
        async with await ApiClient.connect(kubeconfig, context, user_agent="atoll-topo") as client:
            status = GpuNodeStatus.model_validate_json(await client.get(paths.gpunodestatuses(node)))
    except NotFound as error:
        raise InputError(f"there is no GPU report of node {name}; does its agent run?") from error
    except KubeError as error:
        raise InputError(f"the report of node {name} could not be read: {sentence(error)}") from error
    except pydantic.ValidationError as error:
        raise InputError(
            f"the report of node {name} is not what an agent writes: {error.error_count()} faults"
        ) from error
    return source_of_report(status)
