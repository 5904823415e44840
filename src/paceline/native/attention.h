// Attention over a paged cache, for prefill chunks, decoded tokens and token trees alike. A row's keys are taken in order,
// in splits at absolute multiples of SPLIT, merged first to last, wherever the keys lie in the cache.

#pragma once

#include <cstdlib>

#include "elementwise.h"
#include "keys.h"
#include "plan.h"

namespace {

struct Attention : Plan {  // one call
    const float* q;
    Cache cache;
    long q_heads, kv_heads, dim, num_slots, window;
    float scale, softcap;
    bool bad_slot;

    long group() const { return q_heads / kv_heads; }
    long begin(long row) const { return window && positions[row] >= window ? positions[row] - window + 1 : 0; }
    long end(long row) const { return reach[row]; }

    // The slots of a row's positions [from, to). A slot outside the cache is a bug of the caller: reported, not read.
    void find_slots(long row, long from, long to, long* out) {
        const int32_t* table = tables + sequence[row] * table_width;
        const long paged = to < prefix[row] ? to : prefix[row];
        long p = from;
        while (p < paged) {
            const long block = p / block_size, stop = (block + 1) * block_size < paged ? (block + 1) * block_size : paged;
            const long first = block < table_width && table[block] >= 0 ? table[block] * block_size : -num_slots;
            for (; p < stop; p++) *out++ = checked(first + p - block * block_size);
        }
        for (; p < to; p++) {
            const long i = p - prefix[row];
            *out++ = checked(i < path_width ? path[row * path_width + i] : -1);
        }
    }
    long checked(long slot) {
        if (slot >= 0 && slot < num_slots) return slot;
        __atomic_store_n(&bad_slot, true, __ATOMIC_RELAXED);
        return 0;
    }
    template <class T>
    const T* row_of(const void* rows, long slot, long head) const {
        return (const T*)rows + (slot * kv_heads + head) * dim;
    }
};

struct Tile {  // neighbouring rows of one sequence
    long first, rows;
};

// A weighted sum of values is stored as (sum of e^(s - m) v: dim floats, m, sum of e^(s - m)).
struct Scratch {  // of one thread
    float *q, *scores, *panel, *tail, *results, *state;
};

void merge(float* into, const float* from, long dim) {
    const float m = into[dim] > from[dim] ? into[dim] : from[dim];
    const float a = vexp(into[dim] - m), b = vexp(from[dim] - m);
    for (long i = 0; i < dim; i++) into[i] = into[i] * a + from[i] * b;
    into[dim] = m;
    into[dim + 1] = into[dim + 1] * a + from[dim + 1] * b;
}

// Returns the largest of a row's scores at positions [from, to) of the split; fills the lanes beside them.
float largest_score(float* s, long from, long to) {
    const long first = from / VL * VL, last = (to + VL - 1) / VL * VL;
    for (long i = first; i < from; i++) s[i] = -INFINITY;
    for (long i = to; i < last; i++) s[i] = -INFINITY;
    vec best = load(s + first);
    for (long i = first + VL; i < last; i += VL) best = larger(load(s + i), best);
    return max_lanes(best);
}

// Turns scores into weights in place; returns their sum.
float weights_of_scores(float* s, long from, long to, float largest) {
    const long first = from / VL * VL, last = (to + VL - 1) / VL * VL;
    const vec shift = splat(largest);
    vec total = {};
    for (long i = first; i < last; i += VL) {
        const vec e = vexp(load(s + i) - shift);
        store(s + i, e);
        total += e;
    }
    return sum_lanes(total);
}

void scale_queries(const Attention& a, Tile tile, long head, float* out) {
    const long G = a.group();
    for (long r = 0; r < tile.rows; r++) {
        const float* q = a.q + ((tile.first + r) * a.q_heads + head * G) * a.dim;
        for (long i = 0; i < G * a.dim; i++) out[r * G * a.dim + i] = q[i] * a.scale;
    }
}

inline bool equal(const long* one, const long* other, long count) {
    for (long i = 0; i < count; i++)
        if (one[i] != other[i]) return false;
    return true;
}

// The part of a call that one thread computes at a time: a tile, `span` neighbouring kv heads, one split. The results of
// neighbouring heads are `apart` floats from each other.
struct Part {
    Tile tile;
    long first_head, span, split;
    float* results;
    long apart;
    bool goes_on;  // the thread's next part is the next split
};

// Positions that all rows of the tile read from equal slots are done together, the others row by row; either way a row goes
// through its own positions in order. All heads of a block of positions are done before the next block, so that the cache is
// read in order of address: heads of a slot are neighbours in memory.
template <class T>
void attend_split(Attention& a, const Part& part, const Scratch& s) {
    const Tile tile = part.tile;
    const long G = a.group(), D = a.dim, base = part.split * SPLIT, span = part.span;
    const long heads = tile.rows * G, stride = D + 2;
    for (long h = 0; h < span; h++) scale_queries(a, tile, part.first_head + h, s.q + h * heads * D);
    const auto scores = [&](long h) { return s.scores + h * heads * SCORES; };
    const auto result = [&](long h) { return part.results + h * part.apart; };
    long low[TILE_ROWS], high[TILE_ROWS];
    long shared_low = 0, shared_high = SPLIT, any_low = SPLIT, any_paged = 0;
    for (long r = 0; r < tile.rows; r++) {
        const long row = tile.first + r, begin = a.begin(row) - base, end = a.end(row) - base;
        low[r] = begin < 0 ? 0 : begin;
        high[r] = end > SPLIT ? SPLIT : end;
        const long paged = a.prefix[row] - base < high[r] ? a.prefix[row] - base : high[r];
        if (low[r] > shared_low) shared_low = low[r];
        if (paged < shared_high) shared_high = paged;
        if (low[r] >= high[r]) continue;
        if (low[r] < any_low) any_low = low[r];
        if (paged > any_paged) any_paged = paged;
    }
    shared_low = (shared_low + NT - 1) / NT * NT;
    shared_high = shared_high < 0 ? 0 : shared_high / NT * NT;
    if (shared_high <= shared_low) shared_low = shared_high = 0;

    // Pages that a row reads through the block table, and pointers to them.
    long slots[SPLIT + AHEAD];
    const T *keys[SPLIT], *values[SPLIT];
    const char* coming[2 * SPLIT + AHEAD] = {};  // keys of the split, its values, first keys of the next one
    long table_row = tile.first;
    for (long r = 1; r < tile.rows; r++)
        if (a.prefix[tile.first + r] > a.prefix[table_row]) table_row = tile.first + r;
    if (any_low < any_paged) a.find_slots(table_row, base + any_low, base + any_paged, slots + any_low);
    for (long p = any_low; p < any_paged; p++) {
        keys[p] = a.row_of<T>(a.cache.keys, slots[p], part.first_head);
        values[p] = a.row_of<T>(a.cache.values, slots[p], part.first_head);
        coming[p] = (const char*)keys[p], coming[SPLIT + p] = (const char*)values[p];
    }
    const long left = part.goes_on ? a.prefix[table_row] - base - SPLIT : 0, more = left < AHEAD ? left : AHEAD;
    if (more > 0) a.find_slots(table_row, base + SPLIT, base + SPLIT + more, slots + SPLIT);
    for (long p = 0; p < more; p++)
        coming[2 * SPLIT + p] = (const char*)a.row_of<T>(a.cache.keys, slots[SPLIT + p], part.first_head);
    const auto rows_after = [&](long at, long count) {
        return NextRows{coming + at + AHEAD, count, span * D * (long)sizeof(T)};
    };

    // A block's keys; `held` are their slots, -1 for a column that no row may read.
    const T* columns[NT];
    float scales[NT];
    long held[NT];
    auto hold = [&](long h, long block, long from, long to, const long* from_slots) {  // positions [from, to) have these slots
        for (long j = 0; j < NT; j++) {
            const long at = block + j, p = at < from ? from : at < to ? at : to - 1, slot = from_slots[p];
            columns[j] = a.row_of<T>(a.cache.keys, slot, part.first_head + h);
            if (a.cache.key_scales) scales[j] = a.cache.key_scales[slot * a.kv_heads + part.first_head + h];
            held[j] = p == at ? slot : -1;
        }
    };
    auto score = [&](long h, long first, long rows, long block, NextRows* next) {  // against the keys held
        score_keys(s.q + (h * heads + first * G) * D, rows * G, D, columns, scales, s.panel,
                   scores(h) + first * G * SCORES + block, SCORES, next);
    };
    // A block that the rows do not all read from equal slots. The last row comes first: in a chain its keys include the
    // keys of all rows before it. Neighbours with the same keys are scored together; a row drops keys that it does not see.
    auto score_apart = [&](long h, long block) {
        for (long j = 0; j < NT; j++) held[j] = -1;
        long end = 0;  // rows from here on have their scores, or need none
        for (long r = tile.rows - 1; r >= 0; r--) {
            const long from = low[r] > block ? low[r] : block, to = high[r] < block + NT ? high[r] : block + NT;
            if (from >= to) continue;
            long own[SPLIT];
            a.find_slots(tile.first + r, base + from, base + to, own + from);
            if (equal(own + from, held + from - block, to - from)) continue;
            if (r + 1 < end) score(h, r + 1, end - r - 1, block, nullptr);
            end = r + 1;
            const bool in_table = base + to <= a.prefix[tile.first + r];
            in_table ? hold(h, block, any_low, any_paged, slots) : hold(h, block, from, to, own);
        }
        if (end > 0) score(h, 0, end, block, nullptr);
    };
    auto scale_weights = [&](long h, long first, long rows, long from, long to, const long* from_slots) {  // by their values'
        if (!a.cache.value_scales) return;
        float by[SPLIT];
        for (long p = from; p < to; p++)
            by[p] = a.cache.value_scales[from_slots[p] * a.kv_heads + part.first_head + h];
        for (long g = first * G; g < (first + rows) * G; g++)
            for (long p = from; p < to; p++) scores(h)[g * SCORES + p] *= by[p];
    };
    auto own_values = [&](long r, long from, long to, bool resume) {
        long own[SPLIT];
        const T* rows[SPLIT];
        a.find_slots(tile.first + r, base + from, base + to, own + from);
        for (long h = 0; h < span; h++) {
            for (long p = from; p < to; p++) rows[p] = a.row_of<T>(a.cache.values, own[p], part.first_head + h);
            scale_weights(h, r, 1, from, to, own);
            weigh_values(scores(h) + r * G * SCORES, SCORES, G, D, rows, from, to, s.tail, result(h) + r * G * stride, stride,
                         resume, nullptr);
        }
    };

    for (long block = 0; block < SPLIT; block += NT) {
        NextRows next = rows_after(block, NT);
        for (long h = 0; h < span; h++) {
            if (block < shared_low || block >= shared_high) {
                score_apart(h, block);
                continue;
            }
            hold(h, block, block, block + NT, slots);
            score(h, 0, tile.rows, block, &next);
        }
    }

    // Row after row, so that the processor works on several rows at a time.
    const auto each_row = [&](auto use) {
        for (long h = 0; h < span; h++)
            for (long r = 0; r < tile.rows; r++)
                for (long g = r * G; low[r] < high[r] && g < (r + 1) * G; g++)
                    use(scores(h) + g * SCORES, low[r], high[r], result(h) + g * stride + D);
    };
    each_row([&a](float* s, long from, long to, float* state) {
        if (a.softcap != 0) cap_row(s + from, to - from, a.softcap);
        state[0] = largest_score(s, from, to);
    });
    each_row([](float* s, long from, long to, float* state) { state[1] = weights_of_scores(s, from, to, state[0]); });

    const bool shared = shared_low < shared_high;
    bool before = false;
    for (long r = 0; shared && r < tile.rows; r++) before |= low[r] < shared_low;
    for (long r = 0; before && r < tile.rows; r++) own_values(r, low[r], shared_low, false);
    for (long h = 0; h < span; h++) scale_weights(h, 0, tile.rows, shared_low, shared_high, slots);
    const long chunk = heads > FEW_ROWS ? SPLIT : CHUNK;  // many rows are bound by arithmetic: their sums stay in registers
    for (long from = shared_low, to; from < shared_high; from = to) {
        to = from + chunk < shared_high ? from + chunk : shared_high;
        NextRows next = rows_after(SPLIT + from, chunk);
        for (long h = 0; h < span; h++) {
            const T* rows[SPLIT];
            for (long p = from; p < to; p++) rows[p] = values[p] + h * D;
            weigh_values(scores(h), SCORES, heads, D, rows, from, to, s.tail, result(h), stride, before || from > shared_low, &next);
        }
    }
    for (long r = 0; r < tile.rows; r++) {
        const long from = shared ? shared_high : low[r];
        if (from < high[r]) own_values(r, from, high[r], shared);
    }
}

void write_tile(const Attention& a, Tile tile, long head, const float* state, float* out) {
    const long G = a.group(), D = a.dim;
    for (long r = 0; r < tile.rows; r++)
        for (long g = 0; g < G; g++, state += D + 2) {
            float* o = out + ((tile.first + r) * a.q_heads + head * G + g) * D;
            for (long i = 0; i < D; i++) o[i] = state[i] / state[D + 1];
        }
}

// Merges one split's result for every row of the tile that sees it.
void merge_tile(const Attention& a, Tile tile, long split, const float* result, float* state) {
    const long G = a.group(), stride = a.dim + 2;
    for (long r = 0; r < tile.rows; r++) {
        const long begin = a.begin(tile.first + r), end = a.end(tile.first + r);
        if (split < begin / SPLIT || split * SPLIT >= end) continue;
        for (long g = r * G; g < (r + 1) * G; g++) {
            if (split == begin / SPLIT)
                memcpy(state + g * stride, result + g * stride, stride * sizeof(float));
            else
                merge(state + g * stride, result + g * stride, a.dim);
        }
    }
}

template <class T>
int attend(Attention& a, float* out, int threads) {
    const long G = a.group(), D = a.dim, stride = D + 2;
    const long most_rows = TILE_ROWS / G > 1 ? TILE_ROWS / G : 1;
    Tile* tiles = (Tile*)malloc(a.rows * sizeof(Tile));
    if (!tiles) return 1;
    long num_tiles = 0, largest = 0, work = 0, first_split = INT64_MAX, end_split = 0;
    for (long row = 0; row < a.rows; row++) {
        const bool joins = num_tiles && a.sequence[row] == a.sequence[row - 1] && tiles[num_tiles - 1].rows < most_rows;
        if (joins)
            tiles[num_tiles - 1].rows++;
        else
            tiles[num_tiles++] = {row, 1};
        if (tiles[num_tiles - 1].rows > largest) largest = tiles[num_tiles - 1].rows;
        const long first = a.begin(row) / SPLIT, end = (a.end(row) + SPLIT - 1) / SPLIT;
        first_split = first < first_split ? first : first_split;
        end_split = end > end_split ? end : end_split;
        work += (a.end(row) - a.begin(row)) * a.q_heads * D;
    }
    if (work < SERIAL) threads = 1;
    // With enough tiles, an item is a tile with all its splits. Else the splits are items too and are merged afterwards, by
    // one function in one order. With enough items either way, an item takes as many heads as its scores have room for.
    const long splits = end_split - first_split, heads = largest * G, size = heads * stride;  // a split's result
    const bool deal = threads > 1 && splits > 1 && num_tiles * a.kv_heads < 4 * threads;
    long span = threads == 1 || num_tiles * (deal ? splits : 1) >= 2 * threads ? a.kv_heads : 1;
    while (span > 1 && (a.kv_heads % span || span * heads > MOST_SCORES)) span--;
    const long parts = a.kv_heads / span, num_items = num_tiles * parts;

    const long per_thread = span * heads * (D + SCORES) + D * NT + SPLIT * NT + 2 * span * size + 64;
    const long dealt = deal ? num_tiles * a.kv_heads * splits * size : 0;
    float* memory = (float*)malloc((threads * per_thread + dealt) * sizeof(float));
    if (!memory) {
        free(tiles);
        return 1;
    }
    auto partial = [&](long tile, long head, long split) {
        return memory + threads * per_thread + ((tile * a.kv_heads + head) * splits + split - first_split) * size;
    };
    auto scratch = [&](int worker) {
        float* at = memory + worker * per_thread;
        Scratch s;
        s.q = at, at += span * heads * D;
        s.scores = at, at += span * heads * SCORES;
        s.panel = at, at += D * NT;
        s.tail = at, at += SPLIT * NT;
        s.results = at, at += span * size;
        s.state = at;
        return s;
    };
    auto seen = [&](Tile tile, long split) {
        for (long r = tile.first; r < tile.first + tile.rows; r++)
            if (split >= a.begin(r) / SPLIT && split * SPLIT < a.end(r)) return true;
        return false;
    };

    // One claim takes neighbouring splits: the keys prefetched at a split's end are then the thread's own.
    const long run = claim_size(num_items * splits, threads), claims = (splits + run - 1) / run;
    if (deal)
        parallel(num_items * claims, threads, [&](long item, int worker) {
            const long tile = item / parts / claims, head = item % parts * span;
            const long from = first_split + item / parts % claims * run, to = from + run < end_split ? from + run : end_split;
            for (long split = from; split < to; split++)
                if (seen(tiles[tile], split))
                    attend_split<T>(a, {tiles[tile], head, span, split, partial(tile, head, split), splits * size, split + 1 < to},
                                    scratch(worker));
        });
    parallel(num_items, deal && a.rows * a.q_heads * D * splits < SERIAL ? 1 : threads, [&](long item, int worker) {
        const long index = item / parts, first_head = item % parts * span;
        const Tile tile = tiles[index];
        const Scratch s = scratch(worker);
        for (long split = first_split; split < end_split; split++) {
            if (!seen(tile, split)) continue;
            if (!deal) attend_split<T>(a, {tile, first_head, span, split, s.results, size, split + 1 < end_split}, s);
            for (long h = 0; h < span; h++)
                merge_tile(a, tile, split, deal ? partial(index, first_head + h, split) : s.results + h * size,
                           s.state + h * size);
        }
        for (long h = 0; h < span; h++) write_tile(a, tile, first_head + h, s.state + h * size, out);
    });
    free(memory);
    free(tiles);
    return a.bad_slot ? 2 : 0;
}

int attention(const Plan& plan, const Heads& h, const float* q, const Cache& cache, float* out, long window, int threads) {
    if (!plan.rows) return 0;
    Attention a{plan, q, cache, h.q_heads, h.kv_heads, h.dim, h.num_slots, window, h.scale, h.softcap, false};
    return with_stored(cache, [&](auto type) { return attend<decltype(type)>(a, out, threads); });
}

}  // namespace
