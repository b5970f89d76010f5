"""The backward's old names of the kit: this module goes when no file imports it."""

from tilewise.backends.hopper.kit.instructions import (  # noqa: F401
    await_count,
    both,
    choose,
    count_up,
    get_words,
    pack,
    put_words,
)
from tilewise.backends.hopper.kit.softmax import LOG2_E  # noqa: F401
from tilewise.backends.hopper.kit.softmax import softcap as soften  # noqa: F401
from tilewise.backends.hopper.kit.softmax import softcap_roughly as soften_roughly  # noqa: F401
from tilewise.backends.hopper.kit.tiles import begin_product as begin  # noqa: F401
from tilewise.backends.hopper.kit.tiles import column_of, constant_column, row_of, rows_columns  # noqa: F401
from tilewise.backends.hopper.kit.tiles import reduce_quad as over_quad  # noqa: F401
