/* Records plain HTTP requests of uvicorn, as `exchange.Exchange` and its callers do in Python, but as C.
 *
 *     EntryPoint ─▶ ExchangeRun (what the server awaits) ─▶ Exchange (the application's `send`)
 *                   CompiledHook on the way in: in place of an application, a router or a route
 *
 * A request is plain if nothing beyond the standard case applies: a method that infers, headers that hold a lone
 * `traceparent` or none, no other instrumentation, and a connection whose hooks are known to work. `PlainRequests`
 * holds what that depends on; Python code renews it once a second, with the first request after that.
 * Whatever is not plain calls the Python code, which knows all cases. So each function here is a shortcut: it
 * completes a step of a plain request, or it changes nothing and says so.
 */
#include "../../ringbuffer/_native.h"

enum {
    BODY, BODY_KIND, CLOSE, COMPLETE, CYCLE, DISCONNECTED, EFFECTIVE, END, END_RESPONSE, FASTAPI, HEADERS, HTTP, INSPECT,
    LAST_BYTE, METHOD, MORE_BODY, ON_RESPONSE, ORIGINAL, PATH_FORMAT, RESPONSE, ROOT_PATH, ROUTE_ERROR, SCHEME, SELF,
    SEND_AND_FOLLOW, SEND_AND_RECORD, SERVER, START_KIND, STATUS, THROW, TYPE, NAMES
};
static const char *const texts[NAMES] = {
    "body", "http.response.body", "close", "response_complete", "cycle", "disconnected", "effective_route_context", "end",
    "end_response", "fastapi", "headers", "http", "inspect_next_chunk", "record_last_byte", "method", "more_body", "on_response",
    "original_route", "path_format", "otel_infer_response", "root_path", "record_route_error", "scheme", "__self__",
    "send_and_follow", "send_and_record", "server", "http.response.start", "status", "throw", "type"};
static PyObject *names[NAMES];

/* ── what plain requests depend on ─────────────────────────────────────────────────────────────────────────── */

typedef struct {
    PyObject_HEAD
    RequestRing *ring;
    long long valid_until;
    int response_started, first_token_sent, ended, flags;
    char root_sampled, follows_parent;
    PyTypeObject *exchange_type, *request_type, *context_type;
    PyObject *cycle_type, *methods, *scope_key, *request_key, *span_key, *variable_get, *variable_set, *variable_reset;
    PyObject *owner, *make_identity, *run_deferred, *renew_again, *no_tokens, *empty_context, *no_text, *server;
} PlainRequests;

#define EACH_OF_PLAIN(DO)                                                                                            \
    DO(ring) DO(exchange_type) DO(request_type) DO(context_type) DO(cycle_type) DO(methods) DO(scope_key)            \
    DO(request_key) DO(span_key) DO(variable_get) DO(variable_set) DO(variable_reset) DO(owner) DO(make_identity)    \
    DO(run_deferred) DO(renew_again) DO(no_tokens) DO(empty_context) DO(no_text) DO(server)

DEFINE_REFERENCES(PlainRequests, EACH_OF_PLAIN)

/* PlainRequests(exchange_type, request_type, context_type, variable, request_key, span_key, scope_key, methods, owner,
 *               make_identity, run_deferred, renew_again, (codes of ResponseStarted, FirstTokenSent and ExchangeEnded), flags) */
static int init_plain(PlainRequests *self, PyObject *arguments, PyObject *named)
{
    PyObject *exchange, *request, *context, *variable, *request_key, *span_key, *scope_key, *methods, *owner, *identity;
    PyObject *deferred, *again;
    (void)named;
    if (!PyArg_ParseTuple(arguments, "OOOOOOOOOOOO(iii)i", &exchange, &request, &context, &variable, &request_key,
                          &span_key, &scope_key, &methods, &owner, &identity, &deferred, &again, &self->response_started,
                          &self->first_token_sent, &self->ended, &self->flags)) return -1;
    self->exchange_type = (PyTypeObject *)take(exchange);
    self->request_type = (PyTypeObject *)take(request);
    self->context_type = (PyTypeObject *)take(context);
    self->request_key = take(request_key);
    self->span_key = take(span_key);
    self->scope_key = take(scope_key);
    self->methods = take(methods);
    self->owner = take(owner);
    self->make_identity = take(identity);
    self->run_deferred = take(deferred);
    self->renew_again = take(again);
    self->variable_get = PyObject_GetAttrString(variable, "get");
    self->variable_set = PyObject_GetAttrString(variable, "set");
    self->variable_reset = PyObject_GetAttrString(variable, "reset");
    self->no_tokens = PyTuple_New(0);
    self->no_text = PyUnicode_FromString("");
    self->empty_context = PyObject_CallNoArgs(context);
    return PyErr_Occurred() ? -1 : 0;
}

/* renew(ring, cycle_type, valid_until, root_sampled, follows_parent, server): the address of this process, or None */
static PyObject *renew(PlainRequests *self, PyObject *arguments)
{
    PyObject *ring, *cycle_type, *server, *old_ring = (PyObject *)self->ring, *old_type = self->cycle_type;
    PyObject *old_server = self->server;
    long long valid_until;
    int root_sampled, follows_parent;
    if (!PyArg_ParseTuple(arguments, "OOLppO", &ring, &cycle_type, &valid_until, &root_sampled, &follows_parent,
                          &server)) return NULL;
    Py_INCREF(ring);
    Py_INCREF(cycle_type);
    Py_INCREF(server);
    self->server = server;
    self->ring = (RequestRing *)ring;
    self->cycle_type = cycle_type;
    self->valid_until = valid_until;
    self->root_sampled = (char)root_sampled;
    self->follows_parent = (char)follows_parent;
    Py_XDECREF(old_ring);
    Py_XDECREF(old_type);
    Py_XDECREF(old_server);
    Py_RETURN_NONE;
}

static PyObject *invalidate(PlainRequests *self, PyObject *unused)
{
    (void)unused;
    self->valid_until = 0;
    Py_RETURN_NONE;
}

