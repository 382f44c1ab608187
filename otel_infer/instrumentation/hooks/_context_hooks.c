/* Hooks that depend on the current request, which most calls of these functions lack.
 *
 *     work for a thread    no request is current and torch is not suppressed: the original is called
 *     tokenizer            no request is current: the original is called; else the call is a stage of the request
 *
 * All else calls the hook's Python code, before anything is recorded.
 */
#include "../../ringbuffer/_native.h"

enum { DATA, INPUT_IDS, NUMEL, NAMES };
static const char *const texts[NAMES] = {"data", "input_ids", "numel"};
static PyObject *names[NAMES];

enum { REQUEST_TYPE, REQUEST_KEY, CONTEXT, SUPPRESSED };  /* items of `known` (`context_hooks.py`) */
enum { COUNT_TOKENS, STAGE };  /* items of `details` of a tokenizer */

static PyObject *find_request(CompiledHook *self)
{
    return find_current_request(PyTuple_GetItem(self->known, CONTEXT), PyTuple_GetItem(self->known, REQUEST_KEY));
}

/* ── the tokenizer call of a thread ────────────────────────────────────────────────────────────────────────── */

static __thread char busy;  /* an attribute of a `threading.local` takes several cache misses */

static PyObject *get_busy(PyObject *self, void *unused)
{
    (void)self, (void)unused;
    return PyBool_FromLong(busy);
}

static int set_busy(PyObject *self, PyObject *value, void *unused)
{
    (void)self, (void)unused;
    int is_true = value == NULL ? 0 : PyObject_IsTrue(value);
    if (is_true >= 0) busy = (char)is_true;
    return is_true < 0 ? -1 : 0;
}

static PyGetSetDef call_properties[] = {{"busy", get_busy, set_busy, NULL, NULL}, {NULL, NULL, NULL, NULL, NULL}};
static PyType_Slot call_slots[] = {{Py_tp_new, PyType_GenericNew}, {Py_tp_getset, call_properties}, {0, NULL}};
static PyType_Spec call_spec = {"otel_infer.ringbuffer._native.TokenizerCall", sizeof(PyObject), 0, Py_TPFLAGS_DEFAULT,
                                call_slots};

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

static int64_t count_tokens(CompiledHook *self, PyObject *result)
{
    int64_t count = count_usual(result);
    if (count >= 0) return count;
    if (keep_interrupt()) return -1;
    PyObject *number = PyObject_CallFunctionObjArgs(PyTuple_GetItem(self->details, COUNT_TOKENS), result, NULL);
    count = number == NULL ? -1 : PyLong_AsLongLong(number);
    Py_XDECREF(number);
    return count;
}

/* Calls the original as a stage of the request. */
static PyObject *tokenize(CompiledHook *self, RequestState *request, PyObject *arguments, PyObject *named)
{
    StageCall call;
    busy = 1;
    PyObject *result = call_in_stage(self, &call, arguments, named);
    busy = 0;
    if (result != NULL) call.items = count_tokens(self, result);
    return end_stage_call(self, &call, request, PyTuple_GetItem(self->details, STAGE), result);
}

/* ── places ────────────────────────────────────────────────────────────────────────────────────────────────── */

static PyObject *call_tokenizer(CompiledHook *self, PyObject *arguments, PyObject *named)
{
    PyObject *found = find_request(self), *result;
    RequestState *request = (RequestState *)found;
    if (found == Py_None) result = PyObject_Call(self->original, arguments, named);
    else if (found == NULL || Py_TYPE(found) != (PyTypeObject *)PyTuple_GetItem(self->known, REQUEST_TYPE))
        result = PyObject_Call(self->call_slowly, arguments, named);
    else if (!request->ended && !request->tokenizing && !busy && is_alive(self))
        result = tokenize(self, request, arguments, named);
    else result = PyObject_Call(self->original, arguments, named);
    Py_XDECREF(found);
    return result;
}

/* A function that gives work to another thread. */
static PyObject *give_work(CompiledHook *self, PyObject *arguments, PyObject *named)
{
    PyObject *found = find_request(self);
    int passes = found == Py_None && is_exactly(get_variable(PyTuple_GetItem(self->known, SUPPRESSED)), Py_False);
    Py_XDECREF(found);
    PyErr_Clear();
    return PyObject_Call(passes ? self->original : self->call_slowly, arguments, named);
}

const HookPlace context_places[] = {
    {"tokenizer", call_tokenizer, NULL}, {"work for a thread", give_work, NULL}, {NULL, NULL, NULL}};

int add_context_types(PyObject *module)
{
    if (make_names(names, texts, NAMES)) return -1;
    return add_type(module, "TokenizerCall", &call_spec);
}
