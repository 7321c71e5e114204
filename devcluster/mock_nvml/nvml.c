/* A libnvidia-ml.so.1 that plays a machine from a file, so that the real bindings run where there is no GPU.

   In: the file that ATOLL_MOCK_NVML names (machine.h reads it).
   Out: the functions of NVML that the agent calls, with NVML's structures. A key that is missing is answered with
   "not supported". The keys are described in __init__.py beside this file.

   Built with: gcc -shared -fPIC -O2 -Wl,-soname,libnvidia-ml.so.1 -o libnvidia-ml.so.1 nvml.c
   With -DDRIVER='"580.1"' it is the library of that driver, and refuses a machine whose driver is another. */

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, UNSUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, NOT_LOADED = 9, TIMEOUT = 10,
       LOST = 15, MISMATCH = 18, UNKNOWN = 999 };
#define MACHINE_VARIABLE "ATOLL_MOCK_NVML"
#include "machine.h"

typedef struct {
    char bus_id_legacy[16];
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
} PciInfo;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory2;
typedef struct { unsigned pid; unsigned long long memory; unsigned gi, ci; } Process;
typedef struct {
    unsigned field, scope;
    long long timestamp, latency;
    unsigned type, result;
    union { double d; unsigned u; unsigned long long ull; } value;
} FieldValue;
typedef struct { unsigned version; unsigned char cluster[16]; unsigned status, clique, state, mask; unsigned char summary; } Fabric;
typedef struct { Handle *device; unsigned long long type, data; unsigned gi, ci; } Event;
typedef struct { unsigned multiprocessors, copy, decoders, encoders, jpeg, ofa, gi_slices, ci_slices; unsigned long long memory_mb; } Attributes;
typedef struct { long last; } EventSet;

#define TEXT(function, name) \
    int function(Handle *h, char *out, unsigned size) { \
        char value[VALUE]; ENTER(h); \
        if (!gpu_text(h, name, value)) return UNSUPPORTED; \
        if (strlen(value) >= size) return TOO_SMALL; \
        strcpy(out, value); return OK; }
#define NUMBER(function, name, type) \
    int function(Handle *h, type *out) { \
        unsigned long long number; ENTER(h); \
        if (!gpu_number(h, name, &number)) return UNSUPPORTED; \
        *out = (type)number; return OK; }

int nvmlInitWithFlags(unsigned flags) {
    char value[VALUE];
    (void)flags;
    opened = 1;
    int code = enter(-1, __func__);
    if (!code && !get(value, "count")) code = NOT_LOADED;
#ifdef DRIVER
    if (!code && get(value, "driver") && strcmp(value, DRIVER)) code = MISMATCH;
#endif
    opened = !code;
    return code;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { int code = opened ? OK : UNINITIALIZED; opened = 0; return code; }

const char *nvmlErrorString(int code) {
    switch (code) {
    case OK: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID: return "Invalid Argument";
    case UNSUPPORTED: return "Not Supported";
    case 4: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case TOO_SMALL: return "Insufficient Size";
    case NOT_LOADED: return "Driver Not Loaded";
    case TIMEOUT: return "Timeout";
    case LOST: return "GPU is lost";
    case 16: return "GPU requires reset";
    case MISMATCH: return "Driver/library version mismatch";
    case 17: return "The operating system has blocked the request";
    case 28: return "GPU not found";
    default: return "Unknown Error";
    }
}

static int system_text(const char *function, const char *key, char *out, unsigned size) {
    char value[VALUE];
    int code = enter(-1, function);
    if (code) return code;
    if (!get(value, "%s", key)) return UNSUPPORTED;
    snprintf(out, size, "%s", value);
    return OK;
}
int nvmlSystemGetDriverVersion(char *out, unsigned size) { return system_text(__func__, "driver", out, size); }
int nvmlSystemGetNVMLVersion(char *out, unsigned size) { return system_text(__func__, "nvml", out, size); }
int nvmlSystemGetCudaDriverVersion_v2(int *out) { *out = 13000; return opened ? OK : UNINITIALIZED; }

int nvmlDeviceGetCount_v2(unsigned *out) {
    char value[VALUE];
    int code = enter(-1, __func__);
    if (code) return code;
    if (!get(value, "count")) return UNKNOWN;
    *out = (unsigned)atoi(value);
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Handle **out) {
    char value[VALUE];
    refresh();
    if (!get(value, "count") || index >= (unsigned)atoi(value) || index >= GPUS) return INVALID;
    int code = enter((int)index, __func__);
    if (!code) *out = handle((int)index, 0);
    return code;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, Handle **out) {
    char value[VALUE];
    refresh();
    for (int gpu = 0; gpu < GPUS; gpu++)
        for (int mig = 0; mig <= MIGS; mig++)
            if (gpu_text(handle(gpu, mig), "uuid", value) && !strcmp(value, uuid)) {
                int code = enter(gpu, __func__);
                if (!code) *out = handle(gpu, mig);
                return code;
            }
    return NOT_FOUND;
}

int nvmlDeviceGetIndex(Handle *h, unsigned *out) { ENTER(h); *out = (unsigned)h->gpu; return h->mig ? UNSUPPORTED : OK; }
TEXT(nvmlDeviceGetUUID, "uuid")
TEXT(nvmlDeviceGetName, "name")
TEXT(nvmlDeviceGetSerial, "serial")
NUMBER(nvmlDeviceGetMinorNumber, "minor", unsigned)
NUMBER(nvmlDeviceGetArchitecture, "architecture", unsigned)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, "pcie_generation", unsigned)
NUMBER(nvmlDeviceGetPowerManagementMode, "power_management", unsigned)
NUMBER(nvmlDeviceGetPersistenceMode, "persistence", unsigned)
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, "throttle", unsigned long long)
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, "throttle", unsigned long long)
NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, "retired_pending", unsigned)
NUMBER(nvmlDeviceGetMaxMigDeviceCount, "mig_max", unsigned)
NUMBER(nvmlDeviceGetGpuInstanceId, "gi", unsigned)
NUMBER(nvmlDeviceGetComputeInstanceId, "ci", unsigned)
NUMBER(nvmlDeviceGetSupportedEventTypes, "event_types", unsigned long long)

