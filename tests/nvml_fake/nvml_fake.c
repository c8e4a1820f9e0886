/* A stand-in for the NVIDIA driver's libnvidia-ml.so.1, driven by a scenario file.
 *
 * The file is named by NVML_FAKE_SCENARIO and read at nvmlInit. One directive a line; '#' comments.
 *
 *   driver TEXT | cuda INT            what the system calls answer
 *   gpu                               begins a GPU; the lines below describe it
 *   mig SLOT                          begins a MIG instance of the last GPU, in that slot
 *   set KEY VALUE                     an attribute of the device begun last (keys: see build.py)
 *   process PID MIB                   a compute process on it; MIB -1: not available
 *   fault FUNCTION DEVICE CODE [NTH]  that call fails with CODE (NTH: only the NTH such call;
 *                                     `NTH+`: from the NTH on)
 *   delay FUNCTION DEVICE MS [NTH]    that call takes MS milliseconds; -1: it never returns
 *   crash FUNCTION DEVICE             that call ends the process by SIGSEGV
 *   xid GPU CODE [MS]                 an Xid event of that GPU, MS milliseconds after nvmlInit
 *
 * FUNCTION is the C name without "nvml", or `*`. DEVICE is `*`, `-` (calls about no device), `2`, or
 * `2/1` (MIG slot 1 of GPU 2). An attribute that is not set makes its call answer NOT_SUPPORTED, as
 * real devices do. The number VALUE `31|55|-|60` changes: the first call answers 31, the second 55,
 * the third NOT_SUPPORTED, every later one 60.
 */

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    TIMEOUT = 10,
    ARGUMENT_VERSION_MISMATCH = 25,
    UNKNOWN = 999,
};

enum { MAX_DEVICES = 256, MAX_ATTRIBUTES = 64, MAX_PROCESSES = 16, MAX_RULES = 64, MAX_MIG = 8 };
enum { MAX_XIDS = 256, MAX_SETS = 256 };

static const unsigned long long MIB = 1ull << 20;
static const unsigned long long NOT_AVAILABLE = ~0ull;
static const unsigned long long XID_EVENT = 8;

typedef unsigned int uint;
typedef unsigned long long ull;

struct nvmlMemory { ull total, free, used; };
struct nvmlMemory_v2 { uint version; ull total, reserved, free, used; };
struct nvmlUtilization { uint gpu, memory; };
struct nvmlProcessInfo { uint pid; ull used; uint gpu_instance, compute_instance; };
struct nvmlPciInfo {
    char bus_id_legacy[16];
    uint domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
};
struct nvmlTemperatureV { uint version, sensor; int degrees; };
struct nvmlViolationTime { ull reference, violation; };
union nvmlValue { double real; uint number; ull big; };
struct nvmlFieldValue {
    uint id, scope;
    long long timestamp, latency;
    int type, code;
    union nvmlValue value;
};
struct nvmlGpuFabricInfoV {
    uint version;
    unsigned char cluster[16];
    int status;
    uint clique;
    unsigned char state;
    uint health_mask;
};
struct nvmlEventData {
    struct device *device;
    ull type, data;
    uint gpu_instance, compute_instance;
};

struct device {
    int index, slot; /* slot -1: a whole GPU */
    int num_attributes, num_processes;
    char keys[MAX_ATTRIBUTES][32];
    char values[MAX_ATTRIBUTES][128];
    int reads[MAX_ATTRIBUTES];
    long long pids[MAX_PROCESSES], mibs[MAX_PROCESSES];
};

struct rule {
    char kind, function[64], device[16]; /* kind: f(ault) d(elay) c(rash) */
    int value, nth, seen;
    char onward; /* '+': from the NTH call on */
};

struct xid { int gpu, code, ms; char told[MAX_SETS]; };
struct event_set { struct device *device; };

static struct device devices[MAX_DEVICES];
static struct rule rules[MAX_RULES];
static struct xid xids[MAX_XIDS];
static struct event_set event_sets[MAX_SETS];
static int num_devices, num_gpus, num_rules, num_xids, num_sets, initialized;
static struct timespec started;
static char driver_version[80], cuda_version[16];

