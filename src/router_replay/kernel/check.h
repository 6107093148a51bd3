/* Is every set k distinct ids below E? Alone, and in one pass with the checksum of a blob. See _compiled.c. */

#define GROUPS 16    /* vectors between two tests */
#define AHEAD 4096   /* bytes asked for in advance: the loops are faster than the memory */

/* partner[t][i]: the slot that slot i of 32 meets when each set is turned by t + 1 slots. */
typedef struct { uint16_t partner[16][32]; } Turns;

static void make_turns(uint32_t k, Turns *turns)
{
    for (uint32_t turn = 1; k <= 32 && turn <= k / 2; turn++)
        for (uint32_t slot = 0; slot < 32; slot++)
            turns->partner[turn - 1][slot] = (uint16_t)(slot / k * k + (slot % k + turn) % k);
}

INLINE void fetch_ahead(const void *at, size_t from, size_t to)
{
    for (; from < to; from += 64) __builtin_prefetch((const char *)at + AHEAD + from);
}

#if defined(__x86_64__)
#include <immintrin.h>

/* How many sets from the first on are surely good. Stops at the first groups with a bad set, and
 * before the end of the buffer: the lanes take over there, and find the place.
 *
 * Two ids of a set are equal where the set agrees in some slot with itself turned by 1, 2, ... k/2
 * slots. 8 one-byte ids are one 64-bit word, turned by a rotation. */
AVX512 static size_t good_bytes8_avx512(const char *ids, size_t count, uint32_t experts, size_t fetched)
{
    const __m512i last = _mm512_set1_epi8((char)(experts - 1));
    size_t good = 0;
    for (; good + 8 * GROUPS <= count; good += 8 * GROUPS) {
        __mmask64 fine = ~(__mmask64)0;
        fetch_ahead(ids + 8 * good, fetched, 1024);
        for (int group = 0; group < GROUPS; group++) {
            const char *at = ids + 8 * good + 64 * group;
            __m512i x = _mm512_loadu_si512(at);
            __mmask64 here = _mm512_cmple_epu8_mask(x, last);
            here = _mm512_mask_cmpneq_epi8_mask(here, x, _mm512_rol_epi64(x, 8));
            here = _mm512_mask_cmpneq_epi8_mask(here, x, _mm512_rol_epi64(x, 16));
            here = _mm512_mask_cmpneq_epi8_mask(here, x, _mm512_rol_epi64(x, 24));
            here = _mm512_mask_cmpneq_epi8_mask(here, x, _mm512_rol_epi64(x, 32));
            fine &= here;
        }
        if (~fine) break;
    }
    return good;
}

/* Any other k up to 32: as many whole sets as fit 32 slots of 16 bits, turned by a permutation. The
 * least difference and the greatest id of each slot are kept, and tested once for all groups. */
AVX512 INLINE size_t good_sets_any_avx512(const char *ids, int itemsize, size_t count, uint32_t k, uint32_t experts,
                                          const Turns *turns, size_t fetched)
{
    uint32_t sets = 32 / k;
    size_t good = 0, step = (size_t)itemsize * k * sets, bytes = count * itemsize * k;
    const __m512i last = _mm512_set1_epi16((short)(experts - 1));
    const __mmask32 used = sets * k == 32 ? ~(__mmask32)0 : ((__mmask32)1 << (sets * k)) - 1;
    for (; good + sets * GROUPS <= count; good += sets * GROUPS) {
        const char *at = ids + good * itemsize * k;
        __m512i least = _mm512_set1_epi16(-1), greatest = _mm512_setzero_si512();
        if ((size_t)(at - ids) + (GROUPS - 1) * step + 64 > bytes) break; /* the last load must stay inside */
        fetch_ahead(at, fetched, GROUPS * step);
        for (int group = 0; group < GROUPS; group++, at += step) {
            __m512i x = itemsize == 1 ? _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)at)) : _mm512_loadu_si512(at);
            greatest = _mm512_max_epu16(greatest, x);
            for (uint32_t turn = 0; turn < k / 2; turn++) {
                __m512i difference = _mm512_xor_si512(x, _mm512_permutexvar_epi16(_mm512_loadu_si512(turns->partner[turn]), x));
                least = _mm512_min_epu16(least, difference);
            }
        }
        if (_mm512_mask_test_epi16_mask(used, least, least) != used) break;
        if (_mm512_mask_cmpgt_epu16_mask(used, greatest, last)) break;
    }
    return good;
}
/* Of this loop the usual shapes get a build of their own, unrolled. */
AVX512 static size_t good_sets_avx512(const char *ids, int itemsize, size_t count, uint32_t k, uint32_t experts,
                                      const Turns *turns, size_t fetched)
{
    if (itemsize == 2 && k == 8) return good_sets_any_avx512(ids, 2, count, 8, experts, turns, fetched);
    if (itemsize == 2 && k == 10) return good_sets_any_avx512(ids, 2, count, 10, experts, turns, fetched);
    if (itemsize == 2 && k == 22) return good_sets_any_avx512(ids, 2, count, 22, experts, turns, fetched);
    return good_sets_any_avx512(ids, itemsize, count, k, experts, turns, fetched);
}
#endif

INLINE Py_ssize_t check_body(int avx512, const char *ids, int itemsize, size_t count, uint32_t k, uint32_t experts,
                             uint16_t *lanes)
{
    for (size_t first = 0; first < count; first += LANES) {
        size_t sets = count - first < LANES ? count - first : LANES;
        load_block(ids + first * itemsize * k, itemsize, sets, k, lanes);
        sort_block(lanes, k);
        int bad = first_bad_in_block(lanes, k, experts);
        if (bad >= 0) return (Py_ssize_t)first + bad;
    }
    return -1;
}
DISPATCH(check, (const char *ids, int itemsize, size_t count, uint32_t k, uint32_t experts, uint16_t *lanes),
         ids, itemsize, count, k, experts, lanes)

