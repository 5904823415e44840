// Draws one token from one row of logits by the rules of `paceline.verify.host`: temperature, min_p, top_k, top_p, then a
// coin against cumulative p or a seed's Gumbel noise; at temperature 0 the first of the highest logits.
//
// Weights and noise are computed to float precision and may differ from `verify.host` in the last bit. So a token is returned
// only if rounding could not change it; rows too close to a boundary are UNDECIDED, and the caller draws their tokens.

#pragma once

#include <algorithm>
#include <vector>

#include "vectors.h"

namespace {

constexpr long UNDECIDED = -1;
constexpr double CLOSE = 2e-5;  // share of a sum of weights; nearer to a boundary, rounding may decide
constexpr double CLOSE_SUM = 1e-3;  // logit + noise; nearer than this, rounding may decide
constexpr long STRETCH = 256;  // tokens summed as floats before they are added to a double
constexpr int BINS = 256;

struct Asked {
    float temperature, least;  // least: log min_p, or -inf
    int64_t top_k;             // 0: off
    double top_p;              // 1: off
    double coin;               // negative: the draw is seeded
    uint64_t key;              // key of the seed's noise at this position
};

struct Kept {
    float logit, weight;  // tempered logit, and e^logit
    int token;
};

inline bool any(ivec wanted) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)wanted, (__m512i)wanted);
#elif defined(__AVX2__)
    return _mm256_movemask_ps((__m256)wanted);
#else
    int32_t found = 0;
    for (int lane = 0; lane < VL; lane++) found |= wanted[lane];
    return found;
#endif
}

// Logits of one row, tempered: (x - highest) / temperature; -inf beyond the end.
struct Row {
    const float* logits;
    long size;
    float highest, temperature, scale = 1 / temperature;

    vec below(long i) const {
        vec x = splat(-INFINITY);
        if (i + VL <= size)
            x = load(logits + i);
        else
            memcpy(&x, logits + i, (size - i) * sizeof(float));
        return x - splat(highest);
    }
    vec at(long i) const { return below(i) / splat(temperature); }
    vec about(long i) const { return below(i) * splat(scale); }  // faster; the last bit may differ
};

// Returns the highest logit, or NaN if the row holds one, which a comparison alone would skip.
inline float highest_of(const float* logits, long size) {
    constexpr int CHAINS = 4;  // independent maxima
    vec best[CHAINS], strange[CHAINS] = {};
    for (vec& one : best) one = splat(-INFINITY);
    long i = 0;
    for (; i + CHAINS * VL <= size; i += CHAINS * VL)
        for (int chain = 0; chain < CHAINS; chain++) {
            const vec x = load(logits + i + chain * VL);
            best[chain] = larger(x, best[chain]);
            // x - x is 0, or NaN for NaN and infinity; -inf is a valid logit.
            strange[chain] += (vec)((ivec)(x - x) & ~(ivec)(x == splat(-INFINITY)));
        }
    float most = max_lanes(larger(larger(best[0], best[1]), larger(best[2], best[3])));
    float rest = sum_lanes(strange[0] + strange[1] + strange[2] + strange[3]);
    for (; i < size; i++) {
        most = logits[i] > most ? logits[i] : most;
        rest += logits[i] == -INFINITY ? 0.0f : logits[i] - logits[i];
    }
    return most + rest;
}

inline long first_of(const float* logits, long size, float value) {
    long i = 0;
    for (const vec wanted = splat(value); i + VL <= size; i += VL)
        if (any(load(logits + i) == wanted)) break;
    while (i < size && logits[i] != value) i++;
    return i < size ? i : UNDECIDED;
}

inline double weight_of(const Row& row, long from, long to) {
    vec sum = {};
    for (long i = from; i < to; i += VL) sum += vexp(row.about(i));
    return sum_lanes(sum);
}

// Returns the k-th highest logit; -inf if k exceeds the number of blocks, whose maxima give the first bound.
inline float kth_highest(const Row& row, long k, std::vector<float>& values) {
    constexpr long BLOCK = 4 * VL;
    values.clear();
    for (long i = 0; i < row.size; i += BLOCK) {
        vec best = row.at(i);
        for (long j = i + VL; j < std::min(i + BLOCK, row.size); j += VL) best = larger(row.at(j), best);
        values.push_back(max_lanes(best));
    }
    if (k > (long)values.size()) return -INFINITY;
    const auto higher = [](float a, float b) { return a > b; };
    std::nth_element(values.begin(), values.begin() + (k - 1), values.end(), higher);
    const float bound = values[k - 1];  // k blocks have a token at or above it
    values.clear();
    for (long i = 0; i < row.size; i += VL) {
        const vec x = row.at(i);
        if (!any(x >= splat(bound))) continue;
        for (int lane = 0; lane < VL && i + lane < row.size; lane++)
            if (x[lane] >= bound) values.push_back(x[lane]);
    }
    std::nth_element(values.begin(), values.begin() + (k - 1), values.end(), higher);
    return values[k - 1];
}

