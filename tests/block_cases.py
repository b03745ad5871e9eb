"""Random calls of pull_blocks, copy_blocks and swap_blocks, drawn from random.Random or from hypothesis as in pull_cases.py."""
from __future__ import annotations

from dataclasses import dataclass, replace

from pull_cases import ITEM_BYTES, Draw, Side
from reference import PullBlocks


@dataclass(frozen=True)
class BlockCase:
    """One pull_blocks between two caches; a side that is a row is no blocks cache."""

    src: Side
    dst: Side
    pull: PullBlocks


def _list(draw: Draw, count: int, below: int) -> list[int]:
    """Block numbers with what real lists have: runs of neighbours, repeats, jumps."""
    numbers = [draw(0, below - 1)]
    while len(numbers) < count:
        kind = draw(0, 5)
        following = numbers[-1] + 1
        numbers.append(following if kind < 3 and following < below else numbers[-1] if kind == 3 else draw(0, below - 1))
    return numbers


def _dims(draw: Draw) -> list[int]:
    return [draw(1, 4) for _ in range(draw(0, 2))]


def _dtype(draw: Draw) -> str:
    return list(ITEM_BYTES)[draw(0, len(ITEM_BYTES) - 1)]


def _layers(draw: Draw) -> tuple[int, tuple[int, range | None], tuple[int, range | None]]:
    """(tensors a layer, source tensors and range, destination tensors and range) that fit each other."""
    per_layer, layers = draw(1, 3), draw(1, 2)
    sides: list[tuple[int, range | None]] = []
    for _ in range(2):
        present = layers + draw(0, 2)
        start = draw(0, present - layers)
        every = present == layers and draw(0, 1)
        sides.append((present * per_layer, None if every else range(start, start + layers)))
    return per_layer, sides[0], sides[1]


def _strided(draw: Draw, num_tensors: int, rows: int, dims: list[int], dtype: str) -> Side:
    """A side whose rows hold `dims`, with the batch dimension anywhere."""
    place = draw(0, len(dims))
    return Side(num_tensors, [*dims[:place], rows, *dims[place:]], dtype, place)


def blocks_to_blocks(draw: Draw) -> BlockCase:
    """Equal blocks on both sides; either of them can also be an ordinary cache with its rows in pieces."""
    per_layer, (src_tensors, src_layers), (dst_tensors, dst_layers) = _layers(draw)
    dims, dtype = _dims(draw), _dtype(draw)
    src = Side(src_tensors, [draw(1, 9), *dims], dtype, 0)
    dst = _strided(draw, dst_tensors, draw(1, 9), dims, dtype)
    count = draw(1, 12)
    return BlockCase(src, dst, PullBlocks(_list(draw, count, src.geometry.rows), _list(draw, count, dst.geometry.rows),
                                          src_layers, dst_layers, per_layer))


def row_to_blocks(draw: Draw) -> BlockCase:
    """A row of any layout, cut into the destination's blocks; the last bytes of the row may be left over."""
    per_layer, (src_tensors, src_layers), (dst_tensors, dst_layers) = _layers(draw)
    dims, dtype, count = _dims(draw), _dtype(draw), draw(1, 6)
    dst = Side(dst_tensors, [draw(1, 9), *dims], dtype, 0)
    src = _strided(draw, src_tensors, draw(1, 4), [count + draw(0, 2), *dims], dtype)
    return BlockCase(src, dst, PullBlocks([], _list(draw, count, dst.geometry.rows), src_layers, dst_layers, per_layer, by_row=True,
                                          src_row=draw(0, src.geometry.rows - 1)))


def blocks_to_row(draw: Draw) -> BlockCase:
    """The other way round."""
    per_layer, (src_tensors, src_layers), (dst_tensors, dst_layers) = _layers(draw)
    dims, dtype, count = _dims(draw), _dtype(draw), draw(1, 6)
    src = Side(src_tensors, [draw(1, 9), *dims], dtype, 0)
    dst = _strided(draw, dst_tensors, draw(1, 4), [count + draw(0, 2), *dims], dtype)
    return BlockCase(src, dst, PullBlocks(_list(draw, count, src.geometry.rows), [], src_layers, dst_layers, per_layer,
                                          into_row=True, batch_index=draw(0, dst.geometry.rows - 1)))


def _spoiled(draw: Draw, case: BlockCase) -> BlockCase:
    """The same with one thing wrong, as often as not."""
    pull, kind = case.pull, draw(0, 6)
    if kind == 0:
        pull = replace(pull, prompt_blocks=[*pull.prompt_blocks, 0])
    elif kind == 1 and pull.prompt_blocks:
        place = draw(0, len(pull.prompt_blocks) - 1)
        numbers = list(pull.prompt_blocks)
        numbers[place] = case.src.geometry.rows
        pull = replace(pull, prompt_blocks=numbers)
    elif kind == 2 and pull.decoder_blocks:
        pull = replace(pull, decoder_blocks=[*pull.decoder_blocks[:-1], case.dst.geometry.rows])
    elif kind == 3:
        pull = replace(pull, src_layer_range=range(draw(0, 3), 4))
    elif kind == 4:
        pull = replace(pull, dst_layer_range=range(draw(0, 2), 3))
    elif kind == 5:
        return replace(case, src=replace(case.src, dtype=_dtype(draw)))
    else:
        pull = replace(pull, src_row=case.src.geometry.rows, batch_index=pull.batch_index + draw(0, 1))
    return replace(case, pull=pull)


def random_block_case(draw: Draw) -> BlockCase:
    """One call in any direction: two of three have to work."""
    made = (blocks_to_blocks, row_to_blocks, blocks_to_row)[draw(0, 2)](draw)
    return _spoiled(draw, made) if draw(0, 2) == 0 else made


def case_in_one_blocks_cache(draw: Draw) -> BlockCase:
    """Source and destination are one cache, so the lists overlap as often as not."""
    made = blocks_to_blocks(draw)
    into = _list(draw, len(made.pull.prompt_blocks), made.src.geometry.rows)
    return BlockCase(made.src, made.src, replace(made.pull, decoder_blocks=into, dst_layer_range=made.pull.src_layer_range))


def copy_block_info(draw: Draw, rows: int) -> dict[int, list[int]]:
    """What copy_blocks takes: chains, fans, copies onto themselves."""
    return {src: [draw(0, rows - 1) for _ in range(draw(0, 3))] for src in _list(draw, draw(1, 5), rows)}
