"""Our names of parameters and transformers'. Nothing else differs: our rotary layout is theirs."""

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

_BLOCK_NAMES = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
_OUTER_NAMES = {
    "tok_embed.weight": EMBEDDING,
    "norm.weight": "model.norm.weight",
    "output.weight": HEAD,
}


def their_name(name: str) -> str:
    """`layers.3.attention.wq.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    _, number, *parts, kind = name.split(".")
    return f"model.layers.{number}.{_BLOCK_NAMES['.'.join(parts)]}.{kind}"