inline void keep(const Row& row, float least, std::vector<Kept>& kept) {
    kept.clear();
    const vec bound = splat(least);
    for (long i = 0; i < row.size; i += VL) {
        const vec x = row.at(i);
        const ivec above = x >= bound;
        if (!any(above)) continue;
        const vec weights = vexp(x);
        for (int lane = 0; lane < VL && i + lane < row.size; lane++)
            if (above[lane]) kept.push_back({x[lane], weights[lane], (int)(i + lane)});
    }
}

// Finds the lowest logit that top_p keeps, among `kept` (all tokens that matter of `total`); false if rounding may decide.
inline bool nucleus(const std::vector<Kept>& kept, float lowest, double total, double top_p, std::vector<float>& values,
                    float& least) {
    double sums[BINS] = {}, held = 0;
    const float scale = lowest < -1e-30f ? BINS / -lowest : 0.0f;  // finite, even if the temperature makes all logits equal
    const auto bin_of = [&](float logit) { return std::min((int)(-logit * scale), BINS - 1); };
    for (const Kept& one : kept) sums[bin_of(one.logit)] += one.weight;
    const double goal = top_p * total;
    int bin = 0;
    while (bin < BINS && held + sums[bin] < goal) held += sums[bin++];
    if (bin == BINS) return false;
    values.clear();
    for (const Kept& one : kept)
        if (bin_of(one.logit) == bin) values.push_back(one.logit);
    std::sort(values.begin(), values.end(), [](float a, float b) { return a > b; });
    for (const float value : values) {
        const double before = held;
        held += vexp(value);
        if (held < goal) continue;
        least = value;
        return goal - before > CLOSE * total && held - goal > CLOSE * total;
    }
    return false;
}

inline uint32_t token_bits(uint64_t key, uint32_t token) {
    uint32_t x = token ^ (uint32_t)key;
    x ^= x >> 17, x *= 0xED5AD4BBu;
    x ^= x >> 11, x += (uint32_t)(key >> 32), x *= 0xAC4C1B51u;
    x ^= x >> 15, x *= 0x31848BABu;
    return x ^ x >> 14;
}

inline uvec token_bits(uint64_t key, uvec x) {
    x ^= (uint32_t)key;
    x ^= x >> 17, x *= 0xED5AD4BBu;
    x ^= x >> 11, x += (uint32_t)(key >> 32), x *= 0xAC4C1B51u;
    x ^= x >> 15, x *= 0x31848BABu;
    return x ^ x >> 14;
}

constexpr float UNIT = 4.656612873077393e-10f * 0.99999994f;  // rng.py's: the largest stays below 1

inline float unit(uint32_t bits) { return fabsf((float)(int32_t)bits + 0.25f) * UNIT; }

inline double noise_of(float unit) { return -log(-log1p(-(double)unit)); }

// The highest sum of logit and noise, and whether another is close to it.
struct Best {
    double sum = -INFINITY, second = -INFINITY;
    long token = UNDECIDED;

    void offer(float logit, float unit, long index) {
        const double of = logit + noise_of(unit);
        if (of > sum)
            second = sum, sum = of, token = index;
        else if (of > second)
            second = of;
    }
    long said() const { return sum - second > CLOSE_SUM ? token : UNDECIDED; }
};

// Returns e^x or up to 7 % more, or a negative number for x below -87: the bits of a float are nearly its logarithm.
inline vec above_exp(vec x) {
    const vec bits = madd(x, splat(12102203.2f), splat(1065353216.0f));  // 2^23 / ln 2, and 1.0f
    return (vec) __builtin_convertvector(bits, ivec);
}

