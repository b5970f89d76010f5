"""One attention over several memories: q, k and v are sharded over ranks along the sequence.

- :mod:`tilewise.parallel.layout`: who holds which positions.
- :mod:`tilewise.parallel.balance`: layouts with equal work under any mask and few keys to send.
- :mod:`tilewise.parallel.exchange`: the collectives, over torch.distributed or simulated in one process.
- :mod:`tilewise.parallel.board`: numbers that ranks of one machine compare in shared memory.
- :mod:`tilewise.parallel.symmetric`: exchanges by copy engines, for GPUs that reach each other's memory.
- :mod:`tilewise.parallel.route`: the keys that are sent, and their receivers.
- :mod:`tilewise.parallel.moves`: their places in buffers that are sent, received and assembled.
- :mod:`tilewise.parallel.messages`: K and V as messages, and the sum of their gradients.
- :mod:`tilewise.parallel.gathered`: the scheme that gathers K and V.
- :mod:`tilewise.parallel.joined`: all queries of a rank in one call of that scheme, for documents.
- :mod:`tilewise.parallel.heads`: the scheme that computes all rows of some heads on each rank.
- :mod:`tilewise.parallel.cost`, :mod:`tilewise.parallel.plan`: the cost of each scheme, and the choice.
- :mod:`tilewise.parallel.calls`: a call, from the agreement to a rank's part.
- :mod:`tilewise.parallel.operators`: its gradient, and the operators of compiled graphs.
- :mod:`tilewise.parallel.context`: the object that users hold.
- :mod:`tilewise.parallel.dtensors`: DTensors, which need no ``parallel=``.
- :mod:`tilewise.parallel.agreement`: the comparison before bytes move.
"""

from tilewise.parallel.balance import balanced
from tilewise.parallel.context import ContextParallel, context_parallel
from tilewise.parallel.exchange import simulate
from tilewise.parallel.layout import Layout, contiguous, zigzag

__all__ = ["ContextParallel", "Layout", "balanced", "context_parallel", "contiguous", "simulate", "zigzag"]
