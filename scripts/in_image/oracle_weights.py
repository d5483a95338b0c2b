"""The oracle's weights: a target and an EAGLE-3 drafter that are right by construction, not by training.

Tokens lie on one cycle of 504 places, and a place is coded by one-hots modulo 7, 8 and 9: 24 channels, in which "move
k places" is a permutation. The target maps each token to the next place. Its residual stream holds a static code of
the token's place, a clock code that every layer's MLP moves on by STEP places, two marks that every layer's attention
swaps and its MLP swaps back, and constants. The squared norm is the hidden size for each token in each layer, so
RMSNorm is exactly a product with its weight. All weights but the drafter's attention pattern are small multiples of
powers of two: each sum is exact in bfloat16, in any order, on any hardware.

The drafter's `fc` turns each clock back by what its layer id says and compares it with the static code. With the right
states that cancels and the token's place is left. Any other state adds a larger term elsewhere: in each modulus in
which a clock is off, the right residue isn't the largest (see `fc`).
"""

import math
from typing import Any

import torch
from oracle_plan import (
    AMPLITUDE,
    CODE,
    DENSE_INNER,
    DRAFT_STEP,
    FAULT,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    MLA,
    MODULI,
    MOE_INNER,
    PHASES,
    PLACES,
    ROPE_BASE,
    STEP,
    VISION_HIDDEN,
    VISION_INNER,
    VOCAB,
    Oracle,
    draft_vocabulary,
    place,
)

# Channels of the residual stream. A drafter leaves the static code and the marks empty.
STATIC, CLOCK = slice(0, CODE), slice(CODE, 2 * CODE)
REST, TOGGLED, CONSTANTS = 2 * CODE, 2 * CODE + 1, 2 * CODE + 2

Weights = dict[str, Any]


def constants(square: int) -> list[float]:
    """Powers of two, none above 16, whose squares sum up to `square`."""
    values = []
    for value in (16, 8, 4, 2, 1):
        count, square = divmod(square, value**2)
        values += [float(value)] * count
    return values


# What is left of the squared norm: there are 3 ones in each code and one in the marks. The first two are 4.
TARGET_CONSTANTS = constants(HIDDEN - 3 - 3 - 1)
DRAFTER_CONSTANTS = constants(HIDDEN - 3)


def code(position: int) -> Any:
    """The code of a place, [CODE]."""
    row = torch.zeros(CODE)
    start = 0
    for modulus in MODULI:
        row[start + position % modulus] = 1
        start += modulus
    return row


def move(places: int) -> Any:
    """The permutation that turns the code of p into that of p + places, [CODE, CODE]."""
    return torch.block_diag(*(torch.roll(torch.eye(modulus), places, 0) for modulus in MODULI))


def norm(clock: float, static: float, rest: float) -> Any:
    """A norm's weight, [HIDDEN]. Clock above static: a state taken behind a norm is a wrong one for `fc`."""
    weight = torch.full((HIDDEN,), float(rest))
    weight[STATIC], weight[CLOCK] = static, clock
    return weight


def mlp(prefix: str, inner: int, change: Any, *, marks: bool = True) -> Weights:
    """An MLP that adds `change` [CODE, CODE] times the clock code to it, and takes the attention's mark back.

    Its norm has clock 2 and rest 2. Its gates read a constant 4 and are 16, where SiLU is the identity in bfloat16;
    where that constant is negative it adds nothing.
    """
    up, open_, down = torch.zeros(inner, HIDDEN), torch.zeros(inner, HIDDEN), torch.zeros(HIDDEN, inner)
    open_[: CODE + 1, CONSTANTS] = 2
    up[:CODE, CLOCK] = torch.eye(CODE) / 2
    down[CLOCK, :CODE] = change / 16
    if marks:
        up[CODE, TOGGLED] = 1 / 2
        down[REST, CODE], down[TOGGLED, CODE] = 1 / 16, -1 / 16
    names = ("gate_proj", "up_proj", "down_proj")
    return {f"{prefix}.{name}.weight": w for name, w in zip(names, (open_, up, down), strict=True)}


