"""The groups of the training step's profile, by names of kernels as a GPU reported them."""

import pytest

from benchmarks.train_step import GROUPS, group_of

NAMES = {
    "attention_hopper_backward_kv_kernel": "attention",
    "absorbed_backward_kernel": "attention",
    "candidate_rows_backward_kernel": "attention",
    "lmsd_forward_kernel": "LMSD",
    "layer_norm_backward_kernel": "norms",
    "swish_layer_norm_forward_kernel": "norms",
    "void split_embedding_nobag_codegen_forward_unweighted_kernel<float>": "embeddings",
    "void linearize_index_kernel<long, long, true, false>": "embeddings",
    "copy_rows_kernel": "embeddings",
    "encode_backward_kernel": "encoding",
    "piece_sums_kernel": "encoding",
    "void cub::detail::radix_sort::DeviceRadixSortOnesweepKernel<...>": "encoding",
    "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_splitK_NTN": "products",
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8": "products",
    "column_sums_kernel": "sums",
    "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<c10::BFloat16, ...>>": "sums",
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(...)>": "copies and casts",
    "Memset (Device)": "copies and casts",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...>": "optimizer",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<long>>": "other",
}


@pytest.mark.parametrize("name,group", NAMES.items())
def test_a_kernel_is_counted_where_it_belongs(name, group):
    assert group_of(name) == group


def test_every_group_is_named_once():
    assert set(NAMES.values()) == {*GROUPS, "other"}
    pieces = [piece for group in GROUPS.values() for piece in group]
    assert len(pieces) == len(set(pieces)) and all(piece == piece.lower() for piece in pieces)
