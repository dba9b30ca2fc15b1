"""Pieces of real dumps: of Mosaic GPU and ptxas 13.5 for sm_90a, and of libtpu 0.0.52 for v5e."""

PTXAS = """\
ptxas info    : (C7519) warpgroup.arrive is injected in around line 652 by compiler to allow use
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'sum_moments_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for sum_moments_mosaic_gpu_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 158 registers, used 2 barriers, 1 bytes smem
ptxas info    : Compile time = 99.345 ms
"""

SPILLING_PTXAS = PTXAS.replace(
    "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads",
    "72 bytes stack frame, 64 bytes spill stores, 96 bytes spill loads",
)

PTX = """\
.visible .entry sum_moments_mosaic_gpu_kernel(
)
.maxntid 128, 1, 1
.minnctapersm 1
{
	cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd2];
	cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd4];
	cp.async.bulk.commit_group;
	wgmma.fence.sync.aligned;
	wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r5}, %rd6, p, 1, 1, 1, 0;
	wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r5}, %rd6, p, 1, 1, 1, 0;
	wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r5}, %rd6, p, 1, 1, 1, 0;
	wgmma.commit_group.sync.aligned;
	cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%rd4], [%r1];
}
"""

MODULE = """\
module @sum_moments attributes {mosaic_gpu.arch_major = 9 : i32} {
    %c70688_i32 = arith.constant 70688 : i32
    %117 = gpu.launch async [%19] blocks(%arg2, %arg3, %arg4) in (%arg8 = %c1, %arg9 = %c1, \
%arg10 = %c192) threads(%arg5, %arg6, %arg7) in (%arg11 = %c128, %arg12 = %c1, %arg13 = %c1) \
dynamic_shared_memory_size %c70688_i32 {
"""

UTILIZATION = """\
== CAPACTIY:
MATMUL, MATPUSH, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU
    4     4     3     4     2     1     3     3     1     1     2
== UTILIZATION:
0 0 0 0 0 0 0 0 0 0 1
4 1 0 2 0 0 3 1 0 0 0
4 0 0 2 0 0 0 0 1 1 0
1 0 0 0 1 0 0 0 1 1 0
0 0 0 0 0 0 1 0 0 0 0
"""

HLO = """\
  %copy.1 = bf16[8]{0} copy(%x), backend_config={"used_scoped_memory_configs":[{"memory_space":"1",\
"offset":"0","size":"7933952"}]}
  ROOT %kernel.1 = bf16[8]{0} custom-call(%copy.1), custom_call_target="tpu_custom_call", \
backend_config={"scoped_memory_configs":[],"used_scoped_memory_configs":[{"memory_space":"1",\
"offset":"0","size":"2886656"}],"retry_config":{"retry_count":"0"}}
"""
