/* Records the steady steps of transformers' continuous batching, as `continuous_batching` does in Python.
 *
 * A step is steady if its members are those of the last one, each gets its next token, and no keyframe is due.
 */
#include "../hooks/_step_hook.h"

enum { ACTIVE_REQUESTS, BATCHES, FREE_BLOCKS, FREE_SECTORS, HAS_NEW_TOKEN, LENGTH, TO_FORK, WAITING_REQUESTS, NAMES };
static const char *const texts[NAMES] = {"active_requests",  "_otel_infer_batches", "_free_blocks",
                                         "free_sectors",     "has_new_token",       "_length",
                                         "_requests_to_fork", "waiting_requests"};
static PyObject *names[NAMES];

/* ── step in flight ────────────────────────────────────────────────────────────────────────────────────────── */

typedef struct {
    PyObject_HEAD
    PyObject *first_future, *states;
    long long step;
    char is_plain, decode_only;
} StepFlight;

#define EACH_OF_FLIGHT(DO) DO(first_future) DO(states)
#define FORGET_StepFlight(self) (void)(self)
DEFINE_STEP_REFERENCES(StepFlight, EACH_OF_FLIGHT)

static PyObject *new_flight(PyTypeObject *type, PyObject *arguments, PyObject *named)
{
    (void)arguments;
    (void)named;
    StepFlight *self = (StepFlight *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self != NULL) self->is_plain = self->decode_only = 1;
    return (PyObject *)self;
}

static PyMemberDef flight_members[] = {
    STEP_FIELD(StepFlight, T_OBJECT, first_future), STEP_FIELD(StepFlight, T_OBJECT, states),
    STEP_FIELD(StepFlight, T_LONGLONG, step), STEP_FIELD(StepFlight, T_BOOL, is_plain),
    STEP_FIELD(StepFlight, T_BOOL, decode_only), {NULL, 0, 0, 0, NULL}};
static PyType_Slot flight_slots[] = {{Py_tp_new, new_flight}, STEP_REFERENCE_SLOTS(StepFlight),
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
    PyObject *scheduler, *ring, *in_flight, *last_states, *removed, *read_free, *flight_type, *pool;
    StepFlight *spare;  /* a flight that is used again */
    long long timing_due_at, kv_total, free_scale, sector_bytes, pool_bytes;
    Allocator allocators[MAX_ALLOCATORS];
    int allocator_count;
    char closed, is_latest;
} StepTracker;

/* The tracker whose step was composed last; it is not kept alive. `scheduler` of it is a weak reference. */
static StepTracker *latest;
static PyTypeObject *tracker_base;

#define EACH_OF_TRACKER(DO)                                                                                          \
    DO(scheduler) DO(ring) DO(in_flight) DO(last_states) DO(removed) DO(read_free) DO(flight_type) DO(pool) DO(spare)
#define FORGET_StepTracker(self) if (latest == (self)) latest = NULL
DEFINE_STEP_REFERENCES(StepTracker, EACH_OF_TRACKER)

/* Returns the length of an attribute; -1 with an exception. */
static Py_ssize_t count_attribute(PyObject *owner, int name)
{
    PyObject *value = PyObject_GetAttr(owner, names[name]);
    Py_ssize_t count = value == NULL ? -1 : PyObject_Size(value);
    Py_XDECREF(value);
    return count;
}

/* As Python's `round`: half to even. */
static long long round_positive(double number)
{
    long long whole = (long long)number;
    double rest = number - (double)whole;
    return whole + (rest > 0.5 || (rest == 0.5 && (whole & 1)));
}

/* Returns the free bytes of the pool, from its own counts; -1 with an exception. */
static long long read_pool_bytes(StepTracker *self)
{
    Py_ssize_t sectors = count_attribute(self->pool, FREE_SECTORS);
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
        return bytes < 0 ? -1 : round_positive((double)bytes / (double)self->pool_bytes * (double)self->free_scale);
    }
    PyObject *share = self->read_free == NULL ? NULL : PyObject_CallNoArgs(self->read_free);
    double number = share == NULL ? -1 : PyFloat_AsDouble(share);
    Py_XDECREF(share);
    return number < 0 ? -1 : round_positive(number * (double)self->free_scale);
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
    return PyLong_FromLongLong(count_free(self));
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
    return has_token == Py_True && count_attribute(scheduler, TO_FORK) == 0;
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

