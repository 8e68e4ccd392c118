/* Take an object from the garbage collector, which then neither visits nor collects it. Reference counts still free it.
 *
 * Optional: without it, `hicache.radix` leaves its objects to the collector. A full collection of a million nodes takes
 * about half a second, on the thread of the scheduler.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

PyObject *untrack(PyObject *module, PyObject *object)
{
    (void)module;
    if (PyObject_GC_IsTracked(object)) /* also false for types that the collector does not know */
        PyObject_GC_UnTrack(object);
    Py_RETURN_NONE;
}