static PyMethodDef plain_methods[] = {
    {"renew", (PyCFunction)renew, METH_VARARGS,
     "renew(ring, cycle_type, valid_until, root_sampled, follows_parent, server): requests are plain until this instant."},
    {"invalidate", (PyCFunction)invalidate, METH_NOARGS, "invalidate(): no request is plain until `renew`."},
    {NULL, NULL, 0, NULL}};
static PyMemberDef plain_members[] = {
    {"valid_until", T_LONGLONG, offsetof(PlainRequests, valid_until), READONLY, NULL}, {NULL, 0, 0, 0, NULL}};
static PyType_Slot plain_slots[] = {{Py_tp_init, init_plain},         {Py_tp_new, PyType_GenericNew},
                                    REFERENCE_SLOTS(PlainRequests), {Py_tp_methods, plain_methods},
                                    {Py_tp_members, plain_members},   {0, NULL}};
static PyType_Spec plain_spec = {"otel_infer.ringbuffer._native.PlainRequests", sizeof(PlainRequests), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, plain_slots};

/* ── the entry point and the exchange ──────────────────────────────────────────────────────────────────────── */

typedef struct {
    PyObject_HEAD
    PlainRequests *plain;
    PyObject *app, *call_slowly, *hook;
    char reached_app, has_tracer, is_watched;
} EntryPoint;

#define EACH_OF_ENTRY(DO) DO(plain) DO(app) DO(call_slowly) DO(hook)
DEFINE_REFERENCES(EntryPoint, EACH_OF_ENTRY)

typedef struct {
    PyObject_HEAD
    PlainRequests *plain;  /* NULL: not a plain request */
    PyObject *hook, *entry_point, *scope, *request, *route, *route_error, *tokens, *server_receive, *server_send;
    PyObject *receive, *send, *connection, *root_path, *mount_path, *on_response;
    long long arrived_at, disconnected_at, completed_at, started_at, status;
    char deferred, reached_app, finishing, is_direct, is_timed, is_followed, passes;
} Exchange;

#define EACH_OF_EXCHANGE(DO)                                                                                         \
    DO(plain) DO(hook) DO(entry_point) DO(scope) DO(request) DO(route) DO(route_error) DO(tokens) DO(server_receive) \
    DO(server_send) DO(receive) DO(send) DO(connection) DO(root_path) DO(mount_path) DO(on_response)
DEFINE_REFERENCES(Exchange, EACH_OF_EXCHANGE)

static int is_text(PyObject *value, int name)
{
    return value == names[name] ||
           (value != NULL && PyUnicode_Check(value) && PyUnicode_Compare(value, names[name]) == 0);
}

static int is_false(PyObject *owner, int name)
{
    PyObject *value = PyObject_GetAttr(owner, names[name]);
    Py_XDECREF(value);
    return value == Py_False;
}

/* Returns the code of the scope's method and scheme as they are now; 0 for those of no plain request. */
static long read_code(PlainRequests *plain, PyObject *scope)
{
    PyObject *method = PyDict_GetItemWithError(scope, names[METHOD]);
    PyObject *schemes = method == NULL ? NULL : PyDict_GetItemWithError(plain->methods, method);
    PyObject *scheme = schemes == NULL ? NULL : PyDict_GetItemWithError(scope, names[SCHEME]);
    PyObject *code = scheme == NULL ? NULL : PyDict_GetItemWithError(schemes, scheme);
    return code == NULL ? 0 : PyLong_AsLong(code);
}

/* Returns whether the scope is that of a plain request. */
static int is_plain(PlainRequests *plain, PyObject *scope)
{
    if (!PyDict_CheckExact(scope) || !is_text(PyDict_GetItemWithError(scope, names[TYPE]), HTTP)) return 0;
    if (PyDict_GetItemWithError(scope, plain->scope_key) != NULL) return 0;
    PyObject *root_path = PyDict_GetItemWithError(scope, names[ROOT_PATH]);
    if (root_path != NULL && PyObject_IsTrue(root_path)) return 0;
    return read_code(plain, scope) > 0;
}

static int has_empty_context(PlainRequests *plain)
{
    PyObject *context = PyObject_CallNoArgs(plain->variable_get);
    int is_empty = context != NULL && PyDict_Check(context) && PyDict_Size(context) == 0;
    Py_XDECREF(context);
    return is_empty;
}

/* Makes the request current; returns the tuple of tokens that ends that. */
static PyObject *attach_request(PlainRequests *plain, PyObject *request)
{
    PyObject *context = PyObject_CallNoArgs((PyObject *)plain->context_type), *token = NULL, *tokens = NULL;
    if (context != NULL && !PyDict_SetItem(context, plain->request_key, request) &&
        !PyDict_SetItem(context, plain->span_key, request))
        token = PyObject_CallFunctionObjArgs(plain->variable_set, context, NULL);
    if (token != NULL) tokens = PyTuple_Pack(1, token);
    Py_XDECREF(context);
    Py_XDECREF(token);
    return tokens;
}

static RequestState *open_plain(PlainRequests *plain, PyObject *scope, int64_t at)
{
    RequestRing *ring = plain->ring;
    PyObject *headers = PyDict_GetItemWithError(scope, names[HEADERS]);
    PyObject *method = PyDict_GetItemWithError(scope, names[METHOD]);
    if (headers == NULL) return NULL;
    Py_INCREF((PyObject *)ring);  /* an allocation and interning may run Python code, and another thread may renew */
    RequestState *request = allocate(plain->request_type);
    if (request == NULL) {
        Py_DECREF((PyObject *)ring);
        return NULL;
    }
    int failed = open_by_headers(ring, headers, method, at, (uint16_t)plain->flags, plain->root_sampled,
                                 plain->follows_parent, &request->opened);
    if (failed) {
        request->ended = 1;
        Py_DECREF((PyObject *)ring);
        Py_DECREF((PyObject *)request);
        return NULL;
    }
    request->make_identity = take(plain->make_identity);
    request->ring = (PyObject *)ring;  /* of its handle */
    request->around = take(plain->empty_context);
    request->owner = take(plain->owner);
    request->handle = request->opened.handle;
    request->arrived_at = at;
    request->has_server = request->inspect_next_chunk = 1;
    return request;
}

