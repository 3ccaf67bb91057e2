"""The environment variables that NCCL, gloo and torch.distributed read: names, kinds, ranges. No torch.

Sources: NVIDIA's manual ("Environment Variables") and NCCL's own parameter declarations as of 2.30, torch 2.13's
`ProcessGroupNCCL.hpp`, `FlightRecorder` and `ProcessGroupGloo`. They take a wrong value in silence (NCCL reads
`true` as the number 0) or end with a message without a hint; here it is found before a process is started.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass

PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_GLOO_", "TORCH_FR_", "TORCH_DISTRIBUTED_")
"""A variable that starts like this belongs to the collectives."""
OTHERS = ("CUDA_LAUNCH_BLOCKING", "TORCH_SHOW_CPP_STACKTRACES", "TORCH_CPP_LOG_LEVEL")
"""Further ones, for finding a fault."""
NOT_READ = {
    "NCCL_TIMEOUT": "NCCL reads no such variable: the time limit of collectives is the setting `timeout_s` (seconds)",
    "GLOO_TIMEOUT": "gloo reads no such variable: the time limit of collectives is the setting `timeout_s` (seconds)",
}
RENAMED = {
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "NCCL_ENABLE_TIMING": "TORCH_NCCL_ENABLE_TIMING",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_TRACE_CPP_STACK": "TORCH_FR_CPP_STACK",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "TORCH_FR_DUMP_TEMP_FILE",
}
"""torch's old names for settings of its own; it warns on every rank."""
FOREIGN = frozenset({
    "NCCL_VERSION", "NCCL_ROOT", "NCCL_ROOT_DIR", "NCCL_HOME", "NCCL_INCLUDE_DIR", "NCCL_LIB_DIR", "NCCL_LIBRARY",
    "NCCL_LIBRARIES", "NCCL_INCLUDE_DIRS",
})  # fmt: skip
"""Set by container images and builds; nothing reads them at run time, so they are no mistake in a shell."""

ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
PROTOCOLS = ("LL", "LL128", "Simple")
COLLECTIVES = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")
DISTANCES = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")
SUBSYSTEMS = (
    "INIT", "COLL", "P2P", "SHM", "NET", "GRAPH", "TUNING", "ENV", "ALLOC", "ALLOC_HOST", "CALL", "PROXY", "NVLS",
    "BOOTSTRAP", "REG", "PROFILE", "RAS", "DESTROY", "ALL",
)  # fmt: skip
TORCH_TRUTHS = ("0", "1", "n", "y", "no", "yes", "f", "t", "false", "true")


@dataclass(frozen=True)
class Number:
    """A whole number from `least` to `most` (None = no bound), or one of `also`."""

    least: int | None = None
    most: int | None = None
    also: tuple[int, ...] = ()

    def complaint(self, value: str) -> str | None:
        """Return what is wrong with `value`, or None."""
        if not re.fullmatch(r"[+-]?(0[xX][0-9a-fA-F]+|[0-9]+)", value):
            return f"must be a whole number{self._range()}"
        number = int(value, 16) if "x" in value.lower() else int(value)
        low = self.least is not None and number < self.least
        high = self.most is not None and number > self.most
        return f"must be a whole number{self._range()}" if (low or high) and number not in self.also else None

    def _range(self) -> str:
        if self.least is None:
            return ""
        return f" from {self.least} to {self.most}" if self.most is not None else f" of at least {self.least}"


@dataclass(frozen=True)
class OneOf:
    """One of `words`; upper and lower case count alike unless `exact`."""

    words: tuple[str, ...]
    exact: bool = False
    numbers: bool = False

    def complaint(self, value: str) -> str | None:
        """Return what is wrong with `value`, or None."""
        known = self.words if self.exact else tuple(word.lower() for word in self.words)
        if (value if self.exact else value.lower()) in known or (self.numbers and value.isdigit()):
            return None
        return f"must be one of {', '.join(self.words)}" + (" or a number" if self.numbers else "")


@dataclass(frozen=True)
class Words:
    """A comma list of `words`, `^` in front to exclude them; with `per`, also `name:list;name:list` (NCCL_ALGO)."""

    words: tuple[str, ...]
    per: tuple[str, ...] = ()

    def complaint(self, value: str) -> str | None:
        """Return what is wrong with `value`, or None."""
        known = {word.lower() for word in self.words}
        for index, entry in enumerate(value.split(";") if self.per else [value]):
            name, colon, items = entry.rpartition(":")
            if colon and name.lower() not in {name.lower() for name in self.per}:
                return f"{name!r} must be one of {', '.join(self.per)}"
            if index and not colon:
                return f"{entry!r} needs a collective in front (`allreduce:{entry}`)"
            for item in items.removeprefix("^").split(","):
                if item.lower() not in known:
                    return f"{item!r} must be one of {', '.join(self.words)}"
        return None


