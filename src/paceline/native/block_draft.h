// A draft of a block drafter in one call: hidden states of newly committed positions become keys and values, the block of
// the last token and its masks is run, and trees are grown from its logits. The head computes a few positions of a block at
// a time, and stops once no tree can grow further.

#pragma once

#include "block_tree.h"
#include "pass.h"

namespace {

struct ContextKV {  // stack.ContextKVView: weights that turn hidden states into keys and values of all layers
    const float *tap_norm, *norm;  // (taps, H) or null, (H,)
    Product join, kv;
    int64_t taps;
    float eps;
};

// Writes keys and values of all layers from hidden states (rows, taps, H): norm, one product that joins the taps, norm, one
// product for all layers. Nothing attends.
int write_context_kv(const Plan& plan, const Layer* layers, long count, const ContextKV& by, const float* taps, int threads) {
    const long M = plan.rows, H = by.join.outputs, width = by.join.inputs, all = by.kv.stride;
    const long each = count ? all / count : 0;
    float* memory = (float*)malloc(M * (width + 2 * H + all + each) * sizeof(float));
    if (!memory) return 1;
    float *scaled = memory, *joined = scaled + M * width, *normed = joined + M * H;
    float *states = normed + M * H, *part = states + M * all;
    if (by.tap_norm)
        parallel(M, M * width < SERIAL ? 1 : threads, [=](long row, int) {
            for (long at = row * width, tap = 0; tap < by.taps; tap++, at += H)
                rms_norm_row(taps + at, by.tap_norm + tap * H, scaled + at, H, by.eps);
        });
    int status = multiply(by.tap_norm ? scaled : taps, by.join, joined, M, threads);
    rms_norm(joined, nullptr, by.norm, normed, M, H, by.eps, threads);
    status |= multiply(normed, by.kv, states, M, threads);
    for (long layer = 0; layer < count && !status; layer++) {
        for (long row = 0; row < M; row++) memcpy(part + row * each, states + row * all + layer * each, each * sizeof(float));
        const Layer& to = layers[layer];
        Heads without_queries = to.heads;
        without_queries.q_heads = 0;
        status = rope_and_store(plan, without_queries, part, to.cache, nullptr, nullptr, to.k_norm, threads);
    }
    free(memory);
    return status;
}

struct BlockDrafter {  // block/native.DrafterView: shared by all drafts
    const Layer* layers;
    const ContextKV* context_kv;
    const int64_t* columns;  // the drafter's taps, among the taps of the ring
    const float *masks, *norm;  // (masks, H), (H,)
    Product embedding, head;  // an embedding of numbers lies in rows, one of blocks in panels
    int64_t num_layers, first_row, max_positions, block_size;  // first_row: row of a block that drafts the first token
};

struct RowToDraft {  // block/native.BlockRow: a sequence
    int64_t req_index, length;
    int64_t write_from, write_to;  // positions whose hidden states become keys and values
    int64_t first_block, end;      // first block of its keys; positions that its blocks have slots for
    int64_t token;                 // out: its last token
};

struct Drafting {  // block/native.DraftingView: one draft
    const float* states;  // states in the ring
    const int64_t* tokens;
    int64_t capacity, ring_width;
    RowToDraft* rows;
    const int32_t* tables;  // (batch, table_width)
    const float* least;  // (batch,) logs of probabilities
    float* logits;  // out: (batch * depth, vocab), in the order in which they were computed
    int64_t batch, table_width, size, depth;  // size: rows of a block; depth: rows of a block that draft
    int64_t looked_at;  // out: rows of logits that were computed
    block_tree::Forest forest;
};

int write_from_ring(const BlockDrafter& by, const Drafting& d, int threads) {
    const long taps = by.context_kv->taps, H = by.context_kv->join.outputs;
    std::vector<int32_t> positions, slots;
    std::vector<float> states;
    for (long b = 0; b < d.batch; b++) {
        const RowToDraft& row = d.rows[b];
        const int32_t* table = d.tables + b * d.table_width;
        for (long at = row.write_from; at < row.write_to; at++) {
            const float* from = d.states + (row.req_index * d.capacity + at % d.capacity) * d.ring_width;
            for (long tap = 0; tap < taps; tap++)
                states.insert(states.end(), from + by.columns[tap] * H, from + (by.columns[tap] + 1) * H);
            positions.push_back((int32_t)std::min((long)by.max_positions - 1, at));
            slots.push_back((int32_t)(table[at / by.block_size] * by.block_size + at % by.block_size));
        }
    }
    if (positions.empty()) return 0;
    Plan plan{};
    plan.positions = positions.data(), plan.slots = slots.data(), plan.rows = (int64_t)slots.size();
    return write_context_kv(plan, by.layers, by.num_layers, *by.context_kv, states.data(), threads);
}

// Computes hidden states (batch * size, H) of the blocks, behind the last norm. A row without a slot is not stored, and its
// tokens are arbitrary.
int run_blocks(const BlockDrafter& by, Drafting& d, float* hidden, int threads) {
    const long M = d.batch * d.size, H = by.head.inputs, W = d.table_width;
    std::vector<int32_t> numbers(4 * M + d.batch * W);
    int32_t *positions = numbers.data(), *slots = positions + M, *owner = slots + M, *reach = owner + M, *tables = reach + M;
    std::vector<float> residual(M * H), added(M * H);
    for (long b = 0; b < d.batch; b++) {
        RowToDraft& row = d.rows[b];
        const long start = row.first_block * by.block_size, first = row.length - 1;
        memcpy(tables + b * W, d.tables + b * W + row.first_block, (W - row.first_block) * sizeof(int32_t));
        for (long i = 0, m = b * d.size; i < d.size; i++, m++) {
            const long position = std::max(std::min(first + i, (long)row.end - 1), 0L), at = std::max(position - start, 0L);
            positions[m] = (int32_t)position, owner[m] = (int32_t)b;
            const long slot = tables[b * W + at / by.block_size] * by.block_size + at % by.block_size;
            slots[m] = first + i < row.end ? (int32_t)slot : -1;
            reach[m] = (int32_t)std::max(std::min(first + (long)d.size, (long)row.end) - start, 1L);
        }
        row.token = d.tokens[row.req_index * d.capacity + (row.length - 2) % d.capacity];
        float* block = residual.data() + b * d.size * H;
        embed(by.embedding, &row.token, block, 1, 1);
        memcpy(block + H, by.masks, (d.size - 1) * H * sizeof(float));
    }
    const Plan plan{positions, slots, owner, reach, reach, nullptr, tables, M, 0, W, by.block_size};
    const int status =
        run_layers(plan, by.layers, by.num_layers, residual.data(), added.data(), 1, Taps{}, threads);
    rms_norm(added.data(), residual.data(), by.norm, hidden, M, H, by.context_kv->eps, threads);
    return status;
}

constexpr long LEVELS = BOTH_HALVES;  // positions of a block that the head computes at once

// Returns 0; 1: out of memory; 2: a row names a slot outside the cache.
int draft_blocks(const BlockDrafter& by, Drafting& d, int threads) {
    const block_tree::Forest& forest = d.forest;
    const long H = by.head.inputs;
    std::vector<float> hidden(d.batch * d.size * H), rows;
    int status = write_from_ring(by, d, threads);
    if (!status) status = run_blocks(by, d, hidden.data(), threads);
    std::vector<block_tree::Tree> trees(d.batch);
    std::vector<long> growing;
    for (long b = 0; b < d.batch; b++) {
        trees[b].anchor = d.rows[b].token, trees[b].least = d.least[b];
        growing.push_back(b);
    }
    d.looked_at = 0;
    for (long level = 0; level < d.depth && !growing.empty() && !status;) {
        const long levels = std::min(d.depth - level, LEVELS), count = (long)growing.size();
        rows.clear();
        for (const long b : growing) {
            const float* first = hidden.data() + (b * d.size + by.first_row + level) * H;
            rows.insert(rows.end(), first, first + levels * H);
        }
        float* logits = d.logits + d.looked_at * forest.vocab;
        status = multiply(rows.data(), by.head, logits, count * levels, threads);
        std::vector<block_tree::Position> positions(count * levels);
        parallel(count * levels, threads, [&](long at, int) { find(forest, logits + at * forest.vocab, positions[at]); });
        parallel(count, threads, [&](long at, int) {
            block_tree::Tree& tree = trees[growing[at]];
            for (long i = 0; i < levels && !tree.frontier.empty(); i++) grow(forest, positions[at * levels + i], tree);
        });
        d.looked_at += count * levels, level += levels;
        growing.erase(std::remove_if(growing.begin(), growing.end(), [&](long b) { return trees[b].frontier.empty(); }),
                      growing.end());
    }
    for (long b = 0; b < d.batch && !status; b++) write(forest, b, trees[b]);
    return status;
}

}  // namespace
