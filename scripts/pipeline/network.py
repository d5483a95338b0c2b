"""What this machine's network asks for: proxies, mirrors, a CA bundle. Read from the environment, in one place.

An image build gets them as secrets, so that they are in no layer and in no history.
"""

import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from scripts.pipeline.say import Stop

PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
INDEXES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
CA_BUNDLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
SYSTEM_CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")


def index() -> dict[str, str]:
    """The package index that the user names, for uv and for pip, whichever of the two it was written for."""
    chosen = next((os.environ[name] for name in INDEXES if os.environ.get(name)), None)
    return {"UV_DEFAULT_INDEX": chosen, "PIP_INDEX_URL": chosen} if chosen else {}


def debian() -> tuple[str, str] | None:
    """Debian's mirror and that of its security updates, where the user names one.

    An archive of a date keeps them apart by the name: .../debian/DATE and .../debian-security/DATE.
    """
    main = os.environ.get("DEBIAN_MIRROR", "").rstrip("/")
    security = re.sub(r"/debian(?=/|$)", "/debian-security", main)
    return (main, os.environ.get("DEBIAN_SECURITY_MIRROR", security)) if main else None


def mode() -> str:
    """The network of a step that fetches: `host` where a mirror is on this machine's loopback, else `default`."""
    addresses = [*index().values(), *(debian() or ()), *(os.environ.get(name, "") for name in PROXIES[:2])]
    hosts = {urlsplit(address).hostname or "" for address in addresses}
    return "host" if any(host == "localhost" or host.startswith("127.") for host in hosts) else "default"


def values() -> dict[str, str]:
    """All of it but the CA bundle, as the steps of a Dockerfile read it."""
    named = {name: os.environ[name] for name in PROXIES if os.environ.get(name)} | index()
    if mirrors := debian():
        named |= dict(zip(("DEBIAN_MIRROR", "DEBIAN_SECURITY_MIRROR"), mirrors, strict=True))
    return named


def ca_bundle() -> Path | None:
    """The CA bundle of this machine. Raises Stop where the one that the user names can't be read."""
    for name in CA_BUNDLES:
        if chosen := os.environ.get(name):
            try:
                Path(chosen).open("rb").close()
            except OSError as error:
                raise Stop(f"{name}={chosen} can't be read ({error.strerror}): name a CA bundle") from None
            return Path(chosen)
    return SYSTEM_CA_BUNDLE if SYSTEM_CA_BUNDLE.is_file() else None


@contextmanager
def secrets() -> Iterator[dict[str, Path]]:
    """The secrets of a build: `ca`, the CA bundle, and `network`, shell assignments of the values.

    They lie in memory where the machine has a place for that, so that not even a killed build leaves them on a disk.
    """
    bundle = ca_bundle()
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as tmp:
        network = Path(tmp, "network")
        network.write_text("".join(f"export {name}={shlex.quote(value)}\n" for name, value in values().items()))
        yield {"network": network} | ({"ca": bundle} if bundle else {})
