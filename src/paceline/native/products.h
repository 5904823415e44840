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
    long stride, columns;  // columns of the panel, or of several, that are real
    const float* start;    // initial sums (a bias, or `out` to resume); null: zero
    long start_stride;
};

// M rows of floats at an equal distance. Three rows share an address register: with one for each row, GCC keeps some of them in
// vector registers, and to read them takes the ports of multiply-adds.
template <int M>
struct Rows {
    static constexpr int BASES = (M + 2) / 3;
    const float* bases[BASES];
    long apart;
    Rows(const float* x, long ldx) : apart(ldx) {
#pragma GCC unroll 4
        for (int i = 0; i < BASES; i++) bases[i] = x + 3 * i * ldx;
    }
    const float& at(int row, long i) const { return bases[row / 3][row % 3 * apart + i]; }
    inline __attribute__((always_inline)) void advance(long by) {
#pragma GCC unroll 4
        for (int i = 0; i < BASES; i++) {
            bases[i] += by;
            asm volatile("" : "+r"(bases[i]));  // or GCC would derive a register for each row
        }
    }
};

template <int M, int PANELS = 1>
struct Sums {  // of M rows and the columns of neighbouring panels; every loop over `acc` is unrolled, or it would live in memory
    static constexpr int VECTORS = 2 * PANELS;
    vec acc[M][VECTORS];
    explicit Sums(const Output& to) {
#pragma GCC unroll 16
        for (int m = 0; m < M; m++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) acc[m][v] = vec{};
        if (!to.start) return;
        if (to.columns == VECTORS * VL) {
#pragma GCC unroll 16
            for (int m = 0; m < M; m++)
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) acc[m][v] = load(to.start + m * to.start_stride + v * VL);
            return;
        }
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
            float s[VECTORS * VL] = {};
            memcpy(s, to.start + m * to.start_stride, to.columns * sizeof(float));
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) acc[m][v] = load(s + v * VL);
        }
    }
    // Adds column i of the rows times a panel's weights at i.
    inline __attribute__((always_inline)) void add(const Rows<M>& x, long i, vec low, vec high, int panel = 0) {
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
            const vec a = splat(x.at(m, i));
            acc[m][2 * panel] = madd(a, low, acc[m][2 * panel]);
            acc[m][2 * panel + 1] = madd(a, high, acc[m][2 * panel + 1]);
        }
    }
    void store_to(const Output& to) const {
        if (to.columns == VECTORS * VL) {
#pragma GCC unroll 16
            for (int m = 0; m < M; m++)
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) store(to.out + m * to.stride + v * VL, acc[m][v]);
            return;
        }
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
            float s[VECTORS * VL];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) store(s + v * VL, acc[m][v]);
            memcpy(to.out + m * to.stride, s, to.columns * sizeof(float));
        }
    }
};

template <int M, class W>
void product_tile(const float* x, long ldx, W w, long k0, long k1, Output to) {
    Sums<M> sums(to);
    Rows<M> rows(x + k0, ldx);
    for (long k = k0; k < k1; k++) {
        w.template prefetch<M>(k);
        sums.add(rows, 0, w.low(k), w.high(k));
        rows.advance(1);
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

// Calls body(first panel, first row, rows, their outputs) once for every `together` neighbouring panels and chunk of rows.
template <class F>
void over_panels(const Product& product, float* out, long M, int threads, const F& body, long together = 1) {
    const long K = product.inputs, N = product.outputs, width = together * NT, num_panels = (N + width - 1) / width;
    // Many rows at once, which share an expansion of blocks, unless that leaves too little to share among many cores.
    const long chunk = (num_panels < 8 * threads ? 10 : 40) * MT, num_chunks = (M + chunk - 1) / chunk;
    const long stride = product.stride;
    const float* bias = product.bias;
    if (M * K * N < SERIAL) threads = 1;
    auto compute = [=, &body](long item) {
        const long p = item / num_chunks, row = item % num_chunks * chunk;
        const long columns = N - p * width < width ? N - p * width : width;
        const Output to{out + row * stride + p * width, stride, columns, bias ? bias + p * width : nullptr, 0};
        body(p * together, row, M - row < chunk ? M - row : chunk, to);
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
