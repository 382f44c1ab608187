/* Hooks on the functions that an engine calls once per step or block, as C.
 *
 * A hook calls the original, and the frequent step is recorded by C code. Python code records all others: it returns
 * to the same function of an integration as without this module. After a model ran, the caches are cold, and a Python
 * frame touches about twenty cache lines.
 */
#include "_step_hook.h"

enum { CB_SCHEDULE, CB_UPDATE, VLLM_SCHEDULE, VLLM_UPDATE, VLLM_EVICT };
/* `record`: the Python function that records what C code does not; of VLLM_EVICT the counter. `finish`: `call_update`. */
typedef struct {
    PyObject_HEAD
    PyObject *original, *record, *finish, *hook, *bind, *attributes, *references;
    int place;
} StepHook;

#define EACH_OF_HOOK(DO) DO(original) DO(record) DO(finish) DO(hook) DO(bind) DO(attributes)
DEFINE_REFERENCES_AND(StepHook, EACH_OF_HOOK, if (self->references != NULL) PyObject_ClearWeakRefs((PyObject *)self))

/* What `probe.Hook` shares with C code. */
typedef struct {
    PyObject_HEAD
    char alive;
} HookState;

static PyTypeObject *state_base;

static int is_step_hook_alive(StepHook *self)
{
    return ((HookState *)self->hook)->alive;
}

/* Records a call in the frequent case, and returns whether that is done. */
static int record_quickly(StepHook *self, PyObject *owner, PyObject *result)
{
    if (!is_step_hook_alive(self)) return 0;
    switch (self->place) {
    case CB_SCHEDULE: return record_cb_schedule(owner, result);
    case CB_UPDATE: return record_cb_update(result);
    case VLLM_SCHEDULE: return record_vllm_schedule(owner, result, self->hook);
    case VLLM_EVICT: return count_eviction(self->record);
    default: return 0;
    }
}

/* owner, … : calls the original, then records the step with its result. */
static PyObject *call_and_record(StepHook *self, PyObject *arguments, PyObject *named)
{
    PyObject *result = PyObject_Call(self->original, arguments, named), *done;
    PyObject *owner = result != NULL && PyTuple_Size(arguments) > 0 ? PyTuple_GetItem(arguments, 0) : NULL;
    if (owner == NULL || (self->place == VLLM_EVICT && result != Py_True)) return result;
    int is_recorded = record_quickly(self, owner, result);
    if (keep_interrupt()) Py_CLEAR(result);
    if (result == NULL || is_recorded || self->place == VLLM_EVICT) return result;
    done = PyObject_CallFunctionObjArgs(self->record, owner, result, self->hook, NULL);
    if (done == NULL) Py_CLEAR(result);  /* a signal handler raised */
    Py_XDECREF(done);
    return result;
}

/* scheduler, scheduler_output, model_runner_output: as above. `record` calls the original of a call that is not usual;
 * its `finish` records a step of which only the end is not. */
static PyObject *call_update(StepHook *self, PyObject *arguments, PyObject *named)
{
    int64_t at = read_clock();
    long long step = 0;
    PyObject *scheduler = NULL, *output = NULL, *sampled = NULL, *steps = NULL;
    if ((named == NULL || !PyDict_Size(named)) && PyTuple_Size(arguments) == 3 && is_step_hook_alive(self)) {
        scheduler = PyTuple_GetItem(arguments, 0);
        output = PyTuple_GetItem(arguments, 1);
        sampled = PyTuple_GetItem(arguments, 2);
        steps = begin_vllm_update(scheduler, output, &step);
        if (keep_interrupt()) {
            Py_XDECREF(steps);
            return NULL;
        }
    }
    if (steps == NULL) return PyObject_Call(self->record, arguments, named);
    PyObject *result = PyObject_Call(self->original, arguments, NULL);
    int is_done = result == NULL || !is_step_hook_alive(self) ||
                  record_vllm_update(steps, scheduler, output, sampled, result, step, at);
    Py_DECREF(steps);
    if (result != NULL && keep_interrupt()) Py_CLEAR(result);
    if (result == NULL || is_done) return result;
    PyObject *done = PyObject_CallFunction(self->finish, "OOOOLLO", scheduler, output, sampled, result, step,
                                           (long long)at, self->hook);
    if (done == NULL) Py_CLEAR(result);
    Py_XDECREF(done);
    return result;
}

