"""Benchmarks of tilewise: one table of cases, its peers, the error rule, and the judge of every speed goal."""