/* Lets the connection report the last byte and a disconnect. */
static int follow_connection(Exchange *exchange)
{
    PyObject *end_response = PyObject_GetAttr((PyObject *)exchange, names[END_RESPONSE]);
    int failed = end_response == NULL ||
                 PyObject_SetAttr(exchange->connection, names[RESPONSE], (PyObject *)exchange) ||
                 PyObject_SetAttr(exchange->connection, names[ON_RESPONSE], end_response);
    Py_XDECREF(end_response);
    return failed;
}

/* Returns whether requests are plain now. Once a second Python code checks it, unless no request was plain before. */
static int is_valid(PlainRequests *plain, PyObject *connection, int64_t at)
{
    if (at <= plain->valid_until) return 1;
    if (!plain->valid_until) return 0;
    plain->valid_until = 0;  /* if it is not renewed, Python code decides from now on */
    PyObject *done = PyObject_CallFunction(plain->renew_again, "OL", connection, (long long)at);
    Py_XDECREF(done);
    return done != NULL && at <= plain->valid_until && !plain->ring->retired;
}

/* Returns the exchange of a plain request that begins here; NULL if it is not plain. An exception is set only if a
 * signal handler raised it. */
static Exchange *begin_plain(EntryPoint *self, PyObject *scope, PyObject *receive, PyObject *send)
{
    PlainRequests *plain = self->plain;
    int64_t at = read_clock();
    if (plain == NULL || plain->ring == NULL || plain->ring->retired || !self->is_watched ||
        (self->has_tracer && self->reached_app)) return NULL;
    PyObject *connection = is_plain(plain, scope) ? PyObject_GetAttr(send, names[SELF]) : NULL, *on_response = NULL;
    Exchange *exchange = NULL;
    if (connection != NULL && (PyObject *)Py_TYPE(connection) == plain->cycle_type &&
        is_false(connection, DISCONNECTED) && has_empty_context(plain) && is_valid(plain, connection, at))
        on_response = PyObject_GetAttr(connection, names[ON_RESPONSE]);
    if (on_response != NULL && is_hook_alive(self->hook)) exchange = allocate(plain->exchange_type);
    if (exchange != NULL) {
        exchange->request = (PyObject *)open_plain(plain, scope, at);
        if (exchange->request == NULL) Py_CLEAR(exchange);
    }
    if (exchange != NULL) {
        exchange->plain = (PlainRequests *)take((PyObject *)plain);
        exchange->hook = take(self->hook);
        exchange->entry_point = take((PyObject *)self);
        exchange->scope = take(scope);
        exchange->server_receive = take(receive);
        exchange->server_send = take(send);
        exchange->receive = take(receive);
        exchange->connection = take(connection);
        exchange->on_response = take(on_response);
        exchange->root_path = take(plain->no_text);
        exchange->mount_path = take(plain->no_text);
        exchange->arrived_at = at;
        exchange->is_followed = 1;
        exchange->tokens = attach_request(plain, exchange->request);
        if (exchange->tokens == NULL) exchange->tokens = take(plain->no_tokens);
        record_socket_wait((RequestState *)exchange->request, connection, at);
        if (PyDict_SetItem(scope, plain->scope_key, (PyObject *)exchange)) PyErr_Clear();
        if (follow_connection(exchange)) exchange->is_followed = 0;
    }
    Py_XDECREF(connection);
    Py_XDECREF(on_response);
    if (exchange != NULL) PyErr_Clear();
    else keep_interrupt();
    return exchange;
}

/* ── the response ──────────────────────────────────────────────────────────────────────────────────────────── */

static RequestState *get_request(Exchange *self)
{
    return self->plain != NULL && self->request != NULL &&
                   (PyTypeObject *)Py_TYPE(self->request) == self->plain->request_type
               ? (RequestState *)self->request
               : NULL;
}

static void write_instant(Exchange *self, RequestState *request, int code, int64_t at)
{
    char body[40] = {0};
    memcpy(body, &at, 8);
    if (request->handle && !self->plain->ring->retired)
        write_cell(self->plain->ring, code, (uint32_t)request->handle, body);
}

/* Records the start message. Returns whether that is done. */
static int record_start(Exchange *self, PyObject *message)
{
    PyObject *status = PyDict_GetItemWithError(message, names[STATUS]);
    if (self->deferred || self->disconnected_at || status == NULL || !PyLong_CheckExact(status) ||
        !is_false(self->connection, DISCONNECTED)) return 0;
    long long number = PyLong_AsLongLong(status);
    if (number < 0 || number > UINT16_MAX) return 0;
    self->status = number;
    return 1;
}

/* Lets the further chunks of a stream pass, and the first one with a token come back. Returns whether it is done. */
static int pass_chunks(Exchange *self, RequestState *request)
{
    PyObject *old = request->on_token_reached, *inspect = NULL;
    if (!request->first_token_sent) {
        inspect = PyObject_GetAttr((PyObject *)self, names[INSPECT]);
        if (inspect == NULL) return 0;
    }
    self->is_direct = request->sends_directly = 1;
    request->on_token_reached = inspect;
    Py_XDECREF(old);
    self->passes = !request->inspect_next_chunk;
    return 1;
}

/* Records a chunk. Returns whether that is done. */
static int record_body(Exchange *self, PyObject *message)
{
    RequestState *request = get_request(self);
    PyObject *more = PyDict_GetItemWithError(message, names[MORE_BODY]);
    PyObject *body = PyDict_GetItemWithError(message, names[BODY]);
    int is_last = more == NULL || more == Py_False;
    if (self->request == NULL) return 1;
    if (request == NULL || (!is_last && more != Py_True) || (body != NULL && !PyBytes_CheckExact(body)) ||
        !is_false(self->connection, DISCONNECTED)) return 0;
    self->finishing |= is_last;
    if (body == NULL || PyBytes_Size(body) == 0) return 1;
    int64_t at = read_clock();
    request->chunks++;
    if (request->inspect_next_chunk) {
        request->inspect_next_chunk = 0;
        if (!request->responding) {
            request->responding = 1;
            if (self->finishing) self->started_at = at;  /* recorded with the end, which follows */
            else write_instant(self, request, self->plain->response_started, at);
        }
        if (request->tokens_reached && !request->first_token_sent) {
            request->first_token_sent = 1;
            write_instant(self, request, self->plain->first_token_sent, at);
        }
    }
    return self->finishing || pass_chunks(self, request);
}

