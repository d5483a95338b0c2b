"""What the oracle is before it has weights: its sizes, and the cycle of tokens that all of it is about. No torch."""

import math
from dataclasses import dataclass

MODULI = (7, 8, 9)
PLACES = math.prod(MODULI)  # ordinary tokens, ids 0 to 503; the special ones follow
CODE = sum(MODULI)
VOCAB = 576
HIDDEN = 64
STEP = 11  # places that the clock moves in a layer; no two of 61 layers meet
DRAFT_STEP = 1  # places that the drafter moves on in a step
# Where a wrong state's term goes. Modulo 7, 8 and 9: not -1, 0, 1 or 2; twice it is neither 0 nor 1; and with STEP it
# adds up to neither 0 nor 1.
FAULT = 75
HEADS = 8  # as many GPUs as a real server has
DENSE_INNER = 256
MOE_INNER = 256
EXPERTS_PER_TOKEN = 2
ROUTED_SCALE = 2.0
MLA = {"q_lora_rank": 32, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32}
HEAD_DIM = 64  # of a Llama drafter: the same rotary frequencies as the latent attention's
ROPE_BASE = 10000.0
PHASES = 8  # rotary frequencies in use: 8 tell two distances up to 4096 apart by a score of 110 in an exponent
AMPLITUDE = 32.0
DROPPED = (3, 9)  # a partial draft vocabulary lacks the tokens at places 3 modulo 9
VISION_HIDDEN, VISION_HEADS, VISION_INNER = 32, 2, 32


@dataclass(frozen=True)
class Oracle:
    """What the weights are made for. `ids`: the layers whose input the drafter wants, as transformers counts them."""

    layers: int
    ids: tuple[int, ...]
    drafter: str = "llama"
    attention: bool = True
    partial: bool = False
    experts: int = 8

    @property
    def final(self) -> int:
        """How far the clock has moved when the last layer is done, in places."""
        return self.layers * STEP % PLACES


def place(token: int) -> int:
    """The place of a token on the cycle. Special tokens share one with an ordinary token."""
    return (101 * token + 7) % PLACES


def following(token: int) -> int:
    """The token that the target puts after `token`."""
    return pow(101, -1, PLACES) * (place(token) + 1 - 7) % PLACES


def draft_vocabulary(oracle: Oracle) -> list[int]:
    """The target's tokens that the drafter can write, in the order of its own ids."""
    remainder, modulus = DROPPED
    return [t for t in range(VOCAB) if not (oracle.partial and t < PLACES and place(t) % modulus == remainder)]
