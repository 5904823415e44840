// Products of blocks of codes with activations rounded to int8, in blocks of 32 with a scale: integer dot products.
//
// Integers add up the same in any order, and floats are combined once per group, in order of k, by separate products and
// sums (a fused one would round differently where there is none). So every variant of these kernels gives the same bits.

#pragma once

#include <cfloat>
#include <cstdlib>

#include "blocks.h"

namespace {

#if defined(__AVX512F__)
constexpr int RT = 8;  // rows of a tile: float sums of two halves and integer sums of one fit the registers
#else
constexpr int RT = 4;
#endif
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr bool SIGNED = true;  // `dot` takes codes of 8 bits less their ZERO, 128
#else
constexpr bool SIGNED = false;
#endif
constexpr long SUM_GROUP = 16;  // the finest group of weights with a scale of its own

#if !defined(__AVX512VNNI__)
inline ivec four_bytes(const int8_t* at) {
    int32_t four;
    memcpy(&four, at, 4);
    return ivec{} + four;
}

template <int BITS>
inline ivec dot(ivec acc, uvec codes, ivec x) {
#if defined(__AVX512F__) || defined(__AVX2__)
    // Pairs are summed in 16 bits, which two products of 7 bits by 8 just fit.
#if defined(__AVX512F__)
    if (BITS == 8) return dot<7>(dot<7>(acc, codes & 0x7f7f7f7fu, x), codes & 0x80808080u, x);  // an eighth is taken apart
#else
    if (BITS == 8) {  // or, less 128, is a sign: two products of at most 128 by 127 fit too
        const __m256i weights = (__m256i)(codes ^ 0x80808080u);
        acc = dot<7>(acc, (uvec)_mm256_abs_epi8(weights), (ivec)_mm256_sign_epi8((__m256i)x, weights));
        asm("" : "+x"(acc));  // added at once: GCC would keep the products of many rows first, in memory
        return acc;
    }
#endif
#if defined(__AVX512F__)
    const __m512i pairs = _mm512_maddubs_epi16((__m512i)codes, (__m512i)x);
    return acc + (ivec)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#else
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)codes, (__m256i)x);
    return acc + (ivec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
#elif defined(__SSE2__)
    const __m128i c = (__m128i)codes, s = (__m128i)x;
    const __m128i even = _mm_madd_epi16(_mm_and_si128(c, _mm_set1_epi16(255)), _mm_srai_epi16(_mm_slli_epi16(s, 8), 8));
    const __m128i odd = _mm_madd_epi16(_mm_srli_epi16(c, 8), _mm_srai_epi16(s, 8));
    return acc + (ivec)even + (ivec)odd;
#else
    for (int b = 0; b < 4; b++) acc += (ivec)(codes >> 8 * b & 255u) * (x << (24 - 8 * b) >> 24);
    return acc;
#endif
}
#endif

// acc + the dot product of four unsigned and four signed bytes, in each lane; the signed ones are the four at `at`, for
// all lanes. BITS: of the unsigned ones.
template <int BITS>
inline ivec dot(ivec acc, uvec codes, const int8_t* at) {
#if defined(__AVX512VNNI__)
    // By hand: GCC would load the four bytes into a register first, and there is none to spare.
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(codes), "m"(*(const int8_t(*)[4])at));
    return acc;
#else
    return dot<BITS>(acc, codes, four_bytes(at));
#endif
}

struct RoundedBlock {  // of one row
    int8_t codes[BLOCK];
    float scale, scaled_sum;  // scaled_sum: scale times the sum of the codes
    int32_t starts[2];        // where a group's integer sum starts: -ZERO times the sum of its codes
};

// A block with a number that is not finite has no codes: its scale is not-a-number, and so are the row's outputs.
template <class F>
void round_block(const float* x, RoundedBlock& to) {
    constexpr long VECS = BLOCK / VL;
    vec values[VECS];
    ivec most = {};  // as bits, absolute values are in order, not-a-number above all
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

template <int M, class F>
void rounded_tile(const Rounded& x, long row, long K, const uint8_t* panel, bool first, const Output& to) {
    constexpr long PARTS = BLOCK / F::GROUP;
    constexpr bool STARTS = F::ZERO && !(SIGNED && F::BITS == 8);
    Sums<M> sums(to);
    for (long k = 0; k < K; k += BLOCK) {
        const uint8_t* unit = panel + k / F::SUPER * F::UNIT;
        const long block = k % F::SUPER / BLOCK;
        const uint8_t* words = unit + F::WORDS_AT + block * F::BLOCK_BYTES;
        if (first) prefetch_ahead<F>(words);
#pragma GCC unroll 2
        for (long part = 0; part < PARTS; part++) {
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) {
                const RoundedBlock* rows = x.at(k / BLOCK, row);
                asm volatile("" : "+r"(rows));  // read anew for each half: GCC would keep all of it, and spill sums for it
                ivec dots[M];
#pragma GCC unroll 8
                for (int m = 0; m < M; m++) dots[m] = STARTS ? ivec{} + rows[m].starts[part] : ivec{};
#pragma GCC unroll 4
                for (int i = part * WORDS / PARTS; i < (part + 1) * WORDS / PARTS; i++) {
                    const Quads<F> quads(words, h * VL, i);
#pragma GCC unroll 8
                    for (int m = 0; m < M; m++) dots[m] = dot<F::BITS>(dots[m], quads.even, rows[m].codes + 8 * i);
#pragma GCC unroll 8
                    for (int m = 0; m < M; m++) dots[m] = dot<F::BITS>(dots[m], quads.odd, rows[m].codes + 8 * i + 4);
                }
                const Scale<F> weights(unit, block * PARTS + part, h * VL);
#pragma GCC unroll 8
                for (int m = 0; m < M; m++) {
                    vec& sum = sums.acc[m][h];
                    sum = sum + __builtin_convertvector(dots[m], vec) * (weights.scale * splat(rows[m].scale));
                    if (F::AFFINE) sum = sum + weights.offset * splat(rows[m].scaled_sum);
                }
            }
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
