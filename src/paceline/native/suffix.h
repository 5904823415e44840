// The suffix index, the places found in it and the trees grown from them. `paceline.drafters.lookup.index` and `.tree` define
// and document all three; the order of operations is equal to theirs, so all numbers have equal bits.
//
// All memory is the caller's.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace suffix {

constexpr int DEPTH = 24, NUM_LEVELS = 3, LEVELS[NUM_LEVELS] = {5, 2, 1}, LIMIT = 6;
constexpr int COPY = 1;  // the level of two tokens
constexpr int32_t END = -1, NO_TOKEN = -2;
constexpr uint64_t PRIME = 1858537381, BASE = (1ull << 32) % PRIME;
constexpr int NUM_TEXTS = 3;  // a row's own, the past answers of its domain, the corpus
constexpr int MOST_PLACES = NUM_TEXTS * (NUM_LEVELS - 1) * LIMIT + 2;  // two levels of each text, and a deviating copy
static_assert(MOST_PLACES <= 64, "sets of places are bits of a word");

struct Weights {  // the constants of tree.py
    double hit_rate[DEPTH + 1], threshold, store_weight, substituted, inserted, level_steps[4];
};

struct Index {
    int32_t *text, *heads[NUM_LEVELS], *links[NUM_LEVELS];
    int64_t rows, end;
};

struct Place {
    int64_t match, text, start;  // tokens shared; 0: the own text, 1: past answers, 2: corpus; position of the token that followed
    double votes;
};

struct Row {
    Index *own, *past;  // null: there was no memory for one; no answer of the row's domain is known
    int64_t tail_size;
    int32_t tail[DEPTH + 2];  // the last tokens, newest first, then NO_TOKEN
    int64_t count;            // number of places
    Place places[MOST_PLACES];
};

// -- the index

static inline uint64_t hashed(uint64_t hash, int32_t token) { return (hash * BASE + (uint32_t)token) % PRIME; }

template <typename Token>
static void extend(Index& index, const Token* tokens, int64_t count) {
    int64_t rows = index.rows, mask = rows - 1;
    for (int64_t i = 0; i < count; i++) {
        int64_t end = index.end++, slot = end & mask;
        uint64_t hash = 0;
        for (int n = 1, level = NUM_LEVELS - 1; level >= 0; n++) {
            hash = hashed(hash, index.text[(end - n) & mask]);
            if (n < LEVELS[level]) continue;
            int32_t& head = index.heads[level][hash & mask];
            index.links[level][slot] = head;
            head = (int32_t)end;
            level--;
        }
        index.text[slot] = (int32_t)tokens[i];
        if (slot < DEPTH) index.text[slot + rows] = (int32_t)tokens[i];
    }
}

struct Occurrence {
    int64_t position, match;
};

// Finds where the last LEVELS[level] tokens of a context occurred, newest first.
static int occurrences(const Index& index, int level, const int32_t* tail, int64_t tail_size, Occurrence* out) {
    int n = LEVELS[level], count = 0;
    if (tail_size < n) return 0;
    int64_t rows = index.rows, mask = rows - 1, oldest = (index.end > rows ? index.end - rows : 0) + DEPTH;
    uint64_t hash = 0;
    for (int i = 0; i < n; i++) hash = hashed(hash, tail[i]);
    int64_t position = index.heads[level][hash & mask];
    for (int tries = 0; tries < 2 * LIMIT && position >= oldest && count < LIMIT; tries++) {
        int64_t slot = position & mask;
        if (slot <= DEPTH) slot += rows;  // the token before the longest match is read too
        int64_t match = 0;
        while (index.text[slot - 1 - match] == tail[match]) match++;
        if (match >= n) out[count++] = {position, match};
        position = index.links[level][position & mask];
    }
    return count;
}

// -- places that vote for the next token

static void append(Row& row, const int64_t* tokens, int64_t count) {
    if (row.own) extend(*row.own, tokens, count);
    int added = (int)std::min(count, (int64_t)DEPTH), older = std::min((int)row.tail_size, DEPTH - added);
    memmove(row.tail + added, row.tail, older * sizeof(int32_t));
    for (int i = 0; i < added; i++) row.tail[i] = (int32_t)tokens[count - 1 - i];
    row.tail_size = added + older;
    row.tail[row.tail_size] = NO_TOKEN;
}

// Adds the places of a text that levels `first` to `last` find, the newest first.
static void collect(Row& row, const Index* index, int64_t text, int first, int last, double votes) {
    if (!index) return;
    Occurrence all[NUM_LEVELS * LIMIT];
    int total = 0;
    for (int level = first; level <= last; level++) {
        Occurrence merged[NUM_LEVELS * LIMIT];
        int count = occurrences(*index, level, row.tail, row.tail_size, merged);
        if (!count) continue;
        int64_t oldest = merged[count - 1].position;
        for (int i = 0; i < total; i++)
            if (all[i].position < oldest) merged[count++] = all[i];
        memcpy(all, merged, count * sizeof(Occurrence));
        total = count;
    }
    for (int i = 0; i < total; i++)
        row.places[row.count++] = {all[i].match, text, all[i].position, votes * (double)(1ll << all[i].match)};
}

