"""Two processes that change roles: what the first one computed goes over, then the second one's answer comes back.

    shmkv run examples/llm_datadist/switch_role.py prompt       # first terminal
    shmkv run examples/llm_datadist/switch_role.py decoder      # second terminal

Caches and their keys outlive the change; links do not, and have to be removed first.
"""
from __future__ import annotations

import numpy as np
from common import (
    DECODER_CLUSTER,
    PROMPT_CLUSTER,
    Arguments,
    Bytes,
    Meeting,
    check,
    drawn,
    expect,
    link,
    memory,
    run,
    start,
    unlink,
)
from llm_datadist import CacheDesc, CacheKey, CacheKeyByIdAndIndex, DataType, LLMException, LLMRole, LLMStatusCode

DESC = CacheDesc(num_tensors=6, shape=[2, 128, 16], data_type=DataType.DT_BF16)
ROW = 128 * 16 * 2
THERE, BACK = 0, 1                      # which of the two transfers bytes belong to


def content(seed: int, way: int) -> list[Bytes]:
    """All tensors of one transfer, a row each."""
    return [drawn(seed, way, number, nbytes=ROW) for number in range(DESC.num_tensors)]


def prompt(given: Arguments) -> None:
    """The prompt process, which is the decoder in the end."""
    dist = start(LLMRole.PROMPT, PROMPT_CLUSTER, listen_ip_info="127.0.0.1:26000", enable_switch_role=True)
    manager = dist.kv_cache_manager
    cache = manager.allocate_cache(DESC, [CacheKey(PROMPT_CLUSTER, req_id=3)])
    mine = memory(DESC, cache.per_device_tensor_addrs[0])
    for tensor, row in zip(mine, content(given.seed, THERE), strict=True):
        tensor[0], tensor[1] = row, 0xEE
    meeting = Meeting(given)
    meeting.tell("filled")
    cache_id = meeting.tell()           # the decoder has pulled and unlinked, and tells where its answer will be
    dist.switch_role(LLMRole.DECODER)
    meeting.tell()
    meeting.tell()                      # it is the prompt now, and has filled its cache
    link(dist, DECODER_CLUSTER)
    manager.pull_cache(CacheKeyByIdAndIndex(DECODER_CLUSTER, cache_id, batch_index=0), cache, batch_index=1)
    expected = [np.stack(rows) for rows in zip(content(given.seed, THERE), content(given.seed, BACK), strict=True)]
    expect("the answer beside the request", mine, expected)
    unlink(dist, DECODER_CLUSTER)
    meeting.tell()
    dist.finalize()


def decoder(given: Arguments) -> None:
    """The decoder process, which is the prompt in the end."""
    dist = start(LLMRole.DECODER, DECODER_CLUSTER, enable_switch_role=True)
    manager = dist.kv_cache_manager
    cache = manager.allocate_cache(DESC)
    mine = memory(DESC, cache.per_device_tensor_addrs[0])
    meeting = Meeting(given)
    meeting.tell()
    link(dist, PROMPT_CLUSTER)
    manager.pull_cache(CacheKey(PROMPT_CLUSTER, req_id=3), cache, batch_index=1)
    expect("the request", [tensor[1] for tensor in mine], content(given.seed, THERE))
    try:
        dist.switch_role(LLMRole.PROMPT, {"llm.listenIpInfo": "127.0.0.1:26001"})
    except LLMException as error:
        check("no change of roles while there is a link", error.status_code == LLMStatusCode.LLM_EXIST_LINK)
    unlink(dist, PROMPT_CLUSTER)
    meeting.tell(cache.cache_id)
    meeting.tell()                      # the other one is no prompt any more
    dist.switch_role(LLMRole.PROMPT, {"llm.listenIpInfo": "127.0.0.1:26001"})
    for tensor, row in zip(mine, content(given.seed, BACK), strict=True):
        tensor[0] = row
    meeting.tell()
    meeting.tell()                      # and has it
    dist.finalize()


if __name__ == "__main__":
    run(__doc__, prompt, decoder)
