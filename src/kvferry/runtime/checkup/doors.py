"""Who may speak to this engine: the secret, and what is open without one."""

from kvferry.control import find_secret, require_curve
from kvferry.errors import ConfigError
from kvferry.runtime.checkup.addresses import HostAddress
from kvferry.runtime.checkup.deployment import Deployment
from kvferry.runtime.checkup.records import Finding, Verdict

ADVICE = "set secret_file (or KVFERRY_SECRET) on all engines and the router: docs/security.md"


def check_doors(deployment: Deployment, host: HostAddress) -> Finding:
    """Whether kvferry peers must prove that they belong here. Reads the secret, and shows nothing of it."""
    try:
        secret = find_secret(deployment.secret_file)
        if secret is not None:
            require_curve()
    except ConfigError as error:
        return Finding.of_error("doors", error)
    listed = deployment.upstream_networks
    facts: dict[str, object] = {"secret": secret is not None, "upstream_networks": list(listed), "tls": deployment.tls}
    if secret is not None:
        others = len(secret.known) - 1
        facts["further_secrets"] = others
        more = f"; {others} further secret(s) are known, for a change" if others else ""
        plain = f"a plain one is open to {', '.join(listed)}" if listed else "no plain one is open"
        return Finding("doors", Verdict.OK, f"kvferry peers speak CURVE; {plain}{more}", facts=facts)
    said = "no secret is set: whoever reaches the message sockets and the bootstrap service is taken for a peer"
    verdict = Verdict.NOTE if host.scope == "loopback" else Verdict.WARNING
    return Finding("doors", verdict, said, ADVICE if verdict is Verdict.WARNING else "", facts)