// Adds the positions where a copy that deviated at the last token may continue; `share` of the probability is theirs.
static void add_after_deviation(Row& row, const Weights& weights, double share) {
    const Index& index = *row.own;
    Occurrence copies[LIMIT];
    int count = row.tail_size > 2 ? occurrences(index, COPY, row.tail + 1, row.tail_size - 1, copies) : 0;
    const Occurrence* longest = nullptr;  // the newest of equals
    for (int i = 0; i < count; i++)
        if (copies[i].position < index.end - 1 && (!longest || copies[i].match > longest->match)) longest = &copies[i];
    if (!longest) return;
    int64_t start = longest->position;
    if (start + 1 < index.end - 1) row.places[row.count++] = {1, 0, start + 1, weights.substituted * share};
    row.places[row.count++] = {1, 0, start, weights.inserted * share};
}

// The rule of `ngram`: the newest place with the longest match, of `shortest` to `longest` tokens. Returns the tokens shared.
static int64_t find_longest(Row& row, int64_t shortest, int64_t longest) {
    row.count = 0;
    if (!row.own) return 0;
    Place& best = row.places[0];
    int64_t length = 0;  // length of the match, up to `longest`
    for (int level = 0; level < NUM_LEVELS; level++) {
        Occurrence all[LIMIT];
        int count = occurrences(*row.own, level, row.tail, row.tail_size, all);
        for (int i = 0; i < count; i++) {
            int64_t match = std::min(all[i].match, longest);
            if (match < shortest || match < length || (match == length && all[i].position < best.start)) continue;
            length = match, best = {all[i].match, 0, all[i].position, 1.0}, row.count = 1;
        }
        if (length >= LEVELS[level] || LEVELS[level] <= shortest) break;
    }
    return row.count ? best.match : 0;
}

static void find(Row& row, const Index* corpus, const Weights& weights) {
    row.count = 0;
    for (int first = 0; first < 2 && !row.count; first++) {  // places of a long context; if there are none, all
        int last = first ? NUM_LEVELS - 1 : 0;
        collect(row, row.own, 0, first, last, 1.0);
        collect(row, row.past, 1, first, last, weights.store_weight);
        collect(row, corpus, 2, first, last, weights.store_weight);
    }
    for (int i = 1; i < row.count; i++) {  // a stable sort by context
        Place place = row.places[i];
        int at = i;
        for (; at > 0 && row.places[at - 1].match < place.match; at--) row.places[at] = row.places[at - 1];
        row.places[at] = place;
    }
    int64_t longest = row.count ? row.places[0].match : 0;
    double total = 0.0;
    for (int i = 0; i < row.count; i++) total += row.places[i].votes;
    double share = row.count ? weights.hit_rate[longest] / total : 0.0;
    for (int i = 0; i < row.count; i++) row.places[i].votes *= share;
    if (longest <= 1 && row.own) add_after_deviation(row, weights, 1 - weights.hit_rate[longest]);
}

static const Index& text_of(const Row& row, const Place& place, const Index* corpus) {
    return place.text == 2 ? *corpus : place.text ? *row.past : *row.own;
}

static int64_t level_of(const Row& row, const Index* corpus, const Weights& weights) {
    if (!row.count || row.places[0].match >= LEVELS[0]) return row.count ? row.places[0].match : 0;
    int32_t tokens[MOST_PLACES];
    double votes[MOST_PLACES], sure = 0.0;
    int num_tokens = 0;
    for (int i = 0; i < row.count; i++) {
        const Index& index = text_of(row, row.places[i], corpus);
        int32_t token = index.text[row.places[i].start & (index.rows - 1)];
        int at = 0;
        while (at < num_tokens && tokens[at] != token) at++;
        if (at == num_tokens) tokens[at] = token, votes[num_tokens++] = 0.0;
        votes[at] += row.places[i].votes;
    }
    for (int i = 0; i < num_tokens; i++)
        if (votes[i] >= weights.threshold && tokens[i] >= 0) sure += votes[i];
    int64_t level = 0;
    for (double step : weights.level_steps) level += sure >= step;
    return level;
}

// -- the tree

struct Tree {
    int64_t *tokens, *parents, *depths;
    int64_t size;

    int64_t add(int64_t token, int64_t parent, int64_t depth) {
        tokens[size] = token, parents[size] = parent, depths[size] = depth;
        return size++;
    }

    // Returns the token at `depth` on the path to a node.
    int64_t token_above(int64_t node, int64_t depth) const {
        while (depths[node] > depth) node = parents[node];
        return tokens[node];
    }
};

struct Candidate {  // a node that may be added next
    double probability;
    int64_t parent, depth, token;
    uint64_t places;
};

static double votes_of(const Row& row, uint64_t places) {
    double total = 0.0;
    for (; places; places &= places - 1) total += row.places[__builtin_ctzll(places)].votes;
    return total;
}

