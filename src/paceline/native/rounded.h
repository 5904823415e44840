// Products of blocks of codes with activations rounded to int8, in blocks of 32 with a scale: integer dot products.
//
// Integers add up the same in any order, and floats are combined once per group, in order of k, by separate products and
// sums (a fused one would round differently where there is none). So every variant of these kernels gives the same bits.

#pragma once

#include <cfloat>
#include <cstdlib>

#include "blocks.h"

namespace {

// RT: rows of a tile. Up to BOTH_HALVES rows the registers hold the sums of a panel's two halves; up to SHARING rows they hold
// the dots of both, too, so that a row's bytes are read once for both.
#if defined(__AVX512VNNI__)
constexpr int RT = 6, BOTH_HALVES = 6, SHARING = 6;
#elif defined(__AVX512F__)
constexpr int RT = 8, BOTH_HALVES = 8, SHARING = 0;
#elif defined(__AVX2__)
constexpr int RT = 6, BOTH_HALVES = 4, SHARING = 0;
#else
constexpr int RT = 4, BOTH_HALVES = 4, SHARING = 0;
#endif
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr bool SIGNED = true;  // a Dot takes codes of 8 bits less their ZERO, 128
#else
constexpr bool SIGNED = false;
#endif
constexpr long SUM_GROUP = 16;  // the finest group of weights with a scale of its own

inline ivec four_bytes(const int8_t* at) {
    int32_t four;
    memcpy(&four, at, 4);
    return ivec{} + four;
}

// Each lane's dot product of unsigned codes of BITS bits and signed bytes, quad after quad: four codes of each lane times
// four bytes, which all lanes share.
#if defined(__AVX512VNNI__)
template <int BITS>
struct Dot {
    ivec total;
    void add(long, uvec codes, ivec bytes) {
        total = (ivec)_mm512_dpbusd_epi32((__m512i)total, (__m512i)codes, (__m512i)bytes);
    }
};
#elif defined(__AVX512F__)
template <int BITS>
struct Dot {
    ivec total;
    // Pairs are summed in 16 bits, which hold two products of 7 bits by 8; an eighth bit is multiplied separately.
    void add(long, uvec codes, ivec bytes) {
        if (BITS == 8) add_pairs(codes & 0x80808080u, bytes);
        add_pairs(BITS == 8 ? codes & 0x7f7f7f7fu : codes, bytes);
    }
    void add_pairs(uvec codes, ivec bytes) {
        total += (ivec)_mm512_madd_epi16(_mm512_maddubs_epi16((__m512i)codes, (__m512i)bytes), _mm512_set1_epi16(1));
    }
};
#elif defined(__AVX2__)
template <int BITS>
struct Dot {
    // Quads whose summed products fit 16 bits: two products a quad, each at most 2^BITS - 1 (128 of 8 bits) times 127.
    static constexpr long SUMMED = BITS == 4 ? 8 : BITS == 5 ? 4 : BITS == 6 ? 2 : 1;
    ivec total;
    __m256i pairs;
    void add(long quad, uvec codes, ivec shared) {
        __m256i weights = (__m256i)codes, bytes = (__m256i)shared;
        if (BITS == 8) {  // less 128 it is a sign and 7 bits
            weights = (__m256i)(codes ^ 0x80808080u);
            bytes = _mm256_sign_epi8(bytes, weights), weights = _mm256_abs_epi8(weights);
        }
        const __m256i products = _mm256_maddubs_epi16(weights, bytes);
        pairs = quad % SUMMED ? _mm256_add_epi16(pairs, products) : products;
        if (SUMMED > 1) asm("" : "+x"(pairs));  // added at once: GCC would keep the products of many rows first, in memory
        if (quad % SUMMED < SUMMED - 1) return;
        total += (ivec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
        asm("" : "+x"(total));
    }
};
#elif defined(__SSE2__)
template <int BITS>
struct Dot {
    ivec total;
    void add(long, uvec codes, ivec bytes) {
        const __m128i c = (__m128i)codes, s = (__m128i)bytes;
        total += (ivec)_mm_madd_epi16(_mm_and_si128(c, _mm_set1_epi16(255)), _mm_srai_epi16(_mm_slli_epi16(s, 8), 8));
        total += (ivec)_mm_madd_epi16(_mm_srli_epi16(c, 8), _mm_srai_epi16(s, 8));
    }
};
#else
template <int BITS>
struct Dot {
    ivec total;
    void add(long, uvec codes, ivec bytes) {
        for (int b = 0; b < 4; b++) total += (ivec)(codes >> 8 * b & 255u) * (bytes << (24 - 8 * b) >> 24);
    }
};
#endif

struct RoundedBlock {  // a block of one row
    int8_t codes[BLOCK];
    float scale, scaled_sum;  // scaled_sum: scale times the sum of the codes
    int32_t starts[2];        // initial integer sum of a group: -ZERO times the sum of its codes
};

// A block with a number that is not finite has no codes: its scale is not-a-number, and so are the row's outputs.
template <class F>
void round_block(const float* x, RoundedBlock& to) {
    constexpr long VECS = BLOCK / VL;
    vec values[VECS];
    ivec most = {};  // bits of absolute values have their order, not-a-number above all
#pragma GCC unroll 8
    for (long i = 0; i < VECS; i++) {
        values[i] = load(x + i * VL);
        const ivec bits = (ivec)values[i] & 0x7fffffff;
        most = bits > most ? bits : most;
    }
    const int32_t top = max_lanes(most);
    float largest;
    memcpy(&largest, &top, 4);
    const bool finite = top < 0x7f800000;
    const float scale = finite ? largest / 127.0f : NAN;
    const vec inverse = splat(finite && scale > FLT_MIN ? 1.0f / scale : 0.0f), magic = splat(12582912.0f);
    ivec halves[2] = {};
#pragma GCC unroll 8
    for (long i = 0; i < VECS; i++) {
        // Adding 1.5 * 2^23 leaves the nearest integer in the low bits, ties to even.
        ivec code = (ivec)(values[i] * inverse + magic) - 0x4b400000;
        if (!finite) code = ivec{};
        halves[i * VL / SUM_GROUP] += code;
        store_bytes(to.codes + i * VL, code);
    }
    const int32_t first = sum_lanes(halves[0]), second = sum_lanes(halves[1]);
    to.scale = scale, to.scaled_sum = scale * (float)(first + second);
    to.starts[0] = -F::ZERO * (F::GROUP == BLOCK ? first + second : first), to.starts[1] = -F::ZERO * second;
}

struct Rounded {  // the rows of a product: block after block, in each its rows
    uint8_t* blocks;
    long stride;  // bytes between blocks; an odd number of cache lines, or they would all map to the same cache sets

