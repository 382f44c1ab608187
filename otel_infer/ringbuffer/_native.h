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

enum { KNOWN_TEXTS = 16 };

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
    PyObject *known_texts[KNOWN_TEXTS];  /* texts whose id was looked up last; `forget_texts` empties it */
    uint32_t known_ids[KNOWN_TEXTS];
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

/* ── objects with references ─────────────────────────────────────────────────────────────────────────────────── */

#define CLEAR(field) Py_CLEAR(self->field);
#define VISIT(field) Py_VISIT(self->field);
#define FIELD(Type, kind, name) {#name, kind, offsetof(Type, name), 0, NULL}

/* Defines the three functions that a type with references needs. `forget`: what is done before they are dropped. */
#define DEFINE_REFERENCES(Type, EACH) DEFINE_REFERENCES_AND(Type, EACH, (void)self)
#define DEFINE_REFERENCES_AND(Type, EACH, forget)                                                                    \
    static int visit_##Type(Type *self, visitproc visit, void *arg)                                                  \
    {                                                                                                                \
        Py_VISIT(Py_TYPE((PyObject *)self));                                                                         \
        EACH(VISIT)                                                                                                  \
        return 0;                                                                                                    \
    }                                                                                                                \
    static int clear_##Type(Type *self)                                                                              \
    {                                                                                                                \
        EACH(CLEAR)                                                                                                  \
        return 0;                                                                                                    \
    }                                                                                                                \
    static void free_##Type(Type *self)                                                                              \
    {                                                                                                                \
        PyTypeObject *type = Py_TYPE((PyObject *)self);                                                              \
        PyObject_GC_UnTrack(self);                                                                                   \
        forget;                                                                                                      \
        clear_##Type(self);                                                                                          \
        ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);                                                          \
        Py_DECREF(type);                                                                                             \
    }
