/* Records the frequent steps of transformers' continuous batching, as `continuous_batching` does in Python.
 *
 * In a steady step the members are those of the last one, and each gets its next token. In a changed step a few have
 * left, or joined at the end, with prompts that are done in this step. Python code writes keyframes and all others.
 */
#include "../../ringbuffer/_native.h"

enum {
    ACTIVE_REQUESTS, BATCHES, FREE_BLOCKS, FREE_SECTORS, HANDLE, HAS_NEW_TOKEN, LENGTH, QUERY_LENGTH, STATE, TO_FORK,
    WAITING_REQUESTS, NAMES
};
static const char *const texts[NAMES] = {
    "active_requests", "_otel_infer_batches", "_free_blocks", "free_sectors", "otel_infer_handle", "has_new_token",
    "_length", "query_length", "state", "_requests_to_fork", "waiting_requests"};
static PyObject *names[NAMES];

/* ── step in flight ────────────────────────────────────────────────────────────────────────────────────────── */

typedef struct {
    PyObject_HEAD
    PyObject *first_future, *states;
    long long step;
    char is_plain, decode_only;
} StepFlight;

#define EACH_OF_FLIGHT(DO) DO(first_future) DO(states)
DEFINE_REFERENCES(StepFlight, EACH_OF_FLIGHT)

static PyObject *new_flight(PyTypeObject *type, PyObject *arguments, PyObject *named)
{
    (void)arguments;
    (void)named;
    StepFlight *self = (StepFlight *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self != NULL) self->is_plain = self->decode_only = 1;
    return (PyObject *)self;
}

static PyMemberDef flight_members[] = {
    FIELD(StepFlight, T_OBJECT, first_future), FIELD(StepFlight, T_OBJECT, states),
    FIELD(StepFlight, T_LONGLONG, step), FIELD(StepFlight, T_BOOL, is_plain),
    FIELD(StepFlight, T_BOOL, decode_only), {NULL, 0, 0, 0, NULL}};
static PyType_Slot flight_slots[] = {{Py_tp_new, new_flight}, REFERENCE_SLOTS(StepFlight),
                                     {Py_tp_members, flight_members}, {0, NULL}};
static PyType_Spec flight_spec = {"otel_infer.ringbuffer._native.StepFlight", sizeof(StepFlight), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, flight_slots};
static PyTypeObject *flight_base;

/* ── steps of a scheduler ──────────────────────────────────────────────────────────────────────────────────── */

enum { MAX_FLIGHTS = 8, MAX_ALLOCATORS = 8 };

/* Blocks of an allocator in the pool that all share. */
typedef struct {
    long long index, bytes;
} Allocator;

typedef struct {
    PyObject_HEAD
    PyObject *scheduler, *ring, *in_flight, *last_states, *removed, *read_free, *flight_type, *pool, *batch, *announce;
    StepFlight *spare;  /* a flight that is used again */
    long long timing_due_at, size_due_at, kv_total, free_scale, sector_bytes, pool_bytes;
    Allocator allocators[MAX_ALLOCATORS];
    int allocator_count;
    char closed, is_latest;
} StepTracker;

/* The tracker whose step was composed last; it is not kept alive. `scheduler` of it is a weak reference. */
static StepTracker *latest;
static PyTypeObject *tracker_base;

#define EACH_OF_TRACKER(DO)                                                                                          \
    DO(scheduler) DO(ring) DO(in_flight) DO(last_states) DO(removed) DO(read_free) DO(flight_type) DO(pool) DO(batch) DO(announce)             \
    DO(spare)
DEFINE_REFERENCES_AND(StepTracker, EACH_OF_TRACKER, if (latest == self) latest = NULL)

/* Returns the free bytes of the pool, from its own counts; -1 with an exception. */
static long long read_pool_bytes(StepTracker *self)
{
    Py_ssize_t sectors = count_attribute(self->pool, names[FREE_SECTORS]);
    PyObject *trees = sectors < 0 ? NULL : PyObject_GetAttr(self->pool, names[FREE_BLOCKS]);
    long long bytes = trees != NULL && PyList_Check(trees) ? sectors * self->sector_bytes : -1;
    for (int i = 0; i < self->allocator_count && bytes >= 0; i++) {
        PyObject *tree = PyList_GetItem(trees, (Py_ssize_t)self->allocators[i].index);
        PyObject *length = tree == NULL ? NULL : PyObject_GetAttr(tree, names[LENGTH]);
        long long blocks = length == NULL ? -1 : PyLong_AsLongLong(length);
        Py_XDECREF(length);
        bytes = blocks < 0 ? -1 : bytes + blocks * self->allocators[i].bytes;
    }
    Py_XDECREF(trees);
    return bytes;
}

