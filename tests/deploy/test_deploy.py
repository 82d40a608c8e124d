"""What `deploy/` has is accepted by the tools that read it, and by the command line it calls."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import httpx
import kubernetes_validate
import msgspec
import pytest
import yaml
from click import Command
from typer.main import get_command

from raw_client import until
from steps import own_cache
from tiny_gguf import write_tiny_gguf
from twinphase import app
from twinphase.cluster.deploy import ServingArgs

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
BIN = Path(sys.executable).parent
KUBERNETES = "1.32"
START_SECONDS = 120


def read(name):
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def instruction(name):
    """The JSON array of an instruction in the Containerfile's last stage."""
    text = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ")
    return json.loads(re.findall(rf"^{name}\b.*?(\[.*\])$", text, re.MULTILINE)[-1])


def instructions_to_run():
    """The commands of the Containerfile, of all its stages."""
    text = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ")
    return re.findall(r"^RUN (.*)$", text, re.MULTILINE)


def called(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, **options)
    assert done.returncode == 0, done.stdout + done.stderr


def merged(old, new):
    """A strategic merge patch of Kubernetes: objects merge, and lists of named ones by name."""
    if isinstance(new, dict):
        return {**old, **{name: merged(old.get(name, {}), new[name]) for name in new}}
    if isinstance(new, list) and isinstance(new[0], dict):
        by_name = {one["name"]: one for one in old}
        for one in new:
            by_name[one["name"]] = merged(by_name.get(one["name"], {}), one)
        return [*by_name.values()]
    return new


def patched():
    """The server's deployment with the patch for TLS."""
    return merged(read("kubernetes/twinphase.yaml")[2], read("kubernetes/tls.yaml")[0])


def commands():
    """Every call of the command line in `deploy/`, by its position."""
    yield "Containerfile", instruction("CMD")
    for file in ("compose.yaml", "compose.tls.yaml"):
        for name, service in read(file)[0]["services"].items():
            yield f"{file} {name}", service["command"]
    for one in (*read("kubernetes/twinphase.yaml"), patched()):
        if "template" in one["spec"]:
            [container] = one["spec"]["template"]["spec"]["containers"]
            yield one["kind"], container["args"]
    for unit in sorted((DEPLOY / "systemd").iterdir()):
        [line] = re.findall(r"^ExecStart=\S+ (.*)$", unit.read_text(), re.MULTILINE)
        yield unit.name, shlex.split(line)


@pytest.mark.parametrize(("where", "words"), [pytest.param(*one, id=one[0]) for one in commands()])
def test_commands_have_options_that_exist(where, words):
    command: Command = get_command(app).commands[words[0]]
    context = command.make_context(words[0], list(words[1:]))
    assert context.params


def test_kubernetes_takes_the_manifests():
    kinds = []
    for manifest in read("kubernetes/twinphase.yaml"):
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
        kinds.append(manifest["kind"])
    assert kinds == ["Service", "Service", "Deployment", "StatefulSet"]


def test_kubernetes_takes_the_patch_for_tls():
    manifest = patched()
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    pod = manifest["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["image"] and container["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]} == {"cache", "tmp", "tls"}


def test_kubernetes_refuses_a_misspelled_field():
    manifest = read("kubernetes/twinphase.yaml")[2]
    manifest["spec"]["template"]["spec"]["terminationGrace"] = 90
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_pods_are_locked_down_and_have_time_to_drain():
    for one in read("kubernetes/twinphase.yaml")[2:]:
        pod = one["spec"]["template"]["spec"]
        [container] = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert pod["terminationGracePeriodSeconds"] > 60  # --drain-timeout


