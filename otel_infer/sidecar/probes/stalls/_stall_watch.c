/* Looks at the rings of a process for what is late, as `conditions.py` describes, and sleeps between two looks. In Python a
 * look would cost many cache misses; here it is a few lines of memory, without the GIL. Nothing is written, and what is
 * read may be torn: then the next look is right. */
#include "../../../ringbuffer/_native.h"
#include <errno.h>
#include <stdlib.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum { PAGE = 4096, CELL_BYTES = 64, CODE_AT = 8 };
enum { LOOP, STEP, REQUEST };  /* `conditions._REASONS` */
enum { MAX_STEP_RINGS = 256, SLOTS = 1 << 12, LIVE_WORDS = 10, THREADS = 64, THREAD_WORDS = 3, REMEMBERED = 64 };
enum { REPEATED = 4, MAX_ROWS = 64, MAX_WATCHES = 256 };
enum { LOOPS = 4, WORD_OFFERED = 17, WORD_THREAD = 16, WORD_LOOPS = 24 };  /* `layout.W_…` */
enum { THREADS_AT = PAGE - THREADS * THREAD_WORDS * 8, LENGTH_AT = 8, RECORD_CODE_AT = 10, INSTANT_AT = 12, STEP_AT = 20 };

static const int64_t MS = 1000000, SECOND = 1000000000;
#define LOOP_LATE (25 * MS)
#define LATE (250 * MS)
#define SHORT_LATE (50 * MS)
#define REPEATED_WITHIN (30 * SECOND)
#define AGAIN (1 * SECOND)
enum { USUAL_FACTOR = 4, QUIET_FACTOR = 2 };

/* A delay that was reported: its begin, when it is reported again if it lasts, and the time until then. */
typedef struct {
    int64_t since, again_at, wait;
} Reported;

typedef struct {
    Py_buffer memory;
    uint64_t cells, next, thread;
    int64_t at, step;
    int is_running;
    Reported reported;
} StepView;

typedef struct {
    int64_t durations[REMEMBERED];
    int next, count;
    int64_t delayed_at[REPEATED];  /* when something took longer than `SHORT_LATE`, the latest times */
    int next_delayed;
} Durations;

/* What is late: `conditions.Stall`. */
typedef struct {
    int reason;
    int64_t since;
    uint64_t thread, handle;
} Row;

typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    StepView steps[MAX_STEP_RINGS];
    int step_rings;
    unsigned long long cells, read, newest, offered, live_table;
    long long slots, last_step_at, last_end_at;
    int codes[4];  /* submitted, finished, and two that end a request */
    int scheduled_code;
    uint32_t in_engine[SLOTS];
    uint64_t calls[THREADS], begun[THREADS];
    int64_t left_at[THREADS];
    Reported reported_calls[THREADS], reported_loops[LOOPS];
    Durations step_durations, call_durations;
    Row rows[MAX_ROWS];
    int row_count, is_quiet;  /* quiet: what is late is not reported now */
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

/* ── what is late ──────────────────────────────────────────────────────────────────────────────────────────── */

static int compare_times(const void *one, const void *other)
{
    int64_t a = *(const int64_t *)one, b = *(const int64_t *)other;
    return (a > b) - (a < b);
}

/* Returns what it usually takes: the shortest tenth of the latest durations, in which nothing was late. */
static int64_t find_usual(const Durations *known)
{
    int64_t sorted[REMEMBERED];
    memcpy(sorted, known->durations, sizeof sorted);
    qsort(sorted, (size_t)known->count, sizeof *sorted, compare_times);
    return known->count ? sorted[known->count / 10] : 0;
}