inline long by_seed(const Row& row, uint64_t key) {
    Best best;
    uvec tokens;
    for (int lane = 0; lane < VL; lane++) tokens[lane] = lane;
    const vec most = splat(10.0f);
    // The token with the highest logit, whose tempered one is 0, is somewhere in the row.
    float bound = (float)noise_of(unit(token_bits(key, (uint32_t)first_of(row.logits, row.size, row.highest))));
    for (long i = 0; i < row.size; i += VL, tokens += (uint32_t)VL) {
        const vec over = row.about(i) + splat(0.01f - bound);  // logits above the best sum so far
        const vec noise = __builtin_convertvector((ivec)token_bits(key, tokens), vec) + splat(0.25f);
        const vec units = (vec)((ivec)noise & 0x7fffffff) * splat(UNIT);
        // Noise above g needs a uniform below e^-g: only such tokens can come close to the best sum so far.
        const ivec likely = units <= above_exp(over < most ? over : most);
        if (!any(likely)) continue;
        const vec x = row.at(i);
        for (int lane = 0; lane < VL && i + lane < row.size; lane++)
            if (likely[lane]) best.offer(x[lane], units[lane], i + lane);
        bound = std::max(bound, (float)best.sum);
    }
    return best.said();
}

inline long by_seed(const std::vector<Kept>& kept, float least, uint64_t key) {
    Best best;
    for (const Kept& one : kept)
        if (one.logit >= least) best.offer(one.logit, unit(token_bits(key, one.token)), one.token);
    return best.said();
}

// Returns whether the point is further than rounding from both ends of its interval.
inline bool clear(double before, double point, double after, double total) {
    return point - before > CLOSE * total && after - point > CLOSE * total;
}

inline long by_coin(const Row& row, double coin, std::vector<double>& sums) {
    sums.clear();
    double total = 0, held = 0;
    for (long i = 0; i < row.size; i += STRETCH) {
        sums.push_back(weight_of(row, i, std::min(i + STRETCH, row.size)));
        total += sums.back();
    }
    const double point = coin * total;
    size_t block = 0;
    while (block + 1 < sums.size() && held + sums[block] <= point) held += sums[block++];
    for (long i = block * STRETCH; i < row.size; i += VL) {
        const vec weights = vexp(row.about(i));
        for (int lane = 0; lane < VL && i + lane < row.size; lane++) {
            const double before = held;
            held += weights[lane];
            if (held > point) return clear(before, point, held, total) ? i + lane : UNDECIDED;
        }
    }
    return UNDECIDED;
}

inline long by_coin(const std::vector<Kept>& kept, float least, double coin) {
    double total = 0, held = 0;
    for (const Kept& one : kept)
        if (one.logit >= least) total += one.weight;
    const double point = coin * total;
    for (const Kept& one : kept) {
        if (one.logit < least) continue;
        const double before = held;
        held += one.weight;
        if (held > point) return clear(before, point, held, total) ? one.token : UNDECIDED;
    }
    return UNDECIDED;
}

inline long draw_token(const float* logits, long size, const Asked& asked) {
    static thread_local std::vector<float> values;
    static thread_local std::vector<double> sums;
    static thread_local std::vector<Kept> kept;
    const Row row{logits, size, highest_of(logits, size), asked.temperature};
    if (!(row.highest > -INFINITY && row.highest < INFINITY)) return UNDECIDED;
    if (asked.temperature == 0) return first_of(logits, size, row.highest);
    float least = asked.least;
    if (asked.top_k > 0 && asked.top_k < size) {
        const float kth = kth_highest(row, asked.top_k, values);
        if (kth == -INFINITY) return UNDECIDED;
        least = std::max(least, kth);
    }
    if (asked.top_p >= 1 && least == -INFINITY)
        return asked.coin < 0 ? by_seed(row, asked.key) : by_coin(row, asked.coin, sums);
    if (least > -INFINITY) keep(row, least, kept);
    if (asked.top_p < 1) {
        double total = 0;
        float lowest = least;
        if (least > -INFINITY) {
            for (const Kept& one : kept) total += one.weight;
        } else {
            for (long i = 0; i < size; i += STRETCH) total += weight_of(row, i, std::min(i + STRETCH, size));
            // Tokens below this sum to less than 1 - top_p.
            lowest = std::max((float)log((1 - asked.top_p) * total / size), -80.0f) - 0.01f;
            keep(row, lowest, kept);
        }
        if (!nucleus(kept, lowest, total, asked.top_p, values, least)) return UNDECIDED;
    }
    return asked.coin < 0 ? by_seed(kept, least, asked.key) : by_coin(kept, least, asked.coin);
}

}  // namespace
