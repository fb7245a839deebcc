"""The options that say how a rank is reached, as a checkup takes them. Needs no vLLM, nor does ``kvferry doctor``."""

from collections.abc import Iterable

from kvferry.runtime.checkup import Deployment
from kvferry.vllm.config import Config


def deployment_of(
    config: Config,
    *,
    explicit: Iterable[str] = (),
    produces: bool = True,
    detected_host: str | None = None,
    register_host: str = "127.0.0.1",
) -> Deployment:
    """``explicit``: the options that were set. ``detected_host``: what vLLM chose where no option says it.

    ``register_host``: where vLLM has the ranks of this engine register, which is 127.0.0.1 but in larger deployments.
    """
    peers = config.upstream_peers
    return Deployment(
        transport=config.transport,
        protocol=config.mooncake_protocol,
        device=config.device_name,
        variables=config.mooncake_env,
        host=config.host or detected_host,
        host_why="option host" if config.host else "VLLM_HOST_IP, else vLLM's own choice",
        side_channel_port=config.side_channel_port,
        bootstrap_port=config.bootstrap_port,
        bootstrap_address=config.bootstrap_server_address,
        register_host=register_host,
        produces=produces,
        private_only=config.require_private_network,
        upstream_peers=peers if isinstance(peers, str) else ", ".join(peers) or "refuse",
        upstream_assumed=config.declared_peer.missing,
        upstream_declared=config.declared_peer,
        upstream_networks=() if isinstance(peers, str) else peers,
        secret_file=config.secret_file,
        tls=config.bootstrap_tls_cert is not None,
        explicit=frozenset(explicit),
    )
