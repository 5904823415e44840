// Trees from the logits of a block drafter, defined by `paceline.drafters.block.tree`: the likeliest tokens of each position
// are candidates, a Markov head adds W1[token before] . W2[candidate], and the likeliest paths become the tree.

#pragma once

#include <algorithm>
#include <functional>
#include <limits>
#include <vector>

#include "pool.h"
#include "vectors.h"

namespace block_tree {

constexpr float DEEPER = 1e-4f;  // block_tree.DEEPER: a node's score is less than its parent's
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

struct Forest {  // block/native.ForestView
    const int64_t* ids;  // the target's ids of draft tokens
    const float *anchor_rows, *w1, *w2;  // (target's vocabulary, rank), (vocab, rank) twice; rank 0: no Markov head
    int64_t vocab, rank, beam, count, nodes;
    int64_t *tokens, *parents, *depths;  // out: (batch, nodes)
    float* scores;  // out: (batch, nodes) log probabilities of paths
};

struct Scored {
    float score;
    int32_t at;
};

inline bool likelier(const Scored& a, const Scored& b) { return a.score > b.score || (a.score == b.score && a.at < b.at); }

// Returns a bit for each lane that is larger.
inline uint32_t above(vec v, float least) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(least), _CMP_GT_OQ);
#elif defined(__AVX2__)
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps((__m256)v, _mm256_set1_ps(least), _CMP_GT_OQ));
#else
    uint32_t lanes = 0;
    for (int i = 0; i < VL; i++) lanes |= (uint32_t)(v[i] > least) << i;
    return lanes;
#endif
}

// Finds the `count` highest of n scores, highest first, the lower index first among equals. If fewer are above -inf (NaN is
// not), the rest is index 0.
inline void highest(const float* scores, long n, long count, std::vector<Scored>& kept) {
    const size_t room = 2 * count + VL;
    kept.clear();
    float least = LOWEST;
    const auto cut = [&] {
        if (kept.size() <= (size_t)count) return;
        std::nth_element(kept.begin(), kept.begin() + count - 1, kept.end(), likelier);
        kept.resize(count);
        least = kept[count - 1].score;
    };
    for (long i = 0; i < n; i += VL) {
        uint32_t lanes = n - i < VL ? (1u << (n - i)) - 1 : above(load(scores + i), least);
        for (; lanes; lanes &= lanes - 1) {
            const long at = i + __builtin_ctz(lanes);
            if (scores[at] > least) kept.push_back({scores[at], (int32_t)at});
        }
        if (kept.size() + VL > room) cut();
    }
    cut();
    std::sort(kept.begin(), kept.end(), likelier);
    kept.resize(count, {LOWEST, 0});
}

inline float dot(const float* a, const float* b, long n) {
    vec sum{};
    long i = 0;
    for (; i + VL <= n; i += VL) sum = madd(load(a + i), load(b + i), sum);
    if (i < n) sum = madd(load_n(a + i, n - i), load_n(b + i, n - i), sum);
#if defined(__AVX512F__) || defined(__AVX2__)  // intrinsics: sum_lanes takes three times as long
#if defined(__AVX512F__)
    __m256 halves[2];
    memcpy(halves, &sum, sizeof halves);
    const __m256 eight = _mm256_add_ps(halves[0], halves[1]);
#else
    const __m256 eight = (__m256)sum;
#endif
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
#else
    return sum_lanes(sum);
#endif
}

// Returns the sum of e^(score - maximum).
inline double sum_of_exps(const float* scores, long n, float peak) {
    vec sum{};
    const vec shift = splat(peak);
    long i = 0;
    for (; i + VL <= n; i += VL) sum += vexp(load(scores + i) - shift);
    double total = sum_lanes(sum);
    for (; i < n; i++) total += vexp(scores[i] - peak);
    return total;
}

// The candidates of one position, and the parts of their log probabilities.
struct Position {
    std::vector<Scored> best;  // logits without the Markov head, and tokens
    float others;  // log of the summed weight of all other tokens
};

inline void find(const Forest& f, const float* logits, Position& position) {
    highest(logits, f.vocab, f.count, position.best);
    const float peak = position.best[0].score, total = peak + (float)log(sum_of_exps(logits, f.vocab, peak));
    double among = 0;
    for (const Scored& one : position.best) among += vexp(one.score - peak);
    const double share = std::min(among * vexp(peak - total), 1 - 1e-6);
    position.others = total + (float)log(1 - share);
}

