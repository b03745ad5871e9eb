"""Keys whose index hashes are equal in all 64 bits, found by undoing the hash: each of its steps is one-to-one."""
from __future__ import annotations

MASK = 2**64 - 1
ID_BIT = 1 << 32
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
KIND_OFFSET = 0x9E3779B97F4A7C15
BLOCKS_MASK, BLOCKS_BITS = 0xA24BAED4963EE407, 3 << 32


def mix(x: int) -> int:
    """The finaliser of splitmix64, as the library has it."""
    x = (x ^ x >> 30) * MULTIPLIERS[0] & MASK
    x = (x ^ x >> 27) * MULTIPLIERS[1] & MASK
    return x ^ x >> 31


def _unshift(x: int, by: int) -> int:
    found = x
    for _ in range(64 // by + 1):
        found = x ^ found >> by
    return found


def unmix(x: int) -> int:
    """The inverse of `mix`."""
    x = _unshift(x, 31) * pow(MULTIPLIERS[1], -1, 1 << 64) & MASK
    x = _unshift(x, 27) * pow(MULTIPLIERS[0], -1, 1 << 64) & MASK
    return _unshift(x, 30)


def _before_req_id(kind: int, prefix_id: int, model_id: int) -> int:
    return mix(mix(mix(kind + KIND_OFFSET & MASK) ^ model_id) ^ prefix_id)


def hash_of(kind: int, req_id: int, prefix_id: int, model_id: int) -> int:
    return mix(_before_req_id(kind, prefix_id, model_id) ^ req_id) & MASK & ~ID_BIT


def req_id_for(wanted: int, kind: int, prefix_id: int, model_id: int) -> int:
    """The req_id that gives a key this hash."""
    return unmix(wanted) ^ _before_req_id(kind, prefix_id, model_id)


def colliding(count: int, wanted: int, kind: int = 1, prefix_id: int = MASK) -> list[tuple[int, int, int, int]]:
    """`count` keys (kind, req_id, prefix_id, model_id) with one hash; they differ in model_id and req_id."""
    return [(kind, req_id_for(wanted, kind, prefix_id, model), prefix_id, model) for model in range(count)]


def same_but_for_model_id(wanted: int, req_id: int, prefix_id: int = MASK) -> list[tuple[int, int, int, int]]:
    """Two keys that differ in model_id alone."""
    before = [unmix(unmix(unmix(target) ^ req_id) ^ prefix_id) for target in (wanted & ~ID_BIT, wanted | ID_BIT)]
    return [(1, req_id, prefix_id, x ^ mix(1 + KIND_OFFSET & MASK)) for x in before]


def same_but_for_req_id(wanted: int, model_id: int = 0) -> list[tuple[int, int, int, int]]:
    """Two keys that differ in req_id alone: the hash leaves one bit of its last step out."""
    return [(1, req_id_for(target, 1, MASK, model_id), MASK, model_id) for target in (wanted & ~ID_BIT, wanted | ID_BIT)]


def blocks_models(wanted: int) -> list[int]:
    """The four model ids whose blocks keys have one hash, which says by two bits that it is a blocks key's."""
    return [unmix((wanted & ~BLOCKS_BITS) | bits << 32) ^ BLOCKS_MASK for bits in range(4)]
