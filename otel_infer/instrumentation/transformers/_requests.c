/* Records the requests of transformers' servers, as the hooks of `serve.py` and `sequences.py` do in Python, but as C.
 *
 * The frequent case: a request of a server is current, it is recorded, its ids are plain text, and it has one
 * sequence. All else calls the Python hook, which knows all cases. Where that is found after the library's own
 * function has been called, Python code completes the rest (`record_finish`, `DetokenizeSample.estimate_rest`).
 */
#include "../../ringbuffer/_native.h"

/* Codes of `events`, and their fields, which a test checks. */
enum { SUBMITTED = 3, RECEIVED = 4, FINISHED = 10, ATTRIBUTE_SET = 32, OPERATION_NAMED = 43 };
enum { MAX_NAME = 30, SAMPLED_OUTPUTS = 4 };  /* `MAX_NAME`: `request_span.MAX_SHORT_NAME` */

enum {
    ACTIVE, CHILDREN, ENGINE, EOS, GENERATED, GROUP, HANDLE, INITIAL, INITIAL_COUNT, IS_DRIVER, IS_NAMED, IS_OFFLOADED,
    LENGTH, LIMIT, MODEL, NAME, OPERATION, OPERATION_NAMES, PUT, REQUEST_ID, OWN_REQUEST_ID, RESPONSE_ID, SAMPLE,
    SEQUENCES, STATUS, STOP, STREAM_REQUEST, TOTAL_TOKENS, ADDING_GROUP, VARIABLES, NAMES
};
static const char *const texts[NAMES] = {
    "active_requests", "num_children", "engine", "_eos_token_ids", "generated_tokens", "otel_infer",
    "otel_infer_handle", "initial_tokens", "_true_initial_tokens", "is_tp_driver", "is_named", "is_cpu_offloaded",
    "length", "max_new_tokens", "_otel_infer_model", "_name_", "operation", "_operation_names", "put",
    "request_id", "_request_id", "_response_id", "_otel_infer_sample", "num_return_sequences", "status", "stop",
    "_otel_infer", "total_tokens", "group", "__dict__"};
static PyObject *names[NAMES];

typedef struct {
    PyObject_HEAD
    PyTypeObject *request_type, *group_type, *sample_type;
    PyObject *variable, *request_key, *packed_type, *adding, *engine, *operation, *request_id_key, *response_id_key;
    PyObject *remove_from_batch, *record_finish, *cancelled;
} TransformersRequests;

#define EACH_OF_REQUESTS(DO)                                                                                         \
    DO(request_type) DO(group_type) DO(sample_type) DO(variable) DO(request_key) DO(packed_type) DO(adding)      \
    DO(engine) DO(operation) DO(request_id_key) DO(response_id_key) DO(remove_from_batch) DO(record_finish)          \
    DO(cancelled)
DEFINE_REFERENCES(TransformersRequests, EACH_OF_REQUESTS)

/* TransformersRequests(request_type, group_type, sample_type, variable, request_key, packed_type, adding, engine,
 *                      operation, request_id_key, response_id_key, remove_from_batch, record_finish, cancelled) */
static int init_requests(TransformersRequests *self, PyObject *arguments, PyObject *named)
{
    PyObject *given[14];
    (void)named;
    if (self->request_type != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "it is initialized already");
        return -1;
    }
    if (!PyArg_ParseTuple(arguments, "O!O!O!OOOOUUUUOOU", &PyType_Type, &given[0], &PyType_Type, &given[1], &PyType_Type,
                          &given[2], &given[3], &given[4], &given[5], &given[6], &given[7], &given[8], &given[9],
                          &given[10], &given[11], &given[12], &given[13])) return -1;
    int next = 0;
#define SET(field) self->field = (void *)take(given[next++]);
    EACH_OF_REQUESTS(SET)
    return 0;
}

static PyType_Slot requests_slots[] = {{Py_tp_init, init_requests}, {Py_tp_new, PyType_GenericNew},
                                       REFERENCE_SLOTS(TransformersRequests), {0, NULL}};
static PyType_Spec requests_spec = {"otel_infer.ringbuffer._native.TransformersRequests", sizeof(TransformersRequests), 0,
                                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, requests_slots};

