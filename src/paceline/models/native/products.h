// Matrix products over packed panels. Every output adds k = 0, 1, 2, ... in that order, whatever rows share its tile.

#pragma once

#include <cstdint>

#include "pool.h"
#include "vectors.h"

namespace {

// n <= NT rows of length K become a panel (K, NT), zero beyond column n.
template <class T>
void pack_panel(const T* const* rows, long n, long K, T* panel) {
    for (long k = 0; k < K; k++)
        for (long j = 0; j < NT; j++) panel[k * NT + j] = j < n ? rows[j][k] : T(0);
}

// The same for NT rows, fast. `ahead`, when not null, are NT rows wanted soon.
void pack_panel(const float* const* rows, long K, float* panel, const float* const* ahead) {
    long k = 0;
    for (; k + VL <= K; k += VL)
        for (long j = 0; j < NT; j += VL) {
            vec a[VL];
#pragma GCC unroll 16
            for (int i = 0; i < VL; i++) a[i] = load(rows[j + i] + k);
            if (ahead && k % 16 == 0)
                for (int i = 0; i < VL; i++) __builtin_prefetch(ahead[j + i] + k, 0, 3);
            transpose(a);
#pragma GCC unroll 16
            for (int i = 0; i < VL; i++) store(panel + (k + i) * NT + j, a[i]);
        }
    for (; k < K; k++)
        for (long j = 0; j < NT; j++) panel[k * NT + j] = rows[j][k];
}

enum class Kind : int64_t { FLOAT32 = 0, BFLOAT16 = 1 };  // weights.WeightKind: how a weight's numbers are stored

struct Product {  // native_kernels.ProductView
    Kind kind;
    const void *panels, *scales;  // scales: of kinds that store blocks of codes, null for numbers
    const float* bias;
    int64_t inputs, outputs;
};

// The right-hand sides of a product tile: where its k-th pair of vectors comes from.
template <class T>
struct Weights {  // streamed from memory: prefetched, further ahead for tiles of few rows, which finish sooner
    const T* panel;
    template <int M>
    static constexpr long AHEAD = (M <= 4 ? 8192 : 2048) / sizeof(T);
    static constexpr long LINE = 64 / sizeof(T);
    template <int M>
    void prefetch(long k) const {
        for (long i = 0; i < NT; i += LINE) __builtin_prefetch(panel + k * NT + AHEAD<M> + i, 0, 3);
    }
    Weights next_tile() const { return *this; }
    vec low(long k) const { return load(panel + k * NT); }
    vec high(long k) const { return load(panel + k * NT + VL); }
};
struct Keys {  // a panel in L1; meanwhile the values of the same positions may be prefetched, a line at a time
    const float* panel;
    const float* const* ahead = nullptr;
    template <int>
    void prefetch(long k) const {
        if (!ahead) return;
        const float* row = ahead[k % NT] + (k - k % NT);
        for (long i = 0; i < NT; i += 16) __builtin_prefetch(row + i, 0, 2);
    }
    Keys next_tile() const { return {panel}; }
    vec low(long k) const { return load(panel + k * NT); }
    vec high(long k) const { return load(panel + k * NT + VL); }
};
struct Values {  // rows of the cache, wherever they are
    const float* const* rows;
    long column;
    template <int>
    void prefetch(long) const {}
    Values next_tile() const { return *this; }
    vec low(long k) const { return load(rows[k] + column); }
    vec high(long k) const { return load(rows[k] + column + VL); }
};

struct Output {
    float* out;
    long stride, columns;  // columns <= NT of them are real
    const float* start;    // what the sums start from (a bias, or `out` to resume); null: zero
    long start_stride;
};

template <int M, class W>
void product_tile(const float* x, long ldx, W w, long k0, long k1, Output to) {
    vec acc[M][2];  // every loop over it is unrolled, or it would live in memory
    if (to.start && to.columns == NT) {
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
            acc[m][0] = load(to.start + m * to.start_stride);
            acc[m][1] = load(to.start + m * to.start_stride + VL);
        }
    } else {
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) acc[m][0] = acc[m][1] = vec{};
        if (to.start) {
#pragma GCC unroll 16
            for (int m = 0; m < M; m++) {
                float s[NT] = {};
                memcpy(s, to.start + m * to.start_stride, to.columns * sizeof(float));
                acc[m][0] = load(s), acc[m][1] = load(s + VL);
            }
        }
    }
    for (long k = k0; k < k1; k++) {
        w.template prefetch<M>(k);
        const vec low = w.low(k), high = w.high(k);
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
            const vec a = splat(x[m * ldx + k]);
            acc[m][0] = madd(a, low, acc[m][0]);
            acc[m][1] = madd(a, high, acc[m][1]);
        }
    }
    if (to.columns == NT) {
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
            store(to.out + m * to.stride, acc[m][0]);
            store(to.out + m * to.stride + VL, acc[m][1]);
        }
    } else {
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
            float s[NT];
            store(s, acc[m][0]), store(s + VL, acc[m][1]);
            memcpy(to.out + m * to.stride, s, to.columns * sizeof(float));
        }
    }
}

