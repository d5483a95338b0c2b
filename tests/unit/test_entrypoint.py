"""entrypoint.py: what the image does when it is run. A script in place of the engine tells what it was started with."""

import ctypes.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.in_image import entrypoint
from scripts.pipeline import pins

ROOT = Path(__file__).resolve().parents[2]
TELL = "import json, os, sys; print(json.dumps({'pid': os.getpid(), 'args': sys.argv[1:], 'env': dict(os.environ)}))"


class Image:
    """A folder laid out as in the image, with the engine's program in it, which tells its arguments and environment."""

    def __init__(self, root: Path, version: str, variant: str, engine: str = "vllm") -> None:
        self.root, self.bin = root, root / "bin"
        shutil.copytree(ROOT / "scripts" / "in_image", root / "in_image")
        all_pins = pins.load()
        release = pins.record(all_pins, all_pins.release(engine, version, variant))
        (root / "release.json").write_text(json.dumps(release))
        self.bin.mkdir()
        program = self.bin / entrypoint.ENGINES[engine].start[0]
        program.write_text(f"#!{sys.executable}\n{TELL}\n")
        program.chmod(0o755)
        self.env = {"PATH": f"{self.bin}:{os.environ['PATH']}", "HF_HOME": str(root / "hf")}

    @property
    def release(self) -> dict:
        return json.loads((self.root / "release.json").read_text())

    def start(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(self.root / "in_image" / "entrypoint.py"), *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self.env | env)

    def run(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, **env)
        out, err = process.communicate(timeout=30)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def printed(self, *arguments: str, **env: str) -> list[str]:
        """The words of the line that --print shows."""
        done = self.run(*arguments, "--print", **env)
        assert done.returncode == 0 and done.stdout.count("\n") == 1, done.stderr
        return shlex.split(done.stdout)

    def refusal(self, *arguments: str, **env: str) -> str:
        done = self.run(*arguments, **env)
        assert done.returncode == 1 and done.stdout == "", done.stdout
        assert done.stderr.splitlines()[-1].startswith("error: ")
        return done.stderr.splitlines()[-1]


@pytest.fixture
def cuda(tmp_path: Path) -> Image:
    return Image(tmp_path / "cuda", "0.16.0", "cuda")


@pytest.fixture
def twin(tmp_path: Path) -> Image:
    image = Image(tmp_path / "twin", "0.32.0", "cpu")
    for name in ("target", "drafter"):
        (image.root / name).mkdir()
        (image.root / name / "config.json").write_text("{}")
    return image


@pytest.fixture
def sglang(tmp_path: Path) -> Image:
    return Image(tmp_path / "sglang", "0.5.23", "cuda", "sglang")


def models(image: Image) -> list[str]:
    return ["--target", str(image.root / "target"), "--drafter", str(image.root / "drafter")]


def value(words: list[str], flag: str) -> str:
    assert words.count(flag) == 1, words
    return words[words.index(flag) + 1]


# What is served by default.


def test_no_arguments_serve_the_pinned_models(cuda: Image) -> None:
    words, release = cuda.printed(), cuda.release
    at = words.index("vllm")
    assert words[at : at + 3] == ["vllm", "serve", release["target"]["repo"]]
    assert value(words, "--revision") == release["target"]["revision"]
    assert value(words, "--tensor-parallel-size") == "8"
    assert (value(words, "--host"), value(words, "--port")) == ("0.0.0.0", "8000")
    drafter = {"method": "eagle3", "model": release["drafter"]["repo"], "num_speculative_tokens": 3}
    assert json.loads(value(words, "--speculative-config")) == drafter
    assert "VLLM_NO_USAGE_STATS=1" in words[:at]


def test_serve_is_the_same_as_no_arguments(cuda: Image) -> None:
    assert cuda.printed("serve") == cuda.printed()


def test_an_unpinned_drafter_is_said_loudly_and_a_pinned_one_is_not(cuda: Image) -> None:
    assert "UNPINNED" in cuda.run("--print").stderr
    repo = cuda.release["drafter"]["repo"]
    done = cuda.run("--print", "--drafter", f"{repo}@{'a' * 40}")
    assert done.stderr == ""
    assert json.loads(value(shlex.split(done.stdout), "--speculative-config"))["revision"] == "a" * 40


