"""A `libnvidia-ml.so.1` that simulates any machine, faulty ones too, so that the real NVML bindings run without a GPU.

`build` compiles nvml.c with gcc. At every call the library reads the machine from the file in ATOLL_MOCK_NVML, so a
test changes the machine by replacing the file (`MachineFile.write`). To use it, put the library's folder first in
LD_LIBRARY_PATH of the program that loads the bindings.

Keys of the file, one `key value` per line (`devcluster.mock_nvml.machine_file` writes them):

    count 8 | driver 580.1 | nvml 13.580 | event.1 GPU TYPE DATA (TYPE 8 is an XID, DATA its number)
    gpu.0.uuid | name | serial | bus | minor | architecture | memory_mib | compute_capability | pcie_generation
    gpu.0.ecc 1 | mig 0 | power_management 1 | persistence 1 | throttle 0x0 | numa_mask 1 | cpu_mask ff | pids 12 13
    gpu.0.remapped CORRECTED UNCORRECTED PENDING FAILED
    gpu.0.retired_pending 0 | retired_single_bit 0 | retired_double_bit 0
    gpu.0.ecc_corrected_volatile 0 (and uncorrected, aggregate) | field.90 MBPS
    gpu.0.fabric STATE STATUS CLIQUE HEALTHMASK CLUSTER | gpu.0.link.3 down|gpu BUS|switch BUS|unknown
    gpu.0.mig_max 7 | gpu.0.mig.0.uuid | name | memory_mib | slices GI CI | gi | ci | pids
    pair.0.1.level 10 | pair.0.1.p2p 0
    fail.GPU.FUNCTION CODE[/EACH] | hang.GPU.FUNCTION SECONDS | crash.GPU.FUNCTION 1    (GPU or FUNCTION may be *)
"""

from devcluster.mock_nvml.library import build
from devcluster.mock_nvml.machine_file import MachineFile

__all__ = ["MachineFile", "build"]
