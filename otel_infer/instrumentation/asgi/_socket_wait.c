/* Measures how long the bytes of a request waited in the server's socket, as `socket_wait.py` describes. */
#include "../../ringbuffer/_native.h"
#ifdef __linux__
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#endif

enum { TRANSPORT, SOCK_FD, NAMES };
static const char *const texts[NAMES] = {"transport", "_sock_fd"};
static PyObject *names[NAMES], *stage_name;
static int64_t min_wait_ns;

/* Returns the time since the last bytes arrived, ns; 0 = the kernel does not tell. */
static int64_t read_last_receipt(int descriptor)
{
#ifdef __linux__
    struct tcp_info known;
    socklen_t length = sizeof known;
    if (getsockopt(descriptor, IPPROTO_TCP, TCP_INFO, &known, &length)) return 0;
    if (length < offsetof(struct tcp_info, tcpi_last_data_recv) + sizeof known.tcpi_last_data_recv) return 0;
    return known.tcpi_last_data_recv * 1000000LL;
#else
    (void)descriptor;
    return 0;
#endif
}

/* Returns the descriptor of a transport's socket; -1 without an exception if it has none. */
static int find_descriptor(PyObject *transport)
{
    PyObject *number = PyObject_GetAttr(transport, names[SOCK_FD]);  /* of asyncio's own; others have a socket only */
    if (number == NULL) {
        PyErr_Clear();
        number = PyObject_CallMethod(transport, "get_extra_info", "s", "socket");
    }
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
    int64_t waited = descriptor < 0 ? 0 : read_last_receipt(descriptor);
    if (waited >= min_wait_ns) write_stage(request, called_at, stage_name, called_at - waited, 0);
    keep_interrupt();
}

/* read_last_receipt(descriptor) */
static PyObject *read_of_descriptor(PyObject *module, PyObject *number)
{
    (void)module;
    int descriptor = PyObject_AsFileDescriptor(number);
    return descriptor < 0 ? NULL : PyLong_FromLongLong(read_last_receipt(descriptor));
}

/* configure_socket_wait(stage name, shortest wait in ns) */
static PyObject *configure(PyObject *module, PyObject *arguments)
{
    PyObject *name;
    long long shortest;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "UL", &name, &shortest)) return NULL;
    PyObject *old = stage_name;
    stage_name = take(name);
    Py_XDECREF(old);
    min_wait_ns = shortest;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"read_last_receipt", read_of_descriptor, METH_O,
     "read_last_receipt(descriptor): ns since the last bytes of this socket arrived; 0 = unknown."},
    {"configure_socket_wait", configure, METH_VARARGS,
     "configure_socket_wait(stage, min_ns): the name of the stage, and the shortest wait that is recorded."},
    {NULL, NULL, 0, NULL}};

int add_socket_functions(PyObject *module)
{
    return make_names(names, texts, NAMES) || PyModule_AddFunctions(module, functions) ? -1 : 0;
}
