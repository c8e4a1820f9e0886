/* The sums of fingerprint.py on a CPU; utils/fingerprint.py has the formula. */

#include <stdint.h>

#define NUM_COLUMNS 1024
#define GOLDEN UINT64_C(0x9E3779B97F4A7C15)

struct tensor {
    const void *values;
    int64_t num_values, value_bytes, first_row;
};

/* Of the OpenMP that torch computes with: more threads than its own would take turns with them, as
   they spin for a while after each operator. Null pointers: there is none. */
struct openmp {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
    int (*thread_num)(void), (*num_threads)(void);
};

struct call {
    const struct tensor *tensors;
    int64_t num_tensors;
    uint64_t *sums;
    const struct openmp *openmp;
};

/* Without AVX-512, which multiplies 64 bits: weight = low + 2^32 high, low signed. Two multiplications
   of 32 bits take 0.10 to 0.12 ns a value under AVX2, one of 64 bits 0.19. */
static uint64_t columns[NUM_COLUMNS];
static int32_t low[NUM_COLUMNS];
static uint32_t high[NUM_COLUMNS];

static uint64_t weight(uint64_t number)
{
    uint64_t z = (number + 1) * GOLDEN;
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return (z ^ (z >> 31)) | 1;
}

__attribute__((constructor)) static void fill_columns(void)
{
    for (int c = 0; c < NUM_COLUMNS; c++) {
        columns[c] = weight(c);
        low[c] = (int32_t)(uint32_t)columns[c];
        high[c] = (uint32_t)((columns[c] - (uint64_t)(int64_t)low[c]) >> 32);
    }
}

/* The row after the next is on its way meanwhile: 0.105 ns a value from memory, not 0.136. */
#define AHEAD (2 * NUM_COLUMNS)
#define LINE 64

#ifdef __AVX512DQ__
#define ADD_VALUE(c) lows += columns[c] * (uint64_t)(int64_t)bits[c];
#else
#define ADD_VALUE(c)                                   \
    lows += (uint64_t)((int64_t)low[c] * bits[c]);     \
    highs += high[c] * (uint32_t)bits[c];
#endif

#define SUM_OF_ROW(name, type)                                             \
    static uint64_t name(const type *bits, int64_t num)                    \
    {                                                                      \
        const int64_t block = 4 * LINE / sizeof(type);                     \
        uint64_t lows = 0;                                                 \
        uint32_t highs = 0;                                                \
        int64_t c = 0;                                                     \
        for (; c + block <= num; c += block) {                             \
            const char *ahead = (const char *)(bits + c + AHEAD);          \
            for (int line = 0; line < 4; line++)                           \
                __builtin_prefetch(ahead + line * LINE);                   \
            for (int64_t i = c; i < c + block; i++) {                      \
                ADD_VALUE(i)                                               \
            }                                                              \
        }                                                                  \
        for (; c < num; c++) {                                             \
            ADD_VALUE(c)                                                   \
        }                                                                  \
        return lows + ((uint64_t)highs << 32);                             \
    }
SUM_OF_ROW(sum_of_row_16, int16_t)
SUM_OF_ROW(sum_of_row_32, int32_t)

static uint64_t sum_of_row_64(const int64_t *bits, int64_t num)
{
    uint64_t sum = 0;
    for (int64_t c = 0; c < num; c++)
        sum += columns[c] * (uint64_t)bits[c];
    return sum;
}

static uint64_t sum_of_row(const struct tensor *x, int64_t row)
{
    int64_t done = row * NUM_COLUMNS, left = x->num_values - done;
    int64_t num = left < NUM_COLUMNS ? left : NUM_COLUMNS;
    switch (x->value_bytes) { /* the caller has refused any other */
    case 2:
        return sum_of_row_16((const int16_t *)x->values + done, num);
    case 4:
        return sum_of_row_32((const int32_t *)x->values + done, num);
    default:
        return sum_of_row_64((const int64_t *)x->values + done, num);
    }
}

static int64_t num_rows(const struct tensor *x)
{
    return (x->num_values + NUM_COLUMNS - 1) / NUM_COLUMNS;
}

static uint64_t sum_of_rows(const struct tensor *x, int64_t row, int64_t end)
{
    uint64_t sum = 0;
    for (; row < end; row++)
        sum += weight(NUM_COLUMNS + (uint64_t)(x->first_row + row)) * sum_of_row(x, row);
    return sum;
}

/* Thread t of T takes that part of each tensor, as torch's operators do: it is in its cache. */
static void add_share(const struct call *call, int64_t t, int64_t num_threads)
{
    for (int64_t n = 0; n < call->num_tensors; n++) {
        const struct tensor *x = &call->tensors[n];
        int64_t rows = num_rows(x), row = rows * t / num_threads, end = rows * (t + 1) / num_threads;
        if (row < end)
            __atomic_fetch_add(&call->sums[n], sum_of_rows(x, row, end), __ATOMIC_RELAXED);
    }
}

static void add_own_share(void *argument)
{
    const struct call *call = argument;
    add_share(call, call->openmp->thread_num(), call->openmp->num_threads());
}

/* Each sum of `sums`, which hold 0, becomes its tensor's. */
void fingerprint(const struct tensor *tensors, int64_t num_tensors, uint64_t *sums,
                 const struct openmp *openmp, unsigned num_threads)
{
    struct call call = {tensors, num_tensors, sums, openmp};
    if (num_threads > 1)
        openmp->parallel(add_own_share, &call, num_threads, 0);
    else
        add_share(&call, 0, 1);
}
