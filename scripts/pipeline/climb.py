"""Up the ladder with one server: wait for it, ask it, read its counters, and hand what was seen to the ladder."""

import time
from dataclasses import replace

from scripts.pipeline import adapters, files, ladder, say, server
from scripts.pipeline.adapters import Adapter
from scripts.pipeline.ladder import Answer, Counters, Measured, Rung
from scripts.pipeline.trials import Group, Trial

LOG_LINES = 20
WARM_UP, WARM_UP_TOKENS = {"prompt": [1, 2, 3, 4]}, 8


def report(rung: Rung) -> Rung:
    say.step(f"{rung.name} {rung.status}" + (f": {rung.failure}" if rung.failure else "") + f": {rung.detail}")
    return rung


def show_log(up: server.Server) -> None:
    """Show the last lines of a server's log, and keep all of it: its container is about to be removed."""
    lines = up.log(server.WHOLE)
    for line in lines[-LOG_LINES:]:
        say.note(line)
    if lines:
        path = files.cache() / "smoke-failed.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text("\n".join(lines) + "\n")
        say.note(f"the whole log: {path}")


def answers(up: server.Server, adapter: Adapter, model: str, group: Group) -> tuple[Answer, ...]:
    return tuple(server.generate(up, adapter, model, prompt, group.max_tokens) for prompt in group.prompts)


def measure(up: server.Server, adapter: Adapter, model: str, group: Group) -> Measured:
    """Ask all prompts of a group, with the counters read before and after.

    Counters follow an answer with some delay, so they are read again until they have all its tokens. What answers tell
    of their own drafts was nothing before they were asked for.
    """
    text = server.ask(up, adapter.metrics)
    got = answers(up, adapter, model, group)
    told = adapters.all_told(got)
    before = adapters.counters(text, adapter, told.since(told) if isinstance(told, Counters) else told)
    ours = sum(answer.generated for answer in got)
    deadline = time.monotonic() + server.SETTLE_S
    while True:
        after = adapters.counters(server.ask(up, adapter.metrics), adapter, told)
        if isinstance(before, str) or isinstance(after, str) or after.generated - before.generated >= ours:
            return Measured(group.kind, before, after, got)
        if time.monotonic() > deadline:
            return Measured(group.kind, before, after, got)
        time.sleep(0.2)


def health(up: server.Server, adapter: Adapter, deadline: float) -> Rung:
    """S1, not yet reported: wait until the server is healthy. Where it doesn't get so, its log is shown."""
    waited = server.wait(up, adapter.health, deadline)
    rung = ladder.health(waited.seconds, deadline, waited.ended, waited.healthy, waited.last)
    if rung.status == "failed":
        show_log(up)
    return rung


def first(up: server.Server, adapter: Adapter, deadline: float, pinned: str, installed: str | None) -> list[Rung]:
    """S0 and S1: wait until the server is healthy, then ask what it is."""
    healthy = health(up, adapter, deadline)
    served = (server.served_version(up, adapter) or "not told") if healthy.status == "passed" else None
    found = report(ladder.version(pinned, installed, served))
    return [found] if found.status == "failed" else [found, report(healthy)]


def failed_request(up: server.Server, rung: str, error: Exception) -> Rung:
    """Why a request failed: the process has died, what came back is no answer, or it was refused."""
    patience = time.monotonic() + (0 if isinstance(error, server.Garbled | TimeoutError) else server.ASK_S)
    while (ended := up.ended()) is None and time.monotonic() < patience:
        time.sleep(0.2)
    show_log(up)
    if ended:
        why = server.cause(up.log(server.WHOLE))
        return ladder.failed(rung, "died", f"{ended} while it answered ({error}); its log: {why or 'empty'}")
    names = {server.Garbled: "garbled", TimeoutError: "wedged"}
    return ladder.failed(rung, names.get(type(error), "request-failed"), str(error))


def climb(up: server.Server, adapter: Adapter, trial: Trial, pinned: str, installed: str | None) -> tuple[Rung, ...]:
    """All rungs, for a server that was just started or is up. `installed`: the version that its image tells."""
    rungs = first(up, adapter, trial.deadline, pinned, installed)
    if ladder.failure(rungs):
        return ladder.whole(rungs)
    try:
        model = server.model_name(up, adapter)
        if adapter.told:  # its counters aren't there before they have counted something
            server.generate(up, adapter, model, WARM_UP, WARM_UP_TOKENS)
        measured = [measure(up, adapter, model, group) for group in trial.groups]
    except (OSError, server.Garbled) as error:
        return ladder.whole([*rungs, report(failed_request(up, "S2", error))])
    rungs.append(report(ladder.speculation(measured, trial.k)))
    for judge in (ladder.acceptance, ladder.published):
        if not ladder.failure(rungs):
            rungs.append(report(judge(measured, trial.expected)))
    return ladder.whole(rungs)


def without(up: server.Server, adapter: Adapter, trial: Trial) -> tuple[Answer, ...] | Rung:
    """The answers of a server without speculation; or the rung that failed on the way."""
    rung = health(up, adapter, trial.deadline)
    if rung.status == "failed":
        return replace(rung, detail=f"the server without speculation: {rung.detail}")
    try:
        model = server.model_name(up, adapter)
        return tuple(answer for group in trial.groups for answer in answers(up, adapter, model, group))
    except (OSError, server.Garbled) as error:
        return failed_request(up, "S1", error)