// Any number of rows, in tiles of at most MT (two even tiles rather than a full one and a sliver).
template <class W>
void product(const float* x, long ldx, long rows, W w, long k0, long k1, Output to) {
    while (rows > 0) {
        const long m = rows <= MT ? rows : rows < 2 * MT ? (rows + 1) / 2 : MT;
        switch (m) {
#define TILE(M) \
    case M: product_tile<M>(x, ldx, w, k0, k1, to); break;
            TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)
#if !defined(__x86_64__) || defined(__AVX512F__)
            TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12)
#endif
#undef TILE
        }
        rows -= m, x += m * ldx, to.out += m * to.stride, w = w.next_tile();
        if (to.start) to.start += m * to.start_stride;
    }
}

template <class T>
void pack(const T* weight, T* panels, long N, long K, int threads) {
    parallel((N + NT - 1) / NT, threads, [=](long p, int) {
        const T* rows[NT];
        const long n = N - p * NT < NT ? N - p * NT : NT;
        for (long j = 0; j < n; j++) rows[j] = weight + (p * NT + j) * K;
        pack_panel(rows, n, K, panels + p * NT * K);
    });
}

template <class T>
void linear(const float* x, const T* panels, const float* bias, float* out, long M, long K, long N, int threads) {
    const long num_panels = (N + NT - 1) / NT;
    const long chunk = 10 * MT, num_chunks = (M + chunk - 1) / chunk;  // rows cut up too: an even load on many cores
    if (M * K * N < SERIAL) threads = 1;
    auto compute = [=](long item) {
        const long p = item / num_chunks, row = item % num_chunks * chunk;
        const long rows = M - row < chunk ? M - row : chunk;
        // Several tiles read the same panel: cut it so that a part stays in L2 until all have read it.
        const long depth = rows > MT ? 2048 : K;
        float* to = out + row * N + p * NT;
        const long columns = N - p * NT < NT ? N - p * NT : NT;
        Output output{to, N, columns, bias ? bias + p * NT : nullptr, 0};
        long k = 0;
        do {
            const long end = K - k < depth ? K : k + depth;
            product(x + row * K, K, rows, Weights<T>{panels + p * NT * K}, k, end, output);
            output.start = to, output.start_stride = N, k = end;
        } while (k < K);
    };
    // Neighbouring panels in one claim: the prefetch at a panel's end is then for the thread's own next panel.
    const long items = num_panels * num_chunks, run = items / (4 * threads) > 1 ? items / (4 * threads) : 1;
    parallel((items + run - 1) / run, threads, [=](long claim, int) {
        for (long item = claim * run; item < (claim + 1) * run && item < items; item++) compute(item);
    });
}

void pack(Kind kind, const void* weight, void* panels, long N, long K, int threads) {
    switch (kind) {
        case Kind::FLOAT32: return pack((const float*)weight, (float*)panels, N, K, threads);
        case Kind::BFLOAT16: return pack((const uint16_t*)weight, (uint16_t*)panels, N, K, threads);
    }
}

void multiply(const float* x, const Product& p, float* out, long M, int threads) {
    switch (p.kind) {
        case Kind::FLOAT32: return linear(x, (const float*)p.panels, p.bias, out, M, p.inputs, p.outputs, threads);
        case Kind::BFLOAT16: return linear(x, (const uint16_t*)p.panels, p.bias, out, M, p.inputs, p.outputs, threads);
    }
}

}  // namespace
