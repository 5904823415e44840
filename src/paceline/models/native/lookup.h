// What lookup drafters ask of all rows of a step at once: take in what is new and find, then draft.
//
// Drafts lie side by side as `paceline.draft.Draft` wants them: planes of (rows, width) numbers, packed to the width that was
// needed. That is returned; or, where every row is a chain of all the width, -1 - that.

#pragma once

#include "ngram.h"
#include "suffix.h"

namespace lookup {

inline long widest(const int64_t* counts, long rows) {
    long most = 0;
    for (long row = 0; row < rows; row++) most = counts[row] > most ? counts[row] : most;
    return most;
}

inline void pack_rows(int64_t* plane, const int64_t* counts, long rows, long width, long packed, int64_t filler) {
    for (long row = 0; row < rows; row++) {
        int64_t* to = plane + row * packed;
        memmove(to, plane + row * width, counts[row] * sizeof(int64_t));
        for (long at = counts[row]; at < packed; at++) to[at] = filler;
    }
}

// `ends`: where the new tokens of each row end.
inline void find_ngrams(ngram::Text* const* texts, const int32_t* tokens, const int64_t* ends, long rows, int64_t* evidence) {
    for (long row = 0, first = 0; row < rows; first = ends[row++]) {
        ngram::Text& text = *texts[row];
        ngram::extend(text, tokens + first, ends[row] - first);
        ngram::find(text);
        evidence[row] = text.match;
    }
}

inline long draft_ngrams(ngram::Text* const* texts, const int64_t* budgets, long rows, long width, int64_t* tokens,
                         int64_t* counts) {
    bool even = true;
    for (long row = 0; row < rows; row++) {
        counts[row] = ngram::draft(*texts[row], budgets[row], tokens + row * width);
        even = even && counts[row] == counts[0];
    }
    long packed = widest(counts, rows);
    pack_rows(tokens, counts, rows, width, packed, 0);
    return even ? -1 - packed : packed;
}

inline void find_suffixes(suffix::Row* const* texts, const int32_t* tokens, const int64_t* ends, long rows, int64_t* evidence,
                          const suffix::Index* store, const suffix::Weights& weights) {
    for (long row = 0, first = 0; row < rows; first = ends[row++]) {
        suffix::Row& text = *texts[row];
        suffix::append(text, tokens + first, ends[row] - first);
        suffix::find(text, store, weights);
        evidence[row] = suffix::evidence(text, store, weights);
    }
}

// `trees`: planes of tokens, parents and depths.
inline long draft_suffixes(suffix::Row* const* texts, const int64_t* budgets, long rows, long width, int64_t* trees,
                           int64_t* counts, const suffix::Index* store, const suffix::Weights& weights) {
    int64_t *parents = trees + rows * width, *depths = parents + rows * width;
    bool even = true;
    for (long row = 0; row < rows; row++) {
        long at = row * width;
        suffix::Tree tree = {trees + at, parents + at, depths + at, 0};
        suffix::grow(*texts[row], budgets[row], store, weights, tree);
        counts[row] = tree.size;
        even = even && tree.size == counts[0] && (!tree.size || tree.depths[tree.size - 1] == tree.size);
    }
    long packed = widest(counts, rows);
    pack_rows(trees, counts, rows, width, packed, 0);
    pack_rows(parents, counts, rows, width, packed, -1);
    pack_rows(depths, counts, rows, width, packed, 0);
    return even ? -1 - packed : packed;
}

}  // namespace lookup
