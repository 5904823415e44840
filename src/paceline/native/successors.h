// Tables of successors: the 8 likeliest tokens behind a context, its last token or its last two, filled from the likeliest
// tokens at every verified row. `paceline.drafters.lookup.successors` owns the memory and documents the rule.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace successors {

constexpr int WIDTH = 8;  // successors of a context
constexpr int WAYS = 4;   // entries of a set
constexpr int32_t ANY = -1;  // in place of the token before the last: the context is one token

struct Entry {  // successors.ENTRY
    int32_t before, last;
    uint32_t stamp;  // the table's clock when it was written last; 0: unused
    int32_t ids[WIDTH];  // likeliest first; -1 behind the last
    uint8_t probs[WIDTH];  // in 1 / 255
};

struct Table {  // successors.TableView
    Entry* entries;
    int64_t sets, used, clock;  // sets: a power of two
};

inline Entry* set_of(const Table& table, int32_t before, int32_t last) {
    uint64_t hash = ((uint64_t)(uint32_t)before << 32 | (uint32_t)last) * 0x9E3779B97F4A7C15ull;
    return table.entries + (int64_t)((hash ^ hash >> 32) & (uint64_t)(table.sets - 1)) * WAYS;
}

inline const Entry* find(const Table* table, int32_t before, int32_t last) {
    if (!table || !table->sets) return nullptr;
    const Entry* set = set_of(*table, before, last);
    for (int way = 0; way < WAYS; way++)
        if (set[way].stamp && set[way].last == last && set[way].before == before) return set + way;
    return nullptr;
}

struct Successor {
    int32_t id;
    int weight;
};

// Mixes new successors half and half with those that stand in an entry; of equals, new ones stand first.
inline void mix(Entry& entry, const int32_t* ids, const float* probs, bool is_new) {
    Successor merged[2 * WIDTH];
    int count = 0;
    for (int i = 0; i < WIDTH && ids[i] >= 0; i++) merged[count++] = {ids[i], (int)std::lrintf(255.0f * probs[i])};
    if (!is_new) {
        const int fresh = count;
        bool known[2 * WIDTH] = {};
        for (int i = 0; i < WIDTH && entry.ids[i] >= 0; i++) {
            int at = 0;
            while (at < fresh && merged[at].id != entry.ids[i]) at++;
            if (at == fresh)
                merged[count++] = {entry.ids[i], (entry.probs[i] + 1) / 2};
            else
                merged[at].weight = (merged[at].weight + entry.probs[i] + 1) / 2, known[at] = true;
        }
        for (int at = 0; at < fresh; at++)
            if (!known[at]) merged[at].weight = (merged[at].weight + 1) / 2;
        std::stable_sort(merged, merged + count, [](const Successor& a, const Successor& b) { return a.weight > b.weight; });
    }
    for (int i = 0; i < WIDTH; i++) {
        entry.ids[i] = i < count ? merged[i].id : -1;
        entry.probs[i] = i < count ? (uint8_t)merged[i].weight : 0;
    }
}

// Writes what follows a context. An entry that is new begins as a copy of `base`'s, if that has one; in a full set the entry
// that was written longest ago is replaced.
inline void learn(Table& table, const Table* base, int32_t before, int32_t last, const int32_t* ids, const float* probs) {
    if (!table.sets || ids[0] < 0) return;
    Entry *set = set_of(table, before, last), *place = set;
    bool found = false;
    for (int way = 0; way < WAYS && !found; way++) {
        found = set[way].stamp && set[way].last == last && set[way].before == before;
        if (found || set[way].stamp < place->stamp) place = set + way;
    }
    bool is_new = !found;
    if (!found) {
        table.used += !place->stamp;
        const Entry* known = find(base, before, last);
        if (known) *place = *known, is_new = false;
        place->before = before, place->last = last;
    }
    mix(*place, ids, probs, is_new);
    place->stamp = (uint32_t)(table.clock++ % UINT32_MAX) + 1;
}

// Moves all entries of a table into a larger one.
inline void move_all(const Table& from, Table& to) {
    for (int64_t i = 0; i < from.sets * WAYS; i++) {
        const Entry& entry = from.entries[i];
        if (!entry.stamp) continue;
        Entry *set = set_of(to, entry.before, entry.last), *place = set;
        for (int way = 0; way < WAYS; way++)
            if (set[way].stamp < place->stamp) place = set + way;
        to.used += !place->stamp;
        if (place->stamp < entry.stamp) *place = entry;
    }
    to.clock = from.clock;
}

// The verified rows of a step: `core.feedback.Feedback`.
struct Rows {  // recycling.RowsView
    const int32_t *tokens, *parents, *ids;  // ids: `stride` to the next row
    const float* probs;
    int64_t stride, num_sequences;
};

}  // namespace successors
