/* A hook as C, in place of the Python function `call_slowly`, which it calls for all that is not the frequent case.
 *
 * It behaves as a function: it binds as a method, pickles by its name, and has attributes.
 */
#include "../../ringbuffer/_native.h"

#define EACH_OF_HOOK(DO) DO(known) DO(original) DO(call_slowly) DO(hook) DO(bind) DO(details) DO(attributes)
DEFINE_REFERENCES_AND(CompiledHook, EACH_OF_HOOK,
                      if (self->references != NULL) PyObject_ClearWeakRefs((PyObject *)self))

/* ── the state of a hook ───────────────────────────────────────────────────────────────────────────────────── */

/* What `probe.Hook` shares with C code. */
typedef struct {
    PyObject_HEAD
    char alive;
} HookState;

static PyTypeObject *state_base;
static PyObject *mark_failed;

static PyObject *new_state(PyTypeObject *type, PyObject *arguments, PyObject *named)
{
    (void)arguments, (void)named;
    HookState *self = allocate(type);
    if (self != NULL) self->alive = 1;
    return (PyObject *)self;
}

static PyMemberDef state_members[] = {FIELD(HookState, T_BOOL, alive), {NULL, 0, 0, 0, NULL}};
static PyType_Slot state_slots[] = {
    {Py_tp_new, new_state}, {Py_tp_dealloc, free_plain}, {Py_tp_members, state_members}, {0, NULL}};
static PyType_Spec state_spec = {"otel_infer.ringbuffer._native.HookState", sizeof(HookState), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, state_slots};

int is_hook_alive(PyObject *hook)
{
    return hook != NULL && PyObject_TypeCheck(hook, state_base) && ((HookState *)hook)->alive;
}

int mark_hook_failed(PyObject *hook)
{
    PyObject *type, *exc, *traceback;
    fetch_exception(&type, &exc, &traceback);
    PyObject *mark = exc == NULL ? NULL : PyObject_GetAttr(hook, mark_failed);
    PyObject *done = mark == NULL ? NULL : PyObject_CallFunctionObjArgs(mark, exc, NULL);
    Py_XDECREF(mark);
    Py_XDECREF(done);
    drop_exception(type, exc, traceback);
    return PyErr_Occurred() ? -1 : 0;
}

void fetch_exception(PyObject **type, PyObject **exc, PyObject **traceback)
{
    PyErr_Fetch(type, exc, traceback);
    PyErr_NormalizeException(type, exc, traceback);
    if (*traceback != NULL && *exc != NULL) PyException_SetTraceback(*exc, *traceback);
}

void drop_exception(PyObject *type, PyObject *exc, PyObject *traceback)
{
    Py_XDECREF(type);
    Py_XDECREF(exc);
    Py_XDECREF(traceback);
}

/* ── what the places share ─────────────────────────────────────────────────────────────────────────────────── */

PyObject *return_after(CompiledHook *self, PyObject *result, int failed)
{
    if (failed && mark_hook_failed(self->hook)) Py_CLEAR(result);
    return result;
}

PyObject *return_recorded(PyObject *result, PyObject *recorded)
{
    if (recorded == NULL) Py_CLEAR(result);  /* a signal handler raised */
    Py_XDECREF(recorded);
    return result;
}

PyObject *call_and_record(CompiledHook *self, PyObject *arguments, PyObject *named, Recording record)
{
    PyObject *result = PyObject_Call(self->original, arguments, named);
    if (result == NULL || PyTuple_Size(arguments) == 0) return result;
    PyObject *owner = PyTuple_GetItem(arguments, 0);
    int is_recorded = is_alive(self) && record(self, owner, result);
    if (keep_interrupt()) Py_CLEAR(result);
    if (result == NULL || is_recorded) return result;
    return return_recorded(result, PyObject_CallFunctionObjArgs(self->details, owner, result, self->hook, NULL));
}

PyObject *call_in_stage(CompiledHook *self, StageCall *call, PyObject *arguments, PyObject *named)
{
    *call = (StageCall){.started_at = read_clock(), .items = RAISED};
    PyObject *result = PyObject_Call(self->original, arguments, named);
    if (result == NULL) PyErr_Fetch(&call->type, &call->exc, &call->traceback);
    call->at = read_clock();
    return result;
}

PyObject *end_stage_call(CompiledHook *self, StageCall *call, RequestState *request, PyObject *stage, PyObject *result)
{
    if (!PyErr_Occurred() && !request->ended) record_stage_until(request, call->at, stage, call->started_at, call->items);
    if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_Exception)) mark_hook_failed(self->hook);
    if (PyErr_Occurred()) {  /* of a signal handler */
        Py_CLEAR(result);
        drop_exception(call->type, call->exc, call->traceback);
    } else if (result == NULL) PyErr_Restore(call->type, call->exc, call->traceback);
    return result;
}

PyAPI_FUNC(int) PyContextVar_Get(PyObject *variable, PyObject *default_value, PyObject **value);
PyAPI_FUNC(PyObject *) PyContextVar_Set(PyObject *variable, PyObject *value);

PyObject *get_variable(PyObject *variable)
{
    PyObject *value = NULL;
    if (PyContextVar_Get(variable, NULL, &value)) PyErr_Clear();
    return value;
}

