/* Who records the steps of an engine: each records the frequent step, or returns 0 and has changed nothing.
 *
 * An exception that is set when 0 is returned is that of the attempt; the Python code runs into it again.
 */
#ifndef OTEL_INFER_STEP_HOOK_H
#define OTEL_INFER_STEP_HOOK_H
#include "../../ringbuffer/_native.h"

/* Returns whether the weak reference is to this object. */
static inline int refers_to(PyObject *reference, PyObject *object)
{
    return reference != NULL && PyWeakref_Check(reference) && PyWeakref_GetObject(reference) == object;
}

/* `transformers/_batches.c` */
int record_cb_schedule(PyObject *scheduler, PyObject *result);
int record_cb_update(PyObject *result);
int add_batch_types(PyObject *module);

/* `vllm/_scheduler.c`. `begin_vllm_update` returns the steps of the scheduler, as a new reference, and the number of the
 * step whose results come; it is called before the scheduler uses them. */
int record_vllm_schedule(PyObject *scheduler, PyObject *output, PyObject *hook);
PyObject *begin_vllm_update(PyObject *scheduler, PyObject *output, long long *step);
int record_vllm_update(PyObject *steps, PyObject *scheduler, PyObject *output, PyObject *sampled, PyObject *result,
                       long long step, int64_t at);
int count_eviction(PyObject *counter);
int add_scheduler_types(PyObject *module);

#endif
