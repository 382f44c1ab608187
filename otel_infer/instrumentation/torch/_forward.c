/* Records a forward pass of an outermost torch model, as `forward._call_traced` and its callers do in Python, but as C.
 *
 *     model(...) ─▶ CallDescriptor (in place of `_compiled_call_impl`) ─▶ ForwardCall ─▶ forward
 *
 * The usual case is completed here: a call that succeeds, of a model whose name is known, below a current request or as a
 * separate request of a new trace. All else calls the Python code, which knows all cases, before anything is recorded.
 */
#include "../../ringbuffer/_native.h"

enum {
    CALL_ATTRIBUTE, CALL_IMPL, CHECK_DUE_AT, CLOSE, IS_COMPILING, SHAPE, THREAD, NAMES
};
static const char *const texts[NAMES] = {"_compiled_call_impl", "_call_impl", "check_due_at", "close",
                                         "_is_compiling_flag", "shape", "thread"};
static PyObject *names[NAMES];

/* ── the descriptor ────────────────────────────────────────────────────────────────────────────────────────── */

typedef struct {
    PyObject_HEAD
    RequestRing *ring;  /* of separate requests, until `valid_until` */
    long long valid_until;
    int flags;  /* of separate requests */
    char root_sampled;
    PyObject *hook, *compiler, *tensor, *is_tracing, *is_grad_enabled;
    PyObject *outermost, *model_names, *timing, *stage, *owner;
    PyObject *request_type, *context_type, *request_key, *span_key, *make_identity;
    PyObject *get_context, *set_context, *reset_context, *get_thread_owner;
    PyObject *get_suppressed, *set_suppressed, *reset_suppressed;
    PyObject *call_slowly, *end_slowly, *read_batch_size, *run_deferred, *bind, *empty_context, *no_text;
} CallDescriptor;

#define EACH_OF_DESCRIPTOR(DO)                                                                                       \
    DO(ring) DO(hook) DO(compiler) DO(tensor) DO(is_tracing) DO(is_grad_enabled) DO(outermost) DO(model_names)       \
    DO(timing) DO(stage) DO(owner) DO(request_type) DO(context_type) DO(request_key) DO(span_key) DO(make_identity)  \
    DO(get_context) DO(set_context) DO(reset_context) DO(get_thread_owner) DO(get_suppressed) DO(set_suppressed)     \
    DO(reset_suppressed) DO(call_slowly) DO(end_slowly) DO(read_batch_size) DO(run_deferred) DO(bind) DO(empty_context) DO(no_text)
DEFINE_REFERENCES(CallDescriptor, EACH_OF_DESCRIPTOR)

typedef struct {
    PyObject_HEAD
    CallDescriptor *descriptor;
    PyObject *module;
} ForwardCall;

#define EACH_OF_CALL(DO) DO(descriptor) DO(module)
DEFINE_REFERENCES(ForwardCall, EACH_OF_CALL)
static PyTypeObject *forward_call_type;

/* Returns the value for the id of an object, borrowed; NULL without an exception if there is none. */
static PyObject *find_by_id(PyObject *mapping, PyObject *object)
{
    PyObject *id = mapping == NULL ? NULL : PyLong_FromVoidPtr(object);
    PyObject *found = id == NULL ? NULL : PyDict_GetItemWithError(mapping, id);
    Py_XDECREF(id);
    return found;
}

/* Returns what the module holds itself, after `Module.compile`; None if that is nothing. */
static PyObject *get_own_call(PyObject *module)
{
    PyObject *dict = PyObject_GenericGetDict(module, NULL);  /* `module.__dict__`, without a look-up in its classes */
    if (dict == NULL) return NULL;
    PyObject *own = PyDict_Check(dict) ? PyDict_GetItemWithError(dict, names[CALL_ATTRIBUTE]) : NULL;
    own = take(own == NULL && !PyErr_Occurred() ? Py_None : own);
    Py_DECREF(dict);
    return own;
}

