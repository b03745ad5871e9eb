"""Names of blocks: equal where everything that decides about their bytes is, and nowhere else."""
from __future__ import annotations

import hashlib
import json
import random
from dataclasses import asdict, replace
from typing import Any

import pytest
from vllm_parts import GROUP, IDENTITY, other_identity

from shmkv import LLMParamError
from shmkv.integrations.vllm import block_keys
from shmkv.integrations.vllm.block_keys import Media, Prompt, block_hashes, cache_key, key_words
from shmkv.integrations.vllm.identity import CARD_NBYTES, CacheIdentity
from shmkv.integrations.vllm.settings import ConnectorSettings
from shmkv.keys import U64MAX

SEED = IDENTITY.seed()
SIZE = 4


def hashed(tokens: list[int], **more: Any) -> list[bytes]:
    return block_hashes(SEED, Prompt(tokens, **more), SIZE)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 0), (SIZE - 1, 0), (SIZE, 1), (SIZE + 1, 1), (3 * SIZE, 3)])
def test_only_whole_blocks_have_names(tokens: int, blocks: int) -> None:
    assert len(hashed(list(range(tokens)))) == blocks


def test_a_block_is_named_by_all_tokens_before_it() -> None:
    numbers = random.Random(1)
    tokens = [numbers.randrange(1 << 20) for _ in range(6 * SIZE)]
    names = hashed(tokens)
    assert len(set(names)) == 6
    for place in range(len(tokens)):
        changed = [*tokens]
        changed[place] += 1
        assert [one == other for one, other in zip(names, hashed(changed), strict=True)] == [
            block < place // SIZE for block in range(6)]
    assert hashed(tokens[:-1]) == names[:5]
    assert hashed(tokens) == names


def test_salt_and_adapter_are_in_all_blocks() -> None:
    tokens = list(range(3 * SIZE))
    made = [hashed(tokens), hashed(tokens, cache_salt="a"), hashed(tokens, cache_salt="b"), hashed(tokens, lora=("a", "")),
            hashed(tokens, lora=("", "a")), hashed(tokens, cache_salt="a", lora=("a", ""))]
    names = [name for each in made for name in each]
    assert len(set(names)) == len(names)


def test_media_are_in_the_blocks_that_they_touch_and_in_those_behind() -> None:
    tokens = [7] * (4 * SIZE)
    plain, there = hashed(tokens), hashed(tokens, media=(Media("x", SIZE + 1, 2),))
    assert [one == other for one, other in zip(plain, there, strict=True)] == [True, False, False, False]
    assert there != hashed(tokens, media=(Media("y", SIZE + 1, 2),))
    assert there[1:] != hashed(tokens, media=(Media("x", SIZE + 2, 2),))[1:]
    assert hashed(tokens, media=(Media("x", 4 * SIZE, 2),)) == plain


@pytest.mark.parametrize("change", [
    {"model": "other"}, {"model_digest": "x"}, {"weights": "x"}, {"weight_files": "x"}, {"cache_dtype": "float16"}, {"layout": "x"},
    {"attention": "amx"}, {"engine": "0.33.0"}, {"block_size": 8}, {"block_nbytes": 1024}, {"num_layers": 4}, {"num_kv_heads": 1},
    {"head_size": 64}, {"num_shards": 2}, {"window": 8}])
def test_whatever_differs_gives_other_names_and_is_told(change: dict[str, Any]) -> None:
    other = other_identity(**change)
    assert other.seed() != SEED
    (name, value), = change.items()
    named, own = (name, getattr(IDENTITY, name)) if hasattr(IDENTITY, name) else (f"{name} of group 0", getattr(GROUP, name))
    assert IDENTITY.differences(other.card()) == [f"{named}: {value!r} instead of {own!r}"]
    assert IDENTITY.differences(IDENTITY.card()) == []


def test_other_groups_are_told_one_by_one() -> None:
    windowed = replace(GROUP, window=8)
    one, other = (replace(IDENTITY, groups=groups) for groups in ((GROUP, windowed), (windowed, GROUP)))
    assert one.seed() != other.seed()
    assert one.differences(other.card()) == ["window of group 0: 8 instead of 0", "window of group 1: 0 instead of 8"]
    assert IDENTITY.differences(one.card()) == ["groups: 2 instead of 1"]
    assert "groups: 1 instead of 2" in one.differences(IDENTITY.card())


def test_every_field_of_the_identity_is_among_those() -> None:
    text = json.loads(IDENTITY.card().rstrip(b"\0"))
    assert text == {**{name: getattr(IDENTITY, name) for name in CacheIdentity.__dataclass_fields__}, "groups": [asdict(GROUP)]}
    assert len(IDENTITY.card()) == CARD_NBYTES


@pytest.mark.parametrize("card", [b"", b"\0" * CARD_NBYTES, b"{", b"[1]", b'{"groups": 3}', b'{"groups": [3]}', b"\xff\xfe",
                                  bytes(range(256))])
def test_a_card_that_is_none_is_told(card: bytes) -> None:
    assert len(IDENTITY.differences(card)) >= 1


def test_a_description_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="4096 is the most"):
        other_identity(model="m" * CARD_NBYTES).card()


def test_the_words_of_a_key_are_128_bits_of_a_hash_over_block_shard_and_group() -> None:
    name = hashed(list(range(SIZE)))[0]
    digest = hashlib.sha256(name + (3).to_bytes(4, "little") + (1).to_bytes(4, "little")).digest()
    assert key_words(name, 3, 1) == (int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little"))
    assert len({key_words(name, shard, group) for shard in range(8) for group in range(8)}) == 64


def test_a_prefix_id_that_would_mean_none_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class AllOnes:
        def digest(self) -> bytes:
            return b"\xff" * 32

    monkeypatch.setattr(block_keys.hashlib, "sha256", lambda _: AllOnes())
    assert key_words(b"", 0, 0) == (1, U64MAX)
    assert cache_key(5, key_words(b"", 0, 0)).is_usable


def test_settings_of_nothing_are_the_defaults() -> None:
    assert ConnectorSettings.of({}) == ConnectorSettings()
    assert ConnectorSettings.of({"namespace": None, "key_ttl_ms": 5, "async_load": True}) == ConnectorSettings(
        key_ttl_ms=5, async_load=True)


@pytest.mark.parametrize(("given", "kind", "said"), [
    ({"capacity": 5}, LLMParamError, "no setting 'capacity'; there are namespace, cluster_id, capacity_bytes"),
    ({"timeout_ms": 0}, LLMParamError, r"\['timeout_ms'\]"),
    ({"capacity_bytes": -1}, LLMParamError, "capacity_bytes"),
    ({"cluster_id": 2**64}, LLMParamError, "cluster_id"),
    ({"async_load": "yes"}, TypeError, "async_load"),
    ({"namespace": 7}, TypeError, "namespace"),
    ({"look_ms": 0.5}, TypeError, "look_ms"),
])
def test_settings_that_cannot_be_used_are_named(given: dict[str, Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        ConnectorSettings.of(given)