/* ---- the scenario ---------------------------------------------------------------------------- */

static void refuse(const char *line) {
    fprintf(stderr, "nvml_fake: cannot read scenario line: %s\n", line);
    exit(97);
}

static struct device *add_device(int index, int slot, const char *line) {
    if (num_devices == MAX_DEVICES || index < 0) refuse(line);
    struct device *device = &devices[num_devices++];
    memset(device, 0, sizeof *device);
    device->index = index;
    device->slot = slot;
    return device;
}

static void add_attribute(struct device *device, const char *line) {
    if (device == NULL || device->num_attributes == MAX_ATTRIBUTES) refuse(line);
    int position = device->num_attributes++;
    if (sscanf(line, "set %31s %127[^\n]", device->keys[position], device->values[position]) != 2)
        refuse(line);
}

static void add_process(struct device *device, const char *line) {
    if (device == NULL || device->num_processes == MAX_PROCESSES) refuse(line);
    int position = device->num_processes++;
    if (sscanf(line, "process %lld %lld", &device->pids[position], &device->mibs[position]) != 2)
        refuse(line);
}

static void add_rule(const char *line) {
    if (num_rules == MAX_RULES) refuse(line);
    struct rule *rule = &rules[num_rules++];
    memset(rule, 0, sizeof *rule);
    rule->kind = line[0];
    int found = sscanf(line, "%*s %63s %15s %d %d%c", rule->function, rule->device, &rule->value,
                       &rule->nth, &rule->onward);
    if (found < (rule->kind == 'c' ? 2 : 3)) refuse(line);
}

static void add_xid(const char *line) {
    if (num_xids == MAX_XIDS) refuse(line);
    struct xid *xid = &xids[num_xids++];
    memset(xid, 0, sizeof *xid);
    if (sscanf(line, "xid %d %d %d", &xid->gpu, &xid->code, &xid->ms) < 2) refuse(line);
}

static void read_line(const char *line) {
    struct device *last = num_devices ? &devices[num_devices - 1] : NULL;
    char word[16] = "";
    int slot;
    if (sscanf(line, "%15s", word) != 1 || word[0] == '#') return;
    if (!strcmp(word, "driver")) {
        if (sscanf(line, "driver %79s", driver_version) != 1) refuse(line);
    } else if (!strcmp(word, "cuda")) {
        if (sscanf(line, "cuda %15s", cuda_version) != 1) refuse(line);
    } else if (!strcmp(word, "gpu")) {
        add_device(num_gpus++, -1, line);
    } else if (!strcmp(word, "mig")) {
        if (sscanf(line, "mig %d", &slot) != 1) refuse(line);
        add_device(num_gpus - 1, slot, line);
    } else if (!strcmp(word, "set")) {
        add_attribute(last, line);
    } else if (!strcmp(word, "process")) {
        add_process(last, line);
    } else if (!strcmp(word, "fault") || !strcmp(word, "delay") || !strcmp(word, "crash")) {
        add_rule(line);
    } else if (!strcmp(word, "xid")) {
        add_xid(line);
    } else {
        refuse(line);
    }
}

static void read_scenario(void) {
    const char *path = getenv("NVML_FAKE_SCENARIO");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (file == NULL) refuse(path ? path : "(NVML_FAKE_SCENARIO is not set)");
    num_devices = num_gpus = num_rules = num_xids = num_sets = 0;
    driver_version[0] = cuda_version[0] = 0;
    char line[512];
    while (fgets(line, sizeof line, file)) read_line(line);
    fclose(file);
}

/* ---- what every call does first -------------------------------------------------------------- */

static int about(const struct rule *rule, const char *function, const struct device *device) {
    char name[32] = "-";
    if (device && device->slot < 0) snprintf(name, sizeof name, "%d", device->index);
    if (device && device->slot >= 0) snprintf(name, sizeof name, "%d/%d", device->index, device->slot);
    int named = !strcmp(rule->function, "*") || !strcmp(rule->function, function);
    return named && (!strcmp(rule->device, "*") || !strcmp(rule->device, name));
}

static void wait_ms(int ms) {
    if (ms < 0)
        for (;;) pause();
    struct timespec span = {ms / 1000, ms % 1000 * 1000000L};
    nanosleep(&span, NULL);
}

