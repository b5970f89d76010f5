"""Latent attention over pages or selected keys: keys of 576 columns, whose first 512 are the values, in shared memory once.

``config``, of selected keys ``selected``, chooses a kernel and says what it refuses, without the DSL. ``kernel`` has the roles of a CTA
and the launch; ``load`` brings queries and keys, ``convert`` keys of e4m3 numbers, ``gather`` selected ones, ``scores`` makes P of a key
tile, ``values`` adds P V and writes the output, after ``pair`` has merged that of two CTAs. ``tiles`` finds a CTA's rows and keys,
``storage`` lays out shared memory, ``params`` holds the numbers of a launch, ``parameters`` their order.
"""