def test_kuberay_gets_pods_and_an_application():
    [service] = read("kubernetes/kuberay.yaml")
    cluster = service["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **group["template"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    [application] = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    module, _, name = application["import_path"].partition(":")
    assert callable(getattr(sys.modules[module], name))
    assert msgspec.convert(application["args"], ServingArgs).llm_configs


def test_compose_takes_the_files():
    schema = ("--builtin-schema", "vendor.compose-spec")
    files = (DEPLOY / "compose.yaml", DEPLOY / "compose.tls.yaml")
    called(sys.executable, "-m", "check_jsonschema", *schema, *files)
    assert read("compose.yaml")[0]["services"]["server"]["read_only"]


def test_no_key_has_a_default():
    for service in read("compose.yaml")[0]["services"].values():
        keys = [value for name, value in service["environment"].items() if name.endswith("_KEY")]
        assert keys and all(re.match(r"\$\{\w+:\?", key) for key in keys)


def test_a_linter_takes_the_image():
    called(BIN / "hadolint", DEPLOY / "Containerfile")


def test_systemd_takes_the_units(tmp_path):
    for unit in (DEPLOY / "systemd").iterdir():
        text = unit.read_text()
        assert "DynamicUser=yes" in text and "WantedBy=multi-user.target" in text
        # The tool wants the program to exist.
        (tmp_path / unit.name).write_text(text.replace("/opt/twinphase/bin/twinphase", "/bin/true"))
    verifier = shutil.which("systemd-analyze")
    if verifier is not None:  # where systemd is not, its units are of no use either
        called(verifier, "verify", *tmp_path.iterdir())


def test_alerts_read_metrics_that_exist():
    documented = set(re.findall(r"^\| `(\w+)`", (ROOT / "docs/metrics.md").read_text(), re.M))
    named = set(re.findall(r"twinphase:(\w+)", (DEPLOY / "prometheus/rules.yaml").read_text()))
    assert len(named) >= 8
    assert {name.removesuffix("_bucket") for name in named} <= documented


def test_alerts_fire_for_the_phase_that_breaks():
    promtool = shutil.which("promtool")
    if promtool is None and "TWINPHASE_REQUIRE_PROMTOOL" not in os.environ:
        pytest.skip(
            "promtool is part of Debian's prometheus; TWINPHASE_REQUIRE_PROMTOOL demands it"
        )
    assert promtool is not None
    called(promtool, "test", "rules", "rules_test.yaml", cwd=DEPLOY / "prometheus")


def test_the_operators_page_has_every_alert():
    page = (ROOT / "docs/operating.md").read_text()
    alerts = [rule["alert"] for rule in read("prometheus/rules.yaml")[0]["groups"][0]["rules"]]
    assert [name for name in alerts if f"`{name}`" not in page] == []


def test_the_image_starts_is_healthy_and_drains(tmp_path, model_path):
    """The image's own commands, as its user would run them: only the cache can be written."""
    [program] = instruction("ENTRYPOINT")
    words = [BIN / program, *instruction("CMD")]
    words[words.index("smollm2")] = model_path
    check = instruction("HEALTHCHECK")
    code = check[-1]
    assert check[:2] == ["python", "-c"] and ":8000/" in code
    cache = tmp_path / "cache"
    kept = {"PATH": str(BIN), "PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    environment = {**kept, "TWINPHASE_CACHE": str(cache), "HOME": "/nonexistent"}
    log = tmp_path / "log"
    with own_cache(cache), log.open("w") as stderr:
        process = subprocess.Popen(
            [*words, "--port", "0"], env=environment, cwd="/", stderr=stderr, stdout=stderr
        )
    try:
        until(lambda: "listening " in log.read_text() or process.poll() is not None, START_SECONDS)
        port = re.search(r"http://0\.0\.0\.0:(\d+)/v1", log.read_text())
        assert port is not None, log.read_text()
        check = code.replace(":8000/", f":{port[1]}/")
        called(sys.executable, "-c", check, env={**os.environ, "TWINPHASE_SCHEME": "http"})
        asked = {"prompt": "the", "max_tokens": 2}
        reply = httpx.post(f"http://127.0.0.1:{port[1]}/v1/completions", json=asked, timeout=60)
        assert reply.status_code == 200
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    logged = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    assert logged[-1]["message"] == "Stopped"


@pytest.mark.slow
def test_the_images_steps_install_a_program_that_runs(tmp_path):
    """Where no container engine is: in an environment that has the dependencies already."""
    packages = Path(sysconfig.get_path("purelib"))
    called(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    [own] = (tmp_path / "venv").glob("lib/python*/site-packages")
    (own / "dependencies.pth").write_text(f"{packages}\n")
    # A user is made in images only.
    (tmp_path / "bin").mkdir()
    for name in ("useradd", "chown"):
        (tmp_path / "bin" / name).symlink_to("/bin/true")
    pip = tmp_path / "bin" / "pip"
    pip.write_text('#!/bin/sh\nexec python -m pip "$@"\n')
    pip.chmod(0o755)
    path = f"{tmp_path}/venv/bin:{tmp_path}/bin:{os.environ['PATH']}"
    # pip's variable means the opposite of what it says.
    environment = {"PATH": path, "HOME": str(tmp_path), "PIP_NO_BUILD_ISOLATION": "0"}
    steps = instructions_to_run()
    assert len(steps) == 2
    for step in steps:
        script = re.sub(r"(?<=\s)/(wheels|cache)", rf"{tmp_path}/\1", step)
        called("sh", "-ec", script, cwd=ROOT, env=environment)
    assert (tmp_path / "cache").is_dir() and not (tmp_path / "wheels").exists()
    words = [tmp_path / "venv/bin" / instruction("ENTRYPOINT")[0], "version"]
    kept = {"PATH": path, "HOME": "/nonexistent", "TWINPHASE_CACHE": str(tmp_path / "cache")}
    called(*words, cwd="/", env=kept)
    where = "import twinphase; print(twinphase.__file__)"
    found = subprocess.run(
        [tmp_path / "venv/bin/python", "-c", where], env=kept, capture_output=True, text=True
    )
    assert found.stdout.startswith(str(own))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", tensor_type="Q4_0")
