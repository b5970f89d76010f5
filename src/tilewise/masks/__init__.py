"""What kernels ask about masks: :mod:`tilewise.masks.facts`."""