static int pci_info(const char *bus_id, PciInfo *out) {
    memset(out, 0, sizeof *out);
    snprintf(out->bus_id, sizeof out->bus_id, "%.31s", bus_id);
    sscanf(bus_id, "%x:%x:%x", &out->domain, &out->bus, &out->device);
    snprintf(out->bus_id_legacy, sizeof out->bus_id_legacy, "%04x:%02x:%02x.0", out->domain & 0xffff, out->bus & 0xff,
             out->device & 0xff);
    return OK;
}
int nvmlDeviceGetPciInfo_v3(Handle *h, PciInfo *out) {
    char value[VALUE];
    ENTER(h);
    return gpu_text(h, "bus", value) ? pci_info(value, out) : UNSUPPORTED;
}
int nvmlDeviceGetMemoryInfo(Handle *h, Memory *out) {
    unsigned long long mib;
    ENTER(h);
    if (!gpu_number(h, "memory_mib", &mib)) return UNSUPPORTED;
    out->total = mib << 20;
    out->free = out->total;
    out->used = 0;
    return OK;
}
int nvmlDeviceGetCudaComputeCapability(Handle *h, int *major, int *minor) {
    char value[VALUE];
    ENTER(h);
    return gpu_text(h, "compute_capability", value) && sscanf(value, "%d.%d", major, minor) == 2 ? OK : UNSUPPORTED;
}
static int two(Handle *h, const char *name, unsigned *first, unsigned *second) {
    char value[VALUE];
    if (!gpu_text(h, name, value)) return UNSUPPORTED;
    *second = *first = 0;
    if (sscanf(value, "%u %u", first, second) == 1) *second = *first;
    return OK;
}
int nvmlDeviceGetEccMode(Handle *h, unsigned *now, unsigned *pending) { ENTER(h); return two(h, "ecc", now, pending); }
int nvmlDeviceGetMigMode(Handle *h, unsigned *now, unsigned *pending) { ENTER(h); return two(h, "mig", now, pending); }
int nvmlDeviceGetTotalEccErrors(Handle *h, int type, int counter, unsigned long long *out) {
    char name[KEY];
    ENTER(h);
    snprintf(name, KEY, "ecc_%s_%s", type ? "uncorrected" : "corrected", counter ? "aggregate" : "volatile");
    return gpu_number(h, name, out) ? OK : UNSUPPORTED;
}
int nvmlDeviceGetRemappedRows(Handle *h, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    char value[VALUE];
    ENTER(h);
    if (!gpu_text(h, "remapped", value)) return UNSUPPORTED;
    return sscanf(value, "%u %u %u %u", corrected, uncorrected, pending, failed) == 4 ? OK : UNKNOWN;
}
int nvmlDeviceGetRetiredPages(Handle *h, int cause, unsigned *count, unsigned long long *pages) {
    unsigned long long number;
    ENTER(h);
    if (!gpu_number(h, cause ? "retired_double_bit" : "retired_single_bit", &number)) return UNSUPPORTED;
    unsigned room = *count;
    *count = (unsigned)number;
    if (number > room || (number && !pages)) return TOO_SMALL;
    for (unsigned i = 0; i < number; i++) pages[i] = 4096ULL * (i + 1);
    return OK;
}

