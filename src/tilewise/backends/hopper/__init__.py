"""Attention on Hopper GPUs (sm_90a): kernels in CuTe DSL, compiled ahead of time. It has not run on a GPU yet."""