def test_sglang_is_started_by_its_own_words_with_the_same_pins(sglang: Image) -> None:
    words, release = sglang.printed(), sglang.release
    at = words.index("python3")
    assert words[at : at + 5] == ["python3", "-m", "sglang.launch_server", "--model-path", release["target"]["repo"]]
    assert value(words, "--revision") == release["target"]["revision"]
    assert (value(words, "--tensor-parallel-size"), value(words, "--port")) == ("8", "8000")
    assert value(words, "--speculative-algorithm") == "EAGLE3"
    assert value(words, "--speculative-draft-model-path") == release["drafter"]["repo"]
    assert value(words, "--speculative-draft-model-quantization") == "unquant"
    assert value(words, "--speculative-draft-attention-backend") == value(words, "--attention-backend") == "triton"


def test_k_draft_tokens_are_k_steps_and_one_token_more_for_sglang(sglang: Image) -> None:
    words = sglang.printed("--drafter", f"a/b@{'c' * 40}", "--draft-tokens", "5")
    names = ("draft-model-path", "draft-model-revision", "num-steps", "eagle-topk", "num-draft-tokens")
    assert [value(words, f"--speculative-{name}") for name in names] == ["a/b", "c" * 40, "5", "1", "6"]


# The user's word wins.


def test_sglangs_own_flags_replace_ours(sglang: Image) -> None:
    words = sglang.printed("--tp", "4", "--no-trust-remote-code", "--speculative-num-steps", "2")
    assert not {"8", "--trust-remote-code", "--no-trust-remote-code"} & set(words)
    assert value(words, "--speculative-num-steps") == "2" and "--speculative-algorithm" in words
    for whole in (["--no-speculation"], ["--speculative-algorithm", "NGRAM"]):
        theirs = sglang.printed(*whole)
        assert [word for word in theirs if word.startswith("--speculative")] == whole[:1] * (len(whole) - 1)
    assert "contradict --speculative-num-steps" in sglang.refusal("--draft-tokens", "2", "--speculative-num-steps", "2")
    assert "contradict --speculative-algorithm" in sglang.refusal("--drafter", "a/b", "--speculative-algorithm", "X")


@pytest.mark.parametrize("given", [["--model-path", "a/b"], ["--model", "a/b"], ["serve", "a/b"], ["--target=a/b"]])
def test_the_target_has_every_name_that_an_engine_has_for_it(sglang: Image, given: list[str]) -> None:
    words = sglang.printed(*given)
    assert value(words, "--model-path") == "a/b" and "--revision" not in words


