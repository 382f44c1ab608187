/* Hooks of the application's queues, and the context of a worker (`instrumentation/queues.py`, `tracing/work.py`).
 *
 *     put     no request is current, a worker has no item, or the queue is left alone: the original alone is called
 *             a request is current, and the queue is followed: the item is noted here
 *     take    the queue is not followed: the original alone is called
 *             a worker takes the first item of a request: its wait is recorded here, then `take_for_worker` is called
 *     wait    what runs here is no worker that may add to its batch: the original alone is called
 *             a task adds to its batch: the coroutine that notes how long it waits is made here
 *
 * All else is Python code's, which is called before anything is noted or recorded.
 */
#include "../../ringbuffer/_native.h"

enum { ENTRIES, RESULT_OF, POP_ENTRY, ENGINE, IS_CALLED, SINGLE, ITEMS, WORKER, KEY, STARTS_CHILDREN, NAMES };
static const char *const texts[NAMES] = {"entries", "result_of", "pop_entry", "engine", "_is_called", "single",
                                         "_items", "worker", "key", "starts_children"};
static PyObject *names[NAMES];

static PyObject *variable, *context_type, *request_type, *work_type, *request_key, *span_key, *current_task;  /* of `connect_work` */
enum { STATES, STATE_TYPE, END_TAKE, TAKE_FOR_WORKER, STAGE };  /* items of `details` */
enum { FOLLOW };  /* the item of `details` of a wait */

static PyObject *get_detail(CompiledHook *self, int item)
{
    return PyTuple_GetItem(self->details, item);
}

static PyObject *find_request(void)
{
    return find_current_request(variable, request_key);
}

static int has_type(PyObject *object, PyObject *type)
{
    return (PyObject *)Py_TYPE(object) == type;
}

/* Returns the number of positional arguments of a call with a vector, whose first bit is a flag (PEP 590). */
static size_t count_positional(size_t count)
{
    return count & ~((size_t)1 << (8 * sizeof(size_t) - 1));
}

/* ── the state of a queue ──────────────────────────────────────────────────────────────────────────────────── */

/* How many queues that have a state fall into each slot. Most other queues fall into an empty one, so that no key is made. */
static uint32_t slots[256];

static uint32_t *find_slot(uintptr_t address)
{
    return &slots[(address >> 4 ^ address >> 12) % (sizeof slots / sizeof *slots)];
}

/* count_state(queue_id, change): a queue gets a state (1), or loses it (-1). */
static PyObject *count_state(PyObject *module, PyObject *arguments)
{
    Py_ssize_t address;
    int change;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "ni", &address, &change)) return NULL;
    *find_slot((uintptr_t)address) += (uint32_t)change;
    Py_RETURN_NONE;
}

/* Returns the state of a queue, which may be NULL, as a new reference; NULL if no request has put an item into it. */
static PyObject *find_state(CompiledHook *self, PyObject *queue)
{
    PyObject *states = get_detail(self, STATES);
    if (queue == NULL || *find_slot((uintptr_t)queue) == 0) return NULL;
    PyObject *key = PyLong_FromVoidPtr(queue);
    PyObject *state = key == NULL ? NULL : take(PyDict_GetItemWithError(states, key));
    Py_XDECREF(key);
    PyErr_Clear();
    return state;
}

static int is_followed(CompiledHook *self, PyObject *state)
{
    return state != NULL && has_type(state, get_detail(self, STATE_TYPE));
}

/* Returns the entries of a queue that is none of results, as a new reference; NULL if Python code must find out. */
static PyObject *get_entries(PyObject *state)
{
    if (!is_exactly(PyObject_GetAttr(state, names[RESULT_OF]), Py_None)) return NULL;
    PyObject *entries = PyObject_GetAttr(state, names[ENTRIES]);
    if (entries != NULL && !PyDict_CheckExact(entries)) Py_CLEAR(entries);
    return entries;
}

/* Whether a worker has taken no item of a request. */
static int has_no_items(PyObject *work)
{
    PyObject *items = PyObject_GetAttr(work, names[ITEMS]);
    int is_empty = items != NULL && PyTuple_CheckExact(items) && PyTuple_Size(items) == 0;
    Py_XDECREF(items);
    PyErr_Clear();
    return is_empty;
}

