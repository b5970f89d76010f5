"""The choice of a forward over pages, and the reasons against calls that have none. Nothing here imports the DSL."""

from __future__ import annotations

from tilewise.backends.hopper.config import DTYPES, ELEMENT_BYTES, LONG, band_of, strides_addressable
from tilewise.backends.hopper.forward.config import Config
from tilewise.backends.hopper.forward.reasons import reasons as forward_reasons
from tilewise.backends.hopper.forward.tiles import PAGE_ROWS, PAGED_TILES, one_order
from tilewise.backends.hopper.latent import config as latent_config
from tilewise.backends.hopper.latent.config import LatentConfig
from tilewise.problem import Problem, TensorFacts


def reasons(problem: Problem, decoding: bool = False) -> list[str]:
    """Every reason why no forward over pages computes a problem, whatever machine it is; ``decoding``: a kernel of its own has its
    head dims."""
    found = forward_reasons(problem, latent_config.WIDTH if problem.latent else None)
    found += [] if decoding else _width_reasons(problem)
    found += _reasons_of_8_bits(problem) if problem.quantised else []
    # A part of a key block comes from one page, in one box.
    if part_rows(problem) is None:
        found.append(f"page_size {problem.page_size} is not a multiple of {min(_sizes_of_parts(problem))}")
    # The kernel reads the table at one place at least.
    if not problem.capacity or not problem.k.shape[0]:
        found.append("a cache without room for a key")
    if problem.spec.score is not None and not decoding:
        found.append("pages with a score")
    return found + _mask_reasons(problem) + pool_reasons(problem)


LARGE_TILE = 128  # queries (docs/decisions.md#triton-pages)
LATENT_TILE = 64  # rows, and keys, of a tile of the kernel for a v that is a view of k
# The fewest query heads of a sequence, and the fewest tiles of a call, with which that kernel is faster than Triton (H200, 11-22): 84.0 µs
# instead of 139 at 32 × 8,192 with 16 heads, 27.6 instead of 31.5 with 512 tiles. 128 tiles gain nothing: 23.3 and 23.6, or 23.8 instead of
# 20.3 in an earlier version. In 8 bits, nothing below 4,096 tiles was measured.
LATENT_ROWS, LATENT_TILES = 16, {False: 512, True: 4096}  # by whether the cache is in 8 bits


def idles(problem: Problem, cores: int) -> bool:
    """Whether tiles of LARGE_TILE queries of a head would leave a quarter of their rows, or of the multiprocessors, idle.

    A deterministic call counts one sequence, whatever the rest of the batch is; the host does not know the queries of a packed one, of
    which the mean counts. The kernel for a v that is a view of k has tiles of 64 rows, and splits keys.
    """
    queries = -(-problem.seqlen_q // max(problem.batch, 1)) if problem.packed else problem.seqlen_q
    if problem.latent:
        rows = queries * problem.group
        tiles = problem.heads_k * problem.batch * -(-rows // LATENT_TILE) * -(-problem.capacity // LATENT_TILE)
        return rows < LATENT_ROWS or tiles < LATENT_TILES[problem.quantised]
    deterministic = problem.spec.deterministic
    if problem.packed and deterministic:
        return True
    heads = problem.heads_q * (1 if deterministic else problem.batch)
    tiles = heads * -(-queries // LARGE_TILE)
    return 4 * heads * queries < 3 * LARGE_TILE * max(tiles, cores)


def _reasons_of_8_bits(problem: Problem) -> list[str]:
    if not problem.latent:
        return ["a cache in 8 bits: its kernels over pages take 16 bits, but where v lies in the memory of k"]
    if any(len(problem.extras[n].shape) == 3 for n in problem.spec.scale_slots):
        return [
            "a cache in 8 bits with a scale for each token: its kernel takes one for all, for a head or for a sequence and head"
        ]
    return []


def _width_reasons(problem: Problem) -> list[str]:
    dims, latent = (problem.head_dim, problem.head_dim_v), (latent_config.WIDTH, latent_config.WIDTH_V)
    if problem.latent:
        return [] if dims == latent else [f"v in the memory of k with head dims {dims}: its kernel takes {latent}"]
    widest = max(width for width, _ in PAGED_TILES)
    return [f"pages with head_dim {max(dims)}, above {widest}"] if max(dims) > widest else []


def _mask_reasons(problem: Problem) -> list[str]:
    band = band_of(problem)
    if band is None or (band.start, band.stop) != (0, problem.capacity):
        return ["pages with a mask other than causal and window"]
    # Keys on both sides of a window are kept from the copy engine, if they lie in two parts of blocks (pages.box_of).
    last = 1 if band.hi is None else min(band.hi, 1)
    rows = part_rows(problem) or 0
    if band.lo is not None and last - band.lo < rows:
        return [f"pages with a window of {max(last - band.lo, 0)} keys, fewer than {rows}"]
    return []


def part_rows(problem: Problem) -> int | None:
    """The rows that one box brings: a part of a key block comes from one page."""
    if problem.latent and problem.capacity == problem.page_size:
        return latent_config.KEYS  # each sequence lies in one page: what a box has past its end are zeros
    return next((rows for rows in _sizes_of_parts(problem) if problem.page_size % rows == 0), None)


def _sizes_of_parts(problem: Problem) -> tuple[int, ...]:
    # A latent key tile lies in one page.
    return (latent_config.KEYS,) if problem.latent else PAGE_ROWS


def pool_reasons(problem: Problem) -> list[str]:
    """Every reason why the copy engine cannot bring keys and values from their pools."""
    pools = problem.k, problem.v
    # A pool is not copied to where the copy engine could address it.
    if any(not _addressable(x) for x in pools):
        return ["pages whose rows do not lie at multiples of 16 bytes, in pages that are multiples of rows apart"]
    # The boxes of a block serve its K and its V.
    between = [page_rows(x) for x in pools]
    if between[0] != between[1]:
        return [f"pages that are {between[0]} rows apart in k and {between[1]} in v"]
    rows = problem.k.shape[0] * between[0]
    return [f"a pool of {rows} rows, {LONG} or more"] if rows >= LONG else []


def _addressable(pool: TensorFacts) -> bool:
    """Whether the copy engine can address a pool of pages as one tensor of rows (:mod:`packed`)."""
    rows = strides_addressable(
        pool.shape, [n * pool.dtype.itemsize // ELEMENT_BYTES for n in pool.stride[:-1]] + [pool.stride[-1]]
    )
    return rows and pool.stride[1] > 0 and (pool.shape[0] < 2 or pool.stride[0] % pool.stride[1] == 0)


def page_rows(pool: TensorFacts) -> int:
    """How many rows of a pool ``(num_pages, page_size, heads, head_dim)`` lie between the beginnings of two pages."""
    # The stride of a single page says nothing.
    return pool.stride[0] // pool.stride[1] if pool.shape[0] > 1 else pool.shape[1]


def choose(problem: Problem) -> Config | LatentConfig:
    """The kernel for a problem that has no :func:`reasons` against it."""
    if problem.latent:
        return latent_config.choose(problem)
    wide, rows = max(problem.head_dim, problem.head_dim_v), part_rows(problem)
    tiles = next(tiles for (width, n), tiles in PAGED_TILES.items() if wide <= width and n == rows)
    tiles = one_order(tiles) if problem.spec.everywhere else tiles
    # Rows without an end have one far away.
    return Config(tiles, DTYPES[str(problem.dtype)], "band", packed=True, paged=rows)
