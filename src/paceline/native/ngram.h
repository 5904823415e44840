// Prompt lookup for many texts in one call, as defined by `paceline.drafters.lookup.ngram`: the most recent occurrence of the
// longest n-gram that ends the text.
//
// For each n a hash table with open addressing: a slot holds the position of an n-gram's latest continuation, and the n-gram
// is read from the text before it. So the tables hold no keys and are exact. All memory is the caller's.

#pragma once

#include <cstdint>

namespace ngram {

constexpr int64_t MATCH_LIMIT = 16;  // longer matches count as this long

struct Text {
    int32_t* tokens;
    int32_t* tables;              // (most - least + 1, slots), -1 where empty
    int64_t slots;                // a power of two, twice the tokens there is room for
    int64_t least, most;          // n
    int64_t length;               // tokens indexed
    int64_t match, start;         // the last lookup: tokens shared (0: nothing found), and position of the continuation
};

static inline uint64_t mixed(uint64_t hash, int32_t token) {
    return (hash ^ (uint32_t)token) * 0x9E3779B97F4A7C15ull;
}

// The slot of the n tokens before `at`, or the empty one where they belong.
static inline int32_t* slot_of(const Text& text, int64_t n, int64_t at, uint64_t hash) {
    int32_t* table = text.tables + (n - text.least) * text.slots;
    const int32_t* said = text.tokens + at;
    for (uint64_t slot = hash ^ hash >> 32;; slot++) {
        int32_t* held = table + (slot & (text.slots - 1));
        if (*held < 0) return held;
        const int32_t* seen = text.tokens + *held;
        int64_t same = 1;
        while (same <= n && seen[-same] == said[-same]) same++;
        if (same > n) return held;
    }
}

// Tokens behind the text: each continues the n-grams that end before it.
template <typename Token>
static void extend(Text& text, const Token* tokens, int64_t count) {
    for (int64_t i = 0; i < count && 2 * text.length < text.slots; i++) {
        int64_t at = text.length++;
        text.tokens[at] = (int32_t)tokens[i];
        uint64_t hash = 0;
        for (int64_t n = 1; n <= text.most && n <= at; n++) {
            hash = mixed(hash, text.tokens[at - n]);
            if (n >= text.least) *slot_of(text, n, at, hash) = (int32_t)at;
        }
    }
}

static void find(Text& text) {
    int64_t end = text.length, start = -1;
    uint64_t hash = 0;
    for (int64_t n = 1; n <= text.most && n < end; n++) {
        hash = mixed(hash, text.tokens[end - n]);
        if (n < text.least) continue;
        int32_t seen = *slot_of(text, n, end, hash);
        if (seen < 0) break;  // then no longer n-gram was seen either
        start = seen;
    }
    text.match = 0;
    text.start = start;
    if (start < 0) return;
    int64_t most = start < MATCH_LIMIT ? start : MATCH_LIMIT;
    while (text.match < most && text.tokens[start - 1 - text.match] == text.tokens[end - 1 - text.match]) text.match++;
}

// The continuation; past the end of the text the draft continues from itself, so a repetition goes on.
static int64_t draft(const Text& text, int64_t budget, int64_t* tokens) {
    if (!text.match) return 0;
    for (int64_t i = 0; i < budget; i++) {
        int64_t at = text.start + i;
        tokens[i] = at < text.length ? text.tokens[at] : tokens[at - text.length];
    }
    return budget;
}

}  // namespace ngram