/* Records a batch with the members of the last one. */
static int record_unchanged(StepTracker *self, PyObject *scheduler, PyObject *futures, PyObject *tokens)
{
    Py_ssize_t size = PyList_Size(futures), waiting;
    int64_t at = read_clock();
    if (size != PyList_Size(self->last_states) || PyList_Size(self->removed) || PyLong_AsLongLong(tokens) != size)
        return 0;
    if (at >= self->timing_due_at && !self->is_latest) return 0;
    if (count_attribute(scheduler, ACTIVE_REQUESTS) != size || !is_decode(scheduler, futures, size)) return 0;
    waiting = count_attribute(scheduler, WAITING_REQUESTS);
    long long free = waiting < 0 ? -1 : count_free(self);
    StepFlight *flight = free < 0 ? NULL : take_flight(self);
    if (flight == NULL) return 0;
    StepRing *ring = get_step_ring(self->ring);  /* again: Python code may have run */
    const long long numbers[5] = {size, self->kv_total - free, self->kv_total, size, waiting};
    long long step = ring == NULL ? 0 : store_unchanged(ring, numbers, at);
    if (step > 0) {
        flight->step = step;
        flight->first_future = PyList_GetItem(futures, 0);
        flight->states = self->last_states;
        Py_INCREF(flight->first_future);
        Py_INCREF(flight->states);
        append_flight(self, flight);
        latest = self;
        Py_DECREF((PyObject *)flight);
    } else keep_flight(self, flight);
    return step > 0;
}

int record_cb_schedule(PyObject *scheduler, PyObject *result)
{
    if (!PyTuple_Check(result) || PyTuple_Size(result) < 3) return 0;
    PyObject *futures = PyTuple_GetItem(result, 0);
    if (!PyList_Check(futures)) return futures == Py_None;
    if (!PyList_Size(futures)) return 1;
    StepTracker *tracker = find_tracker(scheduler);
    int recorded = tracker != NULL && record_unchanged(tracker, scheduler, futures, PyTuple_GetItem(result, 2));
    Py_XDECREF((PyObject *)tracker);
    return recorded;
}

int record_cb_update(PyObject *result)
{
    StepTracker *self = latest;
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
    STEP_FIELD(StepTracker, T_OBJECT, scheduler), STEP_FIELD(StepTracker, T_OBJECT, ring), STEP_FIELD(StepTracker, T_OBJECT, in_flight),
    STEP_FIELD(StepTracker, T_OBJECT, last_states), STEP_FIELD(StepTracker, T_OBJECT, removed),
    STEP_FIELD(StepTracker, T_OBJECT, read_free), STEP_FIELD(StepTracker, T_OBJECT, flight_type),
    STEP_FIELD(StepTracker, T_OBJECT, pool), STEP_FIELD(StepTracker, T_LONGLONG, timing_due_at),
    STEP_FIELD(StepTracker, T_LONGLONG, kv_total), STEP_FIELD(StepTracker, T_LONGLONG, free_scale),
    STEP_FIELD(StepTracker, T_BOOL, closed), STEP_FIELD(StepTracker, T_BOOL, is_latest), {NULL, 0, 0, 0, NULL}};
static PyType_Slot tracker_slots[] = {{Py_tp_new, PyType_GenericNew},    STEP_REFERENCE_SLOTS(StepTracker),
                                      {Py_tp_members, tracker_members}, {Py_tp_methods, tracker_methods},
                                      {0, NULL}};
static PyType_Spec tracker_spec = {"otel_infer.ringbuffer._native.StepTracker", sizeof(StepTracker), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, tracker_slots};

int add_batch_types(PyObject *module)
{
    for (int i = 0; i < NAMES; i++) {
        names[i] = PyUnicode_InternFromString(texts[i]);
        if (names[i] == NULL) return -1;
    }
    flight_base = (PyTypeObject *)PyType_FromModuleAndSpec(module, &flight_spec, NULL);
    tracker_base = (PyTypeObject *)PyType_FromModuleAndSpec(module, &tracker_spec, NULL);
    return flight_base == NULL || tracker_base == NULL ||
                   PyModule_AddObjectRef(module, "StepFlight", (PyObject *)flight_base) ||
                   PyModule_AddObjectRef(module, "StepTracker", (PyObject *)tracker_base)
               ? -1
               : 0;
}
