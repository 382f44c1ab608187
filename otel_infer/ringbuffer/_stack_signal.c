/* The handler of the stack signal: the interrupted thread writes its own stack, and survives a fault while it does.

   A thread can be interrupted amid a call, where its newest frame is linked to it but not filled in: CPython 3.11 and
   3.12 link a `_PyCFrame` to the thread before they set its `current_frame` (Python/ceval.c, `_PyEval_EvalFrameDefault`).
   Reading the stack then follows whatever was in its place: about one in 50,000 signals to a busy server ended it. So a
   fault of memory that the thread causes while it writes its stack ends the stack, and not the process. */
#include "_native.h"

#include <dlfcn.h>
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/syscall.h>
#endif

enum { FAULTS = 2, FIRST_WITHOUT_EXPORT = 0x030D0000 };
static const int FAULT_SIGNALS[FAULTS] = {SIGSEGV, SIGBUS};

static struct sigaction theirs[FAULTS]; /* what the process does with these signals, while a stack is written */
static atomic_flag is_writing = ATOMIC_FLAG_INIT;
static atomic_long writing_thread;
static sigjmp_buf after_fault;
static atomic_ulong faults;
static atomic_int stack_file = -1;
static void (*faulthandler_writes)(int);
/* faulthandler's own handler writes nothing ever after if it is left amid a stack, so CPython's function is preferred. */
static void (*interpreter_writes)(int, PyThreadState *);

static long own_thread(void)
{
#ifdef SYS_gettid
    return syscall(SYS_gettid);
#else
    return 0;
#endif
}

static void end_stack(int number, siginfo_t *cause, void *context)
{
    (void)context;
    if (atomic_load(&writing_thread) == own_thread() && cause->si_code > 0) siglongjmp(after_fault, 1);
    /* Not ours: the process handles it as ever, when the instruction is repeated or, if it was sent, when it is sent anew. */
    sigaction(number, &theirs[number == SIGBUS], NULL);
    if (cause->si_code <= 0) raise(number);
}

static void guard_faults(void)
{
    struct sigaction guard = {.sa_sigaction = end_stack, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigemptyset(&guard.sa_mask);
    for (int i = 0; i < FAULTS; i++) sigaction(FAULT_SIGNALS[i], &guard, &theirs[i]);
}

/* Leaves alone what the program has set meanwhile. */
static void unguard_faults(void)
{
    struct sigaction now;
    for (int i = 0; i < FAULTS; i++)
        if (!sigaction(FAULT_SIGNALS[i], NULL, &now) && now.sa_sigaction == end_stack)
            sigaction(FAULT_SIGNALS[i], &theirs[i], NULL);
}

static void write_stack(int number)
{
    int error = errno;
    if (atomic_flag_test_and_set(&is_writing)) return; /* one thread at a time; this one is asked again */
    atomic_store(&writing_thread, own_thread());
    guard_faults();
    if (sigsetjmp(after_fault, 1)) {
        atomic_fetch_add(&faults, 1);
    } else if (interpreter_writes != NULL) {
        PyThreadState *thread = PyGILState_GetThisThreadState();
        if (thread != NULL) interpreter_writes(atomic_load(&stack_file), thread);
    } else {
        faulthandler_writes(number);
    }
    unguard_faults();
    atomic_store(&writing_thread, 0);
    atomic_flag_clear(&is_writing);
    errno = error;
}

/* A signal that nothing handles any more does nothing then; Python code can ignore signals in the main thread only. */
static PyObject *ignore_signal(PyObject *module, PyObject *number)
{
    (void)module;
    long wanted = PyLong_AsLong(number);
    if (wanted == -1 && PyErr_Occurred()) return NULL;
    if (signal((int)wanted, SIG_IGN) == SIG_ERR) return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

static PyObject *write_stacks_on(PyObject *module, PyObject *arguments)
{
    int number, file;
    struct sigaction now, own = {.sa_handler = write_stack, .sa_flags = SA_RESTART | SA_ONSTACK};
    (void)module;
    if (!PyArg_ParseTuple(arguments, "ii", &number, &file)) return NULL;
    if (sigaction(number, NULL, &now)) return PyErr_SetFromErrno(PyExc_OSError);
    if (now.sa_handler == SIG_IGN || now.sa_handler == SIG_DFL || now.sa_handler == write_stack) {
        PyErr_SetString(PyExc_RuntimeError, "faulthandler does not handle this signal");
        return NULL;
    }
    faulthandler_writes = now.sa_handler;
    if (Py_Version < FIRST_WITHOUT_EXPORT)
        interpreter_writes = (void (*)(int, PyThreadState *))dlsym(RTLD_DEFAULT, "_Py_DumpTraceback");
    atomic_store(&stack_file, file);
    sigemptyset(&own.sa_mask);
    if (sigaction(number, &own, NULL)) return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

/* The thread that wrote a stack as the process was forked does not exist here. */
static PyObject *forget_writing_thread(PyObject *module, PyObject *nothing)
{
    (void)module, (void)nothing;
    if (atomic_flag_test_and_set(&is_writing)) unguard_faults();
    atomic_store(&writing_thread, 0);
    atomic_flag_clear(&is_writing);
    Py_RETURN_NONE;
}

static PyObject *count_stack_faults(PyObject *module, PyObject *nothing)
{
    (void)module, (void)nothing;
    return PyLong_FromUnsignedLong(atomic_load(&faults));
}

static PyMethodDef functions[] = {
    {"ignore_signal", ignore_signal, METH_O, "ignore_signal(number): ignores a signal, in any thread."},
    {"write_stacks_on", write_stacks_on, METH_VARARGS,
     "write_stacks_on(number, file): takes this signal over from faulthandler; it writes a thread's stack to a descriptor."},
    {"forget_writing_thread", forget_writing_thread, METH_NOARGS, "forget_writing_thread(): for a child, after a fork."},
    {"count_stack_faults", count_stack_faults, METH_NOARGS,
     "count_stack_faults(): the faults of memory that ended a stack, and not this process."},
    {NULL, NULL, 0, NULL}};

int add_stack_signal(PyObject *module) { return PyModule_AddFunctions(module, functions); }
