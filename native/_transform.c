/* Transform coding of heads (tiers/codecs/lossy/transform.py, which says what the bytes are): basis and entropy coder.
 *
 * All sums are of integers, so that every processor makes the same bytes: products of 16 bits into sums of 32, and for
 * rows whose values are too large for these (`is_far`) 64. What is slow is written so that few instructions are left
 * of it: a multiplication and an addition for 16 products, none where four tokens have nothing; no branch for a symbol.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <string.h>

#include "functions.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum {
    PRECISION = 12,
    NUM_SLOTS = 1 << PRECISION,
    NUM_SYMBOLS = 256,
    NUM_STATES = 8,
    SLOTS_BYTES = NUM_SLOTS + 4 * NUM_SYMBOLS, /* of a class */
    HEAD_BYTES = 8 + 4 * NUM_STATES,
    OFFSET = 128, /* symbols are values + OFFSET, 0 is an escape */
    AT_ONCE = 4,  /* tokens */
    BLOCK = 16,   /* columns of a product at once; the number of columns is a multiple of it */
    MAX_COLUMNS = 4096,
    LARGEST_STEPS = 1 << 24,
};
#define INLINED static inline __attribute__((always_inline))
static const uint32_t LOWEST_STATE = 1U << 16;

/* A symbol as the encoder wants it: x / frequency is x * reciprocal >> 44, exactly, for the x that come. */
typedef struct {
    uint64_t reciprocal;
    uint16_t frequency, start; /* 0 < frequency */
    uint32_t is_escape;
} coded_symbol;

/* A segment: `words` [token, stride], of which `num_columns` from `first` on are coded. */
typedef struct {
    uint16_t *words;
    size_t num_tokens, stride, num_columns;
    int is_half;
    const float *mean;
    const int16_t *matrix; /* [column / BLOCK, row / 2, BLOCK, 2] */
    const uint8_t *classes;
} segment;

typedef uint32_t __attribute__((may_alias)) pair_word; /* two numbers of 16 bits */
typedef int32_t ints __attribute__((vector_size(4 * BLOCK), aligned(4), may_alias));
typedef uint32_t words32 __attribute__((vector_size(4 * BLOCK), aligned(4), may_alias));
typedef uint16_t words16 __attribute__((vector_size(2 * BLOCK), aligned(2), may_alias));
typedef float floats __attribute__((vector_size(4 * BLOCK), aligned(4), may_alias));

/* AT_ONCE tokens under way. */
typedef struct {
    int16_t *rows; /* [row, column]; zero where there is no token, or a far one */
    int32_t *sums; /* [column / BLOCK, row, BLOCK] */
    int64_t *far_sums; /* [row, column], of far tokens, and of what is escaped */
    int is_far[AT_ONCE];
    float *units; /* [column] */
    uint8_t *symbols; /* [column] */
    const void **tables; /* [column], of its class */
} tokens;

static size_t bytes_of_tokens(size_t num_columns) {
    return num_columns * (AT_ONCE * (sizeof(int16_t) + sizeof(int32_t) + sizeof(int64_t)) + sizeof(void *) +
                          sizeof(float) + 1);
}

/* `tables`: of the classes, one after the other. */
static void place_tokens(tokens *at, uint8_t *memory, const segment *of, const uint8_t *tables, size_t table_bytes) {
    const size_t num_columns = of->num_columns;
    at->far_sums = (int64_t *)memory;
    at->tables = (const void **)(at->far_sums + AT_ONCE * num_columns);
    at->sums = (int32_t *)(at->tables + num_columns);
    at->units = (float *)(at->sums + AT_ONCE * num_columns);
    at->rows = (int16_t *)(at->units + num_columns);
    at->symbols = (uint8_t *)(at->rows + AT_ONCE * num_columns);
    for (size_t i = 0; i < num_columns; i++) at->tables[i] = tables + of->classes[i] * table_bytes;
}

/* ------------------------------------------------------------------------------------------------ products */

