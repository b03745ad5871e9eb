"""LLMDataDist: one cluster from init to finalize, its links and its manager, in llm_datadist's words."""
from __future__ import annotations

import atexit
import logging
from collections.abc import Sequence

from shmkv import _link
from shmkv.cache_manager import CacheManager
from shmkv.checks import (
    ApiObject,
    check_bool,
    check_dict,
    check_int32,
    check_positive,
    check_sequence,
    check_str,
    check_type,
    check_uint32,
    check_uint64,
)
from shmkv.cluster import Cluster
from shmkv.cluster_info import LLMClusterInfo, parse_listen_ip_info
from shmkv.comms import Comms
from shmkv.config import Settings
from shmkv.drain import drain
from shmkv.errors import LLMException, LLMNoneError, LLMParamError, LLMStatusCode
from shmkv.keys import CacheKey
from shmkv.kv_cache_manager import KvCacheManager
from shmkv.link import MAX_CLUSTERS_A_CALL, LinkResults, Links
from shmkv.link_watch import LinkWatch
from shmkv.options import LISTEN_IP_INFO
from shmkv.push import Pushes
from shmkv.types import LLMRole, RegisterMemStatus

ROLE_OPTION = "llm.Role"
MAX_COMM_NAME = 127
MEMBERS_OF_A_COMM = (2, 4)
CLUSTER_INFO_OPTION = "llm.ClusterInfo"

log = logging.getLogger("shmkv")