/* The timed outputs of one stream (`detokenize_sample.py`). */
typedef struct {
    PyObject_HEAD
    long long tokens, spent_ns;
    PyObject *ns_per_token;
} OutputSums;

#define EACH_OF_SUMS(DO) DO(ns_per_token)
DEFINE_REFERENCES(OutputSums, EACH_OF_SUMS)
static PyMemberDef sums_members[] = {FIELD(OutputSums, T_LONGLONG, tokens), FIELD(OutputSums, T_LONGLONG, spent_ns),
                                     FIELD(OutputSums, T_OBJECT, ns_per_token), {NULL, 0, 0, 0, NULL}};
static PyType_Slot sums_slots[] = {{Py_tp_new, PyType_GenericNew}, REFERENCE_SLOTS(OutputSums),
                                   {Py_tp_members, sums_members}, {0, NULL}};
static PyType_Spec sums_spec = {"otel_infer.ringbuffer._native.OutputSums", sizeof(OutputSums), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, sums_slots};

/* The sequences of one request (`sequence_group.py`). */
typedef struct {
    PyObject_HEAD
    PyObject *request, *packed;
    long long remaining;
    char owns_request, continues;
} GroupState;

#define EACH_OF_GROUP(DO) DO(request) DO(packed)
DEFINE_REFERENCES(GroupState, EACH_OF_GROUP)
static PyMemberDef group_members[] = {FIELD(GroupState, T_OBJECT, request), FIELD(GroupState, T_OBJECT, packed),
                                      FIELD(GroupState, T_LONGLONG, remaining), FIELD(GroupState, T_BOOL, owns_request),
                                      FIELD(GroupState, T_BOOL, continues), {NULL, 0, 0, 0, NULL}};
static PyType_Slot group_slots[] = {{Py_tp_new, PyType_GenericNew}, REFERENCE_SLOTS(GroupState),
                                    {Py_tp_members, group_members}, {0, NULL}};
static PyType_Spec group_spec = {"otel_infer.ringbuffer._native.GroupState", sizeof(GroupState), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, group_slots};

/* ── attributes ────────────────────────────────────────────────────────────────────────────────────────────── */

/* Returns an attribute as a new reference; NULL without an exception if it is missing. */
static PyObject *get(PyObject *owner, int name)
{
    PyObject *value = owner == NULL ? NULL : PyObject_GetAttr(owner, names[name]);
    if (value == NULL) PyErr_Clear();
    return value;
}

/* Returns whether an attribute is this object; a missing one is None. */
static int is(PyObject *owner, int name, PyObject *wanted)
{
    PyObject *value = get(owner, name);
    Py_XDECREF(value);
    return value == wanted || (value == NULL && wanted == Py_None);
}

/* Returns an attribute that is a whole number from 0 to 2**32 - 1; -1 for any other. */
static long long to_count(PyObject *value)
{
    long long number = value != NULL && PyLong_CheckExact(value) ? PyLong_AsLongLong(value) : -1;
    if (number == -1) PyErr_Clear();
    return number > UINT32_MAX ? -1 : number;
}

static long long get_count(PyObject *owner, int name)
{
    PyObject *value = get(owner, name);
    long long number = to_count(value);
    Py_XDECREF(value);
    return number;
}

static int set(PyObject *owner, int name, PyObject *value)
{
    return value == NULL ? -1 : PyObject_SetAttr(owner, names[name], value);
}

/* ── requests ──────────────────────────────────────────────────────────────────────────────────────────────── */

/* Returns the request, as the same reference, if it can be recorded here; else NULL, and the reference is given up. */
static RequestState *take_recorded(TransformersRequests *known, PyObject *found)
{
    if (found == NULL) return NULL;
    if (Py_TYPE(found) == known->request_type && get_ring((RequestState *)found) != NULL) return (RequestState *)found;
    Py_DECREF(found);
    return NULL;
}

/* Returns the current request as a new reference, None if there is none, NULL if Python code must find out. */
static PyObject *find_current(TransformersRequests *known)
{
    PyObject *found = find_current_request(known->variable, known->request_key);
    if (found == NULL || found == Py_None) return found;
    if (Py_TYPE(found) != known->request_type) Py_CLEAR(found);
    else if (((RequestState *)found)->ended) {
        Py_DECREF(found);
        return take(Py_None);
    }
    return found;
}

