// Weights that stay a GGUF file's blocks of codes, laid out as panels of NT columns.
//
// A weight is scale * code + offset, with an unsigned code of 4 to 8 bits. Scale and code have at most 24 significant bits
// together, so their product is exact and the sum is rounded once: the bits equal an expansion to fp32, fused or not.
// Kinds without an offset store code - ZERO; their offset is -ZERO * scale, and the sum is exact too.

#pragma once

#include "products.h"

namespace {

constexpr long BLOCK = 32;  // weights along k that are unpacked together
constexpr long WORDS = 4;   // 32-bit words of a column that hold a block's low nibbles

// One struct for each kind: the file's block as `unpack_block` reads it, and the layout of its parts in a panel.
template <int BITS_, long RAW_, bool AFFINE_, int ZERO_, long SUPER_ = BLOCK, long GROUP_ = BLOCK>
struct Format {
    static constexpr int BITS = BITS_, ZERO = ZERO_;
    static constexpr long RAW = RAW_;      // bytes of a block in the file
    static constexpr bool AFFINE = AFFINE_;  // has an offset of its own
    static constexpr long SUPER = SUPER_;  // weights that share the halves `d` and `m`
    static constexpr long GROUP = GROUP_;  // weights that share a scale
    static constexpr bool SCALED = SUPER > BLOCK;  // a group's scale is d times a small integer
    static constexpr long GROUPS = SUPER / GROUP, BLOCKS = SUPER / BLOCK;
    static constexpr long LOW = BITS == 8 ? 2 * WORDS : WORDS, HIGH = BITS == 8 ? 0 : BITS - 4;  // words of a block
    // A unit is NT columns of SUPER weights: d, m (halves), scales, minima (bytes), then the blocks' words.
    static constexpr long M_AT = 2 * NT, SCALES_AT = M_AT + (AFFINE ? 2 * NT : 0);
    static constexpr long MINIMA_AT = SCALES_AT + (SCALED ? GROUPS * NT : 0);
    static constexpr long WORDS_AT = MINIMA_AT + (SCALED && AFFINE ? GROUPS * NT : 0);
    static constexpr long BLOCK_BYTES = (LOW + HIGH) * NT * 4, UNIT = WORDS_AT + BLOCKS * BLOCK_BYTES;
};

struct Unpacked {  // a block of the file, which becomes one column of a unit
    uint16_t d, m;
    uint8_t scales[16], minima[16], codes[256];
};

inline uint16_t half_at(const uint8_t* p) { return (uint16_t)(p[0] | p[1] << 8); }

// Nibbles as GGUF pairs them: the low ones of `count` bytes, then the high ones.
inline void unpack_nibbles(const uint8_t* from, uint8_t* codes, long count) {
    for (long i = 0; i < count; i++) codes[i] = from[i] & 15, codes[count + i] = from[i] >> 4;
}

// Eight 6-bit scales and eight 6-bit minima in twelve bytes (Q4_K, Q5_K).
inline void unpack_scales(const uint8_t* packed, Unpacked& to) {
    for (int i = 0; i < 4; i++) {
        to.scales[i] = packed[i] & 63, to.minima[i] = packed[i + 4] & 63;
        to.scales[i + 4] = (packed[i + 8] & 15) | packed[i] >> 6 << 4;
        to.minima[i + 4] = packed[i + 8] >> 4 | packed[i + 4] >> 6 << 4;
    }
}

struct Q4_0 : Format<4, 18, false, 8> {
    static void unpack(const uint8_t* __restrict raw, Unpacked& __restrict to) { to.d = half_at(raw), unpack_nibbles(raw + 2, to.codes, 16); }
};
struct Q4_1 : Format<4, 20, true, 0> {
    static void unpack(const uint8_t* __restrict raw, Unpacked& __restrict to) {
        to.d = half_at(raw), to.m = half_at(raw + 2), unpack_nibbles(raw + 4, to.codes, 16);
    }
};
inline void add_fifth_bits(const uint8_t* bits, uint8_t* codes) {
    for (int i = 0; i < 32; i++) codes[i] |= (bits[i / 8] >> i % 8 & 1) << 4;
}
struct Q5_0 : Format<5, 22, false, 16> {
    static void unpack(const uint8_t* __restrict raw, Unpacked& __restrict to) {
        to.d = half_at(raw), unpack_nibbles(raw + 6, to.codes, 16), add_fifth_bits(raw + 2, to.codes);
    }
};
struct Q5_1 : Format<5, 24, true, 0> {
    static void unpack(const uint8_t* __restrict raw, Unpacked& __restrict to) {
        to.d = half_at(raw), to.m = half_at(raw + 2);
        unpack_nibbles(raw + 8, to.codes, 16), add_fifth_bits(raw + 4, to.codes);
    }
};
struct Q8_0 : Format<8, 34, false, 128> {
    static void unpack(const uint8_t* __restrict raw, Unpacked& __restrict to) {
        to.d = half_at(raw);
        for (int i = 0; i < 32; i++) to.codes[i] = raw[2 + i] ^ 128;
    }
};
struct Q4_K : Format<4, 144, true, 0, 256> {
    static void unpack(const uint8_t* __restrict raw, Unpacked& __restrict to) {
        to.d = half_at(raw), to.m = half_at(raw + 2), unpack_scales(raw + 4, to);
        for (int part = 0; part < 4; part++) unpack_nibbles(raw + 16 + 32 * part, to.codes + 64 * part, 32);
    }
};
struct Q5_K : Format<5, 176, true, 0, 256> {
    static void unpack(const uint8_t* __restrict raw, Unpacked& __restrict to) {
        to.d = half_at(raw), to.m = half_at(raw + 2), unpack_scales(raw + 4, to);
        for (int part = 0; part < 4; part++) unpack_nibbles(raw + 48 + 32 * part, to.codes + 64 * part, 32);
        for (int i = 0; i < 256; i++) to.codes[i] |= (raw[16 + i % 32] >> i / 32 & 1) << 4;
    }
};
struct Q6_K : Format<6, 210, false, 32, 256, 16> {
    static void unpack(const uint8_t* __restrict raw, Unpacked& __restrict to) {
        const uint8_t *low = raw, *high = raw + 128;
        to.d = half_at(raw + 208), memcpy(to.scales, raw + 192, 16);
        for (int part = 0; part < 2; part++, low += 64, high += 32)
            for (int quarter = 0; quarter < 4; quarter++)
                for (int lane = 0; lane < 32; lane++) {
                    const int nibble = low[32 * (quarter % 2) + lane] >> 4 * (quarter / 2) & 15;
                    to.codes[128 * part + 32 * quarter + lane] = nibble | (high[lane] >> 2 * quarter & 3) << 4;
                }
    }
};

// Quad q of a block is its weights 4q .. 4q + 3. Quads 2i and 2i + 1 are the low and the high nibbles of word i's bytes;
// the high bits of all quads lie in one or two words more, ready to be shifted and masked.
template <class F>
void place_column(const Unpacked& from, uint8_t* unit, long column) {
    memcpy(unit + 2 * column, &from.d, 2);
    if (F::AFFINE) memcpy(unit + F::M_AT + 2 * column, &from.m, 2);
    for (long i = 0; F::SCALED && i < F::GROUPS; i++) {
        unit[F::SCALES_AT + i * NT + column] = from.scales[i];
        if (F::AFFINE) unit[F::MINIMA_AT + i * NT + column] = from.minima[i];
    }
    for (long block = 0; block < F::BLOCKS; block++) {
        uint32_t words[F::LOW + F::HIGH + 1] = {}, quads[2 * WORDS];
        memcpy(quads, from.codes + block * BLOCK, BLOCK);
        for (long i = 0; i < 2 * WORDS; i++) {
            if (F::BITS == 8) words[i] = quads[i];
            if (F::BITS == 5) words[F::LOW] |= (quads[i] >> 4 & 0x01010101u) << i;
            if (F::BITS == 6) words[F::LOW + i / 4] |= (quads[i] >> 4 & 0x03030303u) << i % 4 * 2;
        }
        for (long i = 0; F::BITS < 8 && i < WORDS; i++)
            words[i] |= (quads[2 * i] & 0x0f0f0f0fu) | (quads[2 * i + 1] & 0x0f0f0f0fu) << 4;
        uint8_t* to = unit + F::WORDS_AT + block * F::BLOCK_BYTES + 4 * column;
        for (long i = 0; i < F::LOW + F::HIGH; i++) memcpy(to + i * NT * 4, words + i, 4);
    }
}

// Columns beyond N have scales of zero, so their weights are zero.
template <class F>
void pack_blocks(const uint8_t* rows, uint8_t* panels, long N, long K, int threads) {
    const long units = K / F::SUPER;
    parallel((N + NT - 1) / NT, threads, [=](long p, int) {
        uint8_t* panel = panels + p * units * F::UNIT;
        if (N - p * NT < NT) memset(panel, 0, units * F::UNIT);
        Unpacked unpacked;
        for (long u = 0; u < units; u++)
            for (long j = 0; j < NT && p * NT + j < N; j++) {
                F::unpack(rows + ((p * NT + j) * units + u) * F::RAW, unpacked);
                place_column<F>(unpacked, panel + u * F::UNIT, j);
            }
    });
}

inline ivec load_words(const uint8_t* p) { return *(const loose_ivec*)p; }

// Codes of quads 2i and 2i + 1, for VL columns from `column` on: four bytes in each lane.
template <class F>
struct Quads {
    uvec even, odd;
    Quads(const uint8_t* block, long column, int i) {
        const uint8_t* at = block + 4 * column;
        if (F::BITS == 8) {
            even = (uvec)load_words(at + 2 * i * NT * 4), odd = (uvec)load_words(at + (2 * i + 1) * NT * 4);
            return;
        }
        const uvec words = (uvec)load_words(at + i * NT * 4);
        even = words & 0x0f0f0f0fu, odd = words >> 4 & 0x0f0f0f0fu;
        if (F::BITS == 5) {
            const uvec high = (uvec)load_words(at + F::LOW * NT * 4) >> 2 * i;
            even |= (high & 0x01010101u) << 4, odd |= (high >> 1 & 0x01010101u) << 4;
        }
        if (F::BITS == 6) {
            const uvec high = (uvec)load_words(at + (F::LOW + i / 2) * NT * 4) >> 4 * (i % 2);
            even |= (high & 0x03030303u) << 4, odd |= (high & 0x0c0c0c0cu) << 2;
        }
    }
};

template <class F>
struct Scale {  // of one group, for VL columns
    vec scale, offset;
    Scale(const uint8_t* unit, long group, long column) {
        scale = load((const half*)unit + column);
        if (F::SCALED) {
            const uint8_t* at = unit + F::SCALES_AT + group * NT + column;
            scale *= F::AFFINE ? load_bytes(at) : load_bytes((const int8_t*)at);  // Q6_K's scales are signed
        }
        if (!F::AFFINE) {
            offset = scale * splat(-(float)F::ZERO);
            return;
        }
        offset = load((const half*)(unit + F::M_AT) + column);
        if (F::SCALED) offset = -(offset * load_bytes(unit + F::MINIMA_AT + group * NT + column));
    }
    // Returns the weights whose codes are byte B of each lane. A code that is not shifted is 256^B times too large, and its
    // scale is divided by 256^B: both are exact, and a shift is saved if registers are left for more scales.
    template <int B>
    vec weight(uvec codes) const {
        if constexpr (VL == 16 && (B == 1 || B == 2))
            return expanded(codes & 255u << 8 * B, scale * splat(1.0f / (1 << 8 * B)));
        return expanded(B == 3 ? codes >> 24 : codes >> 8 * B & 255u, scale);
    }
    vec expanded(uvec codes, vec by) const { return madd(__builtin_convertvector((ivec)codes, vec), by, offset); }
};

// Calls use(k, low, high, panel) with the weights of one block, k after k, for both halves of each of PANELS panels, which lie
// `apart` bytes from each other.
template <class F, int PANELS = 1, class Use>
inline __attribute__((always_inline)) void each_weight(const uint8_t* unit, long block, const Use& use, long apart = 0) {
    constexpr long PARTS = BLOCK / F::GROUP;
    const uint8_t* words = unit + F::WORDS_AT + block * F::BLOCK_BYTES;
#pragma GCC unroll 2
    for (long part = 0; part < PARTS; part++) {
        const long group = block * PARTS + part;
        const Scale<F> first[2] = {{unit, group, 0}, {unit, group, VL}};
        const uint8_t* other = unit + (PANELS - 1) * apart;
        const Scale<F> second[2] = {{other, group, 0}, {other, group, VL}};
        const auto quad = [&](const Scale<F>(&by)[2], long k, uvec low, uvec high, int panel) __attribute__((always_inline)) {
            use(k, by[0].template weight<0>(low), by[1].template weight<0>(high), panel);
            use(k + 1, by[0].template weight<1>(low), by[1].template weight<1>(high), panel);
            use(k + 2, by[0].template weight<2>(low), by[1].template weight<2>(high), panel);
            use(k + 3, by[0].template weight<3>(low), by[1].template weight<3>(high), panel);
        };
        for (int i = part * WORDS / PARTS; i < (part + 1) * WORDS / PARTS; i++)
#pragma GCC unroll 2
            for (int panel = 0; panel < PANELS; panel++) {
                const Quads<F> low(words + panel * apart, 0, i), high(words + panel * apart, VL, i);
                quad(panel ? second : first, 8 * i, low.even, high.even, panel);
                quad(panel ? second : first, 8 * i + 4, low.odd, high.odd, panel);
            }
    }
}

// Prefetches the share of one block in a unit further on, its scales included.
template <class F>
inline void prefetch_ahead(const uint8_t* unit, long block) {
    constexpr long SHARE = (F::UNIT + F::BLOCKS - 1) / F::BLOCKS;
    for (long i = 0; i < SHARE; i += 64) __builtin_prefetch(unit + block * SHARE + PREFETCH_BYTES + i, 0, 3);
}

// Few rows: weights are expanded in registers and used at once.
template <int M, class F, int PANELS = 1>
void block_tile(const float* x, long ldx, const uint8_t* panel, long K, Output to) {
    const long apart = K / F::SUPER * F::UNIT;
    Sums<M, PANELS> sums(to);
    Rows<M> rows(x, ldx);
    for (long k = 0; k < K; k += BLOCK) {
        const uint8_t* unit = panel + k / F::SUPER * F::UNIT;
        const long block = k % F::SUPER / BLOCK;
        const bool ends = k * F::UNIT / F::SUPER + PREFETCH_BYTES >= apart;  // the next panels' beginning is what comes then
        for (int i = 0; i < PANELS; i++) prefetch_ahead<F>(unit + (ends ? i + PANELS - 1 : i) * apart, block);
        const auto add = [&](int i, vec low, vec high, int which) __attribute__((always_inline)) {
            sums.add(rows, i, low, high, which);
        };
        each_weight<F, PANELS>(unit, block, add, apart);
        rows.advance(BLOCK);
    }
    sums.store_to(to);
}

template <class F>
void expand_block(const uint8_t* panel, long k, float* to) {
    const uint8_t* unit = panel + k / F::SUPER * F::UNIT;
    each_weight<F>(unit, k % F::SUPER / BLOCK, [&](int i, vec low, vec high, int) __attribute__((always_inline)) {
        store(to + i * NT, low), store(to + i * NT + VL, high);
    });
}

// Many rows: a slab of the panel is expanded into L2 once and read by all of them.
template <class F>
void slab_product(const float* x, long K, long rows, const uint8_t* panel, Output to) {
    alignas(64) float slab[SLAB * NT];
    for (long k = 0; k < K; k += SLAB) {
        const long depth = K - k < SLAB ? K - k : SLAB;
        for (long i = 0; i < depth; i += BLOCK) expand_block<F>(panel, k + i, slab + i * NT);
        product(x + k, K, rows, Slab{slab}, 0, depth, to);
        to.start = to.out, to.start_stride = to.stride;
    }
}

template <class F>
void product_of_blocks(const float* x, long K, long rows, const uint8_t* panel, Output to) {
    if (to.columns > NT) return block_tile<1, F, 2>(x, K, panel, K, to);
    if (rows > 2 * MT) return slab_product<F>(x, K, rows, panel, to);
    in_tiles<MT>(rows, [&](auto m, long row) {
        Output part = to;
        part.out += row * to.stride;
        block_tile<m.ROWS, F>(x + row * K, K, panel, K, part);
    });
}

template <class F>
void linear_blocks(const float* x, const Product& p, float* out, long M, int threads) {
    const long panel_bytes = p.inputs / F::SUPER * F::UNIT;
    over_panels(p, out, M, threads, [=](long panel, long row, long rows, Output to) {
        product_of_blocks<F>(x + row * p.inputs, p.inputs, rows, (const uint8_t*)p.panels + panel * panel_bytes, to);
    }, M == 1 ? 2 : 1);  // one row takes two panels at a time: the sums of one would wait for their own last addition
}

// Reads rows of the weight (columns of its panels), for an embedding.
template <class F>
void gather_blocks(const Product& p, const int64_t* ids, float* out, long count, int threads) {
    const long K = p.inputs, panel_bytes = K / F::SUPER * F::UNIT;
    if (count * K < SERIAL) threads = 1;
    parallel(count, threads, [=](long n, int) {
        alignas(64) float slab[BLOCK * NT];
        const uint8_t* panel = (const uint8_t*)p.panels + ids[n] / NT * panel_bytes;
        for (long k = 0; k < K; k += BLOCK) {
            expand_block<F>(panel, k, slab);
            for (long i = 0; i < BLOCK; i++) out[n * K + k + i] = slab[i * NT + ids[n] % NT];
        }
    });
}

}  // namespace
