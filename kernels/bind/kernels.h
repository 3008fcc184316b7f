// The kernels that both devices have, by operation and struct: what CpuCall and CudaCall choose from.
#pragma once

#define KDTREE_KERNELS(X) \
  X(embed, EmbedArgs) \
  X(rms_norm, RmsNormArgs) \
  X(pack_linear, PackLinearArgs) \
  X(dequantize_int4, DequantizeInt4Args) \
  X(pack_int4, PackInt4Args) \
  X(linear, LinearArgs) \
  X(rope, RopeArgs) \
  X(swiglu, SwigluArgs) \
  X(residual_add, ResidualAddArgs) \
  X(add_partials, AddPartialsArgs) \
  X(argmax, ArgmaxArgs) \
  X(sample, SampleArgs) \
  X(sample_among, SampleAmongArgs) \
  X(moe_route, MoeRouteArgs) \
  X(moe_experts, MoeExpertsArgs) \
  X(cache_append, CacheAppendArgs) \
  X(latent_append, LatentAppendArgs) \
  X(absorb_query, AbsorbQueryArgs) \
  X(cache_compact, CacheCompactArgs) \
  X(verify_attn, VerifyAttnArgs) \
  X(context_append, ContextAppendArgs) \
  X(block_attn, BlockAttnArgs) \
  X(draft_topk, DraftTopkArgs) \
  X(draft_topk_merge, DraftTopkMergeArgs) \
  X(tree_build, TreeBuildArgs) \
  X(tree_rows, TreeRowsArgs) \
  X(tree_accept, TreeAcceptArgs) \
  X(step_commit, StepCommitArgs) \
  X(accepted_features, AcceptedFeaturesArgs)
