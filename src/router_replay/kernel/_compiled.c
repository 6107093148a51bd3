/* The loops over single sets of experts: check, sort, rank and unrank.
 *
 * A set is k distinct ids below E. Sorted ascending as c[0] < c[1] < ... it has the rank
 *
 *     C(c[0], 1) + C(c[1], 2) + ... + C(c[k-1], k)          (combinatorial number system)
 *
 * which lies in [0, C(E, k)) and takes `width` bits. docs/wire_format.md is the normative text;
 * in_numpy.py does the same work without a compiler and gives the same bytes.
 *
 * All loops run over blocks of 64 sets laid out as lanes: lanes[i][s] is slot i of set s. The inner
 * loop is always over s, without branches, so the compiler turns it into vector code. A block of 64
 * ranks is exactly 8 * width bytes, so blocks also meet on byte borders in the bit stream.
 *
 * In the tables a column is d = c - i, since slot i of a sorted set never holds less than i:
 * table[i][d] = C(d + i, i + 1), for d in [0, E - k + 1]. No entry exceeds C(E, k), whatever k is,
 * and each row is the running sum of the row above it.
 *
 * Built against the limited API of Python 3.11: one binary serves every later version.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "lanes.h"
#include "check.h"
#include "ranks.h"

static void free_capsule(PyObject *capsule) { free_plan(PyCapsule_GetPointer(capsule, "plan")); }

static PyObject *py_plan(PyObject *self, PyObject *args)
{
    unsigned int experts, k;
    int too_wide = 0;
    if (!PyArg_ParseTuple(args, "II", &experts, &k)) return NULL;
    if (k < 1 || k > experts || experts > 65536) return PyErr_Format(PyExc_ValueError, "no sets of %u of %u", k, experts);
    Plan *plan = make_plan(experts, k, &too_wide);
    if (plan) return PyCapsule_New(plan, "plan", free_capsule);
    return too_wide ? PyErr_Format(PyExc_OverflowError, "ranks of %u of %u exceed 128 bits", k, experts) : PyErr_NoMemory();
}

/* Every loop below gets one block of lanes, and runs without the GIL. */
#define RUN(k, call)                                                                  uint16_t *lanes = malloc((size_t)(k) * LANES * sizeof *lanes);                    Py_ssize_t bad = -1;                                                              if (lanes) { Py_BEGIN_ALLOW_THREADS bad = call; Py_END_ALLOW_THREADS }            int no_memory = !lanes;                                                           free(lanes)

static int wrong_shape(Py_ssize_t bytes, int itemsize, unsigned int k)
{
    if ((itemsize == 1 || itemsize == 2) && k >= 1 && k <= 65536 && bytes % ((Py_ssize_t)itemsize * k) == 0) return 0;
    PyErr_Format(PyExc_ValueError, "%zd bytes are not sets of %u ids of %d bytes", bytes, k, itemsize);
    return 1;
}

static PyObject *py_check(PyObject *self, PyObject *args)
{
    Py_buffer ids;
    int itemsize;
    unsigned int k, experts;
    if (!PyArg_ParseTuple(args, "y*iII", &ids, &itemsize, &k, &experts)) return NULL;
    if (wrong_shape(ids.len, itemsize, k)) return PyBuffer_Release(&ids), NULL;
    RUN(k, first_bad(ids.buf, itemsize, (size_t)ids.len / itemsize / k, k, experts, lanes));
    PyBuffer_Release(&ids);
    return no_memory ? PyErr_NoMemory() : PyLong_FromSsize_t(bad);
}

/* hash_check(data, offset, itemsize, k, num_experts) -> (XXH3-64 of data, the first bad set or -1) */
static PyObject *py_hash_check(PyObject *self, PyObject *args)
{
    Py_buffer data;
    Py_ssize_t offset;
    int itemsize;
    unsigned int k, experts;
    uint64_t hash = 0;
    if (!PyArg_ParseTuple(args, "y*niII", &data, &offset, &itemsize, &k, &experts)) return NULL;
    if (data.len <= 240 || offset < 0 || offset > data.len || wrong_shape(data.len - offset, itemsize, k)) {
        PyBuffer_Release(&data);
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "needs more than 240 bytes, and ids within them");
    }
    RUN(k, hash_check(data.buf, (size_t)data.len, (size_t)offset, itemsize, k, experts, lanes, &hash));
    PyBuffer_Release(&data);
    return no_memory ? PyErr_NoMemory() : Py_BuildValue("Kn", (unsigned long long)hash, bad);
}

