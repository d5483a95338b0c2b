"""The climb against a real server in a process of its own, healthy and with each fault; and what is started how."""

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from scripts.pipeline import adapters, climb, ladder, pins, receipt, server, smoke, trials
from scripts.pipeline.say import Stop

RELEASES = ("vllm 0.32.0", "sglang 0.5.9", "sglang 0.5.23")
FAKE = Path(__file__).with_name("fake_engine.py")
RECORDED = Path(__file__).with_name("recorded")
TOKENS: list[int] = json.loads(RECORDED.joinpath("vllm-0.32.0-answer.json").read_text())["choices"][0]["token_ids"]


@dataclass(frozen=True)
class Process:
    """A server in a process of ours, as a container is."""

    url: str
    process: "subprocess.Popen[bytes]"
    file: Path

    def ended(self) -> str | None:
        code = self.process.poll()
        return None if code is None else f"its process ended with exit code {code}"

    def log(self, lines: int) -> list[str]:
        return server.tidy(self.file.read_text())[-lines:]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is kept goes to a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kimi-eagle3"


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[str], Process]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(fault: str = "", release: str = "vllm 0.32.0") -> Process:
        log, port = tmp_path / "log", tmp_path / "port"
        with log.open("w") as file:
            process = subprocess.Popen([sys.executable, FAKE, fault, port, release], stdout=file, stderr=file)
        started.append(process)
        while not port.exists():
            time.sleep(0.01)
        return Process(f"http://127.0.0.1:{port.read_text()}", process, log)

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def oracle(tmp_path: Path) -> Path:
    """oracle.json as the oracle's writer leaves it, for the request that was recorded."""
    counts = {"drafts": 24, "draft_tokens": 72, "accepted": 72, "accepted_per_position": [24, 24, 24]}
    data = {
        "prompt": [5, 42, 79],
        "output": [*TOKENS, 0],
        "output_text": " ".join(f"t{token}" for token in [*TOKENS, 0]),
        "k": {"3": {"max_tokens": 97, **counts, "acceptance_length": 4.0}},
    }
    (tmp_path / "target").mkdir()
    (tmp_path / "oracle.json").write_text(json.dumps(data))
    return tmp_path


def up(process: server.Server, oracle: Path, release: str = "vllm 0.32.0", **changes: float) -> dict[str, ladder.Rung]:
    engine, pinned = release.split()
    trial = replace(trials.oracle_trial(oracle, 3), **{"deadline": 10.0, **changes})
    return {rung.name: rung for rung in climb.climb(process, adapters.adapter(engine, pinned), trial, pinned, None)}


@pytest.mark.parametrize("release", RELEASES)
def test_a_healthy_server_passes_s0_to_s3_with_its_numbers(
    serve: Callable[..., Process], oracle: Path, release: str
) -> None:
    rungs = up(serve("", release), oracle, release)
    assert [rungs[name].status for name in ladder.RUNGS] == ["passed"] * 4 + ["not climbed"]
    assert rungs["S2"].numbers["drafts"] == 24 and rungs["S2"].numbers["generated"] == 97
    assert rungs["S3"].numbers["acceptance"] == 4.0 and rungs["S3"].numbers["per_position"] == [1.0, 1.0, 1.0]
    assert "made, not trained" in rungs["S4"].detail and ladder.ok(tuple(rungs.values()))


