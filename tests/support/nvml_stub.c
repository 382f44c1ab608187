/* A libnvidia-ml.so.1 of two GPUs, the second of which is cut into MIG devices. NVML_STUB says what fails: name=code,…; with
   NVML_STUB_MOVES what they tell changes with the time. */
#include <stdlib.h>
#include <string.h>
#include <stdio.h>
#include <time.h>

typedef struct { unsigned int gpu, memory; } utilization_t;
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned int version, isSupportedDevice; } support_t;
static int handles[3] = {0, 1, 2}; /* the third is a MIG device of the second */
#define OK 0
#define NOT_SUPPORTED 3
#define NOT_FOUND 6

static int failing(const char *name) {
  const char *said = getenv("NVML_STUB");
  const char *at = said ? strstr(said, name) : NULL;
  return at && at[strlen(name)] == '=' ? atoi(at + strlen(name) + 1) : OK;
}
static long moved(long most) { return getenv("NVML_STUB_MOVES") ? time(NULL) / 2 % most : 0; }
#define MAY_FAIL(name) { int code = failing(name); if (code) return code; }

int nvmlInitWithFlags(unsigned int flags) { MAY_FAIL("init"); return OK; }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return "stub"; }
int nvmlSystemGetDriverVersion(char *out, unsigned int size) { snprintf(out, size, "580.1"); return OK; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 2; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **out) { *out = &handles[index]; return OK; }
int nvmlDeviceGetUUID(int *device, char *out, unsigned int size) {
  snprintf(out, size, *device == 2 ? "MIG-2" : "GPU-%d", *device); return OK;
}
int nvmlDeviceGetName(int *device, char *out, unsigned int size) { snprintf(out, size, "Stub %d", *device); return OK; }
int nvmlDeviceGetUtilizationRates(int *device, utilization_t *out) {
  MAY_FAIL("utilization"); if (*device) return NOT_SUPPORTED; out->gpu = 75 + moved(20); out->memory = 9; return OK;
}
int nvmlDeviceGetMemoryInfo(int *device, memory_t *out) {
  MAY_FAIL("memory"); out->total = 80000 >> *device; out->used = (20000 + moved(999)) >> *device; out->free = out->total - out->used; return OK;
}
int nvmlDeviceGetPowerUsage(int *device, unsigned int *out) { MAY_FAIL("power"); *out = 300500 + 1000 * moved(50); return OK; }
int nvmlDeviceGetTotalEnergyConsumption(int *device, unsigned long long *out) { MAY_FAIL("energy"); *out = 7500 + 300000 * moved(1L << 40); return OK; }
int nvmlDeviceGetTemperature(int *device, int sensor, unsigned int *out) { MAY_FAIL("temperature"); *out = 61 + moved(9); return OK; }
int nvmlDeviceGetCurrentClocksEventReasons(int *device, unsigned long long *out) {
  MAY_FAIL("throttled"); *out = 0x4 | (moved(20) < 10 ? 0x40 : 0) | 0x1; return OK;
}
int nvmlDeviceGetTotalEccErrors(int *device, int kind, int counter, unsigned long long *out) {
  MAY_FAIL("errors"); *out = (kind ? 1 : 12) + moved(1L << 40); return OK;
}
int nvmlDeviceGetMigMode(int *device, unsigned int *current, unsigned int *pending) {
  *current = *pending = *device == 1; return OK;
}
int nvmlDeviceGetMaxMigDeviceCount(int *device, unsigned int *count) { *count = 7; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(int *device, unsigned int index, void **out) {
  if (index) return NOT_FOUND; *out = &handles[2]; return OK;
}
int nvmlGpmQueryDeviceSupport(int *device, support_t *out) {
  MAY_FAIL("activity"); out->isSupportedDevice = *device == 0; return OK;
}
int nvmlGpmSampleAlloc(void **out) { *out = calloc(1, 8); return OK; }
int nvmlGpmSampleGet(int *device, void *sample) { return OK; }
typedef struct { unsigned int id, code; double value; char *names[3]; } metric_t;
typedef struct { unsigned int version, count; void *first, *second; metric_t metrics[]; } asked_t;
int nvmlGpmMetricsGet(asked_t *asked) {
  for (unsigned int i = 0; i < asked->count; i++) {
    asked->metrics[i].code = asked->metrics[i].id == 10 ? NOT_SUPPORTED : OK;
    asked->metrics[i].value = 10.0 * asked->metrics[i].id + moved(9);
  }
  return OK;
}
typedef struct { int *device; unsigned long long type, data; unsigned int gi, ci; } event_t;
typedef struct { int *device; long told; } events_t;
int nvmlEventSetCreate(void **out) { *out = calloc(1, sizeof(events_t)); return OK; }
int nvmlDeviceRegisterEvents(int *device, unsigned long long types, events_t *set) {
  MAY_FAIL("xids"); set->device = device; return OK;
}
/* The first GPU has fallen off the bus once; with NVML_STUB_MOVES it does so every few seconds. */
int nvmlEventSetWait_v2(events_t *set, event_t *out, unsigned int ms) {
  if (*set->device || set->told > moved(1L << 40) / 4) return 10;
  set->told = moved(1L << 40) / 4 + 1; out->device = set->device; out->type = 8; out->data = 79; return OK;
}
