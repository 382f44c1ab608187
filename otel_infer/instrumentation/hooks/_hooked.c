/* Functions of other libraries whose hook has nothing to do in most calls, or little: the call passes as C.
 *
 *     PROPAGATE   no request is current and torch is not suppressed: the original is called
 *     TOKENIZE    no request is current: the original is called; else the call is a stage of the request
 *
 * All else calls the hook's Python code, before anything is recorded.
 */
#include "../../ringbuffer/_native.h"

enum { PROPAGATE, TOKENIZE };
enum { ALIVE, BUSY, DATA, INPUT_IDS, MARK_FAILED, NUMEL, NAMES };
static const char *const texts[NAMES] = {"alive", "busy", "data", "input_ids", "mark_failed", "numel"};
static PyObject *names[NAMES];
enum { RAISED = -1 };  /* `events.RAISED` */

typedef struct {
    PyObject_HEAD
    int kind;
    PyObject *original, *call_slowly, *hook, *bind, *request_type, *request_key, *get_context;
    PyObject *get_suppressed;  /* PROPAGATE */
    PyObject *thread_state, *count_tokens, *stage;  /* TOKENIZE */
    PyObject *attributes, *references;
} HookedFunction;

#define EACH_OF_HOOKED(DO)                                                                                           \
    DO(original) DO(call_slowly) DO(hook) DO(bind) DO(request_type) DO(request_key) DO(get_context)                  \
    DO(get_suppressed) DO(thread_state) DO(count_tokens) DO(stage) DO(attributes)
DEFINE_REFERENCES(HookedFunction, EACH_OF_HOOKED)

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

void mark_hook_failed(PyObject *hook)
{
    PyObject *type, *exc, *traceback;
    fetch_exception(&type, &exc, &traceback);
    PyObject *mark = PyObject_GetAttr(hook, names[MARK_FAILED]);
    PyObject *done = mark == NULL || exc == NULL ? NULL : PyObject_CallFunctionObjArgs(mark, exc, NULL);
    Py_XDECREF(mark);
    Py_XDECREF(done);
    drop_exception(type, exc, traceback);
}

int is_exactly(PyObject *value, PyObject *wanted)
{
    Py_XDECREF(value);
    return value == wanted;
}

/* Returns the request of the current context, as a new reference; NULL without an exception if there is none. */
static PyObject *find_request(HookedFunction *self)
{
    PyObject *context = PyObject_CallNoArgs(self->get_context);
    PyObject *found = context != NULL && PyDict_Check(context)
                          ? take(PyDict_GetItemWithError(context, self->request_key))
                          : context != NULL ? take(Py_None) : NULL;
    Py_XDECREF(context);
    return found;
}

/* ── tokens ────────────────────────────────────────────────────────────────────────────────────────────────── */

static Py_ssize_t count_in_list(PyObject *ids)
{
    Py_ssize_t rows = PyList_Size(ids), count = 0;
    if (rows == 0 || !PyList_Check(PyList_GetItem(ids, 0))) return rows;
    for (Py_ssize_t i = 0; i < rows; i++) {
        Py_ssize_t length = PyObject_Size(PyList_GetItem(ids, i));
        if (length < 0) return -1;
        count += length;
    }
    return count;
}

/* Returns the number of tokens in the `input_ids` of a `BatchEncoding`, or in a list; -1 if Python code must count, with
 * or without an exception. */
static int64_t count_usual(PyObject *result)
{
    if (PyList_CheckExact(result)) return count_in_list(result);
    PyObject *data = PyObject_GetAttr(result, names[DATA]);
    PyObject *ids = data != NULL && PyDict_CheckExact(data) ? take(PyDict_GetItemWithError(data, names[INPUT_IDS])) : NULL;
    int64_t count = -1;
    Py_XDECREF(data);
    if (ids != NULL && PyList_CheckExact(ids)) count = count_in_list(ids);
    else if (ids != NULL) {
        PyObject *numel = PyObject_GetAttr(ids, names[NUMEL]);
        PyObject *number = numel == NULL ? NULL : PyObject_CallNoArgs(numel);
        if (number != NULL && PyLong_CheckExact(number)) count = PyLong_AsLongLong(number);
        Py_XDECREF(numel);
        Py_XDECREF(number);
    }
    Py_XDECREF(ids);
    return count;
}

static int64_t count_tokens(HookedFunction *self, PyObject *result)
{
    int64_t count = count_usual(result);
    if (count >= 0) return count;
    PyErr_Clear();
    PyObject *number = PyObject_CallFunctionObjArgs(self->count_tokens, result, NULL);
    count = number == NULL ? -1 : PyLong_AsLongLong(number);
    Py_XDECREF(number);
    return count;
}

/* Calls the original as a stage of the request. */
static PyObject *tokenize(HookedFunction *self, RequestState *request, PyObject *arguments, PyObject *named)
{
    PyObject *type = NULL, *exc = NULL, *traceback = NULL, *done = NULL;
    int64_t started_at = read_clock(), items = RAISED;
    if (PyObject_SetAttr(self->thread_state, names[BUSY], Py_True)) return NULL;
    PyObject *result = PyObject_Call(self->original, arguments, named);
    if (result == NULL) PyErr_Fetch(&type, &exc, &traceback);
    PyObject_SetAttr(self->thread_state, names[BUSY], Py_False);
    PyErr_Clear();
    int64_t at = read_clock();
    if (result != NULL) items = count_tokens(self, result);
    if (!PyErr_Occurred() && !write_stage(request, at, self->stage, started_at, items))
        done = PyObject_CallMethod((PyObject *)request, "_write_stage", "LOLL", (long long)at, self->stage,
                                   (long long)started_at, (long long)items);
    Py_XDECREF(done);
    if (PyErr_Occurred()) mark_hook_failed(self->hook);
    if (PyErr_Occurred()) {  /* of a signal handler */
        Py_CLEAR(result);
        drop_exception(type, exc, traceback);
    } else if (result == NULL) PyErr_Restore(type, exc, traceback);
    return result;
}

