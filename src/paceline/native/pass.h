// A whole pass of a model in one call: embeddings, all layers, the last norm and the head. Behind the weights the caches are
// cold, and each operation from Python would take tens of microseconds.

#pragma once

#include <vector>

#include "layers.h"
#include "rounded.h"

namespace {

struct Model {  // stack.ModelView: shared by all passes
    Product embedding, head;  // an embedding of numbers lies in rows, one of blocks in panels
    const float* norm;  // (H,)
    int64_t vocab;      // rows of the embedding
    int64_t centred;    // the norm subtracts the mean
    float eps, embed_scale, logit_scale, logit_softcap;
};

// Reads rows of an embedding of any kind.
inline void embed(const Product& from, const int64_t* tokens, float* out, long count, int threads) {
    const long H = from.inputs;
    if (from.kind != Kind::FLOAT32 && from.kind != Kind::BFLOAT16 && from.kind != Kind::FLOAT16)
        return gather(from, tokens, out, count, threads);
    for (long m = 0; m < count; m++, out += H) {
        if (from.kind == Kind::FLOAT32) {
            memcpy(out, (const float*)from.panels + tokens[m] * H, H * sizeof(float));
            continue;
        }
        const uint16_t* row = (const uint16_t*)from.panels + tokens[m] * H;
        for (long i = 0; i < H; i += VL) {
            uint16_t numbers[VL] = {};
            const long n = H - i < VL ? H - i : VL;
            memcpy(numbers, row + i, n * sizeof(uint16_t));
            store_n(out + i, from.kind == Kind::BFLOAT16 ? load(numbers) : load((const half*)numbers), n);
        }
    }
}

// Computes logits (count, V) of the rows `chosen`, ascending, or of all rows if null. Returns 0; 1: out of memory; 2: the plan
// names a position outside the tables or a slot outside the cache; 3: a token outside the vocabulary; 4: `chosen` is not
// ascending or not of the pass.
int run_pass(const Model& model, const Plan& plan, const Layer* layers, long num_layers, const int32_t* tokens,
             const int64_t* chosen, long count, const Taps& taps, float* logits, int threads) {
    const long M = plan.rows, H = model.head.inputs;
    std::vector<int64_t> ids(tokens, tokens + M);
    for (const int64_t id : ids)
        if (id < 0 || id >= model.vocab) return 3;
    for (long i = 0; chosen && i < count; i++)
        if (chosen[i] <= (i ? chosen[i - 1] : -1) || chosen[i] >= M) return 4;
    float* memory = (float*)malloc(2 * M * H * sizeof(float));
    if (!memory) return 1;
    float *residual = memory, *added = memory + M * H;
    embed(model.embedding, ids.data(), residual, M, threads);
    scale_rows(residual, M * H, model.embed_scale);
    int status = run_layers(plan, layers, num_layers, residual, added, 1, taps, threads);
    for (long i = 0; chosen && i < count; i++) {  // no row is overwritten before it is read
        memmove(residual + i * H, residual + chosen[i] * H, H * sizeof(float));
        memmove(added + i * H, added + chosen[i] * H, H * sizeof(float));
    }
    std::vector<float> normed(count * H);
    rms_norm(added, residual, model.norm, normed.data(), count, H, model.eps, threads, model.centred);
    scale_rows(normed.data(), count * H, model.logit_scale);
    if (!status) status = multiply(normed.data(), model.head, logits, count, threads);
    if (model.logit_softcap != 0) cap_rows(logits, count, model.head.stride, model.logit_softcap, threads);
    free(memory);
    return status;
}

}  // namespace