/* Records an attribute. Returns whether that is done. */
static int record_text(RequestState *request, PyObject *key, PyObject *value)
{
    RequestRing *ring = get_ring(request);
    return ring != NULL && write_attribute(ring, ATTRIBUTE_SET, (uint32_t)request->handle, read_clock(), key, value);
}

/* Records one of the two ids of a request, unless it is unchanged. Returns whether that is done. */
static int record_id(RequestState *request, int name, PyObject *key, PyObject *id)
{
    PyObject *before = get((PyObject *)request, name);
    int is_same = before != NULL && PyUnicode_CheckExact(before) && PyUnicode_CheckExact(id) &&
                  PyUnicode_Compare(before, id) == 0;
    Py_XDECREF(before);
    if (is_same) return 1;
    return record_text(request, key, id) && !set((PyObject *)request, name, id);
}

/* ── arrival ───────────────────────────────────────────────────────────────────────────────────────────────── */

/* self, body, request_id; `details`: the operation, and the prefix of the response id. */
static PyObject *handle_request(CompiledHook *self, PyObject *arguments, PyObject *named)
{
    TransformersRequests *known = (TransformersRequests *)self->known;
    PyObject *id = PyTuple_Size(arguments) == 3 && named == NULL ? PyTuple_GetItem(arguments, 2) : NULL;
    PyObject *current = id != NULL && PyUnicode_CheckExact(id) && is_alive(self) ? find_current(known) : NULL;
    if (current == Py_None) {
        Py_DECREF(current);
        return PyObject_Call(self->original, arguments, named);
    }
    RequestState *request = take_recorded(known, current);
    PyObject *response_id = request == NULL ? NULL : PyUnicode_Concat(PyTuple_GetItem(self->details, 1), id);
    int is_done = response_id != NULL && record_id(request, RESPONSE_ID, known->response_id_key, response_id) &&
                  !set((PyObject *)request, OPERATION, PyTuple_GetItem(self->details, 0));
    Py_XDECREF(response_id);
    Py_XDECREF((PyObject *)request);
    PyErr_Clear();
    return PyObject_Call(is_done ? self->original : self->call_slowly, arguments, named);
}

/* A submission whose parts are known to be plain. */
typedef struct {
    RequestState *request;
    PyObject *names;  /* operation, engine, model; NULL if they are recorded already */
    uint32_t ids[4];  /* of those names, and of the engine */
    uint32_t tokens, limit;
} Submission;

static int is_short(PyObject *text)
{
    return text != NULL && PyUnicode_CheckExact(text) && PyUnicode_GetLength(text) <= MAX_NAME;
}

/* Finds the names of a request that has none. Returns whether they are plain. */
static int find_names(TransformersRequests *known, PyObject *manager, Submission *made)
{
    if (is((PyObject *)made->request, IS_NAMED, Py_True)) return 1;
    PyObject *model = get(manager, MODEL), *own = get((PyObject *)made->request, OPERATION);
    PyObject *operation = own != NULL && PyUnicode_CheckExact(own) && PyUnicode_GetLength(own) ? own : known->operation;
    if (is_short(model) && is_short(operation)) made->names = PyTuple_Pack(3, operation, known->engine, model);
    PyObject *before = get((PyObject *)made->request, OPERATION_NAMES);
    int is_new = made->names != NULL && before != NULL && PyObject_RichCompareBool(made->names, before, Py_NE) == 1;
    Py_XDECREF(before);
    Py_XDECREF(model);
    Py_XDECREF(own);
    return is_new;
}

/* Returns whether the texts of a submission have ids, which may run Python code, and the request is still recorded. */
static int intern_names(TransformersRequests *known, Submission *made)
{
    RequestRing *ring = (RequestRing *)take((PyObject *)get_ring(made->request));
    int failed = ring == NULL || intern_text(ring, known->engine, &made->ids[3]);
    for (int i = 0; i < 3 && !failed && made->names != NULL; i++)
        failed = intern_text(ring, PyTuple_GetItem(made->names, i), &made->ids[i]);
    failed = failed || get_ring(made->request) != ring;
    Py_XDECREF((PyObject *)ring);
    return !failed;
}

