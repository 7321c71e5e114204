"""A CUDA program that prints the devices it sees and holds a context on each until its input ends.

Prints one line of JSON: pid, error (a CUDA code, 0 for none), uuids in CUDA's own order. It is a separate program that
uses only the driver library, so that only the environment decides what it sees.
"""

import ctypes
import json
import os
import sys
import uuid

LIBRARY = "libcuda.so.1"


def visible() -> tuple[int, list[str]]:
    """CUDA's error code and the uuids of the devices it offers; a context is opened on each."""
    cuda = ctypes.CDLL(LIBRARY)
    code = cuda.cuInit(0)
    count = ctypes.c_int()
    code = code or cuda.cuDeviceGetCount(ctypes.byref(count))
    found = []
    for ordinal in range(count.value if code == 0 else 0):
        device = ctypes.c_int()
        cuda.cuDeviceGet(ctypes.byref(device), ordinal)
        raw = (ctypes.c_ubyte * 16)()
        get_uuid = getattr(cuda, "cuDeviceGetUuid_v2", cuda.cuDeviceGetUuid)
        get_uuid(raw, device)
        found.append(str(uuid.UUID(bytes=bytes(raw))))
        context = ctypes.c_void_p()
        if cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0:
            cuda.cuCtxSetCurrent(context)
            memory = ctypes.c_uint64()
            cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(16 << 20))
    return code, found


if __name__ == "__main__":
    try:
        error, uuids = visible()
    except OSError as fault:
        print(json.dumps({"pid": os.getpid(), "error": str(fault), "uuids": []}), flush=True)
    else:
        print(json.dumps({"pid": os.getpid(), "error": error, "uuids": uuids}), flush=True)
    sys.stdin.read()
