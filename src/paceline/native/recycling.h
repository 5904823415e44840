// Trees grown from tables of successors and from the places that the suffix index finds, mixed node by node, best first by
// learnt survival. `paceline.drafters.lookup.recycling` documents the rule.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "successors.h"
#include "suffix.h"

namespace recycling {

using successors::ANY;
using successors::WIDTH;

constexpr int MOST_NODES = 64;
constexpr int MOST_CHILDREN = 16;  // children of a node that are kept
constexpr int NUM_CONTEXTS = 3, NUM_MATCHES = 6, NUM_RANKS = 8, NUM_SHARES = 9;
constexpr int NUM_BUCKETS = 2 * NUM_CONTEXTS * NUM_MATCHES * NUM_RANKS * NUM_SHARES;
constexpr double SHARE_EDGES[NUM_SHARES - 1] = {.01, .03, .07, .15, .3, .5, .7, .9};
constexpr int MATCH_EDGES[NUM_MATCHES - 1] = {1, 2, 3, 5, 10};  // tokens shared

struct Survival {  // recycling.SurvivalView: by bucket, the children that were candidates on an answer's path
    float *tried, *right;
    const float* prior;
    double prior_weight, most_tried;  // most_tried: both counts are halved there
    double one_token, two_tokens;     // weights of the tables where both know a context