static PyObject *call_hook(StepHook *self, PyObject *arguments, PyObject *named)
{
    if (self->original == NULL) return PyErr_Format(PyExc_RuntimeError, "the hook is not initialized");
    return (self->place == VLLM_UPDATE ? call_update : call_and_record)(self, arguments, named);
}

static PyObject *reduce_hook(PyObject *self, PyObject *unused)
{
    (void)unused;
    return PyObject_GetAttrString(self, "__qualname__");  /* as a function: by its name */
}

static PyObject *bind_hook(StepHook *self, PyObject *instance, PyObject *owner)
{
    (void)owner;
    if (instance == NULL || instance == Py_None) {
        Py_INCREF((PyObject *)self);
        return (PyObject *)self;
    }
    return PyObject_CallFunctionObjArgs(self->bind, (PyObject *)self, instance, NULL);
}

/* StepHook(place, original, record, hook, types.MethodType) */
static int init_hook(StepHook *self, PyObject *arguments, PyObject *named)
{
    PyObject *original, *record, *hook, *bind;
    int place;
    (void)named;
    if (self->original != NULL || !PyArg_ParseTuple(arguments, "iOOOO", &place, &original, &record, &hook, &bind))
        return -1;
    if (!PyObject_TypeCheck(hook, state_base)) {
        PyErr_SetString(PyExc_TypeError, "the hook has no compiled state");
        return -1;
    }
    if (place == VLLM_UPDATE && (self->finish = PyObject_GetAttrString(record, "finish")) == NULL) return -1;
    Py_INCREF(original);
    Py_INCREF(record);
    Py_INCREF(hook);
    Py_INCREF(bind);
    self->place = place;
    self->original = original;
    self->record = record;
    self->hook = hook;
    self->bind = bind;
    return 0;
}

static PyMethodDef hook_methods[] = {{"__reduce__", reduce_hook, METH_NOARGS, "Pickles and copies as a function."},
                                     {NULL, NULL, 0, NULL}};
static PyMemberDef hook_members[] = {
    {"__dictoffset__", T_PYSSIZET, offsetof(StepHook, attributes), READONLY, NULL},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(StepHook, references), READONLY, NULL}, {NULL, 0, 0, 0, NULL}};
static PyGetSetDef hook_properties[] = {{"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
                                        {NULL, NULL, NULL, NULL, NULL}};
static PyType_Slot hook_slots[] = {{Py_tp_init, init_hook},       {Py_tp_new, PyType_GenericNew},
                                   REFERENCE_SLOTS(StepHook), {Py_tp_call, call_hook},
                                   {Py_tp_descr_get, bind_hook},  {Py_tp_members, hook_members},
                                   {Py_tp_methods, hook_methods}, {Py_tp_getset, hook_properties},
                                   {0, NULL}};
static PyType_Spec hook_spec = {"otel_infer.ringbuffer._native.StepHook", sizeof(StepHook), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_METHOD_DESCRIPTOR, hook_slots};

static PyObject *new_state(PyTypeObject *type, PyObject *arguments, PyObject *named)
{
    (void)arguments;
    (void)named;
    HookState *self = (HookState *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self != NULL) self->alive = 1;
    return (PyObject *)self;
}

static void free_state(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMemberDef state_members[] = {FIELD(HookState, T_BOOL, alive), {NULL, 0, 0, 0, NULL}};
static PyType_Slot state_slots[] = {
    {Py_tp_new, new_state}, {Py_tp_dealloc, free_state}, {Py_tp_members, state_members}, {0, NULL}};
static PyType_Spec state_spec = {"otel_infer.ringbuffer._native.HookState", sizeof(HookState), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, state_slots};

int add_step_types(PyObject *module)
{
    state_base = (PyTypeObject *)PyType_FromModuleAndSpec(module, &state_spec, NULL);
    return state_base == NULL || PyModule_AddObjectRef(module, "HookState", (PyObject *)state_base) ||
                   add_type(module, "StepHook", &hook_spec) || add_batch_types(module) || add_scheduler_types(module)
               ? -1
               : 0;
}
