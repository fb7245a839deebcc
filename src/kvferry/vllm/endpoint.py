"""Where one rank is reached and whom it tells: the runtime's options, from vLLM's configuration and ours."""

from typing import TYPE_CHECKING

from vllm.utils.network_utils import get_ip

from kvferry.errors import ConfigError, ConfigReason
from kvferry.protocol import ConsumerLimits, ProducerLimits
from kvferry.runtime import Bootstrap, RuntimeOptions, Timing
from kvferry.runtime.checkup import Deployment
from kvferry.transport import CmaTransport, MooncakeTransport, Transport
from kvferry.vllm.config import Config, split_address
from kvferry.vllm.deployment import deployment_of
from vllm import envs

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def read_deployment(vllm_config: "VllmConfig", config: Config) -> Deployment:
    """How this engine is reached, as far as options, variables and vLLM say."""
    transfer = vllm_config.kv_transfer_config
    return deployment_of(
        config,
        explicit=transfer.kv_connector_extra_config,
        produces=transfer.is_kv_producer,
        detected_host=get_ip(),
    )


def read_options(vllm_config: "VllmConfig", config: Config, *, rank: int, host: str) -> RuntimeOptions:
    """The options of rank ``rank`` of this engine, which binds ``host``, an address of this machine."""

    def make_transport() -> Transport:
        if config.transport == "cma":
            return CmaTransport()
        return MooncakeTransport(host, protocol=config.mooncake_protocol, device=config.device_name)

    return RuntimeOptions(
        host=host,
        port=config.side_channel_port + rank if config.side_channel_port else 0,
        make_transport=make_transport,
        bootstrap=_bootstrap(vllm_config, config, rank=rank),
        dp_rank=_dp_rank(vllm_config),
        timing=Timing(
            publish=config.publish_timeout,
            pull=config.pull_timeout,
            orphan=config.orphan_timeout,
            silence=config.silence_timeout,
        ),
        max_descriptors=config.max_descriptors,
        report=config.transfer_report,
        debug_dir=config.debug_socket_dir,
        producer_limits=ProducerLimits(
            leases=config.max_transfers, pulls=config.max_pulls, strangers=config.max_unknown_transfers
        ),
        consumer_limits=ConsumerLimits(fetches=config.max_transfers),
        quarantine_max_fraction=config.quarantine_max_fraction,
    )


def _bootstrap(vllm_config: "VllmConfig", config: Config, *, rank: int) -> Bootstrap:
    """Rank 0 of the engine that clients are told of serves it, unless it runs elsewhere; all ranks register there."""
    if config.bootstrap_server_address is not None:
        host, port = split_address(config.bootstrap_server_address)
        return Bootstrap(url=_url(host, port))
    parallel = vllm_config.parallel_config
    port = config.bootstrap_port if config.bootstrap_port is not None else envs.VLLM_MOONCAKE_BOOTSTRAP_PORT
    if parallel.local_engines_only:
        host, serves = "127.0.0.1", parallel.data_parallel_rank_local == 0
    else:
        host, serves = parallel.data_parallel_master_ip, parallel.data_parallel_index == 0
        if parallel.nnodes_within_dp > 1:
            host = parallel.master_addr
    serve = ("0.0.0.0", port) if serves and rank == 0 else None
    return Bootstrap(url=_url(host, port), serve=serve)


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


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
