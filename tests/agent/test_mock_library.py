"""The mock of NVIDIA's library answers the vendor's bindings like a driver, also in calls that the agent omits."""

import json
import subprocess
import sys
from pathlib import Path

from devcluster.mock_nvml import MachineFile
from tests.agent.real_bindings import machine_of
from topology.profiles import profile

ASK = """
import json
import pynvml

pynvml.nvmlInit()
told = []
for index in range(pynvml.nvmlDeviceGetCount()):
    uuid = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index))
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    told.append([pynvml.nvmlDeviceGetIndex(handle), pynvml.nvmlDeviceGetMinorNumber(handle)])
first, third = (pynvml.nvmlDeviceGetHandleByIndex(index) for index in (0, 2))
try:
    lost = pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByUUID(uuid))
    pynvml.nvmlDeviceGetTopologyCommonAncestor(first, third)
except pynvml.NVMLError as error:
    lost = str(error)
print(json.dumps([told, lost]))
"""


def ask(path: Path, machine: MachineFile) -> list[object]:
    machine.write(path)
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True, timeout=60)
    answer: list[object] = json.loads(done.stdout)
    return answer


def test_a_handle_tells_its_own_index(mock_environment: Path) -> None:
    """By whatever way a handle was found; the index of this boot is not the minor number."""
    machine = MachineFile(profile("dgx1-v100"), seed="s", order=(3, 0, 6, 1, 7, 4, 2, 5))
    told, _ = ask(mock_environment, machine)

    assert told == [[index, minor] for index, minor in enumerate(machine.order)]


def test_the_relation_to_a_lost_gpu_is_an_error(mock_environment: Path) -> None:
    """Either end of a pair may be the one that fails."""
    machine = machine_of("dgx1-v100").fail(2, "nvmlDeviceGetTopologyCommonAncestor")

    assert ask(mock_environment, machine)[1] == "GPU is lost"
