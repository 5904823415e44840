// Vectors of VL floats, one source for AVX-512, AVX2, NEON and a baseline.
//
// Multiply-adds are fused by hand (madd) and the compiler must not fuse any itself (-ffp-contract=off): two
// instantiations of one template must not round differently.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int VL = 16, MT = 12;  // MT: rows of a product tile; MT * 2 accumulators fit the registers
#elif defined(__AVX2__)
constexpr int VL = 8, MT = 6;
#elif defined(__aarch64__)
constexpr int VL = 4, MT = 12;
#else
constexpr int VL = 4, MT = 6;
#endif
constexpr long NT = 2 * VL;   // columns of a panel
constexpr long SPLIT = 256;   // positions of an attention split; a multiple of NT for every VL
constexpr long SCORES = SPLIT + 16;  // a row of scores; with a stride of a power of two, rows would map to the same cache sets
constexpr int TILE_ROWS = 48; // rows x grouped heads that share one reading of K and V
constexpr long MOST_SCORES = 128;  // rows of scores of a tile and its kv heads, which stay in L2 beside keys and values
constexpr long CHUNK = 64;  // positions whose values all kv heads of a part weigh before the next; a multiple of NT for every VL
constexpr long AHEAD = 128; // positions that are prefetched ahead of those that are read
constexpr long SLAB = 768;  // depth of a slab of expanded weights, which stays in L2: sums are stored once a slab
constexpr long PREFETCH_BYTES = 8192;  // bytes prefetched ahead in panels of blocks
constexpr long SERIAL = 32768; // elementary operations below which waking the other threads costs more than it saves

typedef float vec __attribute__((vector_size(VL * 4)));
typedef int32_t ivec __attribute__((vector_size(VL * 4)));
typedef float loose_vec __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef uint16_t loose_half __attribute__((vector_size(VL * 2), aligned(2), may_alias));
typedef uint32_t uvec __attribute__((vector_size(VL * 4)));
typedef int32_t loose_ivec __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef uint8_t loose_bytes __attribute__((vector_size(VL), aligned(1), may_alias));
typedef int8_t loose_signed_bytes __attribute__((vector_size(VL), aligned(1), may_alias));

struct half {  // IEEE binary16
    uint16_t bits;
};

inline vec load(const float* p) { return *(const loose_vec*)p; }
inline vec load(const uint16_t* p) { return (vec)(__builtin_convertvector(*(const loose_half*)p, uvec) << 16); }  // bf16

// Conversions of bytes and numbers: written by hand where GCC converts lane after lane.
inline vec load_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
    const ivec wide = (ivec)_mm512_maskz_cvtepu8_epi32(-1, _mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
    const ivec wide = (ivec)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
    const ivec wide = __builtin_convertvector(*(const loose_bytes*)p, ivec);
#endif
    return __builtin_convertvector(wide, vec);
}
inline vec load_bytes(const int8_t* p) {
#if defined(__AVX512F__)
    const ivec wide = (ivec)_mm512_maskz_cvtepi8_epi32(-1, _mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
    const ivec wide = (ivec)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
    const ivec wide = __builtin_convertvector(*(const loose_signed_bytes*)p, ivec);
#endif
    return __builtin_convertvector(wide, vec);
}
inline void store_bytes(int8_t* p, ivec v) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i*)p, _mm512_maskz_cvtepi32_epi8(-1, (__m512i)v));
#else
    *(loose_signed_bytes*)p = __builtin_convertvector(v, loose_signed_bytes);
#endif
}
inline void store(float* p, vec v) { *(loose_vec*)p = v; }

inline vec load_n(const float* p, long n) {
    float lanes[VL] = {};
    memcpy(lanes, p, n * sizeof(float));
    return load(lanes);
}
inline void store_n(float* p, vec v, long n) { memcpy(p, &v, n * sizeof(float)); }

inline vec splat(float a) {
#if defined(__AVX512F__)
    return (vec)_mm512_set1_ps(a);
#elif defined(__AVX2__)
    return (vec)_mm256_set1_ps(a);
#else
    return a - vec{};  // a + 0 would lose the sign of -0
#endif
}

inline vec load(const half* p) {
#if defined(__AVX512F__)
    return (vec)_mm512_maskz_cvtph_ps(-1, _mm256_loadu_si256((const __m256i*)p));  // unmasked, GCC 12 warns
#elif defined(__AVX2__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(__aarch64__)
    return (vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t*)p)));
#else
    const uvec bits = __builtin_convertvector(*(const loose_half*)p, uvec), magnitude = bits & 0x7fffu;
    const uvec scaled = (uvec)((vec)(magnitude << 13) * splat(0x1p112f));  // exact, subnormal halves too
    const uvec finite = magnitude < 0x7c00u ? scaled : scaled | 0x7f800000u;
    return (vec)(finite | (bits & 0x8000u) << 16);
