// Several decoder layers in one call. At one row a layer's small steps take a few microseconds each; calls from Python would
// take longer than the steps, with the memory idle meanwhile.

#pragma once

#include <algorithm>
#include <cstdlib>

#include "attention.h"
#include "elementwise.h"
#include "kinds.h"

namespace {

struct Layer {  // stack.LayerView
    const float *input_norm, *q_norm, *k_norm, *attention_norm, *mlp_norm, *down_norm;  // null: no such norm
    Heads heads;
    Cache cache;
    int64_t window, activation, is_parallel, centred;
    Product qkv, output, gate_up, down;
};

// Copies of the residual stream before some layers: tap j of row m at out + (m * count + j) * H.
struct Taps {  // stack.TapsView
    const int64_t* layers;  // (count,), each no more than the number of layers
    float* out;
    int64_t count;
};

void read_taps(const Taps& taps, long layer, const float* residual, const float* added, long M, long H) {
    for (long tap = 0; tap < taps.count; tap++)
        if (taps.layers[tap] == layer)
            for (long row = 0; row < M; row++) {
                float* out = taps.out + (row * taps.count + tap) * H;
                const float *stream = residual + row * H, *more = added ? added + row * H : nullptr;
                for (long i = 0; i < H; i++) out[i] = more ? stream[i] + more[i] : stream[i];
            }
}

// Adds `added`, unless null, to the residual stream; returns the input of a half of the layer: the stream, normed if it has
// a norm.
inline const float* enter(const Layer& layer, const float* norm, float* residual, const float* added, float* normed, long M,
                          long H, int threads) {
    if (norm) {
        rms_norm(added ? added : residual, added ? residual : nullptr, norm, normed, M, H, layer.heads.eps, threads,
                 layer.centred);
        return normed;
    }
    for (long i = 0; added && i < M * H; i++) residual[i] += added[i];
    return residual;
}

// Buffers of the widest layer.
struct LayerBuffers {
    float *memory, *normed, *qkv, *q, *attended, *gate_up, *inner, *other;

    LayerBuffers(const Layer* layers, long count, long M) {
        const long H = layers->qkv.inputs;
        long Q = 0, qkv_width = 0, widest = 0;
        for (const Layer* layer = layers; layer < layers + count; layer++) {
            Q = std::max(Q, (long)(layer->heads.q_heads * layer->heads.dim));
            qkv_width = std::max(qkv_width, (long)layer->qkv.stride);
            widest = std::max(widest, (long)layer->gate_up.stride);
        }
        const long parallel = layers->is_parallel ? H : 0;
        memory = (float*)malloc(M * (H + qkv_width + 2 * Q + widest + widest / 2 + parallel) * sizeof(float));
        normed = memory, qkv = normed + M * H, q = qkv + M * qkv_width, attended = q + M * Q;
        gate_up = attended + M * Q, inner = gate_up + M * widest, other = inner + M * (widest / 2);
    }
    ~LayerBuffers() { free(memory); }
};

// `added`: output of the layer before, not yet in `residual` (ignored if `first`); on return, output of the last layer.
int run_layers(const Plan& plan, const Layer* layers, long count, float* residual, float* added, int first, const Taps& taps,
               int threads) {
    const long M = plan.rows, H = count ? layers->qkv.inputs : 0;
    if (!count) return 0;
    const LayerBuffers at(layers, count, M);
    if (!at.memory) return 1;
    int status = 0;
    for (const Layer* layer = layers; layer < layers + count && !status; layer++) {
        const Heads& heads = layer->heads;
        const float* before = first && layer == layers ? nullptr : added;
        read_taps(taps, layer - layers, residual, before, M, H);
        const float* entered = enter(*layer, layer->input_norm, residual, before, at.normed, M, H, threads);
        status = multiply(entered, layer->qkv, at.qkv, M, threads);
        if (status) break;
        status = rope_and_store(plan, heads, at.qkv, layer->cache, at.q, layer->q_norm, layer->k_norm, threads);
        if (status) break;
        status = attention(plan, heads, at.q, layer->cache, at.attended, layer->window, threads);
        status |= multiply(at.attended, layer->output, added, M, threads);
        if (layer->attention_norm)
            rms_norm(added, nullptr, layer->attention_norm, added, M, H, heads.eps, threads, layer->centred);
        if (!layer->is_parallel) entered = enter(*layer, layer->mlp_norm, residual, added, at.normed, M, H, threads);
        status |= multiply(entered, layer->gate_up, at.gate_up, M, threads);
        gate(at.gate_up, at.inner, M, layer->gate_up.stride / 2, layer->activation, threads);
        float* out = layer->is_parallel ? at.other : added;
        status |= multiply(at.inner, layer->down, out, M, threads);
        if (layer->down_norm) rms_norm(out, nullptr, layer->down_norm, out, M, H, heads.eps, threads, layer->centred);
        for (long i = 0; layer->is_parallel && i < M * H; i++) added[i] += out[i];
    }
    read_taps(taps, count, residual, added, M, H);
    return status;
}

// Writes to the ring of hidden states of committed positions (`paceline.drafters.hidden_states.TapRing`).
// `stored` (count, 3): a place of the ring, a row of `taps` (rows of a pass, width), and the token after that row's.
void store_in_ring(float* states, int64_t* tokens, const float* taps, long width, const int64_t* stored, long count) {
    for (; count; count--, stored += 3) {
        memcpy(states + stored[0] * width, taps + stored[1] * width, width * sizeof(float));
        tokens[stored[0]] = stored[2];
    }
}

}  // namespace