def empty_mla(inputs: int) -> Weights:
    """A latent attention whose scores are all zero and whose output is zero; its norms have clean inputs."""
    nope, rope, v = MLA["qk_nope_head_dim"], MLA["qk_rope_head_dim"], MLA["v_head_dim"]
    q, kv = MLA["q_lora_rank"], MLA["kv_lora_rank"]
    return {
        "q_a_proj": torch.zeros(q, inputs),
        "q_a_layernorm": torch.full((q,), 2.0),
        "q_b_proj": torch.zeros(HEADS * (nope + rope), q),
        "kv_a_proj_with_mqa": torch.zeros(kv + rope, inputs),
        "kv_a_layernorm": torch.full((kv,), 2.0),
        "kv_b_proj": torch.zeros(HEADS * (nope + v), kv),
        "o_proj": torch.zeros(HIDDEN, HEADS * v),
    }


def layer(oracle: Oracle, j: int) -> Weights:
    """Layer j of the target, without the prefix `model.layers.{j}.`. The first is dense, the others have experts."""
    nope, v = MLA["qk_nope_head_dim"], MLA["v_head_dim"]
    attention = empty_mla(HIDDEN)
    # Every value is the same, so that the mean over any context is: 1. Input norm: rest 2, the constant is an 8.
    attention["kv_a_proj_with_mqa"][:2, CONSTANTS] = 2
    for head in range(HEADS):
        attention["kv_b_proj"][head * (nope + v) + nope, 0] = 1 / 32
        attention["o_proj"][REST, head * v] = -1 / HEADS
        attention["o_proj"][TOGGLED, head * v] = 1 / HEADS
    weights = {f"self_attn.{name}.weight": weight for name, weight in attention.items()}
    weights["input_layernorm.weight"] = norm(4, 1 / 2, 2)
    weights["post_attention_layernorm.weight"] = norm(2, 1 / 2, 2)
    if j == 0:
        return weights | mlp("mlp", DENSE_INNER, move(STEP) - torch.eye(CODE))
    # The shared expert takes the old clock away, the two chosen ones write the new. They are chosen by their bias
    # alone: half of the others have a higher score, and write a wrong clock.
    chosen = {(2 * j + 1) % oracle.experts, (2 * j + 4) % oracle.experts}
    gate, bias = torch.zeros(oracle.experts, HIDDEN), torch.zeros(oracle.experts)
    weights |= mlp("mlp.shared_experts", MOE_INNER, -torch.eye(CODE))
    for e in range(oracle.experts):
        right = e in chosen
        gate[e, CONSTANTS] = 0 if right else 1 if e % 2 else -1
        bias[e] = 1 if right else 0
        weights |= mlp(f"mlp.experts.{e}", MOE_INNER, move(STEP if right else STEP + 3) / 2, marks=False)
    return weights | {"mlp.gate.weight": gate, "mlp.gate.e_score_correction_bias": bias}


def text(oracle: Oracle) -> Weights:
    """The target's language model, with the names of a DeepseekV3ForCausalLM. All float32."""
    embed, head = torch.zeros(VOCAB, HIDDEN), torch.zeros(VOCAB, HIDDEN)
    for token in range(VOCAB):
        embed[token, STATIC] = embed[token, CLOCK] = code(place(token))
        if token < PLACES:
            head[token, CLOCK] = code(place(token) - 1 + oracle.final)
    head[PLACES:, CONSTANTS + 1] = -8  # special tokens never win
    embed[:, REST] = 1
    embed[:, CONSTANTS : CONSTANTS + len(TARGET_CONSTANTS)] = torch.tensor(TARGET_CONSTANTS)
    weights = {"model.embed_tokens.weight": embed, "model.norm.weight": norm(2, 1 / 2, 1 / 4), "lm_head.weight": head}
    for j in range(oracle.layers):
        weights |= {f"model.layers.{j}.{name}": weight for name, weight in layer(oracle, j).items()}
    return weights


