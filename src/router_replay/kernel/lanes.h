/* Blocks of 64 sets as lanes, their sorting, and the choice of vector instructions. See _compiled.c. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if !defined(__GNUC__) || !defined(__SIZEOF_INT128__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "needs gcc or clang on a 64-bit little-endian machine; the NumPy kernel serves the others"
#endif

#define LANES 64
#define MAX_WIDTH 128
#define MAX_MANTISSA 10
#define INLINE static inline __attribute__((always_inline))

typedef unsigned __int128 u128;
typedef uint16_t u16_anywhere __attribute__((aligned(1), may_alias)); /* a blob may lie at an odd address */

/* Three builds of each loop: 2 for AVX-512, 1 for AVX2, 0 for every machine. The module's start finds
 * out which; tests lower it to run all three. */
static int simd = 0;

#if defined(__x86_64__)
#include <cpuid.h>
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx2,bmi,bmi2,lzcnt")))
#define AVX2 __attribute__((target("avx2,bmi,bmi2,lzcnt")))
#define DISPATCH(name, parameters, ...)                                                             \
    AVX512 static Py_ssize_t name##_avx512 parameters { return name##_body(1, __VA_ARGS__); }       \
    AVX2 static Py_ssize_t name##_avx2 parameters { return name##_body(0, __VA_ARGS__); }           \
    static Py_ssize_t name##_plain parameters { return name##_body(0, __VA_ARGS__); }               \
    static Py_ssize_t name parameters                                                               \
    {                                                                                               \
        if (simd == 2) return name##_avx512(__VA_ARGS__);                                           \
        return simd == 1 ? name##_avx2(__VA_ARGS__) : name##_plain(__VA_ARGS__);                    \
    }

