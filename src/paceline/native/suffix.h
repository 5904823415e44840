// Suffix decoding for many texts in one call: the same index, places, evidence and trees as `paceline.drafters.lookup.index`
// and `suffix_tree`, which document them, in the same order of operations, so that all numbers have the same bits.
//
// All memory is the caller's.

#pragma once

#include <cstdint>
#include <cstring>

namespace suffix {

constexpr int DEPTH = 24, NUM_LEVELS = 3, LEVELS[NUM_LEVELS] = {5, 2, 1}, LIMIT = 6;
constexpr int COPY = 1;  // the level of two tokens
constexpr int32_t END = -1, STRANGER = -2;
constexpr uint64_t PRIME = 1858537381, BASE = (1ull << 32) % PRIME;
constexpr int MOST = 2 * (NUM_LEVELS - 1) * LIMIT + 2;  // places: two levels of two texts, and a deviating copy
static_assert(MOST <= 64, "sets of places are bits of a word");

struct Weights {  // as `suffix_tree` has them
    double foretold[DEPTH + 1], threshold, elsewhere, behind, with, sure[4];
};

struct Index {
    int32_t *text, *heads[NUM_LEVELS], *links[NUM_LEVELS];
    int64_t rows, end;
};

struct Place {
    int64_t match, elsewhere, start;  // tokens shared, whether in the store, position of the token that followed
    double votes;
};

struct Row {
    Index* own;  // null: there was no memory left for it
    int64_t known;
    int32_t tail[DEPTH + 2];  // the last tokens, newest first, then STRANGER
    int64_t count;
    Place places[MOST];
};

static inline int least(int a, int b) { return a < b ? a : b; }

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

struct Found {
    int64_t position, match;
};

// Where the last LEVELS[level] tokens of a context occurred, newest first.
static int occurrences(const Index& index, int level, const int32_t* tail, int64_t known, Found* found) {
    int n = LEVELS[level], count = 0;
    if (known < n) return 0;
    int64_t rows = index.rows, mask = rows - 1, oldest = (index.end > rows ? index.end - rows : 0) + DEPTH;
    uint64_t hash = 0;
    for (int i = 0; i < n; i++) hash = hashed(hash, tail[i]);
    int64_t position = index.heads[level][hash & mask];
    for (int tries = 0; tries < 2 * LIMIT && position >= oldest && count < LIMIT; tries++) {
        int64_t slot = position & mask;
        if (slot <= DEPTH) slot += rows;  // the token before the longest match is read too
        int64_t match = 0;
        while (index.text[slot - 1 - match] == tail[match]) match++;
        if (match >= n) found[count++] = {position, match};
        position = index.links[level][position & mask];
    }
    return count;
}

// -- places that vote for the next token

static void append(Row& row, const int64_t* tokens, int64_t count) {
    if (row.own) extend(*row.own, tokens, count);
    int fresh = count < DEPTH ? (int)count : DEPTH, kept = least((int)row.known, DEPTH - fresh);
    memmove(row.tail + fresh, row.tail, kept * sizeof(int32_t));
    for (int i = 0; i < fresh; i++) row.tail[i] = (int32_t)tokens[count - 1 - i];
    row.known = fresh + kept;
    row.tail[row.known] = STRANGER;
}

// The places of a text that levels `first` to `last` find, the newest first.
static void collect(Row& row, const Index* index, int64_t elsewhere, int first, int last, double votes) {
    if (!index) return;
    Found all[NUM_LEVELS * LIMIT];
    int total = 0;
    for (int level = first; level <= last; level++) {
        Found merged[NUM_LEVELS * LIMIT];
        int count = occurrences(*index, level, row.tail, row.known, merged);
        if (!count) continue;
        int64_t oldest = merged[count - 1].position;
        for (int i = 0; i < total; i++)
            if (all[i].position < oldest) merged[count++] = all[i];
        memcpy(all, merged, count * sizeof(Found));
        total = count;
    }
    for (int i = 0; i < total; i++)
        row.places[row.count++] = {all[i].match, elsewhere, all[i].position, votes * (double)(1ll << all[i].match)};
}

// Positions where a copy that deviated at the last token may continue.
static void add_strayed(Row& row, const Weights& weights, double left) {
    const Index& index = *row.own;
    Found found[LIMIT];
    int count = row.known > 2 ? occurrences(index, COPY, row.tail + 1, row.known - 1, found) : 0;
    const Found* copied = nullptr;  // the newest of equals
    for (int i = 0; i < count; i++)
        if (found[i].position < index.end - 1 && (!copied || found[i].match > copied->match)) copied = &found[i];
    if (!copied) return;
    int64_t left_out = copied->position;
    if (left_out + 1 < index.end - 1) row.places[row.count++] = {1, 0, left_out + 1, weights.behind * left};
    row.places[row.count++] = {1, 0, left_out, weights.with * left};
}

static void find(Row& row, const Index* store, const Weights& weights) {
    row.count = 0;
    for (int first = 0; first < 2 && !row.count; first++) {  // a long context first; if none is found, all places
        int last = first ? NUM_LEVELS - 1 : 0;
        collect(row, row.own, 0, first, last, 1.0);
        collect(row, store, 1, first, last, weights.elsewhere);
    }
    for (int i = 1; i < row.count; i++) {  // by context, in the order they came
        Place place = row.places[i];
        int at = i;
        for (; at > 0 && row.places[at - 1].match < place.match; at--) row.places[at] = row.places[at - 1];
        row.places[at] = place;
    }
    int64_t longest = row.count ? row.places[0].match : 0;
    double total = 0.0;
    for (int i = 0; i < row.count; i++) total += row.places[i].votes;
    double share = row.count ? weights.foretold[longest] / total : 0.0;
    for (int i = 0; i < row.count; i++) row.places[i].votes *= share;
    if (longest <= 1 && row.own) add_strayed(row, weights, 1 - weights.foretold[longest]);
}

static const Index& text_of(const Row& row, const Place& place, const Index* store) {
    return place.elsewhere ? *store : *row.own;
}

static int64_t evidence(const Row& row, const Index* store, const Weights& weights) {
    if (!row.count || row.places[0].match >= LEVELS[0]) return row.count ? row.places[0].match : 0;
    int32_t tokens[MOST];
    double votes[MOST], sure = 0.0;
    int kinds = 0;
    for (int i = 0; i < row.count; i++) {
        const Index& index = text_of(row, row.places[i], store);
        int32_t token = index.text[row.places[i].start & (index.rows - 1)];
        int kind = 0;
        while (kind < kinds && tokens[kind] != token) kind++;
        if (kind == kinds) tokens[kind] = token, votes[kinds++] = 0.0;
        votes[kind] += row.places[i].votes;
    }
    for (int kind = 0; kind < kinds; kind++)
        if (votes[kind] >= weights.threshold && tokens[kind] >= 0) sure += votes[kind];
    int64_t degree = 0;
    for (double step : weights.sure) degree += sure >= step;
    return degree;
}

// -- the tree

struct Tree {
    int64_t *tokens, *parents, *depths;
    int64_t size;

