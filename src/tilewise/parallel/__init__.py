"""One attention over several memories: q, k and v are sharded over ranks along the sequence.

- :mod:`tilewise.parallel.layout`: who holds which positions.
- :mod:`tilewise.parallel.balance`: positions dealt so that the work is equal for any mask and few keys travel.
- :mod:`tilewise.parallel.exchange`: how ranks talk, over torch.distributed or simulated in one process.
- :mod:`tilewise.parallel.board`: what ranks of one machine compare, in memory that they share.
- :mod:`tilewise.parallel.symmetric`: the same by copy engines, for ranks that reach each other's memory.
- :mod:`tilewise.parallel.route`: which keys travel, and to whom.
- :mod:`tilewise.parallel.moves`: where their numbers lie in what is sent, received and put together.
- :mod:`tilewise.parallel.messages`: these keys as ranks send them, and the sum of their gradients.
- :mod:`tilewise.parallel.gathered`: a scheme, gathering K and V.
- :mod:`tilewise.parallel.joined`: all of a rank's queries in one call of it, for documents.
- :mod:`tilewise.parallel.ring`: a scheme, the keys of one rank after the other.
- :mod:`tilewise.parallel.heads`: a scheme, all rows of some heads on each rank.
- :mod:`tilewise.parallel.cost`, :mod:`tilewise.parallel.plan`: what each scheme costs, and which one is taken.
- :mod:`tilewise.parallel.calls`: a call, from what ranks agree on to a rank's part of it.
- :mod:`tilewise.parallel.operators`: its gradient, and the operators of compiled graphs.
- :mod:`tilewise.parallel.context`: what users hold.
- :mod:`tilewise.parallel.dtensors`: DTensors, which need no ``parallel=``.
- :mod:`tilewise.parallel.agreement`: what ranks compare before bytes move.
"""

from tilewise.parallel.balance import balanced
from tilewise.parallel.context import ContextParallel, context_parallel
from tilewise.parallel.exchange import simulate
from tilewise.parallel.layout import Layout, contiguous, zigzag

__all__ = ["ContextParallel", "Layout", "balanced", "context_parallel", "contiguous", "simulate", "zigzag"]
