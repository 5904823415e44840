// The CPU kernels behind `paceline.models.native_kernels`: plain C functions, one source for AVX-512, AVX2 and a baseline.
//
// The law: a row's result has the same bits whatever rows share the call, however many threads run it, and wherever its
// keys lie in the cache. So every sum has one order, fixed by logical index alone: a product adds k = 0, 1, 2, ...;
// attention walks positions in order, in splits at absolute multiples of SPLIT, merged first to last. Tiles and threads
// only choose which rows are computed together. Multiply-adds are fused by hand (madd below) and the compiler is told not
// to fuse any itself (-ffp-contract=off): two instantiations of one template must not round differently.

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "pool.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// ---- vectors -------------------------------------------------------------------------------------------------------

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
constexpr long SCORES = SPLIT + 16;  // a row of scores; a power of two apart, rows would fight over cache sets
constexpr int TILE_ROWS = 48; // rows x grouped heads that share one reading of K and V
constexpr long SERIAL = 32768; // elementary operations below which waking the other threads costs more than it saves

typedef float vec __attribute__((vector_size(VL * 4)));
typedef int32_t ivec __attribute__((vector_size(VL * 4)));
typedef float loose_vec __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef uint16_t loose_half __attribute__((vector_size(VL * 2), aligned(2), may_alias));
typedef uint32_t uvec __attribute__((vector_size(VL * 4)));

inline vec load(const float* p) { return *(const loose_vec*)p; }
inline vec load(const uint16_t* p) { return (vec)(__builtin_convertvector(*(const loose_half*)p, uvec) << 16); }  // bf16
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

inline float max_lanes(vec v) {
    float best = v[0];
    for (int i = 1; i < VL; i++) best = v[i] > best ? v[i] : best;
    return best;
}