    int64_t add(int64_t token, int64_t parent, int64_t depth) {
        tokens[size] = token, parents[size] = parent, depths[size] = depth;
        return size++;
    }

    // The token at `depth` on the path to a node.
    int64_t above(int64_t node, int64_t depth) const {
        while (depths[node] > depth) node = parents[node];
        return tokens[node];
    }
};

struct Node {  // that may be taken next
    double probability;
    int64_t parent, depth, token;
    uint64_t places;
};

static double votes_of(const Row& row, uint64_t places) {
    double total = 0.0;
    for (; places; places &= places - 1) total += row.places[__builtin_ctzll(places)].votes;
    return total;
}

// How many likely tokens from `depth` on follow all places alike; 0 where the places lie in different texts.
static int64_t agreed(const Row& row, uint64_t places, int64_t depth, double probability, int64_t room, const Index* store,
                      const Weights& weights, const int32_t** tokens) {
    const Place& first = row.places[__builtin_ctzll(places)];
    const Index& index = text_of(row, first, store);
    int64_t count = 0, latest = first.start, last_slot = 0, mask = index.rows - 1;
    while (count < room && probability >= weights.threshold) {
        count++;
        probability *= weights.foretold[least((int)(first.match + depth + count), DEPTH)];
    }
    for (uint64_t rest = places; rest; rest &= rest - 1) {
        const Place& place = row.places[__builtin_ctzll(rest)];
        if (place.elsewhere != first.elsewhere) return 0;
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

static void grow(const Row& row, int64_t budget, const Index* store, const Weights& weights, Tree& tree) {
    Node waiting[2 * MOST];  // disjoint, and each at least as likely as the threshold: never more than ten
    int count = 0;
    uint64_t places = row.count ? ~0ull >> (64 - row.count) : 0;
    int64_t parent = -1, depth = 0;
    double worth = 1.0;
    while (places && tree.size < budget) {
        const Place& best = row.places[__builtin_ctzll(places)];
        if (!count && (!(places & (places - 1)) || best.match + depth >= LEVELS[0])) {
            double votes = votes_of(row, places), probability = worth * votes;
            const int32_t* tokens = nullptr;
            int64_t run = agreed(row, places, depth, probability, budget - tree.size, store, weights, &tokens);
            for (int64_t i = 0; i < run; i++) {
                parent = tree.add(tokens[i], parent, ++depth);
                probability *= weights.foretold[least((int)(best.match + depth), DEPTH)];
            }
            if (run) {
                worth = probability / votes;
                continue;
            }
        }
        Node children[MOST];
        int kinds = 0;
        for (uint64_t rest = places; rest; rest &= rest - 1) {
            int which = __builtin_ctzll(rest);
            const Index& index = text_of(row, row.places[which], store);
            int64_t at = row.places[which].start + depth;
            int64_t token = at < index.end ? index.text[at & (index.rows - 1)] : tree.above(parent, at - index.end + 1);
            int kind = 0;
            while (kind < kinds && children[kind].token != token) kind++;
            if (kind == kinds) children[kinds++] = {0.0, parent, depth + 1, token, 0};
            children[kind].places |= 1ull << which;
        }
        for (int kind = 0; kind < kinds; kind++) {
            Node& child = children[kind];
            child.probability = worth * votes_of(row, child.places);
            if (child.token >= 0 && child.probability >= weights.threshold && count < 2 * MOST) waiting[count++] = child;
        }
        if (!count) break;
        int next = 0;  // the first of equals
        for (int i = 1; i < count; i++)
            if (waiting[i].probability > waiting[next].probability) next = i;
        Node node = waiting[next];
        memmove(waiting + next, waiting + next + 1, (--count - next) * sizeof(Node));  // they stay in order
        depth = node.depth;
        parent = tree.add(node.token, node.parent, depth);
        places = node.places;
        int64_t match = row.places[__builtin_ctzll(places)].match;
        worth = node.probability * weights.foretold[least((int)(match + depth), DEPTH)] / votes_of(row, places);
    }
}

}  // namespace suffix