static int words(Handle *h, const char *name, unsigned count, unsigned long *out) {
    char value[VALUE];
    if (!gpu_text(h, name, value)) return UNSUPPORTED;
    char *rest = value;
    for (unsigned i = 0; i < count; i++) out[i] = strtoul(rest, &rest, 16);
    return OK;
}
int nvmlDeviceGetMemoryAffinity(Handle *h, unsigned count, unsigned long *out, unsigned scope) {
    (void)scope; ENTER(h); return words(h, "numa_mask", count, out);
}
int nvmlDeviceGetCpuAffinityWithinScope(Handle *h, unsigned count, unsigned long *out, unsigned scope) {
    (void)scope; ENTER(h); return words(h, "cpu_mask", count, out);
}
int nvmlDeviceGetCpuAffinity(Handle *h, unsigned count, unsigned long *out) { ENTER(h); return words(h, "cpu_mask", count, out); }

static int processes(Handle *h, const char *name, unsigned *count, Process *out) {
    char value[VALUE];
    unsigned found = 0, room = *count;
    if (!gpu_text(h, name, value)) { *count = 0; return OK; }
    char *state = NULL;
    for (char *word = strtok_r(value, " ", &state); word; word = strtok_r(NULL, " ", &state)) {
        Process process = {0, 1 << 20, 0xffffffff, 0xffffffff};
        if (sscanf(word, "%u:%u:%u", &process.pid, &process.gi, &process.ci) < 1) continue;
        if (out && found < room) out[found] = process;
        found++;
    }
    *count = found;
    return found && (!out || found > room) ? TOO_SMALL : OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(Handle *h, unsigned *count, Process *out) {
    ENTER(h); return processes(h, "pids", count, out);
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(Handle *h, unsigned *count, Process *out) {
    ENTER(h); return processes(h, "graphics_pids", count, out);
}

/* Links: "down", or "gpu BUS", "switch BUS", "unknown", "npu". A card without any does not know the question. */
static int link_text(Handle *h, unsigned link, char *value) {
    char first[VALUE];
    if (get(value, "gpu.%d.link.%d", h->gpu, (int)link)) return OK;
    return get(first, "gpu.%d.link.0", h->gpu) ? INVALID : UNSUPPORTED;
}
int nvmlDeviceGetNvLinkState(Handle *h, unsigned link, unsigned *active) {
    char value[VALUE];
    ENTER(h);
    int code = link_text(h, link, value);
    if (!code) *active = strncmp(value, "down", 4) != 0;
    return code;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(Handle *h, unsigned link, unsigned *type) {
    char value[VALUE];
    ENTER(h);
    int code = link_text(h, link, value);
    if (code) return code;
    *type = !strncmp(value, "gpu", 3) ? 0 : !strncmp(value, "npu", 3) ? 1 : !strncmp(value, "switch", 6) ? 2 : 255;
    return OK;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(Handle *h, unsigned link, PciInfo *out) {
    char value[VALUE];
    ENTER(h);
    int code = link_text(h, link, value);
    char *bus_id = strchr(value, ' ');
    return code ? code : bus_id ? pci_info(bus_id + 1, out) : UNSUPPORTED;
}

static int pair(Handle *a, Handle *b, const char *name, unsigned *out) {
    char value[VALUE];
    if (!get(value, "pair.%d.%d.%s", a->gpu, b->gpu, name) && !get(value, "pair.%d.%d.%s", b->gpu, a->gpu, name)) return UNSUPPORTED;
    *out = (unsigned)strtoul(value, NULL, 0);
    return OK;
}
int nvmlDeviceGetTopologyCommonAncestor(Handle *a, Handle *b, unsigned *level) {
    ENTER(a);
    ENTER(b);
    return pair(a, b, "level", level);
}
int nvmlDeviceGetP2PStatus(Handle *a, Handle *b, unsigned index, unsigned *status) {
    (void)index;
    ENTER(a);
    ENTER(b);
    if (pair(a, b, "p2p", status)) *status = 0;
    return OK;
}

int nvmlDeviceGetFieldValues(Handle *h, int count, FieldValue *values) {
    char name[KEY];
    ENTER(h);
    for (int i = 0; i < count; i++) {
        unsigned long long number;
        snprintf(name, KEY, "field.%u", values[i].field);
        values[i].result = gpu_number(h, name, &number) ? OK : UNSUPPORTED;
        values[i].type = 1;
        if (!values[i].result) values[i].value.ull = number;
    }
    return OK;
}

/* fabric: "STATE STATUS CLIQUE HEALTHMASK CLUSTER", the cluster as 32 hexadecimal digits. */
int nvmlDeviceGetGpuFabricInfoV(Handle *h, Fabric *out) {
    char value[VALUE], cluster[40] = "";
    ENTER(h);
    if (!gpu_text(h, "fabric", value)) return UNSUPPORTED;
    if (sscanf(value, "%u %u %u %i %39s", &out->state, &out->status, &out->clique, (int *)&out->mask, cluster) < 4) return UNKNOWN;
    for (int i = 0; i < 16; i++) {
        unsigned byte = 0;
        if (strlen(cluster) >= (size_t)(2 * i + 2)) sscanf(cluster + 2 * i, "%2x", &byte);
        out->cluster[i] = (unsigned char)byte;
    }
    return OK;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Handle *h, unsigned index, Handle **out) {
    char value[VALUE];
    ENTER(h);
    if (index >= MIGS) return INVALID;
    if (!get(value, "gpu.%d.mig.%d.uuid", h->gpu, (int)index)) return NOT_FOUND;
    *out = handle(h->gpu, 1 + (int)index);
    return OK;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Handle *h, Handle **out) { ENTER(h); *out = handle(h->gpu, 0); return OK; }
int nvmlDeviceIsMigDeviceHandle(Handle *h, unsigned *out) { *out = h->mig > 0; return OK; }
int nvmlDeviceGetAttributes_v2(Handle *h, Attributes *out) {
    char value[VALUE];
    ENTER(h);
    memset(out, 0, sizeof *out);
    if (!h->mig || !gpu_text(h, "slices", value)) return UNSUPPORTED;
    if (sscanf(value, "%u %u", &out->gi_slices, &out->ci_slices) == 1) out->ci_slices = out->gi_slices;
    gpu_number(h, "memory_mib", &out->memory_mb);
    return OK;
}

/* event.N "GPU TYPE DATA": told once to every set that is older than it. */
static int event_after(long last, long *number, char *value) {
    int found = 0;
    pthread_mutex_lock(&lock);
    load();
    for (int i = 0; i < facts_count; i++)
        if (!strncmp(facts[i].key, "event.", 6) && atol(facts[i].key + 6) > last && (!found || atol(facts[i].key + 6) < *number)) {
            *number = atol(facts[i].key + 6);
            strcpy(value, facts[i].value);
            found = 1;
        }
    pthread_mutex_unlock(&lock);
    return found;
}
int nvmlEventSetCreate(EventSet **out) {
    char value[VALUE];
    int code = enter(-1, __func__);
    if (code) return code;
    *out = calloc(1, sizeof(EventSet));
    (*out)->last = -1;
    while (event_after((*out)->last, &(*out)->last, value)) ;
    return OK;
}
int nvmlEventSetFree(EventSet *set) { free(set); return OK; }
int nvmlDeviceRegisterEvents(Handle *h, unsigned long long types, EventSet *set) { (void)types; (void)set; ENTER(h); return OK; }
int nvmlEventSetWait_v2(EventSet *set, Event *out, unsigned milliseconds) {
    char value[VALUE];
    long number;
    int code = enter(-1, __func__);
    if (code) return code;
    for (;;) {
        if (event_after(set->last, &number, value)) {
            int gpu = 0;
            memset(out, 0, sizeof *out);
            set->last = number;
            sscanf(value, "%d %lli %lli", &gpu, (long long *)&out->type, (long long *)&out->data);
            out->gi = out->ci = 0xffffffff;
            out->device = gpu >= 0 && gpu < GPUS ? handle(gpu, 0) : NULL;
            return OK;
        }
        if (!milliseconds) return TIMEOUT;
        usleep(1000 * (milliseconds < 20 ? milliseconds : 20));
        milliseconds -= milliseconds < 20 ? milliseconds : 20;
    }
}
