/* A libamd_smi.so that plays a machine from a file, so that AMD's real bindings run where there is no GPU.

   In: the file that ATOLL_MOCK_AMDSMI names (machine.h reads it). Out: the functions of AMD SMI that the agent calls,
   with its structures. Every other function of the library answers "not supported": the bindings look all of them up
   when they are imported, so library.py adds them. A key that is missing is answered with "not supported" too. */

enum { OK = 0, INVALID = 1, UNSUPPORTED = 2, LOST = 31, UNINITIALIZED = 32, NOT_LOADED = 34, TOO_MANY = 15 };
#define MACHINE_VARIABLE "ATOLL_MOCK_AMDSMI"
#include "../mock_nvml/machine.h"

enum { TEXT = 256, INTERNAL = 0, PCIE = 1, XGMI = 2, UUID = 38 };

typedef struct {
    char market_name[TEXT];
    uint32_t vendor_id;
    char vendor_name[TEXT];
    uint32_t subvendor_id;
    uint64_t device_id;
    uint32_t rev_id;
    char asic_serial[TEXT];
    uint32_t oam_id, num_of_compute_units;
    uint64_t target_graphics_version;
    uint32_t subsystem_id, reserved[21];
} AsicInfo;
typedef struct { uint64_t correctable, uncorrectable, deferred, reserved[5]; } ErrorCount;
typedef struct {
    char name[TEXT];
    uint32_t pid;
    uint64_t memory, engines[8], memories[8];
    char container_name[TEXT];
    uint32_t cu_occupancy, reserved[11];
} Process;

int amdsmi_init(uint64_t flags) {
    char value[VALUE];
    (void)flags;
    opened = 1;
    int code = enter(-1, __func__);
    if (!code && !get(value, "count")) code = NOT_LOADED;
    opened = !code;
    return code;
}
int amdsmi_shut_down(void) { int code = opened ? OK : UNINITIALIZED; opened = 0; return code; }

/* One socket per GPU; the number in `out` is its room, then how many there are. */
int amdsmi_get_socket_handles(uint32_t *count, Handle **out) {
    char value[VALUE];
    int code = enter(-1, __func__);
    if (code) return code;
    uint32_t there = get(value, "count") ? (uint32_t)atoi(value) : 0;
    for (uint32_t i = 0; out && i < there && i < *count && i < GPUS; i++) out[i] = handle((int)i, 0);
    *count = there;
    return OK;
}
int amdsmi_get_processor_handles(Handle *socket, uint32_t *count, Handle **out) {
    int code = opened ? OK : UNINITIALIZED;
    if (out && *count) out[0] = socket;
    *count = 1;
    return code;
}

int amdsmi_get_gpu_asic_info(Handle *h, AsicInfo *out) {
    char value[VALUE];
    unsigned long long number;
    ENTER(h);
    memset(out, 0, sizeof *out);
    if (gpu_text(h, "name", value)) snprintf(out->market_name, TEXT, "%s", value);
    if (gpu_text(h, "serial", value)) snprintf(out->asic_serial, TEXT, "%s", value);
    if (gpu_number(h, "gfx", &number)) out->target_graphics_version = number;
    out->vendor_id = 0x1002;
    return OK;
}
int amdsmi_get_gpu_device_uuid(Handle *h, unsigned *length, char *out) {
    char value[VALUE];
    ENTER(h);
    if (!gpu_text(h, "uuid", value)) return UNSUPPORTED;
    if (strlen(value) >= *length) return INVALID;
    strcpy(out, value);
    return OK;
}
int amdsmi_get_gpu_memory_total(Handle *h, int kind, uint64_t *out) {
    unsigned long long mebibytes;
    ENTER(h);
    if (kind || !gpu_number(h, "memory_mib", &mebibytes)) return UNSUPPORTED;
    *out = mebibytes << 20;
    return OK;
}
int amdsmi_get_gpu_device_bdf(Handle *h, uint64_t *out) {
    char value[VALUE];
    unsigned domain, bus, device, function;
    ENTER(h);
    if (!gpu_text(h, "bus", value) || sscanf(value, "%x:%x:%x.%u", &domain, &bus, &device, &function) != 4) return UNSUPPORTED;
    *out = (uint64_t)domain << 16 | bus << 8 | device << 3 | function;
    return OK;
}
int amdsmi_topo_get_numa_node_number(Handle *h, uint32_t *out) {
    char value[VALUE];
    ENTER(h);
    if (!gpu_text(h, "numa", value)) return UNSUPPORTED;
    *out = (uint32_t)atoi(value); /* the kernel's -1 comes out as 4294967295, as it does in AMD's */
    return OK;
}
int amdsmi_get_gpu_total_ecc_count(Handle *h, ErrorCount *out) {
    unsigned long long number;
    ENTER(h);
    memset(out, 0, sizeof *out);
    if (!gpu_number(h, "ecc_corrected", &number)) return UNSUPPORTED;
    out->correctable = number;
    if (gpu_number(h, "ecc_uncorrected", &number)) out->uncorrectable = number;
    return OK;
}
int amdsmi_get_gpu_process_list(Handle *h, uint32_t *count, Process *out) {
    char value[VALUE] = "", *rest;
    uint32_t found = 0;
    ENTER(h);
    gpu_text(h, "pids", value);
    for (char *word = strtok_r(value, " ", &rest); word; word = strtok_r(NULL, " ", &rest), found++) {
        if (found >= *count) return TOO_MANY;
        memset(&out[found], 0, sizeof *out);
        out[found].pid = (uint32_t)atoi(word);
        snprintf(out[found].name, TEXT, "python3");
    }
    *count = found;
    return OK;
}

int amdsmi_topo_get_link_type(Handle *a, Handle *b, uint64_t *hops, uint32_t *type) {
    char value[VALUE];
    ENTER(a);
    ENTER(b);
    int links = get(value, "pair.%d.%d.xgmi", a->gpu, b->gpu) ? atoi(value) : 0;
    *type = a == b ? INTERNAL : links ? XGMI : PCIE;
    *hops = a == b ? 0 : links ? 1 : 2;
    return OK;
}
int amdsmi_get_minmax_bandwidth_between_processors(Handle *a, Handle *b, uint64_t *least, uint64_t *most) {
    char value[VALUE];
    ENTER(a);
    ENTER(b);
    if (!get(value, "pair.%d.%d.xgmi", a->gpu, b->gpu)) return UNSUPPORTED;
    *least = 50000;
    *most = *least * (uint64_t)atoi(value);
    return OK;
}