/* ── put ───────────────────────────────────────────────────────────────────────────────────────────────────── */

/* Adds (request, instant, False) to the entries of the item. Returns whether that is done. */
static int add_entry(PyObject *entries, PyObject *item, PyObject *request)
{
    int64_t put_at = read_clock();
    PyObject *key = PyLong_FromVoidPtr(item), *at = PyLong_FromLongLong(put_at), *first = NULL;
    PyObject *entry = key == NULL || at == NULL ? NULL : PyTuple_Pack(3, request, at, Py_False);
    PyObject *earlier = entry == NULL ? NULL : PyDict_GetItemWithError(entries, key);
    int failed = entry == NULL || PyErr_Occurred();
    if (!failed) ((RequestState *)request)->queued_at = put_at;
    if (!failed && earlier != NULL) failed = !PyList_CheckExact(earlier) || PyList_Append(earlier, entry);
    else if (!failed) {
        first = PyList_New(1);
        failed = first == NULL || PyList_SetItem(first, 0, take(entry)) || PyDict_SetItem(entries, key, first);
    }
    Py_XDECREF(first);
    Py_XDECREF(entry);
    Py_XDECREF(at);
    Py_XDECREF(key);
    return !failed;
}

/* Notes that a request puts an item, as `QueueState.note_put`. Returns whether that is done. */
static int note_put(CompiledHook *self, PyObject *state, PyObject *request, PyObject *item)
{
    enum { MAX_FORGOTTEN = 64 };  /* `queue_states.MAX_FORGOTTEN` */
    if (!has_type(request, request_type) || ((RequestState *)request)->ended || !is_alive(self)) return 0;
    PyObject *entries = get_entries(state);
    int done = entries != NULL && PyDict_Size(entries) <= MAX_FORGOTTEN && add_entry(entries, item, request);
    Py_XDECREF(entries);
    PyErr_Clear();
    return done;
}

/* Takes back what was noted about an item, because the original has raised: the queue is full. */
static void pop_entry(PyObject *state, PyObject *item)
{
    PyObject *type, *exc, *traceback;
    PyErr_Fetch(&type, &exc, &traceback);
    Py_XDECREF(PyObject_CallMethodObjArgs(state, names[POP_ENTRY], item, NULL));
    PyErr_Clear();
    PyErr_Restore(type, exc, traceback);
}

static PyObject *put_item(PyObject *hook, PyObject *const *arguments, size_t count, PyObject *keywords)
{
    CompiledHook *self = (CompiledHook *)hook;
    PyObject *request = find_request(), *state = NULL, *called = self->original;
    int has_request = request != Py_None && !(request != NULL && has_type(request, work_type) && has_no_items(request));
    if (has_request) {
        state = count_positional(count) < 2 ? NULL : find_state(self, arguments[0]);
        if (state != NULL && !is_followed(self, state)) Py_CLEAR(state);  /* it is left alone */
        else if (state == NULL || request == NULL || !note_put(self, state, request, arguments[1])) called = self->call_slowly;
    }
    PyObject *result = PyObject_Vectorcall(called, arguments, count, keywords);
    if (result == NULL && state != NULL && called == self->original) pop_entry(state, arguments[1]);
    Py_XDECREF(request);
    Py_XDECREF(state);
    return result;
}

/* ── take ──────────────────────────────────────────────────────────────────────────────────────────────────── */

/* A single item of a request that a worker takes. */
typedef struct {
    PyObject *request, *work, *key;
    int64_t put_at;
} Taken;

static void drop_taken(Taken *taken)
{
    Py_CLEAR(taken->request);
    Py_CLEAR(taken->work);
    Py_CLEAR(taken->key);
}

