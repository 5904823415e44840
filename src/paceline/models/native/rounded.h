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
constexpr long SUM_GROUP = 16;  // the finest group of weights with a scale of its own

// acc + the dot product of four unsigned and four signed bytes, in each lane; `x` has the same bytes in every lane.
// BITS: of the unsigned ones.
template <int BITS>
inline ivec dot(ivec acc, uvec codes, ivec x) {
#if defined(__AVX512VNNI__)
    return (ivec)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)codes, (__m512i)x);
#elif defined(__AVX512F__) || defined(__AVX2__)
    // Pairs are summed in 16 bits, which two products of 7 bits by 8 just fit: an eighth bit is taken apart.
    if (BITS == 8) return dot<7>(dot<7>(acc, codes & 0x7f7f7f7fu, x), codes & 0x80808080u, x);
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

struct Rounded {  // the rows of a product
    int8_t* codes;   // (M, K)
    float* scales;   // (M, K / BLOCK)
    int32_t* sums;   // (M, K / SUM_GROUP): of the codes
    float* scaled_sums;  // (M, K / BLOCK): scale times the sum of a block's codes
    long K;

    static long bytes(long M, long K) { return M * (K + K / BLOCK * 8 + K / SUM_GROUP * 4); }
    Rounded(void* memory, long M, long K) : K(K) {
        scales = (float*)memory, scaled_sums = scales + M * (K / BLOCK);
        sums = (int32_t*)(scaled_sums + M * (K / BLOCK)), codes = (int8_t*)(sums + M * (K / SUM_GROUP));
    }

    void round_row(const float* x, long row) const {
        for (long block = 0; block < K / BLOCK; block++) round_block(x + row * K + block * BLOCK, row, block);
    }

    // A block with a number that is not finite has no codes: its scale is not-a-number, and so are the row's outputs.
    void round_block(const float* x, long row, long block) const {
        constexpr long VECS = BLOCK / VL;
        vec values[VECS];
        ivec most = {};  // as bits, absolute values are in order, not-a-number above all
#pragma GCC unroll 8
        for (long i = 0; i < VECS; i++) {
            values[i] = load(x + i * VL);
            const ivec bits = (ivec)values[i] & 0x7fffffff;
            most = bits > most ? bits : most;
        }
        int32_t lanes[VL], top = 0;
        memcpy(lanes, &most, sizeof lanes);
        for (long i = 0; i < VL; i++) top = lanes[i] > top ? lanes[i] : top;
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
            store_bytes(codes + row * K + block * BLOCK + i * VL, code);
        }
        const int32_t first = sum_of(halves[0]), second = sum_of(halves[1]);
        const long at = row * (K / BLOCK) + block;
        scales[at] = scale, scaled_sums[at] = scale * (float)(first + second);
        sums[2 * at] = first, sums[2 * at + 1] = second;
    }

    static int32_t sum_of(ivec v) {
        int32_t lanes[VL], sum = 0;
        memcpy(lanes, &v, sizeof lanes);
        for (long i = 0; i < VL; i++) sum += lanes[i];
        return sum;
    }
};

template <int M, class F>
void rounded_tile(const Rounded& x, long row, const uint8_t* panel, const Output& to) {
    constexpr long PARTS = BLOCK / F::GROUP;
    const long K = x.K, blocks = K / BLOCK;
    const int8_t* codes = x.codes + row * K;
    const float *scales = x.scales + row * blocks, *scaled_sums = x.scaled_sums + row * blocks;
    const int32_t* sums_of = x.sums + row * blocks * 2;
    Sums<M> sums(to);
    for (long k = 0; k < K; k += BLOCK) {
        const uint8_t* unit = panel + k / F::SUPER * F::UNIT;
        const long block = k % F::SUPER / BLOCK, at = k / BLOCK;
        const uint8_t* words = unit + F::WORDS_AT + block * F::BLOCK_BYTES;
        prefetch_ahead<F>(words);
#pragma GCC unroll 2
        for (long part = 0; part < PARTS; part++) {
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) {
                ivec dots[M];
#pragma GCC unroll 8
                for (int m = 0; m < M; m++) {
                    const int32_t* s = sums_of + m * blocks * 2 + 2 * at;
                    dots[m] = ivec{} - F::ZERO * (PARTS == 2 ? s[part] : s[0] + s[1]);
                }
#pragma GCC unroll 4
                for (int i = part * WORDS / PARTS; i < (part + 1) * WORDS / PARTS; i++) {
                    const Quads<F> quads(words, h * VL, i);
#pragma GCC unroll 8
                    for (int m = 0; m < M; m++) {
                        int32_t even, odd;
                        memcpy(&even, codes + m * K + k + 8 * i, 4), memcpy(&odd, codes + m * K + k + 8 * i + 4, 4);
                        dots[m] = dot<F::BITS>(dots[m], quads.even, ivec{} + even);
                        dots[m] = dot<F::BITS>(dots[m], quads.odd, ivec{} + odd);
                    }
                }
                const Scale<F> weights(unit, block * PARTS + part, h * VL);
#pragma GCC unroll 8
                for (int m = 0; m < M; m++) {
                    const vec product = __builtin_convertvector(dots[m], vec) * (weights.scale * splat(scales[m * blocks + at]));
                    sums.acc[m][h] = sums.acc[m][h] + product;
                    if (F::AFFINE) sums.acc[m][h] = sums.acc[m][h] + weights.offset * splat(scaled_sums[m * blocks + at]);
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
    void* memory = malloc(Rounded::bytes(M, K));
    if (!memory) return 1;
    const Rounded rounded(memory, M, K);
    parallel(M, M * K < SERIAL ? 1 : threads, [=](long row, int) { rounded.round_row(x, row); });
    over_panels(p, out, M, threads, [=](long panel, long row, long rows, Output to) {
        const uint8_t* weights = (const uint8_t*)p.panels + panel * panel_bytes;
        in_tiles<RT>(rows, [&](auto m, long first) {
            Output part = to;
            part.out += first * to.stride;
            rounded_tile<m.ROWS, F>(rounded, row + first, weights, part);
        });
    });
    free(memory);
    return 0;
}

}  // namespace