/* Returns the free blocks of the cache; -1 with an exception. */
static long long count_free(StepTracker *self)
{
    if (self->pool != NULL && self->pool != Py_None) {
        long long bytes = read_pool_bytes(self);
        return bytes < 0 ? -1 : round_half_even((double)bytes / (double)self->pool_bytes * (double)self->free_scale);
    }
    PyObject *share = self->read_free == NULL ? NULL : PyObject_CallNoArgs(self->read_free);
    double number = share == NULL ? -1 : PyFloat_AsDouble(share);
    Py_XDECREF(share);
    return number < 0 ? -1 : round_half_even(number * (double)self->free_scale);
}

/* use_pool(pool, bytes of a sector, of the pool, [(index, bytes of a block) per allocator]): reads its free blocks. */
static PyObject *use_pool(StepTracker *self, PyObject *arguments)
{
    PyObject *pool, *allocators, *old = self->pool;
    long long sector_bytes, pool_bytes;
    if (!PyArg_ParseTuple(arguments, "OLLO!", &pool, &sector_bytes, &pool_bytes, &PyList_Type, &allocators)) return NULL;
    Py_ssize_t count = PyList_Size(allocators);
    if (pool_bytes <= 0 || count > MAX_ALLOCATORS) return PyErr_Format(PyExc_ValueError, "the pool is not supported");
    for (Py_ssize_t i = 0; i < count; i++) {
        Allocator *each = self->allocators + i;
        if (!PyArg_ParseTuple(PyList_GetItem(allocators, i), "LL", &each->index, &each->bytes)) return NULL;
    }
    self->allocator_count = (int)count;
    self->sector_bytes = sector_bytes;
    self->pool_bytes = pool_bytes;
    Py_INCREF(pool);
    self->pool = pool;
    Py_XDECREF(old);
    long long free = count_free(self);
    return PyErr_Occurred() ? NULL : PyLong_FromLongLong(free);
}

/* Returns a flight that is not in use, as a new reference. */
static StepFlight *take_flight(StepTracker *self)
{
    StepFlight *flight = self->spare;
    if (flight != NULL) {
        self->spare = NULL;
        return flight;
    }
    if (self->flight_type == NULL) return NULL;
    flight = (StepFlight *)PyObject_CallNoArgs(self->flight_type);
    if (flight != NULL && !PyObject_TypeCheck((PyObject *)flight, flight_base)) Py_CLEAR(flight);
    return flight;
}

/* Keeps a flight for the next step, if nothing else refers to it; takes over the reference. */
static void keep_flight(StepTracker *self, StepFlight *flight)
{
    if (self->spare == NULL && Py_REFCNT((PyObject *)flight) == 1) {
        Py_CLEAR(flight->first_future);
        Py_CLEAR(flight->states);
        flight->decode_only = 1;
        if (self->spare == NULL) {
            self->spare = flight;
            return;
        }
    }
    Py_DECREF((PyObject *)flight);
}

static int append_flight(StepTracker *self, StepFlight *flight)
{
    if (PyList_Size(self->in_flight) >= MAX_FLIGHTS && PyList_SetSlice(self->in_flight, 0, 1, NULL)) return -1;
    return PyList_Append(self->in_flight, (PyObject *)flight);
}

static int is_list(PyObject *value)
{
    return value != NULL && PyList_Check(value);
}

/* Returns whether each of the scheduled sequences gets its next token, and none of them is forked. */
static int is_decode(PyObject *scheduler, PyObject *futures, Py_ssize_t size)
{
    PyObject *has_token = PyObject_GetAttr(PyList_GetItem(futures, size - 1), names[HAS_NEW_TOKEN]);
    Py_XDECREF(has_token);
    return has_token == Py_True && count_attribute(scheduler, names[TO_FORK]) == 0;
}

