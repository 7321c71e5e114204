"""Reports of every known machine, through the real bindings, compared with reviewed files.

After an intended change, rewrite them with ATOLL_WRITE_GOLDEN=1 and read the difference before the commit.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from agent.nvml import NvmlBackend
from atoll.api.node_status import GpuNodeStatusReport, HealthState
from devcluster.mock_nvml.sick import STORIES
from tests.agent.real_bindings import NOWHERE, Bench, machine_of
from topology.model import machine as make_machine
from topology.profiles import profile, profile_names

GOLDEN = Path(__file__).parent / "golden"
NVIDIA = [name for name in profile_names() if profile(name).machine.vendor == "nvidia"]


@pytest.fixture(scope="module")
def shared(mock_environment: Path) -> Iterator[NvmlBackend]:
    """One worker for all machines: the library reads the file anew at every call."""
    backend = NvmlBackend(pci_devices=NOWHERE)
    yield backend
    backend.close()


def told(report: GpuNodeStatusReport) -> bytes:
    """A report as the golden files have it: one line per device and per row of links."""
    body = report.to_json()
    devices = b",\n  ".join(orjson.dumps(device) for device in body.pop("devices"))
    links = {
        key: [" ".join(row) for row in value] if key in {"nvlink", "pcie"} else value
        for key, value in body.pop("links").items()
    }
    rest = orjson.dumps({**body, "links": links}, option=orjson.OPT_INDENT_2)
    return b'{"devices": [\n  ' + devices + b'\n ],\n "report": ' + rest + b"}\n"


def compare(name: str, report: GpuNodeStatusReport) -> None:
    path = GOLDEN / f"{name}.json"
    if os.environ.get("ATOLL_WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(told(report))
    assert orjson.loads(told(report)) == orjson.loads(path.read_bytes())


@pytest.mark.parametrize("name", NVIDIA)
def test_every_known_machine_is_reported_as_it_is(shared: NvmlBackend, mock_environment: Path, name: str) -> None:
    """Links, NUMA nodes, generation and cards come out of the driver as the known machine has them, and healthy."""
    known = profile(name)
    report = Bench(mock_environment, machine_of(name), shared).look()

    assert make_machine(report.links.nvlink).links == known.machine.links
    assert tuple(device.numa_node for device in report.devices) == known.machine.numa
    assert report.links.nvlink_generation == known.machine.nvlink_generation
    assert report.links.nvswitch == known.machine.nvswitch
    assert {device.model for device in report.devices} == {known.model}
    assert {device.health.state for device in report.devices} == {HealthState.HEALTHY}
    assert not any(device.incidents for device in report.devices)
    compare(name, report)


@pytest.mark.parametrize("story", STORIES)
def test_every_sick_machine_is_reported_as_it_is(mock_environment: Path, story: str) -> None:
    """A machine that was well at the first look and is sick at the second."""
    bench = Bench(mock_environment, machine_of("dgx1-v100" if story == "asymmetric" else "dgx-h100"))
    bench.look()
    bench.minute = 1
    bench.machine = STORIES[story](bench.machine)
    report = bench.look()
    bench.backend.close()

    compare(f"sick-{story}", report)


def test_there_is_a_report_of_every_machine_and_every_story() -> None:
    """Nothing is known here that nobody looked at, and no report is left of what is not known any more."""
    wanted = {*profile_names(), *(f"sick-{story}" for story in STORIES)}
    assert {path.stem for path in GOLDEN.glob("*.json")} == wanted
