/* The fields of a request span, and how its usual events are written (`tracing/request_state.py`).
 *
 * What cannot be written here is written by Python code: where the request's ring is not this process's, for example.
 */
#include "../ringbuffer/_native.h"

#define EACH_OF_REQUEST(DO)                                                                                          \
    DO(make_identity) DO(ring) DO(identity) DO(around) DO(provider_spans) DO(owner) DO(on_token_reached) DO(engine_error) \
    DO(operation_names)
DEFINE_REFERENCES(RequestState, EACH_OF_REQUEST)

static PyObject *get_identity(RequestState *self, void *unused)
{
    (void)unused;
    if (self->identity == NULL) {
        const OpenedRequest *opened = &self->opened;
        if (self->make_identity == NULL) Py_RETURN_NONE;
        PyObject *identity = PyObject_CallFunction(
            self->make_identity, "(y#y#y#y#)Hy#", opened->trace, (Py_ssize_t)16, opened->span, (Py_ssize_t)8,
            opened->parent, (Py_ssize_t)8, opened->server, (Py_ssize_t)8, opened->flags, opened->remote,
            (Py_ssize_t)(opened->has_remote ? PARENT_BYTES : 0));
        if (identity == NULL) return NULL;
        if (self->identity == NULL) self->identity = identity;
        else Py_DECREF(identity);  /* another thread was first */
    }
    Py_INCREF(self->identity);
    return self->identity;
}

static int set_identity(RequestState *self, PyObject *value, void *unused)
{
    (void)unused;
    PyObject *old = self->identity;
    Py_XINCREF(value);
    self->identity = value;
    Py_XDECREF(old);
    return 0;
}

RequestRing *get_ring(RequestState *request)
{
    RequestRing *ring = is_ring(request->ring) ? (RequestRing *)request->ring : NULL;
    return ring != NULL && !ring->retired && request->handle ? ring : NULL;
}

/* Writes the event if all before went well, and gives the ring back. Returns whether it is written. */
static int finish_cell(RequestState *self, RequestRing *ring, int code, const char *body, int failed)
{
    if (failed) PyErr_Clear();
    else if (ring->retired) failed = 1;
    else write_cell(ring, code, (uint32_t)self->handle, body);
    Py_DECREF((PyObject *)ring);
    return !failed;
}

/* The layouts of the next four events are checked by a test. */
enum { MAX_SHORT_NAME = 30 };  /* `request_span.MAX_SHORT_NAME` */
int write_stage(RequestState *self, int64_t at, PyObject *name, int64_t started_at, int64_t items)
{
    enum { CODE = 2 };  /* of `events.StageEnded`: q q S q */
    char body[40] = {0};
    uint32_t id = 0;
    RequestRing *ring = (RequestRing *)take((PyObject *)get_ring(self));
    if (ring == NULL) return 0;
    int failed = intern_text(ring, name, &id);
    memcpy(body, &at, 8);
    memcpy(body + 8, &started_at, 8);
    memcpy(body + 16, &id, 4);
    memcpy(body + 20, &items, 8);
    return finish_cell(self, ring, CODE, body, failed);
}

