r"""The quantisers' decoder on a device: tiers/codecs/kernels/quantised.py word for word, as a CUDA kernel.

One thread decodes one value: it finds the rule of its layer, plane and head in a table, its tile and its
place in it, and reads a scale, an offset and a code. Neighbouring threads write neighbouring values and read
neighbouring codes. q s is exact and x' is rounded once (see the host's module), so a fused multiply-add,
which a GPU likes, changes no bit. cupy compiles with `-ftz=true`, which takes subnormal floats for zero, so
none is made on the way: a subnormal half is its mantissa, as an integer, times a power of two.
What comes out is 2^-40 or more, or zero.

Only rules with a length that follows from the shape are here (intN, exact): those of `transform` are
entropy-coded, one value after the other, and stay on the host. What can be wrong with a record is a scale
that is not finite; the fragment's status says so, and its values are then undefined.

Rejected: a thread a tile, as the host loops (a hundred times fewer threads than a device wants), and tables
of addresses made on the host (as many bytes as the values). Never ran on a GPU.
"""

from ..device.launching import PRELUDE

#: Columns of the table of segments, int32 each.
COLUMNS = ("start", "first_head", "num_heads", "coder", "bits", "by_channel", "group_tokens", "num_tiles")
CODERS = {"exact": 0, "int": 1}
NAMES = ("kvtier_quantised_decode",)

SOURCE = (
    PRELUDE
    + r"""
struct Segment { int start, first_head, num_heads, coder, bits, by_channel, group_tokens, num_tiles; };
static const int EXACT = 0;
static const u32 WRONG = 1;

__device__ static float power_of_two(int exponent) { return __uint_as_float((u32)(exponent + 127) << 23); }

__device__ static float float_of_half(u16 word)
{
    const u32 magnitude = word & 0x7fff;
    const float value = magnitude >> 10 == 0 ? (float)magnitude * power_of_two(-24)
                                             : __uint_as_float((magnitude << 13) + ((u32)112 << 23));
    return __uint_as_float(__float_as_uint(value) | (u32)(word & 0x8000) << 16);
}

__device__ static u16 half_of(float value)  // nearest, halves to even; beyond its range, its largest
{
    const u32 bits = __float_as_uint(value), magnitude = bits & 0x7fffffff;
    const float magic = 12582912.0f;
    u32 word;
    if (magnitude < 0x38800000) {
        const volatile float sum = __uint_as_float(magnitude) * power_of_two(24) + magic;
        word = (u32)(sum - magic);
    } else {
        word = ((magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13) - (112 << 10);
    }
    return (u16)((word < 0x7bff ? word : 0x7bff) | (bits >> 16 & 0x8000));
}

__device__ static u16 bfloat_of(float value)  // nearest, halves to even
{
    const u32 bits = __float_as_uint(value);
    return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Codes of two to seven bits lie in areas of four, two and one bits; see kernels/packing.py.
__device__ static u32 code_at(const u8* codes, int bits, u32 eighth, u32 at)
{
    if (bits == 8) return codes[at];
    u32 code = 0, shift = 0;
    for (u32 width = 4; width > 0; width /= 2) {
        if (!(bits & width)) continue;
        const u32 size = width * eighth, mask = (1u << width) - 1;
        code |= (codes[at % size] >> at / size * width & mask) << shift;
        codes += size;
        shift += width;
    }
    return code;
}

extern "C" __global__ void kvtier_quantised_decode(
    int num_fragments, int num_units, int num_tokens, int num_heads, int dim, int is_half,
    const struct Segment* segments, const int* segment_of, const u64* stored, const u64* raw, u32* status)
{
    const u32 num_values = (u32)num_units * num_tokens * num_heads * dim;
    EACH(i, (i64)num_fragments * num_values) {
        const i64 fragment = i / num_values;
        const u32 at = (u32)(i % num_values), d = at % dim, head = at / dim % num_heads;
        const u32 token = at / dim / num_heads % num_tokens, unit = at / dim / num_heads / num_tokens;
        const struct Segment s = segments[segment_of[unit * num_heads + head]];
        const u8* bytes = (const u8*)stored[fragment] + s.start;
        u16* target = (u16*)raw[fragment] + at;
        const u32 mine = head - s.first_head;
        if (s.coder == EXACT) {
            *target = ((const u16*)bytes)[(token * s.num_heads + mine) * dim + d];
            continue;
        }
        const u32 group = s.group_tokens, row = token % group;
        const u32 tile = token / group * s.num_heads + mine;
        const u32 eighth = (group * dim + 7) / 8, per_tile = s.by_channel ? dim : group;
        const u32 num_scales = 2 * per_tile;
        const u16* scales = (const u16*)bytes + tile * num_scales;
        const u8* codes = bytes + 2 * (u32)s.num_tiles * num_scales + tile * eighth * s.bits;
        const u32 code = code_at(codes, s.bits, eighth, row * dim + d);
        const u32 which = s.by_channel ? d : row;
        const u16 offset = scales[which], step = scales[per_tile + which];
        if ((offset & 0x7fff) >= 0x7c00 || (step & 0x7fff) >= 0x7c00) status[fragment] = WRONG;
        const float value = float_of_half(offset) + (float)code * float_of_half(step);
        *target = is_half ? half_of(value) : bfloat_of(value);
    }
}
"""
)
