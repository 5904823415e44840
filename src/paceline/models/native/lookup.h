// What lookup drafters ask of all rows of a step at once: take in what is new and find, then draft.
//
// What is asked comes as one array, so that it is made in few operations. Drafts are `counts` of nodes and behind them
// (rows, width) tokens, parents and depths, as `paceline.draft.Draft` wants them, packed to the width that was needed. That is
// returned; or, where every row is a chain of all the width, -1 - that.

#pragma once

#include "ngram.h"
#include "suffix.h"

namespace lookup {

template <typename Text>
inline Text& text_at(int64_t address) {
    return *reinterpret_cast<Text*>(address);
}

// `asked`: the rows' texts, where the new tokens of each end, and the tokens. The evidence found takes the place of the ends.
template <typename Text, typename Find>
inline void find_all(int64_t* asked, long rows, Find find) {
    int64_t *ends = asked + rows, *tokens = ends + rows;
    for (long row = 0, first = 0, end; row < rows; row++, first = end) {
        end = ends[row];
        ends[row] = find(text_at<Text>(asked[row]), tokens + first, end - first);
    }
}

inline void find_ngrams(int64_t* asked, long rows) {
    find_all<ngram::Text>(asked, rows, [](ngram::Text& text, const int64_t* tokens, int64_t count) {
        ngram::extend(text, tokens, count);
        ngram::find(text);
        return text.match;
    });
}

inline void find_suffixes(int64_t* asked, long rows, const suffix::Index* store, const suffix::Weights& weights) {
    find_all<suffix::Row>(asked, rows, [&](suffix::Row& row, const int64_t* tokens, int64_t count) {
        suffix::append(row, tokens, count);
        suffix::find(row, store, weights);
        return suffix::evidence(row, store, weights);
    });
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

// `asked`: the rows' texts, and their budgets. `draft` writes one row's tree and returns its size.
template <typename Text, typename Draft>
inline long draft_all(const int64_t* asked, long rows, long width, int64_t* counts, Draft draft) {
    int64_t *tokens = counts + rows, *parents = tokens + rows * width, *depths = parents + rows * width;
    bool even = true;
    for (long row = 0, at = 0; row < rows; row++, at += width) {
        int64_t size = draft(text_at<Text>(asked[row]), asked[rows + row], tokens + at, parents + at, depths + at);
        counts[row] = size;
        even = even && size == counts[0] && (!size || depths[at + size - 1] == size);
    }
    long packed = widest(counts, rows);
    pack(tokens, tokens, counts, rows, width, packed, 0);
    pack(parents, tokens + rows * packed, counts, rows, width, packed, -1);
    pack(depths, tokens + 2 * rows * packed, counts, rows, width, packed, 0);
    return even ? -1 - packed : packed;
}

inline long draft_ngrams(const int64_t* asked, long rows, long width, int64_t* counts) {
    auto draft = [](const ngram::Text& text, int64_t budget, int64_t* tokens, int64_t* parents, int64_t* depths) {
        int64_t size = ngram::draft(text, budget, tokens);
        for (int64_t node = 0; node < size; node++) parents[node] = node - 1, depths[node] = node + 1;
        return size;
    };
    return draft_all<ngram::Text>(asked, rows, width, counts, draft);
}

inline long draft_suffixes(const int64_t* asked, long rows, long width, int64_t* counts, const suffix::Index* store,
                           const suffix::Weights& weights) {
    auto draft = [&](const suffix::Row& row, int64_t budget, int64_t* tokens, int64_t* parents, int64_t* depths) {
        suffix::Tree tree = {tokens, parents, depths, 0};
        suffix::grow(row, budget, store, weights, tree);
        return tree.size;
    };
    return draft_all<suffix::Row>(asked, rows, width, counts, draft);
}

}  // namespace lookup
