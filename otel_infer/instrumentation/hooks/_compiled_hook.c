/* A hook as C, in place of the Python function `call_slowly`, which it calls for all that is not the frequent case.
 *
 * It behaves as a function: it binds as a method, pickles by its name, and has attributes.
 */
#include "../../ringbuffer/_native.h"

#define EACH_OF_HOOK(DO) DO(known) DO(original) DO(call_slowly) DO(hook) DO(bind) DO(details) DO(attributes)
DEFINE_REFERENCES_AND(CompiledHook, EACH_OF_HOOK,
                      if (self->references != NULL) PyObject_ClearWeakRefs((PyObject *)self))

static PyObject *alive_name;

int is_alive(CompiledHook *self)
{
    PyObject *alive = PyObject_GetAttr(self->hook, alive_name);
    if (alive == NULL) PyErr_Clear();
    Py_XDECREF(alive);
    return alive == Py_True;
}

int report_failure(CompiledHook *self)
{
    PyObject *type, *exc, *traceback;
    fetch_exception(&type, &exc, &traceback);
    PyObject *done = exc == NULL ? take(Py_None) : PyObject_CallMethod(self->hook, "mark_failed", "O", exc);
    Py_XDECREF(type);
    Py_XDECREF(exc);
    Py_XDECREF(traceback);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

PyObject *return_after(CompiledHook *self, PyObject *result, int failed)
{
    if (failed && report_failure(self)) Py_CLEAR(result);
    return result;
}

static PyObject *call_hook(CompiledHook *self, PyObject *arguments, PyObject *named)
{
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

static HookCall find_call(const char *place)
{
    const HookPlace *const tables[] = {asgi_places, transformers_places, generation_places, context_places};
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++)
        for (const HookPlace *entry = tables[i]; entry->place != NULL; entry++)
            if (!strcmp(entry->place, place)) return entry->call;
    PyErr_Format(PyExc_ValueError, "no hook has the place %s", place);
    return NULL;
}

/* CompiledHook(place, known, original, call_slowly, hook, types.MethodType, details) */
static int init_hook(CompiledHook *self, PyObject *arguments, PyObject *named)
{
    PyObject *known, *original, *call_slowly, *hook, *bind, *details;
    const char *place;
    (void)named;
    if (self->call != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the hook is initialized already");
        return -1;
    }
    if (!PyArg_ParseTuple(arguments, "sOOOOOO", &place, &known, &original, &call_slowly, &hook, &bind, &details)) return -1;
    HookCall call = find_call(place);
    if (call == NULL) return -1;
    self->known = take(known);
    self->original = take(original);
    self->call_slowly = take(call_slowly);
    self->hook = take(hook);
    self->bind = take(bind);
    self->details = take(details);
    self->call = call;
    return 0;
}

static int clear_hook(CompiledHook *self)
{
    self->call = NULL;
    return clear_CompiledHook(self);
}

static PyMethodDef hook_methods[] = {{"__reduce__", reduce_hook, METH_NOARGS, "Pickles and copies as a function."},
                                     {NULL, NULL, 0, NULL}};
static PyMemberDef hook_members[] = {
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
static PyType_Spec hook_spec = {"otel_infer.ringbuffer._native.CompiledHook", sizeof(CompiledHook), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_METHOD_DESCRIPTOR, hook_slots};

int add_hook_type(PyObject *module)
{
    alive_name = PyUnicode_InternFromString("alive");
    return alive_name == NULL || add_type(module, "CompiledHook", &hook_spec) ? -1 : 0;
}
