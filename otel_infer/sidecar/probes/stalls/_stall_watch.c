/* Looks at the rings of one process for what is late, ten times a second, as `conditions.py` describes. In Python a look
 * would cost many cache misses; here it is a few lines of memory. Nothing is written, and what is read may be torn: then
 * the next look is right. */
#include "../../../ringbuffer/_native.h"
#include <errno.h>
#include <signal.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum { PAGE = 4096, CELL_BYTES = 64, CODE_AT = 8 };
enum { LOOP, STEP, REQUEST };  /* `conditions._REASONS` */
enum { MAX_STEP_RINGS = 256, SLOTS = 1 << 12, LIVE_WORDS = 10, THREADS = 64, THREAD_WORDS = 3, REMEMBERED = 64 };
enum { LOOPS = 4, WORD_OFFERED = 17, WORD_THREAD = 16, WORD_LOOPS = 24 };  /* `layout.W_…` */
enum { THREADS_AT = PAGE - THREADS * THREAD_WORDS * 8, LENGTH_AT = 8, RECORD_CODE_AT = 10, INSTANT_AT = 12, STEP_AT = 20 };

typedef struct {
    Py_buffer memory;
    uint64_t cells, next, thread;
    int64_t at, step;
    int is_running;
} StepView;

typedef struct {
    int64_t durations[REMEMBERED];
    int next, count;
} Durations;

typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    StepView steps[MAX_STEP_RINGS];
    int step_rings;
    unsigned long long cells, newest, offered, live_table;
    long long slots, step_floor, call_floor, loop_floor, last_step_at, last_end_at;
    int codes[4];  /* submitted, finished, and two that end a request */
    int scheduled_code;
    uint32_t in_engine[SLOTS];
    uint64_t calls[THREADS], begun[THREADS];
    int64_t left_at[THREADS];
    Durations step_durations, call_durations;
} StallWatch;

static uint64_t load(const Py_buffer *memory, uint64_t at)
{
    uint64_t word;
    memcpy(&word, (const char *)memory->buf + at, sizeof word);
    return word;
}

static void add_duration(Durations *known, int64_t duration)
{
    known->durations[known->next] = duration;
    known->next = (known->next + 1) % REMEMBERED;
    if (known->count < REMEMBERED) known->count++;
}

static int add_found(PyObject *found, int reason, int64_t since, uint64_t thread, uint64_t handle)
{
    PyObject *row = Py_BuildValue("(iLKK)", reason, (long long)since, (unsigned long long)thread, (unsigned long long)handle);
    int failed = row == NULL || PyList_Append(found, row);
    Py_XDECREF(row);
    return failed ? -1 : 0;
}

/* ── requests ──────────────────────────────────────────────────────────────────────────────────────────────── */

static void follow_cell(StallWatch *self, int code, uint32_t handle, int64_t now)
{
    uint32_t *place = &self->in_engine[handle % SLOTS];
    if (code == self->codes[0]) { *place = handle; return; }
    if (code != self->codes[1]) self->last_end_at = now;
    if (*place != handle) return;
    *place = 0;
    if (self->calls[handle % THREADS] == handle) self->left_at[handle % THREADS] = now;
}

static void follow_cells(StallWatch *self, uint64_t read, int64_t now)
{
    if (read > self->newest) self->newest = read;  /* behind a cell that is never written, until it is skipped */
    for (uint64_t left = self->cells; left; left--, self->newest++) {
        uint64_t at = PAGE + self->newest % self->cells * CELL_BYTES;
        if (load(&self->memory, at) != self->newest + 1) return;
        uint64_t word = load(&self->memory, at + CODE_AT);
        for (int i = 0; i < 4; i++)
            if ((int)(word & 0xff) == self->codes[i]) follow_cell(self, self->codes[i], (uint32_t)(word >> 32), now);
    }
}

/* Compares the table of threads with that of the last look: calls that ended, and calls that are late. */
static int look_at_calls(StallWatch *self, int64_t now, PyObject *found)
{
    uint64_t offered = load(&self->memory, WORD_OFFERED * 8), active = 0;
    for (int i = 0; i < THREADS; i++) {
        uint64_t at = THREADS_AT + (uint64_t)i * THREAD_WORDS * 8, handle = load(&self->memory, at);
        uint64_t thread = load(&self->memory, at + 8), since = load(&self->memory, at + 16);
        if (self->calls[i] && (self->calls[i] != handle || self->begun[i] != since))
            add_duration(&self->call_durations, now - (int64_t)self->begun[i]);
        if (self->calls[i] != handle) self->left_at[i] = 0;
        self->calls[i] = handle;
        self->begun[i] = since;
        if (!handle) continue;
        active++;
        int64_t begun = self->left_at[i] > (int64_t)since ? self->left_at[i] : (int64_t)since;
        if (self->in_engine[handle % SLOTS] == handle || now - begun < self->call_floor) continue;
        if (add_found(found, REQUEST, begun, thread, handle)) return -1;
    }
    /* Calls that began and ended between two looks took next to no time. */
    uint64_t unseen = self->offered && offered > self->offered + active ? offered - self->offered - active : 0;
    for (self->offered = offered; unseen && unseen <= (uint64_t)1 << 20; unseen = unseen > REMEMBERED ? REMEMBERED : unseen - 1)
        add_duration(&self->call_durations, 0);
    return 0;
}

