"""One attention over several memories: q, k and v are sharded over ranks along the sequence.

The path of a call, forward; the backward takes the last three steps:

- :mod:`tilewise.parallel.context`: the object that users hold. :mod:`tilewise.parallel.dtensors` makes it for DTensors.
- :mod:`tilewise.parallel.calls`: the steps of a call, and the plans that a group keeps.
- :mod:`tilewise.parallel.agreement`: ranks compare their calls before bytes move.
- :mod:`tilewise.parallel.plan`, :mod:`tilewise.parallel.cost`: the scheme, by its cost, and the rank's part by that scheme.
- :mod:`tilewise.parallel.operators`: the gradient of a call, and the operators of compiled graphs.
- :mod:`tilewise.parallel.heads`, :mod:`tilewise.parallel.gathered`: the schemes. One exchanges rows for heads, the other gathers K and V;
  together they are the third one.
- :mod:`tilewise.parallel.exchange`: the collectives, over torch.distributed or simulated in one process.

What the scheme that gathers K and V needs:

- :mod:`tilewise.parallel.route`: the keys that are sent, and their receivers.
- :mod:`tilewise.parallel.joined`: all queries of a rank in one call, for documents.
- :mod:`tilewise.parallel.moves`: the places of keys in buffers that are sent, received and assembled.
- :mod:`tilewise.parallel.messages`: how such buffers are filled, and gradients summed.

Below the collectives:

- :mod:`tilewise.parallel.board`: numbers that ranks of one machine compare in shared memory.
- :mod:`tilewise.parallel.symmetric`: exchanges by copy engines, for GPUs that reach each other's memory.

Who holds which positions:

- :mod:`tilewise.parallel.layout`: layouts of a sequence.
- :mod:`tilewise.parallel.balance`: layouts with equal work under any mask and few keys to send.
"""

from tilewise.parallel.balance import balanced
from tilewise.parallel.context import ContextParallel, context_parallel
from tilewise.parallel.exchange import simulate
from tilewise.parallel.layout import Layout, contiguous, zigzag

__all__ = ["ContextParallel", "Layout", "balanced", "context_parallel", "contiguous", "simulate", "zigzag"]
