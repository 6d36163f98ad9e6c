"""Field types of addresses and mount options: what sidecars and kubelets contact on behalf of a pool."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from kvpool_operator.api.rules import Rule, matching, quote, refined

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["MountOption", "host_of", "mount_options", "object_endpoint", "public_server"]

_QUAD: Final = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_PORT: Final = "([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_NODE_LOCAL: Final = (
    r"(?i)^(https?://)?(localhost|([a-z0-9.-]+[.])?localhost|localhost[.]localdomain|ip6-localhost"
    r"|metadata|metadata[.]google[.]internal|metadata[.]goog|instance-data|instance-data[.]ec2[.]internal"
    r"|kubernetes|kubernetes[.]default([.][a-z0-9.-]+)?"
    r"|(0|127)[.][0-9.]+|169[.]254[.][0-9.]+|100[.]100[.]100[.]200|168[.]63[.]129[.]16|2(2[4-9]|[345][0-9])[.][0-9.]+"
    r"|0*:.*|fe[89ab][0-9a-f]:.*|ff[0-9a-f]{2}:.*|fd00:ec2:.*|64:ff9b:.*)(:[0-9]+)?$"
)
_NUMBER: Final = r"(?i)^(https?://)?(0x[0-9a-f]+|[0-9]+)([.](0x[0-9a-f]+|[0-9]+))*(:[0-9]+)?$"
_PLAIN_QUAD: Final = rf"^(https?://)?{_QUAD}([.]{_QUAD}){{3}}(:[0-9]+)?$"

HOST_IS_REMOTE: Final = Rule(
    f"!self.matches({quote(_NODE_LOCAL)}) && (!self.matches({quote(_NUMBER)}) || self.matches({quote(_PLAIN_QUAD)}))",
    "give the name or address of a storage server, such as 10.0.0.9: loopback, link-local and metadata addresses, the "
    "Kubernetes API, and addresses in other forms are refused",
)


def _check_remote(value: str) -> str:
    is_number = re.search(_NUMBER, value) is not None and re.search(_PLAIN_QUAD, value) is None
    HOST_IS_REMOTE.check(re.search(_NODE_LOCAL, value) is None and not is_number)
    return value


def _remote(form: str, max_length: int, what: str, *more: Rule) -> Any:
    """Field type: a string of this form whose host is remote."""
    return refined(matching(form, max_length, what, HOST_IS_REMOTE, *more), _check_remote)


def public_server(*more: Rule) -> Any:
    """Field type: the host name or IP address of an NFS server, not of the node itself."""
    form = r"^[A-Za-z0-9]([A-Za-z0-9.:-]{0,251}[A-Za-z0-9])?$"
    what = (
        "give the NFS server as a host name or an address, such as nas.example, 10.0.0.9 or fd00::9, without brackets "
        "and port"
    )
    return _remote(form, 253, what, *more)


def object_endpoint() -> Any:
    """Field type: the URL of an S3-compatible server, not of the node itself."""
    form = rf"^https?://[A-Za-z0-9]([A-Za-z0-9.-]{{0,251}}[A-Za-z0-9])?(:{_PORT})?$"
    what = (
        "give the endpoint as http(s)://host:port, without user, password or path, with a port up to 65535; give a "
        "host name for an IPv6 address"
    )
    return _remote(form, 270, what)


def host_of(server: str) -> str:
    """Return the host of a server or of an endpoint's URL, in lower case."""
    host = server.rsplit("://", 1)[-1].lower()
    return host.split(":", 1)[0] if host.count(":") == 1 else host


_OPTION: Final = (
    r"^(soft|softerr|softreval|nosoftreval|ac|noac|cto|nocto|sharecache|nosharecache|resvport|noresvport|rdirplus"
    r"|nordirplus|lock|nolock|fsc|nofsc|trunkdiscovery|notrunkdiscovery|noacl|tcp|rdma|noatime|nodiratime|relatime"
    r"|nosuid|nodev|noexec"
    r"|(timeo|retrans|retry|rsize|wsize|actimeo|acregmin|acregmax|acdirmin|acdirmax)=[0-9]{1,8}"
    rf"|(nconnect|max_connect)=[0-9]{{1,2}}|(port|mountport)={_PORT}"
    r"|(vers|nfsvers)=(3|4|4[.][0-2])|minorversion=[0-2]|mountvers=3|(proto|mountproto)=(tcp|tcp6|udp|udp6|rdma|rdma6)"
    r"|sec=(sys|krb5|krb5i|krb5p)|xprtsec=(none|tls|mtls)|lookupcache=(all|none|pos|positive)"
    r"|local_lock=(all|flock|posix|none))$"
)
MountOption = matching(
    _OPTION,
    64,
    "give one known NFS option for each entry, such as timeo=30, nconnect=8, vers=4.2, proto=rdma or sec=krb5p; hard "
    "is refused, because a dead server would block the sidecar, and exec, suid and dev are refused",
)

_ALWAYS: Final = ("nosuid", "nodev", "noexec")


def mount_options(given: Iterable[str]) -> list[str]:
    """Return the options of the mount: `given`, soft unless softerr is given, and nosuid, nodev, noexec."""
    options = list(given)
    if not {"soft", "softerr"} & set(options):
        options.append("soft")
    return options + [o for o in _ALWAYS if o not in options]
