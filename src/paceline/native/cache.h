// Keys and values as the cache stores them: float32, bfloat16, or int8 with a scale for each head of a slot. They are rounded
// when they are written, to the nearest with ties to even, and converted when they are read: both are exact functions of one
// head's numbers, so they have the same bits in every variant of the library.

#pragma once

#include "vectors.h"

namespace {

struct Cache {  // stack.CacheView: of one layer
    void *keys, *values;  // (num_slots, kv_heads, dim)
    float *key_scales, *value_scales;  // (num_slots, kv_heads); null unless int8
    int64_t kind;
};

// Calls use(T{}) with the type of a stored number; bfloat16 is held in uint16_t.
template <class Use>
auto with_stored(const Cache& cache, const Use& use) {
    switch (cache.kind) {  // stack.CACHE_DTYPES
        case 1: return use(uint16_t{});
        case 2: return use(int8_t{});
        default: return use(float{});
    }
}

inline vec load(const int8_t* p) { return load_bytes(p); }

inline float number(float stored) { return stored; }
inline float number(int8_t stored) { return stored; }
inline float number(uint16_t stored) {
    const uint32_t bits = (uint32_t)stored << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// Numbers of one 32-bit word of each lane, in order of address.
template <class T>
constexpr int PER_WORD = 4 / sizeof(T);
inline vec number_of_word(vec words, int, float) { return words; }
inline vec number_of_word(vec words, int at, uint16_t) {
    return (vec)(at ? (uvec)words & 0xffff0000u : (uvec)words << 16);
}
inline vec number_of_word(vec words, int at, int8_t) {
    return __builtin_convertvector((ivec)((uvec)words << (24 - 8 * at)) >> 24, vec);
}

inline uint16_t to_bfloat16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Stores `count` heads of `dim` numbers; scales is used by int8 only.
inline void store_heads(const float* x, long count, long dim, float* to, float*) { memcpy(to, x, count * dim * sizeof(float)); }
inline void store_heads(const float* x, long count, long dim, uint16_t* to, float*) {
    for (long i = 0; i < count * dim; i++) to[i] = to_bfloat16(x[i]);
}
inline void store_heads(const float* x, long count, long dim, int8_t* to, float* scales) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, ties to even
    for (long head = 0; head < count; head++, x += dim, to += dim) {
        float largest = 0;
        bool finite = true;
        for (long i = 0; i < dim; i++) {
            const float size = std::fabs(x[i]);
            largest = size > largest ? size : largest;
            finite &= size <= 3.4028235e38f;  // not-a-number fails too
        }
        const float scale = finite ? largest / 127.0f : NAN;  // a number that is not finite stays visible
        scales[head] = scale;
        const bool divides = scale >= 1.17549435e-38f;  // of smaller numbers, quotients could leave the range of a code
        if (!divides) scales[head] = finite ? 0.0f : NAN;
        for (long i = 0; i < dim; i++) to[i] = divides ? (int8_t)((x[i] / scale + magic) - magic) : 0;
    }
}

// Rows that will be read next, prefetched a few lines at a time in order of address: the processor's own prefetching, which has
// more reads under way than a core can have, follows no other order. A row may be null: a prefetch of no memory does nothing.
struct NextRows {
    const char* const* rows;
    long left, bytes;  // rows; bytes of a row
    long at = 0;  // byte of the first row
    void prefetch(long more) {
        while (left && more > 0) {
            const long end = bytes - at < more ? bytes : at + more;
            more -= end - at;
            for (; at < end; at += 64) __builtin_prefetch(*rows + at, 0, 2);
            if (at >= bytes) rows++, left--, at = 0;
        }
    }
    // Prefetches BYTES for each step k, some steps at once.
    template <long BYTES>
    void prefetch_step(long k) {
        constexpr long STEPS = BYTES < 256 ? 256 / BYTES : 1;
        if (k % STEPS == 0) prefetch(STEPS * BYTES);
    }
};

}  // namespace