class LLMDataDist(ApiObject):
    """A cluster of this process: `role` decides what it may do, `cluster_id` (uint64) is its name in the namespace.

    One instance a process can be initialised at a time; `llm_engine_instance` is that one or None.
    """

    llm_engine_instance: LLMDataDist | None = None

    def __init__(self, role: LLMRole, cluster_id: int) -> None:
        self._role = check_type("role", role, LLMRole)
        self._cluster_id = check_uint64("cluster_id", cluster_id)
        self._cluster: Cluster | None = None
        self._links: Links | None = None
        self._watch: LinkWatch | None = None
        self._pushes: Pushes | None = None
        self._comms: Comms | None = None
        self._manager: KvCacheManager | CacheManager | None = None

    @property
    def cluster_id(self) -> int:
        """The value given to the constructor."""
        return self._cluster_id

    @staticmethod
    def _role_to_str(role: LLMRole) -> str:
        return {LLMRole.PROMPT: "Prompt", LLMRole.DECODER: "Decoder", LLMRole.MIX: "Mix"}[role]

    # -- init and finalize ------------------------------------------------------------------------------------------

    def init(self, options: dict[str, str]) -> None:
        """Join the namespace with the options of `LLMConfig.generate_options()`. No-op if this instance is initialised.

        Raises:
            LLMException: LLM_FAILED if another instance of this process is initialised or a living process has the cluster
                id; LLM_DEVICE_OUT_OF_MEMORY if /dev/shm has no room for the control structures.
            LLMParamError, TypeError: an option.
        """
        if self._cluster is not None and not self._cluster.is_forked:
            return
        other = LLMDataDist.llm_engine_instance
        if other is not None and other is not self and not other._is_forked():
            raise LLMException("another LLMDataDist of this process is initialised: finalize it first")
        settings = Settings.from_options(options)
        cluster = Cluster(settings, self._role, self._cluster_id)
        try:
            cluster.join()
            links = Links(cluster)
            self._watch = LinkWatch(cluster, links)
            self._pushes = Pushes(cluster, links)
            self._comms = Comms(cluster, links) if settings.cache_manager else None
            kind = CacheManager if settings.cache_manager else KvCacheManager
            self._manager = kind(cluster, links, self._watch, self._pushes)
            self._cluster, self._links = cluster, links
            LLMDataDist.llm_engine_instance = self
        except BaseException:
            self._cluster = self._links = self._watch = self._pushes = self._comms = self._manager = None
            _take_back(cluster)
            raise
        if not settings.cache_manager:
            # The first generation of the API leaves these two in the caller's dict, and its users read them there.
            options[ROLE_OPTION] = self._role_to_str(self._role)
            options.setdefault(CLUSTER_INFO_OPTION, f'{{"cluster_id": {self._cluster_id}}}')

    def finalize(self, *, drain_ms: int = 0) -> list[CacheKey] | None:
        """Free every cache, drop links, leave the namespace. No-op if not initialised.

        Transfers that run are waited for, `sync_kv_timeout` at most; what is not finished then has the result LLM_ENGINE_FINALIZED.
        With `drain_ms` others may first fetch what is there, for so long at most: until no published request key is left and no
        pull runs. Calls of this process are refused meanwhile. Returns the request keys that nobody fetched; None without.

        Raises:
            LLMException: LLM_LINK_BUSY in a signal handler that interrupted a call; LLM_FAILED if something was not given back.
        """
        check_uint32("drain_ms", drain_ms)
        cluster, links, watch, manager, pushes = self._cluster, self._links, self._watch, self._manager, self._pushes
        if cluster is None or links is None or watch is None or manager is None or pushes is None:
            return None
        if _link.inside_call() or cluster.lock.is_mine:
            raise LLMException("finalize was called from a signal handler that interrupted a call of this cluster",
                               status_code=LLMStatusCode.LLM_LINK_BUSY)
        left = None
        if drain_ms and not cluster.is_closed and not cluster.is_forked:
            left = drain(cluster, links, manager._is_pulling, drain_ms)
        if cluster.is_forked:
            watch.abandon()
        else:
            watch.close()
            if not cluster.is_closed:
                cluster.refuse_new_calls()
            pushes.close(cluster.settings.sync_kv_timeout_ms)
        try:
            if not cluster.is_forked:
                cluster.shut()        # before the links go: a pull of another thread is not told "not linked"
            manager._end_waits()
            if not cluster.is_forked:
                links.close()
        finally:
            cluster.close()
        # Interrupted before this, finalize can be called again and goes on where it was.
        self._cluster = self._links = self._watch = self._pushes = self._comms = self._manager = None
        if LLMDataDist.llm_engine_instance is self:
            LLMDataDist.llm_engine_instance = None
        return left

    def _is_forked(self) -> bool:
        return self._cluster is not None and self._cluster.is_forked

    def _joined(self) -> tuple[Cluster, Links]:
        """Cluster and links, or LLM_FAILED before init and in a forked child."""
        cluster, links = self._cluster, self._links     # once: a finalize in a signal handler may come in between
        if cluster is None or links is None:
            raise LLMException("LLMDataDist is not initialised: call init first")
        cluster.check_usable()
        return cluster, links

    # -- links ------------------------------------------------------------------------------------------------------

    def link_clusters(self, clusters: Sequence[LLMClusterInfo], timeout: int = 3000) -> LinkResults:
        """Link to each cluster by its `remote_cluster_id`, waiting up to `timeout` ms (1 to 2**31 - 1) for it to appear.

        Failures are returned, not raised; what a status leaves open is in the log (`logging.getLogger("shmkv")`). The overall
        status and, in the order of `clusters`, one each:

        - LLM_SUCCESS; LLM_ALREADY_LINK and LLM_REPEAT_REQUEST, with which the overall status is LLM_SUCCESS as well.
        - LLM_WAIT_PROCESS_TIMEOUT: it did not appear. LLM_LINK_FAILED: it is dead, has not the role PROMPT, or another layout.
          LLM_PARAM_INVALID: it has 512 living links. The overall status is LLM_LINK_FAILED then, and the others stay linked.

        Or (status, []), and nothing was done: LLM_PARAM_INVALID for no cluster, a role other than DECODER, and clusters without
        local and remote ip infos, as many of one as of the other and the same local ones for all; LLM_CLUSTER_NUM_EXCEED_LIMIT for
        more than 16; LLM_PROCESSING_LINK when another link call took all of `timeout`.

        In cache-manager mode the role does not count, a cluster that did not appear is LLM_TIMEOUT, and the overall status is that
        of the last cluster that failed.

        Raises:
            TypeError: an argument, or a cluster whose `remote_cluster_id` was never set.
            LLMParamError: `timeout`; in cache-manager mode a cluster without local ip infos, unless `local_comm_res` was given.
            LLMException: LLM_FAILED before init and in a forked child.
        """
        cluster, links = self._joined()
        wanted = self._check_link_arguments(clusters, timeout)
        status = self._check_clusters(cluster, links, wanted)
        return (status, []) if status is not None else links.link(wanted, timeout)

    def unlink_clusters(self, clusters: Sequence[LLMClusterInfo], timeout: int = 3000, force: bool = False) -> LinkResults:
        """Remove links, waiting up to `timeout` ms (1 to 2**31 - 1) for a running pull; `force` removes this side's without any
        wait.

        Returns the overall status and, in the order of `clusters`, one each: LLM_SUCCESS, also for a dead peer; LLM_NOT_YET_LINK,
        with which the overall status is LLM_SUCCESS as well; LLM_LINK_BUSY when a pull did not end in time, with LLM_UNLINK_FAILED
        (in cache-manager mode LLM_LINK_BUSY) overall. Or (LLM_PARAM_INVALID, []) for no cluster, and
        (LLM_CLUSTER_NUM_EXCEED_LIMIT, []) for more than 16.

        Raises:
            TypeError: an argument, or a cluster whose `remote_cluster_id` was never set.
            LLMParamError: `timeout`.
            LLMException: LLM_FAILED before init and in a forked child.
        """
        _, links = self._joined()
        wanted = self._check_link_arguments(clusters, timeout)
        check_bool("force", force)
        if not wanted:
            return LLMStatusCode.LLM_PARAM_INVALID, []
        if len(wanted) > MAX_CLUSTERS_A_CALL:
            return LLMStatusCode.LLM_CLUSTER_NUM_EXCEED_LIMIT, []
        return links.unlink(wanted, timeout, force)

    def check_link_status(self, remote_cluster_id: int) -> None:
        """Return if the link to that cluster can be used (role DECODER).

        Raises:
            LLMException: LLM_NOT_YET_LINK, LLM_LINK_BUSY, or LLM_WAIT_PROCESS_TIMEOUT if the peer is gone.
        """
        cluster, links = self._joined()
        check_uint64("remote_cluster_id", remote_cluster_id)
        if cluster.settings.cache_manager or cluster.role != LLMRole.DECODER:
            raise LLMParamError(f"check_link_status needs role {LLMRole.DECODER!s} without cache manager, this is {cluster.role!s}")
        links.check(remote_cluster_id)

    @staticmethod
    def _check_link_arguments(clusters: Sequence[LLMClusterInfo], timeout: int) -> Sequence[LLMClusterInfo]:
        check_positive("timeout", check_int32("timeout", timeout))
        wanted = check_sequence("clusters", clusters, LLMClusterInfo)
        for info in wanted:
            check_uint64("remote_cluster_id", info.remote_cluster_id)
        return wanted

    @staticmethod
    def _check_clusters(cluster: Cluster, links: Links, wanted: Sequence[LLMClusterInfo]) -> LLMStatusCode | None:
        """What makes a whole call fail, in the order of the contract."""
        if cluster.settings.cache_manager:
            return _check_local_ips(cluster, wanted)
        if cluster.role != LLMRole.DECODER or not wanted:
            log.warning("link_clusters needs role %s and at least one cluster, this is %s with %d", LLMRole.DECODER, cluster.role,
                        len(wanted))
            return LLMStatusCode.LLM_PARAM_INVALID
        if len(wanted) > MAX_CLUSTERS_A_CALL:
            return LLMStatusCode.LLM_CLUSTER_NUM_EXCEED_LIMIT
        for info in wanted:
            if not info.local_ip_info_list or len(info.local_ip_info_list) != len(info.remote_ip_info_list) \
                    or info.local_ip_info_list != wanted[0].local_ip_info_list:
                links.note_failure(info.remote_cluster_id, "link_clusters wants local and remote ip infos, as many of one as of "
                                   "the other, and the same local ones for all clusters of a call")
                return LLMStatusCode.LLM_PARAM_INVALID
        return None

    # -- communications of cache-manager mode ------------------------------------------------------------------------

    def link(self, comm_name: str, cluster_rank_info: dict[int, int], rank_table: str) -> int:
        """Link the clusters of `cluster_rank_info`, {cluster_id: rank}, 2 to 4 with the own one among them and ranks that do not
        fall, and return the number of that communication at once. A link is made as soon as its member is there and somebody asks:
        for the state, by a pull, by a push; until then LLM_NOT_YET_LINK. `comm_name` has 1 to 127 characters; `rank_table` is not
        used.

        Raises:
            TypeError, LLMParamError: an argument, or not in cache-manager mode.
        """
        comms = self._in_cache_manager_mode("link")
        if not 1 <= len(check_str("comm_name", comm_name)) <= MAX_COMM_NAME:
            raise LLMParamError(f"argument 'comm_name' must have 1 to {MAX_COMM_NAME} characters, got {len(comm_name)}")
        _check_ranks(check_dict("cluster_rank_info", cluster_rank_info, int, int), self._cluster_id)
        check_str("rank_table", rank_table)
        self.cache_manager.set_is_call_linked()
        return comms.link(comm_name, cluster_rank_info)

    def unlink(self, comm_id: int) -> None:
        """Remove a communication; the link to a member goes with the last one that has it.

        Raises:
            TypeError, LLMParamError: not the number of a communication.
            LLMException: LLM_LINK_BUSY if a link is in use for longer than 3 s; the communication stays.
        """
        comms = self._in_cache_manager_mode("unlink")
        comms.unlink(check_uint64("comm_id", comm_id))

    def query_register_mem_status(self, comm_id: int) -> RegisterMemStatus:
        """PREPARING until all members are there, then OK; FAILED when one has gone. Raises LLMParamError for an unknown number."""
        comms = self._in_cache_manager_mode("query_register_mem_status")
        return comms.status(check_uint64("comm_id", comm_id))

    def _in_cache_manager_mode(self, what: str) -> Comms:
        self._joined()
        comms = self._comms
        if comms is None:
            raise LLMParamError(f"{what} needs the option EnableCacheManager")
        return comms

    # -- roles and managers -----------------------------------------------------------------------------------------

    def switch_role(self, role: LLMRole, switch_options: dict[str, str] | None = None) -> None:
        """Take another role; caches and keys survive. To PROMPT needs `llm.listenIpInfo` in the options.

        Raises:
            LLMParamError: the same role, or the options.
            LLMException: LLM_FEATURE_NOT_ENABLED without `enable_switch_role`, LLM_EXIST_LINK while links exist.
        """
        cluster, links = self._joined()
        check_type("role", role, LLMRole)
        if role == cluster.role and not cluster.settings.cache_manager:
            raise LLMParamError(f"the role is {role!s} already")
        if switch_options is not None:
            check_type("switch_options", switch_options, dict)
        if role == LLMRole.PROMPT:
            _check_listen_ip(switch_options, required=not cluster.settings.cache_manager)
        if not cluster.settings.enable_switch_role and not cluster.settings.cache_manager:
            raise LLMException("switch_role needs the option enable_switch_role",
                               status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED)
        if links.connected_clusters():
            raise LLMException("switch_role is not possible while links exist: unlink first",
                               status_code=LLMStatusCode.LLM_EXIST_LINK)
        cluster.set_role(role)
        self._role = role

    @property
    def kv_cache_manager(self) -> KvCacheManager:
        """The manager of this cluster's caches.

        Raises:
            LLMException: LLM_FAILED before init, after finalize and in a forked child.
            LLMParamError: in cache-manager mode, which has `cache_manager`.
        """
        self._joined()
        manager = self._manager
        if not isinstance(manager, KvCacheManager):
            raise LLMParamError("kv_cache_manager is not available in cache-manager mode: use cache_manager")
        return manager

    @property
    def cache_manager(self) -> CacheManager:
        """The manager of cache-manager mode.

        Raises:
            LLMException: LLM_FAILED before init, after finalize and in a forked child.
            LLMParamError: in the other mode, which has `kv_cache_manager`.
        """
        self._joined()
        manager = self._manager
        if not isinstance(manager, CacheManager):
            raise LLMParamError("cache_manager needs the option EnableCacheManager")
        return manager


