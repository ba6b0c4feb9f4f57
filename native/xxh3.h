/* XXH3-128 of a payload while it is copied: each stripe is loaded once, stored and hashed.
 *
 * What is hashed is what is stored, even if another process changes the source meanwhile, and the hash costs no
 * second pass over memory. The hash is that of https://github.com/Cyan4973/xxHash (doc/xxhash_spec.md) without
 * a seed, for payloads of more than 240 bytes; shorter ones have another form there, and are left to Python.
 * xxhash.h itself was rejected: it can only read, so a copy and a hash are two passes, 12 to 18 GB/s instead of
 * the 17 to 22 that memcpy has. Algorithm and constants are xxHash's, whose licence is LICENSE.xxHash beside this.
 */
#ifndef KVTIER_XXH3_H
#define KVTIER_XXH3_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

enum {
    XXH3_MIN_BYTES = 241,
    XXH3_DIGEST_BYTES = 16,
    STRIPE_BYTES = 64,
    STRIPES_OF_BLOCK = 16,
    BLOCK_BYTES = STRIPE_BYTES * STRIPES_OF_BLOCK,
    SECRET_BYTES = 192,
};

static const uint32_t PRIME32_1 = 0x9E3779B1U, PRIME32_2 = 0x85EBCA77U, PRIME32_3 = 0xC2B2AE3DU;
static const uint64_t PRIME64_1 = 0x9E3779B185EBCA87ULL, PRIME64_2 = 0xC2B2AE3D27D4EB4FULL,
                      PRIME64_3 = 0x165667B19E3779F9ULL, PRIME64_4 = 0x85EBCA77C2B2AE63ULL,
                      PRIME64_5 = 0x27D4EB2F165667C5ULL, PRIME_OF_END = 0x165667919E3779F9ULL;

static const uint8_t SECRET[SECRET_BYTES] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static inline uint64_t read_u64(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

/* Each `copy_blocks` copies and accumulates `count` whole blocks. Streaming stores leave the caches alone; they need
 * an aligned target and, after the last one, a fence. */
typedef void copy_blocks(uint64_t *sums, uint8_t *into, const uint8_t *from, size_t count, int is_streamed);

static inline void add_stripe(uint64_t *sums, const uint8_t *stripe, const uint8_t *key) {
    for (int lane = 0; lane < 8; lane++) {
        uint64_t value = read_u64(stripe + 8 * lane), keyed = value ^ read_u64(key + 8 * lane);
        sums[lane ^ 1] += value;
        sums[lane] += (keyed & 0xFFFFFFFFU) * (keyed >> 32);
    }
}

static void copy_blocks_plain(uint64_t *sums, uint8_t *into, const uint8_t *from, size_t count, int is_streamed) {
    (void)is_streamed;
    for (; count; count--, into += BLOCK_BYTES, from += BLOCK_BYTES) {
        memmove(into, from, BLOCK_BYTES);
        for (int stripe = 0; stripe < STRIPES_OF_BLOCK; stripe++)
            add_stripe(sums, into + STRIPE_BYTES * stripe, SECRET + 8 * stripe);
        for (int lane = 0; lane < 8; lane++) {
            uint64_t sum = sums[lane];
            sums[lane] = (sum ^ sum >> 47 ^ read_u64(SECRET + SECRET_BYTES - STRIPE_BYTES + 8 * lane)) * PRIME32_1;
        }
    }
}

#if defined(__x86_64__)
__attribute__((target("avx512f"))) static void copy_blocks_avx512(
    uint64_t *sums, uint8_t *into, const uint8_t *from, size_t count, int is_streamed) {
    __m512i sum = _mm512_loadu_si512(sums);
    const __m512i end_key = _mm512_loadu_si512(SECRET + SECRET_BYTES - STRIPE_BYTES);
    const __m512i prime = _mm512_set1_epi64(PRIME32_1);
    for (; count; count--, into += BLOCK_BYTES, from += BLOCK_BYTES) {
        for (int stripe = 0; stripe < STRIPES_OF_BLOCK; stripe++) {
            __m512i value = _mm512_loadu_si512(from + STRIPE_BYTES * stripe);
            if (is_streamed)
                _mm512_stream_si512((void *)(into + STRIPE_BYTES * stripe), value);
            else
                _mm512_storeu_si512(into + STRIPE_BYTES * stripe, value);
            __m512i keyed = _mm512_xor_si512(value, _mm512_loadu_si512(SECRET + 8 * stripe));
            __m512i product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
            sum = _mm512_add_epi64(sum, _mm512_add_epi64(product, _mm512_shuffle_epi32(value, _MM_PERM_BADC)));
        }
        __m512i mixed = _mm512_xor_si512(_mm512_xor_si512(sum, _mm512_srli_epi64(sum, 47)), end_key);
        __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(mixed, 32), prime);
        sum = _mm512_add_epi64(_mm512_mul_epu32(mixed, prime), _mm512_slli_epi64(high, 32));
    }
    _mm512_storeu_si512(sums, sum);
}