static PyObject *call_tokenize(HookedFunction *self, PyObject *found, PyObject *arguments, PyObject *named)
{
    RequestState *request = (RequestState *)found;
    if (found == NULL) return PyObject_Call(self->original, arguments, named);
    if ((PyObject *)Py_TYPE(found) != self->request_type) return PyObject_Call(self->call_slowly, arguments, named);
    int is_stage = !request->ended && !request->tokenizing &&
                   is_exactly(PyObject_GetAttr(self->thread_state, names[BUSY]), Py_False) &&
                   is_exactly(PyObject_GetAttr(self->hook, names[ALIVE]), Py_True);
    PyErr_Clear();
    return is_stage ? tokenize(self, request, arguments, named) : PyObject_Call(self->original, arguments, named);
}

/* ── type ──────────────────────────────────────────────────────────────────────────────────────────────────── */

static PyObject *call_hooked(HookedFunction *self, PyObject *arguments, PyObject *named)
{
    if (self->original == NULL) return PyErr_Format(PyExc_RuntimeError, "the hook is not initialized");
    PyObject *found = find_request(self), *result;
    if (found == NULL && PyErr_Occurred()) return NULL;
    if (self->kind == TOKENIZE) result = call_tokenize(self, found, arguments, named);
    else {
        int passes = found == NULL && is_exactly(PyObject_CallNoArgs(self->get_suppressed), Py_False);
        PyErr_Clear();
        result = PyObject_Call(passes ? self->original : self->call_slowly, arguments, named);
    }
    Py_XDECREF(found);
    return result;
}

static PyObject *bind_hooked(HookedFunction *self, PyObject *instance, PyObject *owner)
{
    (void)owner;
    if (instance == NULL || instance == Py_None) return take((PyObject *)self);
    return PyObject_CallFunctionObjArgs(self->bind, (PyObject *)self, instance, NULL);
}

static PyObject *reduce_hooked(PyObject *self, PyObject *unused)
{
    (void)unused;
    return PyObject_GetAttrString(self, "__qualname__");  /* as a function: by its name */
}

/* HookedFunction(kind, original, call_slowly, hook, types.MethodType, request type, request key, get of the context,
 *                get of the suppression | (thread state, count_tokens, stage)) */
static int init_hooked(HookedFunction *self, PyObject *arguments, PyObject *named)
{
    PyObject *values[8], *further;
    (void)named;
    if (!PyArg_ParseTuple(arguments, "iOOOOOOOO", &self->kind, &values[0], &values[1], &values[2], &values[3], &values[4],
                          &values[5], &values[6], &further)) return -1;
    self->original = take(values[0]);
    self->call_slowly = take(values[1]);
    self->hook = take(values[2]);
    self->bind = take(values[3]);
    self->request_type = take(values[4]);
    self->request_key = take(values[5]);
    self->get_context = take(values[6]);
    if (self->kind == PROPAGATE) self->get_suppressed = take(further);
    else {
        self->thread_state = take(PyTuple_GetItem(further, 0));
        self->count_tokens = take(PyTuple_GetItem(further, 1));
        self->stage = take(PyTuple_GetItem(further, 2));
    }
    return PyErr_Occurred() ? -1 : 0;
}

static void free_hooked(HookedFunction *self)
{
    if (self->references != NULL) PyObject_ClearWeakRefs((PyObject *)self);
    free_HookedFunction(self);
}

static PyMethodDef hooked_methods[] = {{"__reduce__", reduce_hooked, METH_NOARGS, "Pickles and copies as a function."},
                                       {NULL, NULL, 0, NULL}};
static PyMemberDef hooked_members[] = {
    {"__dictoffset__", T_PYSSIZET, offsetof(HookedFunction, attributes), READONLY, NULL},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(HookedFunction, references), READONLY, NULL}, {NULL, 0, 0, 0, NULL}};
static PyGetSetDef hooked_properties[] = {{"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
                                          {NULL, NULL, NULL, NULL, NULL}};
static PyType_Slot hooked_slots[] = {{Py_tp_init, init_hooked},             {Py_tp_new, PyType_GenericNew},
                                     {Py_tp_dealloc, free_hooked},          {Py_tp_traverse, visit_HookedFunction},
                                     {Py_tp_clear, clear_HookedFunction},   {Py_tp_call, call_hooked},
                                     {Py_tp_descr_get, bind_hooked},        {Py_tp_members, hooked_members},
                                     {Py_tp_methods, hooked_methods},       {Py_tp_getset, hooked_properties},
                                     {0, NULL}};
static PyType_Spec hooked_spec = {"otel_infer.ringbuffer._native.HookedFunction", sizeof(HookedFunction), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_METHOD_DESCRIPTOR, hooked_slots};

int add_hooked_type(PyObject *module)
{
    for (int i = 0; i < NAMES; i++) {
        names[i] = PyUnicode_InternFromString(texts[i]);
        if (names[i] == NULL) return -1;
    }
    return add_type(module, "HookedFunction", &hooked_spec);
}