/* Returns the tracker of this scheduler if it may write, as a new reference; NULL if Python code must see to it. */
static StepTracker *find_tracker(PyObject *scheduler)
{
    PyObject *found;
    if (latest != NULL && refers_to(latest->scheduler, scheduler)) {  /* without a look-up by name, with cold caches */
        found = (PyObject *)latest;
        Py_INCREF(found);
    } else found = PyObject_GetAttr(scheduler, names[BATCHES]);
    StepTracker *self = (StepTracker *)found;
    if (found != NULL && PyObject_TypeCheck(found, tracker_base) && !self->closed && is_list(self->in_flight) &&
        is_list(self->last_states) && is_list(self->removed) && get_step_ring(self->ring) != NULL) return self;
    Py_XDECREF(found);
    return NULL;
}

/* Adds a step, and makes it the latest. */
static void add_flight(StepTracker *self, StepFlight *flight, long long step, PyObject *futures, PyObject *states)
{
    flight->step = step;
    flight->first_future = PyList_GetItem(futures, 0);
    flight->states = states;
    Py_INCREF(flight->first_future);
    Py_INCREF(states);
    append_flight(self, flight);
    latest = self;
}

/* ── changed members ───────────────────────────────────────────────────────────────────────────────────────── */

static Py_ssize_t find_pointer(PyObject *const *from, Py_ssize_t count, PyObject *wanted)
{
    while (count-- > 0)
        if (from[count] == wanted) return count;
    return -1;
}

/* Finds who left and who joined. Returns whether the active states are the members that stayed, then newcomers. */
static int compare_members(StepTracker *self, BatchState *batch, PyObject *active, BatchChange *change)
{
    Py_ssize_t count = PyList_Size(batch->members), left = PyList_Size(self->removed), position = 0, at = 0;
    PyObject *key, *state;
    if (count > MAX_MEMBERS || left > MAX_CHANGES) return 0;
    for (Py_ssize_t i = 0; i < count; i++) change->after[i] = PyList_GetItem(batch->members, i);
    for (Py_ssize_t i = 0; i < left; i++) {
        Py_ssize_t found = find_pointer(change->after, count, PyList_GetItem(self->removed, i));
        if (found < 0) return 0;
        memmove(change->after + found, change->after + found + 1, (--count - found) * sizeof(PyObject *));
        change->left[i] = (uint32_t)found;
    }
    if (change->size > MAX_MEMBERS || change->size < count || change->size - count > MAX_CHANGES) return 0;
    while (PyDict_Next(active, &position, &key, &state)) {
        if (at < count && change->after[at] != state) return 0;
        change->after[at++] = state;
    }
    change->left_count = (int)left;
    change->joined_count = (int)(change->size - count);
    return at == change->size;
}

/* Reads the handles of the newcomers. */
static int read_handles(BatchChange *change)
{
    for (int i = 0; i < change->joined_count; i++) {
        char *bytes;
        Py_ssize_t length;
        PyObject *handle = PyObject_GetAttr(change->after[change->size - change->joined_count + i], names[HANDLE]);
        int failed = handle == NULL || PyBytes_AsStringAndSize(handle, &bytes, &length) || length != 4;
        if (!failed) memcpy(change->handles + i, bytes, 4);
        Py_XDECREF(handle);
        if (failed) return 0;
    }
    return 1;
}

/* Reads the prompts, which the scheduler puts at the end. Returns 0 if one goes on in a later step, or there are many. */
static int read_prompts(PyObject *futures, long long surplus, BatchChange *change)
{
    Py_ssize_t last = PyList_Size(futures) - 1;
    for (; last >= 0; last--) {
        PyObject *future = PyList_GetItem(futures, last), *queries = PyObject_GetAttr(future, names[QUERY_LENGTH]);
        PyObject *has_token = PyObject_GetAttr(future, names[HAS_NEW_TOKEN]);
        long long tokens = queries == NULL ? -1 : PyLong_AsLongLong(queries);
        Py_XDECREF(queries);
        Py_XDECREF(has_token);
        if (has_token != Py_True || tokens < 1 || tokens > UINT32_MAX) return 0;
        if (tokens == 1) break;
        PyObject *state = PyObject_GetAttr(future, names[STATE]);
        Py_ssize_t position = state == NULL ? -1 : find_pointer(change->after, change->size, state);
        Py_XDECREF(state);
        if (position < 0 || change->tokens_count == MAX_CHANGES - 1) return 0;
        change->tokens[2 * change->tokens_count] = (uint32_t)position;
        change->tokens[2 * change->tokens_count++ + 1] = (uint32_t)tokens;
        surplus -= tokens - 1;
    }
    return surplus == 0;
}

static int fits(long long number)
{
    return number >= 0 && number <= UINT32_MAX;
}