/* How many sets from the first on are surely good; the others need a closer look. */
static size_t good_sets(const char *ids, int itemsize, size_t count, uint32_t k, uint32_t experts, const Turns *turns, size_t fetched)
{
#if defined(__x86_64__)
    if (simd == 2 && k <= 32 && experts <= (itemsize == 1 ? 256 : 65536))
        return k == 8 && itemsize == 1 ? good_bytes8_avx512(ids, count, experts, fetched)
                                       : good_sets_avx512(ids, itemsize, count, k, experts, turns, fetched);
#endif
    return 0;
}

static Py_ssize_t first_bad(const char *ids, int itemsize, size_t count, uint32_t k, uint32_t experts, uint16_t *lanes)
{
    Turns turns;
    make_turns(k, &turns);
    size_t good = good_sets(ids, itemsize, count, k, experts, &turns, 0);
    Py_ssize_t bad = check(ids + good * itemsize * k, itemsize, count - good, k, experts, lanes);
    return bad < 0 ? bad : bad + (Py_ssize_t)good;
}

/* ---- hash and check ----------------------------------------------------------------------- */

/* XXH3-64 of 241 bytes or more, seed 0 (https://github.com/Cyan4973/xxHash, its specification). It is
 * here, beside the xxhash package, so that `dense` is hashed and checked while a slab is in the
 * nearest cache: two passes over the memory would take longer than a copy. */
#define LEFT_OVER 1024 /* sets at the end of a slab: more than the vector loops leave behind */
#define SLAB 1024 /* bytes hashed and then checked: one block of the hash */
static const unsigned char secret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9,
    0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78,
    0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f,
    0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff,
    0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};
#define PRIME32_1 0x9E3779B1ULL
#define PRIME32_2 0x85EBCA77ULL
#define PRIME32_3 0xC2B2AE3DULL
#define PRIME64_1 0x9E3779B185EBCA87ULL
#define PRIME64_2 0xC2B2AE3D27D4EB4FULL
#define PRIME64_3 0x165667B19E3779F9ULL
#define PRIME64_4 0x85EBCA77C2B2AE63ULL
#define PRIME64_5 0x27D4EB2F165667C5ULL

typedef uint64_t lanes8 __attribute__((vector_size(64)));

INLINE lanes8 load8(const void *at)
{
    lanes8 words;
    memcpy(&words, at, sizeof words);
    return words;
}

INLINE lanes8 mix_stripe(lanes8 sums, const unsigned char *stripe, const unsigned char *key)
{
    lanes8 data = load8(stripe), keyed = data ^ load8(key);
    lanes8 swapped = {data[1], data[0], data[3], data[2], data[5], data[4], data[7], data[6]};
    return sums + swapped + (keyed & 0xFFFFFFFF) * (keyed >> 32);
}

INLINE uint64_t finish_hash(lanes8 sums, size_t length)
{
    uint64_t hash = length * PRIME64_1;
    for (int i = 0; i < 8; i += 2) {
        uint64_t keys[2];
        memcpy(keys, secret + 11 + 8 * i, 16);
        u128 product = (u128)(sums[i] ^ keys[0]) * (sums[i + 1] ^ keys[1]);
        hash += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    hash = (hash ^ hash >> 37) * 0x165667919E3779F9ULL;
    return hash ^ hash >> 32;
}

/* Hash `length` bytes, whose ids begin at `offset`, and check the ids; *bad is the first bad set, or -1. */
INLINE Py_ssize_t hash_check_body(int avx512, const unsigned char *data, size_t length, size_t offset, int itemsize,
                                  uint32_t k, uint32_t experts, uint16_t *lanes, uint64_t *hash)
{
    lanes8 sums = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    size_t set_bytes = (size_t)itemsize * k, count = (length - offset) / set_bytes, checked = 0;
    size_t stripes = (length - 1) / 64;
    Turns turns;
    make_turns(k, &turns);
    Py_ssize_t bad = -1;
    for (size_t stripe = 0; stripe < stripes;) {
        size_t end = stripe + SLAB / 64 < stripes ? stripe + SLAB / 64 : stripes;
        while (stripe < end) {
            size_t in_block = end - stripe < 16 ? end - stripe : 16;
            fetch_ahead(data + 64 * stripe, 0, 512);
            for (size_t i = 0; i < in_block; i++) sums = mix_stripe(sums, data + 64 * (stripe + i), secret + 8 * i);
            stripe += in_block;
            if (in_block == 16) sums = (sums ^ sums >> 47 ^ load8(secret + 128)) * PRIME32_1;
        }
        size_t ready = end == stripes ? count : 64 * end < offset ? 0 : (64 * end - offset) / set_bytes;
        const char *ids = (const char *)data + offset;
        if (bad < 0 && ready > checked) {
            checked += good_sets(ids + checked * set_bytes, itemsize, ready - checked, k, experts, &turns, 512);
            if (end < stripes && ready - checked < LEFT_OVER) continue; /* the next slab takes them along */
            bad = first_bad(ids + checked * set_bytes, itemsize, ready - checked, k, experts, lanes);
            if (bad >= 0) bad += (Py_ssize_t)checked;
            checked = ready;
        }
    }
    sums = mix_stripe(sums, data + length - 64, secret + 121);
    *hash = finish_hash(sums, length);
    return bad;
}
DISPATCH(hash_check, (const unsigned char *data, size_t length, size_t offset, int itemsize, uint32_t k, uint32_t experts,
                      uint16_t *lanes, uint64_t *hash),
         data, length, offset, itemsize, k, experts, lanes, hash)
