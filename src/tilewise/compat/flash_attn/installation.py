"""Standing in for flash-attn's three generations under their own names."""

from __future__ import annotations

from tilewise.compat import flash_attn as second
from tilewise.compat.flash_attn import bert_padding, cute, interface_3, private
from tilewise.compat.stand_in import StandIn, public, put_module

GENERATIONS = {
    2: StandIn("flash_attn", "flash-attn", second.__version__),
    3: StandIn("flash_attn_interface", "flash-attn-3", "3.0.0+tilewise"),
    4: StandIn("flash_attn.cute", "flash-attn-4", "4.0.0+tilewise"),
}


def install(generation: int) -> None:
    """Do the work of :func:`tilewise.compat.flash_attn.install_as_flash_attn`; once is enough."""
    if generation not in GENERATIONS:
        raise ValueError(f"install_as_flash_attn takes generation 2, 3 or 4, got {generation!r}")
    wanted = GENERATIONS[generation]
    if wanted.stands:
        return
    wanted.refuse_the_real_one("install_as_flash_attn", "tilewise.compat.flash_attn")
    version = {"__version__": wanted.version}
    if generation == 3:
        put_module(wanted.module, public(interface_3) | version)
    elif generation == 4:
        put_module(wanted.top, {}, package=True)
        put_module(wanted.module, public(cute) | version, package=True)
        put_module(f"{wanted.module}.interface", public(cute))
    else:
        put_module("flash_attn", public(second) | version, package=True)
        put_module("flash_attn.flash_attn_interface", public(second) | public(private))
        put_module("flash_attn.bert_padding", public(bert_padding))
    wanted.announce()