// Computes log probabilities of a position's candidates behind a token, given its row of W1.
inline void behind(const Forest& f, const Position& position, const float* row, float* scores) {
    float peak = position.others;
    for (long c = 0; c < f.count; c++) {
        const Scored& one = position.best[c];
        scores[c] = one.score + (f.rank ? dot(row, f.w2 + one.at * f.rank, f.rank) : 0.0f);
        peak = scores[c] > peak ? scores[c] : peak;
    }
    const float total = peak + (float)log(sum_of_exps(scores, f.count, peak) + vexp(position.others - peak));
    for (long c = 0; c < f.count; c++) scores[c] -= total;
}

struct Node {
    float score;
    int32_t token, parent, depth;  // token of the draft vocabulary; parent among all nodes, or -1
};

// The tree of one sequence, grown level by level: the likeliest nodes of each level have children.
struct Tree {
    int64_t anchor;  // the sequence's last token
    float least;     // log of min_node_probability
    std::vector<Node> nodes;
    std::vector<Scored> frontier{{0.0f, -1}};  // scores and indexes of nodes that have children
    int32_t depth = 0;
};

// Removes from the frontier what can have no descendant in the tree: once the tree has its nodes, a node that scores no more
// than the last of them.
inline void leave_out_unlikely(const Forest& f, Tree& tree) {
    float last = LOWEST;
    const bool full = tree.nodes.size() >= (size_t)f.nodes;
    if (full) {
        std::vector<float> scores;
        for (const Node& node : tree.nodes) scores.push_back(node.score);
        std::nth_element(scores.begin(), scores.begin() + f.nodes - 1, scores.end(), std::greater<float>());
        last = scores[f.nodes - 1];
    }
    while (!tree.frontier.empty() && ((full && tree.frontier.back().score <= last) || tree.frontier.back().score < tree.least))
        tree.frontier.pop_back();
}

// Adds one level, from the candidates of its position.
inline void grow(const Forest& f, const Position& position, Tree& tree) {
    std::vector<Scored> children, level;
    std::vector<float> scores(f.count);
    const long wide = std::min(f.beam, f.nodes);  // a wider level's last nodes would not be among the likeliest
    tree.depth++;
    for (const Scored& parent : tree.frontier) {
        const float* rows = parent.at < 0 ? f.anchor_rows : f.w1;
        const int64_t token = parent.at < 0 ? tree.anchor : tree.nodes[parent.at].token;
        behind(f, position, f.rank ? rows + token * f.rank : nullptr, scores.data());
        highest(scores.data(), f.count, std::min(wide, (long)f.count), children);
        for (const Scored& child : children) {
            const float score = parent.score + child.score - DEEPER;
            level.push_back({score, (int32_t)tree.nodes.size()});
            tree.nodes.push_back({score, position.best[child.at].at, parent.at, tree.depth});
        }
    }
    const size_t kept = std::min((size_t)wide, level.size());
    std::partial_sort(level.begin(), level.begin() + kept, level.end(), likelier);
    tree.frontier.assign(level.begin(), level.begin() + kept);
    leave_out_unlikely(f, tree);
}

// Writes the likeliest nodes of a grown tree.
inline void write(const Forest& f, long sequence, const Tree& tree) {
    const std::vector<Node>& nodes = tree.nodes;
    std::vector<Scored> chosen;
    for (const Node& node : nodes) chosen.push_back({node.score, (int32_t)chosen.size()});
    const long size = std::min((long)chosen.size(), (long)f.nodes);
    std::partial_sort(chosen.begin(), chosen.begin() + size, chosen.end(), likelier);
    std::vector<int32_t> place(nodes.size(), -1);
    for (long i = 0; i < f.nodes; i++) {
        const long at = sequence * f.nodes + i;
        const Node* node = i < size ? &nodes[chosen[i].at] : nullptr;
        if (node) place[chosen[i].at] = (int32_t)i;
        f.tokens[at] = node ? f.ids[node->token] : 0;
        f.parents[at] = node && node->parent >= 0 ? place[node->parent] : -1;
        f.depths[at] = node ? node->depth : 0;
        f.scores[at] = node ? node->score : LOWEST;
    }
}

}  // namespace block_tree