def vision() -> Weights:
    """A tiny vision tower and projector, all zero but the norms: there for engines that load them, never used."""
    width, inner, merged = VISION_HIDDEN, VISION_INNER, 4 * VISION_HIDDEN
    block = "vision_tower.encoder.blocks.0."
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj.weight": (width, 3, 14, 14),
        "vision_tower.patch_embed.proj.bias": (width,),
        "vision_tower.patch_embed.pos_emb.weight": (4, 4, width),
        f"{block}wqkv.weight": (3 * width, width),
        f"{block}wqkv.bias": (3 * width,),
        f"{block}wo.weight": (width, width),
        f"{block}wo.bias": (width,),
        f"{block}mlp.fc0.weight": (inner, width),
        f"{block}mlp.fc0.bias": (inner,),
        f"{block}mlp.fc1.weight": (width, inner),
        f"{block}mlp.fc1.bias": (width,),
        "mm_projector.proj.0.weight": (merged, merged),
        "mm_projector.proj.0.bias": (merged,),
        "mm_projector.proj.2.weight": (HIDDEN, merged),
        "mm_projector.proj.2.bias": (HIDDEN,),
    }
    weights = {name: torch.zeros(shape) for name, shape in shapes.items()}
    norms = (f"{block}norm0", f"{block}norm1", "vision_tower.encoder.final_layernorm", "mm_projector.pre_norm")
    for name in norms:
        weights |= {f"{name}.weight": torch.ones(width), f"{name}.bias": torch.zeros(width)}
    return weights


def target(oracle: Oracle) -> Weights:
    """The whole target as its checkpoint has it: bfloat16, and the experts' biases in float32."""
    weights = {f"language_model.{name}": weight for name, weight in text(oracle).items()}
    return stored(weights | vision())


def fc(oracle: Oracle) -> Any:
    """[HIDDEN, 3 * HIDDEN]: the place from the first static code, and what each clock differs from its static code by.

    The difference is written where the place is, one on, and FAULT on: 8, 8 and 12 times. Count residues from the
    place, p = 0, and say that a clock is off by d, not 0 modulo 7. That adds -8, -8, -12 at 0, 1, FAULT and 8, 8, 12 at
    d, 1 + d, FAULT + d. So the largest is neither at 0 nor at 1, also if several clocks are off: what lifts 0 is
    d = -FAULT with 12 - 8, which puts 8 at -FAULT; what lifts 1 is d = 1 - FAULT, which puts 8 at 1 - FAULT. Whether
    the MLP then moves it on or not, the draft is wrong. If the residual stream is missing the static code is 0, there
    are 8, 8, 12 at 0, 1, FAULT, and FAULT wins. The moduli leave room for all this: see FAULT.
    """
    weight = torch.zeros(HIDDEN, 3 * HIDDEN)
    to_final = move(oracle.final)
    apart = 8 * move(0) + 8 * move(DRAFT_STEP) + 12 * move(FAULT)
    weight[CLOCK, STATIC] = to_final
    for k, layer_id in enumerate(oracle.ids):
        state = weight[:, k * HIDDEN : (k + 1) * HIDDEN]
        state[CLOCK, CLOCK] += to_final @ apart @ move(-layer_id * STEP)
        state[CLOCK, STATIC] -= to_final @ apart
        # A state from between attention and MLP has this mark: the constant that opens the MLP's gates is 4 - 16, so
        # that the draft stays where it is.
        state[CONSTANTS, TOGGLED] = -16
    for i, value in enumerate(DRAFTER_CONSTANTS):
        weight[CONSTANTS + i, CONSTANTS] = value / 4
    return weight


def pattern(distance: int) -> Any:
    """A query's first PHASES rotary pairs, [PHASES, 2], for a key of (AMPLITUDE, 0) that many positions before it."""
    angles = [distance * ROPE_BASE ** (-2 * j / HEAD_DIM) for j in range(PHASES)]
    return torch.tensor([[AMPLITUDE * math.cos(a), -AMPLITUDE * math.sin(a)] for a in angles])


def values(oracle: Oracle) -> tuple[Any, Any]:
    """What head 0 takes from its own position and head 1 from the one before: [CODE, 2 * CODE] each.

    Inputs are the next token's code (from its embedding) and the drafter's own, x. Head 0: the next token one place
    back, minus twice x. Head 1: the next token there, which is the token here. Their sum is 0 if all is right.
    """
    own, previous = torch.zeros(CODE, 2 * CODE), torch.zeros(CODE, 2 * CODE)
    own[:, :CODE], own[:, CODE:] = move(oracle.final - 1), -2 * torch.eye(CODE)
    previous[:, :CODE] = move(oracle.final)
    return own, previous