/* Writes a batch of which a few left or joined. Returns 0 if it is another one, which Python code writes. */
static int record_changed(StepTracker *self, PyObject *active, PyObject *futures, const long long *load,
                          long long tokens, int decode_only, int64_t at)
{
    BatchChange change;
    change.left_count = change.joined_count = change.tokens_count = 0;
    change.size = PyList_Size(futures);
    BatchState *batch = get_batch(self->batch);
    if (batch == NULL || !PyDict_Check(active) || PyDict_Size(active) != change.size || at >= self->size_due_at) return 0;
    for (int i = 0; i < 4; i++)
        if (!fits(load[i])) return 0;
    if (!compare_members(self, batch, active, &change) || !read_handles(&change)) return 0;
    if (!decode_only && !read_prompts(futures, tokens - change.size, &change)) return 0;
    StepRing *ring = get_step_ring(self->ring);
    int words = change.left_count + change.joined_count + 2 * change.tokens_count;
    PyObject *states = ring != NULL && takes_change(ring, words, at) ? PyList_New(change.size) : NULL;
    StepFlight *flight = states == NULL ? NULL : take_flight(self);
    if (flight == NULL) {
        Py_XDECREF(states);
        return 0;
    }
    for (Py_ssize_t i = 0; i < change.size; i++) {
        Py_INCREF(change.after[i]);
        PyList_SetItem(states, i, change.after[i]);
    }
    flight->decode_only = (char)decode_only;
    add_flight(self, flight, store_change(ring, batch, &change, load, at), futures, states);
    PyObject *before = self->last_states;
    self->last_states = states;
    Py_DECREF(before);
    Py_DECREF((PyObject *)flight);
    PyList_SetSlice(self->removed, 0, change.left_count, NULL);
    return 1;
}

/* Records a batch with the members of the last one, or with few changes. */
static int record_batch(StepTracker *self, PyObject *scheduler, PyObject *futures, PyObject *query_tokens)
{
    StepRing *ring = get_step_ring(self->ring);
    int64_t at = read_clock();
    if (ring->step + 1 >= ring->next_keyframe_step) return 0;
    Py_ssize_t size = PyList_Size(futures), waiting = count_attribute(scheduler, names[WAITING_REQUESTS]);
    long long tokens = PyLong_AsLongLong(query_tokens);
    if (waiting < 0 || tokens < size) return 0;
    if (at >= self->timing_due_at && !self->is_latest) {
        PyObject *done = self->announce == NULL ? NULL : PyObject_CallFunctionObjArgs(self->announce, self, NULL);
        Py_XDECREF(done);
        if (done == NULL) return 0;
    }
    PyObject *active = PyObject_GetAttr(scheduler, names[ACTIVE_REQUESTS]);
    long long free = active != NULL && PyObject_Size(active) == size ? count_free(self) : -1;
    const long long numbers[5] = {size, self->kv_total - free, self->kv_total, size, waiting};
    int decode_only = free >= 0 && tokens == size && is_decode(scheduler, futures, size), recorded = 0;
    ring = get_step_ring(self->ring);  /* again: Python code may have run */
    if (free < 0 || ring == NULL || PyErr_Occurred()) recorded = 0;
    else if (decode_only && size == PyList_Size(self->last_states) && !PyList_Size(self->removed)) {
        StepFlight *flight = take_flight(self);
        long long step = flight == NULL ? 0 : store_unchanged(ring, numbers, at);
        if (step > 0) {
            add_flight(self, flight, step, futures, self->last_states);
            Py_DECREF((PyObject *)flight);
        } else if (flight != NULL) keep_flight(self, flight);
        recorded = step > 0;
    } else recorded = record_changed(self, active, futures, numbers + 1, tokens, decode_only, at);
    Py_XDECREF(active);
    return recorded;
}

static int record_schedule(CompiledHook *self, PyObject *scheduler, PyObject *result)
{
    (void)self;
    if (!PyTuple_Check(result) || PyTuple_Size(result) < 3) return 0;
    PyObject *futures = PyTuple_GetItem(result, 0);
    if (!PyList_Check(futures)) return futures == Py_None;
    if (!PyList_Size(futures)) return 1;
    StepTracker *tracker = find_tracker(scheduler);
    int recorded = tracker != NULL && record_batch(tracker, scheduler, futures, PyTuple_GetItem(result, 2));
    Py_XDECREF((PyObject *)tracker);
    return recorded;
}

