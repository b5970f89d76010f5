// One step of every instruction of tile_registers.h, compiled twice: on the hardware and on its emulation (tiles.cpp).
#include "tile_step.h"

#include "tile_registers.h"

namespace tw::TW_ISA {

void step(const TileStep &in, float (&out)[16][16]) {
  tiles::Shapes shapes{};
  shapes.palette = 1;
  const int rows[] = {in.rows, in.rows, in.pairs}, bytes[] = {4 * in.columns, 4 * in.pairs, 4 * in.columns};
  for (int t = 0; t < 3; ++t) shapes.rows[t] = uint8_t(rows[t]), shapes.row_bytes[t] = uint16_t(bytes[t]);
  shapes.rows[3] = 16, shapes.row_bytes[3] = 64;
  tiles::configure(shapes);
  tiles::load<0>(in.c, 64), tiles::load<1>(in.a, 64), tiles::load<2>(in.b, 64);
  tiles::dot<0, 1, 2>();
  tiles::store<0>(out, 64);
  tiles::release();
}

}  // namespace tw::TW_ISA
