"""The decoder of `float8` on a device: the values of tiers/codecs/exact/float8.py, in CUDA.

As with `exponents`, no thread reads what another one decoded, and there are no barriers, shuffles or shared
memory, so the tests run this very source on the host. `check` counts the ranks of each level of each block
and sees whether they take as many bytes as the head says; `judge` adds up a fragment's verdict. A thread of
`decode` makes eight neighbours: where one of them has no code in the first level, its place in the next
level's list is the number of marked bits before it, which the thread counts with popcounts, and so on; a
quarter of the values take the second level, a hundredth the last.

Rejected: a scan of ranks over the lists in scratch (the lists are read once more and written once); a warp
for each row with ballots (for a GPU only; the marks are words already). Never ran on a GPU.

All fragments of a launch have one shape. Layout of a stored fragment: see Float8.
"""

from ...codecs.levels import FIRST_LITERAL, LEVELS
from ..device.launching import PRELUDE

NUM_LEVELS = len(LEVELS)
_BASES = ", ".join(str(base) for base, _ in LEVELS)
_WIDTHS = ", ".join(str(width) for _, width in LEVELS)

SOURCE = (
    PRELUDE
    + rf"""
#define NUM_LEVELS {NUM_LEVELS}
__device__ static int base_of(int level) {{ const int all[] = {{ {_BASES} }}; return all[level]; }}
__device__ static int width_of(int level) {{ const int all[] = {{ {_WIDTHS} }}; return all[level]; }}
// Ranks from {FIRST_LITERAL} on are bytes.
"""
    + r"""
// The shape of every fragment of a launch. num_values, num_units, num_blocks: of a part; mantissa: bits;
// ends_at, units_at, lists_at: bytes from a fragment's begin.
#define SHAPE \
    int num_fragments, int num_parts, int num_values, int num_units, int num_blocks, int mantissa, \
    int ends_at, int units_at, int lists_at

static const int UNIT = 256, LANES = 64, ROWS = 4, BLOCK_UNITS = 16, COUNTS = NUM_LEVELS + 1;
static const u32 WRONG = 1;

__device__ static int planes_of(int mantissa) { return mantissa == 3 ? 4 : 3; }
__device__ static int unit_bytes_of(int mantissa) { return LANES + 8 * ROWS * planes_of(mantissa); }

__device__ static u64 word_at(const u8* bytes, int count)  // count: 1 to 8, at any address
{
    u64 word = 0;
    for (int i = 0; i < count; ++i) word |= (u64)bytes[i] << 8 * i;
    return word;
}

__device__ static u64 below(int lane) { return lane >= 64 ? ~0ull : (1ull << lane) - 1; }

// The marks of a row of `here` ranks; its planes of `width` bits begin at `row`.
__device__ static u64 marks_of(const u8* row, int here, int width)
{
    const int stride = (here + 7) / 8;
    return word_at(row, stride) & word_at(row + (width - 1) * stride, stride) & below(here);
}

__device__ static int bytes_of(int count, int width)
{
    return width * (count / LANES * 8 + (count % LANES + 7) / 8);
}

__device__ static const u8* row_of(const u8* unit, int row, int mantissa)  // of a block's units
{
    return unit + (i64)(row / ROWS) * unit_bytes_of(mantissa) + LANES + row % ROWS * 8 * planes_of(mantissa);
}

// counts: ranks that each level of each block has, and the bytes behind them; flags: is it as the head says.
extern "C" __global__ void kvtier_float8_check(
    SHAPE, const u64* stored, const i64* rooms, u32* counts, u32* flags)
{
    EACH(i, (i64)num_fragments * num_parts * num_blocks) {
        const i64 per_fragment = (i64)num_parts * num_blocks, inside = i % per_fragment;
        const u8* record = (const u8*)stored[i / per_fragment];
        const u32* ends = (const u32*)(record + ends_at);
        const i64 begin = inside ? ends[inside - 1] : 0, end = ends[inside];
        const int part = (int)(inside / num_blocks), first = (int)(inside % num_blocks) * BLOCK_UNITS;
        const int here = num_units - first < BLOCK_UNITS ? num_units - first : BLOCK_UNITS;
        const u8* unit = record + units_at + ((i64)part * num_units + first) * unit_bytes_of(mantissa);
        int count = 0;
        for (int row = 0; row < here * ROWS; ++row) {
            const u64* planes = (const u64*)row_of(unit, row, mantissa);
            count += __popcll(planes[1] & planes[2]);
        }
        bool is_right = begin <= end && end <= rooms[i / per_fragment];
        i64 at = begin;
        for (int level = 0; level < COUNTS; ++level) {
            counts[i * COUNTS + level] = count;
            if (level == NUM_LEVELS) break;
            const int width = width_of(level);
            is_right = is_right && at + bytes_of(count, width) <= end;
            int marked = 0;
            for (int row = 0; is_right && row < count; row += LANES) {
                const int num_here = count - row < LANES ? count - row : LANES;
                const u8* bytes = record + lists_at + at + row / LANES * 8 * width;
                marked += __popcll(marks_of(bytes, num_here, width));
            }
            at += bytes_of(count, width);
            count = marked;
        }
        flags[i] = is_right && at + count == end ? 0 : WRONG;
    }
}

extern "C" __global__ void kvtier_float8_judge(SHAPE, const u64* stored, const u32* flags, u32* status)
{
    EACH(fragment, num_fragments) {
        const i64 per_fragment = (i64)num_parts * num_blocks;
        u32 wrong = *(const u32*)stored[fragment] == (u32)num_parts ? 0 : WRONG;
        for (i64 block = 0; block < per_fragment; ++block) wrong |= flags[fragment * per_fragment + block];
        status[fragment] = wrong;
    }
}

// The rank in place `i` of a block's list, which begins at `list`.
__device__ static int listed_rank(const u8* list, const u32* counts, int i)
{
    for (int level = 0; level < NUM_LEVELS; ++level) {
        const int count = (int)counts[level], width = width_of(level), row = i / LANES, lane = i % LANES;
        const int here = count - row * LANES < LANES ? count - row * LANES : LANES, stride = (here + 7) / 8;
        const u8* bytes = list + row * 8 * width;
        int code = bytes[lane / 8] >> lane % 8 & 1;
        if (width == 2) code |= (bytes[stride + lane / 8] >> lane % 8 & 1) << 1;
        if (code < (1 << width) - 1) return base_of(level) + code;
        int before = __popcll(marks_of(bytes, here, width) & below(lane));
        for (int other = 0; other < row; ++other)
            before += __popcll(marks_of(list + other * 8 * width, LANES, width));
        list += bytes_of(count, width);
        i = before;
    }
    return list[i];
}

extern "C" __global__ void kvtier_float8_decode(
    SHAPE, const u64* stored, const u64* raw, const u32* counts, const u32* status)
{
    EACH(i, (i64)num_fragments * num_parts * num_units * (UNIT / 8)) {
        const i64 unit_index = i / (UNIT / 8), part = unit_index / num_units, fragment = part / num_parts;
        if (status[fragment]) continue;
        const int eight = (int)(i % (UNIT / 8)), row = eight / 8, lane = eight % 8 * 8;
        const int number = (int)(unit_index % num_units), block = number / BLOCK_UNITS;
        const i64 mine = part % num_parts, inside = mine * num_blocks + block;
        const u8* record = (const u8*)stored[fragment];
        const int num_exponents = 1 << (7 - mantissa);
        const u8* order = record + 4 + mine * num_exponents;
        const u8* unit = record + units_at + (mine * num_units + number) * unit_bytes_of(mantissa);
        const u32* counted = counts + (fragment * num_parts * num_blocks + inside) * COUNTS;
        const u8* planes = row_of(unit, row, mantissa) + lane / 8;
        const u8 sign = planes[0], low = planes[8], high = planes[16], third = mantissa == 3 ? planes[24] : 0;
        const u8* list = record + lists_at + (inside ? ((const u32*)(record + ends_at))[inside - 1] : 0);
        int before = 0;
        if (low & high) {
            const u8* begin = unit - (i64)(number % BLOCK_UNITS) * unit_bytes_of(mantissa);
            const int this_row = number % BLOCK_UNITS * ROWS + row;
            for (int other = 0; other <= this_row; ++other) {
                const u64* words = (const u64*)row_of(begin, other, mantissa);
                before += __popcll(words[1] & words[2] & (other < this_row ? ~0ull : below(lane)));
            }
        }
        u8* values = (u8*)raw[fragment] + mine * num_values + (i64)number * UNIT + row * LANES + lane;
        for (int bit = 0; bit < 8; ++bit) {
            int rank = (low >> bit & 1) | (high >> bit & 1) << 1;
            if (rank == 3) rank = listed_rank(list, counted, before++);
            const int exponent = order[rank % num_exponents] & (num_exponents - 1);
            const int rest = (third >> bit & 1) << 2 | (unit[lane + bit] >> 2 * row & 3);
            values[bit] = (u8)((sign >> bit & 1) << 7 | exponent << mantissa | rest);
        }
    }
}

// The values behind the last whole unit of a part: as they are, at the end of the record.
extern "C" __global__ void kvtier_float8_tail(SHAPE, const u64* stored, const u64* raw, const u32* status)
{
    const int length = num_values - num_units * UNIT;
    EACH(i, (i64)num_fragments * num_parts * length) {
        const i64 fragment = i / ((i64)num_parts * length), inside = i % ((i64)num_parts * length);
        if (status[fragment]) continue;
        const u8* record = (const u8*)stored[fragment];
        const i64 num_lists = (i64)num_parts * num_blocks;
        const i64 end = num_lists ? ((const u32*)(record + ends_at))[num_lists - 1] : 0;
        u8* part = (u8*)raw[fragment] + inside / length * num_values + num_units * UNIT;
        part[inside % length] = record[lists_at + end + inside];
    }
}
"""
)

NAMES = tuple(f"kvtier_float8_{step}" for step in ("check", "judge", "decode", "tail"))
