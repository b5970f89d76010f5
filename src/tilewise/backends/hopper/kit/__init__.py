"""The tools of every Hopper kernel; nothing here knows a pass.

``ring``: stages of shared memory and their barriers. ``tiles``: tiles for the copy engine, and where an accumulator's numbers lie
(``layout`` checks that). ``softmax``: a row's maximum, sum and finish; ``states``: two of these joined, in memory. ``schedule``: which
tile and which blocks, as pure functions; ``scheduler``: the loops over them. ``packed``: lookups among packed sequences. ``expression``,
``bits``, ``dropout``, ``slopes``, ``lines``: masks and scores of the user, a bit for each pair, dropped pairs, ALiBi, and biases by
distance, on a thread's registers. ``pair_bias``: a bias that each pair has of its own, through shared memory. ``operands``: operands in
registers. ``instructions``: PTX. ``params``, ``dtypes``, ``fake``: types and stand-ins for tensors.
"""