/* Play the rules for this call: the code to return, or SUCCESS to go on. */
static int enter(const char *function, const struct device *device) {
    int code = initialized ? SUCCESS : UNINITIALIZED;
    for (int i = 0; i < num_rules; i++) {
        struct rule *rule = &rules[i];
        if (!about(rule, function, device)) continue;
        rule->seen++;
        if (rule->onward == '+' ? rule->seen < rule->nth : rule->nth != 0 && rule->nth != rule->seen)
            continue;
        if (rule->kind == 'd') wait_ms(rule->value);
        if (rule->kind == 'c') raise(SIGSEGV);
        if (rule->kind == 'f') code = rule->value;
    }
    return code;
}

static const char *attribute(const struct device *device, const char *key) {
    for (int i = 0; i < device->num_attributes; i++)
        if (!strcmp(device->keys[i], key)) return device->values[i];
    return NULL;
}

/* The part of `31|55|-|60` that is due: one further with every call, until the last. */
static const char *due(struct device *device, const char *key) {
    for (int i = 0; i < device->num_attributes; i++) {
        if (strcmp(device->keys[i], key)) continue;
        const char *part = device->values[i];
        for (int n = device->reads[i]++; n > 0 && strchr(part, '|'); n--) part = strchr(part, '|') + 1;
        return *part == '-' ? NULL : part;
    }
    return NULL;
}

static int get_number(struct device *device, const char *key, ull *value) {
    const char *text = due(device, key);
    if (text == NULL) return NOT_SUPPORTED;
    *value = strtoull(text, NULL, 0);
    return SUCCESS;
}

static int get_text(const char *text, char *buffer, uint size) {
    if (text == NULL || *text == 0) return NOT_SUPPORTED;
    if (strlen(text) + 1 > size) return INSUFFICIENT_SIZE;
    strcpy(buffer, text);
    return SUCCESS;
}

#define ENTER(function, device)                      \
    do {                                             \
        int entered = enter(function, device);       \
        if (entered != SUCCESS) return entered;      \
    } while (0)

/* ---- the library ----------------------------------------------------------------------------- */

EXPORT int nvmlInitWithFlags(uint flags) {
    (void)flags;
    read_scenario();
    clock_gettime(CLOCK_MONOTONIC, &started);
    initialized = 1;
    int code = enter("InitWithFlags", NULL);
    initialized = code == SUCCESS;
    return code;
}

EXPORT int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
EXPORT int nvmlInit(void) { return nvmlInitWithFlags(0); }

EXPORT int nvmlShutdown(void) {
    ENTER("Shutdown", NULL);
    initialized = 0;
    return SUCCESS;
}

EXPORT const char *nvmlErrorString(int code) {
    return code == UNKNOWN ? "Unknown Error" : code == SUCCESS ? "Success" : "An error of the fake";
}

EXPORT int nvmlSystemGetDriverVersion(char *version, uint length) {
    ENTER("SystemGetDriverVersion", NULL);
    return get_text(driver_version, version, length);
}

EXPORT int nvmlSystemGetNVMLVersion(char *version, uint length) {
    ENTER("SystemGetNVMLVersion", NULL);
    return get_text(driver_version, version, length);
}

EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    ENTER("SystemGetCudaDriverVersion_v2", NULL);
    if (cuda_version[0] == 0) return NOT_SUPPORTED;
    *version = atoi(cuda_version);
    return SUCCESS;
}

EXPORT int nvmlSystemGetCudaDriverVersion(int *version) {
    return nvmlSystemGetCudaDriverVersion_v2(version);
}

EXPORT int nvmlDeviceGetCount_v2(uint *count) {
    ENTER("DeviceGetCount_v2", NULL);
    *count = (uint)num_gpus;
    return SUCCESS;
}

/* ---- handles --------------------------------------------------------------------------------- */

