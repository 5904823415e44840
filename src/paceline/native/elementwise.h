// The operations on one row between the products: norm, rotation, the gated activation.

#pragma once

#include "cache.h"
#include "plan.h"
#include "pool.h"
#include "vectors.h"

namespace {

enum Activation { SILU, GELU_TANH };  // spec.ACTIVATIONS

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

// Subtracts the mean of a row; in place too.
void centre_row(const float* x, float* out, long n) {
    vec sums = {};
    long i = 0;
    for (; i + VL <= n; i += VL) sums += load(x + i);
    if (i < n) sums += load_n(x + i, n - i);
    const float mean = sum_lanes(sums) / (float)n;
    for (i = 0; i < n; i++) out[i] = x[i] - mean;
}

void rotate_row(const float* x, const float* cos, const float* sin, float* out, long half) {
    for (long i = 0; i < half; i++) {
        const float a = x[i], b = x[half + i];
        out[i] = a * cos[i] - b * sin[i];
        out[half + i] = b * cos[i] + a * sin[i];
    }
}

void rms_norm(const float* x, float* residual, const float* weight, float* out, long M, long H, float eps, int threads,
              bool centred = false) {
    if (M * H < SERIAL) threads = 1;
    parallel(M, threads, [=](long row, int) {
        const float* from = x + row * H;
        if (residual) {
            float* sum = residual + row * H;
            for (long i = 0; i < H; i++) sum[i] += from[i];
            from = sum;
        }
        if (centred) {
            centre_row(from, out + row * H, H);
            from = out + row * H;
        }
        rms_norm_row(from, weight, out + row * H, H, eps);
    });
}

template <Activation A>
void gate_rows(const float* gate_up, float* out, long M, long I, int threads) {
    if (M * I < SERIAL) threads = 1;
    parallel(M, threads, [=](long row, int) {
        const float *gate = gate_up + row * 2 * I, *up = gate + I;
        for (long i = 0; i < I; i += VL) {
            const long n = I - i < VL ? I - i : VL;
            const vec g = n == VL ? load(gate + i) : load_n(gate + i, n), u = n == VL ? load(up + i) : load_n(up + i, n);
            vec s = g;  // the activation is g sigmoid(s): of the tanh form of GELU too
            if constexpr (A == GELU_TANH) s = g * (splat(1.5957691216f) + splat(0.0713548163f) * g * g);
            const vec e = vexp(s > vec{} ? -s : s), one = splat(1.0f);  // sigmoid(s) is 1 / (1 + e) or e / (1 + e)
            const vec y = g * ((s > vec{} ? one : e) / (one + e)) * u;
            n == VL ? store(out + row * I + i, y) : store_n(out + row * I + i, y, n);
        }
    });
}

void gate(const float* gate_up, float* out, long M, long I, long activation, int threads) {
    (activation == GELU_TANH ? gate_rows<GELU_TANH> : gate_rows<SILU>)(gate_up, out, M, I, threads);
}

void scale_rows(float* x, long count, float by) {
    if (by == 1.0f) return;
    for (long i = 0; i < count; i++) x[i] *= by;
}

// Computes x = c tanh(x / c), which is c - 2 c / (e^(2 x / c) + 1).
inline void cap_row(float* x, long n, float c) {
    const vec one = splat(1.0f), cap = splat(c), twice = splat(2.0f * c), by = splat(2.0f / c), most = splat(60.0f);
    for (long i = 0; i < n; i += VL) {
        const long some = n - i < VL ? n - i : VL;
        const vec s = (some == VL ? load(x + i) : load_n(x + i, some)) * by;
        const vec y = cap - twice / (vexp(s > most ? most : s) + one);
        some == VL ? store(x + i, y) : store_n(x + i, y, some);
    }
}

inline void cap_rows(float* x, long rows, long width, float c, int threads) {
    parallel(rows, rows * width < SERIAL ? 1 : threads, [=](long row, int) { cap_row(x + row * width, width, c); });
}

// Norms and rotates q and k, writes k and v to the cache; returns 2 if a position or slot is out of range.
int rope_and_store(const Plan& plan, const Heads& h, float* qkv, const Cache& cache, float* q_out, const float* q_norm,
                   const float* k_norm, int threads) {
    const int32_t *positions = plan.positions, *slots = plan.slots;
    const long M = plan.rows, D = h.dim, q_heads = h.q_heads, kv_heads = h.kv_heads, width = (q_heads + 2 * kv_heads) * D;
    const float *cos = h.cos, *sin = h.sin, eps = h.eps;
    for (long row = 0; row < M; row++)
        if (positions[row] < 0 || positions[row] >= h.num_positions || slots[row] < -1 || slots[row] >= h.num_slots) return 2;
    if (M * width < SERIAL) threads = 1;
    parallel(M, threads, [=, &cache, &h](long row, int) {
        float *q = qkv + row * width, *k = q + q_heads * D, *v = k + kv_heads * D;
        const float *c = cos + positions[row] * (D / 2), *s = sin + positions[row] * (D / 2);
        if (q_norm && h.whole_norm) rms_norm_row(q, q_norm, q, q_heads * D, eps);
        for (long head = 0; head < q_heads; head++) {
            if (q_norm && !h.whole_norm) rms_norm_row(q + head * D, q_norm, q + head * D, D, eps);
            rotate_row(q + head * D, c, s, q_out + (row * q_heads + head) * D, D / 2);
        }
        if (slots[row] < 0) return;
        const long at = slots[row] * kv_heads;
        if (k_norm && h.whole_norm) rms_norm_row(k, k_norm, k, kv_heads * D, eps);
        for (long head = 0; head < kv_heads; head++) {
            if (k_norm && !h.whole_norm) rms_norm_row(k + head * D, k_norm, k + head * D, D, eps);
            rotate_row(k + head * D, c, s, k + head * D, D / 2);
        }
        with_stored(cache, [=, &cache](auto type) {
            using T = decltype(type);
            store_heads(k, kv_heads, D, (T*)cache.keys + at * D, cache.key_scales + at);
            store_heads(v, kv_heads, D, (T*)cache.values + at * D, cache.value_scales + at);
        });
    });
    return 0;
}

}  // namespace