static PyObject *py_sort(PyObject *self, PyObject *args)
{
    Py_buffer ids;
    int itemsize;
    unsigned int k;
    if (!PyArg_ParseTuple(args, "w*iI", &ids, &itemsize, &k)) return NULL;
    if (wrong_shape(ids.len, itemsize, k)) return PyBuffer_Release(&ids), NULL;
    RUN(k, sort(ids.buf, itemsize, (size_t)ids.len / itemsize / k, k, lanes));
    PyBuffer_Release(&ids);
    (void)bad;
    if (no_memory) return PyErr_NoMemory();
    return Py_NewRef(Py_None);
}

/* rank(plan, ids, itemsize, out) and unrank(plan, payload, itemsize, out): the first bad set, or -1. */
static PyObject *transcode(PyObject *args, int encoding)
{
    PyObject *capsule;
    Py_buffer in, out;
    int itemsize;
    if (!PyArg_ParseTuple(args, "Oy*iw*", &capsule, &in, &itemsize, &out)) return NULL;
    PyObject *answer = NULL;
    const Plan *plan = PyCapsule_GetPointer(capsule, "plan");
    Py_buffer *ids = encoding ? &in : &out, *payload = encoding ? &out : &in;
    if (!plan || wrong_shape(ids->len, itemsize, plan->k)) goto done;
    size_t count = (size_t)ids->len / itemsize / plan->k;
    if ((size_t)payload->len != (count * plan->width + 7) / 8) {
        PyErr_Format(PyExc_ValueError, "%zu ranks of %u bits do not fill %zd bytes", count, plan->width, payload->len);
        goto done;
    }
    RUN(plan->k, encoding ? rank(plan, in.buf, itemsize, count, out.buf, lanes)
                          : unrank(plan, in.buf, count, out.buf, itemsize, lanes));
    answer = no_memory ? PyErr_NoMemory() : PyLong_FromSsize_t(bad);
done:
    PyBuffer_Release(&in);
    PyBuffer_Release(&out);
    return answer;
}

static PyObject *py_rank(PyObject *self, PyObject *args) { return transcode(args, 1); }
static PyObject *py_unrank(PyObject *self, PyObject *args) { return transcode(args, 0); }

/* simd(level): use at most these vector instructions; the level now in use. */
static PyObject *py_simd(PyObject *self, PyObject *args)
{
    int level;
    if (!PyArg_ParseTuple(args, "i", &level)) return NULL;
    simd = level < best_simd() ? level : best_simd();
    return PyLong_FromLong(simd);
}

static PyMethodDef methods[] = {
    {"plan", py_plan, METH_VARARGS, "plan(num_experts, k): the tables of one model; OverflowError above 128 bits."},
    {"check", py_check, METH_VARARGS, "check(ids, itemsize, k, num_experts): the first bad set, or -1."},
    {"hash_check", py_hash_check, METH_VARARGS, "hash_check(data, offset, itemsize, k, num_experts): (hash, first bad)."},
    {"sort", py_sort, METH_VARARGS, "sort(ids, itemsize, k): each set ascending, in place."},
    {"rank", py_rank, METH_VARARGS, "rank(plan, ids, itemsize, out): the first bad set, or -1."},
    {"unrank", py_unrank, METH_VARARGS, "unrank(plan, payload, itemsize, out): the first bad rank, or -1."},
    {"simd", py_simd, METH_VARARGS, "simd(level): 0 none, 1 AVX2, 2 AVX-512 at most; the level in use. For tests."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "router_replay.kernel._compiled", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__compiled(void)
{
    simd = best_simd();
    return PyModuleDef_Init(&module);
}
