/* Sets to ranks and back, by tables of binomial coefficients. See _compiled.c. */

/* ---- tables ------------------------------------------------------------------------------- */

typedef struct {
    uint32_t experts, k, columns; /* columns = E - k + 2; the last one bounds every valid rank */
    uint32_t width;               /* bits per rank: the length of C(E, k) - 1 */
    uint32_t narrow;              /* rows [0, narrow) of the table fit 64 bits: the high half is left out */
    uint64_t *low, *high;         /* low[i * columns + d]; high starts at row `narrow` */
    uint32_t *guesses;            /* per row: a lower bound of d, by bit length and leading bits of the rank */
    struct { size_t at; uint32_t mantissa, halvings; } *rows;
} Plan;

static void free_plan(Plan *plan)
{
    if (!plan) return;
    free(plan->low);
    free(plan->high);
    free(plan->guesses);
    free(plan->rows);
    free(plan);
}

static u128 entry(const Plan *plan, uint32_t i, uint32_t d)
{
    u128 low = plan->low[(size_t)i * plan->columns + d];
    return i < plan->narrow ? low : low | (u128)plan->high[(size_t)(i - plan->narrow) * plan->columns + d] << 64;
}

static uint32_t bit_length(u128 x)
{
    uint64_t high = (uint64_t)(x >> 64), low = (uint64_t)x;
    return high ? 128 - (uint32_t)__builtin_clzll(high) : low ? 64 - (uint32_t)__builtin_clzll(low) : 0;
}

/* Where a rank is looked up in `guesses`: its bit length, then the `mantissa` bits after its leading one. */
INLINE uint64_t bucket_of(uint64_t x, uint32_t mantissa)
{
    x += x == 0; /* 0 shares the bucket of 1 */
    uint64_t zeros = (uint64_t)__builtin_clzll(x);
    return ((64 - zeros) << mantissa) | ((x << zeros & ~(1ULL << 63)) >> (63 - mantissa));
}

/* The leading 64 bits or so of a wide rank, and how many are dropped behind them. */
INLINE uint64_t leading_bits(uint64_t high, uint64_t low) { return high >> 32 ? high : high ? high << 32 | low >> 32 : low; }
INLINE uint64_t dropped_bits(uint64_t high) { return high >> 32 ? 64 : high ? 32 : 0; }

/* The same for a block. A double begins with just these bits, and AVX-512 converts eight at once. */
INLINE void find_buckets(int avx512, const uint64_t *restrict ranks, uint32_t mantissa, uint32_t *restrict buckets)
{
    double rounded[LANES];
    uint64_t bits[LANES];
    if (!avx512) {
        for (int s = 0; s < LANES; s++) buckets[s] = (uint32_t)bucket_of(ranks[s], mantissa);
        return;
    }
    for (int s = 0; s < LANES; s++) {
        uint64_t x = ranks[s] + (ranks[s] == 0);
        rounded[s] = (double)(x & ~(x >> 53)); /* without the bit that would round it up */
    }
    memcpy(bits, rounded, sizeof bits);
    for (int s = 0; s < LANES; s++) buckets[s] = (uint32_t)((bits[s] >> (52 - mantissa)) - (1022ULL << mantissa));
}

static u128 bucket_start(uint64_t bucket, uint32_t mantissa)
{
    uint32_t exponent = (uint32_t)(bucket >> mantissa) - 1;
    u128 leading = (u128)1 << mantissa | (bucket & ((1ULL << mantissa) - 1));
    if (bucket == 1ULL << mantissa) return 0;
    return exponent >= mantissa ? leading << (exponent - mantissa) : leading >> (mantissa - exponent);
}

