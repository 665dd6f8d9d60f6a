"""What a scale keeps and what it does not: the rows of ``testbed scale``.

The average request is that of the paper's 64K trace (Table 2): 32,721 context tokens, 429 appended.
"""

from __future__ import annotations

from dataclasses import dataclass

from testbed.models.compute import ComputeModel, GpuSpec
from testbed.models.hardware import Hardware
from testbed.models.scale import PAPER_BLOCK_TOKENS, FittedScale
from testbed.units import GBIT, NS_PER_S, transfer_time_ns

AVERAGE_CONTEXT_TOKENS = 32_721
AVERAGE_APPEND_TOKENS = 429
RATIO_TOLERANCE = 0.02
"""A ratio counts as preserved within this; what remains is the rounding of lengths to whole tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRow:
    """One line of the mapping: a quantity in the paper's world and in the emulated one, and whether it is kept."""

    quantity: str
    paper: str
    emulated: str
    preserved: bool
    why: str


def describe(
    scale: FittedScale, hardware: Hardware, gpu: GpuSpec, *, paper_block_tokens: int = PAPER_BLOCK_TOKENS
) -> list[ScaleRow]:
    """The mapping as rows (quantity, paper, emulated, preserved, why).

    Raises:
        ConfigError: the scale cannot be applied to this hardware or block size.
    """
    return [
        *_scale_rows(scale),
        *_cluster_rows(scale, hardware),
        *_size_rows(scale, paper_block_tokens),
        *_time_rows(scale, hardware, gpu, paper_block_tokens),
        *_lost_rows(scale, paper_block_tokens),
    ]


def _row(quantity: str, paper: str, emulated: str, preserved: bool, why: str) -> ScaleRow:
    return ScaleRow(quantity=quantity, paper=paper, emulated=emulated, preserved=preserved, why=why)


def _rate(rate_bps: int) -> str:
    return f"{rate_bps / GBIT:g} Gbit/s" if rate_bps >= GBIT else f"{rate_bps / 1e6:.4g} Mbit/s"


def _size(size_bytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e4)):
        if size_bytes >= size:
            return f"{size_bytes / (1e3 if unit == 'kB' else size):.4g} {unit}"
    return f"{size_bytes:g} B"


def _time(duration_ns: float) -> str:
    if duration_ns >= NS_PER_S:
        return f"{duration_ns / NS_PER_S:.4g} s"
    return f"{duration_ns / 1e6:.4g} ms" if duration_ns >= 1e6 else f"{duration_ns / 1e3:.4g} us"


def _scale_rows(scale: FittedScale) -> list[ScaleRow]:
    error = f"{scale.rounding_error:+.2%} from rounding the bytes per token"
    return [
        _row("bandwidth scale", "1", f"{float(scale.bandwidth_scale):g}", False, "byte scale x time scale, exactly"),
        _row("byte scale", "1", f"{float(scale.byte_scale):.6g}", False, "paper bytes per emulated byte"),
        _row("time scale", "1", f"{float(scale.time_scale):.6g}", False, error),
        _row("agents per emulated agent", "1", str(scale.agents_scale), False, "a lock-step group acts as one"),
        _row("tokens per emulated token", "1", str(scale.length_scale), False, "lengths and blocks shrink alike"),
    ]


def _cluster_rows(scale: FittedScale, hardware: Hardware) -> list[ScaleRow]:
    small = scale.emulated_hardware(hardware)
    per_node = "divided by the bandwidth scale"
    per_gpu = per_node + (", folded over GPUs" if scale.gpus_scale > 1 else "")
    share = hardware.s / hardware.gpus_per_node
    small_share = small.s / small.gpus_per_node
    p_to_d = f"{scale.model.prefill_nodes}:{scale.model.decode_nodes}"
    return [
        _row("SNIC", _rate(hardware.snic_rate_bps), _rate(small.snic_rate_bps), False, per_node),
        _row("CNIC", _rate(hardware.cnic_rate_bps), _rate(small.cnic_rate_bps), False, per_gpu),
        _row("PCIe", _rate(hardware.pcie_rate_bps), _rate(small.pcie_rate_bps), False, per_gpu),
        _row("DRAM", _rate(hardware.dram_rate_bps), _rate(small.dram_rate_bps), False, per_node),
        _row("s", f"{hardware.s:g}", f"{small.s:g}", scale.gpus_scale == 1, "SNIC : CNIC; folding GPUs divides it"),
        _row("g", str(hardware.gpus_per_node), str(small.gpus_per_node), scale.gpus_scale == 1, "GPUs per node"),
        _row("s/g", f"{share:g}", f"{small_share:g}", _near(small_share, share), "what the bounds on P/D depend on"),
        _row("P:D (default)", p_to_d, p_to_d, True, "nodes are not scaled"),
    ]


