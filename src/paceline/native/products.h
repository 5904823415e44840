// Matrix products over packed panels. Every output adds k = 0, 1, 2, ... in that order, whatever rows share its tile.

#pragma once

#include <cstdint>

#include "pool.h"
#include "vectors.h"

namespace {

// Packs n <= NT rows of length K as a panel (K, NT), zero beyond column n.
template <class T>
void pack_panel(const T* const* rows, long n, long K, T* panel) {
    for (long k = 0; k < K; k++)
        for (long j = 0; j < NT; j++) panel[k * NT + j] = j < n ? rows[j][k] : T{};
}

// weights.WeightKind: the storage of a weight, numbers or blocks of codes
enum class Kind : int64_t { FLOAT32 = 0, BFLOAT16, FLOAT16, Q4_0 = 4, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K };

struct Product {  // weights.ProductView
    Kind kind;
    const void* panels;
    const float* bias;
    int64_t inputs, outputs;
    int64_t stride;       // outputs of all parts: a row of the result
    int64_t rounds;       // activations are rounded to int8 (kinds of blocks only)
    const Product* next;  // the part whose outputs follow, if weights of several kinds are one product
};

// The right-hand sides of a product tile: sources of its k-th pair of vectors.
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
struct Slab {  // weights expanded into L2
    const float* panel;
    template <int>
    void prefetch(long k) const {
        for (long i = 0; i < NT; i += 16) __builtin_prefetch(panel + (k + 8) * NT + i, 0, 3);
    }
    Slab next_tile() const { return *this; }
    vec low(long k) const { return load(panel + k * NT); }
    vec high(long k) const { return load(panel + k * NT + VL); }
};

struct Output {
    float* out;
    long stride, columns;  // columns <= NT of them are real
    const float* start;    // initial sums (a bias, or `out` to resume); null: zero
    long start_stride;
};

template <int M>
struct Sums {  // of M rows and a panel's columns; every loop over `acc` is unrolled, or it would live in memory
    vec acc[M][2];
    explicit Sums(const Output& to) {
        if (to.start && to.columns == NT) {
#pragma GCC unroll 16
            for (int m = 0; m < M; m++) {
                acc[m][0] = load(to.start + m * to.start_stride);
                acc[m][1] = load(to.start + m * to.start_stride + VL);
            }
            return;
        }
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) acc[m][0] = acc[m][1] = vec{};
        if (!to.start) return;
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
            float s[NT] = {};
            memcpy(s, to.start + m * to.start_stride, to.columns * sizeof(float));
            acc[m][0] = load(s), acc[m][1] = load(s + VL);
        }
    }
    // Adds column k of the rows, at x, times the panel's weights at k.
    inline __attribute__((always_inline)) void add(const float* x, long ldx, vec low, vec high) {
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
            const vec a = splat(x[m * ldx]);
            acc[m][0] = madd(a, low, acc[m][0]);
            acc[m][1] = madd(a, high, acc[m][1]);
        }
    }
    void store_to(const Output& to) const {
        if (to.columns == NT) {
#pragma GCC unroll 16
            for (int m = 0; m < M; m++) {
                store(to.out + m * to.stride, acc[m][0]);
                store(to.out + m * to.stride + VL, acc[m][1]);
            }
            return;
        }
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
            float s[NT];
            store(s, acc[m][0]), store(s + VL, acc[m][1]);
            memcpy(to.out + m * to.stride, s, to.columns * sizeof(float));
        }
    }
};

template <int M, class W>
void product_tile(const float* x, long ldx, W w, long k0, long k1, Output to) {
    Sums<M> sums(to);
    for (long k = k0; k < k1; k++) {
        w.template prefetch<M>(k);
        sums.add(x + k, ldx, w.low(k), w.high(k));
    }
    sums.store_to(to);
}

template <int M>
struct TileRows {
    static constexpr int ROWS = M;
};

// Calls use(TileRows, first row) for tiles of at most MOST rows; two even tiles rather than a full one and a small one.
template <int MOST, class Use>
void in_tiles(long rows, const Use& use) {
    for (long row = 0; row < rows;) {
        const long left = rows - row, m = left <= MOST ? left : left < 2 * MOST ? (left + 1) / 2 : MOST;
        switch (m) {
#define TILE(M) \
    case M: \
        if constexpr (M <= MOST) use(TileRows<M>{}, row); \
        break;
            TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12)
#undef TILE
        }
        row += m;
    }
}

template <class W>
void product(const float* x, long ldx, long rows, W w, long k0, long k1, Output to) {
    in_tiles<MT>(rows, [&](auto m, long row) {
        Output part = to;
        part.out += row * to.stride;
        if (to.start) part.start += row * to.start_stride;
        product_tile<m.ROWS>(x + row * ldx, ldx, row ? w.next_tile() : w, k0, k1, part);
    });
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

// Returns the items of one claim: about four claims for each thread; among such sizes, the least for the busiest thread.
inline long claim_size(long items, int threads) {
    const long from = items / (4 * threads) > 1 ? items / (4 * threads) : 1;
    long best = from, least = items + 1;
    for (long size = from; size <= 2 * from; size += 1 + from / 8) {
        const long claims = (items + size - 1) / size, most = (claims + threads - 1) / threads * size;
        if (most < least) best = size, least = most;
    }
    return best;
}

// Calls body(panel, first row, rows, their outputs) once for every panel and chunk of rows.
template <class F>
void over_panels(const Product& product, float* out, long M, int threads, const F& body) {
    const long K = product.inputs, N = product.outputs, num_panels = (N + NT - 1) / NT;
    // Many rows at once, which share an expansion of blocks, unless that leaves too little to share among many cores.
    const long chunk = (num_panels < 8 * threads ? 10 : 40) * MT, num_chunks = (M + chunk - 1) / chunk;
    const long stride = product.stride;
    const float* bias = product.bias;
    if (M * K * N < SERIAL) threads = 1;
    auto compute = [=, &body](long item) {
        const long p = item / num_chunks, row = item % num_chunks * chunk;
        const long columns = N - p * NT < NT ? N - p * NT : NT;
        const Output to{out + row * stride + p * NT, stride, columns, bias ? bias + p * NT : nullptr, 0};
        body(p, row, M - row < chunk ? M - row : chunk, to);
    };
    // One claim takes neighbouring panels: the prefetch at a panel's end is then for the thread's own next panel.
    const long items = num_panels * num_chunks, run = claim_size(items, threads);
    parallel((items + run - 1) / run, threads, [=](long claim, int) {
        for (long item = claim * run; item < (claim + 1) * run && item < items; item++) compute(item);
    });
}

template <class T>
void linear(const float* x, const Product& weight, float* out, long M, int threads) {
    const long K = weight.inputs;
    const T* panels = (const T*)weight.panels;
    over_panels(weight, out, M, threads, [=](long p, long row, long rows, Output to) {
        // Several tiles read the same panel: cut it so that a part stays in L2 until all have read it.
        const long depth = rows > MT ? 2048 : K;
        long k = 0;
        do {
            const long end = K - k < depth ? K : k + depth;
            product(x + row * K, K, rows, Weights<T>{panels + p * NT * K}, k, end, to);
            to.start = to.out, to.start_stride = to.stride, k = end;
        } while (k < K);
    });
}

}  // namespace