/* Fill the guesses of row i, and return by how much the worst of them is too low. */
static uint32_t fill_guesses(const Plan *plan, uint32_t i, uint32_t mantissa, uint64_t buckets, uint32_t *guesses)
{
    uint32_t d = 0, worst = 0, greatest = plan->columns - 2;
    for (uint64_t bucket = 1ULL << mantissa; bucket < buckets; bucket++) {
        guesses[bucket] = d; /* d is the answer for the first rank of this bucket */
        uint32_t before = d;
        if (bucket + 1 == buckets) d = greatest;
        else {
            u128 next = bucket_start(bucket + 1, mantissa);
            while (d < greatest && entry(plan, i, d + 1) < next) d++;
            worst = d - before > worst ? d - before : worst;
            while (d < greatest && entry(plan, i, d + 1) <= next) d++;
            continue;
        }
        worst = d - before > worst ? d - before : worst;
    }
    return worst;
}

static int make_guesses(Plan *plan)
{
    size_t used = 0, room = 0;
    for (uint32_t i = 1; i < plan->k; i++) {
        u128 greatest = entry(plan, i, plan->columns - 1) - 1;
        uint32_t mantissa = 0, worst;
        while (mantissa < MAX_MANTISSA && (plan->columns / (i + 1)) >> (mantissa + 1)) mantissa++;
        for (;; mantissa++) { /* most rows come out one too low at worst: one correction when unranking */
            uint64_t high = (uint64_t)(greatest >> 64), leading = leading_bits(high, (uint64_t)greatest);
            uint64_t buckets = bucket_of(leading, mantissa) + (dropped_bits(high) << mantissa) + 1;
            if (used + buckets > room) {
                room = 2 * (used + buckets);
                uint32_t *grown = realloc(plan->guesses, room * sizeof *grown);
                if (!grown) return 0;
                plan->guesses = grown;
            }
            worst = fill_guesses(plan, i, mantissa, buckets, plan->guesses + used);
            if (worst > 1 && mantissa < MAX_MANTISSA) continue;
            plan->rows[i].at = used;
            used += buckets;
            break;
        }
        plan->rows[i].mantissa = mantissa;
        plan->rows[i].halvings = bit_length(worst);
    }
    return 1;
}

/* NULL with *too_wide set where C(E, k) does not fit 128 bits; NULL alone where memory ran out. */
static Plan *make_plan(uint32_t experts, uint32_t k, int *too_wide)
{
    Plan *plan = calloc(1, sizeof *plan);
    u128 *row = NULL;
    if (!plan) return NULL;
    uint32_t columns = experts - k + 2;
    size_t size = (size_t)k * columns * sizeof(uint64_t);
    *plan = (Plan){.experts = experts, .k = k, .columns = columns, .narrow = k};
    plan->rows = calloc(k, sizeof *plan->rows);
    row = malloc(columns * sizeof *row);
    plan->low = malloc(size);
    if (!plan->rows || !row || !plan->low) goto failed;
    for (uint32_t d = 0; d < columns; d++) row[d] = d;
    for (uint32_t i = 0; i < k; i++) {
        for (uint32_t d = 1; i > 0 && d < columns; d++)
            if (__builtin_add_overflow(row[d], row[d - 1], &row[d])) {
                *too_wide = 1;
                goto failed;
            }
        if (plan->narrow == k && row[columns - 1] >> 64) {
            plan->narrow = i;
            plan->high = malloc(size - (size_t)i * columns * sizeof(uint64_t));
            if (!plan->high) goto failed;
        }
        for (uint32_t d = 0; d < columns; d++) {
            plan->low[(size_t)i * columns + d] = (uint64_t)row[d];
            if (i >= plan->narrow) plan->high[(size_t)(i - plan->narrow) * columns + d] = (uint64_t)(row[d] >> 64);
        }
    }
    plan->width = bit_length(row[columns - 1] - 1);
    if (!make_guesses(plan)) goto failed;
    free(row);
    return plan;
failed:
    free(row);
    free_plan(plan);
    return NULL;
}

/* ---- rank --------------------------------------------------------------------------------- */

