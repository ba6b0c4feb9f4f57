"""The decoder of `exponents` on a device: the values of tiers/codecs/exact/exponents.py, in CUDA.

Bit planes were chosen for this: a value's three code bits stand in one byte each, at its own position, and
which values are exceptions is the AND of three words. So no thread reads what another one decoded. Where an
exception stands in the list is the number of marked bits before it, which every thread counts for itself with
popcounts of words that its whole block shares; only the totals of blocks are added up in order, by one small
kernel between two large ones. Not one barrier, shuffle or word of shared memory is needed, which is also why
the tests can run this very source on the host, thread after thread, against numba's loops.

Rejected: one kernel with a scan in shared memory (two launches less, some ten microseconds a batch, for a
kernel that could be checked on a GPU only); decoding by warps with ballots (the marks are a ballot already,
stored); cupy's own kernels for scans (they allocate from cupy's pool and know nothing of our streams).

A record is not believed: before anything is written, `find` decides whether there are as many exceptions as
the head says and whether they end before the record does. Shape and length are the caller's to check
(exponents.py does). All fragments of a launch have one shape.

Layout of a stored fragment: see Exponents. Never ran on a GPU.
"""

from ..device.launching import PRELUDE

SOURCE = (
    PRELUDE
    + r"""
// The shape of every fragment of a launch. num_parts: layers times planes; num_values, num_blocks: of a part,
// in whole blocks of 512 values; blocks_at, exceptions_at: bytes from a fragment's begin.
#define SHAPE \
    int num_fragments, int num_parts, int num_values, int num_blocks, int blocks_at, int exceptions_at

static const int BLOCK = 512, LANES = 64, BLOCK_BYTES = 512 + 192;
static const u32 WRONG = 1;

__device__ static const u8* block_of(const u64* stored, i64 index, i64 per_fragment, int blocks_at)
{
    return (const u8*)stored[index / per_fragment] + blocks_at + index % per_fragment * BLOCK_BYTES;
}

__device__ static u64 marks_of(const u8* block, int word)  // bit: this value is an exception
{
    const u64* planes = (const u64*)(block + BLOCK);
    return planes[word] & planes[8 + word] & planes[16 + word];
}

__device__ static u32 marks_before(const u8* block, int lane)  // of this block
{
    u32 before = 0;
    for (int word = 0; word < lane / 8; ++word) before += __popcll(marks_of(block, word));
    return before + __popcll(marks_of(block, lane / 8) & ((1ull << lane % 8 * 8) - 1));
}

extern "C" __global__ void kvtier_exponents_count(SHAPE, const u64* stored, u32* counts)
{
    EACH(i, (i64)num_fragments * num_parts * num_blocks) {
        const u8* block = block_of(stored, i, (i64)num_parts * num_blocks, blocks_at);
        u32 count = 0;
        for (int word = 0; word < 8; ++word) count += __popcll(marks_of(block, word));
        counts[i] = count;
    }
}

// The values behind the last whole block of a part: as they are, at the end of the record.
extern "C" __global__ void kvtier_exponents_tail(
    SHAPE, const u64* stored, const u64* raw, const u32* ends, const u32* status)
{
    const int length = num_values - num_blocks * BLOCK;
    EACH(i, (i64)num_fragments * num_parts * length) {
        const i64 fragment = i / ((i64)num_parts * length);
        if (status[fragment]) continue;
        const i64 inside = i % ((i64)num_parts * length);
        const u8* bytes = (const u8*)stored[fragment] + exceptions_at + ends[fragment] + 2 * inside;
        u16* part = (u16*)raw[fragment] + inside / length * num_values + num_blocks * BLOCK;
        part[inside % length] = (u16)(bytes[0] | bytes[1] << 8);
    }
}

// offsets: where in its fragment's list the exceptions of a block begin; rooms: bytes the list may have.
extern "C" __global__ void kvtier_exponents_find(
    SHAPE, const u64* stored, const i64* rooms, const u32* counts, u32* offsets, u32* ends, u32* status)
{
    EACH(fragment, num_fragments) {
        const u32* head = (const u32*)stored[fragment];
        bool is_wrong = head[0] != (u32)num_parts;
        i64 end = 0, i = fragment * num_parts * num_blocks;
        for (int part = 0; part < num_parts; ++part) {
            const u32 top = head[1 + 2 * part], declared = head[2 + 2 * part];
            i64 used = 0;
            for (int block = 0; block < num_blocks; ++block, ++i) {
                offsets[i] = (u32)(end + used);
                used += counts[i];
            }
            is_wrong = is_wrong || top > 255 || used != (i64)declared;
            end += used;
        }
        ends[fragment] = (u32)end;
        status[fragment] = is_wrong || end > rooms[fragment] ? WRONG : 0;
    }
}

extern "C" __global__ void kvtier_exponents_decode(
    SHAPE, const u64* stored, const u64* raw, const u32* offsets, const u32* status)
{
    EACH(i, (i64)num_fragments * num_parts * num_blocks * LANES) {
        const i64 index = i / LANES, part = index / num_blocks, fragment = part / num_parts;
        const int lane = (int)(i % LANES);
        if (status[fragment]) continue;
        const u8* block = block_of(stored, index, (i64)num_parts * num_blocks, blocks_at);
        const u8* codes = block + BLOCK + lane;
        const u8 low = codes[0], middle = codes[LANES], high = codes[2 * LANES];
        const u8 top = (u8)((const u32*)stored[fragment])[1 + 2 * (part % num_parts)];
        const u8* exception = (const u8*)stored[fragment] + exceptions_at + offsets[index];
        if (low & middle & high) exception += marks_before(block, lane);
        u16* values = (u16*)raw[fragment] + part % num_parts * num_values + index % num_blocks * BLOCK + lane;
        for (int bit = 0; bit < 8; ++bit) {
            const int code = (low >> bit & 1) | (middle >> bit & 1) << 1 | (high >> bit & 1) << 2;
            const u8 exponent = code == 7 ? *exception++ : (u8)(top - code);
            const u8 rest = block[bit * LANES + lane];
            values[bit * LANES] = (u16)((rest & 0x80) << 8 | exponent << 7 | (rest & 0x7f));
        }
    }
}
"""
)

NAMES = tuple(f"kvtier_exponents_{step}" for step in ("count", "find", "decode", "tail"))