static int look_at_loops(StallWatch *self, int64_t now, PyObject *found)
{
    for (int i = 0; i < LOOPS; i++) {
        uint64_t due_at = load(&self->memory, (WORD_LOOPS + 2 * i) * 8);
        if (!due_at || now - (int64_t)due_at < self->loop_floor) continue;
        if (add_found(found, LOOP, (int64_t)due_at, load(&self->memory, (WORD_LOOPS + 2 * i + 1) * 8), 0)) return -1;
    }
    return 0;
}

/* ── steps ─────────────────────────────────────────────────────────────────────────────────────────────────── */

/* Goes to the last record that is written. */
static void follow_records(StallWatch *self, StepView *steps)
{
    for (uint64_t left = steps->cells; left;) {
        uint64_t at = PAGE + steps->next % steps->cells * CELL_BYTES;
        uint16_t length;
        if (load(&steps->memory, at) != steps->next + 1) return;
        const char *record = (const char *)steps->memory.buf + at;
        memcpy(&length, record + LENGTH_AT, sizeof length);
        int code = (unsigned char)record[RECORD_CODE_AT];
        uint64_t taken = code ? (length + CELL_BYTES - 1u) / CELL_BYTES : steps->cells - steps->next % steps->cells;
        if (!taken || taken > left) return;
        if (code) {
            int64_t instant = (int64_t)load(&steps->memory, at + INSTANT_AT), step = (int64_t)load(&steps->memory, at + STEP_AT);
            if (steps->step && step == steps->step + 1 && instant > steps->at && code == self->scheduled_code)
                add_duration(&self->step_durations, instant - steps->at);
            steps->is_running = code == self->scheduled_code;
            if (steps->is_running) { steps->step = step; steps->at = instant; }
            self->last_step_at = instant > self->last_step_at ? instant : self->last_step_at;
        }
        steps->next += taken;
        left -= taken;
    }
}

static int look_at_steps(StallWatch *self, int64_t now, PyObject *found)
{
    for (int i = 0; i < self->step_rings; i++) {
        StepView *steps = &self->steps[i];
        follow_records(self, steps);
        if (!steps->is_running || now - steps->at < self->step_floor) continue;
        if (add_found(found, STEP, steps->at, load(&steps->memory, WORD_THREAD * 8), 0)) return -1;
    }
    return 0;
}

/* ── the type ──────────────────────────────────────────────────────────────────────────────────────────────── */

static PyObject *look(StallWatch *self, PyObject *arguments)
{
    long long now;
    unsigned long long read;
    if (!PyArg_ParseTuple(arguments, "LK", &now, &read)) return NULL;
    PyObject *found = PyList_New(0);
    if (found == NULL) return NULL;
    follow_cells(self, read, now);
    if (look_at_loops(self, now, found) || look_at_steps(self, now, found) || look_at_calls(self, now, found)) Py_CLEAR(found);
    return found;
}

static PyObject *add_steps(StallWatch *self, PyObject *arguments)
{
    StepView steps = {0};
    unsigned long long cells, next;
    if (!PyArg_ParseTuple(arguments, "y*KK", &steps.memory, &cells, &next)) return NULL;
    if (self->step_rings == MAX_STEP_RINGS || !cells || PAGE + cells * CELL_BYTES > (uint64_t)steps.memory.len) {
        PyBuffer_Release(&steps.memory);
        Py_RETURN_FALSE;
    }
    steps.cells = cells;
    steps.next = next;
    self->steps[self->step_rings++] = steps;
    Py_RETURN_TRUE;
}

/* Returns when those requests arrived that are in an engine, or that a thread works for. */
static PyObject *list_arrivals(StallWatch *self, PyObject *unused)
{
    (void)unused;
    PyObject *arrivals = PyList_New(0);
    for (long long slot = 0; arrivals != NULL && slot < self->slots; slot++) {
        uint64_t at = self->live_table + (uint64_t)slot * LIVE_WORDS * 8, handle = load(&self->memory, at) & 0xffffffff;
        if (!handle || (self->in_engine[handle % SLOTS] != handle && self->calls[handle % THREADS] != handle)) continue;
        PyObject *arrived = PyLong_FromLongLong((long long)load(&self->memory, at + 8));
        if (arrived == NULL || PyList_Append(arrivals, arrived)) Py_CLEAR(arrivals);
        Py_XDECREF(arrived);
    }
    return arrivals;
}

