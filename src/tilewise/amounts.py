"""Amounts as people read them: three digits and a unit that fits, never an exponent."""

from __future__ import annotations


def in_bytes(size: float) -> str:
    """Return ``size`` bytes with a binary unit: ``1536`` is ``1.5 KiB``."""
    return f"{size:.0f} bytes" if size < 1 << 10 else _scaled(size, 1 << 10, ("bytes", "KiB", "MiB", "GiB", "TiB"))


def in_flop(count: float) -> str:
    """Return ``count`` operations as text: ``34.4e9`` are ``34.4 GFLOP``."""
    return _scaled(count, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def _scaled(amount: float, step: int, units: tuple[str, ...]) -> str:
    """``amount`` over the largest power of ``step`` below it; 999.5 and more of a unit stay whole numbers, as 1,000 KiB do."""
    power = 0
    while amount >= step and power < len(units) - 1:
        amount, power = amount / step, power + 1
    return f"{amount:,.0f} {units[power]}" if amount >= 999.5 else f"{amount:.3g} {units[power]}"