    double of(int bucket) const { return (right[bucket] + prior_weight * prior[bucket]) / (tried[bucket] + prior_weight); }
};

struct Child {
    int32_t token, bucket;
    double p;         // probability among its siblings
    double survival;  // learnt
    uint64_t places;  // places that vote for it
};

struct Children {
    int32_t count;
    int32_t node;  // their parent; -1: the root
    int32_t tokens[MOST_CHILDREN], buckets[MOST_CHILDREN];
};

struct Row {  // recycling.RecyclingRowView
    suffix::Row text;
    successors::Table *table, *base;  // of the row's domain; of the model, never written
    int64_t num_next;                 // next-next tokens: ranks of the logits that chose `next_behind`
    int32_t next_behind, next_ids[WIDTH];
    float next_probs[WIDTH];
    int64_t num_expanded, num_nodes;  // of the last draft
    Children expanded[MOST_NODES + 1];
    int32_t tokens[MOST_NODES], parents[MOST_NODES];
};

inline int class_of(const int* edges, int count, int64_t value) {
    int at = 0;
    while (at < count && value >= edges[at]) at++;
    return at;
}

inline int share_class(double p) {
    int at = 0;
    while (at < NUM_SHARES - 1 && p >= SHARE_EDGES[at]) at++;
    return at;
}

inline int bucket_of(int context, int match, int rank, double p, bool is_next) {
    const int group = (is_next * NUM_CONTEXTS + context) * NUM_MATCHES + match;
    return (group * NUM_RANKS + std::min(rank, NUM_RANKS - 1)) * NUM_SHARES + share_class(p);
}

struct Known {  // a row's tables
    const successors::Table *own, *base;
    const successors::Entry* find(int32_t before, int32_t last) const {
        const successors::Entry* entry = successors::find(own, before, last);
        return entry ? entry : successors::find(base, before, last);
    }
};

struct Node {
    int64_t depth;  // 0: the root
    int32_t before, last;
    uint64_t places;  // places that voted for it; of the root, all
};

// Finds the children of a node, likeliest first.
inline int expand(const Row& row, int64_t node, const Node& at, const suffix::Index* corpus, const suffix::Weights& weights,
                  const Survival& survival, const suffix::Tree* tree, Child* out) {
    struct Candidate {
        int32_t token;
        double p;
        uint64_t places;
        int next_rank;  // -1: no next-next token
    } all[suffix::MOST_PLACES + 3 * WIDTH];
    int count = 0;
    const auto add = [&](int32_t token, double p) {
        int i = 0;
        while (i < count && all[i].token != token) i++;
        if (i == count) all[count++] = {token, 0.0, 0, -1};
        all[i].p += p;
        return i;
    };
    const Known known{row.table, row.base};
    const successors::Entry *one = known.find(ANY, at.last), *two = known.find(at.before, at.last);
    const double both = one && two ? 1.0 : 0.0;
    for (int i = 0; two && i < WIDTH && two->ids[i] >= 0; i++)
        add(two->ids[i], two->probs[i] / 255.0 * (both ? survival.two_tokens : 1.0));
    for (int i = 0; one && i < WIDTH && one->ids[i] >= 0; i++)
        add(one->ids[i], one->probs[i] / 255.0 * (both ? survival.one_token : 1.0));
    const int context = two ? 2 : one ? 1 : 0;
    int64_t match = 0;
    if (at.places) {
        const double votes = suffix::votes_of(row.text, at.places);
        match = row.text.places[__builtin_ctzll(at.places)].match + at.depth;
        const double per_vote = at.depth ? weights.hit_rate[std::min(match, (int64_t)suffix::DEPTH)] / votes : 1.0;
        const double left = std::max(0.0, 1.0 - per_vote * votes);
        for (int i = 0; i < count; i++) all[i].p *= left;
        for (uint64_t rest = at.places; rest; rest &= rest - 1) {
            const int place = __builtin_ctzll(rest);
            const suffix::Index& index = suffix::text_of(row.text, row.text.places[place], corpus);
            const int64_t position = row.text.places[place].start + at.depth;
            if (position >= index.end && position - index.end + 1 > at.depth) continue;
            const int64_t token = position < index.end ? index.text[position & (index.rows - 1)]
                                                       : tree->token_above(node, position - index.end + 1);
            if (token >= 0) all[add((int32_t)token, per_vote * row.text.places[place].votes)].places |= 1ull << place;
        }
    }
    const int listed = count;
    if (node < 0 && row.num_next && row.text.tail_size && row.text.tail[0] == row.next_behind)
        for (int i = 0; i < row.num_next; i++) {
            int other = 0;
            while (other < listed && all[other].token != row.next_ids[i]) other++;
            if (other == listed) all[count++] = {row.next_ids[i], row.next_probs[i], 0, i};
        }
    std::stable_sort(all, all + listed, [](const Candidate& a, const Candidate& b) { return a.p > b.p; });
    const int matched = class_of(MATCH_EDGES, NUM_MATCHES - 1, match);
    int kept = 0;
    for (int i = 0; i < count && kept < MOST_CHILDREN; i++) {
        if (i >= MOST_CHILDREN / 2 && i < listed && count > listed) continue;  // room for next-next tokens
        const bool is_next = all[i].next_rank >= 0;
        const int bucket = bucket_of(context, matched, is_next ? all[i].next_rank : i, all[i].p, is_next);
        out[kept++] = {all[i].token, bucket, all[i].p, survival.of(bucket), all[i].places};
    }
    std::stable_sort(out, out + kept, [](const Child& a, const Child& b) { return a.survival > b.survival; });
    return kept;
}

inline void keep(Row& row, int64_t node, const Child* children, int count) {
    Children& list = row.expanded[row.num_expanded++];
    list.count = count, list.node = (int32_t)node;
    for (int i = 0; i < count; i++) list.tokens[i] = children[i].token, list.buckets[i] = children[i].bucket;
}

// Counts which of the candidates of the last draft the answer took: those of every node on its path whose children were
// looked for, whether they were drafted or not.
inline void score(Row& row, Survival& survival, const int64_t* tokens, int64_t count) {
    int64_t node = -1;
    for (int64_t i = 0; i < count; i++) {
        int64_t list = 0;
        while (list < row.num_expanded && row.expanded[list].node != node) list++;
        if (list == row.num_expanded) break;
        const Children& children = row.expanded[list];
        for (int j = 0; j < children.count; j++) {
            const int bucket = children.buckets[j];
            if (survival.tried[bucket] >= survival.most_tried) survival.tried[bucket] /= 2, survival.right[bucket] /= 2;
            survival.tried[bucket] += 1, survival.right[bucket] += children.tokens[j] == tokens[i];
        }
        int64_t child = 0;
        while (child < row.num_nodes && (row.parents[child] != node || row.tokens[child] != tokens[i])) child++;
        if (child == row.num_nodes) break;
        node = child;
    }
    row.num_expanded = row.num_nodes = 0;
}

inline Node root_of(const Row& row) {
    const suffix::Row& text = row.text;
    const int32_t before = text.tail_size > 1 ? text.tail[1] : successors::ANY - 1, last = text.tail_size ? text.tail[0] : -1;
    return {0, before, last, text.count ? ~0ull >> (64 - text.count) : 0};
}

// Returns the level: how well a draft is supported; 0: it would be empty.
inline int64_t level_of(Row& row, const suffix::Index* corpus, const suffix::Weights& weights, const Survival& survival) {
    Child children[MOST_CHILDREN];
    const int count = expand(row, -1, root_of(row), corpus, weights, survival, nullptr, children);
    row.num_expanded = row.num_nodes = 0;
    keep(row, -1, children, count);  // counted also if nothing is drafted
    if (!count) return 0;
    if (row.text.count && row.text.places[0].match >= suffix::LEVELS[0]) return row.text.places[0].match;
    int64_t level = 1;
    for (int i = 1; i < 4; i++) level += children[0].survival >= weights.level_steps[i];
    return level;
}

struct Waiting {
    double probability;
    int64_t order, parent, depth;
    int32_t before, token;
    uint64_t places;
    bool operator<(const Waiting& other) const {  // a heap has the largest in front; of equals, the first
        return probability < other.probability || (probability == other.probability && order > other.order);
    }
};

// Adds the nodes that most probably survive, best first, down to `least`; fewer nodes are a prefix of more.
inline void grow(Row& row, int64_t max_nodes, double least, const suffix::Index* corpus, const suffix::Weights& weights,
                 const Survival& survival, suffix::Tree& tree) {
    static thread_local std::vector<Waiting> waiting;
    waiting.clear();
    row.num_expanded = row.num_nodes = 0;
    max_nodes = std::min(max_nodes, (int64_t)MOST_NODES);
    int64_t order = 0, node = -1;
    double probability = 1.0;
    Node at = root_of(row);
    for (;;) {
        Child children[MOST_CHILDREN];
        const int count = expand(row, node, at, corpus, weights, survival, &tree, children);
        keep(row, node, children, count);
        for (int i = 0; i < count; i++) {
            const Child& child = children[i];
            waiting.push_back({probability * child.survival, order++, node, at.depth + 1, at.last, child.token, child.places});
            std::push_heap(waiting.begin(), waiting.end());
        }
        if (waiting.empty() || tree.size >= max_nodes) break;
        std::pop_heap(waiting.begin(), waiting.end());
        const Waiting next = waiting.back();
        waiting.pop_back();
        if (tree.size && next.probability < least) break;
        node = tree.add(next.token, next.parent, next.depth);
        row.tokens[node] = next.token, row.parents[node] = (int32_t)next.parent, row.num_nodes = tree.size;
        probability = next.probability;
        at = {next.depth, next.before, next.token, next.places};
        if (tree.size == max_nodes) {  // the last node's children are candidates too, which are only counted
            const int last = expand(row, node, at, corpus, weights, survival, &tree, children);
            keep(row, node, children, last);
            break;
        }
    }
}

struct Lesson {  // of one sequence
    int64_t table, row;          // addresses; 0: the sequence has no row
    int64_t start, before, end;  // its root row, the token before that row's or -2, and the end of its committed tokens
};

// Writes what the verified rows of a step teach into the tables, and each row's next-next tokens.

inline void teach(const successors::Rows& rows, const Lesson* lessons, const int64_t* committed, int64_t num_rows,
                  const successors::Table* base) {
    for (int64_t s = 0, from = 0; s < rows.num_sequences; s++) {
        const Lesson& lesson = lessons[s];
        const int64_t end = s + 1 < rows.num_sequences ? lessons[s + 1].start : num_rows;
        successors::Table& table = *reinterpret_cast<successors::Table*>(lesson.table);
        int64_t at = lesson.start;  // row that chose the newest token
        for (int64_t i = lesson.start; i < end; i++) {
            const int32_t *ids = rows.ids + i * rows.stride, last = rows.tokens[i];
            const int32_t before = rows.parents[i] < 0 ? (int32_t)lesson.before : rows.tokens[rows.parents[i]];
            successors::learn(table, base, ANY, last, ids, rows.probs + i * rows.stride);
            if (before >= 0) successors::learn(table, base, before, last, ids, rows.probs + i * rows.stride);
            if (i > lesson.start && from + 1 < lesson.end && rows.parents[i] == at && last == committed[from]) at = i, from++;
        }
        if (lesson.row && lesson.end > from) {
            Row& row = *reinterpret_cast<Row*>(lesson.row);
            row.num_next = 0, row.next_behind = (int32_t)committed[lesson.end - 1];
            const bool whole = from + 1 == lesson.end;  // the path was found
            for (int i = 0; whole && i <= WIDTH && row.num_next < WIDTH; i++) {
                const int32_t id = rows.ids[at * rows.stride + i];
                if (id < 0) break;
                if (id == row.next_behind) continue;
                row.next_ids[row.num_next] = id, row.next_probs[row.num_next++] = rows.probs[at * rows.stride + i];
            }
        }
        from = lesson.end;
    }
}

}  // namespace recycling
