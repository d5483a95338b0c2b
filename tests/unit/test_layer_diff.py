"""Layers compared: each way in which a file can differ is named, and nothing is said of equal ones."""

import gzip
import hashlib
import io
import tarfile

import pytest

from scripts.pipeline import image_config, layer_diff, reproduce

FILES: dict[str, dict[str, object]] = {"etc": {"type": tarfile.DIRTYPE, "mode": 0o755}, "etc/a": {}, "etc/b": {}}


def layer(files: dict[str, dict[str, object]]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, facts in files.items():
            content = facts.get("content", b"text")
            assert isinstance(content, bytes)
            member = tarfile.TarInfo(path)
            for name in facts.keys() - {"content"}:
                setattr(member, name, facts[name])
            member.size = len(content) if member.isreg() else 0
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


def image(*layers: bytes, name: str = "{}.tar") -> io.BytesIO:
    """An archive as an engine saves it; the config beside the layers is none of them."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for number, data in enumerate((*layers, b'{"a": 1}')):
            member = tarfile.TarInfo(name.format(number))
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        link = tarfile.TarInfo("old/layer.tar")
        link.type, link.linkname = tarfile.SYMTYPE, "../0.tar"
        archive.addfile(link)
    out.seek(0)
    return out


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def entries(data: bytes) -> list[layer_diff.Entry]:
    return layer_diff.layers(image(data), {digest(data)})[digest(data)]


def compared(first: dict[str, dict[str, object]], second: dict[str, dict[str, object]]) -> list[str]:
    return [str(difference) for difference in layer_diff.compare(entries(layer(first)), entries(layer(second)))]


def test_equal_layers_have_no_difference() -> None:
    assert compared(FILES, FILES) == []


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"content": b"other"}, "/etc/a: content: 4 bytes, sha256 982d9e3eb996 / 5 bytes, sha256 d9298a10d1b0"),
        ({"content": b"texs"}, "/etc/a: content: 4 bytes, sha256 "),
        ({"mode": 0o600}, "/etc/a: mode: 0644 / 0600"),
        ({"uid": 7}, "/etc/a: owner: 0:0 (:) / 7:0 (:)"),
        ({"mtime": 1}, "/etc/a: time: 1970-01-01T00:00:00+00:00 / 1970-01-01T00:00:01+00:00"),
        ({"mtime": 0.5}, "/etc/a: time: 1970-01-01T00:00:00+00:00 / 1970-01-01T00:00:00.500000+00:00"),
        ({"type": tarfile.SYMTYPE, "linkname": "b"}, "/etc/a: kind: file / symbolic link"),
        ({"pax_headers": {"SCHILY.xattr.user.x": "1"}}, "/etc/a: SCHILY.xattr.user.x: none / '1'"),
    ],
)
def test_each_way_to_differ_is_named(facts: dict[str, object], said: str) -> None:
    assert compared(FILES, FILES | {"etc/a": facts})[0].startswith(said)


def test_a_file_that_is_missing_is_named_with_the_layer_that_lacks_it() -> None:
    less = {path: facts for path, facts in FILES.items() if path != "etc/b"}
    assert compared(FILES, less) == ["/etc/b: missing in the second"]
    assert compared(less, FILES) == ["/etc/b: missing in the first"]


def test_the_order_counts_where_nothing_else_differs() -> None:
    assert compared(FILES, {path: FILES[path] for path in ("etc", "etc/b", "etc/a")}) == [
        "/etc/a: order: /etc/a / /etc/b"
    ]


def test_layers_are_found_by_the_hash_of_what_is_in_them_however_they_are_stored() -> None:
    data = layer(FILES)
    for archive in (image(data), image(data, name="blobs/sha256/{}"), image(gzip.compress(data), name="blobs/x{}")):
        assert list(layer_diff.layers(archive, {digest(data)})) == [digest(data)]
    assert layer_diff.layers(image(data), set()) == {}


def test_a_large_file_is_read_in_pieces() -> None:
    data = layer({"big": {"content": bytes(3_000_000)}})
    pieces = iter([image(data).getvalue()[i : i + 70_001] for i in range(0, 4_000_000, 70_001)])
    found = layer_diff.layers(layer_diff.Stream(pieces), {digest(data)})  # type: ignore[arg-type]
    assert dict(found[digest(data)][0].facts)["content"].startswith("3000000 bytes")


def test_configs_that_differ_are_named_by_their_keys() -> None:
    one = {"Config": {"Env": ["A=1"], "User": ""}, "Os": "linux", "Created": "1"}
    two = {"Config": {"Env": ["A=2"], "User": ""}, "Os": "linux", "Created": "2", "New": 1}
    assert reproduce.config_differences(one, two) == ["Config.Env", "Created", "New"]
    assert reproduce.config_differences(one, one) == []


INSPECTED = {
    "Architecture": "amd64", "Os": "linux", "Config": {"Env": ["A=1"], "Cmd": None, "Hostname": "x", "User": ""},
    "RootFS": {"Layers": ["sha256:1", "sha256:2"]},
}  # fmt: skip
HISTORY = [
    {"CreatedBy": "ENV A=1", "Comment": "c", "Size": 0, "Created": 5},
    {"CreatedBy": "WORKDIR /x", "Comment": "c", "Size": 0, "Created": 4},
    {"CreatedBy": "ADD a /", "Comment": "", "Size": 9, "Created": 3},
]


def test_a_config_holds_no_time_but_the_one_that_is_given() -> None:
    config = image_config.normal(INSPECTED, image_config.docker_steps(HISTORY), 1700000000)
    assert config is not None
    later = [step | {"Created": step["Created"] + 99} for step in HISTORY]  # type: ignore[operator]
    assert image_config.normal(INSPECTED, image_config.docker_steps(later), 1700000000) == config
    assert config.count(b"2023-11-14T22:13:20Z") == 4 and config.count(b"empty_layer") == 1
    assert image_config.normal(INSPECTED, image_config.docker_steps(HISTORY), 1700000001) != config


def test_steps_that_do_not_account_for_the_layers_give_no_config() -> None:
    assert image_config.normal(INSPECTED, image_config.docker_steps(HISTORY[1:2]), 1) is None


def test_podmans_own_names_are_in_no_config() -> None:
    steps = image_config.podman_steps(
        [
            {"created_by": f"/bin/sh -c #(nop) COPY file:{'a' * 64} in /f ", "comment": "FROM 97aef4090f83"},
            {"created_by": "ENV", "comment": "mine", "empty_layer": True},
        ]
    )
    assert steps == [
        {"created_by": "/bin/sh -c #(nop) COPY file in /f ", "comment": ""},
        {"created_by": "ENV", "comment": "mine", "empty_layer": True},
    ]