/* Returns whether something that takes so long until now is late. `has_usual`: whether its usual time counts. */
static int is_late(Durations *known, int has_usual, int64_t duration, int64_t now)
{
    if (duration < SHORT_LATE) return 0;
    int64_t usual_limit = has_usual ? USUAL_FACTOR * find_usual(known) : 0;
    if (duration < usual_limit) return 0;
    known->delayed_at[known->next_delayed] = now;
    known->next_delayed = (known->next_delayed + 1) % REPEATED;
    int64_t oldest = known->delayed_at[known->next_delayed];
    return duration >= LATE || (oldest && now - oldest < REPEATED_WITHIN);
}

/* Returns whether a delay is not reported now: it has been, or nothing is. */
static int is_skipped(const StallWatch *self, const Reported *reported, int64_t since, int64_t now)
{
    return self->is_quiet || (reported->since == since && now < reported->again_at);
}

static void report(StallWatch *self, Reported *reported, Row row, int64_t now)
{
    if (self->row_count == MAX_ROWS) return;
    reported->wait = reported->since == row.since ? 2 * reported->wait : AGAIN;
    reported->since = row.since;
    reported->again_at = now + reported->wait;
    self->rows[self->row_count++] = row;
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
static void look_at_calls(StallWatch *self, int64_t now)
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
        if (self->in_engine[handle % SLOTS] == handle || is_skipped(self, &self->reported_calls[i], begun, now)) continue;
        /* Before an engine, no usual time is long: what a request waits for every time is to be named as well. */
        if (is_late(&self->call_durations, !self->step_rings, now - begun, now))
            report(self, &self->reported_calls[i], (Row){REQUEST, begun, thread, handle}, now);
    }
    /* Calls that began and ended between two looks took next to no time. */
    uint64_t unseen = self->offered && offered > self->offered + active ? offered - self->offered - active : 0;
    for (self->offered = offered; unseen && unseen <= (uint64_t)1 << 20; unseen = unseen > REMEMBERED ? REMEMBERED : unseen - 1)
        add_duration(&self->call_durations, 0);
}

