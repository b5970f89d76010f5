"""Attention as papers before FlashAttention-2 order it: what its loops are measured against."""
