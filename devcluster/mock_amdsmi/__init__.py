"""A `libamd_smi.so` that simulates any AMD machine, faulty ones too, so that AMD's real bindings run without a GPU.

`build` compiles amdsmi.c with gcc. At every call the library reads the machine from the file in ATOLL_MOCK_AMDSMI, like
the mock of NVML. The bindings are the module amdsmi, a development dependency.

Keys of the file, one `key value` per line (`AmdMachineFile` writes them):

    count 8
    gpu.0.name | serial 0xA500000000000000 | uuid | gfx 0x942 | memory_mib | bus | numa (-1: the kernel does not know)
    gpu.0.ecc_corrected 0 | ecc_uncorrected 0 | pids 12 13
    pair.0.1.xgmi LINKS
    fail.GPU.FUNCTION CODE[/EACH] | hang.GPU.FUNCTION SECONDS | crash.GPU.FUNCTION 1    (GPU or FUNCTION may be *)
"""

from devcluster.mock_amdsmi.library import build, environment
from devcluster.mock_amdsmi.machine_file import AmdMachineFile

__all__ = ["AmdMachineFile", "build", "environment"]