__attribute__((target("avx2"))) static void copy_blocks_avx2(
    uint64_t *sums, uint8_t *into, const uint8_t *from, size_t count, int is_streamed) {
    __m256i sum[2] = {_mm256_loadu_si256((const void *)sums), _mm256_loadu_si256((const void *)(sums + 4))};
    const __m256i prime = _mm256_set1_epi64x(PRIME32_1);
    for (; count; count--, into += BLOCK_BYTES, from += BLOCK_BYTES) {
        for (int stripe = 0; stripe < STRIPES_OF_BLOCK; stripe++) {
            for (int half = 0; half < 2; half++) {
                const int offset = STRIPE_BYTES * stripe + 32 * half;
                __m256i value = _mm256_loadu_si256((const void *)(from + offset));
                if (is_streamed)
                    _mm256_stream_si256((void *)(into + offset), value);
                else
                    _mm256_storeu_si256((void *)(into + offset), value);
                __m256i key = _mm256_loadu_si256((const void *)(SECRET + 8 * stripe + 32 * half));
                __m256i keyed = _mm256_xor_si256(value, key);
                __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
                __m256i swapped = _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
                sum[half] = _mm256_add_epi64(sum[half], _mm256_add_epi64(product, swapped));
            }
        }
        for (int half = 0; half < 2; half++) {
            const uint8_t *end_key = SECRET + SECRET_BYTES - STRIPE_BYTES + 32 * half;
            __m256i mixed = _mm256_xor_si256(sum[half], _mm256_srli_epi64(sum[half], 47));
            mixed = _mm256_xor_si256(mixed, _mm256_loadu_si256((const void *)end_key));
            __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
            sum[half] = _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
        }
    }
    _mm256_storeu_si256((void *)sums, sum[0]);
    _mm256_storeu_si256((void *)(sums + 4), sum[1]);
}
#elif defined(__aarch64__)
static void copy_blocks_neon(uint64_t *sums, uint8_t *into, const uint8_t *from, size_t count, int is_streamed) {
    uint64x2_t sum[4];
    (void)is_streamed;
    for (int quarter = 0; quarter < 4; quarter++) sum[quarter] = vld1q_u64(sums + 2 * quarter);
    for (; count; count--, into += BLOCK_BYTES, from += BLOCK_BYTES) {
        for (int stripe = 0; stripe < STRIPES_OF_BLOCK; stripe++) {
            for (int quarter = 0; quarter < 4; quarter++) {
                const int offset = STRIPE_BYTES * stripe + 16 * quarter;
                uint8x16_t bytes = vld1q_u8(from + offset);
                vst1q_u8(into + offset, bytes);
                uint64x2_t value = vreinterpretq_u64_u8(bytes);
                uint64x2_t key = vreinterpretq_u64_u8(vld1q_u8(SECRET + 8 * stripe + 16 * quarter));
                uint64x2_t keyed = veorq_u64(value, key);
                sum[quarter] = vaddq_u64(sum[quarter], vextq_u64(value, value, 1));
                sum[quarter] = vmlal_u32(sum[quarter], vmovn_u64(keyed), vshrn_n_u64(keyed, 32));
            }
        }
        for (int quarter = 0; quarter < 4; quarter++) {
            const uint8_t *end_key = SECRET + SECRET_BYTES - STRIPE_BYTES + 16 * quarter;
            uint64x2_t mixed = veorq_u64(sum[quarter], vshrq_n_u64(sum[quarter], 47));
            mixed = veorq_u64(mixed, vreinterpretq_u64_u8(vld1q_u8(end_key)));
            uint64x2_t high = vmull_u32(vshrn_n_u64(mixed, 32), vdup_n_u32(PRIME32_1));
            sum[quarter] = vmlal_u32(vshlq_n_u64(high, 32), vmovn_u64(mixed), vdup_n_u32(PRIME32_1));
        }
    }
    for (int quarter = 0; quarter < 4; quarter++) vst1q_u64(sums + 2 * quarter, sum[quarter]);
}
#endif