    static long stride_of(long M) { return ((M * (long)sizeof(RoundedBlock) + 63) / 64 | 1) * 64; }
    RoundedBlock* at(long block, long row) const { return (RoundedBlock*)(blocks + block * stride) + row; }
};

// Adds one group of a block's weights, for `HALVES` halves of a panel from `column` on: both of them share a row's bytes.
template <int M, int HALVES, class F>
inline __attribute__((always_inline)) void add_group(const RoundedBlock* rows, const uint8_t* unit, long block, long part,
                                                     long column, vec (&sums)[M][2]) {
    constexpr long PARTS = BLOCK / F::GROUP;
    constexpr bool STARTS = F::ZERO && !(SIGNED && F::BITS == 8);
    if (HALVES == 1) asm volatile("" : "+r"(rows));  // read anew for each half: GCC would keep all of it, and spill sums for it
    Dot<F::BITS> dots[M][HALVES];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 2
        for (int h = 0; h < HALVES; h++) dots[m][h].total = STARTS ? ivec{} + rows[m].starts[part] : ivec{};
    const uint8_t* words = unit + F::WORDS_AT + block * F::BLOCK_BYTES;
#pragma GCC unroll 8
    for (long quad = part * 2 * WORDS / PARTS; quad < (part + 1) * 2 * WORDS / PARTS; quad++) {
        uvec codes[HALVES];
#pragma GCC unroll 2
        for (int h = 0; h < HALVES; h++) {
            const Quads<F> quads(words, column + h * VL, quad / 2);
            codes[h] = quad % 2 ? quads.odd : quads.even;
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            const ivec bytes = four_bytes(rows[m].codes + 4 * quad);
#pragma GCC unroll 2
            for (int h = 0; h < HALVES; h++) dots[m][h].add(quad, codes[h], bytes);
        }
    }
#pragma GCC unroll 2
    for (int h = 0; h < HALVES; h++) {
        const Scale<F> weights(unit, block * PARTS + part, column + h * VL);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            vec& sum = sums[m][column / VL + h];
            sum = sum + __builtin_convertvector(dots[m][h].total, vec) * (weights.scale * splat(rows[m].scale));
            if (F::AFFINE) sum = sum + weights.offset * splat(rows[m].scaled_sum);
        }
    }
}

template <int M, class F>
void rounded_tile(const Rounded& x, long row, long K, const uint8_t* panel, bool first, const Output& to) {
    constexpr int HALVES = M > SHARING ? 1 : 2;
    constexpr long COLUMNS = M > BOTH_HALVES ? VL : NT;  // columns of the panel in one run over k
    Sums<M> sums(to);
#pragma GCC unroll 2
    for (long from = 0; from < NT; from += COLUMNS) {
        for (long k = 0; k < K; k += BLOCK) {
            const uint8_t* unit = panel + k / F::SUPER * F::UNIT;
            const long block = k % F::SUPER / BLOCK;
            if (first && !from) prefetch_ahead<F>(unit, block);
#pragma GCC unroll 2
            for (long part = 0; part < BLOCK / F::GROUP; part++)
#pragma GCC unroll 2
                for (long column = from; column < from + COLUMNS; column += HALVES * VL)
                    add_group<M, HALVES, F>(x.at(k / BLOCK, row), unit, block, part, column, sums.acc);
        }
    }
    sums.store_to(to);
}

// Returns 0, or 1 when out of memory.
template <class F>
int linear_rounded(const float* x, const Product& p, float* out, long M, int threads) {
    const long K = p.inputs, panel_bytes = K / F::SUPER * F::UNIT;
    const long stride = Rounded::stride_of(M);
    const Rounded rounded{(uint8_t*)malloc(K / BLOCK * stride), stride};
    if (!rounded.blocks) return 1;
    parallel(M, M * K < SERIAL ? 1 : threads, [=](long row, int) {
        for (long block = 0; block < K / BLOCK; block++) round_block<F>(x + row * K + block * BLOCK, *rounded.at(block, row));
    });
    over_panels(p, out, M, threads, [=](long panel, long row, long rows, Output to) {
        const uint8_t* weights = (const uint8_t*)p.panels + panel * panel_bytes;
        in_tiles<RT>(rows, [&](auto m, long first) {
            Output part = to;
            part.out += first * to.stride;
            rounded_tile<m.ROWS, F>(rounded, row + first, K, weights, first == 0, part);
        });
    });
    free(rounded.blocks);
    return 0;
}

}  // namespace