#define REFERENCE_SLOTS(Type)                                                                                        \
    {Py_tp_dealloc, free_##Type}, {Py_tp_traverse, visit_##Type}, {Py_tp_clear, clear_##Type}

static inline PyObject *take(PyObject *value)
{
    Py_XINCREF(value);
    return value;
}

static inline void *allocate(PyTypeObject *type)
{
    return ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
}

/* For objects without references to others. */
static inline void free_plain(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* ── names, attributes, exceptions ───────────────────────────────────────────────────────────────────────────── */

/* Makes the names of attributes and keys that a source uses. Returns -1 after an exception. */
static inline int make_names(PyObject **names, const char *const *texts, int count)
{
    for (int i = 0; i < count; i++)
        if ((names[i] = PyUnicode_InternFromString(texts[i])) == NULL) return -1;
    return 0;
}

/* Returns the length of an attribute; -1 with an exception. */
static inline Py_ssize_t count_attribute(PyObject *owner, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(owner, name);
    Py_ssize_t count = value == NULL ? -1 : PyObject_Size(value);
    Py_XDECREF(value);
    return count;
}

/* Rounds a positive number half to even, as Python does. */
static inline long long round_half_even(double number)
{
    long long whole = (long long)number;
    double rest = number - (double)whole;
    return whole + (rest > 0.5 || (rest == 0.5 && whole % 2));
}

/* Returns whether the weak reference is to this object. */
static inline int refers_to(PyObject *reference, PyObject *object)
{
    return reference != NULL && PyWeakref_Check(reference) && PyWeakref_GetObject(reference) == object;
}

/* Whether a call or a look-up gave exactly this value. Takes the reference to `value`, which may be NULL. */
static inline int is_exactly(PyObject *value, PyObject *wanted)
{
    Py_XDECREF(value);
    return value == wanted;
}

/* Drops the exception of an attempt to record, unless a signal handler raised it. Returns whether it stays. */
static inline int keep_interrupt(void)
{
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) return 1;
    PyErr_Clear();
    return 0;
}

/* Takes the exception that is being raised, with its traceback; `drop_exception` or `PyErr_Restore` ends that. */
void fetch_exception(PyObject **type, PyObject **exc, PyObject **traceback);
void drop_exception(PyObject *type, PyObject *exc, PyObject *traceback);

/* ── requests ────────────────────────────────────────────────────────────────────────────────────────────────── */

/* The fields of a request span (`tracing/request_state.py`). */
typedef struct {
    PyObject_HEAD
    OpenedRequest opened;
    PyObject *make_identity;  /* NULL: `identity` is set */
    PyObject *ring, *identity, *around, *provider_spans, *owner, *on_token_reached, *engine_error;
    PyObject *operation_names;  /* operation, provider and model, as recorded last; NULL = none */
    long long handle, arrived_at, chunks, send_wait_ns, detokenize_ns, queued_at, link_count;
    char ended, has_server, inspect_next_chunk, responding, tokens_reached, first_token_sent, sends_directly;
    char has_error_status, is_named, has_forward_name, tokenizing;
} RequestState;

/* Writes the end of a stage. Returns whether that is done; if not, without an exception, Python code must. */
int write_stage(RequestState *self, int64_t at, PyObject *name, int64_t started_at, int64_t items);

/* The same; Python code is called where it must. Returns -1 after an exception. */
int record_stage_until(RequestState *self, int64_t at, PyObject *name, int64_t started_at, int64_t items);

/* Records the stage `accept` of a request that waited in its socket until `called_at`. `cycle`: uvicorn's. */
void record_socket_wait(RequestState *request, PyObject *cycle, int64_t called_at);

/* Writes operation, provider and model (a tuple of three texts), unless they are unchanged. Returns as above. */
int write_operation(RequestState *self, PyObject *names);

/* Writes where the model runs. Returns as above. */
int write_place(RequestState *self, PyObject *provider);

/* Writes the end of a request that succeeded, and frees its slot. Returns as above. */
int close_succeeded(RequestState *self, int64_t at, PyObject *no_text, PyObject *empty_context);

/* ── rings ───────────────────────────────────────────────────────────────────────────────────────────────────── */

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

/* Opens a request of a new trace. `names`: operation, provider, model and name of its span. Returns 0; -1 after an
 * exception. */
int open_root(RequestRing *ring, PyObject *const *names, int64_t at, uint16_t flags, int root_sampled,
              OpenedRequest *opened);

/* write_event(handle, event), the method of a ring */
PyObject *write_event(RequestRing *ring, PyObject *const *arguments, Py_ssize_t count);
/* Writes an event of one cell; `body` has 40 bytes. */
void write_cell(RequestRing *ring, int code, uint32_t handle, const char *body);
int intern_text(RequestRing *ring, PyObject *text, uint32_t *id);
void free_slot(RequestRing *ring, uint32_t handle);
uint64_t count_offered(RequestRing *ring);
/* Stores a word of the header. */
void store_word(RequestRing *ring, int word, uint64_t value);

/* Writes an event of any length, at most 64 parts, in as many cells as it needs. */
void write_long(RequestRing *ring, int code, uint32_t handle, const char *body, size_t length);
/* Writes an attribute as `codec.pack_text` packs it. Returns 0 if a text is not plain: Python code must write it. */
int write_attribute(RequestRing *ring, int code, uint32_t handle, int64_t at, PyObject *key, PyObject *value);

/* Returns the ring of a request that can be written; NULL if Python code must find out. */
RequestRing *get_ring(RequestState *request);
/* Records, once, that a token reached the part of the server that serves the client. Returns -1 after an exception. */
int mark_token_reached(RequestState *request);

/* ── steps ───────────────────────────────────────────────────────────────────────────────────────────────────── */

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

/* ── hooks (`instrumentation/hooks/_compiled_hook.c`) ──────────────────────────────────────────────────────── */

/* Calls without a tuple of arguments (PEP 590). Python 3.11 exports these functions, and the stable ABI has them since 3.12. */
typedef PyObject *(*VectorCall)(PyObject *function, PyObject *const *arguments, size_t count, PyObject *names);
PyAPI_FUNC(PyObject *) PyObject_Vectorcall(PyObject *, PyObject *const *, size_t, PyObject *);
PyAPI_FUNC(PyObject *) PyVectorcall_Call(PyObject *, PyObject *, PyObject *);

typedef struct CompiledHook {
    PyObject_HEAD
    PyObject *known, *original, *call_slowly, *hook, *bind, *details, *attributes, *references;
    PyObject *(*call)(struct CompiledHook *self, PyObject *arguments, PyObject *named);
    VectorCall call_vector;  /* one of both is NULL */
} CompiledHook;
typedef PyObject *(*HookCall)(CompiledHook *self, PyObject *arguments, PyObject *named);
typedef struct {
    const char *place;
    HookCall call;
    VectorCall call_vector;  /* in place of `call`, for a hook that costs as little as a call can */
} HookPlace;

/* Returns whether a `probe.Hook` was neither removed nor disabled. */
int is_hook_alive(PyObject *hook);
static inline int is_alive(CompiledHook *self)
{
    return is_hook_alive(self->hook);
}

/* Passes the exception of our own code to a `probe.Hook`, which disables itself. Returns -1 if that raised one: a signal
 * handler's. */
int mark_hook_failed(PyObject *hook);
/* Returns the result of the library's function, after our own code; `failed`: that code has set an exception. */
PyObject *return_after(CompiledHook *self, PyObject *result, int failed);

/* A call of the original that is a stage of a request. `items`: of the stage, RAISED until they are set. */
enum { RAISED = -1 };  /* `events.RAISED` */
typedef struct {
    PyObject *type, *exc, *traceback;  /* that the original raised */
    int64_t started_at, at, items;
} StageCall;

/* Calls the original. Returns its result; NULL after an exception, which is held until the end. */
PyObject *call_in_stage(CompiledHook *self, StageCall *call, PyObject *arguments, PyObject *named);
/* Records the stage, unless the request has ended or our own code has set an exception, which disables the hook. Returns the
 * result, whose reference it takes; NULL with the exception that leaves the call. */
PyObject *end_stage_call(CompiledHook *self, StageCall *call, RequestState *request, PyObject *stage, PyObject *result);

/* Records what a method of `owner` returned. Returns whether that is done; if not, nothing was changed. */
typedef int (*Recording)(CompiledHook *self, PyObject *owner, PyObject *result);
/* Calls the original, then `record`, or the Python function `details(owner, result, hook)` where that does not suffice. */
PyObject *call_and_record(CompiledHook *self, PyObject *arguments, PyObject *named, Recording record);
PyObject *return_recorded(PyObject *result, PyObject *recorded);

/* Returns the current request as a new reference, None if there is none, NULL without an exception if Python code must
 * find out. */
PyObject *find_current_request(PyObject *variable, PyObject *request_key);
/* Returns the value of a context variable, NULL if it has none. Python exports what it calls, and has since 3.7. */
PyObject *get_variable(PyObject *variable);
/* Sets a context variable; returns the token for its `reset`, NULL after an exception. */
PyObject *set_variable(PyObject *variable, PyObject *value);

/* The places of the hooks, ended by one without a name, and the types of each source. */
extern const HookPlace asgi_places[], transformers_places[], generation_places[], batch_places[], scheduler_places[],
    context_places[], queue_places[], model_places[];
int add_batch_types(PyObject *module);
int add_scheduler_types(PyObject *module);
int add_exchange_types(PyObject *module);
int add_request_state(PyObject *module);
int add_hook_type(PyObject *module);
int add_transformers_types(PyObject *module);
int add_generation_types(PyObject *module);
int add_lag_type(PyObject *module);
int add_socket_functions(PyObject *module);
int add_stall_types(PyObject *module);
int add_stack_signal(PyObject *module);
int add_forward_types(PyObject *module);
int add_context_types(PyObject *module);
int add_queue_functions(PyObject *module);
int add_model_names(PyObject *module);
int add_type(PyObject *module, const char *name, PyType_Spec *spec);

#endif
