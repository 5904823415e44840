// Calls of the lookup drafters for all rows of a step: append new tokens and look up, then draft.
//
// The input of a call is one array, so that Python builds it in few operations. Drafts are `counts` of nodes and behind them
// (rows, width) tokens, parents and depths, as in `paceline.core.draft.Draft`, packed to the width used. The return value is
// that width, or -1 - width if every row is a chain of the full width.

#pragma once

#include "recycling.h"
#include "suffix.h"

namespace lookup {

using suffix::Row;

struct Rule {  // native.RuleView
    const suffix::Index* corpus;     // corpus of `suffix`; null: there is none
    const suffix::Weights* weights;  // weights of `suffix`; null: the rule is `ngram`
    int64_t ngram_min, ngram_max;    // tokens of a match by `ngram`
    recycling::Survival* survival;   // of `recycling`, whose rows are recycling::Row; null: the rule is another one
    double least;                    // probability of a node of `recycling` below which none is drafted
};

inline Row& row_at(int64_t address) { return *reinterpret_cast<Row*>(address); }

// Returns the level: how well a draft is supported; 0: it would be empty.
inline int64_t find(const Rule& rule, Row& row) {
    if (!rule.weights) return suffix::find_longest(row, rule.ngram_min, rule.ngram_max);
    suffix::find(row, rule.corpus, *rule.weights);
    if (rule.survival)
        return recycling::level_of(reinterpret_cast<recycling::Row&>(row), rule.corpus, *rule.weights, *rule.survival);
    return suffix::level_of(row, rule.corpus, *rule.weights);
}

// `rows`: addresses of the rows, the end of each row's new tokens, then the tokens. Levels overwrite the ends.
inline void find_all(const Rule& rule, int64_t* rows, long num_rows) {
    int64_t *ends = rows + num_rows, *tokens = ends + num_rows;
    for (long i = 0, first = 0, end; i < num_rows; i++, first = end) {
        Row& row = row_at(rows[i]);
        end = ends[i];
        if (rule.survival)
            recycling::score(reinterpret_cast<recycling::Row&>(row), *rule.survival, tokens + first, end - first);
        suffix::append(row, tokens + first, end - first);
        ends[i] = find(rule, row);
    }
}

// Moves rows of `counts` numbers from a stride of `width` to a stride of `packed`.
inline void pack(const int64_t* from, int64_t* to, const int64_t* counts, long rows, long width, long packed, int64_t filler) {
    for (long row = 0; row < rows; row++, from += width, to += packed) {
        memmove(to, from, counts[row] * sizeof(int64_t));
        for (long at = counts[row]; at < packed; at++) to[at] = filler;
    }
}

// `rows`: addresses of the rows, then the most nodes of each.
inline long draft_all(const Rule& rule, const int64_t* rows, long num_rows, long width, int64_t* counts) {
    int64_t *tokens = counts + num_rows, *parents = tokens + num_rows * width, *depths = parents + num_rows * width;
    bool chains = true;
    long packed = 0;
    for (long i = 0, at = 0; i < num_rows; i++, at += width) {
        Row& row = row_at(rows[i]);
        suffix::Tree tree = {tokens + at, parents + at, depths + at, 0};
        if (rule.survival)
            recycling::grow(reinterpret_cast<recycling::Row&>(row), rows[num_rows + i], rule.least, rule.corpus, *rule.weights,
                            *rule.survival, tree);
        else if (rule.weights)
            suffix::grow(row, rows[num_rows + i], rule.corpus, *rule.weights, tree);
        else
            suffix::continue_place(row, rows[num_rows + i], tree);
        counts[i] = tree.size;
        if (tree.size > packed) packed = tree.size;
        chains = chains && tree.size == counts[0] && (!tree.size || tree.depths[tree.size - 1] == tree.size);
    }
    pack(tokens, tokens, counts, num_rows, width, packed, 0);
    pack(parents, tokens + num_rows * packed, counts, num_rows, width, packed, -1);
    pack(depths, tokens + 2 * num_rows * packed, counts, num_rows, width, packed, 0);
    return chains ? -1 - packed : packed;
}

}  // namespace lookup
