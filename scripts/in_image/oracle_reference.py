"""The oracle without an engine: transformers computes the target, and the drafter is written out in plain torch.

So an engine's result can be read: if this check passes and the engine's acceptance length is not what oracle.json says,
then the engine is wrong, not the weights. Each fault here is one that an engine can have.
"""

import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from oracle_plan import HEAD_DIM, HEADS, HIDDEN, MLA, ROPE_BASE, Oracle, draft_vocabulary
from safetensors.torch import load_file, save_file

DRAFT_TOKENS = 3
STARTS = 40  # places in the output from which drafts are made
EPSILON = 1e-6


@dataclass(frozen=True)
class Result:
    """One check: how many draft tokens were right before the first wrong one, of how many, and how many must be."""

    name: str
    found: int
    of: int
    expected: int

    @property
    def passed(self) -> bool:
        return self.found == self.expected and self.of > 0


@dataclass(frozen=True)
class States:
    """What the target computes for a sequence: each [tokens, HIDDEN].

    `inputs[j]` is the input of layer j, `attention[j]` and `mlp[j]` what those add to it, `normed[j]` the input behind
    its norm. `inputs` has one more: transformers' last hidden state. `output`: the token that follows each.
    """

    inputs: list[Any]
    attention: list[Any]
    mlp: list[Any]
    normed: list[Any]
    output: list[int]