static PyObject *list_durations(const Durations *known)
{
    PyObject *list = PyList_New(known->count);
    for (int i = 0; list != NULL && i < known->count; i++) {
        PyObject *duration = PyLong_FromLongLong(known->durations[i]);
        if (duration == NULL || PyList_SetItem(list, i, duration)) Py_CLEAR(list);
    }
    return list;
}

static PyObject *list_step_durations(StallWatch *self, PyObject *unused)
{
    (void)unused;
    return list_durations(&self->step_durations);
}

static PyObject *list_call_durations(StallWatch *self, PyObject *unused)
{
    (void)unused;
    return list_durations(&self->call_durations);
}

static int init_watch(PyObject *object, PyObject *arguments, PyObject *named)
{
    StallWatch *self = (StallWatch *)object;
    (void)named;
    if (!PyArg_ParseTuple(arguments, "y*KKL(iiii)i", &self->memory, &self->cells, &self->live_table, &self->slots, &self->codes[0],
                          &self->codes[1], &self->codes[2], &self->codes[3], &self->scheduled_code)) return -1;
    uint64_t end = self->live_table + (uint64_t)self->slots * LIVE_WORDS * 8;
    if (self->slots < 0 || self->slots > SLOTS || !self->cells || end > (uint64_t)self->memory.len || self->live_table < PAGE + self->cells * CELL_BYTES) {
        PyErr_SetString(PyExc_ValueError, "the sizes of the ring exceed its memory");
        return -1;
    }
    return 0;
}

static void free_watch(PyObject *object)
{
    StallWatch *self = (StallWatch *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyBuffer_Release(&self->memory);
    for (int i = 0; i < self->step_rings; i++) PyBuffer_Release(&self->steps[i].memory);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef watch_methods[] = {
    {"look", (PyCFunction)look, METH_VARARGS, "look(now, read): returns (reason, since, thread, handle) of all that is late."},
    {"add_steps", (PyCFunction)add_steps, METH_VARARGS, "add_steps(memory, cells, next): looks at one more step ring."},
    {"list_arrivals", (PyCFunction)list_arrivals, METH_NOARGS,
     "list_arrivals(): when those requests arrived that are in an engine, or that a thread works for."},
    {"list_step_durations", (PyCFunction)list_step_durations, METH_NOARGS, "list_step_durations(): of the latest steps, ns."},
    {"list_call_durations", (PyCFunction)list_call_durations, METH_NOARGS, "list_call_durations(): of the latest calls, ns."},
    {NULL, NULL, 0, NULL}};
static PyMemberDef watch_members[] = {
    FIELD(StallWatch, T_LONGLONG, step_floor), FIELD(StallWatch, T_LONGLONG, call_floor), FIELD(StallWatch, T_LONGLONG, loop_floor),
    FIELD(StallWatch, T_LONGLONG, last_step_at), FIELD(StallWatch, T_LONGLONG, last_end_at), {NULL, 0, 0, 0, NULL}};
static PyType_Slot watch_slots[] = {{Py_tp_init, init_watch}, {Py_tp_new, PyType_GenericNew}, {Py_tp_dealloc, free_watch},
                                    {Py_tp_methods, watch_methods}, {Py_tp_members, watch_members}, {0, NULL}};
static PyType_Spec watch_spec = {"otel_infer.ringbuffer._native.StallWatch", sizeof(StallWatch), 0, Py_TPFLAGS_DEFAULT, watch_slots};

/* A signal that nothing handles any more does nothing then; Python code can ignore signals in the main thread only. */
static PyObject *ignore_signal(PyObject *module, PyObject *number)
{
    (void)module;
    long wanted = PyLong_AsLong(number);
    if (wanted == -1 && PyErr_Occurred()) return NULL;
    if (signal((int)wanted, SIG_IGN) == SIG_ERR) return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

/* Python has no call for a thread of another process. */
static PyObject *signal_thread(PyObject *module, PyObject *arguments)
{
    int process, thread, number;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "iii", &process, &thread, &number)) return NULL;
#ifdef SYS_tgkill
    if (!syscall(SYS_tgkill, process, thread, number)) Py_RETURN_NONE;
#else
    errno = ENOSYS;
#endif
    return PyErr_SetFromErrno(PyExc_OSError);
}

static PyMethodDef functions[] = {
    {"signal_thread", signal_thread, METH_VARARGS, "signal_thread(process, thread, number): sends a signal to one thread."},
    {"ignore_signal", ignore_signal, METH_O, "ignore_signal(number): ignores a signal, in any thread."},
    {NULL, NULL, 0, NULL}};

int add_stall_types(PyObject *module)
{
    return add_type(module, "StallWatch", &watch_spec) || PyModule_AddFunctions(module, functions) ? -1 : 0;
}
