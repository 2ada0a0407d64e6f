"""Where decode time goes: kernels of a trace by kind, on a GPU's names and on a recorded CPU trace."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from ansible_collections.swapgate.core.plugins.module_utils import kernel_times

ROOT = Path(__file__).resolve().parents[2]
RECORDED = Path(__file__).parent / "decode_cpu.pt.trace.json.gz"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all-reduce"),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*, vllm::RankSignals)", "all-reduce"),
        ("void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<...>", "all-reduce"),
        ("multimem_all_reduce_kernel", "all-reduce"),
        ("ncclDevKernel_AllGather_RING_LL", "all-reduce"),
        ("fused_moe_kernel", "MoE"),
        ("void vllm::moe::topkGatingSoftmax<8, 384, 4, 16>(float const*)", "MoE"),
        ("void vllm::moe::moe_align_block_size_kernel<int>", "MoE"),
        ("void marlin_moe_wna16::Marlin<...>", "MoE"),
        ("grouped_topk_fused_kernel", "MoE"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "GEMM"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64", "GEMM"),
        ("void gemmSN_TN_kernel<float, 128, 16, 2, 4>", "GEMM"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", "GEMM"),
        ("void gemvx::kernel<int, int, __nv_bfloat16>", "GEMM"),
        ("void marlin::Marlin<__nv_bfloat16, 256, 1, 8, 8, 4>", "GEMM"),
        ("aten::addmm", "GEMM"),
        ("void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<64>>", "attention"),
        ("cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<...>>>", "attention"),
        ("void flashinfer::BatchDecodeWithPagedKVCacheKernel<...>", "attention"),
        ("kernel_unified_attention_2d", "attention"),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>", "attention"),
        ("void vllm::concat_and_cache_mla_kernel<__nv_bfloat16>", "attention"),
        ("fmhaSm100fKernel_QkvBfloat16OBfloat16H576", "attention"),
        ("flash_mla_sparse_fwd", "attention"),
        ("void vllm::rms_norm_kernel<c10::BFloat16, 8>", "other"),
        ("triton_poi_fused_mul_silu_slice_0", "other"),
        ("void at::native::vectorized_elementwise_kernel<4>", "other"),
        ("Memcpy DtoD (Device -> Device)", "other"),
    ],
)
def test_the_kind_of_a_kernel(name, kind):
    assert kernel_times.kind(name) == kind


def event(name, ts, dur, cat="kernel", tid=7, pid=0):
    """One complete event."""
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": pid, "tid": tid}


# Two steps of a rank; operators of the CPU stand beside and are not counted, since there are kernels.
CUDA = [
    {"ph": "M", "name": "process_name", "pid": 0},
    event("execute_context_0(0)_generation_1(1)", 0, 100, "user_annotation"),
    event("execute_context_0(0)_generation_1(1)", 100, 100, "user_annotation"),
    event("aten::mm", 0, 900, "cpu_op"),
    *(
        event(name, base + ts, dur)
        for base in (0, 100)
        for name, ts, dur in (
            ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)", 0, 50),
            ("nvjet_tst_64x8", 50, 20),
            ("fused_moe_kernel", 70, 15),
            ("flash_fwd_splitkv_kernel", 60, 10),  # on another stream, beside the two
            ("rms_norm_kernel", 85, 4),
        )
    ),
    event("Memcpy DtoH (Device -> Pinned)", 189, 2, "gpu_memcpy"),
]


def test_a_gpus_trace_is_summed_by_kernels_alone():
    found = kernel_times.shares(CUDA)
    assert (found["device"], found["steps"]) == ("gpu", 2)
    assert found["seconds"] == pytest.approx(200e-6)
    shares = {name: item["share"] for name, item in found["kinds"].items()}
    assert shares == pytest.approx({"all-reduce": 0.5, "GEMM": 0.2, "MoE": 0.15, "attention": 0.1, "other": 0.05})
    assert found["kinds"]["all-reduce"]["calls"] == 2
    assert found["busy_share"] == pytest.approx(180 / 191), "overlapping kernels count once, the gap counts not"


def test_a_cpu_operator_counts_without_what_it_calls():
    trace = [
        event("vllm::unified_attention", 0, 100, "cpu_op"),
        event("aten::copy_", 10, 30, "cpu_op"),
        event("aten::linear", 100, 60, "cpu_op"),
        event("aten::addmm", 105, 50, "cpu_op"),
        event("aten::silu", 160, 40, "cpu_op"),
        event("aten::mm", 0, 100, "cpu_op", tid=8),
    ]
    found = kernel_times.shares(trace)
    times = {name: round(item["seconds"] * 1e6) for name, item in found["kinds"].items() if item["calls"]}
    assert times == {"attention": 100, "GEMM": 160, "other": 40}
    assert (found["device"], found["steps"]) == ("cpu", None)


def test_the_recorded_trace_of_the_real_engine():
    """One decode step of the CPU build of vLLM 0.32: the names are as the engine wrote them."""
    found = kernel_times.shares(kernel_times.read(RECORDED))
    assert found["device"] == "cpu" and found["steps"] == 1
    shares = {name: item["share"] for name, item in found["kinds"].items()}
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["GEMM"] > 0.3 and shares["attention"] > 0.01 and shares["MoE"] == 0


def test_ranks_are_added_and_a_waiting_one_shows():
    early = [event("ncclDevKernel_AllReduce", 0, 900), event("nvjet", 900, 100)]
    late = [event("nvjet", 0, 900), event("ncclDevKernel_AllReduce", 900, 100)]
    report = kernel_times.combine([kernel_times.shares(early), kernel_times.shares(late)])
    assert report["kinds"]["all-reduce"]["share"] == pytest.approx(0.5)
    told = "\n".join(kernel_times.table(report))
    assert "(10.0 to 90.0 by rank)" in told and "of the all-reduce time 80 % is waiting" in told
    assert report["waiting_s"] == pytest.approx(800e-6)


def test_no_waiting_is_told_of_one_rank_or_of_traces_that_do_not_match():
    one, two = ([event("ncclDevKernel_AllReduce", 10 * i, 5) for i in range(count)] for count in (1, 2))
    assert kernel_times.combine([kernel_times.shares(one)])["waiting_s"] is None
    assert kernel_times.combine([kernel_times.shares(one), kernel_times.shares(two)])["waiting_s"] is None
    other = [event("ncclDevKernel_AllGather", 0, 50)]
    assert kernel_times.combine([kernel_times.shares(one), kernel_times.shares(other)])["waiting_s"] is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"not json", "expected a Chrome trace"),
        (b"{}", "expected a Chrome trace"),
        (b"\x1f\x8bbroken", "expected a Chrome trace"),
        (b'{"traceEvents": []}', "no kernel and no operator"),
    ],
)
def test_what_is_no_trace_is_one_line_on_standard_error(tmp_path, content, said):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    done = command(str(path))
    assert done.returncode == 1 and done.stdout == "" and said in done.stderr and done.stderr.count("\n") == 1


def command(*words):
    """The script with these words."""
    script = [sys.executable, str(ROOT / "scripts/profile_trace.py")]
    return subprocess.run([*script, *words], capture_output=True, text=True, check=False, timeout=60)


def test_the_command_prints_table_json_and_chart(tmp_path):
    path = tmp_path / "rank0.pt.trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": CUDA}).encode()))
    svg = tmp_path / "x.svg"
    done = command(str(path), "--svg", str(svg), "--title", "a < b")
    assert done.returncode == 0 and done.stdout.splitlines()[1].split()[:3] == ["all-reduce", "50.0", "%"]
    texts = [element.text for element in ElementTree.parse(svg).iter() if element.tag.endswith("text")]
    assert texts[:3] == ["a < b", "all-reduce", "50.0 %"]
    report = tmp_path / "report.json"
    report.write_text(command(str(path), "--json").stdout)
    assert command("--report", str(report)).stdout == done.stdout
    assert command().returncode == 2