/* Not called by dynamo, which traces the function that the type's `__dict__` holds. */
static PyObject *get_call(CallDescriptor *self, PyObject *module, PyObject *owner)
{
    (void)owner;
    if (module == NULL || module == Py_None) Py_RETURN_NONE;
    int is_traced = self->compiler != NULL && self->hook != NULL && self->call_slowly != NULL &&
                    is_exactly(PyObject_CallNoArgs(self->get_suppressed), Py_False) &&
                    find_by_id(self->outermost, module) != NULL &&
                    is_exactly(PyObject_GetAttr(self->compiler, names[IS_COMPILING]), Py_False) &&
                    is_hook_alive(self->hook);
    if (PyErr_Occurred()) return NULL;
    if (!is_traced) return get_own_call(module);
    ForwardCall *call = allocate(forward_call_type);
    if (call == NULL) return NULL;
    call->descriptor = (CallDescriptor *)take((PyObject *)self);
    call->module = take(module);
    return (PyObject *)call;
}

/* ── a call ────────────────────────────────────────────────────────────────────────────────────────────────── */

typedef struct {
    RequestState *request;
    PyObject *token, *flag;  /* of the context, if the request is a separate one, and of the suppression */
    int64_t started_at;
    int is_separate;
} Forward;

/* Opens a separate request, if that is the usual case. */
static RequestState *open_separate(CallDescriptor *self, PyObject *module, int64_t at)
{
    RequestRing *ring = self->ring;
    if (ring == NULL || ring->retired || at > self->valid_until ||
        !is_exactly(PyObject_CallNoArgs(self->is_grad_enabled), Py_False) ||
        !is_exactly(PyObject_CallNoArgs(self->get_thread_owner), Py_None)) return NULL;
    PyObject *known = find_by_id(self->model_names, module), *texts_of_request[4];
    PyObject *operation = known == NULL ? NULL : PyTuple_GetItem(known, 0);
    for (int i = 0; operation != NULL && i < 3; i++) texts_of_request[i] = PyTuple_GetItem(operation, i);
    if (operation != NULL) texts_of_request[3] = PyTuple_GetItem(known, 1);
    if (operation == NULL || PyErr_Occurred()) return NULL;
    Py_INCREF(known);
    Py_INCREF((PyObject *)ring);  /* an allocation and interning may run Python code, and another thread may renew */
    RequestState *request = allocate((PyTypeObject *)self->request_type);
    if (request == NULL) {
        Py_DECREF(known);
        Py_DECREF((PyObject *)ring);
        return NULL;
    }
    request->ended = (char)open_root(ring, texts_of_request, at, (uint16_t)self->flags, self->root_sampled,
                                     &request->opened);
    Py_DECREF(known);
    request->ring = (PyObject *)ring;
    request->make_identity = take(self->make_identity);
    request->around = take(self->empty_context);
    request->owner = take(self->owner);
    request->handle = request->opened.handle;
    request->arrived_at = at;
    request->inspect_next_chunk = 1;
    if (request->ended) Py_CLEAR(request);
    return request;
}

/* Makes the request current; returns the token that ends that, or NULL. */
static PyObject *attach_request(CallDescriptor *self, PyObject *request)
{
    PyObject *context = PyObject_CallNoArgs(self->context_type), *token = NULL;
    if (context != NULL && !PyDict_SetItem(context, self->request_key, request) &&
        !PyDict_SetItem(context, self->span_key, request))
        token = PyObject_CallFunctionObjArgs(self->set_context, context, NULL);
    Py_XDECREF(context);
    return token;
}

/* Records operation and model of a request whose first model this is. Returns whether that is done, or not due. */
static int name_request(CallDescriptor *self, RequestState *request, PyObject *module)
{
    if (request->is_named || request->has_forward_name) return 1;
    PyObject *known = find_by_id(self->model_names, module);
    PyObject *operation = known == NULL ? NULL : take(PyTuple_GetItem(known, 0));
    int is_done = operation != NULL && write_operation(request, operation);
    Py_XDECREF(operation);
    if (is_done) request->has_forward_name = 1;
    return is_done;
}

/* The instant from which Python code looks for a device of this thread. `timing.thread.check_due_at` does not change
 * before, but reading it takes 4 us with cold caches. */
static __thread int64_t device_due_at;

/* Reads the instant again, after Python code was called. Keeps the exception that may be set. */
static void read_device_due(CallDescriptor *self)
{
    PyObject *type, *exc, *traceback;
    PyErr_Fetch(&type, &exc, &traceback);
    PyObject *thread = PyObject_GetAttr(self->timing, names[THREAD]);
    PyObject *due = thread == NULL ? NULL : PyObject_GetAttr(thread, names[CHECK_DUE_AT]);
    device_due_at = due == NULL ? 0 : PyLong_AsLongLong(due);
    Py_XDECREF(thread);
    Py_XDECREF(due);
    PyErr_Restore(type, exc, traceback);
}

