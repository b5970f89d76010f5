"""Faults that show in machine code, of listings as ``cuobjdump -sass`` prints them."""

import pytest

from tilewise.backends.triton.host.machine_code import instructions, serialised, unset_registers
from tilewise.backends.triton.paging import NARROWEST_VALUES, value_pieces
from tilewise.backends.triton.tiles import Tiles


def listing(*lines: str) -> str:
    """A listing with an instruction every 16 bytes, each beside its encoding."""
    rows = (
        f"        /*{16 * n:04x}*/              {line} ;     /* 0x0000000000000949 */" for n, line in enumerate(lines)
    )
    return "\n".join(rows)


BASE = "USHF.R.U32.HI UR4, URZ, 0x4, UR12"
NEXT = "UIADD3 UR6, UP0, UR4, 0x20, URZ"
PRODUCT = "HGMMA.64x16x16.F32 R96, R24, gdesc[UR4].tnspB, R96, gsb0"
START = "S2UR UR12, SR_CgaCtaId"


@pytest.mark.parametrize(
    ("lines", "faults"),
    [
        ((START, BASE, NEXT, "EXIT"), []),
        ((START, NEXT, "EXIT"), [NEXT]),
        # The way that skips the base; and a loop, which is entered with one.
        ((START, "@!P0 BRA 0x30", BASE, NEXT, "EXIT"), [NEXT]),
        ((START, BASE, NEXT, "@P0 BRA 0x20", "EXIT"), []),
        ((START, "BRA 0x30", NEXT, BASE, "EXIT"), []),  # what nothing reaches
        # Registers 6 and 7 are the descriptor of the second matrix, 4 and 5 of a first one that lies in registers.
        ((START, "ULDC.64 UR6, c[0x0][0x208]", PRODUCT, "EXIT"), []),
        ((START, BASE, PRODUCT, "EXIT"), [PRODUCT]),
        ((START, BASE, "UIMAD.WIDE.U32 UR6, UR12, UR4, URZ", "EXIT"), []),  # of single registers
        ((START, "MOV R5, UR9", "R2UR UR9, R5", "EXIT"), []),  # saved for nobody
    ],
)
def test_reads_of_uniform_registers_that_no_way_has_written_are_found(lines, faults):
    assert len(instructions(listing(*lines))) == len(lines)
    assert unset_registers(listing(*lines)) == faults


def test_products_that_wait_for_each_other_are_found():
    wait = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
    assert serialised(listing(PRODUCT, wait, PRODUCT, wait))
    assert not serialised(listing(PRODUCT, PRODUCT, wait))
    assert unset_registers("") == []


def test_values_of_a_quantised_cache_have_no_tile_of_16_pairs():
    for pairs in range(1, 257):
        found = value_pieces(pairs, Tiles(64, 64, 4, 3))
        assert sum(columns for _, columns, _ in found) == pairs
        assert min(wide for _, _, wide in found) >= NARROWEST_VALUES