/* The application's `send`. */
static PyObject *send_message(Exchange *self, PyObject *arguments, PyObject *named)
{
    if (self->server_send == NULL) return PyErr_Format(PyExc_RuntimeError, "the exchange is not initialized");
    if (!self->passes) {
        PyObject *message = PyTuple_Size(arguments) == 1 && named == NULL ? PyTuple_GetItem(arguments, 0) : NULL;
        int is_done = 0;
        if (message != NULL && PyDict_CheckExact(message) && self->plain != NULL && self->is_followed) {
            PyObject *kind = PyDict_GetItemWithError(message, names[TYPE]);
            if (is_text(kind, BODY_KIND)) is_done = record_body(self, message);
            else if (is_text(kind, START_KIND)) is_done = record_start(self, message);
        }
        PyErr_Clear();
        if (!is_done) {
            PyObject *slow = PyObject_GetAttr((PyObject *)self, names[self->is_followed ? SEND_AND_FOLLOW : SEND_AND_RECORD]);
            PyObject *result = slow == NULL ? NULL : PyObject_Call(slow, arguments, named);
            Py_XDECREF(slow);
            return result;
        }
    }
    return PyObject_Call(self->server_send, arguments, named);
}

/* ── the end ───────────────────────────────────────────────────────────────────────────────────────────────── */

/* Returns whether `record_address` has nothing to record: the address is the process's. */
static int has_known_address(Exchange *self)
{
    PyObject *server = PyDict_GetItemWithError(self->scope, names[SERVER]);
    if (server == NULL || server == Py_None) return 1;
    if (!PyTuple_CheckExact(server) || self->plain->server == NULL) return 0;
    int is_equal = PyObject_RichCompareBool(server, self->plain->server, Py_EQ);
    if (is_equal < 0) PyErr_Clear();  /* Python code handles it */
    return is_equal == 1;
}

static int pack_end(Exchange *self, RequestState *request, int64_t at, char *body)
{
    uint32_t error_type, route_id;
    uint16_t status = (uint16_t)self->status;
    uint32_t chunks = self->is_direct ? 0 : (uint32_t)request->chunks;  /* 0: not all were seen */
    int64_t send_wait = self->started_at ? at - self->started_at : request->send_wait_ns;
    long code = read_code(self->plain, self->scope);  /* a middleware may have changed it */
    uint8_t http = (uint8_t)(code | (self->started_at ? 1 : 0));  /* 1: `events.SINGLE_CHUNK` */
    PyObject *route = NULL;
    int failed = code <= 0 || !has_known_address(self);
    if (!failed && self->route != NULL && self->route != Py_None) {
        route = PyObject_GetAttr(self->route, names[PATH_FORMAT]);
        failed = route == NULL || !PyUnicode_CheckExact(route);
    }
    RequestRing *ring = (RequestRing *)take((PyObject *)self->plain->ring);
    if (!failed)
        failed = intern_text(ring, self->plain->no_text, &error_type) ||
                 intern_text(ring, route == NULL ? self->plain->no_text : route, &route_id) ||
                 ring != self->plain->ring;
    Py_DECREF((PyObject *)ring);
    Py_XDECREF(route);
    if (failed) return -1;
    memcpy(body, &at, 8);  /* `events.ExchangeEnded`: q B S H I q q S B */
    memcpy(body + 9, &error_type, 4);
    memcpy(body + 13, &status, 2);
    memcpy(body + 15, &chunks, 4);
    memcpy(body + 19, &send_wait, 8);
    memcpy(body + 27, &request->detokenize_ns, 8);
    memcpy(body + 35, &route_id, 4);
    memcpy(body + 39, &http, 1);
    return 0;
}