/* Begins the usual case. Returns whether it is one; if not, nothing is recorded. An exception is then set only if a signal
 * handler raised it. */
static int begin_forward(CallDescriptor *self, PyObject *module, Forward *forward)
{
    int64_t at = forward->started_at = read_clock();
    PyObject *context = NULL;
    if (at < device_due_at && is_exactly(PyObject_CallNoArgs(self->is_tracing), Py_False))
        context = PyObject_CallNoArgs(self->get_context);
    PyObject *found = context != NULL && PyDict_Check(context) ? PyDict_GetItemWithError(context, self->request_key) : NULL;
    if (found != NULL) {
        if ((PyObject *)Py_TYPE(found) == self->request_type && !((RequestState *)found)->ended &&
            name_request(self, (RequestState *)found, module))
            forward->request = (RequestState *)take(found);
    } else if (context != NULL && PyDict_Check(context) && PyDict_Size(context) == 0) {
        forward->request = open_separate(self, module, at);
        forward->is_separate = forward->request != NULL;
    }
    Py_XDECREF(context);
    if (keep_interrupt()) Py_CLEAR(forward->request);
    if (forward->request == NULL) return 0;
    if (forward->is_separate) forward->token = attach_request(self, (PyObject *)forward->request);
    forward->flag = PyObject_CallFunctionObjArgs(self->set_suppressed, Py_True, NULL);
    PyErr_Clear();
    return 1;
}

/* Returns the batch size: the length of the first argument, if that is a tensor of two or more dimensions. */
static int64_t count_items(CallDescriptor *self, PyObject *arguments, PyObject *named)
{
    PyObject *first = NULL, *name;
    Py_ssize_t position = 0;
    int64_t items = 0;
    if (PyTuple_Size(arguments) > 0) first = PyTuple_GetItem(arguments, 0);
    else if (named != NULL) PyDict_Next(named, &position, &name, &first);
    PyObject *shape = first != NULL && (PyObject *)Py_TYPE(first) == self->tensor ? PyObject_GetAttr(first, names[SHAPE]) : NULL;
    PyObject *length = shape != NULL && PyTuple_Check(shape) && PyTuple_Size(shape) > 1 ? PyTuple_GetItem(shape, 0) : NULL;
    if (length != NULL && PyLong_CheckExact(length)) items = PyLong_AsLongLong(length);
    else if (!PyErr_Occurred()) {
        PyObject *no_names = named == NULL ? PyDict_New() : take(named);
        PyObject *read = no_names == NULL ? NULL : PyObject_CallFunctionObjArgs(self->read_batch_size, arguments, no_names, NULL);
        items = read == NULL ? 0 : PyLong_AsLongLong(read);
        Py_XDECREF(no_names);
        Py_XDECREF(read);
    }
    Py_XDECREF(shape);
    return items;
}

/* Calls a variable's `reset`; the token of another context is ignored, as by `context.detach`. */
static void reset_variable(PyObject *reset, PyObject *token)
{
    PyObject *done = token == NULL ? NULL : PyObject_CallFunctionObjArgs(reset, token, NULL);
    Py_XDECREF(done);
    PyErr_Clear();
}

/* Records a call that succeeded. An exception of ours may be set afterwards. */
static void record_success(CallDescriptor *self, Forward *forward, PyObject *arguments, PyObject *named)
{
    RequestState *request = forward->request;
    if (forward->is_separate) reset_variable(self->reset_context, forward->token);
    int64_t items = count_items(self, arguments, named), at = read_clock();
    if (PyErr_Occurred()) mark_hook_failed(self->hook);
    if (PyErr_Occurred()) return;
    PyObject *done = NULL;
    if (record_stage_until(request, at, self->stage, forward->started_at, items) || !forward->is_separate) return;
    RequestRing *ring = get_ring(request);
    if (ring != NULL && at >= ring->deferred_due_at) {
        done = PyObject_CallFunction(self->run_deferred, "L", (long long)at);
        Py_XDECREF(done);
    }
    if (PyErr_Occurred() || close_succeeded(request, at, self->no_text, self->empty_context)) return;
    PyObject *close = PyObject_GetAttr((PyObject *)request, names[CLOSE]);
    done = close == NULL ? NULL : PyObject_CallNoArgs(close);
    Py_XDECREF(close);
    Py_XDECREF(done);
}