static void write_submission(Submission *made)
{
    RequestRing *ring = get_ring(made->request);
    uint32_t handle = (uint32_t)made->request->handle, sequences = 1;
    if (ring == NULL) return;  /* retired since: the garbage collector may have run Python code in `make_group` */
    int64_t at = read_clock();
    char body[40] = {0};
    memcpy(body, &at, 8);
    if (made->names != NULL) {
        memcpy(body + 8, made->ids, 12);
        write_cell(ring, OPERATION_NAMED, handle, body);
    }
    memcpy(body + 8, &sequences, 4);
    memcpy(body + 12, &made->tokens, 4);
    memcpy(body + 16, &made->limit, 4);
    memcpy(body + 20, &made->ids[3], 4);
    write_cell(ring, SUBMITTED, handle, body);
}

/* Stores what the Python code of a request reads later. Returns -1 after an exception. */
static int store_submission(TransformersRequests *known, Submission *made)
{
    PyObject *request = (PyObject *)made->request;
    if (made->names != NULL && (set(request, IS_NAMED, Py_True) || set(request, OPERATION_NAMES, made->names))) return -1;
    return set(request, ENGINE, known->engine);
}

/* Returns the group of the one sequence of a request (`sequence_group.SequenceGroup`). */
static PyObject *make_group(TransformersRequests *known, RequestState *request)
{
    uint32_t handle = (uint32_t)request->handle;
    PyObject *packed = PyObject_CallFunction(known->packed_type, "y#", (const char *)&handle, (Py_ssize_t)4);
    GroupState *group = packed == NULL ? NULL : allocate(known->group_type);
    if (group == NULL) {
        Py_XDECREF(packed);
        return NULL;
    }
    group->request = take((PyObject *)request);
    group->packed = packed;
    group->remaining = 1;
    return (PyObject *)group;
}

/* Records a submission. Returns its group, NULL if Python code must do it. */
static PyObject *submit(TransformersRequests *known, PyObject *manager, PyObject *prompt, PyObject *limit)
{
    Submission made = {0};
    PyObject *group = NULL;
    long long most = to_count(limit);
    if (!PyList_CheckExact(prompt) || most < 0 || get_count(manager, SEQUENCES) != 1 ||
        !is(manager, IS_DRIVER, Py_True)) return NULL;
    made.request = take_recorded(known, find_current(known));
    made.tokens = (uint32_t)PyList_Size(prompt);
    made.limit = (uint32_t)most;
    if (made.request != NULL && find_names(known, manager, &made) && intern_names(known, &made)) {
        group = make_group(known, made.request);
        if (group != NULL && store_submission(known, &made)) Py_CLEAR(group);
        if (group != NULL) write_submission(&made);
    }
    Py_XDECREF(made.names);
    Py_XDECREF((PyObject *)made.request);
    return group;
}

/* self, input_ids, …, max_new_tokens=… */
static PyObject *add_request(CompiledHook *self, PyObject *arguments, PyObject *named)
{
    TransformersRequests *known = (TransformersRequests *)self->known;
    PyObject *limit = named == NULL ? NULL : PyDict_GetItemWithError(named, names[LIMIT]), *group = NULL;
    if (limit != NULL && PyTuple_Size(arguments) == 2 && is_alive(self))
        group = submit(known, PyTuple_GetItem(arguments, 0), PyTuple_GetItem(arguments, 1), limit);
    if (keep_interrupt()) {
        Py_XDECREF(group);
        return NULL;
    }
    if (group == NULL || set(known->adding, ADDING_GROUP, group)) {
        PyErr_Clear();
        Py_XDECREF(group);
        return PyObject_Call(self->call_slowly, arguments, named);
    }
    Py_DECREF(group);
    PyObject *accepted = PyObject_Call(self->original, arguments, named), *type, *exc, *traceback;
    PyErr_Fetch(&type, &exc, &traceback);
    if (set(known->adding, ADDING_GROUP, Py_None)) PyErr_Clear();
    PyErr_Restore(type, exc, traceback);
    return accepted;
}

