"""Facts of real machines, from their data sheets: what the counts are compared with.

Capacities of the faster levels are those of one core (an SM, a CPU core); bandwidths and rates are those of the whole
machine. A predicted time is therefore a bound, not a forecast: no kernel reaches every peak at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilewise_papers.machine import Level, with_capacity

KIB, GIB = 2**10, 2**30


@dataclass(frozen=True)
class Device:
    """levels: slow to fast. cores: how many work items run at once. word: bytes of a number in attention there.

    matmul_flops: products a second. other_flops: other operations a second, at the rate of plain arithmetic (exp is slower).
    """

    name: str
    levels: tuple[Level, ...]
    cores: int
    matmul_flops: float
    other_flops: float
    word: int
    source: str

    @property
    def sram_elements(self) -> int:
        """M of the papers, in words."""
        return int(self.levels[1].bytes) // self.word

    def with_sram(self, size: int) -> Device:
        """The same device with another capacity of its second level."""
        return replace(self, levels=with_capacity(self.levels, 1, size))


DEVICES = {
    device.name: device
    for device in (
        # Shared memory bandwidth: 128 bytes a clock an SM, at 1.41 GHz.
        Device(
            "a100",
            (Level("HBM", 40 * GIB, 1.555e12), Level("SRAM", 192 * KIB, 19.5e12), Level("registers", 256 * KIB)),
            cores=108,
            matmul_flops=312e12,
            other_flops=19.5e12,
            word=2,
            source="A100 40 GB SXM: data sheet; 192 KiB of L1 and shared memory an SM, as the FlashAttention paper has it",
        ),
        # 128 bytes a clock an SM at 1.98 GHz.
        Device(
            "h200",
            (Level("HBM", 141e9, 4.8e12), Level("SRAM", 228 * KIB, 33.4e12), Level("registers", 256 * KIB)),
            cores=132,
            matmul_flops=989e12,
            other_flops=67e12,
            word=2,
            source="H200 SXM: data sheet, dense bf16; 228 KiB of shared memory an SM",
        ),
        # DRAM and fp32 rates as measured on such a machine; the caches' bandwidth is 64 bytes a clock a core at 4 GHz.
        Device(
            "cpu",
            (Level("DRAM", 8 * GIB, 48e9), Level("L2", 1024 * KIB, 512e9), Level("L1", 48 * KIB)),
            cores=2,
            matmul_flops=540e9,
            other_flops=270e9,
            word=4,
            source="two cores with AVX-512 (48 KiB L1 and 1 MiB L2 each), fp32; copy and FMA rates measured",
        ),
    )
}


def device(name: str) -> Device:
    """The device of that name.

    Raises ValueError, listing the known ones.
    """
    if name not in DEVICES:
        raise ValueError(f"unknown device {name!r}; known are {', '.join(DEVICES)}")
    return DEVICES[name]


def parse_bytes(text: str) -> int:
    """192KiB, 1.5MiB, 100kB, 4096 -> bytes.

    Raises ValueError for anything else.
    """
    units = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
    number = text.strip().rstrip("BbIiKkMmGg ")
    unit = text.strip()[len(number) :].strip().upper()
    try:
        size = float(number) * units[unit]
    except (ValueError, KeyError):
        raise ValueError(f"{text!r} is no size; write it like 192KiB, 1MiB or 65536") from None
    if not 0 < size < float("inf"):
        raise ValueError(f"{text!r} is no size of a memory; it has to be above 0")
    return int(size)
