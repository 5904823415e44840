// Trees from the logits of a block drafter, as `paceline.drafters.block_tree` defines them: of each position the likeliest
// tokens are candidates, a Markov head adds W1[token before] . W2[candidate], and the likeliest paths become the tree.

#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "pool.h"
#include "vectors.h"

namespace block_tree {

constexpr float DEEPER = 1e-4f;  // block_tree.DEEPER: a node's score is less than its parent's
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

struct Forest {  // native_kernels.ForestView
    const float* logits;  // of the first position of the first sequence
    const int64_t *anchors, *ids;  // last tokens (batch,); the target's ids of draft tokens
    const float *anchor_rows, *w1, *w2;  // (target's vocabulary, rank), (vocab, rank) twice; rank 0: no Markov head
    int64_t *tokens, *parents, *depths;  // out: (batch, nodes)
    float* scores;  // out: (batch, nodes) log probabilities of paths
    int64_t batch, sequence_stride, depth, vocab, rank, nodes, beam, count;
};

struct Scored {
    float score;
    int32_t at;
};

inline bool likelier(const Scored& a, const Scored& b) { return a.score > b.score || (a.score == b.score && a.at < b.at); }

// A bit for each lane that is larger.
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

// The `count` highest of n scores, highest first, the lower index first among equals; what is missing for want of scores
// above -inf (NaN is none) is index 0.
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
#if defined(__AVX512F__)  // by hand: sum_lanes keeps an order that no draft depends on, at three times the cost
    __m256 halves[2];
    memcpy(halves, &sum, sizeof halves);
    const __m256 eight = _mm256_add_ps(halves[0], halves[1]);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
#else
    return sum_lanes(sum);
#endif
}

// log of the sum of e to the scores, given their maximum.
inline float log_sum(const float* scores, long n, float peak) {
    vec sum{};
    const vec shift = splat(peak);
    long i = 0;
    for (; i + VL <= n; i += VL) sum += vexp(load(scores + i) - shift);
    double total = sum_lanes(sum);
    for (; i < n; i++) total += vexp(scores[i] - peak);
    return peak + (float)log(total);
}

// The candidates of one position, and what their log probabilities are made of.
struct Position {
    std::vector<Scored> best;  // logits without the Markov head, and tokens
    float others;  // log of what tokens that are no candidates weigh
};

inline void find(const Forest& f, long sequence, long level, Position& position) {
    const float* logits = f.logits + sequence * f.sequence_stride + level * f.vocab;
    highest(logits, f.vocab, f.count, position.best);
    const float peak = position.best[0].score, total = log_sum(logits, f.vocab, peak);
    double among = 0;
    for (const Scored& one : position.best) among += vexp(one.score - peak);
    const double share = std::min(among * vexp(peak - total), 1 - 1e-6);
    position.others = total + (float)log(1 - share);
}

// Log probabilities of a position's candidates behind a token whose row of W1 is given.
inline void behind(const Forest& f, const Position& position, const float* row, float* scores) {
    float peak = position.others;
    for (long c = 0; c < f.count; c++) {
        const Scored& one = position.best[c];
        scores[c] = one.score + (f.rank ? dot(row, f.w2 + one.at * f.rank, f.rank) : 0.0f);
        peak = scores[c] > peak ? scores[c] : peak;
    }
    double sum = vexp(position.others - peak);
    for (long c = 0; c < f.count; c++) sum += vexp(scores[c] - peak);
    const float total = peak + (float)log(sum);
    for (long c = 0; c < f.count; c++) scores[c] -= total;
}

struct Node {
    float score;
    int32_t token, parent, depth;  // token of the draft vocabulary; parent among all nodes, or -1
};

inline void grow(const Forest& f, long sequence, const Position* positions) {
    std::vector<Node> nodes;
    std::vector<Scored> children, level, frontier{{0.0f, -1}};  // of the frontier: scores, and which nodes they are
    std::vector<float> scores(f.count);
    for (long depth = 0; depth < f.depth; depth++) {
        const Position& position = positions[depth];
        level.clear();
        for (const Scored& parent : frontier) {
            const float* rows = parent.at < 0 ? f.anchor_rows : f.w1;
            const int64_t token = parent.at < 0 ? f.anchors[sequence] : nodes[parent.at].token;
            behind(f, position, f.rank ? rows + token * f.rank : nullptr, scores.data());
            highest(scores.data(), f.count, std::min(f.beam, f.count), children);
            for (const Scored& child : children) {
                const float score = parent.score + child.score - DEEPER;
                level.push_back({score, (int32_t)nodes.size()});
                nodes.push_back({score, position.best[child.at].at, parent.at, (int32_t)depth + 1});
            }
        }
        const size_t wide = std::min((size_t)f.beam, level.size());
        std::partial_sort(level.begin(), level.begin() + wide, level.end(), likelier);
        frontier.assign(level.begin(), level.begin() + wide);
    }
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

inline void grow_all(const Forest& f, int threads) {
    std::vector<Position> positions(f.batch * f.depth);
    parallel(f.batch * f.depth, threads, [&](long at, int) { find(f, at / f.depth, at % f.depth, positions[at]); });
    parallel(f.batch, threads, [&](long sequence, int) { grow(f, sequence, &positions[sequence * f.depth]); });
}

}  // namespace block_tree