# SGLang's answers can't tell a server without speculation from one that drafted nothing. 0.5.9 counts no rounds in
# /metrics, so it can't tell one that has drafted for others only, either; 0.5.23 does, from the first round on.
OTHERWISE = {
    ("no-drafts", "sglang 0.5.23"): "counters-still",
    ("no-speculation", "sglang 0.5.9"): "no-drafts",
    ("drafts-frozen", "sglang 0.5.9"): "no-drafts",
}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    ("fault", "rung", "name"),
    [
        ("wrong-version", "S0", "wrong-version"),
        ("no-version", "S0", "wrong-version"),
        ("dies", "S1", "died"),
        ("never-healthy", "S1", "never-healthy"),
        ("hangs", "S1", "never-healthy"),
        ("no-json", "S2", "garbled"),
        ("cut-short", "S2", "garbled"),
        ("refuses", "S2", "request-failed"),
        ("hangs-when-asked", "S2", "wedged"),
        ("dies-when-asked", "S2", "died"),
        ("no-speculation", "S2", "counters-missing"),
        ("accepted-missing", "S2", "counters-missing"),
        ("positions-missing", "S2", "counters-missing"),
        ("frozen-at-zero", "S2", "counters-still"),
        ("frozen", "S2", "counters-still"),
        ("drafts-frozen", "S2", "counters-still"),
        ("no-drafts", "S2", "no-drafts"),
        ("restarted", "S2", "counters-reset"),
        ("others", "S2", "other-traffic"),
        ("counts-twice", "S2", "counters-disagree"),
        ("one-token", "S3", "garbled"),
        ("no-text", "S3", "garbled"),
        ("one-differs", "S3", "output-differs"),
        ("none-accepted", "S3", "acceptance-is-one"),
        ("half-accepted", "S3", "acceptance-low"),
    ],
)
def test_each_fault_fails_at_its_rung_with_its_name(
    serve: Callable[..., Process], oracle: Path, monkeypatch: pytest.MonkeyPatch, fault: str, rung: str, name: str,
    release: str,
) -> None:  # fmt: skip
    name = OTHERWISE.get((fault, release), name)
    monkeypatch.setattr(server, "SETTLE_S", 0.3)
    monkeypatch.setattr(server, "ASK_S", 0.7)
    monkeypatch.setattr(server, "GENERATE_S", 1.0)
    rungs = up(serve(fault, release), oracle, release, deadline=2.0)
    assert [(r.name, r.failure) for r in rungs.values() if r.status == "failed"] == [(rung, name)]
    above = ladder.RUNGS[ladder.RUNGS.index(rung) + 1 :]
    assert all(rungs[one].status == "not climbed" and name in rungs[one].detail for one in above)
    assert not ladder.ok(tuple(rungs.values()))


