/* What the compiled parts share: the request ring, its clock and its cells. */
#ifndef OTEL_INFER_NATIVE_H
#define OTEL_INFER_NATIVE_H
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>
#include <time.h>

typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    uint64_t cells, next_cell;
    long long live_offset, slots, in_flight;
    uint32_t *free_slots;  /* a queue of slot numbers, behind it the generation of each slot */
    uint32_t first_free;
    uint64_t random[4];
    int arrival_code;
    long long deferred_due_at;  /* the instant from which a request is closed by Python code, which runs deferred recorders */
    char retired;  /* it belongs to the parent process, or is closed: nothing may be written */
    PyObject *layouts;  /* event type → bytes that hold a Layout */
    PyObject *strings, *intern, *write_long;
} RequestRing;

enum { PARENT_BYTES = 26, HAS_NO_PARENT = 0, HAS_PARENT = 1, NOT_PLAIN = 2 };

/* A request that was opened below its SERVER span: ids of the trace, the request span, its parent and the SERVER span. */
typedef struct {
    char trace[16], span[8], parent[8], server[8];
    char remote[PARENT_BYTES];  /* version, trace id, span id and flags of a `traceparent` */
    char has_remote;
    uint16_t flags;
    uint32_t handle;
} OpenedRequest;

/* The ring of an engine's steps (`step_ring.PythonStepRing`); what each step needs comes first. */
typedef struct {
    PyObject_HEAD
    char *cells;
    long long offset, last_offset, cells_written, step, size, next_keyframe_step, next_check_at;
    uint32_t scheduled_word, done_word;
    char retired;  /* it belongs to the parent process, or is closed: nothing may be written */
    long long next_keyframe_at, check_interval, keyframe_requests;
    Py_buffer memory;
} StepRing;

int64_t read_clock(void);
int is_ring(PyObject *object);

/* Opens a request by its ASGI headers. Returns 0; 1 if the propagators must read them; -1 after an exception. */
int open_by_headers(RequestRing *ring, PyObject *headers, PyObject *name, int64_t at, uint16_t flags,
                    int root_sampled, int follows_parent, OpenedRequest *opened);

/* Writes an event of one cell; `body` has 40 bytes. */
void write_cell(RequestRing *ring, int code, uint32_t handle, const char *body);
int intern_text(RequestRing *ring, PyObject *text, uint32_t *id);
void free_slot(RequestRing *ring, uint32_t handle);

/* Returns the object as a ring that may be written; NULL without an exception if it is none. */
StepRing *get_step_ring(PyObject *object);

/* Writes a batch with the members of the last one: size, KV blocks used and in all, running, waiting. Returns its step;
 * 0 = its members must be written; -1 after an exception. */
long long store_unchanged(StepRing *ring, const long long *numbers, int64_t at);
void store_single_tokens(StepRing *ring, long long step, int64_t at, uint32_t discarded);

/* What `batch_writer.BatchWriter` holds of the batch that was written last. */
typedef struct {
    PyObject_HEAD
    PyObject *members, *packed_handles, *ordinals, *ordinal_of;
    long long next_ordinal;
} BatchState;

BatchState *get_batch(PyObject *object);

/* A change of the batch: positions of members that left, each at its removal; handles of newcomers, which are the last
 * `joined_count` of `after`; (position, tokens) of a few. `after`: all members, borrowed. */
enum { MAX_CHANGES = 16, MAX_MEMBERS = 1024 };
typedef struct {
    uint32_t left[MAX_CHANGES], handles[MAX_CHANGES], tokens[2 * MAX_CHANGES];
    int left_count, joined_count, tokens_count;
    Py_ssize_t size;
    PyObject *after[MAX_MEMBERS];
} BatchChange;

/* Whether a change of this many words may be written at this instant, instead of a keyframe. */
int takes_change(StepRing *ring, int words, int64_t at);

/* Writes a change and applies it. `load`: KV blocks used and in all, running, waiting. Returns the step. */
long long store_change(StepRing *ring, BatchState *batch, const BatchChange *change, const long long *load, int64_t at);

/* The types of `instrumentation/hooks/_step_hook.c`. */
int add_step_types(PyObject *module);

/* The types of `instrumentation/asgi/_exchange.c`. */
int add_exchange_types(PyObject *module);
int add_type(PyObject *module, const char *name, PyType_Spec *spec);

#endif
