"""Pathfinder and Path-X, the long-range task of the FlashAttention paper: images, a model, its training, a ladder of sizes."""