static void look_at_loops(StallWatch *self, int64_t now)
{
    for (int i = 0; i < LOOPS; i++) {
        uint64_t due_at = load(&self->memory, (WORD_LOOPS + 2 * i) * 8);
        if (!due_at || now - (int64_t)due_at < LOOP_LATE || is_skipped(self, &self->reported_loops[i], (int64_t)due_at, now)) continue;
        Row row = {LOOP, (int64_t)due_at, load(&self->memory, (WORD_LOOPS + 2 * i + 1) * 8), 0};
        report(self, &self->reported_loops[i], row, now);
    }
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

static void look_at_steps(StallWatch *self, int64_t now)
{
    for (int i = 0; i < self->step_rings; i++) {
        StepView *steps = &self->steps[i];
        follow_records(self, steps);
        if (!steps->is_running || is_skipped(self, &steps->reported, steps->at, now)) continue;
        if (is_late(&self->step_durations, 1, now - steps->at, now))
            report(self, &steps->reported, (Row){STEP, steps->at, load(&steps->memory, WORD_THREAD * 8), 0}, now);
    }
}

static void look_at_all(StallWatch *self, int64_t now)
{
    follow_cells(self, self->read, now);
    look_at_loops(self, now);
    look_at_steps(self, now);
    look_at_calls(self, now);
}

/* ── the type ──────────────────────────────────────────────────────────────────────────────────────────────── */

static PyObject *look(StallWatch *self, PyObject *instant)
{
    long long now = PyLong_AsLongLong(instant);
    if (now == -1 && PyErr_Occurred()) return NULL;
    look_at_all(self, now);
    Py_RETURN_NONE;
}

/* Returns what was found late, once. */
static PyObject *take_rows(StallWatch *self, PyObject *unused)
{
    (void)unused;
    PyObject *rows = PyList_New(self->row_count);
    for (int i = 0; rows != NULL && i < self->row_count; i++) {
        const Row *row = &self->rows[i];
        PyObject *taken = Py_BuildValue("(iLKK)", row->reason, (long long)row->since, (unsigned long long)row->thread,
                                        (unsigned long long)row->handle);
        if (taken == NULL || PyList_SetItem(rows, i, taken)) Py_CLEAR(rows);
    }
    self->row_count = 0;
    return rows;
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
    {"look", (PyCFunction)look, METH_O, "look(now): looks once at everything."},
    {"take_rows", (PyCFunction)take_rows, METH_NOARGS,
     "take_rows(): returns (reason, since, thread, handle) of what was found late and not taken."},
    {"add_steps", (PyCFunction)add_steps, METH_VARARGS, "add_steps(memory, cells, next): looks at one more step ring."},
    {"list_arrivals", (PyCFunction)list_arrivals, METH_NOARGS,
     "list_arrivals(): when those requests arrived that are in an engine, or that a thread works for."},
    {NULL, NULL, 0, NULL}};
static PyMemberDef watch_members[] = {
    FIELD(StallWatch, T_ULONGLONG, read), FIELD(StallWatch, T_LONGLONG, last_step_at), FIELD(StallWatch, T_LONGLONG, last_end_at),
    {NULL, 0, 0, 0, NULL}};
static PyType_Slot watch_slots[] = {{Py_tp_init, init_watch}, {Py_tp_new, PyType_GenericNew}, {Py_tp_dealloc, free_watch},
                                    {Py_tp_methods, watch_methods}, {Py_tp_members, watch_members}, {0, NULL}};
static PyType_Spec watch_spec = {"otel_infer.ringbuffer._native.StallWatch", sizeof(StallWatch), 0, Py_TPFLAGS_DEFAULT, watch_slots};

static PyTypeObject *watch_type;

/* Sleeps, without the GIL, until one of the watches has found something, until an instant, or until a signal comes. Before
 * `reports_from`, nothing is reported, and looks are rarer: the records are followed. */
static PyObject *sleep_until_late(PyObject *module, PyObject *arguments)
{
    PyObject *watches;
    long long until, interval, reports_from;
    int found = 0, interrupted = 0;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "O!LLL", &PyTuple_Type, &watches, &until, &interval, &reports_from)) return NULL;
    StallWatch *watched[MAX_WATCHES];
    Py_ssize_t count = PyTuple_Size(watches) < MAX_WATCHES ? PyTuple_Size(watches) : MAX_WATCHES;
    for (Py_ssize_t i = 0; i < count; i++) {
        watched[i] = (StallWatch *)PyTuple_GetItem(watches, i);
        if (!Py_IS_TYPE((PyObject *)watched[i], watch_type)) {
            PyErr_SetString(PyExc_TypeError, "a watch is expected");
            return NULL;
        }
    }
    Py_BEGIN_ALLOW_THREADS
    for (int64_t now = read_clock(); !found && !interrupted && now < until; now = read_clock()) {
        int64_t pause = now < reports_from ? QUIET_FACTOR * interval : interval;
        if (pause > until - now) pause = until - now;
        struct timespec rest = {(time_t)(pause / SECOND), (long)(pause % SECOND)};
        interrupted = nanosleep(&rest, NULL) != 0;
        now = read_clock();
        for (Py_ssize_t i = 0; i < count; i++) {
            watched[i]->is_quiet = now < reports_from;
            look_at_all(watched[i], now);
            found |= watched[i]->row_count > 0;
            watched[i]->is_quiet = 0;
        }
    }
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(found);
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
    {"sleep_until_late", sleep_until_late, METH_VARARGS,
     "sleep_until_late(watches, until, interval, reports_from): sleeps until a watch has found something."},
    {"signal_thread", signal_thread, METH_VARARGS, "signal_thread(process, thread, number): sends a signal to one thread."},
    {NULL, NULL, 0, NULL}};

int add_stall_types(PyObject *module)
{
    if (add_type(module, "StallWatch", &watch_spec) || PyModule_AddFunctions(module, functions)) return -1;
    watch_type = (PyTypeObject *)PyObject_GetAttrString(module, "StallWatch");
    return watch_type == NULL ? -1 : 0;
}
