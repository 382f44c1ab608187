/* Records the usual steps of vLLM's scheduler, as `scheduler` does in Python.
 *
 * In a usual step no request joined or left the batch, and every member runs one token.
 */
#include "../../ringbuffer/_native.h"

enum {
    BATCHES, CACHED, FREE, NEW, OUTPUTS, POOLED, RESUMED, RUNNING, SPECULATED, STEP, TOKENS, TOTAL_TOKENS, NAMES
};
static const char *const texts[NAMES] = {
    "otel_infer_batches", "scheduled_cached_reqs", "num_free_blocks", "scheduled_new_reqs", "outputs", "pooler_output",
    "resumed_req_ids", "running", "scheduled_spec_decode_tokens", "otel_infer_step", "num_scheduled_tokens",
    "total_num_scheduled_tokens"};
static PyObject *names[NAMES];

typedef struct {
    PyObject_HEAD
    PyObject *scheduler, *ring, *hook, *pid, *free_blocks, *removed, *removals;
    long long size, scheduled, done, waiting, total_blocks, report_due_at;
    char single_tokens, ended_early;
} SchedulerSteps;

/* The steps that were used last; they are not kept alive. `scheduler` of it is a weak reference. */
static SchedulerSteps *latest;

#define EACH_OF_STEPS(DO) DO(scheduler) DO(ring) DO(hook) DO(pid) DO(free_blocks) DO(removed) DO(removals)
DEFINE_REFERENCES_AND(SchedulerSteps, EACH_OF_STEPS, if (latest == self) latest = NULL)
static PyTypeObject *steps_base;

static long long read_number(PyObject *owner, int name)
{
    PyObject *value = PyObject_GetAttr(owner, names[name]);
    long long number = value == NULL ? -1 : PyLong_AsLongLong(value);
    Py_XDECREF(value);
    return number;
}

static int is_false(PyObject *owner, int name)
{
    PyObject *value = PyObject_GetAttr(owner, names[name]);
    int is_true = value == NULL ? -1 : PyObject_IsTrue(value);
    Py_XDECREF(value);
    return is_true == 0;
}

/* Returns the steps of a scheduler as a new reference; NULL if there are none. */
static SchedulerSteps *find_steps(PyObject *scheduler)
{
    /* Without a look-up by name, with cold caches. */
    if (latest != NULL && refers_to(latest->scheduler, scheduler) && get_step_ring(latest->ring) != NULL) {
        Py_INCREF((PyObject *)latest);
        return latest;
    }
    PyObject *found = PyObject_GetAttr(scheduler, names[BATCHES]);
    if (found != NULL && PyObject_TypeCheck(found, steps_base)) return latest = (SchedulerSteps *)found;
    Py_XDECREF(found);
    return NULL;
}

static int is_empty(PyObject *list)
{
    return list != NULL && PyList_Check(list) && PyList_Size(list) == 0;
}

/* Whether the batch has the members of the last one, each with one token. */
static int is_usual(SchedulerSteps *self, PyObject *scheduler, PyObject *output)
{
    Py_ssize_t size = count_attribute(output, names[TOKENS]);
    if (size < 1 || size != self->size || !is_empty(self->removed)) return 0;
    if (read_number(output, TOTAL_TOKENS) != size || count_attribute(scheduler, names[RUNNING]) != size ||
        !is_false(output, NEW)) return 0;
    PyObject *cached = PyObject_GetAttr(output, names[CACHED]);
    int none_resumed = cached != NULL && is_false(cached, RESUMED);
    Py_XDECREF(cached);
    return none_resumed;
}

