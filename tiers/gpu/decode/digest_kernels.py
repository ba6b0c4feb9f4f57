"""xxh3-128 on a device: the hash that every record and slot carries, taken where the bytes are.

What comes to a device encoded, or straight from a disk, is compared with what was put before it is published.
The hash of the host is reproduced bit for bit rather than replaced by one that suits a device, because it is
compared with what stands in records.

xxh3 looks sequential and is not: it takes 64 bytes (a stripe) into eight sums, and only after 1,024 bytes (a
block) are the sums scrambled. What a block adds to the sums depends on nothing before it. So one kernel
computes what every block adds, all blocks at a time; a second one walks the blocks of each fragment, 64 bytes
instead of 1,024 a step, eight threads a fragment; a third one merges the eight. No barrier, no shuffle, no
shared memory, as in exponent_kernels.py and for the same reason: the tests run this very source on the host.

Rejected: one warp a fragment with shuffles (one sixteenth of the speed for long fragments, and nothing that a
host could check); another hash in the record beside the first (every writer would have to take it, and what
is stored already has none).

Fragments are longer than 240 bytes, where xxh3 begins to work like this, a multiple of eight, and lie at
multiples of eight. The low half is the hash xxh3-64 of the same bytes. Source: xxHash 0.8, xxhash.h,
XXH3_hashLong_128b, default secret, seed 0. Never ran on a GPU.
"""

import struct

from ..device.launching import PRELUDE

MIN_BYTES = 241  # shorter inputs are hashed in another way
STRIPE_BYTES, BLOCK_BYTES, LANES = 64, 1024, 8
NAMES = ("kvtier_digest_blocks", "kvtier_digest_walk", "kvtier_digest_merge")

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def _words(start: int, count: int) -> str:
    """Return words of the secret, from byte `start` on, as an initialiser."""
    return ", ".join(f"{word:#x}ull" for word in struct.unpack_from(f"<{count}Q", _SECRET, start))


_TABLES = f"""
__device__ static const u64 KEYS[] = {{{_words(0, 24)}}};   // of a stripe: from its number on
__device__ static const u64 SCRAMBLE[] = {{{_words(128, 8)}}};
__device__ static const u64 LAST[] = {{{_words(121, 8)}}};  // of the last 64 bytes
__device__ static const u64 MERGE_LOW[] = {{{_words(11, 8)}}};
__device__ static const u64 MERGE_HIGH[] = {{{_words(117, 8)}}};
"""

SOURCE = (
    PRELUDE
    + _TABLES
    + r"""
static const u64 PRIME32_1 = 0x9E3779B1ull, PRIME32_2 = 0x85EBCA77ull, PRIME32_3 = 0xC2B2AE3Dull;
static const u64 PRIME64_1 = 0x9E3779B185EBCA87ull, PRIME64_2 = 0xC2B2AE3D27D4EB4Full;
static const u64 PRIME64_3 = 0x165667B19E3779F9ull, PRIME64_4 = 0x85EBCA77C2B2AE63ull;
static const u64 PRIME64_5 = 0x27D4EB2F165667C5ull;

// What one stripe adds to one of the eight sums: the word beside it, and its own two halves multiplied.
__device__ static u64 taken(const u64* stripe, int lane, u64 key)
{
    const u64 mixed = stripe[lane] ^ key;
    return stripe[lane ^ 1] + (mixed & 0xffffffffull) * (mixed >> 32);
}

__device__ static u64 begin_of(int lane)
{
    const u64 begins[] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5,
                          PRIME32_1};
    return begins[lane];
}

// sums: [fragment, block, lane], what each whole block adds.
extern "C" __global__ void kvtier_digest_blocks(
    int num_fragments, i64 num_bytes, i64 num_blocks, const u64* places, u64* sums)
{
    EACH(i, num_fragments * num_blocks * 8) {
        const int lane = (int)(i % 8);
        const i64 block = i / 8 % num_blocks;
        const u64* stripe = (const u64*)(places[i / 8 / num_blocks] + block * 1024);
        u64 sum = 0;
        for (int number = 0; number < 16; ++number, stripe += 8)
            sum += taken(stripe, lane, KEYS[number + lane]);
        sums[i] = sum;
    }
}

// states: [fragment, lane], the sums after everything but the merge.
extern "C" __global__ void kvtier_digest_walk(
    int num_fragments, i64 num_bytes, i64 num_blocks, const u64* places, const u64* sums, u64* states)
{
    EACH(i, (i64)num_fragments * 8) {
        const int lane = (int)(i % 8);
        const i64 fragment = i / 8;
        const u64* sum = sums + fragment * num_blocks * 8 + lane;
        u64 state = begin_of(lane);
        for (i64 block = 0; block < num_blocks; ++block, sum += 8) {
            state += *sum;
            state = ((state ^ state >> 47) ^ SCRAMBLE[lane]) * PRIME32_1;
        }
        const u64 end = places[fragment] + num_bytes;
        const u64* stripe = (const u64*)(places[fragment] + num_blocks * 1024);
        for (int number = 0; (u64)(stripe + 8) < end; ++number, stripe += 8)
            state += taken(stripe, lane, KEYS[number + lane]);
        states[i] = state + taken((const u64*)(end - 64), lane, LAST[lane]);
    }
}

__device__ static u64 merged(const u64* state, const u64* keys, u64 hash)
{
    for (int pair = 0; pair < 8; pair += 2) {
        const u64 left = state[pair] ^ keys[pair], right = state[pair + 1] ^ keys[pair + 1];
        hash += left * right ^ __umul64hi(left, right);
    }
    hash = (hash ^ hash >> 37) * 0x165667919E3779F9ull;
    return hash ^ hash >> 32;
}

// digests: [fragment, high and low half].
extern "C" __global__ void kvtier_digest_merge(
    int num_fragments, i64 num_bytes, const u64* states, u64* digests)
{
    EACH(fragment, num_fragments) {
        const u64* state = states + fragment * 8;
        digests[2 * fragment] = merged(state, MERGE_HIGH, ~((u64)num_bytes * PRIME64_2));
        digests[2 * fragment + 1] = merged(state, MERGE_LOW, (u64)num_bytes * PRIME64_1);
    }
}
"""
)


def num_blocks_of(num_bytes: int) -> int:
    """Return how many whole blocks are scrambled before the end of `num_bytes` bytes."""
    return (num_bytes - 1) // BLOCK_BYTES