static struct device *find(int index, int slot) {
    for (int i = 0; i < num_devices; i++)
        if (devices[i].index == index && devices[i].slot == slot) return &devices[i];
    return NULL;
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(uint index, struct device **handle) {
    struct device *device = find((int)index, -1);
    ENTER("DeviceGetHandleByIndex_v2", device);
    if (device == NULL) return INVALID_ARGUMENT;
    *handle = device;
    return SUCCESS;
}

static int by_text(const char *function, const char *key, const char *text, struct device **handle) {
    for (int i = 0; i < num_devices; i++) {
        const char *value = attribute(&devices[i], key);
        if (value == NULL || strcmp(value, text) != 0) continue;
        ENTER(function, &devices[i]);
        *handle = &devices[i];
        return SUCCESS;
    }
    return NOT_FOUND;
}

EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, struct device **handle) {
    return by_text("DeviceGetHandleByUUID", "uuid", uuid, handle);
}

EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, struct device **handle) {
    return by_text("DeviceGetHandleByPciBusId_v2", "bus_id", bus_id, handle);
}

EXPORT int nvmlDeviceGetMaxMigDeviceCount(struct device *device, uint *count) {
    ENTER("DeviceGetMaxMigDeviceCount", device);
    *count = MAX_MIG;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMigDeviceHandleByIndex(struct device *device, uint slot, struct device **handle) {
    struct device *instance = find(device->index, (int)slot);
    ENTER("DeviceGetMigDeviceHandleByIndex", instance);
    if (instance == NULL) return NOT_FOUND;
    *handle = instance;
    return SUCCESS;
}

EXPORT int nvmlDeviceIsMigDeviceHandle(struct device *device, uint *is_mig) {
    ENTER("DeviceIsMigDeviceHandle", device);
    *is_mig = device->slot >= 0;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(struct device *device, struct device **parent) {
    ENTER("DeviceGetDeviceHandleFromMigDeviceHandle", device);
    if (device->slot < 0) return INVALID_ARGUMENT;
    *parent = find(device->index, -1);
    return SUCCESS;
}

/* ---- what a device tells --------------------------------------------------------------------- */

EXPORT int nvmlDeviceGetIndex(struct device *device, uint *index) {
    ENTER("DeviceGetIndex", device);
    *index = (uint)(device->slot < 0 ? device->index : device->slot);
    return SUCCESS;
}

#define TEXT_CALL(name, key)                                                     \
    EXPORT int nvml##name(struct device *device, char *buffer, uint length) {    \
        ENTER(#name, device);                                                    \
        return get_text(attribute(device, key), buffer, length);                 \
    }

TEXT_CALL(DeviceGetName, "name")
TEXT_CALL(DeviceGetUUID, "uuid")
TEXT_CALL(DeviceGetSerial, "serial")
TEXT_CALL(DeviceGetVbiosVersion, "vbios")

#define NUMBER_CALL(name, type, key)                              \
    EXPORT int nvml##name(struct device *device, type *value) {   \
        ENTER(#name, device);                                     \
        ull number;                                               \
        int code = get_number(device, key, &number);              \
        if (code == SUCCESS) *value = (type)number;               \
        return code;                                              \
    }

NUMBER_CALL(DeviceGetComputeMode, int, "compute_mode")
NUMBER_CALL(DeviceGetPowerUsage, uint, "power_mw")
NUMBER_CALL(DeviceGetEnforcedPowerLimit, uint, "power_limit_mw")
NUMBER_CALL(DeviceGetPowerManagementDefaultLimit, uint, "power_default_limit_mw")
NUMBER_CALL(DeviceGetTotalEnergyConsumption, ull, "energy_mj")
NUMBER_CALL(DeviceGetPerformanceState, int, "pstate")
NUMBER_CALL(DeviceGetPersistenceMode, int, "persistence")
NUMBER_CALL(DeviceGetMinorNumber, uint, "minor")
NUMBER_CALL(DeviceGetCurrentClocksEventReasons, ull, "clocks_event_reasons")
NUMBER_CALL(DeviceGetCurrentClocksThrottleReasons, ull, "clocks_event_reasons")
NUMBER_CALL(DeviceGetCurrPcieLinkGeneration, uint, "pcie_gen")
NUMBER_CALL(DeviceGetCurrPcieLinkWidth, uint, "pcie_width")
NUMBER_CALL(DeviceGetMaxPcieLinkGeneration, uint, "pcie_max_gen")
NUMBER_CALL(DeviceGetMaxPcieLinkWidth, uint, "pcie_max_width")
NUMBER_CALL(DeviceGetPcieReplayCounter, uint, "pcie_replays")
NUMBER_CALL(DeviceGetGpuInstanceId, uint, "gpu_instance")
NUMBER_CALL(DeviceGetComputeInstanceId, uint, "compute_instance")

EXPORT int nvmlDeviceGetPciInfo_v3(struct device *device, struct nvmlPciInfo *info) {
    ENTER("DeviceGetPciInfo_v3", device);
    memset(info, 0, sizeof *info);
    const char *bus_id = attribute(device, "bus_id");
    if (bus_id == NULL) return NOT_SUPPORTED;
    if (sscanf(bus_id, "%x:%x:%x", &info->domain, &info->bus, &info->device) != 3) return UNKNOWN;
    snprintf(info->bus_id, sizeof info->bus_id, "%s", bus_id);
    snprintf(info->bus_id_legacy, sizeof info->bus_id_legacy, "%.15s", bus_id + 4);
    return SUCCESS;
}

/* Version 1 counts the driver's own share as used, version 2 tells it apart. */
static int get_memory(struct device *device, struct nvmlMemory_v2 *memory) {
    ull total, reserved, used;
    if (get_number(device, "total_mib", &total) || get_number(device, "used_mib", &used)) return NOT_SUPPORTED;
    if (get_number(device, "reserved_mib", &reserved)) reserved = 0;
    memory->total = total * MIB;
    memory->used = used * MIB;
    memory->reserved = reserved * MIB;
    memory->free = memory->total - memory->used - memory->reserved;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMemoryInfo(struct device *device, struct nvmlMemory *memory) {
    ENTER("DeviceGetMemoryInfo", device);
    struct nvmlMemory_v2 all;
    int code = get_memory(device, &all);
    if (code == SUCCESS) *memory = (struct nvmlMemory){all.total, all.free, all.used + all.reserved};
    return code;
}

EXPORT int nvmlDeviceGetMemoryInfo_v2(struct device *device, struct nvmlMemory_v2 *memory) {
    ENTER("DeviceGetMemoryInfo_v2", device);
    if (memory->version != (sizeof *memory | 2u << 24)) return ARGUMENT_VERSION_MISMATCH;
    return get_memory(device, memory);
}

EXPORT int nvmlDeviceGetUtilizationRates(struct device *device, struct nvmlUtilization *rates) {
    ENTER("DeviceGetUtilizationRates", device);
    ull gpu, memory;
    if (get_number(device, "utilization", &gpu)) return NOT_SUPPORTED;
    if (get_number(device, "memory_utilization", &memory)) memory = 0;
    *rates = (struct nvmlUtilization){(uint)gpu, (uint)memory};
    return SUCCESS;
}

EXPORT int nvmlDeviceGetTemperature(struct device *device, int sensor, uint *degrees) {
    ENTER("DeviceGetTemperature", device);
    ull value;
    if (sensor != 0) return INVALID_ARGUMENT;
    if (get_number(device, "temperature", &value)) return NOT_SUPPORTED;
    *degrees = (uint)value;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetTemperatureV(struct device *device, struct nvmlTemperatureV *temperature) {
    ENTER("DeviceGetTemperatureV", device);
    ull value;
    if (temperature->version != (sizeof *temperature | 1u << 24)) return ARGUMENT_VERSION_MISMATCH;
    if (get_number(device, "temperature", &value)) return NOT_SUPPORTED;
    temperature->degrees = (int)value;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMigMode(struct device *device, uint *current, uint *pending) {
    ENTER("DeviceGetMigMode", device);
    ull mode;
    if (get_number(device, "mig_mode", &mode)) return NOT_SUPPORTED;
    *current = *pending = (uint)mode;
    return SUCCESS;
}

/* "cpus" lists 64-bit words, lowest first: `0xff 0x0`. */
EXPORT int nvmlDeviceGetCpuAffinity(struct device *device, uint num_words, unsigned long *words) {
    ENTER("DeviceGetCpuAffinity", device);
    const char *text = attribute(device, "cpus");
    if (text == NULL) return NOT_SUPPORTED;
    for (uint i = 0; i < num_words; i++) {
        char *end;
        words[i] = strtoul(text, &end, 0);
        text = end;
    }
    return SUCCESS;
}

static int list_processes(const struct device *device, uint *count, struct nvmlProcessInfo *infos) {
    uint room = *count;
    *count = (uint)device->num_processes;
    if (device->num_processes == 0) return SUCCESS;
    if (infos == NULL || room < *count) return INSUFFICIENT_SIZE;
    for (uint i = 0; i < *count; i++) {
        ull used = device->mibs[i] < 0 ? NOT_AVAILABLE : (ull)device->mibs[i] * MIB;
        infos[i] = (struct nvmlProcessInfo){(uint)device->pids[i], used, ~0u, ~0u};
    }
    return SUCCESS;
}

EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(
    struct device *device, uint *count, struct nvmlProcessInfo *infos) {
    ENTER("DeviceGetComputeRunningProcesses_v3", device);
    return list_processes(device, count, infos);
}

/* "clock_sm", "clock_mem", ... in MHz; `type`: 0 graphics, 1 SM, 2 memory, 3 video. */
static int get_clock(struct device *device, const char *prefix, uint type, uint *mhz) {
    static const char *const names[] = {"graphics", "sm", "mem", "video"};
    char key[32];
    ull value;
    if (type > 3) return INVALID_ARGUMENT;
    snprintf(key, sizeof key, "%s_%s", prefix, names[type]);
    if (get_number(device, key, &value)) return NOT_SUPPORTED;
    *mhz = (uint)value;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetClockInfo(struct device *device, uint type, uint *mhz) {
    ENTER("DeviceGetClockInfo", device);
    return get_clock(device, "clock", type, mhz);
}

EXPORT int nvmlDeviceGetMaxClockInfo(struct device *device, uint type, uint *mhz) {
    ENTER("DeviceGetMaxClockInfo", device);
    return get_clock(device, "max_clock", type, mhz);
}

/* `error`: 0 corrected, 1 uncorrected; `counter`: 0 volatile, 1 aggregate. */
EXPORT int nvmlDeviceGetTotalEccErrors(struct device *device, int error, int counter, ull *count) {
    static const char *const keys[2][2] = {
        {"ecc_corrected", "ecc_corrected_total"}, {"ecc_uncorrected", "ecc_uncorrected_total"}};
    ENTER("DeviceGetTotalEccErrors", device);
    if (error < 0 || error > 1 || counter < 0 || counter > 1) return INVALID_ARGUMENT;
    return get_number(device, keys[error][counter], count);
}

EXPORT int nvmlDeviceGetRemappedRows(
    struct device *device, uint *corrected, uint *uncorrected, uint *pending, uint *failed) {
    ENTER("DeviceGetRemappedRows", device);
    ull rows[4] = {0};
    if (get_number(device, "remapped_corrected", &rows[0])) return NOT_SUPPORTED;
    get_number(device, "remapped_uncorrected", &rows[1]);
    get_number(device, "remap_pending", &rows[2]);
    get_number(device, "remap_failed", &rows[3]);
    *corrected = (uint)rows[0], *uncorrected = (uint)rows[1];
    *pending = (uint)rows[2], *failed = (uint)rows[3];
    return SUCCESS;
}

/* "fabric_state": 0 none, 1 not started, 2 in progress, 3 completed; "fabric_status" then. */
EXPORT int nvmlDeviceGetGpuFabricInfoV(struct device *device, struct nvmlGpuFabricInfoV *info) {
    ENTER("DeviceGetGpuFabricInfoV", device);
    ull state, status = SUCCESS;
    if (info->version != (sizeof *info | 2u << 24)) return ARGUMENT_VERSION_MISMATCH;
    if (get_number(device, "fabric_state", &state)) return NOT_SUPPORTED;
    get_number(device, "fabric_status", &status);
    info->state = (unsigned char)state;
    info->status = (int)status;
    return SUCCESS;
}

/* "violation_power_ns", "violation_thermal_ns"; `policy`: 0 power, 1 thermal. */
EXPORT int nvmlDeviceGetViolationStatus(
    struct device *device, int policy, struct nvmlViolationTime *time) {
    ENTER("DeviceGetViolationStatus", device);
    if (policy < 0 || policy > 1) return NOT_SUPPORTED;
    time->reference = 0;
    return get_number(device, policy ? "violation_thermal_ns" : "violation_power_ns", &time->violation);
}

/* "field_82" is NVML_FI_DEV_MEMORY_TEMP, a 32-bit number; all others are 64-bit ones. */
EXPORT int nvmlDeviceGetFieldValues(struct device *device, int count, struct nvmlFieldValue *values) {
    ENTER("DeviceGetFieldValues", device);
    for (int i = 0; i < count; i++) {
        char key[32];
        ull number;
        snprintf(key, sizeof key, "field_%u", values[i].id);
        values[i].code = get_number(device, key, &number);
        values[i].type = values[i].id == 82 ? 1 : 3;
        if (values[i].code != SUCCESS) continue;
        if (values[i].type == 1) values[i].value.number = (uint)number;
        else values[i].value.big = number;
    }
    return SUCCESS;
}

/* ---- events ---------------------------------------------------------------------------------- */

NUMBER_CALL(DeviceGetSupportedEventTypes, ull, "event_types")

EXPORT int nvmlEventSetCreate(struct event_set **set) {
    ENTER("EventSetCreate", NULL);
    if (num_sets == MAX_SETS) return UNKNOWN;
    *set = &event_sets[num_sets++];
    (*set)->device = NULL;
    return SUCCESS;
}

/* One device a set: more than one has not been needed. */
EXPORT int nvmlDeviceRegisterEvents(struct device *device, ull types, struct event_set *set) {
    ENTER("DeviceRegisterEvents", device);
    if (device->slot >= 0 || set->device != NULL) return INVALID_ARGUMENT;
    if (types & XID_EVENT) set->device = device;
    return SUCCESS;
}

static long ms_since_start(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (now.tv_sec - started.tv_sec) * 1000 + (now.tv_nsec - started.tv_nsec) / 1000000;
}

EXPORT int nvmlEventSetWait_v2(struct event_set *set, struct nvmlEventData *data, uint timeout_ms) {
    ENTER("EventSetWait_v2", set->device);
    for (int i = 0; i < num_xids && set->device != NULL; i++) {
        struct xid *xid = &xids[i];
        if (xid->gpu != set->device->index || xid->told[set - event_sets] || ms_since_start() < xid->ms) continue;
        xid->told[set - event_sets] = 1;
        *data = (struct nvmlEventData){set->device, XID_EVENT, (ull)xid->code, ~0u, ~0u};
        return SUCCESS;
    }
    wait_ms((int)timeout_ms);
    return TIMEOUT;
}

EXPORT int nvmlEventSetFree(struct event_set *set) {
    set->device = NULL;
    return SUCCESS;
}

/* ---- for the test that compares struct sizes with pynvml's --------------------------------------- */

EXPORT uint nvml_fake_sizeof(const char *name) {
    if (!strcmp(name, "c_nvmlMemory_t")) return sizeof(struct nvmlMemory);
    if (!strcmp(name, "c_nvmlMemory_v2_t")) return sizeof(struct nvmlMemory_v2);
    if (!strcmp(name, "c_nvmlUtilization_t")) return sizeof(struct nvmlUtilization);
    if (!strcmp(name, "c_nvmlProcessInfo_v3_t")) return sizeof(struct nvmlProcessInfo);
    if (!strcmp(name, "nvmlPciInfo_t")) return sizeof(struct nvmlPciInfo);
    if (!strcmp(name, "c_nvmlTemperature_v1_t")) return sizeof(struct nvmlTemperatureV);
    if (!strcmp(name, "c_nvmlViolationTime_t")) return sizeof(struct nvmlViolationTime);
    if (!strcmp(name, "c_nvmlFieldValue_t")) return sizeof(struct nvmlFieldValue);
    if (!strcmp(name, "c_nvmlGpuFabricInfo_v2_t")) return sizeof(struct nvmlGpuFabricInfoV);
    if (!strcmp(name, "c_nvmlEventData_t")) return sizeof(struct nvmlEventData);
    return 0;
}