/* Binds a state to the group of this thread. Returns -1 after an exception. */
static int bind_state(TransformersRequests *known, PyObject *state, GroupState *group)
{
    PyObject *request = group->request, *id = PyObject_GetAttr(state, names[REQUEST_ID]), *done = NULL;
    if (id == NULL || request == NULL || set(state, GROUP, (PyObject *)group) || set(state, HANDLE, group->packed)) {
        Py_XDECREF(id);
        return -1;
    }
    if (Py_TYPE(request) == known->request_type &&
        record_id((RequestState *)request, OWN_REQUEST_ID, known->request_id_key, id)) done = take(Py_None);
    else {
        PyObject *text = PyObject_Str(id);
        done = text == NULL ? NULL : PyObject_CallMethod(request, "set_request_id", "O", text);
        Py_XDECREF(text);
    }
    Py_XDECREF(done);
    Py_DECREF(id);
    return done == NULL ? -1 : 0;
}

/* self */
static PyObject *post_init(CompiledHook *self, PyObject *arguments, PyObject *named)
{
    TransformersRequests *known = (TransformersRequests *)self->known;
    PyObject *group = PyTuple_Size(arguments) == 1 && named == NULL ? get(known->adding, ADDING_GROUP) : NULL;
    if (group == NULL || Py_TYPE(group) != known->group_type) {
        Py_XDECREF(group);
        return PyObject_Call(self->call_slowly, arguments, named);
    }
    PyObject *result = PyObject_Call(self->original, arguments, named);
    if (result != NULL && is_alive(self))
        result = return_after(self, result, bind_state(known, PyTuple_GetItem(arguments, 0), (GroupState *)group));
    Py_DECREF(group);
    return result;
}

/* Returns the group of a state, as a new reference, if it has one whose sequences all stay in their first states. */
static GroupState *get_group(TransformersRequests *known, PyObject *state)
{
    PyObject *group = get(state, GROUP);
    if (group == NULL || (Py_TYPE(group) == known->group_type && !((GroupState *)group)->continues))
        return (GroupState *)group;
    Py_DECREF(group);
    return NULL;
}

/* Scheduler, state */
static PyObject *add_waiting(CompiledHook *self, PyObject *arguments, PyObject *named)
{
    TransformersRequests *known = (TransformersRequests *)self->known;
    PyObject *state = PyTuple_Size(arguments) == 2 && named == NULL ? PyTuple_GetItem(arguments, 1) : NULL;
    GroupState *group = get_group(known, state);
    RequestState *request = NULL;
    if (group != NULL && is_alive(self) && is(state, IS_OFFLOADED, Py_False))
        request = take_recorded(known, take(group->request));
    if (request != NULL) {
        int64_t at = read_clock();
        char body[40] = {0};
        memcpy(body, &at, 8);
        write_cell(get_ring(request), RECEIVED, (uint32_t)request->handle, body);
    }
    PyObject *result = PyObject_Call(request == NULL ? self->call_slowly : self->original, arguments, named);
    Py_XDECREF((PyObject *)group);
    Py_XDECREF((PyObject *)request);
    return result;
}

/* ── end of a sequence ─────────────────────────────────────────────────────────────────────────────────────── */

/* Returns whether the state has all its tokens. */
static int is_finished(PyObject *state)
{
    PyObject *status = get(state, STATUS), *name = get(status, NAME);
    int is_over = name != NULL && PyUnicode_Check(name) && PyUnicode_CompareWithASCIIString(name, "FINISHED") == 0;
    Py_XDECREF(status);
    Py_XDECREF(name);
    return is_over;
}

/* Reads why a sequence ended and how many tokens it has. Returns whether that is done. */
static int read_end(PyObject *state, PyObject **reason, long long *tokens)
{
    PyObject *generated = get(state, GENERATED), *initial = get(state, INITIAL), *ends = get(state, EOS);
    long long before = get_count(state, INITIAL_COUNT);
    int is_known = generated != NULL && PyList_CheckExact(generated) && initial != NULL && PyList_CheckExact(initial) &&
                   ends != NULL && PySet_Check(ends) && before >= 0;
    if (is_known) {
        Py_ssize_t count = PyList_Size(generated);
        int is_end = count ? PySet_Contains(ends, PyList_GetItem(generated, count - 1)) : 0;
        *reason = names[is_end ? STOP : LENGTH];
        *tokens = count + (before ? PyList_Size(initial) - before : 0);
        is_known = is_end >= 0 && *tokens >= 0 && *tokens <= UINT32_MAX;
    }
    Py_XDECREF(generated);
    Py_XDECREF(initial);
    Py_XDECREF(ends);
    return is_known;
}

