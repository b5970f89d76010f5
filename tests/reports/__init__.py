"""Faults that users of this library or of another one have met: one file a theme, and in each case the right value."""