/* Calls the recorders of what was deferred, if they are due. */
static int run_deferred(PlainRequests *plain, int64_t at)
{
    if (at < plain->ring->deferred_due_at) return 0;
    PyObject *done = PyObject_CallFunction(plain->run_deferred, "L", (long long)at);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Closes a request that succeeded, at its last byte. Returns whether that is done. */
static int close_plain(Exchange *self, int64_t at)
{
    RequestState *request = get_request(self);
    char body[40] = {0};
    if (request == NULL || self->completed_at || self->disconnected_at || self->status < 100 || self->status > 499 ||
        (self->route_error != NULL && self->route_error != Py_None) || request->ended || request->has_error_status ||
        !request->handle || self->plain->ring->retired || PyUnicode_GetLength(self->mount_path) ||
        PyUnicode_GetLength(self->root_path) || (request->provider_spans && request->provider_spans != Py_None) ||
        (request->engine_error != NULL && PyObject_IsTrue(request->engine_error)) ||
        !is_false(self->connection, DISCONNECTED)) return 0;
    Py_INCREF((PyObject *)request);  /* Python code may run */
    int failed = run_deferred(self->plain, at) || pack_end(self, request, at, body) || request->ended ||
                 self->plain->ring->retired || self->request != (PyObject *)request;
    Py_DECREF((PyObject *)request);
    if (failed) return 0;
    write_cell(self->plain->ring, self->plain->ended, (uint32_t)request->handle, body);
    free_slot(self->plain->ring, (uint32_t)request->handle);
    request->send_wait_ns = self->started_at ? at - self->started_at : request->send_wait_ns;
    request->ended = self->finishing = 1;
    self->completed_at = at;
    Py_CLEAR(request->on_token_reached);
    PyObject *around = request->around;  /* it may hold an earlier request of the same connection */
    request->around = take(self->plain->empty_context);
    Py_XDECREF(around);
    Py_CLEAR(self->request);
    return 1;
}

/* The server calls this once the last byte is written. */
static PyObject *end_response(Exchange *self, PyObject *unused)
{
    (void)unused;
    int64_t at = read_clock();
    int is_done = close_plain(self, at);
    if (keep_interrupt()) return NULL;
    if (!is_done) {
        PyObject *slow = PyObject_GetAttr((PyObject *)self, names[LAST_BYTE]);
        PyObject *result = slow == NULL ? NULL : PyObject_CallFunction(slow, "L", (long long)at);
        Py_XDECREF(slow);
        if (result == NULL) return NULL;
        Py_DECREF(result);
    }
    if (self->on_response == NULL || self->on_response == Py_None) Py_RETURN_NONE;
    return PyObject_CallNoArgs(self->on_response);
}

/* Ends the exchange after the application has returned, or raised `exc`. No exception may be set. Afterwards one is set
 * only if a signal handler raised it, as `Hook.count_failure` does. */
static void end_exchange(Exchange *self, PyObject *exc)
{
    if (self->request == NULL && exc == NULL && self->plain != NULL) {
        for (Py_ssize_t i = 0; i < PyTuple_Size(self->tokens); i++) {
            PyObject *done = PyObject_CallFunctionObjArgs(self->plain->variable_reset, PyTuple_GetItem(self->tokens, i),
                                                          NULL);
            Py_XDECREF(done);
            PyErr_Clear();
        }
        Py_CLEAR(self->receive);
        if (PyObject_SetAttr(self->connection, names[RESPONSE], Py_None)) PyErr_Clear();
        if (PyDict_DelItem(self->scope, self->plain->scope_key)) PyErr_Clear();
        return;
    }
    PyObject *end = PyObject_GetAttr((PyObject *)self, names[END]);
    PyObject *done = end == NULL ? NULL : PyObject_CallFunctionObjArgs(end, exc == NULL ? Py_None : exc, NULL);
    Py_XDECREF(end);
    Py_XDECREF(done);
    if (done == NULL && PyErr_ExceptionMatches(PyExc_Exception)) PyErr_WriteUnraisable((PyObject *)self);
}

static PyObject *get_send(Exchange *self, void *unused)
{
    (void)unused;
    return take(self->send == NULL ? (PyObject *)self : self->send);
}

static int set_send(Exchange *self, PyObject *value, void *unused)
{
    (void)unused;
    PyObject *old = self->send;
    self->send = take(value);
    Py_XDECREF(old);
    return 0;
}

static PyObject *bind_send(PyObject *self, PyObject *unused)
{
    (void)self, (void)unused;
    Py_RETURN_NONE;
}

static PyObject *inspect_next_chunk(Exchange *self, PyObject *unused)
{
    (void)unused;
    self->passes = 0;
    Py_RETURN_NONE;
}

static PyMethodDef exchange_methods[] = {
    {"inspect_next_chunk", (PyCFunction)inspect_next_chunk, METH_NOARGS,
     "inspect_next_chunk(): as `PythonExchangeState.inspect_next_chunk`."},
    {"bind_send", bind_send, METH_NOARGS, "bind_send(): does nothing, the exchange itself is the application's `send`."},
    {"end_response", (PyCFunction)end_response, METH_NOARGS,
     "end_response(): closes the request, whose last byte was written, then calls the server's own callback."},
    {NULL, NULL, 0, NULL}};
static PyGetSetDef exchange_properties[] = {{"send", (getter)get_send, (setter)set_send, NULL, NULL},
                                            {NULL, NULL, NULL, NULL, NULL}};
static PyMemberDef exchange_members[] = {
    FIELD(Exchange, T_OBJECT, hook), FIELD(Exchange, T_OBJECT, entry_point), FIELD(Exchange, T_OBJECT, scope),
    FIELD(Exchange, T_OBJECT, request), FIELD(Exchange, T_OBJECT, route), FIELD(Exchange, T_OBJECT, route_error),
    FIELD(Exchange, T_OBJECT, tokens), FIELD(Exchange, T_OBJECT, server_receive),
    FIELD(Exchange, T_OBJECT, server_send), FIELD(Exchange, T_OBJECT, receive), FIELD(Exchange, T_OBJECT, connection),
    FIELD(Exchange, T_OBJECT, root_path), FIELD(Exchange, T_OBJECT, mount_path), FIELD(Exchange, T_OBJECT, on_response),
    FIELD(Exchange, T_LONGLONG, arrived_at), FIELD(Exchange, T_LONGLONG, disconnected_at),
    FIELD(Exchange, T_LONGLONG, completed_at), FIELD(Exchange, T_LONGLONG, started_at),
    FIELD(Exchange, T_LONGLONG, status), FIELD(Exchange, T_BOOL, deferred), FIELD(Exchange, T_BOOL, reached_app),
    FIELD(Exchange, T_BOOL, finishing), FIELD(Exchange, T_BOOL, is_direct), FIELD(Exchange, T_BOOL, is_timed),
    FIELD(Exchange, T_BOOL, is_followed), FIELD(Exchange, T_BOOL, passes), {NULL, 0, 0, 0, NULL}};
static PyType_Slot exchange_slots[] = {{Py_tp_new, PyType_GenericNew}, REFERENCE_SLOTS(Exchange),
                                       {Py_tp_call, send_message},     {Py_tp_methods, exchange_methods},
                                       {Py_tp_members, exchange_members}, {Py_tp_getset, exchange_properties},
                                       {0, NULL}};
static PyType_Spec exchange_spec = {"otel_infer.ringbuffer._native.ExchangeState", sizeof(Exchange), 0,
                                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, exchange_slots};

/* ── what the server or an application awaits ──────────────────────────────────────────────────────────────── */

typedef struct {
    PyObject_HEAD
    EntryPoint *entry_point;  /* NULL once the application was called, with `arguments` */
    PyObject *arguments, *coroutine;
    Exchange *exchange;  /* NULL once the run has ended */
    char is_route;  /* only the exception of a route is recorded */
    char started;  /* the coroutine has run: Python warns of one that has not */
} ExchangeRun;

#define EACH_OF_RUN(DO) DO(entry_point) DO(arguments) DO(coroutine) DO(exchange)

static void end_run(ExchangeRun *self, PyObject *exc)
{
    Exchange *exchange = self->exchange;
    self->exchange = NULL;
    if (exchange == NULL) return;
    if (!self->is_route) end_exchange(exchange, exc);
    else if (exc != NULL && PyObject_IsInstance(exc, PyExc_Exception) == 1) {
        PyObject *done = PyObject_CallMethod((PyObject *)exchange, texts[ROUTE_ERROR], "O", exc);
        if (done == NULL) PyErr_Clear();
        Py_XDECREF(done);
    }
    Py_DECREF((PyObject *)exchange);
}

/* Ends the run with the exception that is being raised; a StopIteration is the end of its coroutine. */
static void end_run_by_error(ExchangeRun *self)
{
    PyObject *type, *exc, *traceback;
    int is_return = PyErr_ExceptionMatches(PyExc_StopIteration);
    PyErr_Fetch(&type, &exc, &traceback);
    PyErr_NormalizeException(&type, &exc, &traceback);
    if (traceback != NULL && exc != NULL) PyException_SetTraceback(exc, traceback);
    end_run(self, is_return ? NULL : exc);
    if (!PyErr_Occurred()) {
        PyErr_Restore(type, exc, traceback);
        return;
    }
    PyObject *new_type, *new_exc, *new_traceback;  /* of a signal handler; `exc` becomes its context */
    PyErr_Fetch(&new_type, &new_exc, &new_traceback);
    PyErr_NormalizeException(&new_type, &new_exc, &new_traceback);
    if (new_exc != NULL && exc != NULL) PyException_SetContext(new_exc, take(exc));
    PyErr_Restore(new_type, new_exc, new_traceback);
    Py_XDECREF(type);
    Py_XDECREF(exc);
    Py_XDECREF(traceback);
}

/* Returns the iterator of an awaitable, whose reference it takes: itself if it is a coroutine. */
static PyObject *get_iterator(PyObject *awaitable)
{
    if (awaitable == NULL || PyType_GetSlot(Py_TYPE(awaitable), Py_am_send) != NULL) return awaitable;
    unaryfunc await = (unaryfunc)PyType_GetSlot(Py_TYPE(awaitable), Py_am_await);
    PyObject *iterator = await == NULL ? NULL : await(awaitable);
    if (await == NULL) PyErr_Format(PyExc_TypeError, "object %R can't be used in 'await' expression", awaitable);
    Py_DECREF(awaitable);
    return iterator;
}

/* Begins the exchange and calls the application, in the context in which it runs. Returns -1 after an exception. */
static int start_run(ExchangeRun *self)
{
    EntryPoint *entry_point = self->entry_point;
    PyObject *arguments = self->arguments;
    self->entry_point = NULL;
    self->arguments = NULL;
    if (entry_point == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the application is being called already, or was closed before");
        return -1;
    }
    PyObject *scope = PyTuple_GetItem(arguments, 0), *awaitable;
    self->exchange = begin_plain(entry_point, scope, PyTuple_GetItem(arguments, 1), PyTuple_GetItem(arguments, 2));
    if (PyErr_Occurred()) awaitable = NULL;
    else if (self->exchange == NULL) awaitable = PyObject_Call(entry_point->call_slowly, arguments, NULL);
    else awaitable = PyObject_CallFunctionObjArgs(entry_point->app, scope, self->exchange->receive,
                                                  (PyObject *)self->exchange, NULL);
    self->coroutine = get_iterator(awaitable);
    Py_DECREF((PyObject *)entry_point);
    Py_DECREF(arguments);
    if (self->coroutine != NULL) return 0;
    end_run_by_error(self);
    return -1;
}

static PySendResult send_to_run(ExchangeRun *self, PyObject *value, PyObject **result)
{
    self->started = 1;
    if (self->coroutine == NULL && start_run(self)) return PYGEN_ERROR;
    PySendResult outcome = PyIter_Send(self->coroutine, value, result);
    if (outcome == PYGEN_ERROR) end_run_by_error(self);
    if (outcome != PYGEN_RETURN) return outcome;
    end_run(self, NULL);
    if (!PyErr_Occurred()) return PYGEN_RETURN;
    Py_CLEAR(*result);
    return PYGEN_ERROR;
}

/* Returns the result of a send as `next` does: a return value as StopIteration. */
static PyObject *return_sent(PySendResult outcome, PyObject *result)
{
    if (outcome != PYGEN_RETURN) return result;
    PyObject *stop = result == Py_None ? PyObject_CallNoArgs(PyExc_StopIteration)
                                       : PyObject_CallFunctionObjArgs(PyExc_StopIteration, result, NULL);
    if (stop != NULL) PyErr_SetObject(PyExc_StopIteration, stop);
    Py_XDECREF(stop);
    Py_DECREF(result);
    return NULL;
}

static PyObject *send_value(ExchangeRun *self, PyObject *value)
{
    PyObject *result = NULL;
    PySendResult outcome = send_to_run(self, value, &result);
    return return_sent(outcome, result);
}

static PyObject *next_of_run(ExchangeRun *self)
{
    return send_value(self, Py_None);
}

/* throw(exception) or throw(type, value, traceback) */
static PyObject *throw_into_run(ExchangeRun *self, PyObject *arguments)
{
    PyObject *throw = self->coroutine == NULL ? NULL : PyObject_GetAttr(self->coroutine, names[THROW]);
    PyObject *result = throw == NULL ? NULL : PyObject_Call(throw, arguments, NULL);
    Py_CLEAR(self->entry_point);  /* nothing begins after a throw */
    if (throw == NULL && PyTuple_Size(arguments) == 0) PyErr_SetString(PyExc_TypeError, "throw takes an exception");
    else if (throw == NULL) {  /* an iterator without `throw`, as the interpreter does */
        PyObject *exc = PyTuple_GetItem(arguments, PyTuple_Size(arguments) > 1 ? 1 : 0);
        PyErr_Clear();
        PyErr_SetObject(PyExceptionInstance_Check(exc) ? (PyObject *)Py_TYPE(exc) : PyTuple_GetItem(arguments, 0), exc);
    }
    Py_XDECREF(throw);
    if (result == NULL) end_run_by_error(self);
    return result;
}

static PyObject *close_run(ExchangeRun *self, PyObject *unused)
{
    (void)unused;
    if (self->coroutine == NULL) {
        Py_CLEAR(self->entry_point);
        Py_RETURN_NONE;
    }
    PyObject *close = PyObject_GetAttr(self->coroutine, names[CLOSE]);
    if (close == NULL && !PyErr_ExceptionMatches(PyExc_AttributeError)) return NULL;
    PyErr_Clear();  /* an iterator without `close` is dropped, as the interpreter does */
    PyObject *closed = close == NULL ? take(Py_None) : PyObject_CallNoArgs(close);
    Py_XDECREF(close);
    if (closed == NULL) { end_run_by_error(self); return NULL; }
    PyObject *exit = self->exchange == NULL ? NULL : PyObject_CallNoArgs(PyExc_GeneratorExit);
    if (exit != NULL) end_run(self, exit);
    Py_XDECREF(exit);
    if (PyErr_Occurred()) Py_CLEAR(closed);
    return closed;
}

static int visit_ExchangeRun(ExchangeRun *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    EACH_OF_RUN(VISIT)
    return 0;
}

/* Ends a run that was dropped before its end. The garbage collector calls it before it clears any object. */
static void finalize_run(ExchangeRun *self)
{
    PyObject *kind, *exc, *traceback;
    if (self->exchange == NULL && (self->entry_point == NULL || self->started)) return;
    PyErr_Fetch(&kind, &exc, &traceback);
    if (self->entry_point != NULL && PyErr_WarnEx(PyExc_RuntimeWarning, "an application was called, but never awaited", 1))
        PyErr_WriteUnraisable(NULL);  /* not `self`, which may have no references any more */
    Py_CLEAR(self->entry_point);
    if (self->started && !self->is_route) {  /* its `finally` blocks run first */
        PyObject *closed = close_run(self, NULL);
        if (closed == NULL) PyErr_WriteUnraisable(self->coroutine);
        Py_XDECREF(closed);
    }
    PyObject *exit = self->exchange == NULL ? NULL : PyObject_CallNoArgs(PyExc_GeneratorExit);
    if (exit != NULL) end_run(self, exit);
    Py_XDECREF(exit);
    if (PyErr_Occurred()) PyErr_WriteUnraisable(NULL);
    PyErr_Restore(kind, exc, traceback);
}

static void free_run(ExchangeRun *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    finalize_run(self);
    EACH_OF_RUN(CLEAR)
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *get_of_coroutine(ExchangeRun *self, PyObject *name)
{
    PyObject *value = PyObject_GenericGetAttr((PyObject *)self, name);
    if (value != NULL || self->coroutine == NULL || !PyErr_ExceptionMatches(PyExc_AttributeError)) return value;
    PyErr_Clear();
    return PyObject_GetAttr(self->coroutine, name);  /* cr_frame, cr_await, __name__, … */
}

static PyObject *coroutine_type;

static PyObject *get_class(ExchangeRun *self, void *unused)
{
    (void)unused;
    return take(self->coroutine == NULL ? coroutine_type : (PyObject *)Py_TYPE(self->coroutine));
}

static PyObject *return_self(PyObject *self)
{
    return take(self);
}

static PyObject *return_self_awaited(PyObject *self, PyObject *unused)
{
    (void)unused;
    return take(self);
}

static PyMethodDef run_methods[] = {
    {"send", (PyCFunction)send_value, METH_O, "send(value): as of a coroutine."},
    {"throw", (PyCFunction)throw_into_run, METH_VARARGS, "throw(exception): as of a coroutine."},
    {"close", (PyCFunction)close_run, METH_NOARGS, "close(): as of a coroutine."},
    {"__await__", (PyCFunction)return_self_awaited, METH_NOARGS, "Returns the run, which is its own iterator."},
    {NULL, NULL, 0, NULL}};
static PyGetSetDef run_properties[] = {  /* `inspect.iscoroutine`, as of the coroutine */
    {"__class__", (getter)get_class, NULL, NULL, NULL}, {NULL, NULL, NULL, NULL, NULL}};
static PyType_Slot run_slots[] = {{Py_tp_dealloc, free_run},          {Py_tp_traverse, visit_ExchangeRun},
                                  {Py_tp_finalize, finalize_run},     {Py_tp_iter, return_self},
                                  {Py_tp_iternext, next_of_run},      {Py_am_await, return_self},
                                  {Py_am_send, send_to_run},          {Py_tp_getattro, get_of_coroutine},
                                  {Py_tp_methods, run_methods},       {Py_tp_getset, run_properties},
                                  {0, NULL}};
static PyType_Spec run_spec = {"otel_infer.ringbuffer._native.ExchangeRun", sizeof(ExchangeRun), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, run_slots};
static PyTypeObject *run_type;

static PyObject *call_app(EntryPoint *self, PyObject *arguments, PyObject *named)
{
    if (self->app == NULL || self->call_slowly == NULL || self->hook == NULL)
        return PyErr_Format(PyExc_RuntimeError, "the entry point has no application");
    if (PyTuple_Size(arguments) != 3 || named != NULL) return PyObject_Call(self->call_slowly, arguments, named);
    ExchangeRun *run = allocate(run_type);
    if (run == NULL) return NULL;
    run->entry_point = (EntryPoint *)take((PyObject *)self);
    run->arguments = take(arguments);
    return (PyObject *)run;
}

static PyMemberDef entry_members[] = {
    FIELD(EntryPoint, T_OBJECT, plain), FIELD(EntryPoint, T_OBJECT, app), FIELD(EntryPoint, T_OBJECT, call_slowly),
    FIELD(EntryPoint, T_OBJECT, hook), FIELD(EntryPoint, T_BOOL, reached_app), FIELD(EntryPoint, T_BOOL, has_tracer),
    FIELD(EntryPoint, T_BOOL, is_watched), {NULL, 0, 0, 0, NULL}};
static PyType_Slot entry_slots[] = {{Py_tp_new, PyType_GenericNew}, REFERENCE_SLOTS(EntryPoint),
                                    {Py_tp_call, call_app},         {Py_tp_members, entry_members},
                                    {0, NULL}};
static PyType_Spec entry_spec = {"otel_infer.ringbuffer._native.EntryPoint", sizeof(EntryPoint), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, entry_slots};

/* ── hooks on the way in ───────────────────────────────────────────────────────────────────────────────────── */

/* Records that the application was reached. Returns whether that is done. */
static int enter_application(Exchange *exchange, PyObject *app)
{
    if (exchange->reached_app) return 1;
    PyObject *root_path = PyObject_GetAttr(app, names[ROOT_PATH]);  /* of a FastAPI */
    int has_root_path = root_path != NULL && PyObject_IsTrue(root_path);
    Py_XDECREF(root_path);
    PyErr_Clear();
    if (has_root_path || exchange->entry_point == NULL) return 0;
    PyObject *context = PyObject_CallNoArgs(exchange->plain->variable_get);
    PyObject *span = context != NULL && PyDict_Check(context)
                         ? PyDict_GetItemWithError(context, exchange->plain->span_key)
                         : NULL;
    int is_own = span != NULL && span == exchange->request;
    Py_XDECREF(context);
    if (!is_own) return 0;
    exchange->reached_app = ((EntryPoint *)exchange->entry_point)->reached_app = 1;
    return 1;
}

static void store_route(Exchange *exchange, PyObject *route, PyObject *scope, int is_included)
{
    PyObject *old = exchange->route, *effective = NULL, *original = NULL;
    if (is_included) {  /* a route of an included router lacks the prefix of its router, FastAPI >= 0.137 */
        PyObject *of_fastapi = PyDict_GetItemWithError(scope, names[FASTAPI]);
        if (of_fastapi != NULL && PyDict_Check(of_fastapi))
            effective = PyDict_GetItemWithError(of_fastapi, names[EFFECTIVE]);
        if (effective != NULL) original = PyObject_GetAttr(effective, names[ORIGINAL]);
    }
    exchange->route = take(original == route ? effective : route);
    Py_XDECREF(original);
    Py_XDECREF(old);
    PyErr_Clear();
}

/* Returns the plain exchange of this scope, as a new reference; NULL without an exception if there is none. */
static Exchange *find_exchange(CompiledHook *self, PyObject *scope)
{
    PlainRequests *plain = (PlainRequests *)self->known;
    PyObject *found = PyDict_CheckExact(scope) ? PyDict_GetItemWithError(scope, plain->scope_key) : NULL;
    int is_plain = found != NULL && Py_TYPE(found) == plain->exchange_type && ((Exchange *)found)->plain != NULL &&
                   !((Exchange *)found)->deferred;
    if (is_plain) Py_INCREF(found);
    if (is_plain && !is_alive(self)) Py_CLEAR(found);
    PyErr_Clear();
    return is_plain ? (Exchange *)found : NULL;
}

/* Returns the exchange if the arguments are those of a plain request: self, scope, receive, send. */
static Exchange *read_arguments(CompiledHook *self, PyObject *arguments, PyObject *named)
{
    return PyTuple_Size(arguments) == 4 && named == NULL ? find_exchange(self, PyTuple_GetItem(arguments, 1)) : NULL;
}

static PyObject *call_application(CompiledHook *self, PyObject *arguments, PyObject *named)
{
    Exchange *exchange = read_arguments(self, arguments, named);
    int is_done = exchange != NULL && enter_application(exchange, PyTuple_GetItem(arguments, 0));
    Py_XDECREF((PyObject *)exchange);
    return PyObject_Call(is_done ? self->original : self->call_slowly, arguments, named);
}

/* Calls a router. Returns what stands for its coroutine, and records its exception. */
static PyObject *call_router(CompiledHook *self, PyObject *arguments, PyObject *named)
{
    Exchange *exchange = read_arguments(self, arguments, named);
    if (exchange == NULL) return PyObject_Call(self->call_slowly, arguments, named);
    PyObject *coroutine = get_iterator(PyObject_Call(self->original, arguments, NULL));
    ExchangeRun *run = coroutine == NULL ? NULL : allocate(run_type);
    if (run == NULL) {
        Py_XDECREF(coroutine);
        Py_DECREF((PyObject *)exchange);
        return NULL;
    }
    run->coroutine = coroutine;
    run->exchange = exchange;
    run->is_route = 1;
    return (PyObject *)run;
}

static PyObject *call_any_route(CompiledHook *self, PyObject *arguments, PyObject *named, int is_included)
{
    Exchange *exchange = read_arguments(self, arguments, named);
    if (exchange == NULL) return PyObject_Call(self->call_slowly, arguments, named);
    store_route(exchange, PyTuple_GetItem(arguments, 0), PyTuple_GetItem(arguments, 1), is_included);
    Py_DECREF((PyObject *)exchange);
    return PyObject_Call(self->original, arguments, named);
}

static PyObject *call_route(CompiledHook *self, PyObject *arguments, PyObject *named)
{
    return call_any_route(self, arguments, named, 0);
}

static PyObject *call_included_route(CompiledHook *self, PyObject *arguments, PyObject *named)
{
    return call_any_route(self, arguments, named, 1);
}

/* uvicorn's protocol, its exception: of a connection whose response, if any, is complete. */
static PyObject *lose_connection(CompiledHook *self, PyObject *arguments, PyObject *named)
{
    PyObject *protocol = PyTuple_Size(arguments) > 0 && named == NULL ? PyTuple_GetItem(arguments, 0) : NULL;
    PyObject *cycle = protocol == NULL ? NULL : PyObject_GetAttr(protocol, names[CYCLE]);
    PyObject *response = cycle == NULL ? NULL : PyObject_GetAttr(cycle, names[RESPONSE]);
    int is_done = response == Py_None;
    if (response != NULL && !is_done) {
        PyObject *complete = PyObject_GetAttr(cycle, names[COMPLETE]);
        is_done = complete == Py_True;
        Py_XDECREF(complete);
    }
    Py_XDECREF(response);
    Py_XDECREF(cycle);
    PyErr_Clear();
    return PyObject_Call(is_done ? self->original : self->call_slowly, arguments, named);
}

const HookPlace asgi_places[] = {{"application", call_application},
                                 {"router", call_router},
                                 {"route", call_route},
                                 {"included route", call_included_route},
                                 {"lost connection", lose_connection},
                                 {NULL, NULL}};

int add_exchange_types(PyObject *module)
{
    if (make_names(names, texts, NAMES)) return -1;
    PyObject *types = PyImport_ImportModule("types");
    coroutine_type = types == NULL ? NULL : PyObject_GetAttrString(types, "CoroutineType");
    Py_XDECREF(types);
    run_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &run_spec, NULL);
    return run_type == NULL || coroutine_type == NULL || add_type(module, "PlainRequests", &plain_spec) ||
                   add_type(module, "EntryPoint", &entry_spec) || add_type(module, "ExchangeState", &exchange_spec)
               ? -1
               : 0;
}
