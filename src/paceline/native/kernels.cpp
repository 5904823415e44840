// The library of `paceline.native.library`, as plain C functions: tensors are row-major, contiguous and fp32 unless named
// otherwise; `threads` is an upper bound.
//
// Invariant: the bits of a row's result do not depend on the other rows of the call, on the number of threads, or on where its
// keys lie in the cache. So every sum has one order, fixed by logical index alone; tiles and threads only choose which rows
// are computed together.

#include "block_draft.h"
#include "layers.h"
#include "lookup.h"
#include "pass.h"
#include "sampling.h"
#include "top_tokens.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT long paceline_abi() { return ABI; }

// Returns whether this processor has the library's instructions beyond those of its level (AVX2, AVX-512).
EXPORT int paceline_runs_here() {
#if defined(__AVX512VNNI__)
    return __builtin_cpu_supports("avx512vnni");
#else
    return 1;
#endif
}

EXPORT long paceline_panel_bytes(int64_t kind, long N, long K) { return panel_bytes((Kind)kind, N, K); }

EXPORT void paceline_pack(int64_t kind, const void* weight, void* panels, long N, long K, int threads) {
    pack((Kind)kind, weight, panels, N, K, threads);
}

// Returns 0; 1: out of memory.
EXPORT int paceline_linear(const Product* product, const float* x, float* out, long M, int threads) {
    return multiply(x, *product, out, M, threads);
}

// Reads rows `ids` of a weight of blocks.
EXPORT void paceline_gather(const Product* product, const int64_t* ids, float* out, long count, int threads) {
    gather(*product, ids, out, count, threads);
}

// A residual that is not null becomes residual + x, and this sum is normed.
EXPORT void paceline_rms_norm(const float* x, float* residual, const float* weight, float* out, long M, long H, float eps,
                              int centred, int threads) {
    rms_norm(x, residual, weight, out, M, H, eps, threads, centred);
}

EXPORT void paceline_cap(float* x, long rows, long width, float c, int threads) { cap_rows(x, rows, width, c, threads); }

EXPORT void paceline_gate(const float* gate_up, float* out, long M, long I, long activation, int threads) {
    gate(gate_up, out, M, I, activation, threads);
}

// Returns 0; 2: a position outside the rotary tables or a slot outside the cache.
EXPORT int paceline_rope_and_store(const Plan* plan, const Heads* heads, float* qkv, const Cache* cache, float* q_out,
                                   const float* q_norm, const float* k_norm, int threads) {
    return rope_and_store(*plan, *heads, qkv, *cache, q_out, q_norm, k_norm, threads);
}

// Returns 0; 1: out of memory; 2: the plan names a slot outside the cache.
EXPORT int paceline_attention(const Plan* plan, const Heads* heads, const float* q, const Cache* cache, float* out,
                              long window, int threads) {
    return attention(*plan, *heads, q, *cache, out, window, threads);
}

// Runs several layers; see layers.h. Returns 0; 1 or 2: as above.
EXPORT int paceline_layers(const Plan* plan, const Layer* layers, long count, float* residual, float* added, int first,
                           const Taps* taps, int threads) {
    return run_layers(*plan, layers, count, residual, added, first, *taps, threads);
}

// Runs a whole pass; see pass.h.
EXPORT int paceline_pass(const Model* model, const Plan* plan, const Layer* layers, long num_layers, const int32_t* tokens,
                         const int64_t* chosen, long count, const Taps* taps, float* logits, int threads) {
    return run_pass(*model, *plan, layers, num_layers, tokens, chosen, count, *taps, logits, threads);
}

// -- drafters that read hidden states: see layers.h and block_draft.h

EXPORT void paceline_store_in_ring(float* states, int64_t* tokens, const float* taps, long width, const int64_t* stored,
                                   long count) {
    store_in_ring(states, tokens, taps, width, stored, count);
}

EXPORT int paceline_write_context_kv(const Plan* plan, const Layer* layers, long count, const ContextKV* by,
                                     const float* taps, int threads) {
    return write_context_kv(*plan, layers, count, *by, taps, threads);
}

EXPORT int paceline_draft_blocks(const BlockDrafter* by, Drafting* drafting, int threads) {
    return draft_blocks(*by, *drafting, threads);
}

// Returns the token drawn from a row of V logits, or UNDECIDED; see sampling.h.
EXPORT long paceline_draw_token(const float* logits, long V, float temperature, float log_min_p, long top_k, double top_p,
                                double coin, uint64_t key) {
    return draw_token(logits, V, {temperature, log_min_p, top_k, top_p, coin, key});
}

// Writes the n likeliest tokens of each row, their probabilities and the mass of the others; see top_tokens.h.
EXPORT void paceline_top_tokens(const float* logits, long V, long rows, long n, int32_t* out, int threads) {
    top_tokens(logits, V, rows, n, out, threads);
}

// -- lookup drafters: see suffix.h and lookup.h

EXPORT void paceline_index_extend(suffix::Index* index, const int32_t* tokens, long count) {
    suffix::extend(*index, tokens, count);
}

EXPORT void paceline_lookup_append(suffix::Row* row, const int64_t* tokens, long count) {
    suffix::append(*row, tokens, count);
}

EXPORT void paceline_lookup_find(const lookup::Rule* rule, int64_t* rows, long num_rows) {
    lookup::find_all(*rule, rows, num_rows);
}

// -- tables of successors: see successors.h and recycling.h

EXPORT void paceline_successors_move(const successors::Table* from, successors::Table* to) { successors::move_all(*from, *to); }

EXPORT void paceline_recycling_teach(const successors::Rows* rows, const recycling::Lesson* lessons, const int64_t* committed,
                                     int64_t num_rows, const successors::Table* base) {
    recycling::teach(*rows, lessons, committed, num_rows, base);
}

EXPORT long paceline_lookup_draft(const lookup::Rule* rule, const int64_t* rows, long num_rows, long width, int64_t* counts) {
    return lookup::draft_all(*rule, rows, num_rows, width, counts);
}