PyObject *set_variable(PyObject *variable, PyObject *value)
{
    return PyContextVar_Set(variable, value);
}

PyObject *find_current_request(PyObject *variable, PyObject *request_key)
{
    PyObject *context = get_variable(variable), *found = NULL;
    if (context != NULL && PyDict_Check(context)) {
        found = PyDict_GetItemWithError(context, request_key);
        if (found == NULL && !PyErr_Occurred()) found = Py_None;
        Py_XINCREF(found);
    }
    Py_XDECREF(context);
    PyErr_Clear();
    return found;
}

/* ── the hook ──────────────────────────────────────────────────────────────────────────────────────────────── */

static PyObject *call_hook(CompiledHook *self, PyObject *arguments, PyObject *named)
{
    if (self->call_vector != NULL) return PyVectorcall_Call((PyObject *)self, arguments, named);
    if (self->call == NULL) return PyErr_Format(PyExc_RuntimeError, "the hook is not initialized");
    return self->call(self, arguments, named);
}

static PyObject *reduce_hook(PyObject *self, PyObject *unused)
{
    (void)unused;
    return PyObject_GetAttrString(self, "__qualname__");  /* as a function: by its name */
}

static PyObject *bind_hook(CompiledHook *self, PyObject *instance, PyObject *owner)
{
    (void)owner;
    if (instance == NULL || instance == Py_None || self->bind == NULL) return take((PyObject *)self);
    return PyObject_CallFunctionObjArgs(self->bind, (PyObject *)self, instance, NULL);
}

static const HookPlace *find_place(const char *place)
{
    const HookPlace *const tables[] = {asgi_places,      transformers_places, generation_places, batch_places,
                                       scheduler_places, context_places,      queue_places,      model_places};
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++)
        for (const HookPlace *entry = tables[i]; entry->place != NULL; entry++)
            if (!strcmp(entry->place, place)) return entry;
    PyErr_Format(PyExc_ValueError, "no hook has the place %s", place);
    return NULL;
}

/* CompiledHook(place, known, original, call_slowly, hook, types.MethodType, details) */
static int init_hook(CompiledHook *self, PyObject *arguments, PyObject *named)
{
    PyObject *known, *original, *call_slowly, *hook, *bind, *details;
    const char *place;
    (void)named;
    if (self->original != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the hook is initialized already");
        return -1;
    }
    if (!PyArg_ParseTuple(arguments, "sOOOOOO", &place, &known, &original, &call_slowly, &hook, &bind, &details)) return -1;
    if (!PyObject_TypeCheck(hook, state_base)) {
        PyErr_SetString(PyExc_TypeError, "the hook has no compiled state");
        return -1;
    }
    const HookPlace *found = find_place(place);
    if (found == NULL) return -1;
    self->known = take(known);
    self->original = take(original);
    self->call_slowly = take(call_slowly);
    self->hook = take(hook);
    self->bind = take(bind);
    self->details = take(details);
    self->call = found->call;
    self->call_vector = found->call_vector;
    return 0;
}

static int clear_hook(CompiledHook *self)
{
    self->call = NULL;
    self->call_vector = NULL;
    return clear_CompiledHook(self);
}

static PyMethodDef hook_methods[] = {{"__reduce__", reduce_hook, METH_NOARGS, "Pickles and copies as a function."},
                                     {NULL, NULL, 0, NULL}};
static PyMemberDef hook_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(CompiledHook, call_vector), READONLY, NULL},
    {"__dictoffset__", T_PYSSIZET, offsetof(CompiledHook, attributes), READONLY, NULL},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(CompiledHook, references), READONLY, NULL}, {NULL, 0, 0, 0, NULL}};
static PyGetSetDef hook_properties[] = {{"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
                                        {NULL, NULL, NULL, NULL, NULL}};
static PyType_Slot hook_slots[] = {{Py_tp_init, init_hook},         {Py_tp_new, PyType_GenericNew},
                                   {Py_tp_dealloc, free_CompiledHook}, {Py_tp_traverse, visit_CompiledHook},
                                   {Py_tp_clear, clear_hook},       {Py_tp_call, call_hook},
                                   {Py_tp_descr_get, bind_hook},    {Py_tp_members, hook_members},
                                   {Py_tp_methods, hook_methods},   {Py_tp_getset, hook_properties},
                                   {0, NULL}};
enum { HAS_VECTOR_CALL = 1UL << 11 };  /* `Py_TPFLAGS_HAVE_VECTORCALL`, which the stable ABI names since 3.12 */
static PyType_Spec hook_spec = {
    "otel_infer.ringbuffer._native.CompiledHook", sizeof(CompiledHook), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_METHOD_DESCRIPTOR | HAS_VECTOR_CALL, hook_slots};

int add_hook_type(PyObject *module)
{
    mark_failed = PyUnicode_InternFromString("mark_failed");
    state_base = (PyTypeObject *)PyType_FromModuleAndSpec(module, &state_spec, NULL);
    return mark_failed == NULL || state_base == NULL ||
                   PyModule_AddObjectRef(module, "HookState", (PyObject *)state_base) ||
                   add_type(module, "CompiledHook", &hook_spec)
               ? -1
               : 0;
}
