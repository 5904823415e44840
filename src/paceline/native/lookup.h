// The two calls of lookup drafters for all rows of a step: index new tokens and find, then draft.
//
// A call's input is one array, so that Python builds it in few operations. Drafts are `counts` of nodes and behind them
// (rows, width) tokens, parents and depths, as in `paceline.core.draft.Draft`, packed to the width used. The return value is that
// width; or, where every row is a chain of the full width, -1 - width.

#pragma once

#include "ngram.h"
#include "suffix.h"

namespace lookup {

struct Ngrams {
    using Text = ngram::Text;

    // Indexes the tokens, looks up the end of the text and returns the evidence found.
    int64_t find(Text& text, const int64_t* tokens, int64_t count) const {
        ngram::extend(text, tokens, count);
        ngram::find(text);
        return text.match;
    }

    // Writes a tree of at most `budget` nodes from the last lookup and returns its size.
    int64_t draft(const Text& text, int64_t budget, int64_t* tokens, int64_t* parents, int64_t* depths) const {
        int64_t size = ngram::draft(text, budget, tokens);
        for (int64_t node = 0; node < size; node++) parents[node] = node - 1, depths[node] = node + 1;
        return size;
    }
};

struct Suffixes {
    using Text = suffix::Row;
    const suffix::Index* store;
    const suffix::Weights& weights;

    int64_t find(Text& row, const int64_t* tokens, int64_t count) const {
        suffix::append(row, tokens, count);
        suffix::find(row, store, weights);
        return suffix::evidence(row, store, weights);
    }

    int64_t draft(const Text& row, int64_t budget, int64_t* tokens, int64_t* parents, int64_t* depths) const {
        suffix::Tree tree = {tokens, parents, depths, 0};
        suffix::grow(row, budget, store, weights, tree);
        return tree.size;
    }
};

template <typename Method>
inline typename Method::Text& text_at(int64_t address) {
    return *reinterpret_cast<typename Method::Text*>(address);
}

// `asked`: the rows' texts, the end of each row's new tokens, and the tokens. The evidence found overwrites the ends.
template <typename Method>
inline void find_all(const Method& method, int64_t* asked, long rows) {
    int64_t *ends = asked + rows, *tokens = ends + rows;
    for (long row = 0, first = 0, end; row < rows; row++, first = end) {
        end = ends[row];
        ends[row] = method.find(text_at<Method>(asked[row]), tokens + first, end - first);
    }
}

// Moves rows of `counts` numbers from a stride of `width` to a stride of `packed`.
inline void pack(const int64_t* from, int64_t* to, const int64_t* counts, long rows, long width, long packed, int64_t filler) {
    for (long row = 0; row < rows; row++, from += width, to += packed) {
        memmove(to, from, counts[row] * sizeof(int64_t));
        for (long at = counts[row]; at < packed; at++) to[at] = filler;
    }
}

inline long widest(const int64_t* counts, long rows) {
    long most = 0;
    for (long row = 0; row < rows; row++) most = counts[row] > most ? counts[row] : most;
    return most;
}

// `asked`: the rows' texts, and their budgets.
template <typename Method>
inline long draft_all(const Method& method, const int64_t* asked, long rows, long width, int64_t* counts) {
    int64_t *tokens = counts + rows, *parents = tokens + rows * width, *depths = parents + rows * width;
    bool even = true;
    for (long row = 0, at = 0; row < rows; row++, at += width) {
        int64_t budget = asked[rows + row];
        int64_t size = method.draft(text_at<Method>(asked[row]), budget, tokens + at, parents + at, depths + at);
        counts[row] = size;
        even = even && size == counts[0] && (!size || depths[at + size - 1] == size);
    }
    long packed = widest(counts, rows);
    pack(tokens, tokens, counts, rows, width, packed, 0);
    pack(parents, tokens + rows * packed, counts, rows, width, packed, -1);
    pack(depths, tokens + 2 * rows * packed, counts, rows, width, packed, 0);
    return even ? -1 - packed : packed;
}

}  // namespace lookup