static int record_schedule(CompiledHook *hook, PyObject *scheduler, PyObject *output)
{
    SchedulerSteps *self = find_steps(scheduler);
    long long step = 0;
    int64_t at = read_clock();
    StepRing *ring = self == NULL ? NULL : get_step_ring(self->ring);
    if (ring != NULL && ring->step + 1 < ring->next_keyframe_step && self->hook == hook->hook && at < self->report_due_at &&
        self->pid != NULL && self->free_blocks != NULL &&
        is_usual(self, scheduler, output)) {
        long long free = read_number(self->free_blocks, FREE);
        ring = free < 0 ? NULL : get_step_ring(self->ring);  /* again: Python code may have run */
        const long long numbers[5] = {self->size, self->total_blocks - free, self->total_blocks, self->size,
                                      self->waiting};
        PyObject *number = ring == NULL ? NULL : PyLong_FromLongLong(ring->step + 1);
        PyObject *ids = number == NULL ? NULL : PyTuple_Pack(2, self->pid, number);
        /* First what may fail: a step that is written must be known to the hooks in the workers. */
        if (ids != NULL && !PyObject_SetAttr(output, names[STEP], ids)) step = store_unchanged(ring, numbers, at);
        Py_XDECREF(number);
        Py_XDECREF(ids);
        if (step > 0) self->scheduled = step;
    }
    Py_XDECREF((PyObject *)self);
    return step > 0;
}

/* Returns the steps of the scheduler, as a new reference, and the number of the step whose results come; NULL if its end
 * is not usual. */
static SchedulerSteps *begin_update(PyObject *scheduler, PyObject *output, long long *step)
{
    SchedulerSteps *self = find_steps(scheduler);
    PyObject *ids = self == NULL ? NULL : PyObject_GetAttr(output, names[STEP]);
    PyObject *number = ids != NULL && PyTuple_Check(ids) && PyTuple_Size(ids) == 2 ? PyTuple_GetItem(ids, 1) : NULL;
    *step = number == NULL ? 0 : PyLong_AsLongLong(number);
    Py_XDECREF(ids);
    if (*step > 0 && is_false(output, SPECULATED)) self->done = *step;
    else {
        Py_XDECREF((PyObject *)self);
        self = NULL;
    }
    return self;
}

/* Returns the number of outputs of all clients; -1 with an exception or if the result has another form. */
static Py_ssize_t count_outputs(PyObject *result)
{
    PyObject *key, *of_client;
    Py_ssize_t position = 0, outputs = 0;
    if (!PyDict_Check(result)) return -1;
    while (PyDict_Next(result, &position, &key, &of_client)) {
        Py_ssize_t count = count_attribute(of_client, names[OUTPUTS]);
        if (count < 0) return -1;
        outputs += count;
    }
    return outputs;
}

/* Records the end of a usual step. `arguments`: scheduler, scheduler_output, model_runner_output. */
static int record_update(SchedulerSteps *self, PyObject *arguments, PyObject *result, long long step, int64_t at)
{
    PyObject *scheduler = PyTuple_GetItem(arguments, 0), *output = PyTuple_GetItem(arguments, 1);
    PyObject *sampled = PyTuple_GetItem(arguments, 2);
    if (!self->single_tokens || self->ended_early || !is_empty(self->removals)) return 0;
    Py_ssize_t outputs = count_outputs(result);
    if (outputs < 1 || outputs != count_attribute(output, names[TOKENS]) || !is_false(sampled, POOLED) ||
        count_attribute(scheduler, names[RUNNING]) < 1) return 0;
    StepRing *ring = get_step_ring(self->ring);
    if (ring == NULL) return 0;
    store_single_tokens(ring, step, at, 0);
    return 1;
}

static PyObject *call_schedule(CompiledHook *self, PyObject *arguments, PyObject *named)
{
    return call_and_record(self, arguments, named, record_schedule);
}

