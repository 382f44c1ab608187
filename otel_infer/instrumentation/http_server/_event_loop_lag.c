/* The usual check of `event_loop_lag._LagTimer`: the loop is punctual, and requests arrive or are in flight. */
#include "../../ringbuffer/_native.h"

typedef struct {
    PyObject_HEAD
    PyObject *ring;  /* the compiled ring of the last check by Python code, or None */
    PyObject *loop, *options;  /* options: keyword arguments of `call_later` */
    long long due_at, offered, interval_ns, max_late_ns, word;  /* word: of the header, for `due_at`; 0 = none */
} LagTimer;

#define EACH_OF_TIMER(DO) DO(ring) DO(loop) DO(options)
DEFINE_REFERENCES(LagTimer, EACH_OF_TIMER)

static PyObject *call_later, *check_slowly;

/* Returns whether nothing is to be recorded, and the timer must continue. */
static int is_usual(LagTimer *self, int64_t now)
{
    RequestRing *ring = is_ring(self->ring) ? (RequestRing *)self->ring : NULL;
    if (ring == NULL || ring->retired || now - self->due_at > self->max_late_ns) return 0;
    long long offered = (long long)count_offered(ring);
    if (offered == self->offered && !ring->in_flight) return 0;
    self->offered = offered;
    return 1;
}

/* The loop calls the timer itself, when it is due. */
static PyObject *call_timer(LagTimer *self, PyObject *arguments, PyObject *named)
{
    int64_t now = read_clock();
    (void)arguments, (void)named;
    if (self->loop == NULL || !is_usual(self, now)) return PyObject_CallMethodObjArgs((PyObject *)self, check_slowly, NULL);
    self->due_at = now + self->interval_ns;
    if (self->word) store_word((RequestRing *)self->ring, (int)self->word, (uint64_t)self->due_at);
    PyObject *later = PyObject_GetAttr(self->loop, call_later);
    PyObject *call = later == NULL ? NULL : Py_BuildValue("(dO)", (double)self->interval_ns / 1e9, (PyObject *)self);
    PyObject *handle = call == NULL ? NULL : PyObject_Call(later, call, self->options);
    Py_XDECREF(later);
    Py_XDECREF(call);
    return handle;
}

static PyMemberDef timer_members[] = {
    FIELD(LagTimer, T_OBJECT, ring), FIELD(LagTimer, T_OBJECT, loop), FIELD(LagTimer, T_OBJECT, options),
    FIELD(LagTimer, T_LONGLONG, due_at), FIELD(LagTimer, T_LONGLONG, offered), FIELD(LagTimer, T_LONGLONG, interval_ns),
    FIELD(LagTimer, T_LONGLONG, max_late_ns),
    FIELD(LagTimer, T_LONGLONG, word), {NULL, 0, 0, 0, NULL}};
static PyType_Slot timer_slots[] = {{Py_tp_new, PyType_GenericNew}, REFERENCE_SLOTS(LagTimer), {Py_tp_call, call_timer},
                                    {Py_tp_members, timer_members}, {0, NULL}};
static PyType_Spec timer_spec = {"otel_infer.ringbuffer._native.LagTimer", sizeof(LagTimer), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, timer_slots};

int add_lag_type(PyObject *module)
{
    call_later = PyUnicode_InternFromString("call_later");
    check_slowly = PyUnicode_InternFromString("check_lag");
    return call_later == NULL || check_slowly == NULL || add_type(module, "LagTimer", &timer_spec) ? -1 : 0;
}
