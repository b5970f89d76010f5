"""Scalar expressions over the indices of attention: the one language of masks, scores and their derivatives.

An expression is a tree over the symbols ``s`` (the score; ``ds`` is its tangent), ``b h i j`` (batch, query head, query, key; within the
sequence), ``off`` (``seqlen_k - seqlen_q``), ``seqlen_q`` and ``seqlen_k``, over numbers, and over *leaves*: tensors
read at an index. It can

- be traced from a Python function (:mod:`tilewise.expr.tracing`),
- print itself as text and be read back (:mod:`tilewise.expr.text` by way of ``reader``), so that an operator can carry it as a string,
- be walked over, and give up its numbers so that one kernel serves every value of them (:mod:`tilewise.expr.walk`),
- say whether its whole numbers fit the 32 bits in which GPUs compute them (:mod:`tilewise.expr.bounds`),
- be evaluated on tensors of indices, and differentiated with respect to the score or to one leaf
  (:mod:`tilewise.expr.meaning`).

:mod:`tilewise.expr.narrow` makes arithmetic of 8 and 16 bits wrap as torch's does, for functions that rely on it.

What a node may be is in :mod:`tilewise.expr.operations`. The other modules of tilewise use the names below.
"""

from tilewise.expr.bounds import LARGEST_NUMBER, beyond_32_bits
from tilewise.expr.meaning import broadcast_shape, clamp_index, constant, derivative, evaluate, rows, tangent
from tilewise.expr.narrow import wrapping
from tilewise.expr.operations import (
    NO_ENTRY,
    ONE,
    OPERATIONS,
    READS,
    WRONG_ENTRY,
    ZERO,
    Expr,
    Operation,
    apply,
    concrete,
    fitted_lookup,
    is_number,
    is_numpys,
    is_symbol,
    kind,
    lookup,
    number,
    refuse_unread,
    selected,
    symbol,
    tensor_kind,
)
from tilewise.expr.reader import read
from tilewise.expr.text import Expressions, numbered_through, parse, to_text
from tilewise.expr.tracing import trace
from tilewise.expr.walk import (
    abstract,
    children,
    depends_on,
    fold,
    indices,
    lookups,
    nodes,
    operations_of,
    same,
    selections,
    substitute,
)

__all__ = [
    "LARGEST_NUMBER",
    "NO_ENTRY",
    "ONE",
    "OPERATIONS",
    "READS",
    "WRONG_ENTRY",
    "ZERO",
    "Expr",
    "Expressions",
    "Operation",
    "abstract",
    "apply",
    "beyond_32_bits",
    "broadcast_shape",
    "children",
    "clamp_index",
    "concrete",
    "constant",
    "depends_on",
    "derivative",
    "evaluate",
    "fitted_lookup",
    "fold",
    "indices",
    "is_number",
    "is_numpys",
    "is_symbol",
    "kind",
    "lookup",
    "lookups",
    "nodes",
    "number",
    "numbered_through",
    "operations_of",
    "parse",
    "read",
    "refuse_unread",
    "rows",
    "same",
    "selected",
    "selections",
    "substitute",
    "symbol",
    "tangent",
    "tensor_kind",
    "to_text",
    "trace",
    "wrapping",
]