// e^x for x <= 0 within 2 ulp, 0 below the smallest normal number: x = n ln 2 + r, a polynomial in r, times 2^n.
inline vec vexp(vec x) {
    const vec lowest = splat(-87.33f), magic = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves n in the low bits
    const vec inside = x < lowest ? lowest : x;  // not-a-number passes both comparisons and comes out as itself
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
inline vec interleave_low(vec a, vec b) {
#if defined(__AVX512F__)
    return SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#elif defined(__AVX2__)
    return SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#else
    return SHUFFLE(a, b, 0, 4, 1, 5);
#endif
}
inline vec interleave_high(vec a, vec b) {
#if defined(__AVX512F__)
    return SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif defined(__AVX2__)
    return SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
    return SHUFFLE(a, b, 2, 6, 3, 7);
#endif
}

// Each round rotates the bits of (row, lane) by one; log2(VL) rounds exchange them.
inline void transpose(vec (&a)[VL]) {
#pragma GCC unroll 4
    for (int round = 1; round < VL; round *= 2) {
        vec b[VL];
#pragma GCC unroll 8
        for (int i = 0; i < VL / 2; i++) {
            b[2 * i] = interleave_low(a[i], a[i + VL / 2]);
            b[2 * i + 1] = interleave_high(a[i], a[i + VL / 2]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < VL; i++) a[i] = b[i];
    }
}

// ---- products ------------------------------------------------------------------------------------------------------

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

// The right-hand sides of a product tile: where its k-th pair of vectors comes from.
template <class T>
struct Weights {  // streamed from memory: ask for it 2 KiB ahead
    const T* panel;
    static constexpr long AHEAD = 2048 / sizeof(T), LINE = 64 / sizeof(T);
    void prefetch(long k) const {
        for (long i = 0; i < NT; i += LINE) __builtin_prefetch(panel + k * NT + AHEAD + i, 0, 3);
    }
    Weights next_tile() const { return *this; }
    vec low(long k) const { return load(panel + k * NT); }
    vec high(long k) const { return load(panel + k * NT + VL); }
};
struct Keys {  // a panel in L1; meanwhile the values of the same positions may be asked for, a line at a time
    const float* panel;
    const float* const* ahead = nullptr;
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
        w.prefetch(k);
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
        // Several tiles read the same panel: let them do it while that part of it is in L2.
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
    // Neighbouring panels in one claim: what is asked for ahead of a panel's end is then the thread's own next panel.
    const long items = num_panels * num_chunks, run = items / (4 * threads) > 1 ? items / (4 * threads) : 1;
    parallel((items + run - 1) / run, threads, [=](long claim, int) {
        for (long item = claim * run; item < (claim + 1) * run && item < items; item++) compute(item);
    });
}

// ---- elementwise ---------------------------------------------------------------------------------------------------

void rms_norm_row(const float* x, const float* weight, float* out, long n, float eps) {
    vec squares[4] = {};
    long i = 0;
    for (; i + 4 * VL <= n; i += 4 * VL)
        for (int j = 0; j < 4; j++) {
            const vec v = load(x + i + j * VL);
            squares[j] = madd(v, v, squares[j]);
        }
    for (; i < n; i += VL) {
        const vec v = n - i < VL ? load_n(x + i, n - i) : load(x + i);
        squares[0] = madd(v, v, squares[0]);
    }
    const float sum = sum_lanes((squares[0] + squares[1]) + (squares[2] + squares[3]));
    const float scale = 1.0f / std::sqrt(sum / (float)n + eps);
    for (i = 0; i < n; i++) out[i] = x[i] * scale * weight[i];
}

void rotate_row(const float* x, const float* cos, const float* sin, float* out, long half) {
    for (long i = 0; i < half; i++) {
        const float a = x[i], b = x[half + i];
        out[i] = a * cos[i] - b * sin[i];
        out[half + i] = b * cos[i] + a * sin[i];
    }
}

// ---- attention -----------------------------------------------------------------------------------------------------

struct Plan {  // native_kernels.PlanView
    const int32_t *positions, *slots, *sequence, *prefix, *path, *tables;
    int64_t rows, path_width, table_width, block_size;
};

struct Attention : Plan {  // one call
    const float *q, *keys, *values;
    long q_heads, kv_heads, dim, num_slots, window;
    float scale;
    bool bad_slot;

    long group() const { return q_heads / kv_heads; }
    long begin(long row) const { return window && positions[row] >= window ? positions[row] - window + 1 : 0; }
    long end(long row) const { return positions[row] + 1; }

    // The slots of a row's positions [from, to). A position it cannot have read is a bug upstream: reported, not followed.
    void find_slots(long row, long from, long to, long* out) {
        const int32_t* table = tables + sequence[row] * table_width;
        const long paged = to < prefix[row] ? to : prefix[row];
        long p = from;
        while (p < paged) {
            const long block = p / block_size, stop = (block + 1) * block_size < paged ? (block + 1) * block_size : paged;
            const long first = block < table_width && table[block] >= 0 ? table[block] * block_size : -num_slots;
            for (; p < stop; p++) *out++ = checked(first + p - block * block_size);
        }
        for (; p < to; p++) {
            const long i = p - prefix[row];
            *out++ = checked(i < path_width ? path[row * path_width + i] : -1);
        }
    }
    long checked(long slot) {
        if (slot >= 0 && slot < num_slots) return slot;
        __atomic_store_n(&bad_slot, true, __ATOMIC_RELAXED);
        return 0;
    }
    const float* row_of(const float* cache, long slot, long head) const { return cache + (slot * kv_heads + head) * dim; }
};

struct Tile {  // neighbouring rows of one sequence
    long first, rows;
};

// A weighted sum of values is kept as (sum of e^(s - m) v: dim floats, m, sum of e^(s - m)).
struct Scratch {  // one thread's
    float *q, *scores, *panel, *tail, *result, *state;
};

void merge(float* into, const float* from, long dim) {
    const float m = into[dim] > from[dim] ? into[dim] : from[dim];
    const float a = vexp(into[dim] - m), b = vexp(from[dim] - m);
    for (long i = 0; i < dim; i++) into[i] = into[i] * a + from[i] * b;
    into[dim] = m;
    into[dim + 1] = into[dim + 1] * a + from[dim + 1] * b;
}

// Scores to weights in place, over positions [from, to) of the split.
void softmax(float* s, long from, long to, float* max, float* sum) {
    const long first = from / VL * VL, last = (to + VL - 1) / VL * VL;
    for (long i = first; i < from; i++) s[i] = -INFINITY;
    for (long i = to; i < last; i++) s[i] = -INFINITY;
    vec best = load(s + first);
    for (long i = first + VL; i < last; i += VL) best = larger(load(s + i), best);
    *max = max_lanes(best);
    vec total = {};
    for (long i = first; i < last; i += VL) {
        const vec e = vexp(load(s + i) - splat(*max));
        store(s + i, e);
        total += e;
    }
    *sum = sum_lanes(total);
}

// sum of weight * value over positions [from, to) of the split, added to what `result` holds when `resume`.
void weigh_values(const Attention& a, const float* weights, long rows, const float* const* values, long from, long to,
                  float* tail, float* result, bool resume) {
    const long stride = a.dim + 2, whole = a.dim / NT * NT;
    for (long c = 0; c < whole; c += NT)
        product(weights, SCORES, rows, Values{values, c}, from, to,
                {result + c, stride, NT, resume ? result + c : nullptr, stride});
    if (whole == a.dim) return;
    const long columns = a.dim - whole;  // a row's last columns are copied: reading NT of them could leave the cache
    for (long p = from; p < to; p++) memcpy(tail + p * NT, values[p] + whole, columns * sizeof(float));
    product(weights, SCORES, rows, Keys{tail}, from, to,
            {result + whole, stride, columns, resume ? result + whole : nullptr, stride});
}

void scale_queries(const Attention& a, Tile tile, long head, float* out) {
    const long G = a.group();
    for (long r = 0; r < tile.rows; r++) {
        const float* q = a.q + ((tile.first + r) * a.q_heads + head * G) * a.dim;
        for (long i = 0; i < G * a.dim; i++) out[r * G * a.dim + i] = q[i] * a.scale;
    }
}

// One tile, one kv head, one split. Positions that all rows of the tile read from the same slots are done together, the
// rest row by row; either way a row goes through its own positions in order.
void attend_split(Attention& a, Tile tile, long head, long split, const Scratch& s, float* result) {
    const long G = a.group(), D = a.dim, base = split * SPLIT;
    scale_queries(a, tile, head, s.q);
    long low[TILE_ROWS], high[TILE_ROWS];
    long shared_low = 0, shared_high = SPLIT, any_low = SPLIT, any_paged = 0;
    for (long r = 0; r < tile.rows; r++) {
        const long row = tile.first + r, begin = a.begin(row) - base, end = a.end(row) - base;
        low[r] = begin < 0 ? 0 : begin;
        high[r] = end > SPLIT ? SPLIT : end;
        const long paged = a.prefix[row] - base < high[r] ? a.prefix[row] - base : high[r];
        if (low[r] > shared_low) shared_low = low[r];
        if (paged < shared_high) shared_high = paged;
        if (low[r] >= high[r]) continue;
        if (low[r] < any_low) any_low = low[r];
        if (paged > any_paged) any_paged = paged;
    }
    shared_low = (shared_low + NT - 1) / NT * NT;
    shared_high = shared_high < 0 ? 0 : shared_high / NT * NT;
    if (shared_high <= shared_low) shared_low = shared_high = 0;

    // Pages any row reads through the block table, and the pointers to them.
    long slots[SPLIT];
    const float *keys[SPLIT], *values[SPLIT];
    long table_row = tile.first;
    for (long r = 1; r < tile.rows; r++)
        if (a.prefix[tile.first + r] > a.prefix[table_row]) table_row = tile.first + r;
    if (any_low < any_paged) a.find_slots(table_row, base + any_low, base + any_paged, slots + any_low);
    for (long p = any_low; p < any_paged; p++) {
        keys[p] = a.row_of(a.keys, slots[p], head);
        values[p] = a.row_of(a.values, slots[p], head);
    }

    // Scores of `rows` rows from `first` on against a block; `from_keys` (null: the panel has it) holds positions [from, to).
    auto score = [&](long first, long rows, long block, long from, long to, const float* const* from_keys) {
        if (from_keys) {
            const float* columns[NT];
            for (long j = 0; j < NT; j++) {  // a column nobody sees may hold anything
                const long p = block + j < from ? from : block + j < to ? block + j : to - 1;
                columns[j] = from_keys[p];
            }
            const bool more = block >= any_low && block + 2 * NT <= any_paged;
            pack_panel(columns, D, s.panel, more ? keys + block + NT : nullptr);
        }
        const bool paged = block >= any_low && block + NT <= any_paged;
        product(s.q + first * G * D, D, rows * G, Keys{s.panel, paged ? values + block : nullptr}, 0, D,
                {s.scores + first * G * SCORES + block, SCORES, NT, nullptr, 0});
    };
    auto own_keys = [&](long r, long from, long to, const float* cache, const float** out) {
        long own[SPLIT];
        a.find_slots(tile.first + r, base + from, base + to, own + from);
        for (long p = from; p < to; p++) out[p] = a.row_of(cache, own[p], head);
    };

    for (long block = 0; block < SPLIT; block += NT) {
        if (block >= shared_low && block < shared_high) {
            score(0, tile.rows, block, block, block + NT, keys);
            continue;
        }
        bool packed = false;  // the panel holds this block as the block table has it
        for (long r = 0; r < tile.rows; r++) {
            const long from = low[r] > block ? low[r] : block, to = high[r] < block + NT ? high[r] : block + NT;
            if (from >= to) continue;
            if (base + to <= a.prefix[tile.first + r]) {
                score(r, 1, block, any_low, any_paged, packed ? nullptr : keys);
                packed = true;
            } else {
                const float* own[SPLIT];
                own_keys(r, from, to, a.keys, own);
                score(r, 1, block, from, to, own);
                packed = false;
            }
        }
    }

    const long stride = D + 2;
    for (long r = 0; r < tile.rows; r++)
        for (long g = r * G; low[r] < high[r] && g < (r + 1) * G; g++)
            softmax(s.scores + g * SCORES, low[r], high[r], result + g * stride + D, result + g * stride + D + 1);

    const bool shared = shared_low < shared_high;
    auto own_values = [&](long r, long from, long to, bool resume) {
        const float* own[SPLIT];
        own_keys(r, from, to, a.values, own);
        weigh_values(a, s.scores + r * G * SCORES, G, own, from, to, s.tail, result + r * G * stride, resume);
    };
    if (shared) {
        bool before = false;
        for (long r = 0; r < tile.rows; r++) before |= low[r] < shared_low;
        for (long r = 0; before && r < tile.rows; r++) own_values(r, low[r], shared_low, false);
        weigh_values(a, s.scores, tile.rows * G, values, shared_low, shared_high, s.tail, result, before);
    }
    for (long r = 0; r < tile.rows; r++) {
        const long from = shared ? shared_high : low[r];
        if (from < high[r]) own_values(r, from, high[r], shared);
    }
}

void write_tile(const Attention& a, Tile tile, long head, const float* state, float* out) {
    const long G = a.group(), D = a.dim;
    for (long r = 0; r < tile.rows; r++)
        for (long g = 0; g < G; g++, state += D + 2) {
            float* o = out + ((tile.first + r) * a.q_heads + head * G + g) * D;
            for (long i = 0; i < D; i++) o[i] = state[i] / state[D + 1];
        }
}

// Merge one split's result for every row of the tile that sees it.
void merge_tile(const Attention& a, Tile tile, long split, const float* result, float* state) {
    const long G = a.group(), stride = a.dim + 2;
    for (long r = 0; r < tile.rows; r++) {
        const long begin = a.begin(tile.first + r), end = a.end(tile.first + r);
        if (split < begin / SPLIT || split * SPLIT >= end) continue;
        for (long g = r * G; g < (r + 1) * G; g++) {
            if (split == begin / SPLIT)
                memcpy(state + g * stride, result + g * stride, stride * sizeof(float));
            else
                merge(state + g * stride, result + g * stride, a.dim);
        }
    }
}

int attend(Attention& a, float* out, int threads) {
    const long G = a.group(), D = a.dim, stride = D + 2;
    const long most_rows = TILE_ROWS / G > 1 ? TILE_ROWS / G : 1;
    Tile* tiles = (Tile*)malloc(a.rows * sizeof(Tile));
    if (!tiles) return 1;
    long num_tiles = 0, largest = 0, work = 0, first_split = INT64_MAX, end_split = 0;
    for (long row = 0; row < a.rows; row++) {
        const bool joins = num_tiles && a.sequence[row] == a.sequence[row - 1] && tiles[num_tiles - 1].rows < most_rows;
        if (joins)
            tiles[num_tiles - 1].rows++;
        else
            tiles[num_tiles++] = {row, 1};
        if (tiles[num_tiles - 1].rows > largest) largest = tiles[num_tiles - 1].rows;
        const long first = a.begin(row) / SPLIT, end = (a.end(row) + SPLIT - 1) / SPLIT;
        first_split = first < first_split ? first : first_split;
        end_split = end > end_split ? end : end_split;
        work += (a.end(row) - a.begin(row)) * a.q_heads * D;
    }
    if (work < SERIAL) threads = 1;
    // Enough tiles: each goes through its splits itself. Else the splits are dealt out too and merged afterwards, by the
    // same function in the same order. With enough items either way, one takes all heads: they are neighbours in memory.
    const long splits = end_split - first_split;
    const bool deal = threads > 1 && splits > 1 && num_tiles * a.kv_heads < 4 * threads;
    const long span = threads == 1 || num_tiles * (deal ? splits : 1) >= 4 * threads ? a.kv_heads : 1;
    const long parts = a.kv_heads / span, num_items = num_tiles * parts;

    const long heads = largest * G, size = heads * stride;  // a split's result for one tile and kv head
    const long per_thread = heads * D + heads * SCORES + D * NT + SPLIT * NT + size + span * size + 64;
    const long dealt = deal ? num_tiles * a.kv_heads * splits * size : 0;
    float* memory = (float*)malloc((threads * per_thread + dealt) * sizeof(float));
    if (!memory) {
        free(tiles);
        return 1;
    }
    auto partial = [&](long tile, long head, long split) {
        return memory + threads * per_thread + ((tile * a.kv_heads + head) * splits + split - first_split) * size;
    };
    auto scratch = [&](int worker) {
        float* at = memory + worker * per_thread;
        Scratch s;
        s.q = at, at += heads * D;
        s.scores = at, at += heads * SCORES;
        s.panel = at, at += D * NT;
        s.tail = at, at += SPLIT * NT;
        s.result = at, at += size;
        s.state = at;
        return s;
    };
    auto seen = [&](Tile tile, long split) {
        for (long r = tile.first; r < tile.first + tile.rows; r++)
            if (split >= a.begin(r) / SPLIT && split * SPLIT < a.end(r)) return true;
        return false;
    };

    if (deal)
        parallel(num_items * splits, threads, [&](long item, int worker) {
            const long tile = item / parts / splits, split = first_split + item / parts % splits, part = item % parts;
            if (!seen(tiles[tile], split)) return;
            for (long head = part * span; head < (part + 1) * span; head++)
                attend_split(a, tiles[tile], head, split, scratch(worker), partial(tile, head, split));
        });
    parallel(num_items, deal && a.rows * a.q_heads * D * splits < SERIAL ? 1 : threads, [&](long item, int worker) {
        const long index = item / parts, first_head = item % parts * span;
        const Tile tile = tiles[index];
        const Scratch s = scratch(worker);
        for (long split = first_split; split < end_split; split++) {
            if (!seen(tile, split)) continue;
            for (long h = 0; h < span; h++) {
                float* result = deal ? partial(index, first_head + h, split) : s.result;
                if (!deal) attend_split(a, tile, first_head + h, split, s, result);
                merge_tile(a, tile, split, result, s.state + h * size);
            }
        }
        for (long h = 0; h < span; h++) write_tile(a, tile, first_head + h, s.state + h * size, out);
    });
    free(memory);
    free(tiles);
    return a.bad_slot ? 2 : 0;
}

}  // namespace

// ---- the C interface: row-major, contiguous, fp32 unless named otherwise; `threads` is an upper bound -----------------

EXPORT long paceline_panel_width() { return NT; }

EXPORT void paceline_pack_f32(const float* weight, float* panels, long N, long K, int threads) {
    pack(weight, panels, N, K, threads);
}

EXPORT void paceline_pack_bf16(const uint16_t* weight, uint16_t* panels, long N, long K, int threads) {
    pack(weight, panels, N, K, threads);
}

EXPORT void paceline_linear_f32(const float* x, const float* panels, const float* bias, float* out, long M, long K, long N,
                                int threads) {
    linear(x, panels, bias, out, M, K, N, threads);
}

EXPORT void paceline_linear_bf16(const float* x, const uint16_t* panels, const float* bias, float* out, long M, long K,
                                 long N, int threads) {
    linear(x, panels, bias, out, M, K, N, threads);
}

// residual may be null; otherwise it becomes residual + x and is what is normed.
EXPORT void paceline_rms_norm(const float* x, float* residual, const float* weight, float* out, long M, long H, float eps,
                              int threads) {
    if (M * H < SERIAL) threads = 1;
    parallel(M, threads, [=](long row, int) {
        const float* from = x + row * H;
        if (residual) {
            float* sum = residual + row * H;
            for (long i = 0; i < H; i++) sum[i] += from[i];
            from = sum;
        }
        rms_norm_row(from, weight, out + row * H, H, eps);
    });
}

EXPORT void paceline_silu_mul(const float* gate_up, float* out, long M, long I, int threads) {
    if (M * I < SERIAL) threads = 1;
    parallel(M, threads, [=](long row, int) {
        const float *gate = gate_up + row * 2 * I, *up = gate + I;
        for (long i = 0; i < I; i += VL) {
            const long n = I - i < VL ? I - i : VL;
            const vec g = n == VL ? load(gate + i) : load_n(gate + i, n), u = n == VL ? load(up + i) : load_n(up + i, n);
            const vec e = vexp(g > vec{} ? -g : g), one = splat(1.0f);  // sigmoid(g) is 1 / (1 + e) or e / (1 + e)
            const vec y = g * ((g > vec{} ? one : e) / (one + e)) * u;
            n == VL ? store(out + row * I + i, y) : store_n(out + row * I + i, y, n);
        }
    });
}

// Returns 0, or 2 when a position lies outside the rotary tables or a slot outside the cache.
EXPORT int paceline_rope_and_store(const Plan* plan, float* qkv, float* keys, float* values, float* q_out, const float* cos,
                                   const float* sin, const float* q_norm, const float* k_norm, long q_heads,
                                   long kv_heads, long D, long num_positions, long num_slots, float eps, int threads) {
    const int32_t *positions = plan->positions, *slots = plan->slots;
    const long M = plan->rows;
    const long width = (q_heads + 2 * kv_heads) * D;
    for (long row = 0; row < M; row++)
        if (positions[row] < 0 || positions[row] >= num_positions || slots[row] < -1 || slots[row] >= num_slots) return 2;
    if (M * width < SERIAL) threads = 1;
    parallel(M, threads, [=](long row, int) {
        float *q = qkv + row * width, *k = q + q_heads * D, *v = k + kv_heads * D;
        const float *c = cos + positions[row] * (D / 2), *s = sin + positions[row] * (D / 2);
        for (long h = 0; h < q_heads; h++) {
            if (q_norm) rms_norm_row(q + h * D, q_norm, q + h * D, D, eps);
            rotate_row(q + h * D, c, s, q_out + (row * q_heads + h) * D, D / 2);
        }
        if (slots[row] < 0) return;
        const long at = slots[row] * kv_heads * D;
        for (long h = 0; h < kv_heads; h++) {
            if (k_norm) rms_norm_row(k + h * D, k_norm, k + h * D, D, eps);
            rotate_row(k + h * D, c, s, keys + at + h * D, D / 2);
        }
        memcpy(values + at, v, kv_heads * D * sizeof(float));
    });
    return 0;
}

// Returns 0, 1 when out of memory, 2 when the plan names a slot outside the cache.
EXPORT int paceline_attention(const Plan* plan, const float* q, const float* keys, const float* values, float* out,
                              long q_heads, long kv_heads, long dim, long num_slots, long window, float scale,
                              int threads) {
    Attention a{*plan, q, keys, values, q_heads, kv_heads, dim, num_slots, window, scale, false};
    return plan->rows ? attend(a, out, threads) : 0;
}