/* Records a call that raised `exc`. An exception of ours may be set afterwards. */
static void record_failure(CallDescriptor *self, Forward *forward, PyObject *exc)
{
    PyObject *done = PyObject_CallFunction(self->end_slowly, "OLOO", (PyObject *)forward->request,
                                           (long long)forward->started_at,
                                           forward->token == NULL ? Py_None : forward->token, exc);
    Py_XDECREF(done);
}

/* Ends the call. Returns the result, whose reference it takes; NULL with the exception that leaves the call. */
static PyObject *end_forward(CallDescriptor *self, Forward *forward, PyObject *arguments, PyObject *named,
                             PyObject *result)
{
    PyObject *type = NULL, *exc = NULL, *traceback = NULL;
    if (result == NULL) fetch_exception(&type, &exc, &traceback);
    PyObject *done = forward->flag == NULL ? NULL : PyObject_CallFunctionObjArgs(self->reset_suppressed, forward->flag, NULL);
    Py_XDECREF(done);
    PyErr_Clear();
    if (result != NULL) record_success(self, forward, arguments, named);
    else record_failure(self, forward, exc == NULL ? Py_None : exc);
    if (PyErr_Occurred()) mark_hook_failed(self->hook);
    if (PyErr_Occurred()) {  /* of a signal handler */
        Py_CLEAR(result);
        drop_exception(type, exc, traceback);
    } else if (result == NULL) PyErr_Restore(type, exc, traceback);
    return result;
}

/* Returns what the module's call would be without the hook. */
static PyObject *get_inner(PyObject *module)
{
    PyObject *inner = get_own_call(module);
    if (inner == NULL) return NULL;
    int is_own = PyObject_IsTrue(inner);
    if (is_own > 0) return inner;
    Py_DECREF(inner);
    return is_own < 0 ? NULL : PyObject_GetAttr(module, names[CALL_IMPL]);
}

static PyObject *call_forward(ForwardCall *call, PyObject *arguments, PyObject *named)
{
    CallDescriptor *self = call->descriptor;
    if (self == NULL || call->module == NULL) return PyErr_Format(PyExc_RuntimeError, "the call was cleared");
    Forward forward = {0};
    PyObject *inner = get_inner(call->module), *result;
    if (inner == NULL) return NULL;
    if (!begin_forward(self, call->module, &forward)) {
        Py_DECREF(inner);
        if (PyErr_Occurred()) return NULL;
        PyObject *slow = PyObject_CallFunctionObjArgs(self->bind, self->call_slowly, call->module, NULL);
        result = slow == NULL ? NULL : PyObject_Call(slow, arguments, named);
        Py_XDECREF(slow);
        read_device_due(self);
        return result;
    }
    result = PyObject_Call(inner, arguments, named);
    Py_DECREF(inner);
    result = end_forward(self, &forward, arguments, named, result);
    Py_DECREF((PyObject *)forward.request);
    Py_XDECREF(forward.token);
    Py_XDECREF(forward.flag);
    return result;
}

/* ── types ─────────────────────────────────────────────────────────────────────────────────────────────────── */

/* connect(outermost, model_names, timing, stage, owner, flags, (request type, context type, request key, span key,
 *         make_identity), (get, set, reset of the context), get of the thread's owner, (get, set, reset of the
 *         suppression), (call_slowly, end_slowly, read_batch_size, run_deferred), types.MethodType) */