INLINE void rank_block(const Plan *plan, const uint16_t *lanes, uint64_t *restrict low, uint64_t *restrict high)
{
    for (int s = 0; s < LANES; s++) {
        low[s] = lanes[s];
        high[s] = 0;
    }
    for (uint32_t i = 1; i < plan->k; i++) {
        const uint64_t *row = plan->low + (size_t)i * plan->columns;
        const uint16_t *lane = lanes + (size_t)i * LANES;
        if (i < plan->narrow) {
            for (int s = 0; s < LANES; s++) low[s] += row[lane[s] - i];
            continue;
        }
        const uint64_t *high_row = plan->high + (size_t)(i - plan->narrow) * plan->columns;
        for (int s = 0; s < LANES; s++) {
            uint64_t add = row[lane[s] - i];
            low[s] += add;
            high[s] += high_row[lane[s] - i] + (low[s] < add);
        }
    }
}

/* The ranks of a block as one bit stream, lowest bit first. `out` has room for 8 * width + 16 bytes. */
INLINE void pack_block(uint32_t width, const uint64_t *low, const uint64_t *high, unsigned char *out)
{
    u128 pending = 0;
    uint32_t pending_bits = 0, low_bits = width < 64 ? width : 64;
    for (int s = 0; s < LANES; s++)
        for (uint32_t part = 0; part * 64 < width; part++) {
            pending |= (u128)(part ? high[s] : low[s]) << pending_bits;
            pending_bits += part ? width - 64 : low_bits;
            uint64_t word = (uint64_t)pending;
            memcpy(out, &word, 8);
            out += pending_bits / 8; /* whole bytes are done; up to 7 bits wait for the next rank */
            pending >>= pending_bits & ~7u;
            pending_bits &= 7;
        }
}

INLINE Py_ssize_t rank_body(int avx512, const Plan *plan, const char *ids, int itemsize, size_t count, unsigned char *out,
                            uint16_t *lanes)
{
    uint64_t low[LANES], high[LANES];
    unsigned char packed[LANES / 8 * MAX_WIDTH + 16];
    for (size_t first = 0; first < count; first += LANES) {
        size_t sets = count - first < LANES ? count - first : LANES;
        load_block(ids + first * itemsize * plan->k, itemsize, sets, plan->k, lanes);
        sort_block(lanes, plan->k);
        int bad = first_bad_in_block(lanes, plan->k, plan->experts); /* a bad id would leave the table */
        if (bad >= 0) return (Py_ssize_t)first + bad;
        rank_block(plan, lanes, low, high);
        pack_block(plan->width, low, high, packed);
        memcpy(out + first / 8 * plan->width, packed, (sets * plan->width + 7) / 8);
    }
    return -1;
}
DISPATCH(rank, (const Plan *plan, const char *ids, int itemsize, size_t count, unsigned char *out, uint16_t *lanes),
         plan, ids, itemsize, count, out, lanes)

/* ---- unrank ------------------------------------------------------------------------------- */

INLINE uint64_t bits_at(const unsigned char *packed, size_t bit, uint32_t count)
{
    u128 word;
    memcpy(&word, packed + bit / 8, 16);
    return (uint64_t)(word >> (bit & 7)) & (~0ULL >> (64 - count));
}

INLINE void unpack_block(uint32_t width, const unsigned char *packed, uint64_t *low, uint64_t *high)
{
    for (uint32_t s = 0; s < LANES; s++) {
        low[s] = width ? bits_at(packed, (size_t)s * width, width < 64 ? width : 64) : 0;
        high[s] = width > 64 ? bits_at(packed, (size_t)s * width + 64, width - 64) : 0;
    }
}

/* Per row of the table, from the top: d is the last column whose entry is <= rank; take it off. */
INLINE void unrank_row_narrow(int avx512, const Plan *plan, uint32_t i, uint64_t *restrict low, uint16_t *restrict lane)
{
    const uint64_t *row = plan->low + (size_t)i * plan->columns;
    const uint32_t *guesses = plan->guesses + plan->rows[i].at;
    uint32_t mantissa = plan->rows[i].mantissa, last = plan->columns - 1;
    uint32_t buckets[LANES], column[LANES];
    find_buckets(avx512, low, mantissa, buckets);
    for (int s = 0; s < LANES; s++) column[s] = guesses[buckets[s]];
    for (uint32_t step = 1u << plan->rows[i].halvings >> 1; step > 1; step /= 2)
        for (int s = 0; s < LANES; s++) {
            uint32_t next = column[s] + step < last ? column[s] + step : last;
            column[s] = low[s] >= row[next] ? next : column[s];
        }
    for (int s = 0; s < LANES; s++) {
        uint32_t d = column[s];
        d += low[s] >= row[d + 1];
        low[s] -= row[d];
        lane[s] = (uint16_t)(d + i);
    }
}