int record_stage_until(RequestState *self, int64_t at, PyObject *name, int64_t started_at, int64_t items)
{
    if (write_stage(self, at, name, started_at, items)) return 0;
    PyObject *done = PyObject_CallMethod((PyObject *)self, "_write_stage", "LOLL", (long long)at, name,
                                         (long long)started_at, (long long)items);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

int write_operation(RequestState *self, PyObject *names)
{
    enum { CODE = 43 };  /* of `events.OperationNamed`: q S S S */
    char body[40] = {0};
    uint32_t id = 0;
    int failed = 0, is_same = self->operation_names == NULL ? 0 : PyObject_RichCompareBool(names, self->operation_names, Py_EQ);
    if (is_same > 0) return 1;
    RequestRing *ring = is_same < 0 ? NULL : (RequestRing *)take((PyObject *)get_ring(self));
    if (ring == NULL) {
        PyErr_Clear();
        return 0;
    }
    int64_t at = read_clock();
    memcpy(body, &at, 8);
    for (int i = 0; i < 3 && !failed; i++) {
        PyObject *name = PyTuple_GetItem(names, i);
        failed = name == NULL || !PyUnicode_CheckExact(name) || PyUnicode_GetLength(name) > MAX_SHORT_NAME ||
                 intern_text(ring, name, &id);
        memcpy(body + 8 + 4 * i, &id, 4);
    }
    if (!finish_cell(self, ring, CODE, body, failed)) return 0;
    PyObject *old = self->operation_names;
    self->operation_names = take(names);
    Py_XDECREF(old);
    return 1;
}

int write_place(RequestState *self, PyObject *provider)
{
    enum { CODE = 48 };  /* of `events.ModelPlaced`: q S */
    char body[40] = {0};
    uint32_t id = 0;
    RequestRing *ring = (RequestRing *)take((PyObject *)get_ring(self));
    if (ring == NULL) return 0;
    int64_t at = read_clock();
    int failed = PyUnicode_GetLength(provider) > MAX_SHORT_NAME || intern_text(ring, provider, &id);
    memcpy(body, &at, 8);
    memcpy(body + 8, &id, 4);
    return finish_cell(self, ring, CODE, body, failed);
}

int close_succeeded(RequestState *self, int64_t at, PyObject *no_text, PyObject *empty_context)
{
    enum { CODE = 11 };  /* of `events.RequestEnded`: q H S H I q q */
    char body[40] = {0};
    uint32_t no_error = 0, chunks = (uint32_t)self->chunks;
    RequestRing *ring = (RequestRing *)take((PyObject *)get_ring(self));
    if (ring == NULL) return 0;
    int failed = self->ended || self->has_error_status || (self->provider_spans && self->provider_spans != Py_None) ||
                 (self->engine_error != NULL && PyObject_IsTrue(self->engine_error)) || at >= ring->deferred_due_at ||
                 intern_text(ring, no_text, &no_error) || self->ended;
    memcpy(body, &at, 8);
    memcpy(body + 10, &no_error, 4);
    memcpy(body + 16, &chunks, 4);
    memcpy(body + 20, &self->send_wait_ns, 8);
    memcpy(body + 28, &self->detokenize_ns, 8);
    Py_INCREF((PyObject *)ring);
    if (finish_cell(self, ring, CODE, body, failed)) free_slot(ring, (uint32_t)self->handle);
    else failed = 1;
    Py_DECREF((PyObject *)ring);
    if (failed) return 0;
    self->ended = 1;
    Py_CLEAR(self->on_token_reached);
    PyObject *around = self->around;  /* it may hold an earlier request of the same connection */
    self->around = take(empty_context);
    Py_XDECREF(around);
    return 1;
}

static PyObject *write_or_pass_on(RequestState *self, int64_t at, PyObject *name, PyObject *started_at, PyObject *items)
{
    int64_t began_at = PyLong_AsLongLong(started_at), count = items == NULL ? 0 : PyLong_AsLongLong(items);
    if (PyErr_Occurred()) PyErr_Clear();
    else if (write_stage(self, at, name, began_at, count)) Py_RETURN_NONE;
    PyObject *slow_items = items == NULL ? PyLong_FromLong(0) : take(items);
    PyObject *done = PyObject_CallMethod((PyObject *)self, "_write_stage", "LOOO", (long long)at, name, started_at, slow_items);
    Py_XDECREF(slow_items);
    return done;
}

/* record_stage(name, started_at, items=0) */
static PyObject *record_stage(RequestState *self, PyObject *const *arguments, Py_ssize_t count)
{
    if (count < 2 || count > 3) return PyErr_Format(PyExc_TypeError, "record_stage takes 2 or 3 arguments");
    return write_or_pass_on(self, read_clock(), arguments[0], arguments[1], count == 3 ? arguments[2] : NULL);
}

/* record_stage_at(at, name, started_at, items) */
static PyObject *record_stage_at(RequestState *self, PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 4) return PyErr_Format(PyExc_TypeError, "record_stage_at takes 4 arguments");
    int64_t at = PyLong_AsLongLong(arguments[0]);
    if (at == -1 && PyErr_Occurred()) return NULL;
    return write_or_pass_on(self, at, arguments[1], arguments[2], arguments[3]);
}

/* An event that could not be written is written again by Python code, which counts it as lost. */
static PyObject *record_event(RequestState *self, PyObject *event)
{
    RequestRing *ring = (RequestRing *)take((PyObject *)get_ring(self));
    PyObject *handle = ring == NULL ? NULL : PyLong_FromLongLong(self->handle), *written = NULL;
    if (handle != NULL) written = write_event(ring, (PyObject *[]){handle, event}, 2);
    Py_XDECREF(handle);
    Py_XDECREF((PyObject *)ring);
    if (written != NULL || keep_interrupt()) return written;
    return PyObject_CallMethod((PyObject *)self, "_record_event", "(O)", event)  /* an event is a tuple */;
}

/* record_names(names): returns whether that is done, or unchanged */
static PyObject *record_names(RequestState *self, PyObject *recorded)
{
    int done = PyTuple_CheckExact(recorded) && PyTuple_Size(recorded) == 3 && write_operation(self, recorded);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(done);
}

static PyObject *get_ids(RequestState *self, void *unused)
{
    (void)unused;
    const OpenedRequest *opened = &self->opened;
    if (self->identity != NULL || self->make_identity == NULL) {
        PyObject *identity = get_identity(self, NULL);
        PyObject *ids = identity == NULL ? NULL : PyObject_GetAttrString(identity, "ids");
        Py_XDECREF(identity);
        return ids;
    }
    return Py_BuildValue("(y#y#y#y#)", opened->trace, (Py_ssize_t)16, opened->span, (Py_ssize_t)8, opened->parent,
                         (Py_ssize_t)8, opened->server, (Py_ssize_t)8);
}