/* Reads the only entry of an item. Returns whether its request works here by no engine, and has not ended. */
static int read_entry(PyObject *listed, Taken *taken)
{
    if (listed == NULL || !PyList_CheckExact(listed) || PyList_Size(listed) != 1) return 0;
    PyObject *entry = PyList_GetItem(listed, 0);
    if (!PyTuple_CheckExact(entry) || PyTuple_GetItem(entry, 2) != Py_False) return 0;
    taken->request = take(PyTuple_GetItem(entry, 0));
    if (!has_type(taken->request, request_type) || ((RequestState *)taken->request)->ended) return 0;
    PyObject *engine = PyObject_GetAttr(taken->request, names[ENGINE]);
    int has_engine = engine == NULL || PyObject_IsTrue(engine) != 0;
    Py_XDECREF(engine);
    taken->put_at = PyLong_AsLongLong(PyTuple_GetItem(entry, 1));
    return !has_engine && !PyErr_Occurred();
}

/* Whether a worker has taken no item of the request, as far as its last batch tells. */
static int has_none_of(PyObject *work, PyObject *request)
{
    PyObject *items = PyObject_GetAttr(work, names[ITEMS]);
    int has_none = items != NULL && PyTuple_CheckExact(items);
    for (Py_ssize_t i = 0; has_none && i < PyTuple_Size(items); i++) {
        PyObject *item = PyTuple_GetItem(items, i);  /* `TakenItem`, whose first field is the request */
        has_none = PyTuple_Check(item) && PyTuple_GetItem(item, 0) != request;
    }
    Py_XDECREF(items);
    return has_none;
}

/* Whether the one that takes is a worker, and the item is the first of its request in the batch. */
static int is_first_item(Taken *taken)
{
    taken->work = find_request();
    if (taken->work == Py_None) return 1;
    return taken->work != NULL && has_type(taken->work, work_type) &&
           (is_exactly(PyObject_GetAttr(taken->work, names[IS_CALLED]), Py_True) || has_none_of(taken->work, taken->request));
}

/* Removes the entry of an item that is new to a batch of a worker. Returns whether that is done; if not, nothing has changed. */
static int pop_usual(PyObject *state, PyObject *item, Taken *taken)
{
    PyObject *entries = get_entries(state);
    taken->key = entries == NULL ? NULL : PyLong_FromVoidPtr(item);
    PyObject *listed = taken->key == NULL ? NULL : take(PyDict_GetItemWithError(entries, taken->key));
    int done = read_entry(listed, taken) && is_first_item(taken) && !PyDict_DelItem(entries, taken->key);
    Py_XDECREF(listed);
    Py_XDECREF(entries);
    PyErr_Clear();
    return done;
}

/* Records the wait, and makes the request the worker's work. Returns -1 after an exception. */
static int take_usual(CompiledHook *self, Taken *taken)
{
    PyObject *stage = get_detail(self, STAGE), *done = NULL;
    int64_t at = read_clock();
    ((RequestState *)taken->request)->queued_at = 0;
    if (!record_stage_until((RequestState *)taken->request, at, stage, taken->put_at, 0))
        done = PyObject_CallFunctionObjArgs(get_detail(self, TAKE_FOR_WORKER), taken->work, taken->request, taken->key, NULL);
    Py_XDECREF(done);
    if (done == NULL && PyErr_ExceptionMatches(PyExc_Exception)) return mark_hook_failed(self->hook);
    return done == NULL ? -1 : 0;
}

/* Follows the item that was taken, or NULL after an exception. Takes the reference to the item, and returns it. */
static PyObject *follow_taken(CompiledHook *self, PyObject *state, PyObject *item)
{
    PyObject *type = NULL, *exc = NULL, *traceback = NULL, *done = NULL;
    Taken taken = {NULL, NULL, NULL, 0};
    int failed = 0;
    if (item == NULL) PyErr_Fetch(&type, &exc, &traceback);
    if (item != NULL && pop_usual(state, item, &taken)) failed = take_usual(self, &taken);
    else {
        done = PyObject_CallFunctionObjArgs(get_detail(self, END_TAKE), state, item == NULL ? Py_None : item,
                                            item == NULL ? Py_False : Py_True, NULL);
        failed = done == NULL;
        Py_XDECREF(done);
    }
    drop_taken(&taken);
    if (failed) {  /* a signal handler raised */
        Py_CLEAR(item);
        drop_exception(type, exc, traceback);
    } else if (item == NULL) PyErr_Restore(type, exc, traceback);
    return item;
}

