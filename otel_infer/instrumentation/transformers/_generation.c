/* Records the plain steps of `generate`, as `generate.wrap_has_unfinished_sequences` does in Python, but as C. Calls of a
 * detokenizer pass without a request, and once those of the run are sampled, as in `tokenization._wrap_decode`. */
#include "../../ringbuffer/_native.h"

enum { LAUNCHED, RUN, SINGLE_TOKENS, UNCHANGED, WAITED, NAMES };
static const char *const texts[NAMES] = {"mark_launched", "run", "write_single_tokens", "write_unchanged", "has_waited"};
static PyObject *names[NAMES];
enum { THREAD_STATE, RUN_TYPE, UNTIMED };  /* items of `known` (`generation_run.py`) */

/* The fields of a `GenerationRun` that each step reads or writes. */
typedef struct {
    PyObject_HEAD
    long long iterations, step, tokens, timing_due_at;
    PyObject *writer, *timing_handle;
    char has_plain_steps, stepping, is_detokenizing_sampled;
} GenerationState;

#define EACH_OF_GENERATION(DO) DO(writer) DO(timing_handle)
DEFINE_REFERENCES(GenerationState, EACH_OF_GENERATION)

static PyMemberDef generation_members[] = {
    FIELD(GenerationState, T_LONGLONG, iterations), FIELD(GenerationState, T_LONGLONG, step),
    FIELD(GenerationState, T_LONGLONG, tokens), FIELD(GenerationState, T_LONGLONG, timing_due_at),
    FIELD(GenerationState, T_OBJECT, writer), FIELD(GenerationState, T_OBJECT, timing_handle),
    FIELD(GenerationState, T_BOOL, has_plain_steps), FIELD(GenerationState, T_BOOL, stepping),
    FIELD(GenerationState, T_BOOL, is_detokenizing_sampled), {NULL, 0, 0, 0, NULL}};
static PyType_Slot generation_slots[] = {{Py_tp_new, PyType_GenericNew}, REFERENCE_SLOTS(GenerationState),
                                         {Py_tp_members, generation_members}, {0, NULL}};
static PyType_Spec generation_spec = {"otel_infer.ringbuffer._native.GenerationState", sizeof(GenerationState), 0,
                                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, generation_slots};

/* Calls a method of the writer of steps. Returns the number that it returns, 0 for None, -1 after an exception. */
static long long call_writer(GenerationState *run, int name, const long long *numbers, int count)
{
    PyObject *method = run->writer == NULL ? NULL : PyObject_GetAttr(run->writer, names[name]);
    PyObject *arguments = method == NULL ? NULL : PyTuple_New(count);
    for (int i = 0; i < count && arguments != NULL; i++) {
        PyObject *number = PyLong_FromLongLong(numbers[i]);
        if (number == NULL || PyTuple_SetItem(arguments, i, number)) Py_CLEAR(arguments);
    }
    PyObject *made = arguments == NULL ? NULL : PyObject_Call(method, arguments, NULL);
    long long number = made == NULL ? -1 : made == Py_None ? 0 : PyLong_AsLongLong(made);
    Py_XDECREF(method);
    Py_XDECREF(arguments);
    Py_XDECREF(made);
    return number;
}

/* Ends a step of one token and begins the next. Returns -1 after an exception. */
static int go_on(GenerationState *run)
{
    int64_t at = read_clock();
    const long long ended[] = {run->step, at}, begun[] = {1, 0, 0, 1, 0, at};
    run->iterations++;
    run->tokens++;
    if (call_writer(run, SINGLE_TOKENS, ended, 2) < 0) return -1;
    long long step = call_writer(run, UNCHANGED, begun, 6);
    if (step < 0) return -1;
    PyObject *done = take(Py_None);
    if (step) run->step = step;
    else {
        Py_DECREF(done);
        done = PyObject_CallMethod((PyObject *)run, "begin_unchanged_step", NULL);
    }
    if (done != NULL && at >= run->timing_due_at) {
        Py_DECREF(done);
        done = PyObject_CallMethod((PyObject *)run, "begin_timing", "LO", (long long)at, Py_False);
    }
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Records what the library's function returned. Returns -1 after an exception. */
static int record_check(GenerationState *run, PyObject *result)
{
    int goes_on = PyObject_IsTrue(result);
    if (goes_on < 0) return -1;
    if (goes_on) return go_on(run);
    if (!run->stepping) return 0;
    PyObject *done = PyObject_CallMethod((PyObject *)run, "advance_iteration", "O", Py_False);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Ends the launch of a step that is timed. Returns -1 after an exception. */
static int end_launch(GenerationState *run)
{
    PyObject *mark = PyObject_GetAttr((PyObject *)run, names[LAUNCHED]);
    PyObject *waited = mark == NULL ? NULL : PyObject_GetAttr((PyObject *)run, names[WAITED]);
    PyObject *done = waited == NULL ? NULL : PyObject_CallFunctionObjArgs(mark, waited, NULL);
    Py_XDECREF(mark);
    Py_XDECREF(waited);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Returns the run of this thread; None if there is none; NULL without an exception if it is of another type. */
static PyObject *find_run(CompiledHook *self)
{
    PyObject *found = PyObject_GetAttr(PyTuple_GetItem(self->known, THREAD_STATE), names[RUN]);
    if (found == NULL) PyErr_Clear();
    else if (found != Py_None && (PyObject *)Py_TYPE(found) != PyTuple_GetItem(self->known, RUN_TYPE)) Py_CLEAR(found);
    return found;
}

static PyObject *check_unfinished(CompiledHook *self, PyObject *arguments, PyObject *named)
{
    PyObject *found = find_run(self);
    if (found == Py_None) {
        Py_DECREF(found);
        return PyObject_Call(self->original, arguments, named);
    }
    GenerationState *run = (GenerationState *)found;
    int is_plain = run != NULL && run->has_plain_steps && run->iterations > 1 && is_alive(self);
    int is_timed = is_plain && run->timing_handle != PyTuple_GetItem(self->known, UNTIMED);
    PyObject *result = NULL;
    if (!is_plain) result = PyObject_Call(self->call_slowly, arguments, named);
    else if (!is_timed || !end_launch(run) || !mark_hook_failed(self->hook)) {
        result = PyObject_Call(self->original, arguments, named);
        if (result != NULL) result = return_after(self, result, record_check(run, result));
    }
    Py_XDECREF(found);
    return result;
}

/* Returns whether no request is current. `details`: the variable of the context and the key of the request, or None. */
static int is_without_request(CompiledHook *self)
{
    if (!PyTuple_Check(self->details)) return 0;
    PyObject *found = find_current_request(PyTuple_GetItem(self->details, 0), PyTuple_GetItem(self->details, 1));
    Py_XDECREF(found);
    return found == Py_None;
}

static PyObject *detokenize(CompiledHook *self, PyObject *arguments, PyObject *named)
{
    PyObject *found = find_run(self);
    int passes = found == Py_None ? is_without_request(self)
                                  : found != NULL && ((GenerationState *)found)->is_detokenizing_sampled;
    Py_XDECREF(found);
    return PyObject_Call(passes ? self->original : self->call_slowly, arguments, named);
}

const HookPlace generation_places[] = {
    {"unfinished sequences", check_unfinished}, {"detokenizer", detokenize}, {NULL, NULL}};

int add_generation_types(PyObject *module)
{
    if (make_names(names, texts, NAMES)) return -1;
    return add_type(module, "GenerationState", &generation_spec);
}
