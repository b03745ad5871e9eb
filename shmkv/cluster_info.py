"""Who to link to: LLMClusterInfo, and the text form of addresses.

Addresses are checked for form, stored and shown. Clusters of one host find each other by namespace and
cluster id, so no address is ever bound or connected to.
"""
from __future__ import annotations

import socket

from shmkv.checks import UINT16_MAX, check_str, check_type, check_uint16, check_uint32, check_uint64, shown
from shmkv.errors import LLMParamError
from shmkv.types import LLMRole


def ip_to_int(name: str, ip: object) -> int:
    """Return an IPv4 address as the number that its four network-order bytes make when read little-endian.

    A str may have any form that inet_aton knows ("1.2.3.4", "22"); an int is a uint32 in that encoding.
    Raises TypeError for other types, LLMParamError for a text that is no address.
    """
    if isinstance(ip, int):
        return check_uint32(name, ip)
    text = check_type(name, ip, str, int)
    try:
        # inet_aton ignores whatever follows white space, so that has to be refused first.
        if str(text).split() != [text]:
            raise ValueError("white space")
        return int.from_bytes(socket.inet_aton(str(text)), "little")
    except (OSError, ValueError) as error:
        raise LLMParamError(f"argument '{name}' is not valid: {shown(ip)} is no IPv4 address") from error


def parse_ip_port(text: str, name: str = "llm.listenIpInfo") -> tuple[str, int]:
    """Split ``"ip:port"`` into a checked text and a number. Raises LLMParamError naming `name`."""
    ip, colon, port = check_str(name, text).rpartition(":")
    if not (colon and port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= UINT16_MAX):
        raise LLMParamError(f"'{name}' must be \"ip:port\" with a port from 0 to 65535, got {shown(text)}")
    ip_to_int(name, ip)
    return ip, int(port)


def parse_listen_ip_info(text: str, name: str = "llm.listenIpInfo") -> list[tuple[str, int]]:
    """Split ``"ip:port;ip:port"``, one entry for each device. Raises LLMParamError naming `name`."""
    return [parse_ip_port(entry, name) for entry in check_str(name, text).split(";")]


class LLMClusterInfo:
    """Another cluster, as link_clusters and unlink_clusters want it: an id, and addresses only to show."""

    def __init__(self) -> None:
        self._remote_cluster_id: int | None = None
        self._remote_role_type: LLMRole | int | None = None
        self._local_ip_info_list: list[tuple[int, int]] = []
        self._remote_ip_info_list: list[tuple[int, int]] = []

    @property
    def remote_cluster_id(self) -> int | None:
        """The other cluster's id, uint64; None until it is set."""
        return self._remote_cluster_id

    @remote_cluster_id.setter
    def remote_cluster_id(self, remote_cluster_id: int) -> None:
        self._remote_cluster_id = check_uint64("remote_cluster_id", remote_cluster_id)

    @property
    def remote_role_type(self) -> LLMRole | int | None:
        """The other cluster's role; stored, never used."""
        return self._remote_role_type

    @remote_role_type.setter
    def remote_role_type(self, remote_role_type: LLMRole | int) -> None:
        self._remote_role_type = check_type("remote_role_type", remote_role_type, LLMRole, int)

    @property
    def local_ip_info_list(self) -> list[tuple[int, int]]:
        """Own addresses as (ip number, port)."""
        return self._local_ip_info_list

    @property
    def remote_ip_info_list(self) -> list[tuple[int, int]]:
        """The other side's addresses as (ip number, port)."""
        return self._remote_ip_info_list

    def append_local_ip_info(self, ip: str | int, port: int) -> None:
        """Add an own address: ip as text or number, port uint16. Raises TypeError or LLMParamError."""
        self._local_ip_info_list.append((ip_to_int("ip", ip), check_uint16("port", port)))

    def append_remote_ip_info(self, ip: str | int, port: int) -> None:
        """Add an address of the other side: ip as text or number, port uint16. Raises TypeError or LLMParamError."""
        self._remote_ip_info_list.append((ip_to_int("ip", ip), check_uint16("port", port)))

    def __repr__(self) -> str:
        return (
            f"LLMClusterInfo(remote_cluster_id={self._remote_cluster_id}, "
            f"local_ip_info_list={self._local_ip_info_list}, remote_ip_info_list={self._remote_ip_info_list})"
        )