static PyObject *get_operation_names(RequestState *self, void *unused)
{
    (void)unused;
    return self->operation_names == NULL ? Py_BuildValue("(sss)", "", "", "") : take(self->operation_names);
}

static int set_operation_names(RequestState *self, PyObject *value, void *unused)
{
    (void)unused;
    PyObject *old = self->operation_names;
    self->operation_names = take(value);
    Py_XDECREF(old);
    return 0;
}

int mark_token_reached(RequestState *self)
{
    enum { CODE = 7 };  /* of `events.TokenReached`: q, which a test checks */
    if (self->tokens_reached) return 0;
    self->tokens_reached = self->inspect_next_chunk = 1;
    int64_t at = read_clock();
    RequestRing *ring = get_ring(self);
    char body[40] = {0};
    memcpy(body, &at, 8);
    if (ring != NULL) write_cell(ring, CODE, (uint32_t)self->handle, body);
    PyObject *done = ring != NULL ? take(Py_None) : PyObject_CallMethod((PyObject *)self, "_write_token_reached", "L", (long long)at);
    if (done != NULL && self->on_token_reached != NULL && self->on_token_reached != Py_None) {
        PyObject *on_token_reached = take(self->on_token_reached);
        Py_DECREF(done);
        done = PyObject_CallNoArgs(on_token_reached);
        Py_DECREF(on_token_reached);
    }
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static PyObject *record_token_reached(RequestState *self, PyObject *unused)
{
    (void)unused;
    if (mark_token_reached(self)) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef request_methods[] = {
    {"record_token_reached", (PyCFunction)record_token_reached, METH_NOARGS,
     "record_token_reached(): as `PythonRequestState.record_token_reached`."},
    {"record_stage", (PyCFunction)(void (*)(void))record_stage, METH_FASTCALL,
     "record_stage(name, started_at, items=0): as `PythonRequestState.record_stage`."},
    {"record_stage_at", (PyCFunction)(void (*)(void))record_stage_at, METH_FASTCALL,
     "record_stage_at(at, name, started_at, items): as `PythonRequestState.record_stage_at`."},
    {"record_event", (PyCFunction)record_event, METH_O, "record_event(event): as `PythonRequestState.record_event`."},
    {"record_names", (PyCFunction)record_names, METH_O, "record_names(names): as `PythonRequestState.record_names`."},
    {NULL, NULL, 0, NULL}};
static PyGetSetDef request_properties[] = {
    {"_span_ids", (getter)get_identity, (setter)set_identity, NULL, NULL},
    {"ids", (getter)get_ids, NULL, "As `PythonRequestState.ids`.", NULL},
    {"_operation_names", (getter)get_operation_names, (setter)set_operation_names, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL}};
static PyMemberDef request_members[] = {
    FIELD(RequestState, T_OBJECT, ring), FIELD(RequestState, T_OBJECT, around), FIELD(RequestState, T_OBJECT, provider_spans),
    FIELD(RequestState, T_OBJECT, owner), FIELD(RequestState, T_OBJECT, on_token_reached),
    {"_engine_error", T_OBJECT, offsetof(RequestState, engine_error), 0, NULL},
    FIELD(RequestState, T_LONGLONG, handle), FIELD(RequestState, T_LONGLONG, arrived_at),
    FIELD(RequestState, T_LONGLONG, chunks), FIELD(RequestState, T_LONGLONG, send_wait_ns),
    FIELD(RequestState, T_LONGLONG, detokenize_ns), FIELD(RequestState, T_LONGLONG, queued_at),
    {"_link_count", T_LONGLONG, offsetof(RequestState, link_count), 0, NULL}, FIELD(RequestState, T_BOOL, ended),
    FIELD(RequestState, T_BOOL, has_server), FIELD(RequestState, T_BOOL, inspect_next_chunk),
    FIELD(RequestState, T_BOOL, responding), FIELD(RequestState, T_BOOL, tokens_reached),
    FIELD(RequestState, T_BOOL, first_token_sent), FIELD(RequestState, T_BOOL, sends_directly),
    {"_has_error_status", T_BOOL, offsetof(RequestState, has_error_status), 0, NULL},
    FIELD(RequestState, T_BOOL, is_named), FIELD(RequestState, T_BOOL, has_forward_name),
    FIELD(RequestState, T_BOOL, tokenizing),
    {NULL, 0, 0, 0, NULL}};
static PyType_Slot request_slots[] = {{Py_tp_new, PyType_GenericNew}, REFERENCE_SLOTS(RequestState),
                                      {Py_tp_members, request_members}, {Py_tp_getset, request_properties},
                                      {Py_tp_methods, request_methods},
                                      {0, NULL}};
static PyType_Spec request_spec = {"otel_infer.ringbuffer._native.RequestState", sizeof(RequestState), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, request_slots};

int add_request_state(PyObject *module) { return add_type(module, "RequestState", &request_spec); }
