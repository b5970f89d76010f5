// Gradients of the tensors that scores read (docs/algorithm.md, (17)): one row of dz at a time. An index that does
// not move along the row takes the row's sum; others take element by element, in order.
#pragma once
#include "program.h"

namespace tw::TW_ISA {

// Sum, not necessarily a whole vector of elements, of dz · slope over pairs with P > 0: where dz is 0 nothing is added,
// so that a slope that is infinite at a hidden pair gives nothing.
template <class T>
TW_INLINE double row_sum(const T *dz, const T *slope, int64_t begin, int64_t end) {
  double total[8] = {};
  for (int64_t n = begin; n < end; ++n) total[n % 8] += dz[n] == T(0) ? 0.0 : double(dz[n] * slope[n]);
  return ((total[0] + total[1]) + (total[2] + total[3])) + ((total[4] + total[5]) + (total[6] + total[7]));
}

template <class T, class Sum>
void add_row(const Machine &machine, const TwLeafGradient &g, Sum *sums, const Place &at, int64_t begin, int64_t end,
             const T *dz) {
  const T *slope = machine.at<T>(g.slope);
  bool moving = false;
  for (int d = 0; d < g.dims; ++d) moving |= g.mode[d] != TW_UNIFORM;
  if (!moving) {
    sums[machine.fixed_offset(g, g.size, g.stride, begin)] += Sum(row_sum(dz, slope, begin, end));
    return;
  }
  int64_t offset[kMaxTileN];
  if (const int64_t consecutive = machine.offsets(g, g.size, g.stride, at, begin, end, offset)) {
    Sum *row = sums + offset[begin];
    for (int64_t n = 0; n < consecutive; ++n) row[n] += dz[begin + n] == T(0) ? Sum(0) : Sum(dz[begin + n] * slope[begin + n]);
    for (int64_t n = begin + consecutive; n < end; ++n)
      if (dz[n] != T(0)) row[consecutive - 1] += Sum(dz[n] * slope[n]);
    return;
  }
  for (int64_t n = begin; n < end; ++n)
    if (dz[n] != T(0)) sums[offset[n]] += Sum(dz[n] * slope[n]);
}

template <class T>
void add_leaf_gradient(const Machine &machine, const TwLeafGradient &g, int64_t group, const Place &at, int64_t begin,
                       int64_t end, const T *dz) {
  if (g.wide) add_row(machine, g, (double *)g.data + group * g.group_stride, at, begin, end, dz);
  else add_row(machine, g, (T *)g.data + group * g.group_stride, at, begin, end, dz);
}

}  // namespace tw::TW_ISA