static PyObject *connect(CallDescriptor *self, PyObject *arguments)
{
    PyObject *values[22];
    if (!PyArg_ParseTuple(arguments, "OOOOOi(OOOOO)(OOO)O(OOO)(OOOO)O", &values[0], &values[1], &values[2], &values[3],
                          &values[4], &self->flags, &values[5], &values[6], &values[7], &values[8], &values[9],
                          &values[10], &values[11], &values[12], &values[13], &values[14], &values[15], &values[16],
                          &values[17], &values[18], &values[19], &values[20], &values[21])) return NULL;
    PyObject **fields[] = {&self->outermost, &self->model_names, &self->timing, &self->stage, &self->owner,
                           &self->request_type, &self->context_type, &self->request_key, &self->span_key,
                           &self->make_identity, &self->get_context, &self->set_context, &self->reset_context,
                           &self->get_thread_owner, &self->get_suppressed, &self->set_suppressed,
                           &self->reset_suppressed, &self->call_slowly, &self->end_slowly, &self->read_batch_size,
                           &self->run_deferred, &self->bind};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        PyObject *old = *fields[i];
        *fields[i] = take(values[i]);
        Py_XDECREF(old);
    }
    self->no_text = PyUnicode_FromString("");
    self->empty_context = PyObject_CallNoArgs(self->context_type);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

/* renew(ring, valid_until, root_sampled) */
static PyObject *renew(CallDescriptor *self, PyObject *arguments)
{
    PyObject *ring, *old = (PyObject *)self->ring;
    long long valid_until;
    int root_sampled;
    if (!PyArg_ParseTuple(arguments, "OLp", &ring, &valid_until, &root_sampled)) return NULL;
    if (!is_ring(ring)) return PyErr_Format(PyExc_TypeError, "renew takes a RequestRing");
    self->ring = (RequestRing *)take(ring);
    self->valid_until = valid_until;
    self->root_sampled = (char)root_sampled;
    Py_XDECREF(old);
    Py_RETURN_NONE;
}

/* Stores a function in the `__dict__` of the type, which dynamo reads. `type.__setattr__` would also let the interpreter
 * call it in place of `get_call`. */
static PyObject *show_get(PyObject *type, PyObject *function)
{
    PyObject *name = PyUnicode_InternFromString("__get__");
    int failed = name == NULL || PyObject_GenericSetAttr(type, name, function);
    Py_XDECREF(name);
    if (failed) return NULL;
    PyType_Modified((PyTypeObject *)type);
    Py_RETURN_NONE;
}

static PyMethodDef descriptor_methods[] = {
    {"connect", (PyCFunction)connect, METH_VARARGS, "connect(…): stores what the calls of all models need."},
    {"renew", (PyCFunction)renew, METH_VARARGS,
     "renew(ring, valid_until, root_sampled): separate requests are opened in this ring until this instant."},
    {"show_get", (PyCFunction)show_get, METH_O | METH_CLASS,
     "show_get(function): dynamo traces this function as `__get__`, the interpreter still calls the compiled one."},
    {NULL, NULL, 0, NULL}};
static PyMemberDef descriptor_members[] = {
    FIELD(CallDescriptor, T_OBJECT, hook), FIELD(CallDescriptor, T_OBJECT, compiler),
    FIELD(CallDescriptor, T_OBJECT, tensor), FIELD(CallDescriptor, T_OBJECT, is_tracing),
    FIELD(CallDescriptor, T_OBJECT, is_grad_enabled), FIELD(CallDescriptor, T_LONGLONG, valid_until),
    {NULL, 0, 0, 0, NULL}};
static PyType_Slot descriptor_slots[] = {{Py_tp_new, PyType_GenericNew}, REFERENCE_SLOTS(CallDescriptor),
                                         {Py_tp_descr_get, get_call},    {Py_tp_members, descriptor_members},
                                         {Py_tp_methods, descriptor_methods}, {0, NULL}};
static PyType_Spec descriptor_spec = {"otel_infer.ringbuffer._native.CallDescriptor", sizeof(CallDescriptor), 0,
                                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, descriptor_slots};

static PyMemberDef call_members[] = {{"__self__", T_OBJECT, offsetof(ForwardCall, module), READONLY, NULL},
                                     {NULL, 0, 0, 0, NULL}};
static PyType_Slot call_slots[] = {REFERENCE_SLOTS(ForwardCall), {Py_tp_call, call_forward},
                                   {Py_tp_members, call_members}, {0, NULL}};
static PyType_Spec call_spec = {"otel_infer.ringbuffer._native.ForwardCall", sizeof(ForwardCall), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, call_slots};

int add_forward_types(PyObject *module)
{
    if (make_names(names, texts, NAMES)) return -1;
    forward_call_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &call_spec, NULL);
    return forward_call_type == NULL || add_type(module, "CallDescriptor", &descriptor_spec) ? -1 : 0;
}