def rms_norm(x: Any, weight: Any) -> Any:
    """Root mean square norm over the last dimension."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON) * weight


def states(folder: Path, tokens: Sequence[int]) -> States:
    """Run the target in `folder` on `tokens` with transformers' DeepseekV3ForCausalLM in float32."""
    from transformers import DeepseekV3ForCausalLM

    config = json.loads((folder / "config.json").read_text())["text_config"] | {"model_type": "deepseek_v3"}
    prefix = "language_model."
    weights = load_file(folder / "model.safetensors")
    with tempfile.TemporaryDirectory() as work:
        (Path(work) / "config.json").write_text(json.dumps(config))
        own = {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
        save_file(own, Path(work) / "model.safetensors", metadata={"format": "pt"})
        model = DeepseekV3ForCausalLM.from_pretrained(work, attn_implementation="eager", dtype=torch.float32).eval()
    kept: dict[tuple[str, int], Any] = {}

    def keep(part: str, j: int) -> Callable[..., None]:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            kept[part, j] = (output[0] if isinstance(output, tuple) else output).reshape(len(tokens), -1)

        return hook

    for j, layer in enumerate(model.model.layers):
        for part in ("self_attn", "mlp", "input_layernorm"):
            getattr(layer, part).register_forward_hook(keep(part, j))
    with torch.inference_mode():
        result = model(torch.tensor([list(tokens)]), output_hidden_states=True)
    count = len(model.model.layers)
    parts = ([kept[part, j] for j in range(count)] for part in ("self_attn", "mlp", "input_layernorm"))
    return States([h[0] for h in result.hidden_states], *parts, result.logits[0].argmax(-1).tolist())


class Drafter:
    """The drafter of a folder, in float32 and without a KV cache: each step computes the whole sequence again."""

    def __init__(self, folder: Path) -> None:
        self.w = {name: weight.float() for name, weight in load_file(folder / "drafter/model.safetensors").items()}
        shared = load_file(folder / "target/model.safetensors")
        self.embed = shared["language_model.model.embed_tokens.weight"].float()
        self.head = self.w.get("lm_head.weight", shared["language_model.lm_head.weight"].float())
        self.to_target = torch.arange(len(self.head)) + self.w.get("d2t", torch.zeros(len(self.head))).long()
        self.latent = "midlayer.self_attn.kv_b_proj.weight" in self.w

    def _attention(self, x: Any, positions: Any, seen: Any) -> Any:
        """Attention of [tokens, 2 * HIDDEN] at `positions`; `seen` [tokens, tokens] says which keys a query has."""
        w = {name.removeprefix("midlayer.self_attn."): weight for name, weight in self.w.items()}
        count = len(x)
        angles = positions[:, None] * ROPE_BASE ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        if self.latent:
            nope, rope, rank, v_dim = (
                MLA[n] for n in ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank", "v_head_dim")
            )
            q = rms_norm(x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"]) @ w["q_b_proj.weight"].T
            q = q.view(count, HEADS, nope + rope)[..., nope:]  # the part without position is zero in the keys
            latent, k = (x @ w["kv_a_proj_with_mqa.weight"].T).split([rank, rope], -1)
            latent = rms_norm(latent, w["kv_a_layernorm.weight"])
            v = (latent @ w["kv_b_proj.weight"].T).view(count, HEADS, nope + v_dim)[..., nope:]
            q, k = (torch.view_as_complex(t.reshape(count, -1, rope // 2, 2).contiguous()) for t in (q, k))
            scale = (nope + rope) ** -0.5
        else:
            q, k, v = ((x @ w[f"{n}_proj.weight"].T).view(count, HEADS, HEAD_DIM) for n in "qkv")
            q, k = (torch.complex(*t.chunk(2, -1)) for t in (q, k))
            scale = HEAD_DIM**-0.5
        q, k = q * turn, (k * turn).expand(-1, HEADS, -1)
        scores = torch.einsum("qhd,khd->hqk", q, k.conj()).real * scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).reshape(count, -1) @ w["o_proj.weight"].T

    def step(self, embeds: Any, hidden: Any, attention: Callable[[Any], Any]) -> tuple[Any, Any]:
        """One pass: embeddings and hidden states, [tokens, HIDDEN] each -> draft logits and the next hidden states."""
        w = self.w
        both = [
            rms_norm(embeds, w["midlayer.input_layernorm.weight"]), rms_norm(hidden, w["midlayer.hidden_norm.weight"])
        ]  # fmt: skip
        hidden = hidden + attention(torch.cat(both, -1))
        x = rms_norm(hidden, w["midlayer.post_attention_layernorm.weight"])
        gate, up, down = (w[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
        hidden = hidden + (torch.nn.functional.silu(x @ gate) * (x @ up)) @ down
        return rms_norm(hidden, w["norm.weight"]) @ self.head.T, hidden

    def draft(
        self, captured: Sequence[Any], tokens: Sequence[int], k: int, *, stale: bool = False, alone: bool = False
    ) -> Iterator[int]:
        """k draft tokens after `tokens`, each computed when it is asked for.

        captured: a state for each layer id, [n, HIDDEN]; tokens: the n tokens that follow those positions. `stale`:
        the positions of the drafter don't move on with its steps. `alone`: it has no KV cache, only its own position.
        """
        hidden = torch.cat(list(captured), -1) @ self.w["fc.weight"].T
        written = list(tokens)
        first = len(written)
        for _ in range(k):
            count = len(written)
            positions = torch.arange(count).clamp(max=first - 1 if stale else count)
            seen = torch.eye(count, dtype=torch.bool) if alone else torch.ones(count, count, dtype=torch.bool).tril()
            attend = lambda x, at=positions, seen=seen: self._attention(x, at, seen)  # noqa: E731
            logits, following = self.step(self.embed[torch.tensor(written)], hidden, attend)
            written.append(int(self.to_target[logits[-1].argmax()]))
            hidden = torch.cat([hidden, following[-1:]])
            yield written[-1]


def faults(oracle: Oracle, s: States) -> Iterator[tuple[str, list[Any]]]:
    """Each wrong set of states that an engine could hand over, by name: three states of [tokens, HIDDEN]."""
    ids = oracle.ids
    yield "all ids one more", [s.inputs[i + 1] for i in ids]
    yield "all ids one less", [s.inputs[i - 1] for i in ids]
    for k, layer_id in enumerate(ids):
        for by in (-1, 1):
            yield f"id {layer_id} moved to {layer_id + by}", [s.inputs[i + by * (i == layer_id)] for i in ids]
        for name, state in (
            ("residual missing", s.mlp[layer_id - 1]),
            ("hidden missing", s.inputs[layer_id] - s.mlp[layer_id - 1]),
            ("taken between attention and MLP", s.inputs[layer_id] + s.attention[layer_id]),
            ("taken behind the norm", s.normed[layer_id]),
        ):
            yield f"id {layer_id} {name}", [state if i == k else s.inputs[x] for i, x in enumerate(ids)]
    yield "residual missing", [s.mlp[i - 1] for i in ids]
    yield "hidden missing", [s.inputs[i] - s.mlp[i - 1] for i in ids]
    yield "taken between attention and MLP", [s.inputs[i] + s.attention[i] for i in ids]
    yield "taken behind the norm", [s.normed[i] for i in ids]
    yield "residual counted twice", [s.inputs[i] + s.normed[i] for i in ids]
    yield "last layer three times", [s.inputs[-2]] * 3
    for order in itertools.permutations(range(3)):
        if order != (0, 1, 2):
            yield f"order {' '.join(str(ids[i]) for i in order)}", [s.inputs[ids[i]] for i in order]


def choices(drafter: Drafter, inputs: Sequence[Any], at: int, right: int) -> Result:
    """Every choice of three layers' inputs, for the token at `at` and without the drafter's attention.

    `right` is the token to draft. One choice may draft it: that of the drafter's ids.
    """
    states = torch.stack([state[at] for state in inputs])
    first, second, third = (states @ part.T for part in drafter.w["fc.weight"].split(HIDDEN, 1))
    found = 0
    for row in first:
        hidden = (row + second[:, None] + third[None]).reshape(-1, HIDDEN)
        logits, _ = drafter.step(torch.zeros_like(hidden), hidden, lambda x: torch.zeros(len(x), HIDDEN))
        found += int((drafter.to_target[logits.argmax(-1)] == right).sum())
    return Result("any choice of three layers", found, len(states) ** 3, 1)


@dataclass(frozen=True)
class Trial:
    """A drafter beside a sequence of tokens that the target writes from position `start` on."""

    drafter: Drafter
    sequence: Sequence[int]
    start: int

    def run(self, name: str, captured: Sequence[Any], expected: int, shift: int = 1, **engine: bool) -> Result:
        """Draft from STARTS places. `shift`: how far its tokens are ahead of the target's; `engine`: as draft."""
        found = 0
        for at in range(self.start, self.start + STARTS):  # the target has just written the token at `at`
            tokens = self.sequence[shift : at + shift]
            drafts = self.drafter.draft([state[:at] for state in captured], tokens, DRAFT_TOKENS, **engine)
            pairs = zip(drafts, self.sequence[at + 1 :], strict=False)
            found += sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        return Result(name, found, STARTS * DRAFT_TOKENS, expected)


def check(folder: Path) -> list[Result]:
    """All checks of a folder that oracle.py wrote: the target, the right states, then each fault."""
    said = json.loads((folder / "oracle.json").read_text())
    oracle = Oracle(**said["oracle"] | {"ids": tuple(said["oracle"]["ids"])})
    start = len(said["prompt"])
    sequence = said["prompt"] + said["output"][: STARTS + DRAFT_TOKENS + 1]
    vocabulary = set(draft_vocabulary(oracle))
    wanted = [sequence[at + 1 : at + 1 + DRAFT_TOKENS] for at in range(start, start + STARTS)]
    writable = [len(list(itertools.takewhile(vocabulary.__contains__, tokens))) for tokens in wanted]
    with torch.inference_mode():
        target = states(folder / "target", sequence)
        trial = Trial(Drafter(folder), sequence, start)
        captured = [target.inputs[i] for i in oracle.ids]
        own = [a == b for a, b in zip(target.output[start - 1 :], sequence[start:], strict=False)]
        at = start + next(i for i, count in enumerate(writable) if count)
        results = [
            Result("the target's own output", sum(own), len(own), len(own)),
            trial.run(f"the input of layers {', '.join(map(str, oracle.ids))}", captured, sum(writable)),
            *(trial.run(name, wrong, 0) for name, wrong in faults(oracle, target)),
            choices(trial.drafter, target.inputs[:-1], at - 1, sequence[at + 1]),
        ]
        if oracle.attention:
            first = sum(count > 0 for count in writable)
            results += [
                trial.run("the drafter's positions stand still", captured, first, stale=True),
                trial.run("the drafter has no KV cache", captured, 0, alone=True),
                trial.run("the embedding is the current token's", captured, 0, shift=0),
            ]
    return results