/* The state is read after the call, because the queue may have waited for the first item of a request. */
static PyObject *take_item(PyObject *hook, PyObject *const *arguments, size_t count, PyObject *keywords)
{
    CompiledHook *self = (CompiledHook *)hook;
    PyObject *item = PyObject_Vectorcall(self->original, arguments, count, keywords);
    PyObject *type = NULL, *exc = NULL, *traceback = NULL;
    if (count_positional(count) == 0 || *find_slot((uintptr_t)arguments[0]) == 0) return item;
    if (item == NULL) PyErr_Fetch(&type, &exc, &traceback);
    PyObject *state = find_state(self, arguments[0]);
    if (item == NULL) PyErr_Restore(type, exc, traceback);
    if (is_followed(self, state) && is_alive(self)) item = follow_taken(self, state, item);
    Py_XDECREF(state);
    return item;
}

/* ── wait ──────────────────────────────────────────────────────────────────────────────────────────────────── */

/* Whether a worker has no item of a batch to which it may add further ones. */
static int is_idle(PyObject *work)
{
    return has_no_items(work) || is_exactly(PyObject_GetAttr(work, names[IS_CALLED]), Py_True);
}

/* Returns the address of the task that runs here; NULL if none does, or if that is unknown. */
static void *find_task(void)
{
    PyObject *task = current_task == NULL ? NULL : PyObject_CallNoArgs(current_task);
    void *found = task == Py_None ? NULL : task;
    Py_XDECREF(task);
    PyErr_Clear();  /* no event loop runs here */
    return found;
}

/* Whether the worker is this task, and takes several items itself; -1 if Python code must find out. */
static int collects_here(PyObject *work)
{
    void *task = find_task();
    PyObject *worker = PyObject_GetAttr(work, names[WORKER]);
    PyObject *key = worker == NULL ? NULL : PyObject_GetAttr(worker, names[KEY]);
    int found = task == NULL || key == NULL ? -1 : PyLong_AsVoidPtr(key) == task;
    if (found == 1) found = is_exactly(PyObject_GetAttr(worker, names[STARTS_CHILDREN]), Py_False);
    Py_XDECREF(key);
    Py_XDECREF(worker);
    if (PyErr_Occurred()) {  /* the key of a thread is negative */
        PyErr_Clear();
        return -1;
    }
    return found;
}

/* `await queue.get()`: what has neither a request nor work gets work from Python code. */
static PyObject *await_item(PyObject *hook, PyObject *const *arguments, size_t count, PyObject *keywords)
{
    CompiledHook *self = (CompiledHook *)hook;
    PyObject *current = find_request(), *called = self->call_slowly, *result = NULL;
    if (current != NULL && has_type(current, request_type) && !((RequestState *)current)->ended) called = self->original;
    else if (current != NULL && has_type(current, work_type)) {
        int collects = is_idle(current) ? 0 : collects_here(current);
        if (collects == 0) called = self->original;
        else if (collects == 1 && count_positional(count) == 1 && keywords == NULL && is_alive(self)) called = NULL;
    }
    if (called != NULL) result = PyObject_Vectorcall(called, arguments, count, keywords);
    else result = PyObject_CallFunctionObjArgs(get_detail(self, FOLLOW), arguments[0], current, NULL);
    Py_XDECREF(current);
    return result;
}

/* `await asyncio.sleep(...)`: an item may be taken meanwhile, so the work is asked afterwards. */
static PyObject *await_sleep(PyObject *hook, PyObject *const *arguments, size_t count, PyObject *keywords)
{
    CompiledHook *self = (CompiledHook *)hook;
    PyObject *current = find_request();
    PyObject *called = current != NULL && has_type(current, work_type) ? self->call_slowly : self->original;
    Py_XDECREF(current);
    return PyObject_Vectorcall(called, arguments, count, keywords);
}

/* ── the context of a worker ───────────────────────────────────────────────────────────────────────────────── */

