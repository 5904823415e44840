// The rows of a pass (paceline.models.plan.PassPlan) and the shape of the layers' heads.

#pragma once

#include <cstdint>

namespace {

const long ABI = 13;  // library.ABI: raised whenever a structure or a signature changes

struct Plan {  // stack.PlanView
    const int32_t *positions, *slots, *sequence, *prefix, *reach, *path, *tables;
    int64_t rows, path_width, table_width, block_size;
};

struct Heads {  // stack.HeadsView
    const float *cos, *sin;  // (num_positions, dim / 2)
    int64_t q_heads, kv_heads, dim, num_positions, num_slots;
    int64_t whole_norm;  // norms of q and k take all heads as one
    float eps, scale, softcap;  // c: a score s becomes c tanh(s / c); 0: none
};

}  // namespace
