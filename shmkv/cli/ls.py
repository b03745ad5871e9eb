"""`shmkv ls`: who is in a namespace, with caches and links. Looks only; what cannot be read is shown as a fault."""
from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table
from rich.text import Text

from shmkv import _inspect, _link_record, _members, segment
from shmkv._layout import VERSION
from shmkv._mapping import Region
from shmkv.cli import console
from shmkv.errors import LLMException
from shmkv.membership import Member, Namespace, directory_name, segment_prefix, table_name
from shmkv.types import DataType, LLMRole


@dataclass
class ClusterReport:
    """One member of the namespace. `bytes` is what its files occupy in /dev/shm; `fault` is "" or what cannot be read."""

    cluster_id: int
    role: str
    pid: int
    alive: bool
    slot: int
    incarnation: str
    layout_version: int
    bytes: int
    files: int
    state: str = ""
    fault: str = ""
    caches: list[dict[str, Any]] = field(default_factory=list)
    links: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Report:
    """What `ls` found."""

    namespace: str
    layout_version: int = VERSION
    fault: str = ""
    clusters: list[ClusterReport] = field(default_factory=list)
    other_versions: dict[str, list[int]] = field(default_factory=dict)


def look(namespace: str) -> Report:
    """Read a namespace, creating nothing. One that does not exist is an empty report."""
    report = Report(namespace)
    report.other_versions = _other_versions(namespace)
    try:
        found = Namespace.peek(namespace)
    except LLMException as error:
        report.fault = str(error)
        return report
    if found is not None:
        report.clusters = [_cluster(found, member) for member in found.members()]
    return report


def _other_versions(namespace: str) -> dict[str, list[int]]:
    """Tables of other layout versions: name → the cluster ids recorded there."""
    found = {}
    for name in segment.names(f"{namespace}.members.v"):
        if name != table_name(namespace):
            try:
                found[name] = list(_members.foreign_clusters(Region.attach(f"{segment.SHM_DIR}/{name}")))
            except OSError:
                found[name] = []
    return found


def _cluster(namespace: Namespace, member: Member) -> ClusterReport:
    directory = f"{namespace.name}.{directory_name(member.incarnation)}"
    files = [*segment.starting_with(segment_prefix(namespace.name, member.incarnation)), *segment.starting_with(directory)]
    report = ClusterReport(member.cluster_id, _enum_name(LLMRole, member.role), member.pid, namespace.lives(member), member.slot,
                           f"{member.incarnation:016x}", VERSION, sum(nbytes for _, nbytes in files), len(files))
    try:
        region = Region.attach(f"{segment.SHM_DIR}/{directory}")
    except FileNotFoundError:
        report.fault = "it has no directory (yet)" if report.alive else "its directory is gone"
        return report
    except OSError as error:
        report.fault = str(error)
        return report
    report.fault = _members.header_fault(region, "directory", member.incarnation)
    if not report.fault:
        report.state = _inspect.state(region)
        report.caches = [{**cache, "dtype": _enum_name(DataType, cache["dtype"])} for cache in _inspect.caches(region)]
        report.links = [_with_death(namespace, region, link) for link in _inspect.links(region)]
    return report


def _with_death(namespace: Namespace, region: Region, link: dict[str, Any]) -> dict[str, Any]:
    """The link, as dead if whoever made it is: its record stays as it was until the slot is wanted again."""
    if link["state"] == "live" and not _link_record.initiator_lives(region, link["slot"], namespace.life_fd, namespace.table):
        return {**link, "state": "dead"}
    return link


def _enum_name(kind: type[LLMRole] | type[DataType], number: int | str | None) -> str:
    """The name of a member, or the number that none has, or the text instead of one."""
    if number is None:
        return ""
    return next((member.name for member in kind if member.value == number), str(number))


# -- printing ----------------------------------------------------------------------------------------------------------

def show(namespace: str, *, json: bool) -> None:
    """Look and print."""
    report = look(namespace)
    if json:
        console.print_json(asdict(report))
        return
    out = console.out()
    if report.fault:
        out.print(Text(f"namespace {namespace}: {report.fault}", style="red"), soft_wrap=True)
    elif not report.clusters:
        out.print(f"nobody is in namespace {namespace}")
    else:
        out.print(f"namespace {namespace}, layout version {report.layout_version}")
        for table in (_clusters_table(report), _caches_table(report), _links_table(report)):
            if table.row_count:
                out.print(table)
    for name, clusters in report.other_versions.items():
        out.print(f"{name}: another layout version, clusters {', '.join(map(str, clusters)) or 'unknown'}")


def _table(title: str, *columns: str) -> Table:
    """Columns that end in ">" are numbers."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column.rstrip(">"), justify="right" if column.endswith(">") else "left")
    return table


def _clusters_table(report: Report) -> Table:
    table = _table("clusters", "cluster>", "role", "pid>", "process", "directory", "layout>", "caches>", "keys>",
                   "files>", "bytes>")
    for each in report.clusters:
        keys = sum(cache["keys"] for cache in each.caches)
        table.add_row(str(each.cluster_id), each.role, str(each.pid),
                      Text("alive", style="green") if each.alive else Text("dead", style="red"),
                      Text(each.fault, style="red") if each.fault else Text(each.state), str(each.layout_version),
                      str(len(each.caches)), str(keys), str(each.files), console.size(each.bytes))
    return table


def _caches_table(report: Report) -> Table:
    table = _table("caches", "cluster>", "cache>", "state", "kind", "tensors>", "dtype", "rows>", "published>", "keys>",
                   "generation>", "bytes>")
    for each in report.clusters:
        for cache in each.caches:
            state = Text(cache["fault"], style="red") if cache["fault"] else Text(cache["state"])
            table.add_row(str(each.cluster_id), str(cache["cache_id"]), state, cache["kind"], str(cache["tensors"]),
                          cache["dtype"], str(cache["rows"]), str(cache["published_rows"]), str(cache["keys"]),
                          str(cache["generation"]), console.size(cache["bytes"]))
    return table


def _links_table(report: Report) -> Table:
    table = _table("links", "from>", "to>", "state", "lock", "leases>", "pulls>", "bytes>", "failed>", "timeouts>")
    for each in report.clusters:
        for link in each.links:
            sides = (link["initiator"], link["acceptor"])
            pulls, nbytes, failed, timeouts, leases = (
                sum(side[name] for side in sides) for name in ("pulls", "bytes", "failed", "timeouts", "leases"))
            state = Text(link["state"], style="red" if link["state"] == "dead" else "")
            table.add_row(str(link["initiator"]["cluster_id"]), str(each.cluster_id), state, _lock_text(link["lock"]),
                          str(leases), str(pulls), console.size(nbytes), str(failed), str(timeouts))
    return table


def _lock_text(lock: dict[str, Any]) -> Text:
    if lock["fault"]:
        return Text(lock["fault"], style="red")
    waiters = ", waited for" if lock["waiters"] else ""
    if lock["holder"] is not None:
        return Text(f"held by {lock['holder']}{waiters}")
    return Text("free" if lock["offered_to"] is None else f"offered to {lock['offered_to']}")