static int record_update(CompiledHook *hook, PyObject *owner, PyObject *result)
{
    StepTracker *self = latest;
    (void)hook, (void)owner;
    if (!PyTuple_Check(result) || PyTuple_Size(result) < 1) return 0;
    PyObject *futures = PyTuple_GetItem(result, 0);
    if (!PyList_Check(futures)) return 0;
    if (!PyList_Size(futures)) return 1;
    if (self == NULL || self->closed || !is_list(self->in_flight) || !PyList_Size(self->in_flight)) return 0;
    StepRing *ring = get_step_ring(self->ring);
    StepFlight *flight = (StepFlight *)PyList_GetItem(self->in_flight, 0);
    if (ring == NULL || !PyObject_TypeCheck((PyObject *)flight, flight_base) || !flight->is_plain || !flight->step ||
        flight->first_future != PyList_GetItem(futures, 0)) return 0;
    store_single_tokens(ring, flight->step, read_clock(), 0);
    Py_INCREF((PyObject *)self);
    Py_INCREF((PyObject *)flight);
    PyList_SetSlice(self->in_flight, 0, 1, NULL);
    keep_flight(self, flight);
    Py_DECREF((PyObject *)self);
    return 1;
}

static PyObject *call_schedule(CompiledHook *self, PyObject *arguments, PyObject *named)
{
    return call_and_record(self, arguments, named, record_schedule);
}

static PyObject *call_update(CompiledHook *self, PyObject *arguments, PyObject *named)
{
    return call_and_record(self, arguments, named, record_update);
}

const HookPlace batch_places[] = {{"schedule batch", call_schedule}, {"batch update", call_update}, {NULL, NULL}};

/* make_latest(): the next update is likely that of this tracker's step. */
static PyObject *make_latest(StepTracker *self, PyObject *unused)
{
    (void)unused;
    latest = self;
    Py_RETURN_NONE;
}

static PyMethodDef tracker_methods[] = {
    {"use_pool", (PyCFunction)use_pool, METH_VARARGS,
     "use_pool(pool, sector_bytes, pool_bytes, allocators): reads the pool's counts; returns its free blocks, -1 = not read."},
    {"make_latest", (PyCFunction)make_latest, METH_NOARGS, "make_latest(): its step was composed last."},
    {NULL, NULL, 0, NULL}};
static PyMemberDef tracker_members[] = {
    FIELD(StepTracker, T_OBJECT, scheduler), FIELD(StepTracker, T_OBJECT, ring), FIELD(StepTracker, T_OBJECT, in_flight),
    FIELD(StepTracker, T_OBJECT, last_states), FIELD(StepTracker, T_OBJECT, removed),
    FIELD(StepTracker, T_OBJECT, read_free), FIELD(StepTracker, T_OBJECT, flight_type),
    FIELD(StepTracker, T_OBJECT, pool), FIELD(StepTracker, T_OBJECT, batch),
    FIELD(StepTracker, T_OBJECT, announce),
    FIELD(StepTracker, T_LONGLONG, size_due_at), FIELD(StepTracker, T_LONGLONG, timing_due_at),
    FIELD(StepTracker, T_LONGLONG, kv_total), FIELD(StepTracker, T_LONGLONG, free_scale),
    FIELD(StepTracker, T_BOOL, closed), FIELD(StepTracker, T_BOOL, is_latest), {NULL, 0, 0, 0, NULL}};
static PyType_Slot tracker_slots[] = {{Py_tp_new, PyType_GenericNew},    REFERENCE_SLOTS(StepTracker),
                                      {Py_tp_members, tracker_members}, {Py_tp_methods, tracker_methods},
                                      {0, NULL}};
static PyType_Spec tracker_spec = {"otel_infer.ringbuffer._native.StepTracker", sizeof(StepTracker), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, tracker_slots};

int add_batch_types(PyObject *module)
{
    if (make_names(names, texts, NAMES)) return -1;
    flight_base = (PyTypeObject *)PyType_FromModuleAndSpec(module, &flight_spec, NULL);
    tracker_base = (PyTypeObject *)PyType_FromModuleAndSpec(module, &tracker_spec, NULL);
    return flight_base == NULL || tracker_base == NULL || PyModule_AddIntMacro(module, MAX_FLIGHTS) ||
                   PyModule_AddObjectRef(module, "StepFlight", (PyObject *)flight_base) ||
                   PyModule_AddObjectRef(module, "StepTracker", (PyObject *)tracker_base)
               ? -1
               : 0;
}
