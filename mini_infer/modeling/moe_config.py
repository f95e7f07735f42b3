"""What the config.json of a mixture of experts says of its feed-forward layers. `source` names the file in errors."""

from __future__ import annotations

from typing import Any

from mini_infer.core.errors import ModelError
from mini_infer.kernels.interface import RouterSpec, Scores
from mini_infer.modeling.spec import ExpertNames, FeedForwardSpec, MLPSpec, MoESpec

FeedForwards = tuple[FeedForwardSpec, ...]  # one a layer


def qwen_moe(config: Any, source: str) -> FeedForwards:
    """Qwen2-MoE, with a shared expert and a gate before it, and Qwen3-MoE: every decoder_sparse_step-th layer, but for
    those that mlp_only_layers names."""
    _require_positive(config, source, "moe_intermediate_size", "decoder_sparse_step")
    router = RouterSpec(config.num_experts, config.num_experts_per_tok, normalize=config.norm_topk_prob)
    shared = getattr(config, "shared_expert_intermediate_size", None)
    sparse = MoESpec(
        _checked(router, source),
        config.moe_intermediate_size,
        None if shared is None else MLPSpec(shared),
        shared_gate=shared is not None,
        names=ExpertNames(shared="shared_expert"),
    )
    dense = MLPSpec(config.intermediate_size)
    every, only_dense = config.decoder_sparse_step, config.mlp_only_layers or ()
    layers = range(config.num_hidden_layers)
    return tuple(dense if layer in only_dense or (layer + 1) % every else sparse for layer in layers)


def mixtral(config: Any, source: str) -> FeedForwards:
    router = RouterSpec(config.num_local_experts, config.num_experts_per_tok, normalize=True)
    names = ExpertNames("block_sparse_moe", "w1", "w3", "w2")
    return (MoESpec(_checked(router, source), config.intermediate_size, names=names),) * config.num_hidden_layers


def olmoe(config: Any, source: str) -> FeedForwards:
    if config.clip_qkv is not None:
        raise ModelError(f"{source}: clip_qkv={config.clip_qkv} is not supported; only null is")
    router = RouterSpec(config.num_experts, config.num_experts_per_tok, normalize=config.norm_topk_prob)
    return (MoESpec(_checked(router, source), config.intermediate_size),) * config.num_hidden_layers


# topk_method of a DeepSeek config -> its scores, the choices of a group that are added up (None: there are no groups),
# and whether there is a correction bias.
_DEEPSEEK = {
    "greedy": (Scores.softmax, None, False),
    "group_limited_greedy": (Scores.softmax, 1, False),
    "noaux_tc": (Scores.sigmoid, 2, True),
}


def deepseek(config: Any, source: str) -> FeedForwards:
    """DeepSeek-V2 (arXiv:2405.04434) and V3 (arXiv:2412.19437): the first layers are dense."""
    method = getattr(config, "topk_method", None) or ("noaux_tc" if config.model_type == "deepseek_v3" else "greedy")
    if method not in _DEEPSEEK:
        raise ModelError(f"{source}: topk_method={method!r} is no router that is known here: {', '.join(_DEEPSEEK)}")
    scores, group_top, bias = _DEEPSEEK[method]
    if (own := getattr(config, "scoring_func", scores.value)) != scores.value:
        raise ModelError(f"{source}: topk_method={method!r} goes with scoring_func={scores.value!r}, not {own!r}")
    if config.norm_topk_prob and scores is Scores.softmax:
        raise ModelError(f"{source}: norm_topk_prob=true with topk_method={method!r} is not supported")
    _require_positive(config, source, "moe_intermediate_size")
    router = RouterSpec(
        config.n_routed_experts,
        config.num_experts_per_tok,
        scores,
        normalize=bool(config.norm_topk_prob),
        scale=config.routed_scaling_factor,
        correction_bias=bias,
        num_groups=config.n_group if group_top else 1,
        top_groups=config.topk_group if group_top else 1,
        group_top=group_top or 1,
        float32_logits=True,
    )
    inner, shared = config.moe_intermediate_size, config.n_shared_experts
    sparse = MoESpec(_checked(router, source), inner, MLPSpec(inner * shared) if shared else None)
    dense = MLPSpec(config.intermediate_size)
    first, every = config.first_k_dense_replace, getattr(config, "moe_layer_freq", 1)
    layers = range(config.num_hidden_layers)
    return tuple(sparse if layer >= first and layer % every == 0 else dense for layer in layers)


def _checked(router: RouterSpec, source: str) -> RouterSpec:
    """Raises ModelError for a choice that cannot be made."""
    experts, groups = router.num_experts, router.num_groups
    if not 1 <= router.top_k <= experts:
        raise ModelError(f"{source}: num_experts_per_tok={router.top_k} of {experts} experts")
    if groups < 1 or experts % groups or not 1 <= router.top_groups <= groups:
        raise ModelError(f"{source}: topk_group={router.top_groups} of n_group={groups} groups of {experts} experts")
    in_groups = experts // groups
    if router.top_k > router.top_groups * in_groups or router.group_top > in_groups:
        chosen = f"num_experts_per_tok={router.top_k} of topk_group={router.top_groups}"
        raise ModelError(f"{source}: {chosen} groups of {in_groups} experts")
    return router


def _require_positive(config: Any, source: str, *names: str) -> None:
    for name in names:
        if not getattr(config, name) >= 1:
            raise ModelError(f"{source}: {name}={getattr(config, name)} must be at least 1")