def drafter_attention(oracle: Oracle) -> Weights:
    """The drafter's attention on [embedding, hidden], whose norms are 2 on the static code and on all else."""
    embedded, hidden, constant = slice(0, CODE), slice(HIDDEN + CODE, HIDDEN + 2 * CODE), HIDDEN + CONSTANTS + 1
    queries = (pattern(0), pattern(1))
    key = torch.tensor([[AMPLITUDE, 0.0]] * PHASES)
    size = DRAFTER_CONSTANTS[1] * 2  # of the constant that queries and keys are made of
    if oracle.drafter == "llama":
        q, k, v = (torch.zeros(HEADS, HEAD_DIM, 2 * HIDDEN) for _ in range(3))
        o = torch.zeros(HIDDEN, HEADS * HEAD_DIM)
        if oracle.attention:
            for head, (query, value) in enumerate(zip(queries, values(oracle), strict=True)):
                for side in range(2):  # rotary pairs are (j, j + 32)
                    q[head, side * HEAD_DIM // 2 :][:PHASES, constant] = query[:, side] / size
                    k[head, side * HEAD_DIM // 2 :][:PHASES, constant] = key[:, side] / size
                v[head, :CODE, embedded], v[head, :CODE, hidden] = value[:, :CODE] / 2, value[:, CODE:] / 2
                o[CLOCK, head * HEAD_DIM : head * HEAD_DIM + CODE] = 4 * move(FAULT)
        flat = {"q_proj": q, "k_proj": k, "v_proj": v}
        return {name: weight.reshape(-1, 2 * HIDDEN) for name, weight in flat.items()} | {"o_proj": o}
    weights = empty_mla(2 * HIDDEN)
    if oracle.attention:
        nope, rope, v_dim, rank = (
            MLA[n] for n in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
        )
        for name, square, start in (("q_a_proj", MLA["q_lora_rank"], 0), ("kv_a_proj_with_mqa", rank - 6, 2 * CODE)):
            for i, value in enumerate(constants(square)):
                weights[name][start + i, constant] = value / size
        weights["kv_a_proj_with_mqa"][:CODE, embedded] = torch.eye(CODE) / 2
        weights["kv_a_proj_with_mqa"][CODE : 2 * CODE, hidden] = torch.eye(CODE) / 2
        weights["kv_a_proj_with_mqa"][rank : rank + 2 * PHASES, constant] = key.flatten() / size  # pairs (2j, 2j + 1)
        first = constants(MLA["q_lora_rank"])[0] * 2
        for head, (query, value) in enumerate(zip(queries, values(oracle), strict=True)):
            at = head * (nope + rope) + nope
            weights["q_b_proj"][at : at + 2 * PHASES, 0] = query.flatten() / first
            at = head * (nope + v_dim) + nope
            weights["kv_b_proj"][at : at + CODE, : 2 * CODE] = value / 2
            weights["o_proj"][CLOCK, head * v_dim : head * v_dim + CODE] = 4 * move(FAULT)
    return weights


def drafter(oracle: Oracle) -> Weights:
    """The drafter as its checkpoint has it. With a partial vocabulary it has an lm_head of its own."""
    weights = {f"midlayer.self_attn.{name}.weight": weight for name, weight in drafter_attention(oracle).items()}
    weights |= mlp("midlayer.mlp", DENSE_INNER, move(DRAFT_STEP) - torch.eye(CODE), marks=False)
    weights |= {
        "fc.weight": fc(oracle),
        "midlayer.input_layernorm.weight": norm(4, 2, 1 / 2),
        "midlayer.hidden_norm.weight": norm(2, 1 / 2, 2),
        "midlayer.post_attention_layernorm.weight": norm(2, 1 / 2, 2),
        "norm.weight": norm(4, 1 / 2, 1 / 2),
    }
    if oracle.partial:
        vocabulary = torch.tensor(draft_vocabulary(oracle))
        weights["lm_head.weight"] = text(oracle)["lm_head.weight"][vocabulary]
        weights["d2t"] = vocabulary - torch.arange(len(vocabulary))
        weights["t2d"] = torch.isin(torch.arange(VOCAB), vocabulary)
    return stored(weights)


def stored(weights: Weights) -> Weights:
    """Weights in a checkpoint's types. Raises ValueError where bfloat16 can't hold one that has to be exact."""
    rounded = {"midlayer.self_attn.q_proj.weight", "midlayer.self_attn.q_b_proj.weight"}
    result = {}
    for name, weight in weights.items():
        own = name in ("d2t", "t2d") or name.endswith("e_score_correction_bias")
        result[name] = weight.contiguous() if own else weight.to(torch.bfloat16).contiguous()
        if name not in rounded and not torch.equal(result[name].to(weight.dtype), weight):
            raise ValueError(f"{name} is not exact in bfloat16")
    return result
