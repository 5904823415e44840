// From a verdict to the next pass in native code, where drafts are looked up: what was said is taken in, the drafts that
// follow are made, and the pass over them is written where a device reads it, as `paceline.engine.layout` and
// `paceline.models.graphs` would. A device waits for nothing else meanwhile.
//
// All memory is the caller's.

#pragma once

#include <cstdint>
#include <cstring>

#include "lookup.h"

namespace relay {

constexpr int HEADER = 4;

struct Step {
    const int64_t *said, *accepted;             // the verdict: (rows, width) tokens, how many of them were drafted
    int64_t width, rows;
    const int64_t *texts;                       // addresses of what the lookups know of each sequence
    const int64_t *lengths, *limits, *budgets;  // tokens before the verdict, tokens it may have, nodes it may have
    const int64_t *ends;                        // tokens that may end a sequence
    int64_t num_ends;
    const int32_t *tables;                      // (rows, table_width) blocks
    int64_t table_width, block_size;
    int64_t most, vocab;                        // the largest budget; tokens there are
    int64_t found;                              // already: who has evidence drafts, for others nodes are left as they are
    int64_t *evidence;                          // (2, rows) what was found, and how long the texts are then
    int64_t *nodes;                             // (rows) of each draft, and (rows, most) tokens, parents and depths
    // Of the pass: rows, the most of them of one sequence, columns of paths, and the longest context.
    int64_t pass_rows, longest, path, max_len;
};

// Where a pass is written: ints from the start of the buffer. As `Placed` in `paceline.models.graphs`.
struct Place {
    int64_t tiles, num_tiles;      // one for each sequence, which all its rows must fit into
    int64_t fields, stride, rows;  // positions, prefix, slots, sequence, reach, tokens: `stride` apart
    int64_t path, path_stride;
    int64_t tables;
    int32_t header[HEADER];
};

static inline int64_t length_of(const Step& step, int64_t row) { return step.lengths[row] + step.accepted[row] + 1; }

// Nobody ends with what was said.
static bool all_go_on(const Step& step) {
    for (int64_t row = 0; row < step.rows; row++) {
        if (length_of(step, row) >= step.limits[row]) return false;
        const int64_t* said = step.said + row * step.width;
        for (int64_t at = 0; at <= step.accepted[row]; at++)
            for (int64_t end = 0; end < step.num_ends; end++)
                if (said[at] == step.ends[end]) return false;
    }
    return true;
}

struct Tree {
    const int64_t *tokens, *parents, *depths;
    int64_t size;
};

static inline Tree tree_of(const Step& step, int64_t row) {
    int64_t plane = step.rows * step.most, *tokens = step.nodes + step.rows + row * step.most;
    return {tokens, tokens + plane, tokens + 2 * plane, step.nodes[row]};
}

static inline bool branches(const Tree& tree) { return tree.size && tree.depths[tree.size - 1] != tree.size; }

// Returns 0 where somebody ends, and then nothing was done; -1 where a draft is not to be passed on.
template <typename Method>
static long draft(const Method& method, Step& step) {
    if (!step.found && !all_go_on(step)) return 0;
    step.pass_rows = step.longest = step.path = step.max_len = 0;
    int64_t plane = step.rows * step.most, *trees = step.nodes + step.rows;
    bool sound = true;
    for (int64_t row = 0; row < step.rows; row++) {
        int64_t length = length_of(step, row), room = step.limits[row] - length - 1, budget = step.budgets[row];
        if (!step.found) {
            auto& text = lookup::text_at<Method>(step.texts[row]);
            step.evidence[row] = method.find(text, step.said + row * step.width, step.accepted[row] + 1);
            step.evidence[step.rows + row] = length;
        }
        if (budget > room) budget = room;
        if (budget > 0 && step.evidence[row] > 0) {
            int64_t* tokens = trees + row * step.most;
            auto& text = lookup::text_at<Method>(step.texts[row]);
            step.nodes[row] = method.draft(text, budget, tokens, tokens + plane, tokens + 2 * plane);
        } else if (!step.found) {
            step.nodes[row] = 0;
        }
        Tree tree = tree_of(step, row);
        int64_t deepest = 0;
        for (int64_t node = 0; node < tree.size; node++) {
            sound = sound && 0 <= tree.tokens[node] && tree.tokens[node] < step.vocab;
            if (tree.depths[node] > deepest) deepest = tree.depths[node];
        }
        if (branches(tree) && deepest > step.path) step.path = deepest;
        if (length + deepest > step.max_len) step.max_len = length + deepest;
        if (tree.size + 1 > step.longest) step.longest = tree.size + 1;
        step.pass_rows += tree.size + 1;
    }
    return sound ? 1 : -1;
}

static void write(const Step& step, const Place& place, int32_t* out) {
    memset(out, 0, place.tables * sizeof(int32_t));
    memcpy(out, place.header, sizeof(place.header));
    int32_t* field[6];  // positions, prefix, slots, sequence, reach, tokens
    for (int i = 0; i < 6; i++) field[i] = out + place.fields + i * place.stride;
    for (int64_t row = 0; row < place.rows; row++) field[2][row] = -1, field[4][row] = 1;
    int64_t at = 0;
    for (int64_t row = 0; row < step.rows; row++) {
        Tree tree = tree_of(step, row);
        bool bushy = branches(tree);
        int64_t first = length_of(step, row) - 1, begin = at;
        const int32_t* table = step.tables + row * step.table_width;
        for (int64_t node = -1; node < tree.size; node++, at++) {
            int64_t stored = first + 1 + node, depth = bushy && node >= 0 ? tree.depths[node] : 0;
            int64_t position = depth ? first + depth : stored;
            field[0][at] = (int32_t)position;
            field[1][at] = (int32_t)(depth ? first + 1 : position + 1);
            field[2][at] = (int32_t)(table[stored / step.block_size] * step.block_size + stored % step.block_size);
            field[3][at] = (int32_t)row;
            field[4][at] = (int32_t)(position + 1);
            field[5][at] = (int32_t)(node < 0 ? step.said[row * step.width + step.accepted[row]] : tree.tokens[node]);
            int32_t* path = out + place.path + at * place.path_stride;
            for (int64_t i = depth; i < step.path; i++) path[i] = -1;
            for (int64_t above = node, i = depth - 1; i >= 0; above = tree.parents[above], i--)
                path[i] = field[2][begin + 1 + above];
        }
        out[place.tiles + row] = (int32_t)begin;
        out[place.tiles + place.num_tiles + row] = (int32_t)(at - begin);
    }
    memcpy(out + place.tables, step.tables, step.rows * step.table_width * sizeof(int32_t));
}

}  // namespace relay