#endif
}

inline vec madd(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

inline vec larger(vec a, vec b) { return a > b ? a : b; }

inline float sum_lanes(vec v) {
    float a[VL];
    store(a, v);
    for (int width = VL / 2; width; width /= 2)
        for (int i = 0; i < width; i++) a[i] += a[i + width];
    return a[0];
}

// GCC turns these loops into a few shuffles.
inline int32_t sum_lanes(ivec v) {
    int32_t a[VL], sum = 0;
    memcpy(a, &v, sizeof a);
    for (int i = 0; i < VL; i++) sum += a[i];
    return sum;
}

inline int32_t max_lanes(ivec v) {  // at least 0
    int32_t a[VL], best = 0;
    memcpy(a, &v, sizeof a);
    for (int i = 0; i < VL; i++) best = a[i] > best ? a[i] : best;
    return best;
}

inline float max_lanes(vec v) {
    float best = v[0];
    for (int i = 1; i < VL; i++) best = v[i] > best ? v[i] : best;
    return best;
}

// Returns e^x for x <= 0 within 2 ulp, 0 below the smallest normal number: x = n ln 2 + r, a polynomial in r, times 2^n.
inline vec vexp(vec x) {
    const vec lowest = splat(-87.33f), magic = splat(12582912.0f);  // 1.5 * 2^23: adding it puts n into the low bits
    const vec inside = x < lowest ? lowest : x;  // not-a-number passes both comparisons unchanged
    const vec shifted = madd(inside, splat(1.44269504088896341f), magic);
    const vec n = shifted - magic;
    vec r = madd(n, splat(-0.693359375f), inside);
    r = madd(n, splat(2.12194440e-4f), r);
    vec y = splat(1.9875691500e-4f);
    y = madd(y, r, splat(1.3981999507e-3f));
    y = madd(y, r, splat(8.3334519073e-3f));
    y = madd(y, r, splat(4.1665795894e-2f));
    y = madd(y, r, splat(1.6666665459e-1f));
    y = madd(y, r, splat(5.0000001201e-1f));
    y = madd(y, r * r, r) + splat(1.0f);
    y *= (vec)(((ivec)shifted << 23) + (127 << 23));
    return x < lowest ? vec{} : y;
}

inline float vexp(float x) { return vexp(splat(x))[0]; }

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, ivec{__VA_ARGS__})
#endif
// Interleaved halves of every four lanes: numbers or pairs of them.
inline vec low_numbers(vec a, vec b) {
#if defined(__AVX512F__)
    return SHUFFLE(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
#elif defined(__AVX2__)
    return SHUFFLE(a, b, 0, 8, 1, 9, 4, 12, 5, 13);
#else
    return SHUFFLE(a, b, 0, 4, 1, 5);
#endif
}
inline vec high_numbers(vec a, vec b) {
#if defined(__AVX512F__)
    return SHUFFLE(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
#elif defined(__AVX2__)
    return SHUFFLE(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
#else
    return SHUFFLE(a, b, 2, 6, 3, 7);
#endif
}
inline vec low_pairs(vec a, vec b) {
#if defined(__AVX512F__)
    return SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
#elif defined(__AVX2__)
    return SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13);
#else
    return SHUFFLE(a, b, 0, 1, 4, 5);
#endif
}
inline vec high_pairs(vec a, vec b) {
#if defined(__AVX512F__)
    return SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
#elif defined(__AVX2__)
    return SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
#else
    return SHUFFLE(a, b, 2, 3, 6, 7);
#endif
}

// The same 16 bytes of VL rows: lane r of vector w is word w of row r.
inline __attribute__((always_inline)) void load_words(const void* const* rows, long at, vec (&words)[4]) {
    vec quads[4];  // quad i: rows i, i + 4, i + 8, ...
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const auto row = [&](int j) { return (const float*)((const char*)rows[i + 4 * j] + at); };
#if defined(__AVX512F__)
        const __m256 low = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(row(0))), _mm_loadu_ps(row(1)), 1);
        const __m256 high = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(row(2))), _mm_loadu_ps(row(3)), 1);
        quads[i] = (vec)_mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
#elif defined(__AVX2__)
        quads[i] = (vec)_mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(row(0))), _mm_loadu_ps(row(1)), 1);
#else
        quads[i] = load(row(0));
#endif
    }
    const vec low = low_numbers(quads[0], quads[1]), high = high_numbers(quads[0], quads[1]);
    const vec next_low = low_numbers(quads[2], quads[3]), next_high = high_numbers(quads[2], quads[3]);
    words[0] = low_pairs(low, next_low), words[1] = high_pairs(low, next_low);
    words[2] = low_pairs(high, next_high), words[3] = high_pairs(high, next_high);
}

}  // namespace