/* Return the fastest one that this processor has, of those named in `allowed` (all, if it is NULL). */
static copy_blocks *best_copy_blocks(const char *allowed) {
#define MAY(name) (!allowed || !strcmp(allowed, name))
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (MAY("avx512") && __builtin_cpu_supports("avx512f")) return copy_blocks_avx512;
    if (MAY("avx2") && __builtin_cpu_supports("avx2")) return copy_blocks_avx2;
#elif defined(__aarch64__)
    if (MAY("neon")) return copy_blocks_neon;
#endif
    return !allowed || !strcmp(allowed, "plain") ? copy_blocks_plain : NULL;
#undef MAY
}

static uint64_t merged(const uint64_t *sums, const uint8_t *key, uint64_t result) {
    for (int pair = 0; pair < 4; pair++) {
        uint64_t first = sums[2 * pair] ^ read_u64(key + 16 * pair);
        uint64_t second = sums[2 * pair + 1] ^ read_u64(key + 16 * pair + 8);
        unsigned __int128 product = (unsigned __int128)first * second;
        result += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    result ^= result >> 37;
    result *= PRIME_OF_END;
    return result ^ result >> 32;
}

/* Copy `length` bytes, at least XXH3_MIN_BYTES, and write the digest of the copy in its canonical form. */
static void copy_and_digest(
    copy_blocks *copy, uint8_t *into, const uint8_t *from, size_t length, int is_streamed, uint8_t *digest) {
    uint64_t sums[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    const size_t num_blocks = (length - 1) / BLOCK_BYTES, rest = length - num_blocks * BLOCK_BYTES;
    copy(sums, into, from, num_blocks, is_streamed && (uintptr_t)into % STRIPE_BYTES == 0);
    /* The rest and the last stripe, which may begin before it, are read from the copy: the source may change. */
    uint8_t *end = into + length;
    memmove(end - rest, from + length - rest, rest);
    for (size_t stripe = 0; stripe < (rest - 1) / STRIPE_BYTES; stripe++)
        add_stripe(sums, end - rest + STRIPE_BYTES * stripe, SECRET + 8 * stripe);
    add_stripe(sums, end - STRIPE_BYTES, SECRET + SECRET_BYTES - STRIPE_BYTES - 7);
    uint64_t low = merged(sums, SECRET + 11, length * PRIME64_1);
    uint64_t high = merged(sums, SECRET + SECRET_BYTES - STRIPE_BYTES - 11, ~(length * PRIME64_2));
    low = __builtin_bswap64(low), high = __builtin_bswap64(high);
    memcpy(digest, &high, sizeof high);
    memcpy(digest + sizeof high, &low, sizeof low);
}

#endif