def test_a_model_of_a_config_file_leaves_no_flag_without_its_value(sglang: Image, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model-path: a/b\n")
    words = sglang.printed("--config", str(tmp_path / "config.yaml"))
    assert "--model-path" not in words and "sglang.launch_server" in words


@pytest.mark.parametrize(
    "given",
    [
        ["--tensor-parallel-size", "4"],
        ["--tensor-parallel-size=4"],
        ["--tensor_parallel_size", "4"],
        ["--tensor_parallel_size=4"],
        ["-tp", "4"],
        ["-tp=4"],
    ],
)
def test_a_flag_replaces_the_default_in_every_spelling(cuda: Image, given: list[str]) -> None:
    words = cuda.printed(*given)
    assert "8" not in words
    assert words[-len(given) :] == given


def test_another_flag_replaces_nothing(cuda: Image) -> None:
    words = cuda.printed("--tensor-parallel", "4")
    assert value(words, "--tensor-parallel-size") == "8"
    assert words[-2:] == ["--tensor-parallel", "4"]  # after the default, so the engine's abbreviation wins too


def test_no_flag_undoes_a_switch_in_the_engine_and_a_value_here(cuda: Image) -> None:
    words = cuda.printed("--no-trust-remote-code", "--no-reasoning-parser")
    assert "--trust-remote-code" not in words and words[-1] == "--no-trust-remote-code"
    assert not {"--reasoning-parser", "--no-reasoning-parser"} & set(words)
    assert "--tool-call-parser" in words


@pytest.mark.parametrize(
    "given",
    [
        ["--speculative-config", "{}"],
        ["--speculative_config={}"],
        ["-sc", "{}"],
        ["--speculative-config.model", "x"],
        ["--spec-tokens", "2"],
    ],
)
def test_the_engines_speculative_flags_replace_the_drafter(cuda: Image, given: list[str]) -> None:
    assert not any("eagle3" in word for word in cuda.printed(*given))


def test_a_config_file_of_the_engine_wins_over_defaults(cuda: Image, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("# port: 1\nmax_model_len: 4096\nmodel: a/b\nlimit:\n  port: 2\n")
    words = cuda.printed("--config", str(config))
    assert not {"--max-model-len", "--revision", cuda.release["target"]["repo"]} & set(words)
    assert value(words, "--port") == "8000"
    assert "c.yaml" in cuda.refusal("--print", "--config", str(tmp_path / "none" / "c.yaml"))


def test_the_users_environment_is_left_alone(twin: Image) -> None:
    told = json.loads(twin.run(*models(twin)).stdout)["env"]
    assert told["VLLM_CPU_KVCACHE_SPACE"] == "1"
    told = json.loads(twin.run(*models(twin), VLLM_CPU_KVCACHE_SPACE="7").stdout)["env"]
    assert told["VLLM_CPU_KVCACHE_SPACE"] == "7"
    assert "VLLM_CPU_KVCACHE_SPACE=7" in twin.printed(*models(twin), VLLM_CPU_KVCACHE_SPACE="7")


# The image's own options.


@pytest.mark.parametrize("given", [["--target", "a/b@c"], ["--model=a/b@c"], ["serve", "a/b@c"]])
def test_another_target_comes_with_its_own_revision_or_none(cuda: Image, given: list[str]) -> None:
    words = cuda.printed(*given)
    assert words[words.index("serve") + 1] == "a/b" and value(words, "--revision") == "c"
    assert "--revision" not in cuda.printed("--target", "a/b")


def test_another_target_with_the_pinned_drafter_is_warned_of(cuda: Image) -> None:
    assert "is for moonshotai/Kimi-K2.5" in cuda.run("--print", "--target", "a/b").stderr
    assert "is for" not in cuda.run("--print", "--target", "a/b", "--drafter", "c/d").stderr
    assert "is for" not in cuda.run("--print").stderr


def test_a_folder_with_an_at_sign_is_a_folder(cuda: Image, tmp_path: Path) -> None:
    folder = tmp_path / "kimi@home"
    folder.mkdir()
    words = cuda.printed("--target", str(folder))
    assert words[words.index("serve") + 1] == str(folder) and "--revision" not in words


def test_draft_tokens_and_no_speculation(cuda: Image) -> None:
    config = json.loads(value(cuda.printed("--draft_tokens=5"), "--speculative-config"))
    assert config["num_speculative_tokens"] == 5
    assert "--speculative-config" not in cuda.printed("--no-speculation")


def test_no_defaults_keeps_models_address_and_port(cuda: Image) -> None:
    words = cuda.printed("--no-defaults", "--no-reasoning-parser")
    flags = {word for word in words if word.startswith("--")}
    assert flags == {"--host", "--port", "--revision", "--speculative-config"}


@pytest.mark.parametrize(
    "given",
    [
        ["--drafter"],
        ["--drafter="],
        ["--draft-tokens", "0"],
        ["--draft-tokens", "x"],
        ["--drafter", "a/b", "--no-speculation"],
        ["--draft-tokens", "2", "-sc", "{}"],
    ],
)
def test_senseless_options_are_refused(cuda: Image, given: list[str]) -> None:
    cuda.refusal("--print", *given)


def test_secrets_are_not_printed_but_passed_on(twin: Image) -> None:
    done = twin.run(*models(twin), "--api-key", "hush1", "hush2", "--hf-token=hush3", "--port", "9000")
    assert "hush" not in done.stderr and "9000" in done.stderr
    assert {"hush1", "hush2", "--hf-token=hush3"} <= set(json.loads(done.stdout)["args"])


# Starting.


def test_it_becomes_the_engine_so_signals_reach_it(twin: Image) -> None:
    process = twin.start(*models(twin), "--port", "9000")
    out, err = process.communicate(timeout=30)
    told = json.loads(out)
    assert told["pid"] == process.pid
    line = err.splitlines()[-1]
    assert shlex.split(line)[shlex.split(line).index("vllm") + 1 :] == told["args"]


def test_any_other_command_runs_as_it_is(cuda: Image) -> None:
    done = cuda.run("sh", "-c", "echo $0 $1; exit 7", "--a", "--print")
    assert (done.returncode, done.stdout, done.stderr) == (7, "--a --print\n", "")
    assert "--target moonshotai/x" in cuda.refusal("moonshotai/x")


@pytest.mark.parametrize("tool", ["about", "contract", "coverage", "health"])
def test_tools_run_with_their_arguments_and_their_exit_status(cuda: Image, tool: str) -> None:
    (cuda.root / "in_image" / f"{tool}.py").write_text("import sys; print(sys.argv[1:]); sys.exit(3)")
    done = cuda.run(tool, "--json")
    assert done.returncode == 3 and done.stdout.endswith("'--json']\n")


def test_help_tells_the_pinned_models(cuda: Image) -> None:
    for given in ("help", "--help", "-h"):
        done = cuda.run(given)
        assert done.returncode == 0 and cuda.release["drafter"]["repo"] in done.stdout


def test_every_option_is_in_help() -> None:
    for name in (entrypoint.VALUED | entrypoint.SWITCHES) - (entrypoint.TARGET - {"target"}):
        assert f"--{name}" in entrypoint.HELP
    assert all(f"IMAGE {tool}" in entrypoint.HELP for tool in entrypoint.TOOLS)


def test_a_broken_image_is_one_line(cuda: Image) -> None:
    (cuda.root / "release.json").unlink()
    assert "release.json" in cuda.refusal("--print")


# The preflight's rules (test_preflight.py), asked on the way.


def test_preflight_says_what_is_wrong_and_starts_nothing(cuda: Image, tmp_path: Path) -> None:
    done = cuda.run("preflight")
    assert done.returncode == 0 and "nothing is known to be wrong" in done.stdout
    assert "not checked" in done.stderr, "the models aren't here"
    assert "--dtype" in cuda.refusal("preflight", "--dtype", "half")
    both = cuda.run("preflight", "--dtype", "half", "-pp", "2")
    assert both.returncode == 1 and both.stderr.count("error: ") == 2


def test_a_start_is_refused_by_a_rule_and_allowed_by_its_name(twin: Image) -> None:
    bad = [*models(twin), "--dtype", "half"]
    assert "KIMI_EAGLE3_ALLOW=dtype" in twin.refusal(*bad)
    done = twin.run(*bad, KIMI_EAGLE3_ALLOW="dtype")
    assert done.returncode == 0 and "allows dtype" in done.stderr
    assert "half" in json.loads(done.stdout)["args"]


def test_printing_a_command_asks_no_rule(cuda: Image) -> None:
    assert "half" in cuda.printed("--dtype", "half")


# What would fail late is refused early.


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")
def test_without_a_gpu_serving_is_refused_but_not_tools_nor_print(cuda: Image) -> None:
    assert "--gpus all" in cuda.refusal()
    cuda.printed()
    assert cuda.run("serve", "--help=all").returncode == 0


def test_gpus_need_both_device_and_driver(tmp_path: Path) -> None:
    libc = ctypes.util.find_library("c") or ""
    assert "device" in entrypoint.gpu_trouble(tmp_path, libc, 0)[0]
    (tmp_path / "nvidia0").touch()
    assert entrypoint.gpu_trouble(tmp_path, libc, 1) == ("", "")
    assert "driver library" in entrypoint.gpu_trouble(tmp_path, "libnone.so.1", 1)[0]
    assert "1 GPUs are visible" in entrypoint.gpu_trouble(tmp_path, libc, 8)[1]


def test_the_twin_needs_no_gpu_but_models(twin: Image) -> None:
    assert "--target" in twin.refusal()
    assert twin.run(*models(twin)).returncode == 0


def test_a_folder_that_is_not_mounted_is_refused(twin: Image) -> None:
    line = "no folder /models/none in this container"
    assert line in twin.refusal("--target", "/models/none", "--drafter", "a/b")
    assert line in twin.refusal("preflight", "--drafter", "/models/none")


def test_a_cache_that_cannot_be_written_is_refused(twin: Image, tmp_path: Path) -> None:
    (tmp_path / "file").touch()  # a folder's permissions don't stop root, a file does
    bad = str(tmp_path / "file" / "triton")
    assert "TRITON_CACHE_DIR" in twin.refusal(*models(twin), TRITON_CACHE_DIR=bad)
    assert twin.run(*models(twin), TRITON_CACHE_DIR=str(tmp_path / "new" / "triton")).returncode == 0


def test_models_may_be_read_only_when_offline(twin: Image, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    bad = str(tmp_path / "file" / "hf")
    assert "HF_HOME" in twin.refusal(*models(twin), HF_HOME=bad)
    assert twin.run(*models(twin), HF_HOME=bad, HF_HUB_OFFLINE="1").returncode == 0


def test_too_little_space_for_the_target_is_warned_of(twin: Image, tmp_path: Path) -> None:
    release = twin.release | {"variant": "cpu"}
    asked = entrypoint.parse(["--target", release["target"]["repo"]])
    env = {"HF_HOME": str(tmp_path / "hf")}
    planned = entrypoint.plan(release, asked, env)
    huge, small = ({**release, "target": {**release["target"], "size_gb": size}} for size in (10**9, 0))
    assert "GB free" in entrypoint.preflight(huge, asked, planned, env)[0]
    assert entrypoint.preflight(small, asked, planned, env) == []
    (tmp_path / "hf" / "hub" / "models--moonshotai--Kimi-K2.5").mkdir(parents=True)
    assert entrypoint.preflight(huge, asked, planned, env) == []
