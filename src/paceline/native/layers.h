// Several decoder layers in one call. At one row a layer's small steps take a few microseconds each; calls from Python would
// take longer than the steps, with the memory idle meanwhile.

#pragma once

#include <cstdlib>

#include "attention.h"
#include "elementwise.h"
#include "kinds.h"

namespace {

struct Layer {  // stack.LayerView
    const float *input_norm, *q_norm, *k_norm, *mlp_norm;
    Cache cache;
    int64_t window;
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

// `added`: output of the layer before, not yet in `residual` (ignored if `first`); on return, output of the last layer.
int run_layers(const Plan& plan, const Heads& heads, const Layer* layers, long count, float* residual, float* added,
               int first, const Taps& taps, int threads) {
    const long M = plan.rows, H = count ? layers->qkv.inputs : 0, Q = heads.q_heads * heads.dim;
    long widest = 0;
    for (long i = 0; i < count; i++) widest = layers[i].gate_up.stride > widest ? layers[i].gate_up.stride : widest;
    const long qkv_width = Q + 2 * heads.kv_heads * heads.dim;
    float* memory = (float*)malloc(M * (H + qkv_width + 2 * Q + widest + widest / 2) * sizeof(float));
    if (!memory) return 1;
    float *normed = memory, *qkv = normed + M * H, *q = qkv + M * qkv_width, *attended = q + M * Q;
    float *gate_up = attended + M * Q, *inner = gate_up + M * widest;
    int status = 0;
    for (const Layer* layer = layers; layer < layers + count && !status; layer++) {
        read_taps(taps, layer - layers, residual, first && layer == layers ? nullptr : added, M, H);
        if (first && layer == layers)
            rms_norm(residual, nullptr, layer->input_norm, normed, M, H, heads.eps, threads);
        else
            rms_norm(added, residual, layer->input_norm, normed, M, H, heads.eps, threads);
        status = multiply(normed, layer->qkv, qkv, M, threads);
        if (status) break;
        status = rope_and_store(plan, heads, qkv, layer->cache, q, layer->q_norm, layer->k_norm, threads);
        if (status) break;
        status = attention(plan, heads, q, layer->cache, attended, layer->window, threads);
        status |= multiply(attended, layer->output, added, M, threads);
        rms_norm(added, residual, layer->mlp_norm, normed, M, H, heads.eps, threads);
        status |= multiply(normed, layer->gate_up, gate_up, M, threads);
        silu_mul(gate_up, inner, M, layer->gate_up.stride / 2, threads);
        status |= multiply(inner, layer->down, added, M, threads);
    }
    read_taps(taps, count, residual, added, M, H);
    free(memory);
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
