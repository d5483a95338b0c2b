"""What an SGLang release tells of its drafts, made by its own code and without a server: `python3 sglang_signals.py`.

Runs in a release's environment. Prints JSON: `before` and `after`, the text of /metrics after a request of eight tokens
(as the server's own warm-up is) and after one more of 97 tokens, 24 drafts of three tokens and all of them accepted;
`meta_info`, what the answer to the second request says. Histograms and the process' own metrics are left out.
"""

import inspect
import json
import re
import sys
from types import SimpleNamespace
from unittest import mock

import prometheus_client

# Kernels, which need the driver's library; none is called.
sys.modules |= dict.fromkeys(("sgl_kernel", "sgl_kernel.kvcacheio"), mock.MagicMock(__spec__=None))

from sglang.srt.managers import tokenizer_manager  # noqa: E402

try:
    from sglang.srt.observability import metrics_collector
except ImportError:
    from sglang.srt.metrics import collector as metrics_collector  # up to 0.5.9

LABELS = {"model_name": "/oracle/target"}
K = 3


def text() -> str:
    """/metrics, as far as it counts tokens and drafts."""
    lines = prometheus_client.generate_latest().decode().splitlines()
    own = [line for line in lines if re.match(r"(# \w+ )?sglang:\w+_total\b", line)]
    return "\n".join(own) + "\n"


def meta_info(drafts: int, tokens: int) -> dict[str, object]:
    """What the release's tokenizer manager writes into an answer, of `drafts` rounds with all K accepted."""
    accepted, histogram = [K * drafts], [[0] * K + [drafts]]
    said = SimpleNamespace(
        completion_tokens=[tokens], spec_verify_ct=[drafts], spec_num_cap_tokens=None,
        spec_accepted_tokens=accepted, spec_acceptance_histogram=histogram,  # 0.5.9
        spec_num_correct_drafts=accepted, spec_correct_drafts_histogram=histogram, spec_num_block_accept_tokens=None,
    )  # fmt: skip
    arguments = SimpleNamespace(speculative_num_draft_tokens=K + 1)
    manager = SimpleNamespace(server_args=arguments)
    found: dict[str, object] = {"completion_tokens": tokens}
    with mock.patch.object(tokenizer_manager, "get_spec", lambda: arguments, create=True):
        tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics(manager, found, said, 0)
    return found


def main() -> None:
    """Run as a command."""
    buckets = SimpleNamespace(prompt_tokens_buckets=None, generation_tokens_buckets=None)
    with mock.patch.object(metrics_collector, "get_observability", lambda: buckets, create=True):
        collector = metrics_collector.TokenizerMetricsCollector(server_args=buckets, labels=LABELS)
    takes = inspect.signature(collector.observe_one_finished_request).parameters

    def request(prompt: int, tokens: int, drafts: int) -> str:
        values = {
            "labels": LABELS, "prompt_tokens": prompt, "generation_tokens": tokens, "cached_tokens": 0,
            "e2e_latency": 1.0, "has_grammar": False, "retraction_count": 0, "spec_verify_ct": drafts,
        }  # fmt: skip
        collector.observe_one_finished_request(**{name: value for name, value in values.items() if name in takes})
        return text()

    before = request(4, 8, 2)
    print("\n" + json.dumps({"before": before, "after": request(12, 97, 24), "meta_info": meta_info(24, 97)}))


if __name__ == "__main__":
    main()
