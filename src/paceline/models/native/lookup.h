// What lookup drafters ask of all rows of a step at once: take in what is new and find, then draft.
//
// What is asked comes as one array, so that it is made in few operations. Drafts are `counts` of nodes and behind them
// (rows, width) tokens, parents and depths, as `paceline.draft.Draft` wants them, packed to the width that was needed. That is
// returned; or, where every row is a chain of all the width, -1 - that.

#pragma once

#include "ngram.h"
#include "suffix.h"

namespace lookup {

struct Ngrams {
    using Text = ngram::Text;

    // Takes tokens in and returns the evidence that is found behind them.
    int64_t find(Text& text, const int64_t* tokens, int64_t count) const {
        ngram::extend(text, tokens, count);
        ngram::find(text);
        return text.match;
    }

    // Writes a tree of at most `budget` nodes from what was found and returns its size.
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

// `asked`: the rows' texts, where the new tokens of each end, and the tokens. The evidence found takes the place of the ends.
template <typename Method>
inline void find_all(const Method& method, int64_t* asked, long rows) {
    int64_t *ends = asked + rows, *tokens = ends + rows;
    for (long row = 0, first = 0, end; row < rows; row++, first = end) {
        end = ends[row];
        ends[row] = method.find(text_at<Method>(asked[row]), tokens + first, end - first);
    }
}

// Rows of `counts` numbers, `width` apart, come to lie `packed` apart.
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
