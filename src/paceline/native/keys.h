// Products with rows of the cache: scores of queries against keys, and sums of weighted values.
//
// Keys are transposed, so that a lane holds a key. Every score adds k = 0, 1, 2, ... in that order from 0, whether few rows
// take the transposed keys from registers or many rows take them from a panel.

#pragma once

#include <type_traits>

#include "cache.h"
#include "products.h"

namespace {

#if defined(__AVX512F__)
constexpr int FEW_ROWS = 12, SHARED_ROWS = 6;  // rows whose sums fit the registers beside VL, or NT, transposed keys
#else
constexpr int FEW_ROWS = 6, SHARED_ROWS = 0;
#endif

// Calls use(k, numbers k of VECTORS * VL keys) for k = 0, 1, 2, ...
template <int VECTORS = 1, class T, class Use>
inline __attribute__((always_inline)) void over_numbers(const T* const* keys, long dim, const Use& use) {
    constexpr long STEP = 4 * PER_WORD<T>;
    long k = 0;
    for (; k + STEP <= dim; k += STEP) {
        vec words[VECTORS][4];
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) load_words((const void* const*)(keys + v * VL), k * sizeof(T), words[v]);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
#pragma GCC unroll 4
            for (int at = 0; at < PER_WORD<T>; at++) {
                vec numbers[VECTORS];
#pragma GCC unroll 2
                for (int v = 0; v < VECTORS; v++) numbers[v] = number_of_word(words[v][i], at, T{});
                use(k + i * PER_WORD<T> + at, numbers);
            }
        }
    }
    for (; k < dim; k++) {
        vec numbers[VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) {
            float lanes[VL];
            for (int i = 0; i < VL; i++) lanes[i] = number(keys[v * VL + i][k]);
            numbers[v] = load(lanes);
        }
        use(k, numbers);
    }
}

// Scores of M rows against VECTORS * VL keys; more than one vector of keys shares the reads of a query.
template <int M, int VECTORS, class T>
void score_tile(const float* q, long dim, const T* const* keys, float* out, long stride, NextRows* next) {
    vec acc[M][VECTORS];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) acc[m][v] = vec{};
    over_numbers<VECTORS>(keys, dim, [&](long k, const vec(&key)[VECTORS]) __attribute__((always_inline)) {
        if (next && k % (4 * PER_WORD<T>) == 0) next->prefetch(VECTORS * VL * 16);
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
            const vec x = splat(q[m * dim + k]);
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) acc[m][v] = madd(x, key[v], acc[m][v]);
        }
    });
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) store(out + m * stride + v * VL, acc[m][v]);
}

template <class T>
struct Panel {  // in L1, made of rows of T
    const float* panel;
    NextRows* next = nullptr;
    template <int>
    void prefetch(long k) const {
        if (next) next->prefetch_step<NT * sizeof(T)>(k);
    }
    Panel next_tile() const { return {panel}; }
    vec low(long k) const { return load(panel + k * NT); }
    vec high(long k) const { return load(panel + k * NT + VL); }
};

// Scores `rows` queries (rows, dim) against NT keys; `panel` has room for (dim, NT) floats.
template <class T>
void score_keys(const float* q, long rows, long dim, const T* const* keys, const float* scales, float* panel, float* out,
                long stride, NextRows* next) {
    if (rows <= FEW_ROWS) {
        in_tiles<FEW_ROWS>(rows, [&](auto m, long) {
            constexpr int VECTORS = m.ROWS <= SHARED_ROWS ? NT / VL : 1;
            for (long j = 0; j < NT; j += VECTORS * VL)
                score_tile<m.ROWS, VECTORS>(q, dim, keys + j, out + j, stride, next);
        });
    } else {
        for (long j = 0; j < NT; j += VL)
            over_numbers(keys + j, dim, [&](long k, const vec(&key)[1]) __attribute__((always_inline)) {
                store(panel + k * NT + j, key[0]);
            });
        product(q, dim, rows, Panel<T>{panel, next}, 0, dim, {out, stride, NT, nullptr, 0});
    }
    if constexpr (std::is_same_v<T, int8_t>)
        for (long m = 0; m < rows; m++)
            for (long j = 0; j < NT; j += VL) store(out + m * stride + j, load(out + m * stride + j) * load(scales + j));
}

template <class T>
struct Values {  // rows of the cache, in any place
    const T* const* rows;
    long column;
    NextRows* next = nullptr;
    template <int>
    void prefetch(long k) const {
        if (next) next->prefetch_step<NT * sizeof(T)>(k);
    }
    Values next_tile() const { return {rows, column}; }
    vec low(long k) const { return load(rows[k] + column); }
    vec high(long k) const { return load(rows[k] + column + VL); }
};

// Sums weight * value over positions [from, to) for `rows` rows of weights; with `resume` the sums are added to `result`
// (rows, dim), both of their own stride.
template <class T>
void weigh_values(const float* weights, long weights_stride, long rows, long dim, const T* const* values, long from, long to,
                  float* tail, float* result, long stride, bool resume, NextRows* next) {
    const long whole = dim / NT * NT;
    for (long c = 0; c < whole; c += NT)
        product(weights, weights_stride, rows, Values<T>{values, c, next}, from, to,
                {result + c, stride, NT, resume ? result + c : nullptr, stride});
    if (whole == dim) return;
    const long columns = dim - whole;  // a row's last columns are copied: reading NT of them could leave the cache
    for (long p = from; p < to; p++)
        for (long i = 0; i < columns; i++) tail[p * NT + i] = number(values[p][whole + i]);
    product(weights, weights_stride, rows, Panel<T>{tail}, from, to,
            {result + whole, stride, columns, resume ? result + whole : nullptr, stride});
}

}  // namespace
