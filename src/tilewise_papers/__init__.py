"""The papers, executable: attention algorithms as programs on a machine that counts every number moved between memories.

machine     levels of memory, tiles, counts           devices   facts of real machines
standard    Algorithms 0 and 3 (FlashAttention)       flash1    Algorithms 1, 2, 4 and 5
flash2      Algorithms 1 and 2 of FlashAttention-2    warps     Figure 3 of FlashAttention-2
split       split keys and merge
nested      tiles within tiles, any number of levels
blocks      the paper's blocks, and the largest       head      one head, as every program takes it
report      every algorithm at one setting, predicted times
tables      the report as text                        plots     sweeps

docs        writes docs/io.md and its plots, run as a module

traffic     the counts beside a GPU's counters        evidence  the papers' claims beside results: writes docs/evidence.md
pathfinder  Path-X, trained and tested

No call of attention needs any of it. The counted machine imports nothing of tilewise; what measures or trains calls tilewise, bench
and examples, and runs in a checkout. Of tilewise only the command line imports it.
"""
