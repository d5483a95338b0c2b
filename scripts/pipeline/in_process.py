"""The oracle through an image's own Python, in one process: for a release that no CPU build can stand for.

What it shows and what it leaves out, stands in scripts/in_image/oracle_vllm.py and oracle_sglang.py. It goes into the
image's receipt beside the ladder, of which nothing is climbed without a server.
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from scripts.pipeline import containers, pins, receipt, say, smoke, trials

SCRIPT = "/opt/kimi-eagle3/in_image/oracle_in_process.py"
DRAFTERS = ("mla", "llama")  # the contract holds every release to both
WHY = "no GPU here, and no CPU build of this release speculates: see in_process"


def prove(engine: containers.ContainerEngine, all_pins: pins.Pins, release: pins.Release, ks: Sequence[int]) -> None:
    """Run the oracle of each drafter's kind in a process of the image, and write the receipt.

    Raises Stop where an acceptance length is not exactly what the oracle says, or nothing was measured.
    """
    image = smoke.inspect(engine, all_pins.image(release))
    record, incomplete = smoke.about(engine, image.id)
    if incomplete:
        raise say.Stop(f"{image.reference} doesn't know what it is: {incomplete}: build it again")
    runs: list[receipt.Run] = []
    found, failed = [], ""
    for kind in DRAFTERS:
        with tempfile.TemporaryDirectory(prefix="oracle-") as tmp, say.timed(f"the oracle in a process ({kind})"):
            folder = trials.make_oracle(engine, image.id, Path(tmp), ["--drafter", kind])
            arguments = ["python3", SCRIPT, "/oracle", "--json", *(word for k in ks for word in ("--k", str(k)))]
            _, output = containers.run(
                engine,
                image.id,
                arguments,
                network_mode="none",
                volumes={str(folder): {"bind": "/oracle", "mode": "ro"}},
            )
            if not runs:
                runs = [smoke.skipped(trials.oracle_trial(folder, k, "oracle.py"), WHY) for k in ks]
        try:
            data, _ = json.JSONDecoder().raw_decode(output, output.index("{"))
        except ValueError:
            raise say.Stop(f"{image.reference}: {SCRIPT} says {output.strip()[-300:] or 'nothing'!r}") from None
        found.append({"drafter": kind, **{key: data[key] for key in ("oracle", "runs", "failure", "ok")}})
        for run in data["runs"]:
            say.note(f"{kind}, K = {run['k']}: acceptance length {run['acceptance_length']:.3f}, in a process")
        if not data["ok"] or not data["runs"]:
            failed = failed or f"{kind}: {(data['failure'] or {}).get('name', 'nothing-measured')}: {data['failure']}"
    path = receipt.path_for(image.id)
    receipt.write(path, receipt.make(release, image, None, record, runs, in_process=found))
    say.step(f"receipt: {path}")
    if failed:
        raise say.Stop(f"{image.reference} hands over wrong hidden states: {failed}: mend its series")
