"""Assigns a category of work to a kernel by its name.

The first pattern that matches the name decides, in this order: a name for the kernel's purpose
(``flash_fwd``, ``nll_loss``) comes before one for its implementation (``elementwise``). The
patterns are part of report.json. A softmax alone counts as attention, and a copy kernel, which
runs on the multiprocessors, as copy. Of effasr_kernels, whose kernels have short names, the whole
name is matched; ``normalize`` and ``merge_parts`` are names of kernels of several operations, and
count for the most frequent one.
"""

from __future__ import annotations

import re

COMMUNICATION, COPY, DATA, OTHER = "communication", "copy", "data", "other"

PATTERNS: dict[str, str] = {
    COMMUNICATION: r"nccl|nvshmem|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all"
    r"|\bgloo:|\bc10d::|\bmpi:|one_shot_|two_shot_",
    # The recursions of the transducer and of CTC, and what is fused with them.
    "lattice": r"transducer|rnnt|lattice|^_?sweep_|^_?finish_frames|^_?place_nodes"
    r"|^finish_states$|^differentiate(_kept)?$|^_?(fold|join|search|score|divide)$",
    "optimizer": r"adam|multi_tensor_apply|_foreach_|fused_?optim|(?<![a-z])lamb(?!da)|\bsgd"
    r"|clip_grad|Optimizer\.",
    "loss": r"log_?softmax|nll_loss|cross_?entropy|(?<![a-z])ctc|kl_div|(^|_)loss"
    r"|^_?(label_gradient|softmax_gradient|score_labels|merge_repeats)"
    r"|^_differentiate$|^_lose_and_|^_find_scale$|^_partial_normalizers$|^_finish_statistics$",
    "attention": r"flash|fmha|attention|attn|softmax|^_?(grad_queries|grad_table|turn\b"
    r"|add_content_bias|scores$|fill_tile_table$)|^(attend_(one|several)|merge_parts|rotate)$",
    "convolution": r"conv(?!ert)|fprop|dgrad|wgrad|winograd|im2col|col2im|implicit_?gemm"
    r"|^_?(stem|strided)_|^_?merge$",
    "matmul": r"gemm|gemv|cutlass|cublas|nvjet|splitk|xmma|matmul|_mm\b|::mm\b|::bmm|addmm|baddbmm"
    r"|linear|einsum|::dot\b|wgmma|^(multiply(_transposed)?|rank_parts)$",
    "normalisation": r"layer_?norm|batch_?norm|group_?norm|rms_?norm|instance_?norm|welford"
    r"|bn_(fw|bw)|_norm\b|::norm\b|^normalize(_rows|_backward)?$|^add_norm_backward$"
    r"|^(sum_gradients|update)$",
    COPY: r"^memcpy|^memset|copy|catarray|::cat\b|::clone|::contiguous|::to\b|^append_rows$",
    "elementwise": r"elementwise|pointwise|vectorized|unrolled|triton_(poi|red|per)|reduce|dropout"
    r"|bernoulli|random|distribution|::(add|sub|mul|div|neg|relu|silu|sigmoid|glu|gelu|tanh|exp"
    r"|log|sqrt|rsqrt|pow|sum|mean|where|fill|zero|masked|clamp|threshold|maximum|minimum|abs"
    r"|lerp|addc|copysign|sign|reciprocal|std|var|bitwise|logical|gt|lt|ge|le|eq|ne)\w*\b"
    r"|multiply|divide|subtract|sqrt|cub::|scan|sort|gather|scatter|index|embedding|fill"
    r"|^activate(_gated)?(_backward)?$|^(mask_rows|cut_windows)$|^sum_(rows|segments)$",
}
_COMPILED = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in PATTERNS.items()}
_NODE = re.compile(r"(?:autograd::engine::evaluate_function: )?(\w+?)Backward\d*$")
"""A node of autograd's graph, after the operator that it belongs to."""
_UNNAMED = re.compile(r"(\(anonymous namespace\)|<unnamed>)::")
_HINT = re.compile(r"\b(?!gpu_kernel_impl)\w*(?:[Ff]unctor|_kernel|_cuda|Op|Kernel)\w*")
"""Names in template parameters that distinguish kernels of the same name.

``gpu_kernel_impl`` is a parameter of many PyTorch kernels, copies and elementwise ones.
"""
CATEGORIES = (*PATTERNS, OTHER)


def categorize(name: str) -> str:
    """Return the category of a kernel, copy or operator of this name."""
    node = _NODE.match(name)
    if node:
        name = f"aten::{node[1]}"
    for category, pattern in _COMPILED.items():
        if pattern.search(name):
            return category
    return OTHER


def shorten(name: str, longest: int = 96) -> str:
    """Return a C++ name without its return type, arguments and most of its template parameters."""
    text = _UNNAMED.sub("", name).removeprefix("void ")
    text = text[: _arguments_at(text)]
    head, _, rest = text.partition("<")
    if rest:
        hint = next((word for word in _HINT.findall(rest) if word not in head), "…")
        text = f"{head}<{hint}>"
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _arguments_at(name: str) -> int:
    """Return where the arguments of a function begin: at a bracket right after its name."""
    depth = 0
    for place, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if (
            letter == "("
            and depth == 0
            and place
            and (name[place - 1].isalnum() or name[place - 1] in "_>")
        ):
            return place
    return len(name)