/* Sums [token, BLOCK] of `rows` [AT_ONCE, columns / 2], pairs of 16 bits, by one block of a matrix. `pairs` names the
 * pairs that are not zero in all rows. */
typedef void block_product(const pair_word *rows, size_t num_pairs_each, const uint16_t *pairs, size_t num_pairs,
                           const int16_t *block, int32_t *sums);

static void product_plain(const pair_word *rows, size_t num_pairs_each, const uint16_t *pairs, size_t num_pairs,
                          const int16_t *block, int32_t *sums) {
    memset(sums, 0, AT_ONCE * BLOCK * sizeof *sums);
    for (size_t i = 0; i < num_pairs; i++)
        for (int row = 0; row < AT_ONCE; row++) {
            int16_t pair[2];
            memcpy(pair, rows + (size_t)row * num_pairs_each + pairs[i], sizeof pair);
            const int16_t *by = block + (size_t)pairs[i] * BLOCK * 2;
            int32_t *into = sums + row * BLOCK; /* sums of a table that nothing checked may wrap */
            for (int column = 0; column < BLOCK; column++)
                into[column] = (int32_t)((uint32_t)into[column] + (uint32_t)(pair[0] * by[2 * column]) +
                                         (uint32_t)(pair[1] * by[2 * column + 1]));
        }
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static inline void product_avx2(const pair_word *rows, size_t num_pairs_each,
                                                         const uint16_t *pairs, size_t num_pairs,
                                                         const int16_t *block, int32_t *sums) {
    __m256i low[AT_ONCE] = {0}, high[AT_ONCE] = {0};
    for (size_t i = 0; i < num_pairs; i++) {
        const __m256i *by = (const __m256i *)(block + (size_t)pairs[i] * BLOCK * 2);
        const __m256i first = _mm256_loadu_si256(by), second = _mm256_loadu_si256(by + 1);
#pragma GCC unroll 4
        for (int row = 0; row < AT_ONCE; row++) {
            const __m256i pair = _mm256_set1_epi32((int)rows[(size_t)row * num_pairs_each + pairs[i]]);
            low[row] = _mm256_add_epi32(low[row], _mm256_madd_epi16(pair, first));
            high[row] = _mm256_add_epi32(high[row], _mm256_madd_epi16(pair, second));
        }
    }
    for (int row = 0; row < AT_ONCE; row++) {
        _mm256_storeu_si256((__m256i *)(sums + row * BLOCK), low[row]);
        _mm256_storeu_si256((__m256i *)(sums + row * BLOCK + 8), high[row]);
    }
}

__attribute__((target("avx512bw"))) static inline void product_avx512(const pair_word *rows, size_t num_pairs_each,
                                                               const uint16_t *pairs, size_t num_pairs,
                                                               const int16_t *block, int32_t *sums) {
    __m512i all[AT_ONCE] = {0};
    for (size_t i = 0; i < num_pairs; i++) {
        const __m512i by = _mm512_loadu_si512(block + (size_t)pairs[i] * BLOCK * 2);
#pragma GCC unroll 4
        for (int row = 0; row < AT_ONCE; row++) {
            const __m512i pair = _mm512_set1_epi32((int)rows[(size_t)row * num_pairs_each + pairs[i]]);
            all[row] = _mm512_add_epi32(all[row], _mm512_madd_epi16(pair, by));
        }
    }
    for (int row = 0; row < AT_ONCE; row++) _mm512_storeu_si512(sums + row * BLOCK, all[row]);
}
#endif

/* Multiply AT_ONCE rows with a matrix: sums [column / BLOCK, row, BLOCK]. */
INLINED void multiply(block_product *product, const int16_t *rows, size_t num_columns, const int16_t *matrix,
                     int32_t *sums) {
    const size_t num_pairs_each = num_columns / 2;
    const pair_word *words = (const pair_word *)rows;
    uint16_t pairs[MAX_COLUMNS / 2];
    size_t num_pairs = 0;
    for (size_t pair = 0; pair < num_pairs_each; pair++) {
        uint32_t any = 0;
        for (int row = 0; row < AT_ONCE; row++) any |= words[(size_t)row * num_pairs_each + pair];
        pairs[num_pairs] = (uint16_t)pair;
        num_pairs += any != 0;
    }
    for (size_t column = 0; column < num_columns; column += BLOCK)
        product(words, num_pairs_each, pairs, num_pairs, matrix + column * num_columns,
                sums + column * AT_ONCE);
}

/* ------------------------------------------------------------------------------------------------- floats */

INLINED uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINED float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Values from and to 16 bits as kernels/floats.py has them. */
INLINED float widened(uint16_t word, int is_half) {
    if (!is_half) return float_of((uint32_t)word << 16);
    return float_of(bits_of(float_of((word & 0x7FFFU) << 13) * 0x1p112F) | (word & 0x8000U) << 16);
}

INLINED words16 narrowed(floats values, int is_half) {
    const words32 bits = (words32)values;
    if (!is_half) return __builtin_convertvector(bits + 0x7FFF + (bits >> 16 & 1) >> 16, words16);
    const words32 magnitude = bits & 0x7FFFFFFF, is_small = (words32)(magnitude < 0x38800000);
    const words32 small = (words32)((floats)(magnitude & is_small) * 0x1p24F + 12582912.0F) - 0x4B400000;
    const words32 normal = (magnitude + 0xFFF + (magnitude >> 13 & 1) >> 13) - (112U << 10);
    const words32 word = (small & is_small) | (normal & ~is_small), fits = (words32)(word < 0x7BFF);
    return __builtin_convertvector((word & fits) | (0x7BFF & ~fits) | (bits >> 16 & 0x8000), words16);
}

/* ------------------------------------------------------------------------------------------------- encode */

typedef struct {
    const int32_t *far_matrix; /* [row, column] */
    float scale; /* from values to units */
    int shift, far_shift; /* from sums to steps */
    double limit; /* of the units' squares, above which sums take 64 bits */
    uint8_t *coded; /* [token, column], symbols */
    int32_t *escapes; /* those without a symbol from the beginning on; at last, all of them at the end */
    size_t max_escapes, num_escapes;
    uint16_t *words; /* the stream, at the end of as many as there are values */
    size_t num_words;
    uint32_t states[NUM_STATES];
} encoder;

/* Fill a row with the units of a token. Return whether it is far, -1 where its values cannot be coded. */
INLINED int find_units(const segment *of, const encoder *into, const uint16_t *words, float *units, int16_t *row,
                       int is_half) {
    uint32_t largest = 0, largest_word = 0;
    uint64_t squares = 0;
    for (size_t i = 0; i < of->num_columns; i++) {
        units[i] = (widened(words[i], is_half) - of->mean[i]) * into->scale;
        const uint32_t size = bits_of(units[i]) & 0x7FFFFFFF, word = words[i] & 0x7FFFU;
        largest = size > largest ? size : largest;
        largest_word = word > largest_word ? word : largest_word;
    }
    if (largest >= 0x4F000000 || (is_half && largest_word >= 0x7C00)) return -1; /* 2^31, or not finite */
    if (largest >= 0x46FFFF00) return 1; /* 32767.5 */
    for (size_t i = 0; i < of->num_columns; i++) {
        const int32_t unit = (int32_t)(bits_of(units[i] + 12582912.0F) - 0x4B400000); /* the nearest */
        row[i] = (int16_t)unit;
        squares += (uint32_t)(unit * unit);
    }
    return (double)squares > into->limit;
}

/* Write the symbols of a token, and append its steps that have none. Return whether these can be coded. */
static int find_slowly(encoder *into, const tokens *at, size_t row, size_t num_columns, uint8_t *coded) {
    for (size_t i = 0; i < num_columns; i++) {
        const int64_t step =
            at->is_far[row]
                ? (int64_t)((uint64_t)at->far_sums[row * num_columns + i] + (1ULL << (into->far_shift - 1))) >>
                      into->far_shift
                : (int64_t)at->sums[i / BLOCK * BLOCK * AT_ONCE + row * BLOCK + i % BLOCK] +
                          (1LL << (into->shift - 1)) >>
                      into->shift;
        coded[i] = (uint8_t)(step > -OFFSET && step < OFFSET ? step + OFFSET : 0);
        if (coded[i]) continue;
        if (into->num_escapes == into->max_escapes || step <= -LARGEST_STEPS || step >= LARGEST_STEPS) return 0;
        into->escapes[into->num_escapes++] = (int32_t)step;
    }
    return 1;
}

/* Fill `into->coded` and the beginning of `into->escapes`. Return whether the values can be coded. */
INLINED int find_symbols(const segment *of, encoder *into, tokens *at, block_product *product, int is_half) {
    const size_t num_columns = of->num_columns;
    for (size_t token = 0; token < of->num_tokens; token += AT_ONCE) {
        for (size_t row = 0; row < AT_ONCE; row++) {
            int16_t *const whole = at->rows + row * num_columns;
            const int is_there = token + row < of->num_tokens;
            at->is_far[row] =
                is_there && find_units(of, into, of->words + (token + row) * of->stride, at->units, whole, is_half);
            if (at->is_far[row] < 0) return 0;
            if (is_there && !at->is_far[row]) continue;
            memset(whole, 0, num_columns * sizeof *whole);
            int64_t *const sums = at->far_sums + row * num_columns;
            memset(sums, 0, num_columns * sizeof *sums);
            for (size_t i = 0; is_there && i < num_columns; i++) {
                const int64_t unit = (int64_t)rintf(at->units[i]);
                const int32_t *by = into->far_matrix + i * num_columns;
                for (size_t column = 0; column < num_columns; column++)
                    sums[column] = (int64_t)((uint64_t)sums[column] + (uint64_t)unit * (uint64_t)by[column]);
            }
        }
        multiply(product, at->rows, num_columns, of->matrix, at->sums);
        for (size_t row = 0; row < AT_ONCE && token + row < of->num_tokens; row++) {
            uint8_t *const coded = into->coded + (token + row) * num_columns;
            uint32_t num_coded = 0;
            for (size_t block = 0; block < num_columns; block += BLOCK) {
                const int32_t *const in_block = at->sums + block * AT_ONCE + row * BLOCK;
                for (size_t i = 0; i < BLOCK; i++) {
                    const int32_t step = (int32_t)((uint32_t)in_block[i] + (1U << (into->shift - 1))) >> into->shift;
                    coded[block + i] = (uint8_t)(step + OFFSET);
                    num_coded += (uint32_t)(step + OFFSET - 1) < 2 * OFFSET - 1;
                }
            }
            if ((num_coded < num_columns || at->is_far[row]) && !find_slowly(into, at, row, num_columns, coded))
                return 0;
        }
    }
    return 1;
}

/* Code `into->coded`, from the last one to the first. Return whether there is room for its escapes. */
INLINED int code_symbols(const segment *of, encoder *into, const void *const *tables) {
    const size_t num_values = of->num_tokens * of->num_columns;
    uint16_t *const end = into->words + num_values, *words = end;
    size_t num_far = into->num_escapes, first_escape = into->max_escapes;
    uint32_t states[NUM_STATES];
    for (int lane = 0; lane < NUM_STATES; lane++) states[lane] = LOWEST_STATE;
    for (const uint8_t *row = into->coded + num_values; row > into->coded;) {
        row -= of->num_columns;
        for (size_t column = of->num_columns; column;) {
            column -= NUM_STATES;
#pragma GCC unroll 8
            for (int lane = NUM_STATES - 1; lane >= 0; lane--) {
                const uint32_t symbol = row[column + (size_t)lane];
                const coded_symbol *in_class = tables[column + (size_t)lane];
                const coded_symbol *found = in_class + symbol;
                if (__builtin_expect(found->is_escape, 0)) {
                    const int32_t value = symbol ? (int32_t)symbol - OFFSET : into->escapes[--num_far];
                    if (first_escape == num_far) return 0;
                    into->escapes[--first_escape] = value;
                    found = in_class;
                }
                uint64_t state = states[lane];
                const uint32_t is_full = state >> 20 >= found->frequency;
                words[-1] = (uint16_t)state;
                words -= is_full;
                state >>= is_full * 16;
                const uint64_t quotient = state * found->reciprocal >> 44;
                states[lane] = (uint32_t)(state + quotient * (NUM_SLOTS - found->frequency) + found->start);
            }
        }
    }
    memcpy(into->states, states, sizeof states);
    into->num_words = (size_t)(end - words);
    into->num_escapes = into->max_escapes - first_escape;
    return 1;
}

/* ------------------------------------------------------------------------------------------------- decode */

typedef struct {
    float scale;
    const uint8_t *words, *end; /* the stream; may lie at any address */
    const uint8_t *escapes, *escapes_end;
    uint32_t states[NUM_STATES];
} decoder;

/* Decode the symbols of a row, by tables [slot] of symbols, and [symbol] of starts and
 * frequencies << 16. Return whether there were words enough. */
INLINED int next_symbols(size_t num_columns, decoder *from, const void *const *restrict tables,
                         uint8_t *restrict symbols) {
    uint32_t states[NUM_STATES];
    const uint8_t *words = from->words, *const end = from->end;
    memcpy(states, from->states, sizeof states);
    for (size_t column = 0; column < num_columns; column += NUM_STATES) {
        uint8_t padded[2 * NUM_STATES] = {0};
        const uint8_t *next = words;
        const size_t left = (size_t)(end - words);
        if (__builtin_expect(left < sizeof padded, 0)) memcpy(padded, words, left), next = padded;
        const uint8_t *const first = next;
#pragma GCC unroll 8
        for (int lane = 0; lane < NUM_STATES; lane++) {
            const uint32_t state = states[lane];
            const uint8_t *const table = tables[column + (size_t)lane];
            const uint32_t slot = state & NUM_SLOTS - 1, symbol = table[slot];
            uint32_t entry;
            memcpy(&entry, table + NUM_SLOTS + sizeof entry * symbol, sizeof entry);
            symbols[column + (size_t)lane] = (uint8_t)symbol;
            const uint32_t small = (entry >> 16) * (state >> PRECISION) + slot - (entry & 0xFFFF);
            uint16_t word;
            memcpy(&word, next, sizeof word);
            const uint32_t is_small = small < LOWEST_STATE; /* no branch: nothing foresees it */
            states[lane] = small << 16 * is_small | (word & -is_small);
            next += 2 * is_small;
        }
        if ((size_t)(next - first) > left) return 0;
        words += next - first;
    }
    from->words = words;
    memcpy(from->states, states, sizeof states);
    return 1;
}

/* Add what the escapes of a token are, each times its row, and leave 0 in their place. Return whether there were as
 * many. */
static int add_escapes(const segment *of, decoder *from, int16_t *steps, int64_t *sums) {
    const size_t num_columns = of->num_columns;
    memset(sums, 0, num_columns * sizeof *sums);
    for (size_t i = 0; i < num_columns; i++) {
        if (steps[i] != -OFFSET) continue;
        int32_t step;
        if (from->escapes == from->escapes_end) return 0;
        memcpy(&step, from->escapes, sizeof step);
        from->escapes += sizeof step;
        steps[i] = 0;
        const int16_t *by = of->matrix + i / 2 * 2 * BLOCK + i % 2;
        for (size_t block = 0; block < num_columns; block += BLOCK)
            for (size_t column = 0; column < BLOCK; column++)
                sums[block + column] += (int64_t)step * by[block * num_columns + column * 2];
    }
    return 1;
}

INLINED int decode_tokens(const segment *of, decoder *from, tokens *at, block_product *product, int is_half) {
    const size_t num_columns = of->num_columns;
    for (size_t token = 0; token < of->num_tokens; token += AT_ONCE) {
        for (size_t row = 0; row < AT_ONCE; row++) {
            int16_t *const steps = at->rows + row * num_columns;
            const int is_there = token + row < of->num_tokens;
            uint32_t num_far = 0;
            if (is_there && !next_symbols(num_columns, from, at->tables, at->symbols)) return 0;
            for (size_t i = 0; i < num_columns; i++) {
                steps[i] = (int16_t)(at->symbols[i] - OFFSET);
                num_far += !at->symbols[i];
            }
            at->is_far[row] = is_there && num_far;
            if (at->is_far[row] && !add_escapes(of, from, steps, at->far_sums + row * num_columns)) return 0;
            if (!is_there) memset(steps, 0, num_columns * sizeof *steps);
        }
        multiply(product, at->rows, num_columns, of->matrix, at->sums);
        for (size_t row = 0; row < AT_ONCE && token + row < of->num_tokens; row++) {
            uint16_t *const words = of->words + (token + row) * of->stride;
            const int64_t *const far_sums = at->far_sums + row * num_columns;
            for (size_t block = 0; block < num_columns; block += BLOCK) {
                const int32_t *const in_block = at->sums + block * AT_ONCE + row * BLOCK;
                floats sums = __builtin_convertvector(*(const ints *)in_block, floats);
                if (__builtin_expect(at->is_far[row], 0))
                    for (size_t i = 0; i < BLOCK; i++) sums[i] = (float)(in_block[i] + far_sums[block + i]);
                const floats mean = *(const floats *)(of->mean + block);
                *(words16 *)(words + block) = narrowed(sums * from->scale + mean, is_half);
            }
        }
    }
    int is_even = from->words == from->end && from->escapes == from->escapes_end;
    for (int lane = 0; lane < NUM_STATES; lane++) is_even &= from->states[lane] == LOWEST_STATE;
    return is_even;
}

/* ------------------------------------------------------------------------------------------- instructions */

/* Both, made for the instructions of a product. */
#define FOR_INSTRUCTIONS(name, attributes)                                                                          \
    attributes static int encode_##name(const segment *of, encoder *into, tokens *at) {                             \
        return (of->is_half ? find_symbols(of, into, at, product_##name, 1)                                         \
                            : find_symbols(of, into, at, product_##name, 0)) &&                                     \
               code_symbols(of, into, at->tables);                                                                  \
    }                                                                                                               \
    attributes static int decode_##name(const segment *of, decoder *from, tokens *at) {                             \
        return of->is_half ? decode_tokens(of, from, at, product_##name, 1)                                         \
                           : decode_tokens(of, from, at, product_##name, 0);                                        \
    }
FOR_INSTRUCTIONS(plain, )
#if defined(__x86_64__)
FOR_INSTRUCTIONS(avx2, __attribute__((target("avx2,bmi2"))))
FOR_INSTRUCTIONS(avx512, __attribute__((target("avx512bw,bmi2"))))
#endif

static struct {
    int (*encode)(const segment *of, encoder *into, tokens *at);
    int (*decode)(const segment *of, decoder *from, tokens *at);
} here = {encode_plain, decode_plain};

/* Take the instructions called so, NULL for the best; plain ones where these are not there. */
void use_transform(const char *name) {
    here.encode = encode_plain, here.decode = decode_plain;
#if defined(__x86_64__)
    if (!__builtin_cpu_supports("bmi2")) return;
    if ((!name || !strcmp(name, "avx512")) && __builtin_cpu_supports("avx512bw"))
        here.encode = encode_avx512, here.decode = decode_avx512;
    else if ((!name || !strcmp(name, "avx2")) && __builtin_cpu_supports("avx2"))
        here.encode = encode_avx2, here.decode = decode_avx2;
#else
    (void)name;
#endif
}

/* -------------------------------------------------------------------------------------------------- Python */

/* Read the segment that all arguments together tell of. Return 0 with an error set where they do not fit. */
static int is_segment(segment *of, const Py_buffer *words, const Py_buffer *matrix, const Py_buffer *mean,
                      const Py_buffer *classes, Py_ssize_t first, Py_ssize_t stride, Py_ssize_t num_classes) {
    const Py_ssize_t num_columns = classes->len;
    int is_valid = num_columns && num_columns % BLOCK == 0 && num_columns <= MAX_COLUMNS && first >= 0 &&
                   stride >= num_columns && first <= stride - num_columns && stride <= PY_SSIZE_T_MAX / 2 &&
                   words->len % (2 * stride) == 0 && matrix->len == 2 * num_columns * num_columns &&
                   mean->len == 4 * num_columns &&
                   !(((uintptr_t)words->buf | (uintptr_t)matrix->buf) % 2 || (uintptr_t)mean->buf % 4);
    for (Py_ssize_t i = 0; is_valid && i < num_columns; i++) is_valid = ((uint8_t *)classes->buf)[i] < num_classes;
    if (!is_valid) {
        PyErr_SetString(PyExc_ValueError, "words, matrix, mean and classes are not of one segment");
        return 0;
    }
    of->words = (uint16_t *)words->buf + first;
    of->num_tokens = (size_t)(words->len / (2 * stride)), of->stride = (size_t)stride;
    of->num_columns = (size_t)num_columns;
    of->mean = mean->buf, of->matrix = matrix->buf, of->classes = classes->buf;
    return 1;
}

enum { WORDS, MATRIX, MEAN, CLASSES, TABLE, STORED, FAR_MATRIX, NUM_BUFFERS };

static PyObject *released(Py_buffer *buffers, PyObject *result) {
    for (int i = 0; i < NUM_BUFFERS; i++)
        if (buffers[i].obj) PyBuffer_Release(&buffers[i]);
    return result;
}

const char encode_transform_doc[] =
    "encode_transform(words, matrix, mean, classes, symbols, into, far_matrix, first, stride, is_half, scale,\n"
    "                 shift, far_shift, limit, /)\n--\n\n"
    "Encode columns of `words` [token, stride] from `first` on; return the bytes written, -1 where they do not\n"
    "fit or a value has no code. See Forward, and the twin in tiers/codecs/lossy/transform.py.";

PyObject *encode_transform(PyObject *module, PyObject *args) {
    Py_buffer b[NUM_BUFFERS] = {0};
    Py_ssize_t first, stride;
    segment of;
    encoder into = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*y*y*y*w*y*nnpfiid", &b[WORDS], &b[MATRIX], &b[MEAN], &b[CLASSES], &b[TABLE],
                          &b[STORED], &b[FAR_MATRIX], &first, &stride, &of.is_half, &into.scale, &into.shift,
                          &into.far_shift, &into.limit))
        return released(b, NULL);
    const Py_ssize_t table_bytes = NUM_SYMBOLS * (Py_ssize_t)sizeof(coded_symbol);
    if (!is_segment(&of, &b[WORDS], &b[MATRIX], &b[MEAN], &b[CLASSES], first, stride, b[TABLE].len / table_bytes))
        return released(b, NULL);
    if (b[FAR_MATRIX].len != 2 * b[MATRIX].len || (uintptr_t)b[FAR_MATRIX].buf % 4 || (uintptr_t)b[TABLE].buf % 8 ||
        into.shift < 1 || into.shift > 30 || into.far_shift < 1 || into.far_shift > 62) {
        PyErr_SetString(PyExc_ValueError, "a far matrix, symbols or shifts that no table has");
        return released(b, NULL);
    }
    const size_t num_values = of.num_tokens * of.num_columns;
    into.far_matrix = b[FAR_MATRIX].buf;
    into.max_escapes = num_values / 8 + 1; /* _MAX_ESCAPES_SHARE of the twin */
    const size_t escape_bytes = (4 * into.max_escapes + 7) / 8 * 8;
    uint8_t *memory = PyMem_Malloc(escape_bytes + bytes_of_tokens(of.num_columns) + 3 * num_values);
    if (!memory) return released(b, PyErr_NoMemory());
    tokens at;
    into.escapes = (int32_t *)memory;
    place_tokens(&at, memory + escape_bytes, &of, b[TABLE].buf, (size_t)table_bytes);
    into.words = (uint16_t *)(memory + escape_bytes + bytes_of_tokens(of.num_columns));
    into.coded = (uint8_t *)(into.words + num_values);
    Py_ssize_t length = -1;
    Py_BEGIN_ALLOW_THREADS
    if (here.encode(&of, &into, &at)) {
        const size_t end = HEAD_BYTES + 4 * into.num_escapes + 2 * into.num_words;
        if (end <= (size_t)b[STORED].len) {
            uint8_t *const stored = b[STORED].buf;
            const uint32_t counts[2] = {(uint32_t)into.num_words, (uint32_t)into.num_escapes};
            memcpy(stored, counts, sizeof counts);
            memcpy(stored + sizeof counts, into.states, sizeof into.states);
            memcpy(stored + HEAD_BYTES, into.escapes + into.max_escapes - into.num_escapes, 4 * into.num_escapes);
            memcpy(stored + HEAD_BYTES + 4 * into.num_escapes, into.words + num_values - into.num_words,
                   2 * into.num_words);
            length = (Py_ssize_t)end;
        }
    }
    Py_END_ALLOW_THREADS
    PyMem_Free(memory);
    return released(b, PyLong_FromSsize_t(length));
}

const char decode_transform_doc[] =
    "decode_transform(words, matrix, mean, classes, slots, stored, num_escapes, first, stride, is_half, scale, /)\n"
    "--\n\n"
    "Undo `encode_transform`: `stored` is states, `num_escapes` escapes and words. Return whether all came out\n"
    "even; `words` is undefined where they did not.";

PyObject *decode_transform(PyObject *module, PyObject *args) {
    Py_buffer b[NUM_BUFFERS] = {0};
    Py_ssize_t num_escapes, first, stride;
    segment of;
    decoder from;
    (void)module;
    if (!PyArg_ParseTuple(args, "w*y*y*y*y*y*nnnpf", &b[WORDS], &b[MATRIX], &b[MEAN], &b[CLASSES], &b[TABLE],
                          &b[STORED], &num_escapes, &first, &stride, &of.is_half, &from.scale))
        return released(b, NULL);
    if (!is_segment(&of, &b[WORDS], &b[MATRIX], &b[MEAN], &b[CLASSES], first, stride, b[TABLE].len / SLOTS_BYTES))
        return released(b, NULL);
    const Py_ssize_t rest = b[STORED].len - (Py_ssize_t)sizeof from.states;
    if (rest < 0 || num_escapes < 0 || num_escapes > rest / 4 || rest % 2) {
        PyErr_SetString(PyExc_ValueError, "states, escapes and words that are not as long");
        return released(b, NULL);
    }
    uint8_t *memory = PyMem_Malloc(bytes_of_tokens(of.num_columns));
    if (!memory) return released(b, PyErr_NoMemory());
    tokens at;
    place_tokens(&at, memory, &of, b[TABLE].buf, SLOTS_BYTES);
    memset(at.symbols, 0, of.num_columns);
    memcpy(from.states, b[STORED].buf, sizeof from.states);
    from.escapes = (uint8_t *)b[STORED].buf + sizeof from.states;
    from.words = from.escapes_end = from.escapes + 4 * num_escapes;
    from.end = (uint8_t *)b[STORED].buf + b[STORED].len;
    int is_even;
    Py_BEGIN_ALLOW_THREADS
    is_even = here.decode(&of, &from, &at);
    Py_END_ALLOW_THREADS
    PyMem_Free(memory);
    return released(b, PyBool_FromLong(is_even));
}