static int write_end(RequestState *request, PyObject *reason, long long count)
{
    RequestRing *ring = (RequestRing *)take((PyObject *)get_ring(request));
    uint32_t id, tokens = (uint32_t)count;
    int64_t at = read_clock();
    char body[40] = {0};
    int failed = ring == NULL || intern_text(ring, reason, &id) || get_ring(request) != ring;
    if (!failed) {
        memcpy(body, &at, 8);
        memcpy(body + 8, &id, 4);
        memcpy(body + 12, &tokens, 4);
        write_cell(ring, FINISHED, (uint32_t)request->handle, body);
    }
    Py_XDECREF((PyObject *)ring);
    return !failed;
}

/* Records the end of a sequence of a server's request. Returns whether that is done. An exception is set only if a signal
 * handler raised it. */
static int record_end(TransformersRequests *known, PyObject *state)
{
    PyObject *reason;
    long long tokens, children;
    GroupState *group = get_group(known, state);
    RequestState *request = NULL;
    int is_done = 0;
    if (group != NULL && !group->owns_request && is_finished(state))
        request = take_recorded(known, take(group->request));
    if (request != NULL && (children = get_count(state, CHILDREN)) >= 0 && read_end(state, &reason, &tokens) &&
        write_end(request, reason, tokens)) {
        group->remaining -= 1 + children;
        is_done = !set(state, GROUP, Py_None);
    }
    Py_XDECREF((PyObject *)request);
    Py_XDECREF((PyObject *)group);
    (void)keep_interrupt();
    return is_done;
}

/* Scheduler, request_id */
static PyObject *finish_request(CompiledHook *self, PyObject *arguments, PyObject *named)
{
    TransformersRequests *known = (TransformersRequests *)self->known;
    PyObject *scheduler = PyTuple_Size(arguments) == 2 && named == NULL ? PyTuple_GetItem(arguments, 0) : NULL;
    PyObject *active = scheduler != NULL && is_alive(self) ? get(scheduler, ACTIVE) : NULL;
    PyObject *state = active != NULL && PyDict_CheckExact(active)
                          ? take(PyDict_GetItemWithError(active, PyTuple_GetItem(arguments, 1)))
                          : NULL;
    Py_XDECREF(active);
    PyErr_Clear();
    if (state == NULL) return PyObject_Call(self->call_slowly, arguments, named);
    PyObject *result = PyObject_Call(self->original, arguments, named);
    if (result != NULL) {
        PyObject *done = PyObject_CallFunctionObjArgs(known->remove_from_batch, scheduler, state, NULL);
        int failed = done == NULL;
        Py_XDECREF(done);
        if (!failed && !record_end(known, state)) {
            done = PyErr_Occurred() ? NULL : PyObject_CallFunctionObjArgs(known->record_finish, state, NULL);
            failed = done == NULL;
            Py_XDECREF(done);
        }
        result = return_after(self, result, failed);
    }
    Py_DECREF(state);
    return result;
}

/* ── streamers ─────────────────────────────────────────────────────────────────────────────────────────────── */

static int bind_streamer(TransformersRequests *known, PyObject *streamer, PyObject *request)
{
    OutputSums *sample = allocate(known->sample_type);
    if (sample == NULL) return -1;
    sample->ns_per_token = PyList_New(0);
    int failed = sample->ns_per_token == NULL || set(streamer, STREAM_REQUEST, request) ||
                 set(streamer, SAMPLE, (PyObject *)sample);
    Py_DECREF((PyObject *)sample);
    return failed ? -1 : 0;
}

/* Returns the sample of a streamer as a new reference; NULL after an exception. */
static OutputSums *get_sample(TransformersRequests *known, PyObject *streamer)
{
    PyObject *sample = PyObject_GetAttr(streamer, names[SAMPLE]);
    if (sample == NULL || (Py_TYPE(sample) == known->sample_type && ((OutputSums *)sample)->ns_per_token != NULL &&
                           PyList_CheckExact(((OutputSums *)sample)->ns_per_token))) return (OutputSums *)sample;
    Py_DECREF(sample);
    PyErr_SetString(PyExc_TypeError, "the sample of a streamer is no sample");
    return NULL;
}