def test_a_dead_process_is_noticed_at_once_with_its_last_lines(
    serve: Callable[[str], Process], oracle: Path, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    start = time.monotonic()
    rungs = up(serve("dies"), oracle, deadline=60.0)
    assert time.monotonic() - start < 5
    assert "exit code 3" in rungs["S1"].detail and "fc_norm" in rungs["S1"].detail
    assert "Loading shards:  40%" in capsys.readouterr().out
    assert "fc_norm" in (cache / "smoke-failed.log").read_text()


def test_progress_is_plain_lines_with_what_the_server_says_elapsed_and_deadline(
    serve: Callable[[str], Process], oracle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server, "SAY_S", 1.0)
    up(serve("never-healthy"), oracle, deadline=3.0)
    shown = [line for line in capsys.readouterr().out.splitlines() if " of 3 s: " in line]
    assert 2 <= len(shown) <= 4
    assert shown[0] == "    0 s of 3 s: Loading shards:  40% Completed | 38/96"


def test_a_server_that_is_already_up_is_tested_without_a_container(
    serve: Callable[[str], Process], oracle: Path, tmp_path: Path
) -> None:
    url, out = serve("").url, tmp_path / "receipt.json"
    target = str(oracle / "target")
    smoke.job(["vllm", "--base-url", url + "/", "--target", target, "--k", "3", "--receipt", str(out)])
    made = receipt.read(out)
    assert made["ok"] and made["server"] == url and made["image"] is None
    assert made["runs"][0]["hardware"].startswith("not known")
    assert made["not_climbed"] == [{"run": "oracle, K = 3", "rung": "S4", "why": made["runs"][0]["rungs"][4]["detail"]}]


def test_a_failure_is_one_line_with_its_cure_and_leaves_a_receipt_that_is_not_ok(
    serve: Callable[[str], Process], oracle: Path, tmp_path: Path
) -> None:
    out = tmp_path / "receipt.json"
    arguments = ["--target", str(oracle / "target"), "--k", "3", "--receipt", str(out)]
    with pytest.raises(Stop, match=r"oracle, K = 3: S3 acceptance-is-one: 0 of 288 .*hidden states") as stop:
        smoke.job(["vllm", "--base-url", serve("none-accepted").url, *arguments])
    assert "\n" not in str(stop.value)
    assert receipt.read(out)["ok"] is False


def test_another_expected_acceptance_length_is_held_exactly(serve: Callable[[str], Process], oracle: Path) -> None:
    arguments = ["--target", str(oracle / "target"), "--k", "3"]
    with pytest.raises(Stop, match=r"S3 acceptance-high: .* 4\.000 at K = 3, and it has to be exactly 3\.9"):
        smoke.job(["vllm", "--base-url", serve("").url, *arguments, "--expect-acceptance", "3.9"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--base-url", "nowhere", "--deadline", "1"], "is no address of a server"),
        (["--base-url", "http://127.0.0.1:9", "--gpus"], "don't go with it"),
        (["--base-url", "http://127.0.0.1:9", "--k", "0"], "give 1 or more"),
        (["--base-url", "http://127.0.0.1:9", "--k", "1", "3"], "takes one --k"),
        (["--variant", "cuda"], "is for GPUs: add --gpus"),
        (["--target", "/nowhere"], "belong together"),
        (["--target", "a/b", "--drafter", "c/d", "--oracle", "--layers 9"], "exclude each other"),
        (["--env", "NO_SUCH_NAME"], "there is no such variable here"),
        (["--version", "9.9.9"], "has no release"),
    ],
)
def test_what_does_not_go_together_is_one_line_before_anything_starts(arguments: list[str], says: str) -> None:
    with pytest.raises(Stop, match=says) as stop:
        smoke.job(["vllm", *arguments])
    assert "\n" not in str(stop.value)


def launched(tmp_path: Path, *arguments: str, cpu: bool = True) -> server.Launch:
    options = smoke.arguments("vllm").parse_args(list(arguments))
    for name in ("target", "drafter"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").write_text("{}")
    trial = trials.own_trial(str(tmp_path / "target"), str(tmp_path / "drafter"), 5)
    return smoke.launch(options, adapters.VLLM, "image:1", cpu, trial)


def test_the_line_that_is_printed_and_the_container_that_is_started_say_the_same(tmp_path: Path) -> None:
    command = launched(
        tmp_path, "--gpus", "0,1", "--env", "NCCL_P2P_DISABLE=1", "--", "--max-model-len", "512", cpu=False
    )
    words = shlex.split(command.line("docker"))
    options = command.options("docker")
    assert words[words.index("--gpus") + 1] == '"device=0,1"'
    assert options["device_requests"][0]["DeviceIDs"] == ["0", "1"] and options["ipc_mode"] == "host"
    assert {words[i + 1] for i, word in enumerate(words) if word == "--env"} == {
        f"{name}={value}" for name, value in options["environment"].items()
    }
    assert "NCCL_P2P_DISABLE=1" in words and options["environment"]["HF_HUB_OFFLINE"] == "1"
    assert {words[i + 1] for i, word in enumerate(words) if word == "--volume"} == {
        f"{at}:{to['bind']}:{to['mode']}" for at, to in options["volumes"].items()
    }
    end = words[words.index("image:1") + 1 :]
    assert shlex.join(end) == (
        "serve --target /target --drafter /drafter --draft-tokens 5 --tensor-parallel-size 2 --max-model-len 512"
    )
    assert tuple(end) == command.arguments


def test_podman_names_gpus_in_its_own_way(tmp_path: Path) -> None:
    command = launched(tmp_path, "--gpus", cpu=False)
    assert "--device nvidia.com/gpu=all" in command.line("podman") and "--gpus" not in command.line("podman")
    assert command.options("podman")["devices"] == ["nvidia.com/gpu=all"]


def test_the_model_is_split_over_the_gpus_that_were_chosen_else_as_the_image_does_it(tmp_path: Path) -> None:
    assert "--tensor-parallel-size" not in launched(tmp_path, "--gpus", cpu=False).arguments
    three = launched(tmp_path, "--gpus", "1,2,5", cpu=False).arguments
    assert three[three.index("--tensor-parallel-size") + 1] == "3"


def test_the_twin_gets_no_gpu_and_knows_that_it_is_a_cpu_build(tmp_path: Path) -> None:
    command = launched(tmp_path)
    assert "--gpus" not in command.line("docker") and command.environment["VLLM_TARGET_DEVICE"] == "cpu"
    assert "VLLM_TARGET_DEVICE" not in launched(tmp_path, "--gpus", cpu=False).environment


def test_a_variable_that_is_handed_over_by_name_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hush")
    command = launched(tmp_path, "--env", "HF_TOKEN")
    assert "--env HF_TOKEN " in command.line("docker") and "hush" not in command.line("docker")
    assert command.options("docker")["environment"]["HF_TOKEN"] == "hush"


@pytest.mark.parametrize(
    ("tag", "arguments", "name"),
    [
        ("0.16.0", ["--gpus"], "vllm 0.16.0"),
        ("0.32.0-cpu", [], "vllm 0.32.0 (cpu)"),
        ("0.32.0-cpu", ["--version", "0.16.0", "--variant", "cuda"], "vllm 0.16.0"),
        ("", [], "vllm 0.32.0 (cpu)"),
        ("", ["--gpus"], "vllm 0.32.0"),
        ("", ["--base-url", "http://127.0.0.1:9"], "vllm 0.32.0"),
    ],
)
def test_what_is_not_said_about_an_image_is_read_from_its_label(tag: str, arguments: list[str], name: str) -> None:
    options = smoke.arguments("vllm").parse_args(arguments)
    assert smoke.chosen_release("vllm", pins.load(), options, tag).name == name


def test_an_engine_without_a_twin_says_what_its_server_needs() -> None:
    with pytest.raises(Stop, match="sglang has no twin, so its server needs GPUs: add --gpus, or --base-url"):
        smoke.job(["sglang"])


def test_sglang_is_asked_for_plain_text_and_conversations_in_its_own_words() -> None:
    old, new = (adapters.adapter("sglang", version) for version in ("0.5.9", "0.5.23"))
    greedy = {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True}
    assert adapters.request(old, "m", {"prompt": [1, 2]}, 5) == (
        "/generate", {"input_ids": [1, 2], "sampling_params": greedy}
    )  # fmt: skip
    assert adapters.request(new, "m", {"prompt": "a"}, 5)[1] == {"text": "a", "sampling_params": greedy}
    path, body = adapters.request(new, "m", {"messages": []}, 5)
    assert path == "/v1/chat/completions" and body["return_meta_info"] and body["return_token_ids"]
    said = {"message": {"reasoning_content": "a", "content": "b"}, "response_token_ids": [1, 2], "meta_info": {}}
    answer = adapters.answer(new, {"choices": [said], "usage": {"completion_tokens": 2}})
    assert (answer.text, answer.tokens, answer.told) == ("ab", (1, 2), ladder.Counters(0, 0, 0, 0, ()))


def test_an_adapter_holds_from_its_version_on_and_before_the_first_there_is_none() -> None:
    assert adapters.adapter("sglang", "0.5.22") == adapters.adapter("sglang", "0.5.9")
    assert adapters.adapter("sglang", "0.6.0").told != adapters.adapter("sglang", "0.5.9").told
    with pytest.raises(Stop, match=r"no smoke test for sglang 0\.5\.8"):
        adapters.adapter("sglang", "0.5.8")


def test_where_conversations_tell_nothing_the_pinned_pair_is_asked_for_plain_text_and_held_to_no_figure() -> None:
    all_pins = pins.load()
    for version, kinds in (("0.5.9", {"plain"}), ("0.5.23", {"chat", "maths", "coding"})):
        options = namespace(target=all_pins.target.repo, k=[3])
        (trial,) = smoke.planned_trials(all_pins, all_pins.release("sglang", version), options, None)
        assert trial.pair == "pinned" and {group.kind for group in trial.groups} == kinds
        assert (trial.expected.floor is None) == (not trial.expected.figures) == (kinds == {"plain"})


def test_what_answers_tell_is_summed_and_a_name_that_is_missing_is_told() -> None:
    names = adapters.SGLANG.told
    assert names is not None
    meta = {names.drafts: 4, names.draft_tokens: 12, names.accepted: 6, names.histogram: [1, 0, 3]}
    one = adapters.told(names, meta)
    assert one == ladder.Counters(0, 4, 12, 6, (3, 3, 0))
    answers = [ladder.Answer("", None, 1, told) for told in (one, adapters.told(names, {}), one)]
    assert adapters.all_told(answers) == ladder.Counters(0, 8, 24, 12, (6, 6, 0))
    for name in (names.draft_tokens, names.accepted, names.histogram):
        missing = adapters.told(names, {key: value for key, value in meta.items() if key != name})
        assert missing == f"{name} in an answer's meta_info"
    assert adapters.all_told([ladder.Answer("", None, 1)]) is None


def test_somebodys_own_pair_leaves_the_receipt_of_the_image_alone() -> None:
    image = {"id": f"sha256:{'a' * 64}"}
    assert smoke.own_receipt({"image": image, "runs": [{"pair": "oracle"}]})
    assert smoke.own_receipt({"image": image, "runs": [{"pair": "oracle"}, {"pair": "own"}]}) is None
    assert smoke.own_receipt({"image": None, "runs": [{"pair": "oracle"}]}) is None


def test_without_speculation_only_the_drafter_is_left_out(tmp_path: Path) -> None:
    assert smoke.plain(launched(tmp_path)).arguments == ("serve", "--target", "/target", "--no-speculation")


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Stop, match=r"has no config.json"):
        server.mounted(tmp_path)
    with pytest.raises(Stop, match=r"no folder "):
        server.mounted(tmp_path / "nowhere")


def namespace(**given: object) -> argparse.Namespace:
    fields = {
        "k": None,
        "target": None,
        "drafter": None,
        "gpus": None,
        "oracle_only": False,
        "deadline": None,
        "oracle": None,
    }
    return argparse.Namespace(**{**fields, "expect_acceptance": None, **given})


def test_with_gpus_the_oracle_comes_first_then_the_pinned_pair_with_its_floor(oracle: Path) -> None:
    all_pins = pins.load()
    first, second = smoke.planned_trials(all_pins, all_pins.release("vllm"), namespace(gpus="all"), oracle)
    assert (first.pair, second.pair) == ("oracle", "pinned")
    assert second.target == f"{all_pins.target.repo}@{all_pins.target.revision}"
    assert second.expected.floor and second.expected.figures
    kinds = {group.kind for group in second.groups}
    assert {figure.kind for figure in second.expected.figures} <= kinds


def test_a_floor_holds_only_at_the_k_that_it_is_pinned_for() -> None:
    all_pins = pins.load()
    target, drafter = all_pins.target.repo, "lightseekorg/kimi-k2.5-eagle3-mla"
    assert trials.trial_for(all_pins, target, None, drafter, 3).expected.floor == 2.2
    assert trials.trial_for(all_pins, target, None, drafter, 5).expected.floor is None
    assert trials.trial_for(all_pins, target, "some/other", drafter, 3).expected.figures == ()
    assert trials.trial_for(all_pins, "some/target", drafter, drafter, 3).pair == "own"


def test_what_went_wrong_is_the_first_exception_and_not_the_one_that_another_process_has_of_it() -> None:
    log = [
        "(EngineCore pid=53) ERROR 11-30 22:53:01 [core.py:1203] RuntimeError: Cannot find any model weights with `/d`",
        "    raise RuntimeError(",
        "RuntimeError: Engine core initialization failed. See root cause above.",
    ]
    assert server.cause(log) == "RuntimeError: Cannot find any model weights with `/d`"
    assert server.cause(["INFO: ready", "Killed"]) == "Killed" and server.cause([]) == ""
    assert server.cause(["torch.cuda.OutOfMemoryError: CUDA out of memory"]).startswith("torch.cuda.OutOf")


def test_a_log_is_shown_as_a_terminal_would() -> None:
    assert server.tidy("\x1b[36mINFO\x1b[0m ready\n\n 10%\r 20%\r\n") == ["INFO ready", " 20%"]


@pytest.mark.parametrize("value", ["nan", "inf", "1", "0", "-4"])
def test_an_expected_acceptance_length_that_nothing_could_miss_or_meet_is_refused(value: str) -> None:
    with pytest.raises(Stop, match=r"--expect-acceptance .*: give a number above 1"):
        smoke.job(["vllm", f"--expect-acceptance={value}"])