@dataclass(frozen=True)
class Text:
    """Any text that isn't empty."""

    def complaint(self, value: str) -> str | None:
        """Return what is wrong with `value`, or None."""
        return None if value else "must not be empty"


@dataclass(frozen=True)
class Interface:
    """Network interfaces; `interfaces.py` compares them with the host's."""

    def complaint(self, value: str) -> str | None:
        """Return None: the grammar is each backend's own."""
        return None


Kind = Number | OneOf | Words | Text | Interface

FLAG = OneOf(("0", "1"), exact=True)
TRUTH = OneOf(TORCH_TRUTHS)
ANY = Number()
COUNT = Number(0, also=(-1, -2))
"""NCCL's own mark for "decide yourself" is -1 or -2."""


def _table(prefix: str, kinds: Mapping[Kind, str]) -> dict[str, Kind]:
    return {prefix + name: kind for kind, names in kinds.items() for name in names.split()}


VARIABLES: dict[str, Kind] = {
    **_table(
        "NCCL_",
        {
            FLAG: """ALLGATHERV_ENABLE ALLOC_P2P_NET_LL_BUFFERS CHECK_POINTERS COLLNET_ENABLE COMM_BLOCKING
                COMM_SHRINK_SHARE_RESOURCES COMM_SPLIT_SHARE_RESOURCES DEV_API_JIT DMABUF_ENABLE
                ELASTIC_BUFFER_REGISTER ENABLE_VERSION_CHECK GDRCOPY_ENABLE GDRCOPY_FIFO_ENABLE GDRCOPY_FLUSH_ENABLE
                GDRCOPY_SYNC_ENABLE GDR_FLUSH_DISABLE GIN_ENABLE GRAPH_HELPER_DISABLE GRAPH_REGISTER GROUP_CUDA_STREAM
                IB_DATA_DIRECT IB_DISABLE IB_ECE_ENABLE IB_MERGE_NICS IB_MERGE_VFS IB_QUERY_PORT_SPEED
                IB_RETURN_ASYNC_EVENTS IB_SPLIT_DATA_ON_QPS IB_SUBNET_AWARE_ROUTING IB_USE_INLINE IB_WARN_RAIL_LOCAL
                IGNORE_COLLNET_MISMATCH IGNORE_CPU_AFFINITY IGNORE_DISABLED_P2P IGNORE_NET_MISMATCH
                IPC_USE_ABSTRACT_SOCKET LAUNCH_RACE_FATAL LEGACY_CUDA_REGISTER LL128_C2C LOCAL_REGISTER
                MNNVL_CROSS_CLIQUE MNNVL_RAIL_PER_HOST MNNVL_SCATTER_NETS_ENABLE MULTI_RANK_GPU_ENABLE
                MULTI_SEGMENT_REGISTER NET_DISABLE_INTRA NET_FORCE_FLUSH NET_GDR_C2C NET_GDR_MLOPART
                NET_OPTIONAL_RECV_COMPLETION NET_SHARED_COMMS NVB_DISABLE NVB_PRECONNECT NVTX_DISABLE OOB_NET_ENABLE
                P2P_DIRECT_DISABLE P2P_DISABLE P2P_EPOCH_ENABLE P2P_USE_CUDA_MEMCPY PXN_C2C PXN_DISABLE RAS_ENABLE
                REPORT_CONNECT_PROGRESS RMA_DISABLE RUNTIME_CONNECT SET_CPU_STACK_SIZE SET_STACK_SIZE SET_THREAD_NAME
                SHM_DISABLE SINGLE_PROC_MEM_REG_ENABLE SYM_GIN_KERNELS_ENABLE SYM_NOWIN_ENABLE SYM_TMA_ENABLE
                UNPACK_DOUBLE_NCHANNELS WARN_ENABLE_DEBUG_INFO WIN_ENABLE""",
            Number(0, 2): "CROSS_NIC IB_PCI_RELAXED_ORDERING MNNVL_ENABLE NVLS_ENABLE P2P_PXN_LEVEL PAT_ENABLE",
            Number(0, 1, (-1, -2)): """CUMEM_ENABLE CUMEM_HOST_ENABLE NET_GDR_READ NET_SHARED_BUFFERS P2P_READ_ENABLE
                GRAPH_MIXING_SUPPORT GRAPH_STREAM_ORDERING IB_ADAPTIVE_ROUTING LAUNCH_ORDER_IMPLICIT""",
            Number(0, 31): "IB_TIMEOUT",
            Number(0, 7): "IB_RETRY_CNT",
            Number(0, 15, (-1,)): "IB_SL",
            Number(0, 255, (-1,)): "IB_TC IB_FIFO_TC GIN_IB_TC IB_GID_INDEX",
            Number(1, 128): "IB_QPS_PER_CONNECTION",
            # net_socket.cc: at most 16 threads; with NSOCKS_PERTHREAD at most 64 sockets in all (see `cross_checks`).
            Number(1, 16, (-2,)): "SOCKET_NTHREADS",
            Number(1, 64, (-2,)): "NSOCKS_PERTHREAD",
            # The manual allows these four; NCCL corrects others in silence.
            OneOf(("64", "128", "256", "512"), exact=True): "NTHREADS",
            Number(160, 640, (-2,)): "LL128_NTHREADS",
            Number(1, 64, (-1, -2)): """MIN_NCHANNELS MAX_NCHANNELS MIN_NRINGS MAX_NRINGS MIN_P2P_NCHANNELS
                MAX_P2P_NCHANNELS NCHANNELS_PER_NET_PEER NVLS_NCHANNELS MIN_CTAS MAX_CTAS""",
            Number(0, 8, (-1, -2)): "CGA_CLUSTER_SIZE",
            COUNT: """BUFFSIZE LL_BUFFSIZE LL128_BUFFSIZE CHUNK_SIZE CONNECT_ROUND_MAX_PEERS COLLNET_NODE_THRESHOLD
                GRAPH_DUMP_FILE_RANK TOPO_DUMP_FILE_RANK IB_AR_THRESHOLD IB_PKEY IB_ROCE_VERSION_NUM
                IB_SUBNET_PREFIX_LEN IB_ROUTABLE_FLID_GID_INDEX IB_MQP_RETRY_ALL IB_MQP_RETRY_CNT
                IB_MQP_RETRY_SLEEP_MSEC L1_SHARED_MEMORY_CARVEOUT NET_OVERHEAD NVLSTREE_MAX_CHUNKSIZE NVLS_CHUNKSIZE
                P2P_LL_THRESHOLD P2P_MAX_PEERS P2P_NET_CHUNKSIZE P2P_NVL_CHUNKSIZE P2P_PCI_CHUNKSIZE
                P2P_PER_CHANNEL_NET_BW P2P_SCHEDULE_GROUP_SIZE PROGRESS_APPENDOP_FREQ PROXY_APPEND_BATCH_SIZE
                PROXY_DUMP_SIGNAL RAS_TIMEOUT_FACTOR SHM_LOCALITY SOCKET_INLINE SOCKET_MIN_TASKSIZE
                SOCKET_POLL_TIMEOUT_MSEC SOCKET_RCVBUF SOCKET_SNDBUF SOCKET_RETRY_CNT SOCKET_RETRY_SLEEP_MSEC
                SYM_CE_THRESHOLD SYM_CTAS UID_STAGGER_RATE UID_STAGGER_THRESHOLD WORK_ARGS_BYTES WORK_FIFO_BYTES
                WORK_FIFO_DEPTH""",
            ANY: "MNNVL_CLIQUE_ID MNNVL_UUID MEM_SYNC_DOMAIN LSA_TEAM_SIZE WIN_STRIDE",
            Words(ALGORITHMS, COLLECTIVES): "ALGO",
            Words(PROTOCOLS, COLLECTIVES): "PROTO",
            OneOf(DISTANCES, exact=True, numbers=True): "P2P_LEVEL NET_GDR_LEVEL NET_MERGE_LEVEL",
            OneOf(("VERSION", "WARN", "INFO", "ABORT", "TRACE")): "DEBUG",
            Words(SUBSYSTEMS): "DEBUG_SUBSYS",
            Words(("VERSION", "WARN", "INFO", "ABORT", "TRACE", "ALL")): "DEBUG_TIMESTAMP_LEVELS",
            OneOf(("PARALLEL", "GROUP")): "LAUNCH_MODE",
            OneOf(("AF_INET", "AF_INET6"), exact=True): "SOCKET_FAMILY IB_ADDR_FAMILY",
            Interface(): "SOCKET_IFNAME OOB_NET_IFNAME",
            Text(): """CHECK_MODE COMM_ID CONF_FILE CTA_POLICY DEBUG_FILE DEBUG_TIMESTAMP_FORMAT ENV_PLUGIN GIN_PLUGIN
                GIN_TYPE GRAPH_DUMP_FILE GRAPH_FILE HOSTID IBVERBS_LIB IB_ADDR_RANGE IB_HCA NET NETDEVS_POLICY
                NET_FORCE_MERGE NET_MERGE_POLICY NET_PLUGIN NO_CACHE PROFILER_PLUGIN PROXY_CPUSET RAS_ADDR RMA_PLUGIN
                SOCKET_MAGIC SYM_KERNEL THREAD_THRESHOLDS TOPO_DUMP_FILE TOPO_FILE TUNER_PLUGIN TUNER_CONFIG_FILE""",
        },
    ),
    **_table(
        "TORCH_NCCL_",
        {
            TRUTH: """HIGH_PRIORITY BLOCKING_WAIT DUMP_ON_TIMEOUT PROPAGATE_ERROR DESYNC_DEBUG ENABLE_TIMING
                ENABLE_MONITORING RETHROW_CUDA_ERRORS LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN EXTRA_DUMP_ON_EXEC
                CUDA_EVENT_CACHE NAN_CHECK AVOID_RECORD_STREAMS USE_TENSOR_REGISTER_ALLOCATOR_HOOK BCAST_UNIQUEID
                SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING""",
            Number(0, 3): "ASYNC_ERROR_HANDLING",
            Number(1): "HEARTBEAT_TIMEOUT_SEC COORD_CHECK_MILSEC WAIT_TIMEOUT_DUMP_MILSEC RANKS_PER_ROOT",
            Text(): "DEBUG_INFO_PIPE_FILE",
        },
    ),
    **_table(
        "",
        {
            Interface(): "GLOO_SOCKET_IFNAME",
            # The two transports that torch's Linux wheels are built with.
            OneOf(("TCP", "TCP_TLS"), exact=True): "GLOO_DEVICE_TRANSPORT",
            Text(): """GLOO_DEVICE_TRANSPORT_TCP_TLS_PKEY GLOO_DEVICE_TRANSPORT_TCP_TLS_CERT
                GLOO_DEVICE_TRANSPORT_TCP_TLS_CA_FILE GLOO_DEVICE_TRANSPORT_TCP_TLS_CA_PATH TORCH_FR_DUMP_TEMP_FILE""",
            OneOf(("DEBUG", "INFO", "WARN", "ERROR")): "GLOO_LOG_LEVEL",
            FLAG: """GLOO_DISABLE_CONNECTION_RETRIES GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER GLOO_ENABLE_STORE_V2_API
                TORCH_GLOO_LAZY_INIT CUDA_LAUNCH_BLOCKING TORCH_SHOW_CPP_STACKTRACES""",
            TRUTH: "TORCH_FR_CPP_STACK TORCH_FR_DUMP_DYNAMIC_FILE_NAME",
            Number(0): "TORCH_FR_BUFFER_SIZE",
            OneOf(("OFF", "INFO", "DETAIL")): "TORCH_DISTRIBUTED_DEBUG",
            OneOf(("INFO", "WARNING", "ERROR", "FATAL"), numbers=True): "TORCH_CPP_LOG_LEVEL",
        },
    ),
}
"""Every variable that is known, by name."""