static PyObject *init_streamer(CompiledHook *self, PyObject *arguments, PyObject *named)
{
    TransformersRequests *known = (TransformersRequests *)self->known;
    PyObject *request = PyTuple_Size(arguments) > 0 && is_alive(self) ? find_current(known) : NULL;
    if (request == NULL) return PyObject_Call(self->call_slowly, arguments, named);
    PyObject *result = PyObject_Call(self->original, arguments, named);
    if (result != NULL)
        result = return_after(self, result, bind_streamer(known, PyTuple_GetItem(arguments, 0), request));
    Py_DECREF(request);
    return result;
}

/* Lets further outputs reach the library's own function, unless the streamer has another `put` than this hook. */
static int release_put(CompiledHook *self, PyObject *streamer)
{
    PyObject *own = get((PyObject *)Py_TYPE(streamer), PUT);
    int is_own = own == (PyObject *)self;
    Py_XDECREF(own);
    if (!is_own) return 0;
    PyObject *method = PyObject_CallFunctionObjArgs(self->bind, self->original, streamer, NULL);
    int failed = set(streamer, PUT, method);
    Py_XDECREF(method);
    return failed;
}

/* Adds a timed output to the sample, and records the first token. Returns -1 after an exception. */
static int add_output(CompiledHook *self, PyObject *streamer, RequestState *request, int64_t started_at)
{
    OutputSums *sample = get_sample((TransformersRequests *)self->known, streamer);
    PyObject *total = sample == NULL ? NULL : PyObject_GetAttr(streamer, names[TOTAL_TOKENS]), *ns = NULL;
    long long tokens = total == NULL ? -1 : PyLong_AsLongLong(total);
    int failed = total == NULL || PyErr_Occurred();
    if (!failed && tokens > sample->tokens) {  /* the first `put` may be the prompt */
        failed = mark_token_reached(request);
        int64_t spent_ns = read_clock() - started_at;
        if (!failed) ns = PyFloat_FromDouble((double)spent_ns / (double)(tokens - sample->tokens));
        failed = failed || ns == NULL || PyList_Append(sample->ns_per_token, ns);
        if (!failed) {
            sample->spent_ns += spent_ns;
            sample->tokens = tokens;
            if (PyList_Size(sample->ns_per_token) >= SAMPLED_OUTPUTS) failed = release_put(self, streamer);
        }
    }
    Py_XDECREF((PyObject *)sample);
    Py_XDECREF(total);
    Py_XDECREF(ns);
    return failed ? -1 : 0;
}

/* Stores the type of the exception that a streamer raised, unless it was cancelled. The exception stays set. */
static void keep_error(TransformersRequests *known, RequestState *request)
{
    PyObject *type, *exc, *traceback;
    PyErr_Fetch(&type, &exc, &traceback);
    if (type != NULL && PyErr_GivenExceptionMatches(type, PyExc_Exception)) {
        PyObject *name = PyObject_GetAttrString(type, "__name__"), *qualified = PyObject_GetAttrString(type, "__qualname__");
        if (name != NULL && qualified != NULL && PyUnicode_Compare(name, known->cancelled) != 0) {
            PyObject *done = PyObject_CallMethod((PyObject *)request, "set_engine_error", "O", qualified);
            Py_XDECREF(done);
        }
        Py_XDECREF(name);
        Py_XDECREF(qualified);
        PyErr_Clear();
    }
    PyErr_Restore(type, exc, traceback);
}

/* Streamer, value */
static PyObject *put_output(CompiledHook *self, PyObject *arguments, PyObject *named)
{
    TransformersRequests *known = (TransformersRequests *)self->known;
    PyObject *streamer = PyTuple_Size(arguments) == 2 && named == NULL ? PyTuple_GetItem(arguments, 0) : NULL;
    RequestState *request = streamer == NULL ? NULL : take_recorded(known, get(streamer, STREAM_REQUEST));
    if (request == NULL || !is_alive(self)) {
        Py_XDECREF((PyObject *)request);
        return PyObject_Call(self->call_slowly, arguments, named);
    }
    int64_t started_at = read_clock();
    PyObject *result = PyObject_Call(self->original, arguments, named);
    if (result == NULL) keep_error(known, request);
    else result = return_after(self, result, add_output(self, streamer, request, started_at));
    Py_DECREF((PyObject *)request);
    return result;
}