static int is_request(PyObject *object)
{
    return object != NULL && PyObject_TypeCheck(object, (PyTypeObject *)request_type);
}

static PyObject *get_current_span(PyObject *request)
{
    PyObject *spans = ((RequestState *)request)->provider_spans;
    return spans == NULL || !PyTuple_Check(spans) ? request : PyTuple_GetItem(spans, 1);
}

/* Returns whether the current span is that of the request that this context has worked for, which ends with it. */
static int has_own_span(PyObject *context, PyObject *span)
{
    PyObject *owner = take(PyDict_GetItemWithError(context, request_key));
    if (owner != NULL && has_type(owner, work_type)) {
        PyObject *single = PyObject_GetAttr(owner, names[SINGLE]);
        Py_DECREF(owner);
        owner = single;
    }
    int is_own = is_request(owner) && span == get_current_span(owner);
    Py_XDECREF(owner);
    return is_own;
}

/* Makes the span that of `single`, or of nothing, unless a span of the application is current. Returns -1 after an exception. */
static int replace_span(PyObject *context, PyObject *single)
{
    PyObject *span = PyDict_GetItemWithError(context, span_key);
    if (span != NULL && !has_own_span(context, span)) return PyErr_Occurred() ? -1 : 0;
    if (is_request(single)) return PyDict_SetItem(context, span_key, get_current_span(single));
    return span == NULL ? 0 : PyDict_DelItem(context, span_key);
}

/* attach_work(work, single): as `work.attach_work`. */
static PyObject *attach_work(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    (void)module;
    if (count != 2 || variable == NULL) return PyErr_Format(PyExc_TypeError, "attach_work takes a work and its request");
    PyObject *around = get_variable(variable), *context = NULL, *token = NULL;
    if (around != NULL && PyDict_Check(around)) context = PyObject_CallFunctionObjArgs(context_type, around, NULL);
    Py_XDECREF(around);
    if (context != NULL && !replace_span(context, arguments[1]) && !PyDict_SetItem(context, request_key, arguments[0]) &&
        (!is_request(arguments[1]) || !PyObject_SetAttr(arguments[0], names[SINGLE], arguments[1])))
        token = set_variable(variable, context);
    Py_XDECREF(context);
    if (token == NULL && !PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "the context is no dict");
    if (token == NULL) return NULL;
    Py_DECREF(token);
    Py_RETURN_NONE;
}

/* connect_work(variable, context_type, request_type, work_type, request_key, span_key, current_task) */
static PyObject *connect_work(PyObject *module, PyObject *arguments)
{
    enum { KEPT = 7 };
    PyObject **const kept[KEPT] = {&variable,  &context_type, &request_type, &work_type,
                                   &request_key, &span_key,     &current_task};
    (void)module;
    if (PyTuple_Size(arguments) != KEPT) return PyErr_Format(PyExc_TypeError, "connect_work takes %d arguments", KEPT);
    for (int i = 0; i < KEPT; i++) {
        PyObject *old = *kept[i];
        *kept[i] = take(PyTuple_GetItem(arguments, i));
        Py_XDECREF(old);
    }
    Py_RETURN_NONE;
}

const HookPlace queue_places[] = {
    {"put into a queue", NULL, put_item}, {"take from a queue", NULL, take_item}, {"get of a queue", NULL, await_item},
    {"sleep of a task", NULL, await_sleep}, {NULL, NULL, NULL}};

static PyMethodDef functions[] = {
    {"attach_work", (PyCFunction)(void (*)(void))attach_work, METH_FASTCALL,
     "attach_work(work, single): makes this the work of the worker that runs here. single: its only request, or None."},
    {"count_state", count_state, METH_VARARGS, "count_state(queue_id, change): a queue gets a state (1), or loses it (-1)."},
    {"connect_work", connect_work, METH_VARARGS, "connect_work(...): what `attach_work` and the hooks of queues need."},
    {NULL, NULL, 0, NULL}};

int add_queue_functions(PyObject *module)
{
    return make_names(names, texts, NAMES) || PyModule_AddFunctions(module, functions) ? -1 : 0;
}