def concerns(name: str) -> bool:
    """Tell whether a variable belongs to the collectives."""
    return name in OTHERS or name.startswith(PREFIXES)


def nearest(name: str) -> str | None:
    """Return the known variable that `name` looks like, or None."""
    matches = difflib.get_close_matches(name.upper(), VARIABLES, n=1, cutoff=0.75)
    return matches[0] if matches else None


def cross_checks(values: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return (variable, what is wrong) for values that are right alone but not together."""

    def number(name: str, default: int) -> int:
        value = values.get(name, "")
        return int(value) if value.isdigit() else default

    found = []
    threads, sockets = number("NCCL_SOCKET_NTHREADS", 1), number("NCCL_NSOCKS_PERTHREAD", 1)
    if threads * sockets > 64:
        found.append((
            "NCCL_NSOCKS_PERTHREAD",
            f"NCCL_SOCKET_NTHREADS {threads} x NCCL_NSOCKS_PERTHREAD {sockets} = {threads * sockets} sockets, "
            f"but NCCL opens at most 64",
        ))  # fmt: skip
    for low, high in (("MIN_NCHANNELS", "MAX_NCHANNELS"), ("MIN_CTAS", "MAX_CTAS")):
        least, most = number(f"NCCL_{low}", 1), number(f"NCCL_{high}", 64)
        if least > most:
            found.append((f"NCCL_{low}", f"{least} is more than NCCL_{high} ({most})"))
    if number("TORCH_NCCL_DESYNC_DEBUG", 0) and values.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0":
        found.append(("TORCH_NCCL_DESYNC_DEBUG", "has no effect with TORCH_NCCL_ASYNC_ERROR_HANDLING=0"))
    return found
