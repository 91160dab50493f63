"""Kernels by their names."""

import ast
from pathlib import Path

import pytest
from analysis.budget import categorize, shorten

KERNELS = Path(__file__).parents[2] / "kernels" / "effasr_kernels"
OWN = {
    "attention": "attention_forward attention_backward_kv attention_backward_q attention_delta "
    "attend_one attend_several merge_parts rotate scores grad_queries grad_table fill_tile_table",
    "convolution": "convolve convolve_backward stem_forward stem_backward stem_patches "
    "strided_forward strided_backward",
    "copy": "append_rows",
    "elementwise": "activate activate_backward activate_gated activate_gated_backward "
    "cut_windows mask_rows sum_rows sum_segments",
    "lattice": "sweep_forward sweep_backward sweep_durations_forward sweep_durations_backward "
    "differentiate differentiate_kept divide finish_frames finish_states fold join place_nodes "
    "score align spread",
    "loss": "_grad_logits_kernel _upstream_scale_kernel _finish_statistics _loss_and_grad_kernel "
    "_partial_normalizers label_gradient merge_repeats score_labels softmax_gradient",
    "matmul": "multiply multiply_transposed rank_parts",
    "normalisation": "add_norm add_norm_backward normalize normalize_backward normalize_rows "
    "sum_gradients update",
    "optimizer": "adamw_chunk adamw_squares",
}
"""Kernels of effasr_kernels by category."""
LAMBDA = (
    "at::native::gpu_kernel_impl_nocast<at::native::log_kernel_cuda()::[lambda() (instance 1)]>"
)


NAMES = {
    "matmul": [
        "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x256x8_cublas",
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN",
        "void cublasLt::splitKreduce_kernel<32, 16, int>(cublasSplitKParams<float>)",
        *("aten::addmm", "autograd::engine::evaluate_function: BmmBackward0"),
    ],
    "communication": [
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "gloo:all_reduce",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>(Flash_fwd_params)",
        "void at::native::(anonymous namespace)::softmax_warp_forward<float>(float*)",
    ],
    "loss": [
        "at::native::(anonymous namespace)::cunn_SoftMaxForward<LogSoftMaxForwardEpilogue>",
        *("aten::_log_softmax", "nll_loss_forward_reduce_cuda_kernel_2d"),
        "void ctc_loss_log_alpha_gpu_kernel<float>()",
    ],
    "convolution": ["void cudnn::cnn::conv2d_grouped_direct_kernel<false>()"],
    "normalisation": [
        "void at::native::vectorized_layer_norm_kernel<float>()",
        "void at::native::batch_norm_collect_statistics_kernel<InvStd>()",
        "NativeLayerNormBackward0",
    ],
    "optimizer": [
        "multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>",
        "aten::_fused_adamw_",
    ],
    "elementwise": [
        f"void at::native::elementwise_kernel<128, 4, {LAMBDA}>(int)",
        *("triton_poi_fused_silu_mul_0", "aten::mul", "ReluBackward0"),
    ],
    "copy": [
        "void at::native::unrolled_elementwise_kernel<direct_copy_kernel_cuda()>(int)",
        *("Memcpy HtoD (pinned -> device)", "Memset"),
    ],
    "other": ["my_own_thing"],
}


@pytest.mark.parametrize("category", NAMES)
def test_the_name_tells_the_category(category: str) -> None:
    assert {name: categorize(name) for name in NAMES[category]} == dict.fromkeys(
        NAMES[category], category
    )


def launched() -> set[str]:
    """Return the names of the Triton kernels of effasr_kernels that the host launches."""
    kernels, named = set(), set()
    for path in KERNELS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.FunctionDef(decorator_list=[decorator]):
                    if "triton.jit" in ast.unparse(decorator):
                        kernels.add(node.name)
                case ast.Call(ast.Name("launch" | "_launch"), [kernel, *_]) | ast.Call(
                    ast.Name("partial"), [ast.Name("launch"), kernel, *_]
                ):
                    for part in ast.walk(kernel):
                        named |= {getattr(part, "id", None), getattr(part, "attr", None)}
    return kernels & named


def test_every_kernel_of_effasr_has_its_category() -> None:
    expected = {name: category for category, names in OWN.items() for name in names.split()}
    assert {name: categorize(name) for name in launched()} == expected


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("ncclDevKernel_Sum_bf16(ncclDevKernelArgsStorage<4096ul>)", "ncclDevKernel_Sum_bf16"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)",
         "at::native::vectorized_elementwise_kernel<FillFunctor>"),
        (f"void at::native::elementwise_kernel<128, 4, {LAMBDA}>(int)",
         "at::native::elementwise_kernel<log_kernel_cuda>"),
        ("void (anonymous namespace)::kernel<int>(float*)", "kernel<…>"),
        ("void <unnamed>::kernel(float*)", "kernel"),
        ("Memcpy HtoD (pageable -> device)", "Memcpy HtoD (pageable -> device)"),
        ("CUDA graph 5 (whole)", "CUDA graph 5 (whole)"),
        ("x" * 200, "x" * 95 + "…"),
    ],
)  # fmt: skip
def test_names_are_cut_to_what_tells_them_apart(name: str, short: str) -> None:
    assert shorten(name) == short
