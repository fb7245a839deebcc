"""Where one rank is reached and whom it tells: the runtime's options, from vLLM's configuration and ours."""

import logging
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from vllm.utils.network_utils import get_ip

from kvferry.control import Networks, Secret, ServerTls, SocketOptions, every_interface, find_secret
from kvferry.errors import ConfigError, ConfigReason
from kvferry.protocol import ConsumerLimits, ProducerLimits
from kvferry.runtime import Bootstrap, RuntimeOptions, Timing
from kvferry.runtime.checkup import Deployment
from kvferry.runtime.options import PRIVATE_NETWORKS, UpstreamPeers
from kvferry.transport import CmaTransport, MooncakeTransport, Transport
from kvferry.transport.engine_settings import parse_variables
from kvferry.transport.mooncake import installed_build
from kvferry.vllm.config import Config, split_address
from kvferry.vllm.deployment import deployment_of
from vllm import envs

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)


def read_deployment(vllm_config: "VllmConfig", config: Config) -> Deployment:
    """How this engine is reached, as far as options, variables and vLLM say."""
    transfer = vllm_config.kv_transfer_config
    return deployment_of(
        config,
        explicit=transfer.kv_connector_extra_config,
        produces=transfer.is_kv_producer,
        detected_host=get_ip(),
        register_host=_register_host(vllm_config),
    )


def read_options(
    vllm_config: "VllmConfig",
    config: Config,
    *,
    rank: int,
    host: str,
    enter_thread: Callable[[], None] | None = None,
) -> RuntimeOptions:
    """The options of rank ``rank`` of this engine, which binds ``host``, an address of this machine."""
    os.environ.update(parse_variables(config.mooncake_env))  # an engine's settings are those of its process
    parallel = vllm_config.parallel_config
    # The data parallel ranks of a host have the same options, and ports of their own.
    place = parallel.data_parallel_index * parallel.world_size + rank

    def make_transport() -> Transport:
        if config.transport == "cma":
            return CmaTransport()
        return MooncakeTransport(
            host, protocol=config.mooncake_protocol, device=config.device_name, enter_thread=enter_thread
        )

    secret = find_secret(config.secret_file)
    return RuntimeOptions(
        host=host,
        port=config.side_channel_port + place if config.side_channel_port else 0,
        make_transport=make_transport,
        enter_thread=enter_thread,
        bootstrap=_bootstrap(vllm_config, config, rank=rank, bound=host),
        dp_rank=_dp_rank(vllm_config),
        timing=Timing(
            publish=config.publish_timeout,
            pull=config.pull_timeout,
            orphan=config.orphan_timeout,
            silence=config.silence_timeout,
        ),
        max_descriptors=config.max_descriptors,
        max_layouts=config.max_layouts,
        retries=config.retries,
        verify=config.verify,
        report=config.transfer_report,
        debug_dir=config.debug_socket_dir,
        producer_limits=ProducerLimits(
            leases=config.max_transfers,
            pulls=config.max_pulls,
            strangers=config.max_unknown_transfers,
            strangers_per_peer=max(1, config.max_unknown_transfers // 2),
            write_timeout=config.write_timeout,
            lost_grace=config.lost_consumer_grace,
        ),
        sockets=SocketOptions(
            max_message=config.max_message_bytes,
            max_queued=config.max_queued_messages,
            max_unread=config.max_unread_messages,
        ),
        consumer_limits=ConsumerLimits(fetches=config.max_transfers),
        quarantine_max_fraction=config.quarantine_max_fraction,
        upstream_peers=_upstream_peers(config, secret),
        secret=secret,
        secure_port=config.secure_port + place if config.secure_port else 0,
        bootstrap_ca=config.bootstrap_ca,
        write_targets=_write_targets(config),
    )


def check_memory(config: Config, memories: Iterable[str], *, host: str) -> None:
    """Refuse memory that the chosen transport cannot move, before any request. CPU memory goes with all of them."""
    devices = sorted(set(memories) - {"cpu"})
    if not devices:
        return
    if config.transport == "cma":
        raise ConfigError(
            ConfigReason.INVALID_VALUE,
            f"option transport is 'cma', which copies CPU memory, and the cache lies on {devices[0]}: use 'mooncake'",
        )
    os.environ.update(parse_variables(config.mooncake_env))
    installed_build(host).check_memory(devices)


def _bootstrap(vllm_config: "VllmConfig", config: Config, *, rank: int, bound: str) -> Bootstrap:
    """Rank 0 of the engine that clients are told of serves it, unless it runs elsewhere; all ranks register there."""
    if config.bootstrap_server_address is not None:
        host, port = split_address(config.bootstrap_server_address)
        return Bootstrap(url=_url(host, port, https=config.bootstrap_ca is not None))
    port = config.bootstrap_port if config.bootstrap_port is not None else envs.VLLM_MOONCAKE_BOOTSTRAP_PORT
    host = _register_host(vllm_config)
    serve = (every_interface(bound, host), port) if _dp_rank(vllm_config) == 0 and rank == 0 else None
    tls = None
    if config.bootstrap_tls_cert is not None and config.bootstrap_tls_key is not None:
        tls = ServerTls(config.bootstrap_tls_cert, config.bootstrap_tls_key)
    return Bootstrap(url=_url(host, port, https=tls is not None), serve=serve, tls=tls)


def _register_host(vllm_config: "VllmConfig") -> str:
    """Where the rank that serves the bootstrap service is found by the other ranks."""
    parallel = vllm_config.parallel_config
    if parallel.local_engines_only:
        return "127.0.0.1"
    return str(parallel.master_addr if parallel.nnodes_within_dp > 1 else parallel.data_parallel_master_ip)


def _upstream_peers(config: Config, secret: Secret | None) -> UpstreamPeers:
    peers = UpstreamPeers.parse(config.upstream_peers)
    if secret is None:
        return peers
    if peers.everywhere:
        logger.warning(
            "upstream_peers is 'allow' and a secret is set, which vLLM's own connector cannot know: such peers are "
            "refused; list their networks to serve just these"
        )
    return peers.beside_a_secret()


def _write_targets(config: Config) -> Networks:
    if config.write_targets is None:
        return PRIVATE_NETWORKS
    return Networks.parse(config.write_targets, option="write_targets")


def _dp_rank(vllm_config: "VllmConfig") -> int:
    parallel = vllm_config.parallel_config
    return int(parallel.data_parallel_rank_local if parallel.local_engines_only else parallel.data_parallel_index)


def check_parallel(vllm_config: "VllmConfig") -> None:
    """Refuse what this version does not carry, before anything is built."""
    parallel = vllm_config.parallel_config
    if parallel.prefill_context_parallel_size > 1:
        raise ConfigError(
            ConfigReason.UNSUPPORTED_MODEL,
            f"prefill context parallel size {parallel.prefill_context_parallel_size}: only 1 is supported yet",
        )


def check_sleep_mode(vllm_config: "VllmConfig") -> None:
    """Refuse an engine that may take its cache's memory away while a peer reads or writes it."""
    if vllm_config.model_config is not None and vllm_config.model_config.enable_sleep_mode:
        raise sleep_refusal()


def sleep_refusal() -> ConfigError:
    """What is said of sleep mode, at start-up and when an engine is put to sleep all the same."""
    return ConfigError(
        ConfigReason.UNSUPPORTED_MODEL,
        "sleep mode unmaps the cache's memory, which peers read and write: start without --enable-sleep-mode",
    )


def _url(host: str, port: int, *, https: bool) -> str:
    scheme = "https" if https else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