// Returns the number of likely tokens, from `depth` on, that follow every place; 0 if the places lie in two texts.
static int64_t common_run(const Row& row, uint64_t places, int64_t depth, double probability, int64_t most,
                          const Index* corpus, const Weights& weights, const int32_t** tokens) {
    const Place& first = row.places[__builtin_ctzll(places)];
    const Index& index = text_of(row, first, corpus);
    int64_t count = 0, latest = first.start, last_slot = 0, mask = index.rows - 1;
    while (count < most && probability >= weights.threshold) {
        count++;
        probability *= weights.hit_rate[std::min(first.match + depth + count, (int64_t)DEPTH)];
    }
    for (uint64_t rest = places; rest; rest &= rest - 1) {
        const Place& place = row.places[__builtin_ctzll(rest)];
        if (place.text != first.text) return 0;
        int64_t slot = (place.start + depth) & mask;
        if (place.start > latest) latest = place.start;
        if (slot > last_slot) last_slot = slot;
    }
    if (count > index.end - latest - depth) count = index.end - latest - depth;
    if (count < 1 || last_slot + count > index.rows + DEPTH) return 0;
    *tokens = index.text + ((first.start + depth) & mask);
    for (uint64_t rest = places & (places - 1); rest; rest &= rest - 1) {
        int64_t slot = (row.places[__builtin_ctzll(rest)].start + depth) & mask;
        if (memcmp(index.text + slot, *tokens, count * sizeof(int32_t))) return 0;
    }
    int64_t until = 0;
    while (until < count && (*tokens)[until] != END) until++;
    return until;
}

// Adds the most probable nodes, best first.
static void grow(const Row& row, int64_t max_nodes, const Index* corpus, const Weights& weights, Tree& tree) {
    Candidate waiting[2 * MOST_PLACES];  // disjoint, and each at least as likely as the threshold: never more than ten
    int count = 0;
    uint64_t places = row.count ? ~0ull >> (64 - row.count) : 0;
    int64_t parent = -1, depth = 0;
    double per_vote = 1.0;  // probability that a vote of the places adds to a child
    while (places && tree.size < max_nodes) {
        const Place& best = row.places[__builtin_ctzll(places)];
        if (!count && (!(places & (places - 1)) || best.match + depth >= LEVELS[0])) {
            double votes = votes_of(row, places), probability = per_vote * votes;
            const int32_t* tokens = nullptr;
            int64_t run = common_run(row, places, depth, probability, max_nodes - tree.size, corpus, weights, &tokens);
            for (int64_t i = 0; i < run; i++) {
                parent = tree.add(tokens[i], parent, ++depth);
                probability *= weights.hit_rate[std::min(best.match + depth, (int64_t)DEPTH)];
            }
            if (run) {
                per_vote = probability / votes;
                continue;
            }
        }
        Candidate children[MOST_PLACES];
        int num_children = 0;
        for (uint64_t rest = places; rest; rest &= rest - 1) {
            int place = __builtin_ctzll(rest);
            const Index& index = text_of(row, row.places[place], corpus);
            int64_t at = row.places[place].start + depth;
            int64_t token = at < index.end ? index.text[at & (index.rows - 1)] : tree.token_above(parent, at - index.end + 1);
            int child = 0;
            while (child < num_children && children[child].token != token) child++;
            if (child == num_children) children[num_children++] = {0.0, parent, depth + 1, token, 0};
            children[child].places |= 1ull << place;
        }
        for (int i = 0; i < num_children; i++) {
            Candidate& child = children[i];
            child.probability = per_vote * votes_of(row, child.places);
            if (child.token >= 0 && child.probability >= weights.threshold && count < 2 * MOST_PLACES) waiting[count++] = child;
        }
        if (!count) break;
        int likeliest = 0;  // the first of equals
        for (int i = 1; i < count; i++)
            if (waiting[i].probability > waiting[likeliest].probability) likeliest = i;
        Candidate next = waiting[likeliest];
        memmove(waiting + likeliest, waiting + likeliest + 1, (--count - likeliest) * sizeof(Candidate));
        depth = next.depth;
        parent = tree.add(next.token, next.parent, depth);
        places = next.places;
        int64_t match = row.places[__builtin_ctzll(places)].match;
        double hit_rate = weights.hit_rate[std::min(match + depth, (int64_t)DEPTH)];
        per_vote = next.probability * hit_rate / votes_of(row, places);
    }
}

// Adds the tokens that followed the one place; past the end of the text the chain continues from itself.
static void continue_place(const Row& row, int64_t max_nodes, Tree& tree) {
    if (!row.count) return;
    const Index& index = *row.own;
    for (int64_t at = row.places[0].start; tree.size < max_nodes; at++) {
        int64_t token = at < index.end ? index.text[at & (index.rows - 1)] : tree.tokens[at - index.end];
        tree.add(token, tree.size - 1, tree.size + 1);
    }
}

}  // namespace suffix