INLINE void unrank_row_wide(int avx512, const Plan *plan, uint32_t i, uint64_t *restrict low, uint64_t *restrict high,
                            uint16_t *restrict lane)
{
    const uint64_t *row = plan->low + (size_t)i * plan->columns;
    const uint64_t *high_row = plan->high + (size_t)(i - plan->narrow) * plan->columns;
    const uint32_t *guesses = plan->guesses + plan->rows[i].at;
    uint32_t mantissa = plan->rows[i].mantissa, last = plan->columns - 1;
    uint64_t leading[LANES];
    uint32_t buckets[LANES], column[LANES];
    for (int s = 0; s < LANES; s++) leading[s] = leading_bits(high[s], low[s]);
    find_buckets(avx512, leading, mantissa, buckets);
    for (int s = 0; s < LANES; s++) column[s] = guesses[buckets[s] + (dropped_bits(high[s]) << mantissa)];
    for (uint32_t step = 1u << plan->rows[i].halvings >> 1; step > 0; step /= 2)
        for (int s = 0; s < LANES; s++) {
            uint32_t next = column[s] + step < last ? column[s] + step : last;
            int reached = (high[s] > high_row[next]) | ((high[s] == high_row[next]) & (low[s] >= row[next]));
            column[s] = reached ? next : column[s];
        }
    for (int s = 0; s < LANES; s++) {
        uint32_t d = column[s];
        high[s] -= high_row[d] + (low[s] < row[d]);
        low[s] -= row[d];
        lane[s] = (uint16_t)(d + i);
    }
}

INLINE Py_ssize_t unrank_body(int avx512, const Plan *plan, const unsigned char *payload, size_t count, char *ids, int itemsize,
                              uint16_t *lanes)
{
    uint64_t low[LANES], high[LANES];
    unsigned char packed[LANES / 8 * MAX_WIDTH + 16];
    u128 total = entry(plan, plan->k - 1, plan->columns - 1);
    uint64_t total_low = (uint64_t)total, total_high = (uint64_t)(total >> 64);
    memset(packed, 0, sizeof packed);
    for (size_t first = 0; first < count; first += LANES) {
        size_t sets = count - first < LANES ? count - first : LANES, bytes = (sets * plan->width + 7) / 8;
        memcpy(packed, payload + first / 8 * plan->width, bytes);
        memset(packed + bytes, 0, sizeof packed - bytes); /* sets beyond `count` get rank 0 */
        unpack_block(plan->width, packed, low, high);
        uint64_t too_great = 0;
        for (int s = 0; s < LANES; s++)
            too_great |= (high[s] > total_high) | ((high[s] == total_high) & (low[s] >= total_low));
        for (size_t s = 0; too_great && s < sets; s++)
            if (((u128)high[s] << 64 | low[s]) >= total) return (Py_ssize_t)(first + s);
        for (uint32_t i = plan->k - 1; i > 0; i--)
            if (i < plan->narrow) unrank_row_narrow(avx512, plan, i, low, lanes + (size_t)i * LANES);
            else unrank_row_wide(avx512, plan, i, low, high, lanes + (size_t)i * LANES);
        for (int s = 0; s < LANES; s++) lanes[s] = (uint16_t)low[s];
        store_block(ids + first * itemsize * plan->k, itemsize, sets, plan->k, lanes);
    }
    return -1;
}
DISPATCH(unrank, (const Plan *plan, const unsigned char *payload, size_t count, char *ids, int itemsize, uint16_t *lanes),
         plan, payload, count, ids, itemsize, lanes)