/* Returns the median of the sample; -1 if it is not plain. */
static double find_median(PyObject *outputs)
{
    double sorted[SAMPLED_OUTPUTS];
    Py_ssize_t count = PyList_Size(outputs);
    if (count == 0 || count > SAMPLED_OUTPUTS) return -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *output = PyList_GetItem(outputs, i);
        double ns = PyFloat_CheckExact(output) ? PyFloat_AsDouble(output) : -1;
        Py_ssize_t to = i;
        if (!(ns >= 0)) return -1;
        for (; to > 0 && sorted[to - 1] > ns; to--) sorted[to] = sorted[to - 1];
        sorted[to] = ns;
    }
    return count % 2 ? sorted[count / 2] : (sorted[count / 2 - 1] + sorted[count / 2]) / 2;
}

/* Returns the estimated time of the tokens of a stream that were not timed; -1 after an exception. */
static long long estimate_rest(OutputSums *sample, PyObject *total)
{
    long long tokens = to_count(total);
    double median = find_median(sample->ns_per_token);
    if (median >= 0 && tokens >= sample->tokens) return round_half_even((double)(tokens - sample->tokens) * median);
    PyObject *estimated = PyObject_CallMethod((PyObject *)sample, "estimate_rest", "O", total);
    long long rest = estimated == NULL ? -1 : PyLong_AsLongLong(estimated);
    Py_XDECREF(estimated);
    return rest;
}

/* Adds the estimated time of detokenizing to the request. Returns -1 after an exception. */
static int add_detokenizing(TransformersRequests *known, PyObject *streamer, RequestState *request)
{
    OutputSums *sample = get_sample(known, streamer);
    PyObject *total = sample == NULL ? NULL : PyObject_GetAttr(streamer, names[TOTAL_TOKENS]);
    long long rest = total == NULL ? -1 : estimate_rest(sample, total);
    int failed = total == NULL || PyErr_Occurred();
    if (!failed) request->detokenize_ns += sample->spent_ns + rest;
    Py_XDECREF((PyObject *)sample);
    Py_XDECREF(total);
    return failed ? -1 : 0;
}

/* Streamer */
static PyObject *end_stream(CompiledHook *self, PyObject *arguments, PyObject *named)
{
    TransformersRequests *known = (TransformersRequests *)self->known;
    PyObject *streamer = PyTuple_Size(arguments) == 1 && named == NULL ? PyTuple_GetItem(arguments, 0) : NULL;
    RequestState *request = streamer == NULL ? NULL : take_recorded(known, get(streamer, STREAM_REQUEST));
    PyObject *variables = request == NULL ? NULL : get(streamer, VARIABLES);
    if (variables == NULL || !PyDict_CheckExact(variables)) {
        Py_XDECREF(variables);
        Py_XDECREF((PyObject *)request);
        return PyObject_Call(self->call_slowly, arguments, named);
    }
    if (PyDict_DelItem(variables, names[PUT])) PyErr_Clear();  /* it refers to the streamer */
    Py_DECREF(variables);
    PyObject *result = PyObject_Call(self->original, arguments, named);
    if (result != NULL && is_alive(self)) result = return_after(self, result, add_detokenizing(known, streamer, request));
    Py_DECREF((PyObject *)request);
    return result;
}

const HookPlace transformers_places[] = {{"handle request", handle_request}, {"add request", add_request},
                                         {"state", post_init},               {"add waiting request", add_waiting},
                                         {"finish request", finish_request}, {"streamer", init_streamer},
                                         {"put", put_output},                {"end", end_stream},
                                         {NULL, NULL}};

int add_transformers_types(PyObject *module)
{
    if (make_names(names, texts, NAMES)) return -1;
    return PyModule_AddIntMacro(module, SAMPLED_OUTPUTS) || PyModule_AddIntConstant(module, "MAX_SHORT_NAME", MAX_NAME) ||
           add_type(module, "OutputSums", &sums_spec) || add_type(module, "GroupState", &group_spec) ||
           add_type(module, "TransformersRequests", &requests_spec) ? -1 : 0;
}