def _size_rows(scale: FittedScale, paper_block: int) -> list[ScaleRow]:
    model, block = scale.model, scale.emulated_block_tokens(paper_block)
    blocks = -(-AVERAGE_CONTEXT_TOKENS // paper_block)
    small_blocks = -(-scale.emulated_length(AVERAGE_CONTEXT_TOKENS) // block)
    hit = AVERAGE_CONTEXT_TOKENS / (AVERAGE_CONTEXT_TOKENS + AVERAGE_APPEND_TOKENS)
    small_hit = _small_hit_rate(scale)
    token, small_token = model.kv_bytes_per_token_layer, scale.kv_bytes_per_token_layer
    return [
        _row("KV per token and layer", f"{token} B", f"{small_token} B", False, "a whole number of 4-byte words"),
        _row("block tokens", str(paper_block), str(block), scale.length_scale == 1, "divided by the length scale"),
        _row("Layer Block", _size(model.layer_block_bytes(paper_block)), _size(scale.layer_block_bytes(block)), False,
             "divided by the byte scale, times the agents of a group"),
        _row("Full Block", _size(model.full_block_bytes(paper_block)), _size(scale.full_block_bytes(block)), False,
             "layers x Layer Block, as in the paper"),
        _row("layers", str(model.layers), str(model.layers), True, "layers are not scaled"),
        _row("blocks per average request", str(blocks), str(small_blocks), abs(blocks - small_blocks) <= 1,
             "lengths and block tokens shrink alike"),
        _row("hit rate", f"{hit:.2%}", f"{small_hit:.2%}", _near(small_hit, hit), "appends shrink as contexts do"),
    ]  # fmt: skip


def _time_rows(scale: FittedScale, hardware: Hardware, gpu: GpuSpec, paper_block: int) -> list[ScaleRow]:
    paper = ComputeModel(model=scale.model, gpu=gpu)
    small = scale.compute_model(gpu)
    context, append = scale.emulated_length(AVERAGE_CONTEXT_TOKENS), scale.emulated_length(AVERAGE_APPEND_TOKENS)
    load = transfer_time_ns(AVERAGE_CONTEXT_TOKENS * scale.model.kv_bytes_per_token, hardware.snic_rate_bps)
    small_load = transfer_time_ns(context * scale.kv_bytes_per_token, scale.emulated_rate_bps(hardware.snic_rate_bps))
    # Work only: the base of a forward is paid once per batch, whatever the number of agents in it.
    work = _work_ns(paper, AVERAGE_CONTEXT_TOKENS, AVERAGE_APPEND_TOKENS) / hardware.gpus_per_node
    small_work = _work_ns(small, context, append) / (hardware.gpus_per_node // scale.gpus_scale)
    group_model = ComputeModel(
        model=scale.model, gpu=gpu, agents_scale=scale.agents_scale, gpus_scale=scale.gpus_scale
    )
    step = group_model.decode_step_time_ns([AVERAGE_CONTEXT_TOKENS])
    small_step = small.decode_step_time_ns([context])
    per_token = small_step / scale.length_scale
    group = "of a group" if scale.agents_scale > 1 else "of a request"
    return [
        _row(f"load time {group}", _time(load * scale.agents_scale), _time(small_load),
             _near(small_load, load * scale.agents_scale * float(scale.time_scale)), "one SNIC, times the time scale"),
        _row(f"prefill work {group}", _time(work * scale.agents_scale), _time(small_work),
             _near(small_work, work * scale.agents_scale * float(scale.time_scale)),
             "spread over the GPUs of a node, times the time scale"),
        _row("load : compute", f"{load / work:.4g}", f"{small_load / small_work:.4g}",
             _near(small_load / small_work, load / work), "both are scaled by the same factor"),
        _row(f"decode step {group}", _time(step), _time(per_token), _near(per_token, step * float(scale.time_scale)),
             "per paper token, times the time scale; a group's sequences share the GPUs folded into one"),
    ]  # fmt: skip


def _lost_rows(scale: FittedScale, paper_block: int) -> list[ScaleRow]:
    block = scale.emulated_block_tokens(paper_block)
    header = 78  # Ethernet, IPv4, TCP with timestamps, and the frame of a block
    size, small_size = scale.model.layer_block_bytes(paper_block), scale.layer_block_bytes(block)
    return [
        _row("header share of a Layer Block sent alone", f"{header / (size + header):.2%}",
             f"{header / (small_size + header):.2%}", False, "headers do not shrink; batch Layer Blocks into one post"),
        _row("latency of a message, in paper time", "about 5 us", f"{100 / float(scale.time_scale):.4g} us", False,
             "the kernel's 100 us or so are divided by the time scale only"),
        _row("agents in lock-step", "independent", f"groups of {scale.agents_scale}", scale.agents_scale == 1,
             "a group loads, computes and decodes as one: coarser queues, burstier load"),
    ]  # fmt: skip


def _small_hit_rate(scale: FittedScale) -> float:
    context, append = scale.emulated_length(AVERAGE_CONTEXT_TOKENS), scale.emulated_length(AVERAGE_APPEND_TOKENS)
    return context / (context + append)


def _work_ns(compute: ComputeModel, cached: int, new: int) -> float:
    """Prefill time without the base of the forward."""
    base_ns = compute.gpu.prefill_base_s * float(compute.time_scale) * NS_PER_S
    return compute.prefill_time_ns(cached, new) - base_ns


def _near(value: float, reference: float) -> bool:
    return abs(value - reference) <= RATIO_TOLERANCE * reference
