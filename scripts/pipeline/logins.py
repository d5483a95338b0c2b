"""Who we are to a registry: the user's Docker login, which is sent to that registry and its login service alone.

It never leaves this module but on a request: no error and no log has it.
"""

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import requests
from requests.auth import HTTPBasicAuth

from scripts.pipeline.say import Stop

TIMEOUT = (10, 60)  # seconds: to connect, and without a byte from the other side
Signing = Callable[[requests.PreparedRequest], requests.PreparedRequest]


class Again(Exception):
    """It failed in a way that may pass."""


class Logins:
    """The authorization of requests to a registry at `base`, a URL without a path."""

    def __init__(self, host: str, base: str, session: requests.Session, verify: str | bool) -> None:
        self._host, self._base, self._session, self._verify = host, base, session, verify
        self._basic: HTTPBasicAuth | None = None
        self._tokens: dict[str, str] = {}  # by the repositories that each is for

    @property
    def given(self) -> bool:
        """Whether a name and a password were sent."""
        return self._basic is not None

    def sign(self, names: str) -> Signing:
        """Puts the authorization on a request to the registry itself. Its presence keeps ~/.netrc out."""

        def sign(request: requests.PreparedRequest) -> requests.PreparedRequest:
            if urlsplit(request.url or "").netloc == urlsplit(self._base).netloc:
                if token := self._tokens.get(names):
                    request.headers["Authorization"] = f"Bearer {token}"
                elif self._basic:
                    self._basic(request)
            return request

        return sign

    def answer(self, response: requests.Response, name: str, also: str) -> bool:
        """Answer a 401 with the user's login. False where there's nothing new to try."""
        scheme, _, rest = response.headers.get("WWW-Authenticate", "").partition(" ")
        asked = dict(re.findall(r'(\w+)="([^"]*)"', rest))
        login = _login(self._host)
        if scheme.lower() == "basic":
            if self._basic or not login or "password" not in login:
                return False
            self._basic = HTTPBasicAuth(login["username"].encode(), login["password"].encode())
            return True
        realm = asked.get("realm", "")
        if scheme.lower() != "bearer" or not realm.startswith(("http://", "https://")):
            return False
        if login and realm.startswith("http://") and self._base.startswith("https:"):
            raise Stop(f"{self._host} wants the login sent to {realm.partition('?')[0]}, without TLS: it isn't sent")
        scopes = [*asked.get("scope", "").split(" "), *([f"repository:{also}:pull"] if also else [])]
        query: dict[str, Any] = {"service": asked.get("service", ""), "scope": [scope for scope in scopes if scope]}
        try:
            if login and "token" in login:
                query |= {"grant_type": "refresh_token", "refresh_token": login["token"], "client_id": "kimi-eagle3"}
                query["scope"] = " ".join(query["scope"])
                answer = self._session.post(realm, data=query, auth=nobody, timeout=TIMEOUT, verify=self._verify)
            else:
                auth = HTTPBasicAuth(login["username"].encode(), login["password"].encode()) if login else nobody
                answer = self._session.get(realm, params=query, auth=auth, timeout=TIMEOUT, verify=self._verify)
        except requests.exceptions.RequestException as error:
            raise Again(f"its login service: {reason(error)}") from None
        if answer.status_code == 429 or answer.status_code >= 500:
            raise Again(f"its login service: {answer.status_code}")
        found = content(answer) if answer.status_code == 200 else {}
        if token := found.get("token") or found.get("access_token"):
            self._tokens[name + also] = str(token)
            return True
        if login:
            raise Stop(f"{self._host} doesn't accept the Docker login: run `docker login {self._host}`")
        return False


def nobody(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """No authorization, not even of ~/.netrc."""
    return request


def _login(host: str) -> dict[str, str] | None:
    """The user's Docker login for a host: `username` and `password`, or `token`. Raises Stop where it can't be read."""
    from docker import auth
    from docker.errors import DockerException

    try:
        found = auth.load_config().resolve_authconfig(host) or {}
    except (DockerException, ValueError, OSError, KeyError):
        # Without the reason: it may be what a credential helper printed.
        raise Stop(f"the Docker login for {host} can't be read: run `docker login {host}`") from None
    entry = {key.lower(): str(value) for key, value in found.items() if value}
    if "identitytoken" in entry:
        return {"token": entry["identitytoken"]}
    return {key: entry[key] for key in ("username", "password")} if {"username", "password"} <= entry.keys() else None


def reason(error: requests.exceptions.RequestException) -> str:
    """Why a request got no answer, without its address: that may hold what nobody should read."""
    if isinstance(error, requests.exceptions.Timeout):
        return "no answer in time"
    text = str(error)
    for sign, words in (
        ("refused", "connection refused"), ("reset", "connection reset"), ("Broken pipe", "connection cut"),
        ("closed connection", "connection cut"), ("Connection aborted", "connection cut"),
        ("Name or service", "no such host"), ("resolve", "no such host"), ("Cannot connect to proxy", "proxy fails"),
    ):  # fmt: skip
        if sign in text:
            return words
    return type(error).__name__


def content(response: requests.Response) -> dict[str, Any]:
    """The JSON object of an answer; empty where it is none."""
    try:
        found = response.json()
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}
