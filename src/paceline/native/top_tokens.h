// The likeliest tokens of rows of logits, with their probabilities by softmax of the raw logits, and the mass of the others.

#pragma once

#include <algorithm>
#include <vector>

#include "pool.h"
#include "sampling.h"

namespace {

struct Likely {
    float logit;
    int32_t id;
    bool operator<(const Likely& other) const { return logit > other.logit || (logit == other.logit && id < other.id); }
};

// Calls take(vector, first token) for every VL logits of a range of a row, with -inf beyond the row's end.
template <class F>
void each_vector(const float* logits, long from, long to, long size, const F& take) {
    long i = from;
    for (; i + VL <= std::min(to, size); i += VL) take(load(logits + i), i);
    if (i >= to) return;
    vec last = splat(-INFINITY);
    memcpy(&last, logits + i, (size - i) * sizeof(float));
    take(last, i);
}

// Writes the `n` likeliest tokens of one row, the first of equals first: -1 and 0 behind the last token of p > 0, or where
// the logits are not numbers.
inline void top_tokens_of_row(const float* logits, long size, long n, int32_t* ids, float* probs, float* rest) {
    static thread_local std::vector<float> highest;
    static thread_local std::vector<Likely> likely;
    std::fill(ids, ids + n, -1), std::fill(probs, probs + n, 0.0f), *rest = 1.0f;
    highest.clear(), likely.clear();
    // Maxima of parts of the row, one for each lane of a stretch: n parts have a token at or above their n-th highest.
    const long parts = std::max(4 * n, 256L), stretch = (size + parts - 1) / parts * VL, end = (size + VL - 1) / VL * VL;
    for (long i = 0; i < size; i += stretch) {
        vec best = splat(-INFINITY);
        each_vector(logits, i, std::min(i + stretch, end), size, [&](vec x, long) { best = larger(x, best); });
        for (int lane = 0; lane < VL; lane++) highest.push_back(best[lane]);
    }
    const float most = *std::max_element(highest.begin(), highest.end());
    if (!std::isfinite(most)) return;
    float bound = -INFINITY;
    if (n <= (long)highest.size()) {
        std::nth_element(highest.begin(), highest.begin() + (n - 1), highest.end(), std::greater<float>());
        bound = highest[n - 1];
    }
    double total = 0;
    for (long i = 0; i < size; i += STRETCH) {
        vec sum = {};
        each_vector(logits, i, std::min(i + STRETCH, end), size, [&](vec x, long first) {
            sum += vexp(x - splat(most));
            if (!any(x >= splat(bound))) return;
            for (long j = first; j < std::min(first + VL, size); j++)
                if (logits[j] >= bound && logits[j] > -INFINITY) likely.push_back({logits[j], (int32_t)j});
        });
        total += sum_lanes(sum);
    }
    if (!std::isfinite(total)) return;  // NaN, which no maximum shows
    const long count = std::min(n, (long)likely.size());
    std::partial_sort(likely.begin(), likely.begin() + count, likely.end());
    double held = 0;
    for (long i = 0; i < count; i++) {
        const double weight = vexp(likely[i].logit - most);
        ids[i] = likely[i].id, probs[i] = (float)(weight / total), held += weight;
    }
    *rest = (float)std::max(0.0, (total - held) / total);
}

// `out`: (M, n) ids, (M, n) probabilities as floats, and (M) rest masses as floats, one behind the other.
inline void top_tokens(const float* logits, long size, long rows, long n, int32_t* out, int threads) {
    float *probs = reinterpret_cast<float*>(out + rows * n), *rest = probs + rows * n;
    parallel(rows, threads, [&](long row, int) {
        top_tokens_of_row(logits + row * size, size, n, out + row * n, probs + row * n, rest + row);
    });
}

}  // namespace
