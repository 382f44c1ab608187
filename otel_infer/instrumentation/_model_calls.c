/* Records a call of a model as a stage of the current request, as `model_calls.wrap_call` does in Python, but as C.
 *
 * The usual case is completed here: a call of a model that is known already, in a request. All else calls the Python code,
 * before anything is recorded.
 */
#include "../ringbuffer/_native.h"

enum { SHAPE, NAMES };
static const char *const texts[NAMES] = {"shape"};
static PyObject *names[NAMES];
enum { MAX_VALUES = 8 };  /* of a list that is searched for rows, as in `_iter_values` */

enum { REQUEST_TYPE, REQUEST_KEY, CONTEXT, SUPPRESSED };  /* items of `known` (`context_hooks.py`) */
enum { LIBRARY, MODELS, STAGE, COUNT_ROWS, IS_COUNTED_HERE };  /* items of `details` */
enum { OF_LIBRARY, OPERATION, PLACE };  /* items of a `KnownModel` */

PyAPI_FUNC(int) PyContextVar_Reset(PyObject *variable, PyObject *token);

/* ── rows ──────────────────────────────────────────────────────────────────────────────────────────────────── */

enum { UNKNOWN = -1 };

/* Returns the first dimension of an array with several; 0 for any other value; UNKNOWN if Python code must find out. */
static int64_t read_rows(PyObject *value)
{
    if (value == Py_None || PyUnicode_CheckExact(value) || PyLong_CheckExact(value)) return 0;
    PyObject *shape = PyObject_GetAttr(value, names[SHAPE]);
    if (shape == NULL) return keep_interrupt() || PyObject_HasAttrString(value, "values") ? UNKNOWN : 0;
    int64_t rows = UNKNOWN;
    if (PyTuple_CheckExact(shape)) {
        PyObject *first = PyTuple_Size(shape) > 1 ? PyTuple_GetItem(shape, 0) : NULL;
        rows = first == NULL ? 0 : PyLong_CheckExact(first) ? PyLong_AsLongLong(first) : UNKNOWN;
    }
    Py_DECREF(shape);
    return rows;
}

/* Returns the same of the values of a dictionary. */
static int64_t read_rows_in(PyObject *values, int64_t (*read)(PyObject *))
{
    PyObject *name, *item;
    Py_ssize_t position = 0;
    int64_t rows = 0;
    while (!rows && PyDict_Next(values, &position, &name, &item)) {
        Py_INCREF(item);
        rows = read(item);
        Py_DECREF(item);
    }
    return rows;
}

/* Returns the same of an argument: an array, or several in a dictionary, list or tuple. */
static int64_t read_rows_of(PyObject *value)
{
    PyObject *item;
    int64_t rows = 0;
    if (PyDict_CheckExact(value)) return read_rows_in(value, read_rows);
    if (!PyList_CheckExact(value) && !PyTuple_CheckExact(value)) return read_rows(value);
    for (Py_ssize_t i = 0; !rows && i < MAX_VALUES && i < PySequence_Size(value); i++) {
        item = PySequence_GetItem(value, i);
        rows = item == NULL ? UNKNOWN : read_rows(item);
        Py_XDECREF(item);
    }
    return rows;
}

/* Returns the rows of a call's input; -1 with an exception. The first of `arguments` is the model. */
static int64_t count_rows(CompiledHook *self, PyObject *arguments, PyObject *named)
{
    int64_t rows = PyTuple_GetItem(self->details, IS_COUNTED_HERE) == Py_True ? 0 : UNKNOWN;
    for (Py_ssize_t i = 1; !rows && i < PyTuple_Size(arguments); i++) rows = read_rows_of(PyTuple_GetItem(arguments, i));
    if (!rows && named != NULL) rows = read_rows_in(named, read_rows_of);
    if (rows >= 0 || keep_interrupt()) return rows;
    PyObject *others = PyTuple_GetSlice(arguments, 1, PyTuple_Size(arguments));
    PyObject *by_name = named == NULL ? PyDict_New() : take(named);
    PyObject *count = others == NULL || by_name == NULL ? NULL : PyObject_CallFunctionObjArgs(
        PyTuple_GetItem(self->details, COUNT_ROWS), others, by_name, NULL);
    rows = count == NULL ? -1 : PyLong_AsLongLong(count);
    Py_XDECREF(others);
    Py_XDECREF(by_name);
    Py_XDECREF(count);
    return rows;
}

/* ── a call ────────────────────────────────────────────────────────────────────────────────────────────────── */

/* Records operation, model and place of a request that no model has served. Returns whether that is done, or not due. */
static int name_request(CompiledHook *self, RequestState *request, PyObject *model)
{
    if (request->is_named || request->has_forward_name) return 1;
    PyObject *id = PyLong_FromVoidPtr(model);
    PyObject *known = id == NULL ? NULL : take(PyDict_GetItemWithError(PyTuple_GetItem(self->details, MODELS), id));
    int is_done = known != NULL && PyTuple_GetItem(known, OF_LIBRARY) == PyTuple_GetItem(self->details, LIBRARY) &&
                  write_operation(request, PyTuple_GetItem(known, OPERATION));
    if (is_done) {
        request->has_forward_name = 1;
        PyObject *place = PyTuple_GetItem(known, PLACE);
        if (PyUnicode_GetLength(place) > 0 && !write_place(request, place)) {
            PyObject *done = PyObject_CallMethod((PyObject *)request, "set_execution_provider", "O", place);
            Py_XDECREF(done);
        }
    }
    Py_XDECREF(id);
    Py_XDECREF(known);
    return is_done;
}

/* Calls the model, whose inner calls are suppressed, as a stage of the request. */
static PyObject *call_known(CompiledHook *self, RequestState *request, PyObject *arguments, PyObject *named)
{
    StageCall call;
    PyObject *suppressed = PyTuple_GetItem(self->known, SUPPRESSED), *token = set_variable(suppressed, Py_True);
    PyErr_Clear();
    PyObject *result = call_in_stage(self, &call, arguments, named);
    if (token != NULL && PyContextVar_Reset(suppressed, token)) PyErr_Clear();
    Py_XDECREF(token);
    if (result != NULL) call.items = count_rows(self, arguments, named);
    return end_stage_call(self, &call, request, PyTuple_GetItem(self->details, STAGE), result);
}

static PyObject *call_model(CompiledHook *self, PyObject *arguments, PyObject *named)
{
    PyObject *found = NULL, *result;
    if (PyTuple_Size(arguments) > 0 && is_alive(self) &&
        is_exactly(get_variable(PyTuple_GetItem(self->known, SUPPRESSED)), Py_False))
        found = find_current_request(PyTuple_GetItem(self->known, CONTEXT), PyTuple_GetItem(self->known, REQUEST_KEY));
    int is_usual = found != NULL && Py_TYPE(found) == (PyTypeObject *)PyTuple_GetItem(self->known, REQUEST_TYPE) &&
                   !((RequestState *)found)->ended &&
                   name_request(self, (RequestState *)found, PyTuple_GetItem(arguments, 0));
    if (keep_interrupt()) result = NULL;
    else if (is_usual) result = call_known(self, (RequestState *)found, arguments, named);
    else result = PyObject_Call(self->call_slowly, arguments, named);
    Py_XDECREF(found);
    return result;
}

const HookPlace model_places[] = {{"call of a model", call_model, NULL}, {NULL, NULL, NULL}};

int add_model_names(PyObject *module)
{
    (void)module;
    return make_names(names, texts, NAMES);
}