/* By CPUID itself: __builtin_cpu_supports needs a runtime symbol that not every compiler can link. */
static int best_simd(void)
{
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & (1u << 27))) return 0; /* may the registers be saved? */
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & 0x06) != 0x06 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    const unsigned avx512 = 1u << 16 | 1u << 17 | 1u << 28 | 1u << 30 | 1u << 31; /* f, dq, cd, bw, vl */
    if ((b & avx512) == avx512 && (low & 0xe6) == 0xe6) return 2;
    return b & 1u << 5 ? 1 : 0;
}
#else
static int best_simd(void) { return 0; }
#define DISPATCH(name, parameters, ...) \
    static Py_ssize_t name parameters { return name##_body(0, __VA_ARGS__); }
#endif

/* ---- lanes -------------------------------------------------------------------------------- */

/* Sets beyond `count` in the last block become {0, 1, ..., k-1}: a good set, of rank 0. */
INLINE void load_slots(const char *ids, int itemsize, size_t count, uint32_t k, uint16_t *lanes)
{
    for (uint32_t i = 0; i < k; i++) {
        uint16_t *lane = lanes + (size_t)i * LANES;
        if (itemsize == 1)
            for (size_t s = 0; s < count; s++) lane[s] = ((const uint8_t *)ids)[s * k + i];
        else
            for (size_t s = 0; s < count; s++) lane[s] = ((const u16_anywhere *)ids)[s * k + i];
        for (size_t s = count; s < LANES; s++) lane[s] = (uint16_t)i;
    }
}

INLINE void store_slots(char *ids, int itemsize, size_t count, uint32_t k, const uint16_t *lanes)
{
    for (size_t s = 0; s < count; s++)
        if (itemsize == 1)
            for (uint32_t i = 0; i < k; i++) ((uint8_t *)ids)[s * k + i] = (uint8_t)lanes[(size_t)i * LANES + s];
        else
            for (uint32_t i = 0; i < k; i++) ((u16_anywhere *)ids)[s * k + i] = lanes[(size_t)i * LANES + s];
}

/* The usual k = 8, a whole block: a set is one or two 64-bit words, which shifts take apart and put
 * together for many sets at once. */
INLINE void load_words(const char *ids, int itemsize, uint16_t *restrict lanes)
{
    uint64_t words[LANES], mask = itemsize == 1 ? 0xFF : 0xFFFF;
    int slots = 8 / itemsize;
    for (int part = 0; part < itemsize; part++, lanes += slots * LANES) {
        for (int s = 0; s < LANES; s++) memcpy(words + s, ids + (s * itemsize + part) * 8, 8);
        for (int i = 0; i < slots; i++)
            for (int s = 0; s < LANES; s++) lanes[i * LANES + s] = (uint16_t)(words[s] >> (8 * itemsize * i) & mask);
    }
}

INLINE void store_words(char *ids, int itemsize, const uint16_t *restrict lanes)
{
    uint64_t words[LANES];
    int slots = 8 / itemsize;
    for (int part = 0; part < itemsize; part++, lanes += slots * LANES) {
        for (int s = 0; s < LANES; s++) words[s] = lanes[s];
        for (int i = 1; i < slots; i++)
            for (int s = 0; s < LANES; s++) words[s] |= (uint64_t)lanes[i * LANES + s] << (8 * itemsize * i);
        for (int s = 0; s < LANES; s++) memcpy(ids + (s * itemsize + part) * 8, words + s, 8);
    }
}

INLINE void load_block(const char *ids, int itemsize, size_t count, uint32_t k, uint16_t *lanes)
{
    if (k != 8 || count < LANES) load_slots(ids, itemsize, count, k, lanes);
    else if (itemsize == 1) load_words(ids, 1, lanes);
    else load_words(ids, 2, lanes);
}

INLINE void store_block(char *ids, int itemsize, size_t count, uint32_t k, const uint16_t *lanes)
{
    if (k != 8 || count < LANES) store_slots(ids, itemsize, count, k, lanes);
    else if (itemsize == 1) store_words(ids, 1, lanes);
    else store_words(ids, 2, lanes);
}

/* Batcher's merge exchange (Knuth 5.2.2, algorithm M): a fixed network for any k, so that 64 sets
 * are sorted at once by minima and maxima. */
INLINE void sort_block(uint16_t *restrict lanes, uint32_t k)
{
    uint32_t top = 1;
    while (top * 2 < k) top *= 2;
    for (uint32_t p = top; k > 1 && p > 0; p /= 2) {
        uint32_t q = top, r = 0, d = p;
        for (;;) {
            for (uint32_t i = 0; i + d < k; i++) {
                if ((i & p) != r) continue;
                uint16_t *a = lanes + (size_t)i * LANES, *b = a + (size_t)d * LANES;
                for (int s = 0; s < LANES; s++) {
                    uint16_t low = a[s] < b[s] ? a[s] : b[s], high = a[s] < b[s] ? b[s] : a[s];
                    a[s] = low;
                    b[s] = high;
                }
            }
            if (q == p) break;
            d = q - p;
            q /= 2;
            r = p;
        }
    }
}

/* The first set of a sorted block that repeats an id or holds one >= experts; -1 where all are good. */
INLINE int first_bad_in_block(const uint16_t *lanes, uint32_t k, uint32_t experts)
{
    uint16_t bad[LANES], last = (uint16_t)(experts - 1), any = 0;
    for (int s = 0; s < LANES; s++) bad[s] = lanes[(size_t)(k - 1) * LANES + s] > last;
    for (uint32_t i = 1; i < k; i++) {
        const uint16_t *lane = lanes + (size_t)i * LANES;
        for (int s = 0; s < LANES; s++) bad[s] |= lane[s] == lane[s - LANES];
    }
    for (int s = 0; s < LANES; s++) any |= bad[s];
    if (!any) return -1;
    for (int s = 0;; s++)
        if (bad[s]) return s;
}

INLINE Py_ssize_t sort_body(int avx512, char *ids, int itemsize, size_t count, uint32_t k, uint16_t *lanes)
{
    for (size_t first = 0; first < count; first += LANES) {
        char *block = ids + first * itemsize * k;
        size_t sets = count - first < LANES ? count - first : LANES;
        load_block(block, itemsize, sets, k, lanes);
        sort_block(lanes, k);
        store_block(block, itemsize, sets, k, lanes);
    }
    return -1;
}
DISPATCH(sort, (char *ids, int itemsize, size_t count, uint32_t k, uint16_t *lanes), ids, itemsize, count, k, lanes)
