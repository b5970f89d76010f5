"""Decoding steps: a few queries a sequence, whose keys CTAs share, over pages or dense tensors.

``config`` has the kernels' sizes and ``choice`` says which calls get one, without the DSL. ``kernel`` has the roles of a CTA and the
launch; ``shares`` finds a CTA's part of all keys, ``load`` brings it, ``compute`` attends to it, ``merge`` brings together what several
CTAs have of a sequence. ``storage`` lays out shared memory, ``params`` holds the numbers of a launch, ``parameters`` their
order.
"""
