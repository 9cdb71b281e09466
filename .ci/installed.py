"""Use an installed simpar from the folder it is run in, which must be empty: every command that reads shipped data, and serve."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

SCENARIO = "zero-7.5b_a100x64_zero1"
SIMPAR = str(Path(sys.executable).parent / "simpar")


def run(*arguments: str) -> str:
    """What a command prints; any exit code but 0 ends this script."""
    print("$ simpar", *arguments, flush=True)
    done = subprocess.run([SIMPAR, *arguments], capture_output=True, text=True, timeout=300)
    if done.returncode:
        sys.exit(f"exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def served() -> str:
    """The tiles of the page, computed over HTTP, as the browser would ask for them."""
    from simpar.report.serve.page import value_id
    from simpar.report.serve.state import Bases

    print("$ simpar serve --port 0", flush=True)
    server = subprocess.Popen([SIMPAR, "serve", "--port", "0"], stdout=subprocess.PIPE, text=True)
    try:
        found = re.search(r"http://127\.0\.0\.1:\d+/", server.stdout.readline())
        assert found, "no address printed"
        url = found.group()
        controls = {value_id(key): value for key, value in Bases()[SCENARIO].values.items()}
        known = {"base": SCENARIO, "more": "", "tab": "1", **controls}
        callbacks = json.load(urllib.request.urlopen(f"{url}_dash-dependencies", timeout=60))
        compute = next(c for c in callbacks if "tiles.children" in c["output"] and any(i["id"] == "base" for i in c["inputs"]))
        outputs = [dict(zip(("id", "property"), o.rsplit(".", 1), strict=True)) for o in compute["output"].strip(".").split("...")]
        given = {kind: [{**i, "value": known.get(i["id"])} for i in compute[kind]] for kind in ("inputs", "state")}
        body = {"output": compute["output"], "outputs": outputs, "changedPropIds": ["base.value"], **given}
        headers = {"Content-Type": "application/json", "Origin": url.rstrip("/")}
        request = urllib.request.Request(f"{url}_dash-update-component", json.dumps(body).encode(), headers)
        answer = json.load(urllib.request.urlopen(request, timeout=120))
        return json.dumps(answer["response"]["tiles"])
    finally:
        server.terminate()
        server.wait(20)


def main() -> None:
    """Run everything."""
    assert not any(Path().iterdir()), "run me in an empty folder"
    import simpar

    assert "site-packages" in simpar.__file__, simpar.__file__
    run("--version")
    step = json.loads(run("simulate", SCENARIO, "--json"))
    assert step["fits"]
    assert simpar.simulate(SCENARIO).step_time_s == step["step_time_s"]
    found = json.loads(run("search", "--model", "llama3.1-8b", "--hardware", "dgx-h100", "--num-nodes", "1", "--global-batch", "16",
                           "--sequence-length", "4096", "--framework", "megatron-core", "--fix", "pp=1", "--fix", "cp=1",
                           "--workers", "1", "--top", "1", "--quiet", "--json"))  # fmt: skip
    assert found["best"]
    assert json.loads(run("validate", "--only", "BloombergGPT", "--json"))["rows"]
    assert json.loads(run("plan", "opt-175b_a100x992", "--repetitions", "10", "--json"))["feasible"]
    run("export", "megatron", "megatron-1.7b_a100x32_tp1pp1", "--out", "launch")
    assert any(Path("launch").iterdir())
    assert len(json.loads(run("profiles", "--json"))) > 30
    assert len(json.loads(run("models", "--json"))) > 30
    assert len(json.loads(run("scenarios", "--json"))["plans"]) > 5
    run("scenarios", "copy", SCENARIO, "--out", "mine.toml")
    run("profiles", "new", "--from", "dgx-h100", "--out", "machine.toml", "--set", "gpu.memory=192 GB")
    run("simulate", "mine.toml", "--set", "cluster.hardware=machine.toml", "--html", "step.html")
    assert "H100" in run("topology", "dgx-h100", "--json")
    assert "step" in served()
    print("the installed package is whole")


if __name__ == "__main__":
    main()