/* `details`: records a step of which only the end is not usual. */
static PyObject *call_update(CompiledHook *self, PyObject *arguments, PyObject *named)
{
    int64_t at = read_clock();
    long long step = 0;
    SchedulerSteps *steps = NULL;
    if ((named == NULL || !PyDict_Size(named)) && PyTuple_Size(arguments) == 3 && is_alive(self))
        steps = begin_update(PyTuple_GetItem(arguments, 0), PyTuple_GetItem(arguments, 1), &step);
    if (keep_interrupt()) {
        Py_XDECREF((PyObject *)steps);
        return NULL;
    }
    if (steps == NULL) return PyObject_Call(self->call_slowly, arguments, named);
    PyObject *result = PyObject_Call(self->original, arguments, NULL);
    int is_done = result == NULL || !is_alive(self) || record_update(steps, arguments, result, step, at);
    Py_DECREF((PyObject *)steps);
    if (result != NULL && keep_interrupt()) Py_CLEAR(result);
    if (result == NULL || is_done) return result;
    return return_recorded(result, PyObject_CallFunction(self->details, "OOOOLLO", PyTuple_GetItem(arguments, 0),
                                                         PyTuple_GetItem(arguments, 1), PyTuple_GetItem(arguments, 2),
                                                         result, step, (long long)at, self->hook));
}

static PyMemberDef steps_members[] = {
    FIELD(SchedulerSteps, T_OBJECT, scheduler), FIELD(SchedulerSteps, T_OBJECT, ring), FIELD(SchedulerSteps, T_OBJECT, hook),
    FIELD(SchedulerSteps, T_OBJECT, pid), FIELD(SchedulerSteps, T_OBJECT, free_blocks),
    FIELD(SchedulerSteps, T_OBJECT, removed), FIELD(SchedulerSteps, T_OBJECT, removals),
    FIELD(SchedulerSteps, T_LONGLONG, size), FIELD(SchedulerSteps, T_LONGLONG, scheduled),
    FIELD(SchedulerSteps, T_LONGLONG, done), FIELD(SchedulerSteps, T_LONGLONG, waiting),
    FIELD(SchedulerSteps, T_LONGLONG, total_blocks), FIELD(SchedulerSteps, T_LONGLONG, report_due_at),
    FIELD(SchedulerSteps, T_BOOL, single_tokens), FIELD(SchedulerSteps, T_BOOL, ended_early),
    {NULL, 0, 0, 0, NULL}};
static PyType_Slot steps_slots[] = {{Py_tp_new, PyType_GenericNew}, REFERENCE_SLOTS(SchedulerSteps),
                                    {Py_tp_members, steps_members}, {0, NULL}};
static PyType_Spec steps_spec = {"otel_infer.ringbuffer._native.SchedulerSteps", sizeof(SchedulerSteps), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, steps_slots};

/* ── evictions ─────────────────────────────────────────────────────────────────────────────────────────────── */

typedef struct {
    PyObject_HEAD
    long long count;
} EventCounter;

static PyTypeObject *counter_base;

/* `details`: the counter. */
static PyObject *call_evict(CompiledHook *self, PyObject *arguments, PyObject *named)
{
    PyObject *evicted = PyObject_Call(self->original, arguments, named);
    if (evicted == Py_True && is_alive(self) && PyObject_TypeCheck(self->details, counter_base))
        ((EventCounter *)self->details)->count++;
    return evicted;
}

const HookPlace scheduler_places[] = {{"vllm schedule", call_schedule}, {"vllm update", call_update},
                                      {"vllm eviction", call_evict}, {NULL, NULL}};

static PyMemberDef counter_members[] = {FIELD(EventCounter, T_LONGLONG, count), {NULL, 0, 0, 0, NULL}};
static PyType_Slot counter_slots[] = {
    {Py_tp_new, PyType_GenericNew}, {Py_tp_dealloc, free_plain}, {Py_tp_members, counter_members}, {0, NULL}};
static PyType_Spec counter_spec = {"otel_infer.ringbuffer._native.EventCounter", sizeof(EventCounter), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, counter_slots};

int add_scheduler_types(PyObject *module)
{
    if (make_names(names, texts, NAMES)) return -1;
    steps_base = (PyTypeObject *)PyType_FromModuleAndSpec(module, &steps_spec, NULL);
    counter_base = (PyTypeObject *)PyType_FromModuleAndSpec(module, &counter_spec, NULL);
    return steps_base == NULL || counter_base == NULL ||
                   PyModule_AddObjectRef(module, "SchedulerSteps", (PyObject *)steps_base) ||
                   PyModule_AddObjectRef(module, "EventCounter", (PyObject *)counter_base)
               ? -1
               : 0;
}
