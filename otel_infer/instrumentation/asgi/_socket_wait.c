/* Measures how long the bytes of a request waited in the server's socket, as `socket_wait.py` describes. */
#include "../../ringbuffer/_native.h"
#ifdef __linux__
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#endif

enum { TRANSPORT, SOCK_FD, GET_EXTRA_INFO, SOCKET, NAMES };
static const char *const texts[NAMES] = {"transport", "_sock_fd", "get_extra_info", "socket"};
static PyObject *names[NAMES], *stage_name;
static PyTypeObject *socket_only;  /* the last type of transport without `_sock_fd`, because a failed lookup is slow */
static int64_t min_wait_ns, tick_ns, first_tick;

#ifdef __linux__
/* Returns how many ms ago the last bytes arrived, counted in ticks; -1 = unknown. */
static int64_t read_last_receipt(int descriptor)
{
    struct tcp_info known;
    socklen_t length = sizeof known;
    if (getsockopt(descriptor, IPPROTO_TCP, TCP_INFO, &known, &length)) return -1;
    if (length < offsetof(struct tcp_info, tcpi_last_data_recv) + sizeof known.tcpi_last_data_recv) return -1;
    return known.tcpi_last_data_recv;
}
#endif

/* Returns how long the last bytes had waited at `called_at`, ns; 0 = shorter than is recorded, or unknown. */
static int64_t estimate_wait(int descriptor, int64_t called_at)
{
#ifdef __linux__
    int64_t received_ms = tick_ns ? read_last_receipt(descriptor) : -1;
    if (received_ms <= 0) return 0;
    int64_t now = read_clock(), last_tick = first_tick ? now - (now - first_tick) % tick_ns : now;
    int64_t ticks = (received_ms * 1000000 + tick_ns / 2) / tick_ns;
    int64_t shortest = called_at - (last_tick - (ticks - 1) * tick_ns);
    return ticks && shortest >= min_wait_ns ? shortest + tick_ns / 2 : 0;
#else
    (void)descriptor, (void)called_at;
    return 0;
#endif
}

/* Returns a new reference to the number of a transport's socket, or to the socket; NULL with an exception if it has none. */
static PyObject *get_socket(PyObject *transport)
{
    if (Py_TYPE(transport) != socket_only) {
        PyObject *number = PyObject_GetAttr(transport, names[SOCK_FD]);  /* of asyncio's own; others have a socket */
        if (number != NULL || !PyErr_ExceptionMatches(PyExc_AttributeError)) return number;
        PyErr_Clear();
        PyTypeObject *last = socket_only;
        socket_only = (PyTypeObject *)take((PyObject *)Py_TYPE(transport));
        Py_XDECREF((PyObject *)last);
    }
    return PyObject_CallMethodObjArgs(transport, names[GET_EXTRA_INFO], names[SOCKET], NULL);
}

/* Returns the descriptor of a transport's socket; -1 without an exception if it has none. */
static int find_descriptor(PyObject *transport)
{
    PyObject *number = get_socket(transport);
    int descriptor = number == NULL || number == Py_None ? -1 : PyObject_AsFileDescriptor(number);
    Py_XDECREF(number);
    if (keep_interrupt()) return -1;
    return descriptor;
}

/* Records the stage `accept` if the request of this uvicorn cycle waited. Leaves no exception, but a signal handler's. */
void record_socket_wait(RequestState *request, PyObject *cycle, int64_t called_at)
{
    PyObject *transport = PyObject_GetAttr(cycle, names[TRANSPORT]);
    int descriptor = transport == NULL ? -1 : find_descriptor(transport);
    Py_XDECREF(transport);
    int64_t waited = descriptor < 0 ? 0 : estimate_wait(descriptor, called_at);
    if (waited) write_stage(request, called_at, stage_name, called_at - waited, 0);
    keep_interrupt();
}

/* estimate_wait(descriptor, called_at) */
static PyObject *estimate_of_descriptor(PyObject *module, PyObject *arguments)
{
    PyObject *number;
    long long called_at;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "OL", &number, &called_at)) return NULL;
    int descriptor = PyObject_AsFileDescriptor(number);
    return descriptor < 0 ? NULL : PyLong_FromLongLong(estimate_wait(descriptor, called_at));
}

/* configure_socket_wait(stage name, shortest wait, tick of the kernel, instant of any tick or 0; all in ns) */
static PyObject *configure(PyObject *module, PyObject *arguments)
{
    PyObject *name;
    long long shortest, tick, first;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "ULLL", &name, &shortest, &tick, &first)) return NULL;
    PyObject *old = stage_name;
    stage_name = take(name);
    Py_XDECREF(old);
    min_wait_ns = shortest;
    tick_ns = tick;
    first_tick = first;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"estimate_socket_wait", estimate_of_descriptor, METH_VARARGS,
     "estimate_socket_wait(descriptor, called_at): how long the last bytes of this socket had waited then, ns; 0 = not long, or unknown."},
    {"configure_socket_wait", configure, METH_VARARGS,
     "configure_socket_wait(stage, min_ns, tick_ns, first_tick): the stage, the shortest wait that is recorded, and the ticks."},
    {NULL, NULL, 0, NULL}};

int add_socket_functions(PyObject *module)
{
    return make_names(names, texts, NAMES) || PyModule_AddFunctions(module, functions) ? -1 : 0;
}