def _take_back(cluster: Cluster) -> None:
    """After a failed init, whose own exception is the one that counts."""
    try:
        cluster.close()
    except LLMException as error:
        log.warning("after a failed init: %s", error)


def _check_local_ips(cluster: Cluster, wanted: Sequence[LLMClusterInfo]) -> LLMStatusCode | None:
    if not wanted:
        return LLMStatusCode.LLM_PARAM_INVALID
    if len(wanted) > MAX_CLUSTERS_A_CALL:
        return LLMStatusCode.LLM_CLUSTER_NUM_EXCEED_LIMIT
    if not cluster.settings.local_comm_res and any(not info.local_ip_info_list for info in wanted):
        raise LLMParamError("local_ip_info_list is empty")
    return None


def _check_ranks(ranks: dict[int, int], own_id: int) -> None:
    for cluster_id, rank in ranks.items():
        check_uint64("cluster_rank_info", cluster_id)
        check_uint32(f"cluster_rank_info[{cluster_id}]", rank)
    numbers = list(ranks.values())
    if not MEMBERS_OF_A_COMM[0] <= len(ranks) <= MEMBERS_OF_A_COMM[1] or numbers != sorted(numbers) or own_id not in ranks:
        raise LLMParamError(f"argument 'cluster_rank_info' must have 2 to 4 clusters, cluster {own_id} among them, with ranks that "
                            f"do not fall, got {ranks}")


def _check_listen_ip(switch_options: dict[str, str] | None, *, required: bool) -> None:
    if switch_options is None:
        if required:
            raise LLMNoneError(f"argument 'switch_options' only support dict with {LISTEN_IP_INFO}, got None")
        return
    text = switch_options.get(LISTEN_IP_INFO)
    if text is None:
        if required:
            raise LLMParamError(f"argument 'switch_options' needs {LISTEN_IP_INFO} (listenIpInfo) for role PROMPT")
        return
    parse_listen_ip_info(check_type(LISTEN_IP_INFO, text, str), LISTEN_IP_INFO)


def _finalize_at_exit() -> None:
    """The instance that is still initialised when the interpreter ends."""
    instance = LLMDataDist.llm_engine_instance
    if instance is None:
        return
    try:
        instance.finalize()
    except LLMException as error:
        log.warning("finalize at exit: %s", error)
    finally:
        LLMDataDist.llm_engine_instance = None


atexit.register(_finalize_at_exit)
